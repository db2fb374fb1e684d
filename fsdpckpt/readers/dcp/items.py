"""Opens the stored items of a DCP directory: finds each chunk's elements, and reads the pickled values.

An item is one ``torch.save`` archive. With ``SerializationFormat.SAFETENSORS`` a data file holds one safetensors blob
instead, and only its header gives the place of a chunk (``filesystem.py``: the offset in ``.metadata`` is the blob's).

If rows do not divide evenly the metadata can be wrong; then the items decide (``correct_uneven``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple, NoReturn

import numpy as np
import numpy.typing as npt

from fsdpckpt.errors import COPY_AGAIN, SourceCorruptError, SourceIncompleteError, SourceUnrecognisedError
from fsdpckpt.formats.dcp.items import ItemReader, Structures, item_ends
from fsdpckpt.formats.safetensors import read_header
from fsdpckpt.formats.torch import ChecksumRow, load_torch, notes_on_defaultdicts
from fsdpckpt.ir.checkpoint import Checksums, SourceFile
from fsdpckpt.ir.files import stored_by_number
from fsdpckpt.ir.tensors import Boxes, Chunks, Int64Array, Tensor, contiguous_stride
from fsdpckpt.ir.values import Value, leaf_tensors
from fsdpckpt.readers.dcp.directory import DcpDirectory
from fsdpckpt.readers.dcp.uneven import correct_uneven
from fsdpckpt.readers.protocol import ChunkedTensor, PartContents
from fsdpckpt.readers.safetensors import sharding_info
from fsdpckpt.storage.sources import Sources
from fsdpckpt.text import plural


def declared_chunks(directory: DcpDirectory, offset: Int64Array | None = None) -> list[ChunkedTensor]:
    """Every tensor with the chunks that the metadata declares, none of them located.

    ``offset``: a column for the chunks of all tensors, from which each tensor gets its part.
    """
    ranks, numbers = directory.by_file(directory.ranks), directory.by_file(directory.numbers)
    as_named, one_each = np.array_equal(numbers, np.arange(len(numbers))), np.array_equal(ranks, numbers)
    unknown: dict[int, Int64Array] = {}
    first = 0
    declared: list[ChunkedTensor] = []
    for key, tensor in directory.metadata.tensors.items():
        stored = tensor.chunks
        file = stored.file if as_named else numbers[stored.file]
        rank = file if one_each else ranks[stored.file]
        if offset is not None:
            at = offset[first : first + len(file)]
            first += len(file)
        elif len(file) in unknown:
            at = unknown[len(file)]
        else:
            at = unknown[len(file)] = np.broadcast_to(np.array(-1, np.int64), (len(file),))
        chunks = Chunks(rank, file, at, stored.boxes, stored.item)
        declared.append(ChunkedTensor(key, tensor.dtype, tensor.shape, chunks))
    return declared


def locate_chunks(directory: DcpDirectory, sources: Sources, tree: PartContents) -> list[ChunkedTensor]:
    """Every tensor with its chunks located. Items are opened in file order, each read once.

    Raises SourceCorruptError that lists all items that differ from the metadata.
    """
    declared, located, resized, checksums = _located(directory, sources)
    tree.checksums = Checksums.joined([tree.checksums, *checksums])
    uneven = [tensor for tensor in declared if tensor.key in resized]
    if uneven:
        correct_uneven(directory, uneven, located, tree)
    return list(located.values())


def locate_some(directory: DcpDirectory, sources: Sources, tree: PartContents) -> list[ChunkedTensor] | None:
    """``locate_chunks`` of a directory's metadata for some of its tensors. None if items have other sizes than it
    declares: ``correct_uneven`` needs those of all tensors.
    """
    _, located, resized, checksums = _located(directory, sources)
    if resized:
        return None
    tree.checksums = Checksums.joined([tree.checksums, *checksums])
    return list(located.values())


class _Located(NamedTuple):
    """What the items show: the tensors as declared, and as they are; the keys of those whose items have other sizes;
    the checksums of their files.
    """

    declared: list[ChunkedTensor]
    located: dict[str, ChunkedTensor]
    resized: frozenset[str]
    checksums: list[Checksums]


def _located(directory: DcpDirectory, sources: Sources) -> _Located:
    offset = np.full(sum(len(tensor.chunks) for tensor in directory.metadata.tensors.values()), -1, np.int64)
    declared = declared_chunks(directory, offset)
    if not declared:
        return _Located([], {}, frozenset(), [])
    paths = {number: directory.file(name) for number, name in directory.names().items()}
    contents = _Contents(paths, declared, offset)
    _read_blobs(contents, directory, sources)
    try:
        checksums = contents.read_archives(sources)
    except SourceUnrecognisedError as error:
        raise _no_archive(directory, str(error.key), error) from None
    mismatched = contents.mismatched_rows()
    if len(mismatched):
        _refuse(contents, directory, mismatched)
    return _Located(declared, *contents.located(), checksums)


_SMALL_VALUE = 1 << 14  # bytes of a pickled value that is compared with those already read


class _Contents:
    """The contents of the items of all chunks, in columns, tensor after tensor.

    ``paths``: of the files, by number. ``order``: the rows sorted by file name and offset. ``offset``: of the first
    element, in the file; the column that ``declared`` has. ``kind``: a position in ``structures.kinds``.
    """

    def __init__(self, paths: Mapping[int, str], declared: Sequence[ChunkedTensor], offset: Int64Array) -> None:
        self.declared, self._paths = declared, paths
        chunks = [tensor.chunks for tensor in declared]
        self._first = np.cumsum([0, *map(len, chunks)])
        self.file = np.concatenate([rows.file for rows in chunks])
        self.item = np.concatenate([rows.item for rows in chunks if rows.item is not None])
        elements: dict[Boxes, Int64Array] = {}  # of each chunk; tensors that are cut alike share their boxes
        for boxes in (tensor.chunks.boxes for tensor in declared):
            if boxes not in elements:
                elements[boxes] = boxes.size.prod(axis=1)
        of_data = np.concatenate([elements[each.chunks.boxes] * each.dtype.itemsize for each in declared])
        self.overhead = self.item[:, 1] - of_data  # bytes: an archive is always longer than its data
        self.is_blob = self.overhead == 0
        names = np.zeros(max(paths, default=0) + 1, np.int64)
        names[sorted(paths, key=paths.__getitem__)] = np.arange(len(paths))
        self.order = np.lexsort((self.item[:, 1], self.item[:, 0], names[self.file]))
        self._offset = offset
        self.kind = np.zeros(len(self.file), np.int64)
        self.structures = Structures()

    def in_files(self, chosen: npt.NDArray[np.bool_]) -> Iterator[tuple[int, npt.NDArray[np.intp]]]:
        """The ``chosen`` rows of each file, with its number."""
        rows = self.order[chosen[self.order]]
        for part in np.split(rows, np.flatnonzero(np.diff(self.file[rows])) + 1):
            if len(part):
                yield int(self.file[part[0]]), part

    def tensor(self, row: int) -> tuple[ChunkedTensor, int]:
        """The tensor that ``row`` is a chunk of, and the number of the chunk."""
        number = int(np.searchsorted(self._first, row, side="right")) - 1
        return self.declared[number], row - int(self._first[number])

    def set_location(
        self, rows: npt.NDArray[np.intp], offsets: Int64Array | list[int], kinds: Int64Array | list[int]
    ) -> None:
        self._offset[rows], self.kind[rows] = offsets, kinds

    def read_archives(self, sources: Sources) -> list[Checksums]:
        """Locate the data of each item that is a torch archive. Raises what ``ItemReader.tensors`` raises."""
        checksums: list[Checksums] = []
        for number, rows in self.in_files(~self.is_blob):
            sources.announce(self._paths[number], partial(item_ends, *self.item[rows].T))
        for number, rows in self.in_files(~self.is_blob):
            reader = ItemReader(sources.open(self._paths[number]), self.structures)
            try:
                located = reader.tensors(*self.item[rows].T)
            except SourceUnrecognisedError as error:
                error.key = self.tensor(int(rows[reader.failed_item]))[0].key
                raise
            self.set_location(rows, located.offset, located.kind)
            has = located.crc >= 0
            file = np.full(int(has.sum()), number, np.int64)
            checksums.append(Checksums(file, located.record_offset[has], located.record_nbytes[has], located.crc[has]))
        return checksums

    def mismatched_rows(self) -> npt.NDArray[np.intp]:
        """The rows whose item does not have the dtype or the number of dimensions that the metadata declares."""
        kinds = self.structures.kinds
        names = {dtype.name: number for number, (dtype, *_) in enumerate(kinds)}
        stored = np.array([(names[dtype.name], len(shape)) for dtype, shape, _ in kinds], np.int64).reshape(-1, 2)
        declared = np.array([(names.get(t.dtype.name, -1), len(t.shape)) for t in self.declared], np.int64)
        declared_of_rows = np.repeat(declared, np.diff(self._first), axis=0)
        return np.flatnonzero((stored[self.kind] != declared_of_rows).any(axis=1))

    def located(self) -> tuple[dict[str, ChunkedTensor], frozenset[str]]:
        """Every tensor by its key, with the offsets, sizes and strides found in its items; and the keys of those that
        have other sizes than declared.
        """
        located = {tensor.key: tensor for tensor in self.declared}
        resized: list[str] = []
        found: dict[tuple[Boxes, bytes, bytes], Boxes] = {}  # tensors whose items are alike share boxes, as before
        kinds, counts = self.structures.kinds, np.diff(self._first)
        ndim = np.array([len(tensor.shape) for tensor in self.declared], np.int64)
        for dimensions in {len(shape) for _, shape, _ in kinds if shape}:
            numbers = np.flatnonzero((ndim == dimensions) & (counts > 0))
            if not len(numbers):
                continue
            # The size and the stride that the item of each chunk of these tensors has.
            nothing = ((0,) * dimensions,) * 2  # a placeholder for kinds with a different number of dimensions
            forms = [(shape, stride) if len(shape) == dimensions else nothing for _, shape, stride in kinds]
            rows = np.repeat(ndim == dimensions, counts)
            stored_size, stored_stride = np.array(forms, np.int64).swapaxes(0, 1).take(self.kind[rows], axis=1)
            # Those that the metadata declares.
            tensors = [self.declared[number] for number in numbers.tolist()]
            declared_size = np.concatenate([tensor.chunks.size for tensor in tensors])
            other_size = stored_size != declared_size
            other_stride = stored_stride != np.concatenate([tensor.chunks.stride for tensor in tensors])
            if other_size.any():
                # FSDP2 stores (0, 0) where it declares (4, 0). Such a chunk stays as declared: no element is elsewhere.
                empty = (declared_size == 0).any(axis=1) & (stored_size == 0).any(axis=1)
                stored_size[empty] = declared_size[empty]
                other_size[empty] = other_stride[empty] = False
            begins = np.cumsum(counts[numbers]) - counts[numbers]
            sizes = np.logical_or.reduceat(other_size.any(axis=1), begins)
            strides = np.logical_or.reduceat(other_stride.any(axis=1), begins)
            for at in np.flatnonzero(sizes | strides).tolist():
                tensor, rows_of_it = tensors[at], slice(begins[at], begins[at] + counts[numbers[at]])
                size, stride = stored_size[rows_of_it], stored_stride[rows_of_it]
                alike = tensor.chunks.boxes, size.tobytes(), stride.tobytes()
                if alike not in found:
                    found[alike] = Boxes(tensor.chunks.start, size.copy(), stride.copy())
                located[tensor.key] = tensor._replace(chunks=replace(tensor.chunks, boxes=found[alike]))
                if sizes[at]:
                    resized.append(tensor.key)
        return located, frozenset(resized)


def _refuse(contents: _Contents, directory: DcpDirectory, mismatched: npt.NDArray[np.intp]) -> NoReturn:
    rows = contents.order[np.isin(contents.order, mismatched)].tolist()
    paths = directory.names()
    texts, files = list[str](), list[str]()
    for row in rows[:50]:
        tensor, chunk = contents.tensor(row)
        dtype, shape, _ = contents.structures.kinds[int(contents.kind[row])]
        start, size = tuple(tensor.chunks.start[chunk].tolist()), tuple(tensor.chunks.size[chunk].tolist())
        path = paths[int(contents.file[row])]
        files.append(directory.file(path))
        texts.append(f"{tensor.key} at {start}: {path} holds {dtype.name} {shape}, not {tensor.dtype.name} {size}")
    raise SourceCorruptError(
        f"{directory.path}: {plural(len(rows), 'item', 'do')} not match the metadata",
        details=texts,
        files=files,
        file=directory.path,
        key=contents.tensor(rows[0])[0].key,
        why="data files of another save overwrote those of this one",
        next_step="use the checkpoint before this one",
    )


def _read_blobs(contents: _Contents, directory: DcpDirectory, sources: Sources) -> None:
    """Read files in the safetensors format: the header decides. A file has each name once, so a second chunk
    was lost.
    """
    lost: list[tuple[str, str, str]] = []  # key, what is lost, of which file
    paths = directory.names()
    for number, rows in contents.in_files(contents.is_blob):
        path = paths[number]
        file = directory.file(path)
        begin = int(contents.item[rows, 0].min())
        header = read_header(sources.open(file), begin=begin, end=directory.nbytes[path])
        starts = sharding_info(header, file=file) or {}
        for row in rows.tolist():
            (key, dtype, _, chunks), chunk = contents.tensor(row)
            tensor, start = header.tensors.get(key), tuple(chunks.start[chunk].tolist())
            if tensor is None or starts.get(key) != start or tensor.dtype is not dtype:
                lost.append((key, f"{key} at {start}: not in {path}", file))
                continue
            kind = contents.structures.kind(dtype, tensor.shape, contiguous_stride(tensor.shape))
            contents.set_location(np.array([row]), [tensor.offset], [kind])
    if lost:
        raise SourceIncompleteError(
            f"{directory.path}: the metadata names {plural(len(lost), 'chunk')} that no file holds",
            details=[text for _, text, _ in lost[:50]],
            files=[file for _, _, file in lost[:50]],
            file=directory.path,
            key=lost[0][0],
            why="FileSystemWriter(serialization_format=SAFETENSORS) keeps one chunk of a name per file, the last one",
            next_step="save again with the default serialization format, or with HuggingFaceStorageWriter",
        )


def read_values(directory: DcpDirectory, sources: Sources, tree: PartContents) -> dict[str, Value]:
    """Every pickled value of the checkpoint, by flat key.

    A flattened optimizer repeats each hyper-parameter for every parameter with the same bytes: they are parsed once.
    """
    values: dict[str, Value] = {}
    parsed: dict[bytes, tuple[Value, list[ChecksumRow]]] = {}
    records: list[ChecksumRow] = []
    defaultdicts: list[str] = []
    for key, stored in sorted(directory.metadata.items.items(), key=lambda item: item[1][:2]):
        path, begin, length, _ = stored
        source = sources.open(directory.file(path))
        data = source.read(begin, length) if length <= _SMALL_VALUE else b""
        number, rank = directory.numbers[path], directory.ranks[path]
        if data and data in parsed:
            values[key], checksums = parsed[data]
            records.extend((number, begin + at, nbytes, crc) for _, at, nbytes, crc in checksums)
            continue
        try:
            value, checksums, inner = load_torch(source, number, begin=begin, end=begin + length, rank=rank)
        except SourceUnrecognisedError as error:
            raise _no_archive(directory, key, error) from None
        records.extend(checksums)
        values[key] = value
        defaultdicts += (f"{key}.{name}" if name else key for name in inner)
        if data and not inner and not any(True for _ in leaf_tensors(value)):  # a tensor has its place in this item
            parsed[data] = value, [(file, at - begin, nbytes, crc) for file, at, nbytes, crc in checksums]
    tree.checksums = Checksums.joined([tree.checksums, Checksums.of(records)])
    tree.notes += notes_on_defaultdicts(directory.path, defaultdicts)
    return values


def _no_archive(directory: DcpDirectory, key: str, error: SourceUnrecognisedError) -> SourceCorruptError:
    """The error for an item that is not an archive at all: the file is damaged."""
    return SourceCorruptError(
        f"{directory.path}: the item of {key} is not a torch archive",
        file=error.file,
        key=key,
        expected=error.expected,
        found=error.found,
        why="the data file was damaged, or overwritten by another save",
        next_step=COPY_AGAIN,
    )


def is_located(tensor: Tensor) -> bool:
    """Whether every chunk with elements has been located in a file."""
    chunks = tensor.chunks
    return chunks.item is None or bool((chunks.offset >= 0).all())


class LocatedRows(NamedTuple):
    """What ``locate_rows`` found: the tensors, and the checksums of the items that it opened."""

    tensors: list[Tensor]
    checksums: Checksums


def locate_rows(
    wanted: Sequence[tuple[Tensor, npt.NDArray[np.intp]]], files: Sequence[SourceFile], sources: Sources
) -> LocatedRows | None:
    """Each tensor reduced to those rows of its chunks, located. Items are opened in the order of their file.

    None if an item differs from the metadata: ``correct_uneven`` needs all items, so the checkpoint must be opened
    with ``Locate.ALL``. Raises what ``ItemReader.tensors`` raises.
    """
    located = [replace(tensor, chunks=tensor.chunks.take(rows)) for tensor, rows in wanted]
    unplaced = [number for number, tensor in enumerate(located) if not is_located(tensor)]
    if not unplaced:
        return LocatedRows(located, Checksums.of([]))
    ends = np.cumsum([len(located[number].chunks) for number in unplaced])
    offset = np.full(ends[-1], -1, np.int64)
    declared: list[ChunkedTensor] = []
    for number, part in zip(unplaced, np.split(offset, ends[:-1]), strict=True):
        tensor = located[number]
        declared.append(ChunkedTensor(str(number), tensor.dtype, tensor.shape, replace(tensor.chunks, offset=part)))
    contents = _Contents({number: file.path for number, file in stored_by_number(files).items()}, declared, offset)
    if (contents.overhead <= 0).any():  # only the header of a safetensors blob gives the place of the data
        return None
    try:
        checksums = Checksums.joined(contents.read_archives(sources))
    except SourceUnrecognisedError:
        return None
    if len(contents.mismatched_rows()):
        return None
    found, resized = contents.located()
    if resized:
        return None
    for number, after in zip(unplaced, found.values(), strict=True):
        located[number] = replace(located[number], chunks=after.chunks)
    return LocatedRows(located, checksums)
