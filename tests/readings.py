"""Readings as data. A row says what a checkpoint is, how it is made, and what is read of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from fsdpckpt.ir.checkpoint import Checkpoint
from tests.makers import Make
from tests.readers.contents import held, opened, same_values

__all__ = ["Reading", "each_reading"]


@dataclass(frozen=True)
class Reading:
    """``name``: what it is. ``make``: makes it. ``model`` and ``optim``: the sections, absent if None.

    ``extra``: the extras, and ``ranks`` those of each rank where they differ; None: not compared. ``is_a``: fields of
    the checkpoint by name. ``notes``: texts, of which each stands in a note, with DIR for the directory; ``problems``:
    the kind and the key of each. ``files``: the names of those that were read; None: not compared.
    """

    name: str
    make: Make
    model: Any = None
    optim: Any = None
    extra: Mapping[Any, Any] | None = None
    ranks: Sequence[Mapping[Any, Any]] | None = None
    is_a: Mapping[str, Any] | None = None
    notes: Sequence[str] = ()
    problems: Sequence[tuple[str, str | None]] = ()
    files: Sequence[str] | None = None

    def require(self, tmp_path: Path) -> Checkpoint:
        """It is read, with all that the row says."""
        source = self.make(tmp_path) or tmp_path
        found = opened(source)
        same_values(found, model=self.model, optim=self.optim)
        assert [(problem.kind, problem.key) for problem in found.problems] == list(self.problems)
        if self.extra is not None:
            assert held(found.extra, found.files) == held(self.extra, ())
        if self.ranks is not None:
            assert [held(extra, found.files) for extra in found.rank_extra] == [held(extra, ()) for extra in self.ranks]
        if self.files is not None:
            assert [Path(file.path).name for file in found.files] == list(self.files)
        for field, value in (self.is_a or {}).items():
            assert getattr(found, field) == value, field
        messages = [note.message.replace(str(tmp_path), "DIR") for note in found.notes]
        for text in self.notes:
            assert any(text in message for message in messages), messages
        return found


def each_reading(rows: Iterable[Reading]) -> pytest.MarkDecorator:
    """The test runs once for each row, under its name."""
    return pytest.mark.parametrize("reading", list(rows), ids=lambda row: row.name)
