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
import os
import shutil
import stat
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from fsdpckpt import flags
from fsdpckpt.errors import FsdpckptError, TargetExistsError, TargetUnwritableError
from fsdpckpt.ir.checkpoint import Note, NoteKind
from fsdpckpt.storage.hidden import (
    OUTPUT,
    Lock,
    backup_path,
    has_writers,
    is_directory,
    is_free,
    journal_path,
    journal_paths,
    lock_file,
    lock_path,
    open_own_file,
    read_own_file,
    require_own_kind,
    staging_root,
    write_own_file,
)
from fsdpckpt.storage.local_target import sync_directory, target_errors
from fsdpckpt.storage.renameat2 import rename_if_absent, swap_names
from fsdpckpt.storage.target_checks import (
    Contents,
    added_since,
    contents_of,
    existing_and_missing,
    is_empty_directory,
    space_error,
)

_MAX_NAMES = 10  # files that are named in an error
_PUBLISHED = "published"  # in a staging directory: the inode of the output that replaces a DST that was moved aside


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
        with target_errors(root):
            exists = is_directory(root)
            output = is_directory(os.path.join(root, OUTPUT))
            for journal in journal_paths(root):
                os.close(open_own_file(journal, os.O_RDONLY))
        resumed = resume and output and bool(journal_paths(root))
        return cls(root, exists, resumed, 0 if resumed else _allocated(root))


class Staging:
    """The staging directory of one DST, locked while it is in use.

    ``root``: the directory itself. ``path``: the directory in it to write to. ``journal``: the path of this process's
    journal (``journal_paths(root)``: all of them). ``interrupted``: what an interrupted run had left there.
    ``replaces``: what ``commit`` may delete at DST; None where DST has to be new, or an empty directory.
    ``committed``: DST is complete. ``warnings``: what could not be done that DST does not need.
    """

    def __init__(self, target: str, *, directory: bool, replaces: Contents | None = None, resume: bool = False) -> None:
        self._target = os.path.realpath(target)
        self._directory = directory
        self.replaces = replaces
        parent = os.path.dirname(self._target)
        self.root = staging_root(target)
        self.path = os.path.join(self.root, OUTPUT)
        self.journal = journal_path(self.root)
        self._aside = backup_path(target)
        self._lock_path = lock_file(target)
        self.committed = False
        self.warnings: list[Note] = []
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
            _restore_backup(self._target)
            self._refuse_writers()
            self.interrupted = InterruptedRun.of(self._target, resume=resume)
            if self.interrupted.exists and not self.interrupted.resumed:
                self.discard()
            self._refuse_to_replace()
            if not self.interrupted.resumed:
                self._make()

    def _refuse_writers(self) -> None:
        """Workers outlive a killed leader by a few seconds, in which they still write."""
        if has_writers(self.root):
            raise self._busy_error()

    def _busy_error(self) -> TargetExistsError:
        return TargetExistsError(
            f"another fsdpckpt is writing {self._target}",
            file=self._target,
            next_step="wait for it to end, or give another DST",
            retryable=True,
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

    def _acquire(self) -> Lock:
        with target_errors(self._lock_path):  # a lock that another user's run left cannot be opened: which one is it
            try:
                lock = lock_path(self._lock_path, os.O_RDWR | os.O_CREAT)
            except BlockingIOError:
                raise self._busy_error() from None
        if not lock.effective:
            no_locks = f"the file system of {self._target} has no locks (flock)"
            self._warn("unlocked", f"{no_locks}: nothing keeps a second run from writing there at the same time")
        return lock

    @property
    def final_path(self) -> str:
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
        """Remove everything staged but the target files ``paths``: an earlier run may have staged others.

        Also whatever else has their names: links, pipes, directories. Of files those with a second name: after a kill
        right after the names were swapped, the older DST is here, and its links lead out of it.
        """
        kept = set(map(self.locate, paths))
        with target_errors(self._target):
            for folder, directories, files in os.walk(self.path, topdown=False):
                for path in [os.path.join(folder, name) for name in (*files, *directories)]:
                    status = os.lstat(path)
                    if stat.S_ISDIR(status.st_mode):
                        with contextlib.suppress(OSError):  # not empty: kept files are in it
                            os.rmdir(path)
                    elif path not in kept or not stat.S_ISREG(status.st_mode) or status.st_nlink > 1:
                        os.unlink(path)

    def commit(self) -> None:
        """Make the output durable and visible under DST's name. The files in it must be synced already.

        Raises TargetExistsError, with DST as it was, when something came there that ``replaces`` does not have. Once
        DST is complete nothing is raised: what then fails is in ``warnings``.
        """
        with target_errors(self._target):
            folders = [folder for folder, _, _ in os.walk(self.path)]
            durable = [sync_directory(folder) for folder in folders].count(False) == 0
            self._refuse_to_replace()
            if not os.path.lexists(self._target) or self.replaces is None:
                self._rename_into_place()
            elif swap_names(self.final_path, self._target):
                self._check_replaced(self.final_path, lambda: swap_names(self.final_path, self._target))
            elif not self._directory and os.path.isfile(self._target):  # one rename replaces it: no detour is needed
                self._check_replaced(self._target, lambda: None)
                os.rename(self.final_path, self._target)
            else:
                self._replace_in_two_steps()
        self.committed = True
        self._clean_up(durable=durable)

    def _replace_in_two_steps(self) -> None:
        """Move DST aside and the output to its place; after a kill in between the next run moves DST back."""
        number = os.lstat(self.final_path).st_ino
        write_own_file(os.path.join(self.root, _PUBLISHED), b"%d" % number)
        sync_directory(self.root)
        os.rename(self._target, self._aside)
        try:
            self._check_replaced(self._aside, lambda: None)
            os.rename(self.final_path, self._target)
        except BaseException:
            os.rename(self._aside, self._target)
            raise

    def _clean_up(self, *, durable: bool) -> None:
        """DST is complete: make its name durable, and remove the rest."""
        try:
            durable &= sync_directory(os.path.dirname(self._target))
        except FsdpckptError as error:
            where = " and ".join(filter(os.path.lexists, (self._aside, self.path)))
            kept = f"; what was at DST before is kept in {where}" if self.replaces and where else ""
            message = f"{self._target} is complete, but its name may not be on the disk yet ({error.what}){kept}"
            self._warn("not-synced", message)
            if kept:  # after a crash of the machine it may be all that is left
                return
        if not durable:
            what = f"the file system of {self._target} does not make file names durable on request"
            self._warn("not-synced", f"{what}: look whether DST is there if this machine crashes within a minute")
        try:
            if os.path.lexists(self._aside):
                _remove(self._aside)
            self.discard()
        except OSError as error:
            left = " and ".join(filter(os.path.lexists, (self._aside, self.root)))
            what = f"{self._target} is complete, but what the run no longer needs could not be removed"
            self._warn("left-behind", f"{what} ({error.strerror}): remove {left}")

    def _warn(self, kind: NoteKind, message: str) -> None:
        self.warnings.append(Note(kind, message, warning=True))

    def _rename_into_place(self) -> None:
        empty = is_empty_directory(self._target)
        if empty:
            os.rmdir(self._target)
        try:
            if not rename_if_absent(self.final_path, self._target):
                self._refuse_to_replace()
                os.rename(self.final_path, self._target)
        except OSError as error:
            if empty:
                with contextlib.suppress(OSError):
                    os.mkdir(self._target)
            if isinstance(error, FileExistsError):
                raise self._exists_error() from None
            raise

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
            f"{self._target} already exists",
            file=self._target,
            why="another program created it meanwhile, or it had been moved aside by an interrupted run",
            next_step=f"give another DST, or add {flags.overwrite} to replace it",
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
        try:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._lock_path)
        except OSError as error:  # nobody is kept out by a lock that nobody holds
            self._warn("left-behind", f"{self._lock_path} could not be removed ({error.strerror}): remove it")
        self._lock.close()
        self._remove_created()

    def _remove_created(self) -> None:
        """Remove the directories that were created for DST and are still empty."""
        for directory in self._created:
            with contextlib.suppress(OSError):  # not empty: the output is in it
                os.rmdir(directory)


def clear_leftover(target: str) -> list[Note]:
    """Remove what a run left that was killed after DST became visible. Returns the warnings."""
    if not any(map(os.path.lexists, (staging_root(target), lock_file(target), backup_path(target)))):
        return []
    staging = Staging(target, directory=os.path.isdir(target), replaces={})
    with target_errors(target):
        try:
            staging.discard()
        finally:
            staging.close()
    return staging.warnings


def restore_backup(target: str) -> bool:
    """Move an older DST back that a run had moved aside when it was killed; returns whether it did. Not while a run is
    going on.
    """
    aside, lock = backup_path(target), lock_file(target)
    if not os.path.lexists(aside):
        return False
    with target_errors(target):
        existed = os.path.lexists(lock)
        with contextlib.suppress(BlockingIOError), contextlib.closing(lock_path(lock, os.O_RDWR | os.O_CREAT)):
            try:
                return _restore_backup(os.path.realpath(target))
            finally:
                if not existed:
                    os.unlink(lock)
    return False


def _restore_backup(target: str) -> bool:
    """Remove the older DST if the new one is in its place, else move it back; returns whether it did that."""
    aside = backup_path(target)
    if not os.path.lexists(aside):
        return False
    require_own_kind(aside)
    if _is_published(target):
        _remove(aside)
        return False
    if is_empty_directory(target):  # as good as none
        os.rmdir(target)
    if os.path.lexists(target):
        raise TargetExistsError(
            f"another program wrote {target} while an earlier run was replacing it",
            details=[f"what was there before is in {aside}"],
            file=target,
            next_step=f"move {target} away",
            run_again=True,
        )
    os.rename(aside, target)
    return True


def _is_published(target: str) -> bool:
    """Whether DST is what an earlier run put in the place of what it had moved aside."""
    try:
        number = read_own_file(os.path.join(staging_root(target), _PUBLISHED))
        return number == b"%d" % os.lstat(target).st_ino
    except (FileNotFoundError, NotADirectoryError):
        return False


def was_interrupted(target: str) -> bool:
    """Whether a run that wrote ``target`` left something, maybe after DST became visible, and none is going on."""
    lock = lock_file(target)
    return (os.path.lexists(staging_root(target)) or os.path.lexists(lock)) and is_free(lock)


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
