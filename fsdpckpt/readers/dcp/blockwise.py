"""Reads optimizer states quantized in blocks from a DCP directory: torchao's classes save each shard as one item.

The metadata declares such a state as a tensor of the dtype it presents. Its items are shorter than such a tensor.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import NoReturn

from fsdpckpt.errors import SourceUnrecognisedError, SourceUnsupportedError
from fsdpckpt.formats.dcp import DcpMetadata, DcpTensor
from fsdpckpt.formats.pickle import load
from fsdpckpt.formats.torch import open_archive
from fsdpckpt.formats.torch.tensors import TensorBuilder, Wrapped
from fsdpckpt.formats.torch.torchao import StoredBlocks, stored_blocks
from fsdpckpt.ir.checkpoint import Checksums
from fsdpckpt.ir.quantized import split_state
from fsdpckpt.ir.tensors import Box, Boxes, Chunks, Tensor
from fsdpckpt.ir.torchao import CODES, QMAP, SCALE, Blocks, is_blockwise
from fsdpckpt.ir.values import Value
from fsdpckpt.readers.dcp.directory import DcpDirectory
from fsdpckpt.readers.protocol import ChunkedTensor, PartContents, build_tensors
from fsdpckpt.storage.sources import Sources


def read_blockwise(
    directory: DcpDirectory, sources: Sources, tree: PartContents
) -> tuple[DcpMetadata, dict[str, Value]]:
    """Read all states of ``directory`` that are quantized in blocks: the metadata with their parts in their place, and
    the parts by flat key, which are not among the tensors of that metadata.

    Raises SourceUnsupportedError for shards that begin or end inside a block, or of which some are not in blocks.
    """
    metadata = directory.metadata
    sums: list[Checksums] = []
    parts: dict[str, dict[str, Value]] = {}
    numel: dict[Boxes, int] = {}
    for key, tensor in metadata.tensors.items():
        if _is_short(tensor, numel):
            items = [_item(directory, tensor, row, key, sources, sums) for row in range(len(tensor.chunks.file))]
            if items[0] is not None:
                parts[key] = _state(directory, key, tensor, items)
    if not parts:
        return metadata, {}
    tree.checksums = Checksums.joined([tree.checksums, *sums])
    paths = metadata.paths
    if paths is not None:
        paths = paths | {
            part: (*paths[key][:-1], f"{paths[key][-1]}{part[len(key) :]}")
            for key in parts.keys() & paths.keys()
            for part in parts[key]
        }
    order = [part for key in metadata.order for part in parts.get(key, (key,))]
    tensors = {key: tensor for key, tensor in metadata.tensors.items() if key not in parts}
    values = {part: value for state in parts.values() for part, value in state.items()}
    return replace(metadata, order=order, paths=paths, tensors=tensors), values


def _is_short(tensor: DcpTensor, numel: dict[Boxes, int]) -> bool:
    """Whether an item is too short for its tensor. ``numel``: elements of a first chunk, for tensors that are cut
    alike.
    """
    boxes = tensor.chunks.boxes
    if not len(boxes):
        return False
    if boxes not in numel:
        numel[boxes] = prod(boxes.size[0].tolist())
    return 0 < tensor.chunks.item.item(0, 1) < numel[boxes] * tensor.dtype.itemsize


def _item(
    directory: DcpDirectory, tensor: DcpTensor, row: int, key: str, sources: Sources, sums: list[Checksums]
) -> StoredBlocks | None:
    """The content of one chunk's item; None if that is not a state in blocks."""
    chunks = tensor.chunks
    if not chunks.size[row].all():
        return None
    name = directory.metadata.files[int(chunks.file[row])]
    source = sources.open(directory.file(name))
    begin, nbytes = chunks.item[row].tolist()
    try:
        archive = open_archive(source, begin=begin, end=begin + nbytes)
    except SourceUnrecognisedError:
        return None
    builder = TensorBuilder(archive.records, source.path)
    content: object = load(archive.pickle, file=source.path, tensors=builder)
    if not isinstance(content, Wrapped) or not is_blockwise(content.kind):
        return None
    sums.append(archive.checksums(directory.numbers[name]))
    return stored_blocks(content, source.path, key)


def _state(directory: DcpDirectory, key: str, tensor: DcpTensor, items: list[StoredBlocks | None]) -> dict[str, Value]:
    chunks, ndim = tensor.chunks, len(tensor.shape)
    first = next(item.blocks for item in items if item is not None)
    blocks = replace(first, shape=tensor.shape)
    columns: dict[str, list[tuple[int, int, int, Box]]] = {part: [] for part in blocks.parts}
    for row, item in enumerate(items):
        box = Box(tuple(chunks.start[row].tolist()), tuple(chunks.size[row].tolist()))
        if not box.numel:
            continue
        name = directory.metadata.files[int(chunks.file[row])]
        if item is None or replace(item.blocks, shape=tensor.shape) != blocks or item.blocks.shape != box.sizes:
            _refuse(directory, key, blocks, f"{name}: {item.blocks if item is not None else 'a plain tensor'}")
        boxes_of_parts = blocks.boxes_of(box) if ndim == len(box.sizes) else None
        if boxes_of_parts is None:
            _refuse(directory, key, blocks, f"{box.sizes} from {box.offsets}")
        for part in blocks.parts:
            stored = item.parts[part]
            at = boxes_of_parts.get(part, Box.whole(stored.shape))  # the map is whole in each
            columns[part].append((directory.ranks[name], directory.numbers[name], stored.offset, at))
    parts = {}
    for part, rows in columns.items():
        rank, file, offset, boxes = zip(*rows, strict=True)
        start, size = [box.offsets for box in boxes], [box.sizes for box in boxes]
        chunks_of_part = Chunks.rows(ndim=len(size[0]), rank=rank, file=file, offset=offset, start=start, size=size)
        dtype = next(item.parts[part].dtype for item in items if item is not None)
        shape = size[0] if part == QMAP else blocks.shape_of(part)
        parts[part] = ChunkedTensor(part, dtype, shape, chunks_of_part)
    tensors: dict[str, Tensor] = build_tensors(list(parts.values()), world_size=directory.world_size)
    tensors[SCALE] = replace(tensors[SCALE], sharded=tensors[CODES].sharded, cut=tensors[CODES].cut)
    if QMAP in tensors:
        tensors[QMAP] = replace(tensors[QMAP], sharded=False)
    return {str(name): value for name, value in split_state(key, blocks, tensors).items()}


def _refuse(directory: DcpDirectory, key: str, blocks: Blocks, found: str) -> NoReturn:
    raise SourceUnsupportedError(
        f"{key} is {blocks}, but not all of its shards are whole blocks of that kind",
        key=key,
        file=directory.path,
        expected=f"shards of {blocks.group} rows or a multiple of it",
        found=found,
        why="a partial block cannot be placed in the full tensor",
    )
