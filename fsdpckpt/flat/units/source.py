"""The units of a flattened source: given, beside it, or inferred; proved by the elements that each rank holds."""

from __future__ import annotations

from dataclasses import replace

from fsdpckpt.errors import NeedsInformationError, SourceCorruptError, UsageError
from fsdpckpt.flat.match import FlatMatch, Mismatch, match
from fsdpckpt.flat.units.globs import expand
from fsdpckpt.flat.units.inference import Inferred, Refusal, Wanted, infer
from fsdpckpt.flat.units.lengths import lengths_said
from fsdpckpt.flat.units.names import NameList, model_names, optimizer_names
from fsdpckpt.flat.units.prefixes import Prefixes, parameter_order, prefixes_of
from fsdpckpt.flat.units.request import (
    ORDER,
    FoundUnits,
    UnitsRequest,
    load_units,
    overridden,
    reference_names,
    require_agreement,
    settings_given,
)
from fsdpckpt.flat.units.wrappings import Wrapping, wrappings
from fsdpckpt.ir.checkpoint import Checkpoint
from fsdpckpt.ir.units import Units
from fsdpckpt.storage.sources import Sources

__all__ = ["source_units"]

_SAVED = "give the units file that save_units wrote in the job that saved this: --units FILE"


def source_units(
    checkpoint: Checkpoint, request: UnitsRequest, sources: Sources, *, target_flattened: bool = False
) -> FoundUnits:
    """The units of a flattened source, proved by the number of elements of every slice.

    ``target_flattened``: ``request`` describes the target, and the source only where nothing lies beside the source.
    Raises SourceCorruptError for units that contradict the checkpoint, NeedsInformationError when several units fit or
    something has to be given.
    """
    beside = checkpoint.units
    if beside is not None and (target_flattened or request.file is None):
        asked = UnitsRequest() if target_flattened else request
        return _given(checkpoint, beside, checkpoint.units_from or "beside the checkpoint", asked, sources)
    if beside is None and checkpoint.units_from and request.file is None:
        raise NeedsInformationError(
            f"several units files that differ lie beside {checkpoint.source}",
            details=checkpoint.units_from.split(", "),
            why="each describes another model or another wrapping, and only one can be this checkpoint's",
            next_step="name the one that belongs to it: --units FILE",
        )
    if request.file is None:
        return _inferred(checkpoint, request, sources, target_flattened=target_flattened)
    units = load_units(request.file, sources)
    if target_flattened:
        return _serving_both(checkpoint, units, request.file, sources)
    return _given(checkpoint, units, request.file, request, sources)


def _given(checkpoint: Checkpoint, units: Units, label: str, request: UnitsRequest, sources: Sources) -> FoundUnits:
    """Units from a file, with the options' settings on top; proved or refused."""
    asked = overridden(units, request)
    found = match(checkpoint, asked)
    settings = settings_given(request)
    if isinstance(found, Mismatch) and settings and isinstance(match(checkpoint, units), FlatMatch):
        raise UsageError(
            f"{', '.join(settings)}: that is not how {checkpoint.source} was saved",
            details=found.contradictions,
            why=f"the units of {label} as they stand fit the lengths of all its slices",
            next_step=f"drop {' and '.join(settings)}",
        )
    if isinstance(found, Mismatch):
        raise SourceCorruptError(
            f"the units of {label} are not those of {checkpoint.source}",
            details=found.contradictions,
            why="they belong to another model, another wrapping or another run, rank files were mixed up, or the "
            "optimizers of the ranks list their parameters in different orders",
            next_step=_SAVED,
            file=label,
        )
    require_agreement(asked, request, sources, f"the units of {label}")
    return FoundUnits(found.units, found, (f"units: from {label}",))


def _serving_both(checkpoint: Checkpoint, units: Units, label: str, sources: Sources) -> FoundUnits:
    """The target's file, where nothing says what the source's units are: its settings may be others, if proved."""
    if isinstance(match(checkpoint, units), FlatMatch):
        return _given(checkpoint, units, label, UnitsRequest(), sources)
    # Its ranks are the target's; how many the source has, and how they share, its own lengths prove.
    wrapping = Wrapping(replace(units, world_size=None), f"units: names and wrapping from {label}", strided=True)
    found = infer(checkpoint, [wrapping], wanted=Wanted())
    if isinstance(found, Refusal):  # the file as it stands makes the better message
        return _given(checkpoint, units, label, UnitsRequest(), sources)
    return _found(found)


def _found(found: Inferred) -> FoundUnits:
    return FoundUnits(found.units, found.match, found.how, found.unsettled)


# Nothing lies beside the source, and no units file was given.


def _inferred(checkpoint: Checkpoint, request: UnitsRequest, sources: Sources, *, target_flattened: bool) -> FoundUnits:
    names = _names(checkpoint, request, sources)
    prefixes = _prefixes(checkpoint, request, names, target_flattened=target_flattened)
    asked = Wanted(request.use_orig_params, request.strategy, request.param_dtype, request.shard_size)
    found = infer(
        checkpoint,
        wrappings(checkpoint, names, prefixes, parameters=request.parameters),
        wanted=Wanted() if target_flattened else asked,
        preferred=asked,
    )
    if isinstance(found, Refusal):
        raise _refused(checkpoint, names, prefixes, found)
    # --unit was held against what the checkpoint shows, or describes the target.
    require_agreement(found.units, replace(request, globs=()), sources, f"what {checkpoint.source} shows of its units")
    if names.of_model or request.parameters is not None:
        return _found(found)
    return replace(_found(found), unsettled=(*found.unsettled, ORDER))


def _names(checkpoint: Checkpoint, request: UnitsRequest, sources: Sources) -> NameList:
    """Names, shapes and order: the checkpoint's own where they are ordered, else those of the reference."""
    lists = [model_names(checkpoint, "the model section"), optimizer_names(checkpoint, "the optimizer's own names")]
    if request.reference is not None:
        lists.append(reference_names(request.reference, sources))
    known = [names for names in lists if names is not None]
    if not known:
        raise NeedsInformationError(
            f"{checkpoint.source} holds flat parameters, and nothing says which parameters lie in them",
            details=lengths_said(checkpoint),
            why="PyTorch does not save names and shapes with them, and " + _beside(checkpoint),
            next_step="add --units FILE (save_units or `fsdpckpt units` makes one), or --reference PATH of a full or "
            "sharded checkpoint of this model",
        )
    best = next((names for names in known if names.ordered and names.of_model), None)
    best = best or next((names for names in known if names.ordered), known[0])
    if (best.ordered and best.of_model) or request.parameters is not None:
        return best
    return best.reordered(parameter_order(checkpoint), "the checkpoint's own names")


def _beside(checkpoint: Checkpoint) -> str:
    """What a user who knows of a units file there has to be told."""
    unused = [note.message for note in checkpoint.notes if note.kind == "units-unreadable"]
    return "; ".join(unused) if unused else "no units file lies beside the checkpoint"


def _prefixes(checkpoint: Checkpoint, request: UnitsRequest, names: NameList, *, target_flattened: bool) -> Prefixes:
    """The prefixes that the checkpoint shows, else those of ``--unit``; both must agree."""
    shown = prefixes_of(checkpoint)
    if shown is None and not request.globs:
        raise NeedsInformationError(
            f"{checkpoint.source} does not say which modules were FSDP units",
            details=lengths_said(checkpoint),
            why="a raw optimizer.state_dict() has neither unit names nor param_names, and wrapping is never guessed",
            next_step="add --unit GLOB (repeatable) for the wrapped modules, for example --unit 'model.layers.*' "
            "(--unit none when only the root was wrapped), or --units FILE",
        )
    if shown is None:
        return Prefixes(
            ("", *_expanded(request, names)), complete=False, label=f"--unit {' --unit '.join(request.globs)}"
        )
    if not request.globs or target_flattened:
        return shown
    given = {"", *_expanded(request, names)}
    # An optimizer that was not given a frozen unit does not name it; flat parameters name all.
    unknown = sorted(given - {"", *shown.prefixes}) if shown.exact else []
    absent = sorted(set(shown.prefixes) - given)
    if unknown or absent:
        raise UsageError(
            f"--unit names other units than {checkpoint.source} has",
            details=[
                *(f"{one} is no unit by {shown.label}" for one in unknown),
                *(f"{one} is a unit by {shown.label}, and no --unit matches it" for one in absent),
            ],
            next_step="drop --unit: the checkpoint names its units itself",
        )
    more = [one for one in _expanded(request, names) if one not in shown.prefixes]
    return replace(shown, prefixes=(*shown.prefixes, *more))


def _expanded(request: UnitsRequest, names: NameList) -> tuple[str, ...]:
    return expand(request.globs, [param.name for param in names.params])


def _refused(checkpoint: Checkpoint, names: NameList, prefixes: Prefixes, refusal: Refusal) -> NeedsInformationError:
    return NeedsInformationError(
        f"the units of {checkpoint.source} cannot be inferred: names from {names.label}, units from {prefixes.label}",
        details=[f"nearest: {refusal.nearest}", *refusal.contradictions],
        why="the names are those of another model, units were left out, or rank files were mixed up; or the job used "
        "settings that were not tried",
        next_step=f"give what is wrong above with --unit GLOB, --reference PATH or --parameters FILE, or {_SAVED}",
    )
