"""Signs of life while a worker computes: long planning is no hang, and a hang is no long planning."""

from __future__ import annotations

import _thread
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from fsdpckpt.comm.group import Group
from fsdpckpt.errors import WorkerError

__all__ = ["pulse"]

LOOK = 0.2  # seconds between two looks
MOVED = 0.001  # seconds of processor time between two looks that count as movement


@contextmanager
def pulse(group: Group) -> Iterator[None]:
    """While the body runs, the others learn that this worker lives as long as its thread uses the processor.

    A failure of another worker interrupts the body and is raised in its place. For the main thread only.
    """
    if group.world_size == 1:
        yield
        return
    watcher = _Watcher(group)
    watcher.start()
    try:
        yield
    except BaseException:
        if watcher.failure is not None:  # the interruption was the watcher's
            raise watcher.failure from None
        raise
    finally:
        watcher.stop()


class _Watcher(threading.Thread):
    def __init__(self, group: Group) -> None:
        super().__init__(name="fsdpckpt-pulse", daemon=True)
        self.failure: WorkerError | None = None
        self._group = group
        self._clock = time.pthread_getcpuclockid(threading.get_ident())
        self._ended = threading.Event()

    def run(self) -> None:
        before = 0.0
        while not self._ended.wait(LOOK):
            used = time.clock_gettime(self._clock)
            moving, before = used - before >= MOVED, used
            try:
                self._group.watch(moving=moving)
            except WorkerError as error:
                self.failure = error
                if not self._ended.is_set():
                    _thread.interrupt_main()
                return

    def stop(self) -> None:
        self._ended.set()
        self.join()
