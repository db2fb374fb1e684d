"""Proves by value that float32 weights are the masters of the copies that they were tied to by position.

A mixed-precision wrapper rounds each master to the copy's dtype after every step, so a master that does not round to
its copy belongs to another parameter. Samples are enough to see that: two parameters have no window in common.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np

from fsdpckpt.errors import FsdpckptError
from fsdpckpt.ir.checkpoint import SourceFile
from fsdpckpt.ir.dtypes import DTYPES, numpy_dtype
from fsdpckpt.ir.tensors import Tensor
from fsdpckpt.storage import is_remote
from fsdpckpt.storage.remote_file import REQUESTS
from fsdpckpt.storage.sources import Sources

if TYPE_CHECKING:
    from fsdpckpt.ir.dtypes import NumpyArray

_WHOLE = 1 << 16  # elements: chunks up to this size are compared completely
_FIRST = 64  # elements that tell most tensors apart
_WINDOW = 1 << 14  # elements of larger ones, at the beginning, in the middle and at the end


def first_different(
    pairs: Sequence[tuple[str, Tensor, Tensor]], files: Sequence[SourceFile], sources: Sources
) -> str | None:
    """The first of ``pairs`` (a name, the copy, the master) whose master does not round to the copy, or cannot be
    compared with it; None if all do. None, too, while the metadata alone was read and no tensor has a place.
    """
    if not any(_is_located(tensor) for _, *both in pairs for tensor in both):
        return None

    def is_same(pair: tuple[str, Tensor, Tensor]) -> bool:
        return _is_copy(pair[1], pair[2], files, sources)

    if any(map(is_remote, files)):
        with ThreadPoolExecutor(REQUESTS) as pool:
            same = list(pool.map(is_same, pairs))
        return next((pair[0] for pair, good in zip(pairs, same, strict=True) if not good), None)
    return next((pair[0] for pair in pairs if not is_same(pair)), None)


def names_by_value(
    copies: Mapping[str, Tensor], masters: Sequence[Tensor], files: Sequence[SourceFile], sources: Sources
) -> list[str] | None:
    """The name of the one copy that each of ``masters`` rounds to; None if it is not exactly one for each."""
    known = KnownCopies(copies, files, sources)
    names: list[str] = []
    for master in masters:
        name = known.of(master)
        if name is None or name in names:
            return None
        names.append(name)
    return names


class KnownCopies:
    """Finds the copy that a master rounds to. Copies with other first elements are not read further."""

    def __init__(self, copies: Mapping[str, Tensor], files: Sequence[SourceFile], sources: Sources) -> None:
        self._copies, self._files, self._sources = copies, files, sources
        self._names: dict[tuple[tuple[int, ...], str, bytes], list[str]] = {}
        self.shapes: dict[tuple[int, ...], set[str]] = {}
        """The dtypes of the copies of each shape."""
        for name, copy in copies.items():
            first = self._first_elements(copy)
            if first is not None:
                key = copy.shape, copy.dtype.name, first.tobytes()
                self._names.setdefault(key, []).append(name)
                self.shapes.setdefault(copy.shape, set()).add(copy.dtype.name)

    def of(self, master: Tensor) -> str | None:
        """The name of the only copy that ``master`` rounds to; None if there is none, or several."""
        first = self._first_elements(master)
        found: list[str] = []
        for dtype in sorted(self.shapes.get(master.shape, ())) if first is not None else ():
            with np.errstate(over="ignore", invalid="ignore"):
                rounded = first.astype(numpy_dtype(DTYPES[dtype]))  # type: ignore[union-attr]
            for name in self._names.get((master.shape, dtype, rounded.tobytes()), ()):
                if _is_copy(self._copies[name], master, self._files, self._sources):
                    found.append(name)
        return found[0] if len(found) == 1 else None

    def _first_elements(self, tensor: Tensor) -> NumpyArray | None:
        """The first elements of the first chunk, in the order of the file; None if they cannot be read."""
        rows = _rows(tensor)
        if tensor.dtype.numpy is None or not rows or not _is_located(tensor):
            return None
        row = rows[min(rows)]
        elements = _Elements(tensor, row, self._files, self._sources)
        if not elements.count or elements.span != elements.count:
            return None
        try:
            return elements.read_first(min(elements.count, _FIRST))
        except FsdpckptError:
            return None


def _is_copy(copy: Tensor, master: Tensor, files: Sequence[SourceFile], sources: Sources) -> bool:
    try:
        return _rounds_to(copy, master, files, sources)
    except FsdpckptError:  # a file that ends before the tensor: whoever takes the tensor says so
        return False


def _is_located(tensor: Tensor) -> bool:
    return bool((tensor.chunks.offset >= 0).all())


def _rounds_to(copy: Tensor, master: Tensor, files: Sequence[SourceFile], sources: Sources) -> bool:
    if copy.shape != master.shape or copy.dtype.numpy is None or master.dtype.numpy is None:
        return False
    if not _is_located(copy) or not _is_located(master):
        return False
    of_copy, of_master = _rows(copy), _rows(master)
    if not of_copy or of_copy.keys() != of_master.keys():
        return False
    into = numpy_dtype(copy.dtype)
    for box, row in of_copy.items():
        elements = _Elements(copy, row, files, sources), _Elements(master, of_master[box], files, sources)
        for low, high in _windows(*elements):
            held, full = elements[0].read(low, high), elements[1].read(low, high)
            with np.errstate(over="ignore", invalid="ignore"):  # float16 rounds large weights to infinity
                rounded = full.astype(into)
            if not bool(((held == rounded) | (np.isnan(held) & np.isnan(rounded))).all()):
                return False
    return True


def _rows(tensor: Tensor) -> dict[tuple[int, ...], int]:
    """The chunks with elements, by their boxes; of equal boxes the first."""
    rows: dict[tuple[int, ...], int] = {}
    boxes = zip(tensor.chunks.start.tolist(), tensor.chunks.size.tolist(), strict=True)
    for row, (start, size) in enumerate(boxes):
        rows.setdefault((*start, *size), row)
    return rows


class _Elements:
    """The elements of one chunk: in the order of the file where they are dense, else in row-major order."""

    def __init__(self, tensor: Tensor, row: int, files: Sequence[SourceFile], sources: Sources) -> None:
        self._tensor, self._row, self._files, self._sources = tensor, row, files, sources
        self.size: list[int] = tensor.chunks.size[row].tolist()
        self.stride: list[int] = tensor.chunks.stride[row].tolist()
        self.count = int(np.prod(self.size, dtype=np.int64))
        steps = zip(self.size, self.stride, strict=True)
        self.span = sum((length - 1) * step for length, step in steps) + 1 if self.count else 0

    def read_first(self, count: int) -> NumpyArray:
        """The first ``count`` elements in the order of the file."""
        dtype = numpy_dtype(self._tensor.dtype)
        data = self._sources.read_elements(self._files, self._tensor, row=self._row, first=0, count=count)
        first: NumpyArray = np.frombuffer(data, dtype)
        return first

    def read(self, low: int, high: int) -> NumpyArray:
        """The elements of ``_windows``: all in row-major order for (0, count), else those from ``low`` to ``high`` in
        the order of the file.
        """
        dtype = numpy_dtype(self._tensor.dtype)
        whole = high - low == self.count
        first, count = (0, self.span) if whole else (low, high - low)
        data = self._sources.read_elements(self._files, self._tensor, row=self._row, first=first, count=count)
        flat: NumpyArray = np.frombuffer(data, dtype)
        if not whole:
            return flat
        steps = [step * dtype.itemsize for step in self.stride]
        view: NumpyArray = np.ndarray(self.size, dtype, data, 0, steps)
        return view


def _windows(copy: _Elements, master: _Elements) -> Iterator[tuple[int, int]]:
    """Which elements of two chunks of equal size to compare."""
    count = copy.count
    alike = copy.stride == master.stride and copy.span == count
    if count <= _WHOLE or not alike:
        if count:
            yield 0, count
        return
    for low in (0, (count - _WINDOW) // 2, count - _WINDOW):
        yield low, low + _WINDOW
