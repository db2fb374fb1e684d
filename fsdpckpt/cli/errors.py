"""Turns every exception and signal into a message, in words or JSON, and an exit code.

``main`` needs ``catch_signals`` before anything else, so importing this module takes no time.
"""

from __future__ import annotations

import errno
import os
import signal
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from types import FrameType, MappingProxyType
from typing import TYPE_CHECKING

from fsdpckpt.credentials import without_credentials
from fsdpckpt.errors import (
    FsdpckptError,
    InternalError,
    InterruptedRunError,
    SourceError,
    TargetUnwritableError,
    UsageError,
    leftover_of,
    to_copy,
)
from fsdpckpt.flags import Message

if TYPE_CHECKING:
    from fsdpckpt.cli.output import Line, Streams

MAX_DETAILS = 100  # lines on a screen; --json has them all

_SIGNALS = ("SIGINT", "SIGTERM", "SIGHUP")  # by name: not every system has all of them
_NO_TARGET = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the disk quota is used up",
    errno.EROFS: "the file system is read-only",
}
_LOOK_AT = {  # what to look at, and with which command
    errno.EACCES: ("look at the owner and the permissions", "ls -ld"),
    errno.EPERM: ("look at the owner and the permissions", "ls -ld"),
    errno.ELOOP: ("see where the link leads", "ls -l"),
}
# Packages that fsspec opens URLs with: their errors are the store's answers, not bugs of this program.
_STORES = frozenset(
    {"aiohttp", "aiobotocore", "azure", "adlfs", "botocore", "fsspec", "gcsfs", "google", "httpx", "httpx2"}
    | {"huggingface_hub", "requests", "s3fs", "urllib3"}
)


class Interruption(BaseException):
    """A signal asked the program to end. Not a KeyboardInterrupt, which the option parser would handle itself."""


def catch_signals() -> None:
    """Make signals raise Interruption: the run ends tidily, can be resumed, and the exit code is 130.

    A signal that the caller ignores, as ``nohup`` does with SIGHUP, stays ignored.
    """

    def stop(_number: int, _frame: FrameType | None) -> None:
        raise Interruption

    for number in _numbers():
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, stop)


def ignore_signals() -> None:
    """Ignore further signals: a second Ctrl-C must not turn the last message of a run into a traceback."""
    for number in _numbers():
        with suppress(ValueError):  # not in the main thread
            signal.signal(number, signal.SIG_IGN)


def _numbers() -> list[signal.Signals]:
    return [getattr(signal, name) for name in _SIGNALS if hasattr(signal, name)]


def guarded(output: Streams, body: Callable[[], int]) -> int:
    """The exit code of ``body``, or of the error it raised, after showing it."""
    try:
        return body()
    except (KeyboardInterrupt, Interruption) as error:
        return show_ended(output, error, {}, "error")
    except Exception as error:  # noqa: BLE001  # the boundary: one of the program's two broad excepts
        return show_error(output, error)


def show_ended(output: Streams, raised: BaseException, document: Mapping[str, object], schema: str) -> int:
    """Show ``document``, what a command had done when ``raised`` ended it, with the error, and return its exit code."""
    if isinstance(raised, (KeyboardInterrupt, Interruption)):
        ignore_signals()
        raised = _interruption_error(raised)
    return show_error(output, raised, document, schema)


def _interruption_error(error: BaseException) -> InterruptedRunError:
    what, leftover = "interrupted (Ctrl-C or a signal)", leftover_of(error)
    if leftover is None:
        return InterruptedRunError(what, why="no partial output was left", next_step="run it again", retryable=True)
    import shlex

    words = [word for word in sys.argv[1:] if word != "--no-resume"]
    return InterruptedRunError(
        what,
        details=[leftover.what],
        next_step=to_copy("run the same command again: it continues", shlex.join(["fsdpckpt", *words])),
        retryable=True,
    )


def show_error(
    output: Streams, raised: BaseException, document: Mapping[str, object] = MappingProxyType({}), schema: str = "error"
) -> int:
    """Show ``raised`` and return its exit code. ``document``: the rest of the command's JSON, of ``schema``."""
    from fsdpckpt.cli.output import redirect_to_null

    error = as_fsdpckpt_error(raised)
    if isinstance(error, UsageError) and error.next_steps is None:
        error.next_step = to_copy("see the options, with examples", f"{_command_name()} --help")
    try:
        if os.environ.get("FSDPCKPT_DEBUG") == "1":
            import traceback

            output.error("".join(traceback.format_exception(raised)).rstrip().split("\n"))
        if output.as_json:
            output.document(lambda: {**document, **error_json(error)}, schema)
            output.error(error_lines(error)[:1])  # the document may go to a file: a log should show what happened
        else:
            output.error(error_lines(error))
    except OSError:  # stdout or stderr cannot be written: a full disk
        redirect_to_null(sys.stdout)
        try:
            output.error(error_lines(error))
        except OSError:
            redirect_to_null(sys.stderr)
    return error.exit_code


def _command_name() -> str:
    """The command that was called: ``fsdpckpt convert``."""
    first = sys.argv[1] if len(sys.argv) > 1 else ""
    return f"fsdpckpt {first}" if first in ("inspect", "convert", "diff", "verify", "units") else "fsdpckpt"


def as_fsdpckpt_error(error: BaseException) -> FsdpckptError:
    """Any exception as one of this program's, so that it has an exit code, a cause and a next step."""
    if isinstance(error, FsdpckptError):
        return error
    if isinstance(error, OSError) and error.errno is not None:
        return _from_system(error)
    if type(error).__module__.partition(".")[0] in _STORES:
        from fsdpckpt.storage.retry import is_final

        return SourceError(
            f"the store could not be read: {type(error).__name__}: {error}",
            why="the network, the credentials or the URL",
            next_step="check the URL and the credentials",
            run_again=True,
            retryable=not is_final(error),
        )
    if isinstance(error, MemoryError):
        converting = _command_name() == "fsdpckpt convert"
        smaller = "run it again with a smaller --max-memory" if converting else "free some memory, then run it again"
        return InternalError("there was not enough memory", next_step=smaller)
    return InternalError(f"{type(error).__name__}: {error}", why="this is a bug in fsdpckpt: please report it")


def _from_system(error: OSError) -> FsdpckptError:
    path = os.fsdecode(error.filename) if isinstance(error.filename, (str, bytes)) else None
    where = f"{path}: " if path else ""
    leftover = leftover_of(error)
    details = [] if leftover is None else [f"{leftover.what}: the same command {leftover.resume}"]
    if error.errno in _NO_TARGET:
        return TargetUnwritableError(
            f"{where}{_NO_TARGET[error.errno]}",
            details=details,
            file=path,
            next_step="make room there or choose another DST",
            run_again=True,
        )
    next_step = None
    if path and error.errno in _LOOK_AT:
        import shlex

        what, command = _LOOK_AT[error.errno]
        next_step = to_copy(what, f"{command} {shlex.quote(path)}")
    return SourceError(
        f"{where}{error.strerror or error}",
        details=details,
        file=path,
        why="the operating system refused to read it",
        next_step=next_step,
    )


def error_lines(error: FsdpckptError) -> list[Line]:
    from fsdpckpt.cli.output import Colour, Styled, UnbrokenLine

    first, *rest = error_text(error).split("\n")
    commands = {line for line in (error.next_steps or "").split("\n")[1:] if line.startswith(" ")}
    return [
        Styled(first, Colour.BAD, end=len("error:")),
        *(UnbrokenLine(line) if line in commands else line for line in rest),
    ]


def error_text(error: FsdpckptError) -> str:
    """The error for a person, several lines."""
    lines = [": ".join(filter(None, ("error", error.title, error.what)))]
    lines.extend(error.expectation)
    shown = "\n".join((error.what, *error.findings))
    for label, value in (("file", error.file), ("key", error.key), ("rank", error.rank)):
        text = without_credentials(str(value))
        in_findings = label == "file" and text.rpartition("/")[2] in error.findings
        shown_already = in_findings or _mentions(shown, text)
        if value is not None and not shown_already:  # once is enough
            lines.append(f"  {label}: {text}")
    shown_findings = error.shown_findings(MAX_DETAILS)
    lines.extend("  - " + finding.replace("\n", "\\n") for finding in shown_findings)
    if len(error.findings) > MAX_DETAILS:
        lines[-1] += ": --json lists them all"
    if error.why is not None:
        lines.append(f"why:  {error.why}")
    lines.append(f"next: {error.next_steps or error.usual_next_step}".rstrip(" "))
    return str(Message("\n".join(map(format, lines))))


def _mentions(text: str, word: str) -> bool:
    """Whether ``word`` is in ``text``, and not only as a part of other words."""
    import re

    return re.search(rf"(?<!\w){re.escape(word)}(?!\w)", text) is not None


def error_json(error: FsdpckptError) -> dict[str, object]:
    """``{"error": {...}}``: a part of the document of the command that failed."""
    return {"error": error.describe()}
