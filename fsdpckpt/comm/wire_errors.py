"""Errors as values that cross between processes: a damaged source is exit code 3 whichever rank reads it.

A record has the type and the fields of an error of this program, or of the operating system. Other errors have none:
the ranks that did not raise them know their text only.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

from fsdpckpt import errors
from fsdpckpt.errors import FsdpckptError, InternalError, WorkerError

__all__ = ["ErrorRecord", "decode_error", "encode_error", "original_error"]

ErrorRecord: TypeAlias = "dict[str, Any]"
"""``{"type": class name, ...}`` with the fields of the error; plain JSON values."""


def encode_error(error: BaseException) -> ErrorRecord | None:
    """``error`` as a record; None for one that does not cross: a WorkerError, and what this program did not foresee."""
    if isinstance(error, OSError):
        filename = error.filename if isinstance(error.filename, str) else None
        return {"type": "OSError", "args": [error.errno, error.strerror or str(error), filename]}
    if not isinstance(error, FsdpckptError) or isinstance(error, WorkerError):
        return None
    return {"type": type(error).__name__, **error.to_json()}


def decode_error(record: Mapping[str, Any]) -> Exception:
    """The error that ``encode_error`` made ``record`` of. An InternalError when this program knows no such type."""
    return _decoded(record) or InternalError(f"another worker reported an unknown error: {record!r}")


def _decoded(record: Mapping[str, Any]) -> Exception | None:
    fields = dict(record)
    name = fields.pop("type", None)
    if name == "OSError":
        return OSError(*fields["args"])
    kind = getattr(errors, str(name), None)
    if not isinstance(kind, type) or not issubclass(kind, FsdpckptError):
        return None
    return kind.from_json(fields)


def original_error(error: WorkerError) -> Exception:
    """The error that made a rank fail, where it is one that a lone process would end with; else ``error`` itself."""
    original = None if error.original is None else _decoded(error.original)
    if original is None:
        return error
    if isinstance(original, FsdpckptError) and error.rank:
        original.details = (*original.details, f"met by worker {error.rank} in step '{error.step}'")
    return original
