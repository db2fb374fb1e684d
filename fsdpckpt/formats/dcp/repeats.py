"""Recognises records of a ``.metadata`` pickle that were parsed before: repeats are only compared.

Tensors of one shape have the same list of chunks, byte for byte: ``Lists`` holds their bytes. Most of many tensors are
described by the same bytes, except for their keys. ``Entries`` recognises those that were walked before, if they are
whole values, whatever surrounds them: they begin with the class, then come the attributes, and nothing reaches below
the mark before them.
"""

from __future__ import annotations

import re
from typing import NamedTuple

import numpy as np

from fsdpckpt.formats.dcp.runs import METADATA, Memo
from fsdpckpt.ir.tensors import Int64Array

_MOST_ALIKE = 8  # lists that begin with the same bytes
_MOST_KEY = 512  # bytes that distinguish them
_MOST_BYTES = 32 << 20  # bytes of lists that are remembered


class Records(NamedTuple):
    """Consecutive records. ``rows``: their rows in the columns; ``end``: the end of their bytes. They begin at
    ``begins``, counted from ``base``.
    """

    rows: slice
    memoised: int
    end: int
    base: int
    begins: Int64Array


class _List(NamedTuple):
    content: bytes
    rows: slice
    memoised: int
    begins: Int64Array


class Lists:
    """The lists of chunks, or tensors with their lists, that were parsed."""

    def __init__(self) -> None:
        self._known: dict[bytes, list[_List]] = {}
        self._left = _MOST_BYTES

    def add(self, data: bytes, begins: Int64Array, end: int, rows: slice, memoised: int) -> bool:
        """Remember the chunks of ``rows``, which begin at ``begins`` of ``data``. False if there are too many."""
        at = int(begins[0])
        alike = self._known.setdefault(_first_chunk_key(data, at), [])
        room = len(alike) < _MOST_ALIKE and self._left >= end - at
        if room:
            alike.append(_List(data[at:end], rows, memoised, begins - at))
            alike.sort(key=lambda known: -len(known.content))
            self._left -= end - at
        return room

    def take(self, data: bytes, at: int) -> Records | None:
        """The longest known list at ``at`` with more bytes after it."""
        for known in self._known.get(_first_chunk_key(data, at), ()):
            end = at + len(known.content)
            if end < len(data) and data.startswith(known.content, at):
                return Records(known.rows, known.memoised, end, at, known.begins)
        return None


def _first_chunk_key(data: bytes, at: int) -> bytes:
    """The bytes at ``at`` up to the end of the first chunk, or its begin: a chunk ends with these opcodes."""
    return data[at : data.find(b"ub", at, at + _MOST_KEY) + 2]


ENTRY = (METADATA.encode(), b"TensorStorageMetadata")
_GET = rb"(?:h(.)|j(.{4}))"
_BEGIN = re.compile(_GET + rb"\)\x81\x94?\}\x94?\(", re.DOTALL)
_END = re.compile(_GET + rb"\]\x94?\(?", re.DOTALL)
_OPCODE = re.compile(rb"[hK].|M..|[jJ].{4}|G.{8}|[)\]}(teausbR\x81\x85-\x89N\x94]", re.DOTALL)
_FOLLOWS = b"X\x8cus"  # the next key, or the end of the dict or of a part of it


class Entries:
    """The tensors that were walked."""

    def __init__(self) -> None:
        self._known = Lists()

    def add(self, data: bytes, begin: int, at: int, chunks_end: int, number: int, memoised: int, memo: Memo) -> bool:
        """Remember the tensor at ``begin``, whose chunks are one run from ``at`` to ``chunks_end``, as ``number``.

        ``memoised``: how many values it memoises. False if it is not a whole tensor, or too many are known.
        """
        appended = data[chunks_end : chunks_end + 3]
        marks = {b"eub": 2, b"aub": 1}.get(appended, -1)
        if _count_marks(data[begin:at], memo) != marks or data[chunks_end + 3] not in _FOLLOWS:
            return False
        return self._known.add(data, np.array([begin]), chunks_end + 3, slice(number, number + 1), memoised)

    def take(self, data: bytes, at: int) -> Records | None:
        """The known tensor at ``at``, with its number in ``rows``."""
        taken = self._known.take(data, at)
        return taken if taken is not None and data[taken.end] in _FOLLOWS else None


def _count_marks(head: bytes, memo: Memo) -> int:
    """The number of open marks after ``head``, a tensor up to its first chunk; 0 if it is something else."""
    match = _BEGIN.match(head)
    if match is None or memo.names.get(_number(match)) != ENTRY:
        return 0
    at, open_marks = match.end(), 1
    while open_marks:
        match = _OPCODE.match(head, at)
        if match is None:
            return 0
        last = _END.fullmatch(head, at)
        if last is not None and memo.texts.get(_number(last)) == b"chunks":
            return open_marks + head.endswith(b"(")
        open_marks += {b"(": 1, b"t": -1, b"e": -1, b"u": -1}.get(match[0], 0)
        at = match.end()
    return 0


def _number(get: re.Match[bytes]) -> int:
    return int.from_bytes(get[1] or get[2], "little")
