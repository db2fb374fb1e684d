"""Finds the copies of a tensor that differ between ranks, and says what that means (``ir.buffers`` has the rule)."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from enum import Enum, auto
from typing import NamedTuple

import numpy as np

from fsdpckpt.ir.buffers import NO_BUFFERS, UNKNOWN_COPIES, copies_differ, known_buffers, trained_keys
from fsdpckpt.ir.checkpoint import (
    Checkpoint,
    ChunkChecksums,
    ModelState,
    NamedTensor,
    Problem,
    ProblemKind,
    Section,
)
from fsdpckpt.ir.names import clean
from fsdpckpt.ir.placements import PerRank, Sharded
from fsdpckpt.ir.tensors import Boxes, Int64Array, Tensor, first_equal
from fsdpckpt.ir.values import Value


class Meaning(Enum):
    """What it means that two ranks have different copies of a tensor."""

    CONTRADICTION = auto()  # they must be the same
    BUFFER = auto()  # the first is taken
    OPEN = auto()  # they may be a buffer's, or parts, or each rank's own


class DifferentCopies(NamedTuple):
    """``rank`` has another copy of a tensor than ``first_rank``. ``why``: what it means, for people."""

    named: NamedTensor
    first_rank: int
    rank: int
    meaning: Meaning
    why: str

    def problem(self) -> Problem:
        """Fatal, unless it is a buffer."""
        named, is_open = self.named, self.meaning is Meaning.OPEN
        message = f"{named.section} {named.key}: {copies_differ(self.first_rank, self.rank, self.why)}"
        fatal = self.meaning is not Meaning.BUFFER
        kind: ProblemKind = "copies" if is_open else "replica"
        return Problem(kind, message, fatal=fatal, key=named.key, rank=self.rank, section=named.section)


def mark_open_copies(checkpoint: Checkpoint, found: Iterable[DifferentCopies]) -> None:
    """Mark the tensors of the model of which ranks have different copies, and nothing says why. ``found``: what
    ``copies_of_plain_tensors`` says of ``checkpoint``.
    """
    if checkpoint.model is None:
        return
    for different in found:
        if different.meaning is Meaning.OPEN:
            cut = PerRank((different.first_rank, different.rank))
            checkpoint.model.params[different.named.param] = replace(different.named.tensor, cut=cut)


def contradicting_copies(found: Iterable[DifferentCopies]) -> Iterator[Problem]:
    """Of ``copies_of_plain_tensors``, those of which no rank's can be taken, but for those of which
    ``ir.buffers.undecided_copies`` says it.
    """
    return (different.problem() for different in found if different.meaning is Meaning.CONTRADICTION)


def copies_of_plain_tensors(checkpoint: Checkpoint) -> Iterator[DifferentCopies]:
    """The model's plain tensors of which ranks have different copies, as far as checksums show it."""
    params = checkpoint.params
    plain: dict[str, Tensor | Value] = {
        key: leaf
        for key, leaf in params.items()
        if isinstance(leaf, Tensor) and len(leaf.chunks) > 1 and not leaf.sharded
    }
    if not plain:
        return
    judge = CopiesJudge(checkpoint, (), trained_keys(checkpoint))
    alone = replace(checkpoint, model=ModelState(plain), optim=None, named=(), extra={}, rank_extra=())
    yield from differing_copies(alone, judge)


def differing_copies(checkpoint: Checkpoint, judge: CopiesJudge) -> Iterator[DifferentCopies]:
    """Each tensor of the model or the optimizer of which two ranks have different copies.

    Compares the CRC-32s in the source's files; ``unsummed_copies`` lists what has none.
    """
    if all(len(tensor.chunks) < 2 for tensor in checkpoint.leaves()):  # as in one file
        return
    checksums = ChunkChecksums(checkpoint.checksums)
    for named, rows, first in _copied(checkpoint):
        crcs = checksums.of(named.tensor, rows)
        differing = np.flatnonzero((crcs >= 0) & (crcs[first] >= 0) & (crcs != crcs[first]))
        if len(differing):
            ranks = named.tensor.chunks.rank
            yield judge.judge(named, int(ranks[rows[first[differing[0]]]]), int(ranks[rows[differing[0]]]))


def unsummed_copies(checkpoint: Checkpoint) -> list[NamedTensor]:
    """The plain tensors of which some rank's copy has no checksum: only their bytes show whether copies differ.

    Without replicas of shards, which are marked as such, and numbers in the optimizer (``step``).
    """
    checksums = ChunkChecksums(checkpoint.checksums)
    return [
        named
        for named, rows, _ in _copied(checkpoint)
        if not isinstance(named.tensor.cut, Sharded)
        and (named.tensor.ndim or named.section is Section.MODEL)
        and (checksums.of(named.tensor, rows) < 0).any()
    ]


class CopiesJudge:
    """Says what it means that two ranks have different copies of a tensor.

    A contradiction if ranks must agree: of optimizer states, trained parameters, and shards that have replicas. Of a
    known buffer the first copy is taken. Of any other tensor of the model nothing says whether the copies are parts, or
    each rank's own. ``buffers``: the globs of ``--buffers``; ``trained``: the names of trained
    parameters, also where ``checkpoint`` has no optimizer any more.
    """

    def __init__(self, checkpoint: Checkpoint, buffers: Sequence[str], trained: Collection[str]) -> None:
        self._buffers = known_buffers(checkpoint, buffers)
        self._trained = {name for key in trained for name in (clean(key), clean(key).removeprefix("module."))}
        self._no_buffers = tuple(buffers) == NO_BUFFERS

    def judge(self, named: NamedTensor, first_rank: int, rank: int) -> DifferentCopies:
        """What it means that ``rank`` has another copy of ``named`` than ``first_rank``."""
        of_model = named.section is Section.MODEL and named.state is None
        parameter = of_model and (self._no_buffers or clean(named.param) in self._trained)
        if named.section is Section.OPTIM or bool(named.tensor.sharded) or parameter:
            meaning, why = Meaning.CONTRADICTION, "it is a parameter" if parameter else "they are replicas"
        elif not of_model or named.param in self._buffers:
            meaning, why = Meaning.BUFFER, "the first is taken"
        else:
            meaning, why = Meaning.OPEN, UNKNOWN_COPIES
        return DifferentCopies(named, first_rank, rank, meaning, why)


def _copied(checkpoint: Checkpoint) -> Iterator[tuple[NamedTensor, Int64Array, Int64Array]]:
    """Each tensor of the model or the optimizer of which several chunks are copies, with what ``_copies_in`` returns;
    what several parameters share once.
    """
    seen: set[tuple[object, ...]] = set()
    copies: dict[Boxes, tuple[Int64Array, Int64Array]] = {}  # of tensors that are cut alike
    for named in checkpoint.tensors():
        tensor, chunks = named.tensor, named.tensor.chunks
        if len(chunks) < 2 or named.section is Section.EXTRA:
            continue
        if chunks.boxes not in copies:
            copies[chunks.boxes] = _copies_in(tensor)
        rows, first = copies[chunks.boxes]
        if not len(rows):
            continue
        location = tensor.location()  # of a part of another tensor it is another one, though it begins where that does
        if location in seen:  # the parameters of one unit share its ``step``
            continue
        if location is not None:
            seen.add(location)
        yield named, rows, first


def _copies_in(tensor: Tensor) -> tuple[Int64Array, Int64Array]:
    """The rows of the chunks with elements, and for each which of these rows is the first with its box and strides.

    No rows if there are no copies.
    """
    chunks = tensor.chunks
    if int(chunks.size.prod(axis=1).sum()) <= tensor.numel:
        return np.empty(0, np.int64), np.empty(0, np.int64)
    rows = np.flatnonzero((chunks.size > 0).all(axis=1))
    return rows, first_equal(np.concatenate([chunks.start, chunks.size, chunks.stride], axis=1)[rows])
