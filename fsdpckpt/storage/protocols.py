"""Defines what bytes are read from and written to, and what identifies the state of a file.

To add a storage, implement ``ByteSource`` (and ``ByteTarget``, if it can be written at positions) and inherit the
suites in ``tests/storage/byte_source_contract.py`` and ``byte_target_contract.py``.
"""

from __future__ import annotations

import os
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

from fsdpckpt.errors import SourceCorruptError, SourceError, SourceMissingError, UsageError
from fsdpckpt.ir.files import SourceFile, Stored
from fsdpckpt.text import bytes_text

UPLOADING = "fsdpckpt.uploading"  # exists in a directory of an object store until its upload is complete


class ByteSource(ABC):
    """Bytes read at positions. Any thread may read at any time; reading moves no position.

    ``path``: a path or URL, for messages. ``nbytes``: the total length in bytes, which does not change.
    Opening a source that does not exist raises SourceMissingError.
    """

    path: str
    nbytes: int

    @abstractmethod
    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill all of ``buffer`` (bytes format) from ``offset``.

        Raises SourceCorruptError if these bytes are not all inside the file, including a negative ``offset``;
        SourceError if the disk, the network or the store fails.
        """

    def read(self, offset: int, nbytes: int) -> bytes:
        """Exactly ``nbytes`` bytes from ``offset``, never fewer. Raises what ``read_into`` raises."""
        self.require_inside(offset, nbytes)
        data = bytearray(nbytes)
        self.read_into(offset, memoryview(data))
        return bytes(data)

    def prefetch(self, ranges: Iterable[tuple[int, int]]) -> bool:
        """Announce the small ranges (offset, nbytes) that are read next; True if they were fetched ahead, so that
        reading them one by one costs no request.
        """
        return False

    def require_inside(self, offset: int, nbytes: int) -> None:
        """Raises SourceCorruptError unless the file has ``nbytes`` bytes at ``offset``."""
        if offset < 0 or offset + nbytes > self.nbytes:
            raise too_short_error(self.path, offset, nbytes, max(self.nbytes - max(offset, 0), 0))

    def close(self) -> None:  # noqa: B027  # most sources hold nothing
        """Release what the source holds. May be called twice."""


class ByteTarget(Protocol):
    """A new file of exactly ``nbytes`` bytes, written at positions in any order, by any thread at any time.

    Making one raises TargetUnwritableError if the file cannot be created. Only ``commit`` ends it successfully: bytes
    that were never committed must not be trusted.
    """

    path: str
    nbytes: int

    def write(self, offset: int, data: memoryview | bytes) -> None:
        """Write all of ``data`` at ``offset``. Raises TargetUnwritableError (disk full, no permission, ...)."""
        ...

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill ``buffer`` with what was written at ``offset``. Raises TargetUnwritableError."""
        ...

    def sync(self) -> None:
        """Make what was written so far durable. Raises TargetUnwritableError if it may be lost."""
        ...

    def commit(self) -> None:
        """Make everything that was written durable, and close.

        Raises TargetUnwritableError if the file is not ``nbytes`` long, or is not known to be on the disk.
        """
        ...

    def close(self) -> None:
        """Release the file. Without an earlier ``commit`` this abandons it. May be called twice."""
        ...


@dataclass(frozen=True, slots=True)
class Entry:
    """One name in a directory. ``nbytes`` is 0 for a directory. ``link``: the path that a link leads to, else ""."""

    name: str
    path: str
    nbytes: int
    directory: bool
    link: str = ""


def is_url(path: str) -> bool:
    """True for ``scheme://...``: such a path goes through fsspec."""
    return "://" in path


# ``s3://``, ``gs:``, ``s3:bucket``, ``s3:/bucket``, ``https:///x``; but ``hdfs:///x`` is a file of the default host
_UNFINISHED_URL = re.compile(
    r"(?!(?:hdfs|memory):///.)(s3a?|gc?s|abfss?|az|adl|https?|hf|hdfs|memory):(?://?/?|/?([^/].*)|///.*|)"
)


def require_complete_url(path: str, name: str) -> None:
    """Raises UsageError for a ``path`` that begins as a URL and is none, unless something is there. ``name``: what
    messages call it.
    """
    begun = _UNFINISHED_URL.fullmatch(path)
    if begun and not os.path.lexists(path):
        whole = f"{begun[1]}://{begun[2] or 'BUCKET/PATH'}"
        raise UsageError(f"{name} is not a complete URL: {path}", next_step=f"give {whole}")


def is_remote(file: SourceFile) -> bool:
    """Whether the bytes of ``file`` come from a store."""
    return isinstance(file, Stored) and is_url(file.path)


def too_short_error(path: str, offset: int, expected: int, actual: int) -> SourceCorruptError:
    """The error of a read of ``expected`` bytes that reached the end of the file after ``actual``."""
    return SourceCorruptError(
        f"{path} ends too early",
        file=path,
        expected=f"{bytes_text(expected)} at offset {offset:,}",
        found=bytes_text(actual),
        why="the file was truncated, or is still being written",
        next_step="copy or save the checkpoint again",
        run_again=True,
    )


# Fields in which fsspec's file systems report the version of an object. The first one present is used.
_TAGS = (
    "ETag",
    "etag",
    "md5Hash",
    "content_md5",
    "crc32c",
    "blob_id",
    "xet_hash",
    "mtime",
    "LastModified",
    "last_modified",
    "updated",
)


@dataclass(frozen=True, slots=True)
class FileIdentity:
    """Distinguishes one state of a file from another.

    ``nbytes``: its length. A local file also has ``mtime_ns`` and ``inode``, a remote one its store's ``tag``.
    """

    path: str
    nbytes: int
    mtime_ns: int = 0
    inode: int = 0
    tag: str = ""


def identity_of_status(path: str, status: os.stat_result) -> FileIdentity:
    return FileIdentity(path, status.st_size, status.st_mtime_ns, status.st_ino)


def identity_now(path: str) -> FileIdentity:
    """The identity of the local file at ``path`` now. Raises SourceMissingError if it is gone, SourceError."""
    try:
        return identity_of_status(path, os.stat(path))
    except FileNotFoundError:
        raise SourceMissingError(
            f"{path} vanished while it was read",
            file=path,
            why="another program removed or moved it",
            next_step="restore it",
            run_again=True,
        ) from None
    except OSError as error:
        raise SourceError(f"{path} cannot be reached any more: {error.strerror}", file=path) from None


def remote_identity(url: str, info: Mapping[str, object]) -> FileIdentity:
    """The identity of one object, from what fsspec's ``info`` returns for it."""
    tag = next((f"{name}={info[name]}" for name in _TAGS if info.get(name) is not None), "")
    size = info.get("size")
    return FileIdentity(url, size if isinstance(size, int) else 0, tag=tag)


def change_between(before: FileIdentity, now: FileIdentity) -> str | None:
    """What happened to a file, as words for a message; None if nothing did. Does not compare the paths."""
    if now.nbytes != before.nbytes:
        verb = "grew" if now.nbytes > before.nbytes else "shrank"
        return f"{verb} from {bytes_text(before.nbytes)} to {bytes_text(now.nbytes)}"
    if now.inode != before.inode:
        return "was replaced by another file"
    if now.mtime_ns != before.mtime_ns or now.tag != before.tag:
        return "was written to"
    return None


def changed_error(path: str, change: str) -> SourceCorruptError:
    """The error for a file that changed while it was read: the bytes copied so far belong to no single checkpoint."""
    return SourceCorruptError(
        f"{path} changed while it was read: it {change}",
        file=path,
        why="a training job is still writing this checkpoint, or another program is copying over it",
        next_step="wait until the checkpoint is complete",
        run_again=True,
        retryable=True,
    )
