"""Reports progress: long work reports bytes to a ``Progress``, which the command line draws.

A worker that another process started writes its events to a file (``ProgressPipe``), which that process follows.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Protocol, TextIO


class Progress(Protocol):
    """Gets the progress of one stage at a time, from any thread."""

    def begin(self, stage: str, total_bytes: int) -> None:
        """A stage starts: ``"read"``, ``"copy"``, ``"verify"``, ... ``total_bytes`` 0 if it has no size."""

    def advance(self, nbytes: int) -> None:
        """``nbytes`` more bytes are done."""

    def end(self) -> None:
        """The stage is complete."""


class NoProgress:
    """Ignores all progress."""

    def begin(self, stage: str, total_bytes: int) -> None:
        del stage, total_bytes

    def advance(self, nbytes: int) -> None:
        del nbytes

    def end(self) -> None:
        return None


NO_PROGRESS: Progress = NoProgress()

INTERVAL = 0.1  # seconds: as often as a bar is redrawn


class ProgressPipe:
    """A ``Progress`` that appends each call to ``path``, one JSON list on each line."""

    def __init__(self, path: str) -> None:
        self._lock = threading.Lock()
        self._file = open(path, "a", encoding="utf-8")  # noqa: SIM115  # closed by __exit__
        self._done = 0
        self._written = 0.0

    def begin(self, stage: str, total_bytes: int) -> None:
        with self._lock:
            self._write("begin", stage, total_bytes)

    def advance(self, nbytes: int) -> None:
        with self._lock:
            self._done += nbytes
            if time.monotonic() - self._written > INTERVAL:
                self._flush()

    def end(self) -> None:
        with self._lock:
            self._flush()
            self._write("end")

    def _flush(self) -> None:
        self._written = time.monotonic()
        if self._done:
            self._write("advance", self._done)
            self._done = 0

    def _write(self, *event: object) -> None:
        self._file.write(json.dumps(event) + "\n")
        self._file.flush()

    def __enter__(self) -> ProgressPipe:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()


@contextmanager
def follow_progress(path: str, progress: Progress) -> Iterator[None]:
    """While the body runs, report to ``progress`` what a ``ProgressPipe`` writes to ``path``."""
    ended = threading.Event()
    with open(path, "w+", encoding="utf-8") as file:
        thread = threading.Thread(target=_follow, args=(file, progress, ended), name="fsdpckpt-progress", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()


def _follow(file: TextIO, progress: Progress, ended: threading.Event) -> None:
    rest = ""  # of a line that is not written completely
    while True:
        last = ended.is_set()
        *lines, rest = (rest + file.read()).split("\n")
        for line in lines:
            method, *values = json.loads(line)
            getattr(progress, method)(*values)
        if last:
            return
        ended.wait(INTERVAL)
