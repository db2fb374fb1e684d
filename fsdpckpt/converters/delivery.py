"""A conversion whose DST is in an object store: converted on a local disk, checked there, then uploaded.

Staged and not streamed, because the check before anything is visible, ``--verify full`` and ``--resume`` need the whole
output at hand, and a zip file's checksums stand before the data that they are of. It takes DST's size of local disk.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Protocol

from fsdpckpt.converters.options import ConvertOptions, VerifyLevel
from fsdpckpt.converters.report import Report
from fsdpckpt.errors import FsdpckptError, TargetExistsError, TargetUnwritableError
from fsdpckpt.ir.checkpoint import Note
from fsdpckpt.progress import Progress
from fsdpckpt.storage.identity import remote_identity
from fsdpckpt.storage.remote_store import RemoteStore
from fsdpckpt.storage.remote_target import RemoteTarget, open_target
from fsdpckpt.storage.targets import target_errors

__all__ = ["deliver"]

BLOCK = 4 << 20  # bytes compared at once


class Convert(Protocol):
    """The conversion to a local DST."""

    def __call__(self, source: str, target: str, options: ConvertOptions, progress: Progress) -> Report: ...


def deliver(source: str, target: str, options: ConvertOptions, progress: Progress, *, convert: Convert) -> Report:
    """Convert ``source`` to the URL ``target`` by way of ``options.staging``, or the system's directory for such files.

    Raises what ``convert`` and ``open_target`` raise. When it fails after the conversion, the local output stays for
    ``--resume``, and readers refuse what was uploaded so far.
    """
    begun = time.monotonic()
    remote = open_target(target, source, overwrite=options.overwrite, resume=options.resume)
    stage = _Stage.of(remote.url, options)
    local = replace(options, staging=None, overwrite=not options.resume)
    if options.dry_run:
        return _report(convert(source, stage.path, local, progress), target, stage, begun)
    with stage.locked():
        if not options.resume:
            stage.forget()
        try:
            report = convert(source, stage.path, local, progress)
        except TargetUnwritableError as error:
            error.next_step = "make room there, or name a local directory that has it: --staging DIR"
            raise
        try:
            _upload(stage, remote, options, progress)
        except BaseException as error:
            _say(error, f"the converted checkpoint is kept in {stage.path}")
            raise
        stage.remove()
    return _report(report, target, stage, begun)


@dataclass(frozen=True, slots=True)
class _Stage:
    """``root``: a directory for one DST alone, the same in every run. ``path``: where the output is put together."""

    root: str
    path: str

    @classmethod
    def of(cls, url: str, options: ConvertOptions) -> _Stage:
        above = options.staging or tempfile.gettempdir()
        root = os.path.join(above, f"fsdpckpt-{os.getuid()}-{hashlib.sha256(url.encode()).hexdigest()[:16]}")
        return cls(root, os.path.join(root, url.rpartition("/")[2]))

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """One run at a time on this machine. Raises TargetExistsError."""
        with target_errors(self.root):
            os.makedirs(self.root, mode=0o700, exist_ok=True)
            if os.stat(self.root).st_uid != os.getuid():  # anybody may make directories in /tmp
                raise TargetUnwritableError(
                    f"{self.root} belongs to somebody else", file=self.root, next_step="add --staging DIR"
                )
            lock = os.open(self.root, os.O_RDONLY | os.O_CLOEXEC)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield
        except BlockingIOError:
            raise TargetExistsError(
                f"another fsdpckpt is writing from {self.root}", file=self.root, next_step="wait for it to end"
            ) from None
        finally:
            os.close(lock)
            with contextlib.suppress(OSError):  # not empty: it is kept for --resume
                os.rmdir(self.root)

    @property
    def _record(self) -> str:
        return os.path.join(self.root, "uploaded.jsonl")

    def arrived(self, name: str, info: Mapping[str, object]) -> None:
        """Note that the store has the file ``name``, in the state that ``info`` tells."""
        with open(self._record, "a", encoding="utf-8") as file:
            file.write(json.dumps([name, remote_identity(name, info).tag]) + "\n")

    def arrivals(self) -> dict[str, str]:
        """What ``arrived`` was told by earlier runs: tag by name."""
        found: dict[str, str] = {}
        with contextlib.suppress(FileNotFoundError), open(self._record, encoding="utf-8") as file:
            for line in file:
                with contextlib.suppress(ValueError):  # the last one, cut short by a kill
                    name, tag = json.loads(line)
                    found[name] = tag
        return found

    def forget(self) -> None:
        """What was uploaded before is not to be gone on with."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._record)

    def files(self) -> dict[str, str]:
        """The output: relative name to path; "" is the name of a DST that is one file."""
        if os.path.isfile(self.path):
            return {"": self.path}
        found = {}
        for folder, _, names in os.walk(self.path):
            for name in names:
                path = os.path.join(folder, name)
                found[os.path.relpath(path, self.path)] = path
        return dict(sorted(found.items()))

    def remove(self) -> None:
        shutil.rmtree(self.root, ignore_errors=True)


def _upload(stage: _Stage, remote: RemoteTarget, options: ConvertOptions, progress: Progress) -> None:
    files = stage.files()
    before = stage.arrivals() if options.resume else {}

    def there(name: str, info: Mapping[str, object]) -> bool:
        tag = remote_identity(name, info).tag
        return bool(tag) and before.get(name) == tag

    progress.begin("upload", sum(os.path.getsize(path) for path in files.values()))
    remote.upload(
        files,
        memory=options.max_memory,
        sent=progress.advance,
        there=there,
        arrived=stage.arrived,
        check=_compare if options.verify is VerifyLevel.FULL else None,
    )
    progress.end()


def _compare(url: str, path: str) -> None:
    """Raises TargetUnwritableError when the object at ``url`` is not the file at ``path``, byte for byte."""
    there = RemoteStore().open(url)
    with open(path, "rb") as file:
        offset = 0
        while data := file.read(BLOCK):
            if there.read(offset, len(data)) != data:
                raise TargetUnwritableError(
                    f"{url} is not what was uploaded",
                    file=url,
                    found=f"other bytes within {len(data)} from offset {offset}",
                    why="another program writes there, or the store lost something",
                    next_step="run the command again",
                )
            offset += len(data)


def _say(error: BaseException, kept: str) -> None:
    if isinstance(error, FsdpckptError):
        error.details = (*error.details, kept)
        error.next_step = f"{error.next_step}; then the same command with --resume uploads what is missing"
    else:
        error.add_note(kept)


def _report(report: Report, target: str, stage: _Stage, begun: float) -> Report:
    note = Note("staged", f"converted in {os.path.dirname(stage.root)}, then uploaded")
    seconds = time.monotonic() - begun
    return replace(
        report, target=target, staged_in=os.path.dirname(stage.root), notes=(*report.notes, note), seconds=seconds
    )
