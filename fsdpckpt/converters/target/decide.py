"""Decides once what a conversion writes: layout, container, ranks, mesh, form, and the options as they apply.

Two tables say what is possible: the producers' forms, and the options with where each applies. What follows is the same
whatever comes after: no later step chooses again.
"""

from __future__ import annotations

from dataclasses import replace

from fsdpckpt.converters.target.decision import Decision
from fsdpckpt.converters.target.layout import choose_layout, refuse_section_options, require_file_name
from fsdpckpt.converters.target.map_options import with_mapping
from fsdpckpt.converters.target.mesh import meshes_of, on_mesh, requested_mesh, with_mesh
from fsdpckpt.converters.target.model_files import stated_dtype
from fsdpckpt.converters.target.places import files_beside, require_places
from fsdpckpt.converters.target.schedule import place_of_schedule
from fsdpckpt.ir import KeyType, Section, section_of
from fsdpckpt.ir.checkpoint import Checkpoint
from fsdpckpt.options import ConvertOptions
from fsdpckpt.producers import Flavor, Form
from fsdpckpt.storage.sources import Sources
from fsdpckpt.transform.weight_decay import has_one_group


def decide(target: str, options: ConvertOptions, opened: Checkpoint, sources: Sources) -> Decision:
    """What is written of ``opened``. ``notes``: what was decided without being asked for.

    Raises UsageError for options that contradict each other, DST or the source, or that apply to nothing;
    NeedsInformationError if the source does not say how tensors lie on the ranks of the target, or if the target's
    framework has no place for all that is selected.
    """
    # The options as far as the source alone decides them.
    dtype, notes = stated_dtype(opened, options, sources)
    asked = replace(of_one_section(options), dtype=dtype)
    # The mesh says how many ranks there are; layout, container and form follow.
    meshes = meshes_of(opened)
    mesh = requested_mesh(asked, opened, meshes, sources)
    on_ranks = with_mesh(asked, opened.layout, mesh)
    placed = on_mesh(choose_layout(target, on_ranks, opened), opened, meshes, mesh)
    require_file_name(target, placed)
    refuse_section_options(placed, opened)
    decided = replace(
        placed,
        options=replace(placed.options, key_type=_key_type(placed, opened)),
        notes=(*notes, *placed.notes),
        splits_param_group=bool(options.no_weight_decay) and has_one_group(opened),
    )
    if decided.flavor is None or decided.form is None:
        return with_mapping(decided)
    return with_mapping(_with_places(decided, decided.flavor, decided.form, opened, sources))


def of_one_section(options: ConvertOptions) -> ConvertOptions:
    """``options`` for the section that ``only`` names: once it is chosen from several, it is the only one."""
    return replace(options, only=section_of(options.only))


def _key_type(decision: Decision, opened: Checkpoint) -> KeyType | None:
    """That of the form, which its loader takes; the one asked for if the form leaves it open. None: as the source."""
    asked: KeyType | None = decision.options.key_type
    if decision.form is None:
        return asked
    if decision.form.optim is None or not opened.has(Section.OPTIM):
        return None
    return asked if decision.form.any_key_type else decision.form.key_type


def _with_places(decision: Decision, flavor: Flavor, form: Form, opened: Checkpoint, sources: Sources) -> Decision:
    """``decision`` with the files to copy, and with a place for the LR scheduler if only the source keeps it inside."""
    only = section_of(decision.options.only)
    require_places(opened, flavor, form, only)
    copied = files_beside(opened, decision, flavor, sources)
    schedule = place_of_schedule(opened, flavor, form, copied) if only is None else None
    if schedule is None:
        return replace(decision, side_files=copied)
    return replace(decision, side_files=copied, form=replace(form, extra=schedule), moves_schedule=True)
