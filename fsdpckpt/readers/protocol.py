"""Defines the reader protocol: a reader recognises its files, and reads them into one nested state dict.

``detect`` lists a path and asks the readers of ``readers.READERS`` in order. Each claims its files and returns a
``Part`` for every container among them; ``Part.read`` returns its ``PartContents``. Recognising looks at names and
first bytes, reading at headers and metadata: neither reads tensor data. ``docs/adding-a-format.md`` walks through a
complete reader.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import lru_cache
from typing import ClassVar, NamedTuple, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from fsdpckpt import flags
from fsdpckpt.errors import UsageError
from fsdpckpt.ir.checkpoint import Checkpoint, Checksums, Evidence, Layout, Note, Problem, Section, SourceFile
from fsdpckpt.ir.dtypes import DType
from fsdpckpt.ir.files import Inline, Stored, paths_in
from fsdpckpt.ir.optimizer import ParamKey
from fsdpckpt.ir.placements import Shard, Sharded, Whole
from fsdpckpt.ir.tensors import Boxes, Chunks, Int64Array, Tensor
from fsdpckpt.ir.text_keys import LostDict
from fsdpckpt.ir.units import Units
from fsdpckpt.ir.values import Key, Value
from fsdpckpt.storage import Entry
from fsdpckpt.storage.sources import Sources, matches

MANIFEST = "fsdpckpt.json"
UNITS = "units.json"  # the file name that save_units uses in a directory

_MAX_POINTER_BYTES = 1024  # of a file that names the last checkpoint

KeyPath: TypeAlias = tuple[Key, ...]
"""Where a value is in a nested state dict: dict keys and list positions, outermost first."""

Items: TypeAlias = Int64Array
"""Items of DCP directories, as ``readers.dcp.items`` numbers them, ascending."""


def require_matches(globs: Sequence[str], *checkpoints: Checkpoint) -> None:
    """Raises UsageError for a glob that no file of the ``checkpoints`` matched."""
    ignored = [path for checkpoint in checkpoints for path in checkpoint.origin.ignored]
    for glob in globs:
        if not any(matches(glob, path) for path in ignored):
            names = [path for checkpoint in checkpoints for path in paths_in(checkpoint.files)]
            sources = " or ".join(checkpoint.source for checkpoint in checkpoints)
            raise UsageError(
                f"{flags.ignore_file(glob)} matches no file of {sources}",
                details=[f"{name} exists" for name in get_close_matches(glob, names, n=3, cutoff=0.4)],
                next_step="give the name of a file or directory, or its path from there",
            )


@dataclass(frozen=True, slots=True, eq=False)
class Locate:
    """Which tensors of a DCP directory are located: their items are opened, and show where in its file each chunk is.

    ``Locate.NOTHING``: the metadata alone is read, and few of the other values; ``Locate.ALL``; ``Locate.only(items)``:
    the tensors that have one of ``items``, and all other values.
    """

    all: bool
    items: Items = field(default_factory=lambda: np.zeros(0, np.int64))
    values: bool = True  # whether everything that is not a tensor is read

    NOTHING: ClassVar[Locate]
    ALL: ClassVar[Locate]

    @classmethod
    def only(cls, items: Items) -> Locate:
        return cls(all=False, items=items)


Locate.NOTHING = Locate(all=False, values=False)
Locate.ALL = Locate(all=True)


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """How to read a checkpoint. ``locate``: which data files to open whose metadata alone describes the tensors; chunks
    of others have offset -1. ``only``: the requested section; parts whose names show that they hold a different one may
    be incomplete. ``prefer_dcp_over_exports``: if a directory has a DCP checkpoint and a file with the same
    section, the file is left out, as by ``dcp.load``.
    """

    locate: Locate = Locate.ALL
    only: Section | None = None
    prefer_dcp_over_exports: bool = False


class Reader(Protocol):
    """A family of checkpoint files. Readers have no state: one instance reads every checkpoint."""

    def recognise_file(self, file: Entry, sources: Sources) -> Part | None:
        """Claim ``file``, which the user named; None if it is not of this family.

        Raises SourceUnrecognisedError for a file that is useless without the files beside it.
        """
        ...

    def recognise_directory(
        self, path: str, files: Mapping[str, Entry], options: ReadOptions, sources: Sources
    ) -> Claim:
        """Claim the containers among ``files``: the files by name in the directory ``path`` that no reader before this
        one claimed.

        Raises SourceIncompleteError that lists the files that others refer to and that are missing.
        """
        ...


@dataclass(slots=True)
class Claim:
    """What one reader recognised in a directory: the parts, the names of all files that belong to them, those of these
    files that are not read, and the subdirectories that contain the parts.
    """

    parts: list[Part] = field(default_factory=list)
    names: set[str] = field(default_factory=set)
    left_out: list[str] = field(default_factory=list)
    directories: set[str] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class Part:
    """One container that can be read. ``label``: its name in messages, a path, or for a set of files a text that names
    them. ``glob``: what the file names of such a set match. ``stem``: the key for its extras.

    ``read`` opens it: numbers its files in the given table, and raises SourceIncompleteError, SourceCorruptError,
    SourceUnsafeError or SourceUnsupportedError. Problems that do not stop it are in the tree. ``ranks_inferred``: the
    ranks come from file names with nothing but a number. ``optional``: the name does not show a model or an optimizer,
    so a checkpoint is complete without this part. ``extras``: the framework keeps neither in a file of this name.
    """

    label: str
    stem: str
    read: PartReader
    glob: str = ""
    ranks_inferred: bool = False
    optional: bool = False
    extras: bool = False

    @property
    def directory(self) -> str:
        return self.label.rpartition("/")[0]

    @property
    def name(self) -> str:
        """The last component of ``label``."""
        return self.label.rpartition("/")[2]


class FileTable:
    """Numbers the files of one checkpoint; ``Chunks.file`` holds these numbers.

    ``units``: those of the checkpoint, if they are known before its files are read. ``without_slices``: the files that
    this program wrote, if not as slices of flat parameters. ``lost``: the dicts that are others in its DCP directory.
    """

    def __init__(self, units: Units | None = None) -> None:
        self.units = units
        self.without_slices: Collection[str] = ()
        self.lost: Sequence[LostDict] = ()
        self._ids: dict[str, int] = {}
        self._files: list[SourceFile] = []

    def add(self, path: str, nbytes: int) -> int:
        """The number of ``path``, assigned on first use."""
        number = self._ids.get(path)
        if number is None:
            number = self._ids[path] = len(self._files)
            self._files.append(Stored(path, nbytes))
        return number

    def add_inline(self, data: bytes) -> int:
        """The number of a source that is ``data`` itself."""
        self._files.append(Inline(data))
        return len(self._files) - 1

    def files(self) -> tuple[SourceFile, ...]:
        return tuple(self._files)

    def may_hold_slices(self) -> bool:
        """Whether there may be slices of flat parameters in them: not in what this program wrote otherwise."""
        return not all(path in self.without_slices for path in self._ids)

    def truncate(self, count: int) -> None:
        """Remove all files but the first ``count``."""
        for file in self._files[count:]:
            if isinstance(file, Stored):
                del self._ids[file.path]
        del self._files[count:]


@dataclass(slots=True)
class PartContents:
    """The content of one container. ``root``: the state dict as the producer nested it (ranks merged, dotted DCP keys
    nested again), with leaves that are ``Tensor`` or values.

    ``rank_values``: for rank files, the leaves (values, and plain tensors of extras) that differ between ranks: path ->
    value of each rank, index = rank (None if that rank has no such key). ``root`` has rank 0's. ``absences``: keys of
    the same files that some ranks lack: path -> those ranks. ``missing``: keys that a rank lacks although it should
    hold a part of them: path -> what is wrong then. ``checksums``: CRC-32 records of its files.
    ``differs``: reads a vector that several ranks have whole, and tells whether its bytes differ between them.
    ``world_size``: how many ranks wrote it, from the metadata. ``container``: one of ``ir.checkpoint.Container``, or
    the name of a format that can only be read. ``evidence``: why the files were recognised. ``devices``: the device
    types of the DTensors' meshes. ``flavor``: the producer if the content shows it, or "". ``orders``: by the
    path of an optimizer, the keys that the groups list on each rank that lists others, or in another order.
    ``keys_in_order``: as ``Origin.keys_in_order``. ``groups_rebuilt``: as ``Optimizer.rebuilt``, for a reader
    that makes the groups. ``copies``: as ``Checkpoint.copies``.
    """

    root: Value
    layout: Layout
    container: str
    world_size: int
    rank_values: dict[KeyPath, tuple[Value, ...]] = field(default_factory=dict)
    absences: dict[KeyPath, frozenset[int]] = field(default_factory=dict)
    missing: dict[KeyPath, Problem] = field(default_factory=dict)
    checksums: Checksums = field(default_factory=lambda: Checksums.of([]))
    differs: Callable[[Tensor], bool] = lambda _: False
    evidence: list[Evidence] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    notes: list[Note] = field(default_factory=list)
    devices: set[str] = field(default_factory=set)
    flavor: str = ""
    orders: dict[KeyPath, dict[int, list[list[ParamKey]]]] = field(default_factory=dict)
    keys_in_order: bool = True
    groups_rebuilt: bool = False
    copies: dict[str, Tensor] = field(default_factory=dict)


class ChunkedTensor(NamedTuple):
    key: str
    dtype: DType
    shape: tuple[int, ...]
    chunks: Chunks


def build_tensors(tensors: Sequence[ChunkedTensor], *, world_size: int) -> dict[str, Tensor]:
    """Make the tensors. ``world_size``: how many ranks wrote them. The chunks alone decide whether and how FSDP shards
    a tensor.
    """
    cut_of: dict[tuple[tuple[int, ...], Boxes], list[int] | None] = {}  # tensors that are cut alike share their boxes
    cuts = []
    for tensor in tensors:
        alike = (tensor.shape, tensor.chunks.boxes)
        if alike not in cut_of:
            cut_of[alike] = _cut_dimensions(tensor)
        cuts.append(cut_of[alike])
    several = any(cut is not None for cut in cuts) and world_size > 1
    built: dict[str, Tensor] = {}
    for (key, dtype, shape, chunks), cut in zip(tensors, cuts, strict=True):
        sharded = None if shape else False
        if shape and cut is not None:
            sharded = True
        elif shape and several and shape[0] >= 2:  # one row is one chunk either way under FSDP1: this proves nothing
            sharded = False
        built[key] = Tensor(dtype, shape, chunks, sharded, _by_dimensions(tuple(cut or [0])) if sharded else Whole())
    return built


@lru_cache(maxsize=64)
def _by_dimensions(dims: tuple[int, ...]) -> Sharded:
    return Sharded(tuple(Shard(dim) for dim in dims))


def _cut_dimensions(tensor: ChunkedTensor) -> list[int] | None:
    """The dimensions along which the chunks divide the tensor; None if each chunk is all of it."""
    size, shape = tensor.chunks.size, tensor.shape
    if len(size) == 1 and tuple(size[0].tolist()) == shape:
        return None
    differs: npt.NDArray[np.bool_] = np.not_equal(size, np.array(shape, np.int64))
    if not differs.any():
        return None
    filled: npt.NDArray[np.bool_] = np.all(size > 0, axis=1, keepdims=True)
    differs[:, 1:] &= filled  # an empty chunk only shows that rows are cut
    cut: list[int] = np.flatnonzero(differs.any(axis=0)).tolist()
    return cut


PartReader: TypeAlias = Callable[[FileTable, Sources], PartContents]


def file_name(path: str) -> str:
    """The last component of a URL, or of a path of any operating system."""
    return path.replace("\\", "/").rpartition("/")[2]


def stem_of(name: str) -> str:
    """``name`` without its suffix."""
    return name.rpartition(".")[0] or name


def dotted(path: tuple[object, ...]) -> str:
    """The path of keys joined by dots; "the top level" if it is empty."""
    return ".".join(map(str, path)) or "the top level"


def claim_latest(
    path: str,
    pointer: Entry | None,
    sources: Sources,
    claim: Callable[[str, Mapping[str, Entry]], Claim],
    directory: Callable[[str], str | None] = str,
) -> Claim:
    """Claim the last checkpoint of the run in ``path``: that in the subdirectory which the small file ``pointer``
    names. Claims nothing if there is no such subdirectory.

    ``directory``: makes its name from the file's content, None for content that no program writes. ``claim``: claims
    the files of a directory.
    """
    if pointer is None or not 0 < pointer.nbytes <= _MAX_POINTER_BYTES:
        return Claim()
    name = directory(sources.open(pointer.path).read(0, pointer.nbytes).decode("utf-8", "replace").strip())
    if name is None or not any(entry.directory and entry.name == name for entry in sources.list_directory(path)):
        return Claim()
    below = f"{path.rstrip('/')}/{name}"
    files = {entry.name: entry for entry in sources.list_directory(below) if not entry.directory}
    parts = claim(below, files).parts
    return Claim(parts, {pointer.name}, directories={name}) if parts else Claim()
