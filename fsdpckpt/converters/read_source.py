"""Reads SRC: what options take of it, and no more of a DCP directory.

Its metadata alone says what options take; from that follows which items are opened (``Locate``), and it is read once.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from fsdpckpt.converters.steps.check import fatal_problems
from fsdpckpt.converters.steps.draft import Draft
from fsdpckpt.converters.steps.knowledge import Knowledge
from fsdpckpt.converters.target.decide import decide, of_one_section
from fsdpckpt.converters.target.decision import Decision
from fsdpckpt.converters.transform import begin, find_selection
from fsdpckpt.errors import FsdpckptError
from fsdpckpt.flat.units.from_options import listed_parameters, units_request
from fsdpckpt.flat.units.presence import is_flattened
from fsdpckpt.flat.units.request import UnitsRequest, load_units
from fsdpckpt.flat.units.sections import labels_of, places_of, with_parameters_of_section
from fsdpckpt.ir import Section, section_of
from fsdpckpt.ir.checkpoint import Checkpoint
from fsdpckpt.options import ConvertOptions
from fsdpckpt.options.declare import Scope, given
from fsdpckpt.readers.dcp.item_numbers import items_of
from fsdpckpt.readers.dcp.items import is_located
from fsdpckpt.readers.detect import OpenOptions, open_checkpoint
from fsdpckpt.readers.masters import has_untied_masters, with_masters
from fsdpckpt.readers.protocol import Locate
from fsdpckpt.storage.sources import Sources
from fsdpckpt.transform.selection import choose_section, named_section
from fsdpckpt.verify.elements import without_repeats
from fsdpckpt.verify.masters import require_rounded


@dataclass(frozen=True, slots=True)
class Asked:
    """What is asked for."""

    source: str
    target: str
    options: ConvertOptions
    request: UnitsRequest  # what the options say about units
    sources: Sources

    @classmethod
    def by(cls, source: str, target: str, options: ConvertOptions, sources: Sources) -> Asked:
        """What the command asks for. Raises SourceError if a list of parameters cannot be read."""
        return cls(source, target, options, units_request(options, listed_parameters(options)), sources)


@dataclass(frozen=True, slots=True)
class Opened:
    """SRC as it was read. Where ``--only`` names one of several sections, the section alone."""

    checkpoint: Checkpoint
    places: tuple[str, ...]  # the keys of that section, and of its model
    request: UnitsRequest  # what the options about units say of it

    def begun(self, decision: Decision, sources: Sources) -> Draft:
        """The draft before the first step."""
        return begin(self.checkpoint, decision, sources, request=self.request, places=self.places)


def read_source(asked: Asked) -> Opened:
    """SRC, with everything located that options take of it: other items of a DCP directory are not opened."""
    options = asked.options
    takes_all = options.only is None and not options.include and not options.exclude
    if takes_all or options.map:  # a map compares numbers of several parameters
        return _proved(_open(asked, Locate.ALL), asked)
    outline = _open(asked, Locate.NOTHING)
    if all(map(is_located, outline.leaves())):  # in no DCP directory
        return _proved(outline, asked)
    # The metadata is parsed once: this takes it from ``sources`` and opens items.
    return _proved(_open(asked, items_to_open(outline, asked)), asked)


def _open(asked: Asked, locate: Locate) -> Checkpoint:
    options = asked.options
    units = load_units(options.units, asked.sources) if options.units is not None else None
    known = OpenOptions(only=section_of(options.only), units=units, ignore_file=options.ignore_file)
    return open_checkpoint(asked.source, sources=asked.sources, locate=locate, options=known)


def items_to_open(outline: Checkpoint, asked: Asked) -> Locate:
    """The items of a DCP directory that hold what options take of it. ``outline``: what its metadata alone says.

    Raises UsageError for a glob that matches nothing, or that leaves nothing: items have no other names.
    """
    opened = _chosen(replace(outline, copies={}), asked)
    checkpoint = opened.checkpoint
    if checkpoint.origin.has_masters or is_flattened(checkpoint, asked.sources, asked.request):
        return Locate.ALL  # they are proved by their bytes
    if fatal_problems(checkpoint, section_of(asked.options.only)):
        return Locate.ALL  # the items may show otherwise; if not, the error lists what is wrong with all of them
    decision = decide(asked.target, asked.options, checkpoint, asked.sources)
    selection = find_selection(opened.begun(decision, asked.sources), decision)
    if isinstance(selection, FsdpckptError):
        return Locate.ALL  # equal bytes may say more of which parameter an id is, and the error does
    return Locate.only(items_of([*selection.checkpoint.leaves(), *selection.side_files.values()]))


def _chosen(whole: Checkpoint, asked: Asked) -> Opened:
    """What ``--only`` names of ``whole``, with what the other options say of it."""
    only = asked.options.only
    section = named_section(whole, only)
    request = replace(asked.request, sections=labels_of(whole, section))
    if section is not None:
        request = with_parameters_of_section(request, whole, section)
    return Opened(choose_section(whole, only), places_of(whole, section), request)


def _proved(whole: Checkpoint, asked: Asked) -> Opened:
    """``_chosen``, of what was located: master weights are compared with their copies, which are not written, and what
    is stored again elsewhere is left out.
    """
    sources = asked.sources
    if section_of(asked.options.only) is not Section.OPTIM:
        require_rounded(whole, sources)
    distinct = without_repeats(replace(whole, copies={}), sources)
    opened = _chosen(distinct, asked)
    return replace(opened, checkpoint=_with_told_masters(opened.checkpoint, asked))


def _with_told_masters(checkpoint: Checkpoint, asked: Asked) -> Checkpoint:
    """``checkpoint`` with the float32 weights that only options tie to parameters: a reader of the target, which has
    the names, would tie them.
    """
    options = of_one_section(asked.options)
    if options.only is Section.OPTIM or not given(options, Scope.KNOWLEDGE) or not has_untied_masters(checkpoint):
        return checkpoint
    named = Knowledge(asked.request, asked.sources).find_named(checkpoint)
    # Rekeying for the target asks again, and says what is missing.
    return checkpoint if isinstance(named, FsdpckptError) else with_masters(named, asked.sources)
