"""The windows that an interrupted run has written, as rows: of target files, or of the segments of a job.

They are plain arrays with named columns, and not structured ones: workers send them to each other, which takes numbers
alone.
"""

from __future__ import annotations

import numpy as np

from fsdpckpt.ir.tensors import Int64Array

NUMBER = 0  # of the target file, or of the segment
BEGIN, END = 1, 2  # in bytes of the target file
CRC = 3
RECEIVED = 4  # of windows in a journal: 1 if bytes came from other workers, whose source parts may be in no journal
COLUMNS = 5
COLUMNS_OF_SEGMENTS = 4  # of windows by segment, which this run reads back: all but RECEIVED

NOTHING_WRITTEN: Int64Array = np.zeros((0, COLUMNS), np.int64)
NOTHING_WRITTEN_IN_SEGMENTS: Int64Array = np.zeros((0, COLUMNS_OF_SEGMENTS), np.int64)


def written_bytes(rows: Int64Array) -> int:
    """How many bytes disjoint windows have."""
    return int((rows[:, END] - rows[:, BEGIN]).sum())


def rows_of(rows: Int64Array, number: int) -> Int64Array:
    """The windows of file or segment ``number``. ``rows`` are sorted by it."""
    first, last = rows[:, NUMBER].searchsorted((number, number + 1))
    return rows[first:last]
