"""Patterns of the opcodes of a pickle, and of the operands that records have."""

from __future__ import annotations

import re
from collections.abc import Iterable


def _counted(opcode: bytes, zeros: bytes, sizes: Iterable[int]) -> bytes:
    """A pattern for an opcode with a count of one byte (then ``zeros``), and as many bytes."""
    counts = b"|".join(re.escape(bytes((size,))) + zeros + rb".{%d}" % size for size in sizes)
    return re.escape(opcode) + rb"(?:" + counts + rb")"


GET = rb"(?:h.|j.{4})"
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
MEMOIZES, NUMBERED = (  # match each opcode that memoises a value, with all opcodes before it, and the end
    re.compile(rb"(?:" + PLAIN + rb"|" + SHORT_TEXT + rb"|" + TEXT + rb")*+(" + puts + rb"|\Z)", re.DOTALL)
    for puts in (rb"\x94", PUTS)
)
ANY = re.compile(
    rb"(?:" + PLAIN + rb"|" + GET + rb"|" + PUTS + rb"|\x94|" + SHORT_TEXT + rb"|" + TEXT + rb")*+", re.DOTALL
)
INTEGERS = re.compile(INTEGER, re.DOTALL)
