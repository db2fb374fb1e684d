"""Opens the finished output again, through the readers, and holds it against what was meant to be written."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from fsdpckpt.errors import FsdpckptError, InternalError
from fsdpckpt.flat.match import Mismatch, match
from fsdpckpt.flat.unflatten import unflatten
from fsdpckpt.ir.checkpoint import Checkpoint, NamedTensor, Section, SourceFile
from fsdpckpt.ir.tensors import Tensor
from fsdpckpt.ir.units import Units
from fsdpckpt.options import VerifyLevel
from fsdpckpt.progress import Progress
from fsdpckpt.readers.detect import open_checkpoint
from fsdpckpt.storage.sources import Sources
from fsdpckpt.transform.parameter_order import from_units
from fsdpckpt.transform.rekey import to_names
from fsdpckpt.verify.elements import first_difference
from fsdpckpt.writers.protocol import DtypeRule

__all__ = ["Pair", "Verdict", "check_output", "compared", "digests_of", "matched"]

Verdict: TypeAlias = str | int
"""A tensor's SHA-256, or the number of its first element that is not as in the source."""


@dataclass(frozen=True, slots=True)
class Pair:
    """A tensor of the source, and what was written for it. ``name``: ``<section> <key>``."""

    name: str
    source: Tensor
    written: Tensor


def check_output(
    expected: Checkpoint,
    path: str,
    *,
    units: Units | None,
    dtypes: DtypeRule,
    level: VerifyLevel,
    sources: Sources,
    progress: Progress,
    max_memory: int | None = None,
) -> dict[str, str]:
    """Every tensor of ``expected`` must be in the output at ``path`` with its shape, dtype and bytes in its file.

    With level ``full`` every element is read from both sides and compared, casts applied; returns the SHA-256 of each
    tensor by ``<section> <key>``, empty with any other level. ``max_memory``: bytes of buffers to read with. Raises
    InternalError: an output that fails is discarded, never committed.
    """
    with Sources() as opener:
        pairs, files = matched(expected, path, units=units, dtypes=dtypes, level=level, opener=opener)
        if level is not VerifyLevel.FULL:
            return {}
        found = compared(pairs, (expected.files, sources), (files, opener), progress, max_memory=max_memory)
    return digests_of(pairs, found, path)


def matched(
    expected: Checkpoint, path: str, *, units: Units | None, dtypes: DtypeRule, level: VerifyLevel, opener: Sources
) -> tuple[list[Pair], Sequence[SourceFile]]:
    """Every tensor of ``expected`` with the one that was written for it, and the files that these lie in.

    ``opener`` opens the output. Raises InternalError when they are not the same tensors.
    """
    written = _reopen(path, opener, locate=level is VerifyLevel.FULL)
    if units is not None:
        written = _named(written, units, path)
    wrong = [problem.message for problem in written.problems if problem.fatal]
    empty = frozenset(name for name, param in units.params().items() if not param.numel) if units else frozenset()
    found = {(named.section, named.key): named for named in _compared(written, empty)}
    pairs = []
    for named in _compared(expected, empty):
        other = found.pop((named.section, named.key), None)
        dtype = dtypes.of(named.section, named.state, named.tensor)
        if other is None:
            wrong.append(f"{named.section} {named.key} was not written")
        elif (other.tensor.shape, other.tensor.dtype) != (named.tensor.shape, dtype):
            wrong.append(f"{named.section} {named.key} was written as {_form(other)}, not as {_form(named)}")
        else:
            pairs.append(Pair(f"{named.section} {named.key}", named.tensor, other.tensor))
    wrong.extend(f"{named.section} {named.key} was written and should not be there" for named in found.values())
    if wrong:
        raise _not_as_planned(path, wrong)
    return pairs, written.files


def compared(
    pairs: Sequence[Pair],
    source: tuple[Sequence[SourceFile], Sources],
    written: tuple[Sequence[SourceFile], Sources],
    progress: Progress,
    *,
    max_memory: int | None,
) -> dict[str, Verdict]:
    """Each of ``pairs`` read from both sides: its SHA-256, or the element where they differ. By name."""
    progress.begin("verify", sum(pair.written.nbytes for pair in pairs))
    found: dict[str, Verdict] = {}
    for pair in pairs:
        total = hashlib.sha256()
        at = first_difference((pair.source, *source), (pair.written, *written), total, max_memory=max_memory)
        found[pair.name] = total.hexdigest() if at is None else at
        progress.advance(pair.written.nbytes)
    progress.end()
    return found


def digests_of(pairs: Sequence[Pair], found: Mapping[str, Verdict], path: str) -> dict[str, str]:
    """The SHA-256 of each of ``pairs``, in their order. Raises InternalError for those that differ."""
    verdicts = {pair.name: found[pair.name] for pair in pairs}
    wrong = [
        f"{name} differs from the source at element {at}" for name, at in verdicts.items() if not isinstance(at, str)
    ]
    if wrong:
        raise _not_as_planned(path, wrong)
    return {name: digest for name, digest in verdicts.items() if isinstance(digest, str)}


def _not_as_planned(path: str, wrong: Sequence[str]) -> InternalError:
    return InternalError(
        f"the output does not read back as it was planned; {path} was discarded",
        details=wrong[:20],
        next_step="please report this with the command line and the output of `fsdpckpt inspect` on the source",
    )


def _reopen(path: str, sources: Sources, *, locate: bool) -> Checkpoint:
    try:
        return open_checkpoint(path, sources=sources, locate=locate)
    except FsdpckptError as error:  # our own output: whatever is wrong with it is no fault of the user's source
        raise InternalError(f"the output does not read back: {error.what}", details=error.details) from error


def _named(written: Checkpoint, units: Units, path: str) -> Checkpoint:
    """Flattened output as whole tensors by name, proved by the units it was written with."""
    found = match(written, units)
    if isinstance(found, Mismatch):
        raise InternalError(
            f"the flattened output does not fit its own units; {path} was discarded", details=found.contradictions[:20]
        )
    named = unflatten(written, found)
    if named.optim is None or named.optim.key_type != "id":
        return named
    return to_names(named, from_units(units, "the units it was written with"))  # NO_SHARD and one rank cut nothing


def _compared(checkpoint: Checkpoint, empty: Collection[str]) -> Iterator[NamedTensor]:
    """Model and optimizer states: their keys are the same in every container, those of extras follow each container.

    States of parameters without elements, ``empty``, have no place in slices.
    """
    for named in checkpoint.tensors():
        state = named.section is Section.OPTIM and named.state is not None and named.param not in empty
        if named.section is Section.MODEL or state:
            yield named


def _form(named: NamedTensor) -> str:
    return f"{named.tensor.dtype.name} {list(named.tensor.shape)}"
