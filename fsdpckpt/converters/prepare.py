"""Prepares a conversion: reads, transforms, lays out and plans. Reads only headers and writes nothing.

Only rank 0 does this, and ``--dry-run`` does nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from fsdpckpt import flags
from fsdpckpt.converters.lay_out import lay_out
from fsdpckpt.converters.linking import Linking, choose_linking, link_equal_files
from fsdpckpt.converters.steps.draft import Draft, TransformedCheckpoint
from fsdpckpt.converters.steps.knowledge import Knowledge
from fsdpckpt.converters.target.decide import decide, of_one_section
from fsdpckpt.converters.target.decision import Decision
from fsdpckpt.converters.transform import begin, transform
from fsdpckpt.errors import (
    FsdpckptError,
    SourceCorruptError,
    SourceError,
    SourceIncompleteError,
    TargetUnwritableError,
)
from fsdpckpt.execute.recorded import recorded_checksums
from fsdpckpt.flat.units.from_options import listed_parameters, units_request
from fsdpckpt.flat.units.presence import is_flattened
from fsdpckpt.flat.units.request import UnitsRequest, load_units
from fsdpckpt.flat.units.sections import labels_of, places_of, with_parameters_of_section
from fsdpckpt.ir import Section, section_of
from fsdpckpt.ir.checkpoint import Checkpoint, Checksums
from fsdpckpt.ir.targets import Target, TargetFile
from fsdpckpt.options import ConvertOptions
from fsdpckpt.options.declare import Scope, given
from fsdpckpt.plan import Plan, make_plan
from fsdpckpt.readers.dcp.item_numbers import items_of
from fsdpckpt.readers.dcp.items import is_located
from fsdpckpt.readers.detect import open_checkpoint
from fsdpckpt.readers.masters import has_untied_masters, with_masters
from fsdpckpt.readers.protocol import Locate, require_matches
from fsdpckpt.storage.sources import Sources
from fsdpckpt.text import size_text
from fsdpckpt.transform.selection import NoKeyMatchesError, choose_section, named_section
from fsdpckpt.verify.elements import without_repeats
from fsdpckpt.verify.masters import require_rounded


@dataclass(frozen=True, slots=True, eq=False)
class Prepared:
    """A conversion that is ready to be executed."""

    options: ConvertOptions  # as they were given, with the dtype that the source states for ``auto``
    transformed: TransformedCheckpoint
    decision: Decision
    output: Target
    plan: Plan
    linking: Linking

    def outline(self) -> Prepared:
        """What is needed after the plan has run: without literals, write items and copies."""
        files = [TargetFile(file.path, nbytes=file.nbytes) for file in self.output.files]
        return replace(self, output=replace(self.output, files=files), plan=self.plan.outline())


_MOST_BYTES = 1 << 58  # 256 PiB: casts, and copies for several ranks, leave their total below 2**63


def prepare(source: str, target: str, options: ConvertOptions, sources: Sources) -> Prepared:
    """Read ``source``, transform it, lay out ``target`` and plan the copies. Reads tensor data only where a proof needs
    some of it.
    """
    asked = _Asked(source, target, options, units_request(options, listed_parameters(options)), sources)
    try:
        draft, decision = _read_and_transform(asked)
    except (SourceIncompleteError, SourceCorruptError) as error:
        if options.only is None and (readable := _what_can_be_read(source, error, options, sources)) is not None:
            steps = [error.next_step or error.usual_next_step, readable]
            error.next_step = "; or ".join(f"{step}" for step in steps)
        raise
    checkpoint = draft.checkpoint
    _require_possible_size(checkpoint, target)
    files = checkpoint.files
    linking = choose_linking(options.link, files, target)
    totals_only = options.dry_run and not linking.files  # links are found by comparing the plan of each file
    output = lay_out(draft.transformed, decision, draft.side_files, linking.files)
    output, plan = link_equal_files(output, make_plan(output, totals_only=totals_only), linking, files, sources)
    output.notes += linking.notes(output, files)
    recorded = recorded_checksums(plan, checkpoint, frozenset(link.source for link in output.links))
    checkpoint.checksums = Checksums.joined([checkpoint.checksums, recorded.checksums])
    output.notes += recorded.notes
    as_given = replace(options, dtype=decision.options.dtype)
    return Prepared(as_given, draft.transformed, decision, output, plan, linking)


def _what_can_be_read(source: str, error: SourceError, options: ConvertOptions, sources: Sources) -> str | None:
    """How to take what needs none of the files that are missing or damaged; None if there is nothing."""
    from fsdpckpt.describe import describe_incomplete  # on the way to an error only

    incomplete = describe_incomplete(source, error, sources, options.ignore_file)
    if incomplete is None:
        return None
    for section in incomplete.readable:
        if str(flags.only(section)) in str(error.next_step):
            return None  # it says so
        return f"take the {_WORDS[section]} alone, which is complete: add {flags.only(section)}"
    return None


_WORDS = {Section.MODEL: "model", Section.OPTIM: "optimizer"}


def _require_possible_size(checkpoint: Checkpoint, target: str) -> None:
    """Raises TargetUnwritableError for tensors of more bytes than can be counted in 64 bits when they are laid out: a
    small file may hold any number of expanded ones.
    """
    total = sum(tensor.nbytes for tensor in checkpoint.leaves())
    if total > _MOST_BYTES:
        raise TargetUnwritableError(
            f"{target} would hold {size_text(total)}, more than any file system",
            file=target,
            why="SRC has expanded tensors, each of which stands for many more bytes than are stored",
            next_step=f"leave them out with {flags.exclude('GLOB')}",
        )


class _Asked(NamedTuple):
    """What is asked for. ``request``: what the options say about units; a file of names is read once for it."""

    source: str
    target: str
    options: ConvertOptions
    request: UnitsRequest
    sources: Sources


def _read_and_transform(asked: _Asked) -> tuple[Draft, Decision]:
    """Read SRC, decide what is written, and transform what was read into it."""
    opened = _read_what_is_taken(asked)
    require_matches(asked.options.ignore_file, opened.checkpoint)
    return _transform(opened, asked)


def _read_what_is_taken(asked: _Asked) -> _Opened:
    """SRC, with everything located that options take of it: other items of a DCP directory are not opened."""
    options = asked.options
    takes_all = options.only is None and not options.include and not options.exclude
    if takes_all or options.map:  # a map compares numbers of several parameters
        return _read(asked, Locate.ALL)
    outline = _read(asked, Locate.NOTHING)
    if all(map(is_located, outline.checkpoint.leaves())):  # in no DCP directory
        return outline
    # The metadata is parsed once: what follows takes it from ``sources`` and opens items.
    return _read(asked, _what_to_locate(outline, asked))


def _what_to_locate(outline: _Opened, asked: _Asked) -> Locate:
    """The items of a DCP directory that hold what options take: those of the tensors that are left when its
    metadata alone is transformed. All if flat parameters or master weights have to be proved by their bytes.

    Raises UsageError for a glob that matches nothing: items have no other names.
    """
    checkpoint = outline.checkpoint
    if checkpoint.origin.has_masters or is_flattened(checkpoint, asked.sources, asked.request):
        return Locate.ALL
    try:
        draft, _ = _transform(outline, asked)
    except NoKeyMatchesError:
        raise
    except FsdpckptError:  # the items may show otherwise; if not, the error lists what is wrong with all of them
        return Locate.ALL
    taken = [*draft.checkpoint.leaves(), *draft.side_files.values()]
    return Locate.only(items_of(taken))


def _transform(opened: _Opened, asked: _Asked) -> tuple[Draft, Decision]:
    decision = decide(asked.target, asked.options, opened.checkpoint, asked.sources)
    begun = begin(opened.checkpoint, decision, asked.sources, request=opened.request, places=opened.places)
    return transform(begun, decision), decision


class _Opened(NamedTuple):
    """SRC as it was read. Where ``--only`` names one of several sections, the section alone."""

    checkpoint: Checkpoint
    places: tuple[str, ...]  # the keys of that section, and of its model
    request: UnitsRequest  # what the options about units say of it


def _read(asked: _Asked, locate: Locate) -> _Opened:
    options, sources = asked.options, asked.sources
    whole = open_checkpoint(
        asked.source,
        sources=sources,
        locate=locate,
        only=section_of(options.only),
        units=load_units(options.units, sources) if options.units is not None else None,
        ignore_file=options.ignore_file,
    )
    if section_of(options.only) is not Section.OPTIM:
        require_rounded(whole, sources)
    # The copies have been compared with the masters, and are not written.
    distinct = without_repeats(replace(whole, copies={}), sources)
    section = named_section(distinct, options.only)
    chosen = choose_section(distinct, options.only)
    checkpoint = _with_told_masters(chosen, of_one_section(options), asked.request, sources)
    request = replace(asked.request, sections=labels_of(distinct, section))
    if section is not None:
        request = with_parameters_of_section(request, distinct, section)
    return _Opened(checkpoint, places_of(distinct, section), request)


def _with_told_masters(
    checkpoint: Checkpoint, options: ConvertOptions, request: UnitsRequest, sources: Sources
) -> Checkpoint:
    """``checkpoint`` with the float32 weights that only ``options`` tie to parameters: a reader of the target, which
    has the names, would tie them. ``request``: what they say about units.
    """
    if options.only is Section.OPTIM or not given(options, Scope.KNOWLEDGE) or not has_untied_masters(checkpoint):
        return checkpoint
    named = Knowledge(request, sources).find_named(checkpoint)
    # Rekeying for the target asks again, and says what is missing.
    return checkpoint if isinstance(named, FsdpckptError) else with_masters(named, sources)
