"""Reads the ``.metadata`` file of a DCP directory: which tensors, in which chunks, in which files.

Written by ``torch.distributed.checkpoint`` (``metadata.py``, ``planner_helpers.py``, ``filesystem.py``) of torch 2.1 to
2.14: one plain pickle of a closed set of dataclasses. A checkpoint of 100,000 tensors has millions of them, so their
names resolve to stub classes that the C unpickler fills by itself (``formats.pickle.StubInstance``); no name is ever
imported, and those outside the set are reported together.

Everything is checked before it is used: chunks lie inside their tensor and are unique, every chunk has one stored item,
relative paths stay inside the directory, offsets and lengths are counts of bytes.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from math import prod
from operator import add, itemgetter, le
from typing import Final, NamedTuple, NoReturn, TypeGuard

import numpy as np

from fsdpckpt.errors import SourceCorruptError, SourceIncompleteError, SourceUnsafeError, damaged
from fsdpckpt.formats.dcp.chunk_table import ChunkTable, Indexes, ItemLocation, StoredChunks, is_inside
from fsdpckpt.formats.dcp.records import CHUNK, ITEM, MetadataRuns, ScannedTensor, scan_metadata
from fsdpckpt.formats.pickle import StubInstance, instance_class, load, state_of, stub_for
from fsdpckpt.formats.pickle.allowlist import STORAGE_MODULES
from fsdpckpt.formats.pickle.check import MAX_DEPTH
from fsdpckpt.formats.pickle.operands import NotScannedError
from fsdpckpt.formats.pickle.records import RecordRun, Scan
from fsdpckpt.ir.dtypes import DTYPES, MAX_DIMENSIONS, DType
from fsdpckpt.ir.tensors import Boxes, contiguous_strides
from fsdpckpt.process import gc_paused
from fsdpckpt.storage import ByteSource
from fsdpckpt.text import plural, truncate

_PATHS = "Path PosixPath WindowsPath PurePath PurePosixPath PureWindowsPath"
_CLASSES = frozenset(
    (module, name)
    for module, names in (
        ("torch.distributed.checkpoint.metadata", "Metadata MetadataIndex StorageMeta TensorProperties"),
        ("torch.distributed.checkpoint.metadata", "TensorStorageMetadata BytesStorageMetadata ChunkStorageMetadata"),
        ("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING"),
        *((module, "_StorageInfo _StoragePrefix") for module in STORAGE_MODULES),
        ("torch.distributed._shard.sharded_tensor.metadata", "TensorProperties MEM_FORMAT_ENCODING"),
        ("torch.serialization", "_get_layout"),
        # Megatron-core keeps every rank's plan in the metadata.
        ("torch.distributed.checkpoint.planner", "SavePlan WriteItem WriteItemType TensorWriteData"),
        ("megatron.core.dist_checkpointing.strategies.torch", "MCoreMetadata MCoreSavePlan"),
        ("pathlib", _PATHS),
        ("pathlib._local", _PATHS),
    )
    for name in names.split()
)
PathElement = int | str
_INTEGERS = {int}
_MAX_FILE_BYTES = 1 << 63
_SMALL = 96 << 10  # bytes of a file that is not scanned
_WHY = "the metadata was damaged or edited, or a custom planner wrote it"


@dataclass(slots=True, eq=False)
class DcpTensor:
    """One tensor: ``shape`` is global, ``chunks`` in the file's order, each offset once."""

    dtype: Final[DType]
    shape: Final[tuple[int, ...]]
    chunks: Final[StoredChunks]


@dataclass(slots=True)
class DcpMetadata:
    """``tensors`` and ``items`` (pickled values) by flat key. ``files``: relative paths, to which chunks refer by
    position.

    ``paths``: the nesting of each flat key, dict keys as str and list positions as int; None if the save did not
    flatten. ``version``: None before torch wrote one. ``transforms``: how encoded items are encoded. ``unflattened``:
    the real shape of tensors that Megatron-core saved as ranges of flattened shards.
    """

    tensors: dict[str, DcpTensor]
    items: dict[str, ItemLocation]
    paths: dict[str, tuple[PathElement, ...]] | None
    version: str | None = None
    order: list[str] = field(default_factory=list)
    files: list[str] = field(default_factory=list)
    transforms: frozenset[str] = frozenset()
    unflattened: dict[str, tuple[int, ...]] = field(default_factory=dict)


class _TorchName(str):
    """``torch.<name>``, a dtype. Kept as a name because a pickle may set the state of whatever it names."""

    __slots__ = ()


def _torch_size(extents: object = ()) -> tuple[int, ...]:
    """``torch.Size``, limited to a few numbers, so that no pickle can build large tuples of sizes of sizes."""
    few = type(extents) in (tuple, list) and len(extents) <= MAX_DIMENSIONS  # type: ignore[arg-type]
    if not (few and _INTEGERS.issuperset(map(type, extents))):  # type: ignore[call-overload]
        raise pickle.UnpicklingError("a size that is not a short list of numbers")
    return tuple(extents)  # type: ignore[arg-type]


def _stub_for(module: str, name: str) -> object | None:
    if module == "torch" and name == "Size":
        return _torch_size
    if module == "torch" and name in DTYPES:
        return _TorchName(name)
    if (module, name) == ("builtins", "getattr"):  # of enum members, by Python 3.11.0 to 3.11.3
        return stub_for(module, name)
    return instance_class(module, name) if (module, name) in _CLASSES else None


def _load(data: bytes, file: str, runs: MetadataRuns | None = None) -> object:
    """The object in ``data``: records, tuples, dicts, scalars, ``_TorchName``. Raises as ``formats.pickle.load``."""
    what = "is not a readable DCP metadata file"
    return load(data, file=file, tensors=runs or _NoRuns(), stubs=_stub_for, what=what)


class _NoRuns:
    """A file that is not scanned has no persistent ids."""

    def storage(self, _persistent_id: object) -> NoReturn:
        raise pickle.UnpicklingError("unexpected persistent id")

    def rebuild(self, function: str, arguments: tuple[object, ...]) -> NoReturn:
        raise pickle.UnpicklingError(f"unexpected tensor: {function}, {len(arguments)} arguments")


def parse_metadata(source: ByteSource) -> DcpMetadata:
    """Parse and validate a ``.metadata`` file.

    Raises SourceUnsafeError (unknown globals), SourceCorruptError (contradictions), SourceIncompleteError (lists all
    entries without a stored item).
    """
    # The general reader accepts or reports anything unexpected: it sees each record. It has read a small file before
    # the patterns of the scanner are compiled.
    if source.nbytes <= _SMALL:
        return _parse_all(source)
    with suppress(NotScannedError, SourceCorruptError, SourceUnsafeError):
        with gc_paused():
            scan = scan_metadata(source)
        return _parse_scanned(scan, source.path)
    return _parse_all(source)


def _parse_all(source: ByteSource) -> DcpMetadata:
    """The same with every record loaded."""
    return _RecordParser(source.path, None).parse(_load(source.read(0, source.nbytes), source.path))


def _parse_scanned(scan: Scan, file: str) -> DcpMetadata:
    """The same of a file whose records were scanned. Raises NotScannedError if the general reader must read it."""
    runs = MetadataRuns(scan)
    root = _load(scan.pickle, file, runs)
    runs.finish()
    return _RecordParser(file, scan).parse(root)


class _ParsedTensor(NamedTuple):
    """A tensor that other keys have, too: dtype and shape, its ``number`` in the table, and starts and sizes if the
    chunks were added one by one.
    """

    head: tuple[DType, Indexes]
    number: int
    boxes: list[tuple[Indexes, Indexes]] | None


class _RecordParser:
    """Parses the records of one file, and adds the chunks of its tensors to a table."""

    def __init__(self, file: str, scan: Scan | None) -> None:
        self._file = file
        self._table = ChunkTable(scan)
        self._parsed: dict[int, _ParsedTensor] = {}  # by the number of the entry

    def _refuse(
        self, what: str, *, key: str | None = None, expected: str | None = None, found: object = None
    ) -> NoReturn:
        if isinstance(found, str):
            text: str | None = found[:200]
        else:
            text = None if found is None else truncate(found)
        raise damaged(self._file, what, expected, text, key=key, why=_WHY)

    def parse(self, root: object) -> DcpMetadata:
        if not isinstance(root, StubInstance) or type(root).__name__ not in ("Metadata", "MCoreMetadata"):
            self._refuse("this is a pickle, but not DCP metadata", expected="Metadata", found=type(root).__name__)
        fields = vars(root)
        entries = fields.get("state_dict_metadata")
        if not isinstance(entries, dict):
            self._refuse("there is no table of entries", expected="state_dict_metadata")
        table = self._table
        self._read_storage_data(fields.get("storage_data"))
        heads: dict[str, tuple[DType, Indexes]] = {}
        items: dict[str, ItemLocation] = {}
        missing: list[tuple[float, str]] = []  # number of tensors before it, what
        for key, entry in entries.items():
            if type(entry) is ScannedTensor and type(key) is str:
                heads[key] = self._add_entry(key, entry)
                continue
            if type(key) is not str or not isinstance(entry, StubInstance):
                self._refuse("an entry is neither a tensor nor a value", found=key)
            kind = type(entry).__name__
            if kind == "TensorStorageMetadata":
                heads[key] = self._tensor(key, entry)
            elif kind != "BytesStorageMetadata":
                self._refuse("an entry is neither a tensor nor a value", key=key, found=kind)
            elif (key, None) in table.single:
                items[key] = table.single[key, None]
            else:
                missing.append((len(table) - 0.5, key))
        paths = _nesting(fields.get("planner_data"))
        chunks, unstored = table.finish()
        self._require_all([*missing, *unstored])
        tensors = {key: DcpTensor(*head, rows) for (key, head), rows in zip(heads.items(), chunks, strict=True)}
        version = fields.get("version")
        order = list(entries)
        if paths is not None:  # planner_data keeps the state dict's own order, the table of entries does not
            order = list(dict.fromkeys([*(key for key in paths if key in entries), *order]))
        transforms = table.transforms.union(*(item.transforms for item in items.values()))
        version = version if isinstance(version, str) else None
        unflattened = self._unflattened(fields.get("mcore_data"), tensors)
        return DcpMetadata(tensors, items, paths, version, order, table.files, frozenset(transforms), unflattened)

    def _unflattened(self, data: object, tensors: dict[str, DcpTensor]) -> dict[str, tuple[int, ...]]:
        """The shapes of tensors in ``mcore_data`` of Megatron-core, {} without it."""
        shapes: dict[str, tuple[int, ...]] = {}
        for key, entry in data.items() if isinstance(data, dict) else ():
            shape = entry.get("nd_reformulated_orig_global_shape") if isinstance(entry, dict) else None
            if shape is None:
                continue
            extents = tuple(shape) if isinstance(shape, (tuple, list)) else ()
            valid = 0 < len(extents) <= MAX_DIMENSIONS and all(type(n) is int and 0 <= n < 1 << 59 for n in extents)
            if type(key) is not str or key not in tensors or not valid:
                self._refuse(
                    "mcore_data gives an invalid shape, or one for a tensor that is not in the checkpoint", found=key
                )
            shapes[key] = extents
        return shapes

    def _require_all(self, missing: list[tuple[float, str]]) -> None:
        if missing:
            names = [name for _, name in sorted(missing, key=itemgetter(0))]
            raise SourceIncompleteError(
                f"{self._file}: {plural(len(names), 'entry', 'have')} no stored data",
                details=names[:50],
                why="the save did not finish, or the metadata was damaged",
                next_step="save the checkpoint again",
                file=self._file,
                key=names[0],
            )

    def _read_storage_data(self, data: object) -> None:
        if not isinstance(data, dict):
            self._refuse("there is no table of stored items", expected="storage_data")
        checked: set[str] = set()
        for index, info in data.items():
            if type(index) is RecordRun and info is None:
                self._table.mark_used(index, ITEM)
                continue
            try:
                chunk, stored = index.__dict__, info.__dict__
                path, offset, length = stored["relative_path"], stored["offset"], stored["length"]
                fqn, start = chunk["fqn"], chunk.get("offset")  # no offset: of a pickled value
            except (AttributeError, KeyError, TypeError):
                self._refuse("an entry of storage_data does not have the form that torch writes", found=index)
            if type(path) is not str or not (path in checked or is_inside(path)):
                outside = "an item is outside the checkpoint directory"
                self._refuse(outside, expected="a relative path", found=truncate(path))
            checked.add(path)
            if type(fqn) is not str or not (start is None or _is_shape(start)):
                found = f"{truncate(fqn)} at {truncate(start)}"
                self._refuse("an entry of storage_data names no tensor", found=found)
            if (
                type(offset) is not int
                or type(length) is not int
                or not (0 <= offset < _MAX_FILE_BYTES and 0 <= length < _MAX_FILE_BYTES)
            ):
                found = f"{truncate(offset)}, {truncate(length)} bytes"
                self._refuse("an item is at an impossible offset", key=fqn, found=found)
            names: tuple[str, ...] = ()
            if transforms := stored.get("transform_descriptors"):
                if not isinstance(transforms, (list, tuple)):
                    self._refuse("an item's transforms are not a list", found=transforms)
                names = tuple(name if isinstance(name, str) else truncate(name) for name in transforms)
            self._table.single[fqn, start] = ItemLocation(path, offset, length, names)

    def _add_entry(self, key: str, entry: ScannedTensor) -> tuple[DType, Indexes]:
        """Add the chunks of a tensor whose record was scanned; return its dtype and shape."""
        parsed = self._parsed.get(entry.number)
        if parsed is None:
            head = self._head(key, entry.shape, entry.properties)
            boxes = None
            if not self._table.add_runs(key, entry.shape, [entry.chunks]):
                boxes = list(self._boxes(key, entry.shape, [entry.chunks]))
                self._table.add(key, len(entry.shape), boxes)
            parsed = self._parsed[entry.number] = _ParsedTensor(head, len(self._table) - 1, boxes)
        elif parsed.boxes is not None:
            self._table.add(key, len(entry.shape), parsed.boxes)
        else:
            self._table.add_copy(key, parsed.number)
        return parsed.head

    def _tensor(self, key: str, entry: StubInstance) -> tuple[DType, Indexes]:
        """Add the chunks of a tensor; return its dtype and shape."""
        fields = entry.__dict__
        entries = fields.get("chunks")
        if not isinstance(entries, list):
            self._refuse("a tensor has no shape or no chunks", key=key, found=f"{key}: {truncate(fields.get('size'))}")
        dtype, shape = self._head(key, fields.get("size"), fields.get("properties"))
        runs = [record for record in entries if type(record) is RecordRun]
        for run in runs:
            self._table.mark_used(run, CHUNK)
        if not runs or len(runs) < len(entries) or not self._table.add_runs(key, shape, runs):
            self._table.add(key, len(shape), self._boxes(key, shape, entries))
        return dtype, shape

    def _head(self, key: str, shape: object, properties: object) -> tuple[DType, Indexes]:
        """The dtype and the shape of a tensor, checked."""
        dtype = self._dtype(key, properties)
        if not _is_shape(shape):
            self._refuse("a tensor has no shape or no chunks", key=key, found=f"{key}: {truncate(shape)}")
        if len(shape) > MAX_DIMENSIONS or prod(filter(None, shape)) * dtype.itemsize >= 1 << 63:
            self._refuse("a tensor is larger than any can be", key=key, found=f"{key}: {truncate(shape)}")
        return dtype, shape

    def _start_size_pairs(self, entries: list[object]) -> Iterator[tuple[object, object]]:
        """Start and size of each chunk."""
        for record in entries:
            if isinstance(record, RecordRun):
                start, size = self._table.boxes_of(record)
                yield from zip(map(tuple, start.tolist()), map(tuple, size.tolist()), strict=True)
            else:
                fields = getattr(record, "__dict__", {})
                yield fields.get("offsets"), fields.get("sizes")

    def _boxes(self, key: str, shape: Indexes, entries: list[object]) -> Iterator[tuple[Indexes, Indexes]]:
        """Each box once."""
        starts: set[Indexes] = set()
        for start, size in self._start_size_pairs(entries):
            if not (_is_shape(start) and _is_shape(size) and len(start) == len(size) == len(shape)):
                found = f"{key}: {truncate(start)}, {truncate(size)}"
                self._refuse("a chunk and its tensor have different numbers of dimensions", key=key, found=found)
            if not all(map(le, map(add, start, size), shape)):
                expected, found = f"inside {shape}", f"{start} + {size}"
                self._refuse("a chunk is outside its tensor", key=key, expected=expected, found=found)
            if start in starts:
                if 0 in size:  # ranks beyond the last row all write the same empty chunk
                    continue
                self._refuse("two chunks of one tensor start at the same place", key=key, found=f"{key} at {start}")
            starts.add(start)
            yield start, size

    def _dtype(self, key: str, properties: object) -> DType:
        fields = getattr(properties, "__dict__", {})
        state = state_of(properties)
        # (dtype, layout, requires_grad, memory_format, pin_memory): TensorProperties.__getstate__
        dtype = state[0] if isinstance(state, tuple) and state else fields.get("dtype")
        if isinstance(state, dict):
            dtype = state.get("dtype")
        if not isinstance(dtype, _TorchName):
            found = f"{key}: {truncate(dtype)}"
            self._refuse("a tensor has no dtype that fsdpckpt knows", key=key, found=found)
        return DTYPES[dtype]


def _is_shape(value: object) -> TypeGuard[Indexes]:
    if type(value) is not tuple:
        return False
    return not value or (_INTEGERS.issuperset(map(type, value)) and min(value) >= 0)  # a bool is not an extent


def _nesting(data: object) -> dict[str, tuple[PathElement, ...]] | None:
    """The nesting in planner_data, if DefaultSavePlanner wrote it with flatten_state_dict; otherwise there is none."""
    if not isinstance(data, dict) or not data:
        return None
    for key, path in data.items():
        if type(key) is not str or type(path) is not tuple or not 0 < len(path) <= MAX_DEPTH:
            return None
        for element in path:
            if type(element) is not str and (type(element) is not int or element < 0):
                return None
    return data


def merge_metadata(parts: Iterable[tuple[str, DcpMetadata]]) -> DcpMetadata:
    """Join the rank-local metadata (``__<rank>.metadata``) of several ranks.

    Each rank describes its own chunks and keeps those that other ranks hold too: repeated boxes stay, as replicas.
    Raises SourceCorruptError if two ranks disagree on a shape or dtype.
    """
    merged = DcpMetadata({}, {}, None)
    chunks: dict[str, list[StoredChunks]] = {}
    numbers: dict[str, int] = {}
    for file, part in parts:
        renumbered = np.array([numbers.setdefault(path, len(numbers)) for path in part.files], np.int64)
        for key, tensor in part.tensors.items():
            known = merged.tensors.setdefault(key, tensor)
            if (known.dtype, known.shape) != (tensor.dtype, tensor.shape):
                expected, found = (f"{each.dtype.name} {each.shape}" for each in (known, tensor))
                raise damaged(file, "two ranks disagree on a tensor", expected, found[:200], key=key, why=_WHY)
            chunks.setdefault(key, []).append(replace(tensor.chunks, file=renumbered[tensor.chunks.file]))
        for key, item in part.items.items():
            merged.items.setdefault(key, item)
        if part.paths is not None:
            merged.paths = {**(merged.paths or {}), **part.paths}
        merged.version = merged.version or part.version
        merged.order.extend(part.order)
        merged.transforms |= part.transforms
        for key, shape in part.unflattened.items():
            if merged.unflattened.setdefault(key, shape) != shape:
                expected, found = str(merged.unflattened[key]), str(shape)
                raise damaged(file, "two ranks disagree on a tensor", expected, found, key=key, why=_WHY)
    merged.files = list(numbers)
    for key, rows in chunks.items():
        size = np.concatenate([part.size for part in rows])
        boxes = Boxes(np.concatenate([part.start for part in rows]), size, contiguous_strides(size))
        places = np.concatenate([part.file for part in rows]), np.concatenate([part.item for part in rows])
        merged.tensors[key] = replace(merged.tensors[key], chunks=StoredChunks(boxes, *places))
    merged.order = list(dict.fromkeys(merged.order))
    return merged
