"""Parses one field of many pickled records at once: literal bytes, integers, ``torch.Size``, texts.

All functions take a ``Block`` of opcodes and the offsets where the field begins, one for each record, and return which
records have it in the expected form. If a record extends past the end of the block, zeros follow, which are not
opcodes.

``Plans`` skips the plans of all ranks, which Megatron-core appends after everything that is read:
``save_state_dict_async_plan`` (``megatron/core/dist_checkpointing/strategies/state_dict_saver.py``) gives the metadata
the attribute ``all_local_plans``: the chunks once more, as objects that refer to those in the tables before it. It is
the last attribute, so nothing refers to its content.
"""

from __future__ import annotations

import re

import numpy as np
import numpy.typing as npt

from fsdpckpt.formats.pickle.opcodes import opcode_end
from fsdpckpt.ir.tensors import Int64Array

BoolArray = npt.NDArray[np.bool_]
UInt64Array = npt.NDArray[np.uint64]

_MAX_DIMENSIONS = 8  # dimensions of a size that are read in bulk: more are rare
_PADDING = bytes(1024)  # more than the bytes of one record, valid or not
_LONG = 0x8A
_WIDTH = np.zeros(256, np.int64)  # bytes of an unsigned operand by opcode
_WIDTH[list(b"KMJ")] = (1, 2, 4)
MASK = np.array([(1 << (8 * width)) - 1 for width in range(9)], np.uint64)


class NeedsGeneralReaderError(Exception):
    """The pickle does not have the form that is read in bulk. The file may be fine: the general reader decides."""


class Block:
    """Opcodes, as bytes, and as the number in the 8 bytes at every offset."""

    def __init__(self, data: bytes) -> None:
        padded = data + _PADDING
        self.data = data
        self.bytes = np.frombuffer(padded, np.uint8)
        self._words: UInt64Array = np.ndarray((len(padded) - 7,), "<u8", padded, strides=(1,))

    def words(self, at: npt.NDArray[np.signedinteger]) -> UInt64Array:
        """The little-endian number in the 8 bytes at each offset."""
        words: UInt64Array = self._words[at]
        return words

    def opcodes(self, at: Int64Array) -> npt.NDArray[np.uint8]:
        return self.bytes[at]

    def has(self, at: Int64Array, literal: bytes) -> BoolArray:
        """Which offsets have ``literal``."""
        ok = np.ones(len(at), np.bool_)
        for begin in range(0, len(literal), 8):
            part = literal[begin : begin + 8]
            ok &= (self.words(at + begin) & MASK[len(part)]) == np.uint64(int.from_bytes(part, "little"))
        return ok

    def operands(self, at: Int64Array) -> tuple[Int64Array, Int64Array, BoolArray]:
        """For the integers at ``at``: where their bytes begin, how many there are (0: not an integer), whether one is a
        sign.
        """
        opcode = self.opcodes(at)
        offset, width = at + 1, _WIDTH[opcode]
        long = np.flatnonzero(opcode == _LONG)
        if len(long):
            nbytes = self.opcodes(offset[long]).astype(np.int64)
            width[long] = np.where(nbytes <= 8, nbytes, 0)
            offset[long] += 1
        return offset, width, (opcode == ord("J")) | (opcode == _LONG)

    def integers(self, at: Int64Array) -> tuple[Int64Array, Int64Array, BoolArray]:
        """The values (0 up to 2^63 - 1) and the ends of the integers at ``at``."""
        offset, width, signed = self.operands(at)
        value = self.words(offset) & MASK[width]
        ok = (width > 0) & ~(signed & (value > MASK[width] >> np.uint64(1)))
        return value.astype(np.int64), offset + width, ok

    def hints(self, at: Int64Array) -> tuple[Int64Array, Int64Array, BoolArray]:
        """``integers``, with 0 for None."""
        value, end, ok = self.integers(at)
        return value, end, ok | (self.opcodes(at) == ord("N"))

    def references(self, at: Int64Array) -> tuple[Int64Array, Int64Array, BoolArray]:
        """The memo numbers and the ends of the GETs at ``at``."""
        opcode = self.opcodes(at)
        short = opcode == ord("h")
        number = (self.words(at + 1) & np.where(short, MASK[1], MASK[4])).astype(np.int64)
        return number, at + np.where(short, 2, 5), short | (opcode == ord("j"))

    def sizes(self, at: Int64Array, memoize: bytes) -> tuple[Int64Array, Int64Array, Int64Array, BoolArray]:
        """The operands of ``torch.Size``: extents (n, the largest number of dimensions), their count, ends.

        ``memoize``: the opcode that follows each value, or none.
        """
        call = b"\x85%bR%b" % (memoize, memoize)  # the arguments: one tuple
        size_end, empty_size = memoize + call, b")" + call
        n = len(at)
        ndim = np.full(n, -1, np.int64)
        end = at.copy()
        columns: list[Int64Array] = []
        ok = np.ones(n, np.bool_)
        first = self.opcodes(at)
        empty = np.flatnonzero(first == ord(")"))
        ndim[empty] = 0
        ok[empty] = self.has(at[empty], empty_size)
        end[empty] += len(empty_size)
        marked = first == ord("(")  # more than three: from a mark to TUPLE, not TUPLE1 to TUPLE3
        end[marked] += 1
        rows = np.flatnonzero(ndim < 0)
        for count in range(_MAX_DIMENSIONS + 1):
            if count:
                opcode = self.opcodes(end[rows])
                several, few = (opcode == ord("t")) & (count > 3), (opcode == 0x84 + count) & (count < 4)
                closed = np.where(marked[rows], several, few)
                done = rows[closed]
                ok[done] &= self.has(end[done] + 1, size_end)
                end[done] += 1 + len(size_end)
                ndim[done] = count
                rows = rows[~closed]
            if not len(rows) or count == _MAX_DIMENSIONS:
                break
            value, after, fine = self.integers(end[rows])
            column = np.zeros(n, np.int64)
            column[rows] = value
            columns.append(column)
            end[rows] = after
            rows = rows[fine]
        extents = np.stack(columns, 1) if columns else np.zeros((n, 0), np.int64)
        return extents, ndim, end, ok & (ndim >= 0)

    def texts(self, at: Int64Array) -> tuple[Int64Array, Int64Array, Int64Array, BoolArray]:
        """The short, memoised texts at ``at``: where the characters begin, their number of bytes, ends."""
        nbytes = self.opcodes(at + 1).astype(np.int64)
        end = at + 2 + nbytes
        return at + 2, nbytes, end + 1, (self.opcodes(at) == 0x8C) & (self.opcodes(end) == 0x94)


class Texts:
    """Numbers texts in the order of their first appearance."""

    def __init__(self) -> None:
        self.all: list[bytes] = []
        self._numbers: dict[bytes, int] = {}

    def known(self, text: bytes | None) -> int:
        """The number of ``text``; -1 if it has none yet."""
        return self._numbers.get(text, -1) if text is not None else -1

    def number(self, text: bytes) -> int:
        number = self._numbers.get(text)
        if number is None:
            number = self._numbers[text] = len(self.all)
            self.all.append(text)
        return number

    def numbers(self, data: bytes, at: Int64Array, nbytes: Int64Array) -> npt.NDArray[np.int32]:
        """The numbers of the texts of ``nbytes`` at ``at`` of ``data``."""
        texts = [data[begin:end] for begin, end in zip(at.tolist(), (at + nbytes).tolist(), strict=True)]
        for text in dict.fromkeys(texts):
            self.number(text)
        return np.array(list(map(self._numbers.__getitem__, texts)), np.int32)


PLANS = b"all_local_plans"
END = b"ub."  # the ends of the attributes, of the object and of the pickle

# Opcodes of one length that neither open nor close a mark, many at a time.
_PLAIN = re.compile(rb"(?:[\x94)\x81}\]NbaR\x93\x85-\x89s0]|[hK].|j.{4}|M..|J.{4}|G.{8}){1,64}", re.DOTALL)
_MARK, _CLOSING, _COUNTED = ord("("), b"uet", b"\x8cX\x8a"


class Plans:
    """The list of plans, from its mark on. ``ended``: it was skipped, and nothing followed it."""

    def __init__(self) -> None:
        self.ended = False
        self._depth = 1  # open marks; 0 between batches of the list, and after it

    def past(self, data: bytes, at: int, limit: int) -> int:
        """Skip from ``at`` at least to ``limit``; return where an opcode begins.

        Raises NeedsGeneralReaderError for anything but a list of plans in the last place.
        """
        while at < limit and not self.ended:
            opcode = data[at]
            if self._depth == 0:
                self.ended = data.startswith(END, at)
                if not self.ended and opcode != _MARK:
                    raise NeedsGeneralReaderError("an attribute behind the plans")
                at += len(END) if self.ended else 1
                self._depth = 1
                continue
            plain = _PLAIN.match(data, at)
            if plain is not None:
                at = plain.end()
            elif opcode == _MARK or opcode in _CLOSING:
                self._depth += 1 if opcode == _MARK else -1
                at += 1
            elif opcode in _COUNTED:
                at = opcode_end(data, at)
            else:
                raise NeedsGeneralReaderError(f"opcode {opcode:#x}")
        if at > len(data):
            raise NeedsGeneralReaderError("a long text")
        return at
