"""Shows a run for ``inspect``: a row for each of its checkpoints, and which is the newest."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from fsdpckpt.cli.output import Cell, Colour, Line, Name, Styled, cut_line, labelled, table_lines, wrapped
from fsdpckpt.errors import SeveralCheckpointsError, SourceError
from fsdpckpt.producers import PLAIN
from fsdpckpt.text import count_text, plural, size_text

if TYPE_CHECKING:
    from fsdpckpt.cli.output import Streams
    from fsdpckpt.describe import Run, RunCheckpoint

MOST_PROBLEMS = 3  # lines of one checkpoint; inspect of it shows all
NUMBERS = frozenset({"step", "ranks", "bytes"})  # aligned right


def show_run(output: Streams, source: str, several: SeveralCheckpointsError) -> int:
    """Returns 3 if none of the checkpoints can be read."""
    from fsdpckpt.api import inspect_run

    run = inspect_run(source, several)
    output.document(lambda: _document(run), "run")
    output.data(_lines(run, output.columns))
    return 0 if any(each.layout is not None for each in run.checkpoints) else SourceError.exit_code


def _lines(run: Run, columns: int | None) -> Iterator[Line]:
    rows = {each.name: _cells(each) for each in run.checkpoints}
    common = _common(list(rows.values())) if columns is not None else {}
    title = f"{run.source}: {plural(len(run.checkpoints), 'checkpoint')}"
    yield from wrapped(f"{title} ({', '.join(common.values())})" if common else title, columns)
    has_steps = any(each.step is not None for each in run.checkpoints)
    fields = [field for field in next(iter(rows.values())) if field not in common]
    if not has_steps:
        fields = [field for field in fields if field != "step"]
    cells: list[Sequence[Cell]] = [fields]
    for name, row in rows.items():
        cells.append([Name(name) if field == "checkpoint" else row[field] for field in fields])
    right = [at for at, field in enumerate(fields) if field in NUMBERS]
    heading, *lines = table_lines(cells, right=right, columns=columns)
    yield Styled(heading, Colour.HEADING)
    yield from lines
    for each in run.checkpoints:
        for problem in each.problems[: MOST_PROBLEMS if columns is not None else None]:
            yield from wrapped(f"{each.name}: {problem.replace(f'{run.source}/', '')}", columns)
    if has_steps:  # else they are parts of one run: an actor and a critic
        yield from _newest_lines(run, columns)


def _cells(each: RunCheckpoint) -> dict[str, str]:
    """One row, by field; "-" is what is not known of a checkpoint that cannot be read."""
    form = each.container if each.flavor in (None, PLAIN) else f"{each.container} ({each.flavor})"
    return {
        "step": "-" if each.step is None else str(each.step),
        "checkpoint": each.name,
        "bytes": "-" if each.nbytes is None else size_text(each.nbytes),
        "holds": " + ".join(each.sections) or "-",
        "layout": each.layout or "-",
        "format": form or "-",
        "ranks": "-" if each.world_size is None else count_text(each.world_size),
        "complete": "yes" if each.complete else "no",
    }


def _common(rows: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """What all checkpoints that can be read have in common: it needs no column."""
    common = {}
    for field in ("holds", "layout", "format", "ranks"):
        values = {row[field] for row in rows} - {"-"}
        if len(values) == 1 and len(rows) > 1:
            value = values.pop()
            common[field] = f"on {plural(int(value.replace(',', '')), 'rank')}" if field == "ranks" else value
    return common


def _newest_lines(run: Run, columns: int | None) -> Iterator[Line]:
    """The newest checkpoint, what points to it or to another one, and the one to look at next."""
    by_name = {each.name: each for each in run.checkpoints}
    for pointer, name in run.pointers.items():
        yield cut_line(f"{pointer} -> {name}", columns)
    for lost in run.lost:
        yield from labelled("problem:", lost, Colour.BAD, columns)
    newest, proposed = by_name[run.newest], by_name[run.proposed]
    yield f"newest: {newest.name}" + ("" if newest.complete else ", which is not complete")
    complete = [each.step for each in run.checkpoints if each.complete and each.step is not None]
    pointing = next((pointer for pointer, name in run.pointers.items() if proposed.name.startswith(name)), None)
    if proposed.step == newest.step:
        pass
    elif pointing is None or proposed.step == max(complete, default=None):
        yield f"newest complete: {proposed.name}"
    else:
        text = f"{pointing} names {proposed.name}: the trainer may have stopped before it had saved {newest.name}"
        yield from labelled("problem:", text, Colour.BAD, columns)
    yield f"next: fsdpckpt inspect {shlex.quote(proposed.path)}"


def _document(run: Run) -> dict[str, object]:
    return {
        "source": run.source,
        "newest": run.newest,
        "pointers": run.pointers,
        "lost": list(run.lost),
        "proposed": run.proposed,
        "checkpoints": [{**asdict(each), "complete": each.complete} for each in run.checkpoints],
    }
