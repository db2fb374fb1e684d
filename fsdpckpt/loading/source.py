"""Opens a source to load from, lists what a rank can load, and reads boxes of its tensors.

Opening reads no tensor data. Reading a box never reads a whole tensor or a whole stored chunk, unless that is the box.
"""

from __future__ import annotations

import io
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import NamedTuple, TypeVar

import numpy as np
import torch

from fsdpckpt import flags
from fsdpckpt.converters.target.decision import Decision
from fsdpckpt.converters.transform import transform_to_load
from fsdpckpt.errors import NeedsInformationError, SourceUnsupportedError, StateDictMismatchError
from fsdpckpt.execute.read_check import ReadCheck
from fsdpckpt.flat.units.from_options import listed_parameters, units_request
from fsdpckpt.flat.units.presence import is_flattened
from fsdpckpt.flat.units.request import load_units
from fsdpckpt.ir.checkpoint import Checkpoint, Container, Layout, Section
from fsdpckpt.ir.names import clean
from fsdpckpt.ir.quantized import Blockwise
from fsdpckpt.ir.targets import TargetFile
from fsdpckpt.ir.tensors import Box, Tensor
from fsdpckpt.ir.torchao import TORCHAO
from fsdpckpt.ir.values import Value
from fsdpckpt.lazy import copy_blocks
from fsdpckpt.options import ConvertOptions
from fsdpckpt.producers import PLAIN_PATHS, SectionPath
from fsdpckpt.readers.dcp.items import is_located, locate_rows
from fsdpckpt.readers.detect import OpenOptions, open_checkpoint
from fsdpckpt.readers.protocol import Locate, require_matches
from fsdpckpt.storage.sources import Sources
from fsdpckpt.verify.blocks import (
    BlockReader,
    ChunkReader,
    for_each,
    in_file_order,
    rows_to_read,
)
from fsdpckpt.verify.elements import without_repeats
from fsdpckpt.writers.state_dicts import Leaf, Path, extras_of_rank, flatten_state_dict, settings_by_parameter
from fsdpckpt.writers.torch_full import lay_out_file

S = TypeVar("S")
T = TypeVar("T")


def open_to_load(path: str, options: ConvertOptions, sources: Sources, *, locate: Locate) -> Checkpoint:
    """The checkpoint at ``path`` as whole tensors, keyed and named according to ``options``.

    ``Locate.NOTHING``: the items of a DCP directory are not opened, unless they contain flat parameters. Raises what
    ``fsdpckpt convert`` raises for the source: SourceError, NeedsInformationError.
    """
    units = load_units(options.units, sources) if options.units is not None else None
    known = OpenOptions(units=units, ignore_file=options.ignore_file, prefer_dcp_over_exports=True)
    checkpoint = open_checkpoint(path, sources=sources, locate=locate, options=known)
    require_matches(options.ignore_file, checkpoint)
    request = units_request(options, listed_parameters(options))
    flattened = not locate.all and is_flattened(checkpoint, sources, request)
    if flattened and not all(map(is_located, checkpoint.leaves())):
        checkpoint = open_checkpoint(path, sources=sources, locate=Locate.ALL, options=known)
    try:
        # as for a conversion to whole tensors, up to the layout
        spec = Decision(Layout.FULL, Container.DCP, None, options, directory=True)
        return transform_to_load(without_repeats(checkpoint, sources), spec, sources, request).checkpoint
    except NeedsInformationError as error:
        if options.key_type == "name":
            error.alternative = f"{flags.key_type('id')} for an optimizer.state_dict() that is keyed by id itself"
        raise


@dataclass(frozen=True, slots=True)
class Names:
    """The dotted keys of the model and the optimizer in the state dict to fill ("" is its top level).

    None: as in the source if that is DCP, else ``model`` and ``optimizer``. ``flattened``: the optimizer has the form
    of ``StateDictOptions(flatten_optimizer_state_dict=True)``.
    """

    model: str | None = None
    optimizer: str | None = None
    flattened: bool = False

    def section_paths(self, checkpoint: Checkpoint) -> dict[Section, SectionPath]:
        """Where the sections of ``checkpoint`` are in the state dict."""

        def path(section: Section, name: str | None) -> Path:
            if name is not None:
                return tuple(name.split(".")) if name else ()
            is_dcp = checkpoint.container is Container.DCP
            plain = PLAIN_PATHS[section].keys
            stored = checkpoint.origin.nesting.get(section, plain) if is_dcp else plain
            return tuple(key if isinstance(key, int) else str(key) for key in stored)

        given = {Section.MODEL: self.model, Section.OPTIM: self.optimizer}
        return {section: SectionPath("", path(section, name)) for section, name in given.items()}


@dataclass(frozen=True, slots=True)
class Entries:
    """``values`` and ``paths`` (their nesting) by flat key."""

    values: Mapping[str, Value]
    paths: Mapping[str, Path]

    def tensor(self, key: str) -> Tensor:
        value = self.values[key]
        if not isinstance(value, Tensor):
            raise StateDictMismatchError(f"{key} is not a tensor in the checkpoint", key=key)
        return value


def entries_of(checkpoint: Checkpoint, names: Names, rank: int) -> Entries:
    """What rank ``rank`` can load: what all ranks share, and the extras of source rank ``rank`` modulo their number.

    Raises SourceUnsupportedError if two entries would have one key, or the optimizer has ids and ``names`` flattens it.
    """
    of_rank = replace(checkpoint, extra=extras_of_rank(checkpoint, rank), rank_extra=(), named=())
    paths = names.section_paths(checkpoint)
    try:
        leaves, _ = flatten_state_dict(of_rank, paths, flattened_keys=names.flattened)
    except SourceUnsupportedError as error:
        if error.key is not None:
            error.alternative = "give the sections other names: StorageReader(path, model=..., optimizer=...)"
        raise
    values = _MatchingNames({leaf.key: _loadable(leaf) for leaf in leaves})
    if of_rank.optim is not None and not names.flattened:
        settings = settings_by_parameter(of_rank.optim, paths[Section.OPTIM].keys)
        values.others = {leaf.key: _loadable(leaf) for leaf in settings}
    return Entries(values, {leaf.key: leaf.path for leaf in leaves})


def _loadable(leaf: Leaf) -> Value:
    if isinstance(leaf.value, Blockwise):
        raise SourceUnsupportedError(
            f"{leaf.key} is {leaf.value.blocks}, which StorageReader does not load",
            key=leaf.key,
            why=f"only {TORCHAO} fills such a tensor from another",
            next_step=f"{flags.command('convert', 'SRC', 'DST', flags.container('dcp'))}, and load DST with "
            "torch.distributed.checkpoint",
        )
    return leaf.value


class _MatchingNames(dict[str, T]):
    """Finds entries by names with prefixes of wrappers (a compiled model's), if one entry matches.

    ``others``: entries that are found but not listed: the settings of a nested optimizer by parameter.
    """

    others: Mapping[str, T] = MappingProxyType({})

    def __missing__(self, key: str) -> T:
        matched = clean(key)
        return self[matched] if super().__contains__(matched) else self.others[matched]

    def __contains__(self, key: object) -> bool:
        if not isinstance(key, str):
            return False
        return super().__contains__(key) or super().__contains__(clean(key)) or clean(key) in self.others


def matching_names(values: Mapping[str, T], change: Callable[[str, T], S]) -> dict[str, S]:
    """``values`` changed, so that names with prefixes of wrappers find them, and all names that they had."""
    matching = _MatchingNames({key: change(key, value) for key, value in values.items()})
    if isinstance(values, _MatchingNames):
        matching.others = {key: change(key, value) for key, value in values.others.items()}
    return matching


class BoxToRead(NamedTuple):
    """``box`` of the tensor ``key``, to be read into ``target``, a part of ``held_as`` in the state dict."""

    key: str
    held_as: str
    box: Box
    target: torch.Tensor


def read_boxes(
    boxes: Sequence[BoxToRead], entries: Entries, checkpoint: Checkpoint, check: ReadCheck, *, threads: int
) -> bool:
    """Read every box, in file order. Reads nothing and returns False if chunks cannot be located one by one.

    Raises SourceCorruptError if a file ends too early, an item is damaged, or bytes do not have their checksum.
    """
    filled = [wanted for wanted in boxes if wanted.target.numel()]
    tensors = [entries.tensor(wanted.key) for wanted in filled]
    rows = [_rows(tensor, wanted.box) for tensor, wanted in zip(tensors, filled, strict=True)]
    located = locate_rows(list(zip(tensors, rows, strict=True)), checkpoint.files, check.sources)
    if located is None:
        return False
    check.add(located.checksums)
    reads = check.reading()

    def work(reader: BlockReader, number: int) -> None:
        tensor = located.tensors[number]
        _read(ChunkReader(reader, tensor, list(range(len(tensor.chunks)))), filled[number])

    for_each(
        range(len(filled)),
        work,
        make_reader=lambda: BlockReader(checkpoint.files, reads),
        threads=threads,
        order=in_file_order(located.tensors),
    )
    reads.finish()
    return True


def _rows(tensor: Tensor, box: Box) -> np.ndarray[tuple[int], np.dtype[np.intp]]:
    """The chunks that hold part of the box; of replicas only the one that is read."""
    chunks, offsets = tensor.chunks, np.asarray(box.offsets, np.int64)
    low = np.maximum(chunks.start, offsets)
    high = np.minimum(chunks.start + chunks.size, offsets + np.asarray(box.sizes, np.int64))
    rows = np.flatnonzero((low < high).all(axis=1))
    return rows[rows_to_read(chunks.take(rows))]


def _read(chunks: ChunkReader, wanted: BoxToRead) -> None:
    """Read into the target's own memory if that is contiguous host memory, else copy one block after the other.

    The memory of a conjugated or negated view holds other numbers than the view.
    """
    box, target = wanted.box, wanted.target
    if target.device.type == "cpu" and target.is_contiguous() and not (target.is_conj() or target.is_neg()):
        chunks.read_into(box, target.reshape(-1).view(torch.uint8).numpy())
        return
    copy_blocks(chunks, box, target)


def as_saved(value: Value, checkpoint: Checkpoint, check: ReadCheck) -> io.BytesIO:
    """What ``torch.save`` would write for ``value``, made from scratch: it names only allow-listed classes.

    Raises SourceCorruptError if tensors in it do not have their checksums.
    """
    file = TargetFile("")
    lay_out_file(file, value, casts={}, stem="archive")
    content = bytearray(file.nbytes)
    for offset, begin, nbytes in file.literals:
        content[offset : offset + nbytes] = file.blob[begin : begin + nbytes]
    reads = check.reading()
    reader = BlockReader(checkpoint.files, reads)
    for write_item in file.write_items:
        memory = np.empty(write_item.nbytes, np.uint8)
        ChunkReader(reader, write_item.tensor).read_into(Box(write_item.start, write_item.size), memory)
        if write_item.order is not None:  # transposed or channels_last in the source, and so in the archive
            elements = memory.reshape(*write_item.size, write_item.dtype.itemsize)
            memory = np.ascontiguousarray(elements.transpose(*write_item.order, elements.ndim - 1))
        content[write_item.offset : write_item.offset + write_item.nbytes] = memory.tobytes()
    reads.finish()
    for begin, end, positions in file.checksums:
        crc = zlib.crc32(memoryview(content)[begin:end]).to_bytes(4, "little")
        for position in positions:
            content[position : position + 4] = crc
    return io.BytesIO(bytes(content))
