"""Turns the slices of a flattened checkpoint into whole tensors, once the units are proved.

The counterparts in PyTorch, ``_unflatten_optim_state`` and ``_convert_state_with_orig_params``, gather first; here no
data moves: each slice becomes boxes of its parameter, which point into the slice.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TypeAlias

import numpy as np

from fsdpckpt.flat.blocks import require_aligned_blocks
from fsdpckpt.flat.match import FlatMatch
from fsdpckpt.flat.names import module_of
from fsdpckpt.flat.proofs import compare_replicas, require_padding
from fsdpckpt.flat.slices import is_number_per_rank, is_step, slice_lengths
from fsdpckpt.flat.units.request import ResolvedUnits
from fsdpckpt.ir.checkpoint import Checkpoint, ModelState, Note
from fsdpckpt.ir.dtypes import DType
from fsdpckpt.ir.fatal import fatal
from fsdpckpt.ir.names import clean
from fsdpckpt.ir.optimizer import (
    PARAM_NAMES,
    PARAMS,
    MemberNumber,
    Optimizer,
    OwnValue,
    ParamGroup,
    ParamKey,
    StatesOrValue,
    renumbered,
)
from fsdpckpt.ir.parameters import Parameter
from fsdpckpt.ir.placements import Flattened, OneSlice, Slices, Whole
from fsdpckpt.ir.state_parts import StateParts, state_parts
from fsdpckpt.ir.tensors import Chunks, Int64Array, Tensor, contiguous_stride
from fsdpckpt.ir.units import Unit, Units
from fsdpckpt.ir.values import Key, Value
from fsdpckpt.layouts.flattened import FlatLayout, flat_boxes, is_flat_key
from fsdpckpt.storage.sources import Sources
from fsdpckpt.text import plural

_Run: TypeAlias = tuple[int, int, int, int, int]
"""A slice: rank, file, byte offset, and the range [begin, begin + count) of the flat tensor it holds."""


def unflatten(checkpoint: Checkpoint, match: FlatMatch) -> Checkpoint:
    """The same checkpoint with whole tensors under original names; an optimizer in slices becomes keyed by name."""
    notes: list[Note] = []
    model = checkpoint.model
    if model is not None and any(is_flat_key(key) for key in model.params):
        model = _model(model, match, notes)
    optim = checkpoint.optim
    if optim is not None and match.flat_optimizer:
        optim = _optimizer(optim, match, checkpoint.world_size, notes)
    return replace(checkpoint, model=model, optim=optim).noted(*notes)


# The model.


def _model(model: ModelState, match: FlatMatch, notes: list[Note]) -> ModelState:
    flat = {clean(key) for key in model.params if is_flat_key(key)}
    by_key = {unit.key: unit for unit in match.units.units if unit.key in flat}
    split = {param.name for unit in by_key.values() for param in unit.params}
    cut = match.units.cut_in_sharded()
    params: dict[str, Tensor | Value] = {}
    for key, leaf in model.params.items():
        name = clean(key)
        unit = by_key.get(name)
        if unit is not None and isinstance(leaf, Tensor):
            tensors = _split_params(unit, leaf.dtype, _sorted_runs(leaf), match.layouts[unit.key])
            params.update({param: tensor.with_sharded(param in cut) for param, tensor in tensors.items()})
        elif name not in split:
            whole = _read_whole(leaf)
            params[name] = whole.with_sharded(name in cut) if isinstance(whole, Tensor) else whole
    for later, first in match.units.shared:
        if first in params:
            params[later] = params[first]
    # LOCAL_STATE_DICT has the innermost units first, and buffers apart from their modules: the order of the model's
    # state dict is what others rely on.
    ordered = [name for name in _model_order(match.units) if name in params]
    params = {name: params[name] for name in _with_buffers(ordered, params)}
    counted = f"{plural(len(split), 'parameter', 'were')} found in {plural(len(by_key), 'flat parameter')}"
    notes.append(Note("unflattened", f"model: {counted}"))
    return ModelState(params, model.metadata)


def _model_order(units: Units) -> list[str]:
    """``units.parameters`` with each in its module: a shared one may be listed where its other name is."""
    order, unit_of = list(units.parameters), units.unit_of()
    for later, first in units.shared:
        params = unit_of[first].params if first in unit_of else ()
        mates = [param.name for param in params if param.name.rpartition(".")[0] == first.rpartition(".")[0]]
        place = mates.index(first) if first in mates else 0
        following = mates[place + 1 : place + 2]
        if following and first in order and order.index(following[0]) != order.index(first) + 1:
            order[order.index(first)] = later
            order.insert(order.index(following[0]), first)
    return order


def _with_buffers(ordered: Sequence[str], names: Iterable[str]) -> list[str]:
    """All ``names``, those of ``ordered`` in that order. Each other one comes where ``Module.state_dict`` has a buffer:
    after the parameters of its own module, and before those of the modules in it.
    """
    last_own = {module_of(name): place for place, name in enumerate(ordered)}
    first_inside: dict[str, int] = {}
    for place, name in reversed(list(enumerate(ordered))):
        words = name.split(".")
        first_inside.update({".".join(words[:depth]): place for depth in range(len(words))})
    placed = set(ordered)
    following: dict[int, list[str]] = {}  # by the place of the parameter before them, -1 for none
    for name in dict.fromkeys(names):
        if name not in placed:
            module = module_of(name)
            place = last_own.get(module, first_inside.get(module, len(ordered)) - 1)
            following.setdefault(place, []).append(name)
    listed = list(following.get(-1, ()))
    for place, name in enumerate(ordered):
        listed += [name, *following.get(place, ())]
    return listed


def _read_whole(leaf: Tensor | Value) -> Tensor | Value:
    """A 1-D tensor that every rank holds whole, which was read as slices because nothing marks it as a buffer."""
    if not isinstance(leaf, Tensor):
        return leaf
    if isinstance(leaf.cut, OneSlice):
        return replace(leaf, sharded=False, cut=Whole())
    if not isinstance(leaf.cut, Slices):
        return replace(leaf, sharded=False)
    chunks = leaf.chunks
    length = int(chunks.size[0, 0])
    return Tensor(leaf.dtype, (length,), chunks.with_boxes(start=np.zeros_like(chunks.start)), sharded=False)


# The optimizer.


def _optimizer(optim: Optimizer, match: FlatMatch, world_size: int, notes: list[Note]) -> Optimizer:
    by_key = {unit.key: unit for unit in match.units.units}
    params, units = match.units.params(), match.units.unit_of()
    state: dict[ParamKey, StatesOrValue] = {}
    for key, states in optim.items():
        name = match.keys.get(key)
        if isinstance(states, OwnValue):
            state[name if name is not None and name in params else key] = states
        elif name is None:
            state[key] = states
        elif name in by_key:
            state.update(_unit_states(by_key[name], states, match, world_size))
        else:
            state[name] = _param_states(params[name], units.get(name), states, match, world_size)
    if match.units.use_orig_params:  # FSDP1 cuts the states of whole flat parameters even where it cuts no weights
        for name in (units.keys() - match.units.cut_in_sharded()) & state.keys():
            entry = state[name]
            if not isinstance(entry, OwnValue):
                state[name] = {item: _as_whole(leaf) for item, leaf in entry.items()}
    groups = None
    if optim.groups is not None:
        listed = zip(optim.groups, optim.in_groups(), strict=True)
        groups = [_group(group, keys, match, by_key) for group, keys in listed]
    notes.append(
        Note("unflattened", f"optimizer: states of {plural(len(state), 'parameter')}, from {len(optim.state)} keys")
    )
    named = optim.remade(state, groups, optim.extra)
    number_of = {name: number for number, name in enumerate(named.keys)}
    became: dict[MemberNumber, list[MemberNumber]] = {}
    for member, key in enumerate(optim.keys):
        name = match.keys.get(key, str(key))
        names = by_key[name].names if name in by_key else [name]
        became[member] = [number_of[name] for name in names if name in number_of]
    return replace(named, orders=renumbered(optim.orders, became))


def _as_whole(leaf: Tensor | Value) -> Tensor | Value:
    """A state of a parameter that a sharded checkpoint has whole on every rank."""
    return leaf.with_sharded(sharded=False) if isinstance(leaf, Tensor) else leaf


def _unit_states(
    unit: Unit, states: Mapping[str, Tensor | Value], match: FlatMatch, world_size: int
) -> dict[ParamKey, dict[str, Tensor | Value]]:
    """The states of each parameter of a flat parameter; a state that is not a slice belongs to all of them."""
    layout = match.layouts[unit.key]
    by_name: dict[ParamKey, dict[str, Tensor | Value]] = {param.name: {} for param in unit.params}
    parts = state_parts(states)
    scales = _scales(unit, unit.params, states, parts, match)
    for item, leaf in states.items():
        if item in scales:
            for name, tensor in scales[item].items():
                by_name[name][item] = tensor
            continue
        cut = isinstance(leaf, Tensor) and leaf.ndim and not is_step(item, leaf) and item not in parts.maps
        if cut and isinstance(leaf, Tensor) and _fits(leaf, layout.shard_numel, world_size):
            starts = leaf.chunks.rank % layout.shard_count * layout.shard_numel
            for name, tensor in _split_params(unit, leaf.dtype, _sorted_runs(leaf, starts), layout).items():
                by_name[name][item] = tensor
        else:
            for entry in by_name.values():
                entry[item] = replace(leaf) if isinstance(leaf, Tensor) and not leaf.ndim else _read_whole(leaf)
    return by_name


def _param_states(
    param: Parameter, unit: Unit | None, states: Mapping[str, Tensor | Value], match: FlatMatch, world_size: int
) -> dict[str, Tensor | Value]:
    """The states of a parameter that has an entry itself. ``unit``: the one that holds it, if any."""
    parts = state_parts(states)
    scales = _scales(unit, [param], states, parts, match) if unit is not None else {}
    counts = match.counts.get(param.name)
    entry: dict[str, Tensor | Value] = {}
    for item, leaf in states.items():
        if item in scales:
            entry[item] = scales[item][param.name]
        elif item in parts.maps or (isinstance(leaf, Tensor) and is_step(item, leaf)):
            entry[item] = _read_whole(leaf)
        else:
            entry[item] = _of_param(param, leaf, counts, world_size)
    return entry


def _scales(
    unit: Unit,
    params: Sequence[Parameter],
    states: Mapping[str, Tensor | Value],
    parts: StateParts,
    match: FlatMatch,
) -> dict[str, dict[str, Tensor]]:
    """The scales of bitsandbytes' states in the vector of ``params``: by state, then by parameter."""
    scales: dict[str, dict[str, Tensor]] = {}
    for name, state in parts.scales.items():
        scale, codes = states.get(name), states.get(state)
        if isinstance(scale, Tensor) and isinstance(codes, Tensor):
            scales[name] = _read_scales(unit, params, scale, codes, match)
    return scales


def _read_scales(
    unit: Unit, params: Sequence[Parameter], scales: Tensor, codes: Tensor, match: FlatMatch
) -> dict[str, Tensor]:
    """The scales of each of ``params``: one for each block of a slice. Raises SourceUnsupportedError."""
    layout, orig = match.layouts[unit.key], match.units.use_orig_params
    codes_of_rank = dict(zip(codes.chunks.rank.tolist(), codes.chunks.size.prod(axis=1).tolist(), strict=True))
    ranks, counts = scales.chunks.rank.tolist(), scales.chunks.size[:, 0].tolist()
    lengths = [(codes_of_rank.get(rank, 0), count) for rank, count in zip(ranks, counts, strict=True)]
    block = require_aligned_blocks(unit, layout, {param.name for param in params}, lengths, orig=orig)
    by_shard: dict[int, list[tuple[int, int, int]]] = {}
    for rank, file, offset in zip(ranks, scales.chunks.file.tolist(), scales.chunks.offset.tolist(), strict=True):
        by_shard.setdefault(rank % layout.shard_count, []).append((rank, file, offset))
    slices = layout.slices()
    columns = (slices.param, slices.rank, slices.begin, slices.count, slices.offset)
    runs: dict[str, list[_Run]] = {param.name: [] for param in params}
    for index, shard, begin, count, skipped in zip(*(column.tolist() for column in columns), strict=True):
        name = unit.params[index].name
        for rank, file, offset in by_shard.get(shard, ()) if name in runs else ():
            first = offset + (0 if orig else skipped // block * scales.dtype.itemsize)
            runs[name].append((rank, file, first, begin // block, -(-count // block)))
    return {
        param.name: _param_tensor(
            Parameter(param.name, (-(-param.numel // block),), scales.dtype), scales.dtype, runs[param.name], 0
        )
        for param in params
    }


def _fits(leaf: Tensor, shard: int, world_size: int) -> bool:
    lengths = slice_lengths(leaf, world_size)
    return lengths is not None and bool((lengths == shard).all())


def _of_param(param: Parameter, leaf: Tensor | Value, counts: Int64Array | None, world_size: int) -> Tensor | Value:
    """A state of ``param``. ``counts``: the number of its elements in each shard, None if no unit has it."""
    if not isinstance(leaf, Tensor):
        return leaf
    if counts is None:
        return _read_whole(leaf) if leaf.ndim else leaf
    if not leaf.ndim:
        return _holder_state(leaf, counts, world_size)
    lengths = slice_lengths(leaf, world_size)
    if lengths is not None and np.array_equal(lengths, np.resize(counts, world_size)):
        starts = np.resize(np.cumsum(counts) - counts, world_size)[leaf.chunks.rank]
        return _param_tensor(param, leaf.dtype, _sorted_runs(leaf, starts), 0)
    if is_number_per_rank(leaf):
        return _read_whole(leaf)
    return replace(leaf, sharded=True, cut=Flattened())  # FSDP1 cut nothing: NO_SHARD, or groups of one rank


def _holder_state(leaf: Tensor, counts: Int64Array, world_size: int) -> Tensor:
    """A 0-dim state from the ranks that hold elements of the parameter.

    Optimizers that make states at once (Adagrad) have one on the other ranks too, which never advances.
    """
    holds_elements = np.resize(counts, world_size)[leaf.chunks.rank] > 0
    return replace(leaf, chunks=leaf.chunks.take(holds_elements)) if holds_elements.any() else leaf


def _group(
    group: ParamGroup, keys: Sequence[ParamKey], match: FlatMatch, by_key: Mapping[str, Unit]
) -> dict[Key, Value]:
    """As ``_unflatten_param_groups``: a flat parameter stands for all the names in it. ``param_names`` then have the
    order of ``model.parameters()``, as ids do (``Units.named_groups``), not that of units.
    """
    names: list[str] = []
    listed = [match.keys[key] for key in keys]
    for name in listed:
        names.extend(by_key[name].names if name in by_key else [name])
    changed: dict[Key, Value] = {**group.settings, PARAMS: list(names)}
    if PARAM_NAMES in group.settings:
        if not by_key.keys().isdisjoint(listed):
            position = {name: index for index, name in enumerate(match.units.parameters)}
            names.sort(key=lambda name: position.get(name, -1))
        changed[PARAM_NAMES] = [*names]
    return changed


# Slices to boxes.


def _sorted_runs(tensor: Tensor, starts: Int64Array | None = None) -> list[_Run]:
    """The non-empty chunks of a 1-D tensor, with ``starts`` in place of their own, sorted by begin and rank."""
    chunks = tensor.chunks
    begin = chunks.start[:, 0] if starts is None else starts
    rows = zip(
        chunks.rank.tolist(),
        chunks.file.tolist(),
        chunks.offset.tolist(),
        begin.tolist(),
        chunks.size[:, 0].tolist(),
        strict=True,
    )
    return sorted((row for row in rows if row[4]), key=lambda row: (row[3], row[0]))


def _split_params(unit: Unit, dtype: DType, runs: Sequence[_Run], layout: FlatLayout) -> dict[str, Tensor]:
    """Split ``runs``, the slices of a flat parameter sorted by their begin, into its parameters."""
    ends = np.maximum.accumulate(np.asarray([run[3] + run[4] for run in runs], np.int64))
    begins = [run[3] for run in runs]
    by_name = {}
    for param, start, numel in zip(unit.params, layout.start.tolist(), layout.numel.tolist(), strict=True):
        low = int(np.searchsorted(ends, start, side="right"))
        high = int(np.searchsorted(begins, start + numel, side="left"))
        by_name[param.name] = _param_tensor(param, dtype, runs[low:high], start)
    return by_name


def _param_tensor(param: Parameter, dtype: DType, runs: Sequence[_Run], start: int) -> Tensor:
    """One parameter's tensor, which begins at ``start``: the part of each run inside the parameter, as boxes."""
    order = param.order
    dims = range(len(param.shape)) if order is None else order
    rows = []
    for rank, file, offset, begin, count in runs:
        low = max(begin - start, 0)
        at = offset + (low + start - begin) * dtype.itemsize
        end = min(begin + count - start, param.numel)
        for box in flat_boxes(param.shape, low, end - low, order):
            stride = [1] * len(box.sizes)
            for dim, step in zip(dims, contiguous_stride([box.sizes[dim] for dim in dims]), strict=True):
                stride[dim] = step
            rows.append((rank, file, at, box.offsets, box.sizes, tuple(stride)))
            at += box.numel * dtype.itemsize
    ranks, files, offsets, starts, sizes, strides = zip(*rows, strict=True) if rows else [()] * 6
    chunks = Chunks.rows(
        ndim=len(param.shape), rank=ranks, file=files, offset=offsets, start=starts, size=sizes, stride=strides
    )
    if not param.numel:
        chunks = Chunks.whole(file=0, offset=0, shape=param.shape)
    return Tensor(dtype, param.shape, chunks, sharded=True, cut=Flattened())


def name_slices(
    checkpoint: Checkpoint, resolved: ResolvedUnits, sources: Sources, *, replicas: bool = True
) -> Checkpoint:
    """Turn the slices of ``checkpoint`` into whole tensors with units that were proved.

    ``replicas``: whether to compare replicas of slices. Raises SourceCorruptError if they differ, or if bytes that are
    padding according to the units do not hold padding.
    """
    if resolved.match is None:
        return checkpoint
    padding = require_padding(checkpoint, resolved.match, sources)
    proved = [f"{padding} elements of padding hold what FSDP1 writes there"] if padding else []
    problems, notes = compare_replicas(checkpoint, resolved.match) if replicas else ([], [])
    if problems:
        raise fatal(problems, source=checkpoint.source)
    added = [*notes, *(Note("units", line) for line in (*resolved.how, *resolved.match.proved, *proved))]
    return unflatten(checkpoint.noted(*added), resolved.match)
