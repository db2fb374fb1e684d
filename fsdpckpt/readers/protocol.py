"""What every container reader returns: one nested state dict, before its sections are told apart."""

from __future__ import annotations

from dataclasses import dataclass, field

from fsdpckpt.ir.checkpoint import Container, Layout, Note, Problem, SourceFile
from fsdpckpt.ir.values import Value

__all__ = ["EXTRA_STEM", "FileTable", "MANIFEST", "Tree", "UNITS"]

MANIFEST = "fsdpckpt.json"
UNITS = "units.json"  # what save_units calls its file in a directory
EXTRA_STEM = "extra_state"  # of the rank files, verl's and this program's, that hold extras and nothing else


class FileTable:
    """Numbers the files of one checkpoint; ``Chunks.file`` holds these numbers."""

    def __init__(self) -> None:
        self._ids: dict[str, int] = {}
        self._files: list[SourceFile] = []

    def add(self, path: str, nbytes: int) -> int:
        """The number of ``path``, given out on first sight."""
        number = self._ids.get(path)
        if number is None:
            number = self._ids[path] = len(self._files)
            self._files.append(SourceFile(path, nbytes))
        return number

    def files(self) -> tuple[SourceFile, ...]:
        return tuple(self._files)


@dataclass(slots=True)
class Tree:
    """One container, read. ``root`` is the state dict as the producer nested it (ranks merged, dotted DCP keys
    put back into their nesting), leaves ``Tensor`` or values.

    ``rank_values``: for per-rank files, the non-tensor leaves (and plain tensors of extras) that differ between ranks:
    path -> value of each rank, index = rank (None where that rank has no such key). ``root`` has rank 0's.
    ``absences``: the same files' keys that some ranks lack: path -> those ranks.
    ``checksums``: rows (file, offset, nbytes, crc). ``world_size``: how many ranks wrote it, from the metadata.
    ``devices``: the device types of the meshes of DTensors. ``flavor``: the producer where the content says it, or "".
    """

    root: Value
    layout: Layout
    container: Container
    world_size: int
    rank_values: dict[tuple[Value, ...], tuple[Value, ...]] = field(default_factory=dict)
    absences: dict[tuple[Value, ...], frozenset[int]] = field(default_factory=dict)
    checksums: list[tuple[int, int, int, int]] = field(default_factory=list)
    evidence: list[str] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    notes: list[Note] = field(default_factory=list)
    devices: set[str] = field(default_factory=set)
    flavor: str = ""
