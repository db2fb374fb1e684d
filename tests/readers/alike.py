"""What comes of the files of several ranks, those that are alike parsed once, and each parsed: in plain values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fsdpckpt.errors import FsdpckptError
from fsdpckpt.ir.checkpoint import Checksums
from fsdpckpt.ir.tensors import Tensor
from fsdpckpt.readers.protocol import FileTable
from fsdpckpt.readers.torch_ranks.merge import RankMerge
from fsdpckpt.readers.torch_ranks.rank_files import grouped, open_ranks
from fsdpckpt.storage.sources import Sources

__all__ = ["Refusal", "same_end"]


class Refusal:
    """An error that equals another of the same type and words."""

    def __init__(self, error: FsdpckptError) -> None:
        self.error = error

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Refusal) and self._words() == other._words()

    def __hash__(self) -> int:
        return hash(str(self.error))

    def __repr__(self) -> str:
        return f"{type(self.error).__name__}: {self.error}"

    def _words(self) -> tuple[object, ...]:
        error = self.error
        return type(error), str(error), error.details, error.file, error.key, error.expected, error.found


def same_end(paths: Mapping[int, str], sources: Sources | None = None) -> object:
    """The end that reading the files of ranks comes to: what they hold together, or the error.

    Raises AssertionError when parsing all files, and parsing only what differs, do not come to the same end.
    """
    with sources or Sources() as opened:
        once, each = _end(paths, opened, alike=True), _end(paths, opened, alike=False)
    if once != each:
        raise AssertionError(f"{once} is not {each}")
    return once


def _end(paths: Mapping[int, str], sources: Sources, *, alike: bool) -> object:
    table = FileTable()
    table.add("another-part.pt", 1)  # so that no file has its rank's number
    try:
        files = open_ranks(paths, table, sources, alike=alike)
    except FsdpckptError as error:
        return Refusal(error)
    archives = [file.archive for file in files]
    merge = RankMerge(grouped(files, [one.root for one in archives]), sharded=any(one.forms for one in archives))
    root = merge.value([group.root for group in grouped(files, [one.root for one in archives])])
    said = [(one.ranks, set().union(*one.worlds), one.forms, one.devices, one.dropped) for one in archives]
    sums = [_columns(one.checksums) for one in archives]
    return (
        plain(root),
        merge.problems,
        plain(merge.rank_values),
        merge.absences,
        said,
        sums,
        table.files(),
    )


def _columns(sums: Checksums) -> list[list[int]]:
    return [column.tolist() for column in (sums.file, sums.offset, sums.nbytes, sums.crc)]


def plain(value: Any) -> Any:
    """``value`` with its tensors as tuples, and with types where equality does not see them."""
    if isinstance(value, Tensor):
        chunks = value.chunks
        columns = (chunks.rank, chunks.file, chunks.offset, chunks.start, chunks.size, chunks.stride)
        said = (value.dtype.name, value.shape, value.sharded, value.placement, value.sharding)
        return (*said, *(column.tolist() for column in columns))
    if isinstance(value, dict):
        return (
            type(value).__name__,
            [(key, plain(child)) for key, child in value.items()],
            plain(vars(value)) if hasattr(value, "__dict__") else None,
        )
    if isinstance(value, (list, tuple)):
        return type(value).__name__, [plain(child) for child in value]
    return type(value).__name__, repr(value)
