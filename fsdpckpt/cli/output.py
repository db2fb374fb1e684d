"""Prints all output: data on stdout, messages and progress on stderr, with ``--json`` one document on stdout.

Tables of text are never cut in a pipe, and at most as wide as the screen on a terminal.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from itertools import islice
from typing import TextIO, TypeAlias

from fsdpckpt.flags import on_command_line
from fsdpckpt.process import process_role
from fsdpckpt.progress import NoProgress, Progress
from fsdpckpt.text import JsonText, printable, remaining_text, shorten, shrink, size_text

GAP = 2  # spaces between columns
NARROWEST = 8  # characters of a column of names, however narrow the terminal


def visible(text: str) -> str:
    """``text`` on one line, with line breaks and control sequences of the terminal escaped."""
    return printable(on_command_line(text))  # options are values in a message, also when it is formatted


@dataclass(frozen=True, slots=True)
class Name:
    """A cell whose middle may be cut if the screen is narrow; ``suffix`` stays whole."""

    text: str
    suffix: str = ""

    def __str__(self) -> str:
        return visible(self.text) + self.suffix

    def within(self, width: int) -> str:
        return shorten(visible(self.text), max(width - len(self.suffix), 1)) + self.suffix


Cell: TypeAlias = str | Name


def _cell_text(cell: Cell) -> str:
    return visible(cell) if isinstance(cell, str) else str(cell)


def table_lines(rows: Sequence[Sequence[Cell]], *, right: Collection[int], columns: int | None = None) -> list[str]:
    """The rows as lines with aligned columns. ``right``: columns of numbers; ``columns``: of the terminal, if any."""
    texts = [list(map(_cell_text, row)) for row in rows]
    widths = [max(map(len, column)) for column in zip(*texts, strict=True)]
    if columns is not None and (narrowed := _narrow(rows, widths, columns)) != widths:
        widths = narrowed
        for row, cells in zip(rows, texts, strict=True):
            for at, cell in enumerate(row):
                if isinstance(cell, Name):
                    cells[at] = cell.within(widths[at])
    lines = []
    for cells in texts:
        aligned = [
            text.rjust(width) if at in right else text.ljust(width)
            for at, (text, width) in enumerate(zip(cells, widths, strict=True))
        ]
        lines.append(cut_line((" " * GAP).join(aligned).rstrip(), columns))
    return lines


def _narrow(rows: Sequence[Sequence[Cell]], widths: Sequence[int], columns: int) -> list[int]:
    """``widths`` with the columns of names made narrower, the widest first, until the table fits or none can be
    narrowed.
    """
    least = list(widths)
    for at, column in enumerate(zip(*rows, strict=True)):
        if any(isinstance(cell, Name) for cell in column):
            fixed = max((len(cell) for cell in column if isinstance(cell, str)), default=0)
            suffix = max(len(cell.suffix) for cell in column if isinstance(cell, Name))
            least[at] = min(widths[at], max(fixed, suffix + NARROWEST))
    return shrink(widths, least, columns - GAP * (len(widths) - 1))


def cut_line(line: str, columns: int | None) -> str:
    """``line`` in at most ``columns`` characters, ending in an ellipsis if it is longer."""
    line = on_command_line(line)
    return line if columns is None or len(line) <= columns else line[: max(columns - 1, 0)] + "…"


def wrapped(line: str, columns: int | None) -> list[str]:
    """A sentence on as many lines as it needs: unlike a row, it loses nothing on a narrow screen.

    It breaks between words only: a path stays whole, to be copied. Lines after the first begin below the first word
    after a label.
    """
    line = on_command_line(line)  # an option in it must not be taken apart, nor count longer than it is shown
    if columns is None or len(line) <= columns:
        return [line]
    import textwrap

    label = _LABEL.match(line)
    indent = " " * len(label[0]) if label is not None else "    "
    width = max(columns, 20)
    lines = textwrap.wrap(line, width, subsequent_indent=indent, break_on_hyphens=False, break_long_words=False)
    return lines or [line]


_LABEL = re.compile(r" *- |(?:why|next|or): +| +")


class UnbrokenLine(str):
    """A line that is not broken, whatever its length: a command to copy."""

    __slots__ = ()


SCHEMA_VERSION = 1  # increases when a key disappears or changes its meaning; new keys may appear at any time
PRINTED_AT_ONCE = 1 << 16  # characters of a document, at least
ITEMS_AT_ONCE = 256  # of a list in a document
SECONDS_BETWEEN_LINES = 5.0  # often enough to show progress in a CI log, rarely enough not to fill it


class Colour(StrEnum):
    """The meaning of a colour. The values are those of the terminal's control sequence."""

    BAD = "1;31"
    GOOD = "1;32"
    NEW = "32"
    CHANGED = "33"
    HEADING = "1"
    ASIDE = "2"


@dataclass(frozen=True, slots=True)
class Styled:
    """A line with ``begin`` to ``end`` coloured if colours are shown."""

    text: str
    colour: Colour
    begin: int = 0
    end: int | None = None


Line: TypeAlias = str | Styled


def labelled(label: str, text: str, colour: Colour | None, columns: int | None) -> Iterator[Line]:
    """``label text`` with a coloured label, on several lines if the terminal is narrow."""
    first, *rest = wrapped(f"{label} {text}", columns)
    yield first if colour is None else Styled(first, colour, end=len(label))
    yield from rest


class Streams:
    """The streams of one command. ``quiet``: no messages, no progress. ``as_json``: ``document`` is all of stdout."""

    def __init__(self, *, as_json: bool, quiet: bool) -> None:
        self.as_json = as_json
        self.quiet = quiet
        self.warned = False

    def data(self, lines: Iterable[Line]) -> None:
        """Print lines on stdout; nothing with ``--json``."""
        if not self.as_json:
            self._write(sys.stdout, _styled_text(lines, sys.stdout))

    @property
    def columns(self) -> int | None:
        """The width of the terminal that data goes to, None if it goes anywhere else."""
        return shutil.get_terminal_size().columns if _is_terminal(sys.stdout) and not self.as_json else None

    def document(self, make: Callable[[], Mapping[str, object]], schema: str | None = None) -> None:
        """Print the one JSON document that ``make`` returns; without ``--json`` it is not called.

        An iterator in it is printed as a list, item by item. ``schema``: its name in ``cli/schemas``. A units file
        names its own format instead.
        """
        if self.as_json:
            document = make() if schema is None else {"schema": f"fsdpckpt/{schema}/{SCHEMA_VERSION}", **make()}
            parts: list[str] = []
            for part in _json_parts(document):
                parts.append(part)
                if len(part) > PRINTED_AT_ONCE or len(parts) > PRINTED_AT_ONCE // 1000:
                    self._write(sys.stdout, "".join(parts))
                    parts = []
            self._write(sys.stdout, "".join(parts) + "\n")

    def message(self, text: Line) -> None:
        """One line for a person, on stderr; nothing with ``--quiet``."""
        if not self.quiet:
            self._write(sys.stderr, _styled_text(_wrapped_lines([text], sys.stderr), sys.stderr))

    def warning(self, text: str) -> None:
        """A warning on stderr; not shown with ``--quiet``, but counted."""
        self.warned = True
        for line in labelled("warning:", text, Colour.CHANGED, None):
            self.message(line)

    def error(self, lines: Iterable[Line]) -> None:
        """Print an error on stderr, also with ``--quiet``."""
        self._write(sys.stderr, _styled_text(_wrapped_lines(lines, sys.stderr), sys.stderr))

    @contextmanager
    def progress(self) -> Iterator[Progress]:
        """Show progress: a bar on a terminal, a line every few seconds in a log, nothing if quiet."""
        if self.quiet or process_role.silent:
            yield NoProgress()
        elif _is_terminal(sys.stderr) and os.environ.get("TERM") != "dumb":
            with _bar() as bar:
                yield bar
        else:
            yield Lines(self.message)

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


def _json_parts(document: Mapping[str, object]) -> Iterator[str]:
    """The text of ``document``, in parts."""
    separator = "{"
    for key, value in document.items():
        yield f"{separator}{_json(key)}: "
        separator = ", "
        if isinstance(value, Iterator):
            yield "["
            between = ""
            for items in _json_items(value):
                yield f"{between}{items}"
                between = ", "
            yield "]"
        else:
            yield _json(value)
    yield "}" if document else "{}"


def _json_items(items: Iterator[object]) -> Iterator[str]:
    """The text of ``items``, many at a time: a call for each would take longer than what it writes."""
    while batch := list(islice(items, ITEMS_AT_ONCE)):
        if any(isinstance(item, JsonText) for item in batch):  # long ones
            yield from map(_json, batch)
        else:
            yield _json(batch)[1:-1]


def _json(value: object) -> str:
    text = str(value) if isinstance(value, JsonText) else json.dumps(value, ensure_ascii=False, allow_nan=False)
    text = on_command_line(text)  # without options that are still values
    if sys.stdout is not None and not _writable(sys.stdout, text):
        text = json.dumps(json.loads(text), allow_nan=False)
    return text


def _styled_text(lines: Iterable[Line], stream: TextIO | None) -> str:
    """The lines for ``stream``: with colours on a terminal, unless NO_COLOR is set."""
    environment = os.environ
    shows_colours = _is_terminal(stream) and environment.get("TERM") != "dumb"
    colours = bool(environment.get("FORCE_COLOR")) or shows_colours
    colours = colours and not environment.get("NO_COLOR")
    parts = []
    for line in lines:
        if isinstance(line, str):
            parts.append(visible(line))
        elif not colours:
            parts.append(visible(line.text))
        else:
            before, middle = line.text[: line.begin], line.text[line.begin : line.end]
            after = "" if line.end is None else line.text[line.end :]
            parts.append(f"{visible(before)}\x1b[{line.colour}m{visible(middle)}\x1b[0m{visible(after)}")
    return "".join(f"{part}\n" for part in parts)


def _wrapped_lines(lines: Iterable[Line], stream: TextIO | None) -> Iterator[Line]:
    """``lines`` for people, broken between words where ``stream`` is a terminal."""
    columns = shutil.get_terminal_size().columns if _is_terminal(stream) else None
    for line in lines:
        if isinstance(line, UnbrokenLine):
            yield line
        elif isinstance(line, str):
            yield from wrapped(line, columns)
        else:
            first, *rest = wrapped(line.text, columns)
            yield Styled(first, line.colour, line.begin, line.end)
            yield from rest


def _is_terminal(stream: TextIO | None) -> bool:
    return stream is not None and stream.isatty()


def redirect_to_null(stream: TextIO) -> None:
    """Point a broken ``stream`` at the null device: the interpreter flushes it at exit, and would print an error."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, stream.fileno())
    os.close(null)


def _writable(stream: TextIO, text: str) -> bool:
    try:
        text.encode(stream.encoding or "utf-8", stream.errors or "strict")
    except UnicodeEncodeError:
        return False
    return True


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
            text += f", {remaining_text((self._total - self._done) / rate)}"
        return text


@contextmanager
def _bar() -> Iterator[Progress]:
    """A rich progress bar on stderr, removed when the block ends."""
    from rich import progress
    from rich.console import Console
    from rich.table import Column
    from rich.text import Text

    class Numbers(progress.ProgressColumn):
        """In the words of all other output: ``1.2 GiB of 3.6 GiB (33 %)  850.0 MiB/s  2 min 5 s left``."""

        def render(self, task: progress.Task) -> Text:
            done = int(task.completed)
            of = f" of {size_text(int(task.total))} ({100 * done // int(task.total)} %)" if task.total else ""
            rate = f"  {size_text(int(task.speed))}/s" if task.speed else ""
            left = f"  {remaining_text(task.time_remaining)}" if task.time_remaining else ""
            return Text(f"{size_text(done)}{of}{rate}{left}")

    drawn = progress.Progress(
        progress.TextColumn("{task.description}"),
        progress.BarColumn(bar_width=None),  # the rest of the line after the numbers: two lines would jump
        Numbers(Column(no_wrap=True)),
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
