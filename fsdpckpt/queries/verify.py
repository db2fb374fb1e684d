"""Answers ``verify``: whether a checkpoint is damaged, and with ``--for`` whether a framework resumes from it."""

from __future__ import annotations

from dataclasses import replace

from fsdpckpt import flags
from fsdpckpt.errors import SourceError
from fsdpckpt.ir.checkpoint import Checkpoint
from fsdpckpt.options.commands import VerifyOptions
from fsdpckpt.options.declare import Scope, refuse_unused
from fsdpckpt.producers import Flavor
from fsdpckpt.progress import Progress
from fsdpckpt.queries.opening import by_name, knowledge_of, open_all
from fsdpckpt.storage.sources import Sources
from fsdpckpt.verify.integrity import Verification, listing_all_damage, verify_checkpoint
from fsdpckpt.verify.measures import Finite
from fsdpckpt.verify.resumption import Resumption, check_resumption


def verify(source: str, options: VerifyOptions, progress: Progress) -> Verification:
    """All that is wrong with ``source``."""
    framework, searched = _framework(options), _searched(options)
    with Sources() as sources:
        try:
            with listing_all_damage(source, sources):
                (opened,) = open_all([source], sources, options.units, options.ignore_file)
        except SourceError as error:
            from fsdpckpt.describe import describe_incomplete, suggest_readable  # on the way to an error only

            left = describe_incomplete(source, error, sources, options.ignore_file)
            if left is not None:
                suggest_readable(error, left)
            raise
        checkpoint = by_name(opened, sources, options, listing=True, planned=framework is not None)
        if searched is not None:
            searched.require_matches(checkpoint)
        verification = verify_checkpoint(
            checkpoint,
            sources=sources,
            digests=options.digests,
            finite=searched,
            buffers=options.buffers,
            threads=options.threads,
            progress=progress,
        )
        if framework is None:
            return verification
        return replace(verification, resumption=_resumption(source, opened, framework, options, sources))


def _framework(options: VerifyOptions) -> Flavor | None:
    """The framework of ``--for``. Raises UsageError for one that cannot be written, and for options about none."""
    if options.flavor is None:
        refuse_unused(options, Scope.FRAMEWORK, "no framework is named", f"add {flags.for_('FLAVOR')}")
        return None
    from fsdpckpt.converters.target.form_choice import writable_flavor  # with all of the converters

    return writable_flavor(options.flavor, flags.for_)


def _searched(options: VerifyOptions) -> Finite | None:
    """What is searched for NaN and Inf. Raises UsageError for options about it if nothing is."""
    if not options.finite:
        refuse_unused(options, Scope.FINITE, "nothing is searched for NaN and Inf", f"add {flags.finite}")
        return None
    return Finite(options.include, options.exclude)


def _resumption(
    source: str, opened: Checkpoint, framework: Flavor, options: VerifyOptions, sources: Sources
) -> Resumption:
    """Whether ``framework`` resumes from ``opened``; if not, the conversion that makes what it resumes from."""
    from fsdpckpt.converters.proposal import with_proposal  # and the whole pipeline

    found = check_resumption(opened, framework, options.world_size, sources)
    given = knowledge_of(options)
    if options.ignore_file:
        given["ignore_file"] = options.ignore_file
    return with_proposal(found, source, framework, sources, given=given)
