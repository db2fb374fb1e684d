"""Describes units, which FSDP1 never saves: the parameters in each flat parameter, in order and with their shapes.

A *unit* is one FSDP1-wrapped module; the parameters it manages form one flat parameter. Names are FQNs without the
prefixes that wrappers add. Order matters everywhere: of units (pre-order of the modules, the root first), of the
parameters in a unit, of ``model.parameters()``, of the optimizer's groups.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from typing import TypeAlias

from fsdpckpt.errors import InternalError
from fsdpckpt.ir.dtypes import DType
from fsdpckpt.ir.parameters import Parameter, RowNumber
from fsdpckpt.ir.terms import Strategy

__all__ = ["Strategy"]  # from ``ir``: code that uses units uses it too

FLAT_PARAM = "_flat_param"

Groups: TypeAlias = tuple[tuple[str, ...], ...]
"""What each param group of an optimizer holds, in the order of ids: parameter names, or keys of units."""

RowGroups: TypeAlias = tuple[tuple[RowNumber, ...], ...]
"""The same as rows of units. A flat parameter that an optimizer holds is all of its rows, one after the other."""


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

    @property
    def names(self) -> list[str]:
        """Those of its parameters, in their order."""
        return [param.name for param in self.params]

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
class RankRows:
    """What the optimizers on ``ranks`` train, if it differs from ``Units.trained``."""

    ranks: tuple[int, ...]
    trained: RowGroups


@dataclass(frozen=True)  # without slots: its views are made once
class Units:
    """All units of one model, and what else is needed to read or write its flattened checkpoints.

    The parameters are *rows*: those of one unit after the other, then the ``unmanaged`` ones. A name stands in its row
    alone, and everything else refers to the number of the row. ``parameters``, ``groups``, ``shared``, ``orders`` and
    ``optimizers`` are views that name the rows; ``ir.unit_lists`` makes units of such lists.

    A model without FSDP1 has no units: its parameters are all ``unmanaged``, and ``use_orig_params`` is True. The names
    of its parameters, their order and the optimizer's groups are what its checkpoints may lack too.
    """

    units: tuple[Unit, ...]
    use_orig_params: bool
    order: tuple[RowNumber, ...]  # of ``model.parameters()``, a shared parameter once
    unmanaged: tuple[Parameter, ...] = ()  # in no unit (ignored by FSDP, or not wrapped), whole on every rank
    tied: tuple[tuple[str, RowNumber], ...] = ()  # each later name of a shared parameter, which is no row, and its row
    trained: RowGroups | None = None  # by each group of the optimizer, in the order of its ids; None if unknown
    world_size: int | None = None  # the number of ranks that saved, None for any
    shard_size: int | None = None  # ranks in one sharding group, None for all of them (HYBRID_SHARD has fewer)
    by_rank: tuple[RankRows, ...] = ()  # ranks whose optimizers list another order, or lack some that ``trained`` has
    by_optimizer: tuple[tuple[str, RowGroups], ...] = ()  # ``trained`` of each of several, by the names of sections

    def __post_init__(self) -> None:
        object.__setattr__(self, "unmanaged", _sharded(self.unmanaged, sharded=False))
        count = sum(len(unit.params) for unit in self.units) + len(self.unmanaged)
        if sorted(self.order) != list(range(count)):
            raise InternalError(f"{len(self.order)} rows of {count} are in the order of model.parameters()")

    @cached_property
    def rows(self) -> tuple[Parameter, ...]:
        """Every parameter by the number of its row."""
        return (*(param for unit in self.units for param in unit.params), *self.unmanaged)

    @cached_property
    def parameters(self) -> tuple[str, ...]:
        """The names in the order of ``model.parameters()``."""
        return tuple(self.rows[row].name for row in self.order)

    @cached_property
    def shared(self) -> tuple[tuple[str, str], ...]:
        """(later name, first name) of shared parameters."""
        return tuple((later, self.rows[row].name) for later, row in self.tied)

    @cached_property
    def groups(self) -> Groups | None:
        """For each group of the optimizer its parameters in the order of their ids: names, or with
        ``use_orig_params=False`` the ``key`` of a unit. None if unknown, which means one group in the order of
        ``model.parameters()``. For several optimizers, until ``of_optimizer`` chooses one.
        """
        return None if self.trained is None else self.keys_of(self.trained)

    @cached_property
    def orders(self) -> tuple[RankOrder, ...]:
        """The groups on the ranks whose optimizers list the parameters in a different order, or lack some; ``groups``
        lists every parameter that any rank has.
        """
        return tuple(RankOrder(of_ranks.ranks, self.keys_of(of_ranks.trained)) for of_ranks in self.by_rank)

    @cached_property
    def optimizers(self) -> tuple[tuple[str, Groups], ...]:
        """The groups of each of several optimizers, by the name of its section; ``groups`` is None then."""
        return tuple((name, self.keys_of(trained)) for name, trained in self.by_optimizer)

    @cached_property
    def rows_of(self) -> Mapping[str, tuple[RowNumber, ...]]:
        """The rows of everything that an optimizer can hold, by its key."""
        return keys_of_rows(self.units, self.unmanaged, use_orig_params=self.use_orig_params)

    @cached_property
    def _key_of(self) -> Mapping[RowNumber, str]:
        return {row: key for key, rows in self.rows_of.items() for row in rows}

    def keys_of(self, groups: RowGroups) -> Groups:
        """What an optimizer with these ``groups`` holds."""
        return tuple(tuple(dict.fromkeys(map(self._key_of.__getitem__, rows))) for rows in groups)

    def with_groups(self, groups: Groups | None) -> Units:
        """The same with the groups of another optimizer, by keys. Raises InternalError for one that it cannot hold."""
        if groups is None:
            return replace(self, trained=None)
        unknown = [key for group in groups for key in group if key not in self.rows_of]
        if unknown:
            raise InternalError(f"{unknown[0]} is nothing that an optimizer of these units holds")
        return replace(self, trained=rows_of_keys(groups, self.rows_of))

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
        if self.groups is None:
            return self.optimizer_keys()
        return tuple(key for group in self.groups for key in group)

    def named_groups(self) -> Groups | None:
        """``groups`` by original names; those in a flat parameter in the order of ``model.parameters()``."""
        if self.groups is None or self.use_orig_params:
            return self.groups
        position = {row: place for place, row in enumerate(self.order)}
        groups: list[tuple[str, ...]] = []
        for rows in self.trained or ():
            in_order = sorted(rows, key=position.__getitem__)
            groups.append(tuple(self.rows[row].name for row in in_order))
        return tuple(groups)

    def names_of(self, keys: Iterable[str]) -> list[str]:
        """The names in the flat parameters ``keys``; a key of any other parameter is its name."""
        by_key = {unit.key: unit for unit in self.units}
        names: list[str] = []
        for key in keys:
            names += by_key[key].names if key in by_key else [key]
        return names

    def of_optimizer(self, names: Iterable[str]) -> Units | None:
        """The same with the groups of the optimizer that is recorded under the first of ``names``; None if none is."""
        recorded = dict(self.by_optimizer)
        trained = next((recorded[name] for name in names if name in recorded), None)
        return None if trained is None else replace(self, trained=trained)

    @property
    def of_one_optimizer(self) -> bool:
        """Whether ``groups`` are those of one of several optimizers, chosen by its name."""
        return self.trained is not None and bool(self.by_optimizer)

    def groups_of(self, rank: int) -> Groups | None:
        """The groups of the optimizer on ``rank``; None as for ``groups``."""
        return next((order.groups for order in self.orders if rank in order.ranks), self.groups)


def keys_of_rows(
    units: Iterable[Unit], unmanaged: Iterable[Parameter], *, use_orig_params: bool
) -> dict[str, tuple[RowNumber, ...]]:
    """The rows of everything that an optimizer can hold, by its key: a flat parameter's, or the one of a name."""
    found: dict[str, tuple[RowNumber, ...]] = {}
    first = 0
    for unit in units:
        numbers = range(first, first + len(unit.params))
        if use_orig_params:
            found.update({param.name: (row,) for row, param in enumerate(unit.params, first)})
        else:
            found[unit.key] = tuple(numbers)
        first = numbers.stop
    found.update({param.name: (row,) for row, param in enumerate(unmanaged, first)})
    return found


def rows_of_keys(groups: Groups, rows_of: Mapping[str, tuple[RowNumber, ...]]) -> RowGroups:
    """The rows of ``groups``. ``rows_of``: of each key."""
    return tuple(tuple(chain(*map(rows_of.__getitem__, group))) for group in groups)


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


def first_misplaced(names: Iterable[str], position: Mapping[str, int]) -> tuple[str, str] | None:
    """The first of ``names`` that is not in the order of ``position``, and the name that is expected there.

    Ignores names that ``position`` lacks.
    """
    listed = [name for name in names if name in position]
    pairs = zip(listed, sorted(listed, key=position.__getitem__), strict=True)
    return next((pair for pair in pairs if pair[0] != pair[1]), None)
