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


def plain(*, numbered: bool, skipped: bytes = b"") -> bytes:
    """A pattern for opcodes that are copied and are no references, as protocols with memo numbers of their own
    (``numbered``), or the later ones, have them. ``skipped``: opcodes at which they end.
    """
    puts, text = (PUTS, TEXT) if numbered else (MEMOIZES, SHORT_TEXT)
    end = rb"(?!" + re.escape(skipped) + rb")" if skipped else b""
    return rb"|".join((PLAIN, puts, end + rb"(?:" + text + rb")"))


# Compiled when they are needed: with 255 lengths of a text that takes a while.
@cache
def memoising(*, numbered: bool) -> re.Pattern[bytes]:
    """A pattern for each opcode that memoises a value, with all opcodes before it, and for the end."""
    puts, text = (PUTS, TEXT) if numbered else (MEMOIZES, SHORT_TEXT)
    others = rb"|".join((PLAIN, GET, text))
    return re.compile(rb"(?:" + others + rb")*+(" + puts + rb"|\Z)", re.DOTALL)


@cache
def in_frame() -> re.Pattern[bytes]:
    """A pattern for opcodes within a frame, which only later protocols have."""
    return re.compile(rb"(?:" + plain(numbered=False) + rb"|" + GET + rb")*+", re.DOTALL)
