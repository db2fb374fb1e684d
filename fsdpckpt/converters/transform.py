"""The steps from what was read to what is written, in their order.

A step is a function ``(Draft, Decision) -> Draft`` in ``converters.steps``. ``Draft`` is the checkpoint and what the
steps have found out about it; ``Decision`` never changes.
"""

from __future__ import annotations

from dataclasses import replace

from fsdpckpt.converters.mapping import mapped_after
from fsdpckpt.converters.steps.adapt import adapt
from fsdpckpt.converters.steps.cast import give_own_tensors
from fsdpckpt.converters.steps.check import require_reference, require_sound
from fsdpckpt.converters.steps.copies import take_equal_copies
from fsdpckpt.converters.steps.draft import Draft, Step, TransformedCheckpoint
from fsdpckpt.converters.steps.export import export
from fsdpckpt.converters.steps.fill import fill_states
from fsdpckpt.converters.steps.keys import find_named_optimizer, key_optimizer, name_optimizer
from fsdpckpt.converters.steps.knowledge import Knowledge
from fsdpckpt.converters.steps.numbers import number_sections
from fsdpckpt.converters.steps.optimizer import group_parameters, unwrap_quantized
from fsdpckpt.converters.steps.parallel import record_one_rank
from fsdpckpt.converters.steps.place import note_unproved_cuts, place, place_rest
from fsdpckpt.converters.steps.prefixes import clean_words, remove_prefixes, restore_prefixes
from fsdpckpt.converters.steps.refused_states import refuse_states
from fsdpckpt.converters.steps.rename import rename
from fsdpckpt.converters.steps.schedule import double_schedule
from fsdpckpt.converters.steps.sections import each_section, take
from fsdpckpt.converters.steps.select import keep_section, select_keys
from fsdpckpt.converters.steps.shard import shard, shard_as_units
from fsdpckpt.converters.steps.unflatten import unflatten
from fsdpckpt.converters.steps.unused import find_unused
from fsdpckpt.converters.steps.wrap import require_something, require_whole_units, wrap
from fsdpckpt.converters.target.decision import Decision
from fsdpckpt.errors import FsdpckptError
from fsdpckpt.flat.units.from_options import units_request
from fsdpckpt.flat.units.request import UnitsRequest
from fsdpckpt.ir import Layout
from fsdpckpt.ir.checkpoint import Checkpoint
from fsdpckpt.ir.row_names import leads
from fsdpckpt.readers.side_files import with_copied
from fsdpckpt.storage.sources import Sources

TO_WHOLE_TENSORS: tuple[Step, ...] = (
    require_reference,
    keep_section,
    require_sound,
    refuse_states,
    unwrap_quantized,
    group_parameters,
    unflatten,
    remove_prefixes,
    take_equal_copies,
    clean_words,
)
"""From any source to whole tensors under plain names."""

TO_FULL_OR_SHARDED: tuple[Step, ...] = (
    find_unused,
    name_optimizer,
    select_keys,
    fill_states,
    place,
    key_optimizer,
    shard,
    place_rest,
    restore_prefixes,
    rename,  # the last change of names: until here they are matched with those of the source and of options
    give_own_tensors,
    note_unproved_cuts,
)
"""From whole tensors to what full and sharded targets hold."""

TO_FLATTENED: tuple[Step, ...] = (
    name_optimizer,
    select_keys,
    rename,  # before the units: they are those of the target's names
    give_own_tensors,
    restore_prefixes,
    require_something,
    wrap,
    fill_states,
    require_whole_units,
    shard_as_units,
    place,
    place_rest,
    note_unproved_cuts,
)
"""From whole tensors to what FSDP1 flattens: still whole tensors, with units. The writer cuts them."""


_OF_FINAL_NAMES = (find_unused, fill_states, note_unproved_cuts)
"""Steps after the map: what they say of names they say of the new ones."""

BEFORE_MAP: tuple[Step, ...] = tuple(
    step for step in (*TO_WHOLE_TENSORS, *TO_FULL_OR_SHARDED) if step not in _OF_FINAL_NAMES
)
"""From any source to the whole tensors that ``--map`` takes."""


def map_parameters(draft: Draft, decision: Decision) -> Draft:
    """With ``--map``: read the source as whole tensors by name, and go on with the model that the map makes of it."""
    return mapped_after(BEFORE_MAP, draft, decision)


def transform_sections(draft: Draft, decision: Decision) -> Draft:
    """Take the steps of a section for the main model and optimizer, and for each named one on its own."""
    to_target = TO_FLATTENED if decision.layout is Layout.FLATTENED else TO_FULL_OR_SHARDED
    return each_section(draft, decision, (map_parameters, *TO_WHOLE_TENSORS, *to_target))


def add_side_files(draft: Draft, _: Decision) -> Draft:
    """Say in the account of files which ones are copied."""
    return draft.with_checkpoint(with_copied(draft.checkpoint, draft.side_files))


STEPS: tuple[Step, ...] = (
    double_schedule,
    adapt,
    transform_sections,
    number_sections,
    record_one_rank,
    export,
    add_side_files,
)
"""All steps of a conversion. The framework's come before and after those of the sections."""


def begin(
    opened: Checkpoint,
    decision: Decision,
    sources: Sources,
    *,
    request: UnitsRequest,
    places: tuple[str, ...] = (),
) -> Draft:
    """The draft before the first step. ``request``: what the options say about units as they were given; ``places``:
    the keys of the named section that ``--only`` made the main one, and of its model.
    """
    listed = request.parameter_groups
    known = replace(
        units_request(decision.options, listed),
        sections=request.sections,
        parameters=request.parameters,  # of either model of a map, whose options the decision divides
        parameter_groups=listed,
    )
    knowledge = Knowledge(known, sources)
    noted = opened.noted(*decision.notes)
    return Draft(checkpoint=noted, opened=noted, knowledge=knowledge, leads=leads(opened), places=places)


def transform(begun: Draft, decision: Decision) -> Draft:
    """Take all steps. Raises SourceError for a source that is incomplete or contradicts itself, NeedsInformationError,
    UsageError.
    """
    return take(STEPS, begun, decision)


def find_selection(begun: Draft, decision: Decision) -> Draft | FsdpckptError:
    """``begun`` with what ``transform`` takes of it: the sections, and the keys in them that options select. Names
    decide that; no tensor is located, compared or changed.

    Globs select among the names of optimizer states: if nothing proves which parameter each id is, the error that says
    what would. Raises UsageError for a glob that matches nothing, and if nothing is left.
    """
    unnamed: list[FsdpckptError] = []

    def select_named(draft: Draft, decision: Decision) -> Draft:
        if not decision.options.include and not decision.options.exclude:
            return draft
        named = find_named_optimizer(draft)
        if isinstance(named, FsdpckptError):
            unnamed.append(named)
            return draft
        return select_keys(named, decision)

    def select_in_sections(draft: Draft, decision: Decision) -> Draft:
        return each_section(draft, decision, (keep_section, unwrap_quantized, remove_prefixes, select_named))

    selected = take((double_schedule, adapt, select_in_sections), begun, decision)
    return unnamed[0] if unnamed else selected


def transform_to_load(
    opened: Checkpoint, decision: Decision, sources: Sources, request: UnitsRequest
) -> TransformedCheckpoint:
    """What ``transform`` makes of the sections, for a loader that takes what a plain target would hold."""
    return transform_sections(begin(opened, decision, sources, request=request), decision).transformed
