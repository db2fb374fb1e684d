"""Proves units against a flattened checkpoint: every slice on every rank must have the length that follows from the
units.

``match`` needs every setting of the units (``use_orig_params``, strategy, alignment, sharding group). It either maps
each key of the checkpoint to a parameter or a whole unit, or lists everything that contradicts the units. It does not
search or guess; ``units.inference`` tries several units with it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain

import numpy as np

from fsdpckpt.flat.laid_out import LaidOutUnits
from fsdpckpt.flat.member_names import MemberNames
from fsdpckpt.flat.names import first_misplaced_module, order_contradictions
from fsdpckpt.flat.slices import (
    is_number_per_rank,
    is_sliced,
    is_step,
    lengths_text,
    slice_lengths,
    tensor_text,
)
from fsdpckpt.ir.checkpoint import Checkpoint, Container
from fsdpckpt.ir.names import clean, keeps_order
from fsdpckpt.ir.optimizer import Optimizer, ParamKey
from fsdpckpt.ir.parameters import Parameter
from fsdpckpt.ir.placements import OneSlice, Slices
from fsdpckpt.ir.state_parts import state_parts
from fsdpckpt.ir.state_shapes import ShownShapes, fits
from fsdpckpt.ir.tensors import Int64Array, Tensor
from fsdpckpt.ir.units import FLAT_PARAM, Unit, Units
from fsdpckpt.ir.values import Value
from fsdpckpt.layouts.flattened import FlatLayout, is_flat_key
from fsdpckpt.text import plural


@dataclass(frozen=True, slots=True, eq=False)
class FlatMatch:
    """Units that match. ``keys``: each optimizer key of the checkpoint to an original name or a unit's key.

    ``layouts``: each unit's key to its layout. ``shard_size``: ranks in one sharding group; rank r holds shard r %
    ``shard_size``. ``counts``: for each sharded parameter, its number of elements in each shard. ``flat_optimizer``:
    whether the optimizer holds slices at all. ``proved``: what was compared, for messages.
    """

    units: Units
    keys: Mapping[ParamKey, str]
    layouts: Mapping[str, FlatLayout]
    shard_size: int
    counts: Mapping[str, Int64Array]
    flat_optimizer: bool
    proved: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Mismatch:
    """Everything in the checkpoint that contradicts the units.

    ``uncompared``: how many optimizer entries could not be compared, because the groups that list them are wrong.
    ``undivided``: why nothing says which of several optimizers holds which parameter, if that is all that is wrong.
    """

    contradictions: tuple[str, ...]
    uncompared: int = 0
    undivided: str | None = None


def match(checkpoint: Checkpoint, units: Units) -> FlatMatch | Mismatch:
    """Map every key of ``checkpoint`` according to ``units``, or list everything that contradicts them."""
    contradictions = list(_other_ranks(checkpoint.world_size, units))
    shard_size = units.shard_size or checkpoint.world_size
    if checkpoint.world_size % shard_size:
        return Mismatch(tuple(contradictions))  # nothing can be laid out
    laid_out = LaidOutUnits.of(units, checkpoint.world_size)
    matching = _Matching(checkpoint, laid_out)
    contradictions += matching.contradictions()
    if contradictions:
        undivided = matching.members.undivided if len(contradictions) == 1 else None
        return Mismatch(tuple(contradictions), matching.uncompared, undivided)
    named_groups = matching.members.named_groups
    return FlatMatch(
        units if named_groups is None else units.with_groups(named_groups),
        matching.keys,
        laid_out.layouts,
        shard_size,
        laid_out.counts,
        matching.flat_optimizer,
        tuple(matching.proved),
    )


def _other_ranks(world_size: int, units: Units) -> Iterator[str]:
    """Why units cannot be those of a checkpoint of ``world_size`` ranks."""
    if units.world_size is not None and units.world_size != world_size:
        yield f"the units were recorded on {units.world_size} ranks, the checkpoint has {world_size}"
    if units.shard_size and world_size % units.shard_size:
        groups = plural(units.shard_size, "rank")
        yield f"sharding groups of {groups} do not divide {plural(world_size, 'rank')}"


class _Matching:
    """One comparison; ``contradictions`` fills the attributes for ``FlatMatch``."""

    def __init__(self, checkpoint: Checkpoint, laid_out: LaidOutUnits) -> None:
        self.checkpoint = checkpoint
        self.units = laid_out.units
        self.world_size = laid_out.world_size
        self.params = laid_out.params
        self.sharded = laid_out.unit_of
        self.by_key = laid_out.by_key
        self.layouts = laid_out.layouts
        self.counts = laid_out.counts
        self.members = MemberNames(checkpoint, laid_out)
        self.keys: dict[ParamKey, str] = {}
        self.proved: list[str] = []
        self.uncompared = 0
        self.flat_optimizer = is_sliced(checkpoint, laid_out.units)

    def contradictions(self) -> Iterator[str]:
        if self.checkpoint.model is not None:
            yield from self._model(self.checkpoint.model.params)
        if self.checkpoint.optim is not None:
            yield from self._optimizer(self.checkpoint.optim)

    # The model.

    def _model(self, params: Mapping[str, Tensor | Value]) -> Iterator[str]:
        flat = dict.fromkeys(key for key in params if is_flat_key(key))
        if flat:
            yield from self._flat_parameters(params, flat)
        yield from self._names(params, flat)

    def _flat_parameters(self, params: Mapping[str, Tensor | Value], flat: Collection[str]) -> Iterator[str]:
        by_clean = {clean(key): key for key in flat}
        whole = {clean(key) for key in params if key not in flat}
        for key in by_clean:
            if key not in self.by_key:
                yield f"the checkpoint has a flat parameter {key}, the units have no such unit"
        for unit in self.units.units:
            leaf = params.get(by_clean.get(unit.key, unit.key))
            layout = self.layouts[unit.key]
            total = layout.total
            if leaf is None and layout.shard_count == 1:
                # LOCAL_STATE_DICT returns the whole parameters of a NO_SHARD module (``_post_state_dict_hook``).
                yield from _missing_names(unit.names, whole)
            elif not isinstance(leaf, Tensor):
                yield f"the checkpoint has no flat parameter {unit.key}"
            elif leaf.shape != (total,):
                actual = leaf.numel if leaf.ndim == 1 else list(leaf.shape)
                yield f"{unit.key}: {total} elements in the units, {actual} in the checkpoint"
            else:
                yield from self._flat_chunks(unit, leaf)
        optim = self.checkpoint.optim
        if optim is not None and optim.key_type == "id" and keeps_order(self.checkpoint, ()):
            wrong = first_misplaced_module(
                [unit.prefix for unit in self.units.units], [key[: -len(FLAT_PARAM) - 1] for key in by_clean]
            )
            if wrong:
                yield f"the order of units differs: {wrong[0]} in the units, {wrong[1]} in the model section"
        self.proved.append(f"units check out: {len(flat)} of {len(flat)} flat parameters match in name and length")

    def _flat_chunks(self, unit: Unit, leaf: Tensor) -> Iterator[str]:
        layout = self.layouts[unit.key]
        for rank, start, size in zip(
            leaf.chunks.rank.tolist(), leaf.chunks.start[:, 0].tolist(), leaf.chunks.size[:, 0].tolist(), strict=True
        ):
            begin, end = layout.shard_range(rank % layout.shard_count)
            if size and (start, start + size) != (begin, end):
                yield f"{unit.key}: rank {rank} holds {start}:{start + size}, the units have {begin}:{end}"

    def _names(self, params: Mapping[str, Tensor | Value], flat: Collection[str]) -> Iterator[str]:
        """Names beside the flat parameters: whole parameters and buffers, or slices by rank (use_orig_params)."""
        shared = dict(self.units.shared)
        cleaned = {clean(key): leaf for key, leaf in params.items() if key not in flat}
        compared = 0
        for name, leaf in cleaned.items():
            param = self.params.get(shared.get(name, name))
            if param is None:
                if isinstance(leaf, Tensor) and leaf.sharded and not isinstance(leaf.cut, Slices):
                    yield f"the model has a parameter {name}, which the units do not have"
            elif isinstance(leaf, Tensor):
                compared += 1
                yield from self._match_names(name, param, leaf, sliced=bool(flat))
        if flat or not cleaned:
            # LOCAL_STATE_DICT lists the innermost units first, and within each the model's order.
            slices = [
                name for name, leaf in cleaned.items() if isinstance(leaf, Tensor) and isinstance(leaf.cut, Slices)
            ]
            if self.checkpoint.container is Container.TORCH:
                yield from order_contradictions(self.units, slices, "the model section", across=False)
            return
        yield from _missing_names(self.params, cleaned)
        if keeps_order(self.checkpoint, list(cleaned)):
            yield from order_contradictions(self.units, list(cleaned), "the model section")
        if compared:
            self.proved.append(f"{compared} names and shapes of the units are those of the model section")

    def _match_names(self, name: str, param: Parameter, leaf: Tensor, *, sliced: bool) -> Iterator[str]:
        if sliced and param.name in self.sharded:
            wrong = self._check_slices(param, leaf)
            if wrong:
                yield f"model {name}: {wrong}"
        elif leaf.shape != param.shape and not self._whole_vector(param, leaf):
            yield f"{name}: {list(param.shape)} in the units, {list(leaf.shape)} in the model section"

    # The optimizer.

    def _optimizer(self, optim: Optimizer) -> Iterator[str]:
        if not self.flat_optimizer:
            yield from self._whole_optimizer(optim)
            return
        if optim.key_type == "id" and not self._read_in_these_orders(optim):
            yield (
                "the units have a different parameter order per rank than was used to read the ids: put this units "
                "file beside the rank files, as units.json"
            )
            return
        yield from self.members.contradictions(optim)
        self.keys.update(self.members.keys)
        self.proved += self.members.proved
        listed = set(optim.grouped_keys())
        compared = 0
        for key, states in optim.state.items():
            name = self.keys.get(key)
            if name is None:
                self.uncompared += key in listed  # its group is wrong, which is reported already
                if isinstance(key, int) and optim.groups is not None and key not in listed:
                    yield f"optim {key}: no param group lists it"
                continue
            if name not in self.by_key and name not in self.params:  # from param_names, which is reported already
                continue
            parts = state_parts(states).names
            tensors = {
                state: leaf
                for state, leaf in states.items()
                if isinstance(leaf, Tensor) and leaf.ndim and state not in parts and not is_step(state, leaf)
            }
            wrong = {state: text for state, leaf in tensors.items() if (text := self._state(name, leaf))}
            compared += len(tensors)
            for state, text in wrong.items():
                # One number per rank is a counter of shape (1,) when other states fit; alone it would prove nothing.
                if len(wrong) == len(tensors) or not is_number_per_rank(tensors[state]):
                    yield f"optim {key} ({name}) {state}: {text}"
        if compared:
            self.proved.append(f"{compared} optimizer states have the units' number of elements on every rank")

    def _read_in_these_orders(self, optim: Optimizer) -> bool:
        """Whether the ids of all ranks were read in the orders that the units record for single ranks, if they do."""
        position = {key: number for number, key in enumerate(chain(*(self.units.groups or ())))}
        recorded: dict[int, list[list[object]]] = {}
        for order in self.units.orders:
            places: list[list[object]] = [list(map(position.get, group)) for group in order.groups]
            recorded.update(dict.fromkeys(order.ranks, places))
        read: dict[int, list[list[object]]] = {}
        for members in optim.orders:
            keys: list[list[object]] = [list(map(optim.keys.__getitem__, group)) for group in members.groups]
            read.update(dict.fromkeys(members.ranks, keys))
        return not recorded or recorded == read

    def _whole_optimizer(self, optim: Optimizer) -> Iterator[str]:
        """An optimizer by name beside flattened model files (accelerate's LOCAL_STATE_DICT)."""
        shown = ShownShapes(optim)
        for key in optim.state if optim.key_type == "name" else ():
            param = self.params.get(clean(str(key)))
            if param is None:
                continue
            self.keys[key] = param.name
            shapes = shown.of(key)
            if not fits(param.shape, shapes):
                yield f"optim {key}: {list(param.shape)} in the units, {list(next(iter(shapes)))} in the checkpoint"
        if self.keys:
            self.proved.append(f"{len(self.keys)} optimizer entries have the names and shapes of the units")

    def _state(self, name: str, leaf: Tensor) -> str | None:
        """What is wrong with one state's lengths."""
        if name in self.by_key:
            shard = self.layouts[name].shard_numel
            lengths = slice_lengths(leaf, self.world_size)
            if lengths is None or (lengths != shard).any():
                return f"{shard} elements on every rank in the units, found {tensor_text(leaf, self.world_size)}"
            return None
        if name in self.sharded:
            return self._check_slices(self.params[name], leaf)
        if leaf.shape != self.params[name].shape and not self._whole_vector(self.params[name], leaf):
            return f"{list(self.params[name].shape)} in the units, found {tensor_text(leaf, self.world_size)}"
        return None

    def _check_slices(self, param: Parameter, leaf: Tensor) -> str | None:
        layout = self.layouts[self.sharded[param.name].key]
        if layout.shard_count == 1 and leaf.shape == param.shape and not isinstance(leaf.cut, Slices):
            return None
        lengths = slice_lengths(leaf, self.world_size)
        expected = np.resize(self.counts[param.name], self.world_size)
        if isinstance(leaf.cut, OneSlice):  # DCP saved the slice of only one rank, and does not say which rank
            if leaf.shape[0] not in expected:
                return f"{lengths_text(expected)} elements by rank in the units, found a slice of {leaf.shape[0]}"
            return None
        if lengths is None or not np.array_equal(lengths, expected):
            return f"{lengths_text(expected)} elements by rank in the units, found {tensor_text(leaf, self.world_size)}"
        return None

    def _whole_vector(self, param: Parameter, leaf: Tensor) -> bool:
        """Whether ``leaf``, read as slices, is a 1-D tensor that every rank that has it holds whole."""
        return (
            isinstance(leaf.cut, Slices)
            and len(param.shape) == 1
            and bool((leaf.chunks.size[:, 0] == param.shape[0]).all())
        )


def _missing_names(names: Iterable[str], present: Collection[str]) -> Iterator[str]:
    return (f"{name} is in the units, not in the model section" for name in names if name not in present)
