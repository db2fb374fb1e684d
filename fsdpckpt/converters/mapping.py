"""Applies ``--map``: finds the map and its numbers, and makes of what was read the checkpoint that is converted."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import replace
from difflib import get_close_matches
from typing import TYPE_CHECKING

from fsdpckpt import flags
from fsdpckpt.converters.map_numbers import MapNumbers
from fsdpckpt.converters.steps.draft import Draft, Step
from fsdpckpt.converters.steps.knowledge import Knowledge
from fsdpckpt.converters.steps.sections import take
from fsdpckpt.converters.target.decision import Decision
from fsdpckpt.errors import NeedsInformationError, UsageError
from fsdpckpt.flat.units.from_options import units_request
from fsdpckpt.ir import Layout
from fsdpckpt.ir.checkpoint import Checkpoint
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
    """The draft of the model that ``--map`` makes of what ``steps`` make of the source; ``draft`` without a map."""
    mapping = decision.mapping
    if mapping is None:
        return draft
    knowledge = Knowledge(units_request(mapping.read.options), draft.sources)
    read = take(steps, replace(draft, knowledge=knowledge), mapping.read)
    if read.left_out:
        return read
    plain, names = normalise(read.checkpoint)
    named = names.report_wrappers(Table.of(plain).with_plain_words().written(plain))
    key_type = decision.options.key_type or draft.source_keys
    if key_type == "id" and decision.layout is not Layout.FLATTENED:
        refuse_ids(named, mapping.options)
    checkpoint, applied = _mapped(named, draft.opened, mapping.options, draft.sources)
    return replace(
        draft,
        checkpoint=checkpoint,
        opened=checkpoint,
        places=(),
        keys_before_map=draft.source_keys,
        applied_map=applied,
        unmatched=read.unmatched,
    )


def _mapped(
    checkpoint: Checkpoint, opened: Checkpoint, options: ConvertOptions, sources: Sources
) -> tuple[Checkpoint, AppliedMap]:
    """``checkpoint``, whose optimizer is keyed by name, as the map of ``options`` makes it.

    ``opened``: the source with the sections that are left out. Raises what ``apply_map`` raises, NeedsInformationError
    for a number that nothing gives, UsageError.
    """
    from fsdpckpt.maps import Reading, apply_map

    layout_map = find_map(options)
    values = MapNumbers(layout_map, opened, options, sources)

    def number(tensor: Tensor) -> bytes:
        return sources.read_elements(checkpoint.files, tensor)

    def equal(first: Tensor, other: Tensor) -> bool:
        files = (checkpoint.files, sources)
        same_form = first.shape == other.shape and first.dtype is other.dtype
        return same_form and first_difference((first, *files), (other, *files), None) is None

    shapes: dict[str, tuple[int, ...]] = {}
    for model in (opened.model, checkpoint.model):  # the second has names without prefixes of wrappers
        for name, leaf in model.params.items() if model is not None else ():
            if isinstance(leaf, Tensor):
                shapes[name] = leaf.shape
    return apply_map(checkpoint, layout_map, values, Reading(number, equal), shapes)


def find_map(options: ConvertOptions) -> LayoutMap:
    """The map that ``--map`` names, or its inverse."""
    from fsdpckpt.maps import map_names, named_map, read_map

    name = str(options.map)
    if name.endswith(_FILES) or "/" in name:
        found = read_map(name)
    else:
        names = map_names()
        if name not in names:
            near = get_close_matches(name, names, n=1, cutoff=0.4)
            raise UsageError(
                f"there is no built-in map {name}",
                expected=", ".join(names) + ", or the path of a .toml or .json file",
                found=name,
                next_step=f"did you mean {flags.map_(near[0])}?"
                if near
                else f"{flags.map_('./' + name)} if it is a file",
            )
        found = named_map(name)
    return found.inverse() if options.inverse else found


def refuse_ids(checkpoint: Checkpoint, options: ConvertOptions) -> None:
    """Raises NeedsInformationError for a target whose optimizer would be keyed by id."""
    if checkpoint.optim is not None and checkpoint.optim.keys:
        source = shlex.quote(checkpoint.source)
        raise NeedsInformationError(
            f"{flags.map_(options.map)} makes other parameters, and the order in which the optimizer of the new "
            "model lists them is unknown",
            why=f"the optimizer of {source} is keyed by id, and an id is a position in that list",
            next_step=f"{flags.key_type('name')}; a second conversion with {flags.key_type('id')} and "
            f"{flags.parameters('FILE')} makes ids of the names",
        )
