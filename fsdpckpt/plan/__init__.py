"""Plans every byte of every target file, in columns."""

from fsdpckpt.plan.plan import (
    Copies,
    FilePlan,
    Plan,
    StridedBatch,
    check_file,
    make_plan,
    open_windows,
    rows_within,
    split_copies,
    strided_batches,
)
from fsdpckpt.plan.written import rows_of

__all__ = [
    "Copies",
    "FilePlan",
    "Plan",
    "StridedBatch",
    "check_file",
    "make_plan",
    "open_windows",
    "rows_of",
    "rows_within",
    "split_copies",
    "strided_batches",
]
