"""Draws progress: a rich bar on a terminal, plain lines in a log."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from fsdpckpt.progress import Progress
from fsdpckpt.text import size_text

__all__ = ["Lines", "bar"]

SECONDS_BETWEEN_LINES = 5.0  # often enough to see life in a CI log, seldom enough not to fill it


class Lines:
    """A line every few seconds, and one at the end of a stage that took long enough to have had one."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._lock = threading.Lock()
        self._stage = ""
        self._total = self._done = 0
        self._begun = self._said = time.monotonic()
        self._spoke = False

    def begin(self, stage: str, total_bytes: int) -> None:
        with self._lock:
            self._stage, self._total, self._done, self._spoke = stage, total_bytes, 0, False
            self._begun = self._said = time.monotonic()

    def advance(self, nbytes: int) -> None:
        with self._lock:
            self._done += nbytes
            now = time.monotonic()
            if now - self._said < SECONDS_BETWEEN_LINES:
                return
            self._said, self._spoke = now, True
            line = self._line(now - self._begun)
        self._say(line)

    def end(self) -> None:
        with self._lock:
            if not self._spoke:
                return
            line = self._line(time.monotonic() - self._begun)
        self._say(line)

    def _line(self, seconds: float) -> str:
        rate = self._done / seconds if seconds > 0 else 0.0
        text = f"{self._stage}: {size_text(self._done)}"
        if self._total:
            text += f" of {size_text(self._total)} ({100 * self._done // self._total} %)"
        text += f", {size_text(int(rate))}/s"
        if self._total > self._done and rate > 0:
            text += f", {(self._total - self._done) / rate:.0f} s left"
        return text


@contextmanager
def bar() -> Iterator[Progress]:
    """A rich progress bar on stderr, gone when the block ends."""
    from rich import progress
    from rich.console import Console

    drawn = progress.Progress(
        progress.TextColumn("{task.description}"),
        progress.BarColumn(),
        progress.DownloadColumn(binary_units=True),
        progress.TransferSpeedColumn(),
        progress.TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
    )

    class Bar:
        task: progress.TaskID | None = None

        def begin(self, stage: str, total_bytes: int) -> None:
            self.end()
            self.task = drawn.add_task(stage, total=total_bytes or None)

        def advance(self, nbytes: int) -> None:
            if self.task is not None:
                drawn.advance(self.task, nbytes)

        def end(self) -> None:
            if self.task is not None:
                drawn.remove_task(self.task)
                self.task = None

    with drawn:
        yield Bar()
