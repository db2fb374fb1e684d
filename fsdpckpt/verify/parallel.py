"""Does the same work for many items in a few threads, each with a reader of its own.

Two threads by default: one reads, which releases the interpreter's lock, while the other computes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TypeVar

from fsdpckpt.ir.checkpoint import Checkpoint
from fsdpckpt.ir.tensors import Tensor
from fsdpckpt.ir.values import Value
from fsdpckpt.storage.protocols import is_url

DEFAULT_THREADS = 2
REMOTE_THREADS = 8  # a store answers slowly, and many requests at once

T = TypeVar("T")
R = TypeVar("R")
W = TypeVar("W")

Advance = Callable[[int], None]
"""Called with the number of bytes that were read since the last call."""


def no_progress(nbytes: int) -> None:
    """An ``Advance`` that shows nothing."""


class Cancelled(Exception):
    """The work was cancelled: another item failed, or the user interrupted it."""


_thread = threading.local()


def raise_if_cancelled() -> None:
    """Raises Cancelled when the work was cancelled; called between two blocks of one item."""
    stop: threading.Event | None = getattr(_thread, "stop", None)
    if stop is not None and stop.is_set():
        raise Cancelled


def threads_for(*checkpoints: Checkpoint) -> int:
    """The number of threads to read ``checkpoints`` with when the user gives none."""
    remote = any(is_url(file.path) for checkpoint in checkpoints for file in checkpoint.files)
    return REMOTE_THREADS if remote else DEFAULT_THREADS


def for_each(
    items: Sequence[T],
    work: Callable[[W, T], R],
    *,
    make_reader: Callable[[], W],
    threads: int = DEFAULT_THREADS,
    order: Sequence[int] | None = None,
) -> list[R]:
    """The results of ``work(reader, item)`` in the order of ``items``. The first error cancels all.

    ``order``: in which the items are started. ``make_reader()`` is called once in each thread.
    """
    results: dict[int, R] = {}
    numbers: Iterator[int] = iter(order if order is not None else range(len(items)))
    lock = threading.Lock()
    stop = threading.Event()

    def run() -> None:
        outer = getattr(_thread, "stop", None)
        _thread.stop = stop
        try:
            reader = make_reader()
            while not stop.is_set():
                with lock:
                    number = next(numbers, None)
                if number is None:
                    return
                results[number] = work(reader, items[number])
        except BaseException:
            stop.set()
            raise
        finally:
            _thread.stop = outer

    count = max(min(threads, len(items)), 1)
    if count == 1:
        run()
    else:
        with ThreadPoolExecutor(count, thread_name_prefix="fsdpckpt-verify") as pool:
            futures = [pool.submit(run) for _ in range(count)]
            try:
                wait(futures)
            finally:  # also after a signal: leaving the pool waits for its threads
                stop.set()
        errors = [error for future in futures if (error := future.exception()) is not None]
        if errors:  # one failed, the others may only have been cancelled
            raise next((error for error in errors if not isinstance(error, Cancelled)), errors[0])
    return [results[number] for number in range(len(items))]


def in_file_order(values: Sequence[Value]) -> list[int]:
    """The order in which the first chunks of ``values`` lie in their files, so that reads run forward."""
    return sorted(range(len(values)), key=lambda number: _position(values[number]))


def _position(value: Value) -> tuple[int, int]:
    if isinstance(value, Tensor) and len(value.chunks):
        return int(value.chunks.file[0]), int(value.chunks.offset[0])
    return -1, -1
