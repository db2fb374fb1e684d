"""Every error fsdpckpt raises on purpose, each with its exit code.

FsdpckptError                    70  (a bug when raised as itself)
├── UsageError                    2  the command line or the arguments are wrong
│   └── StateDictMismatchError       two state dicts, or those of two ranks, differ in structure
├── SourceError                   3  the source cannot be used
│   ├── SourceMissingError           nothing is there
│   ├── SourceUnrecognisedError      something is there, but no checkpoint this program knows
│   ├── SourceIncompleteError        a rank, a file, a shard or some elements are absent
│   ├── SourceCorruptError           bytes contradict each other (truncated, checksum, overlap)
│   ├── SourceUnsafeError            a pickle names something outside the allow-list
│   └── SourceUnsupportedError       recognised, and refused because converting it would lose data
├── NeedsInformationError         4  several answers are possible; an option settles it
├── TargetError                   5  the target cannot be written
│   ├── TargetExistsError            it is there already
│   └── TargetUnwritableError        permission, space, file name
├── WorkerError                   6  a worker or the process group failed
├── InternalError                70  an invariant of this program does not hold
└── InterruptedRunError           130  SIGINT or SIGTERM
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

__all__ = [
    "FsdpckptError",
    "InternalError",
    "InterruptedRunError",
    "NeedsInformationError",
    "SourceCorruptError",
    "SourceError",
    "SourceIncompleteError",
    "SourceMissingError",
    "SourceUnrecognisedError",
    "SourceUnsafeError",
    "SourceUnsupportedError",
    "StateDictMismatchError",
    "TargetError",
    "TargetExistsError",
    "TargetUnwritableError",
    "UsageError",
    "WorkerError",
]


class FsdpckptError(Exception):
    """What is wrong, why that may be, and the command to type next.

    ``what`` is one sentence; ``details`` lists every single finding when there are several (all missing
    ranks, all unknown globals); ``why`` is the likely cause; ``next_step`` is a command or an option.
    ``file``, ``key``, ``rank``, ``expected`` and ``found`` are for machines (``--json``) and tests.
    """

    exit_code: ClassVar[int] = 70

    def __init__(
        self,
        what: str,
        *,
        details: Sequence[str] = (),
        why: str | None = None,
        next_step: str | None = None,
        file: str | None = None,
        key: str | None = None,
        rank: int | None = None,
        expected: str | None = None,
        found: str | None = None,
    ) -> None:
        super().__init__(what)
        self.what = what
        self.details = tuple(details)
        self.why = why
        self.next_step = next_step
        self.file = file
        self.key = key
        self.rank = rank
        self.expected = expected
        self.found = found

    def __str__(self) -> str:
        lines = [self.what]
        if self.expected is not None or self.found is not None:
            lines.append(f"  expected {self.expected}, found {self.found}")
        lines.extend(f"  - {detail}" for detail in self.details)
        if self.why is not None:
            lines.append(f"  why: {self.why}")
        if self.next_step is not None:
            lines.append(f"  next: {self.next_step}")
        return "\n".join(lines)


class UsageError(FsdpckptError):
    exit_code = 2


class StateDictMismatchError(UsageError):
    """``details`` lists every difference: keys, kinds, shapes, dtypes."""


class SourceError(FsdpckptError):
    exit_code = 3


class SourceMissingError(SourceError):
    pass


class SourceUnrecognisedError(SourceError):
    pass


class SourceIncompleteError(SourceError):
    pass


class SourceCorruptError(SourceError):
    pass


class SourceUnsafeError(SourceError):
    pass


class SourceUnsupportedError(SourceError):
    pass


class NeedsInformationError(FsdpckptError):
    exit_code = 4


class TargetError(FsdpckptError):
    exit_code = 5


class TargetExistsError(TargetError):
    pass


class TargetUnwritableError(TargetError):
    pass


class WorkerError(FsdpckptError):
    """The same on every worker: ``rank`` failed in the collective ``step`` because of ``cause``.

    ``cause_exit_code`` is what the cause itself would have ended the program with (70 for an unforeseen exception).
    ``original``: the cause as a record (``comm.wire_errors``), where one process alone would end with it.
    """

    exit_code = 6
    step: str | None = None
    cause: str | None = None
    cause_exit_code: int | None = None
    original: dict[str, object] | None = None


class InternalError(FsdpckptError):
    exit_code = 70


class InterruptedRunError(FsdpckptError):
    exit_code = 130
