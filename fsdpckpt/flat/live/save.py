"""Saves what a live model and its optimizer know and never write to a checkpoint: the units file.

That is the order of ``model.parameters()`` and of the optimizer's groups, which ids count in, and the units of FSDP1.
``save_parameter_order`` makes no rank wait for another. If ranks' optimizers list different parameters, the ranks
exchange the differences through the store of the process group: the first rank to arrive sets the usual order, and
every rank with a different order adds its own. The rank that writes the file reads the store again afterwards, so that
the last write has every rank's order.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
import torch.distributed
from torch import nn
from torch.distributed.distributed_c10d import _get_default_store

from fsdpckpt.errors import InternalError, SourceUnsupportedError
from fsdpckpt.flat.live.modules import (
    FsdpModule,
    Optimizers,
    contradictions,
    dtype_of,
    fsdp_modules,
    names_of,
    optimizer_groups,
    parameter_order,
    params_outside_units,
    shared,
    stride_of,
    with_aligning_dtype,
)
from fsdpckpt.flat.live.unwrapped import rank_of_unwrapped, units_without_fsdp1
from fsdpckpt.flat.units.request import units_path, write_units
from fsdpckpt.ir.parameters import Parameter
from fsdpckpt.ir.unit_lists import ContradictoryUnitsError, flaws, units_of_lists
from fsdpckpt.ir.units import Groups, RankOrder, Strategy, Unit, Units, unit_text
from fsdpckpt.ir.units_json import decode, encode

_STRATEGIES = {
    "FULL_SHARD": Strategy.FULL_SHARD,
    "SHARD_GRAD_OP": Strategy.SHARD_GRAD_OP,
    "HYBRID_SHARD": Strategy.HYBRID_SHARD,
    "_HYBRID_SHARD_ZERO2": Strategy.HYBRID_SHARD,
    "NO_SHARD": Strategy.NO_SHARD,
}


def save_parameter_order(model: nn.Module, optimizer: Optimizers, path: str | os.PathLike[str]) -> None:
    """Write the units file of a live model to ``path``: a ``.json`` file, or a directory for its ``units.json``.

    Any model: FSDP1, FSDP2, DDP, or not wrapped at all. Call it on every rank; no rank waits for another, and rank 0 of
    the model's process group writes. ``optimizer`` gives the order of ids in its state; None means one group in
    ``model.parameters()`` order, and a mapping has several optimizers by the names of their sections. Ranks of an FSDP1
    model whose only optimizer lists its parameters in a different order, or lacks some, are recorded with their own
    order. Call it outside forward and backward. Raises UsageError for an optimizer of another model, TargetExistsError
    for a file of anything else, and SourceUnsupportedError on a rank whose own order cannot be recorded, because it
    does not see the file that rank 0 wrote, or because it has several optimizers.
    """
    units, target = units_of(model, optimizer), units_path(os.fsdecode(path))
    if not units.flat:
        if not rank_of_unwrapped(model):
            write_units(units, target)
        return
    rank, process_groups = _checkpoint_rank(model)
    orders = SharedOrders.of(units, process_groups, rank, target) if optimizer is not None else None
    if orders is None:
        if not rank:
            write_units(units, target)
        return
    file_is_stale = orders.publish(units)
    if rank and not (file_is_stale and orders.require_seen()):
        return  # rank 0 writes it
    by_rank = orders.units()
    while True:
        orders.written(write_units(with_orders(by_rank), target))
        before, by_rank = by_rank, orders.units()
        if by_rank == before:
            return


def units_of(model: nn.Module, optimizer: Optimizers = None) -> Units:
    """The units of a live model, the same on every rank; none for a model without FSDP1.

    Those of FSDP1 are proved against the numbers of the model's flat parameters. Raises UsageError for a model without
    parameters or an optimizer of a different model, SourceUnsupportedError for FSDP1 on top of tensor parallelism.
    """
    modules = fsdp_modules(model)
    if not modules:
        return units_without_fsdp1(model, optimizer)
    use_orig_params = _agreed_orig_params(modules)
    units = tuple(_unit(module) for module in modules)
    names = names_of(modules, model)
    outside = tuple(params_outside_units(model, names))
    world_size, shard_size = _rank_counts(modules)
    one, several = optimizer_groups(optimizer, names.keys)
    result = _consistent(
        units=units,
        use_orig_params=use_orig_params,
        parameters=tuple(parameter_order(model, modules, names, use_orig_params=use_orig_params)),
        unmanaged=outside,
        shared=tuple(shared(model, modules, names, {param.name for param in outside})),
        groups=one,
        world_size=world_size,
        shard_size=shard_size,
        optimizers=several,
    )
    _require_proved(result, modules)
    return result


save_units = save_parameter_order
"""The name of this function for FSDP1, whose flat parameters it describes."""


def _checkpoint_rank(model: nn.Module) -> tuple[int, list[Any]]:
    """This rank's number in the model's checkpoint, and the model's process groups: each pipeline stage has its own."""
    groups = fsdp_modules(model)[0].groups
    rank = 0
    for group in reversed(groups):
        rank = rank * group.size() + group.rank()
    return rank, groups


def _agreed_orig_params(modules: list[FsdpModule]) -> bool:
    values = {module.use_orig_params for module in modules}
    if len(values) > 1:
        raise SourceUnsupportedError(
            "some FSDP modules of this model have use_orig_params=True and some False",
            why="FSDP itself refuses such a model in its first forward",
            next_step="wrap all modules with the same use_orig_params",
        )
    return values.pop()


def _rank_counts(modules: list[FsdpModule]) -> tuple[int, int | None]:
    """(ranks of the model, ranks of a sharding group if they are fewer)."""
    sizes = {tuple(group.size() for group in module.groups) for module in modules}
    if len(sizes) > 1:
        raise SourceUnsupportedError(
            "the units of this model are sharded over process groups of different sizes",
            expected="one size",
            found=", ".join(str(size[0]) for size in sorted(sizes)),
            next_step="wrap all units with the same process_group",
        )
    shard, *replicas = sizes.pop()
    _require_neighbours(modules[0].groups)
    world = shard * (replicas[0] if replicas else 1)
    return world, shard if shard != world else None


def _require_neighbours(groups: Sequence[Any]) -> None:
    """Raises SourceUnsupportedError if the ranks of a HYBRID_SHARD sharding group are not consecutive.

    The number of a rank file then shows neither its shard nor its replica: rank r is expected to hold shard r %
    ``shard_size``.
    """
    if len(groups) < 2 or not torch.distributed.is_initialized() or any(group.size() == 1 for group in groups):
        return  # the ranks of a group that is gone are not known
    ranks = [torch.distributed.get_process_group_ranks(group) for group in groups]
    if ranks[0][-1] - ranks[0][0] >= ranks[1][1] - ranks[1][0]:
        raise SourceUnsupportedError(
            f"HYBRID_SHARD of this model shards over ranks {', '.join(map(str, ranks[0][:8]))} and has replicas on "
            f"ranks {', '.join(map(str, ranks[1][:8]))}; rank files can be read where neighbouring ranks shard",
            why="the number of a rank file would not say which shard it holds",
            next_step="save with StateDictType.SHARDED_STATE_DICT, which needs no units file, or shard over "
            "neighbouring ranks",
        )


def _unit(module: FsdpModule) -> Unit:
    flat = module.flat_param
    if any(extension is not None for extension in getattr(flat, "_param_extensions", ())):
        raise SourceUnsupportedError(
            f"the parameters of {unit_text(module.prefix)} are DTensors",
            why="FSDP1 on top of tensor parallelism flattens each rank's part of a parameter",
            next_step="save such a model as SHARDED_STATE_DICT, which fsdpckpt reads without a units file",
        )
    params = tuple(
        Parameter(
            name=name,
            shape=tuple(flat._shapes[number]),
            dtype=dtype_of(module.orig_dtype),
            stride=_stride(flat, number),
            requires_grad=_requires_grad(module, number),
        )
        for number, name in enumerate(module.names)
    )
    mixed = module.param_dtype
    unit = Unit(
        module.prefix,
        params,
        _STRATEGIES[module.state.sharding_strategy.name],
        None if mixed is None else dtype_of(mixed),
    )
    return with_aligning_dtype(unit, module)


def _stride(flat: Any, number: int) -> tuple[int, ...] | None:
    # torch 2.4 has neither attribute: it flattens every parameter row-major.
    strides, contiguities = getattr(flat, "_strides", None), getattr(flat, "_contiguities", None)
    if strides is None or contiguities is None or contiguities[number]:
        return None
    return stride_of(tuple(flat._shapes[number]), tuple(strides[number]))


def _requires_grad(module: FsdpModule, number: int) -> bool:
    params = module.flat_param._params
    return bool(module.flat_param.requires_grad if params is None else params[number].requires_grad)


def _require_proved(units: Units, modules: list[FsdpModule]) -> None:
    """Check that the flat parameters of ``units`` are those of the model, number by number, and that ``units`` are
    consistent.
    """
    shard_size = units.shard_size or units.world_size or 1
    wrong = flaws(units)
    for unit, module in zip(units.units, modules, strict=True):
        wrong += contradictions(unit, module, shard_size=shard_size, use_orig_params=units.use_orig_params)
    if wrong:
        raise _not_understood(wrong)


def _consistent(**lists: Any) -> Units:
    """The units of these lists (``units_of_lists``). Raises InternalError if they do not fit together."""
    try:
        return units_of_lists(**lists)
    except ContradictoryUnitsError as error:
        raise _not_understood(error.flaws) from None


def _not_understood(wrong: Sequence[str]) -> InternalError:
    return InternalError(
        "this version of fsdpckpt does not understand the units of this model",
        details=wrong,
        why=f"torch {torch.__version__} lays out flat parameters differently, or the model was changed after "
        "it was wrapped",
    )


_PREFIX = "fsdpckpt/units"
_OF_RANKS = ("version", "unmanaged", "parameters", "groups", "optimizers")  # fields in which ranks may differ


@dataclass(frozen=True, slots=True)
class SharedOrders:
    """The orders of the ranks that together write the units file ``target``. ``rank``: this rank in the checkpoint."""

    store: Any
    key: str
    rank: int
    target: str

    @classmethod
    def of(cls, units: Units, groups: Sequence[Any], rank: int, target: str) -> SharedOrders | None:
        """None if the ranks have no store with compare-and-set (MPI, or no process group).

        ``groups``: the model's process groups; ranks of other groups may have a model of the same units.
        """
        if not torch.distributed.is_initialized():
            return None
        ranks = torch.distributed.get_process_group_ranks(groups[0]) if len(groups) == 1 else None
        same = {name: value for name, value in encode(units).items() if name not in _OF_RANKS}
        key = f"{_PREFIX}/{_digest([same, ranks, target])}"
        try:
            store = _get_default_store()
            store.compare_set(f"{key}/probe", "", "1")
        except RuntimeError:  # this kind of store cannot compare
            return None
        return cls(store, key, rank, target)

    def publish(self, units: Units) -> bool:
        """Store this rank's optimizer order; True if a file that is written already may lack it."""
        document = json.dumps(encode(units))
        digest = _digest(document)
        if not self.store.check([f"{_PREFIX}/{digest}"]):
            self.store.set(f"{_PREFIX}/{digest}", document)
        if self._orders_by_rank().get(self.rank, self._compare_set("first", "", digest)) == digest:
            return False
        while True:
            before = self._get("others")
            after = f"{before}{self.rank} {digest}\n"
            if self._compare_set("others", before, after) == after:
                return True

    def units(self) -> dict[int | None, Units]:
        """The units of every rank that differs, and under None those of all others."""
        first, digests = self._get("first"), self._orders_by_rank()
        units = {digest: self._units(digest) for digest in {first, *digests.values()}}
        return {None: units[first], **{rank: units[digest] for rank, digest in digests.items()}}

    def written(self, data: bytes) -> None:
        """Announce that the file has been written with this content."""
        self.store.set(f"{self.key}/written", _digest(data))

    def require_seen(self) -> bool:
        """Whether the file has been written, and this rank sees that very file.

        Raises SourceUnsupportedError if it does not: rank 0's file then lacks this rank's order.
        """
        for _ in range(20):
            written = self._get("written")
            if not written:
                return False
            try:
                with open(self.target, "rb") as file:
                    if _digest(file.read()) == written:
                        return True
            except OSError:
                pass
            time.sleep(0.1)  # another rank may be writing
        raise SourceUnsupportedError(
            f"the optimizer of rank {self.rank} lists its parameters in a different order, which the units file "
            "cannot record",
            why=f"another rank wrote {self.target}, and this rank does not see that file",
            next_step="call save_units on every rank with a path on a disk that all ranks share",
            file=self.target,
        )

    def _orders_by_rank(self) -> dict[int, str]:
        """The digest of the latest order of each rank that ever differed from the first."""
        lines = (line.split() for line in self._get("others").splitlines())
        return {int(rank): digest for rank, digest in lines}

    def _units(self, digest: str) -> Units:
        return decode(json.loads(self.store.get(f"{_PREFIX}/{digest}")), source=f"{self.target} (another rank)")

    def _get(self, name: str) -> str:
        key = f"{self.key}/{name}"
        return str(self.store.get(key).decode()) if self.store.check([key]) else ""

    def _compare_set(self, name: str, expected: str, desired: str) -> str:
        return str(self.store.compare_set(f"{self.key}/{name}", expected, desired).decode())


def _digest(value: object) -> str:
    data = value if isinstance(value, bytes) else json.dumps(value).encode()
    return hashlib.sha256(data).hexdigest()


def with_orders(by_rank: Mapping[int | None, Units]) -> Units:
    """Combine the ranks' ``Units``, which differ in their optimizers and unmanaged parameters.

    None: the ranks that are not in ``by_rank``. Raises SourceUnsupportedError for optimizers that cannot be recorded
    together.
    """
    usual = by_rank[None]
    every = [by_rank.get(rank, usual) for rank in range(usual.world_size or 1)]
    if any(units.optimizers != usual.optimizers for units in every):
        raise SourceUnsupportedError(
            "the optimizers of the ranks list their parameters in different orders",
            why="a units file records that for one optimizer, and this model has several",
            next_step="give each optimizer its parameters in the same order on every rank",
        )
    groups = [units.groups for units in every if units.groups is not None]
    if len(groups) < len(every) or len(set(map(len, groups))) > 1:
        if all(units.groups == every[0].groups for units in every):
            return every[0]
        raise SourceUnsupportedError(
            "the optimizers of the ranks have different numbers of param groups",
            found=", ".join(f"rank {rank}: {len(units.groups or ())}" for rank, units in list(enumerate(every))[:8]),
            why="a units file lists the parameters of each group",
            next_step="make the optimizer with the same groups on every rank",
        )
    joined: list[tuple[str, ...]] = []
    for same_group in zip(*groups, strict=True):  # what each rank lists of one group
        joined.append(tuple(dict.fromkeys(chain(*same_group))))
    united: Groups = tuple(joined)
    orders: dict[Groups, list[int]] = {}
    for rank, of_rank in enumerate(groups):
        if of_rank != united:
            orders.setdefault(of_rank, []).append(rank)
    first = every[0]
    return _consistent(
        units=first.units,
        use_orig_params=first.use_orig_params,
        parameters=tuple(dict.fromkeys(name for units in every for name in units.parameters)),
        unmanaged=_unmanaged(every),
        shared=first.shared,
        groups=united,
        world_size=first.world_size,
        shard_size=first.shard_size,
        orders=tuple(RankOrder(tuple(ranks), of_ranks) for of_ranks, ranks in orders.items()),
        optimizers=first.optimizers,
    )


def _unmanaged(every: Sequence[Units]) -> tuple[Parameter, ...]:
    """The parameters outside every unit, some of which only some ranks may have."""
    named: dict[str, Parameter] = {}
    for units in every:
        for param in units.unmanaged:
            if named.setdefault(param.name, param) != param:
                on_one, on_another = map(_form_text, (named[param.name], param))
                raise SourceUnsupportedError(
                    f"{param.name} is {on_one} on one rank and {on_another} on another",
                    why="a parameter that FSDP does not manage is the same on every rank that has it",
                    next_step="give it another name on each rank",
                )
    return tuple(named.values())


def _form_text(param: Parameter) -> str:
    strides = "" if param.stride is None else f" of strides {list(param.stride)}"
    return f"{list(param.shape)} {param.dtype.name}{strides}{'' if param.requires_grad else ', frozen,'}"
