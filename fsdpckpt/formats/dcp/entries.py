"""Knows the tensors of a ``.metadata`` pickle again: most of many are described by the same bytes, but for their keys.

What was walked over once is known again only if it is a whole value, whatever is around it: it begins with the class,
then come its attributes, and nothing reaches below the mark before them.
"""

from __future__ import annotations

import re

import numpy as np

from fsdpckpt.formats.dcp.repeats import Lists, Records
from fsdpckpt.formats.dcp.runs import METADATA, Memo

ENTRY = (METADATA.encode(), b"TensorStorageMetadata")
_GET = rb"(?:h(.)|j(.{4}))"
_BEGIN = re.compile(_GET + rb"\)\x81\x94?\}\x94?\(", re.DOTALL)
_END = re.compile(_GET + rb"\]\x94?\(?", re.DOTALL)
_OPCODE = re.compile(rb"[hK].|M..|[jJ].{4}|G.{8}|[)\]}(teausbR\x81\x85-\x89N\x94]", re.DOTALL)
_FOLLOWS = b"X\x8cus"  # the next key, or the end of the dict or of a part of it


class Entries:
    """The tensors that were walked over."""

    def __init__(self) -> None:
        self._known = Lists()

    def add(self, data: bytes, begin: int, at: int, chunks_end: int, number: int, memoised: int, memo: Memo) -> bool:
        """Remember the tensor at ``begin``, whose chunks are one run from ``at`` to ``chunks_end``, as ``number``.

        ``memoised``: how many values it memoises. False when it is no whole tensor, or too many are known.
        """
        appended = data[chunks_end : chunks_end + 3]
        marks = {b"eub": 2, b"aub": 1}.get(appended, -1)
        if _marks(data[begin:at], memo) != marks or data[chunks_end + 3] not in _FOLLOWS:
            return False
        return self._known.add(data, np.array([begin]), chunks_end + 3, slice(number, number + 1), memoised)

    def take(self, data: bytes, at: int) -> Records | None:
        """The known tensor that stands at ``at``, its number in ``rows``."""
        taken = self._known.take(data, at)
        return taken if taken is not None and data[taken.end] in _FOLLOWS else None


def _marks(head: bytes, memo: Memo) -> int:
    """How many marks are open after ``head``, a tensor up to the first of its chunks; 0 when it is something else."""
    match = _BEGIN.match(head)
    if match is None or memo.name(_number(match)) != ENTRY:
        return 0
    at, open_marks = match.end(), 1
    while open_marks:
        match = _OPCODE.match(head, at)
        if match is None:
            return 0
        last = _END.fullmatch(head, at)
        if last is not None and memo.text(_number(last)) == b"chunks":
            return open_marks + head.endswith(b"(")
        open_marks += {b"(": 1, b"t": -1, b"e": -1, b"u": -1}.get(match[0], 0)
        at = match.end()
    return 0


def _number(get: re.Match[bytes]) -> int:
    return int.from_bytes(get[1] or get[2], "little")
