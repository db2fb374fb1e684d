"""The units of a flattened target: given, the source's, or made of names and ``--unit``; checked by what is written."""

from __future__ import annotations

from dataclasses import replace

from fsdpckpt.converters.units_request import (
    FoundUnits,
    UnitsRequest,
    against,
    load_units,
    overridden,
    reference_names,
)
from fsdpckpt.errors import NeedsInformationError, SourceCorruptError, UsageError
from fsdpckpt.ir.checkpoint import Checkpoint
from fsdpckpt.ir.dtypes import DType
from fsdpckpt.ir.units import Strategy, Units
from fsdpckpt.ir.units_flaws import flaws
from fsdpckpt.planner.unit_agreement import contradictions, listed_names
from fsdpckpt.planner.unit_build import Settings, build_units, grouped
from fsdpckpt.planner.unit_globs import expand
from fsdpckpt.planner.unit_names import NamedParam, NameList, model_names, optimizer_names, units_names
from fsdpckpt.planner.unit_order import memory_doubt
from fsdpckpt.storage.sources import Sources

__all__ = ["target_units"]

_SHOWN = 12


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
    units, how = _wrapping(checkpoint, request, source, sources)
    units = _sharding(overridden(units, request), request, world_size)
    units = replace(units, world_size=world_size, groups=_groups(units, checkpoint))
    wrong = [*contradictions(units, checkpoint, dtype=dtype), *against(units, request, sources)]
    if wrong:
        raise SourceCorruptError(
            f"the units do not describe the model of {checkpoint.source}",
            details=wrong,
            why="they are those of another model, or of another version of this one",
            next_step="give this model's: --units FILE (save_units or `fsdpckpt units` makes one)",
            file=request.file,
        )
    _require_possible(units)
    return FoundUnits(units, None, (how, *_said(units, request)))


def _wrapping(
    checkpoint: Checkpoint, request: UnitsRequest, source: FoundUnits | Units | None, sources: Sources
) -> tuple[Units, str]:
    """Which parameters lie in which unit, and where that comes from."""
    if request.file is not None:
        return load_units(request.file, sources), f"target units: from {request.file}"
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
    names = units_names(own, label) if own is not None else _names(checkpoint, request, sources)
    prefixes = {"", *expand(request.globs, [param.name for param in names.params])}
    settings = Settings(own.use_orig_params if own is not None else bool(request.use_orig_params))
    units = build_units(
        names.params,
        prefixes,
        settings,
        unmanaged=[param.name for param in names.params if param.managed is False],
        shared=names.shared,
    )
    if own is not None and own.units:
        first = own.units[0]
        kept = UnitsRequest(strategy=first.strategy, param_dtype=first.param_dtype, shard_size=own.shard_size)
        units = overridden(units, kept)
    _require_order(units, names)
    return units, f"target units: names from {names.label}, wrapping from --unit {' --unit '.join(request.globs)}"


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


# Names of a source that is not flattened.


def _names(checkpoint: Checkpoint, request: UnitsRequest, sources: Sources) -> NameList:
    """The parameters in the order of ``model.parameters()``. Raises NeedsInformationError when they are not certain."""
    own = model_names(checkpoint, "the model section")
    if own is None:
        own = optimizer_names(checkpoint, "the optimizer's own names")
    chosen = own
    if request.reference is not None and (own is None or not own.ordered):
        chosen = _with_reference(own, reference_names(request.reference, sources))
    if chosen is None:
        raise NeedsInformationError(
            f"{checkpoint.source} has no names and shapes to make units of",
            next_step="add --units FILE, or --reference PATH of a full or sharded checkpoint of this model",
        )
    if request.parameters is not None:
        return _explicit(chosen, request.parameters, checkpoint)
    return _settled(chosen, checkpoint)


def _with_reference(own: NameList | None, reference: NameList) -> NameList:
    """The reference's names and order, with the dtypes and what else the checkpoint itself says of them."""
    held = {param.name: param for param in own.params} if own is not None else {}
    params = tuple(
        replace(param, dtype=held[param.name].dtype, stride=held[param.name].stride or param.stride)
        if param.name in held
        else param
        for param in reference.params
        if own is None or param.name in held
    )
    return replace(reference, params=params)


def _explicit(names: NameList, order: tuple[str, ...], checkpoint: Checkpoint) -> NameList:
    """Exactly the parameters that ``--parameters`` lists; a managed name that it lacks can only be a shared one."""
    held = {param.name: param for param in names.params}
    absent = [name for name in order if name not in held]
    if absent:
        raise SourceCorruptError(
            f"--parameters lists names that {checkpoint.source} does not have",
            details=absent[:_SHOWN],
            next_step="--parameters FILE with the names of model.named_parameters(), one a line",
        )
    listed, shared = set(order), list(names.shared)
    for name, param in held.items():
        if param.managed and name not in listed:
            first = [one for one in order if held[one].shape == param.shape and held[one].dtype == param.dtype]
            if len(first) != 1:
                raise NeedsInformationError(
                    f"{name} is a parameter that --parameters does not list, so it is a shared one",
                    details=[f"it may be {one}" for one in first[:_SHOWN]],
                    next_step="add --units FILE, which says what is shared",
                )
            shared.append((name, first[0]))
    params = tuple(replace(held[name], managed=held[name].managed is not False) for name in order)
    return replace(names, params=params, ordered=True, label=f"{names.label} and --parameters", shared=tuple(shared))


def _settled(names: NameList, checkpoint: Checkpoint) -> NameList:
    """Only the parameters; what may be a parameter or a buffer, frozen or shared, raises NeedsInformationError."""
    optim = checkpoint.optim
    by_name = optim is not None and optim.key_type == "name"
    trained = {name for group in listed_names(optim) for name in group} if optim is not None and by_name else set()
    if optim is not None and by_name:
        trained |= {str(key) for key in optim.state}
    params: list[NamedParam] = []
    open_: list[str] = []
    for param in names.params:
        if param.name in trained:
            params.append(replace(param, managed=param.managed is not False))
        elif param.managed and not trained:
            params.append(param)
        elif param.managed:
            alike = next((one.name for one in params if one.name in trained and one.shape == param.shape), None)
            if alike is not None:
                open_.append(f"{param.name} has no optimizer state: it may be frozen, or shared with {alike}")
            params.append(replace(param, requires_grad=False))
        elif param.possible:
            open_.append(f"{param.name} may be a parameter or a buffer")
    if open_:
        raise NeedsInformationError(
            f"{checkpoint.source} does not say enough of {len(open_)} of its names to make units of them",
            details=[*open_[:_SHOWN], *([f"... and {len(open_) - _SHOWN} more"] if len(open_) > _SHOWN else [])],
            why="a flat parameter holds every parameter once, frozen ones too, and no buffer",
            next_step="add --parameters FILE (the names of model.named_parameters(), one a line), or --units FILE",
        )
    return replace(names, params=tuple(params))


def _require_order(units: Units, names: NameList) -> None:
    crowded = [unit for unit in units.units if len(unit.params) > 1]
    if names.ordered or not crowded:
        return
    raise NeedsInformationError(
        f"the order of the parameters is not known: {names.label} has them in no order of the model's",
        details=[f"unit {unit.prefix!r} has {len(unit.params)} parameters" for unit in crowded[:_SHOWN]],
        why="safetensors files and some DCP directories sort their keys, and a flat parameter is all about order",
        next_step="add --parameters FILE (the names of model.named_parameters(), one a line), --reference PATH of a "
        "checkpoint that PyTorch wrote, or --units FILE",
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
                "--shard-size does not divide --world-size", expected=f"a divisor of {world_size}", found=str(size)
            )
        raise NeedsInformationError(
            f"sharding groups of {size} ranks, as the units have, do not divide {world_size} ranks",
            next_step="add --shard-size N, or --strategy full-shard",
        )
    return units


def _groups(units: Units, checkpoint: Checkpoint) -> tuple[tuple[str, ...], ...] | None:
    """The optimizer's groups under these units: as recorded, else as the checkpoint's groups list the parameters."""
    if units.groups is not None or checkpoint.optim is None or checkpoint.optim.key_type == "id":
        return units.groups
    names = listed_names(checkpoint.optim)
    return grouped(units, names) if names else None


def _require_possible(units: Units) -> None:
    wrong = flaws(units)
    if wrong:
        raise UsageError(
            "FSDP1 cannot wrap this model so",
            details=wrong,
            why="the parameters of one flat parameter have one dtype, and with use_orig_params=False one requires_grad",
            next_step="wrap it another way (--unit GLOB or --units FILE), or add --use-orig-params",
        )


def _said(units: Units, request: UnitsRequest) -> list[str]:
    strategies = ", ".join(dict.fromkeys(unit.strategy.value for unit in units.units))
    said = [f"use_orig_params={units.use_orig_params}, {strategies}"]
    plain = [unit for unit in units.units if unit.param_dtype is None]
    if units.use_orig_params and plain and request.file is None:
        dtypes = ", ".join(dict.fromkeys(unit.params[0].dtype.name for unit in plain))
        said.append(f"aligned for {dtypes}: pass --param-dtype if MixedPrecision.param_dtype is used")
    kernels = memory_doubt(units)
    if kernels and request.globs:
        said.append(f"{len(kernels)} kernels are taken for row-major: channels_last models need --units FILE")
    return said
