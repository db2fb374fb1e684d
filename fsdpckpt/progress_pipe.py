"""Progress from a worker to the process that started it: one writes events to a file, the other follows it."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import TextIO

from fsdpckpt.progress import Progress

__all__ = ["Relay", "followed"]

INTERVAL = 0.1  # seconds: as often as a bar is redrawn


class Relay:
    """A ``Progress`` that appends its events to ``path``, one JSON list a line. Nothing is written before the first."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._file: TextIO | None = None
        self._done = 0
        self._said = 0.0

    def begin(self, stage: str, total_bytes: int) -> None:
        with self._lock:
            self._say("begin", stage, total_bytes)

    def advance(self, nbytes: int) -> None:
        with self._lock:
            self._done += nbytes
            if time.monotonic() - self._said > INTERVAL:
                self._flush()

    def end(self) -> None:
        with self._lock:
            self._flush()
            self._say("end")

    def _flush(self) -> None:
        self._said = time.monotonic()
        if self._done:
            self._say("advance", self._done)
            self._done = 0

    def _say(self, *event: object) -> None:
        if self._file is None:
            self._file = open(self._path, "a", encoding="utf-8")  # noqa: SIM115  # closed by __exit__
        self._file.write(json.dumps(event) + "\n")
        self._file.flush()

    def __enter__(self) -> Relay:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file is not None:
            self._file.close()


@contextmanager
def followed(path: str, progress: Progress) -> Iterator[None]:
    """While the body runs, what a ``Relay`` writes to ``path`` is told to ``progress``."""
    ended = threading.Event()
    thread = threading.Thread(target=_follow, args=(path, progress, ended), name="fsdpckpt-progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _follow(path: str, progress: Progress, ended: threading.Event) -> None:
    at = 0
    while True:
        last = ended.is_set()
        if os.path.exists(path):
            with open(path, encoding="utf-8") as file:
                file.seek(at)
                text = file.read()
            whole = text[: text.rfind("\n") + 1]
            at += len(whole.encode())
            for line in whole.splitlines():
                _tell(progress, json.loads(line))
        if last:
            return
        ended.wait(INTERVAL)


def _tell(progress: Progress, event: list[object]) -> None:
    what, *rest = event
    if what == "begin":
        progress.begin(str(rest[0]), int(str(rest[1])))
    elif what == "advance":
        progress.advance(int(str(rest[0])))
    else:
        progress.end()
