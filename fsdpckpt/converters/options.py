"""Everything ``convert`` can be told, as data. The command line and the Python API fill the same record."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum

from fsdpckpt.ir.checkpoint import Container, Layout, Section

__all__ = ["ConvertOptions", "TensorForm", "VerifyLevel", "parse_size"]

DEFAULT_MAX_MEMORY = 128 * 1024 * 1024  # bytes of copy buffers: several windows a thread, far below a laptop's memory
DEFAULT_MAX_SHARD_SIZE = 5_000_000_000  # bytes, the split Hugging Face's own writers use


class TensorForm(StrEnum):
    """What a per-rank sharded torch file holds."""

    DTENSOR = "dtensor"
    SHARDED_TENSOR = "sharded-tensor"


class VerifyLevel(StrEnum):
    NONE = "none"
    STRUCTURE = "structure"
    FULL = "full"


@dataclass(frozen=True, slots=True)
class ConvertOptions:
    """Options of one conversion; None means "as the contract's default says". Sizes are bytes.

    ``buffers``: globs of model keys that every rank holds whole; the single word ``none`` says there are none.
    ``rename``: (old, new) pairs, applied to whole keys or to dotted prefixes, in order.
    ``dtype`` and ``optim_dtype`` are torch dtype names.
    """

    to: Layout | None = None
    container: Container | None = None
    world_size: int | None = None
    tensor: TensorForm = TensorForm.DTENSOR
    reference: str | None = None
    buffers: tuple[str, ...] = ()
    only: Section | None = None
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    strip_prefix: str | None = None
    add_prefix: str | None = None
    rename: tuple[tuple[str, str], ...] = ()
    dtype: str | None = None
    optim_dtype: str | None = None
    max_shard_size: int = DEFAULT_MAX_SHARD_SIZE
    max_memory: int = DEFAULT_MAX_MEMORY
    threads: int | None = None
    verify: VerifyLevel = VerifyLevel.STRUCTURE
    dry_run: bool = False
    overwrite: bool = False


_UNITS = {
    "": 1,
    "k": 1000,
    "m": 1000**2,
    "g": 1000**3,
    "t": 1000**4,
    "ki": 1024,
    "mi": 1024**2,
    "gi": 1024**3,
    "ti": 1024**4,
}


def parse_size(text: str) -> int:
    """``"128MiB"``, ``"5GB"``, ``"1000"`` to bytes. Raises ValueError for anything else."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(|[kmgt]i?)b?", text.strip().lower(), re.ASCII)
    if found is None:
        raise ValueError(f"{text!r} is not a size; write for example 128MiB or 5GB")
    return int(float(found[1]) * _UNITS[found[2]])
