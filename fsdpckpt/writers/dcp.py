"""Lays out a DCP directory, as ``dcp.save({"model": ..., "optimizer": ..., **extra})`` writes it.

Sharded tensors are cut by their mesh (by default along dimension 0), and rank r's chunks are in ``__{r}_0.distcp``, so
that each of N loading ranks reads only its own file. What several ranks hold is stored once, in the file of the rank
that ``torch.distributed.checkpoint._dedup_save_plans`` chooses. Each item is a ``torch.save`` archive.

An item of a data file has neither a name nor the offsets of its box: ``.metadata`` has both. If a target needs the same
boxes as a DCP source, in the same dtypes, its ``.metadata`` can refer to the source's items: the files are linked.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from itertools import pairwise
from math import prod
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from fsdpckpt.errors import InternalError
from fsdpckpt.formats.dcp.write_metadata import DcpEntry, StoredItems, metadata_pickle
from fsdpckpt.formats.pickle.opcodes import StorageView
from fsdpckpt.formats.pickle.write import PickleWriter, dumps
from fsdpckpt.formats.zip_write import ALIGNMENT, CastBox, Records
from fsdpckpt.ir.checkpoint import Checkpoint
from fsdpckpt.ir.dtypes import DType
from fsdpckpt.ir.quantized import Blockwise
from fsdpckpt.ir.targets import PER_ITEM, ItemKinds, LinkedFile, Target, TargetData, TargetFile
from fsdpckpt.ir.tensors import Box, Chunks, Int64Array, Tensor, contiguous_stride, first_equal
from fsdpckpt.ir.torchao import CODES, Blocks
from fsdpckpt.ir.values import Value, leaf_tensors
from fsdpckpt.layouts import (
    DistinctChunks,
    RankBoxes,
    SharedChunk,
    emptied,
    emptied_dimension,
    mesh_chunks,
    source_chunks,
)
from fsdpckpt.writers.protocol import WriteSpec
from fsdpckpt.writers.state_dicts import Leaf, flatten_state_dict, lost_dicts
from fsdpckpt.writers.torch_full import lay_out_file

_STEM = "archive"  # the folder torch.save uses for a file object
_METADATA = ".metadata"


def lay_out(checkpoint: Checkpoint, spec: WriteSpec) -> Target:
    """One data file for each rank that has an item, ``.metadata`` last; their names begin with ``spec.path``.

    ``spec.world_size`` ranks share the tensors whose ``sharded`` is True, according to ``Tensor.sharding`` (0-dim ones
    are never cut). None keeps the source's own chunks and ranks, replicas written once. Raises SourceUnsupportedError
    if two keys flatten to one.
    """
    world_size = spec.world_size
    casts, notes = spec.dtypes.casts(checkpoint)
    leaves, flattening = flatten_state_dict(checkpoint, spec.section_paths, flattened_keys=spec.flattened_keys)
    notes += flattening
    held_chunks = [_held_chunks(leaf.value, spec) for leaf in leaves]
    source_ranks = (rank + 1 for chunks in held_chunks if chunks for rank in chunks.unshared_ranks)
    ranks = world_size or max(source_ranks, default=1)
    assigned = _dedup(leaves, held_chunks, casts, ranks)
    boxes_of = [(leaf.tensor, boxes) for leaf, boxes in zip(leaves, assigned, strict=True)]
    links = _Links(boxes_of, casts, spec.linkable)
    names = [links.free_name(rank) for rank in range(ranks)]
    empty_along = [_empty_along(leaf, spec) for leaf in leaves]
    files, entries = _Items(casts, names, links).lay_out(leaves, assigned, empty_along)
    pickled = metadata_pickle(entries, [*names, *links.names.values()])
    metadata = TargetFile(
        _METADATA, nbytes=len(pickled), blob=pickled, literal_columns=array("q", (0, 0, len(pickled)))
    )
    files.append(metadata)
    for file in files:
        file.path = spec.path + file.path
    linked: list[LinkedFile] = []
    for number, name in links.names.items():
        linked.append(LinkedFile(spec.path + name, number, int(links.used[number])))
    lost = lost_dicts(checkpoint, spec.section_paths, flattened_keys=spec.flattened_keys)
    return Target(files, notes, linked, lost)


def _held_chunks(value: Value | Blockwise, spec: WriteSpec) -> DistinctChunks | None:
    """The chunks of a tensor with the ranks that hold each, None if all ranks hold it whole."""
    if isinstance(value, Blockwise):
        codes = value.tensors[CODES]
        if spec.world_size is None:
            return _of_elements(source_chunks(codes), value.blocks)
        return mesh_chunks(value.blocks.shape, spec.sharding(codes)) if codes.sharded else None
    if not isinstance(value, Tensor):
        return None
    if spec.world_size is None:
        return source_chunks(value)
    return mesh_chunks(value.shape, spec.sharding(value)) if value.sharded and value.shape else None


def _empty_along(leaf: Leaf, spec: WriteSpec) -> int | None:
    """The dimension along which a local tensor without elements is empty, in any case (``emptied_dimension``)."""
    value = leaf.value.tensors[CODES] if isinstance(leaf.value, Blockwise) else leaf.value
    if spec.world_size is None or not isinstance(value, Tensor) or not value.sharded or not value.shape:
        return None
    return emptied_dimension(spec.sharding(value))


def _of_elements(chunks: DistinctChunks, blocks: Blocks) -> DistinctChunks:
    """The boxes of a parameter whose codes are ``chunks``."""
    if not blocks.packed:
        return chunks
    rows = chunks.unshared
    start, size = np.zeros((2, len(rows.rank), len(blocks.shape)), np.int64)
    size[:] = blocks.shape
    start[:, 0], size[:, 0] = rows.start[:, 0] * blocks.group, rows.size[:, 0] * blocks.group
    return DistinctChunks(RankBoxes(rows.rank, start, size), chunks.unshared_ranks)


def _dedup(
    leaves: list[Leaf], held_chunks: list[DistinctChunks | None], casts: Mapping[Tensor, DType], ranks: int
) -> list[RankBoxes]:
    """For each leaf its (rank, box)es, in the order of the ranks that write them.

    As ``dedup_save_plans``: item by item, rank 0's first, then those that only rank 1 and later ranks have, and so on.
    The rank with the smallest load among those that hold an item writes it (the first of several), and its load grows
    by the size of the *whole* tensor (``WriteItem.tensor_storage_size``), or by 1. Of the items that only one rank
    holds, which are most, only those count that come before another with the same first holder: no later item is
    between their ranks.
    """
    nbytes = [_nbytes(leaf.value, casts) or 1 for leaf in leaves]
    loads = np.zeros(ranks, np.int64)
    assigned: list[RankBoxes] = []
    shared_assigned: dict[int, list[tuple[int, Box]]] = {}  # by leaf: its boxes that several ranks hold
    by_first_holder: dict[int, list[tuple[int, SharedChunk]]] = {}  # without rank 0: leaf and chunk
    for number, chunks in enumerate(held_chunks):
        rank = 0
        if chunks is None:
            rank = int(loads.argmin())  # the first of equals
            assigned.append(_whole_boxes(rank, leaves[number].form[1]))
        else:
            assigned.append(chunks.unshared)
            first = chunks.shared[0] if chunks.shared and not chunks.shared[0].ranks[0] else None
            for chunk in chunks.shared[1:] if first is not None else chunks.shared:
                by_first_holder.setdefault(chunk.ranks[0], []).append((number, chunk))
            if first is not None:
                rank = _least_loaded(first, loads)
                shared_assigned.setdefault(number, []).append((rank, first.box))
            elif 0 not in chunks.unshared_ranks:
                continue
        loads[rank] += nbytes[number]
    with_unshared: list[tuple[int, Collection[int]]] = []
    for number, chunks in enumerate(held_chunks):
        if chunks and chunks.unshared_ranks:
            with_unshared.append((number, chunks.unshared_ranks))
    for holder in sorted(by_first_holder):
        unshared = iter([number for number, unshared_ranks in with_unshared if holder in unshared_ranks])
        next_unshared = next(unshared, len(leaves))
        for number, chunk in by_first_holder[holder]:
            while next_unshared < number:
                loads[holder] += nbytes[next_unshared]
                next_unshared = next(unshared, len(leaves))
            rank = _least_loaded(chunk, loads)
            shared_assigned.setdefault(number, []).append((rank, chunk.box))
            loads[rank] += nbytes[number]
    for number, boxes in shared_assigned.items():
        assigned[number] = assigned[number].merged_with(RankBoxes.of(boxes, len(boxes[0][1].sizes)))
    return assigned


@lru_cache(maxsize=4096)
def _whole_boxes(rank: int, shape: tuple[int, ...]) -> RankBoxes:
    return RankBoxes.of([(rank, Box.whole(shape))], len(shape))


def _least_loaded(chunk: SharedChunk, loads: Int64Array) -> int:
    return min(set(chunk.ranks), key=loads.__getitem__)  # a set as in PyTorch, whose order decides between equals


def _nbytes(value: Value | Blockwise, casts: Mapping[Tensor, DType]) -> int:
    if isinstance(value, Blockwise):
        return prod(value.blocks.shape) * value.blocks.dtype.itemsize
    return value.numel * casts.get(value, value.dtype).itemsize if isinstance(value, Tensor) else 0


class _Linked(NamedTuple):
    """The boxes of one tensor that are in linked files, one row each. ``boxes``: the numbers of these boxes.

    ``file``: a number of the source's; ``offset``, ``nbytes``: of the item in it.
    """

    boxes: npt.NDArray[np.bool_]
    file: Int64Array
    offset: Int64Array
    nbytes: Int64Array


class _Links:
    """The items of the source to which a target refers. ``names``: of each linked file, by its number in the source.

    ``used``: how many bytes of each are used. ``items``: the linked boxes of each value by its number among ``values``,
    the target's tensors (None for other values) with the boxes of each; other boxes must be written. ``casts``: the new
    dtypes. ``linkable``: the source files that may be linked. One of these is linked if most bytes that the target
    takes from it are items that do not change.
    """

    def __init__(
        self, values: Sequence[tuple[Tensor | None, RankBoxes]], casts: Mapping[Tensor, DType], linkable: frozenset[int]
    ) -> None:
        files = max(linkable, default=-1) + 1
        linked_bytes, copied_bytes, rank = np.zeros((3, files), np.int64)  # of each file, and the rank that wrote it
        links: dict[int, tuple[Int64Array, Int64Array, Int64Array]] = {}
        for number, (tensor, boxes) in enumerate(values if linkable else ()):
            if tensor is not None and tensor.chunks.item is not None:
                chunks, item = tensor.chunks, tensor.chunks.item
                stored, rows = _stored_boxes(tensor, item, boxes)
                usable = stored[np.isin(chunks.file[stored], list(linkable))]
                wanted = np.isin(usable, rows) & (tensor not in casts)
                for used, total in ((wanted, linked_bytes), (~wanted, copied_bytes)):
                    np.add.at(total, chunks.file[usable[used]], item[usable[used], 1])
                rank[chunks.file[usable]] = chunks.rank[usable]
                if tensor not in casts:
                    links[number] = (rows, np.where(rows < 0, -1, chunks.file[rows]), item[rows])
        linked = [file for file in sorted(linkable) if linked_bytes[file] > copied_bytes[file]]
        self._files_of_rank: Counter[int] = Counter()
        self.names = {file: self.free_name(int(rank[file])) for file in linked}
        self.used = np.zeros(files, np.int64)
        self.items: dict[int, _Linked] = {}
        for number, (_, file, item) in links.items():
            in_linked = np.isin(file, linked)
            if in_linked.any():
                self.items[number] = _Linked(in_linked, file[in_linked], item[in_linked, 0], item[in_linked, 1])
                np.add.at(self.used, file[in_linked], item[in_linked, 1])

    def free_name(self, rank: int) -> str:
        """The next name for a data file of ``rank``, as ``FileSystemWriter`` numbers them."""
        self._files_of_rank[rank] += 1
        return f"__{rank}_{self._files_of_rank[rank] - 1}.distcp"


def _stored_boxes(tensor: Tensor, item: Int64Array, wanted: RankBoxes) -> tuple[Int64Array, Int64Array]:
    """The chunks that the source stores as separate items, of replicas the first; and for each box of ``wanted`` the
    chunk equal to it, -1 for none.

    Leaves out data files in the safetensors format, which hold one blob for all chunks.
    """
    chunks = tensor.chunks
    nbytes = chunks.size.prod(axis=1) * tensor.dtype.itemsize
    archives = np.flatnonzero(item[:, 1] > nbytes)
    start = np.concatenate([chunks.start[archives], wanted.start])
    equal = first_equal(np.concatenate([start, np.concatenate([chunks.size[archives], wanted.size])], axis=1))
    count = len(archives)
    of_wanted = equal[count:]
    stored = archives[equal[:count] == np.arange(count)]
    if not count:
        return stored, np.full(of_wanted.shape, -1)
    return stored, np.where(of_wanted < count, archives[np.minimum(of_wanted, count - 1)], -1)


class _ItemRows(NamedTuple):
    """The items of an entry, one row each: the kind, the box in ``TargetData.boxes`` (0 for a value), and what
    ``.metadata`` has about it. The number of a file is the rank that writes it. Entries that are cut in the same way
    share these rows.
    """

    kind: Int64Array
    box: Int64Array
    items: StoredItems


@dataclass(slots=True)
class _Items:
    """Lays out the items of all data files, in columns.

    Items of one *kind* (the same dtype and size, or the same value) differ only in their data: a kind is laid out once,
    as a separate file, and inserted in every data file. Items begin at multiples of ``ALIGNMENT``, so that data is
    aligned in the file as well as in the item.
    """

    casts: Mapping[Tensor, DType]
    names: list[str]  # of the data file of each rank
    links: _Links
    data: TargetData = field(default_factory=TargetData)
    blob: bytearray = field(default_factory=bytearray)
    kinds: list[TargetFile] = field(default_factory=list)
    nbytes: list[int] = field(default_factory=list)  # of an item of each kind, without the padding behind it
    kind_numbers: dict[tuple[str, tuple[int, ...]] | bytes, int] = field(default_factory=dict)
    rows_by_cut: dict[tuple[object, ...], _ItemRows] = field(default_factory=dict)

    def lay_out(
        self, leaves: list[Leaf], assigned: list[RankBoxes], empty_along: list[int | None]
    ) -> tuple[list[TargetFile], list[DcpEntry]]:
        """The data files, by rank, and the entries of ``.metadata``.

        ``empty_along``: for each leaf, the dimension along which items without elements are empty, whatever their box.
        """
        item_rows = [
            self._items_of(leaf.value, self._written(number, leaf.value, boxes), dim)
            for number, (leaf, boxes, dim) in enumerate(zip(leaves, assigned, empty_along, strict=True))
        ]
        tensors = [
            self.data.add_tensor(leaf.value, self._dtype(leaf.value)) if isinstance(leaf.value, Tensor) else -1
            for leaf in leaves
        ]
        counts = [len(each.kind) for each in item_rows]
        none = [np.zeros(0, np.int64)]
        rank = np.concatenate([each.items.file for each in item_rows] or none)
        order = np.argsort(rank, kind="stable")
        rank = rank[order]
        kind = np.concatenate([rows.kind for rows in item_rows] or none)[order]
        box = np.concatenate([each.box for each in item_rows] or none)[order]
        tensor = np.repeat(np.array(tensors, np.int64), counts)[order]
        starts = np.flatnonzero(np.diff(rank, prepend=-1)).tolist()
        ends = np.cumsum(np.array([file.nbytes for file in self.kinds], np.int64)[kind])
        begin = np.concatenate([[0], ends])
        kinds, files = ItemKinds(self.kinds), []
        for low, high in pairwise([*starts, len(rank)]):
            rows, at = slice(low, high), int(begin[low])
            begin[rows] -= at
            # Not a method of the file: two objects that refer to each other wait for the garbage collector.
            build = partial(kinds.insert, kind=kind[rows], begin=begin[rows], tensor=tensor[rows], box=box[rows])
            files.append(TargetFile(self.names[rank[low]], self.data, int(ends[high - 1]) - at, self.blob, build=build))
        offset = np.empty(len(rank), np.int64)
        offset[order] = begin[:-1]
        lasts = np.cumsum(counts).tolist()
        entries = []
        for number, (leaf, each, last) in enumerate(zip(leaves, item_rows, lasts, strict=True)):
            dtype, shape = leaf.form
            dtype = self._dtype(leaf.tensor) if leaf.tensor is not None else dtype
            items, of_leaf = each.items, offset[last - len(each.kind) : last]
            linked = self.links.items.get(number)
            if linked is not None:
                items, of_leaf = self._with_linked(assigned[number], items, of_leaf, linked)
            entries.append(DcpEntry(leaf.key, leaf.path, dtype, shape, items, of_leaf))
        return files, entries

    def _written(self, number: int, value: Value | Blockwise, boxes: RankBoxes) -> RankBoxes:
        """Which of ``boxes`` must be written, and on which rank."""
        if self.links.names and not isinstance(value, Tensor | Blockwise):
            return _whole_boxes(0, ())  # the linked files hold the data: one small one for all the rest
        linked = self.links.items.get(number)
        return boxes if linked is None else boxes.take(~linked.boxes)

    def _with_linked(
        self, boxes: RankBoxes, items: StoredItems, offset: Int64Array, linked: _Linked
    ) -> tuple[StoredItems, Int64Array]:
        """The written and the linked items of one tensor, and where each begins."""
        numbers = {file: len(self.names) + number for number, file in enumerate(self.links.names)}
        file, begin, nbytes = np.empty((3, len(boxes.rank)), np.int64)
        file[linked.boxes] = [numbers[each] for each in linked.file.tolist()]
        begin[linked.boxes], nbytes[linked.boxes] = linked.offset, linked.nbytes
        file[~linked.boxes], begin[~linked.boxes], nbytes[~linked.boxes] = items.file, offset, items.nbytes
        return StoredItems(boxes.start, boxes.size, file, nbytes), begin

    def _dtype(self, tensor: Tensor) -> DType:
        return self.casts.get(tensor, tensor.dtype)

    def _items_of(self, value: Value | Blockwise, boxes: RankBoxes, dim: int | None) -> _ItemRows:
        if isinstance(value, Blockwise):
            pairs = zip(boxes.start.tolist(), boxes.size.tolist(), strict=True)
            cut = [Box(tuple(start), emptied(tuple(size), dim)) for start, size in pairs]
            return self._item_rows([self._blocks(value, box) for box in cut], [0] * len(cut), boxes)
        columns = (boxes.rank.tobytes(), boxes.start.tobytes(), boxes.size.tobytes())
        if isinstance(value, Tensor):
            dtype = self._dtype(value)
            key = (dtype.name, value.ndim, dim, *columns)
            rows = self.rows_by_cut.get(key)
            if rows is None:
                kinds = [self._tensor(dtype, emptied(tuple(size), dim)) for size in boxes.size.tolist()]
                indexes = [
                    self.data.add_box(*box) for box in zip(boxes.start.tolist(), boxes.size.tolist(), strict=True)
                ]
                rows = self.rows_by_cut[key] = self._item_rows(kinds, indexes, boxes)
            return rows
        kind = self._value(value)
        return self.rows_by_cut.setdefault((kind, *columns), self._item_rows([kind], [0], boxes))

    def _item_rows(self, kinds: list[int], indexes: list[int], boxes: RankBoxes) -> _ItemRows:
        nbytes = np.array([self.nbytes[kind] for kind in kinds], np.int64)
        items = StoredItems(boxes.start, boxes.size, boxes.rank, nbytes)
        return _ItemRows(np.array(kinds, np.int64), np.array(indexes, np.int64), items)

    def _tensor(self, dtype: DType, size: tuple[int, ...]) -> int:
        """The kind of row-major tensors of ``size``. Each item adds which tensor it is, and which box of it."""
        number = self.kind_numbers.get((dtype.name, size))
        if number is None:
            file = TargetFile("", blob=self.blob)
            lay_out_file(file, Tensor(dtype, size, Chunks.whole(file=0, offset=0, shape=size)), casts={}, stem=_STEM)
            if file.item_columns:
                file.item_columns[2:] = array("q", (PER_ITEM, PER_ITEM))
            number = self.kind_numbers[dtype.name, size] = self._kind(file)
        return number

    def _blocks(self, value: Blockwise, box: Box) -> int:
        """The kind of one box of a state in blocks; an empty one is not quantized, and is an empty tensor."""
        blocks = value.blocks
        if not box.numel:
            return self._tensor(blocks.dtype, box.sizes)
        boxes_of_parts = blocks.boxes_of(box)
        if boxes_of_parts is None:
            raise InternalError(f"a box of {blocks} was laid out that cuts a block: {box}")
        boxes = {tensor: boxes_of_parts.get(part) for part, tensor in value.tensors.items()}  # none of the map
        records = Records()

        def stored(tensor: Tensor) -> StorageView:
            content = CastBox(tensor, tensor.dtype, boxes.get(tensor) or Box.whole(tensor.shape))
            sizes = content.box.sizes
            return StorageView(records.add(content), tensor.dtype, 0, sizes, contiguous_stride(sizes), content.nbytes)

        pickle = PickleWriter()
        pickle.whole_blocks(value, stored)
        file = TargetFile("", self.data, blob=self.blob)
        records.write(file, pickle.finish(), stem=_STEM)
        return self._kind(file)

    def _value(self, value: Value) -> int:
        """The kind of a value that is not a tensor (it may hold some)."""
        pickled = None if any(True for _ in leaf_tensors(value)) else dumps(value)
        number = self.kind_numbers.get(pickled) if pickled is not None else None
        if number is None:
            file = TargetFile("", self.data, blob=self.blob)
            lay_out_file(file, value, casts=self.casts, stem=_STEM)
            number = self._kind(file)
            if pickled is not None:
                self.kind_numbers[pickled] = number
        return number

    def _kind(self, file: TargetFile) -> int:
        self.nbytes.append(file.nbytes)
        file.add_literal(bytes(-file.nbytes % ALIGNMENT))
        self.kinds.append(file)
        return len(self.kinds) - 1
