"""The tensors of one section as a tree of modules, laid out along one axis of bytes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from fsdpckpt.ir.tensors import Tensor

__all__ = ["Module", "module_tree"]

DEEPEST = 12  # path segments that become levels: the rest stays one name, however many dots a key has


@dataclass(slots=True)
class Module:
    """A module, or a tensor of it (then ``tensor`` is that). ``begin``, ``end``: its bytes on the section's axis."""

    path: str
    tensor: Tensor | None = None
    begin: int = 0
    end: int = 0
    tensors: int = 0
    elements: int = 0
    children: dict[str, Module] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.path.rpartition(".")[2]

    @property
    def nbytes(self) -> int:
        return self.end - self.begin

    def leaves(self) -> Iterator[Module]:
        """Every tensor below, in the order of the axis."""
        if self.tensor is not None:
            yield self
        for child in self.children.values():
            yield from child.leaves()


def module_tree(named: Iterable[tuple[str, Tensor]]) -> Module:
    """The root over all (dotted name, tensor); modules and tensors stand in the order in which they first come."""
    root = Module("")
    for name, tensor in named:
        node, path = root, ""
        for word in name.split(".", DEEPEST - 1):
            path = f"{path}.{word}" if path else word
            node = node.children.setdefault(word, Module(path))
        node.tensor = tensor
    _lay_out(root, 0)
    return root


def _lay_out(node: Module, at: int) -> int:
    node.begin = at
    if node.tensor is not None:
        at += node.tensor.nbytes
        node.tensors, node.elements = 1, node.tensor.numel
    for child in node.children.values():
        at = _lay_out(child, at)
        node.tensors += child.tensors
        node.elements += child.elements
    node.end = at
    return at
