"""Prints all output: data on stdout, messages and progress on stderr, with ``--json`` one document on stdout."""

from __future__ import annotations

import json
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TextIO

from fsdpckpt.process_role import process_role
from fsdpckpt.progress import NoProgress, Progress
from fsdpckpt.text import size_text

__all__ = ["Lines", "Output", "redirect_to_null", "visible"]

SCHEMA_VERSION = 1  # goes up when a key goes away or changes its meaning; new keys may come at any time
GAP = 2  # spaces between columns
SECONDS_BETWEEN_LINES = 5.0  # often enough to show progress in a CI log, seldom enough not to fill it


class Output:
    """The streams of one command. ``quiet``: no messages, no progress. ``as_json``: ``document`` is all of stdout."""

    def __init__(self, *, as_json: bool, quiet: bool) -> None:
        self.as_json = as_json
        self.quiet = quiet

    def data(self, lines: Iterable[str]) -> None:
        """Print lines on stdout; nothing with ``--json``."""
        if not self.as_json:
            self._write(sys.stdout, "".join(f"{visible(line)}\n" for line in lines))

    def table(self, headings: Sequence[str], rows: Iterable[Sequence[str]], *, right: frozenset[str]) -> None:
        """Print a table, with rich on a terminal, else as aligned text. ``right``: headings of numeric columns."""
        if self.as_json:
            return
        cells = [[visible(text) for text in row] for row in rows]
        widths = [max(map(len, column)) for column in zip(headings, *cells, strict=True)]
        # A table wider than the terminal would be folded within its columns: plain lines wrap more legibly.
        if (
            sys.stdout is not None
            and sys.stdout.isatty()
            and sum(widths) + GAP * (len(widths) - 1) <= shutil.get_terminal_size().columns
        ):
            _draw(headings, cells, right)
        else:
            self._write(sys.stdout, _aligned(headings, cells, widths, right))

    def document(self, make: Callable[[], Mapping[str, object]], schema: str | None = None) -> None:
        """Print the one JSON document that ``make`` returns; without ``--json`` it is not called.

        ``schema``: its name in ``cli/schemas``. A units file names its own format instead.
        """
        if self.as_json:
            document = make() if schema is None else {"schema": f"fsdpckpt/{schema}/{SCHEMA_VERSION}", **make()}
            text = json.dumps(document, ensure_ascii=False, allow_nan=False)
            if sys.stdout is not None and not _writable(sys.stdout, text):
                text = json.dumps(document, allow_nan=False)
            self._write(sys.stdout, text + "\n")

    def message(self, text: str) -> None:
        """One line for a person, on stderr; nothing with ``--quiet``."""
        if not self.quiet:
            self._write(sys.stderr, visible(text) + "\n")

    def error(self, text: str) -> None:
        """Print an error of several lines on stderr, also with ``--quiet``."""
        self._write(sys.stderr, "".join(f"{visible(line)}\n" for line in text.split("\n")))

    def progress(self) -> AbstractContextManager[Progress]:
        """Show progress: a bar on a terminal, a line every few seconds in a log, nothing if quiet."""
        return _progress(self)

    @staticmethod
    def _write(stream: TextIO | None, text: str) -> None:
        if stream is None or process_role.silent:  # closed by the caller, or another worker prints for all
            return
        if not _writable(stream, text):
            text = text.encode(stream.encoding, "backslashreplace").decode(stream.encoding)
        try:
            stream.write(text)
            stream.flush()
        except BrokenPipeError:  # the reader has closed the pipe: the work goes on, and its exit code is right
            redirect_to_null(stream)


def redirect_to_null(stream: TextIO) -> None:
    """Point a broken ``stream`` at the null device: the interpreter flushes it at exit, and would print an error."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, stream.fileno())
    os.close(null)


def visible(text: str) -> str:
    """``text`` on one line, with line breaks and control sequences of the terminal escaped."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else _escaped(char) for char in text)


def _escaped(char: str) -> str:
    return char if "\ud800" <= char <= "\udfff" else repr(char)[1:-1]  # lone surrogates are bytes of a file name


def _writable(stream: TextIO, text: str) -> bool:
    try:
        text.encode(stream.encoding or "utf-8", stream.errors or "strict")
    except UnicodeEncodeError:
        return False
    return True


@contextmanager
def _progress(output: Output) -> Iterator[Progress]:
    if output.quiet or process_role.silent:
        yield NoProgress()
        return
    if sys.stderr is not None and sys.stderr.isatty() and os.environ.get("TERM") != "dumb":
        with _bar() as stages:
            yield stages
        return
    yield Lines(output.message)


def _draw(headings: Sequence[str], rows: Iterable[Sequence[str]], right: frozenset[str]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, GAP, 0, 0), header_style="bold")
    for heading in headings:
        table.add_column(heading, justify="right" if heading in right else "left", no_wrap=True)
    for row in rows:
        table.add_row(*(text.replace("[", r"\[") for text in row))
    Console(file=sys.stdout).print(table)


def _aligned(
    headings: Sequence[str], rows: Sequence[Sequence[str]], widths: Sequence[int], right: frozenset[str]
) -> str:
    lines = []
    for row in (headings, *rows):
        cells = [
            text.rjust(width) if heading in right else text.ljust(width)
            for heading, text, width in zip(headings, row, widths, strict=True)
        ]
        lines.append((" " * GAP).join(cells).rstrip() + "\n")
    return "".join(lines)


class Lines:
    """Progress as a line every few seconds, and one at the end of a stage that took long enough to have had one."""

    def __init__(self, show: Callable[[str], None]) -> None:
        self._show = show
        self._lock = threading.Lock()
        self._stage = ""
        self._total = self._done = 0
        self._begun = self._shown_at = time.monotonic()
        self._shown = False

    def begin(self, stage: str, total_bytes: int) -> None:
        with self._lock:
            self._stage, self._total, self._done, self._shown = stage, total_bytes, 0, False
            self._begun = self._shown_at = time.monotonic()

    def advance(self, nbytes: int) -> None:
        with self._lock:
            self._done += nbytes
            now = time.monotonic()
            if now - self._shown_at < SECONDS_BETWEEN_LINES:
                return
            self._shown_at, self._shown = now, True
            line = self._line(now - self._begun)
        self._show(line)

    def end(self) -> None:
        with self._lock:
            if not self._shown:
                return
            line = self._line(time.monotonic() - self._begun)
        self._show(line)

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
def _bar() -> Iterator[Progress]:
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
