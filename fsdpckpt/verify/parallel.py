"""The same work for many items, by a few threads with a reader each. Results come in the order of the items.

Two threads by default: one reads (which releases the interpreter's lock) while the other computes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from fsdpckpt.ir.tensors import Tensor
from fsdpckpt.ir.values import Value

__all__ = ["DEFAULT_THREADS", "Advance", "for_each", "in_file_order"]

DEFAULT_THREADS = 2

T = TypeVar("T")
R = TypeVar("R")
W = TypeVar("W")

Advance = Callable[[int], None]


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

    def run() -> None:
        nonlocal numbers
        own = reader()
        while True:
            with lock:
                number = next(numbers, None)
            if number is None:
                return
            try:
                results[number] = work(own, items[number])
            except BaseException:
                with lock:
                    numbers = iter(())
                raise

    count = max(min(threads, len(items)), 1)
    if count == 1:
        run()
    else:
        with ThreadPoolExecutor(count, thread_name_prefix="fsdpckpt-verify") as pool:
            futures = [pool.submit(run) for _ in range(count)]
            try:
                for future in futures:
                    future.result()
            except BaseException:
                with lock:
                    numbers = iter(())
                raise
    return [results[number] for number in range(len(items))]


def in_file_order(leaves: Sequence[Value]) -> list[int]:
    """The order in which the first pieces of ``leaves`` lie in their files, so that reads run forward."""
    return sorted(range(len(leaves)), key=lambda number: _place(leaves[number]))


def _place(leaf: Value) -> tuple[int, int]:
    if isinstance(leaf, Tensor) and len(leaf.pieces):
        return int(leaf.pieces.file[0]), int(leaf.pieces.offset[0])
    return -1, -1
