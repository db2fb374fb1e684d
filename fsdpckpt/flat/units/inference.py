"""Settles by proof what a flattened checkpoint does not say of its units.

Every reading of the names (``unit_wrappings``) is tried with every setting (``use_orig_params``, alignment, sharding
group, the optimizer's ids). Those that no length contradicts survive. When all survivors read the same bytes as the
same parameters, that is the answer; otherwise nothing is chosen, and the error says what settles it.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from fsdpckpt.errors import NeedsInformationError
from fsdpckpt.flat.match import FlatMatch, match
from fsdpckpt.flat.slice_lengths import is_flat_key
from fsdpckpt.flat.units.build import with_settings
from fsdpckpt.flat.units.doubts import memory_doubt, order_doubt
from fsdpckpt.flat.units.ids import group_candidates
from fsdpckpt.flat.units.lengths import lengths_said, possible_groups, uneven
from fsdpckpt.flat.units.readings import reads, settings_said
from fsdpckpt.flat.units.wrappings import Wrapping
from fsdpckpt.ir.checkpoint import Checkpoint
from fsdpckpt.ir.dtypes import DTYPES, DType
from fsdpckpt.ir.units import Strategy, Units

__all__ = ["Inferred", "Refusal", "Wanted", "infer"]


@dataclass(frozen=True, slots=True)
class Wanted:
    """Settings that are known; None where they are to be found out."""

    use_orig_params: bool | None = None
    strategy: Strategy | None = None
    param_dtype: DType | None = None
    shard_size: int | None = None

    def fits(self, units: Units) -> bool:
        """Whether ``units`` have these settings."""
        strategies = {unit.strategy for unit in units.units}
        return (
            self.use_orig_params in (None, units.use_orig_params)
            and (self.strategy is None or strategies <= {self.strategy})
            and (self.param_dtype is None or {unit.param_dtype for unit in units.units} <= {self.param_dtype})
            and self.shard_size in (None, units.shard_size)
        )


@dataclass(frozen=True, slots=True, eq=False)
class Inferred:
    """The units that are proved. ``unsettled``: settings that make no difference to the bytes, so none is proved."""

    units: Units
    match: FlatMatch
    how: tuple[str, ...]
    unsettled: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Refusal:
    """Nothing fits. ``nearest`` says in words which reading comes closest, ``contradictions`` all against it."""

    nearest: str
    contradictions: tuple[str, ...]


@dataclass(frozen=True, slots=True, eq=False)
class _Survivor:
    wrapping: Wrapping
    match: FlatMatch

    @property
    def said(self) -> str:
        return "; ".join((*self.wrapping.assumed, settings_said(self.match.units)))


def infer(
    checkpoint: Checkpoint, wrappings: Iterable[Wrapping], *, wanted: Wanted, preferred: Wanted | None = None
) -> Inferred | Refusal:
    """The one answer that the lengths in ``checkpoint`` allow, or what contradicts the nearest.

    ``wrappings``: lower tiers first; those of a higher one are not looked at when something fits.
    ``preferred`` decides between several that fit, where the caller has reason to expect these settings. Raises
    NeedsInformationError when several fit that read the same bytes differently, or an order is not certain.
    """
    survivors: list[_Survivor] = []
    nearest: Refusal | None = None
    distance = 0
    for wrapping in wrappings:
        if survivors and wrapping.tier > survivors[-1].wrapping.tier:
            break
        for units, candidates in _settled(checkpoint, wrapping.units, wanted):
            said = "; ".join((*wrapping.assumed, settings_said(units)))
            if not candidates:
                nearest = nearest or Refusal(said, ("the optimizer's states have other shapes than the parameters",))
            for groups in candidates:
                found = match(checkpoint, units if groups is None else replace(units, groups=groups))
                if isinstance(found, FlatMatch):
                    survivors.append(_Survivor(wrapping, found))
                elif nearest is None or len(found.contradictions) + found.unread < distance:
                    nearest, distance = Refusal(said, found.contradictions), len(found.contradictions) + found.unread
    if not survivors:
        return nearest or Refusal("no reading of the names at all", tuple(lengths_said(checkpoint)))
    return _answer(checkpoint, survivors, preferred or Wanted())


def _settled(
    checkpoint: Checkpoint, units: Units, wanted: Wanted
) -> Iterator[tuple[Units, Sequence[tuple[tuple[str, ...], ...] | None]]]:
    """``units`` under every setting that is not known, each with every assignment of the optimizer's ids."""
    if not units.units:
        return
    flags = (wanted.use_orig_params,) if wanted.use_orig_params is not None else (False, True)
    for use_orig_params in flags:
        if not use_orig_params and uneven(checkpoint):
            continue
        for strategy, shard_size in _shardings(checkpoint, wanted):
            for param_dtype in _param_dtypes(units, use_orig_params=use_orig_params, wanted=wanted):
                settled = replace(
                    with_settings(units, use_orig_params=use_orig_params, strategy=strategy, param_dtype=param_dtype),
                    shard_size=shard_size,
                )
                yield settled, group_candidates(checkpoint, settled)


def _shardings(checkpoint: Checkpoint, wanted: Wanted) -> Iterator[tuple[Strategy, int | None]]:
    """Strategy and sharding group, full groups first. A group of one rank is NO_SHARD, and all of one rank's are."""
    world_size = checkpoint.world_size
    sizes = possible_groups(checkpoint)
    whole = wanted.strategy if wanted.strategy is Strategy.SHARD_GRAD_OP else Strategy.FULL_SHARD
    fits = Wanted(strategy=wanted.strategy, shard_size=wanted.shard_size)
    found: list[tuple[Strategy, int | None]] = [(whole, None)] if world_size in sizes else []
    if world_size == 1 and wanted.strategy is not None:
        found = [(wanted.strategy, wanted.shard_size)]
    if world_size > 1 and 1 in sizes:
        found.append((Strategy.NO_SHARD, None))
    found.extend((Strategy.HYBRID_SHARD, size) for size in sizes if 1 < size < world_size)
    if wanted.strategy is Strategy.HYBRID_SHARD and world_size in sizes:
        found.append((Strategy.HYBRID_SHARD, world_size))
    for strategy, size in found:
        if fits.strategy in (None, strategy) and fits.shard_size in (None, size):
            yield strategy, size


def _param_dtypes(units: Units, *, use_orig_params: bool, wanted: Wanted) -> tuple[DType | None, ...]:
    """What decides the alignment: the parameters' own dtype, or one of another size (half and single precision)."""
    if wanted.param_dtype is not None or not use_orig_params:
        return (wanted.param_dtype,)
    sizes = {(unit.param_dtype or unit.params[0].dtype).itemsize for unit in units.units}
    others = [DTYPES[name] for name in ("bfloat16", "float32") if {DTYPES[name].itemsize} != sizes]
    return (None, *others)


def _answer(checkpoint: Checkpoint, survivors: list[_Survivor], preferred: Wanted) -> Inferred:
    classes: dict[object, list[_Survivor]] = {}
    for survivor in survivors:
        classes.setdefault(reads(checkpoint, survivor.match), []).append(survivor)
    if len(classes) > 1:
        liked = {key: [one for one in held if preferred.fits(one.match.units)] for key, held in classes.items()}
        classes = {key: held for key, held in liked.items() if held} if preferred != Wanted() else classes
    if len(classes) != 1:
        raise _ambiguous(checkpoint, [held[0] for held in classes.values()] or survivors)
    (same,) = classes.values()
    chosen = next((one for one in same if preferred.fits(one.match.units)), same[0])
    if not chosen.wrapping.ordered:
        doubt = order_doubt(checkpoint, chosen.match)
        if doubt is not None:
            raise _unordered(checkpoint, chosen, doubt)
    kernels = memory_doubt(chosen.match.units) if chosen.match.keys or _splits(checkpoint) else []
    if kernels and not chosen.wrapping.strided:
        raise _unstrided(checkpoint, kernels)
    how = (chosen.wrapping.label, *chosen.wrapping.assumed, settings_said(chosen.match.units))
    return Inferred(chosen.match.units, chosen.match, how, _differing([one.match.units for one in same]))


def _splits(checkpoint: Checkpoint) -> bool:
    return checkpoint.model is not None and any(map(is_flat_key, checkpoint.model.params))


def _unstrided(checkpoint: Checkpoint, kernels: list[str]) -> NeedsInformationError:
    return NeedsInformationError(
        f"whether {checkpoint.source} is of a channels_last model is not known",
        details=kernels,
        why="FSDP1 flattens the kernels of convolutions in memory order, and neither lengths nor shapes show it",
        next_step="add --units FILE: save_units and `fsdpckpt units --model` record the strides",
    )


def _differing(many: list[Units]) -> tuple[str, ...]:
    """The settings in which these units differ."""
    columns: dict[str, list[Hashable]] = {
        "use_orig_params": [units.use_orig_params for units in many],
        "strategy": [tuple(unit.strategy for unit in units.units) for units in many],
        "shard_size": [units.shard_size for units in many],
        "param_dtype": [tuple(unit.param_dtype for unit in units.units) for units in many],
    }
    return tuple(name for name, values in columns.items() if len(set(values)) > 1)


_OPTIONS = {
    "use_orig_params": "--use-orig-params or --no-use-orig-params",
    "strategy": "--strategy",
    "shard_size": "--shard-size N",
    "param_dtype": "--param-dtype DTYPE",
}


def _ambiguous(checkpoint: Checkpoint, several: list[_Survivor]) -> NeedsInformationError:
    options = [_OPTIONS[name] for name in _differing([one.match.units for one in several])]
    if len({(one.wrapping.assumed, one.match.units.groups) for one in several}) > 1:
        options.append("--parameters FILE (the names of model.named_parameters(), one a line)")
    said = list(dict.fromkeys(one.said + _first_difference(one, several) for one in several))
    return NeedsInformationError(
        f"the units of {checkpoint.source} are not certain: {len(several)} readings fit the lengths of all slices",
        details=said,
        why="slices of flat parameters carry no names, and these readings would give different parameters",
        next_step="add " + ", or ".join([*options, "--units FILE"]),
    )


def _first_difference(one: _Survivor, several: list[_Survivor]) -> str:
    """The first optimizer key that is another parameter elsewhere."""
    for key, name in one.match.keys.items():
        if any(other.match.keys.get(key) != name for other in several):
            return f"; optimizer key {key} is {name}"
    return ""


def _unordered(checkpoint: Checkpoint, chosen: _Survivor, doubt: str) -> NeedsInformationError:
    return NeedsInformationError(
        f"the order of the parameters in {checkpoint.source} is not certain: {doubt}",
        details=[chosen.wrapping.label],
        why="the names come from where keys are sorted (safetensors, some DCP directories), and lengths do not show "
        "which of two parameters comes first",
        next_step="add --parameters FILE (the names of model.named_parameters(), one a line), --reference PATH of a "
        "checkpoint that PyTorch wrote, or --units FILE",
    )
