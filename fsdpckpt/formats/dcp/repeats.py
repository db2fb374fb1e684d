"""Recognises records of a ``.metadata`` pickle that were parsed before: repeats are only compared.

Tensors of one shape have the same list of chunks, byte for byte. Every rank stores the same tensors in the same order,
so its items differ from another rank's only in numbers. ``KnownLists`` holds the bytes of lists of chunks;
``KnownItems`` holds those of items, with a mask over their numbers, which are read anew.

Most of many tensors are described by the same bytes, except for their keys. ``KnownTensors`` recognises those that were
walked before, if they are whole values, whatever surrounds them: they begin with the class, then come the attributes,
and nothing reaches below the mark before them.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from fsdpckpt.formats.dcp.fields import MASK, Block
from fsdpckpt.formats.dcp.runs import METADATA, ItemForm, Matches, Memo
from fsdpckpt.formats.pickle.opcodes import opcode_end
from fsdpckpt.ir.tensors import Int64Array

_MAX_ALIKE = 8  # lists that begin with the same bytes
_MAX_KEY = 512  # bytes that distinguish them
_MAX_LIST_BYTES = 32 << 20  # bytes of lists that are remembered
_MAX_ITEM_BYTES = 8 << 20  # bytes of items, which take three times as much memory
_MIN_RUN = 16  # items in a row from which comparing is faster than parsing
_SHORT_RUN = 128  # items in a row, on average, below which they are joined with those around them
_BATCH = 1024  # items compared at once: a batch of the pickler has a thousand
_NUMBERS = ("index", "path", "offset", "length")  # the numbers of an item; then its start

Begins: TypeAlias = tuple[int, Int64Array]
"""Where records begin: an offset in the data, and how far from it each is."""

NameAt: TypeAlias = Callable[[int], int]
"""The number of the name of the item at an offset; -1 when none is known there."""


class Records(NamedTuple):
    """Consecutive records. ``rows``: their rows in the columns; ``end``: the end of their bytes."""

    rows: slice
    memoised: int
    end: int
    begins: list[Begins]


class _List(NamedTuple):
    content: bytes
    rows: slice
    memoised: int
    begins: Int64Array


class KnownLists:
    """The lists of chunks, or tensors with their lists, that were parsed."""

    def __init__(self) -> None:
        self._known: dict[bytes, list[_List]] = {}
        self._left = _MAX_LIST_BYTES

    def add(self, data: bytes, begins: Int64Array, end: int, rows: slice, memoised: int) -> bool:
        """Remember the chunks of ``rows``, which begin at ``begins`` of ``data``. False if there are too many."""
        at = int(begins[0])
        alike = self._known.setdefault(_first_chunk_key(data, at), [])
        room = len(alike) < _MAX_ALIKE and self._left >= end - at
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
                return Records(known.rows, known.memoised, end, [(at, known.begins)])
        return None


def _first_chunk_key(data: bytes, at: int) -> bytes:
    """The bytes at ``at`` up to the end of the first chunk, or its begin: a chunk ends with these opcodes."""
    return data[at : data.find(b"ub", at, at + _MAX_KEY) + 2]


@dataclass(frozen=True, slots=True, eq=False)
class _ItemRun:
    """n items without the separators of batches. ``begins`` (n + 1,): of their bytes; ``mask``: 0 over their numbers.

    ``offsets``, ``masks`` (numbers, n): where each number's bytes are, and which of the 8 bytes from there on belong to
    it. ``names``, ``ndim`` (n,): as in the columns of items. ``memoised`` (n + 1,): how many values come before each.
    """

    content: npt.NDArray[np.uint8]
    mask: npt.NDArray[np.uint8]
    begins: Int64Array
    offsets: Int64Array
    masks: npt.NDArray[np.uint64]
    names: npt.NDArray[np.signedinteger]
    ndim: npt.NDArray[np.signedinteger]
    memoised: Int64Array

    def __len__(self) -> int:
        return len(self.names)

    def part(self, first: int, end: int, numbers: int) -> _ItemRun:
        """The items from ``first`` to ``end`` (exclusive), with ``numbers`` numbers each."""
        rows, low = slice(first, end), self.begins[first]
        begins = self.begins[first : end + 1] - low
        more = numbers - len(self.offsets)
        return _ItemRun(
            self.content[low : self.begins[end]],
            self.mask[low : self.begins[end]],
            begins,
            np.concatenate([self.offsets[:, rows] - low, np.tile(begins[:-1], (more, 1))]),
            np.concatenate([self.masks[:, rows], np.zeros((more, end - first), np.uint64)]),
            self.names[rows],
            self.ndim[rows],
            self.memoised[first : end + 1] - self.memoised[first],
        )

    def equal_until(self, block: Block, at: int, first: int) -> int:
        """Whether the items from ``first`` to this one (exclusive) are at ``at`` of ``block``, except for their
        numbers.
        """
        last = min(first + _BATCH, len(self))
        for end in (first + 1, last):  # if one is not there, the others need not be compared
            low, high = int(self.begins[first]), int(self.begins[end])
            nbytes = max(min(high - low, len(block.data) - 1 - at), 0)
            differs = (block.bytes[at : at + nbytes] ^ self.content[low : low + nbytes]) & self.mask[low : low + nbytes]
            if differs.max(initial=0):
                nbytes = int((differs != 0).argmax())
            if nbytes < high - low:
                return int(np.searchsorted(self.begins, low + nbytes, "right")) - 1
        return last


def _join(parts: list[tuple[_ItemRun, int, int]]) -> _ItemRun:
    """The items of several parts (first to end, exclusive) one after the other."""
    numbers = max(len(run.offsets) for run, *_ in parts)
    runs = [run.part(first, end, numbers) for run, first, end in parts]
    shifts = np.cumsum([0, *(len(each.content) for each in runs)])
    counts = np.cumsum([0, *(int(each.memoised[-1]) for each in runs)])
    return _ItemRun(
        np.concatenate([each.content for each in runs]),
        np.concatenate([each.mask for each in runs]),
        np.append(
            np.concatenate([each.begins[:-1] + shift for each, shift in zip(runs, shifts[:-1], strict=True)]),
            shifts[-1],
        ),
        np.concatenate([each.offsets + shift for each, shift in zip(runs, shifts[:-1], strict=True)], axis=1),
        np.concatenate([each.masks for each in runs], axis=1),
        np.concatenate([each.names for each in runs]),
        np.concatenate([each.ndim for each in runs]),
        np.append(
            np.concatenate([each.memoised[:-1] + count for each, count in zip(runs, counts[:-1], strict=True)]),
            counts[-1],
        ),
    )


class KnownItems:
    """The items that were parsed, and those of the current block that were recognised."""

    def __init__(self) -> None:
        self._last: dict[int, tuple[_ItemRun, int]] = {}  # by name: the last item that has it
        self._left = _MAX_ITEM_BYTES
        self.scattered = False  # those that were taken last did not follow each other before: parsing more joins them
        self._taken: list[tuple[_ItemRun, int, int, int]] = []  # first item, end, where the first begins in the block

    def add(self, block: Block, matches: Matches, rows: npt.NDArray[np.intp], columns: dict[str, Int64Array]) -> None:
        """Remember the items in ``rows``; ``columns`` has their names and dimensions."""
        begin, end = matches.begin[rows], matches.end[rows]
        begins = np.append(0, np.cumsum(end - begin))
        cut = np.flatnonzero(begin[1:] != end[:-1])
        firsts, lasts = np.append(0, cut + 1), np.append(cut, len(rows) - 1)
        parts = zip(begin[firsts].tolist(), end[lasts].tolist(), strict=True)
        content = np.frombuffer(b"".join([block.data[low:high] for low, high in parts]), np.uint8)
        mask = np.full(len(content), 0xFF, np.uint8)
        shift = begins[:-1] - begin
        offsets: list[Int64Array] = []
        masks: list[npt.NDArray[np.uint64]] = []

        def number(at: Int64Array, width: Int64Array, signed: npt.NDArray[np.bool_]) -> None:
            offsets.append(at + shift)
            masks.append(MASK[width])
            for byte in range(int(width.max(initial=0))):
                inside = width > byte
                mask[offsets[-1][inside] + byte] = 0
                top = inside & signed & (width == byte + 1)
                mask[offsets[-1][top] + byte] = 0x80  # a negative number was not parsed

        for name in _NUMBERS:
            at = matches.offsets[name][rows]
            if name == "path":
                width = block.references(at)[1] - at - 1
                number(at + 1, width, np.zeros(len(at), np.bool_))
            else:
                number(*block.operands(at))
        at = matches.offsets["start"][rows]
        at = at + (block.opcodes(at) == ord("("))
        for dimension in range(int(columns["ndim"].max(initial=0))):
            offset, width, signed = block.operands(at)
            width = np.where(columns["ndim"] > dimension, width, 0)
            number(offset, width, signed)
            at = offset + width
        memoised = np.append(0, np.cumsum(matches.memoised[rows]))
        names, ndim = columns["name"], columns["ndim"]
        self._remember(_ItemRun(content, mask, begins, np.stack(offsets), np.stack(masks), names, ndim, memoised))

    def _remember(self, run: _ItemRun) -> None:
        if len(run.content) > self._left:
            self._last.clear()
            self._left = _MAX_ITEM_BYTES
        self._left -= len(run.content)
        last = dict(zip(run.names.tolist(), range(len(run)), strict=True))
        self._last.update((name, (run, row)) for name, row in last.items())

    def take(self, form: ItemForm, block: Block, at: int, name_at: NameAt) -> Records | None:
        """The known items at ``at``, one after the other. ``name_at``: returns the name of the item at an offset."""
        if self.scattered:
            self.scattered = False
            return None
        separator = form.append[:1] + b"("
        expected: tuple[_ItemRun, int] | None = None
        run_begins: list[Begins] = []
        memoised = count = 0
        while len(run_begins) < 4 or count >= _MIN_RUN * len(run_begins):
            begin = at + len(separator) if run_begins and block.data.startswith(separator, at) else at
            run, first, end = self._match_items(block, begin, expected, name_at)
            if run is None or end == first:
                break
            shift = begin - int(run.begins[first])
            run_begins.append((shift, run.begins[first:end]))
            self._taken.append((run, first, end, shift))
            memoised += int(run.memoised[end] - run.memoised[first])
            count += end - first
            at = shift + int(run.begins[end])
            expected = run, end
        self.scattered = 0 < count < _MIN_RUN * len(run_begins)
        if _MIN_RUN * len(run_begins) <= count < _SHORT_RUN * len(run_begins):
            self._remember(_join([taken[:3] for taken in self._taken[-len(run_begins) :]]))
        return Records(slice(0, count), memoised, at, run_begins) if run_begins else None

    def _match_items(
        self, block: Block, at: int, expected: tuple[_ItemRun, int] | None, name_at: NameAt
    ) -> tuple[_ItemRun | None, int, int]:
        """The known items at ``at``: the expected ones, else those that follow the same name."""
        if expected is not None and expected[1] < len(expected[0]):
            end = expected[0].equal_until(block, at, expected[1])
            if end > expected[1]:
                return (*expected, end)
        named = self._last.get(name_at(at))
        return (*named, named[0].equal_until(block, at, named[1])) if named is not None else (None, 0, 0)

    def columns(self, block: Block) -> dict[str, Int64Array] | None:
        """The fields of all items taken from ``block`` since the last call; ``path`` is a memo reference."""
        if not self._taken:
            return None
        numbers = max(len(run.offsets) for run, *_ in self._taken)
        count = sum(end - first for _, first, end, _ in self._taken)
        offsets, masks = np.zeros((numbers, count), np.int64), np.zeros((numbers, count), np.uint64)
        at = 0
        for run, first, end, shift in self._taken:
            rows, has = slice(at, at := at + end - first), len(run.offsets)
            np.add(run.offsets[:, first:end], shift, out=offsets[:has, rows])
            masks[:has, rows] = run.masks[:, first:end]
        values = (block.words(offsets) & masks).view(np.int64)
        columns = dict(zip(_NUMBERS, values, strict=False))
        columns["start"] = values[len(_NUMBERS) :].T
        columns["name"] = np.concatenate([run.names[first:end] for run, first, end, _ in self._taken])
        columns["ndim"] = np.concatenate([run.ndim[first:end] for run, first, end, _ in self._taken])
        self._taken = []
        return columns


ENTRY = (METADATA.encode(), b"TensorStorageMetadata")
_GET = rb"(?:h(.)|j(.{4}))"
_BEGIN = re.compile(_GET + rb"\)\x81\x94?\}\x94?\(", re.DOTALL)
_END = re.compile(_GET + rb"\]\x94?\(?", re.DOTALL)
_OPCODES = b"hKMjJG)]}(teausbR\x81\x85\x86\x87\x88\x89N\x94"
_OPENED_MARKS = {b"(": 1, b"t": -1, b"e": -1, b"u": -1}
_FOLLOWS = b"X\x8cus"  # the next key, or the end of the dict or of a part of it


class KnownTensors:
    """The tensors that were walked."""

    def __init__(self) -> None:
        self._known = KnownLists()

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
        opcode = head[at : at + 1]
        if not opcode or opcode not in _OPCODES:
            return 0
        last = _END.fullmatch(head, at) if opcode in b"hj" else None
        if last is not None and memo.texts.get(_number(last)) == b"chunks":
            return open_marks + head.endswith(b"(")
        open_marks += _OPENED_MARKS.get(opcode, 0)
        at = opcode_end(head, at)
    return 0


def _number(get: re.Match[bytes]) -> int:
    return int.from_bytes(get[1] or get[2], "little")
