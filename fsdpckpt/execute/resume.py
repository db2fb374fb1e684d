"""What an interrupted run left in its journals, and whether it is this run's: same plan, same source, same program.

A journal's first record is the run's identity. The others say which windows of which target files are on the disk
with which CRC-32, and the checksums of the parts of source records that were read for them. Who wrote a window, this
process or another one, alone or as one of several, does not count: how later runs cut the rest is up to them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field

import numpy as np

from fsdpckpt.plan.plan import COPY_COLUMNS, Claim, Plan
from fsdpckpt.storage.journal import Record, read_records
from fsdpckpt.storage.protocols import FileIdentity, change_between

__all__ = [
    "Finished",
    "RunIdentity",
    "SourcePart",
    "first_record",
    "joined",
    "plan_digest",
    "read_run",
    "run_of",
    "windows_record",
]

SourcePart = tuple[int, int, int, int, int]
"""(source file, record, offset, nbytes, crc), as ``SourceCheck`` keeps them."""

FORMAT = 2  # of the journal: another one belongs to another program version


@dataclass(frozen=True, slots=True)
class RunIdentity:
    """``plan``: ``plan_digest``. ``options``: those that decide what is written, as text, to say what changed.

    ``sources``: the files that tensor data comes from, in the checkpoint's order; each is one copy of the file, or
    several where workers see different disks.
    """

    version: str
    plan: str
    options: Mapping[str, str]
    sources: Sequence[Sequence[FileIdentity]]

    def source_changes(self, now: RunIdentity) -> list[str]:
        """What happened to the source's files since this run, one line each: every copy has to be one known then."""
        if len(self.sources) != len(now.sources):
            return [f"the source had {len(self.sources)} files and has {len(now.sources)} now"]
        return [
            f"{copy.path} {changes[0]}"
            for before, after in zip(self.sources, now.sources, strict=True)
            for copy in after
            if None not in (changes := [_change(each, copy) for each in before])
        ]

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


def _change(before: FileIdentity, now: FileIdentity) -> str | None:
    if not (now.tag or now.inode):
        return "may be another file: its server says neither ETag nor Last-Modified"
    return change_between(before, now)


@dataclass(frozen=True, slots=True)
class Finished:
    """Windows that are on the disk: (file, begin, end) to CRC-32. ``parts``: of the source records read for them.

    ``received``: those of the windows for which bytes came from other workers: the parts of these may be in none of
    the journals.
    """

    crcs: Mapping[tuple[int, int, int], int] = field(default_factory=dict)
    parts: Sequence[SourcePart] = ()
    received: frozenset[tuple[int, int, int]] = frozenset()

    @property
    def nbytes(self) -> int:
        return sum(end - begin for claims in self.claims().values() for begin, end, _ in claims)

    @property
    def longest(self) -> int:
        """Bytes of the longest window: what a buffer to read it back needs."""
        return max((end - begin for _, begin, end in self.crcs), default=0)

    def received_ranges(self) -> dict[int, list[tuple[int, int]]]:
        """By file, in order, what ``received`` holds of ``claims``."""
        return {
            file: ranges
            for file, claims in self.claims().items()
            if (ranges := [(begin, end) for begin, end, _ in claims if (file, begin, end) in self.received])
        }

    def claims(self) -> dict[int, list[Claim]]:
        """By file the windows in order, disjoint: of two that overlap, one that was written anew, either will do."""
        found: dict[int, list[Claim]] = {}
        for (file, begin, end), crc in sorted(self.crcs.items(), key=lambda item: (*item[0][:2], -item[0][2])):
            own = found.setdefault(file, [])
            if begin < end and (not own or own[-1][1] <= begin):
                own.append((begin, end, crc))
        return found


def joined(several: Sequence[Finished]) -> Finished:
    """What the journals of several processes say together."""
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
    """The run that left the journal at ``path``; None when it holds none that this program can read."""
    return run_of(read_records(path))


def run_of(records: Sequence[Record]) -> tuple[RunIdentity, Finished] | None:
    """As ``read_run``, from the journal's records."""
    try:
        return _run(records)
    except (LookupError, TypeError, ValueError, AttributeError):  # whole records, but of another program
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


def plan_digest(plan: Plan) -> str:
    """SHA-256 of all that decides which bytes a plan writes where, and whence they come."""
    total = hashlib.sha256()
    total.update(repr([(source.name, target.name) for source, target in plan.casts]).encode())
    for file in plan.files:
        total.update(repr((file.path, file.nbytes, len(file.blob), file.places)).encode())
        total.update(file.blob)
        columns = [getattr(file.copies, name) for name in COPY_COLUMNS]
        for table in (file.literals, file.write_items, file.first_copy, file.checksums, *columns):
            total.update(repr(table.shape).encode())
            total.update(np.ascontiguousarray(table).data)
    return total.hexdigest()
