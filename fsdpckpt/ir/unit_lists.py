"""Makes units of lists of names, as a units file or a live model has them, and finds what contradicts itself in units.

People read and edit a units file, so it names each parameter in every list. Here each name becomes the number of its
row, or a flaw: no ``Units`` have a name that none of their parameters has.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, pairwise
from typing import TypeVar

from fsdpckpt.ir.parameters import Parameter
from fsdpckpt.ir.terms import Strategy
from fsdpckpt.ir.units import (
    Groups,
    RankOrder,
    RankRows,
    Unit,
    Units,
    first_misplaced,
    keys_of_rows,
    rows_of_keys,
    unit_text,
)

_Item = TypeVar("_Item")


class ContradictoryUnitsError(Exception):
    """The lists are not those of one model. ``flaws``: everything that is wrong, one sentence each."""

    def __init__(self, flaws: Sequence[str]) -> None:
        super().__init__("; ".join(flaws))
        self.flaws = list(flaws)


def units_of_lists(
    units: tuple[Unit, ...],
    parameters: Sequence[str],
    unmanaged: tuple[Parameter, ...] = (),
    *,
    use_orig_params: bool,
    shared: Sequence[tuple[str, str]] = (),
    groups: Groups | None = None,
    world_size: int | None = None,
    shard_size: int | None = None,
    orders: Sequence[RankOrder] = (),
    optimizers: Sequence[tuple[str, Groups]] = (),
) -> Units:
    """Units whose lists have these names: the views of ``Units`` that are called like them.

    Raises ContradictoryUnitsError if they do not fit together.
    """
    rows = [*(param for unit in units for param in unit.params), *unmanaged]
    row_of = {param.name: row for row, param in enumerate(rows)}
    rows_of = keys_of_rows(units, unmanaged, use_orig_params=use_orig_params)
    by_optimizer = [("groups", groups or ()), *((f"optimizers.{name}", listed) for name, listed in optimizers)]
    wrong = [*_repeated_rows(units, rows), *_wrong_order(parameters, row_of)]
    wrong += _repeated("optimizers: {}", (name for name, _ in optimizers))
    for where, listed in by_optimizer:
        wrong += _wrong_groups(where, listed, rows_of, use_orig_params=use_orig_params)
    for number, order in enumerate(orders):
        wrong += (f"orders[{number}]: {text}" for text in _wrong_rank_order(order, groups or ()))
    wrong += _wrong_shared(shared, row_of)
    if wrong:
        wrong += _form_flaws(units, rows, use_orig_params=use_orig_params)
        wrong += _rank_flaws(units, world_size, shard_size, [order.ranks for order in orders])
        raise ContradictoryUnitsError(wrong)
    return Units(
        units,
        use_orig_params,
        tuple(row_of[name] for name in parameters),
        unmanaged,
        tuple((later, row_of[first]) for later, first in shared),
        None if groups is None else rows_of_keys(groups, rows_of),
        world_size,
        shard_size,
        tuple(RankRows(order.ranks, rows_of_keys(order.groups, rows_of)) for order in orders),
        tuple((name, rows_of_keys(listed, rows_of)) for name, listed in optimizers),
    )


def flaws(units: Units) -> list[str]:
    """Everything in ``units`` that FSDP1 refuses or that contradicts itself, one sentence each; empty if they describe
    one model.
    """
    ranks = [of_ranks.ranks for of_ranks in units.by_rank]
    return [
        *_repeated_rows(units.units, units.rows),
        *_misplaced(units),
        *_form_flaws(units.units, units.rows, use_orig_params=units.use_orig_params),
        *_rank_flaws(units.units, units.world_size, units.shard_size, ranks),
    ]


def _repeated_rows(units: Sequence[Unit], rows: Iterable[Parameter]) -> Iterator[str]:
    yield from _repeated("parameter {}", (param.name for param in rows))
    yield from _repeated("{}", (unit_text(unit.prefix) for unit in units))


def _repeated(what: str, names: Iterable[str]) -> Iterator[str]:
    yield from (f"{what.format(name)} is listed {times} times" for name, times in _counted(names))


def _counted(items: Iterable[_Item]) -> list[tuple[_Item, int]]:
    """Those that come several times, and how often."""
    return [(item, times) for item, times in Counter(items).items() if times > 1]


def _wrong_order(parameters: Sequence[str], row_of: Mapping[str, int]) -> Iterator[str]:
    """``parameters`` has every parameter, once."""
    listed = set(parameters)
    yield from _repeated("parameters: {}", parameters)
    unknown = (name for name in parameters if name not in row_of)
    yield from (f"parameters: {name} is in no unit and not listed as unmanaged" for name in unknown)
    yield from (f"parameters: {name} is missing" for name in row_of if name not in listed)


def _wrong_groups(where: str, groups: Groups, keys: Mapping[str, object], *, use_orig_params: bool) -> Iterator[str]:
    """Groups have only what an optimizer of the wrapped model could hold, once."""
    listed = [*chain(*groups)]
    kind = "parameter" if use_orig_params else "flat parameter or unmanaged parameter"
    yield from _repeated(f"{where}: {{}}", listed)
    yield from (f"{where}: {key} is not a {kind} of these units" for key in listed if key not in keys)


def _wrong_rank_order(order: RankOrder, groups: Groups) -> Iterator[str]:
    if len(order.groups) != len(groups):
        yield f"{len(order.groups)} groups, and groups has {len(groups)}"
        return
    for index, (of_ranks, of_all) in enumerate(zip(order.groups, groups, strict=True)):
        keys = set(of_all)
        yield from (f"{key} is not in group {index} of groups" for key in of_ranks if key not in keys)
        yield from _repeated("{}", of_ranks)


def _wrong_shared(shared: Sequence[tuple[str, str]], row_of: Mapping[str, int]) -> Iterator[str]:
    yield from _repeated("shared: {}", (later for later, _ in shared))
    for later, first in shared:
        if first not in row_of:
            yield f"shared: {first}, whose other name is {later}, is not a parameter of these units"
        if later in row_of:
            yield f"shared: {later} is another name of {first}, and a parameter of its own"


def _misplaced(units: Units) -> Iterator[str]:
    """A unit has its parameters in the order of ``model.parameters()``; shared ones may come earlier elsewhere."""
    shared = {first for _, first in units.shared}
    position = {name: index for index, name in enumerate(units.parameters) if name not in shared}
    for unit in units.units:
        wrong = first_misplaced(unit.names, position)
        if wrong is not None:
            yield f"{unit} lists {wrong[0]} where `parameters` lists {wrong[1]}"


def _form_flaws(units: Iterable[Unit], rows: Iterable[Parameter], *, use_orig_params: bool) -> Iterator[str]:
    for unit in units:
        yield from _unit_flaws(unit, use_orig_params=use_orig_params)
    for param in rows:
        yield from _stride_flaws(param)


def _unit_flaws(unit: Unit, *, use_orig_params: bool) -> Iterator[str]:
    """What FSDP1 refuses to flatten: see ``FlatParamHandle._validate_tensors_to_flatten``."""
    if not any(param.numel for param in unit.params):
        yield f"{unit} has no {'elements' if unit.params else 'parameters'}"
    for param, following in pairwise(unit.params):
        if param.dtype != following.dtype:
            dtypes = f"{param.name} is {param.dtype.name} and {following.name} {following.dtype.name}"
            yield f"{unit}: {dtypes}; all parameters of a unit must share one dtype"
        if not use_orig_params and param.requires_grad != following.requires_grad:
            yield f"{unit}: only one of {param.name} and {following.name} requires gradients"
    inside = f"{unit.prefix}." if unit.prefix else ""
    outside = [p.name for p in unit.params if not p.name.startswith(inside) or p.name == inside]
    yield from (f"{unit}: {name} is outside it" for name in outside)


def _stride_flaws(param: Parameter) -> Iterator[str]:
    """A stride must be dense: FSDP1 flattens ``numel`` elements in memory order."""
    if param.stride is None:
        return
    if len(param.stride) != len(param.shape):
        yield f"{param.name}: {len(param.stride)} strides for {len(param.shape)} dimensions"
        return
    step = 1 if param.numel else 0
    for dim in reversed(param.order or range(len(param.shape))):
        if step and param.shape[dim] > 1 and param.stride[dim] != step:
            yield f"{param.name}: strides {list(param.stride)} leave gaps between the elements of {list(param.shape)}"
            return
        step *= param.shape[dim]


def _rank_flaws(
    units: Iterable[Unit], world_size: int | None, shard_size: int | None, orders: Iterable[Iterable[int]]
) -> Iterator[str]:
    ranks = [*chain(*orders)]
    yield from (f"orders: rank {rank} has {times}" for rank, times in _counted(ranks))
    yield from (f"orders: there is no rank {rank}" for rank in ranks if world_size is None or rank >= world_size)
    if world_size is not None and shard_size is not None and world_size % shard_size:
        yield f"shard_size: {world_size} ranks cannot be divided into sharding groups of {shard_size}"
    if shard_size not in (None, world_size) and any(
        unit.strategy in (Strategy.FULL_SHARD, Strategy.SHARD_GRAD_OP) for unit in units
    ):
        yield f"shard_size: only hybrid-shard and no-shard may have sharding groups of {shard_size} ranks"
