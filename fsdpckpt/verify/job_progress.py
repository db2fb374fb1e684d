"""Compares what the parts of a job say of its progress: steps of the optimizer, the schedule, counts, the directory.

Each stands in a file of its own, so a job that was killed while it saved, or a copy that was put together by hand, may
have them of different steps. Nothing is lost then, and a job resumes, with another learning rate or at another place in
its data.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress

import numpy as np

from fsdpckpt.errors import SourceError
from fsdpckpt.ir.checkpoint import Checkpoint, Problem, Section
from fsdpckpt.ir.counters import STEP
from fsdpckpt.ir.dtypes import numpy_dtype
from fsdpckpt.ir.optimizer import Optimizer
from fsdpckpt.ir.sections import optimizers
from fsdpckpt.ir.tensors import Tensor
from fsdpckpt.ir.values import Object, Value, find_value
from fsdpckpt.storage.sources import Sources
from fsdpckpt.text import plural

STEP_COUNTERS = (("global_step",), ("global_steps",), ("train_state", "step"))
"""Where frameworks count the optimizer's steps beside it: Lightning, DeepSpeed, torchtitan."""

_TRAINER_STATE = "trainer_state.json"
_MAX_BYTES = 1 << 28
# The directories that the Trainer and torchtitan name after the step, each with where the step stands inside.
_NAMED_AFTER_STEP = (
    (re.compile(r"checkpoint-(\d{1,15})"), _TRAINER_STATE),
    (re.compile(r"step-(\d{1,15})"), "train_state.step"),
)
_LAST, _BASES, _RATES = "last_epoch", "base_lrs", "_last_lr"  # of the state dict of torch's schedulers


def check_progress(checkpoint: Checkpoint, sources: Sources) -> tuple[list[Problem], list[str]]:
    """Problems, none of them fatal, and notes on what may be meant."""
    counts, problems = _counts(checkpoint, sources)
    later = _later_steps(checkpoint, counts, sources)
    notes = [*_misnamed(checkpoint, counts), *later]
    schedules, found = list(_schedules(checkpoint.extra)), optimizers(checkpoint)
    if len(schedules) == 1 and len(found) == 1 and found[0].groups is not None:
        other_groups = _other_groups(schedules[0], found[0])
        problems += other_groups
        notes += [] if other_groups else _other_rates(schedules[0], found[0])
    return problems, notes


def steps_of(optim: Optimizer, checkpoint: Checkpoint, sources: Sources) -> int | None:
    """The step count of the first parameter that has one; None if none has, or if it is NaN or infinite."""
    step = next((entry[STEP] for entry in optim.state.values() if STEP in entry), None)
    return as_count(step, checkpoint, sources)


def as_count(step: Value, checkpoint: Checkpoint, sources: Sources) -> int | None:
    """A number, or a tensor of one, as an integer; None if it is anything else, NaN or infinite."""
    if isinstance(step, Tensor) and step.numel == 1 and step.dtype.numpy is not None:
        step = np.frombuffer(sources.read_elements(checkpoint.files, step), numpy_dtype(step.dtype))[0].item()
    if isinstance(step, Object) and step.number is not None:
        step = step.number.item()
    return int(step) if type(step) is int or (isinstance(step, float) and math.isfinite(step)) else None


def _counts(checkpoint: Checkpoint, sources: Sources) -> tuple[dict[str, int], list[Problem]]:
    """How many steps the job has counted, by where that stands; and a problem for a file that cannot be read."""
    counts: dict[str, int] = {}
    for path in STEP_COUNTERS:
        with suppress(SourceError):  # its file has a problem already
            count = as_count(find_value(checkpoint.extra, path), checkpoint, sources)
            if count is not None:
                counts[".".join(path)] = count
    directory = checkpoint.origin.directory
    path_of_state = f"{directory.rstrip('/')}/{_TRAINER_STATE}"
    entry = sources.stat(path_of_state) if directory else None
    if entry is None or entry.directory or entry.nbytes > _MAX_BYTES:
        return counts, []
    try:
        document = json.loads(sources.open(path_of_state).read(0, entry.nbytes))
    except (ValueError, RecursionError):
        message = f"{path_of_state} is not JSON: the Trainer cannot resume with it"
        return counts, [Problem("unreadable", message, fatal=False, file=path_of_state)]
    count = document.get("global_step") if isinstance(document, dict) else None
    return {**counts, **({_TRAINER_STATE: count} if type(count) is int else {})}, []


def _misnamed(checkpoint: Checkpoint, counts: Mapping[str, int]) -> Iterator[str]:
    """A note if the directory is named after another step than the job has counted: people rename checkpoints, and
    they are resumed as before.
    """
    directory = os.path.abspath(checkpoint.origin.directory) if checkpoint.origin.directory else ""
    for name, place in _NAMED_AFTER_STEP:
        named = name.fullmatch(os.path.basename(directory))
        if named is not None and place in counts and int(named[1]) != counts[place]:
            message = f"the directory is named {named[0]}, and {place} in it counts {counts[place]} steps: it was "
            yield message + "renamed, or that file is of another save"


def _later_steps(checkpoint: Checkpoint, counts: Mapping[str, int], sources: Sources) -> list[str]:
    """A note for each optimizer that has made more steps than the job has counted. Fewer are usual: with float16 some
    are skipped, and an optimizer of several may not take part in each.
    """
    notes: list[str] = []
    for optim in optimizers(checkpoint):
        with suppress(SourceError):
            steps = steps_of(optim, checkpoint, sources)
            more = [f"{place} counts {count}" for place, count in counts.items() if steps is not None and steps > count]
            if more:
                message = f"the optimizer has made {plural(steps or 0, 'step')}, and {' and '.join(more)}: "
                notes.append(message + "it is of a later save, or the job counts from 0 or began anew")
    return notes


def _schedules(value: object) -> Iterator[Mapping[object, object]]:
    """The state dicts of schedulers in ``value``. Those of which one is made are parts of it."""
    if isinstance(value, Mapping):
        if type(value.get(_LAST)) is int and isinstance(value.get(_RATES, value.get(_BASES)), list):
            yield value
            return
        for each in value.values():
            yield from _schedules(each)
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _schedules(each)


def _other_groups(schedule: Mapping[object, object], optim: Optimizer) -> list[Problem]:
    """A problem if the scheduler has learning rates of another number of groups: torch's stops at its next step."""
    groups = optim.param_groups or []
    for name in (_BASES, _RATES):
        rates = schedule.get(name)
        if isinstance(rates, list) and len(rates) != len(groups) and not optim.rebuilt:
            message = f"the LR scheduler has {name} of {plural(len(rates), 'param group')}, and the optimizer has "
            return [Problem("step", f"{message}{len(groups)}", fatal=False, section=Section.EXTRA)]
    return []


def _other_rates(schedule: Mapping[object, object], optim: Optimizer) -> list[str]:
    """A note if the learning rates that the scheduler set last are not those of the optimizer."""
    last = schedule.get(_RATES)
    set_last = _numbers(last if isinstance(last, list) else [])
    now = _numbers([group.get("lr") for group in optim.param_groups or []])
    if set_last is None or now is None or not set_last or _alike(set_last, now):
        return []
    rates = f"{_listed(set_last)} last, and the optimizer has {_listed(now)}"
    why = "they are of different steps, or the job set them itself"
    return [f"the LR scheduler set the learning rates {rates}: {why}"]


def _alike(rates: Sequence[float], others: Sequence[float]) -> bool:
    """Whether each of ``rates`` is among ``others`` and the reverse, but for float32's rounding."""
    return all(_is_among(rate, others) for rate in rates) and all(_is_among(other, rates) for other in others)


def _is_among(rate: float, rates: Sequence[float]) -> bool:
    return any(math.isclose(rate, other, rel_tol=1e-6) for other in rates)


def _numbers(values: Sequence[object]) -> list[float] | None:
    """``values`` as they are; None if one is no number, such as a tensor."""
    numbers = [float(value) for value in values if isinstance(value, (int, float))]
    return numbers if len(numbers) == len(values) else None


def _listed(rates: Sequence[float]) -> str:
    return ", ".join(f"{rate:g}" for rate in dict.fromkeys(rates))
