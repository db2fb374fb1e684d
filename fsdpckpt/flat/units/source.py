"""Finds the units of a flattened source (given, beside it, or inferred) and proves them by each rank's elements."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeAlias

from fsdpckpt import flags
from fsdpckpt.errors import (
    NeedsInformationError,
    SourceCorruptError,
    SourceUnsupportedError,
    UsageError,
    required,
    to_copy,
)
from fsdpckpt.flags import Flag
from fsdpckpt.flat.match import FlatMatch, Mismatch, match
from fsdpckpt.flat.names import UnitPrefixes, parameter_order, prefixes_of
from fsdpckpt.flat.slices import describe_lengths
from fsdpckpt.flat.units.architectures import BaseModel, units_command
from fsdpckpt.flat.units.build import Settings, build_units, expand_globs, layers_glob
from fsdpckpt.flat.units.candidates import Candidate, candidates
from fsdpckpt.flat.units.inference import Refusal, find_inferred
from fsdpckpt.flat.units.presence import is_flattened
from fsdpckpt.flat.units.request import (
    ResolvedUnits,
    UnitsRequest,
    find_disagreement,
    load_units,
    option_contradictions,
    reference_names,
    require_model_order,
)
from fsdpckpt.flat.units.target import target_units
from fsdpckpt.flat.units.target_names import separate_buffers
from fsdpckpt.ir.checkpoint import Checkpoint, Layout
from fsdpckpt.ir.listing import Listing
from fsdpckpt.ir.sections import main_alone
from fsdpckpt.ir.tensors import Tensor
from fsdpckpt.ir.units import Units
from fsdpckpt.layouts.flattened import is_flat_key
from fsdpckpt.readers.detect import open_checkpoint
from fsdpckpt.storage.sources import Sources
from fsdpckpt.text import plural
from fsdpckpt.transform.listings import model_names, optimizer_names, unwrapped_names
from fsdpckpt.transform.units_beside import units_beside_unreadable

_SAVED = f"give the units file that save_units wrote in the job that saved this: {flags.units('FILE')}"

UnitsUnknown: TypeAlias = NeedsInformationError | SourceCorruptError | SourceUnsupportedError
"""Why the units of a source are not known: the error, for whoever needs them."""


def source_units(
    checkpoint: Checkpoint, request: UnitsRequest, sources: Sources, *, target_flattened: bool = False
) -> ResolvedUnits:
    """``find_source_units``. Raises the error if that is the answer."""
    return required(find_source_units(checkpoint, request, sources, target_flattened=target_flattened))


def find_source_units(
    checkpoint: Checkpoint, request: UnitsRequest, sources: Sources, *, target_flattened: bool = False
) -> ResolvedUnits | UnitsUnknown:
    """The units of a flattened source, proved by the number of elements of every slice. An error for units that
    contradict the checkpoint, if several units match or an option is needed, and for a parameter with the name of a
    flat parameter.

    ``target_flattened``: ``request`` describes the target, and the source only if no units are beside the source.
    Raises UsageError for options that match nothing, SourceError for files they name that cannot be read.
    """
    unusable = _only_called_flat(checkpoint) or _units_beside_unusable(checkpoint, request)
    if unusable is not None:
        return unusable
    beside = checkpoint.units
    if beside is not None and beside.flat and (target_flattened or request.file is None):
        source_request = UnitsRequest() if target_flattened else request
        return _given_units(
            checkpoint, beside, checkpoint.origin.units_from or "beside the checkpoint", source_request, sources
        )
    units = load_units(request.file, sources, request.sections) if request.file is not None else None
    if request.file is None or units is None or not units.flat:
        return _infer_units(checkpoint, request, sources, target_flattened=target_flattened)
    of_other_ranks = units.world_size not in (None, checkpoint.world_size) and not units.orders
    if target_flattened or (of_other_ranks and not request.options()):
        return find_units_like(checkpoint, units, request.file, sources)
    return _given_units(checkpoint, units, request.file, request, sources)


def _only_called_flat(checkpoint: Checkpoint) -> SourceUnsupportedError | None:
    """The error for a parameter that has the name of a flat parameter, and is none."""
    for key, leaf in checkpoint.params.items():
        if is_flat_key(key) and isinstance(leaf, Tensor) and leaf.ndim != 1:
            return SourceUnsupportedError(
                f"{checkpoint.source}: the parameter {key} has the name of an FSDP1 flat parameter, and is none",
                file=checkpoint.source,
                key=key,
                expected="a vector",
                found=f"shape {list(leaf.shape)}",
                why="fsdpckpt recognises flat parameters by this name, which FSDP1 keeps for them",
                next_step="save the model with another name for this parameter",
            )
    return None


def _units_beside_unusable(
    checkpoint: Checkpoint, request: UnitsRequest
) -> NeedsInformationError | SourceCorruptError | None:
    """The error if units files are beside ``checkpoint``, none of them is used, and no option names one."""
    if request.file is not None:
        return None
    if checkpoint.units is None and checkpoint.origin.units_from:
        return NeedsInformationError(
            f"several different units files are beside {checkpoint.source}",
            details=checkpoint.origin.units_from.split(", "),
            why="each describes a different model or wrapping, and only one can be this checkpoint's",
            next_step=f"name the one that belongs to it: {flags.units('FILE')}",
        )
    return units_beside_unreadable(checkpoint)


def _given_units(
    checkpoint: Checkpoint, units: Units, label: str, request: UnitsRequest, sources: Sources
) -> ResolvedUnits | NeedsInformationError | SourceCorruptError:
    """Units from a file, with the settings from options applied; proved or refused."""
    requested = request.applied_to(units)
    result = match(checkpoint, requested)
    settings = [f"{option}" for option in request.options()]
    if isinstance(result, Mismatch) and settings and isinstance(match(checkpoint, units), FlatMatch):
        raise UsageError(
            f"{', '.join(settings)}: that is not how {checkpoint.source} was saved",
            details=result.contradictions,
            why=f"without these options, the units of {label} match every slice",
            next_step=f"drop {' and '.join(settings)}",
        )
    if isinstance(result, Mismatch) and result.undivided is not None:
        return NeedsInformationError(
            f"cannot tell which parameters each optimizer of {checkpoint.source} has: {result.undivided}",
            file=checkpoint.source,
            why="they list their parameters by id, and parameters with equally long slices look alike",
            next_step='give units that save_units(model, {"NAME": optimizer, ...}) wrote with all optimizers, by the '
            f"names that `fsdpckpt inspect` lists, or save_units(model, optimizer) with one: {flags.units('FILE')}",
            alternative="save each optimizer by name: FSDP.optim_state_dict(model, optimizer)",
        )
    if isinstance(result, Mismatch):
        return SourceCorruptError(
            f"the units of {label} are not those of {checkpoint.source}",
            details=result.contradictions,
            why="they belong to a different model, wrapping or run, rank files were mixed up, HYBRID_SHARD sharded "
            "over ranks that are not neighbours, or the optimizers of the ranks list their parameters in other orders",
            next_step=_SAVED,
            file=label,
        )
    of_model = checkpoint.optim is None
    disagreement = find_disagreement(requested, request, sources, f"the units of {label}", of_model=of_model)
    return disagreement or ResolvedUnits(result.units, result, (f"units: from {label}",))


def find_units_like(
    checkpoint: Checkpoint, units: Units, label: str, sources: Sources
) -> ResolvedUnits | NeedsInformationError | SourceCorruptError:
    """The units of another checkpoint of the model, if nothing gives those of this one: they may have other settings
    and ranks, if the slices prove them; the error that says why not, if they do not.
    """
    if isinstance(match(checkpoint, units), FlatMatch):
        return _given_units(checkpoint, units, label, UnitsRequest(), sources)
    # Its number of ranks is the target's; the source's own lengths prove its ranks and sharding groups.
    wrapping = Candidate(replace(units, world_size=None), f"units: names and wrapping from {label}", strides_known=True)
    result = find_inferred(checkpoint, [wrapping], wanted=Settings())
    if isinstance(result, Refusal):  # the unchanged file gives the better message
        return _given_units(checkpoint, units, label, UnitsRequest(), sources)
    return result


# Nothing lies beside the source, and no units file was given.


def _infer_units(
    checkpoint: Checkpoint, request: UnitsRequest, sources: Sources, *, target_flattened: bool
) -> ResolvedUnits | NeedsInformationError | SourceCorruptError:
    listed = _parameter_names(checkpoint, request, sources)
    if isinstance(listed, NeedsInformationError):
        return listed
    # An optimizer's own names have no buffers among them that a glob could match.
    names = separate_buffers(listed, request.buffers, all_match=False)
    prefixes = _unit_prefixes(checkpoint, request, names, sources, target_flattened=target_flattened)
    if isinstance(prefixes, NeedsInformationError):
        return prefixes
    result = find_inferred(
        checkpoint,
        candidates(
            checkpoint,
            names,
            prefixes,
            parameters=request.parameters,
            parameter_groups=request.parameter_groups,
        ),
        wanted=Settings() if target_flattened else request,
        preferred=request,
        order_command=lambda: units_command(request.reference, checkpoint.source, sources),
    )
    if isinstance(result, Refusal):
        command = None if names.ordered else units_command(request.reference, checkpoint.source, sources)
        return _refused_error(checkpoint, names, prefixes, result, command)
    if isinstance(result, NeedsInformationError):
        return result
    # --unit was compared with the checkpoint, or describes the target.
    compared = replace(request, globs=())
    disagreement = find_disagreement(result.units, compared, sources, f"what {checkpoint.source} shows of its units")
    if disagreement is not None:
        return disagreement
    order_known = names.in_model_order or request.parameters is not None
    return result if order_known else replace(result, order_known=False)


def _parameter_names(
    checkpoint: Checkpoint, request: UnitsRequest, sources: Sources
) -> Listing | NeedsInformationError:
    """Names, shapes and order: the checkpoint's own if they are ordered, else those of the reference. An error if there
    are none.
    """
    lists = [model_names(checkpoint, "the model section"), optimizer_names(checkpoint, "the optimizer's own names")]
    if request.reference is not None:
        lists.append(reference_names(request.reference, request.sections, sources))
    lists.append(_recorded_names(checkpoint, request, sources))
    available = [names for names in lists if names is not None]
    if not available:
        listed = parameter_order(checkpoint)
        what = f"no units file says what each flat parameter of {checkpoint.source} contains"
        if listed:
            what = (
                f"{checkpoint.source} names {plural(len(listed), 'parameter')} of flat parameters, without their shapes"
            )
        return NeedsInformationError(
            what,
            details=describe_lengths(checkpoint),
            most_shown=5,
            why="PyTorch does not save names and shapes with them, and there is no units file beside the checkpoint",
            next_step=f"add {flags.reference('PATH')} of a full or sharded checkpoint of this model, or "
            f"{flags.units('FILE')}: save_units writes one in the job, and `fsdpckpt units --config DIR --wrap CLASS` "
            "makes one from the directory of a Hugging Face model",
        )
    best = next((names for names in available if names.ordered and names.in_model_order), None)
    best = best or next((names for names in available if names.ordered), available[0])
    if (best.ordered and best.in_model_order) or request.parameters is not None:
        return best
    return best.reordered(parameter_order(checkpoint), "the checkpoint's own names")


def _recorded_names(checkpoint: Checkpoint, request: UnitsRequest, sources: Sources) -> Listing | None:
    """What a units file says of a model that had no units: names, shapes and order. None without such a file."""
    if request.file is not None:
        units = load_units(request.file, sources, request.sections)
        return None if units is None or units.flat else unwrapped_names(units, request.file)
    if checkpoint.units is None or checkpoint.units.flat:
        return None
    return unwrapped_names(checkpoint.units, checkpoint.origin.units_from or "the units file beside the checkpoint")


def _unit_prefixes(
    checkpoint: Checkpoint,
    request: UnitsRequest,
    names: Listing,
    sources: Sources,
    *,
    target_flattened: bool,
) -> UnitPrefixes | NeedsInformationError:
    """The prefixes that the checkpoint shows, else those of ``--unit``; both must agree. An error if there are none."""
    shown = prefixes_of(checkpoint)
    if shown is None and not request.globs:
        options = (
            f"add {flags.unit('GLOB')} (repeatable) for the wrapped modules, for example "
            f"{flags.unit(layers_glob(param.name for param in names.params))} ({flags.unit('none')} when only the root "
            f"was wrapped), or {flags.units('FILE')}"
        )
        command = units_command(request.reference, checkpoint.source, sources) if not names.ordered else None
        return NeedsInformationError(
            f"{checkpoint.source} does not say which modules were FSDP units",
            details=describe_lengths(checkpoint),
            most_shown=5,
            why="a raw optimizer.state_dict() has neither unit names nor param_names, and wrapping is never guessed",
            next_step=options if command is None else to_copy(f"make a units file, then add {flags.units}", command),
            alternative=None if command is None else options,
        )
    if shown is not None and (not request.globs or target_flattened):
        return shown
    expanded = expand_globs(request.globs, [param.name for param in names.params])
    label = " ".join(f"{flags.unit(glob)}" for glob in request.globs)
    return _agreed_prefixes(checkpoint, shown, UnitPrefixes(("", *expanded), complete=False, label=label), flags.unit)


def _agreed_prefixes(
    checkpoint: Checkpoint, shown: UnitPrefixes | None, wanted: UnitPrefixes, option: Flag
) -> UnitPrefixes:
    """``wanted``, of ``option``, and what the checkpoint shows, with which it must agree. Raises UsageError."""
    if shown is None:
        return wanted
    given = set(wanted.prefixes)
    # An optimizer that was not given a frozen unit does not name it; flat parameters name all.
    unknown = sorted(given - {"", *shown.prefixes}) if shown.exact else []
    absent = sorted(set(shown.prefixes) - given)
    if unknown or absent:
        raise UsageError(
            f"{option} names other units than {checkpoint.source} has",
            details=[
                *(f"{prefix} is not a unit according to {shown.label}" for prefix in unknown),
                *(f"{prefix} is a unit according to {shown.label}, and no {option} matches it" for prefix in absent),
            ],
            next_step=f"give {option} for each class that the training job wrapped"
            if option == flags.wrap
            else f"drop {flags.unit}: the checkpoint names its units itself",
        )
    more = [prefix for prefix in wanted.prefixes if prefix not in shown.prefixes]
    return replace(shown, prefixes=(*shown.prefixes, *more))


def _refused_error(
    checkpoint: Checkpoint,
    names: Listing,
    prefixes: UnitPrefixes,
    refusal: Refusal,
    command: str | None = None,
) -> NeedsInformationError:
    """``command``: what makes a units file from the base model whose names do not have the order of the model."""
    options = (
        f"correct what is wrong above with {flags.unit('GLOB')}, {flags.reference('PATH')} or "
        f"{flags.parameters('FILE')}, or {_SAVED}"
    )
    if command is not None:
        return NeedsInformationError(
            f"the units of {checkpoint.source} cannot be inferred: the names of {names.source} are sorted",
            why="flat parameters follow model.parameters(), which weight files do not keep",
            next_step=to_copy(f"make a units file, then add {flags.units}", command),
            alternative=options,
        )
    return NeedsInformationError(
        f"the units of {checkpoint.source} cannot be inferred: names from {names.source}, units from {prefixes.label}",
        details=[f"nearest: {refusal.nearest}", *refusal.contradictions],
        why="the names are those of a different model, units were left out, or rank files were mixed up; or the job "
        "used settings that were not tried",
        next_step=options,
    )


def find_units(checkpoint: Checkpoint, request: UnitsRequest, sources: Sources) -> ResolvedUnits:
    """The units of any checkpoint, those of its main model. For one that is not flattened, ``request`` must say how the
    model was wrapped.

    Raises what ``source_units`` and ``target_units`` raise, NeedsInformationError if none of several models is the main
    one.
    """
    _require_main_section(checkpoint)
    checkpoint = main_alone(checkpoint)
    if is_flattened(checkpoint, sources, request):
        resolved = source_units(checkpoint, request, sources)
        require_model_order(resolved, checkpoint.source)
        return replace(resolved, how=(*resolved.how, *(resolved.match.proved if resolved.match is not None else ())))
    resolved = target_units(checkpoint, request, None, None, sources)
    return replace(resolved, how=tuple(line.removeprefix("target ") for line in resolved.how))


def _require_main_section(checkpoint: Checkpoint) -> None:
    if checkpoint.model is not None or checkpoint.optim is not None or not checkpoint.named:
        return
    manifest = checkpoint.origin.manifest
    recorded = manifest is not None and any(named.units is not None for named in checkpoint.named)
    raise NeedsInformationError(
        f"{checkpoint.source} has several models or optimizers, and a units file describes one",
        details=[named.label for named in checkpoint.named],
        file=checkpoint.source,
        why="none of them is the main one",
        next_step=f"its {flags.units(manifest.path)} has the units of each"
        if recorded and manifest is not None
        else f"make a checkpoint of one first: fsdpckpt convert with {flags.only(checkpoint.named[0].label)}",
    )


def units_of_base(
    base: BaseModel, classes: Sequence[str], request: UnitsRequest, source: str | None, sources: Sources
) -> ResolvedUnits:
    """The units of ``base`` with ``classes`` wrapped.

    ``source``: a checkpoint of the model; a flattened one decides dtypes and the settings that ``request`` leaves open,
    and its slices prove the units. Raises NeedsInformationError if several settings match, SourceCorruptError if none
    does, UsageError for classes that the model or the checkpoint does not have.
    """
    prefixes = base.prefixes(classes)
    how = (f"names and shapes: {base.names.source}", f"wrapped: {prefixes.label}, and the root")
    checkpoint = None if source is None else open_checkpoint(source, sources=sources)
    if checkpoint is None or checkpoint.layout is not Layout.FLATTENED:
        units = build_units(base.names.params, prefixes.prefixes, request, shared=base.names.shared)
        dtypes = ", ".join(dict.fromkeys(param.dtype.name for param in base.names.params))
        assumed = [f"{dtypes}, as in the base model: {flags.from_('SRC')} takes the dtype of a flattened checkpoint"]
        if request.use_orig_params is None:
            assumed.append(
                f"use_orig_params=False, FSDP's own default: add {flags.use_orig_params} if the training sets it"
            )
        proved = () if source is None else prove(units, source, sources)
        return ResolvedUnits(units, None, (*how, *assumed, *proved))
    agreed = _agreed_prefixes(checkpoint, prefixes_of(checkpoint), prefixes, flags.wrap)
    result = find_inferred(checkpoint, candidates(checkpoint, base.names, agreed), wanted=request)
    if isinstance(result, NeedsInformationError):
        raise result
    if isinstance(result, Refusal):
        raise _refused_error(checkpoint, base.names, agreed, result)
    proved = result.match.proved if result.match is not None else ()
    return replace(result, how=(*how, *result.how[1:], *proved))


def prove(units: Units, source: str, sources: Sources) -> tuple[str, ...]:
    """What the checkpoint at ``source`` confirms of ``units``, for messages.

    A flattened checkpoint confirms the number of elements of every slice, any other one names and shapes. Raises
    SourceCorruptError, which lists everything that contradicts the units, and SourceError.
    """
    checkpoint = open_checkpoint(source, sources=sources)
    if checkpoint.layout is not Layout.FLATTENED:
        wrong: Sequence[str] = option_contradictions(units, UnitsRequest(reference=source), sources)
        proved: tuple[str, ...] = (f"names and shapes are those of {source}; its units do not show there",)
    else:
        result = match(checkpoint, units)
        wrong, proved = (result.contradictions, ()) if isinstance(result, Mismatch) else ((), result.proved)
    if wrong:
        raise SourceCorruptError(
            f"the units of the model are not those of {source}",
            details=wrong,
            why="the checkpoint is of a different model, or was saved with other classes wrapped, or with a different "
            "use_orig_params, strategy or MixedPrecision.param_dtype",
            next_step=f"give {flags.wrap}, {flags.use_orig_params}/{flags.use_orig_params.off}, {flags.strategy} and "
            f"{flags.param_dtype} as the training script does",
            file=source,
        )
    return proved
