"""One thread that makes calls which may never return, so that the caller waits with a limit and stays in control.

Neither a store nor a process group of PyTorch can be interrupted from Python. What blocks inside one blocks a daemon
thread here, never the thread that notices, reports and ends.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Generic, TypeVar

__all__ = ["Background", "Job"]

T = TypeVar("T")


class Job(Generic[T]):
    """One call on its way. ``done`` is set when it returned or raised."""

    def __init__(self, call: Callable[[], T]) -> None:
        self._call = call
        self._value: T | None = None
        self._error: BaseException | None = None
        self.done = threading.Event()

    def run(self) -> None:
        try:
            self._value = self._call()
        except BaseException as error:  # noqa: BLE001  # handed to the thread that waits
            self._error = error
        finally:
            self.done.set()

    def result(self) -> T:
        """What the call returned; raises what it raised. Only once ``done``."""
        if self._error is not None:
            raise self._error
        return self._value  # type: ignore[return-value]  # T may be None; set when there was no error


class Background:
    """A daemon thread that runs calls in the order they were given."""

    def __init__(self, name: str) -> None:
        self._jobs: SimpleQueue[Job[object] | None] = SimpleQueue()
        self._name = name
        self._thread: threading.Thread | None = None

    def submit(self, call: Callable[[], T]) -> Job[T]:
        job = Job(call)
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name=self._name, daemon=True)
            self._thread.start()
        self._jobs.put(job)  # type: ignore[arg-type]  # the queue never looks at the result
        return job

    def close(self, patience: float) -> None:
        """End the thread once it has done what it was given; waits at most ``patience`` seconds for it.

        A thread that is inside torch when the interpreter ends takes the process down with an abort.
        """
        self._jobs.put(None)
        if self._thread is not None:
            self._thread.join(patience)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            job.run()
