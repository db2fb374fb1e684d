"""Keeps a journal of what a run has written, so that a killed run can be resumed; also reads journals back.

The first record of a journal is the run's identity: plan, source, options and program version. Every other record lists
windows of target files that are on the disk, each with its CRC-32, and the checksums of the parts of source records
that were read for them. It does not matter which process wrote a window: a later run may divide the rest differently.
``Recorder`` appends to the journal while a plan runs, and lists a window only after it is synced.

The file consists of lines of JSON, each durable once ``append`` returns: the CRC-32 of the record in eight hexadecimal
digits, a space, the record, and a newline. A line that a crash cut short ends the journal: reading stops there, and
appending overwrites it.
"""

from __future__ import annotations

import json
import os
import threading
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Protocol, cast

import numpy as np

from fsdpckpt.execute.checks import NO_PARTS, PART_COLUMNS, Part
from fsdpckpt.ir.tensors import Int64Array
from fsdpckpt.plan.written import BEGIN, COLUMNS, END, NOTHING_WRITTEN, NUMBER, RECEIVED, written_bytes
from fsdpckpt.storage import ByteTarget, FileIdentity, change_between
from fsdpckpt.storage.hidden import open_own_file, read_own_file
from fsdpckpt.storage.local_target import sync_directory, target_errors
from fsdpckpt.text import plural

Record = dict[str, object]

_PREFIX = 9  # bytes: the checksum and the space after it


class Journal:
    """The journal at ``path``, created by the first ``append``. A new one starts with the record ``first()``."""

    def __init__(self, path: str, first: Callable[[], Record] | None = None) -> None:
        self.path = path
        self._first = first
        self._fd = -1

    def append(self, records: list[Record]) -> None:
        """Add ``records`` durably, in one write. Raises TargetUnwritableError."""
        with target_errors(self.path):
            new = self._fd < 0 and self._open()
            if new and self._first is not None:
                records = [self._first(), *records]
            data = b"".join(_line(record) for record in records)
            done = 0
            while done < len(data):
                done += os.write(self._fd, data[done:])
            os.fdatasync(self._fd)
        if new:
            sync_directory(os.path.dirname(self.path))

    def _open(self) -> bool:
        """Open after the last valid record; returns whether there was none."""
        end = _scan(self.path)[1]
        self._fd = open_own_file(self.path, os.O_WRONLY | os.O_CREAT)
        os.ftruncate(self._fd, end)
        os.lseek(self._fd, end, os.SEEK_SET)
        return end == 0

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def read_records(path: str) -> list[Record]:
    """The valid records of the journal at ``path``, in order; none if the file does not exist."""
    return _scan(path)[0]


def _scan(path: str) -> tuple[list[Record], int]:
    """The records, and the offset where the last one ends."""
    try:
        data = read_own_file(path)
    except FileNotFoundError:
        return [], 0
    records: list[Record] = []
    end = 0
    while (stop := data.find(b"\n", end)) >= 0:
        record = _record(data[end:stop])
        if record is None:
            break
        records.append(record)
        end = stop + 1
    return records, end


def _line(record: Record) -> bytes:
    text = json.dumps(record, separators=(",", ":")).encode()
    return b"%08x %s\n" % (zlib.crc32(text), text)


def _record(line: bytes) -> Record | None:
    text = line[_PREFIX:]
    if line[:_PREFIX] != b"%08x " % zlib.crc32(text):
        return None
    record = json.loads(text)
    return record if isinstance(record, dict) else None


FORMAT = 3  # of the journal; journals of any other format are ignored


@dataclass(frozen=True, slots=True)
class RunIdentity:
    """What must be equal for a run to be resumed.

    ``plan``: ``Plan.digest``. ``options``: those that affect the output, as text, so that a message can say what
    changed. ``sources``: the files with tensor data, in the checkpoint's order; for each file one copy, or several if
    workers see different disks. ``nbytes``: of the whole output, for messages.
    """

    version: str
    plan: str
    options: Mapping[str, str]
    sources: Sequence[Sequence[FileIdentity]]
    nbytes: int = 0

    def source_changes(self, now: RunIdentity) -> list[str]:
        """What changed in the source's files since this run: one line for each copy that this run did not see."""
        if len(self.sources) != len(now.sources):
            return [f"the source had {plural(len(self.sources), 'file')} and has {len(now.sources)} now"]
        changed: list[str] = []
        for before, after in zip(self.sources, now.sources, strict=True):
            for copy in after:
                changes = [_change(copy_before, copy) for copy_before in before]
                if None not in changes:  # it is no copy that this run saw
                    changed.append(f"{copy.path} {changes[0]}")
        return changed

    def lost_sources(self, now: RunIdentity) -> list[str]:
        """The files of this run that were replaced at their paths: no command can resume it any more."""
        present = {copy.path: copy for copies in now.sources for copy in copies}
        return [
            f"{copy.path} {change}"
            for copies in self.sources
            for copy in copies
            if copy.path in present and (change := _change(copy, present[copy.path])) is not None
        ]

    def other_changes(self, now: RunIdentity) -> list[str]:
        """What else changed: the program version, options, or a plan that differs although these are equal."""
        changes = []
        if self.version != now.version:
            changes.append(f"it was begun by fsdpckpt {self.version}, and this is fsdpckpt {now.version}")
        if self.plan != now.plan:
            names = sorted(self.options.keys() | now.options.keys())
            texts = [(name, self.options.get(name, "-"), now.options.get(name, "-")) for name in names]
            changed = [
                f"--{name.replace('_', '-')} was {before} and is {after}"
                for name, before, after in texts
                if before != after
            ]
            changes.extend(
                changed or ["the output would differ from the one begun: the units or the reference changed"]
            )
        return changes


def _change(before: FileIdentity, now: FileIdentity) -> str | None:
    if not (now.tag or now.inode):
        return "may have changed: its server sends neither ETag nor Last-Modified"
    return change_between(before, now)


@dataclass(frozen=True, slots=True, eq=False)
class JournaledWindows:
    """What journals list, in rows."""

    windows: Int64Array = field(default_factory=lambda: NOTHING_WRITTEN)  # of target files, on the disk
    parts: Int64Array = field(default_factory=lambda: NO_PARTS)  # of the source records that were read for them

    def written(self) -> Int64Array:
        """The rows of ``windows`` in order, disjoint. If two overlap (one was written again), the first is used."""
        rows = self.windows[self.windows[:, BEGIN] < self.windows[:, END]]
        rows = rows[np.lexsort((-rows[:, RECEIVED], -rows[:, END], rows[:, BEGIN], rows[:, NUMBER]))]
        disjoint = []
        last = (0, 0)  # the file and the end of the last row
        for row, (file, begin, end) in enumerate(rows[:, [NUMBER, BEGIN, END]].tolist()):
            if (file, begin) >= last:
                disjoint.append(row)
                last = (file, end)
        return rows[disjoint]

    @property
    def nbytes(self) -> int:
        return written_bytes(self.written())

    @property
    def longest(self) -> int:
        """The size of the longest window in bytes: a buffer to read it back needs that much."""
        return int((self.windows[:, END] - self.windows[:, BEGIN]).max(initial=0))


def joined(journals: Sequence[JournaledWindows]) -> JournaledWindows:
    """The union of the journals of several processes."""
    windows = [NOTHING_WRITTEN, *(journal.windows for journal in journals)]
    parts = [NO_PARTS, *(journal.parts for journal in journals)]
    return JournaledWindows(np.concatenate(windows), np.concatenate(parts))


def first_record(identity: RunIdentity) -> Record:
    return {"format": FORMAT, **asdict(identity)}


def windows_record(journaled: JournaledWindows) -> Record:
    return {"windows": journaled.windows.tolist(), "parts": journaled.parts.tolist()}


def read_run(path: str) -> tuple[RunIdentity, JournaledWindows] | None:
    """The run that left the journal at ``path``; None if there is none that this program can read."""
    return run_of(read_records(path))


def run_of(records: Sequence[Record]) -> tuple[RunIdentity, JournaledWindows] | None:
    """``read_run`` for the journal's records."""
    try:
        if not records or records[0].get("format") != FORMAT:
            return None
        windows = [
            JournaledWindows(_rows(record["windows"], COLUMNS), _rows(record["parts"], PART_COLUMNS))
            for record in records[1:]
        ]
        return identity_of(records[0]), joined(windows)
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError):  # another program's journal
        return None


def identity_of(first: Record) -> RunIdentity:
    """The inverse of ``first_record``."""
    options = first["options"] if isinstance(first["options"], dict) else {}
    sources = cast("list[list[dict[str, object]]]", first["sources"])
    identities = [list(map(_file_identity, copies)) for copies in sources]
    nbytes = int(str(first["nbytes"]))
    return RunIdentity(str(first["version"]), str(first["plan"]), options, identities, nbytes)


def _file_identity(record: Mapping[str, object]) -> FileIdentity:
    nbytes, mtime_ns, inode = (int(str(record[name])) for name in ("nbytes", "mtime_ns", "inode"))
    return FileIdentity(str(record["path"]), nbytes, mtime_ns, inode, str(record["tag"]))


def _rows(value: object, columns: int) -> Int64Array:
    """``columns`` numbers in each row. Raises ValueError, TypeError or OverflowError for anything else."""
    rows = cast("list[list[int]]", value)
    for row in rows:
        if len(row) != columns or any(type(number) is not int or number < 0 for number in row):
            raise ValueError(f"rows of {columns} numbers were expected")
    return np.asarray(rows, np.int64).reshape(-1, columns)


def _no_parts() -> Int64Array:
    return NO_PARTS


class Recording(Protocol):
    """What a run tells of the windows that it writes. ``nbytes``: how many bytes a later run will find."""

    nbytes: int

    def start(self, new_parts: Callable[[], Int64Array]) -> None:
        """Writing begins. ``new_parts`` returns the parts of source records that were read since its last call."""

    def wrote(self, number: int, file: ByteTarget, part: Part, *, received: bool = False) -> None:
        """``part`` of target file ``number`` is written. ``received``: some of its bytes came from another worker."""

    def retract(self) -> None:
        """What was written cannot be trusted."""

    def close(self, *, complete: bool, patience: float | None = None) -> None:
        """Nothing more is written. ``complete``: everything is. Wait at most ``patience`` seconds."""


SYNC_SECONDS = 2.0  # between two syncs: a kill loses at most this much work; shorter runs need no extra sync


class Recorder:
    """Collects the windows that were written; a thread syncs their files and then lists them in the journal.

    ``path``: of the journal. ``identity``: called once, when the journal begins. ``journaled``: what earlier runs left,
    in this journal or others. ``nbytes``: how many bytes are on the disk and listed in some journal.
    """

    def __init__(self, path: str, identity: Callable[[], RunIdentity], journaled: JournaledWindows) -> None:
        self.journaled = journaled
        self.nbytes = journaled.nbytes
        self._journal = Journal(path, lambda: first_record(identity()))
        self._begun = bool(len(journaled.windows))
        self._pending: list[tuple[int, ByteTarget, Part, bool]] = []
        self._new_parts: Callable[[], Int64Array] = _no_parts
        self._directories: set[str] = set()
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._complete = False
        self._retracted = False
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None

    def start(self, new_parts: Callable[[], Int64Array]) -> None:
        """Start the thread. ``new_parts`` returns the parts of source records that were read since its last call."""
        self._new_parts = new_parts
        thread = threading.Thread(target=self._run, name="fsdpckpt-journal", daemon=True)
        thread.start()
        self._thread = thread  # not earlier: ``close`` would wait for a thread that a signal kept from starting

    def wrote(self, number: int, file: ByteTarget, part: Part, *, received: bool = False) -> None:
        """Record that ``part`` of target file ``number`` is written. Raises the error of an earlier sync, if there was
        one.

        ``received``: some of its bytes came from another worker.
        """
        if self._failure is not None:
            raise self._failure
        if part[1]:
            with self._lock:
                self._pending.append((number, file, part, received))

    def retract(self) -> None:
        """Delete the journal, because what was written cannot be trusted; ``close`` then adds nothing."""
        self._retracted = True
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        with target_errors(self._journal.path), suppress(FileNotFoundError):
            os.unlink(self._journal.path)

    def close(self, *, complete: bool, patience: float | None = None) -> None:
        """Stop. Afterwards the journal lists everything that was written, unless a short run is already ``complete``.

        Returns after ``patience`` seconds in any case, so that a hanging disk does not block the run.
        """
        self._complete = complete
        self._stop.set()
        if self._thread is None:
            self._end()
        else:
            self._thread.join(patience)
        if complete and self._failure is not None:  # a disk reports a lost write only once, here to the thread
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
        self._pending, self._new_parts = [], _no_parts  # they refer to the run, whose memory the next step needs

    def _attempt(self) -> None:
        try:
            self._record()
        except BaseException as error:  # noqa: BLE001  # raised by ``wrote`` or ``close``
            self._failure = error

    def _record(self) -> None:
        """Sync what was written, then append it to the journal."""
        with self._lock:
            windows, self._pending = self._pending, []
        parts = self._new_parts()  # after taking the windows, so that the parts of all of them are included
        if not windows and not len(parts):
            return
        for file in {id(file): file for _, file, _, _ in windows}.values():
            self._sync(file)
        rows = [(number, begin, begin + nbytes, crc, received) for number, _, (begin, nbytes, crc), received in windows]
        table = np.asarray(rows, np.int64).reshape(-1, COLUMNS)
        self._journal.append([windows_record(JournaledWindows(table, parts))])
        self._begun = True
        self.nbytes += written_bytes(table)

    def _sync(self, file: ByteTarget) -> None:
        file.sync()
        directory = os.path.dirname(file.path)
        if directory not in self._directories:  # a file's name must be durable too
            sync_directory(directory)
            self._directories.add(directory)
