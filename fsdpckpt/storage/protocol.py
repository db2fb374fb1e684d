"""What every source of bytes offers, whatever it is stored on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from fsdpckpt.errors import SourceCorruptError

__all__ = ["UPLOADING", "ByteSource", "Entry", "ends_too_early", "is_url"]

UPLOADING = "fsdpckpt.uploading"  # lies in a directory of a store for as long as files of it are still to come


class ByteSource(Protocol):
    """Bytes at positions. ``nbytes`` is the total length; ``path`` names it in messages."""

    path: str
    nbytes: int

    def read(self, offset: int, nbytes: int) -> bytes:
        """Exactly ``nbytes`` from ``offset``. Raises SourceCorruptError when the file ends before."""
        ...

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill ``buffer`` (bytes format) from ``offset``. Raises SourceCorruptError when the file ends before."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Entry:
    """One name in a directory. ``nbytes`` is 0 for a directory."""

    name: str
    path: str
    nbytes: int
    directory: bool


def is_url(path: str) -> bool:
    """True for ``scheme://...``: such a path goes through fsspec."""
    return "://" in path


def ends_too_early(path: str, offset: int, wanted: int, got: int) -> SourceCorruptError:
    """The error of a read that met the end of its file."""
    return SourceCorruptError(
        f"{path} ends too early",
        file=path,
        expected=f"{wanted} bytes at offset {offset}",
        found=f"{got}",
        why="the file was truncated, or is still being written",
        next_step="copy or save the checkpoint again, then run the command again",
    )
