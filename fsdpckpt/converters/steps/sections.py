"""Takes the same steps for every model and every optimizer: the main ones, and each named one like the only one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from fsdpckpt import flags
from fsdpckpt.converters.steps.draft import Draft, Step
from fsdpckpt.converters.steps.knowledge import Knowledge
from fsdpckpt.converters.steps.unused import note_unused
from fsdpckpt.converters.target.decision import Decision
from fsdpckpt.errors import FsdpckptError, NeedsInformationError
from fsdpckpt.flat.units.presence import is_flattened
from fsdpckpt.flat.units.request import UnitsRequest
from fsdpckpt.flat.units.sections import places_of, request_of_section
from fsdpckpt.ir import Layout
from fsdpckpt.ir.checkpoint import Checkpoint, ModelState, NamedSection, Note, Section
from fsdpckpt.ir.names import clean
from fsdpckpt.ir.optimizer import Optimizer
from fsdpckpt.ir.sections import alone, main_alone, model_of
from fsdpckpt.ir.tensors import Tensor
from fsdpckpt.transform.selection import NoKeyMatchesError, none_left, parameter_names

if TYPE_CHECKING:  # few conversions need maps
    from fsdpckpt.maps import AppliedMap


def each_section(draft: Draft, decision: Decision, steps: Sequence[Step]) -> Draft:
    """Take ``steps`` for the main sections, and for each named one that the target holds like them.

    Raises what they raise; UsageError for an option that applies to no section at all.
    """
    opened = draft.checkpoint
    if not opened.named or decision.options.only is not None:
        with_beside = _with_named_beside(opened, draft.knowledge, decision)
        only = take(steps, replace(draft, checkpoint=with_beside, opened=with_beside), decision)
        return note_unused(only, [only])
    # Each optimizer lists some of the parameters: what one says of a model, all sections know.
    shares_lists = decision.layout is not Layout.FULL and opened.layout is not Layout.FLATTENED
    source = _with_listed_parameters(draft, decision) if shares_lists else opened
    taken = _sections_to_flatten(source, draft) if decision.layout is Layout.FLATTENED else source.named
    main = take(steps, _begun(draft, source, None, decision), decision)
    done = [_take_section(steps, draft, decision, source, section) for section in taken]
    sections = [main, *done]
    _require_matches(sections, taken)
    rest = replace(source, model=None, optim=None) if main.left_out else main.checkpoint
    joined = _joined(rest, source, dict(zip(taken, done, strict=True)))
    whole = replace(main, checkpoint=joined, applied_maps=_first_applied(sections))
    used = [flags.buffers] if shares_lists else []  # to know the parameters that the optimizers list
    return _promoted(note_unused(whole, sections, used))


def _first_applied(sections: Sequence[Draft]) -> tuple[AppliedMap, ...]:
    """What the maps did to the first of ``sections`` that they apply to."""
    return next((each.applied_maps for each in sections if each.applied_maps), ())


def _sections_to_flatten(opened: Checkpoint, draft: Draft) -> tuple[NamedSection, ...]:
    """The named sections of ``opened`` that a flattened target holds as flat parameters: each model that FSDP1 wraps,
    with its optimizers.

    A flattened source shows which ones these are. Of any other it wraps what is trained: the main model, and those that
    have an optimizer, all of them if nothing has one. An average of weights stays whole.
    """
    models = [
        named.content if isinstance(named.content, ModelState) else model_of(opened, named) for named in opened.named
    ]
    by_model = list(zip(models, opened.named, strict=True))
    wrapped: list[ModelState | None] = [opened.model] if opened.model is not None else []
    if opened.layout is Layout.FLATTENED:
        request = draft.knowledge.request
        wrapped += [model for model, each in by_model if is_flattened(alone(opened, each), draft.sources, request)]
    elif opened.model is None and not opened.has(Section.OPTIM):
        wrapped += models
    else:
        wrapped += [model for model, each in by_model if each.section is Section.OPTIM]
    return tuple(named for model, named in by_model if any(model is each for each in wrapped))


def _take_section(
    steps: Sequence[Step], draft: Draft, decision: Decision, opened: Checkpoint, section: NamedSection
) -> Draft:
    """``take`` for ``section``, which an error names."""
    try:
        return take(steps, _begun(draft, opened, section, decision), decision)
    except FsdpckptError as error:
        error.what = f"{section.label}: {error.what}"
        if isinstance(error, NeedsInformationError) and error.alternative is None:
            place = places_of(opened, section)[-1]
            error.alternative = (
                f"take one section at a time: {flags.only(section.label)}; a name in the file of {flags.parameters} "
                f"is for one section alone if it begins with its keys: {place}.NAME"
            )
        raise


def take(steps: Sequence[Step], draft: Draft, decision: Decision) -> Draft:
    """``draft`` after all ``steps``."""
    for step in steps:
        draft = step(draft, decision)
        if draft.left_out:
            break
    return draft


def _begun(draft: Draft, opened: Checkpoint, section: NamedSection | None, decision: Decision) -> Draft:
    """The draft of ``section`` alone, None for the main ones. The model of an optimizer only says what its ids are: it
    has nothing that could be lost.
    """
    view = main_alone(opened) if section is None else alone(opened, section)
    for_ids = section is not None and section.section is Section.OPTIM and view.model is not None
    if for_ids and view.model is not None:
        view = replace(view, model=ModelState(view.model.params))
    knowledge = draft.knowledge.of(request_of_section(draft.knowledge.request, opened, section, draft.sources))
    view = _with_named_beside(view, knowledge, decision)
    return replace(
        draft,
        checkpoint=view,
        opened=view,
        knowledge=knowledge,
        places=places_of(opened, section),
        model_for_ids=for_ids,
        one_of_several=True,
    )


def _with_named_beside(view: Checkpoint, knowledge: Knowledge, decision: Decision) -> Checkpoint:
    """``view`` whose other optimizers of its model are keyed by name, where something proves the names. They say which
    parameters are trained, and no flat parameter has others too.
    """
    if decision.layout is not Layout.FLATTENED or view.layout is Layout.FLATTENED:
        return view
    beside: list[Optimizer] = []
    for each in view.beside:
        named = knowledge.find_named(replace(view, optim=each, beside=()))
        proved = None if isinstance(named, FsdpckptError) else named.optim
        beside.append(each if proved is None else proved)
    return replace(view, beside=tuple(beside))


def _joined(main: Checkpoint, opened: Checkpoint, done: Mapping[NamedSection, Draft]) -> Checkpoint:
    """``main`` with what became of each named section of ``opened``, and with the notes on it. Those that are not in
    ``done`` stay as they are.
    """
    notes = list(main.ledger.notes)
    lacking = dict.fromkeys(main.lacking)
    named: list[NamedSection] = []
    files = list(main.files)
    for section in opened.named:
        draft = done.get(section)
        if draft is None:
            named.append(section)
            notes.append(_left_whole(section))
            continue
        if draft.left_out:
            notes.append(Note("dropped", f"{flags.include} and {flags.exclude} leave nothing of {section.label}"))
            continue
        of_model = section.section is Section.MODEL
        content = draft.checkpoint.model if of_model else draft.checkpoint.optim
        if content is not None:
            made = draft.checkpoint.files[len(opened.files) :]  # zeros, and numbers that a map repeats
            content = _in_files(content, len(opened.files), len(files))
            files += made
            named.append(replace(section, content=content, units=draft.units, written_keys=draft.key_type))
        added = [note for note in draft.checkpoint.ledger.notes if note not in notes]
        notes += [replace(note, message=f"{section.label}: {note.message}") for note in added]
        lacking.update(dict.fromkeys(draft.checkpoint.lacking))
    ledger = replace(main.ledger, notes=tuple(notes))
    return replace(main, files=tuple(files), named=tuple(named), ledger=ledger, lacking=tuple(lacking))


def _in_files(content: ModelState | Optimizer, first: int, moved_to: int) -> ModelState | Optimizer:
    """``content`` of a section whose steps have made files from number ``first`` on, which are ``moved_to`` now: each
    section counts its own after those of the source.
    """

    def renumbered(tensor: Tensor) -> Tensor:
        numbers = tensor.chunks.file
        made = numbers >= first
        if not made.any():
            return tensor
        return replace(tensor, chunks=replace(tensor.chunks, file=np.where(made, numbers + moved_to - first, numbers)))

    return content if first == moved_to else content.map_tensors(renumbered)


def _require_matches(done: Sequence[Draft], sections: Sequence[NamedSection] = ()) -> None:
    """Raises the error of an option that applied to none of ``done``, the sections with anything in them.

    ``sections``: the named ones, which it may have been meant for.
    """
    with_keys = [draft for draft in done if draft.opened.model is not None or draft.opened.optim is not None]
    errors = [error for draft in with_keys for error in draft.unmatched]
    for error in errors:
        if all(_is_unmatched(error, draft) for draft in with_keys):
            meant = next((named for named in sections if f"{error.given}".startswith(f"{named.dotted}.")), None)
            if meant is not None:
                error.next_step = f"{flags.only(meant.label)} takes that section alone"
            raise error
    if with_keys and all(draft.left_out for draft in with_keys):
        raise none_left(with_keys[0].opened.source, sum(len(parameter_names(draft.opened)) for draft in with_keys))


def _is_unmatched(error: NoKeyMatchesError, draft: Draft) -> bool:
    """Whether the option that ``error`` is about applied to nothing of ``draft`` either."""
    same = (other for other in draft.unmatched if other.of_selected == error.of_selected)
    return (error.of_selected and draft.left_out) or any(other.given == error.given for other in same)


def _with_listed_parameters(draft: Draft, decision: Decision) -> Checkpoint:
    """The checkpoint with every tensor that one of its optimizers lists marked as a parameter.

    Each optimizer of several lists some: for the others' sake, what one says of the model is noted there.
    """
    opened = draft.checkpoint
    own = Knowledge(UnitsRequest(buffers=decision.options.buffers), draft.sources)  # options are about one of them
    listed: list[tuple[ModelState, set[str]]] = []
    views = [alone(opened, named) for named in opened.named if named.section is Section.OPTIM]
    for view in [replace(opened, named=()), *views]:
        if view.model is None or view.optim is None:
            continue
        by_name = own.find_named(view)
        proved = None if isinstance(by_name, FsdpckptError) else by_name.optim
        keys = proved.keys if proved is not None else ()
        listed.append((view.model, {clean(key) for key in keys if isinstance(key, str)}))
    contents = [opened.model, *(named.content for named in opened.named)]
    models = [_with_parameters(each, listed) for each in contents if isinstance(each, ModelState)]
    alike = iter([_like_another(model, models) for model in models])
    main = next(alike) if opened.model is not None else None
    sections = [
        replace(named, content=next(alike)) if isinstance(named.content, ModelState) else named
        for named in opened.named
    ]
    return replace(opened, model=main, named=tuple(sections))


def _with_parameters(model: ModelState, listed: Sequence[tuple[ModelState, set[str]]]) -> ModelState:
    """``model`` with its tensors among the ``listed`` names marked as parameters."""
    names = {name for of, keys in listed if of is model for name in keys}
    params = dict(model.params)
    for name, leaf in model.params.items():
        if isinstance(leaf, Tensor) and leaf.ndim and leaf.sharded is None and clean(name) in names:
            params[name] = replace(leaf, sharded=True)
    return ModelState(params, model.metadata)


def _like_another(model: ModelState, others: Sequence[ModelState]) -> ModelState:
    """``model`` with its tensors marked as those of another one with the same names and shapes: an average of its
    weights has no optimizer that lists them.
    """
    params = dict(model.params)
    for other in others:
        if {name: _shape(leaf) for name, leaf in params.items()} != {
            name: _shape(leaf) for name, leaf in other.params.items()
        }:
            continue
        for name, leaf in params.items():
            like = other.params[name]
            if isinstance(leaf, Tensor) and isinstance(like, Tensor) and leaf.sharded is None:
                params[name] = leaf.with_sharded(like.sharded)
    return ModelState(params, model.metadata)


def _shape(leaf: object) -> tuple[int, ...] | None:
    return leaf.shape if isinstance(leaf, Tensor) else None


def _left_whole(section: NamedSection) -> Note:
    message = f"{section.label} stays whole in a flattened target: no optimizer trains it, so FSDP1 may not wrap "
    return Note("whole", message + f"it. {flags.only(section.label)} flattens it alone")


def _promoted(draft: Draft) -> Draft:
    """``draft`` with its only model, and its only optimizer, as the main one, if options have left just one: that is
    how a reader finds it.
    """
    checkpoint = draft.checkpoint
    for section in (Section.MODEL, Section.OPTIM):
        main = checkpoint.model if section is Section.MODEL else checkpoint.optim
        of_kind = [named for named in checkpoint.named if named.section is section]
        if main is not None or len(of_kind) != 1:
            continue
        (only,) = of_kind
        if isinstance(only.content, ModelState):
            checkpoint = replace(checkpoint, model=only.content)
        else:
            checkpoint = replace(checkpoint, optim=only.content)
        rest = tuple(named for named in checkpoint.named if named is not only)
        origin = replace(checkpoint.origin, nesting={**checkpoint.origin.nesting, section: only.path})
        checkpoint = replace(checkpoint, origin=origin, named=rest)
        if only.units is not None:  # those of an optimizer, which comes last, describe its model too
            draft = replace(draft, units=only.units, key_type=only.written_keys or draft.key_type)
    return draft.with_checkpoint(checkpoint)
