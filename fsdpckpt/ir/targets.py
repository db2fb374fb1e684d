"""Describes what a writer lays out: target files of literal bytes, and write items for tensor data.

A *write item* is one contiguous range of a target file that receives one box of one tensor, row-major (or in the
memory order ``order`` says). A *checksum* is a range whose CRC-32 the executor computes while copying and
then writes as 4 little-endian bytes at one or more places.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from fsdpckpt.ir.checkpoint import Note
from fsdpckpt.ir.dtypes import DType
from fsdpckpt.ir.tensors import Tensor


class WriteItem(NamedTuple):  # there may be millions, and a frozen dataclass is five times slower to make
    """``nbytes`` from ``offset``: elements ``start`` .. ``start + size`` of ``tensor``, cast to ``dtype``.

    ``start``, ``size``: elements, one a dimension. ``order``: the dimensions from slowest to fastest in the
    write item's memory; None is row-major.
    """

    offset: int
    nbytes: int
    tensor: Tensor
    start: tuple[int, ...]
    size: tuple[int, ...]
    dtype: DType
    order: tuple[int, ...] | None = None


@dataclass(slots=True)
class TargetFile:
    """One file being laid out, front to back. ``path`` is relative to the target directory ("" for a one-file target).

    ``blob`` holds every literal byte, repeated bytes only once; ``literals`` are (file offset, start in blob, nbytes).
    ``checksums`` are (begin, end, places) with ``places`` the file offsets that receive the CRC-32 of [begin, end).
    """

    path: str
    nbytes: int = 0
    blob: bytearray = field(default_factory=bytearray)
    literals: list[tuple[int, int, int]] = field(default_factory=list)
    write_items: list[WriteItem] = field(default_factory=list)
    checksums: list[tuple[int, int, tuple[int, ...]]] = field(default_factory=list)

    def literal(self, data: bytes | bytearray) -> int:
        """Append ``data``; returns the file offset it starts at."""
        offset = self.nbytes
        if data:
            at, begin, nbytes = self.literals[-1] if self.literals else (0, 0, 0)
            if nbytes and at + nbytes == offset and begin + nbytes == len(self.blob):
                self.literals[-1] = (at, begin, nbytes + len(data))
            else:
                self.literals.append((offset, len(self.blob), len(data)))
            self.blob += data
            self.nbytes += len(data)
        return offset

    def repeat(self, start: int, nbytes: int) -> int:
        """Append ``nbytes`` that are already at ``start`` of ``blob``; returns the file offset they start at."""
        offset = self.nbytes
        if nbytes:
            self.literals.append((offset, start, nbytes))
            self.nbytes = offset + nbytes
        return offset

    def write_item(
        self,
        tensor: Tensor,
        *,
        start: Sequence[int] | None = None,
        size: Sequence[int] | None = None,
        dtype: DType | None = None,
        order: tuple[int, ...] | None = None,
    ) -> int:
        """Append a write item for a box of ``tensor`` (the whole tensor by default); returns its file offset."""
        offset = self.nbytes
        dtype = tensor.dtype if dtype is None else dtype
        start = (0,) * tensor.ndim if start is None else tuple(start)
        size = tensor.shape if size is None else tuple(size)
        nbytes = dtype.itemsize
        for extent in size:
            nbytes *= extent
        if nbytes:
            self.write_items.append(WriteItem(offset, nbytes, tensor, start, size, dtype, order))
            self.nbytes += nbytes
        return offset

    def checksum(self, begin: int, end: int, places: Sequence[int]) -> None:
        """Ask for the CRC-32 of [begin, end), to be stored little-endian at every offset of ``places``.

        The places must lie in literal bytes, and hold zeros there.
        """
        self.checksums.append((begin, end, tuple(places)))


@dataclass(frozen=True, slots=True)
class LinkedFile:
    """A target file at ``path`` that is the source's file number ``source``, byte for byte: it is linked, not written.

    ``used``: the bytes in it that belong to the target.
    """

    path: str
    source: int
    used: int


@dataclass(slots=True)
class Target:
    """All files of one output, in the order they become visible (a DCP ``.metadata`` last); ``links`` come first.

    ``notes``: what the layout dropped, renamed or cast.
    """

    files: list[TargetFile]
    notes: list[Note] = field(default_factory=list)
    links: list[LinkedFile] = field(default_factory=list)
