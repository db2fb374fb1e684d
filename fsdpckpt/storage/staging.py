"""A directory beside DST where the output grows, and the rename that makes it visible all at once.

Protocol: 1. ``Staging`` locks DST's name and creates ``.<name>.fsdpckpt-staging`` beside it, with ``output`` and maybe
a ``journal`` in it. 2. The caller writes and syncs the files in ``output``. 3. ``commit`` syncs the directories,
renames ``output`` (or its one file) to DST, syncs the parent, and removes the rest. Until the rename DST is untouched;
after it DST is complete. An existing DST that is to be replaced changes places with the new one, in one step, and is
removed then. Where the file system cannot do that, it is first renamed aside; a run that is killed between the two
renames leaves ``.<name>.fsdpckpt-old``, which the next run moves back.

A journal says which bytes of ``output`` are on the disk. It goes first whenever staging is removed, so that it never
speaks of files that are gone. Each of several processes that write to ``output`` has a journal of its own, and holds a
lock in the directory for as long as it writes (``lock_as_writer``): nobody else begins while one of them lives.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import hashlib
import os
import shutil
from collections.abc import Iterable

from fsdpckpt.errors import TargetExistsError, TargetUnwritableError
from fsdpckpt.storage.local import sync_directory, target_errors

__all__ = [
    "NAME_LIMIT",
    "Staging",
    "clear_leftover",
    "exchange",
    "free_bytes",
    "lock_as_writer",
    "journal_path",
    "journal_paths",
    "staging_root",
]

NAME_LIMIT = 255  # bytes of one file name on every file system in use; some allow fewer
_JOURNAL, _WRITER = "journal", "writer"


def _hidden_name(name: str, suffix: str) -> str:
    """A name beside DST's, its own where that fits."""
    found = f".{name}.fsdpckpt-{suffix}"
    if len(os.fsencode(found)) <= NAME_LIMIT:
        return found
    return f".{hashlib.sha256(os.fsencode(name)).hexdigest()[:32]}.fsdpckpt-{suffix}"


def staging_root(target: str) -> str:
    """Where the staging directory of ``target`` is, or would be."""
    parent, name = os.path.split(os.path.realpath(target))
    return os.path.join(parent, _hidden_name(name, "staging"))


def journal_path(root: str, writer: int | None = None) -> str:
    """The journal of a process alone, or of number ``writer`` of several, in the staging directory ``root``."""
    return os.path.join(root, _JOURNAL if writer is None else f"{_JOURNAL}-{writer}")


def journal_paths(root: str) -> list[str]:
    """All journals in the staging directory ``root``; none where there is no such directory."""
    return [os.path.join(root, name) for name in _names(root, _JOURNAL)]


def lock_as_writer(root: str, writer: int) -> int:
    """Lock ``root`` as number ``writer`` of several that write there, until the descriptor returned is closed."""
    path = os.path.join(root, f"{_WRITER}-{writer}")
    with target_errors(path):
        held = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        fcntl.flock(held, fcntl.LOCK_EX)
    return held


def _has_writers(root: str) -> bool:
    """Whether a process that holds a lock in the staging directory ``root`` is still there."""
    return not all(_is_free(os.path.join(root, name)) for name in _names(root, _WRITER))


def _is_free(path: str) -> bool:
    with contextlib.suppress(FileNotFoundError):
        lock = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        finally:
            os.close(lock)
    return True


def _names(root: str, kind: str) -> list[str]:
    try:
        return sorted(name for name in os.listdir(root) if name == kind or name.startswith(f"{kind}-"))
    except (FileNotFoundError, NotADirectoryError):
        return []


class Staging:
    """The staging directory of one DST, locked while it is in use.

    ``root``: the directory itself. ``path``: the directory in it to write into. ``journal``: where the one of this
    process goes; ``journal_paths(root)`` are all.
    ``leftover``: True when an interrupted run had left one; ``resumed``: True when it had a journal and was kept, as
    ``resume`` asks, else it was removed. ``journaled``: True when what was removed had a journal.
    ``overwrite``: whether ``commit`` may replace what is at DST by then. ``committed``: DST is complete.
    """

    def __init__(self, target: str, *, directory: bool, overwrite: bool = False, resume: bool = False) -> None:
        self._target = os.path.realpath(target)
        self._directory = directory
        self._overwrite = overwrite
        parent, name = os.path.split(self._target)
        self.root = staging_root(target)
        self.path = os.path.join(self.root, "output")
        self.journal = journal_path(self.root)
        self._aside = os.path.join(parent, _hidden_name(name, "old"))
        self._lock_path = os.path.join(parent, _hidden_name(name, "lock"))
        self.committed = False
        self._made = _missing_directories(parent)
        with target_errors(self._target):
            os.makedirs(parent, exist_ok=True)
            self._lock = self._acquire()
        try:
            self._prepare(resume=resume)
        except BaseException:
            self.close()
            raise

    def _prepare(self, *, resume: bool) -> None:
        """Clear what an interrupted run left, unless it is to be resumed; a DST it had moved aside comes back."""
        with target_errors(self._target):
            if os.path.lexists(self._aside):
                if os.path.lexists(self._target):
                    _remove(self._aside)
                else:
                    os.rename(self._aside, self._target)
            self.leftover = os.path.lexists(self.root)
            self._refuse_writers()
            self.journaled = bool(journal_paths(self.root))
            self.resumed = resume and self.journaled and os.path.isdir(self.path)
            if self.leftover and not self.resumed:
                self.discard()
            self._refuse_to_replace()
            if not self.resumed:
                self._make()

    def _refuse_writers(self) -> None:
        """Workers whose leader was killed live a few seconds longer, and write meanwhile."""
        if _has_writers(self.root):
            raise self._busy()

    def _busy(self) -> TargetExistsError:
        return TargetExistsError(
            f"another fsdpckpt is writing {self._target}",
            file=self._target,
            next_step="wait for it to end, or give another DST",
        )

    def _make(self) -> None:
        os.mkdir(self.root)
        try:
            os.mkdir(self.path)
        except OSError:
            os.rmdir(self.root)
            raise

    def restart(self) -> None:
        """Remove what an interrupted run left after all, and begin with an empty directory."""
        with target_errors(self._target):
            self.discard()
            self._make()

    def _acquire(self) -> int:
        while True:
            lock = os.open(self._lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(lock)
                raise self._busy() from None
            # Its last owner may have removed the name between our open and our lock: then the lock guards nothing.
            with contextlib.suppress(FileNotFoundError):
                if os.stat(self._lock_path).st_ino == os.fstat(lock).st_ino:
                    return lock
            os.close(lock)

    @property
    def visible(self) -> str:
        """What becomes DST: the staging directory, or the one file in it."""
        return self.path if self._directory else self.locate("")

    def locate(self, path: str) -> str:
        """Where the target file ``path`` grows; "" is the one file of a target that is a file, under DST's own name."""
        return os.path.join(self.path, path or os.path.basename(self._target))

    def require_space(self, nbytes: int, *, files: int = 0) -> None:
        """Raises TargetUnwritableError when the file system has less than ``nbytes``, or no ``files`` new names, free.

        What an interrupted run has staged already counts as free.
        """
        with target_errors(self._target):
            system = os.statvfs(self.path)
            free = system.f_bavail * system.f_frsize + _allocated(self.path)
        if free < nbytes:
            raise TargetUnwritableError(
                f"not enough free space for {self._target}",
                file=self._target,
                expected=f"{nbytes} bytes",
                found=f"{free} bytes free",
                next_step="make room, or choose a DST on another file system",
            )
        if system.f_files and system.f_favail < files:  # some file systems count none
            raise TargetUnwritableError(
                f"not enough free inodes for {self._target}",
                file=self._target,
                expected=f"{files} files",
                found=f"{system.f_favail} free inodes",
                next_step="remove some files, or choose a DST on another file system",
            )

    def require_files(self, paths: Iterable[str]) -> None:
        """Raises TargetUnwritableError when a target file that was written is not there any more."""
        for path in map(self.locate, paths):
            if not os.path.isfile(path):
                raise TargetUnwritableError(
                    f"{path} vanished while the output was written",
                    file=path,
                    why="another program cleans up here, or the file system was taken away",
                    next_step="run the command again, or choose another DST",
                )

    def keep_only(self, paths: Iterable[str]) -> None:
        """Remove every staged file but the target files ``paths``: an earlier run may have had others to write here.

        Links too, hard ones as well: after a kill right behind an exchange it is the older DST that lies here, and a
        link in it leads out.
        """
        kept = set(map(self.locate, paths))
        with target_errors(self._target):
            for folder, folders, names in os.walk(self.path):
                links = [os.path.join(folder, name) for name in folders if os.path.islink(os.path.join(folder, name))]
                for path in (*links, *(os.path.join(folder, name) for name in names)):
                    if path not in kept or os.path.islink(path) or os.lstat(path).st_nlink > 1:
                        os.unlink(path)

    def commit(self) -> None:
        """Make the output durable and visible under DST's name. The files in it must be synced already.

        Raises TargetExistsError when something came to be at DST meanwhile and ``overwrite`` was not given.
        """
        with target_errors(self._target):
            for folder, _, _ in os.walk(self.path):
                sync_directory(folder)
            self._refuse_to_replace()
            # A file over a file needs no detour: there, rename replaces at once.
            detour = os.path.lexists(self._target) and (self._directory or os.path.isdir(self._target))
            if not detour or not exchange(self.visible, self._target):
                if detour:
                    os.rename(self._target, self._aside)
                os.rename(self.visible, self._target)
            sync_directory(os.path.dirname(self._target))
            self.committed = True
            if os.path.lexists(self._aside):
                _remove(self._aside)
            self.discard()

    def _refuse_to_replace(self) -> None:
        if os.path.lexists(self._target) and not self._overwrite:
            raise TargetExistsError(
                f"{self._target} exists",
                file=self._target,
                why="another program made it meanwhile, or an interrupted run had moved it aside and it is back now",
                next_step="give another DST, or add --overwrite to replace it",
            )

    def discard(self) -> None:
        """Remove what was staged, if it is still there: the journals first."""
        for journal in journal_paths(self.root):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(journal)
        with contextlib.suppress(FileNotFoundError):
            _remove(self.root)

    def close(self) -> None:
        """Release the lock, and remove the directories that were made for an output that never came."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._lock_path)
        os.close(self._lock)
        for directory in self._made:
            with contextlib.suppress(OSError):  # not empty: the output is in it
                os.rmdir(directory)


def clear_leftover(target: str) -> None:
    """Remove what a run left that ended between DST's appearance and its own."""
    parent, name = os.path.split(os.path.realpath(target))
    if any(os.path.lexists(os.path.join(parent, _hidden_name(name, suffix))) for suffix in ("staging", "lock", "old")):
        staging = Staging(target, directory=True, overwrite=True)
        staging.discard()
        staging.close()


def free_bytes(target: str) -> int:
    """What is free where ``target`` would be written, with what an interrupted run has staged there."""
    parent, name = os.path.split(os.path.realpath(target))
    staged = os.path.join(parent, _hidden_name(name, "staging"))
    while not os.path.lexists(parent):
        parent = os.path.dirname(parent)
    with target_errors(target):
        system = os.statvfs(parent)
    return system.f_bavail * system.f_frsize + _allocated(staged)


def _missing_directories(path: str) -> list[str]:
    """``path`` and the directories above it that do not exist, the deepest first."""
    missing = []
    while not os.path.lexists(path):
        missing.append(path)
        path = os.path.dirname(path)
    return missing


def _allocated(directory: str) -> int:
    """Bytes of disk that the files below ``directory`` occupy."""
    found = 0
    for folder, _, names in os.walk(directory):
        for name in names:
            found += os.lstat(os.path.join(folder, name)).st_blocks * 512
    return found


def _remove(path: str) -> None:
    if os.path.isdir(path) and not os.path.islink(path):
        shutil.rmtree(path)
    else:
        os.unlink(path)


_AT_FDCWD = -100
_EXCHANGE = 2  # RENAME_EXCHANGE of linux/fs.h
# Errors that mean "not possible here": old kernels, NFS and some network file systems, sandboxes that refuse unknown
# calls. Where the permission is missing, the plain renames that are tried next lack it as well.
_LACKING = frozenset({errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.EPERM})


def exchange(one: str, other: str) -> bool:
    """Whether ``one`` and ``other``, which both exist, have changed places: then there was no moment without either.

    False, with nothing done, where that is not possible. Raises OSError for what would stop any rename.
    """
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        return False
    if rename(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), ctypes.c_uint(_EXCHANGE)) == 0:
        return True
    number = ctypes.get_errno()
    if number in _LACKING:
        return False
    raise OSError(number, os.strerror(number), one)
