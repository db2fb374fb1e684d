"""Finds that a checkpoint lacks the model or the optimizer, by what its framework saves only together with both."""

from __future__ import annotations

import re
from collections.abc import Iterable

from fsdpckpt.ir.checkpoint import Checkpoint, Problem, Section
from fsdpckpt.producers.forms import Flavor
from fsdpckpt.producers.table import flavor_named
from fsdpckpt.text import first_of

_SHOWN = 3
_UNSETTLED = frozenset({"several-models", "several-optimizers"})  # then the section may be one of the extras


def missing_sections(checkpoint: Checkpoint, names: Iterable[str]) -> list[Problem]:
    """A fatal problem where one of the two is absent, and a scheduler or random states say that both were saved.

    ``names``: of the files beside the checkpoint. A save of the model alone has no such files and no such extras.
    """
    flavor = flavor_named(checkpoint.flavor)
    if flavor is None or any(note.kind in _UNSETTLED for note in checkpoint.notes):
        return []
    absent = [
        (section, what)
        for section, what, held in (
            (Section.MODEL, "model", checkpoint.model),
            (Section.OPTIM, "optimizer", checkpoint.optim),
        )
        if held is None
    ]
    files = [name for name in sorted(names) if any(re.search(pattern, name) for pattern in flavor.training_files)]
    beside = [*files, *(key for key in flavor.training_keys if checkpoint.extra.get(key))]
    if len(absent) != 1 or not beside:
        return []
    section, what = absent[0]
    file = _file_of(section, flavor, checkpoint)
    message = (
        f"{checkpoint.directory or checkpoint.source} has no {what}{f' ({file})' if file else ''}, and flavor "
        f"{flavor.name} saves {first_of(beside, _SHOWN)} only together with one"
    )
    return [Problem("missing-section", message, section=section)]


def _file_of(section: Section, flavor: Flavor, checkpoint: Checkpoint) -> str:
    """Where the section would be in the form that the rest has; "" where that is no file of its own."""
    for form in flavor.forms:
        place = form.model if section is Section.MODEL else form.optim
        if form.container == checkpoint.container and place is not None:
            return place.file.format(rank=0, world_size=checkpoint.world_size)
    return ""
