"""Keeps the journal while a plan runs: what it names is on the disk, so that a run that is killed can be resumed."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextlib import suppress

from fsdpckpt.execute.crc import Part
from fsdpckpt.execute.resume import Finished, RunIdentity, SourcePart, first_record, windows_record
from fsdpckpt.storage.journal import Journal
from fsdpckpt.storage.local import WritableFile, sync_directory, target_errors

__all__ = ["Recorder"]

SYNC_SECONDS = 2.0  # between two syncs: what a kill may cost; a run that is shorter costs no sync more than it must


class Recorder:
    """Collects the windows that are written; a thread of its own syncs their files and then names them in the journal.

    ``path``: of the journal. ``identity`` is asked for once, when the journal begins. ``finished``: what earlier runs
    have left, in this journal or others. ``nbytes``: how many bytes are on the disk and named by some journal.
    """

    def __init__(self, path: str, identity: Callable[[], RunIdentity], finished: Finished) -> None:
        self.finished = finished
        self.nbytes = finished.nbytes
        self._journal = Journal(path, lambda: first_record(identity()))
        self._begun = bool(finished.crcs)
        self._pending: list[tuple[int, WritableFile, Part, bool]] = []
        self._fresh: Callable[[], list[SourcePart]] = list
        self._directories: set[str] = set()
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._ended = threading.Event()
        self._complete = False
        self._retracted = False
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None

    def start(self, fresh: Callable[[], list[SourcePart]]) -> None:
        """Begin. ``fresh`` returns the parts of source records that were summed since it was last asked."""
        self._fresh = fresh
        self._thread = threading.Thread(target=self._run, name="fsdpckpt-journal", daemon=True)
        self._thread.start()

    def wrote(self, number: int, file: WritableFile, part: Part, *, received: bool = False) -> None:
        """``part`` of target file ``number`` is written. Raises what went wrong when others were synced.

        ``received``: bytes of it came from another worker.
        """
        if self._failure is not None:
            raise self._failure
        if part[1]:
            with self._lock:
                self._pending.append((number, file, part, received))

    def retract(self) -> None:
        """What was written is not to be trusted: the journal goes, and ``close`` adds nothing."""
        self._retracted = True
        self._stop.set()
        if self._thread is not None:
            self._ended.wait()
        with target_errors(self._journal.path), suppress(FileNotFoundError):
            os.unlink(self._journal.path)

    def close(self, *, complete: bool, patience: float | None = None) -> None:
        """End. Unless all is ``complete`` and was quick, the journal names all that was written when this returns.

        After ``patience`` seconds it returns all the same: a disk that hangs holds nobody up.
        """
        self._complete = complete
        self._stop.set()
        if self._thread is None:
            self._end()
        else:
            self._ended.wait(patience)
        if complete and self._failure is not None:  # a disk tells of a lost write once, and it has told us
            raise self._failure

    def _run(self) -> None:
        while self._failure is None and not self._stop.wait(SYNC_SECONDS):
            self._attempt()
        self._stop.wait()
        self._end()

    def _end(self) -> None:
        if self._failure is None and not self._retracted and (not self._complete or self._begun):
            self._attempt()
        self._journal.close()
        self._ended.set()

    def _attempt(self) -> None:
        try:
            self._record()
        except BaseException as error:  # noqa: BLE001  # raised by whoever writes, or closes
            self._failure = error

    def _record(self) -> None:
        """Sync what was written, then say so."""
        with self._lock:
            windows, self._pending = self._pending, []
        parts = self._fresh()  # after the windows: theirs are all among these
        if not windows and not parts:
            return
        for file in {id(file): file for _, file, _, _ in windows}.values():
            self._sync(file)
        rows = [(number, begin, begin + nbytes, crc) for number, _, (begin, nbytes, crc), _ in windows]
        received = [row[:3] for row, (_, _, _, came) in zip(rows, windows, strict=True) if came]
        self._journal.append([windows_record(rows, parts, received)])
        self._begun = True
        self.nbytes += sum(end - begin for _, begin, end, _ in rows)

    def _sync(self, file: WritableFile) -> None:
        file.sync()
        directory = os.path.dirname(file.path)
        if directory not in self._directories:  # a file's name has to be durable too
            sync_directory(directory)
            self._directories.add(directory)
