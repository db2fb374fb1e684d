"""A plan as plain values, made by one rank and run by all; and the digest by which they agree on it."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import astuple, dataclass, field
from typing import TypeAlias, cast

import numpy as np

from fsdpckpt.execute.budget import Budget, Settings
from fsdpckpt.execute.journal import Finished
from fsdpckpt.ir.checkpoint import Checksums, SourceFile
from fsdpckpt.ir.dtypes import DTYPES
from fsdpckpt.ir.tensors import Int64Array
from fsdpckpt.plan.partition import Segment
from fsdpckpt.plan.plan import COPY_COLUMNS, Copies, FilePlan, Plan

__all__ = ["Job", "pack_job", "unpack_job"]

Packed: TypeAlias = dict[str, object]


@dataclass(frozen=True, slots=True, eq=False)
class Job:
    """What all workers do together. ``segments``: who writes what.

    ``claims``: rows of (place, file, begin, end, crc), the windows that an interrupted run has written, in order.
    """

    plan: Plan
    files: tuple[SourceFile, ...]
    checksums: Checksums
    segments: tuple[Segment, ...]
    settings: Settings
    claims: Int64Array = field(default_factory=lambda: np.zeros((0, 5), np.int64))

    @classmethod
    def of_one(
        cls,
        plan: Plan,
        files: Sequence[SourceFile],
        checksums: Checksums,
        budget: Budget,
        finished: Finished | None = None,
    ) -> Job:
        """The job of a single rank, which writes everything. ``finished``: what an interrupted run has written."""
        segments = tuple(Segment(number, 0, 0, file.nbytes, 0) for number, file in enumerate(plan.files))
        claims = [(0, file, *claim) for file, found in (finished or Finished()).claims().items() for claim in found]
        settings = Settings(budget.window, budget.nbytes, 0, 0, 0)
        return cls(plan, tuple(files), checksums, segments, settings, np.asarray(claims, np.int64).reshape(-1, 5))

    def digest(self) -> str:
        """SHA-256 over every column of it."""
        total = hashlib.sha256()
        _add(total, pack_job(self))
        return total.hexdigest()


def _add(total: hashlib._Hash, value: object) -> None:
    if isinstance(value, dict):
        _add(total, list(value.items()))
    elif isinstance(value, (list, tuple)):
        total.update(f"[{len(value)}".encode())
        for item in value:
            _add(total, item)
    elif isinstance(value, np.ndarray):
        total.update(f"{value.dtype.str}{value.shape}".encode())
        total.update(np.ascontiguousarray(value).data)
    else:
        data = bytes(value) if isinstance(value, (bytes, bytearray)) else repr(value).encode()
        total.update(f"{type(value).__name__[:4]}{len(data)}:".encode() + data)


def pack_job(job: Job) -> Packed:
    """``job`` as text, bytes, lists and arrays."""
    sums = job.checksums
    return {
        "paths": [file.path for file in job.files],
        "nbytes": np.asarray([file.nbytes for file in job.files], np.int64),
        "checksums": np.stack([sums.file, sums.offset, sums.nbytes, sums.crc]),
        "segments": np.asarray([(s.file, s.place, s.begin, s.end, s.owner) for s in job.segments], np.int64).reshape(
            -1, 5
        ),
        "settings": list(astuple(job.settings)),
        "claims": job.claims,
        "casts": [[source.name, target.name] for source, target in job.plan.casts],
        "targets": [_packed_file(file) for file in job.plan.files],
    }


def _packed_file(file: FilePlan) -> list[object]:
    return [
        file.path,
        file.nbytes,
        bytes(file.blob),
        file.literals,
        file.write_items,
        file.first_copy,
        np.stack([getattr(file.copies, name) for name in COPY_COLUMNS]),
        file.checksums,
        np.asarray([len(places) for places in file.places], np.int64),
        np.asarray([place for places in file.places for place in places], np.int64),
    ]


def unpack_job(value: object) -> Job:
    """The job that ``pack_job`` made ``value`` of."""
    fields = cast("dict[str, object]", value)
    nbytes = cast("Int64Array", fields["nbytes"]).tolist()
    casts = cast("list[list[str]]", fields["casts"])
    targets = cast("list[Sequence[object]]", fields["targets"])
    return Job(
        plan=Plan(
            tuple(_unpacked_file(target) for target in targets),
            tuple((DTYPES[source], DTYPES[target]) for source, target in casts),
        ),
        files=tuple(map(SourceFile, cast("list[str]", fields["paths"]), nbytes)),
        checksums=Checksums(*cast("Int64Array", fields["checksums"])),
        segments=tuple(Segment(*row) for row in cast("Int64Array", fields["segments"]).tolist()),
        settings=Settings(*cast("list[int]", fields["settings"])),
        claims=cast("Int64Array", fields["claims"]),
    )


def _unpacked_file(target: Sequence[object]) -> FilePlan:
    path, nbytes, blob, *rest = target
    literals, write_items, first_copy, copies, checksums, counts, places = cast("list[Int64Array]", rest)
    ends = np.cumsum(counts).tolist()
    return FilePlan(
        path=str(path),
        nbytes=cast("int", nbytes),
        blob=cast("bytes", blob),
        literals=literals,
        write_items=write_items,
        first_copy=first_copy,
        copies=Copies(*np.ascontiguousarray(copies)),
        checksums=checksums,
        places=tuple(
            tuple(places[end - count : end].tolist()) for end, count in zip(ends, counts.tolist(), strict=True)
        ),
    )
