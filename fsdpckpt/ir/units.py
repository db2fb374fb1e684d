"""Describes units, which FSDP1 never saves: the parameters in each flat parameter, in order and with their shapes.

A *unit* is one FSDP1-wrapped module; the parameters it manages form one flat parameter. Names are FQNs without the
prefixes that wrappers add. Order matters everywhere: of units (pre-order of the modules, the root first), of the
parameters in a unit, of ``model.parameters()``, of the optimizer's groups.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import chain, pairwise
from typing import TypeAlias, TypeVar

from fsdpckpt.ir.dtypes import DType
from fsdpckpt.ir.parameters import Parameter
from fsdpckpt.ir.terms import Strategy

__all__ = ["Strategy"]  # from ``ir``: code that uses units uses it too

FLAT_PARAM = "_flat_param"

_Item = TypeVar("_Item")

Groups: TypeAlias = tuple[tuple[str, ...], ...]
"""What each param group of an optimizer holds, in the order of ids: parameter names, or keys of units."""


def unit_text(prefix: str) -> str:
    """The unit at ``prefix``, for a message."""
    return f"unit {prefix!r}" if prefix else "the root unit"


@dataclass(frozen=True, slots=True)
class Unit:
    """One flat parameter. ``prefix``: FQN of the wrapped module, "" for the root.

    ``params``: every parameter in it, including frozen ones; a shared one once, where it comes first. ``param_dtype``:
    ``MixedPrecision.param_dtype``, which decides the alignment under ``use_orig_params=True``; None if there is none.
    """

    prefix: str
    params: tuple[Parameter, ...]
    strategy: Strategy = Strategy.FULL_SHARD
    param_dtype: DType | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "params", _sharded(self.params, sharded=True))

    @property
    def key(self) -> str:
        """The key of its flat parameter in a ``LOCAL_STATE_DICT``."""
        return f"{self.prefix}.{FLAT_PARAM}" if self.prefix else FLAT_PARAM

    def __str__(self) -> str:
        return unit_text(self.prefix)

    @property
    def aligning_dtype(self) -> DType:
        """The dtype whose size decides the alignment under ``use_orig_params=True``."""
        return self.param_dtype or self.params[0].dtype

    @property
    def requires_grad(self) -> bool:
        return any(param.requires_grad for param in self.params)


@dataclass(frozen=True, slots=True)
class RankOrder:
    """The optimizer's groups on ``ranks``, if they differ from ``Units.groups``."""

    ranks: tuple[int, ...]
    groups: Groups


@dataclass(frozen=True, slots=True)
class Units:
    """All units of one model, and what else is needed to read or write its flattened checkpoints.

    A model without FSDP1 has no units: its parameters are all ``unmanaged``, and ``use_orig_params`` is True. The names
    of its parameters, their order and the optimizer's groups are what its checkpoints may lack too.

    ``unmanaged``: parameters in no unit (ignored by FSDP, or of modules that are not wrapped), whole on every rank.
    ``shared``: (later name, first name) of shared parameters. ``parameters``: original names in the order of
    ``model.parameters()``, a shared parameter once. ``groups``: for each group of the optimizer its parameters in the
    order of their ids: original names, or with ``use_orig_params=False`` the ``key`` of a unit; None if unknown, which
    means one group in the order of ``model.parameters()``. ``world_size``: the number of ranks that saved, None for
    any. ``shard_size``: ranks in one sharding group, None for all of them (HYBRID_SHARD has fewer). ``orders``: the
    ranks whose optimizers list the parameters in a different order, or lack some; ``groups`` then lists every parameter
    that any rank has. ``optimizers``: the groups of each of several optimizers, by the name of its section; ``groups``
    is None then, until ``of_optimizer`` chooses one.
    """

    units: tuple[Unit, ...]
    use_orig_params: bool
    parameters: tuple[str, ...]
    unmanaged: tuple[Parameter, ...] = ()
    shared: tuple[tuple[str, str], ...] = ()
    groups: Groups | None = None
    world_size: int | None = None
    shard_size: int | None = None
    orders: tuple[RankOrder, ...] = ()
    optimizers: tuple[tuple[str, Groups], ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "unmanaged", _sharded(self.unmanaged, sharded=False))

    def params(self) -> dict[str, Parameter]:
        """Every original parameter by name, in the order of units, unmanaged ones last."""
        by_name = {param.name: param for unit in self.units for param in unit.params}
        by_name.update({param.name: param for param in self.unmanaged})
        return by_name

    def unit_of(self) -> dict[str, Unit]:
        """The unit of each sharded original parameter."""
        return {param.name: unit for unit in self.units for param in unit.params}

    @property
    def flat(self) -> bool:
        """Whether there are flat parameters. A model without FSDP1 has none: only names, order and groups are known."""
        return bool(self.units)

    def cut_in_sharded(self) -> frozenset[str]:
        """The parameters that ``SHARDED_STATE_DICT`` cuts: those in units.

        Those of a NO_SHARD unit stay whole (``_replace_with_full_state_dict_type``), unless all units are such: then
        the job cut nothing, and what is written is for one that does. Without FSDP1 FSDP2 cuts, which cuts them all.
        """
        if not self.flat:
            return frozenset(param.name for param in self.unmanaged if param.shape)
        cut = [unit for unit in self.units if unit.strategy is not Strategy.NO_SHARD]
        return frozenset(param.name for unit in cut or self.units for param in unit.params)

    def optimizer_keys(self) -> tuple[str, ...]:
        """What ``model.parameters()`` of the wrapped model holds, in order: the order of ids in a single group.

        With ``use_orig_params=True`` the original names, otherwise units' keys and unmanaged names: a module's own
        unmanaged parameters come first, then its flat parameter (it is registered last), then its children.
        """
        if self.use_orig_params:
            return self.parameters
        unmanaged = {param.name for param in self.unmanaged}
        flat = {unit.key for unit in self.units}
        return tuple(key for key in state_dict_order(self.parameters, self) if key in flat or key in unmanaged)

    def listed_by_unit(self) -> tuple[str, ...]:
        """The original names in the order in which FSDP1 lists those of flat parameters, unmanaged ones at their places
        among them; () if it lists them as the model does.
        """
        if self.use_orig_params:
            return ()
        return tuple(self.names_of(self.optimizer_keys()))

    def id_order(self) -> tuple[str, ...]:
        """The parameters in the order of an optimizer's ids: ``groups`` one after the other, else
        ``optimizer_keys``.
        """
        return self.optimizer_keys() if self.groups is None else tuple(key for group in self.groups for key in group)

    def named_groups(self) -> Groups | None:
        """``groups`` by original names; those in a flat parameter in the order of ``model.parameters()``."""
        if self.groups is None or self.use_orig_params:
            return self.groups
        position = {name: index for index, name in enumerate(self.parameters)}
        named: list[tuple[str, ...]] = []
        for group in self.groups:
            named.append(tuple(sorted(self.names_of(group), key=lambda name: position.get(name, -1))))
        return tuple(named)

    def names_of(self, keys: Iterable[str]) -> list[str]:
        """The names in the flat parameters ``keys``; a key of any other parameter is its name."""
        params_of = {unit.key: unit.params for unit in self.units}
        names: list[str] = []
        for key in keys:
            names += [param.name for param in params_of[key]] if key in params_of else [key]
        return names

    def of_optimizer(self, names: Iterable[str]) -> Units | None:
        """The same with the groups of the optimizer that is recorded under the first of ``names``; None if none is."""
        recorded = dict(self.optimizers)
        groups = next((recorded[name] for name in names if name in recorded), None)
        return None if groups is None else replace(self, groups=groups)

    @property
    def of_one_optimizer(self) -> bool:
        """Whether ``groups`` are those of one of several optimizers, chosen by its name."""
        return self.groups is not None and bool(self.optimizers)

    def groups_of(self, rank: int) -> Groups | None:
        """The groups of the optimizer on ``rank``; None as for ``groups``."""
        return next((order.groups for order in self.orders if rank in order.ranks), self.groups)


def _sharded(params: tuple[Parameter, ...], *, sharded: bool) -> tuple[Parameter, ...]:
    """``params`` as what units say of them: those in a unit are sharded."""
    if all(param.sharded is sharded for param in params):
        return params
    return tuple(replace(param, sharded=sharded) for param in params)


@dataclass(slots=True)
class _Module:
    """One module: its parameters, the key of its flat parameter, its other keys, and its children, in the order of
    ``state_dict``.
    """

    params: list[str] = field(default_factory=list)
    flat: str | None = None
    others: list[str] = field(default_factory=list)
    children: dict[str, _Module] = field(default_factory=dict)


def state_dict_order(names: Iterable[str], units: Units) -> list[str]:
    """``names`` (parameters, buffers) and the keys of flat parameters in the order of a ``LOCAL_STATE_DICT``.

    A module's parameters come first, then its buffers, then its children. With ``use_orig_params=False`` the flat
    parameter is a parameter of its module, registered last; with True the state dict hook puts it after everything in
    the module. Otherwise the order of ``names`` stays.
    """
    parameters = {*units.params(), *(later for later, _ in units.shared)}
    root = _Module()
    for name in names:
        *path, _ = name.split(".")
        module = root
        for word in path:
            module = module.children.setdefault(word, _Module())
        (module.params if name in parameters else module.others).append(name)
    for unit in units.units:
        holder: _Module | None = root
        for word in unit.prefix.split(".") if unit.prefix else ():
            holder = holder.children.get(word) if holder is not None else None
        if holder is not None:  # else nothing in it is in ``names``
            holder.flat = unit.key
    return _listed(root, last=units.use_orig_params)


def _listed(root: _Module, *, last: bool) -> list[str]:
    """The keys of all modules. ``last``: flat parameters come after everything in their module."""
    keys: list[str] = []
    left: list[_Module | str] = [root]  # what comes next is at the end; names in a file may nest deeper than calls can
    while left:
        module = left.pop()
        if isinstance(module, str):
            keys.append(module)
            continue
        keys.extend(module.params)
        if module.flat is not None and not last:
            keys.append(module.flat)
        keys.extend(module.others)
        if module.flat is not None and last:
            left.append(module.flat)
        left.extend(reversed(module.children.values()))
    return keys


def flaws(units: Units) -> list[str]:
    """Everything that contradicts itself in ``units``, one sentence each; empty if they describe one model."""
    result = [*_repeated(units), *_orders(units)]
    for unit in units.units:
        result.extend(_unit_flaws(unit, use_orig_params=units.use_orig_params))
    for param in units.params().values():
        result.extend(_stride_flaws(param))
    result.extend(_shared_flaws(units))
    result.extend(_rank_flaws(units))
    return result


def _repeated(units: Units) -> Iterator[str]:
    names = [param.name for unit in units.units for param in unit.params] + [p.name for p in units.unmanaged]
    yield from (f"parameter {name} is listed {times} times" for name, times in _repeated_keys(names))
    yield from (
        f"{unit_text(prefix)} is listed {times} times"
        for prefix, times in _repeated_keys(u.prefix for u in units.units)
    )
    yield from (f"parameters: {name} is listed {times} times" for name, times in _repeated_keys(units.parameters))
    for where, groups in _all_groups(units):
        listed = [key for group in groups for key in group]
        yield from (f"{where}: {key} is listed {times} times" for key, times in _repeated_keys(listed))
    names = [name for name, _ in units.optimizers]
    yield from (f"optimizers: {name} is listed {times} times" for name, times in _repeated_keys(names))


def _all_groups(units: Units) -> list[tuple[str, Groups]]:
    """The groups of every optimizer, and where they stand."""
    return [("groups", units.groups or ()), *((f"optimizers.{name}", groups) for name, groups in units.optimizers)]


def _repeated_keys(names: Iterable[_Item]) -> list[tuple[_Item, int]]:
    return [(name, times) for name, times in Counter(names).items() if times > 1]


def _orders(units: Units) -> Iterator[str]:
    """``parameters`` has every parameter; ``groups`` has only what an optimizer of the wrapped model could hold."""
    params = set(units.params())
    listed = set(units.parameters)
    unknown = [name for name in units.parameters if name not in params]
    yield from (f"parameters: {name} is in no unit and not listed as unmanaged" for name in unknown)
    yield from (f"parameters: {name} is missing" for name in units.params() if name not in listed)
    yield from _misplaced(units)
    unmanaged = {param.name for param in units.unmanaged}
    keys = params if units.use_orig_params else {unit.key for unit in units.units} | unmanaged
    kind = "parameter" if units.use_orig_params else "flat parameter or unmanaged parameter"
    for where, groups in _all_groups(units):
        listed_keys = chain(*groups)
        yield from (f"{where}: {key} is not a {kind} of these units" for key in listed_keys if key not in keys)
    for number, order in enumerate(units.orders):
        yield from (f"orders[{number}]: {text}" for text in _order_flaws(order, units.groups or ()))


def _order_flaws(order: RankOrder, groups: Groups) -> Iterator[str]:
    if len(order.groups) != len(groups):
        yield f"{len(order.groups)} groups, and groups has {len(groups)}"
        return
    for index, (of_ranks, of_all) in enumerate(zip(order.groups, groups, strict=True)):
        keys = set(of_all)
        yield from (f"{key} is not in group {index} of groups" for key in of_ranks if key not in keys)
        yield from (f"{key} is listed {times} times" for key, times in _repeated_keys(of_ranks))


def _misplaced(units: Units) -> Iterator[str]:
    """A unit has its parameters in the order of ``model.parameters()``; shared ones may come earlier elsewhere."""
    shared = {first for _, first in units.shared}
    position = {name: index for index, name in enumerate(units.parameters) if name not in shared}
    for unit in units.units:
        wrong = first_misplaced([param.name for param in unit.params], position)
        if wrong is not None:
            yield f"{unit} lists {wrong[0]} where `parameters` lists {wrong[1]}"


def first_misplaced(names: Iterable[str], position: Mapping[str, int]) -> tuple[str, str] | None:
    """The first of ``names`` that is not in the order of ``position``, and the name that is expected there.

    Ignores names that ``position`` lacks.
    """
    listed = [name for name in names if name in position]
    pairs = zip(listed, sorted(listed, key=position.__getitem__), strict=True)
    return next((pair for pair in pairs if pair[0] != pair[1]), None)


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
    yield from (f"{unit}: {name} is outside of it" for name in outside)


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


def _shared_flaws(units: Units) -> Iterator[str]:
    params = units.params()
    yield from (
        f"shared: {later} is listed {n} times" for later, n in _repeated_keys(later for later, _ in units.shared)
    )
    for later, first in units.shared:
        if first not in params:
            yield f"shared: {first}, whose other name is {later}, is not a parameter of these units"
        if later in params:
            yield f"shared: {later} is another name of {first}, and a parameter of its own"


def _rank_flaws(units: Units) -> Iterator[str]:
    world_size, shard_size = units.world_size, units.shard_size
    ranks = [rank for order in units.orders for rank in order.ranks]
    yield from (f"orders: rank {rank} has {times}" for rank, times in _repeated_keys(ranks))
    yield from (f"orders: there is no rank {rank}" for rank in ranks if world_size is None or rank >= world_size)
    if world_size is not None and shard_size is not None and world_size % shard_size:
        yield f"shard_size: {world_size} ranks cannot be divided into sharding groups of {shard_size}"
    if shard_size not in (None, world_size) and any(
        unit.strategy in (Strategy.FULL_SHARD, Strategy.SHARD_GRAD_OP) for unit in units.units
    ):
        yield f"shard_size: only hybrid-shard and no-shard may have sharding groups of {shard_size} ranks"
