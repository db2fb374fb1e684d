"""Keeps what is to be uploaded to one DST in a local directory, with notes of what the store has of it already."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import tempfile
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from fsdpckpt.errors import (
    TargetExistsError,
    TargetUnwritableError,
)
from fsdpckpt.storage import remote_identity
from fsdpckpt.storage.local import target_errors

_UPLOAD, _SENT = "upload", "sent-"


@dataclass(frozen=True, slots=True)
class UploadDirectory:
    """A local directory to upload from, for one DST alone and the same in every run. ``path``: the output in it.

    It holds the converted output, and notes of what the store has of it already. A note counts for one *upload* only,
    which a run with ``--no-resume`` begins anew, and one that finds no output: what an earlier one has sent may be of
    another checkpoint.
    """

    root: str
    path: str

    @classmethod
    def of(cls, url: str, directory: str | None) -> UploadDirectory:
        """That of ``url`` in ``directory``, by default the system's for temporary files."""
        above = directory or tempfile.gettempdir()
        root = os.path.join(above, f"fsdpckpt-{os.getuid()}-{hashlib.sha256(url.encode()).hexdigest()[:16]}")
        return cls(root, os.path.join(root, url.rpartition("/")[2]))

    @contextlib.contextmanager
    def locked(self, *, resume: bool) -> Iterator[str]:
        """One run at a time on this machine. The value says which upload it is; anew unless to ``resume``.

        Raises TargetExistsError, TargetUnwritableError.
        """
        with target_errors(self.root):
            os.makedirs(self.root, mode=0o700, exist_ok=True)
            if os.stat(self.root).st_uid != os.getuid():  # anybody may make directories in /tmp
                raise TargetUnwritableError(
                    f"{self.root} belongs to another user", file=self.root, next_step="add --staging DIR"
                )
            lock = os.open(self.root, os.O_RDONLY | os.O_CLOEXEC)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            raise TargetExistsError(
                f"another fsdpckpt is writing from {self.root}", file=self.root, next_step="wait for it to end"
            ) from None
        try:
            with target_errors(self.root):
                if not resume or not os.path.lexists(self.path):
                    self._clear()
                upload = self.upload() or self._begin()
            yield upload
        finally:
            with contextlib.suppress(OSError):
                if os.listdir(self.root) == [_UPLOAD]:  # else it is kept for the next run
                    self.remove()
            os.close(lock)

    def upload(self) -> str:
        """Which upload is under way; empty when none is, or this process does not see it."""
        try:
            with open(os.path.join(self.root, _UPLOAD), encoding="utf-8") as file:
                return file.read()
        except OSError:
            return ""

    def _begin(self) -> str:
        upload = uuid.uuid4().hex
        with open(os.path.join(self.root, _UPLOAD), "w", encoding="utf-8") as file:
            file.write(upload)
        return upload

    def note_sent(self, upload: str, rank: int, name: str, info: Mapping[str, object]) -> None:
        """Note that the store has the file ``name``, with the ``info`` it returned. ``rank``: who sent it."""
        line = json.dumps([upload, name, remote_identity(name, info).tag])
        with open(os.path.join(self.root, f"{_SENT}{rank}"), "a", encoding="utf-8") as file:
            file.write(line + "\n")

    def sent(self, upload: str) -> dict[str, str]:
        """What earlier runs of ``upload`` noted: tag by name."""
        tags: dict[str, str] = {}
        for path in self._notes():
            with open(path, encoding="utf-8") as file:
                for line in file:
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
        """The path of the file ``name``; "" is the name of a DST that is one file."""
        return os.path.join(self.path, name) if name else self.path

    def _clear(self) -> None:
        """Forget what earlier runs have converted and sent; what a conversion has staged it clears itself."""
        for path in (os.path.join(self.root, _UPLOAD), *self._notes()):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
        if os.path.isdir(self.path):
            shutil.rmtree(self.path)
        elif os.path.lexists(self.path):
            os.unlink(self.path)

    def remove(self) -> None:
        """All of it; first what makes notes count."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(os.path.join(self.root, _UPLOAD))
        shutil.rmtree(self.root, ignore_errors=True)


def is_sent(earlier: Mapping[str, str], name: str, info: Mapping[str, object]) -> bool:
    """Whether what the store says of ``name`` (``info``) is what one of the ``earlier`` tags noted."""
    tag = remote_identity(name, info).tag
    return bool(tag) and earlier.get(name) == tag
