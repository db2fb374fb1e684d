"""What tells one state of a file from another: length, time of change and inode, or a store's own tag."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from fsdpckpt.errors import SourceCorruptError, SourceError, SourceMissingError

__all__ = ["FileIdentity", "change_between", "changed_error", "identity_now", "identity_of_status", "remote_identity"]

# Where the file systems that fsspec knows say that an object changed. The first that is there counts.
_TAGS = (
    "ETag",
    "etag",
    "md5Hash",
    "content_md5",
    "crc32c",
    "blob_id",
    "mtime",
    "LastModified",
    "last_modified",
    "updated",
)


@dataclass(frozen=True, slots=True)
class FileIdentity:
    """``nbytes`` and, of a local file, ``mtime_ns`` and ``inode``; of a remote one ``tag``, what its store calls it."""

    path: str
    nbytes: int
    mtime_ns: int = 0
    inode: int = 0
    tag: str = ""


def identity_of_status(path: str, status: os.stat_result) -> FileIdentity:
    return FileIdentity(path, status.st_size, status.st_mtime_ns, status.st_ino)


def identity_now(path: str) -> FileIdentity:
    """The identity of what is at the local ``path`` now. Raises SourceMissingError when nothing is, SourceError."""
    try:
        return identity_of_status(path, os.stat(path))
    except FileNotFoundError:
        raise SourceMissingError(
            f"{path} vanished while it was read",
            file=path,
            why="another program removed it or moved it away",
            next_step="bring it back, then run the command again",
        ) from None
    except OSError as error:
        raise SourceError(f"{path} cannot be reached any more: {error.strerror}", file=path) from None


def remote_identity(url: str, info: Mapping[str, object]) -> FileIdentity:
    """From what fsspec's ``info`` says of one object."""
    tag = next((f"{name}={info[name]}" for name in _TAGS if info.get(name) is not None), "")
    size = info.get("size")
    return FileIdentity(url, size if isinstance(size, int) else 0, tag=tag)


def change_between(before: FileIdentity, now: FileIdentity) -> str | None:
    """What happened to a file, in words; None when nothing did. The spelling of its path does not count."""
    if now.nbytes != before.nbytes:
        verb = "grew" if now.nbytes > before.nbytes else "shrank"
        return f"{verb} from {before.nbytes} to {now.nbytes} bytes"
    if now.inode != before.inode:
        return "was replaced by another file"
    if now.mtime_ns != before.mtime_ns or now.tag != before.tag:
        return "was written to"
    return None


def changed_error(path: str, change: str) -> SourceCorruptError:
    """A file that changed while it was read: what was copied belongs to no one checkpoint."""
    return SourceCorruptError(
        f"{path} changed while it was read: it {change}",
        file=path,
        why="a training job is still writing this checkpoint, or something copies over it",
        next_step="wait until the checkpoint is complete, then run the command again",
    )
