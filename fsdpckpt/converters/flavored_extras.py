"""The extras that a producer's loader opens: another producer's under the same name are told from its own."""

from __future__ import annotations

from dataclasses import replace

from fsdpckpt.ir.checkpoint import Checkpoint, Note
from fsdpckpt.ir.values import Value
from fsdpckpt.producers.forms import Flavor, Form
from fsdpckpt.producers.table import flavor_named

__all__ = ["with_extras_for"]


def with_extras_for(checkpoint: Checkpoint, flavor: Flavor, form: Form) -> Checkpoint:
    """``checkpoint`` with the extras that ``form``'s loader opens, as it wants them; what was done is in the notes.

    An extra of a name that it opens, but not made as it makes it, is left out; the state of the source's LR scheduler
    goes where this producer has it; what its loader stops without is added.
    """
    notes = list(checkpoint.notes)
    extra, rank_extra = dict(checkpoint.extra), checkpoint.rank_extra
    foreign = tuple(key for key, keys in form.opened if extra.get(key) is not None and not _has(extra[key], keys))
    if foreign:
        extra = {key: value for key, value in extra.items() if key not in foreign}
        rank_extra = tuple({key: value for key, value in each.items() if key not in foreign} for each in rank_extra)
        message = f"not carried, as they are not what {flavor.title} has under that name: {', '.join(foreign)}"
        notes.append(Note("not-carried", message, keys=foreign))
    if form.schedule is not None and form.schedule[0] not in extra:
        place, keys = form.schedule
        schedule = _schedule(checkpoint)
        if _has(schedule, keys):
            extra[place] = schedule
            notes.append(Note("inferred", f"{place} is the state of the source's LR scheduler, as it is"))
    absent: list[tuple[str, Value]] = [
        (key, [] if value == () else value) for key, value in form.defaults if key not in extra
    ]
    if absent:
        said = ", ".join(f"{key} = {value!r}" for key, value in absent)
        notes.append(Note("inferred", f"what {flavor.title} needs and the source does not have was added: {said}"))
        extra.update(absent)
    return replace(checkpoint, extra=extra, rank_extra=rank_extra, notes=tuple(notes))


def _schedule(checkpoint: Checkpoint) -> Value:
    """The state dict of the source's LR scheduler, None where its producer keeps none that is torch's own."""
    source = flavor_named(checkpoint.flavor)
    found: Value = checkpoint.extra if source is not None and source.schedule else None
    for step in source.schedule if source is not None else ():
        if isinstance(found, dict):
            found = found.get(step)
        else:
            found = found[step] if isinstance(found, list) and isinstance(step, int) and step < len(found) else None
    return found


def _has(value: Value, keys: frozenset[str]) -> bool:
    return isinstance(value, dict) and keys <= value.keys()
