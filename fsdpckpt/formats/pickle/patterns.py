"""Patterns of the opcodes of a pickle, and of the operands that records have."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import cache


def _counted(opcode: bytes, zeros: bytes, sizes: Iterable[int]) -> bytes:
    """A pattern for an opcode with a count of one byte (then ``zeros``), and as many bytes."""
    counts = b"|".join(re.escape(bytes((size,))) + zeros + rb".{%d}" % size for size in sizes)
    return re.escape(opcode) + rb"(?:" + counts + rb")"


GET = rb"(?:h.|j.{4})"
NEW = rb"\)\x81"  # after a reference to a class: an instance of it
MEMOIZED = rb"\x94?+"
SHORT_TEXT = _counted(b"\x8c", b"", range(256))
TEXT = _counted(b"X", rb"\x00{3}", range(256))
INTEGER = rb"(?:K.|M..|J.{4}|" + _counted(b"\x8a", b"", range(5, 9)) + rb")"
_THREE = rb"\x85|" + INTEGER + rb"(?:\x86|" + INTEGER + rb"\x87)"
SIZES = rb"\)|(?:\(" + INTEGER + rb"{4,8}+t|" + INTEGER + rb"(?:" + _THREE + rb"))" + MEMOIZED
# Opcodes that are copied, many at a time. None of them takes a value off the stack again, copies it or opens a frame:
# no save needs these. How values are memoised depends on the protocol.
PLAIN = rb"[)\]}(teausbR\x81\x85-\x89NQ\x93]|K.|M..|J.{4}|G.{8}|c[^\n]{1,99}\n[^\n]{1,99}\n|" + _counted(
    b"\x8a", b"", range(1, 10)
)
PUTS = rb"q.|r.{4}"
MEMOIZES = b"\x94"
INTEGERS = re.compile(INTEGER, re.DOTALL)
_UNMEMOISED = rb"|".join((PLAIN, GET, SHORT_TEXT, TEXT))


# Compiled when they are needed: with 255 lengths of a text that takes a while.
@cache
def memoising(puts: bytes) -> re.Pattern[bytes]:
    """A pattern for each opcode that memoises a value, which ``puts`` matches, with all opcodes before it, and for the
    end.
    """
    return re.compile(rb"(?:" + _UNMEMOISED + rb")*+(" + puts + rb"|\Z)", re.DOTALL)


@cache
def in_frame() -> re.Pattern[bytes]:
    """A pattern for opcodes within a frame."""
    return re.compile(rb"(?:" + _UNMEMOISED + rb"|" + MEMOIZES + rb")*+", re.DOTALL)
