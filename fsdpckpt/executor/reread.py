"""Proves source records again that an interrupted run of workers read, and of which no journal has all parts.

A worker sums what it reads, and names the sums in its journal with the windows that it writes itself. What it sent to
another worker may be in a window on the disk while its sums were lost: those records are read once more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np

from fsdpckpt.executor.checks import SourceCheck, SourceRecord, require_sum
from fsdpckpt.executor.crc import crc32
from fsdpckpt.executor.splitting import split
from fsdpckpt.ir.checkpoint import SourceFile
from fsdpckpt.planner.plan import Plan
from fsdpckpt.planner.windows import Range
from fsdpckpt.storage.sources import Sources

__all__ = ["read_again", "unjudged"]

CHUNK = 1 << 20  # bytes read at a time


def unjudged(check: SourceCheck, plan: Plan, received: Mapping[int, Sequence[Range]]) -> list[SourceRecord]:
    """The records with bytes in the ranges ``received[file]`` of target files that ``check`` has not all parts of."""
    spans: dict[int, list[np.ndarray[tuple[int, int], np.dtype[np.int64]]]] = {}
    for number, ranges in received.items():
        file = plan.files[number]
        begins, ends = np.asarray(ranges, np.int64).reshape(-1, 2).T
        parts = split(file, plan, np.ones(len(file.copies.rows), bool), begins, ends)
        copies = parts.copies
        last = copies.source + (copies.rows - 1) * copies.source_pitch + parts.nbytes // copies.rows
        for source in np.unique(copies.file).tolist():
            chosen = copies.file == source
            spans.setdefault(source, []).append(np.stack([copies.source[chosen], last[chosen]]))
    found: list[SourceRecord] = []
    for source, several in sorted(spans.items()):
        found += check.unjudged(source, *np.concatenate(several, axis=1))
    return found


def read_again(
    records: Iterable[SourceRecord], files: Sequence[SourceFile], sources: Sources, moved: Callable[[], None]
) -> None:
    """Raises SourceCorruptError for a record that does not match its checksum. Calls ``moved`` all the time."""
    buffer = memoryview(bytearray(CHUNK))
    for file, offset, nbytes, expected in records:
        source = sources.open(files[file].path)
        total = 0
        for at in range(0, nbytes, CHUNK):
            view = buffer[: min(CHUNK, nbytes - at)]
            source.read_into(offset + at, view)
            total = crc32(view, total)
            moved()
        require_sum(files[file].path, offset, nbytes, expected, total)
