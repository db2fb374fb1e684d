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

from fsdpckpt.execute.checks import Part, SourcePart
from fsdpckpt.plan import Claim, Range
from fsdpckpt.storage import FileIdentity, change_between
from fsdpckpt.storage.local import WritableFile, sync_directory, target_errors
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
        self._fd = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
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
        with open(path, "rb") as file:
            data = file.read()
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


FORMAT = 2  # of the journal; journals of any other format are ignored


@dataclass(frozen=True, slots=True)
class RunIdentity:
    """What must be equal for a run to be resumed.

    ``plan``: ``Plan.digest``. ``options``: those that affect the output, as text, so that a message can say what
    changed. ``sources``: the files with tensor data, in the checkpoint's order; for each file one copy, or several if
    workers see different disks.
    """

    version: str
    plan: str
    options: Mapping[str, str]
    sources: Sequence[Sequence[FileIdentity]]

    def source_changes(self, now: RunIdentity) -> list[str]:
        """What changed in the source's files since this run: one line for each copy that this run did not see."""
        if len(self.sources) != len(now.sources):
            return [f"the source had {plural(len(self.sources), 'file')} and has {len(now.sources)} now"]
        return [
            f"{copy.path} {changes[0]}"
            for before, after in zip(self.sources, now.sources, strict=True)
            for copy in after
            if None not in (changes := [_change(each, copy) for each in before])
        ]

    def lost_sources(self, now: RunIdentity) -> list[str]:
        """The files at the same paths that this run did not read: no command can resume it any more."""
        there = {copy.path: copy for copies in now.sources for copy in copies}
        return [
            f"{copy.path} {change}"
            for copies in self.sources
            for copy in copies
            if copy.path in there and (change := _change(copy, there[copy.path])) is not None
        ]

    def other_changes(self, now: RunIdentity) -> list[str]:
        """What else changed: the program version, options, or a plan that differs although these are equal."""
        changes = []
        if self.version != now.version:
            changes.append(f"fsdpckpt {self.version} began it, this is fsdpckpt {now.version}")
        if self.plan != now.plan:
            names = sorted(self.options.keys() | now.options.keys())
            texts = [(name, self.options.get(name, "-"), now.options.get(name, "-")) for name in names]
            changed = [
                f"--{name.replace('_', '-')} was {before} and is {after}"
                for name, before, after in texts
                if before != after
            ]
            changes.extend(changed or ["what would be written is not what was begun (its units or reference changed)"])
        return changes


def _change(before: FileIdentity, now: FileIdentity) -> str | None:
    if not (now.tag or now.inode):
        return "may be another file: its server says neither ETag nor Last-Modified"
    return change_between(before, now)


@dataclass(frozen=True, slots=True)
class Finished:
    """Windows on the disk: (file, begin, end) to CRC-32. ``parts``: of the source records read for them.

    ``received``: the windows that contain bytes from other workers; their source parts may be in no journal.
    """

    crcs: Mapping[tuple[int, int, int], int] = field(default_factory=dict)
    parts: Sequence[SourcePart] = ()
    received: frozenset[tuple[int, int, int]] = frozenset()

    @property
    def nbytes(self) -> int:
        return sum(end - begin for claims in self.claims().values() for begin, end, _ in claims)

    @property
    def longest(self) -> int:
        """The size of the longest window in bytes: a buffer to read it back needs that much."""
        return max((end - begin for _, begin, end in self.crcs), default=0)

    def received_ranges(self) -> dict[int, list[Range]]:
        """For each file, in order, the ranges of ``claims`` that are in ``received``."""
        return {
            file: ranges
            for file, claims in self.claims().items()
            if (ranges := [Range(begin, end) for begin, end, _ in claims if (file, begin, end) in self.received])
        }

    def claims(self) -> dict[int, list[Claim]]:
        """For each file the windows in order, disjoint. If two overlap (one was written again), the first is used."""
        by_file: dict[int, list[Claim]] = {}
        for (file, begin, end), crc in sorted(self.crcs.items(), key=lambda item: (*item[0][:2], -item[0][2])):
            windows = by_file.setdefault(file, [])
            if begin < end and (not windows or windows[-1][1] <= begin):
                windows.append(Claim(begin, end, crc))
        return by_file


def joined(several: Sequence[Finished]) -> Finished:
    """The union of what the journals of several processes say."""
    crcs = {window: crc for each in several for window, crc in each.crcs.items()}
    parts = [part for each in several for part in each.parts]
    return Finished(crcs, parts, frozenset().union(*(each.received for each in several)))


def first_record(identity: RunIdentity) -> Record:
    return {"format": FORMAT, **asdict(identity)}


def windows_record(
    windows: Sequence[tuple[int, int, int, int]],
    parts: Sequence[SourcePart],
    received: Sequence[tuple[int, int, int]] = (),
) -> Record:
    """``windows``: (file, begin, end, crc)."""
    return {"windows": windows, "parts": parts, "received": received}


def read_run(path: str) -> tuple[RunIdentity, Finished] | None:
    """The run that left the journal at ``path``; None if there is none that this program can read."""
    return run_of(read_records(path))


def run_of(records: Sequence[Record]) -> tuple[RunIdentity, Finished] | None:
    """``read_run`` for the journal's records."""
    try:
        return _run(records)
    except (LookupError, TypeError, ValueError, AttributeError):  # complete records, but of another program
        return None


def _run(records: Sequence[Record]) -> tuple[RunIdentity, Finished] | None:
    if not records or records[0].get("format") != FORMAT:
        return None
    first = records[0]
    sources = [[_file_identity(copy) for copy in copies] for copies in _copies(first["sources"])]
    options = first["options"] if isinstance(first["options"], dict) else {}
    identity = RunIdentity(str(first["version"]), str(first["plan"]), options, sources)
    crcs: dict[tuple[int, int, int], int] = {}
    parts: list[SourcePart] = []
    received: list[tuple[int, int, int]] = []
    for record in records[1:]:
        crcs |= {(file, begin, end): crc for file, begin, end, crc in _rows(record["windows"], 4)}
        parts += [(file, index, offset, nbytes, crc) for file, index, offset, nbytes, crc in _rows(record["parts"], 5)]
        received += [(file, begin, end) for file, begin, end in _rows(record["received"], 3)]
    return identity, Finished(crcs, parts, frozenset(received))


def _file_identity(record: Mapping[str, object]) -> FileIdentity:
    nbytes, mtime_ns, inode = (int(str(record[name])) for name in ("nbytes", "mtime_ns", "inode"))
    return FileIdentity(str(record["path"]), nbytes, mtime_ns, inode, str(record["tag"]))


def _rows(value: object, width: int) -> list[list[int]]:
    rows = value if isinstance(value, list) else []
    if any(len(row) != width or any(type(number) is not int for number in row) for row in rows):
        raise ValueError("rows of numbers were expected")
    return rows


def _copies(value: object) -> list[list[dict[str, object]]]:
    return value if isinstance(value, list) else []


SYNC_SECONDS = 2.0  # between two syncs: a kill loses at most this much work; shorter runs need no extra sync


class Recorder:
    """Collects the windows that were written; a thread syncs their files and then lists them in the journal.

    ``path``: of the journal. ``identity``: called once, when the journal begins. ``finished``: what earlier runs left,
    in this journal or others. ``nbytes``: how many bytes are on the disk and listed in some journal.
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
        """Start the thread. ``fresh`` returns the parts of source records that were read since its last call."""
        self._fresh = fresh
        thread = threading.Thread(target=self._run, name="fsdpckpt-journal", daemon=True)
        thread.start()
        self._thread = thread  # not earlier: ``close`` would wait for a thread that a signal kept from starting

    def wrote(self, number: int, file: WritableFile, part: Part, *, received: bool = False) -> None:
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
            self._ended.wait()
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
            self._ended.wait(patience)
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
        self._pending, self._fresh = [], list  # they refer to the run, whose memory is needed for the check
        self._ended.set()

    def _attempt(self) -> None:
        try:
            self._record()
        except BaseException as error:  # noqa: BLE001  # raised by ``wrote`` or ``close``
            self._failure = error

    def _record(self) -> None:
        """Sync what was written, then append it to the journal."""
        with self._lock:
            windows, self._pending = self._pending, []
        parts = self._fresh()  # after taking the windows, so that the parts of all of them are included
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
        if directory not in self._directories:  # a file's name must be durable too
            sync_directory(directory)
            self._directories.add(directory)
