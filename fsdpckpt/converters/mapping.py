"""Applies ``--map``: finds the maps and their numbers, and makes of what was read the checkpoint that is converted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from difflib import get_close_matches
from typing import TYPE_CHECKING

from fsdpckpt import flags
from fsdpckpt.converters.map_numbers import MapNumbers, refuse_unknown_numbers
from fsdpckpt.converters.map_order import divided, in_order_of_ids
from fsdpckpt.converters.steps.draft import Draft, Step
from fsdpckpt.converters.steps.knowledge import Knowledge
from fsdpckpt.converters.steps.sections import take
from fsdpckpt.converters.target.decision import Decision, MapDecision
from fsdpckpt.errors import UsageError
from fsdpckpt.flat.units.from_options import units_request
from fsdpckpt.ir import Layout
from fsdpckpt.ir.checkpoint import Checkpoint, Note
from fsdpckpt.ir.row_names import normalise
from fsdpckpt.ir.table import Table
from fsdpckpt.ir.tensors import Tensor
from fsdpckpt.options import ConvertOptions
from fsdpckpt.storage.sources import Sources
from fsdpckpt.verify.elements import first_difference

if TYPE_CHECKING:  # few conversions need maps
    from fsdpckpt.maps import AppliedMap, LayoutMap

_FILES = (".toml", ".json")


def mapped_after(steps: Sequence[Step], draft: Draft, decision: Decision) -> Draft:
    """The draft of the model that the maps make of what ``steps`` make of the source; ``draft`` without a map."""
    mapping = decision.mapping
    if mapping is None:
        return draft
    maps = find_maps(mapping.options)
    request = draft.knowledge.request
    listed = request.parameter_groups
    given = Knowledge(replace(units_request(mapping.options, listed), sections=request.sections), draft.sources)
    reading, of_new_model = mapping.read, draft.knowledge
    if not mapping.knows_target:
        options, of_new_model = divided(given, draft.opened, maps, reading.options)
        reading = replace(reading, options=options)
    knowledge = Knowledge(units_request(reading.options, listed), draft.sources)
    read = take(steps, replace(draft, knowledge=knowledge), reading)
    if read.left_out:
        return read
    plain, names = normalise(read.checkpoint)
    by_name = names.report_wrappers(Table.of(plain).with_plain_words().written(plain))
    made, applied = _mapped(by_name, draft.opened, maps, mapping, draft.sources)
    key_type = decision.options.key_type or draft.source_keys
    if key_type != "id" and not mapping.knows_target and of_new_model.request.parameters is not None:
        unused = (
            f"{flags.parameters} had no effect: it lists the parameters of the new model, whose optimizer has no ids"
        )
        made = made.noted(Note("unused", unused))
    if key_type == "id" and decision.layout is not Layout.FLATTENED and made.optim is not None:
        made, of_new_model = in_order_of_ids(made, given, of_new_model, mapping.options.map)
    return replace(
        draft,
        checkpoint=made,
        opened=made,
        knowledge=of_new_model,
        places=(),
        keys_before_map=draft.source_keys,
        applied_maps=applied,
        unmatched=read.unmatched,
    )


def _mapped(
    checkpoint: Checkpoint, opened: Checkpoint, maps: Sequence[LayoutMap], mapping: MapDecision, sources: Sources
) -> tuple[Checkpoint, tuple[AppliedMap, ...]]:
    """``checkpoint``, whose optimizer is keyed by name, as ``maps`` make it, one after the other.

    ``opened``: the source with the sections that are left out. Raises what ``apply_map`` raises, NeedsInformationError
    for a number that nothing gives, UsageError.
    """
    from fsdpckpt.maps import Reading, apply_map

    refuse_unknown_numbers(maps, mapping.options)
    applied: list[AppliedMap] = []
    # Of what is left out, too, as long as names are those of the source.
    shapes = opened.shapes
    for layout_map in maps:
        made = checkpoint

        def number(tensor: Tensor, of: Checkpoint = made) -> bytes:
            return sources.read_elements(of.files, tensor)

        def equal(first: Tensor, other: Tensor, of: Checkpoint = made) -> bool:
            files = (of.files, sources)
            same_form = first.shape == other.shape and first.dtype is other.dtype
            return same_form and first_difference((first, *files), (other, *files), None) is None

        values = MapNumbers(layout_map, opened, mapping, sources)
        known = shapes | checkpoint.shapes  # the second have names without prefixes of wrappers
        checkpoint, done = apply_map(checkpoint, layout_map, values, Reading(number, equal), known)
        applied.append(done)
        shapes = {}
    return checkpoint, tuple(applied)


def find_maps(options: ConvertOptions) -> tuple[LayoutMap, ...]:
    """The maps that ``--map`` names, in the order in which they are applied: with ``--inverse`` each backwards, the
    last one first.
    """
    found = tuple(map(_find_map, options.map))
    return tuple(each.inverse() for each in reversed(found)) if options.inverse else found


def _find_map(name: str) -> LayoutMap:
    from fsdpckpt.maps import map_names, named_map, read_map

    if name.endswith(_FILES) or "/" in name:
        return read_map(name)
    names = map_names()
    if name not in names:
        near = get_close_matches(name, names, n=1, cutoff=0.4)
        raise UsageError(
            f"there is no built-in map {name}",
            expected=", ".join(names) + ", or the path of a .toml or .json file",
            found=name,
            next_step=f"did you mean {flags.map_(near[0])}?" if near else f"{flags.map_('./' + name)} if it is a file",
        )
    return named_map(name)
