"""The operands of many opcodes as columns."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from fsdpckpt.formats.pickle.patterns import INTEGERS
from fsdpckpt.ir.tensors import Int64Array

Columns: TypeAlias = dict[str, npt.NDArray[np.signedinteger]]

MEMOIZE = 0x94
_OPERAND_BYTES = np.array([0, 0, 1, 2, 0, 4, 0, 5, 6, 7, 8])  # of an integer, by the length of its opcode
_SIGNED = 5  # the length of the opcode of a signed integer of 4 bytes; longer ones are signed, too
_MASK = np.array([(1 << (8 * width)) - 1 for width in range(9)], np.uint64)


class NotScannedError(Exception):
    """The pickle may be fine, but not all of it has the form of a save: the general loader decides."""


def numbers_of(opcodes: Sequence[bytes]) -> Int64Array:
    """The numbers in these opcodes, one in each; 0 for None. Raises NotScannedError for a negative one."""
    length = np.fromiter(map(len, opcodes), np.int64, len(opcodes))
    data = b"".join(opcodes) + bytes(8)
    words: npt.NDArray[np.uint64] = np.ndarray((len(data) - 7,), "<u8", data, strides=(1,))
    width = _OPERAND_BYTES[length]
    value: npt.NDArray[np.uint64] = words[np.cumsum(length) - width] & _MASK[width]
    signed = (length == _SIGNED) | (width > 4)
    if (signed & (value > _MASK[width] >> np.uint64(1))).any():
        raise NotScannedError("a negative number")
    return value.astype(np.int64)


def references_of(opcodes: Sequence[bytes]) -> Int64Array:
    """The memo numbers that these opcodes refer to, one in each; -1 for an opcode that is no reference."""
    length = np.fromiter(map(len, opcodes), np.int64, len(opcodes))
    data = b"".join(opcodes) + bytes(8)
    begin = np.cumsum(length) - length
    opcode = np.frombuffer(data, np.uint8)[begin]
    words: npt.NDArray[np.uint64] = np.ndarray((len(data) - 7,), "<u8", data, strides=(1,))
    width = (opcode == ord("h")) + 4 * (opcode == ord("j"))
    return np.where(width > 0, (words[begin + 1] & _MASK[width]).astype(np.int64), -1)


def sizes_of(
    opcodes: Sequence[bytes],
) -> tuple[npt.NDArray[np.signedinteger], npt.NDArray[np.int8], int | npt.NDArray[np.uint8]]:
    """The numbers in the tuples of these opcodes, one tuple in each; how many each has; which are memoised."""
    different = dict.fromkeys(opcodes)
    parts = [INTEGERS.findall(tuple_opcodes) for tuple_opcodes in different]
    counts = np.fromiter(map(len, parts), np.int8, len(parts))
    table = np.zeros((len(parts), int(counts.max())), np.int64)
    table[np.arange(table.shape[1]) < counts[:, None]] = numbers_of(list(chain.from_iterable(parts)))
    place = dict(zip(different, range(len(parts)), strict=True))
    which = np.fromiter(map(place.__getitem__, opcodes), np.int64, len(opcodes))
    memoised = {tuple_opcodes: tuple_opcodes[-1] == MEMOIZE for tuple_opcodes in different}
    return table[which], counts[which], by_value(memoised, opcodes)


def by_value(counts: dict[bytes, bool], opcodes: Sequence[bytes]) -> int | npt.NDArray[np.uint8]:
    """The count for each of ``opcodes``, one number if they are all equal."""
    if len(set(counts.values())) == 1:
        return int(counts[opcodes[0]])
    return np.fromiter(map(counts.__getitem__, opcodes), np.uint8, len(opcodes))


def smallest_integers(column: npt.NDArray[np.signedinteger]) -> npt.NDArray[np.signedinteger]:
    """The column in integers of 4 bytes if they hold it."""
    fits = column.dtype == np.int64 and column.max(initial=0) <= np.iinfo(np.int32).max
    return column.astype(np.int32) if fits else column
