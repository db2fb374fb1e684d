"""The same work for many items, by a few threads with a reader each. Results come in the order of the items.

Two threads by default: one reads (which releases the interpreter's lock) while the other computes.
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

__all__ = ["DEFAULT_THREADS", "Advance", "Stopped", "for_each", "go_on", "in_file_order", "threads_for"]

DEFAULT_THREADS = 2
REMOTE_THREADS = 8  # a store answers late and serves many at once

T = TypeVar("T")
R = TypeVar("R")
W = TypeVar("W")

Advance = Callable[[int], None]


class Stopped(Exception):
    """The work was called off, since another item failed or the user wants no more of it."""


_thread = threading.local()


def go_on() -> None:
    """To be called between two blocks of one item: raises Stopped when the work was called off."""
    stop: threading.Event | None = getattr(_thread, "stop", None)
    if stop is not None and stop.is_set():
        raise Stopped


def threads_for(*checkpoints: Checkpoint) -> int:
    """How many threads read ``checkpoints`` unless the user says."""
    remote = any(is_url(file.path) for checkpoint in checkpoints for file in checkpoint.files)
    return REMOTE_THREADS if remote else DEFAULT_THREADS


def for_each(
    items: Sequence[T],
    work: Callable[[W, T], R],
    *,
    reader: Callable[[], W],
    threads: int = DEFAULT_THREADS,
    order: Sequence[int] | None = None,
) -> list[R]:
    """``work(reader, item)`` for every item, started in ``order`` (as given when None). The first error stops all.

    ``reader()`` is called once a thread: what it makes is that thread's own.
    """
    results: dict[int, R] = {}
    numbers: Iterator[int] = iter(order if order is not None else range(len(items)))
    lock = threading.Lock()
    stop = threading.Event()

    def run() -> None:
        outer = getattr(_thread, "stop", None)
        _thread.stop = stop
        try:
            own = reader()
            while not stop.is_set():
                with lock:
                    number = next(numbers, None)
                if number is None:
                    return
                results[number] = work(own, items[number])
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
            finally:  # also after a signal: the pool waits for its threads
                stop.set()
        errors = [error for future in futures if (error := future.exception()) is not None]
        if errors:  # most of them may have stopped because of one
            raise next((error for error in errors if not isinstance(error, Stopped)), errors[0])
    return [results[number] for number in range(len(items))]


def in_file_order(leaves: Sequence[Value]) -> list[int]:
    """The order in which the first chunks of ``leaves`` lie in their files, so that reads run forward."""
    return sorted(range(len(leaves)), key=lambda number: _place(leaves[number]))


def _place(leaf: Value) -> tuple[int, int]:
    if isinstance(leaf, Tensor) and len(leaf.chunks):
        return int(leaf.chunks.file[0]), int(leaf.chunks.offset[0])
    return -1, -1
