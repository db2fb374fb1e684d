"""A nested state dict to DCP's flat keys (``torch.distributed.checkpoint._nested_dict`` and ``_traverse``).

Mappings are always entered, their keys as text; lists only when they hold tensors or non-empty containers that do;
tuples never. An empty mapping leaves no trace, which is why it is noted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from fsdpckpt.errors import SourceUnsupportedError
from fsdpckpt.ir.checkpoint import Checkpoint, Note
from fsdpckpt.ir.tensors import Tensor
from fsdpckpt.ir.values import Key, Value
from fsdpckpt.writers.extras import extras_of_one
from fsdpckpt.writers.torch_full import optim_dict

__all__ = ["Leaf", "flatten"]

Path: TypeAlias = tuple[str | int, ...]

_STATE = ("optimizer", "state")


class Leaf(NamedTuple):
    """One entry of the flat state dict: its key, the path it was nested under, and what it is."""

    key: str
    path: Path
    value: Value


@dataclass(frozen=True, slots=True)
class _Walk:
    """Collects the leaves of one section. ``ids``: the outermost keys may be parameter ids, which a reader restores."""

    leaves: list[Leaf]
    notes: list[Note]
    ids: bool = False

    def enter(self, path: Path, prefix: str, value: Value) -> None:
        if isinstance(value, dict):
            self.mapping(path, prefix, value)
        elif isinstance(value, list) and not _plain(value):
            for index, item in enumerate(value):
                self.enter((*path, index), f"{prefix}.{index}", item)
        else:
            self.leaves.append(Leaf(prefix, path, value))

    def mapping(self, path: Path, prefix: str, value: dict[Key, Value]) -> None:
        if not value and path != _STATE:
            self.notes.append(
                Note("dropped", f"{prefix} is an empty dict: a DCP directory has no place for it", prefix)
            )
        for key, item in value.items():
            part = key if type(key) is str else self.renamed(prefix, key)
            inner = f"{prefix}.{part}" if prefix else part
            if type(item) is Tensor:
                self.leaves.append(Leaf(inner, (*path, part), item))
            else:
                self.enter((*path, part), inner, item)

    def renamed(self, prefix: str, key: Key) -> str:
        if not (self.ids and prefix == ".".join(_STATE)):
            where = prefix or "the extras"
            self.notes.append(
                Note("renamed", f"key {key!r} of {where} becomes text, it was {type(key).__name__}", str(key))
            )
        return str(key)


def _plain(values: list[Value]) -> bool:
    """Whether DCP keeps a list as one value: no tensor, mapping or entered list in it."""
    return not any(isinstance(item, (Tensor, dict)) or (isinstance(item, list) and not _plain(item)) for item in values)


def flatten(checkpoint: Checkpoint) -> tuple[list[Leaf], list[Note]]:
    """All leaves in ``dcp.save``'s order, with notes on what the flat form cannot hold.

    Raises SourceUnsupportedError when several entries get the same flat key.
    """
    leaves: list[Leaf] = []
    notes: list[Note] = []
    walk = _Walk(leaves, notes)
    if checkpoint.model is not None:
        model: dict[Key, Value] = dict(checkpoint.model.params.items())
        walk.mapping(("model",), "model", model)
        if checkpoint.model.metadata is not None:
            what = "the model state dict's _metadata (module versions)"
            notes.append(Note("dropped", f"{what} has no place in a DCP directory"))
    if checkpoint.optim is not None:
        root = optim_dict(checkpoint.optim)
        _Walk(leaves, notes, ids=True).enter(_STATE, ".".join(_STATE), root.pop("state"))
        if root:
            walk.mapping(("optimizer",), "optimizer", root)
    extra, dropped = extras_of_one(checkpoint)
    if extra:
        walk.mapping((), "", extra)
    _refuse_duplicates(leaves)
    return leaves, notes + dropped


def _refuse_duplicates(leaves: list[Leaf]) -> None:
    if len({leaf.key for leaf in leaves}) == len(leaves):
        return
    seen: set[str] = set()
    double = [leaf.key for leaf in leaves if leaf.key in seen or seen.add(leaf.key)]  # type: ignore[func-returns-value]
    raise SourceUnsupportedError(
        "several entries would get the same key in a DCP directory",
        details=double,
        why="DCP joins nested keys with dots, and two of them become equal",
        next_step="leave one of them out with --exclude, or rename it with --rename OLD=NEW",
        key=double[0],
    )
