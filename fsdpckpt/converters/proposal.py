"""Finds the conversion that makes a checkpoint from which a framework resumes, by planning it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace

from fsdpckpt import flags
from fsdpckpt.converters.prepare import prepare
from fsdpckpt.errors import FsdpckptError, UsageError
from fsdpckpt.option_fields import arguments_of
from fsdpckpt.options import ConvertOptions
from fsdpckpt.producers import Flavor
from fsdpckpt.storage.sources import Sources
from fsdpckpt.verify.resumption import MISSING_SECTIONS, Resumption, missing_extra_warnings


def with_proposal(
    found: Resumption, source: str, flavor: Flavor, sources: Sources, *, given: Mapping[str, object]
) -> Resumption:
    """``found`` with the command that makes a checkpoint that ``flavor`` resumes from, if it does not from ``source``.

    The conversion is planned, so a command that would be refused is never shown without the reason. ``given``: the
    options that say what ``source`` does not record, which the conversion needs too.
    """
    if found.resumes:
        return found
    target = f"{os.path.basename(source.rstrip('/')) or 'checkpoint'}-for-{flavor.name}"
    refused: FsdpckptError | None = None
    # Some forms are the same for any number of ranks, and take no --world-size.
    for world_size in (found.world_size, None):
        options = ConvertOptions.of(**given, flavor=flavor.name, world_size=world_size)
        command = flags.command("convert", source, target, *arguments_of(options))
        try:
            prepared = prepare(source, target, replace(options, dry_run=True), sources)
        except UsageError as error:
            refused = refused or error  # what the first says is about the ranks that were asked for
            continue
        except FsdpckptError as error:
            refused = refused or error
            break
        notes = (*prepared.transformed.checkpoint.notes, *prepared.output.notes)
        lacking = [reason for reason in found.missing if reason in MISSING_SECTIONS]
        lacking += missing_extra_warnings(prepared.transformed.checkpoint, flavor)
        lacking += [note.message for note in notes if note.kind == "unconfigured"]
        return replace(found, command=command, still_missing=tuple(dict.fromkeys(lacking)))
    reasons = () if refused is None else (refused.what, *([refused.next_step] if refused.next_step else []))
    return replace(found, still_missing=reasons)
