"""Keeps the journal while a plan runs: what it names is on the disk, so that a run that is killed can be resumed."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

from fsdpckpt.errors import FsdpckptError
from fsdpckpt.executor.crc import Part
from fsdpckpt.executor.resume import Finished, RunIdentity, SourcePart, first_record, windows_record
from fsdpckpt.storage.journal import Journal
from fsdpckpt.storage.targets import WritableFile, sync_directory

__all__ = ["Recorder"]

SYNC_SECONDS = 2.0  # between two syncs: what a kill may cost; a run that is shorter costs no sync more than it must


class Recorder:
    """Collects the windows that are written; a thread of its own syncs their files and then names them in the journal.

    ``path``: of the journal. ``identity`` is asked for once, at the first entry. ``finished``: what an earlier run has
    left there. ``nbytes``: how many bytes the journal names.
    """

    def __init__(self, path: str, identity: Callable[[], RunIdentity], finished: Finished) -> None:
        self.finished = finished
        self.nbytes = finished.nbytes
        self._identity = identity
        self._journal = Journal(path)
        self._begun = bool(finished.crcs)
        self._pending: list[tuple[int, WritableFile, Part]] = []
        self._fresh: Callable[[], list[SourcePart]] = list
        self._directories: set[str] = set()
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._failure: FsdpckptError | OSError | None = None

    def start(self, fresh: Callable[[], list[SourcePart]]) -> None:
        """Begin. ``fresh`` returns the parts of source records that were summed since it was last asked."""
        self._fresh = fresh
        self._thread = threading.Thread(target=self._run, name="fsdpckpt-journal", daemon=True)
        self._thread.start()

    def wrote(self, number: int, file: WritableFile, part: Part) -> None:
        """``part`` of target file ``number`` is written. Raises what went wrong when others were synced."""
        if self._failure is not None:
            raise self._failure
        if (number, part[0], part[0] + part[1]) not in self.finished.crcs:
            with self._lock:
                self._pending.append((number, file, part))

    def close(self, *, complete: bool) -> None:
        """End. Unless all is ``complete`` and was quick, the journal names all that was written when this returns."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        try:
            if not complete or self._begun:
                self._record()
        except (FsdpckptError, OSError) as error:
            self._failure = self._failure or error
        finally:
            self._journal.close()
        if complete and self._failure is not None:  # a disk tells of a lost write once, and it has told us
            raise self._failure

    def _run(self) -> None:
        while not self._stop.wait(SYNC_SECONDS):
            try:
                self._record()
            except (FsdpckptError, OSError) as error:
                self._failure = error
                return

    def _record(self) -> None:
        """Sync what was written, then say so."""
        if self._failure is not None:
            return
        with self._lock:
            windows, self._pending = self._pending, []
        if not windows:
            return
        parts = self._fresh()  # after the windows: theirs are all among these
        for file in {id(file): file for _, file, _ in windows}.values():
            self._sync(file)
        rows = [(number, begin, begin + nbytes, crc) for number, _, (begin, nbytes, crc) in windows]
        records = [] if self._begun else [first_record(self._identity(), self.finished.window)]
        self._journal.append([*records, windows_record(rows, parts)])
        self._begun = True
        self.nbytes += sum(end - begin for _, begin, end, _ in rows)

    def _sync(self, file: WritableFile) -> None:
        file.sync()
        directory = os.path.dirname(file.path)
        if directory not in self._directories:  # a file's name has to be durable too
            sync_directory(directory)
            self._directories.add(directory)
