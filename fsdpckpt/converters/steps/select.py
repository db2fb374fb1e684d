"""Applies ``--only``; then ``--include`` and ``--exclude``, to the model and the optimizer, which is keyed by name."""

from __future__ import annotations

from dataclasses import replace

from fsdpckpt import flags
from fsdpckpt.converters.steps.draft import Draft
from fsdpckpt.converters.steps.rename import renaming
from fsdpckpt.converters.steps.shared_places import require_places
from fsdpckpt.converters.target.decision import Decision
from fsdpckpt.errors import required
from fsdpckpt.flat.units.changes import NameChanges
from fsdpckpt.ir import Layout, section_of
from fsdpckpt.ir.checkpoint import Checkpoint
from fsdpckpt.ir.names import without_module
from fsdpckpt.transform.selection import (
    NoKeyMatchesError,
    find_kept,
    find_unmatched_globs,
    is_selected,
    parameter_names,
    select_section,
)


def keep_section(draft: Draft, decision: Decision) -> Draft:
    """Apply ``--only``."""
    return draft.with_checkpoint(select_section(draft.checkpoint, section_of(decision.options.only)))


def select_keys(draft: Draft, decision: Decision) -> Draft:
    """Keep the selected parameters, and in units only those. What it found out about names is in ``changes``.

    Raises UsageError for a glob that matches nothing, and if nothing is left; a section that is one of several is then
    left out: the globs are meant for others.
    """
    options, checkpoint = decision.options, draft.checkpoint
    if not options.include and not options.exclude:
        if decision.layout is not Layout.FLATTENED:
            return draft
        return replace(draft, changes=_changes(draft, checkpoint, decision))
    names_of_each = _names_in_globs(draft)
    if draft.one_of_several and not names_of_each:
        return draft
    matched = draft.with_unmatched(
        find_unmatched_globs(names_of_each, options.include, options.exclude, checkpoint.source)
    )
    selected = find_kept(
        checkpoint, names_of_each, include=options.include, exclude=options.exclude, shared=_shared_in_units(draft)
    )
    if isinstance(selected, NoKeyMatchesError) and draft.one_of_several:
        return replace(matched, left_out=True)
    kept = required(selected)
    changed = matched.with_selection(kept, _changes(draft, kept, decision))
    counted = decision.layout is not Layout.FLATTENED and (options.key_type or changed.source_keys) == "id"
    if counted and checkpoint.optim is not None and changed.known_units is not None:
        require_places(changed, [changed.known_units.parameters], f"{flags.key_type('name')}", written=False)
    return changed


def _shared_in_units(draft: Draft) -> tuple[tuple[str, str], ...]:
    """The shared parameters that units tell of; the model section shows its own."""
    known = (
        draft.source_units.units if draft.source_units is not None else None,
        draft.checkpoint.units,
        draft.id_units,
    )
    return next((units.shared for units in known if units is not None), ())


def _names_in_globs(draft: Draft) -> dict[str, tuple[str, ...]]:
    """Each parameter with all names that a glob may match: plain, as in the source, without the ``module.`` that all
    have, as another section spells it, and below its section or, in an optimizer, below its model.
    """
    found: dict[str, tuple[str, ...]] = {}
    listed = parameter_names(draft.checkpoint)
    present = set(listed)
    for name, bare in zip(listed, without_module(listed, ()), strict=True):
        own = (name, draft.source_names.of_model(name), draft.source_names.of_optimizer(name), bare)
        elsewhere = (lead + bare for lead in draft.leads if lead + bare not in present)
        names = tuple(dict.fromkeys((*own, *elsewhere)))
        below = (f"{place}.{each}" for place in draft.places for each in names)
        found[name] = (*names, *below)
    return found


def _changes(draft: Draft, selected: Checkpoint, decision: Decision) -> NameChanges:
    """What becomes of any name if ``selected`` is what is left of ``draft``, and names are changed after that."""
    options, names = decision.options, parameter_names(draft.checkpoint)
    present, kept = set(names), set(parameter_names(selected))

    def keeps(name: str) -> bool:
        if name in present:
            return name in kept
        return is_selected((name,), include=options.include, exclude=options.exclude)

    new_name = renaming(draft, decision).new_name
    return NameChanges(keeps, new_name, tuple(names))
