"""Describes a run: a directory of several checkpoints, one row each."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from fsdpckpt.credentials import without_credentials
from fsdpckpt.describe.describe import stored_files
from fsdpckpt.errors import FsdpckptError, SeveralCheckpointsError
from fsdpckpt.ir.checkpoint import Checkpoint
from fsdpckpt.notebook import table
from fsdpckpt.readers.candidates import newest, pointer_text, pointers, proposed
from fsdpckpt.readers.detect import OpenOptions, open_checkpoint
from fsdpckpt.readers.protocol import Locate
from fsdpckpt.readers.search import WORDS_OF_STEP
from fsdpckpt.storage.sources import Sources, relative_path
from fsdpckpt.text import natural

_EMPTY = "empty: its save did not finish, or it was not copied"
ITSELF = "."  # the name of what lies beside the steps of a run
_MOST_FINDINGS = 3  # of an error, beside what is wrong
_DEEPEST = 4  # checkpoints below checkpoints: runs/step_7/actor


@dataclass(frozen=True, slots=True)
class RunCheckpoint:
    """One checkpoint of a run. All but ``path``, ``name`` and ``step`` are empty if it cannot be read."""

    path: str
    name: str  # from the run's directory
    step: int | None  # as its name says
    sections: tuple[str, ...] = ()
    layout: str | None = None
    container: str | None = None
    flavor: str | None = None
    world_size: int | None = None
    nbytes: int | None = None  # of its files
    problems: tuple[str, ...] = ()  # that a reader finds without reading tensor data

    @property
    def complete(self) -> bool:
        return not self.problems


@dataclass(frozen=True, slots=True, repr=False)
class Run:
    """The checkpoints of a run, in the natural order of their names.

    ``newest``: the name of the one with the highest step. ``proposed``: of the one to read: what a ``latest`` file
    names, since the save of a newer one may not have finished; else the newest that is complete.
    ``pointers``: files such as ``latest`` and links, each with the name of what it leads to. ``lost``: those that lead
    nowhere, each in a sentence.
    """

    source: str
    checkpoints: tuple[RunCheckpoint, ...]
    newest: str
    pointers: dict[str, str]
    lost: tuple[str, ...]
    proposed: str

    def __repr__(self) -> str:
        return f"<{without_credentials(self.source)}: {len(self.checkpoints)} checkpoints, newest {self.newest}>"

    def _repr_html_(self) -> str:
        """For notebooks: a table of the checkpoints."""
        columns = ("name", "step", "holds", "layout", "ranks", "complete")
        rows = (
            (
                each.name,
                "-" if each.step is None else each.step,
                ", ".join(each.sections),
                each.layout or "-",
                each.world_size or "-",
                "yes" if each.complete else "; ".join(each.problems),
            )
            for each in self.checkpoints
        )
        return table(repr(self)[1:-1], columns, rows, len(self.checkpoints))


def describe_run(source: str, several: SeveralCheckpointsError, sources: Sources) -> Run:
    """Read the headers of each of the checkpoints that ``several`` lists, and of those below them."""
    found: list[RunCheckpoint] = []
    for path in several.checkpoints:
        below = [other for other in several.checkpoints if other.startswith(f"{path.rstrip('/')}/")]
        found += _checkpoints_at(path, source, sources, _DEEPEST, without=below)
    rows = sorted(found, key=lambda each: natural(each.name))
    paths = [each.path for each in rows]  # also of those below the ones that are listed
    found_pointers = pointers(source, paths, sources)
    return Run(
        source,
        tuple(rows),
        relative_path(newest(source, paths), source) or ITSELF,
        {each.name: each.target for each in found_pointers if each.target is not None},
        tuple(pointer_text(each) for each in found_pointers if each.target is None),
        relative_path(proposed(source, [each.path for each in rows if each.complete] or paths, sources), source)
        or ITSELF,
    )


def _checkpoints_at(
    path: str, source: str, sources: Sources, depth: int, without: Sequence[str] = ()
) -> list[RunCheckpoint]:
    """``without``: the checkpoints below ``path`` that have rows of their own."""
    name = relative_path(path, source) or ITSELF
    ignored = tuple(relative_path(other, path) for other in without)
    try:
        checkpoint = open_checkpoint(
            path, sources=sources, locate=Locate.NOTHING, options=OpenOptions(ignore_file=ignored)
        )
    except SeveralCheckpointsError as several:
        if depth:
            below = [_checkpoints_at(each, source, sources, depth - 1) for each in several.checkpoints]
            return [each for found in below for each in found]
        return [RunCheckpoint(path, name, step_of(name), problems=(several.what,))]
    except FsdpckptError as error:
        entry = sources.stat(path)
        if entry is not None and entry.directory and not sources.list_directory(path):
            return [RunCheckpoint(path, name, step_of(name), problems=(_EMPTY,))]
        shown = without_credentials(path)
        problem = error.what.removeprefix(f"{shown}: ").removeprefix(f"{shown} ")
        findings = ", ".join(error.shown_findings(_MOST_FINDINGS))
        return [RunCheckpoint(path, name, step_of(name), problems=(": ".join(filter(None, (problem, findings))),))]
    return [_row(checkpoint, path, name)]


def _row(checkpoint: Checkpoint, path: str, name: str) -> RunCheckpoint:
    held = {"model": checkpoint.model, "optim": checkpoint.optim, "extra": checkpoint.extra or checkpoint.rank_extra}
    sections = [section for section, content in held.items() if content]
    sections += [named.label for named in checkpoint.named]
    return RunCheckpoint(
        path,
        name,
        step_of(name),
        tuple(dict.fromkeys(sections)),
        str(checkpoint.layout),
        str(checkpoint.container),
        checkpoint.flavor,
        checkpoint.world_size,
        sum(file.nbytes for file in stored_files(checkpoint)),
        tuple(problem.message for problem in checkpoint.problems if problem.fatal),
    )


def step_of(name: str) -> int | None:
    """The step that the name of a checkpoint says: ``global_step_7/actor``, ``epoch=1-step=500.ckpt``."""
    for word in WORDS_OF_STEP:
        if match := re.search(rf"(?:^|[^a-z]){word}[-_=]?0*(\d+)", name, re.IGNORECASE):
            return int(match[1])
    numbers = re.findall(r"\d+", name)
    return int(numbers[-1]) if numbers else None
