"""Opens a source to load from, lists what a rank can load, and reads boxes of its tensors.

Opening reads no tensor data. Reading a box never reads a whole tensor or a whole stored chunk, unless that is the box.
"""

from __future__ import annotations

import io
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TypeVar

import numpy as np

from fsdpckpt.converters.target_spec import TargetSpec
from fsdpckpt.converters.transform import transform, units_request
from fsdpckpt.errors import NeedsInformationError, SourceUnsupportedError, UsageError
from fsdpckpt.flat.units.request import load_units
from fsdpckpt.flat.units.source import is_flattened
from fsdpckpt.ir.checkpoint import Checkpoint, Container, Layout, OptimState, Section, group_params
from fsdpckpt.ir.names import clean
from fsdpckpt.ir.quantized import TORCHAO, Blockwise
from fsdpckpt.ir.targets import TargetFile
from fsdpckpt.ir.tensors import Box, Tensor
from fsdpckpt.ir.values import Value
from fsdpckpt.options import ConvertOptions
from fsdpckpt.readers.dcp.items import is_located, locate_rows
from fsdpckpt.readers.detect import open_checkpoint
from fsdpckpt.readers.protocol import require_matches
from fsdpckpt.storage.sources import Sources
from fsdpckpt.verify.blocks import (
    BLOCK_BYTES,
    BlockReader,
    Bytes,
    ChunkReader,
    for_each,
    in_file_order,
    rows_to_read,
    slabs,
)
from fsdpckpt.verify.elements import without_repeats
from fsdpckpt.writers.state_dicts import Leaf, extras_of_rank, flatten
from fsdpckpt.writers.torch_full import lay_out_file

Path = tuple[str | int, ...]
S = TypeVar("S")
T = TypeVar("T")


def open_to_load(path: str, options: ConvertOptions, sources: Sources, *, locate: bool) -> Checkpoint:
    """The checkpoint at ``path`` as whole tensors, keyed and named according to ``options``.

    ``locate=False``: the items of a DCP directory are not opened, unless they contain flat parameters. Raises what
    ``fsdpckpt convert`` raises for the source: SourceError, NeedsInformationError.
    """
    units = load_units(options.units, sources) if options.units is not None else None
    ignored = options.ignore_file
    checkpoint = open_checkpoint(path, sources=sources, units=units, locate=locate, ignore_file=ignored, as_dcp=True)
    require_matches(ignored, checkpoint)
    flattened = not locate and is_flattened(checkpoint, sources, units_request(options))
    if flattened and not all(map(is_located, checkpoint.leaves())):
        checkpoint = open_checkpoint(path, sources=sources, units=units, locate=True, ignore_file=ignored, as_dcp=True)
    try:
        # as for a conversion to whole tensors, up to the layout
        spec = TargetSpec(Layout.FULL, Container.DCP, None, options, directory=True)
        return transform(without_repeats(checkpoint, sources), spec, sources).checkpoint
    except NeedsInformationError as error:
        if options.key_type == "name":
            error.alternative = "--key-type id for an optimizer.state_dict() that is keyed by id itself"
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


@dataclass(frozen=True, slots=True)
class Entries:
    """``values`` and ``paths`` (their nesting) by flat key."""

    values: Mapping[str, Value]
    paths: Mapping[str, Path]


def entries_of(checkpoint: Checkpoint, names: Names, rank: int) -> Entries:
    """What rank ``rank`` can load: what all ranks share, and the extras of source rank ``rank`` modulo their number.

    Raises UsageError if ``names`` give two entries one key, SourceUnsupportedError if the checkpoint itself does.
    """
    of_rank = replace(checkpoint, extra=extras_of_rank(checkpoint, rank), rank_extra=())
    leaves: Iterable[tuple[Path, Value]] = [(leaf.path, _loadable(leaf)) for leaf in flatten(of_rank)[0]]
    if names.flattened and of_rank.optim is not None:
        leaves = _by_parameter(of_rank.optim, leaves)
    prefixes = _prefixes(of_rank, names)
    values: dict[str, Value] = {}
    paths: dict[str, Path] = {}
    for stored_path, value in leaves:
        prefix = prefixes.get(stored_path[0])
        path = stored_path if prefix is None else (*prefix, *stored_path[1:])
        key = ".".join(map(str, path))
        if key in values:
            raise UsageError(
                f"two entries of {checkpoint.source} would both be loaded as {key}",
                key=key,
                next_step="give the sections other names: StorageReader(path, model=..., optimizer=...)",
            )
        values[key], paths[key] = value, path
    matching = _MatchingNames(values)
    if of_rank.optim is not None and not names.flattened:
        prefix = prefixes.get("optimizer", ("optimizer",))
        matching.others = {".".join(map(str, (*prefix, *path[1:]))): value for path, value in _settings(of_rank.optim)}
    return Entries(matching, paths)


def _loadable(leaf: Leaf) -> Value:
    if isinstance(leaf.value, Blockwise):
        raise SourceUnsupportedError(
            f"{leaf.key} is {leaf.value.blocks}, which StorageReader does not load",
            key=leaf.key,
            why=f"only {TORCHAO} fills such a tensor from another",
            next_step="fsdpckpt convert SRC DST --container dcp, and load DST with torch.distributed.checkpoint",
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


def _prefixes(checkpoint: Checkpoint, names: Names) -> dict[str | int, Path]:
    """Replacements for the first element of a path. An extra with the name of an absent section keeps its name."""
    prefixes: dict[str | int, Path] = {}
    for section, present, word, name in (
        (Section.MODEL, checkpoint.model is not None, "model", names.model),
        (Section.OPTIM, checkpoint.optim is not None, "optimizer", names.optimizer),
    ):
        if present and name is not None:
            prefixes[word] = tuple(name.split(".")) if name else ()
        elif present:
            nesting = checkpoint.nesting.get(section, (word,))
            prefixes[word] = tuple(key if isinstance(key, int) else str(key) for key in nesting)
    return prefixes


def _by_parameter(optim: OptimState, leaves: Iterable[tuple[Path, Value]]) -> Iterator[tuple[Path, Value]]:
    """The optimizer in the form of ``_flatten_optim_state_dict``: one level of dotted keys, settings by parameter."""
    for path, value in leaves:
        if path[:2] != ("optimizer", "param_groups"):
            yield ("optimizer", ".".join(map(str, path[1:]))) if path[0] == "optimizer" else path, value
    yield from _settings(optim)


def _settings(optim: OptimState) -> Iterator[tuple[Path, Value]]:
    for group in optim.param_groups or ():
        settings = {str(key): value for key, value in group.items() if key != "params"}
        for param in group_params(group) or ():
            for key, value in settings.items():
                yield ("optimizer", f"param_groups.{param}.{key}"), value


@dataclass(frozen=True, slots=True)
class BoxToRead:
    """``box`` of ``tensor``, to be read row-major into ``memory``.

    Without host memory to read into, ``put`` gets its bytes in parts (the part's box within the box, its bytes).
    """

    tensor: Tensor
    box: Box
    memory: Bytes | None
    put: Callable[[Box, Bytes], None]


def read_boxes(boxes: Sequence[BoxToRead], checkpoint: Checkpoint, sources: Sources, *, threads: int) -> bool:
    """Read every box, in file order. Reads nothing and returns False if chunks cannot be located one by one.

    Raises SourceCorruptError if a file ends too early or an item is damaged.
    """
    located = locate_rows([(each.tensor, _rows(each)) for each in boxes], checkpoint.files, sources)
    if located is None:
        return False

    def work(reader: BlockReader, number: int) -> None:
        _read(reader, boxes[number], located[number])

    for_each(
        range(len(boxes)),
        work,
        make_reader=lambda: BlockReader(checkpoint.files, sources),
        threads=threads,
        order=in_file_order(located),
    )
    return True


def _rows(wanted: BoxToRead) -> np.ndarray[tuple[int], np.dtype[np.intp]]:
    """The chunks that hold part of the box; of replicas only the one that is read."""
    chunks, offsets = wanted.tensor.chunks, np.asarray(wanted.box.offsets, np.int64)
    low = np.maximum(chunks.start, offsets)
    high = np.minimum(chunks.start + chunks.size, offsets + np.asarray(wanted.box.sizes, np.int64))
    rows = np.flatnonzero((low < high).all(axis=1))
    return rows[rows_to_read(chunks.take(rows))]


def _read(reader: BlockReader, wanted: BoxToRead, located: Tensor) -> None:
    chunks = ChunkReader(reader, located, list(range(len(located.chunks))))
    if wanted.memory is not None:
        chunks.read_into(wanted.box, wanted.memory)
        return
    itemsize = wanted.tensor.dtype.itemsize
    for part in slabs(wanted.box.sizes, itemsize, BLOCK_BYTES):
        block = np.empty(part.numel * itemsize, np.uint8)
        offsets = tuple(map(sum, zip(wanted.box.offsets, part.offsets, strict=True)))
        chunks.read_into(Box(offsets, part.sizes), block)
        wanted.put(part, block)


def as_saved(value: Value, checkpoint: Checkpoint, sources: Sources) -> io.BytesIO:
    """What ``torch.save`` would write for ``value``, made from scratch: it names only allow-listed classes."""
    file = TargetFile("")
    lay_out_file(file, value, casts={}, stem="archive")
    content = bytearray(file.nbytes)
    for offset, begin, nbytes in file.literals:
        content[offset : offset + nbytes] = file.blob[begin : begin + nbytes]
    reader = BlockReader(checkpoint.files, sources)
    for write_item in file.write_items:
        memory = np.frombuffer(content, np.uint8, write_item.nbytes, write_item.offset)
        ChunkReader(reader, write_item.tensor).read_into(Box(write_item.start, write_item.size), memory)
        del memory
    for begin, end, places in file.checksums:
        crc = zlib.crc32(memoryview(content)[begin:end]).to_bytes(4, "little")
        for place in places:
            content[place : place + 4] = crc
    return io.BytesIO(bytes(content))
