"""Infers the units of a flattened checkpoint, by excluding all others.

Every candidate (``candidates``) is tested with every setting (``use_orig_params``, alignment, sharding
group, the optimizer's ids). Those that the lengths of slices contradict are dropped. If all the rest read the same
bytes as the same parameters, the units are known. Otherwise the error says which option decides; nothing is guessed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import TypeAlias

import numpy as np

from fsdpckpt import flags
from fsdpckpt.errors import NeedsInformationError
from fsdpckpt.flat.match import FlatMatch, match
from fsdpckpt.flat.slices import describe_lengths, has_uneven_slices, lengths_by_key, possible_shard_sizes
from fsdpckpt.flat.units.build import Settings, differing_settings, regrouped
from fsdpckpt.flat.units.candidates import Candidate, group_candidates
from fsdpckpt.flat.units.request import ResolvedUnits, order_unknown
from fsdpckpt.ir.checkpoint import Checkpoint
from fsdpckpt.ir.dtypes import DTYPES, DType
from fsdpckpt.ir.names import clean
from fsdpckpt.ir.parameters import Parameter
from fsdpckpt.ir.units import Groups, Strategy, Unit, Units
from fsdpckpt.layouts.flattened import is_flat_key


@dataclass(frozen=True, slots=True)
class Refusal:
    """No candidate matches. ``nearest`` describes the closest one, ``contradictions`` lists everything that excludes
    it.
    """

    nearest: str
    contradictions: tuple[str, ...]


@dataclass(frozen=True, slots=True, eq=False)
class _Matched:
    """A candidate whose units match under some settings."""

    candidate: Candidate
    match: FlatMatch

    @property
    def description(self) -> str:
        return "; ".join((*self.candidate.assumed, describe_settings(self.match.units)))


def find_inferred(
    checkpoint: Checkpoint,
    candidates: Iterable[Candidate],
    *,
    wanted: Settings,
    preferred: Settings | None = None,
    order_command: Callable[[], str | None] = lambda: None,
) -> ResolvedUnits | Refusal | NeedsInformationError:
    """The only units that the lengths in ``checkpoint`` allow, or what contradicts the nearest candidate. An error if
    several match that read the same bytes differently, or if an order is not certain.

    ``candidates``: those of earlier turns first; a later turn comes only if nothing in an earlier one matches.
    ``preferred``: settings that the caller expects; they decide if several match. ``order_command``: the command that
    finds the order of the names, for an error.
    """
    matches: list[_Matched] = []
    nearest: Refusal | None = None
    distance = 0
    for candidate in candidates:
        if matches and candidate.turn > matches[-1].candidate.turn:
            break
        for units, assignments in _with_settings(checkpoint, candidate, wanted):
            description = "; ".join((*candidate.assumed, describe_settings(units)))
            if not assignments:
                nearest = nearest or Refusal(
                    description, ("the optimizer's states have other shapes than the parameters",)
                )
            for groups in assignments:
                result = match(checkpoint, units if groups is None else units.with_groups(groups))
                if isinstance(result, FlatMatch):
                    matches.append(_Matched(candidate, result))
                elif nearest is None or len(result.contradictions) + result.uncompared < distance:
                    nearest, distance = (
                        Refusal(description, result.contradictions),
                        len(result.contradictions) + result.uncompared,
                    )
    if not matches:
        return nearest or Refusal(
            "no candidate units could be built from the names", tuple(describe_lengths(checkpoint))
        )
    choice = _choose(checkpoint, matches, preferred or Settings(), order_command)
    if isinstance(choice, NeedsInformationError):
        return choice
    resolved, chosen = choice
    exchanged = _exchanged(checkpoint, chosen, wanted)
    return resolved if exchanged is None else _ambiguous(checkpoint, [chosen, exchanged])


def _exchanged(checkpoint: Checkpoint, chosen: _Matched, wanted: Settings) -> _Matched | None:
    """What also matches if a name that ``chosen`` left out is in the place of another; None if nothing does."""
    for alternative in chosen.candidate.alternatives():
        candidate = replace(alternative, groups=chosen.candidate.groups)
        for units, assignments in _with_settings(checkpoint, candidate, wanted):
            for groups in assignments:
                result = match(checkpoint, units if groups is None else units.with_groups(groups))
                if isinstance(result, FlatMatch):
                    return _Matched(candidate, result)
    return None


def _with_settings(
    checkpoint: Checkpoint, candidate: Candidate, wanted: Settings
) -> Iterator[tuple[Units, Sequence[Groups | None]]]:
    """The units of ``candidate`` under every combination of unknown settings, each with every assignment of the
    optimizer's ids: one if the user lists them.
    """
    units = candidate.units
    if not units.units:
        return
    flags = (wanted.use_orig_params,) if wanted.use_orig_params is not None else (False, True)
    for use_orig_params in flags:
        if not use_orig_params and has_uneven_slices(checkpoint):
            continue
        for strategy, shard_size in _shardings(checkpoint, wanted):
            for param_dtype in _param_dtypes(units, use_orig_params=use_orig_params, wanted=wanted):
                configured = replace(
                    Settings(use_orig_params, strategy, param_dtype).applied_to(units), shard_size=shard_size
                )
                if candidate.groups is None:
                    yield configured, group_candidates(checkpoint, configured)
                    continue
                listed = regrouped(configured, candidate.groups)
                yield configured, [] if listed is None else [listed]


def _shardings(checkpoint: Checkpoint, wanted: Settings) -> Iterator[tuple[Strategy, int | None]]:
    """Strategy and sharding group, full groups first. A group of one rank is NO_SHARD, and so is every group in a world
    of one.
    """
    world_size = checkpoint.world_size
    sizes = possible_shard_sizes(checkpoint)
    whole = wanted.strategy if wanted.strategy is Strategy.SHARD_GRAD_OP else Strategy.FULL_SHARD
    fits = Settings(strategy=wanted.strategy, shard_size=wanted.shard_size)
    possible: list[tuple[Strategy, int | None]] = [(whole, None)] if world_size in sizes else []
    if world_size == 1 and wanted.strategy is not None:
        possible = [(wanted.strategy, wanted.shard_size)]
    if world_size > 1 and 1 in sizes:
        possible.append((Strategy.NO_SHARD, None))
    possible.extend((Strategy.HYBRID_SHARD, size) for size in sizes if 1 < size < world_size)
    if wanted.strategy is Strategy.HYBRID_SHARD and world_size in sizes:
        possible.append((Strategy.HYBRID_SHARD, world_size))
    for strategy, size in possible:
        if fits.strategy in (None, strategy) and fits.shard_size in (None, size):
            yield strategy, size


def _param_dtypes(units: Units, *, use_orig_params: bool, wanted: Settings) -> tuple[DType | None, ...]:
    """Dtypes that decide the alignment: the parameters' own, or one of a different size (half, single precision)."""
    if wanted.param_dtype is not None or not use_orig_params:
        return (wanted.param_dtype,)
    sizes = {unit.aligning_dtype.itemsize for unit in units.units}
    others = [DTYPES[name] for name in ("bfloat16", "float32") if {DTYPES[name].itemsize} != sizes]
    return (None, *others)


def _choose(
    checkpoint: Checkpoint, matches: list[_Matched], preferred: Settings, order_command: Callable[[], str | None]
) -> tuple[ResolvedUnits, _Matched] | NeedsInformationError:
    """The units of the only way to read the bytes that ``matches`` leave, with one of the matches that have it."""
    by_mapping: dict[object, list[_Matched]] = {}
    for matched in matches:
        by_mapping.setdefault(byte_mapping(checkpoint, matched.match), []).append(matched)
    groups = list(by_mapping.values())
    if len(groups) > 1 and preferred.options():
        fitting: list[list[_Matched]] = []
        for same in groups:
            fitting.append([matched for matched in same if preferred.fits(matched.match.units)])
        groups = list(filter(None, fitting))
    if len(groups) != 1:
        return _ambiguous(checkpoint, [same[0] for same in groups] or matches)
    (same,) = groups
    chosen = next((matched for matched in same if preferred.fits(matched.match.units)), same[0])
    if not chosen.candidate.ordered:
        reason = why_order_matters(checkpoint, chosen.match)
        if reason is not None:
            return order_unknown(checkpoint.source, reason, [chosen.candidate.label], command=order_command())
    kernels = possibly_channels_last(chosen.match.units) if chosen.match.keys or _splits(checkpoint) else []
    if kernels and not chosen.candidate.strides_known:
        return _without_strides(checkpoint, kernels)
    how = (chosen.candidate.label, *chosen.candidate.assumed, describe_settings(chosen.match.units))
    open_settings = differing_settings([matched.match.units for matched in same])
    return ResolvedUnits(chosen.match.units, chosen.match, how, open_settings), chosen


def _splits(checkpoint: Checkpoint) -> bool:
    return checkpoint.model is not None and any(map(is_flat_key, checkpoint.model.params))


def _without_strides(checkpoint: Checkpoint, kernels: list[str]) -> NeedsInformationError:
    return NeedsInformationError(
        f"cannot tell whether {checkpoint.source} is of a channels_last model",
        details=kernels,
        why="FSDP1 flattens the kernels of convolutions in memory order, and neither lengths nor shapes show it",
        next_step=f"add {flags.units('FILE')}: save_units and `fsdpckpt units --model` record the strides",
    )


_OPTIONS = {
    "use_orig_params": f"{flags.use_orig_params} or {flags.use_orig_params.off}",
    "strategy": f"{flags.strategy}",
    "shard_size": f"{flags.shard_size('N')}",
    "param_dtype": f"{flags.param_dtype('DTYPE')}",
}


def _ambiguous(checkpoint: Checkpoint, several: list[_Matched]) -> NeedsInformationError:
    differing = differing_settings([matched.match.units for matched in several])
    options = [_OPTIONS[name] for name in differing]
    if len({(matched.candidate.assumed, matched.match.units.groups) for matched in several}) > 1:
        options.append(f"{flags.parameters('FILE')} (the names of model.named_parameters(), one per line)")
    return NeedsInformationError(
        f"the units of {checkpoint.source} are ambiguous: {len(several)} candidates match every slice",
        details=list(dict.fromkeys(matched.description + _first_difference(matched, several) for matched in several)),
        why="slices of flat parameters carry no names, and these candidates would give different parameters",
        next_step="add " + ", or ".join([*options, f"{flags.units('FILE')}"]),
    )


def _first_difference(matched: _Matched, several: list[_Matched]) -> str:
    """The first optimizer key that stands for different parameters."""
    for key, name in matched.match.keys.items():
        if any(other.match.keys.get(key) != name for other in several):
            return f"; optimizer key {key} is {name}"
    return ""


def possibly_channels_last(units: Units) -> list[str]:
    """The parameters whose elements FSDP1 flattens in a different order if the model is channels_last.

    These are convolution kernels with several channels and several elements per channel. Names and shapes do not show
    the memory format; parameters with known strides are not listed.
    """
    params = [param for unit in units.units for param in unit.params]
    kernels = [param for param in params if len(param.shape) in (4, 5) and param.stride is None]
    return [param.name for param in kernels if param.shape[1] > 1 and prod(param.shape[2:]) > 1]


def why_order_matters(checkpoint: Checkpoint, match: FlatMatch) -> str | None:
    """Why the order of the parameters matters and is not proved; None if every order gives the same result.

    Only the order shows where parameters are in a flat parameter. States by name need no order; states by id are
    certain without one only if each id has the length of exactly one parameter.
    """
    units = match.units
    model = checkpoint.params
    flat = any(is_flat_key(key) for key in model) or (checkpoint.optim is not None and not units.use_orig_params)
    if flat:
        for unit in units.units:
            filled = [param for param in unit.params if param.numel]
            if len(filled) > 1:
                return f"{len(unit.params)} parameters are in {unit}"
    optim = checkpoint.optim
    if optim is None or optim.key_type != "id":
        return None
    if not units.use_orig_params:
        shards = Counter(layout.shard_numel for layout in match.layouts.values())
        return "several flat parameters are equally long" if max(shards.values()) > 1 else None
    params = units.params()
    times = Counter(param.numel for param in params.values())
    lengths = lengths_by_key(optim, checkpoint.world_size)
    for key, name in match.keys.items():
        numel = params[name].numel
        if times[numel] > 1:
            return f"several parameters have {numel:,} elements, {name} among them"
        if key not in lengths or int(lengths[key][: match.shard_size].sum()) != numel:
            return f"optimizer key {key} does not show how long its parameter {name} is"
    return None


_Row: TypeAlias = tuple[object, ...]


def byte_mapping(checkpoint: Checkpoint, match: FlatMatch) -> object:
    """Equal for two matches of ``checkpoint`` exactly when they read the same bytes as the same parameters."""
    units = match.units
    by_key = {unit.key: unit for unit in units.units}
    flat = {key: _flat(unit, match) for key, unit in by_key.items()}
    params, inside = units.params(), units.unit_of()
    keys = []
    for key, name in match.keys.items():
        if name in by_key:
            keys.append((key, flat[name]))
        elif name in inside:
            keys.append((key, (_slice(params[name], match),)))
        else:
            keys.append((key, ((name, params[name].shape),)))
    model = checkpoint.params
    split = {clean(key) for key in model if is_flat_key(key)}
    named = frozenset((key, flat[key]) for key in by_key if key in split)
    optim = checkpoint.optim
    whole = units.groups if optim is not None and optim.key_type == "id" and not match.flat_optimizer else None
    return (tuple(keys), whole, named, frozenset(units.shared))


def _flat(unit: Unit, match: FlatMatch) -> tuple[_Row, ...]:
    """Each parameter of a flat parameter; its position there matters only if there are others."""
    layout = match.layouts[unit.key]
    filled = [param for param in unit.params if param.numel]
    if len(filled) == 1:
        return (_slice(filled[0], match),)
    starts = layout.start.tolist()
    return tuple(
        (param.name, param.shape, param.order, start, layout.shard_numel, layout.shard_count)
        for param, start in zip(unit.params, starts, strict=True)
        if param.numel
    )


def _slice(param: Parameter, match: FlatMatch) -> _Row:
    counts = np.resize(match.counts[param.name], match.shard_size).astype(np.int64)
    return (param.name, param.shape, param.order, counts.tobytes(), match.shard_size)


def describe_settings(units: Units) -> str:
    """The settings in words, for messages: ``use_orig_params=True, full-shard, param_dtype bfloat16``."""
    strategies = dict.fromkeys(unit.strategy for unit in units.units)
    parts = [f"use_orig_params={units.use_orig_params}", ", ".join(strategy.value for strategy in strategies)]
    if units.shard_size is not None and Strategy.HYBRID_SHARD in strategies:
        parts[-1] += f" in groups of {units.shard_size} ranks"
    if units.use_orig_params:
        dtypes = dict.fromkeys(unit.aligning_dtype.name for unit in units.units)
        parts.append(f"aligned for {', '.join(dtypes)}")
    return ", ".join(parts)
