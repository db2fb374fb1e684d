"""Recomputes the CRC-32 of every record that carries one: ``torch.load`` does not look at them.

A file whose records all say 0 was saved without (``torch.serialization.set_crc32_options``) and is not judged.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fsdpckpt.errors import SourceError
from fsdpckpt.ir.checkpoint import Checkpoint, Problem
from fsdpckpt.storage.sources import Sources
from fsdpckpt.verify.parallel import DEFAULT_THREADS, Advance, for_each

__all__ = ["Record", "check_records", "records"]

READ_BYTES = 4 * 1024 * 1024  # at once: large enough for a disk, small enough to stay in a processor's cache


@dataclass(frozen=True, slots=True)
class Record:
    """``nbytes`` from ``offset`` of file number ``file``, whose CRC-32 should be ``crc``."""

    file: int
    offset: int
    nbytes: int
    crc: int


def records(checkpoint: Checkpoint) -> list[Record]:
    """Every record to check, in file order; those of files without checksums left out."""
    sums = checkpoint.checksums
    having = set(np.unique(sums.file[sums.crc != 0]).tolist())
    rows = zip(sums.file.tolist(), sums.offset.tolist(), sums.nbytes.tolist(), sums.crc.tolist(), strict=True)
    return [Record(*row) for row in sorted(set(rows)) if row[0] in having]


def check_records(
    checkpoint: Checkpoint,
    wanted: list[Record],
    *,
    sources: Sources,
    threads: int = DEFAULT_THREADS,
    advance: Advance | None = None,
) -> list[Problem]:
    """A problem for each record whose bytes do not sum to its checksum or cannot be read."""
    from isal.isal_zlib import crc32

    def work(buffer: bytearray, record: Record) -> Problem | None:
        path = checkpoint.files[record.file].path
        crc, done = 0, 0
        try:
            source = sources.open(path)
            while done < record.nbytes:
                view = memoryview(buffer)[: min(READ_BYTES, record.nbytes - done)]
                source.read_into(record.offset + done, view)
                crc = crc32(view, crc)
                done += len(view)
                if advance is not None:
                    advance(len(view))
        except SourceError as error:
            return Problem("truncated", str(error.what), file=path)
        if crc == record.crc:
            return None
        return Problem(
            "checksum",
            f"{path}: the record of {record.nbytes} bytes at offset {record.offset} has CRC-32 {crc:08x}, "
            f"and the file says {record.crc:08x}",
            file=path,
        )

    found = for_each(wanted, work, reader=lambda: bytearray(READ_BYTES), threads=threads)
    return [problem for problem in found if problem is not None]
