"""Adapts a checkpoint to a producer's form: which sections, side files and extras it has, and where they go.

The notes list everything that moves to another place and everything the producer has no place for.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

import numpy as np

from fsdpckpt import flags
from fsdpckpt.converters.decision import Decision
from fsdpckpt.converters.steps.draft import Draft
from fsdpckpt.errors import NeedsInformationError, SourceMissingError, UsageError
from fsdpckpt.ir import section_of
from fsdpckpt.ir.checkpoint import Checkpoint, Container, Layout, NamedSection, Note, Section
from fsdpckpt.ir.dtypes import numpy_dtype
from fsdpckpt.ir.optimizer import Optimizer
from fsdpckpt.ir.origin import LeftOut
from fsdpckpt.ir.sections import model_of, optimizers, placed
from fsdpckpt.ir.tensors import Tensor
from fsdpckpt.ir.values import Key, Object, Value, find_value
from fsdpckpt.producers import Flavor, Form, PathKey, SectionPath, extra_keys
from fsdpckpt.producers.table import flavor_named
from fsdpckpt.readers.rank_facts import rank_facts
from fsdpckpt.readers.side_files import SideFiles, missing_file_warnings, side_files
from fsdpckpt.storage.sources import Sources
from fsdpckpt.verify.resumption import (
    changes_with_ranks,
    changes_without_extras,
    data_position_changes,
    has_extra,
    has_keys,
    missing_extra_warnings,
    names_beside,
    ranks_that_saved,
)
from fsdpckpt.writers.state_dicts import extra_notes, extras_of_rank

_LAMBDAS = "lr_lambdas"  # what LambdaLR has, and its load_state_dict() needs
_SCHEDULERS = "_schedulers"  # those that SequentialLR and ChainedScheduler consist of
_BY_GROUP = re.compile(r"_last_lr|lr_lambdas|\w*(lrs|momentums)")  # the lists with an entry for each param group
_ANY_SCHEDULE = frozenset({"last_epoch", "_last_lr"})  # what every LR scheduler of torch has


def require_places(checkpoint: Checkpoint, flavor: Flavor, form: Form, only: Section | None) -> None:
    """Raises UsageError, SourceMissingError or NeedsInformationError if ``form`` has no place for what is selected."""
    _require_section_of_form(checkpoint, flavor, form, only)
    if only is None:
        _require_places(checkpoint, flavor, form)


def files_beside(checkpoint: Checkpoint, decision: Decision, flavor: Flavor, sources: Sources) -> SideFiles:
    """The files beside the source that belong in the target. A file that is the target has none.

    The LR scheduler for two param groups is written, not copied as a file.
    """
    ignored = checkpoint.origin.ignored
    ignored = (*ignored, flavor.schedule_file) if decision.splits_param_group else ignored
    source = replace(checkpoint, origin=replace(checkpoint.origin, ignored=ignored))
    only, directory = section_of(decision.options.only), decision.directory
    return side_files(source, flavor, decision.world_size, sources, only=only, directory=directory)


def place_of_schedule(checkpoint: Checkpoint, flavor: Flavor, form: Form, copied: SideFiles) -> SectionPath | None:
    """Where the source's LR scheduler goes if ``form`` has no place for extras: the file that ``flavor`` has for it.

    None if it has none, if the file is copied from beside the source, or if the source has no scheduler of torch's.
    """
    file, keeps_optimizer = flavor.schedule_file, checkpoint.has(Section.OPTIM) and form.optim is not None
    movable = form.extra is None and keeps_optimizer and file and file not in copied.files
    if not movable or _source_schedule(checkpoint, _ANY_SCHEDULE) is None:
        return None
    return SectionPath(file, container=Container.TORCH, layout=Layout.FULL)


def double_schedule(draft: Draft, decision: Decision) -> Draft:
    """Give the LR scheduler a second entry for each param group if the only group is split in two."""
    return draft.with_checkpoint(_doubled_schedule(draft.checkpoint)) if decision.splits_param_group else draft


def adapt(draft: Draft, decision: Decision) -> Draft:
    """Reduce the checkpoint to the sections, extras and side files that the target's framework has a place for."""
    flavor, form = decision.flavor, decision.form
    if flavor is None or form is None:
        return draft
    copied, ranks, sources = decision.side_files, decision.world_size, draft.sources
    everything = decision.options.only is None
    checkpoint = _with_files(draft.checkpoint, copied)
    if everything:
        checkpoint = _place_named(checkpoint, flavor, form)
    if checkpoint.optim is not None and form.optim is None:
        note = Note("not-carried", f"optimizer state not written: flavor {flavor.name} has no place for it")
        checkpoint = replace(checkpoint, optim=None).noted(note)
    about_schedule: list[Note] = []
    lacking = list(copied.lacking)
    if everything and checkpoint.has(Section.OPTIM):
        moved = {flavor.schedule_file} if decision.moves_schedule else set[str]()
        lacking += missing_file_warnings("the target", flavor, copied.names | moved)
    if form.extra is None or decision.moves_schedule:
        checkpoint, about_schedule = _with_schedule_alone(checkpoint, decision, flavor, sources)
    else:
        checkpoint = _with_placed_extras(checkpoint, flavor, form, form.extra, copied)
    has_both = checkpoint.has(Section.MODEL) and checkpoint.has(Section.OPTIM)
    if not has_both:
        why = f"left out, because flavor {flavor.name} saves them only with both the model and the optimizer"
        checkpoint = _without_extras(checkpoint, _extras_implying_both(checkpoint, flavor, form), why)
    checkpoint = checkpoint.noted(*copied.notes, *about_schedule).lacks(*lacking)
    if everything and form.optim is not None and not checkpoint.has(Section.OPTIM):
        message = f"{checkpoint.source} has no optimizer: {flavor.name} starts with a new one, or stops"
        checkpoint = checkpoint.noted(Note("resumption", message, warning=True))
    if has_both and ranks is not None and form.optim is not None:
        names = names_beside(checkpoint, sources)
        changes = changes_with_ranks(flavor, copied.files, ranks_that_saved(checkpoint, names), ranks)
        changed = [Note("resumption", change, warning=True) for change in changes]
        checkpoint = checkpoint.noted(*changed)
    if everything and (has_both or not _extras_imply_both(flavor, form)):
        checkpoint = _adapt_extras(checkpoint, flavor, form, sources)
    checkpoint = _with_rank_facts(checkpoint, form, ranks)
    if everything and has_both:
        checkpoint = _with_resumption(checkpoint, flavor, ranks or checkpoint.world_size)
    return replace(draft, checkpoint=checkpoint, side_files=copied.files)


def _with_files(checkpoint: Checkpoint, copied: SideFiles) -> Checkpoint:
    """``checkpoint`` with the files of ``copied``, which lists anew what of those beside the source is not carried."""
    below = f"{checkpoint.origin.directory.rstrip('/')}/"
    left_out = tuple(each for each in checkpoint.origin.left_out if _is_left_out(each, below, copied))
    origin = replace(checkpoint.origin, left_out=left_out)
    return replace(checkpoint, files=(*checkpoint.files, *copied.sources), origin=origin)


def _with_schedule_alone(
    checkpoint: Checkpoint, decision: Decision, flavor: Flavor, sources: Sources
) -> tuple[Checkpoint, list[Note]]:
    """``checkpoint`` with the LR scheduler as its only extra, if that has a place; and the notes on it."""
    schedule = _source_schedule(checkpoint, _ANY_SCHEDULE) if decision.moves_schedule else None
    in_place = _schedule_path(checkpoint)[:1] if schedule is not None else ()
    why = f"left out, because flavor {flavor.name} has no place for them"
    left = _without_extras(checkpoint, _unplaced_extras(checkpoint, decision.side_files, in_place), why)
    if schedule is None:
        return replace(left, extra={}, rank_extra=()), []
    note = _schedule_note(flavor.schedule_file, schedule, checkpoint, flavor, sources)
    return replace(left, extra=schedule, rank_extra=()), [note]


def _with_placed_extras(
    checkpoint: Checkpoint, flavor: Flavor, form: Form, place: SectionPath, copied: SideFiles
) -> Checkpoint:
    """``checkpoint`` with the extras that go to ``place``: those that are neither written nor copied otherwise."""
    checkpoint = _without_extras(checkpoint, _extras_in_files(checkpoint, copied.copied))  # they are not written twice
    why = f"left out, because flavor {flavor.name} has a section under that name"
    checkpoint = _without_extras(checkpoint, _names_of_sections(checkpoint, form), why)
    if form.model.keys == () and form.model.file == place.file and place.container is None:
        # A tensor there would be one of the model's names.
        tensors = [str(key) for key, value in checkpoint.extra.items() if isinstance(value, Tensor)]
        why = f"left out: flavor {flavor.name} takes tensors at the top as the model's"
        checkpoint = _without_extras(checkpoint, tensors, why)
    return checkpoint


def _is_left_out(left_out: LeftOut, below: str, copied: SideFiles) -> bool:
    """Whether what was left out while reading is not in the target either: it is in a directory ``below`` that of the
    checkpoint, and not ``copied``.
    """
    places = [f"{left_out.directory}/{name}".rstrip("/") for name in left_out.names]
    from_there = any(path == place or path.startswith(f"{place}/") for path in copied.copied for place in places)
    return left_out.directory.startswith(below) and not from_there


def _with_rank_facts(checkpoint: Checkpoint, form: Form, world_size: int | None) -> Checkpoint:
    """``checkpoint`` with the extras of each of ``world_size`` ranks, which say whose they are if ``form`` does."""
    if not form.rank_facts or world_size is None:
        return checkpoint
    extras = [extras_of_rank(replace(checkpoint, named=()), rank) for rank in range(world_size)]
    rank_extra = [{**extra, **rank_facts(form, rank, world_size)} for rank, extra in enumerate(extras)]
    return replace(checkpoint, rank_extra=tuple(rank_extra)).noted(*extra_notes(checkpoint, world_size))


def _with_resumption(checkpoint: Checkpoint, flavor: Flavor, ranks: int) -> Checkpoint:
    """``checkpoint`` with a warning about each extra that it lacks, or has of other ranks, and ``flavor`` asks for."""
    lacking = [
        *missing_extra_warnings(checkpoint, flavor),
        *changes_without_extras(checkpoint, flavor),
        *data_position_changes(checkpoint, flavor, ranks),
    ]
    warnings = [Note("resumption", text, warning=True) for text in lacking]
    return checkpoint.noted(*warnings)


def _place_named(checkpoint: Checkpoint, flavor: Flavor, form: Form) -> Checkpoint:
    """The named sections at the places that ``form`` has for them; those that it has no place for are left out."""
    if form.several:
        return checkpoint
    main = int(checkpoint.optim is not None)
    optimizers = [named for named in checkpoint.named if named.section is Section.OPTIM]
    numbers = {named.path: main + number for number, named in enumerate(sorted(optimizers, key=_by_number))}
    kept: list[NamedSection] = []
    notes: list[Note] = []
    for named in checkpoint.named:
        is_optimizer = named.section is Section.OPTIM
        path = named.path
        if is_optimizer and form.optimizers:
            path = form.optimizer_keys(numbers[named.path])
        elif form.keeps_source_keys and len(path) > 1 and checkpoint.flavor != flavor.name:  # it looks for one key
            path = ("_".join(map(str, path)),)
        elif (is_optimizer and form.optim is None) or (form.extra is None and not form.keeps_source_keys):
            message = f"{named.label} is left out: flavor {flavor.name} has no place for it"
            notes.append(Note("not-carried", message, warning=True))
            continue
        if path != named.path:
            message = f"{named.dotted} becomes {'.'.join(map(str, path))}, as flavor {flavor.name} calls it"
            notes.append(Note("renamed", message, named.dotted))
        kept.append(replace(named, path=path))
    return replace(checkpoint, named=tuple(kept)).noted(*notes)


def number_sections(draft: Draft, decision: Decision) -> Draft:
    """Give several models and optimizers the numbers that the framework gives them. It is the last change of places:
    they say what belongs together.
    """
    if decision.flavor is None or decision.form is None:
        return draft
    return draft.with_checkpoint(_with_numbers(draft.checkpoint, decision.flavor, decision.form))


def _with_numbers(checkpoint: Checkpoint, flavor: Flavor, form: Form) -> Checkpoint:
    """All models, and all optimizers, of several under the numbers that ``form`` gives them: in their order, or in that
    of numbers that they have already; optimizers in the order of their models. Call it last: places say what belongs
    together.
    """
    if not form.several:
        return checkpoint
    saved, notes = checkpoint, list[Note]()
    models = [saved.model, *(named.content for named in sorted(saved.named, key=_by_number))]
    kept: list[NamedSection] = []
    for section in (Section.MODEL, Section.OPTIM):
        others = sorted((named for named in saved.named if named.section is section), key=_by_number)
        if not others:
            continue
        if section is Section.OPTIM:
            ordered = [(_index(models, model_of(saved, named)), at, named) for at, named in enumerate(others)]
            others = [named for _, _, named in sorted(ordered, key=lambda each: each[:2])]
        main = saved.model if section is Section.MODEL else saved.optim
        if main is not None:
            path = saved.origin.nesting.get(section) or (str(section),)
            others.insert(0, NamedSection(section, str(section), path, main))
        for number, named in enumerate(others):
            key = form.number_key(section, number)
            if named.path != (key,):
                message = f"{named.dotted} becomes {key}, as flavor {flavor.name} calls it"
                notes.append(Note("renamed", message, named.dotted))
            kept.append(replace(named, path=(key,), name=key))
        is_model = section is Section.MODEL  # what has a number is no main section any more
        checkpoint = replace(checkpoint, model=None) if is_model else replace(checkpoint, optim=None)
    return replace(checkpoint, named=tuple(kept)).noted(*notes)


def _index(models: Sequence[object], model: object) -> int:
    """The place of ``model``; behind all others if it is none of them."""
    return next((number for number, each in enumerate(models) if each is model), len(models))


def _require_places(checkpoint: Checkpoint, flavor: Flavor, form: Form) -> None:
    """Raises NeedsInformationError for several models or optimizers, none the main one, that ``form`` cannot hold."""
    for section, what, main, holds in (
        (Section.MODEL, "model", checkpoint.model, form.keeps_source_keys or form.several),
        (Section.OPTIM, "optimizer", checkpoint.optim, form.keeps_source_keys or form.several or bool(form.optimizers)),
    ):
        several = [named for named in checkpoint.named if named.section is section]
        if main is None and several and not holds and (section is Section.MODEL or form.optim is not None):
            raise NeedsInformationError(
                f"flavor {flavor.name} saves one {what}, and {checkpoint.source} has {len(several)}",
                details=[named.label for named in several],
                file=checkpoint.source,
                next_step=f"{flags.only(several[0].label)} (one of these); or {flags.flavor('plain')}, which keeps all",
            )


def _by_number(named: NamedSection) -> list[tuple[int, str]]:
    """A sort key that puts ``optimizer_10`` behind ``optimizer_9``; names without numbers keep their order."""
    numbers = re.findall(r"\d+", named.dotted)
    return [(int(number), "") for number in numbers]


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
    keys = {str(path.keys[0]) for path in paths for extra in extras if path.keys and _is_taken(extra, path.keys)}
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
    extra, *rank_extra = (
        {key: value for key, value in each.items() if str(key) not in names}
        for each in (checkpoint.extra, *checkpoint.rank_extra)
    )
    left = replace(checkpoint, extra=extra, rank_extra=tuple(rank_extra))
    if why is None or not names:
        return left
    return left.noted(Note("not-carried", f"{why}: {', '.join(names)}", keys=tuple(names)))


def _require_section_of_form(checkpoint: Checkpoint, flavor: Flavor, form: Form, only: Section | None) -> None:
    """Raises UsageError or SourceMissingError if the checkpoint has none of the sections in ``form``."""
    if form.optim is None and only is Section.OPTIM:
        raise UsageError(
            f"{flags.only('optim')} cannot be combined with {flags.flavor(flavor.name)}, which has no place for the "
            "optimizer",
            next_step=f"drop {flags.only}, or {flags.flavor}",
        )
    if form.optim is None and not checkpoint.has(Section.MODEL):
        raise SourceMissingError(
            f"{checkpoint.source} has no model, and flavor {flavor.name} keeps nothing else",
            next_step=f"give the checkpoint that has the model, or drop {flags.flavor}",
        )


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
    return at_top or any(re.search(pattern, name) for pattern in flavor.training_files)


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
    return {
        str(key)
        for key, files in checkpoint.origin.extra_files.items()
        if not files.isdisjoint(paths) or any(file.startswith(tuple(above)) for file in files)
    }


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
        schedule = _source_schedule(checkpoint, keys)
        if schedule is not None:
            extra = with_extra(extra, place, schedule)
            notes.append(_schedule_note(place, schedule, checkpoint, flavor, sources))
    defaults: list[tuple[str, Value]] = [
        (key, [] if value == () else value) for key, value in form.defaults if not has_extra(extra, key)
    ]
    if form.counter and type(find_value(extra, extra_keys(form.counter))) is not int:
        steps = _recorded_steps(checkpoint, sources)
        defaults.append((form.counter, steps or 0))
        if steps is None:
            message = (
                f"{checkpoint.source} does not record how many steps the optimizer has made: {form.counter} is set to 0"
            )
            notes.append(Note("resumption", message, warning=True))
    if defaults:
        added = ", ".join(f"{key} = {value!r}" for key, value in defaults)
        message = f"what flavor {flavor.name} needs and the source does not have was added: {added}"
        notes.append(Note("inferred", message))
        for key, value in defaults:
            extra = with_extra(extra, key, value)
    return replace(checkpoint, extra=extra).noted(*notes)


def with_extra(extra: dict[Key, Value], name: str, value: Value) -> dict[Key, Value]:
    """``extra`` with ``value`` under the keys of ``name``, see ``Form``."""
    at_place = placed(extra, extra_keys(name), value)
    return at_place if isinstance(at_place, dict) else extra


def _schedule_note(
    place: str, schedule: Mapping[Key, Value], checkpoint: Checkpoint, flavor: Flavor, sources: Sources
) -> Note:
    """The note that ``schedule`` goes to ``place``, and what another framework may read differently in it."""
    message = f"{place} is the state of the source's LR scheduler"
    if flavor.schedule_file and _LAMBDAS not in schedule:
        message += ", which is not a LambdaLR: resume with a scheduler of the same class"
    epochs, steps = schedule.get("last_epoch"), _recorded_steps(checkpoint, sources) or 0
    source = flavor_named(checkpoint.flavor)
    by_process = source is not None and source.counts_processes
    counts_otherwise = True
    if by_process and not flavor.counts_processes and isinstance(epochs, int) and epochs != steps:
        message += (
            f"; it counts {epochs} steps, and the optimizer {steps}: {checkpoint.flavor} counts one for each process"
        )
    elif flavor.counts_processes and not by_process:
        message += f"; {flavor.name} will count one step for each process, unless split_batches is set"
    else:
        counts_otherwise = False
    return Note("inferred", message, warning=counts_otherwise)


def _source_schedule(checkpoint: Checkpoint, required: frozenset[str]) -> dict[Key, Value] | None:
    """The state dict of the source's LR scheduler, if it has the ``required`` keys; None if its producer does not use a
    torch scheduler.
    """
    path = _schedule_path(checkpoint)
    value: Value = checkpoint.extra if path else None
    for step in path:
        if isinstance(value, dict):
            value = value.get(step)
        else:
            value = value[step] if isinstance(value, list) and isinstance(step, int) and step < len(value) else None
    return value if isinstance(value, dict) and has_keys(value, required) else None


def _doubled_schedule(checkpoint: Checkpoint) -> Checkpoint:
    """``checkpoint`` with an LR scheduler for two param groups like the one that it has."""
    path = _schedule_path(checkpoint)
    extra, *rank_extra = (
        {key: _doubled(value, path[1:]) if path[:1] == (key,) else value for key, value in each.items()}
        for each in (checkpoint.extra, *checkpoint.rank_extra)
    )
    return replace(checkpoint, extra=extra, rank_extra=tuple(rank_extra))


def _doubled(value: Value, path: tuple[PathKey, ...]) -> Value:
    """``value`` with a second entry in the lists that have one for each param group, of the scheduler at ``path``."""
    if isinstance(value, list):
        return [_doubled(each, path[1:]) if number in path[:1] else each for number, each in enumerate(value)]
    if not isinstance(value, dict):
        return value
    if path:
        return {key: _doubled(each, path[1:]) if key == path[0] else each for key, each in value.items()}
    doubled: dict[Key, Value] = {}
    for key, each in value.items():
        if key == _SCHEDULERS and isinstance(each, list):
            doubled[key] = [_doubled(scheduler, ()) for scheduler in each]
        else:
            by_group = isinstance(each, list) and len(each) == 1 and _BY_GROUP.fullmatch(str(key))
            doubled[key] = each * 2 if isinstance(each, list) and by_group else each
    return doubled


def _schedule_path(checkpoint: Checkpoint) -> tuple[PathKey, ...]:
    source = flavor_named(checkpoint.flavor)
    paths = source.schedules if source is not None else ()
    return next((path for path in paths if find_value(checkpoint.extra, path) is not None), ())


_STEPS_OF_OTHERS = (("global_step",), ("global_steps",), ("train_state", "step"))
"""Where frameworks count the optimizer's steps beside it: Lightning, DeepSpeed, torchtitan."""


def _recorded_steps(checkpoint: Checkpoint, sources: Sources) -> int | None:
    """How many steps the first optimizer that counts them has made; without any, what the framework that saved it has
    counted. None if nothing records it.
    """
    found = (_steps_of(optim, checkpoint, sources) for optim in optimizers(checkpoint))
    steps = next((each for each in found if each is not None), None)
    if steps is not None:
        return steps
    values = (find_value(checkpoint.extra, path) for path in _STEPS_OF_OTHERS)
    return next((value for each in values if (value := _as_count(each, checkpoint, sources)) is not None), None)


def _steps_of(optim: Optimizer, checkpoint: Checkpoint, sources: Sources) -> int | None:
    """The step count of the first parameter that has one; None if none has, or if it is NaN or infinite."""
    step = next((entry["step"] for entry in optim.state.values() if "step" in entry), None)
    return _as_count(step, checkpoint, sources)


def _as_count(step: Value, checkpoint: Checkpoint, sources: Sources) -> int | None:
    """A number, or a tensor of one, as an integer; None if it is anything else, NaN or infinite."""
    if isinstance(step, Tensor) and step.numel == 1 and step.dtype.numpy is not None:
        step = np.frombuffer(sources.read_elements(checkpoint.files, step), numpy_dtype(step.dtype))[0].item()
    if isinstance(step, Object) and step.number is not None:
        step = step.number.item()
    return int(step) if type(step) is int or (isinstance(step, float) and math.isfinite(step)) else None
