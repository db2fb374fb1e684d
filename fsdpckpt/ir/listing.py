"""The rows of a model in the order in which one source lists them.

Several sources list the parameters of one model: its state dict, an optimizer, a units file, the user. They may
disagree in names, shapes and order, so each is a ``Listing`` until they are compared.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from typing import Self, TypeVar

from fsdpckpt.ir.names import DISTRIBUTED, clean
from fsdpckpt.ir.parameters import Named, Parameter

_Item = TypeVar("_Item")


def divided(items: Iterable[_Item], sizes: Iterable[int]) -> list[list[_Item]]:
    """``items`` in lists of these ``sizes``, one after the other."""
    left = iter(items)
    return [list(islice(left, size)) for size in sizes]


@dataclass(frozen=True)  # without slots: its views are made once
class Listing:
    """``rows`` in the order of ``model.state_dict()`` if ``ordered``, otherwise in any order.

    ``source``: where they come from, in words. ``in_model_order``: False if they are in the order of an optimizer,
    whose groups may have another one; with ``use_orig_params=False`` FSDP1 lists parameters flat parameter by flat
    parameter, the root's first. ``shared``: (later name, first name) of tensors known to be one; no row has a later
    name. ``from_reference``: they come from another checkpoint, which may have been cast.
    """

    rows: tuple[Named, ...]
    source: str
    ordered: bool = True
    in_model_order: bool = True
    shared: tuple[tuple[str, str], ...] = ()
    from_reference: bool = False

    @cached_property
    def names(self) -> tuple[str, ...]:
        return tuple(row.name for row in self.rows)

    @cached_property
    def params(self) -> tuple[Parameter, ...]:
        """The rows of which more than the name is known."""
        return tuple(row for row in self.rows if isinstance(row, Parameter))

    @cached_property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """The shapes that are known, by name."""
        return {param.name: param.shape for param in self.params}

    def shape(self, name: str) -> tuple[int, ...] | None:
        return self.shapes.get(name)

    def reordered(self, order: Sequence[str], source: str) -> Self:
        """The same rows, those of ``order`` first and in its order, if it has every possible parameter."""
        position = {name: index for index, name in enumerate(order)}
        if any(param.possible and param.name not in position for param in self.params):
            return self
        rows = sorted(self.rows, key=lambda row: position.get(row.name, len(position)))
        source = f"{self.source}, ordered by {source}"
        return replace(self, rows=tuple(rows), ordered=True, in_model_order=True, source=source)

    def selected(self, names: Mapping[str, str]) -> Self:
        """The rows in ``names`` (old to new), under their new names."""
        rows = tuple(replace(row, name=names[row.name]) for row in self.rows if row.name in names)
        shared = tuple((names.get(later, later), names[first]) for later, first in self.shared if first in names)
        return replace(self, rows=rows, shared=shared)

    def named_like(self, names: Collection[str]) -> Self:
        """The listing with ``module.`` (of DistributedDataParallel) before all names or before none, as ``names`` are.
        Rows keep their numbers.
        """
        ours = {name.startswith(DISTRIBUTED) for name in self.names}
        theirs = {clean(name).startswith(DISTRIBUTED) for name in names}
        if len(ours) != 1 or len(theirs) != 1 or ours == theirs:
            return self

        def new(name: str) -> str:
            return name.removeprefix(DISTRIBUTED) if ours == {True} else DISTRIBUTED + name

        rows = tuple(replace(row, name=new(row.name)) for row in self.rows)
        shared = tuple((new(later), new(first)) for later, first in self.shared)
        return replace(self, rows=rows, shared=shared)
