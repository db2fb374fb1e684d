"""Decides once what a conversion writes: layout, container, ranks, mesh, form, and the options as they apply.

Two tables say what is possible: the producers' forms, and the options with where each applies. What follows is the same
whatever comes after: no later step chooses again.
"""

from __future__ import annotations

from dataclasses import replace

from fsdpckpt.converters.huggingface import stated_dtype
from fsdpckpt.converters.target_mesh import meshes_of, on_mesh, requested_mesh, with_mesh
from fsdpckpt.converters.target_spec import TargetSpec, make_target_spec, refuse_section_options, require_file_name
from fsdpckpt.ir import KeyType, Section, section_of
from fsdpckpt.ir.checkpoint import Checkpoint
from fsdpckpt.options import ConvertOptions
from fsdpckpt.storage.sources import Sources


def decide(target: str, options: ConvertOptions, opened: Checkpoint, sources: Sources) -> TargetSpec:
    """What is written of ``opened``. ``notes``: what was decided without being asked for.

    Raises UsageError for options that contradict each other, DST or the source, or that apply to nothing;
    NeedsInformationError if the source does not say how tensors lie on the ranks of the target.
    """
    dtype, notes = stated_dtype(opened, options, sources)
    asked = replace(of_one_section(options), dtype=dtype)
    meshes = meshes_of(opened)
    mesh = requested_mesh(asked, opened, meshes, sources)
    on_ranks = with_mesh(asked, opened.layout, mesh)
    spec = on_mesh(make_target_spec(target, on_ranks, opened), opened, meshes, mesh)
    require_file_name(target, spec)
    refuse_section_options(spec, opened)
    applied = replace(on_ranks, key_type=_key_type(spec, opened))
    return replace(spec, options=applied, notes=(*notes, *spec.notes))


def of_one_section(options: ConvertOptions) -> ConvertOptions:
    """``options`` for the section that ``only`` names: once it is chosen from several, it is the only one."""
    return replace(options, only=section_of(options.only))


def _key_type(spec: TargetSpec, opened: Checkpoint) -> KeyType | None:
    """That of the form, which its loader takes; the one asked for if the form leaves it open. None: as the source."""
    asked: KeyType | None = spec.options.key_type
    if spec.form is None:
        return asked
    if spec.form.optim is None or not opened.has(Section.OPTIM):
        return None
    return asked if spec.form.any_key_type else spec.form.key_type
