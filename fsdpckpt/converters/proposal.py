"""Finds the conversion that makes a checkpoint from which a framework resumes, by planning it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace

from fsdpckpt import flags
from fsdpckpt.converters.prepare import Prepared, prepare
from fsdpckpt.errors import FsdpckptError, UsageError
from fsdpckpt.flags import Message
from fsdpckpt.ir.checkpoint import Layout
from fsdpckpt.options import ConvertOptions
from fsdpckpt.options.declare import arguments_of
from fsdpckpt.producers import Flavor
from fsdpckpt.storage.sources import Sources
from fsdpckpt.verify.resumption import Resumption, form_refusals, lacking

_FILES = frozenset({".bin", ".ckpt", ".pt", ".pth", ".safetensors"})  # the target is mostly a directory


def with_proposal(
    found: Resumption, source: str, flavor: Flavor, sources: Sources, *, given: Mapping[str, object]
) -> Resumption:
    """``found`` with the command that makes a checkpoint that ``flavor`` resumes from, if it does not from ``source``.

    The conversion is planned, so a command that would be refused is never shown without the reason. ``given``: the
    options that say what ``source`` does not record, which the conversion needs too.
    """
    if found.resumes:
        return found
    name, suffix = os.path.splitext(os.path.basename(source.rstrip("/")) or "checkpoint")
    target = f"{name if suffix in _FILES else name + suffix}-for-{flavor.name}"  # step=1.5 has no suffix
    refused: FsdpckptError | None = None
    refusals = {Message(reason) for form in flavor.forms for reason in form_refusals(flavor, form)}
    if refusals.intersection(found.missing):
        given = {**given, "to": Layout.SHARDED}
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
        left = _lacking(prepared, flavor)
        if set(found.missing) <= set(left):  # the same again: only another save of the job helps
            return replace(found, still_missing=found.missing)
        return replace(found, command=command, still_missing=tuple(left))
    reasons: list[str | None] = [] if refused is None else [refused.what, refused.next_step]
    return replace(found, still_missing=tuple(filter(None, reasons)))


def _lacking(prepared: Prepared, flavor: Flavor) -> list[Message]:
    """What the planned checkpoint will lack, by the rules that a finished one is checked with."""
    form = prepared.decision.form
    if form is None:
        return []
    paths = [*(file.path for file in prepared.output.files), *(link.path for link in prepared.output.links)]
    names = {path.partition("/")[0] for path in paths}
    return list(dict.fromkeys(lacking(prepared.transformed.checkpoint, flavor, form, names)))
