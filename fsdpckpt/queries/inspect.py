"""Answers ``inspect``."""

from __future__ import annotations

from dataclasses import replace

from fsdpckpt.describe import Description, describe
from fsdpckpt.ir.invariants import problems
from fsdpckpt.options.commands import InspectOptions
from fsdpckpt.progress import Progress
from fsdpckpt.queries.opening import by_name, open_all
from fsdpckpt.readers.protocol import Locate
from fsdpckpt.storage.sources import Sources


def inspect(source: str, options: InspectOptions, progress: Progress) -> Description:
    """The description of ``source``, with statistics of its values if they are asked for."""
    with Sources() as sources:
        locate = Locate.ALL if options.ranks or options.stats else Locate.NOTHING
        (opened,) = open_all([source], sources, options.units, options.ignore_file, locate=locate)
        named = by_name(opened, sources, options)
        # Tensors that were made of slices have problems of their own: parts that no slice has.
        checkpoint = named if named is opened else named.with_problems(*problems(named))
        description = describe(checkpoint, options.keys, options.section)
        stored = opened.optim.key_type if opened.optim is not None else None
        if not options.stats:
            return replace(description, key_type=stored)
        from fsdpckpt.verify.measures import stats_of

        measured = stats_of(
            checkpoint, description.tensors, sources=sources, threads=options.threads, progress=progress
        )
        return replace(description, key_type=stored, stats=tuple(measured))
