"""Shows what is left of a checkpoint for ``inspect``: which rank has which file, and which sections can be read."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from fsdpckpt.cli.errors import error_json, show_error
from fsdpckpt.cli.output import Line, wrapped
from fsdpckpt.errors import SourceCorruptError, SourceIncompleteError
from fsdpckpt.text import count_text, dtypes_text, names_text, plural, shorten, size_text

if TYPE_CHECKING:
    from fsdpckpt.cli.output import Streams
    from fsdpckpt.describe import FilesOfRanks, Incomplete
    from fsdpckpt.options.commands import InspectOptions

WIDEST_PATTERN = 38  # columns of a name
WIDEST_GRID = 40  # characters: more ranks share one
MOST_NAMES = 4
_SIGNS = {"present": "+", "missing": "-", "damaged": "!", "none": " "}
_WORST = ("damaged", "missing", "present", "none")


def show_incomplete(
    output: Streams, source: str, error: SourceIncompleteError | SourceCorruptError, options: InspectOptions
) -> int:
    """Show it on stdout and the error on stderr, and return the error's exit code."""
    from fsdpckpt.api import inspect_incomplete
    from fsdpckpt.describe import suggest_readable

    left = inspect_incomplete(source, error, ignore_file=options.ignore_file)
    if left is None:
        raise error
    suggest_readable(error, left)
    if options.report is not None:
        from fsdpckpt.report import write_incomplete_report

        nbytes = write_incomplete_report(left, options.report)
        output.message(f"{options.report}: {size_text(nbytes)}")
    if output.as_json:
        return show_error(output, error, _document(left), "incomplete")
    output.data(_lines(left, output.columns))
    return show_error(output, error)


def _lines(left: Incomplete, columns: int | None) -> Iterator[Line]:
    yield from _grid_lines(left)
    for label, names in (("missing", left.missing), ("damaged", left.damaged)):
        if names:
            yield from wrapped(f"{label}: {names_text(names, MOST_NAMES)}", columns)
    summaries = left.summaries
    for section, totals in summaries.items():
        parts = [plural(totals.tensors, "tensor"), f"{count_text(totals.elements)} elements", size_text(totals.nbytes)]
        yield from wrapped(f"can be read: {section} ({', '.join(parts)}, {dtypes_text(totals.dtypes)})", columns)
    if not summaries:
        yield "can be read: nothing"


def _grid_lines(left: Incomplete) -> Iterator[str]:
    ranks = left.grid.ranks
    if ranks < 2:
        return
    in_one = -(-ranks // WIDEST_GRID)
    heading = f"ranks 0 to {ranks - 1}" + (f", {in_one} in each sign" if in_one > 1 else "")
    yield f"{'files':{WIDEST_PATTERN}}  {heading}"
    for row in left.grid.rows:
        yield f"{shorten(row.pattern, WIDEST_PATTERN):{WIDEST_PATTERN}}  {_signs(row, in_one)}".rstrip()
    yield f"{'':{WIDEST_PATTERN}}  + there  - missing  ! damaged"


def _signs(row: FilesOfRanks, in_one: int) -> str:
    """A sign for each rank or, of several, the worst of theirs."""
    signs = []
    for first in range(0, len(row.states), in_one):
        states = row.states[first : first + in_one]
        worst = next(state for state in _WORST if state in states)
        signs.append(_SIGNS[worst])
    return "".join(signs)


def _row_document(row: FilesOfRanks) -> dict[str, object]:
    return {"pattern": row.pattern, "ranks": {state: row.ranks(state) for state in sorted(set(row.states))}}


def _document(left: Incomplete) -> dict[str, object]:
    return {
        "source": left.source,
        "complete": False,
        "readable": {
            name: {"tensors": totals.tensors, "elements": totals.elements, "nbytes": totals.nbytes}
            for name, totals in left.summaries.items()
        },
        "missing": list(left.missing),
        "damaged": list(left.damaged),
        "files": list(map(_row_document, left.grid.rows)),
        "next": left.commands,
        **error_json(left.error),
    }
