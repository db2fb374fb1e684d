"""Shows flat parameters by name where no conversion asks for it: for ``inspect``, ``diff``, ``verify`` and ``open``.

Without any help slices stay slices, and a note says what would name them. Options, and the other side of a comparison,
are help: its recorded units, or its names and shapes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from fsdpckpt.errors import NeedsInformationError, SourceCorruptError, SourceError, SourceUnsupportedError, required
from fsdpckpt.flat.unflatten import name_slices
from fsdpckpt.flat.units.presence import is_flattened
from fsdpckpt.flat.units.request import ResolvedUnits, UnitsRequest, of_same_section
from fsdpckpt.flat.units.sections import labels_of, request_of_section
from fsdpckpt.flat.units.source import UnitsUnknown, find_source_units, find_units_like
from fsdpckpt.ir.checkpoint import Checkpoint, NamedSection, Note, Problem, Section
from fsdpckpt.ir.invariants import problems
from fsdpckpt.ir.sections import alone, main_alone
from fsdpckpt.storage.sources import Sources
from fsdpckpt.transform.listings import model_names, optimizer_names

NOTHING_GIVEN = UnitsRequest()


def logical(
    checkpoint: Checkpoint,
    sources: Sources,
    request: UnitsRequest = NOTHING_GIVEN,
    *,
    other: Checkpoint | None = None,
    listing: bool = False,
) -> Checkpoint:
    """Turn slices into whole tensors by name, if the units of ``checkpoint`` are known.

    They are known from ``request``, from a file beside the checkpoint, or by what its own model section or ``other``,
    the checkpoint that it is compared with, proves. If they are not, the slices stay unchanged, with a note on what
    would name them. Raises SourceError if units contradict the checkpoint, NeedsInformationError if ``request`` gives
    something and it is not enough. ``listing``: for a caller that lists problems and compares replicas itself;
    contradictions to the units beside the checkpoint are then added to its problems.
    """
    if other is not None and checkpoint.units is not None and checkpoint.units.flat and request.file is None:
        request = NOTHING_GIVEN  # what is given is for the other side
    main = _settled(main_alone(checkpoint), sources=sources, request=request, other=other, listing=listing)
    if not checkpoint.named:
        return main
    ledger = main.ledger
    sections: list[NamedSection] = []
    for section in checkpoint.named:
        view = alone(checkpoint, section)
        own = view if section.section is Section.MODEL else replace(view, model=None)
        if not is_flattened(own, sources, request):
            sections.append(section)
            continue
        settled = _settled(
            view,
            sources=sources,
            request=request_of_section(request, checkpoint, section, sources),
            other=other if other is None else of_same_section(other, labels_of(checkpoint, section)),
            listing=listing,
        )
        added = [note for note in settled.ledger.notes if note not in ledger.notes]
        ledger = ledger.with_notes(*(replace(note, message=f"{section.label}: {note.message}") for note in added))
        of_slices = {section.problem(problem) for problem in problems(view)}
        content = settled.model if section.section is Section.MODEL else settled.optim
        unnamed = content is section.content
        known = tuple(problem for problem in ledger.problems if unnamed or problem not in of_slices)
        ledger = replace(ledger, problems=(*known, *map(section.problem, settled.problems)))
        sections.append(replace(section, content=section.content if content is None else content))
    return replace(main, named=tuple(sections), beside=checkpoint.beside, ledger=ledger)


def _settled(
    checkpoint: Checkpoint, *, sources: Sources, request: UnitsRequest, other: Checkpoint | None, listing: bool
) -> Checkpoint:
    """``logical`` for a checkpoint without named sections."""
    if not is_flattened(checkpoint, sources, request):
        return checkpoint
    if checkpoint.units is None and checkpoint.origin.units_refused and request == NOTHING_GIVEN:
        return _unnamed(checkpoint, "the units file beside it cannot be used")
    resolved = _find_units(checkpoint, request, other, sources)
    if isinstance(resolved, ResolvedUnits):
        return _with_names(checkpoint, resolved, sources, listing=listing)
    if isinstance(resolved, NeedsInformationError) and request == NOTHING_GIVEN:
        return _unnamed(checkpoint, resolved.what)
    if isinstance(resolved, SourceCorruptError) and request == NOTHING_GIVEN and listing:
        return _with_problems(checkpoint, resolved)
    raise resolved


def _with_names(checkpoint: Checkpoint, resolved: ResolvedUnits, sources: Sources, *, listing: bool) -> Checkpoint:
    """``checkpoint`` with whole tensors in place of slices, whose units are ``resolved``."""
    try:
        named = name_slices(checkpoint, resolved, sources, replicas=not listing)
    except SourceUnsupportedError as error:  # blocks of which no parameter has whole ones
        message = "; ".join((error.what, *error.details[:1]))
        return _unnamed(checkpoint, message)
    except SourceCorruptError as error:
        if not listing:
            raise
        return _with_problems(checkpoint, error)
    # A problem of slices appears again, under a parameter's name, in the tensors made of them.
    of_slices = set(problems(checkpoint))
    others = tuple(problem for problem in named.problems if problem not in of_slices)
    return replace(named, ledger=replace(named.ledger, problems=others))


def _unnamed(checkpoint: Checkpoint, why: str) -> Checkpoint:
    """``checkpoint``, whose slices nothing names, so that nothing proves that they are complete."""
    return checkpoint.noted(Note("unnamed", f"optimizer state stays keyed by id: {why}", for_verify=True))


def require_comparable(a: Checkpoint, b: Checkpoint, request: UnitsRequest, sources: Sources) -> None:
    """Raises NeedsInformationError if only one of both is in slices of flat parameters that nothing names: a slice and
    a whole tensor are never the same, and do not differ either.
    """
    in_slices = [is_flattened(each, sources, request) for each in (a, b)]
    if in_slices[0] == in_slices[1]:
        return
    sliced, whole = (a, b) if in_slices[0] else (b, a)
    found = _find_units(sliced, request, whole, sources)
    if isinstance(found, NeedsInformationError):
        raise NeedsInformationError(
            f"{sliced.source} holds slices of flat parameters and {whole.source} whole tensors, and they cannot be "
            f"matched: {found.what}",
            details=found.details,
            why=found.why,
            next_step=found.next_step,
        )
    required(found)


def _find_units(
    checkpoint: Checkpoint, request: UnitsRequest, other: Checkpoint | None, sources: Sources
) -> ResolvedUnits | UnitsUnknown:
    """The units of ``checkpoint``: as ``request`` says, else with what ``other`` says. The last error, if neither says
    enough.
    """
    found = find_source_units(checkpoint, request, sources)
    if not isinstance(found, NeedsInformationError):
        return found
    for with_help in _with_help_of(checkpoint, request, other, sources):
        if isinstance(with_help, ResolvedUnits):
            return with_help
        if isinstance(with_help, NeedsInformationError):
            found = with_help  # what is still missing; any other error is of one that belongs to another model
    return found


def _with_help_of(
    checkpoint: Checkpoint, request: UnitsRequest, other: Checkpoint | None, sources: Sources
) -> Iterator[ResolvedUnits | UnitsUnknown]:
    """What comes of the units, and of the names, of ``other``. Nothing of one that has its names from its own units or
    from options: what is at its path alone has none.
    """
    if other is None:
        return
    if other.units is not None and other.units.flat and request.file is None:
        yield find_units_like(checkpoint, other.units, other.origin.units_from or other.source, sources)
    named = model_names(other, other.source) or optimizer_names(other, other.source)
    if named is not None and request.reference is None:
        try:
            with_names = find_source_units(checkpoint, replace(request, reference=other.source), sources)
        except NeedsInformationError as error:
            yield error
        except SourceError:  # no reference
            return
        else:
            yield with_names


def _with_problems(checkpoint: Checkpoint, error: SourceCorruptError) -> Checkpoint:
    """``checkpoint`` with one problem for each item that ``error`` lists."""
    added = [Problem("units", f"{error.what}: {detail}", file=error.file) for detail in error.details]
    added = added or [Problem("units", error.what, file=error.file)]
    return checkpoint.with_problems(*added)
