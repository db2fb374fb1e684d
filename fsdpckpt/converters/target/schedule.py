"""Finds the LR scheduler of a checkpoint, and says where and how another framework keeps it."""

from __future__ import annotations

import re
from collections.abc import Mapping

from fsdpckpt.ir.checkpoint import Checkpoint, Container, Layout, Note, Section
from fsdpckpt.ir.sections import optimizers
from fsdpckpt.ir.values import Key, Value, find_value
from fsdpckpt.producers import Flavor, Form, PathKey, SectionPath
from fsdpckpt.producers.recognition import flavor_named
from fsdpckpt.readers.side_files import SideFiles
from fsdpckpt.storage.sources import Sources
from fsdpckpt.verify.job_progress import STEP_COUNTERS, as_count, steps_of
from fsdpckpt.verify.resumption import (
    has_keys,
)

_LAMBDAS = "lr_lambdas"  # what LambdaLR has, and its load_state_dict() needs
_SCHEDULERS = "_schedulers"  # those that SequentialLR and ChainedScheduler consist of
_BY_GROUP = re.compile(r"_last_lr|lr_lambdas|\w*(lrs|momentums)")  # the lists with an entry for each param group
ANY_SCHEDULE = frozenset({"last_epoch", "_last_lr"})  # what every LR scheduler of torch has


def place_of_schedule(checkpoint: Checkpoint, flavor: Flavor, form: Form, copied: SideFiles) -> SectionPath | None:
    """Where the source's LR scheduler goes if ``form`` has no place for extras: the file that ``flavor`` has for it.

    None if it has none, if the file is copied from beside the source, or if the source has no scheduler of torch's.
    """
    file, keeps_optimizer = flavor.schedule_file, checkpoint.has(Section.OPTIM) and form.optim is not None
    movable = form.extra is None and keeps_optimizer and file and file not in copied.files
    if not movable or source_schedule(checkpoint, ANY_SCHEDULE) is None:
        return None
    return SectionPath(file, container=Container.TORCH, layout=Layout.FULL)


def schedule_note(
    place: str, schedule: Mapping[Key, Value], checkpoint: Checkpoint, flavor: Flavor, sources: Sources
) -> Note:
    """The note that ``schedule`` goes to ``place``, and what another framework may read differently in it."""
    message = f"{place} is the state of the source's LR scheduler"
    if flavor.schedule_file and _LAMBDAS not in schedule:
        message += ", which is not a LambdaLR: resume with a scheduler of the same class"
    epochs, steps = schedule.get("last_epoch"), recorded_steps(checkpoint, sources) or 0
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


def source_schedule(checkpoint: Checkpoint, required: frozenset[str]) -> dict[Key, Value] | None:
    """The state dict of the source's LR scheduler, if it has the ``required`` keys; None if its producer does not use a
    torch scheduler.
    """
    path = schedule_path(checkpoint)
    value: Value = checkpoint.extra if path else None
    for step in path:
        if isinstance(value, dict):
            value = value.get(step)
        else:
            value = value[step] if isinstance(value, list) and isinstance(step, int) and step < len(value) else None
    return value if isinstance(value, dict) and has_keys(value, required) else None


def doubled_schedule(checkpoint: Checkpoint) -> Checkpoint:
    """``checkpoint`` with an LR scheduler for two param groups like the one that it has."""
    path = schedule_path(checkpoint)

    def doubled(extra: Mapping[Key, Value]) -> dict[Key, Value]:
        own = {key: _doubled(value, path[1:]) for key, value in extra.items() if path[:1] == (key,)}
        return {**extra, **own}

    return checkpoint.with_extras(doubled)


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


def schedule_path(checkpoint: Checkpoint) -> tuple[PathKey, ...]:
    source = flavor_named(checkpoint.flavor)
    paths = source.schedules if source is not None else ()
    return next((path for path in paths if find_value(checkpoint.extra, path) is not None), ())


def recorded_steps(checkpoint: Checkpoint, sources: Sources) -> int | None:
    """How many steps the first optimizer that counts them has made; without any, what the framework that saved it has
    counted. None if nothing records it.
    """
    found = (steps_of(optim, checkpoint, sources) for optim in optimizers(checkpoint))
    steps = next((each for each in found if each is not None), None)
    if steps is not None:
        return steps
    for path in STEP_COUNTERS:
        count = as_count(find_value(checkpoint.extra, path), checkpoint, sources)
        if count is not None:
            return count
    return None
