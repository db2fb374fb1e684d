"""The local directory that an upload to an object store starts from, and notes of what is already there."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shlex
import shutil
import stat
import tempfile
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from fsdpckpt import flags
from fsdpckpt.converters.output.places import read_text
from fsdpckpt.credentials import shown_name
from fsdpckpt.errors import TargetExistsError, TargetUnwritableError
from fsdpckpt.storage import remote_identity
from fsdpckpt.storage.hidden import (
    Lock,
    has_writers,
    journal_paths,
    lock_path,
    open_own_file,
    read_own_file,
    write_own_file,
)
from fsdpckpt.storage.local_target import target_errors
from fsdpckpt.storage.target_checks import existing_and_missing

_UPLOAD, _SENT, _OUTPUT = "upload", "sent-", "output"


@dataclass(frozen=True, slots=True)
class Spool:
    """A local directory to upload from, for one DST and the same in every run. ``path``: the output in it, apart from
    the notes: it is called what DST is called.

    It holds the converted output and notes of what the store already has. A note counts for one *upload* only. A run
    with ``--no-resume``, or one that finds no output, begins a new upload: what an earlier one sent may belong to
    another checkpoint.
    """

    root: str
    path: str

    @classmethod
    def of(cls, url: str, directory: str | None) -> Spool:
        """The directory for ``url`` in ``directory``, by default the system's directory for temporary files."""
        above = directory or tempfile.gettempdir()
        root = os.path.join(above, f"fsdpckpt-{os.getuid()}-{hashlib.sha256(url.encode()).hexdigest()[:16]}")
        return cls(root, os.path.join(root, _OUTPUT, shown_name(url)))

    def journals(self) -> list[str]:
        """The journals of an upload that is not staged, which list the objects that are complete."""
        return journal_paths(self.root)

    @contextlib.contextmanager
    def locked(self, *, resume: bool) -> Iterator[str]:
        """Lock the directory against other runs on this machine. The value names the upload; a new one unless
        ``resume``.

        Raises TargetExistsError, TargetUnwritableError.
        """
        _, created = existing_and_missing(os.path.dirname(self.root))
        with target_errors(self.root):
            lock = self._lock()
        try:
            with target_errors(self.root):
                self._refuse_writers()
                if not resume or not (os.path.lexists(self.path) or self.journals()):
                    self._clear()
                upload = self.upload() or self._begin()
                os.makedirs(os.path.dirname(self.path), exist_ok=True)
            yield upload
        finally:
            with contextlib.suppress(OSError):  # not empty
                os.rmdir(os.path.dirname(self.path))
            with contextlib.suppress(OSError):
                if os.listdir(self.root) == [_UPLOAD]:  # else it is kept for the next run
                    self.remove()
            lock.close()
            for directory in created:
                with contextlib.suppress(OSError):  # not empty
                    os.rmdir(directory)

    def _lock(self) -> Lock:
        while True:
            os.makedirs(self.root, mode=0o700, exist_ok=True)
            status = os.lstat(self.root)
            if status.st_uid != os.getuid() or not stat.S_ISDIR(status.st_mode):  # anyone may make one in /tmp
                whose = "a symbolic link" if stat.S_ISLNK(status.st_mode) else "another user's"
                raise TargetUnwritableError(
                    f"{self.root} is {whose}, but fsdpckpt stages output only in a directory that you own",
                    file=self.root,
                    next_step=f"remove {shlex.quote(self.root)}, or add {flags.staging('DIR')}",
                )
            try:
                return lock_path(self.root, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            except BlockingIOError:
                raise self._busy_error() from None
            except FileNotFoundError:  # a run that ended has removed it
                continue

    def _refuse_writers(self) -> None:
        """Workers outlive a killed first one by a few seconds, in which they still send."""
        if has_writers(self.root):
            raise self._busy_error()

    def _busy_error(self) -> TargetExistsError:
        return TargetExistsError(
            f"another fsdpckpt is writing from {self.root}",
            file=self.root,
            next_step="wait for it to end",
            retryable=True,
        )

    def upload(self) -> str:
        """The name of the current upload; empty if there is none, or this process does not see it."""
        return read_text(os.path.join(self.root, _UPLOAD))

    def _begin(self) -> str:
        upload = uuid.uuid4().hex
        write_own_file(os.path.join(self.root, _UPLOAD), upload.encode())
        return upload

    def note_sent(self, upload: str, rank: int, name: str, info: Mapping[str, object]) -> None:
        """Note that ``rank`` sent the file ``name``, and the ``info`` that the store returned."""
        line = json.dumps([upload, name, remote_identity(name, info).tag])
        path = os.path.join(self.root, f"{_SENT}{rank}")
        with target_errors(path), os.fdopen(open_own_file(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT), "ab") as file:
            file.write(line.encode() + b"\n")

    def sent(self, upload: str) -> dict[str, str]:
        """What earlier runs of ``upload`` sent: the store's tag for each name."""
        tags: dict[str, str] = {}
        for path in self._notes():
            for line in read_own_file(path).splitlines():
                with contextlib.suppress(ValueError):  # the last one, cut short by a kill
                    noted, name, tag = json.loads(line)
                    if noted == upload:
                        tags[name] = tag
        return tags

    def _notes(self) -> list[str]:
        try:
            return [os.path.join(self.root, name) for name in os.listdir(self.root) if name.startswith(_SENT)]
        except FileNotFoundError:  # this machine had nothing to convert
            return []

    def locate(self, name: str) -> str:
        """The path of the file ``name``; "" if DST is one file."""
        return os.path.join(self.path, name) if name else self.path

    def _clear(self) -> None:
        """Delete what earlier runs converted and sent. A conversion clears what it has staged itself."""
        for path in (os.path.join(self.root, _UPLOAD), *self.journals(), *self._notes()):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
        if os.path.isdir(self.path):
            shutil.rmtree(self.path)
        elif os.path.lexists(self.path):
            os.unlink(self.path)

    def forget_sent(self) -> None:
        """Delete the journals: what they list is sent again."""
        for path in self.journals():
            with target_errors(path), contextlib.suppress(FileNotFoundError):
                os.unlink(path)

    def remove(self) -> None:
        """Delete the directory, beginning with the file that makes the notes valid. What cannot be removed stays."""
        with contextlib.suppress(OSError):
            os.unlink(os.path.join(self.root, _UPLOAD))
        shutil.rmtree(self.root, ignore_errors=True)


def is_sent(earlier: Mapping[str, str], name: str, info: Mapping[str, object]) -> bool:
    """Whether the store's ``info`` on ``name`` matches one of the ``earlier`` tags."""
    tag = remote_identity(name, info).tag
    return bool(tag) and earlier.get(name) == tag
