"""Names what this program keeps beside DST, and opens it without trusting what is there.

Beside DST there may be a lock, a staging directory (``output``, journals and locks of workers are in it) and the older
DST, moved aside. Whoever may write there can put something else under these names. So a link is never followed, a pipe
is never waited for, and what is not of the expected kind is neither written to nor removed: an error names it.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import shlex
import stat
from contextlib import suppress
from dataclasses import dataclass

from fsdpckpt.errors import TargetUnwritableError, to_copy
from fsdpckpt.storage.local_target import target_errors
from fsdpckpt.storage.places import is_within

NAME_LIMIT = 255  # bytes of one file name on every file system in use; some allow fewer

OUTPUT, JOURNAL, WRITER = "output", "journal", "writer"
"""What is in a staging directory; several journals and writers have a number behind the name."""


def hidden_path(target: str, suffix: str) -> str:
    """The path beside ``target``; contains a hash of its name if that is too long."""
    parent, name = os.path.split(os.path.realpath(target))
    hidden = f".{name}.fsdpckpt-{suffix}"
    if len(os.fsencode(hidden)) > NAME_LIMIT:
        hidden = f".{hashlib.sha256(os.fsencode(name)).hexdigest()[:32]}.fsdpckpt-{suffix}"
    return os.path.join(parent, hidden)


def staging_root(target: str) -> str:
    """The path of the staging directory of ``target``, whether it exists or not."""
    return hidden_path(target, "staging")


def backup_path(target: str) -> str:
    """Where an older ``target`` is while a new one takes its place, on file systems that cannot swap names."""
    return hidden_path(target, "old")


def lock_file(target: str) -> str:
    """The lock that a run holds while it writes ``target``."""
    return hidden_path(target, "lock")


def hidden_place_of(target: str, path: str) -> str | None:
    """The staging directory or the backup of ``target`` if ``path`` is or lies in it; a run removes or renames both."""
    places = (staging_root(target), backup_path(target))
    return next((place for place in places if os.path.lexists(place) and is_within(path, place)), None)


def journal_path(root: str, writer: int | None = None) -> str:
    """The journal in the staging directory ``root`` of a single process, or of number ``writer`` of several."""
    return os.path.join(root, JOURNAL if writer is None else f"{JOURNAL}-{writer}")


def journal_paths(root: str) -> list[str]:
    """All journals in the staging directory ``root``; empty if it does not exist."""
    return [os.path.join(root, name) for name in names_in(root, JOURNAL)]


def names_in(root: str, kind: str) -> list[str]:
    """The entries of ``root`` called ``kind``, or ``kind`` with a number; none if it is no directory of ours."""
    try:
        names = os.listdir(root) if stat.S_ISDIR(os.lstat(root).st_mode) else []
    except (FileNotFoundError, NotADirectoryError):
        return []
    return sorted(name for name in names if name == kind or name.startswith(f"{kind}-"))


def is_directory(path: str) -> bool:
    """Whether there is a directory at ``path``, one of this program's own. Raises TargetUnwritableError for anything
    else.
    """
    try:
        status = os.lstat(path)
    except FileNotFoundError:
        return False
    if not stat.S_ISDIR(status.st_mode):
        raise _foreign_error(path, status)
    return True


def open_own_file(path: str, flags: int) -> int:
    """A descriptor of the regular file ``path``, one of this program's own.

    Raises OSError, and TargetUnwritableError for anything else: also for a file with a second name, which is somebody's
    data.
    """
    try:
        descriptor = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o644)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.EISDIR, errno.ENXIO):  # a link, a directory, a pipe or a socket
            raise _foreign_error(path, os.lstat(path)) from None
        raise
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode) or status.st_nlink > 1:
        os.close(descriptor)
        raise _foreign_error(path, status)
    return descriptor


def read_own_file(path: str) -> bytes:
    """The content of ``path``; raises what ``open_own_file`` raises."""
    with os.fdopen(open_own_file(path, os.O_RDONLY), "rb") as file:
        return file.read()


def write_own_file(path: str, content: bytes) -> None:
    """Make ``content`` the file at ``path``: a new file, so that no other name of an earlier one sees it."""
    with suppress(FileNotFoundError):
        os.unlink(path)
    with os.fdopen(open_own_file(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def require_own_kind(path: str) -> None:
    """Raises TargetUnwritableError if ``path`` is neither a file nor a directory, nor absent."""
    with suppress(FileNotFoundError):
        status = os.lstat(path)
        if not stat.S_ISREG(status.st_mode) and not stat.S_ISDIR(status.st_mode):
            raise _foreign_error(path, status)


_KINDS = {
    stat.S_IFLNK: "a link",
    stat.S_IFIFO: "a pipe",
    stat.S_IFDIR: "a directory",
    stat.S_IFSOCK: "a socket",
    stat.S_IFREG: "a file",
}


def _foreign_error(path: str, status: os.stat_result) -> TargetUnwritableError:
    kind = _KINDS.get(stat.S_IFMT(status.st_mode), "a device")
    if stat.S_ISREG(status.st_mode) and status.st_nlink > 1:
        kind = "a file that has another name, too (a hard link)"
    command = "rm -r" if stat.S_ISDIR(status.st_mode) else "rm"
    return TargetUnwritableError(
        f"{path} is {kind}, and not what fsdpckpt keeps there",
        file=path,
        why="another program or user made it; it was neither followed nor removed",
        next_step=to_copy("look at it, and remove it", f"{command} {shlex.quote(path)}"),
        resumable=False,
    )


# What a file system answers that has no locks: Lustre without the flock option, NFS without its lock service, FUSE.
# NFS refuses an exclusive lock of what is not open for writing, which a directory cannot be, with EBADF.
_NO_LOCKS = frozenset({errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK, errno.EBADF})


@dataclass(frozen=True, slots=True)
class Lock:
    """A lock that is held until ``close``. ``effective``: False where the file system has no locks."""

    descriptor: int
    effective: bool

    def close(self) -> None:
        os.close(self.descriptor)


def lock_path(path: str, flags: int, *, wait: bool = False, shared: bool = False) -> Lock:
    """Open ``path``, a file or a directory of this program's own, with ``flags``, and lock it.

    ``shared``: others may share the lock. Raises BlockingIOError if another process holds the lock, unless this process
    is to ``wait`` for it.
    """
    operation = (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | (0 if wait else fcntl.LOCK_NB)
    while True:
        if flags & os.O_DIRECTORY:
            lock = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW)
        else:
            lock = open_own_file(path, flags)
        try:
            effective = _locked(lock, operation)
            # The previous owner may have removed it between our open and our lock: then the lock guards nothing.
            with suppress(FileNotFoundError):
                if os.path.samestat(os.lstat(path), os.fstat(lock)):
                    return Lock(lock, effective)
        except BaseException:
            os.close(lock)
            raise
        os.close(lock)


def _locked(descriptor: int, operation: int) -> bool:
    try:
        fcntl.flock(descriptor, operation)
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        return False
    return True


def lock_as_writer(root: str, writer: int) -> Lock:
    """Lock ``root`` as number ``writer`` of several, until the lock is closed."""
    path = os.path.join(root, f"{WRITER}-{writer}")
    with target_errors(path):
        return lock_path(path, os.O_RDWR | os.O_CREAT, wait=True)


def has_writers(root: str) -> bool:
    """Whether a process that locked the staging directory ``root`` as a writer is still running."""
    return not all(is_free(os.path.join(root, name)) for name in names_in(root, WRITER))


def is_free(path: str) -> bool:
    """Whether no process holds the lock ``path``, as far as the file system can tell."""
    with target_errors(path):
        try:
            lock_path(path, os.O_RDWR, shared=True).close()  # all workers of a run look at once
        except FileNotFoundError:
            return True
        except BlockingIOError:
            return False
    return True
