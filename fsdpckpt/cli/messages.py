"""Errors in words: what is wrong, expected and found, every finding, why that may be, and the command to type next."""

from __future__ import annotations

import errno
import os
import platform

from fsdpckpt.errors import FsdpckptError, InternalError, SourceError, TargetUnwritableError

__all__ = ["error_json", "error_text", "in_our_words"]

MOST_DETAILS = 100  # lines on a screen; --json has them all

_NO_TARGET = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the disk quota is used up",
    errno.EROFS: "the file system is read-only",
}
_TITLES: dict[str, str] = {
    "UsageError": "usage",
    "SourceMissingError": "source missing",
    "SourceUnrecognisedError": "source not recognised",
    "SourceIncompleteError": "source incomplete",
    "SourceCorruptError": "source corrupt",
    "SourceUnsafeError": "source refused as unsafe",
    "SourceUnsupportedError": "source refused",
    "SourceError": "source",
    "NeedsInformationError": "more information is needed",
    "TargetExistsError": "target exists",
    "TargetUnwritableError": "target cannot be written",
    "TargetError": "target",
    "WorkerError": "a worker failed",
    "InterruptedRunError": "interrupted",
}


def in_our_words(error: BaseException) -> FsdpckptError:
    """Any exception as one of this program's, so that it has an exit code, a cause and a next step."""
    if isinstance(error, FsdpckptError):
        return error
    if isinstance(error, OSError) and error.errno is not None:
        return _from_system(error)
    if isinstance(error, MemoryError):
        return InternalError("there was not enough memory", next_step="run it again with a smaller --max-memory")
    return InternalError(
        f"{type(error).__name__}: {error}",
        why="this is a bug in fsdpckpt: please report it",
        next_step="run the command again with FSDPCKPT_DEBUG=1 set, and send what it prints with the output of "
        "`fsdpckpt --version`",
    )


def _from_system(error: OSError) -> FsdpckptError:
    path = os.fsdecode(error.filename) if isinstance(error.filename, (str, bytes)) else None
    where = f"{path}: " if path else ""
    if error.errno in _NO_TARGET:
        return TargetUnwritableError(f"{where}{_NO_TARGET[error.errno]}", file=path)
    what = f"{where}{error.strerror or error}"
    return SourceError(what, file=path, why="the operating system refused to read it")


def error_text(error: FsdpckptError) -> str:
    """The error for a person, several lines."""
    title = _TITLES.get(type(error).__name__, "internal error")
    lines = [f"error: {title}: {error.what}"]
    if error.expected is not None and error.found is not None:
        lines.append(f"  expected {error.expected}, found {error.found}")
    elif error.expected is not None:
        lines.append(f"  expected {error.expected}")
    elif error.found is not None:
        lines.append(f"  found {error.found}")
    told = "\n".join((error.what, *error.details))
    for label, value in (("file", error.file), ("key", error.key)):
        if value is not None and value not in told:
            lines.append(f"  {label}: {value}")
    if error.rank is not None and str(error.rank) not in told:
        lines.append(f"  rank: {error.rank}")
    lines.extend(f"  - {detail}" for detail in error.details[:MOST_DETAILS])
    if len(error.details) > MOST_DETAILS:
        lines.append(f"  - and {len(error.details) - MOST_DETAILS} more: --json lists them all")
    if error.why is not None:
        lines.append(f"why:  {error.why}")
    if error.next_step is not None:
        lines.append(f"next: {error.next_step}")
    return "\n".join(lines)


def error_json(error: FsdpckptError) -> dict[str, object]:
    """The error for a program: ``{"error": {...}}``."""
    document: dict[str, object] = {
        "type": type(error).__name__,
        "exit_code": error.exit_code,
        "what": error.what,
        "details": list(error.details),
        "why": error.why,
        "next_step": error.next_step,
        "file": error.file,
        "key": error.key,
        "rank": error.rank,
        "expected": error.expected,
        "found": error.found,
    }
    if error.exit_code == InternalError.exit_code:
        document["python"] = platform.python_version()
    return {"error": document}
