"""Answers ``diff``."""

from __future__ import annotations

from dataclasses import replace

from fsdpckpt import flags
from fsdpckpt.ir import Section, SectionName, section_of
from fsdpckpt.ir.checkpoint import Checkpoint
from fsdpckpt.options.commands import DiffOptions
from fsdpckpt.options.declare import Scope, refuse_unused
from fsdpckpt.progress import Progress
from fsdpckpt.queries.opening import both_by_name, open_all, units_request_of
from fsdpckpt.storage.sources import Sources
from fsdpckpt.transform.selection import choose_section
from fsdpckpt.verify.compare import compare, only_section
from fsdpckpt.verify.difference import Difference
from fsdpckpt.verify.elements import Tolerance, without_repeats


def diff(a: str, b: str, options: DiffOptions, progress: Progress) -> Difference:
    """The differences between ``a`` and ``b``, both by name, in the sections that ``only`` names."""
    if not options.map:
        refuse_unused(options, Scope.MAP, "there is no map", f"add {flags.map_('FILE')}")
    exact = options.rtol is None and options.atol is None
    request = units_request_of(options)
    with Sources() as sources:
        opened = open_all([a, b], sources, options.units, options.ignore_file)
        distinct = [without_repeats(checkpoint, sources) for checkpoint in opened]
        notes: list[str] = []
        if options.map:
            from fsdpckpt.queries.mapped import mapped  # few comparisons need maps

            distinct[0], note = mapped(distinct[0], distinct[1], options, request, sources)
            notes.append(note)
        named, unused = both_by_name(distinct[0], distinct[1], sources, options, request)
        first, second = (only_section(_chosen(each, options.only), section_of(options.only)) for each in named)
        difference = compare(
            first,
            second,
            sources=sources,
            tolerance=None if exact else Tolerance(options.rtol or 0.0, options.atol or 0.0),
            strict=options.strict,
            threads=options.threads,
            progress=progress,
        )
        return replace(difference, notes=(*(notes or unused), *difference.notes))


def _chosen(checkpoint: Checkpoint, only: Section | SectionName | None) -> Checkpoint:
    """One side of a comparison with the section that ``only`` names as its main one: the one that it has, if it is the
    only one of its kind, as ``convert --only`` writes it.
    """
    section = section_of(only)
    alone = section is not None and not any(named.section is section for named in checkpoint.named)
    return choose_section(checkpoint, section if alone else only)
