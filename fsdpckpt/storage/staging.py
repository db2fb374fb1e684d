"""Stages the output in a directory beside DST, and makes it visible with one rename.

1. ``Staging`` locks DST's name and creates ``.<name>.fsdpckpt-staging`` beside it, with ``output`` and maybe a
   ``journal`` in it.
2. The caller writes and syncs the files in ``output``.
3. ``commit`` syncs the directories, renames ``output`` (or its only file) to DST, syncs the parent, and removes the
   rest.

Until the rename DST is untouched; after it DST is complete. An existing DST that is to be replaced swaps names with
the new one in one step, then it is removed. Where the file system cannot do that, it is first renamed aside; a run that
is killed between the two renames leaves ``.<name>.fsdpckpt-old``, which the next run moves back.

A journal records which bytes of ``output`` are on the disk. Removing a staging directory starts with its journals, so
that none ever describes files that are gone. When several processes write to ``output``, each has its own journal and
holds a lock in the directory while it writes (``lock_as_writer``): no other run starts before all of them ended.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import hashlib
import os
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from fsdpckpt.errors import TargetExistsError, TargetUnwritableError
from fsdpckpt.storage.local import sync_directory, target_errors
from fsdpckpt.storage.target_checks import (
    NAME_LIMIT,
    Contents,
    added_since,
    contents_of,
    existing_and_missing,
    files_below,
    is_empty_directory,
    space_error,
)

_OUTPUT, _JOURNAL, _WRITER = "output", "journal", "writer"
_MAX_NAMES = 10  # files that are named in an error


def _hidden_name(name: str, suffix: str) -> str:
    """A name for a file beside DST, whose own name is ``name``; contains a hash of it if it is too long."""
    hidden = f".{name}.fsdpckpt-{suffix}"
    if len(os.fsencode(hidden)) <= NAME_LIMIT:
        return hidden
    return f".{hashlib.sha256(os.fsencode(name)).hexdigest()[:32]}.fsdpckpt-{suffix}"


def staging_root(target: str) -> str:
    """The path of the staging directory of ``target``, whether it exists or not."""
    parent, name = os.path.split(os.path.realpath(target))
    return os.path.join(parent, _hidden_name(name, "staging"))


def journal_path(root: str, writer: int | None = None) -> str:
    """The journal in the staging directory ``root`` of a single process, or of number ``writer`` of several."""
    return os.path.join(root, _JOURNAL if writer is None else f"{_JOURNAL}-{writer}")


def journal_paths(root: str) -> list[str]:
    """All journals in the staging directory ``root``; empty if it does not exist."""
    return [os.path.join(root, name) for name in _names(root, _JOURNAL)]


def lock_path(path: str, flags: int, *, wait: bool = False, shared: bool = False) -> int:
    """Open ``path`` with ``flags``, and lock it until the returned descriptor is closed.

    ``shared``: others may share the lock. Raises BlockingIOError if another process holds the lock, unless this process
    is to ``wait`` for it.
    """
    while True:
        lock = os.open(path, flags | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(lock, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | (0 if wait else fcntl.LOCK_NB))
            # The previous owner may have removed it between our open and our lock: then the lock guards nothing.
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.lstat(path), os.fstat(lock)):
                    return lock
        except BaseException:
            os.close(lock)
            raise
        os.close(lock)


def lock_as_writer(root: str, writer: int) -> int:
    """Lock ``root`` as number ``writer`` of several, until the returned descriptor is closed."""
    path = os.path.join(root, f"{_WRITER}-{writer}")
    with target_errors(path):
        return lock_path(path, os.O_RDWR | os.O_CREAT, wait=True)


def _has_writers(root: str) -> bool:
    """Whether a process that locked the staging directory ``root`` as a writer is still running."""
    return not all(_is_free(os.path.join(root, name)) for name in _names(root, _WRITER))


def _is_free(path: str) -> bool:
    try:
        os.close(lock_path(path, os.O_RDWR, shared=True))  # all workers of a run look at once
    except FileNotFoundError:
        return True
    except BlockingIOError:
        return False
    return True


def _names(root: str, kind: str) -> list[str]:
    try:
        return sorted(name for name in os.listdir(root) if name == kind or name.startswith(f"{kind}-"))
    except (FileNotFoundError, NotADirectoryError):
        return []


@dataclass(frozen=True, slots=True)
class InterruptedRun:
    """What an interrupted run left for a DST, before another run changes it.

    ``root``: its staging directory, which may not exist (``exists``). ``resumed``: the next run keeps it, which needs
    ``resume`` and a journal; else it is removed, ``removed`` bytes.
    """

    root: str
    exists: bool
    resumed: bool
    removed: int

    @classmethod
    def of(cls, target: str, *, resume: bool) -> InterruptedRun:
        root = staging_root(target)
        resumed = resume and bool(journal_paths(root)) and os.path.isdir(os.path.join(root, _OUTPUT))
        return cls(root, os.path.lexists(root), resumed, 0 if resumed else _allocated(root))


class Staging:
    """The staging directory of one DST, locked while it is in use.

    ``root``: the directory itself. ``path``: the directory in it to write to. ``journal``: the path of this process's
    journal (``journal_paths(root)``: all of them). ``interrupted``: what an interrupted run had left there.
    ``replaces``: what ``commit`` may delete at DST; None where DST has to be new, or an empty directory.
    ``committed``: DST is complete.
    """

    def __init__(self, target: str, *, directory: bool, replaces: Contents | None = None, resume: bool = False) -> None:
        self._target = os.path.realpath(target)
        self._directory = directory
        self.replaces = replaces
        parent, name = os.path.split(self._target)
        self.root = staging_root(target)
        self.path = os.path.join(self.root, _OUTPUT)
        self.journal = journal_path(self.root)
        self._aside = os.path.join(parent, _hidden_name(name, "old"))
        self._lock_path = os.path.join(parent, _hidden_name(name, "lock"))
        self.committed = False
        _, self._created = existing_and_missing(parent)
        with target_errors(self._target):
            try:
                os.makedirs(parent, exist_ok=True)
                self._lock = self._acquire()
            except BaseException:
                self._remove_created()
                raise
        try:
            self._prepare(resume=resume)
        except BaseException:
            self.close()
            raise

    def _prepare(self, *, resume: bool) -> None:
        """Remove what an interrupted run left, unless it is resumed, and move back a DST that it moved aside."""
        with target_errors(self._target):
            if os.path.lexists(self._aside):
                self._restore_backup()
            self._refuse_writers()
            self.interrupted = InterruptedRun.of(self._target, resume=resume)
            if self.interrupted.exists and not self.interrupted.resumed:
                self.discard()
            self._refuse_to_replace()
            if not self.interrupted.resumed:
                self._make()

    def _restore_backup(self) -> None:
        """Remove the older DST if the new one is in its place, else move it back."""
        if not os.path.lexists(self._target):
            os.rename(self._aside, self._target)
        elif not os.path.lexists(self.visible):
            _remove(self._aside)
        else:
            raise TargetExistsError(
                f"another program wrote {self._target} while an earlier run was replacing it",
                details=[f"what was there before is in {self._aside}"],
                file=self._target,
                next_step=f"move {self._target} away",
                run_again=True,
            )

    def _refuse_writers(self) -> None:
        """Workers outlive a killed leader by a few seconds, in which they still write."""
        if _has_writers(self.root):
            raise self._busy_error()

    def _busy_error(self) -> TargetExistsError:
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
        """Discard what an interrupted run left, and start with an empty directory."""
        with target_errors(self._target):
            self.discard()
            self._make()

    def _acquire(self) -> int:
        try:
            return lock_path(self._lock_path, os.O_RDWR | os.O_CREAT)
        except BlockingIOError:
            raise self._busy_error() from None

    @property
    def visible(self) -> str:
        """The path that becomes DST: the output directory, or the only file in it."""
        return self.path if self._directory else self.locate("")

    def locate(self, path: str) -> str:
        """The staged path of the target file ``path``; "" for a target that is one file."""
        return os.path.join(self.path, path or os.path.basename(self._target))

    def require_space(self, nbytes: int, *, files: int = 0) -> None:
        """Raises TargetUnwritableError if fewer than ``nbytes`` bytes or ``files`` inodes are free.

        What an interrupted run has staged already counts as free.
        """
        with target_errors(self._target):
            system = os.statvfs(self.path)
        free = _free_bytes(system, self.path)
        if free is not None and free < nbytes:
            raise space_error(self._target, nbytes, free)
        if system.f_files and system.f_favail < files:  # some file systems do not count them
            raise TargetUnwritableError(
                f"not enough free inodes for {self._target}",
                file=self._target,
                expected=f"{files} files",
                found=f"{system.f_favail} free inodes",
                next_step="remove some files, or choose a DST on another file system",
            )

    def require_files(self, paths: Iterable[str]) -> None:
        """Raises TargetUnwritableError if a target file that was written no longer exists."""
        for path in map(self.locate, paths):
            if not os.path.isfile(path):
                raise TargetUnwritableError(
                    f"{path} vanished while the output was written",
                    file=path,
                    why="another program cleans up here, or the file system was unmounted",
                    next_step="run the command again, or choose another DST",
                )

    def keep_only(self, paths: Iterable[str]) -> None:
        """Remove every staged file but the target files ``paths``: an earlier run may have staged others.

        Symbolic and hard links, too: after a kill right after the names were swapped, the older DST is here, and its
        links lead out of it.
        """
        kept = set(map(self.locate, paths))
        with target_errors(self._target):
            for path in [os.path.join(self.path, name) for name in files_below(self.path)]:
                if path not in kept or os.path.islink(path) or os.lstat(path).st_nlink > 1:
                    os.unlink(path)

    def commit(self) -> None:
        """Make the output durable and visible under DST's name. The files in it must be synced already.

        Raises TargetExistsError, with DST as it was, when something came there that ``replaces`` does not have.
        """
        with target_errors(self._target):
            for folder, _, _ in os.walk(self.path):
                sync_directory(folder)
            self._refuse_to_replace()
            if not os.path.lexists(self._target) or self.replaces is None:
                self._rename_into_place()
            elif swap_names(self.visible, self._target):
                self._check_replaced(self.visible, lambda: swap_names(self.visible, self._target))
            elif not self._directory and os.path.isfile(self._target):  # one rename replaces it: no detour is needed
                self._check_replaced(self._target, lambda: None)
                os.rename(self.visible, self._target)
            else:
                os.rename(self._target, self._aside)
                self._check_replaced(self._aside, lambda: os.rename(self._aside, self._target))
                os.rename(self.visible, self._target)
            sync_directory(os.path.dirname(self._target))
            self.committed = True
            if os.path.lexists(self._aside):
                _remove(self._aside)
            self.discard()

    def _rename_into_place(self) -> None:
        if is_empty_directory(self._target):
            os.rmdir(self._target)
        try:
            if not _rename(self.visible, self._target, _NOREPLACE):
                self._refuse_to_replace()
                os.rename(self.visible, self._target)
        except FileExistsError:
            raise self._exists_error() from None

    def _check_replaced(self, path: str, undo: Callable[[], object]) -> None:
        """Nobody reaches ``path``, the older DST, by its name any more: what is there now is what is deleted."""
        try:
            added = added_since(self.replaces or {}, contents_of(path))
        except OSError:
            undo()
            raise
        if added:
            undo()
            raise TargetExistsError(
                f"{self._target} changed while it was being replaced",
                details=[name or self._target for name in added[:_MAX_NAMES]],
                file=self._target,
                why="another program writes there: what it wrote would be deleted",
                next_step="give another DST, or end that program and run the command again",
            )

    def _refuse_to_replace(self) -> None:
        if os.path.lexists(self._target) and self.replaces is None and not is_empty_directory(self._target):
            raise self._exists_error()

    def _exists_error(self) -> TargetExistsError:
        return TargetExistsError(
            f"{self._target} exists",
            file=self._target,
            why="another program created it meanwhile, or it had been moved aside by an interrupted run",
            next_step="give another DST, or add --overwrite to replace it",
        )

    def discard(self) -> None:
        """Remove what was staged, the journals first."""
        for journal in journal_paths(self.root):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(journal)
        with contextlib.suppress(FileNotFoundError):
            _remove(self.root)

    def close(self) -> None:
        """Release the lock, and remove directories that were created for an output that was never written."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._lock_path)
        os.close(self._lock)
        self._remove_created()

    def _remove_created(self) -> None:
        """Remove the directories that were created for DST and are still empty."""
        for directory in self._created:
            with contextlib.suppress(OSError):  # not empty: the output is in it
                os.rmdir(directory)


def clear_leftover(target: str) -> None:
    """Remove what a run left that was killed after DST became visible."""
    parent, name = os.path.split(os.path.realpath(target))
    if any(os.path.lexists(os.path.join(parent, _hidden_name(name, suffix))) for suffix in ("staging", "lock", "old")):
        staging = Staging(target, directory=os.path.isdir(target), replaces={})
        staging.discard()
        staging.close()


def was_interrupted(target: str) -> bool:
    """Whether a run that wrote ``target`` left something, maybe after DST became visible, and none is going on."""
    parent, name = os.path.split(os.path.realpath(target))
    lock = os.path.join(parent, _hidden_name(name, "lock"))
    return (os.path.lexists(staging_root(target)) or os.path.lexists(lock)) and _is_free(lock)


def free_bytes(target: str) -> int | None:
    """Free bytes where ``target`` would be written, including what an interrupted run has staged there; None if the
    file system does not count them.
    """
    with target_errors(target):
        system = os.statvfs(existing_and_missing(os.path.dirname(os.path.realpath(target)))[0])
    return _free_bytes(system, staging_root(target))


def _free_bytes(system: os.statvfs_result, staged: str) -> int | None:
    """Free bytes on ``system``, including those in the directory ``staged``; None if it does not count them, as FUSE
    without statfs.
    """
    return system.f_bavail * system.f_frsize + _allocated(staged) if system.f_blocks else None


def _allocated(directory: str) -> int:
    """Bytes of disk that are free once the files below ``directory`` are gone: not those that have another name."""
    paths = (os.path.join(folder, name) for folder, _, names in os.walk(directory) for name in names)
    return sum(status.st_blocks * 512 for status in map(os.lstat, paths) if status.st_nlink == 1)


def _remove(path: str) -> None:
    if os.path.isdir(path) and not os.path.islink(path):
        shutil.rmtree(path)
    else:
        os.unlink(path)


_AT_FDCWD = -100
_NOREPLACE, _EXCHANGE = 1, 2  # RENAME_NOREPLACE and RENAME_EXCHANGE of linux/fs.h
# Errors that mean "not possible here": old kernels, NFS and some network file systems, sandboxes that refuse unknown
# calls. Where the permission is missing, the plain renames that are tried next lack it as well.
_UNSUPPORTED = frozenset({errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.EPERM})


def swap_names(source: str, target: str) -> bool:
    """Swap the names of ``source`` and ``target``, which both exist, in one atomic step.

    False, with nothing done, where the system cannot do that. Raises OSError for what would stop any rename.
    """
    return _rename(source, target, _EXCHANGE)


def _rename(source: str, target: str, flags: int) -> bool:
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        return False
    if rename(_AT_FDCWD, os.fsencode(source), _AT_FDCWD, os.fsencode(target), ctypes.c_uint(flags)) == 0:
        return True
    number = ctypes.get_errno()
    if number in _UNSUPPORTED:
        return False
    raise OSError(number, os.strerror(number), source)
