"""Decides what a conversion writes, and refuses options that do not apply to it.

The layout, container and world size come from the options, DST's suffix and the source.
"""

from __future__ import annotations

import os
import re
from dataclasses import replace
from difflib import get_close_matches

from fsdpckpt import flags
from fsdpckpt.converters.target.decision import Decision
from fsdpckpt.converters.target.form_choice import default_form, is_per_rank, ranks_of, requested_form, writable_flavor
from fsdpckpt.errors import UsageError
from fsdpckpt.formats.torch.mesh import MAX_RANKS
from fsdpckpt.ir import Container, Layout, Section, section_of
from fsdpckpt.ir.checkpoint import Checkpoint, Note
from fsdpckpt.options import ConvertOptions
from fsdpckpt.options.declare import Scope, given, refuse_unused
from fsdpckpt.producers import PLAIN, Flavor, Form
from fsdpckpt.storage.target_checks import is_empty_directory

TORCH_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt")
SAFETENSORS_SUFFIX = ".safetensors"
DCP_SUFFIX = ".dcp"  # a directory: the suffix is allowed and has no effect
_SUFFIX = re.compile(r"\.[A-Za-z][A-Za-z0-9]*")


def choose_layout(target: str, options: ConvertOptions, source: Checkpoint) -> Decision:
    """The layout, container, world size and form of one conversion of ``source``. Without ``--flavor`` the source's own
    form, if it has one that can be written.

    Raises UsageError if the options contradict each other or DST's suffix.
    """
    if options.world_size is not None and options.world_size > MAX_RANKS:
        expected = f"at most {MAX_RANKS:,}"
        raise UsageError(f"{flags.world_size} has too many ranks", expected=expected, found=str(options.world_size))
    suffix = os.path.splitext(target.rstrip("/"))[1]
    file_suffix = suffix if suffix in (*TORCH_SUFFIXES, SAFETENSORS_SUFFIX) else ""
    notes: tuple[Note, ...] = ()
    if options.flavor is None:
        default = default_form(file_suffix, options, source)
        if not isinstance(default, Note) and default is not None:
            return _of_producer(*default, options, source)
        notes = () if default is None else (default,)
    elif options.flavor != PLAIN:
        flavor = writable_flavor(options.flavor)
        return _of_producer(flavor, requested_form(flavor, file_suffix, options, source), options, source)
    return replace(_plain(suffix, options, source), notes=notes)


def refuse_unknown_suffix(target: str) -> None:
    """Raises UsageError if DST looks like a kind of file that is not written: ``q.tp``, ``notes.json``.

    A suffix is a dot, a letter, then letters and digits up to the end. A trailing slash makes such a name a directory;
    ``step-1.5`` and ``v0.2`` have no suffix.
    """
    stem, suffix = os.path.splitext(target)
    if suffix in (*TORCH_SUFFIXES, SAFETENSORS_SUFFIX, DCP_SUFFIX) or not _SUFFIX.fullmatch(suffix):
        return
    near = get_close_matches(suffix.lower(), (*TORCH_SUFFIXES, SAFETENSORS_SUFFIX), n=1, cutoff=0.5) or [".pt"]
    raise UsageError(
        f"DST ends in {suffix}, which is not a suffix of a checkpoint file",
        expected=f"{', '.join(TORCH_SUFFIXES)} (torch) or {SAFETENSORS_SUFFIX}, or a directory's name",
        found=target,
        next_step=f"give {stem}{near[0]} for a file, or {target}/ for a directory of this name",
    )


def require_file_name(target: str, decision: Decision) -> None:
    """Raises UsageError if one file is written and DST is a directory or ends with a slash."""
    if not decision.directory and (target.endswith("/") or is_empty_directory(target)):
        name = os.path.join(
            target, "full" + (SAFETENSORS_SUFFIX if decision.container is Container.SAFETENSORS else ".pt")
        )
        other = ""
        if decision.options.to is None:
            renamed = (
                ", and give it a name without a suffix" if os.path.splitext(target.rstrip("/"))[1] in _OF_FILES else ""
            )
            other = f"; or add {flags.to('sharded')} for a directory{renamed}"
        raise UsageError(
            f"DST names a directory, {target}, but a {decision.layout} {decision.container} checkpoint is one file",
            next_step=f"give the file a name, for example {name}{other}",
        )


_OF_FILES = (*TORCH_SUFFIXES, SAFETENSORS_SUFFIX)
_WITHOUT_SHARDS = "-ddp"  # the end of the name of a flavor whose jobs do not shard


def _plain(suffix: str, options: ConvertOptions, source: Checkpoint) -> Decision:
    source_layout = source.layout
    container = _container(suffix, options, source_layout)
    layout = _layout(container, suffix, options, source_layout)
    if layout is Layout.FULL:
        refuse_unused(options, Scope.SHARDED, f"{_why_full(container, suffix)} is not sharded")
    if layout is Layout.FULL and options.world_size is not None:
        if options.to is None and container is not Container.SAFETENSORS and suffix not in TORCH_SUFFIXES:
            if source_layout is Layout.FULL and source.flavor.endswith(_WITHOUT_SHARDS):
                raise UsageError(
                    f"{flags.world_size} has no effect: {source.source} is a full (DDP) checkpoint, which every rank "
                    "loads whole",
                    why="there is nothing to reshard: it resumes on any number of ranks as it is",
                    next_step=f"drop {flags.world_size(options.world_size)}; or, for a job with FSDP, add "
                    f"{flags.to('sharded')}",
                )
            raise UsageError(
                f"{flags.world_size} applies only to sharded targets; the source is full, so the target would be too",
                next_step=f"add {flags.to('sharded')}, or drop {flags.world_size(options.world_size)}",
            )
        raise UsageError(
            f"{flags.world_size} says for how many ranks to shard, and {_why_full(container, suffix)} is not sharded",
            next_step=f"drop {flags.world_size}",
        )
    world_size = options.world_size
    if is_per_rank(layout, container):
        if world_size is None and _has_rank_files(source):
            world_size = source.world_size  # files by rank stay those of as many ranks
        _require_ranks(world_size)
    if layout is Layout.FLATTENED and container is not Container.TORCH:
        raise UsageError(
            f"flattened shards are written as torch files, one per rank, but {flags.container} is {container}",
            next_step=f"drop {flags.container}",
        )
    refuse_target_options(options, layout=layout, container=container, source_layout=source_layout)
    one_file = layout is Layout.FULL and (container is Container.TORCH or suffix == SAFETENSORS_SUFFIX)
    if one_file and given(options, Scope.SAFETENSORS):
        raise UsageError(
            f"{flags.max_shard_size} splits the files of a directory, but DST is one file ({suffix})",
            next_step=f"drop {flags.max_shard_size}, or give DST a name without a suffix",
        )
    return Decision(layout, container, world_size, options, directory=not one_file)


def _has_rank_files(source: Checkpoint) -> bool:
    return source.layout is Layout.FLATTENED or (
        source.layout is Layout.SHARDED and source.container == Container.TORCH
    )


def _of_producer(flavor: Flavor, form: Form, options: ConvertOptions, source: Checkpoint) -> Decision:
    world_size = ranks_of(flavor, form, options, source)
    if is_per_rank(form.layout, form.container):
        _require_ranks(world_size)
    refuse_target_options(options, layout=form.layout, container=form.container, source_layout=source.layout)
    return Decision(form.layout, form.container, world_size, options, form.directory, flavor, form)


def _require_ranks(world_size: int | None) -> None:
    if world_size is None:
        raise UsageError("per-rank files need a number of ranks", next_step=f"add {flags.world_size('N')}")


def _why_full(container: Container, suffix: str) -> str:
    if container is Container.SAFETENSORS:
        return "a safetensors target"
    return f"one file ({suffix})" if suffix in TORCH_SUFFIXES else f"{flags.to('full')}"


def _container(suffix: str, options: ConvertOptions, source_layout: Layout) -> Container:
    of_suffix = {SAFETENSORS_SUFFIX: Container.SAFETENSORS, **dict.fromkeys(TORCH_SUFFIXES, Container.TORCH)}.get(
        suffix
    )
    if options.container not in (None, of_suffix) and of_suffix is not None:
        raise UsageError(
            f"DST ends in {suffix}, which names the container {of_suffix}, and {flags.container} says "
            f"{options.container}",
            next_step=f"drop {flags.container}, or give DST another name",
        )
    if (container := options.container or of_suffix) is not None:
        return container
    return Container.DCP if (options.to or source_layout) is Layout.SHARDED else Container.TORCH


def _layout(container: Container, suffix: str, options: ConvertOptions, source_layout: Layout) -> Layout:
    if container is Container.SAFETENSORS:
        if options.to not in (None, Layout.FULL):
            raise UsageError(
                f"safetensors files hold whole tensors, so {flags.to(options.to)} does not fit",
                next_step=f"{flags.to('full')}, or a DST and a {flags.container} that are not safetensors",
            )
        return Layout.FULL
    layout = options.to
    if layout is None:
        layout = Layout.FULL if suffix in TORCH_SUFFIXES else source_layout
    if layout is not Layout.FULL and suffix in TORCH_SUFFIXES:
        raise UsageError(
            f"{flags.to(layout)} writes a directory, but DST ends in {suffix}",
            next_step="give DST a name without a suffix",
        )
    return layout


def check_flavor(options: ConvertOptions) -> None:
    """Raises UsageError for a ``--flavor`` that cannot be written. Opens nothing."""
    if options.flavor is not None and options.flavor != PLAIN:
        writable_flavor(options.flavor)


def refuse_target_options(
    options: ConvertOptions, *, layout: Layout, container: Container, source_layout: Layout
) -> None:
    """Raises UsageError for an option that has no effect on a target of this layout and container."""
    per_rank = layout is Layout.SHARDED and container is Container.TORCH
    flat = Layout.FLATTENED in (layout, source_layout)
    for scope, applies, remedy in (
        (Scope.PER_RANK_FILES, per_rank, f"{flags.to('sharded')} {flags.container('torch')}"),
        (Scope.SHARDED, layout is not Layout.FULL, f"{flags.to('sharded')}"),
        (Scope.DTENSORS, flat or per_rank, f"{flags.to('sharded')} {flags.container('torch')}"),
        (Scope.SAFETENSORS, container is Container.SAFETENSORS, f"{flags.container('safetensors')}"),
    ):
        if not applies:
            refuse_unused(options, scope, f"the target is {layout}, {container}", f"add {remedy}")


def refuse_section_options(decision: Decision, opened: Checkpoint) -> None:
    """Raises UsageError for an option about a section that does not exist, is not selected, or is not written."""
    if not decision.options.map:
        refuse_unused(decision.options, Scope.MAP, "there is no map", f"add {flags.map_('FILE')}")
    options, written = decision.options, decision.form is None or decision.form.optim is not None
    for section, scope, words, present in (
        (Section.MODEL, Scope.MODEL, "model", opened.has(Section.MODEL)),
        (Section.OPTIM, Scope.OPTIMIZER, "optimizer", opened.has(Section.OPTIM)),
    ):
        why = None
        if section_of(options.only) not in (None, section):
            why = f"{flags.only(options.only)} leaves the {words} out"
        elif not present:
            why = f"{opened.source} has no {words}"
        elif section is Section.OPTIM and not written:
            why = f"flavor {decision.flavor_name} has no place for the {words}"
        if why is not None:
            refuse_unused(options, scope, why)


def refuse_flat_options(options: ConvertOptions, source: Checkpoint, *, has_flat: bool) -> None:
    """Raises UsageError for options about FSDP1's flat parameters if neither the source nor the target has any."""
    if given(options, Scope.FLAT_PARAMETERS) and not has_flat:
        why, remedy = f"neither {source.source} nor the target has flat parameters", f"add {flags.to('flattened')}"
        if source.optim is not None and source.optim.key_type == "id" and not any(source.optim.state.values()):
            why = f"the optimizer of {source.source} has ids without states, which do not show what FSDP1 flattened"
            remedy = (
                f"give {flags.units('FILE')} (save_units or `fsdpckpt units` makes one), which says what each id is"
            )
        refuse_unused(options, Scope.FLAT_PARAMETERS, why, remedy)
