"""Computes statistics and digests of tensors, streamed block by block, and selects those searched for NaN and Inf."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fsdpckpt import flags
from fsdpckpt.globs import matches_any
from fsdpckpt.ir.checkpoint import Checkpoint, NamedTensor, Section
from fsdpckpt.ir.coverage import flaws
from fsdpckpt.ir.dtypes import DType, numpy_dtype
from fsdpckpt.ir.names import clean
from fsdpckpt.ir.tensors import Stats, Tensor
from fsdpckpt.progress import NO_PROGRESS, Progress
from fsdpckpt.storage.sources import Sources
from fsdpckpt.text import plural, some_of
from fsdpckpt.transform.selection import require_globs
from fsdpckpt.verify.blocks import BlockReader, Bytes, for_each, in_file_order, threads_for
from fsdpckpt.verify.repeated import collapsed, extent, is_endless, nbytes_to_read

VERY_LARGE = 2.0**480  # an element from which on the sum of squares may be infinite
DOWNSCALE = 2.0**-560  # the factor that keeps it finite
PART_LENGTH = 1 << 16  # elements processed together: half a MiB as float64, which stays in the processor's cache


_REAL = {"complex32": np.float16, "complex64": np.float32, "complex128": np.float64}


def _values(block: Bytes, dtype: DType) -> npt.NDArray[np.generic]:
    """The elements of ``block`` as a numeric type; complex ones as pairs of reals, bool as 0 and 1."""
    if dtype.name == "bool":
        return block
    return block.view(_REAL.get(dtype.name) or numpy_dtype(dtype))


def _cache_sized(block: Bytes, dtype: DType) -> Iterator[npt.NDArray[np.generic]]:
    """``block`` in parts that stay in the cache; 8- and 16-bit floats as float32, which numpy computes with faster."""
    values = _values(block, dtype)
    widen = dtype.kind in ("float", "complex") and values.dtype.itemsize < 4
    for begin in range(0, len(values), PART_LENGTH):
        part = values[begin : begin + PART_LENGTH]
        yield part.astype(np.float32) if widen else part


def sum_of_squares(block: Bytes, dtype: DType) -> float:
    """The sum of the squares of the finite elements of ``block``; 0 for a dtype without arithmetic."""
    if dtype.numpy is None:
        return 0.0
    total = 0.0
    with np.errstate(all="ignore"):
        for part in _cache_sized(block, dtype):
            wide = part.astype(np.float64)
            squares = np.square(wide, out=wide)
            finite = np.isfinite(squares)
            total += float(squares.sum()) if finite.all() else float(squares[finite].sum())
    return total


class _RunningStats:
    """Statistics of the finite elements so far. From the first very large one on, all are scaled down: the square of a
    float64 may be too large for a float64.

    ``_squares``: the sum of squared deviations from the mean; ``_norm``: the sum of squares.
    """

    def __init__(self) -> None:
        self.nan = self.inf = self._count = 0
        self._mean = self._squares = self._norm = 0.0
        self._low, self._high = math.inf, -math.inf
        self._scale = 1.0

    def add(self, part: npt.NDArray[np.generic]) -> None:
        """Take in the elements of ``part``, of which there is at least one."""
        low, high = float(part.min()), float(part.max())
        if not (math.isfinite(low) and math.isfinite(high)):  # a NaN is the minimum and the maximum
            part = self._finite(part)
            if not len(part):
                return
            low, high = float(part.min()), float(part.max())
        self._low, self._high = min(self._low, low), max(self._high, high)
        wide = part.astype(np.float64)
        if self._scale == 1.0 and max(-low, high) > VERY_LARGE:
            self._scale = DOWNSCALE
            self._mean *= DOWNSCALE
            self._squares = self._squares * DOWNSCALE * DOWNSCALE  # not by DOWNSCALE**2, which is 0
            self._norm = self._norm * DOWNSCALE * DOWNSCALE
        if self._scale != 1.0:
            wide *= self._scale
        count, mean = len(wide), float(wide.mean())
        wide -= mean
        # Not np.dot: BLAS starts threads of its own, which compete with ours over parts this small.
        squares = float(np.square(wide, out=wide).sum())
        # Chan's update of mean and squared deviations: exact where summing squares would cancel.
        delta, total = mean - self._mean, self._count + count
        self._squares += squares + delta * delta * self._count * count / total
        self._mean += delta * count / total
        self._norm += squares + count * mean * mean
        self._count = total

    def _finite(self, part: npt.NDArray[np.generic]) -> npt.NDArray[np.generic]:
        """The finite elements of ``part``; counts the others."""
        nan, inf = _not_finite(part)
        self.nan += nan
        self.inf += inf
        finite: npt.NDArray[np.generic] = part[np.isfinite(part)]
        return finite

    def result(self, repeats: int = 1) -> Stats:
        """The statistics if each element so far stands ``repeats`` times."""
        nan, inf = self.nan * repeats, self.inf * repeats
        if not self._count:
            return Stats(None, None, None, None, None, nan, inf)
        std, norm = math.sqrt(self._squares / self._count), math.sqrt(self._norm) * math.sqrt(repeats)
        mean, std, norm = (value / self._scale for value in (self._mean, std, norm))
        return Stats(self._low, self._high, mean, std, norm, nan, inf)


def _not_finite(part: npt.NDArray[np.generic]) -> tuple[int, int]:
    """(NaN, Inf) elements."""
    nan = int(np.isnan(part).sum())
    return nan, len(part) - int(np.isfinite(part).sum()) - nan


def stats(reader: BlockReader, tensor: Tensor, progress: Progress = NO_PROGRESS) -> Stats | None:
    """The statistics of ``tensor``; None for a dtype without arithmetic (bits, complex32), and for a tensor that stands
    for too many elements (``repeated.is_endless``).
    """
    (tensor,), repeats = collapsed(tensor)
    if tensor.dtype.numpy is None or is_endless(tensor):
        return None
    running = _RunningStats()
    with np.errstate(all="ignore"):
        for block in reader.blocks(tensor):
            for part in _cache_sized(block, tensor.dtype):
                running.add(part)
            progress.advance(len(block))
    return running.result(repeats)


def stats_of(
    checkpoint: Checkpoint,
    tensors: Sequence[NamedTensor],
    *,
    sources: Sources,
    threads: int | None = None,
    progress: Progress = NO_PROGRESS,
) -> list[Stats | None]:
    """The statistics of each of ``tensors``, in their order; None for one that is not whole, which is a problem."""
    whole = [not flaws(named.tensor) for named in tensors]

    def work(reader: BlockReader, number: int) -> Stats | None:
        return stats(reader, tensors[number].tensor, progress) if whole[number] else None

    def make_reader() -> BlockReader:
        return BlockReader(checkpoint.files, sources)

    progress.begin(
        "stats", sum(nbytes_to_read(named.tensor) for named, read in zip(tensors, whole, strict=True) if read)
    )
    order = in_file_order([named.tensor for named in tensors])
    count = threads if threads is not None else threads_for(checkpoint)
    results = for_each(range(len(tensors)), work, make_reader=make_reader, threads=count, order=order)
    progress.end()
    return results


def count_not_finite(reader: BlockReader, tensor: Tensor, progress: Progress = NO_PROGRESS) -> tuple[int, int]:
    """(NaN, Inf) elements of ``tensor``; (0, 0) for a dtype that has neither."""
    (tensor,), repeats = collapsed(tensor)
    if tensor.dtype.kind not in ("float", "complex"):
        progress.advance(tensor.nbytes)
        return 0, 0
    if is_endless(tensor):  # its elements are those that are stored, each any number of times
        tensor, repeats = extent(tensor), 1
    nan = inf = 0
    for block in reader.blocks(tensor):
        for part in _cache_sized(block, tensor.dtype):
            if not np.isfinite(part).all():
                nans, infs = _not_finite(part)
                nan, inf = nan + nans, inf + infs
        progress.advance(len(block))
    return nan * repeats, inf * repeats


def digest(reader: BlockReader, tensor: Tensor, progress: Progress = NO_PROGRESS) -> str:
    """The hexadecimal SHA-256 of the elements of ``tensor`` as row-major little-endian bytes, and of nothing else.

    It does not depend on layout, container or world size, and equals
    ``hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy().tobytes())``. Raises SourceIncompleteError if
    elements are missing.
    """
    sha256 = hashlib.sha256()
    for block in reader.blocks(tensor):
        sha256.update(block.data)
        progress.advance(len(block))
    return sha256.hexdigest()


@dataclass(frozen=True, slots=True)
class Finite:
    """Which tensors are searched for NaN and Inf, by globs that match keys and parameter names.

    ``include``: only what matches is searched, also buffers; ``exclude``: what matches is not.
    """

    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()

    def require_matches(self, checkpoint: Checkpoint) -> None:
        """Raises UsageError for a glob that matches nothing: the intended tensors would not be searched."""
        names = [(named.key, named.param) for named in checkpoint.tensors()]
        require_globs(flags.include, self.include, names, checkpoint.source)
        require_globs(flags.exclude, self.exclude, names, checkpoint.source)

    def selects(self, named: NamedTensor, buffers: frozenset[str]) -> bool:
        if _matches_any(named, self.exclude):
            return False
        if self.include:
            return _matches_any(named, self.include)
        return named.section is not Section.MODEL or (named.state is None and named.key not in buffers)

    def note(self, buffers: frozenset[str]) -> tuple[str, ...]:
        """A note on what is left out because it seems to be a buffer."""
        if self.include or not buffers:
            return ()
        seem = "seems to be a buffer" if len(buffers) == 1 else "seem to be buffers"
        count = f"{plural(len(buffers), 'model tensor')} {seem}"
        names = some_of(sorted(buffers), 3)
        return (f"{count}, not searched for NaN and Inf: {names}; {flags.include('GLOB')} searches what it matches",)


def _matches_any(named: NamedTensor, globs: tuple[str, ...]) -> bool:
    return matches_any(named.key, globs) or matches_any(named.param, globs)


def buffer_keys(checkpoint: Checkpoint) -> frozenset[str]:
    """The model's keys that are not parameters, as far as this is known; frozen parameters may be among them.

    A parameter is what the optimizer lists by name, or what FSDP shards. Of the others, those are buffers that every
    rank holds whole although parameters are sharded, and, if nothing is sharded, those that the optimizer does not
    list. Without either (an optimizer by ids or none, in one full file) nothing counts as a buffer.
    """
    if checkpoint.model is None:
        return frozenset()
    tensors = {key: leaf for key, leaf in checkpoint.model.params.items() if isinstance(leaf, Tensor)}
    optim = checkpoint.optim
    in_optimizer: set[str] = set()
    if optim is not None:
        in_optimizer = {clean(name) for name in (*optim.grouped_keys(), *optim.state) if isinstance(name, str)}
    if in_optimizer.isdisjoint(map(clean, tensors)):  # by ids, or under other names than the model's
        in_optimizer = set()
    return frozenset(
        key
        for key, tensor in tensors.items()
        if clean(key) not in in_optimizer
        and tensor.sharded is not True
        and (bool(in_optimizer) or (tensor.sharded is False and tensor.ndim > 0))
    )
