"""Assembles one window of a target file in memory: literals, and tensor bytes read, gathered or cast.

``CopyPool`` does this on the threads of one rank, as the bytes arrive, while the main thread communicates.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from itertools import pairwise, product

import numpy as np
import numpy.typing as npt
from isal.isal_zlib import crc32

from fsdpckpt.execute.checks import Part, SourceCheck
from fsdpckpt.execute.window_sums import WindowSums
from fsdpckpt.ir.checkpoint import SourceFile
from fsdpckpt.ir.dtypes import DType, cast, numpy_dtype
from fsdpckpt.ir.tensors import Int64Array
from fsdpckpt.plan import Copies, FilePlan, Plan, StridedBatch, rows_within, strided_batches
from fsdpckpt.plan.streams import SHORTEST_IN_PLACE
from fsdpckpt.plan.transfer import Window
from fsdpckpt.storage import is_remote
from fsdpckpt.storage.local_target import BLOCK, aligned_buffer
from fsdpckpt.storage.remote_file import REQUEST_COST
from fsdpckpt.storage.sources import Sources

# All in bytes. Ranges from SHORTEST_IN_PLACE on are read straight into their place in the window; smaller neighbours
# share a read.
MAX_GAP = 32 * 1024  # between two small ranges on a disk: cheaper to read than to skip
WIDE_ROW = 16 * 1024  # rows of this width or more are read one by one from a disk, narrower ones in one span
MIN_SUMMED = 128 * 1024  # bytes of a piece whose checksum is kept: a shorter one is summed again in less time
CHECKSUM_BLOCK = 1024 * 1024  # small enough for the second-level cache of one core; threads meet between blocks

_FEW_COPIES = 16  # in a window
CAST_AT_ONCE = 1 << 16  # elements: their temporary copies fit into the processor's cache


class SourceReader:
    """Reads source files, which are given by their number. Thread-safe.

    ``widest_gap[file]``: a gap of up to so many bytes between two ranges is cheaper to read than to skip. ``remote``:
    whether any file is in a store.
    """

    def __init__(self, files: Sequence[SourceFile], sources: Sources) -> None:
        self._files = files
        self._sources = sources
        self.remote = any(map(is_remote, files))
        self.widest_gap = np.array([REQUEST_COST if is_remote(file) else MAX_GAP for file in files], np.int64)

    def read_into(self, file: int, offset: int, view: memoryview) -> None:
        """Fill ``view`` with the bytes from ``offset``."""
        self._sources.open_file(self._files[file]).read_into(offset, view)

    def read_summed(self, file: int, offset: int, view: memoryview) -> int:
        """``read_into``, block by block, each summed while it is in the processor's cache; returns the CRC-32."""
        step = max(len(view), 1) if self.remote else CHECKSUM_BLOCK
        crc = 0
        for at in range(0, len(view), step):
            block = view[at : at + step]
            self.read_into(file, offset + at, block)
            crc = crc32(block, crc)
        return crc


class Assembler:
    """Assembles windows in one thread's buffers: ``window`` bytes for the result and as many for scratch."""

    def __init__(self, plan: Plan, reader: SourceReader, check: SourceCheck, window: int) -> None:
        self._plan = plan
        self._reader = reader
        self._check = check
        self._few_copies = 1 if reader.remote else _FEW_COPIES
        self._window = aligned_buffer(window + BLOCK)
        self._scratch = aligned_buffer(window)
        self._begin = 0
        self._summed: list[Part] = []

    def assemble(self, file: FilePlan, begin: int, end: int, *, into: memoryview | None = None) -> memoryview:
        """The bytes [begin, end) of ``file``, valid until the next call. ``into``: fill this buffer instead."""
        self._begin, self._summed = begin, []
        shift = begin % BLOCK  # the same alignment in memory as in the file, as direct writes need it
        view = self._window[shift : shift + end - begin] if into is None else into
        self._copy_literals(file, begin, view)
        low = int(file.write_items[:, 0].searchsorted(begin, side="right")) - 1
        high = int(file.write_items[:, 0].searchsorted(end, side="left"))
        rows = slice(int(file.first_copy[max(low, 0)]), int(file.first_copy[high]))
        contiguous = (file.copies.rows[rows] == 1) & (file.copies.cast[rows] < 0)
        if rows.stop - rows.start <= self._few_copies and contiguous.all():
            self._copy_each(file.copies, rows, begin, view)
            return view
        self._copy_contiguous(file.copies, rows, contiguous, begin, view)
        if not contiguous.all():
            numbers = np.flatnonzero(~contiguous) + rows.start
            widths = self._plan.source_bytes(file.copies.width[numbers], file.copies.cast[numbers])
            for batch in strided_batches(file.copies, numbers, widths, begin, end, len(self._scratch)):
                self._copy_strided(file, batch, begin, view)
        return view

    def sums(self, view: memoryview) -> WindowSums:
        """The checksums of ``view``, which ``assemble`` has returned."""
        return WindowSums(self._begin, view, self._summed)

    def _copy_literals(self, file: FilePlan, begin: int, view: memoryview) -> None:
        literals = file.literals
        end = begin + len(view)
        low = max(int(literals[:, 0].searchsorted(begin, side="right")) - 1, 0)
        high = int(literals[:, 0].searchsorted(end, side="left"))
        blob = memoryview(file.blob)
        for at, start, nbytes in literals[low:high].tolist():
            first, last = max(at, begin), min(at + nbytes, end)
            if first < last:
                view[first - begin : last - begin] = blob[start + first - at : start + last - at]

    def _read_summed(self, file: int, offset: int, view: memoryview, position: int, length: int) -> None:
        """Fill ``length`` bytes from ``position`` of ``view``, and keep their checksum."""
        crc = self._reader.read_summed(file, offset, view[position : position + length])
        self._check.add_sum(file, offset, length, crc)
        if length >= MIN_SUMMED:
            self._summed.append((self._begin + position, length, crc))

    def _copy_each(self, copies: Copies, rows: slice, begin: int, view: memoryview) -> None:
        """Copy contiguous copies one by one: small files have only a few, and the set-up in ``_copy_contiguous`` would
        cost more.
        """
        columns = (copies.file, copies.source, copies.target, copies.width)
        for file, source, target, width in zip(*(column[rows].tolist() for column in columns), strict=True):
            first, last = max(target, begin), min(target + width, begin + len(view))
            if first < last:
                self._read_summed(file, source + first - target, view, first - begin, last - first)

    def _copy_contiguous(
        self, copies: Copies, rows: slice, contiguous: npt.NDArray[np.bool_], begin: int, view: memoryview
    ) -> None:
        """Copy the ``contiguous`` ones of the copies ``rows``: large ones are read in place, small neighbours in one
        read and then distributed.
        """
        columns = (copies.file, copies.source, copies.target, copies.width)
        file, source, target, width = (column[rows][contiguous] for column in columns)
        first = np.maximum(target, begin)
        nbytes = np.minimum(target + width, begin + len(view)) - first
        inside = nbytes > 0
        source = source + first - target
        table = np.stack([file, source, first - begin, nbytes])[:, inside]
        table = table[:, np.lexsort((table[1], table[0]))]
        widest_gap = self._reader.widest_gap[table[0]]
        large = table[3] >= np.maximum(SHORTEST_IN_PLACE, widest_gap)
        for number, offset, position, length in table[:, large].T.tolist():
            self._read_summed(number, offset, view, position, length)
        table, widest_gap = table[:, ~large], widest_gap[~large]
        file, begins, ends = table[0], table[1], table[1] + table[3]
        gap = begins[1:] - ends[:-1]
        near = (file[1:] == file[:-1]) & (gap >= 0) & (gap <= widest_gap[1:])
        bounds = [0, *(np.flatnonzero(~near) + 1).tolist(), table.shape[1]]
        for low, high in pairwise(bounds):
            while low < high:
                count = int(np.searchsorted(ends[low:high], begins[low] + len(self._scratch), side="right"))
                self._read_group(table[:, low : low + max(count, 1)], view)
                low += max(count, 1)  # noqa: PLW2901

    def _read_group(self, group: Int64Array, view: memoryview) -> None:
        """Read the ranges of ``group`` at once and copy each to its position in ``view``.

        Its rows: source file, offset, position, length.
        """
        number, first, position, length = group[:, 0].tolist()
        if group.shape[1] == 1:
            self._read_summed(number, first, view, position, length)
            return
        span = self._scratch[: int(group[1, -1] + group[3, -1]) - first]
        self._reader.read_into(number, first, span)
        crcs: list[int] = []
        for at, position, length in zip((group[1] - first).tolist(), group[2].tolist(), group[3].tolist(), strict=True):
            part = span[at : at + length]
            view[position : position + length] = part
            crcs.append(crc32(part))
        self._check.add_sums(number, group[1], group[3], np.array(crcs, np.int64))

    def _copy_strided(self, file: FilePlan, batch: StridedBatch, begin: int, view: memoryview) -> None:
        """Copy by rows, or with a cast. A single copy is clipped to the window: part of a row, full rows, a part."""
        copy = [int(column[batch.first]) for column in file.copies]
        for source, target, width, rows in rows_within(self._plan, copy, begin, begin + len(view)):
            self._copy_rows(copy, source, view[target - begin :], width, rows, batch)

    def _copy_rows(
        self, copy: list[int], source: int, view: memoryview, width: int, rows: int, batch: StridedBatch
    ) -> None:
        """Copy ``rows`` full rows of ``width`` target bytes through scratch, reading as many at once as fit there.

        One read takes all copies of ``batch`` from every source row: they span ``row_span`` bytes of it.
        """
        number, _, source_pitch, _, pitch, _, _, cast = copy
        source_type, target_type = _item_types(self._plan.casts[cast] if cast >= 0 else None, width)
        source_width = width // target_type.itemsize * source_type.itemsize
        row_span = (batch.count - 1) * batch.source_step + source_width
        limit = len(self._scratch)
        if source_width > limit:
            part = limit // source_type.itemsize * target_type.itemsize
            for row, at in product(range(rows), range(0, width, part)):
                offset = source + row * source_pitch + at // target_type.itemsize * source_type.itemsize
                self._copy_rows(copy, offset, view[row * pitch + at :], min(part, width - at), 1, batch)
            return
        widest_gap = int(self._reader.widest_gap[number])
        if row_span >= WIDE_ROW and widest_gap <= MAX_GAP:
            widest_gap = 0
        one_by_one = source_pitch - row_span > widest_gap
        # Rows may overlap in the source: the last one of a span then ends beyond its pitch.
        rows_at_once = 1 if one_by_one else (limit - row_span) // max(source_pitch, 1) + 1
        for row in range(0, rows, rows_at_once):
            count = min(rows - row, rows_at_once)
            span = self._scratch[: (count - 1) * source_pitch + row_span]
            at = source + row * source_pitch
            self._reader.read_into(number, at, span)
            if count == 1 or source_pitch == row_span:
                self._check.add_bytes(number, at, span)
            shape = (batch.count, count, source_width // source_type.itemsize)
            source_rows: npt.NDArray[np.generic] = np.ndarray(
                shape, source_type, span, 0, (batch.source_step, source_pitch, source_type.itemsize)
            )
            target_rows: npt.NDArray[np.generic] = np.ndarray(
                shape, target_type, view, row * pitch, (batch.target_step, pitch, target_type.itemsize)
            )
            _cast_rows(source_rows, target_rows)


def _item_types(casting: tuple[DType, DType] | None, width: int) -> tuple[np.dtype[np.generic], np.dtype[np.generic]]:
    if casting is None:
        unit = np.dtype(f"u{width if width in (1, 2, 4, 8) else 1}")  # a narrow row moves as one integer
        return unit, unit
    return numpy_dtype(casting[0]), numpy_dtype(casting[1])


def _cast_rows(source: npt.NDArray[np.generic], target: npt.NDArray[np.generic]) -> None:
    """Cast elements from ``source`` to ``target``, a few rows at a time: numpy's temporary copies are not in the memory
    budget.
    """
    if source.dtype == target.dtype:
        target[...] = source
        return
    shorter = 0 if source.shape[0] < source.shape[1] else 1
    for source_rows, target_rows in zip(np.moveaxis(source, shorter, 0), np.moveaxis(target, shorter, 0), strict=True):
        rows, width = source_rows.shape
        step = max(CAST_AT_ONCE // max(width, 1), 1)
        for row in range(0, rows, step):
            for column in range(0, width, CAST_AT_ONCE):
                box = (slice(row, row + step), slice(column, column + CAST_AT_ONCE))
                target_rows[box] = cast(source_rows[box], target.dtype)


SLOWEST_DISK = 20e6  # bytes a second: a disk that makes files durable more slowly counts as hung
POLL_INTERVAL = 0.05  # seconds
PATIENCE = 2.0  # seconds to wait for the threads once the run has failed


class CopyPool:
    """Threads that, from ``start`` on, call ``copy(thread, window)`` for every window whose bytes have been received.

    They are daemons, so that a thread that hangs in a system call does not keep the process alive. ``in_order``: no
    window is begun before all windows in front of it are; else those that were received come first.
    """

    def __init__(
        self, windows: Sequence[Window], threads: int, copy: Callable[[int, Window], None], *, in_order: bool = False
    ) -> None:
        self._copy = copy
        self._lock = threading.RLock()  # entered by itself: a signal in Condition.__enter__ would leave it locked
        self._changed = threading.Condition(self._lock)
        self._in_order = in_order
        self._ready = deque(window for window in windows if in_order or window.round < 0)
        self._received: deque[Window] = deque()
        self._waiting: dict[int, list[Window]] = {}  # by round: windows whose bytes are not here yet
        for window in windows:
            if window.round >= 0:
                self._waiting.setdefault(window.round, []).append(window)
        self._left = len(windows)
        self._error: BaseException | None = None
        self._stopped = False
        self._has_condition = False  # whether ``wait`` has an ``until``
        self._windows_done = self._windows_reported = 0
        self._silent_until = 0.0
        self._threads = [
            threading.Thread(target=self._work, args=(number,), name=f"fsdpckpt-copy-{number}", daemon=True)
            for number in range(threads)
        ]

    def start(self) -> None:
        """Start the threads. Call it where ``stop`` is sure to follow: a signal may arrive when only some of
        them run.
        """
        for thread in self._threads:
            thread.start()

    def received(self, number: int) -> None:
        """All bytes for the windows of round ``number`` have been received."""
        with self._lock:
            windows = self._waiting.pop(number, ())
            if not self._in_order:
                self._received.extend(windows)
            self._changed.notify_all()

    def expect_silence(self, nbytes: int) -> None:
        """A thread is about to sync ``nbytes`` to the disk: a lack of progress does not mean that it hangs."""
        self._silent_until = max(self._silent_until, time.monotonic() + nbytes / SLOWEST_DISK)

    def moved(self) -> bool:
        """Whether the threads made progress since the last call, or ``expect_silence`` still applies."""
        before, self._windows_reported = self._windows_reported, self._windows_done
        return before != self._windows_reported or time.monotonic() < self._silent_until

    def wait(self, watch: Callable[[], None], until: Callable[[], bool] | None = None) -> None:
        """Wait until all windows are written, or ``until()`` is true; call ``watch`` while waiting.

        Calls ``until`` again after every window. Raises what a thread raised.
        """
        while True:
            with self._lock:
                self._has_condition = until is not None
                if self._error is not None:
                    raise self._error
                done = until() if until is not None else not self._left
                if done:
                    return
                self._changed.wait(POLL_INTERVAL)
            watch()

    def stop(self, patience: float | None = PATIENCE) -> None:
        """Let no thread take another window, then wait for the threads, at most ``patience`` seconds (None:
        no limit).
        """
        with self._lock:
            self._stopped = True
            self._changed.notify_all()
        deadline = None if patience is None else time.monotonic() + patience
        for thread in self._threads:
            if thread.is_alive():  # a thread that starts late because of a signal finds the pool stopped
                thread.join(None if deadline is None else max(deadline - time.monotonic(), 0.0))

    def _next(self) -> Window | None:
        with self._lock:
            while not self._stopped:
                if self._received:  # these first: their bytes take up memory
                    return self._received.popleft()
                if self._ready and self._ready[0].round not in self._waiting:
                    return self._ready.popleft()
                if not self._ready and not self._waiting:
                    return None
                self._changed.wait()
            return None

    def _work(self, number: int) -> None:
        try:
            while (window := self._next()) is not None:
                self._copy(number, window)
                with self._lock:
                    self._windows_done += 1
                    self._left -= 1
                    if self._has_condition or not self._left:  # else waking the main thread costs more than a window
                        self._changed.notify_all()
        except BaseException as error:  # noqa: BLE001  # raised by the main thread, in ``wait``
            with self._lock:
                self._stopped = True
                self._error = self._error or error
                self._changed.notify_all()
