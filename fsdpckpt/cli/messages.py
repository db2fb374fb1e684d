"""Errors in words: what is wrong, expected and found, every finding, why that may be, and the command to type next."""

from __future__ import annotations

import errno
import os
import platform
import shlex

from fsdpckpt.errors import FsdpckptError, InternalError, SourceError, TargetUnwritableError

__all__ = ["error_json", "error_text", "in_our_words"]

_REPORT = (
    "run the command again with FSDPCKPT_DEBUG=1 set, and send what it prints with the output of `fsdpckpt --version`"
)
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


# What to do next where the error itself does not say: no error leaves its reader alone.
_NEXT: dict[str, str] = {
    "UsageError": "fsdpckpt --help lists the commands, and fsdpckpt COMMAND --help the options",
    "SourceMissingError": "check the path",
    "SourceUnrecognisedError": "give a torch.save file, a DCP directory, a safetensors file or a directory of them",
    "SourceIncompleteError": "copy or save the checkpoint again, then run the command again",
    "SourceCorruptError": "copy or save the checkpoint again, then run the command again",
    "SourceUnsafeError": "save the checkpoint again without these objects",
    "SourceUnsupportedError": "save the checkpoint in another form",
    "SourceError": "check the file and the disk, then run the command again",
    "NeedsInformationError": "fsdpckpt COMMAND --help shows the options that tell",
    "TargetExistsError": "give another DST",
    "TargetUnwritableError": "give another DST",
    "TargetError": "give another DST",
    "WorkerError": "run the command again",
    "InterruptedRunError": "run the command again",
}
# Packages that fsspec opens URLs with: their errors are the store's answers, not bugs of this program.
_STORES = frozenset(
    {"aiohttp", "aiobotocore", "azure", "adlfs", "botocore", "fsspec", "gcsfs", "google", "huggingface_hub", "requests"}
    | {"s3fs", "urllib3"}
)


def in_our_words(error: BaseException) -> FsdpckptError:
    """Any exception as one of this program's, so that it has an exit code, a cause and a next step."""
    if isinstance(error, FsdpckptError):
        if error.next_step is None:
            error.next_step = _NEXT.get(type(error).__name__, _REPORT)
        return error
    if isinstance(error, OSError) and error.errno is not None:
        ours = _from_system(error)
        ours.details = tuple(f"{note}: --resume goes on from there" for note in getattr(error, "__notes__", ()))
        return ours
    if type(error).__module__.partition(".")[0] in _STORES:
        return SourceError(
            f"the store could not be read: {type(error).__name__}: {error}",
            why="the network, the credentials or the URL",
            next_step="check the URL and the credentials, then run the command again",
        )
    if isinstance(error, MemoryError):
        return InternalError("there was not enough memory", next_step="run it again with a smaller --max-memory")
    return InternalError(
        f"{type(error).__name__}: {error}",
        why="this is a bug in fsdpckpt: please report it",
        next_step=_REPORT,
    )


def _from_system(error: OSError) -> FsdpckptError:
    path = os.fsdecode(error.filename) if isinstance(error.filename, (str, bytes)) else None
    where = f"{path}: " if path else ""
    if error.errno in _NO_TARGET:
        return TargetUnwritableError(
            f"{where}{_NO_TARGET[error.errno]}",
            file=path,
            next_step="make room there or choose another DST, then run the command again",
        )
    what = f"{where}{error.strerror or error}"
    why = "the operating system refused to read it"
    next_step = f"ls -ld {shlex.quote(path)}  # whose is it, and who may read it?" if path else _NEXT["SourceError"]
    return SourceError(what, file=path, why=why, next_step=next_step)


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
    lines.extend("  - " + detail.replace("\n", "\\n") for detail in error.details[:MOST_DETAILS])
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
