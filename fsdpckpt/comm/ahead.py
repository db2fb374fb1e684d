"""An iterator that another thread runs ahead of the one that takes its items."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from queue import Empty, SimpleQueue
from typing import Generic, Self, TypeVar

from fsdpckpt.comm.store_monitor import LOOK

__all__ = ["Ahead"]

MOST = 16  # items made and not taken; what they hold is bounded elsewhere
PATIENCE = 2.0  # seconds for the thread to end when its items are not wanted any more

T = TypeVar("T")


class Ahead(Generic[T]):
    """``items``, made by a daemon thread. ``watch`` is called while the caller waits for one, and may raise."""

    def __init__(self, items: Iterator[T], watch: Callable[[], None], name: str) -> None:
        self._items = items
        self._watch = watch
        self._made: SimpleQueue[tuple[T] | BaseException] = SimpleQueue()
        self._room = threading.Semaphore(MOST)
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> T:
        while True:
            try:
                found = self._made.get(timeout=LOOK)
            except Empty:
                self._watch()
                continue
            if isinstance(found, BaseException):
                self._made.put(found)  # for whoever asks again
                raise found
            self._room.release()
            return found[0]

    def close(self) -> None:
        """No further item is wanted. Waits a little for the thread, which may be in the middle of one."""
        self._stopped = True
        self._room.release()
        self._thread.join(PATIENCE)

    def _run(self) -> None:
        try:
            for item in self._items:
                self._made.put((item,))
                self._room.acquire()
                if self._stopped:
                    return
            self._made.put(StopIteration())
        except BaseException as error:  # noqa: BLE001  # raised by the thread that takes the items
            self._made.put(error)
