"""A directory beside DST where the output grows, and the rename that makes it visible all at once.

Protocol: 1. ``Staging`` creates and locks ``.<name>.fsdpckpt-staging`` beside DST. 2. The caller writes and syncs the
files in it. 3. ``commit`` syncs the directories, renames the staging directory (or its one file) to DST, and syncs the
parent. Until the rename DST is untouched; after it DST is complete. An existing DST that is to be replaced is first
renamed aside, and removed only once the new one is in place.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil

from fsdpckpt.errors import TargetExistsError, TargetUnwritableError, UsageError
from fsdpckpt.storage.sources import is_url
from fsdpckpt.storage.targets import sync_directory, target_errors

__all__ = ["Staging", "check_target"]


def check_target(target: str, source: str, *, overwrite: bool) -> None:
    """Refuse a DST that exists, lies in SRC, or cannot be created. Nothing is written.

    Raises UsageError, TargetExistsError or TargetUnwritableError.
    """
    if is_url(target):
        raise TargetUnwritableError(
            f"{target} is a URL: this version writes to local paths only",
            file=target,
            next_step="give a local DST, then copy it to the store",
        )
    real_target, real_source = os.path.realpath(target), os.path.realpath(source)
    if not is_url(source) and (real_target == real_source or real_target.startswith(real_source + os.sep)):
        raise UsageError(
            f"{target} is the source or lies inside it, and the source is never written to",
            file=target,
            next_step="give a DST outside of SRC",
        )
    if real_source.startswith(real_target + os.sep) and overwrite:
        raise UsageError(f"replacing {target} would delete the source, which lies inside it", file=target)
    if os.path.lexists(target) and not overwrite:
        raise TargetExistsError(
            f"{target} exists",
            file=target,
            why="fsdpckpt never replaces anything unasked",
            next_step="give another DST, or --overwrite to replace it once the new one is complete",
        )
    parent = os.path.dirname(real_target)
    while not os.path.exists(parent):
        parent = os.path.dirname(parent)
    if not os.path.isdir(parent) or not os.access(parent, os.W_OK | os.X_OK):
        raise TargetUnwritableError(
            f"{target} cannot be created: no permission to write in {parent}",
            file=target,
            next_step="choose another DST",
        )


class Staging:
    """The staging directory of one DST, locked while it is in use.

    ``path``: the directory to write into. ``leftover``: True when an interrupted run had left one, which was removed.
    """

    def __init__(self, target: str, *, directory: bool) -> None:
        self._target = os.path.realpath(target)
        self._directory = directory
        parent, name = os.path.split(self._target)
        self.path = os.path.join(parent, f".{name}.fsdpckpt-staging")
        self._lock_path = os.path.join(parent, f".{name}.fsdpckpt-lock")
        with target_errors(self.path):
            os.makedirs(parent, exist_ok=True)
            self._lock = self._acquire()
        with target_errors(self.path):
            self.leftover = os.path.lexists(self.path)
            if self.leftover:
                shutil.rmtree(self.path)
            os.mkdir(self.path)

    def _acquire(self) -> int:
        while True:
            lock = os.open(self._lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(lock)
                raise TargetExistsError(
                    f"another fsdpckpt is writing {self._target}",
                    file=self._target,
                    next_step="wait for it to end, or give another DST",
                ) from None
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

    def require_space(self, nbytes: int) -> None:
        """Raises TargetUnwritableError when the file system has less than ``nbytes`` free."""
        free = shutil.disk_usage(self.path).free
        if free < nbytes:
            raise TargetUnwritableError(
                f"not enough free space for {self._target}",
                file=self._target,
                expected=f"{nbytes} bytes",
                found=f"{free} bytes free",
                next_step="make room, or choose a DST on another file system",
            )

    def commit(self) -> None:
        """Make the output durable and visible under DST's name. The files in it must be synced already."""
        with target_errors(self._target):
            for folder, _, _ in os.walk(self.path):
                sync_directory(folder)
            aside = f"{self.path}-replaced"
            replacing = os.path.lexists(self._target)
            if replacing:
                os.rename(self._target, aside)
            os.rename(self.visible, self._target)
            sync_directory(os.path.dirname(self._target))
            if replacing:
                _remove(aside)
            if not self._directory:
                os.rmdir(self.path)

    def discard(self) -> None:
        """Remove what was staged, if it is still there."""
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(self.path)

    def close(self) -> None:
        """Release the lock."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._lock_path)
        os.close(self._lock)


def _remove(path: str) -> None:
    if os.path.isdir(path) and not os.path.islink(path):
        shutil.rmtree(path)
    else:
        os.unlink(path)
