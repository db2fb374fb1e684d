"""Opens what a query is about, by name as far as options, units files and other checkpoints know names."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from fsdpckpt.flat.units.from_options import listed_parameters, units_request
from fsdpckpt.flat.units.request import UnitsRequest, load_units
from fsdpckpt.ir import Layout
from fsdpckpt.ir.buffers import known_buffers, with_named_buffers
from fsdpckpt.ir.checkpoint import Checkpoint, Note
from fsdpckpt.ir.sections import optimizers
from fsdpckpt.options import ConvertOptions
from fsdpckpt.options.commands import DiffOptions, KnowledgeOptions, VerifyOptions
from fsdpckpt.options.declare import OptionRecord, options_of
from fsdpckpt.producers.recognition import id_rule_of
from fsdpckpt.readers.detect import OpenOptions, open_checkpoint
from fsdpckpt.readers.protocol import Locate, require_matches
from fsdpckpt.storage.sources import Sources

_KNOWLEDGE = ("units", *(option.name for option in options_of(KnowledgeOptions)))


def knowledge_of(options: OptionRecord) -> dict[str, object]:
    """What ``options`` say of units, names and order: those that are given, by name."""
    values = {name: getattr(options, name) for name in _KNOWLEDGE}
    return {name: value for name, value in values.items() if value not in (None, ())}


def units_request_of(options: OptionRecord) -> UnitsRequest:
    """What any record of options says about units. Raises what ``listed_parameters`` raises."""
    chosen = ConvertOptions.of(**knowledge_of(options))
    return units_request(chosen, listed_parameters(chosen))


def open_all(
    paths: Sequence[str | os.PathLike[str]],
    sources: Sources,
    units: str | None,
    ignore_file: tuple[str, ...],
    *,
    locate: Locate = Locate.ALL,
) -> list[Checkpoint]:
    """The checkpoints at ``paths``. ``units``: a units file. Raises UsageError for a glob of ``ignore_file`` that
    matches none of their files.
    """
    loaded = load_units(units, sources) if units is not None else None
    known = OpenOptions(units=loaded, ignore_file=ignore_file)
    opened = [open_checkpoint(os.fsdecode(path), sources=sources, locate=locate, options=known) for path in paths]
    require_matches(ignore_file, *opened)
    return opened


def by_name(
    checkpoint: Checkpoint,
    sources: Sources,
    options: OptionRecord,
    *,
    listing: bool = False,
    planned: bool = False,
) -> Checkpoint:
    """Flattened shards by name, if ``options``, a file beside them or their own model section say the units; any other
    checkpoint with its buffers, if ``options`` name some. A note names options that have no effect, unless a conversion
    is ``planned`` with them.
    """
    given = knowledge_of(options)
    if checkpoint.layout is not Layout.FLATTENED and not _has_units(checkpoint) and not given:
        return checkpoint
    from fsdpckpt.flat.logical import logical  # takes time, and most checkpoints need none of it

    named = logical(checkpoint, sources, units_request_of(options), listing=listing)
    if named is not checkpoint or not given:
        return named
    (read,), unused = _with_buffers([checkpoint], given, needed=planned)
    return read.noted(*(Note("unused", message, for_verify=True) for message in unused))


def _has_units(checkpoint: Checkpoint) -> bool:
    """Whether units say how to read it, or one of several sections: on one rank nothing shows that it is flattened."""
    return checkpoint.units is not None or any(named.units is not None for named in checkpoint.named)


def _with_buffers(
    sides: Sequence[Checkpoint], given: Mapping[str, object], *, needed: bool = False
) -> tuple[list[Checkpoint], list[str]]:
    """The checkpoints without the problems that ``--buffers`` settles; and what to say of that which is ``given`` and
    has no effect on any of them. ``needed``: nothing, as something else asks for it.
    """
    globs = given.get("buffers")
    buffers = globs if isinstance(globs, tuple) else ()
    told = any(known_buffers(side, buffers) != known_buffers(side) for side in sides)
    unused = [] if needed else [name for name in given if name != "buffers" or not told]
    read = [with_named_buffers(side, buffers) for side in sides]
    if not unused:
        return read, []
    listed = " and ".join(f"{option.flag}" for option in options_of(VerifyOptions) if option.name in unused)
    which = " and ".join(dict.fromkeys(side.source for side in sides))
    return read, [f"{listed} had no effect: nothing else is needed to read {which}"]


def both_by_name(
    a: Checkpoint, b: Checkpoint, sources: Sources, options: DiffOptions, request: UnitsRequest
) -> tuple[list[Checkpoint], list[str]]:
    """Both sides of a comparison with flattened shards by name: each is help for the other. Also returns what
    ``_with_buffers`` does. ``request``: what ``options`` say about units.
    """
    flattened = any(each.layout is Layout.FLATTENED or _has_units(each) for each in (a, b))
    if not flattened and not knowledge_of(options):
        return [a, b], []
    from fsdpckpt.flat.logical import logical, require_comparable  # as in ``by_name``

    named = [logical(each, sources, request, other=other) for each, other in ((a, b), (b, a))]
    require_comparable(named[0], named[1], request, sources)
    given = knowledge_of(options)
    if given and _keyed_differently(*named):
        from fsdpckpt.converters.steps.knowledge import Knowledge

        knowledge = Knowledge(request, sources)
        return [knowledge.named(each) for each in named], []
    read_as_they_are = given and all(each is one for each, one in zip(named, (a, b), strict=True))
    return _with_buffers(named, given) if read_as_they_are else (named, [])


def _keyed_differently(a: Checkpoint, b: Checkpoint) -> bool:
    """Whether a key of an optimizer of one side may be another parameter's on the other side."""
    rules = {
        id_rule_of(each) if optim.key_type == "id" else None
        for each in (a, b)
        for optim in optimizers(each)
        if optim.key_type is not None
    }
    return len(rules) > 1
