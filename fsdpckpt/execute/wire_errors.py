"""Errors that cross between workers and arrive as what they are: a damaged source is exit code 3 on any of them.

A collective step carries the cause of a failure as text. An error of this program, or of the operating system, is put
into that text as JSON (``carrying``), and taken out again where the run ends (``as_it_was``).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

from fsdpckpt import errors
from fsdpckpt.errors import FsdpckptError, WorkerError

__all__ = ["Carried", "as_it_was", "carried_text", "carrying", "raise_carried"]

_MARK = "fsdpckpt error"
_FIELDS = ("details", "why", "next_step", "file", "key", "rank", "expected", "found")


class Carried(FsdpckptError):
    """An error on its way to the other workers. Its text is all of it."""

    def __init__(self, error: FsdpckptError | OSError) -> None:
        super().__init__(carried_text(error))

    def __str__(self) -> str:
        return self.what


@contextmanager
def carrying() -> Iterator[None]:
    """Whatever the body raises of this program's errors, or the system's, is raised as ``Carried``."""
    try:
        yield
    except (WorkerError, Carried):
        raise
    except (FsdpckptError, OSError) as error:
        raise Carried(error) from error


def carried_text(error: FsdpckptError | OSError) -> str:
    """``error`` as text that ``raise_carried`` reads."""
    document: dict[str, object] = {_MARK: type(error).__name__}
    if isinstance(error, OSError):
        document |= {_MARK: "OSError", "args": [error.errno, error.strerror or str(error), _name(error.filename)]}
    else:
        document["what"] = error.what
        document |= {name: getattr(error, name) for name in _FIELDS}
    return json.dumps(document)


def _name(filename: object) -> str | None:
    return filename if isinstance(filename, str) else None


def _parsed(text: str) -> Exception | None:
    """The error in ``text``; None when it carries none."""
    try:
        document = json.loads(text)
    except ValueError:
        return None
    if not isinstance(document, dict) or _MARK not in document:
        return None
    kind = document.pop(_MARK)
    if kind == "OSError":
        return OSError(*document["args"])
    known = getattr(errors, str(kind), None)
    if not isinstance(known, type) or not issubclass(known, FsdpckptError):
        return None
    return known(document.pop("what"), **document)


def raise_carried(text: str) -> NoReturn:
    """Raise the error in ``text``."""
    raise _parsed(text) or errors.InternalError(f"another worker said something unknown: {text}")


def as_it_was(error: WorkerError) -> Exception:
    """The error that made a worker fail, where it is one that a lone process would end with; else ``error`` itself."""
    original = _parsed(error.cause or "")
    if original is None:
        return error
    if isinstance(original, FsdpckptError) and error.rank:
        original.details = (*original.details, f"met by worker {error.rank} in step '{error.step}'")
    return original
