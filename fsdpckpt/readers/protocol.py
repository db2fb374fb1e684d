"""State what a reader is: it recognises its files, and reads them into one nested state dict.

``detect`` lists what is at a path and asks the readers of ``readers.READERS`` in their order. Each claims the files
that are its own and gives a ``Part`` for every container among them; whoever wants the content calls ``Part.read``,
which returns a ``Tree``. Recognising looks at names and first bytes, reading at headers and metadata: neither reads the
data of tensors. ``docs/adding-a-format.md`` walks through a complete reader.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

from fsdpckpt.ir.checkpoint import Checksums, Evidence, Layout, Note, Problem, Section, SourceFile
from fsdpckpt.ir.units import RankOrder, Units
from fsdpckpt.ir.values import Value
from fsdpckpt.readers.ignored import IgnoredFiles
from fsdpckpt.storage.protocols import Entry
from fsdpckpt.storage.sources import Sources

MANIFEST = "fsdpckpt.json"
UNITS = "units.json"  # what save_units calls its file in a directory


Items: TypeAlias = frozenset[tuple[int, int]]
"""Tensors of a DCP directory by the first item of each: the number of its file, and where in it the item begins."""


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """``locate=False``: leave the data files closed where metadata alone describe the tensors; chunks then have
    offset -1; with items, only their tensors are located. ``only``: the section that is wanted; parts that clearly hold
    another one may be incomplete. ``ignored``: files that are left out. ``as_dcp``: where one directory has a DCP
    checkpoint and another file with the same section, only the first counts, as for ``dcp.load``.
    """

    locate: bool | Items = True
    only: Section | None = None
    ignored: IgnoredFiles = field(default_factory=IgnoredFiles)
    as_dcp: bool = False


class Reader(Protocol):
    """A family of checkpoint files. Readers have no state: one instance serves every checkpoint."""

    def recognise_file(self, file: Entry, sources: Sources) -> Part | None:
        """How to read ``file``, which the user named; None when it is not of this family.

        Raises SourceUnrecognisedError for a file that only means something together with the files beside it.
        """
        ...

    def recognise_directory(
        self, path: str, files: Mapping[str, Entry], options: ReadOptions, sources: Sources
    ) -> Claim:
        """The containers among ``files``, the files by name that lie in the directory ``path`` and that no reader
        before this one claimed.

        Raises SourceIncompleteError, naming all of them, when files are missing that the names of others ask for.
        """
        ...


@dataclass(slots=True)
class Claim:
    """What one reader recognised in a directory: the parts, the names of all files that are its own, those of them that
    are not to be read, and the sub-directories that the parts are in."""

    parts: list[Part] = field(default_factory=list)
    names: set[str] = field(default_factory=set)
    not_carried: list[str] = field(default_factory=list)
    directories: set[str] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class Part:
    """One container that can be read. ``label``, a path, names it in messages; ``stem`` names its extras.

    ``read`` opens it: it numbers its files in the table given, and raises SourceIncompleteError, SourceCorruptError,
    SourceUnsafeError or SourceUnsupportedError. Problems that do not stop it are in the tree. ``bare_ranks``: file
    names with nothing but a number were taken for ranks. ``neighbour``: the name does not say that this is a model or
    an optimizer, so that a checkpoint can do without it. ``extras``: the framework keeps neither in a file of this
    name.
    """

    label: str
    stem: str
    read: ReadPart
    bare_ranks: bool = False
    neighbour: bool = False
    extras: bool = False


class FileTable:
    """Numbers the files of one checkpoint; ``Chunks.file`` holds these numbers.

    ``units``: those of the checkpoint, as far as they are known before its files are read.
    """

    def __init__(self, units: Units | None = None) -> None:
        self.units = units
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
    ``checksums``: CRC-32 records of its files. ``world_size``: how many ranks wrote it, from the metadata.
    ``container``: one of ``ir.checkpoint.Container``, or the name of a format that can only be read.
    ``evidence``: what says that the files are what they were taken for. ``devices``: the device types of the meshes of
    DTensors. ``flavor``: the producer where the content says it, or "". ``orders``: as ``Checkpoint.orders``.
    """

    root: Value
    layout: Layout
    container: str
    world_size: int
    rank_values: dict[tuple[Value, ...], tuple[Value, ...]] = field(default_factory=dict)
    absences: dict[tuple[Value, ...], frozenset[int]] = field(default_factory=dict)
    checksums: Checksums = field(default_factory=lambda: Checksums.of([]))
    evidence: list[Evidence] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    notes: list[Note] = field(default_factory=list)
    devices: set[str] = field(default_factory=set)
    flavor: str = ""
    orders: tuple[RankOrder, ...] = ()


ReadPart: TypeAlias = Callable[[FileTable, Sources], Tree]


def file_name(path: str) -> str:
    """The last component of a path of any system or of a URL."""
    return path.replace("\\", "/").rpartition("/")[2]


def stem_of(name: str) -> str:
    """``name`` without its suffix."""
    return name.rpartition(".")[0] or name


def dotted(path: tuple[object, ...]) -> str:
    """The path of keys as people write it; "the top level" without any."""
    return ".".join(map(str, path)) or "the top level"
