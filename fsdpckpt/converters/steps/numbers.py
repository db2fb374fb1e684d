"""Gives several models and several optimizers the numbers that the target's framework gives them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from fsdpckpt.converters.steps.draft import Draft
from fsdpckpt.converters.target.decision import Decision
from fsdpckpt.ir.checkpoint import Checkpoint, NamedSection, Note, Section
from fsdpckpt.ir.sections import model_of
from fsdpckpt.producers import Flavor, Form


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
    models = [saved.model, *(named.content for named in sorted(saved.named, key=by_number))]
    kept: list[NamedSection] = []
    for section in (Section.MODEL, Section.OPTIM):
        others = sorted((named for named in saved.named if named.section is section), key=by_number)
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


def by_number(named: NamedSection) -> list[tuple[int, str]]:
    """A sort key that puts ``optimizer_10`` behind ``optimizer_9``; names without numbers keep their order."""
    numbers = re.findall(r"\d+", named.dotted)
    return [(int(number), "") for number in numbers]
