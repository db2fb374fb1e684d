"""What must hold for units to describe one model that FSDP1 could have wrapped: every contradiction is listed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import pairwise

from fsdpckpt.ir.units import Strategy, Unit, UnitParam, Units

__all__ = ["flaws"]


def flaws(units: Units) -> list[str]:
    """Every contradiction within ``units``, one sentence each; none when they describe one model."""
    found = [*_repeated(units), *_orders(units)]
    for unit in units.units:
        found.extend(_unit_flaws(unit, use_orig_params=units.use_orig_params))
    for param in units.params().values():
        found.extend(_stride_flaws(param))
    found.extend(_shared_flaws(units))
    found.extend(_rank_flaws(units))
    return found


def _repeated(units: Units) -> Iterator[str]:
    names = [param.name for unit in units.units for param in unit.params] + [p.name for p in units.unmanaged]
    yield from (f"parameter {name} is listed {times} times" for name, times in _twice(names))
    yield from (f"unit {prefix!r} is listed {times} times" for prefix, times in _twice(u.prefix for u in units.units))
    yield from (f"parameters: {name} is listed {times} times" for name, times in _twice(units.parameters))
    held = [key for group in units.groups or () for key in group]
    yield from (f"groups: {key} is in {times} places" for key, times in _twice(held))


def _twice(names: Iterable[str]) -> list[tuple[str, int]]:
    return [(name, times) for name, times in Counter(names).items() if times > 1]


def _orders(units: Units) -> Iterator[str]:
    """``parameters`` has every parameter, ``groups`` only what an optimizer of the wrapped model could hold."""
    known = set(units.params())
    listed = set(units.parameters)
    yield from (f"parameters: {name} is in no unit and not unmanaged" for name in units.parameters if name not in known)
    yield from (f"parameters: {name} is missing" for name in units.params() if name not in listed)
    yield from _astray(units)
    unmanaged = {param.name for param in units.unmanaged}
    keys = known if units.use_orig_params else {unit.key for unit in units.units} | unmanaged
    kind = "parameter" if units.use_orig_params else "flat parameter or unmanaged parameter"
    for group in units.groups or ():
        yield from (f"groups: {key} is no {kind} of these units" for key in group if key not in keys)


def _astray(units: Units) -> Iterator[str]:
    """A unit has its parameters in the order of ``model.parameters()``; shared ones may be met elsewhere before."""
    place = {name: index for index, name in enumerate(units.parameters)}
    firsts = {first for _, first in units.shared}
    for unit in units.units:
        names = [param.name for param in unit.params if param.name in place and param.name not in firsts]
        for one, other in zip(names, sorted(names, key=place.__getitem__), strict=True):
            if one != other:
                yield f"unit {unit.prefix!r}: {one} stands where parameters has {other}"
                break


def _unit_flaws(unit: Unit, *, use_orig_params: bool) -> Iterator[str]:
    """What ``FlatParamHandle._validate_tensors_to_flatten`` refuses."""
    if not unit.params:
        yield f"unit {unit.prefix!r} has no parameters"
    for one, other in pairwise(unit.params):
        if one.dtype != other.dtype:
            yield f"unit {unit.prefix!r}: {one.name} is {one.dtype.name} and {other.name} {other.dtype.name}: one dtype"
        if not use_orig_params and one.requires_grad != other.requires_grad:
            yield f"unit {unit.prefix!r}: only one of {one.name} and {other.name} requires gradients"
    inside = f"{unit.prefix}." if unit.prefix else ""
    yield from (f"unit {unit.prefix!r}: {p.name} is outside of it" for p in unit.params if not _within(p.name, inside))


def _within(name: str, inside: str) -> bool:
    return name.startswith(inside) and len(name) > len(inside)


def _stride_flaws(param: UnitParam) -> Iterator[str]:
    """A stride has to be dense: FSDP1 flattens ``numel`` elements as they lie in memory."""
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


def _shared_flaws(units: Units) -> Iterator[str]:
    known = units.params()
    yield from (f"shared: {later} is listed {n} times" for later, n in _twice(later for later, _ in units.shared))
    for later, first in units.shared:
        if first not in known:
            yield f"shared: {first}, whose other name is {later}, is no parameter of these units"
        if later in known:
            yield f"shared: {later} is another name of {first}, and a parameter of its own"


def _rank_flaws(units: Units) -> Iterator[str]:
    world, shard = units.world_size, units.shard_size
    if world is not None and shard is not None and world % shard:
        yield f"shard_size: {world} ranks are no whole number of sharding groups of {shard}"
    if shard not in (None, world) and any(
        unit.strategy in (Strategy.FULL_SHARD, Strategy.SHARD_GRAD_OP) for unit in units.units
    ):
        yield f"shard_size: only hybrid-shard and no-shard have sharding groups of their own, here of {shard} ranks"
