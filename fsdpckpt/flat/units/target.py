"""The units of a flattened target: given, the source's, or made of names and ``--unit``; checked by what is written."""

from __future__ import annotations

from dataclasses import replace

from fsdpckpt.errors import NeedsInformationError, SourceCorruptError, UsageError
from fsdpckpt.flat.units.agreement import contradictions, listed_names
from fsdpckpt.flat.units.build import Settings, build_units, grouped
from fsdpckpt.flat.units.doubts import memory_doubt
from fsdpckpt.flat.units.globs import expand
from fsdpckpt.flat.units.names import units_names
from fsdpckpt.flat.units.readings import settings_said
from fsdpckpt.flat.units.request import (
    FoundUnits,
    UnitsRequest,
    load_units,
    overridden,
    require_agreement,
    require_order,
)
from fsdpckpt.flat.units.target_names import require_known_order, target_names
from fsdpckpt.ir.checkpoint import Checkpoint
from fsdpckpt.ir.dtypes import DType
from fsdpckpt.ir.units import Strategy, UnitParam, Units, flaws
from fsdpckpt.storage.sources import Sources
from fsdpckpt.transform.parameter_order import from_param_names

__all__ = ["target_units"]


def target_units(
    checkpoint: Checkpoint,
    request: UnitsRequest,
    source: FoundUnits | Units | None,
    world_size: int | None,
    sources: Sources,
    *,
    dtype: DType | None = None,
) -> FoundUnits:
    """The units of a flattened target of ``checkpoint`` (whole tensors, its optimizer keyed by name).

    ``source``: the units of a flattened source, whose wrapping is kept where ``request`` does not say another.
    ``dtype``: what the model section is cast to. Raises NeedsInformationError when wrapping or ``use_orig_params`` are
    not known, SourceCorruptError when the units are those of another model, UsageError for what FSDP1 cannot wrap.
    """
    wrapped, how = _wrapping(checkpoint, request, source, sources)
    units = wrapped
    if dtype is not None and request.file is None and checkpoint.model is not None:
        units = _cast(units, dtype)
    units = _sharding(overridden(units, request), request, world_size)
    units = replace(units, world_size=world_size, groups=_groups(units, checkpoint))
    _require_description(units, checkpoint, request, dtype)
    said = f"the units of {request.file}" if request.file is not None else "the target's units"
    require_agreement(units, request, sources, said)
    _require_possible(units)
    # With use_orig_params=False nothing is aligned, so that nothing shows how it would be.
    aligned = wrapped.use_orig_params and any((request.file, source, checkpoint.units))
    return FoundUnits(units, None, (how, *_said(units, request, aligned=aligned)))


def _wrapping(
    checkpoint: Checkpoint, request: UnitsRequest, source: FoundUnits | Units | None, sources: Sources
) -> tuple[Units, str]:
    """Which parameters lie in which unit, and where that comes from."""
    if request.file is not None:
        return load_units(request.file, sources), f"target units: from {request.file}"
    if isinstance(source, FoundUnits):
        require_order(source, checkpoint.source)
    own, unsettled = (source.units, source.unsettled) if isinstance(source, FoundUnits) else (source, ())
    label = "the source's units"
    if own is None and checkpoint.units is not None:
        own, label = checkpoint.units, f"the units of {checkpoint.units_from}"
    if own is not None and request.use_orig_params is None and "use_orig_params" in unsettled:
        raise _which_parameters(checkpoint, "the source's bytes are the same with both")
    if own is not None and not request.globs:
        return own, f"target units: {label}"
    if not request.globs:
        raise NeedsInformationError(
            f"nothing says which modules of {checkpoint.source} become FSDP units",
            why="wrapping is never guessed: another wrapping gives other files",
            next_step="add --units FILE (save_units or `fsdpckpt units` makes one), or --unit GLOB (repeatable) for "
            "the wrapped modules, for example --unit 'model.layers.*' (--unit none when only the root is wrapped)",
        )
    if own is None and request.use_orig_params is None:
        raise _which_parameters(checkpoint, "the source is not flattened")
    names = units_names(own, label) if own is not None else target_names(checkpoint, request, sources)
    prefixes = {"", *expand(request.globs, [param.name for param in names.params])}
    settings = Settings(own.use_orig_params if own is not None else bool(request.use_orig_params))
    units = build_units(
        names.params,
        prefixes,
        settings,
        unmanaged=[param.name for param in names.params if param.sharded is False],
        shared=names.shared,
    )
    if own is not None and own.units:
        first = own.units[0]
        kept = UnitsRequest(strategy=first.strategy, param_dtype=first.param_dtype, shard_size=own.shard_size)
        units = overridden(units, kept)
    require_known_order(units, names, checkpoint)
    return units, f"target units: names from {names.label}, wrapping from --unit {' --unit '.join(request.globs)}"


def _require_description(units: Units, checkpoint: Checkpoint, request: UnitsRequest, dtype: DType | None) -> None:
    wrong = contradictions(units, checkpoint, dtype=dtype)
    if not wrong:
        return
    listed = request.file is None and request.parameters is not None
    raise SourceCorruptError(
        f"the units do not describe the model of {checkpoint.source}",
        details=wrong,
        why="they have the names and the order of --parameters"
        if listed
        else "they are those of another model, or of another version of this one",
        next_step="write the names of model.named_parameters() into the file of --parameters, one a line, in that order"
        if listed
        else "give this model's: --units FILE (save_units or `fsdpckpt units` makes one)",
        file=request.file,
    )


def _cast(units: Units, dtype: DType) -> Units:
    """The same with the dtype that a cast gives its floating parameters: it decides how they are aligned."""

    def cast(params: tuple[UnitParam, ...]) -> tuple[UnitParam, ...]:
        return tuple(replace(param, dtype=dtype) if param.dtype.floating else param for param in params)

    changed = tuple(replace(unit, params=cast(unit.params)) for unit in units.units)
    return replace(units, units=changed, unmanaged=cast(units.unmanaged))


def _which_parameters(checkpoint: Checkpoint, why: str) -> NeedsInformationError:
    return NeedsInformationError(
        f"nothing says whether the job that loads {checkpoint.source} uses use_orig_params",
        details=[
            "use_orig_params=False: states by flat parameter",
            "use_orig_params=True: states by parameter, aligned",
        ],
        why=why,
        next_step="add --use-orig-params or --no-use-orig-params",
    )


# Settings.


def _sharding(units: Units, request: UnitsRequest, world_size: int | None) -> Units:
    """The sharding group settled: HYBRID_SHARD needs its size, every other strategy has none."""
    hybrid = any(unit.strategy is Strategy.HYBRID_SHARD for unit in units.units)
    if request.shard_size is not None and not hybrid:
        raise UsageError(
            "--shard-size is the size of a sharding group, which only hybrid-shard has",
            next_step="add --strategy hybrid-shard, or drop --shard-size",
        )
    if hybrid and units.shard_size is None:
        raise NeedsInformationError(
            "hybrid-shard shards within groups of ranks, and nothing says how many ranks a group has",
            next_step="add --shard-size N (usually the GPUs of one node)",
        )
    size = units.shard_size
    if size is not None and world_size is not None and world_size % size:
        if request.shard_size is not None:
            raise UsageError(
                f"--shard-size {size} does not divide the {world_size} ranks of the target",
                why="every sharding group has as many ranks",
                next_step="--shard-size with one of "
                + ", ".join(str(one) for one in range(2, world_size + 1) if world_size % one == 0),
            )
        raise NeedsInformationError(
            f"sharding groups of {size} ranks, as the units have, do not divide {world_size} ranks",
            next_step="add --shard-size N, or --strategy full-shard",
        )
    return units


def _groups(units: Units, checkpoint: Checkpoint) -> tuple[tuple[str, ...], ...] | None:
    """The optimizer's groups under these units: as recorded, else as the checkpoint's groups list the parameters.

    Their order is that of ``model.parameters()``, unless ``param_names`` state the optimizer's own.
    """
    if units.groups is not None or checkpoint.optim is None or checkpoint.optim.key_type == "id":
        return units.groups
    names = listed_names(checkpoint.optim)
    found = grouped(units, names) if names else None
    if found is None or not units.use_orig_params:
        return found
    told = from_param_names(checkpoint.optim, units.parameters)
    groups = told.groups if told is not None else None
    same = groups is not None and [set(group) for group in groups] == [set(group) for group in found]
    return groups if same else found


def _require_possible(units: Units) -> None:
    wrong = flaws(units)
    if wrong:
        raise UsageError(
            "FSDP1 cannot wrap this model so",
            details=wrong,
            why="the parameters of one flat parameter have one dtype, and with use_orig_params=False one requires_grad",
            next_step="wrap it another way (--unit GLOB or --units FILE), or add --use-orig-params",
        )


def _said(units: Units, request: UnitsRequest, *, aligned: bool) -> list[str]:
    """``aligned``: the alignment is recorded in a file, or proved by the source's own slices."""
    said = [settings_said(units)]
    if units.use_orig_params and not aligned and any(unit.param_dtype is None for unit in units.units):
        said.append("nothing says which MixedPrecision.param_dtype the job uses, if any: --param-dtype says it")
    kernels = memory_doubt(units)
    if kernels and request.globs:
        said.append(f"{len(kernels)} kernels are taken for row-major: channels_last models need --units FILE")
    return said
