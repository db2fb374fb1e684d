"""Open the stored items of a DCP directory: where each chunk's elements lie, and what the pickled values are.

An item is one ``torch.save`` archive; with ``SerializationFormat.SAFETENSORS`` a data file holds one safetensors blob
instead, and only its header says where a chunk lies (``filesystem.py``: the offset in ``.metadata`` is the blob's).

The metadata can be wrong. When FSDP2 and tensor parallelism both shard dimension 0 and the rows do not divide evenly,
``compute_local_shape_and_global_offset`` (``torch/distributed/tensor/_utils.py``, seen up to torch 2.14) computes other
boxes than the ranks hold, and DCP stores the computed ones. The items carry their true number of rows. The true rule:
``torch.chunk`` of the rows over the tensor-parallel ranks, then ``torch.chunk`` of that chunk over the FSDP ranks; rank
= dp * TP + tp.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache
from math import prod
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from fsdpckpt.errors import COPY_AGAIN, SourceCorruptError, SourceIncompleteError, SourceUnrecognisedError
from fsdpckpt.formats.dcp.items import ItemReader
from fsdpckpt.formats.dcp.metadata import Chunk, DcpTensor
from fsdpckpt.formats.safetensors import read_header
from fsdpckpt.formats.torch.archive import ChecksumRow, load_torch
from fsdpckpt.ir.checkpoint import Note, SourceFile
from fsdpckpt.ir.tensors import Tensor
from fsdpckpt.ir.values import Value, leaf_tensors
from fsdpckpt.readers.chunks import Box, ChunkedTensor
from fsdpckpt.readers.dcp import DcpDirectory
from fsdpckpt.readers.protocol import Tree
from fsdpckpt.readers.safetensors import sharding_info
from fsdpckpt.storage.sources import Sources

__all__ = [
    "Mesh",
    "StoredRows",
    "fitting_meshes",
    "is_located",
    "locate_chunks",
    "locate_rows",
    "read_values",
    "true_starts",
]


class _Job(NamedTuple):
    """One chunk to locate: ``place`` is its row in the result."""

    path: str
    offset: int
    length: int
    key: str
    place: int
    chunk: Chunk


def locate_chunks(directory: DcpDirectory, sources: Sources, tree: Tree) -> list[ChunkedTensor]:
    """Every tensor with its chunks located. Items are opened in file order, each read once.

    Raises SourceCorruptError for items that are not what the metadata says, all of them named.
    """
    tensors = directory.metadata.tensors
    boxes: dict[str, list[Box]] = {}
    torch_jobs: list[_Job] = []
    blobs: dict[str, list[_Job]] = {}
    for key, tensor in tensors.items():
        boxes[key] = [_EMPTY] * len(tensor.chunks)
        itemsize = tensor.dtype.itemsize
        for place, chunk in enumerate(tensor.chunks):
            path, offset, length, _ = chunk.stored
            job = _Job(path, offset, length, key, place, chunk)
            if length == prod(chunk.size) * itemsize:  # an archive is always longer than its data
                blobs.setdefault(path, []).append(job)
            else:
                torch_jobs.append(job)
    _locate_blobs(directory, sources, blobs, boxes)
    torch_jobs.sort()
    _locate_archives(directory, sources, torch_jobs, boxes, tree)
    _correct_uneven(directory, boxes, tree)
    return [ChunkedTensor(key, tensor.dtype, tensor.shape, boxes[key]) for key, tensor in tensors.items()]


_SMALL_VALUE = 1 << 14  # bytes of a pickled value that is compared with those already read
_EMPTY = Box(0, 0, -1, (), ())


def _locate_archives(
    directory: DcpDirectory,
    sources: Sources,
    jobs: list[_Job],
    boxes: dict[str, list[Box]],
    tree: Tree,
) -> None:
    """Fill ``boxes`` with what each item really holds: its true size, at the start the metadata declares."""
    wrong: list[tuple[str, str]] = []  # key, what is wrong
    tensors = directory.metadata.tensors
    checksums = tree.checksums
    items: dict[str, list[tuple[int, int]]] = {}
    for job in jobs:
        items.setdefault(job.path, []).append((job.offset, job.offset + job.length))
    opened = ""
    for path, offset, length, key, place, chunk in jobs:
        if path != opened:
            reader = ItemReader(sources.open(directory.file(path)))
            number, rank, opened = directory.numbers[path], directory.ranks[path], path
            reader.announce(items[path])
        try:
            item = reader.tensor(offset, offset + length)
        except SourceUnrecognisedError:
            with _as_corrupt(directory, key):
                raise
        if item.crc is not None:
            checksums.append((number, item.record_offset, item.record_nbytes, item.crc))
        if item.dtype is not tensors[key].dtype or len(item.shape) != len(chunk.size):
            declared = f"{tensors[key].dtype.name} {chunk.size}"
            text = f"{key} at {chunk.start}: {path} holds {item.dtype.name} {item.shape}, not {declared}"
            wrong.append((key, text))
            continue
        boxes[key][place] = Box(rank, number, item.offset, chunk.start, item.shape, item.stride)
    if wrong:
        raise SourceCorruptError(
            f"{directory.path}: {len(wrong)} items are not what the metadata says",
            details=[text for _, text in wrong[:50]],
            file=directory.path,
            key=wrong[0][0],
            why="data files of another save overwrote those of this one",
            next_step="use the checkpoint before this one",
        )


def _locate_blobs(
    directory: DcpDirectory,
    sources: Sources,
    blobs: dict[str, list[_Job]],
    boxes: dict[str, list[Box]],
) -> None:
    """Files in the safetensors format: the header decides. A name stands in a file once, so a second chunk was lost."""
    lost: list[tuple[str, str]] = []  # key, what is lost
    for path, jobs in blobs.items():
        file = directory.file(path)
        header = read_header(sources.open(file), begin=min(job.offset for job in jobs), end=directory.nbytes[path])
        starts = sharding_info(header, file=file) or {}
        for job in jobs:
            tensor = header.tensors.get(job.key)
            declared = directory.metadata.tensors[job.key]
            if tensor is None or starts.get(job.key) != job.chunk.start or tensor.dtype is not declared.dtype:
                lost.append((job.key, f"{job.key} at {job.chunk.start}: not in {path}"))
                continue
            rank = directory.ranks[path]
            boxes[job.key][job.place] = Box(rank, directory.numbers[path], tensor.offset, job.chunk.start, tensor.shape)
    if lost:
        raise SourceIncompleteError(
            f"{directory.path}: {len(lost)} chunks that the metadata names are in no file",
            details=[text for _, text in lost[:50]],
            file=directory.path,
            key=lost[0][0],
            why="FileSystemWriter(serialization_format=SAFETENSORS) keeps one chunk of a name per file, the last one",
            next_step="save again with the default serialization format, or with HuggingFaceStorageWriter",
        )


def _correct_uneven(directory: DcpDirectory, boxes: dict[str, list[Box]], tree: Tree) -> None:
    """Tensors whose items have other sizes than declared: place them by the true rule, or refuse.

    The rule is that of ``_true_box``. One mesh must explain every such tensor of the checkpoint.
    """
    tensors = directory.metadata.tensors
    uneven = [
        key
        for key, tensor in tensors.items()
        if any(chunk.size != box.size for chunk, box in zip(tensor.chunks, boxes[key], strict=True))
    ]
    if not uneven:
        return
    rows = {key: _stored_rows(tensors[key], boxes[key]) for key in uneven}
    meshes: set[Mesh] | None = None
    for key in uneven:
        fitting: set[Mesh] = set()
        items = rows[key]
        if items is not None:
            fitting = fitting_meshes(tensors[key].shape[0], items, world_size=directory.world_size)
        meshes = fitting if meshes is None else meshes & fitting
    unexplained: dict[str, str] = {}
    for key in uneven:
        items = rows[key]
        starts = None if items is None else true_starts(tensors[key].shape[0], items, meshes or ())
        if starts is None:
            unexplained[key] = _difference(key, tensors[key], boxes[key])
            continue
        boxes[key] = [
            box._replace(start=(start, *box.start[1:])) for box, start in zip(boxes[key], starts, strict=True)
        ]
    if unexplained:
        raise _unplaceable(directory, unexplained)
    tree.notes.append(
        Note(
            "chunks-corrected",
            f"the metadata declares wrong chunks for {len(uneven)} tensors (uneven rows, FSDP2 x tensor parallel); "
            "they were placed by the sizes the items really have",
            uneven[0],
        )
    )


def _stored_rows(tensor: DcpTensor, boxes: list[Box]) -> list[StoredRows] | None:
    """The items as rows of dimension 0; None when another dimension is cut as well."""
    items: list[StoredRows] = []
    for chunk, box in zip(tensor.chunks, boxes, strict=True):
        if not tensor.shape or len(box.size) != len(tensor.shape) or box.size[1:] != tensor.shape[1:]:
            return None
        items.append(StoredRows(box.rank, box.size[0], chunk.start[0], chunk.size[0]))
    return items


def _difference(key: str, tensor: DcpTensor, boxes: list[Box]) -> str:
    pairs = [
        f"at {chunk.start} declared {chunk.size}, stored {box.size}"
        for chunk, box in zip(tensor.chunks, boxes, strict=True)
        if chunk.size != box.size
    ]
    return f"{key}: {'; '.join(pairs[:4])}"


def _unplaceable(directory: DcpDirectory, unexplained: dict[str, str]) -> SourceCorruptError:
    return SourceCorruptError(
        f"{directory.path}: {len(unexplained)} tensors have items of another size than the metadata declares",
        details=list(unexplained.values())[:50],
        file=directory.path,
        key=next(iter(unexplained)),
        why="FSDP2 x tensor parallel with uneven rows makes torch declare wrong chunks; here several ranks declared "
        "the same one, so that rows were never stored, or no single mesh explains the sizes; or two saves are mixed",
        next_step="save full state dicts, or one torch.save file per rank",
    )


def read_values(directory: DcpDirectory, sources: Sources, tree: Tree) -> dict[str, Value]:
    """Every pickled value of the checkpoint, by flat key.

    A flattened optimizer repeats each hyper-parameter for every parameter, as the same bytes: they are parsed once.
    """
    values: dict[str, Value] = {}
    known: dict[bytes, tuple[Value, list[ChecksumRow]]] = {}
    for key, stored in sorted(directory.metadata.items.items(), key=lambda item: item[1][:2]):
        path, begin, length, _ = stored
        source = sources.open(directory.file(path))
        data = source.read(begin, length) if length <= _SMALL_VALUE else b""
        number, rank = directory.numbers[path], directory.ranks[path]
        if data and data in known:
            values[key], checksums = known[data]
            tree.checksums.extend((number, begin + at, nbytes, crc) for _, at, nbytes, crc in checksums)
            continue
        with _as_corrupt(directory, key):
            value, checksums = load_torch(source, number, begin=begin, end=begin + length, rank=rank)
        tree.checksums.extend(checksums)
        values[key] = value
        if data and not any(True for _ in leaf_tensors(value)):  # a tensor inside lies in its own item
            known[data] = value, [(file, at - begin, nbytes, crc) for file, at, nbytes, crc in checksums]
    return values


@contextmanager
def _as_corrupt(directory: DcpDirectory, key: str) -> Iterator[None]:
    """Bytes that are no archive at all, where the metadata says one is, are damage."""
    try:
        yield
    except SourceUnrecognisedError as error:
        raise SourceCorruptError(
            f"{directory.path}: the item of {key} is no torch archive",
            file=error.file,
            key=key,
            expected=error.expected,
            found=error.found,
            why="the data file was damaged, or overwritten by another save",
            next_step=COPY_AGAIN,
        ) from None


def is_located(tensor: Tensor) -> bool:
    """Whether every chunk with elements has its place in a file."""
    chunks = tensor.chunks
    return chunks.item is None or bool((chunks.offset >= 0).all())


def locate_rows(
    wanted: Sequence[tuple[Tensor, npt.NDArray[np.intp]]], files: Sequence[SourceFile], sources: Sources
) -> list[Tensor] | None:
    """Each tensor with those rows of its chunks alone, located. Items are opened in the order of their file.

    None when an item holds something else than the metadata declares: ``_correct_uneven`` needs all of them, so the
    checkpoint has to be opened with ``locate=True``. Raises what ``ItemReader.tensor`` raises.
    """
    located = [replace(tensor, chunks=tensor.chunks.take(rows)) for tensor, rows in wanted]
    jobs: list[tuple[int, int, int, int, int]] = []
    for number, tensor in enumerate(located):
        chunks = tensor.chunks
        if chunks.item is None:
            continue
        for row, (file, (begin, length), offset) in enumerate(
            zip(chunks.file.tolist(), chunks.item.tolist(), chunks.offset.tolist(), strict=True)
        ):
            if offset < 0:
                jobs.append((file, begin, length, number, row))
    if not jobs:
        return located
    jobs.sort()
    columns = {number: located[number].chunks for *_, number, _ in jobs}
    places = {number: (chunks.offset.copy(), chunks.stride.copy()) for number, chunks in columns.items()}
    readers: dict[int, ItemReader] = {}
    for file, begin, length, number, row in jobs:
        if file not in readers:
            readers = {file: ItemReader(sources.open(files[file].path))}
        offsets, strides = places[number]
        place = _place(readers[file], begin, length, located[number], row)
        if place is None:
            return None
        offsets[row], strides[row] = place
    for number, (offsets, strides) in places.items():
        chunks = replace(located[number].chunks, offset=offsets, stride=strides)
        located[number] = replace(located[number], chunks=chunks)
    return located


def _place(reader: ItemReader, begin: int, length: int, tensor: Tensor, row: int) -> tuple[int, tuple[int, ...]] | None:
    """Offset and strides of one chunk; None when its item is not a torch archive of just that box."""
    size = tensor.chunks.size[row].tolist()
    if begin < 0 or length <= tensor.dtype.itemsize * int(np.prod(size, dtype=np.int64)):
        return None  # a blob of the safetensors format: only its header says where the data lies
    try:
        item = reader.tensor(begin, begin + length)
    except SourceUnrecognisedError:
        return None
    if item.dtype is not tensor.dtype or list(item.shape) != size:
        return None
    return item.offset, item.stride


class Mesh(NamedTuple):
    """``data`` FSDP ranks times ``tensor`` tensor-parallel ranks; the latter are neighbours."""

    data: int
    tensor: int


class StoredRows(NamedTuple):
    """One item: who wrote it, how many rows it really has, and what the metadata says."""

    rank: int
    rows: int
    declared_start: int
    declared_rows: int


def _chunk(rows: int, parts: int, index: int) -> tuple[int, int]:
    """First row and number of rows of part ``index`` under ``torch.chunk``."""
    size = -(-rows // parts)
    begin = min(index * size, rows)
    return begin, min(begin + size, rows) - begin


def _true_box(rows: int, mesh: Mesh, rank: int) -> tuple[int, int]:
    data, tensor = divmod(rank, mesh.tensor)
    begin, extent = _chunk(rows, mesh.tensor, tensor)
    inner, count = _chunk(extent, mesh.data, data)
    return begin + inner, count


@lru_cache(maxsize=8)
def _meshes(world_size: int) -> tuple[Mesh, ...]:
    sizes = (tensor for tensor in range(2, world_size // 2 + 1) if world_size % tensor == 0)
    return tuple(Mesh(world_size // tensor, tensor) for tensor in sizes)


def fitting_meshes(rows: int, items: Sequence[StoredRows], *, world_size: int) -> set[Mesh]:
    """Every mesh under which each item has exactly its rank's rows, and all rows are there once."""
    return {mesh for mesh in _meshes(world_size) if _fits(rows, items, mesh)}


def _fits(rows: int, items: Sequence[StoredRows], mesh: Mesh) -> bool:
    total = 0
    for item in items:
        start, count = _true_box(rows, mesh, item.rank)
        if count != item.rows:
            return False
        # Where the declared size is right, torch's declared place is right too: no combination was seen otherwise.
        if count and item.declared_rows == count and item.declared_start != start:
            return False
        total += count
    return total == rows and len({item.rank for item in items}) == len(items)


def true_starts(rows: int, items: Sequence[StoredRows], meshes: Iterable[Mesh]) -> list[int] | None:
    """The first row of each item, when all ``meshes`` agree on it; None when they do not or there is none."""
    answers = {tuple(_true_box(rows, mesh, item.rank)[0] for item in items) for mesh in meshes}
    return list(answers.pop()) if len(answers) == 1 else None
