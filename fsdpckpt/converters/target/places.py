"""Refuses what the form of a framework has no place for, and finds the files that belong beside it."""

from __future__ import annotations

from dataclasses import replace

from fsdpckpt import flags
from fsdpckpt.converters.target.decision import Decision
from fsdpckpt.errors import NeedsInformationError, SourceMissingError, UsageError
from fsdpckpt.ir import section_of
from fsdpckpt.ir.checkpoint import Checkpoint, Section
from fsdpckpt.producers import Flavor, Form
from fsdpckpt.readers.side_files import SideFiles, side_files
from fsdpckpt.storage.sources import Sources


def require_places(checkpoint: Checkpoint, flavor: Flavor, form: Form, only: Section | None) -> None:
    """Raises UsageError, SourceMissingError or NeedsInformationError if ``form`` has no place for what is selected."""
    _require_section_of_form(checkpoint, flavor, form, only)
    if only is None:
        _require_places(checkpoint, flavor, form)


def _require_section_of_form(checkpoint: Checkpoint, flavor: Flavor, form: Form, only: Section | None) -> None:
    """Raises UsageError or SourceMissingError if the checkpoint has none of the sections in ``form``."""
    if form.optim is None and only is Section.OPTIM:
        raise UsageError(
            f"{flags.only('optim')} cannot be combined with {flags.flavor(flavor.name)}, which has no place for the "
            "optimizer",
            next_step=f"drop {flags.only}, or {flags.flavor}",
        )
    if form.optim is None and not checkpoint.has(Section.MODEL):
        raise SourceMissingError(
            f"{checkpoint.source} has no model, and flavor {flavor.name} keeps nothing else",
            next_step=f"give the checkpoint that has the model, or drop {flags.flavor}",
        )


def _require_places(checkpoint: Checkpoint, flavor: Flavor, form: Form) -> None:
    """Raises NeedsInformationError for several models or optimizers, none the main one, that ``form`` cannot hold."""
    for section, what, main, holds in (
        (Section.MODEL, "model", checkpoint.model, form.keeps_source_keys or form.several),
        (Section.OPTIM, "optimizer", checkpoint.optim, form.keeps_source_keys or form.several or bool(form.optimizers)),
    ):
        several = [named for named in checkpoint.named if named.section is section]
        is_written = section is Section.MODEL or form.optim is not None
        if is_written and several and main is None and not holds:
            layout = f" {flags.to(form.layout)}" if form.layout is not checkpoint.layout else ""
            raise NeedsInformationError(
                f"flavor {flavor.name} saves one {what}, but {checkpoint.source} has {len(several)}",
                details=[named.label for named in several],
                file=checkpoint.source,
                next_step=f"{flags.only(several[0].label)} (one of these); or {flags.flavor('plain')}{layout}, "
                "which keeps all",
            )


def files_beside(checkpoint: Checkpoint, decision: Decision, flavor: Flavor, sources: Sources) -> SideFiles:
    """The files beside the source that belong in the target. A file that is the target has none.

    The LR scheduler for two param groups is written, not copied as a file.
    """
    ignored = checkpoint.origin.ignored
    ignored = (*ignored, flavor.schedule_file) if decision.splits_param_group else ignored
    source = replace(checkpoint, origin=replace(checkpoint.origin, ignored=ignored))
    only, directory = section_of(decision.options.only), decision.directory
    return side_files(source, flavor, decision.world_size, sources, only=only, directory=directory)
