"""A state dict taken apart: its tensors in one list, and the rest with a ``Slot`` where each tensor was.

Dicts, lists and tuples are looked into, keys keep their types; everything else that is no tensor stays where it is.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import torch

from fsdpckpt.comm.objects import Slot

__all__ = ["StateDict", "Tree", "rebuild", "taken_apart"]

StateDict: TypeAlias = dict[str, object]


@dataclass(frozen=True, slots=True)
class Tree:
    """``skeleton`` with ``Slot(i)`` for ``tensors[i]``, whose dotted key is ``keys[i]``."""

    skeleton: object
    keys: tuple[str, ...]
    tensors: tuple[torch.Tensor, ...]


def taken_apart(state: object) -> Tree:
    """``state`` as a tree; tensors in the order of the dicts."""
    keys: list[str] = []
    tensors: list[torch.Tensor] = []

    def visit(value: object, key: str) -> object:
        if isinstance(value, torch.Tensor):
            keys.append(key)
            tensors.append(value)
            return Slot(len(tensors) - 1)
        return value

    skeleton = _mapped(state, visit, "")
    return Tree(skeleton, tuple(keys), tuple(tensors))


def rebuild(skeleton: object, tensors: list[torch.Tensor]) -> object:
    """The state dict of which ``skeleton`` is left, with ``tensors`` in its slots."""
    return _mapped(skeleton, lambda value, _: tensors[value.index] if isinstance(value, Slot) else value, "")


def _mapped(value: object, visit: Callable[[object, str], object], key: str) -> object:
    if type(value) in {dict, OrderedDict}:
        mapping: dict[object, object] = value  # type: ignore[assignment]  # by the exact type
        items = [
            (name, _mapped(child, visit, f"{key}.{name}" if key else str(name))) for name, child in mapping.items()
        ]
        if not isinstance(mapping, OrderedDict):
            return dict(items)
        ordered = OrderedDict(items)
        vars(ordered).update(vars(mapping))  # torch's _metadata
        return ordered
    if type(value) in {list, tuple}:
        children = [_mapped(child, visit, f"{key}[{i}]") for i, child in enumerate(value)]  # type: ignore[arg-type,var-annotated]
        return children if type(value) is list else tuple(children)
    return visit(value, key)
