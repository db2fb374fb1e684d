"""Report progress while a rank computes: long planning is no hang, and a hang is no long planning."""

from __future__ import annotations

import _thread
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from fsdpckpt.errors import WorkerError

__all__ = ["heartbeat"]

LOOK = 0.2  # seconds between two looks
MOVED = 0.001  # seconds of processor time between two looks that count as movement


@contextmanager
def heartbeat(watch: Callable[[bool], None]) -> Iterator[None]:
    """While the body runs, call ``watch(moving)`` from another thread: whether the body used the processor meanwhile.

    A WorkerError of ``watch`` interrupts the body and is raised in its place. For the main thread only.
    """
    heart = _Heart(watch)
    heart.start()
    try:
        yield
    except BaseException:
        if heart.failure is not None:  # the interruption was this thread's
            raise heart.failure from None
        raise
    finally:
        heart.stop()


class _Heart(threading.Thread):
    def __init__(self, watch: Callable[[bool], None]) -> None:
        super().__init__(name="fsdpckpt-heartbeat", daemon=True)
        self.failure: WorkerError | None = None
        self._watch = watch
        self._clock = time.pthread_getcpuclockid(threading.get_ident())
        self._ended = threading.Event()

    def run(self) -> None:
        before = 0.0
        while not self._ended.wait(LOOK):
            used = time.clock_gettime(self._clock)
            moving, before = used - before >= MOVED, used
            try:
                self._watch(moving)
            except WorkerError as error:
                self.failure = error
                if not self._ended.is_set():
                    _thread.interrupt_main()
                return

    def stop(self) -> None:
        self._ended.set()
        self.join()
