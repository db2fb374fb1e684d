"""Proves source records by reading them once more: those of which the sums of what was read do not make the whole.

Rows that lie apart in the source, as those of a transposed tensor or of a tensor cut by columns do, are read with the
gaps between them, in spans that overlap or leave some out. And of what an interrupted run of workers read no journal
may have all parts: a worker sums what it reads, and names the sums in its journal with the windows that it writes
itself, so that those of what it sent to another worker may be lost while that window is on the disk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from fsdpckpt.execute.checks import SourceCheck, SourceRecord, require_sum
from fsdpckpt.execute.crc import crc32
from fsdpckpt.ir.checkpoint import SourceFile
from fsdpckpt.ir.tensors import Int64Array
from fsdpckpt.plan.plan import Copies, Plan
from fsdpckpt.plan.windows import Range, split
from fsdpckpt.storage.sources import Sources

__all__ = ["has_gaps", "read_again", "unjudged"]

CHUNK = 1 << 20  # bytes read at a time


def has_gaps(plan: Plan) -> bool:
    """Whether any rows of ``plan`` lie apart in their source."""
    return any(_gapped(plan, file.copies).any() for file in plan.files)


def unjudged(check: SourceCheck, plan: Plan, received: Mapping[int, Sequence[Range]]) -> list[SourceRecord]:
    """The records that ``check`` has not all parts of, among those whose rows lie apart, and those of ``received``.

    ``received[file]``: ranges of target files, of which other workers read the sources.
    """
    spans: dict[int, list[Int64Array]] = {}
    for number, ranges in received.items():
        file = plan.files[number]
        begins, ends = np.asarray(ranges, np.int64).reshape(-1, 2).T
        parts = split(file, plan, np.ones(len(file.copies.rows), bool), begins, ends)
        _add(spans, parts.copies, parts.nbytes // parts.copies.rows, np.ones(len(parts.copies), bool))
    for file in plan.files:
        copies = file.copies
        _add(spans, copies, plan.source_bytes(copies.width, copies.cast), _gapped(plan, copies))
    found: list[SourceRecord] = []
    for source, several in sorted(spans.items()):
        found += check.unjudged(source, *np.concatenate(several, axis=1))
    return found


def _add(spans: dict[int, list[Int64Array]], copies: Copies, width: Int64Array, wanted: npt.NDArray[np.bool_]) -> None:
    """Add where the ``wanted`` of ``copies`` begin and end, by their source file. Their rows are of ``width`` bytes."""
    ends = copies.source + (copies.rows - 1) * copies.source_pitch + width
    for source in np.unique(copies.file[wanted]).tolist():
        chosen = wanted & (copies.file == source)
        spans.setdefault(source, []).append(np.stack([copies.source[chosen], ends[chosen]]))


def _gapped(plan: Plan, copies: Copies) -> npt.NDArray[np.bool_]:
    found: npt.NDArray[np.bool_] = (copies.rows > 1) & (
        copies.source_pitch != plan.source_bytes(copies.width, copies.cast)
    )
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
