"""Copies windows on the threads of one rank, as their bytes arrive, while the main thread communicates."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from fsdpckpt.plan.transfer import Window

SLOWEST_DISK = 20e6  # bytes a second: a disk that makes files durable more slowly counts as hung
POLL_INTERVAL = 0.05  # seconds
PATIENCE = 2.0  # seconds to wait for the threads once the run has failed


class CopyPool:
    """Threads that, from ``start`` on, call ``copy(thread, window)`` for every window whose bytes have been received.

    They are daemons, so that one that hangs in a system call does not keep the process from ending.
    """

    def __init__(self, windows: Sequence[Window], threads: int, copy: Callable[[int, Window], None]) -> None:
        self._copy = copy
        self._lock = threading.RLock()  # entered by itself: a signal in Condition.__enter__ would leave it locked
        self._changed = threading.Condition(self._lock)
        self._ready = deque(window for window in windows if window.round < 0)
        self._arrived: deque[Window] = deque()
        self._waiting: dict[int, list[Window]] = {}
        for window in windows:
            if window.round >= 0:
                self._waiting.setdefault(window.round, []).append(window)
        self._left = len(windows)
        self._error: BaseException | None = None
        self._stopped = False
        self._asked = False  # whether ``wait`` has an ``until``
        self._moves = self._seen = 0
        self._quiet_until = 0.0
        self._threads = [
            threading.Thread(target=self._work, args=(number,), name=f"fsdpckpt-copy-{number}", daemon=True)
            for number in range(threads)
        ]

    def start(self) -> None:
        """Start the threads. Where ``stop`` is sure to follow: a signal may arrive when only some of them run."""
        for thread in self._threads:
            thread.start()

    def arrived(self, number: int) -> None:
        """All bytes for the windows of round ``number`` have been received."""
        with self._lock:
            self._arrived.extend(self._waiting.pop(number, ()))
            self._changed.notify_all()

    def expect_silence(self, nbytes: int) -> None:
        """A thread is about to sync ``nbytes`` to the disk: no progress for a while does not mean that it hangs."""
        self._quiet_until = max(self._quiet_until, time.monotonic() + nbytes / SLOWEST_DISK)

    def moved(self) -> bool:
        """Whether the threads made progress since the last call, or ``expect_silence`` still applies."""
        before, self._seen = self._seen, self._moves
        return before != self._seen or time.monotonic() < self._quiet_until

    def wait(self, watch: Callable[[], None], until: Callable[[], bool] | None = None) -> None:
        """Wait until all windows are written, or until ``until()`` is true; calls ``watch`` while waiting.

        ``until`` is asked again after every window. Raises what a thread raised.
        """
        while True:
            with self._lock:
                self._asked = until is not None
                if self._error is not None:
                    raise self._error
                if not self._left if until is None else until():
                    return
                self._changed.wait(POLL_INTERVAL)
            watch()

    def stop(self, patience: float | None = PATIENCE) -> None:
        """Let no thread take another window; wait for the threads, at most ``patience`` seconds (None: no limit)."""
        with self._lock:
            self._stopped = True
            self._changed.notify_all()
        deadline = None if patience is None else time.monotonic() + patience
        for thread in self._threads:
            if thread.is_alive():  # one that a signal kept from starting finds the pool stopped
                thread.join(None if deadline is None else max(deadline - time.monotonic(), 0.0))

    def _next(self) -> Window | None:
        with self._lock:
            while not self._stopped:
                if self._arrived:  # these first: their bytes take up memory
                    return self._arrived.popleft()
                if self._ready:
                    return self._ready.popleft()
                if not self._waiting:
                    return None
                self._changed.wait()
            return None

    def _work(self, number: int) -> None:
        try:
            while (window := self._next()) is not None:
                self._copy(number, window)
                with self._lock:
                    self._moves += 1
                    self._left -= 1
                    if self._asked or not self._left:  # else waking the main thread costs more than a small window
                        self._changed.notify_all()
        except BaseException as error:  # noqa: BLE001  # raised by the main thread, in ``wait``
            with self._lock:
                self._stopped = True
                self._error = self._error or error
                self._changed.notify_all()
