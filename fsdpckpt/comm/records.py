"""What workers write about themselves for the others: where they are, and what failed. JSON, no objects."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import cast

from fsdpckpt.comm.wire_errors import ErrorRecord, encode_error
from fsdpckpt.errors import FsdpckptError, InternalError, WorkerError

__all__ = ["Failure", "Position"]


@dataclass(frozen=True, slots=True)
class Position:
    """Where one worker is. ``sequence``: steps it has entered. ``beat`` changes as long as it lives and moves.

    ``silence``: seconds for which it may stay without a change beyond the usual limit, because it said so.
    """

    sequence: int
    step: str
    beat: int
    silence: float

    def text(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def parse(cls, text: str) -> Position:
        return cls(**cast("dict[str, int]", json.loads(text)))  # type: ignore[arg-type]  # written by text()


@dataclass(frozen=True, slots=True)
class Failure:
    """Worker ``rank`` failed in ``step``. ``exit_code``: what the cause would have ended a lone process with.

    ``original``: the cause as a record, where it is an error that a lone process would end with.
    """

    rank: int
    step: str
    cause: str
    exit_code: int
    original: ErrorRecord | None = None

    @classmethod
    def of(cls, error: BaseException, rank: int, step: str) -> Failure:
        """The failure of ``rank``, which raised ``error`` in ``step``."""
        return cls(rank, step, _words_of(error), _exit_code_of(error), encode_error(error))

    def text(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def parse(cls, text: str) -> Failure:
        return cls(**cast("dict[str, int]", json.loads(text)))  # type: ignore[arg-type]  # written by text()

    def error(self) -> WorkerError:
        """The one error that every worker raises."""
        error = WorkerError(
            f"worker {self.rank} failed in step '{self.step}': {self.cause}",
            rank=self.rank,
            next_step="find the cause on that rank",
            run_again=True,
        )
        error.step, error.cause, error.cause_exit_code = self.step, self.cause, self.exit_code
        error.original = self.original
        return error


def _words_of(error: BaseException) -> str:
    """An exception as the cause in a failure: our own in full, any other with its type."""
    if isinstance(error, FsdpckptError):
        return str(error)
    text = str(error)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _exit_code_of(error: BaseException) -> int:
    if isinstance(error, FsdpckptError):
        return error.exit_code
    return 130 if isinstance(error, KeyboardInterrupt) else InternalError.exit_code
