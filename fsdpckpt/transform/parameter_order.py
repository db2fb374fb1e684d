"""The order of an optimizer's parameters, which maps its ids to names and back, as one source states it.

``transform.order_sources`` reads it from each source, and ``transform.stated_orders`` lists those of a checkpoint.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Flag, auto
from functools import cached_property
from itertools import accumulate, chain
from typing import TypeVar

from fsdpckpt.ir.listing import Listing
from fsdpckpt.ir.parameters import Named, Parameter, RowNumber
from fsdpckpt.ir.units import Groups, first_misplaced

_Row = TypeVar("_Row")


class Doubt(Flag):
    """What is not certain of a name that a source lists.

    ``OPTIMIZER``: the optimizer may lack it (buffers, frozen parameters). ``MODEL``: ``model.parameters()`` may lack it
    (buffers, later names of shared parameters). ``PLAIN``: a plain tensor beside distributed ones, which is a buffer
    unless FSDP ignored a frozen parameter. ``ALIKE``: it has the shape and the checksums of another one, and no other
    doubt: it may be that one under a second name, or both are as they were filled when they were made (the zeros of
    adapters, copies of one layer).
    """

    OPTIMIZER = auto()
    MODEL = auto()
    PLAIN = auto()
    ALIKE = auto()


@dataclass(frozen=True)
class ParameterOrder(Listing):
    """A listing as the order of an optimizer's ids: what its source says of the optimizer, too.

    ``authoritative``: True for a source whose purpose is this order (``--parameters``, a units file), False for a model
    section. ``members``: the rows of the optimizer's groups, each in the order of its ids (in none if not ``ordered``),
    if known. ``complete``: whether every name of the model is in a row or in ``shared``. ``excludes_buffers``: False if
    buffers may be among the rows. ``caution``: a warning for whoever uses this order. ``doubts``: by row.
    ``unit_order``: the rows as FSDP1 lists those of flat parameters, () if it has none.
    """

    authoritative: bool = False
    members: tuple[tuple[RowNumber, ...], ...] | None = None
    complete: bool = False
    excludes_buffers: bool = True
    caution: str | None = None
    doubts: Mapping[RowNumber, Doubt] = field(default_factory=dict)
    unit_order: tuple[RowNumber, ...] = ()

    @classmethod
    def of_groups(cls, groups: Iterable[Sequence[Named]], source: str) -> ParameterOrder:
        """The groups of an optimizer, each in its order."""
        groups = list(groups)
        rows = tuple(chain(*groups))
        members = split_by_sizes(range(len(rows)), list(map(len, groups)))
        return cls(rows, source, in_model_order=False, authoritative=True, members=members)

    @cached_property
    def groups(self) -> Groups | None:
        """``members`` by name."""
        return (
            None if self.members is None else tuple(tuple(map(self.names.__getitem__, rows)) for rows in self.members)
        )

    @cached_property
    def by_unit(self) -> tuple[str, ...]:
        """``unit_order`` by name."""
        return tuple(map(self.names.__getitem__, self.unit_order))

    @cached_property
    def uncertain(self) -> frozenset[str]:
        """The names that the optimizer may lack."""
        return self._with(Doubt.OPTIMIZER)

    @cached_property
    def doubtful(self) -> frozenset[str]:
        """The names that ``model.parameters()`` may lack."""
        return self._with(Doubt.MODEL)

    @cached_property
    def plain(self) -> frozenset[str]:
        """The names of plain tensors beside distributed ones."""
        return self._with(Doubt.PLAIN)

    @cached_property
    def alike(self) -> frozenset[str]:
        """The names of tensors that have the checksums of others, which proves nothing of them."""
        return self._with(Doubt.ALIKE)

    def _with(self, doubt: Doubt) -> frozenset[str]:
        return frozenset(self.names[row] for row, doubts in self.doubts.items() if doubt in doubts)

    def with_shapes_of(self, others: Sequence[Listing]) -> ParameterOrder:
        """Add the shapes that this source lacks from the first of ``others`` that has them."""
        known: dict[str, Parameter] = {}
        for listing in reversed(others):
            known.update({param.name: param for param in listing.params})
        rows = tuple(row if isinstance(row, Parameter) else known.get(row.name, row) for row in self.rows)
        return replace(self, rows=rows)


def split_by_sizes(rows: Sequence[_Row], sizes: Sequence[int]) -> tuple[tuple[_Row, ...], ...]:
    """``rows`` in parts of these sizes."""
    return tuple(tuple(rows[end - size : end]) for end, size in zip(accumulate(sizes), sizes, strict=True))


def contradictions(used: ParameterOrder, other: ParameterOrder, keyed: Collection[str]) -> list[str]:
    """Everything in which ``other`` contradicts the order in use. ``keyed``: the optimizer's names."""
    other_names = {*other.names, *(later for later, _ in other.shared)}
    result = [f"{name} is not in {other.source}" for name in keyed if name not in other_names]
    result += _differing_shapes(used, other)
    if used.complete and other.excludes_buffers:
        used_names = {*used.names, *(later for later, _ in used.shared)}
        missing = [name for name in other.names if name not in used_names and name not in other.uncertain]
        result += [f"{name} of {other.source} is not in {used.source}" for name in missing]
    if used.groups is not None and other.groups is not None:
        result += _differing_groups(used, other)
    if used.ordered and other.ordered and used.in_model_order and other.in_model_order:
        result += _first_difference_in_order(used, other)
    return result


def _differing_shapes(used: ParameterOrder, other: ParameterOrder) -> list[str]:
    return [
        f"{name} has shape {list(shape)} in {used.source}, {list(other_shape)} in {other.source}"
        for name in used.names
        if (shape := used.shape(name)) is not None
        and (other_shape := other.shape(name)) is not None
        and shape != other_shape
    ]


def _differing_groups(used: ParameterOrder, other: ParameterOrder) -> list[str]:
    groups, other_groups = used.groups or (), other.groups or ()
    if len(groups) != len(other_groups):
        return [f"{used.source} has {len(groups)} groups, {other.source} {len(other_groups)}"]
    assumed = used.caution is not None or other.caution is not None
    by_unit = used.by_unit or other.by_unit  # flat parameters have an order, and those in them have not
    order_counts = used.ordered and other.ordered and not assumed and not by_unit
    return [
        f"group {number}: {used.source} and {other.source} list different parameters, or list them in a different order"
        for number, (group, other_group) in enumerate(zip(groups, other_groups, strict=True))
        if (group != other_group if order_counts else {*group} != {*other_group})
    ]


def _first_difference_in_order(used: ParameterOrder, other: ParameterOrder) -> list[str]:
    """The first place where two orders differ, a list of one line; empty if they do not.

    Skips names that either is uncertain of: FSDP1 registers the parameters it manages again, after those it ignores.
    """
    uncertain = used.uncertain | other.uncertain
    position = {name: index for index, name in enumerate(other.names) if name not in uncertain}
    misplaced = first_misplaced((name for name in used.names if name not in uncertain), position)
    if misplaced is None:
        return []
    name, expected = misplaced
    return [f"{used.source} and {other.source} differ in order: one has {name} where the other has {expected}"]
