"""Defines the job that all ranks of a run share: the plan, its division, and the sizes of the buffers.

Rank 0 makes it and sends it as plain values. Also turns ``--max-memory`` and ``--threads`` into threads and buffers,
for one process and for several ranks.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import astuple, dataclass, field
from typing import cast

import numpy as np

from fsdpckpt import flags
from fsdpckpt.errors import UsageError
from fsdpckpt.ir.checkpoint import Checksums, SourceFile
from fsdpckpt.ir.dtypes import DTYPES
from fsdpckpt.ir.files import pack_files, unpack_files
from fsdpckpt.ir.tensors import Int64Array
from fsdpckpt.plan import Copies, FilePlan, Plan
from fsdpckpt.plan.transfer import FILES_AT_ONCE, Segment
from fsdpckpt.plan.written import NOTHING_WRITTEN_IN_SEGMENTS
from fsdpckpt.storage.descriptors import written_files_limit
from fsdpckpt.text import size_text

LARGEST_WINDOW = 8 * 1024 * 1024  # bytes: the cost of a larger request is negligible on every disk measured
SMALLEST_WINDOW = 64 * 1024  # bytes: below this the work per request dominates
MIN_THREADS, MAX_THREADS = 4, 8  # by default: while some wait for their writes, others read, even on a busy machine
BUFFERS_PER_THREAD = 2  # the window being assembled, and scratch for what must be cast or gathered


@dataclass(frozen=True, slots=True)
class Budget:
    """``threads`` threads, each with two buffers of ``window`` bytes."""

    threads: int
    window: int

    @property
    def nbytes(self) -> int:
        return self.threads * BUFFERS_PER_THREAD * self.window


def make_budget(*, max_memory: int, threads: int | None) -> Budget:
    """The largest windows that fit in ``max_memory`` bytes. Raises UsageError if not even the smallest fit."""
    requested = threads if threads is not None else min(MAX_THREADS, max(MIN_THREADS, os.cpu_count() or 1))
    if requested < 1:
        raise UsageError(f"{flags.threads} must be at least 1", expected="1 or more", found=str(requested))
    affordable = max_memory // (BUFFERS_PER_THREAD * SMALLEST_WINDOW)
    if affordable < 1:
        raise UsageError(
            f"{flags.max_memory} is too small for a single copy buffer",
            expected=f"at least {size_text(BUFFERS_PER_THREAD * SMALLEST_WINDOW)}",
            found=size_text(max_memory),
            next_step=f"{flags.max_memory(f'{BUFFERS_PER_THREAD * SMALLEST_WINDOW >> 10}KiB')}",
        )
    count = min(requested, affordable)
    window = min(LARGEST_WINDOW, max_memory // (BUFFERS_PER_THREAD * count))
    return Budget(count, window // SMALLEST_WINDOW * SMALLEST_WINDOW)


PAGE = 4096  # bytes
WINDOWS_PER_ROUND = 4  # the bytes for several small windows are sent together
MIN_WINDOWS_HELD = 2 * WINDOWS_PER_ROUND  # two rounds: one is received while the other is written


@dataclass(frozen=True, slots=True)
class JobSettings:
    """Sizes in bytes, the same on all ranks. ``window``: assembled and written at once; ``window_memory``: buffers of
    all threads together. ``round_bytes``: received in one round; ``rounds_held``: how many rounds are held at once.
    ``exchange_bytes``: buffers of the process group. These three are 0 if every rank sees all of its sources.
    ``files_at_once``: the number of target files that take turns.
    """

    window: int
    window_memory: int
    round_bytes: int
    rounds_held: int
    exchange_bytes: int
    files_at_once: int


def choose_settings(plan: Plan, budget: Budget, max_memory: int, *, exchanging: bool) -> JobSettings:
    """The settings for ``max_memory`` bytes per rank; ``budget`` has its number of threads.

    If bytes are exchanged, an eighth of the memory is for the exchange, half as much for reading what is sent, and at
    most half for windows, each no more than a sixteenth; rounds of four windows get the rest. Raises UsageError if that
    is not enough.
    """
    files_at_once = min(FILES_AT_ONCE, written_files_limit())
    if not exchanging:
        return JobSettings(budget.window, max_memory, 0, 0, 0, files_at_once)
    growth = max(1.0, max((source.itemsize / target.itemsize for source, target in plan.casts), default=1.0))
    largest = make_budget(max_memory=max_memory // 2, threads=budget.threads)
    window = max(min(largest.window, max_memory // 32) // PAGE, 1) * PAGE
    window_memory = largest.threads * BUFFERS_PER_THREAD * window
    remaining = max_memory - max_memory // 8 - max_memory // 16 - window_memory
    window = min(window, max(int(remaining / MIN_WINDOWS_HELD / growth) // PAGE, 1) * PAGE)
    round_bytes = int(WINDOWS_PER_ROUND * window * growth)
    rounds_held = max(remaining // round_bytes, 2)
    return JobSettings(window, window_memory, round_bytes, rounds_held, max_memory // 8, files_at_once)


def threads_for(settings: JobSettings, budget: Budget) -> int:
    """How many of the threads of ``budget`` this rank has memory for."""
    return max(min(budget.threads, settings.window_memory // (BUFFERS_PER_THREAD * settings.window)), 1)


def for_worker(budget: Budget, local_workers: int, *, max_memory: int, chosen: bool) -> Budget:
    """The share of ``budget`` for one of ``local_workers`` workers on a machine: at least two threads, of which one
    assembles while the other waits for the disk.

    ``chosen``: the user chose the number of threads, with ``--threads``; each worker gets it.
    """
    if chosen or local_workers == 1:
        return budget
    return make_budget(max_memory=max_memory, threads=max(budget.threads // local_workers, 2))


@dataclass(frozen=True, slots=True, eq=False)
class Job:
    """What all ranks do together. ``segments``: which rank writes what.

    ``written``: the windows that an interrupted run has written, by segment, in order: rows of ``plan.written``.
    """

    plan: Plan
    files: tuple[SourceFile, ...]
    checksums: Checksums
    segments: tuple[Segment, ...]
    settings: JobSettings
    written: Int64Array = field(default_factory=lambda: NOTHING_WRITTEN_IN_SEGMENTS)


def pack_job(job: Job) -> dict[str, object]:
    """Encode ``job`` as text, bytes, lists and arrays."""
    blobs, numbers = _blobs(job.plan)
    checksums = job.checksums
    segments = [
        (segment.file, segment.directory, segment.begin, segment.end, segment.owner) for segment in job.segments
    ]
    return {
        "checksums": np.stack([checksums.file, checksums.offset, checksums.nbytes, checksums.crc]),
        "segments": np.asarray(segments, np.int64).reshape(-1, 5),
        "written": job.written,
        "files": pack_files(job.files),
        "settings": list(astuple(job.settings)),
        "bytes_read": job.plan.bytes_read,
        "casts": [[source.name, target.name] for source, target in job.plan.casts],
        "blobs": [bytes(blob) for blob in blobs],
        "targets": [_packed_file(file, number) for file, number in zip(job.plan.files, numbers, strict=True)],
    }


def _blobs(plan: Plan) -> tuple[list[bytes | bytearray], list[int]]:
    """The blobs of all files without repeats, and the number of each file's blob: neighbours may share one."""
    blobs: list[bytes | bytearray] = []
    numbers = []
    for file in plan.files:
        if not blobs or file.blob != blobs[-1]:
            blobs.append(file.blob)
        numbers.append(len(blobs) - 1)
    return blobs, numbers


def _packed_file(file: FilePlan, blob: int) -> list[object]:
    tables = (file.literals, file.write_items, file.first_copy, np.stack(file.copies), file.checksums)
    return [file.path, file.nbytes, blob, *tables]


def unpack_job(value: object) -> Job:
    """The inverse of ``pack_job``."""
    fields = cast("dict[str, object]", value)
    casts = cast("list[list[str]]", fields["casts"])
    targets = cast("list[Sequence[object]]", fields["targets"])
    blobs = cast("list[bytes]", fields["blobs"])
    return Job(
        plan=Plan(
            tuple(_unpacked_file(target, blobs) for target in targets),
            tuple((DTYPES[source], DTYPES[target]) for source, target in casts),
            cast("int", fields["bytes_read"]),
        ),
        files=tuple(unpack_files(cast("list[list[object]]", fields["files"]))),
        checksums=Checksums(*cast("Int64Array", fields["checksums"])),
        segments=tuple(Segment(*row) for row in cast("Int64Array", fields["segments"]).tolist()),
        settings=JobSettings(*cast("list[int]", fields["settings"])),
        written=cast("Int64Array", fields["written"]),
    )


def _unpacked_file(target: Sequence[object], blobs: Sequence[bytes]) -> FilePlan:
    path, nbytes, blob = cast("tuple[str, int, int]", tuple(target[:3]))
    literals, write_items, first_copy, copies, checksums = cast("list[Int64Array]", target[3:])
    columns = Copies(*np.ascontiguousarray(copies))
    return FilePlan(path, nbytes, blobs[blob], literals, write_items, first_copy, columns, checksums)
