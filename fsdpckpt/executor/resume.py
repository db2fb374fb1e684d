"""What an interrupted run left in its journal, and whether it is this run's: same plan, same source, same program.

The journal's first record is the run's identity. The others say which windows of which target files are on the disk
with which CRC-32, and the checksums of the parts of source records that were read for them.
"""

from __future__ import annotations

import hashlib
import threading
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field

import numpy as np

from fsdpckpt.planner.plan import COPY_COLUMNS, FilePlan, Plan
from fsdpckpt.storage.identity import FileIdentity, change_between
from fsdpckpt.storage.journal import Record, read_records

__all__ = ["Finished", "LatePlaces", "RunIdentity", "SourcePart", "plan_digest", "read_run"]

SourcePart = tuple[int, int, int, int, int]
"""(source file, record, offset, nbytes, crc), as ``SourceCheck`` keeps them."""

FORMAT = 1  # of the journal: another one belongs to another program version


@dataclass(frozen=True, slots=True)
class RunIdentity:
    """``plan``: ``plan_digest``. ``options``: those that decide what is written, as text, to say what changed.

    ``sources``: the files that tensor data comes from, in the checkpoint's order.
    """

    version: str
    plan: str
    options: Mapping[str, str]
    sources: Sequence[FileIdentity]

    def source_changes(self, now: RunIdentity) -> list[str]:
        """What happened to the source's files since this run, one line each."""
        if len(self.sources) != len(now.sources):
            return [f"the source had {len(self.sources)} files and has {len(now.sources)} now"]
        pairs = zip(self.sources, now.sources, strict=True)
        changes = [(after.path, change_between(before, after)) for before, after in pairs]
        return [f"{path} {change}" for path, change in changes if change is not None]

    def other_changes(self, now: RunIdentity) -> list[str]:
        """What else is not as it was: program version, options, or the plan for a reason these do not tell."""
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


@dataclass(frozen=True, slots=True)
class Finished:
    """Windows of at most ``window`` bytes that are on the disk: (file, begin, end) to CRC-32."""

    window: int
    crcs: Mapping[tuple[int, int, int], int] = field(default_factory=dict)
    parts: Sequence[SourcePart] = ()

    @property
    def nbytes(self) -> int:
        return sum(end - begin for _, begin, end in self.crcs)


def first_record(identity: RunIdentity, window: int) -> Record:
    return {"format": FORMAT, "window": window, **asdict(identity)}


def windows_record(windows: Sequence[tuple[int, int, int, int]], parts: Sequence[SourcePart]) -> Record:
    """``windows``: (file, begin, end, crc)."""
    return {"windows": windows, "parts": parts}


def read_run(path: str) -> tuple[RunIdentity, Finished] | None:
    """The run that left the journal at ``path``; None when it holds none that this program can read."""
    records = read_records(path)
    if not records or records[0].get("format") != FORMAT:
        return None
    first = records[0]
    sources = [_file_identity(each) for each in _dicts(first["sources"])]
    options = first["options"] if isinstance(first["options"], dict) else {}
    identity = RunIdentity(str(first["version"]), str(first["plan"]), options, sources)
    crcs: dict[tuple[int, int, int], int] = {}
    parts: list[SourcePart] = []
    for record in records[1:]:
        crcs |= {(file, begin, end): crc for file, begin, end, crc in _rows(record["windows"])}
        parts += [(file, index, offset, nbytes, crc) for file, index, offset, nbytes, crc in _rows(record["parts"])]
    window = first["window"]
    return identity, Finished(window if isinstance(window, int) else 0, crcs, parts)


def _file_identity(record: Mapping[str, object]) -> FileIdentity:
    nbytes, mtime_ns, inode = (int(str(record[name])) for name in ("nbytes", "mtime_ns", "inode"))
    return FileIdentity(str(record["path"]), nbytes, mtime_ns, inode, str(record["tag"]))


def _rows(value: object) -> list[list[int]]:
    return value if isinstance(value, list) else []


def _dicts(value: object) -> list[dict[str, object]]:
    return value if isinstance(value, list) else []


def plan_digest(plan: Plan) -> str:
    """SHA-256 of all that decides which bytes a plan writes where, and whence they come."""
    total = hashlib.sha256()
    total.update(repr([(source.name, target.name) for source, target in plan.casts]).encode())
    for file in plan.files:
        total.update(repr((file.path, file.nbytes, len(file.blob), file.places)).encode())
        total.update(file.blob)
        columns = [getattr(file.copies, name) for name in COPY_COLUMNS]
        for table in (file.literals, file.slots, file.first_copy, file.checksums, *columns):
            total.update(repr(table.shape).encode())
            total.update(np.ascontiguousarray(table).data)
    return total.hexdigest()


class LatePlaces:
    """Where checksums of one file go that are known only when other windows are: zeros until the file is complete.

    A window that is read back may hold them already; ``clear`` makes it what it was when it was summed.
    """

    def __init__(self, file: FilePlan) -> None:
        self._file = file
        self._rows: list[tuple[int, int, int]] | None = None  # place, begin and end of the range, sorted
        self._lock = threading.Lock()

    def clear(self, begin: int, view: memoryview) -> None:
        """Zero the late places of the window ``view``, which begins at ``begin``."""
        end = begin + len(view)
        rows = self._sorted()
        for place, low, high in rows[bisect_left(rows, (begin - 3,)) : bisect_left(rows, (end,))]:
            if begin <= min(place, low) and max(place + 4, high) <= end:
                continue  # summed and stored within this window
            start, stop = max(place - begin, 0), min(place + 4, end) - begin
            view[start:stop] = bytes(stop - start)

    def _sorted(self) -> list[tuple[int, int, int]]:
        with self._lock:
            if self._rows is None:  # only a run that is resumed needs them
                ranges = zip(self._file.checksums.tolist(), self._file.places, strict=True)
                self._rows = sorted((place, low, high) for (low, high), places in ranges for place in places)
            return self._rows
