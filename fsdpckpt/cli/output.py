"""The only place that prints: data on stdout, talk and progress on stderr, with ``--json`` one document on stdout."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, TextIO

from fsdpckpt.process_role import standing

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fsdpckpt.progress import Progress

__all__ = ["Output", "abandon", "visible"]

SCHEMA_VERSION = 1  # goes up when a key goes away or changes its meaning; new keys may come at any time
GAP = 2  # spaces between columns


class Output:
    """Where one command prints. ``quiet``: no talk, no progress. ``as_json``: ``document`` is all of stdout."""

    def __init__(self, *, as_json: bool, quiet: bool) -> None:
        self.as_json = as_json
        self.quiet = quiet

    def data(self, lines: Iterable[str]) -> None:
        """Lines for stdout; nothing under ``--json``."""
        if not self.as_json:
            self._write(sys.stdout, "".join(f"{visible(line)}\n" for line in lines))

    def table(self, headings: Sequence[str], rows: Iterable[Sequence[str]], *, right: frozenset[str]) -> None:
        """A table: by rich on a terminal, aligned plain text elsewhere. ``right``: headings of numeric columns."""
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
        """The one JSON document; ``make`` is only called under ``--json``.

        ``schema``: the name of what it follows, ``fsdpckpt/<name>/1``, in ``cli/schemas``; a units file says it itself.
        """
        if self.as_json:
            document = make() if schema is None else {"schema": f"fsdpckpt/{schema}/{SCHEMA_VERSION}", **make()}
            text = json.dumps(document, ensure_ascii=False, allow_nan=False)
            if sys.stdout is not None and not _writable(sys.stdout, text):
                text = json.dumps(document, allow_nan=False)
            self._write(sys.stdout, text + "\n")

    def talk(self, text: str) -> None:
        """A line for whoever watches; nothing with ``--quiet``."""
        if not self.quiet:
            self._write(sys.stderr, visible(text) + "\n")

    def error(self, text: str) -> None:
        """An error in words, of several lines: always shown, also with ``--quiet``."""
        self._write(sys.stderr, "".join(f"{visible(line)}\n" for line in text.split("\n")))

    def progress(self) -> AbstractContextManager[Progress]:
        """A bar with bytes, rate and time left on a terminal, a line every few seconds in a log, nothing if quiet."""
        return _progress(self)

    @staticmethod
    def _write(stream: TextIO | None, text: str) -> None:
        if stream is None or standing.silent:  # closed by whoever started the program; one worker speaks for all
            return
        if not _writable(stream, text):
            text = text.encode(stream.encoding, "backslashreplace").decode(stream.encoding)
        try:
            stream.write(text)
            stream.flush()
        except BrokenPipeError:  # who read has seen enough, or is gone: the work goes on, and its exit code is true
            abandon(stream)


def abandon(stream: TextIO) -> None:
    """The interpreter flushes its streams at exit, and would complain of this one: give it somewhere to flush to."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, stream.fileno())
    os.close(null)


def visible(text: str) -> str:
    """``text`` on one line: a name with a line break or a terminal's control sequence in it is shown escaped."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else _escaped(char) for char in text)


def _escaped(char: str) -> str:
    return char if "\ud800" <= char <= "\udfff" else repr(char)[1:-1]  # half a pair is a byte of an odd file name


def _writable(stream: TextIO, text: str) -> bool:
    try:
        text.encode(stream.encoding or "utf-8", stream.errors or "strict")
    except UnicodeEncodeError:
        return False
    return True


@contextmanager
def _progress(output: Output) -> Iterator[Progress]:
    from fsdpckpt.progress import NoProgress

    if output.quiet or standing.silent:
        yield NoProgress()
        return
    if sys.stderr is not None and sys.stderr.isatty() and os.environ.get("TERM") != "dumb":
        from fsdpckpt.cli.progress import bar

        with bar() as stages:
            yield stages
        return
    from fsdpckpt.cli.progress import Lines

    yield Lines(output.talk)


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
