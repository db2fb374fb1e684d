"""Adapts a checkpoint to a producer's form: which sections, side files and extras it has, and where they go.

The notes list everything that moves to another place and everything the producer has no place for.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from fsdpckpt.converters.steps.draft import Draft
from fsdpckpt.converters.steps.numbers import by_number
from fsdpckpt.converters.target.decision import Decision
from fsdpckpt.converters.target.schedule import (
    ANY_SCHEDULE,
    recorded_steps,
    schedule_note,
    schedule_path,
    source_schedule,
)
from fsdpckpt.ir.checkpoint import Checkpoint, NamedSection, Note, Section
from fsdpckpt.ir.frame import placed
from fsdpckpt.ir.tensors import Tensor
from fsdpckpt.ir.values import Key, Value, find_value
from fsdpckpt.producers import Flavor, Form, PathKey, SectionPath, extra_keys
from fsdpckpt.producers.recognition import fits_any
from fsdpckpt.readers.rank_facts import rank_facts
from fsdpckpt.readers.side_files import SideFiles, missing_file_warnings
from fsdpckpt.storage.sources import Sources
from fsdpckpt.verify.resumption import (
    changes_with_ranks,
    changes_without_extras,
    data_position_changes,
    form_refusals,
    has_extra,
    has_keys,
    missing_extra_warnings,
    names_beside,
    ranks_that_saved,
)
from fsdpckpt.writers.state_dicts import extra_notes, extras_of_rank

_TARGET_HAS = "the target has "


def adapt(draft: Draft, decision: Decision) -> Draft:
    """Reduce the checkpoint to the sections, extras and side files that the target's framework has a place for."""
    if decision.flavor is None or decision.form is None:
        return draft
    for part in _PARTS:
        draft = part(draft, decision, decision.flavor, decision.form)
    return draft


def _take_files(draft: Draft, decision: Decision, _: Flavor, __: Form) -> Draft:
    """Take the files that are copied; they list anew what of those beside the source is left out."""
    checkpoint, copied = draft.checkpoint, decision.side_files
    own = checkpoint.origin.directory.rstrip("/")
    # What is in the checkpoint's own directory is listed by what is copied from there.
    elsewhere = [each for each in checkpoint.origin.left_out if each.refused or each.directory.rstrip("/") != own]
    left_out = [remaining for each in elsewhere if (remaining := each.except_for(copied.copied)) is not None]
    origin = replace(checkpoint.origin, left_out=tuple(left_out))
    with_files = replace(checkpoint, files=(*checkpoint.files, *copied.sources), origin=origin)
    return replace(draft, checkpoint=with_files, side_files=copied.files)


def _place_sections(draft: Draft, decision: Decision, flavor: Flavor, form: Form) -> Draft:
    """Put named sections where the framework looks for them, and leave out those that it has no place for."""
    everything = decision.options.only is None
    named = _place_named(draft.checkpoint, flavor, form) if everything else draft.checkpoint
    if named.optim is None or form.optim is not None:
        return draft.with_checkpoint(named)
    note = Note("not-carried", f"optimizer state not written: flavor {flavor.name} has no place for it")
    return draft.with_checkpoint(replace(named, optim=None).noted(note))


def _place_extras(draft: Draft, decision: Decision, flavor: Flavor, form: Form) -> Draft:
    """Leave out the extras that have no place, or that a loader would take for something else."""
    copied = decision.side_files
    if form.extra is None or decision.moves_schedule:
        placed_ones = _with_schedule_alone(draft.checkpoint, decision, flavor)
    else:
        placed_ones = _with_placed_extras(draft.checkpoint, flavor, form, form.extra, copied)
    if _has_both(placed_ones):
        return draft.with_checkpoint(placed_ones)
    why = f"left out, because flavor {flavor.name} saves them only with both the model and the optimizer"
    implying = _extras_implying_both(placed_ones, flavor, form)
    return draft.with_checkpoint(_without_extras(placed_ones, implying, why))


def _note_files(draft: Draft, decision: Decision, flavor: Flavor, _: Form) -> Draft:
    """Note what is copied, where the LR scheduler goes, and which files the framework will not find."""
    checkpoint, copied = draft.checkpoint, decision.side_files
    notes, lacking, names = list(copied.notes), list(copied.lacking), set(copied.names)
    schedule = source_schedule(draft.opened, ANY_SCHEDULE) if decision.moves_schedule else None
    if schedule is not None:
        notes.append(schedule_note(flavor.schedule_file, schedule, draft.opened, flavor, draft.sources))
        names.add(flavor.schedule_file)
    if decision.options.only is None and checkpoint.has(Section.OPTIM):
        lacking += missing_file_warnings(_TARGET_HAS, flavor, names)
    return draft.with_checkpoint(checkpoint.noted(*notes).lacks(*lacking))


def _warn_of_start(draft: Draft, decision: Decision, flavor: Flavor, form: Form) -> Draft:
    """Warn of a new optimizer, and of what another number of ranks changes."""
    checkpoint, ranks = draft.checkpoint, decision.world_size
    if form.optim is None:
        return draft
    if refusals := list(form_refusals(flavor, form)):
        checkpoint = checkpoint.noted(*(Note("resumption", each, warning=True) for each in refusals))
        draft = draft.with_checkpoint(checkpoint)
    if not checkpoint.has(Section.OPTIM) and decision.options.only is None:
        message = f"{checkpoint.source} has no optimizer: {flavor.name} starts with a new one, or stops"
        return draft.with_checkpoint(checkpoint.noted(Note("resumption", message, warning=True)))
    if ranks is None or not _has_both(checkpoint):
        return draft
    saved_by = ranks_that_saved(checkpoint, names_beside(checkpoint, draft.sources))
    changes = changes_with_ranks(flavor, decision.side_files.files, saved_by, ranks)
    return draft.with_checkpoint(checkpoint.noted(*(Note("resumption", each, warning=True) for each in changes)))


def _complete_extras(draft: Draft, decision: Decision, flavor: Flavor, form: Form) -> Draft:
    """Give the loader the extras that it opens, in the shape that it expects."""
    may_have = _has_both(draft.checkpoint) or not _extras_imply_both(flavor, form)
    if decision.options.only is not None or not may_have:
        return draft
    return draft.with_checkpoint(_adapt_extras(draft.checkpoint, flavor, form, draft.sources))


def _add_rank_facts(draft: Draft, decision: Decision, _: Flavor, form: Form) -> Draft:
    """Say in the extras of each rank whose they are, if the framework asks for it."""
    checkpoint, world_size = draft.checkpoint, decision.world_size
    if not form.rank_facts or world_size is None:
        return draft
    extras = [extras_of_rank(replace(checkpoint, named=()), rank) for rank in range(world_size)]
    rank_extra = [{**extra, **rank_facts(form, rank, world_size)} for rank, extra in enumerate(extras)]
    of_ranks = replace(checkpoint, rank_extra=tuple(rank_extra))
    return draft.with_checkpoint(of_ranks.noted(*extra_notes(checkpoint, world_size)))


def _warn_of_extras(draft: Draft, decision: Decision, flavor: Flavor, _: Form) -> Draft:
    """Warn of each extra that is missing, or that other ranks have saved, if the framework asks for it."""
    checkpoint = draft.checkpoint
    if decision.options.only is not None or not _has_both(checkpoint):
        return draft
    lacking = [
        *missing_extra_warnings(_TARGET_HAS, checkpoint, flavor),
        *changes_without_extras(_TARGET_HAS, checkpoint, flavor),
        *data_position_changes(_TARGET_HAS, checkpoint, flavor, decision.world_size or checkpoint.world_size),
    ]
    return draft.with_checkpoint(checkpoint.noted(*(Note("resumption", text, warning=True) for text in lacking)))


_PARTS = (
    _take_files,
    _place_sections,
    _place_extras,
    _note_files,
    _warn_of_start,
    _complete_extras,
    _add_rank_facts,
    _warn_of_extras,
)


def _has_both(checkpoint: Checkpoint) -> bool:
    return checkpoint.has(Section.MODEL) and checkpoint.has(Section.OPTIM)


def _with_schedule_alone(checkpoint: Checkpoint, decision: Decision, flavor: Flavor) -> Checkpoint:
    """``checkpoint`` with the LR scheduler as its only extra, if that has a place."""
    schedule = source_schedule(checkpoint, ANY_SCHEDULE) if decision.moves_schedule else None
    in_place = schedule_path(checkpoint)[:1] if schedule is not None else ()
    why = f"left out, because flavor {flavor.name} has no place for them"
    left = _without_extras(checkpoint, _unplaced_extras(checkpoint, decision.side_files, in_place), why)
    return replace(left, extra={} if schedule is None else schedule, rank_extra=())


def _with_placed_extras(
    checkpoint: Checkpoint, flavor: Flavor, form: Form, place: SectionPath, copied: SideFiles
) -> Checkpoint:
    """``checkpoint`` with the extras that go to ``place``: those that are neither written nor copied otherwise."""
    once = _without_extras(checkpoint, _extras_in_files(checkpoint, copied.copied))  # what is copied is not written too
    why = f"left out, because flavor {flavor.name} has a section under that name"
    beside_sections = _without_extras(once, _names_of_sections(once, form), why)
    if form.model.keys or form.model.file != place.file or place.container is not None:
        return beside_sections
    # They are beside the names of the model: a tensor would be one of them.
    tensors = [str(key) for key, value in beside_sections.extra.items() if isinstance(value, Tensor)]
    why = f"left out: flavor {flavor.name} takes tensors at the top as the model's"
    return _without_extras(beside_sections, tensors, why)


def _place_named(checkpoint: Checkpoint, flavor: Flavor, form: Form) -> Checkpoint:
    """The named sections at the places that ``form`` has for them; those that it has no place for are left out."""
    if form.several:
        return checkpoint
    main = int(checkpoint.optim is not None)
    optimizers = [named for named in checkpoint.named if named.section is Section.OPTIM]
    numbers = {named.path: main + number for number, named in enumerate(sorted(optimizers, key=by_number))}
    kept: list[NamedSection] = []
    notes: list[Note] = []
    for named in checkpoint.named:
        is_optimizer = named.section is Section.OPTIM
        has_no_place = form.extra is None and not form.keeps_source_keys
        path = named.path
        if is_optimizer and form.optimizers:
            path = form.optimizer_keys(numbers[named.path])
        elif form.keeps_source_keys and len(path) > 1 and checkpoint.flavor != flavor.name:  # it looks for one key
            path = ("_".join(map(str, path)),)
        elif has_no_place or (is_optimizer and form.optim is None):
            message = f"{named.label} is left out: flavor {flavor.name} has no place for it"
            notes.append(Note("not-carried", message, warning=True))
            continue
        if path != named.path:
            message = f"{named.dotted} becomes {'.'.join(map(str, path))}, as flavor {flavor.name} calls it"
            notes.append(Note("renamed", message, named.dotted))
        kept.append(replace(named, path=path))
    return replace(checkpoint, named=tuple(kept)).noted(*notes)


def _names_of_sections(checkpoint: Checkpoint, form: Form) -> tuple[str, ...]:
    """The extras at the place of a section in the same file: what a wrapper around the optimizer had beside it."""
    if form.extra is None:
        return ()
    paths = [
        path
        for path, content in ((form.model, checkpoint.model), (form.optim, checkpoint.optim))
        if path is not None and content is not None and path.file == form.extra.file
    ]
    extras = (checkpoint.extra, *checkpoint.rank_extra)
    keys: set[str] = set()
    for path in paths:
        if path.keys and any(_is_taken(extra, path.keys) for extra in extras):
            keys.add(str(path.keys[0]))
    return tuple(name for name in _extra_names(checkpoint) if name in keys)


def _is_taken(value: Value, path: Sequence[PathKey]) -> bool:
    """Whether something is at ``path`` already, or where the containers that lead there would be."""
    for key in path:
        if not isinstance(value, dict):
            return True
        if key not in value:
            return False
        value = value[key]
    return True


def _without_extras(checkpoint: Checkpoint, names: Collection[str], why: str | None = None) -> Checkpoint:
    """``checkpoint`` without the extras ``names``; the note that they are left out begins with ``why``."""
    left = checkpoint.with_extras(lambda extra: {key: value for key, value in extra.items() if str(key) not in names})
    if why is None or not names:
        return left
    return left.noted(Note("not-carried", f"{why}: {', '.join(names)}", keys=tuple(names)))


def _extras_imply_both(flavor: Flavor, form: Form) -> bool:
    """Whether a target that holds only a model must have no extras: a loader would read them as a sign that the
    optimizer was saved, or as names of the model.

    The first case applies to frameworks that keep extras in the model's file, the second to files with both at the top
    level.
    """
    if form.extra is None:
        return False
    name = form.extra.file.format(rank=0, world_size=1)
    at_top = form.model.keys == form.extra.keys == () and form.model.file == form.extra.file
    return at_top or fits_any(flavor.training_files, name)


def _extras_implying_both(checkpoint: Checkpoint, flavor: Flavor, form: Form) -> tuple[str, ...]:
    """The extras that ``verify`` takes as proof that both the model and the optimizer were saved."""
    names = _extra_names(checkpoint)
    saved_with_both = {extra_keys(key)[0] for key in flavor.training_keys}
    return tuple(name for name in names if _extras_imply_both(flavor, form) or name in saved_with_both)


def _unplaced_extras(checkpoint: Checkpoint, copied: SideFiles, in_place: tuple[PathKey, ...]) -> tuple[str, ...]:
    """The extras that are neither ``in_place``, nor in a side file, nor already reported as left out."""
    accounted_for = {*map(str, in_place), *_extras_in_files(checkpoint, copied.copied | copied.left_out)}
    return tuple(name for name in _extra_names(checkpoint) if name not in accounted_for)


def _extra_names(checkpoint: Checkpoint) -> list[str]:
    """The names of the extras, also of those that only some ranks have."""
    return list(dict.fromkeys(str(key) for extra in (checkpoint.extra, *checkpoint.rank_extra) for key in extra))


def _extras_in_files(checkpoint: Checkpoint, paths: Collection[str]) -> set[str]:
    """The names of the extras in the files at ``paths``, or in directories there."""
    above = {f"{path}/" for path in paths}
    found: set[str] = set()
    for key, files in checkpoint.origin.extra_files.items():
        if not files.isdisjoint(paths) or any(file.startswith(tuple(above)) for file in files):
            found.add(str(key))
    return found


def _adapt_extras(checkpoint: Checkpoint, flavor: Flavor, form: Form, sources: Sources) -> Checkpoint:
    """Keep the extras that ``form``'s loader opens, in the shape it expects; the notes say what changed.

    An extra that the loader opens, but with different content, is left out. The source's LR scheduler moves to where
    this producer keeps it. What the loader cannot do without is added.
    """
    different = [
        key
        for key, keys in form.loader_opens
        if checkpoint.extra.get(key) is not None and not has_keys(checkpoint.extra[key], keys)
    ]
    why = f"left out, because flavor {flavor.name} keeps something else under that name"
    checkpoint = _without_extras(checkpoint, different, why)
    notes: list[Note] = []
    extra = dict(checkpoint.extra)
    if form.schedule is not None and find_value(extra, extra_keys(form.schedule[0])) is None:
        place, keys = form.schedule
        schedule = source_schedule(checkpoint, keys)
        if schedule is not None:
            extra = with_extra(extra, place, schedule)
            notes.append(schedule_note(place, schedule, checkpoint, flavor, sources))
    defaults: list[tuple[str, Value]] = [
        (key, [] if value == () else value) for key, value in form.defaults if not has_extra(extra, key)
    ]
    if form.counter and type(find_value(extra, extra_keys(form.counter))) is not int:
        steps = recorded_steps(checkpoint, sources)
        defaults.append((form.counter, steps or 0))
        if steps is None:
            message = f"{checkpoint.source} does not record the optimizer's number of steps: {form.counter} is set to 0"
            notes.append(Note("resumption", message, warning=True))
    if defaults:
        added = ", ".join(f"{key} = {value!r}" for key, value in defaults)
        message = f"added what flavor {flavor.name} needs and the source lacks: {added}"
        notes.append(Note("inferred", message))
        for key, value in defaults:
            extra = with_extra(extra, key, value)
        if any(key in _schedule_keys(flavor, form) for key, _ in defaults):
            message = (
                f"{_TARGET_HAS}no LR schedule that {flavor.name} reads: it starts over, so set warmup and length to "
                "what is left"
            )
            notes.append(Note("resumption", message, warning=True))
    return replace(checkpoint, extra=extra).noted(*notes)


def _schedule_keys(flavor: Flavor, form: Form) -> set[str]:
    """The extras in which the framework keeps its LR schedule."""
    own = {form.schedule[0]} if form.schedule is not None else set()
    return own | {str(path[0]) for path in flavor.schedules}


def with_extra(extra: dict[Key, Value], name: str, value: Value) -> dict[Key, Value]:
    """``extra`` with ``value`` under the keys of ``name``, see ``Form``."""
    at_place = placed(extra, extra_keys(name), value)
    return at_place if isinstance(at_place, dict) else extra
