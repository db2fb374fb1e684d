"""Reads the ``.metadata`` file of a DCP directory: which tensors, in which chunks, in which files.

Written by ``torch.distributed.checkpoint`` (``metadata.py``, ``planner_helpers.py``, ``filesystem.py``) of
torch 2.1 to 2.14. Everything is checked before it is used: chunks lie inside their tensor and are unique, every chunk
has one stored item, relative paths stay inside the directory, offsets and lengths are counts of bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from math import prod
from operator import add, itemgetter, le
from typing import Final, NamedTuple, NoReturn, TypeGuard

import numpy as np

from fsdpckpt.errors import SourceCorruptError, SourceIncompleteError, SourceUnsafeError, damaged
from fsdpckpt.formats.dcp.chunk_table import ChunkTable, Indexes, Stored, StoredChunks, is_inside
from fsdpckpt.formats.dcp.fields import UnusualError
from fsdpckpt.formats.dcp.records import TorchName, load_records
from fsdpckpt.formats.dcp.reduce import Reduced, Run, reduce_pickle
from fsdpckpt.formats.dcp.runs import CHUNK, INDEX
from fsdpckpt.formats.pickle import StubInstance
from fsdpckpt.formats.pickle.cost import MAX_DEPTH
from fsdpckpt.ir.dtypes import DTYPES, MAX_DIMENSIONS, DType
from fsdpckpt.storage import ByteSource
from fsdpckpt.text import plural, truncate

PathElement = int | str
_INTEGERS = {int}


@dataclass(slots=True, eq=False)
class DcpTensor:
    """One tensor: ``shape`` is global, ``chunks`` in the file's order, each offset once."""

    dtype: Final[DType]
    shape: Final[tuple[int, ...]]
    chunks: Final[StoredChunks]


@dataclass(slots=True)
class DcpMetadata:
    """``tensors`` and ``items`` (pickled values) by flat key. ``files``: relative paths, which chunks name by position.

    ``paths``: flat key to its nesting, dict keys as str and list positions as int; None when the save did not flatten.
    ``version``: None before torch wrote one. ``transforms``: how items are encoded, of those that are.
    ``unflattened``: of tensors that Megatron-core saved as ranges of flattened shards, the shape that they have.
    """

    tensors: dict[str, DcpTensor]
    items: dict[str, Stored]
    paths: dict[str, tuple[PathElement, ...]] | None
    version: str | None = None
    order: list[str] = field(default_factory=list)
    files: list[str] = field(default_factory=list)
    transforms: frozenset[str] = frozenset()
    unflattened: dict[str, tuple[int, ...]] = field(default_factory=dict)


class _Context(NamedTuple):
    file: str

    def refuse(
        self, what: str, *, key: str | None = None, expected: str | None = None, found: object = None
    ) -> NoReturn:
        text = None if found is None else found[:200] if isinstance(found, str) else truncate(found)
        why = "the metadata was damaged or edited, or a custom planner wrote it"
        raise damaged(self.file, what, expected, text, key=key, why=why)


def parse_metadata(source: ByteSource) -> DcpMetadata:
    """Parse and validate a ``.metadata`` file.

    Raises SourceUnsafeError (unknown globals), SourceCorruptError (contradictions), SourceIncompleteError (entries
    without a stored item, all named).
    """
    reduced = reduce_pickle(source)
    if reduced is not None:
        # Anything unexpected is for the general reader to accept or to name: it sees each record.
        with suppress(UnusualError, SourceCorruptError, SourceUnsafeError):
            return _parse(load_records(reduced.pickle, file=source.path, runs=reduced.runs), source.path, reduced)
    return _parse(load_records(source.read(0, source.nbytes), file=source.path), source.path, None)


def _parse(root: object, file: str, reduced: Reduced | None) -> DcpMetadata:
    context = _Context(file)
    if not isinstance(root, StubInstance) or type(root).__name__ not in ("Metadata", "MCoreMetadata"):
        context.refuse("this is a pickle, but not DCP metadata", expected="Metadata", found=type(root).__name__)
    fields = vars(root)
    entries = fields.get("state_dict_metadata")
    if not isinstance(entries, dict):
        context.refuse("there is no table of entries", expected="state_dict_metadata")
    table = ChunkTable(reduced)
    known: dict[Run, _Known] = {}
    _read_storage_data(fields.get("storage_data"), table, context)
    heads: dict[str, tuple[DType, Indexes]] = {}
    items: dict[str, Stored] = {}
    missing: list[tuple[float, str]] = []  # number of tensors before it, what
    for key, entry in entries.items():
        if type(entry) is Run and type(key) is str:
            heads[key] = _again(key, entry, known, table)
            continue
        if type(key) is not str or not isinstance(entry, StubInstance):
            context.refuse("an entry is neither a tensor nor a value", found=key)
        kind = type(entry).__name__
        if kind == "TensorStorageMetadata":
            heads[key] = _tensor(key, entry, table, known, context)
        elif kind == "BytesStorageMetadata":
            item = table.single.get((key, None))
            if item is None:
                missing.append((len(table) - 0.5, key))
            else:
                items[key] = item
        else:
            context.refuse("an entry is neither a tensor nor a value", key=key, found=kind)
    paths = _paths(fields.get("planner_data"))
    chunks, unstored = table.finish()
    _require_all([*missing, *unstored], context)
    tensors = {key: DcpTensor(*head, rows) for (key, head), rows in zip(heads.items(), chunks, strict=True)}
    version = fields.get("version")
    order = list(entries)
    if paths is not None:  # planner_data keeps the state dict's own order, the table of entries does not
        order = list(dict.fromkeys([*(key for key in paths if key in entries), *order]))
    transforms = table.transforms.union(*(item.transforms for item in items.values()))
    version = version if isinstance(version, str) else None
    unflattened = _unflattened(fields.get("mcore_data"), tensors, context)
    return DcpMetadata(tensors, items, paths, version, order, table.files, frozenset(transforms), unflattened)


def _unflattened(data: object, tensors: Mapping[str, DcpTensor], context: _Context) -> dict[str, tuple[int, ...]]:
    """What ``mcore_data`` of Megatron-core says of tensors, {} without it."""
    shapes: dict[str, tuple[int, ...]] = {}
    for key, entry in data.items() if isinstance(data, dict) else ():
        shape = entry.get("nd_reformulated_orig_global_shape") if isinstance(entry, dict) else None
        if shape is None:
            continue
        extents = tuple(shape) if isinstance(shape, (tuple, list)) else ()
        valid = 0 < len(extents) <= MAX_DIMENSIONS and all(type(one) is int and 0 <= one < 1 << 59 for one in extents)
        if type(key) is not str or key not in tensors or not valid:
            context.refuse("it names the shape of a tensor that is none", found=key)
        shapes[key] = extents
    return shapes


def _require_all(missing: list[tuple[float, str]], context: _Context) -> None:
    if missing:
        names = [name for _, name in sorted(missing, key=itemgetter(0))]
        raise SourceIncompleteError(
            f"{context.file}: {plural(len(names), 'entry', 'have')} no stored data",
            details=names[:50],
            why="the save did not finish, or the metadata was damaged",
            next_step="save the checkpoint again",
            file=context.file,
            key=names[0],
        )


def _read_storage_data(data: object, table: ChunkTable, context: _Context) -> None:
    if not isinstance(data, dict):
        context.refuse("there is no table of stored items", expected="storage_data")
    checked: set[str] = set()
    for index, info in data.items():
        if isinstance(index, Run) and info is index:
            table.use(index, INDEX)
            continue
        try:
            where = index.__dict__
            what = info.__dict__
            path, offset, length = what["relative_path"], what["offset"], what["length"]
            place = (where["fqn"], where.get("offset"))  # absent for a pickled value
        except (AttributeError, KeyError, TypeError):
            context.refuse("an entry of storage_data has another form than torch writes", found=index)
        if type(path) is not str or path not in checked:
            checked.add(_checked_path(path, context))
        fqn, start = place
        if type(fqn) is not str or not (start is None or _is_shape(start)):
            context.refuse("an entry of storage_data names no tensor", found=f"{truncate(fqn)} at {truncate(start)}")
        if type(offset) is not int or type(length) is not int or not (0 <= offset < 1 << 63 and 0 <= length < 1 << 63):
            context.refuse(
                "an item lies at an impossible place",
                key=fqn,
                found=f"{truncate(offset)}, {truncate(length)} bytes",
            )
        transforms = what.get("transform_descriptors")
        table.single[place] = Stored(path, offset, length, _transforms(transforms, context) if transforms else ())


def _transforms(value: object, context: _Context) -> tuple[str, ...]:
    if not isinstance(value, (list, tuple)):
        context.refuse("an item's transforms are no list", found=value)
    return tuple(name if isinstance(name, str) else truncate(name) for name in value)


def _checked_path(path: object, context: _Context) -> str:
    if type(path) is not str or not is_inside(path):
        context.refuse(
            "an item lies outside the checkpoint directory", expected="a relative path", found=truncate(path)
        )
    return path


def _is_shape(value: object) -> TypeGuard[Indexes]:
    if type(value) is not tuple:
        return False
    return not value or (_INTEGERS.issuperset(map(type, value)) and min(value) >= 0)  # a bool is no extent


class _Known(NamedTuple):
    """A tensor whose chunks are one run: dtype and shape, its ``number`` in the table, and starts and sizes where the
    chunks were added one by one."""

    head: tuple[DType, Indexes]
    number: int
    boxes: list[tuple[Indexes, Indexes]] | None


def _again(key: str, entry: Run, known: Mapping[Run, _Known], table: ChunkTable) -> tuple[DType, Indexes]:
    """Add the chunks of a tensor that is described as another one; returns its dtype and shape."""
    run = table.run_of(entry)
    if run not in known:
        raise UnusualError("a tensor described as one that is none")
    head, number, boxes = known[run]
    if boxes is not None:
        table.add(key, len(head[1]), boxes)
    else:
        table.add_again(key, number)
    return head


def _tensor(
    key: str, entry: StubInstance, table: ChunkTable, known: dict[Run, _Known], context: _Context
) -> tuple[DType, Indexes]:
    """Add the chunks of a tensor to ``table``, and what can be ``known`` by its run; returns its dtype and shape."""
    fields = entry.__dict__
    shape = fields.get("size")
    dtype = _dtype(key, fields.get("properties"), context)
    entries = fields.get("chunks")
    if not _is_shape(shape) or not isinstance(entries, list):
        context.refuse("a tensor has no shape or no chunks", key=key, found=f"{key}: {truncate(shape)}")
    if len(shape) > MAX_DIMENSIONS or prod(filter(None, shape)) * dtype.itemsize >= 1 << 63:
        context.refuse("a tensor is larger than any can be", key=key, found=f"{key}: {truncate(shape)}")
    runs = [record for record in entries if isinstance(record, Run)]
    for run in runs:
        table.use(run, CHUNK)
    alike = len(runs) == len(entries) == 1
    boxes = None
    if not runs or len(runs) < len(entries) or not table.add_runs(key, shape, runs):
        each = _boxes(key, shape, _pairs(entries, table), context)
        boxes = list(each) if alike else None
        table.add(key, len(shape), each if boxes is None else boxes)
    if alike:
        known[runs[0]] = _Known((dtype, shape), len(table) - 1, boxes)
    return dtype, shape


def _pairs(entries: list[object], table: ChunkTable) -> Iterator[tuple[object, object]]:
    """Start and size of each chunk."""
    for record in entries:
        if isinstance(record, Run):
            start, size = table.of_run(record)
            yield from zip(map(tuple, start.tolist()), map(tuple, size.tolist()), strict=True)
        else:
            fields = getattr(record, "__dict__", {})
            yield fields.get("offsets"), fields.get("sizes")


def _boxes(
    key: str, shape: Indexes, pairs: Iterable[tuple[object, object]], context: _Context
) -> Iterator[tuple[Indexes, Indexes]]:
    """Each box once."""
    starts: set[Indexes] = set()
    for start, size in pairs:
        if not _is_shape(start) or not _is_shape(size) or len(start) != len(shape) or len(size) != len(shape):
            context.refuse(
                "a chunk has not its tensor's dimensions", key=key, found=f"{key}: {truncate(start)}, {truncate(size)}"
            )
        if not all(map(le, map(add, start, size), shape)):
            context.refuse(
                "a chunk lies outside its tensor", key=key, expected=f"inside {shape}", found=f"{start} + {size}"
            )
        if start in starts:
            if 0 in size:  # ranks beyond the last row all write the same empty chunk
                continue
            context.refuse("two chunks of one tensor start at the same place", key=key, found=f"{key} at {start}")
        starts.add(start)
        yield start, size


def _dtype(key: str, properties: object, context: _Context) -> DType:
    fields = getattr(properties, "__dict__", {})
    state = fields.get("", (None,))[0]
    # (dtype, layout, requires_grad, memory_format, pin_memory): TensorProperties.__getstate__
    dtype = state[0] if isinstance(state, tuple) and state else fields.get("dtype")
    if isinstance(state, dict):
        dtype = state.get("dtype")
    if not isinstance(dtype, TorchName):
        context.refuse("a tensor has no dtype that fsdpckpt knows", key=key, found=f"{key}: {truncate(dtype)}")
    return DTYPES[dtype]


def _paths(data: object) -> dict[str, tuple[PathElement, ...]] | None:
    """planner_data, when it is what DefaultSavePlanner writes with flatten_state_dict; another one means no nesting."""
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
    """One description of what several ranks wrote with rank-local metadata (``__<rank>.metadata``).

    Each rank describes its own chunks and does not drop what others hold too: boxes that repeat are kept, they are
    replicas. Raises SourceCorruptError when two ranks disagree on a shape or dtype.
    """
    merged = DcpMetadata({}, {}, None)
    chunks: dict[str, list[StoredChunks]] = {}
    numbers: dict[str, int] = {}
    for file, part in parts:
        renumbered = np.array([numbers.setdefault(path, len(numbers)) for path in part.files], np.int64)
        for key, tensor in part.tensors.items():
            known = merged.tensors.setdefault(key, tensor)
            if (known.dtype, known.shape) != (tensor.dtype, tensor.shape):
                _Context(file).refuse(
                    "two ranks disagree on a tensor",
                    key=key,
                    expected=f"{known.dtype.name} {known.shape}",
                    found=f"{tensor.dtype.name} {tensor.shape}",
                )
            chunks.setdefault(key, []).append(replace(tensor.chunks, file=renumbered[tensor.chunks.file]))
        for key, item in part.items.items():
            merged.items.setdefault(key, item)
        if part.paths is not None:
            merged.paths = {**(merged.paths or {}), **part.paths}
        merged.version = merged.version or part.version
        merged.order.extend(part.order)
        merged.transforms |= part.transforms
    merged.files = list(numbers)
    for key, rows in chunks.items():
        columns = ([part.start for part in rows], [part.size for part in rows], [part.file for part in rows])
        joined = (*map(np.concatenate, columns), np.concatenate([part.item for part in rows]))
        merged.tensors[key] = replace(merged.tensors[key], chunks=StoredChunks(*joined))
    merged.order = list(dict.fromkeys(merged.order))
    return merged
