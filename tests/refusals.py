"""Refusals as data. A row says what is wrong with a checkpoint, how it is made, and what ``convert`` tells the user.

REFUSALS = (
    incomplete("a rank's file is missing", copied(RUN, lose("*rank_1*")), "1 of 2 ranks is missing: 1"),
)

@each_of(REFUSALS)
def test_it_is_refused(refusal: Refusal, tmp_path: Path) -> None:
    refusal.require(tmp_path)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

import fsdpckpt
from fsdpckpt import errors
from tests.makers import Make

__all__ = [
    "Refusal", "Refused", "corrupt", "each_of", "incomplete", "missing", "misused", "several", "unclear",
    "unrecognised", "unsafe", "unsupported",
]  # fmt: skip


_NOTHING: Mapping[str, object] = MappingProxyType({})


@dataclass(frozen=True)
class Refusal:
    """``name``: what is wrong, as a sentence. ``make``: makes such a checkpoint. ``error``: the class of the error.

    ``says``: texts of the message, word for word, with DIR for the directory that was made. ``omits``: what it does not
    say. ``about``: fields of the error, for programs. ``options``: of ``convert``.
    """

    error: type[errors.FsdpckptError]
    name: str
    make: Make
    says: tuple[str, ...]
    omits: tuple[str, ...]
    about: Mapping[str, object]
    options: Mapping[str, Any]

    def require(self, tmp_path: Path) -> None:
        """``convert`` ends with the error, says all of it, and writes nothing."""
        directory, target = tmp_path / "made", tmp_path / "target"
        directory.mkdir()
        source = self.make(directory) or directory
        with pytest.raises(self.error) as raised:
            fsdpckpt.convert(source, target, **self.options)
        assert type(raised.value) is self.error
        said = raised.value.text.replace(str(directory), "DIR")
        for text in self.says:
            assert text in said, said
        for text in self.omits:
            assert text not in said, said
        for field, value in self.about.items():
            assert str(getattr(raised.value, field)).replace(str(directory), "DIR") == str(value), field
        assert not target.exists(), "nothing is written"


def _rows_of(error: type[errors.FsdpckptError]) -> Callable[..., Refusal]:
    def row(
        name: str,
        make: Make,
        *says: str,
        omits: tuple[str, ...] = (),
        about: Mapping[str, object] = _NOTHING,
        **options: Any,
    ) -> Refusal:
        return Refusal(error, name, make, says, omits, about, options)

    return row


# With the exit code of each
misused = _rows_of(errors.UsageError)  # 2
missing = _rows_of(errors.SourceMissingError)  # 3
incomplete = _rows_of(errors.SourceIncompleteError)  # 3
corrupt = _rows_of(errors.SourceCorruptError)  # 3
unrecognised = _rows_of(errors.SourceUnrecognisedError)  # 3
unsafe = _rows_of(errors.SourceUnsafeError)  # 3
unsupported = _rows_of(errors.SourceUnsupportedError)  # 3
unclear = _rows_of(errors.NeedsInformationError)  # 4
several = _rows_of(errors.SeveralCheckpointsError)  # 4


def each_of(rows: Iterable[Refusal]) -> pytest.MarkDecorator:
    """The test runs once for each row, under its name."""
    return pytest.mark.parametrize("refusal", list(rows), ids=lambda row: row.name)


@dataclass(frozen=True)
class Refused:
    """How a row of another table says that what it does is refused: the exit code, ``words`` of what is said and
    advised, and all ``details``, if the row has them.

    ``silent``: words that it does not say.
    """

    code: int
    words: str | Sequence[str] = ()
    details: Sequence[str] | None = None
    silent: Sequence[str] = ()

    def by(self, command: Callable[[], object]) -> errors.FsdpckptError:
        """Run ``command``, which is refused so."""
        with pytest.raises(errors.FsdpckptError) as caught:
            command()
        error = caught.value
        text = " ".join(map(str, (error.what, *error.details, error.why, error.next_step)))
        assert error.exit_code == self.code, text
        for word in [self.words] if isinstance(self.words, str) else self.words:
            assert word in text
        assert self.details is None or tuple(error.details) == tuple(self.details)
        assert not [word for word in self.silent if word in text]
        return error
