"""Parses runs of equal records of a DCP ``.metadata`` pickle into columns: chunks, and where each is stored.

Records of one class have the same bytes in one file, except for numbers and names: names and attributes are memo
references after their first occurrence. A *form* has these bytes, learned from the first record that consists of
references; ``find`` returns every offset in a block at which a whole record of this form begins. Such an offset may be
inside a text: it counts only if an opcode begins there, which only the walk over the opcodes knows (``reduce``).
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np

from fsdpckpt.formats.dcp.fields import Block, BoolArray, NeedsGeneralReaderError
from fsdpckpt.formats.pickle.allowlist import STORAGE_MODULES
from fsdpckpt.ir.tensors import Int64Array

METADATA = "torch.distributed.checkpoint.metadata"
CHUNK = (METADATA.encode(), b"ChunkStorageMetadata")
INDEX = (METADATA.encode(), b"MetadataIndex")
_INFOS = frozenset((module.encode(), b"_StorageInfo") for module in STORAGE_MODULES)
_SIZE = (b"torch", b"Size")
_MEMOIZE = b"\x94"
_BUILD = b"ub"
_GETS = b"hj"
PUTS = {ord("q"): 1, ord("r"): 4}  # opcodes that write a memo number, and its bytes
_HINT = rb"(?:N|K.|M..|J.{4}|\x8a.{1,9})"
_Parse = Callable[[Int64Array], tuple[Int64Array, Int64Array, BoolArray]]  # offsets to values, ends, whether it fits


class ReferenceIntoRunError(NeedsGeneralReaderError):
    """An opcode refers to a value that a run holds."""


class Memo:
    """The pickle's memo so far: ``texts`` and ``names``, as (module, name), by number."""

    def __init__(self) -> None:
        self.count = 0  # for values without a written number
        self.numbers: set[int] = set()
        self.texts: dict[int, bytes] = {}
        self.names: dict[int, tuple[bytes, bytes]] = {}
        # Values memoised in runs: the first and the last number of each run, and how many values come before.
        self._first: list[int] = []
        self._last: list[int] = []
        self._removed: list[int] = []

    def remove(self, count: int) -> None:
        """The next ``count`` values are in a run."""
        if not count:
            return
        self._first.append(self.count)
        self.count += count
        self._last.append(self.count)
        self._removed.append(count + (self._removed[-1] if self._removed else 0))

    def put(self, number: int) -> None:
        """Give a value this number, as protocols before 4 do. No number may appear twice."""
        if number in self.numbers:
            raise NeedsGeneralReaderError("a memo number twice")
        self.numbers.add(number)

    def next(self, data: bytes, at: int) -> int | None:
        """The number that the opcode at ``at`` gives a value; None if it memoises nothing."""
        width = PUTS.get(data[at])
        if width is not None:
            return int.from_bytes(data[at + 1 : at + 1 + width], "little")
        return self.count if data[at] == _MEMOIZE[0] else None

    def left(self, number: int) -> int:
        """The number that value ``number`` has without the runs."""
        index = bisect_right(self._first, number) - 1
        if index < 0:
            return number
        if number < self._last[index]:
            raise ReferenceIntoRunError
        return number - self._removed[index]


@dataclass(frozen=True, slots=True)
class Matches:
    """The records in one block, in the order of their offsets.

    ``begin``, ``end``: of their bytes. ``memoised``: how many values each memoises. ``last``: for each the number of
    the last record of its run, in which each begins where the one before ends, or after the ``separator`` of batches.
    ``columns``: the fields. ``offsets``: where the values of items begin, by field.
    """

    begin: Int64Array
    end: Int64Array
    memoised: Int64Array
    last: Int64Array
    columns: dict[str, Int64Array]
    offsets: dict[str, Int64Array] = field(default_factory=dict)


def _candidates(block: Block, prefix: bytes, begin: int, end: int) -> Int64Array:
    rare = prefix.index(b"\x81")
    at = np.flatnonzero(block.bytes[begin + rare : end + rare] == 0x81) + begin
    return at[block.has(at, prefix)]


def _runs(block: Block, begin: Int64Array, end: Int64Array, append: bytes, same: Int64Array | None) -> Int64Array:
    """For each record the last one of its run. ``same``: a field that is equal for all records of a run."""
    n = len(begin)
    linked = np.zeros(n, np.bool_)
    if n > 1:
        gap = begin[1:] - end[:-1]
        linked[:-1] = (gap == 0) | ((gap == 2) & block.has(end[:-1], append[:1] + b"("))
        if same is not None:
            linked[:-1] &= same[1:] == same[:-1]
    stops = np.flatnonzero(~linked)
    return stops[np.searchsorted(stops, np.arange(n))]


@dataclass(frozen=True, slots=True)
class ChunkForm:
    """``ChunkStorageMetadata(offsets, sizes)``. ``prefix`` ends with the name of ``offsets``' class; so does ``sizes``.

    ``memoize``: the opcode that follows each value; none if the writer knows that nothing refers to it. ``objects``:
    how many a record leaves on the stack. ``append``: the opcodes that append those of a batch, and a single one.
    """

    prefix: bytes
    sizes: bytes
    memoize: bytes
    objects: int = 1
    append: bytes = b"ea"

    def find(self, block: Block, begin: int, end: int) -> Matches:
        """The whole records that begin in [begin, end)."""
        at = _candidates(block, self.prefix, begin, end)
        start, ndim, after, ok = block.sizes(at + len(self.prefix), self.memoize)
        ok &= block.has(after, self.sizes)
        size, ndim_of_size, after, fine = block.sizes(after + len(self.sizes), self.memoize)
        ok &= fine & (ndim == ndim_of_size) & block.has(after, _BUILD)
        after += len(_BUILD)
        rows = np.flatnonzero(ok & (after <= len(block.data)))
        at, after, ndim = at[rows], after[rows], ndim[rows]
        last = _runs(block, at, after, self.append, ndim)
        memoised = len(self.memoize) * (2 + 2 * np.where(ndim > 0, 3, 2))
        return Matches(at, after, memoised, last, {"start": start[rows], "size": size[rows], "ndim": ndim})


@dataclass(frozen=True, slots=True)
class ItemForm:
    """``MetadataIndex(fqn, offset, index)`` and its ``_StorageInfo(relative_path, offset, length)``.

    ``prefix`` ends before the fqn, which is a text, or with ``shared_names`` a reference to one. The other fields are
    the bytes before the value they are named after. The index says which chunk it may be: Megatron-core saves None.
    ``rest`` matches what follows the fqn, and little else.
    """

    prefix: bytes
    index: bytes
    start: bytes
    path: bytes
    offset: bytes
    length: bytes
    memoize: bytes
    shared_names: bool
    rest: re.Pattern[bytes]
    objects: int = 2
    append: bytes = b"us"

    def find(self, block: Block, begin: int, end: int) -> Matches:
        """The whole records that begin in [begin, end)."""
        at = _candidates(block, self.prefix, begin, end)
        if self.shared_names:
            text, after, ok = block.references(at + len(self.prefix))
            nbytes = text
        else:
            text, nbytes, after, ok = block.texts(at + len(self.prefix))

        offsets: dict[str, Int64Array] = {}

        def number(name: str, parse: _Parse, literal: bytes) -> Int64Array:
            nonlocal after, ok
            ok &= block.has(after, literal)
            offsets[name] = after + len(literal)
            value, after, fine = parse(offsets[name])
            ok &= fine
            return value

        index = number("index", block.hints, self.index)
        ok &= block.has(after, self.start)
        offsets["start"] = after + len(self.start)
        start, ndim, after, fine = block.sizes(offsets["start"], self.memoize)
        ok &= fine
        path = number("path", block.references, self.path)
        offset = number("offset", block.integers, self.offset)
        length = number("length", block.integers, self.length)
        ok &= block.has(after, _BUILD)
        after += len(_BUILD)
        rows = np.flatnonzero(ok & (after <= len(block.data)))
        fields = {"text": text, "nbytes": nbytes, "index": index, "start": start, "ndim": ndim, "path": path}
        columns = {name: column[rows] for name, column in {**fields, "offset": offset, "length": length}.items()}
        last = _runs(block, at[rows], after[rows], self.append, None)
        memoised = len(self.memoize) * (4 + np.where(columns["ndim"] > 0, 3, 2)) + (not self.shared_names)
        return Matches(
            at[rows], after[rows], memoised, last, columns, {name: each[rows] for name, each in offsets.items()}
        )

    def may_stand(self, data: bytes, at: int) -> bool:
        """Whether a record may begin at ``at``: a quick test, since ``find`` takes as long for one as for a hundred."""
        after = at + len(self.prefix)
        if self.shared_names:
            after += 2 if data[after] == ord("h") else 5
        else:
            after += 3 + data[after + 1]
        return data.startswith(self.prefix, at) and self.rest.match(data, after) is not None

    def name(self, data: bytes, at: int, memo: Memo) -> bytes | None:
        """The name of the item at ``at``; None if there is none of this form."""
        begin = at + len(self.prefix)
        if not data.startswith(self.prefix, at):
            return None
        if not self.shared_names:
            return data[begin + 2 : begin + 2 + data[begin + 1]]
        width = 1 if data[begin] == ord("h") else 4
        return memo.texts.get(int.from_bytes(data[begin + 1 : begin + 1 + width], "little"))


Form: TypeAlias = ChunkForm | ItemForm


def learn(kind: tuple[bytes, bytes], data: bytes, at: int, memo: Memo) -> Form | None:
    """The form of the record of class ``kind`` at ``at``, whose name is a reference; None if it has another form."""
    cursor = _Cursor(data, at, memo)
    try:
        return _learn_chunk(cursor) if kind == CHUNK else _learn_item(cursor)
    except (_FormMismatchError, IndexError):
        return None


class _FormMismatchError(Exception):
    pass


class _Cursor:
    """Walks one record. ``take`` returns the bytes since its last call."""

    def __init__(self, data: bytes, at: int, memo: Memo) -> None:
        self._data, self._at, self._memo = data, at, memo
        self._kept = at
        self.memoize = b""

    def take(self) -> bytes:
        taken, self._kept = self._data[self._kept : self._at], self._at
        return taken

    def literal(self, text: bytes) -> None:
        self._require(self._data.startswith(text, self._at))
        self._at += len(text)

    def name(self, *names: tuple[bytes, bytes]) -> None:
        """Read a reference to one of ``names``."""
        self._require(self._memo.names.get(self._reference()) in names)

    def new(self, *names: tuple[bytes, bytes]) -> None:
        """Read an instance of one of ``names``, its attributes, a dict, and a mark before them."""
        self.name(*names)
        self.memoize = _MEMOIZE if self._data.startswith(b")\x81\x94", self._at) else b""
        self.literal(b")\x81%b}%b(" % (self.memoize, self.memoize))

    def attribute(self, text: bytes) -> None:
        self._require(self._memo.texts.get(self._reference()) == text)

    def is_reference(self) -> bool:
        return self._data[self._at] in _GETS

    def shared_text(self) -> None:
        self._require(self._memo.texts.get(self._reference()) is not None)
        self.take()

    def value(self, parse: Callable[..., tuple[Int64Array | BoolArray, ...]], *how: bytes) -> None:
        """Skip a field."""
        *_, end, ok = parse(Block(self._data[self._at : self._at + 512]), np.zeros(1, np.int64), *how)
        self._require(bool(ok[0]))
        self._at += int(end[0])
        self.take()

    def _reference(self) -> int:
        opcode = self._data[self._at]
        self._require(opcode in _GETS)
        width = 1 if opcode == ord("h") else 4
        self._at += 1 + width
        return int.from_bytes(self._data[self._at - width : self._at], "little")

    def _require(self, ok: bool) -> None:  # noqa: FBT001 (what is required)
        if not ok:
            raise _FormMismatchError


def _learn_chunk(cursor: _Cursor) -> ChunkForm:
    cursor.new(CHUNK)
    cursor.attribute(b"offsets")
    cursor.name(_SIZE)
    prefix = cursor.take()
    cursor.value(Block.sizes, cursor.memoize)
    cursor.attribute(b"sizes")
    cursor.name(_SIZE)
    return ChunkForm(prefix, cursor.take(), cursor.memoize)


def _learn_item(cursor: _Cursor) -> ItemForm:
    cursor.new(INDEX)
    cursor.attribute(b"fqn")
    prefix = cursor.take()
    shared_names = cursor.is_reference()
    cursor.shared_text() if shared_names else cursor.value(Block.texts)
    cursor.attribute(b"index")
    index = cursor.take()
    cursor.value(Block.hints)
    cursor.attribute(b"offset")
    cursor.name(_SIZE)
    start = cursor.take()
    cursor.value(Block.sizes, cursor.memoize)
    cursor.literal(_BUILD)
    cursor.new(*_INFOS)
    cursor.attribute(b"relative_path")
    path = cursor.take()
    cursor.shared_text()
    cursor.attribute(b"offset")
    offset = cursor.take()
    cursor.value(Block.integers)
    cursor.attribute(b"length")
    rest = re.escape(index) + _HINT + re.escape(start) + b".{3,100}?" + re.escape(path) + b"[hj]"
    return ItemForm(
        prefix, index, start, path, offset, cursor.take(), cursor.memoize, shared_names, re.compile(rest, re.DOTALL)
    )
