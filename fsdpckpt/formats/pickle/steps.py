"""What the scanner matches at once, the opcodes up to the next record and the record; questions about opcodes alone."""

from __future__ import annotations

import re
from functools import cache
from typing import Protocol

from fsdpckpt.formats.pickle.opcodes import opcode_end
from fsdpckpt.formats.pickle.operands import MEMOIZE, NotScannedError
from fsdpckpt.formats.pickle.patterns import GET, NEW, in_frame, plain
from fsdpckpt.formats.pickle.records import Record

SHORT_TEXT_OPCODE = 0x8C
COPIED = 1  # the group of opcodes that are copied; those of records come after it
_NEW_NBYTES = 2  # of the opcodes that make an instance
_MAX_COPIED = 1023  # opcodes that are copied at once: where a frame ends among them, they are read from the first on


class Skipped(Protocol):
    """The last attribute of a pickle, which nobody reads. ``key``: the opcodes of its name; ``begin``: the first of
    its value, which becomes None; ``end``: those that end the pickle after it.
    """

    key: bytes
    begin: bytes
    end: bytes
    ended: bool

    def past(self, data: bytes, at: int, limit: int) -> int:
        """Skip from ``at`` at least to ``limit``; return where an opcode begins."""
        ...


@cache
def step_pattern(records: tuple[Record, ...], numbered: bool, skipped: bytes) -> re.Pattern[bytes]:  # noqa: FBT001 (a key of the cache)
    """A pattern for opcodes up to the next instance, which may be a record, and for what comes then: a group for the
    former, for records of each kind, and for what is skipped. It matches everywhere, if only nothing.
    """
    get = GET + rb"(?=.{%d})(?!%b)" % (_NEW_NBYTES, NEW)
    copied = rb"(?:%b|%b){0,%d}+" % (plain(numbered=numbered, skipped=skipped), get, _MAX_COPIED)
    runs = b"".join(rb"(" + record.in_a_row + rb")|" for record in records)
    skip = re.escape(skipped) if skipped else rb"(?!)"
    return re.compile(rb"(" + copied + rb")(?:" + runs + rb"(" + skip + rb"))?+", re.DOTALL)


@cache
def references_pattern(numbered: bool) -> re.Pattern[bytes]:  # noqa: FBT001 (a key of the cache)
    """A pattern for a reference, if there is one, and the opcodes up to the next one: a group for each."""
    return re.compile(rb"(" + GET + rb")?+((?:" + plain(numbered=numbered) + rb")*+)", re.DOTALL)


def is_short_text(opcodes: bytes) -> bool:
    """Whether they are a short text, memoised, and nothing else."""
    return opcodes[0] == SHORT_TEXT_OPCODE and len(opcodes) == 3 + opcodes[1] and opcodes[-1] == MEMOIZE


def require_boundary(data: bytes, at: int, boundary: int) -> None:
    """Raises unless one of the opcodes from ``at`` on ends at ``boundary``, where a frame begins."""
    match = in_frame().match(data, at, boundary)
    at = at if match is None else match.end()
    while at < boundary:
        at = opcode_end(data, at)
    if at != boundary:
        raise NotScannedError("an opcode in two frames")


@cache
def values_memoised(opcodes: bytes) -> int:
    """How many values these opcodes memoise."""
    at = count = 0
    while at < len(opcodes):
        count += opcodes[at] == MEMOIZE
        at = opcode_end(opcodes, at)
    return count
