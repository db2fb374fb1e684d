"""Every error fsdpckpt raises on purpose, each with its exit code.

FsdpckptError                    70  (a bug when raised as itself)
├── UsageError                    2  the command line or the arguments are wrong; also a ValueError
│   ├── StateDictMismatchError       two state dicts, or those of two ranks, differ in structure
│   └── TorchMissingError            what was asked for needs PyTorch; also an ImportError
├── SourceError                   3  the source cannot be used
│   ├── SourceMissingError           nothing is there
│   ├── SourceUnrecognisedError      something is there, but no checkpoint this program knows
│   ├── SourceIncompleteError        a rank, a file, a shard or some elements are absent
│   ├── SourceCorruptError           bytes contradict each other (truncated, checksum, overlap)
│   ├── SourceUnsafeError            a pickle names something outside the allow-list
│   └── SourceUnsupportedError       recognised, and refused because converting it would lose data
├── NeedsInformationError         4  several answers are possible, an option decides; also a ValueError
│   └── SeveralCheckpointsError      the source is a directory of several checkpoints
├── TargetError                   5  the target cannot be written
│   ├── TargetExistsError            it is there already
│   └── TargetUnwritableError        permission, space, file name
├── WorkerError                   6  a worker or the process group failed
├── InternalError                70  an invariant of this program does not hold
└── InterruptedRunError           130  SIGINT or SIGTERM
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass, fields
from typing import Any, ClassVar, TypeVar

from fsdpckpt import flags
from fsdpckpt.credentials import without_credentials
from fsdpckpt.flags import Flag, Message, Wording, in_python

_T = TypeVar("_T")

NEW_LINE = "\n  "  # before a command to copy
_AGAIN = "run the command again"
EMPTY = "most likely a shell variable without a value"
COPY_AGAIN = "copy or save the checkpoint again"
_OTHER_TARGET = "give another DST"
_MOST_IN_REPR = 3  # of an error's findings
_PATHS = frozenset({"file", "files"})  # to find files by; shown without passwords as everything else


@dataclass(frozen=True, slots=True)
class Leftover:
    """What a failed run left. ``what``: what was kept, and where; ``resume``: what the same command does with it."""

    what: str
    resume: str

    def __post_init__(self) -> None:
        object.__setattr__(self, "what", Message(self.what))
        object.__setattr__(self, "resume", Message(self.resume))


@dataclass(eq=False, repr=False)
class FsdpckptError(Exception):
    """What is wrong, the likely cause, and the command to type next.

    ``what``: one sentence; ``details``: every single finding if there are several (all missing ranks, all unknown
    globals), of which a person sees the first ``most_shown`` if that is set; ``files``: the file of each finding;
    ``why``: the likely cause; ``next_step``: a command or an option.
    ``run_again``: the same command may succeed, after ``next_step`` if there is one. ``retryable``: it may succeed
    later although nobody changes anything: a store did not answer, another run held the lock, a worker was lost.
    ``alternative``: another way to the same goal. ``leftover``: what a failed run left for the next one;
    ``resumable``: False if that does not help.
    ``file``, ``key``, ``rank``, ``expected`` and ``found`` are for machines (``--json``) and tests. Whatever text a
    field is given, it holds a ``Message``: with options as the command line shows them, and as values beside that.

    ``title``: the kind of error, shown before ``what`` unless it is empty. ``usual_next_step``: for errors that have no
    other.
    """

    exit_code: ClassVar[int] = 70
    title: ClassVar[str] = "internal error"
    usual_next_step: ClassVar[str] = (
        "run the command again with FSDPCKPT_DEBUG=1 set, and send what it prints with the output of "
        "`fsdpckpt --version`"
    )

    what: str
    _: KW_ONLY
    details: Sequence[str] = ()
    most_shown: int | None = None
    files: Sequence[str | None] = ()
    why: str | None = None
    next_step: str | None = None
    run_again: bool = False
    alternative: str | None = None
    resumable: bool = True
    retryable: bool = False
    file: str | None = None
    key: str | None = None
    rank: int | None = None
    expected: str | None = None
    found: str | None = None
    leftover: Leftover | None = None

    def __post_init__(self) -> None:
        super().__init__(self.what)  # a Message already: what a traceback shows has no passwords
        self.files = tuple(self.files)

    def __setattr__(self, name: str, value: object) -> None:
        super().__setattr__(name, value if name in _PATHS else _with_messages(value))

    @property
    def findings(self) -> tuple[str, ...]:
        """``details``, and what is left to resume."""
        return (*self.details, *([] if self.leftover is None else [self.leftover.what]))

    def shown_findings(self, most: int | None = None) -> list[str]:
        """``findings`` for a person: at most ``most``, and a line that says how many more there are."""
        limits = [limit for limit in (most, self.most_shown) if limit is not None]
        shown = self.findings[: min(limits, default=len(self.findings))]
        more = len(self.findings) - len(shown)
        return [*shown, *([f"and {more} more"] if more else [])]

    @property
    def expectation(self) -> list[str]:
        """The line of ``expected`` and ``found``, if either is known."""
        pair = (("expected", self.expected), ("found", self.found))
        line = ", ".join(f"{word} {value}" for word, value in pair if value is not None)
        return [Message(f"  {line}")] if line else []

    @property
    def next_steps(self) -> str | None:
        """All next steps; None if the error has none. Commands to copy are on separate lines."""
        first = None if self.next_step is None else f"{self.next_step}"
        if self.leftover is not None:
            steps = "; then ".join(filter(None, (first, f"{_AGAIN}: it {self.leftover.resume}")))
        else:
            steps = ", then ".join(filter(None, (first, _AGAIN if self.run_again else None)))
        if steps and self.alternative is not None:
            either = f"{steps}\nor:   " if NEW_LINE in steps else f"{steps}; or, "
            return Message(f"{either}{self.alternative}")
        return Message(steps) if steps else self.alternative

    @property
    def text(self) -> str:
        """The whole error, in several lines, with the options of the command line."""
        lines = [self.what, *self.expectation]
        lines.extend(f"  - {finding}" for finding in self.shown_findings())
        if self.why is not None:
            lines.append(f"  why: {self.why}")
        if self.next_steps is not None:
            lines.append(f"  next: {self.next_steps}")
        return Message("\n".join(map(format, lines)))

    def __str__(self) -> str:
        """For Python: ``text`` with options as keywords. The command line shows the fields (``cli.errors``)."""
        return in_python(self.text)

    def describe(self) -> dict[str, object]:
        """The error for a program, as ``--json`` prints it: with options as the command line shows them."""
        document: dict[str, object] = {
            "type": type(self).__name__,
            "exit_code": self.exit_code,
            "what": self.what,
            "details": list(self.findings),
            "why": self.why,
            "next_step": (self.next_steps or self.usual_next_step).replace(NEW_LINE, " ").strip(),
            "file": None if self.file is None else without_credentials(self.file),
            "key": self.key,
            "rank": self.rank,
            "expected": self.expected,
            "found": self.found,
            "retryable": self.retryable,
        }
        if self.exit_code == InternalError.exit_code:
            import platform

            document["python"] = platform.python_version()
        return document

    def to_json(self) -> dict[str, Any]:
        """Every field except the class, for ``from_json`` in another process, where options are still values."""
        document = {field.name: _coded_field(getattr(self, field.name)) for field in fields(self)}
        if self.leftover is not None:
            document["leftover"] = [_coded_field(self.leftover.what), _coded_field(self.leftover.resume)]
        return document

    def __repr__(self) -> str:
        """The class, ``what``, and the fields that say what it is about: ``str`` has the whole error."""
        about = {name: getattr(self, name) for name in ("file", "key", "rank", "expected", "found")}
        known = [f"{name}={without_credentials(repr(value))}" for name, value in about.items() if value is not None]
        if self.details:
            known.append(f"details={self.shown_findings(_MOST_IN_REPR)!r}")
        return f"{type(self).__name__}({', '.join([repr(str(self.what)), *known])})"

    @classmethod
    def from_json(cls, document: dict[str, Any]) -> FsdpckptError:
        """The inverse of ``to_json``, for an error of this class."""
        values = {name: _decoded_field(value) for name, value in document.items()}
        leftover = values.get("leftover")
        return cls(**{**values, "leftover": None if leftover is None else Leftover(*leftover)})


def _with_messages(value: object) -> object:
    """A field's ``value`` with Messages for all texts in it."""
    if isinstance(value, str):
        return Message(value)
    if isinstance(value, tuple | list):
        return tuple(map(_with_messages, value))
    return value


def _coded_field(value: object) -> object:
    if isinstance(value, str):
        return Message(value).to_json()
    return [_coded_field(each) for each in value] if isinstance(value, tuple) else value


def _decoded_field(value: object) -> Any:
    return list(map(flags.from_json, value)) if isinstance(value, list) else flags.from_json(value)


@contextmanager
def of_option(flag: Flag) -> Iterator[None]:
    """Make a SourceError in the block name ``flag``, the option whose file it is about."""
    try:
        yield
    except SourceError as error:
        error.what = f"{flag} {error.what}"
        raise


def required(found: _T | FsdpckptError) -> _T:
    """``found``, what a question was answered with. Raises it if it is the reason why there is nothing else."""
    if isinstance(found, FsdpckptError):
        raise found
    return found


def to_copy(why: str, command: str) -> str:
    """A next step: the purpose of ``command``, then the command on a separate line, ready to copy."""
    return f"{why}:{NEW_LINE}{command}"


def to_look(why: str, command: str) -> str:
    """A next step for a terminal: ``to_copy``; Python shows only what to look for, since no caller types ``ls``."""
    return f"{Wording(to_copy(why, command), why)}"


def attach_leftover(error: BaseException, leftover: Leftover) -> None:
    """Attach to ``error``, of any class, what is left to resume."""
    error.leftover = leftover  # type: ignore[attr-defined]
    if not isinstance(error, FsdpckptError):
        error.add_note(leftover.what)  # for the traceback that Python shows


def leftover_of(error: BaseException) -> Leftover | None:
    """What ``attach_leftover`` attached."""
    return getattr(error, "leftover", None)


class FsdpckptWarning(UserWarning):
    """A framework will stop because of this, start afresh, or train in another way than before."""


class UsageError(FsdpckptError, ValueError):
    exit_code = 2
    title = ""
    usual_next_step = "fsdpckpt --help lists the commands, and fsdpckpt COMMAND --help the options"


class StateDictMismatchError(UsageError):
    """``details`` lists every difference: keys, kinds, shapes, dtypes."""


class TorchMissingError(UsageError, ImportError):
    """The requested feature needs PyTorch, which is not installed."""


def require_torch(what: str) -> None:
    """Raises TorchMissingError if PyTorch is not installed. ``what``: the subject and verb: ``"workers need"``."""
    from importlib.util import find_spec

    if find_spec("torch") is None:
        raise TorchMissingError(
            f"{what} PyTorch, which is not installed",
            why="it is optional: only workers, StorageReader, save_units, `units --model` and fsdpckpt.comm use it",
            next_step='pip install "fsdpckpt[torch]"',
        )


class SourceError(FsdpckptError):
    exit_code = 3
    title = "source"
    usual_next_step = "check the file and the disk, then run the command again"


class SourceMissingError(SourceError):
    title = "source missing"
    usual_next_step = "check the path"


class SourceUnrecognisedError(SourceError):
    title = "source not recognised"
    usual_next_step = "give a torch.save file, a DCP directory, a safetensors file or a directory of them"


class SourceIncompleteError(SourceError):
    title = "source incomplete"
    usual_next_step = "copy or save the checkpoint again, then run the command again"


class SourceCorruptError(SourceError):
    title = "source corrupt"
    usual_next_step = "copy or save the checkpoint again, then run the command again"


def damaged(
    file: str,
    what: str,
    expected: str | None = None,
    found: str | None = None,
    *,
    why: str,
    key: str | None = None,
    next_step: str | None = None,
    run_again: bool = False,
) -> SourceCorruptError:
    """The error for a ``file`` in which ``what`` is wrong: the sentence begins with the file's name."""
    return SourceCorruptError(
        f"{file}: {what}",
        file=file,
        key=key,
        expected=expected,
        found=found,
        why=why,
        next_step=next_step,
        run_again=run_again,
    )


class SourceUnsafeError(SourceError):
    title = "source refused as unsafe"
    usual_next_step = "save the checkpoint again without these objects"


class SourceUnsupportedError(SourceError):
    title = "source refused"
    usual_next_step = "save the checkpoint in another form"


class NeedsInformationError(FsdpckptError, ValueError):
    exit_code = 4
    title = "more information is needed"
    usual_next_step = "fsdpckpt COMMAND --help lists the options that provide it"


@dataclass(eq=False, repr=False)
class SeveralCheckpointsError(NeedsInformationError):
    """``checkpoints``: the paths of all that were found, to choose one of."""

    checkpoints: Sequence[str] = ()


class TargetError(FsdpckptError):
    exit_code = 5
    title = "target"
    usual_next_step = _OTHER_TARGET


class TargetExistsError(TargetError):
    title = ""


class TargetUnwritableError(TargetError):
    title = "target cannot be written"


class WorkerError(FsdpckptError):
    """The same on every worker: ``rank`` failed in the collective ``step`` because of ``cause``.

    ``cause_exit_code``: the exit code of the cause itself (70 for an unforeseen exception). ``original``: the cause as
    a record (``comm.protocol``), if a single process would end with it.
    """

    exit_code = 6
    title = "a worker failed"
    usual_next_step = _AGAIN
    step: str | None = None
    cause: str | None = None
    cause_exit_code: int | None = None
    original: dict[str, object] | None = None


class InternalError(FsdpckptError):
    """An invariant of this program does not hold."""


class InterruptedRunError(FsdpckptError):
    exit_code = 130
    title = ""
    usual_next_step = _AGAIN
