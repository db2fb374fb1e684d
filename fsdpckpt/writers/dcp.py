"""Lays out a DCP directory, as ``dcp.save({"model": ..., "optimizer": ..., **extra})`` writes it.

Sharded tensors are cut as their mesh cuts them (by default along dimension 0), and rank r's chunks lie in
``__{r}_0.distcp``, so that each of N loading ranks reads its own file only. What several ranks hold lies once, in the
file of the rank that ``torch.distributed.checkpoint._dedup_save_plans`` chooses. Each item is a ``torch.save`` archive.
Where files of the source may be linked, ``.metadata`` points to the items in them (``dcp_links``).
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from operator import itemgetter
from typing import NamedTuple, TypeAlias

from fsdpckpt.errors import SourceUnsupportedError
from fsdpckpt.formats.dcp.metadata import DcpEntry, StoredChunk, metadata_pickle
from fsdpckpt.formats.pickle.write import PickleOpcodes, StorageView, dumps
from fsdpckpt.formats.zip import ALIGNMENT, TorchZip
from fsdpckpt.ir.checkpoint import BARE_VALUE, Checkpoint, Note, OptimState, group_params
from fsdpckpt.ir.dtypes import DType
from fsdpckpt.ir.targets import Target, TargetFile, WriteItem
from fsdpckpt.ir.tensors import Box, RankBoxes, Tensor, contiguous_stride
from fsdpckpt.ir.values import Key, Value, leaf_tensors
from fsdpckpt.layouts.sharded import HeldChunks, SharedChunk, mesh_chunks, source_boxes
from fsdpckpt.producers.forms import PLAIN_NESTING, Nesting
from fsdpckpt.writers.dcp_links import LinkedItems
from fsdpckpt.writers.protocol import WriteSpec
from fsdpckpt.writers.state_dicts import extras_of_one, optim_dict
from fsdpckpt.writers.torch_full import lay_out_file

_STEM = "archive"  # the folder torch.save uses for a file object
_METADATA = ".metadata"


def lay_out(checkpoint: Checkpoint, spec: WriteSpec) -> Target:
    """One data file for each rank that has an item, ``.metadata`` last; their names begin with ``spec.path``.

    ``spec.world_size`` ranks share the tensors whose ``sharded`` is True, as ``Tensor.sharding`` says (0-dim ones are
    never cut). None keeps the source's own chunks and ranks, replicas written once. Raises SourceUnsupportedError when
    two keys flatten to one.
    """
    world_size = spec.world_size
    casts, notes = spec.dtypes.casts(checkpoint)
    leaves, flattening = flatten(checkpoint, spec.nesting)
    notes += flattening
    entries = []
    held = [_held(leaf.value, spec) for leaf in leaves]
    ranks = world_size or max((rank + 1 for chunks in held if chunks for rank in chunks.own_ranks), default=1)
    placed = _dedup(leaves, held, casts, ranks)
    tensors = [(leaf.value, boxes) for leaf, boxes in zip(leaves, placed, strict=True)]
    links = LinkedItems(tensors, casts, spec.linkable)
    writer = _DataFiles(casts, links)
    for leaf, (value, boxes) in zip(leaves, tensors, strict=True):
        if isinstance(value, Tensor):
            dtype = casts.get(value, value.dtype)
            chunks = [writer.tensor(value, dtype, rank, box) for rank, box in boxes]
            entries.append(DcpEntry(leaf.key, leaf.path, dtype, value.shape, chunks))
        else:
            entries.append(DcpEntry(leaf.key, leaf.path, None, (), [writer.value(value, boxes[0][0])]))
    metadata = TargetFile(_METADATA)
    metadata.literal(metadata_pickle(entries))
    files = [*writer.in_order(), metadata]
    for file in files:
        file.path = spec.path + file.path
    return Target(files, notes, links.files(spec.path))


def _held(value: Value, spec: WriteSpec) -> HeldChunks | None:
    """The chunks of a tensor with the ranks that hold each, None for what all ranks hold whole."""
    if not isinstance(value, Tensor):
        return None
    if spec.world_size is None:
        return HeldChunks.each_once(source_boxes(value))
    return mesh_chunks(value.shape, spec.sharding(value)) if value.sharded and value.shape else None


def _dedup(
    leaves: list[Leaf], held: list[HeldChunks | None], casts: Mapping[Tensor, DType], ranks: int
) -> list[RankBoxes]:
    """For each leaf its (rank, box)es, in the order of the ranks that write them.

    As ``dedup_save_plans``: item by item, those of rank 0 first, then what rank 1 has beside them, and so on. Of the
    ranks that hold an item the first with the smallest load writes it, and its load grows by the size of the *whole*
    tensor (``WriteItem.tensor_storage_size``), or by 1. Of the items that one rank alone holds, which are most, only
    those count that come before another with the same first holder: no later item is between their ranks.
    """
    nbytes = [_nbytes(leaf.value, casts) or 1 for leaf in leaves]
    loads = [0] * ranks
    least = list(range(ranks))  # a heap of load * ranks + rank; what a later load has outdated is dropped when met
    placed: list[RankBoxes] = []
    moved: dict[int, list[tuple[int, Box]]] = {}  # by leaf: its boxes that several ranks hold, each on one of them
    later: dict[int, list[tuple[int, SharedChunk]]] = {}  # by first holder, all but rank 0: leaf and chunk
    for number, chunks in enumerate(held):
        rank = 0
        if chunks is None:
            while least[0] != loads[least[0] % ranks] * ranks + least[0] % ranks:
                heapq.heappop(least)
            rank, value = least[0] % ranks, leaves[number].value
            placed.append([(rank, Box.whole(value.shape if isinstance(value, Tensor) else ()))])
        else:
            placed.append(chunks.own)
            first = chunks.shared[0] if chunks.shared and not chunks.shared[0].ranks[0] else None
            for chunk in chunks.shared[1:] if first is not None else chunks.shared:
                later.setdefault(chunk.ranks[0], []).append((number, chunk))
            if first is not None:
                rank = _smallest(first, loads)
                moved.setdefault(number, []).append((rank, first.box))
            elif 0 not in chunks.own_ranks:
                continue
        loads[rank] += nbytes[number]
        heapq.heappush(least, loads[rank] * ranks + rank)
    with_own = [(number, chunks.own_ranks) for number, chunks in enumerate(held) if chunks and chunks.own_ranks]
    for holder in sorted(later):
        own = iter([number for number, own_ranks in with_own if holder in own_ranks])
        before = next(own, len(leaves))
        for number, chunk in later[holder]:
            while before < number:
                loads[holder] += nbytes[before]
                before = next(own, len(leaves))
            rank = _smallest(chunk, loads)
            moved.setdefault(number, []).append((rank, chunk.box))
            loads[rank] += nbytes[number]
    for number, boxes in moved.items():
        placed[number] = sorted([*placed[number], *boxes], key=itemgetter(0))
    return placed


def _smallest(chunk: SharedChunk, loads: list[int]) -> int:
    return min(set(chunk.ranks), key=loads.__getitem__)  # a set, as there: in its order the first of equals is met


def _nbytes(value: Value, casts: Mapping[Tensor, DType]) -> int:
    return value.numel * casts.get(value, value.dtype).itemsize if isinstance(value, Tensor) else 0


class _ItemParts(NamedTuple):
    """The bytes around the data of tensors of one dtype and size: where they are in a file's blob, and how many."""

    before: int
    before_nbytes: int
    after: int
    after_nbytes: int
    data_nbytes: int
    item_nbytes: int
    checksums: list[tuple[int, int, tuple[int, ...]]]


@dataclass(slots=True)
class _DataFiles:
    """The data files being laid out, by rank.

    Items begin at multiples of ``ALIGNMENT``, so that data is aligned in the file as well as in the item. Items of the
    same dtype and size differ in their data only: the rest stands in the blob once.
    """

    casts: Mapping[Tensor, DType]
    links: LinkedItems
    files: dict[int, TargetFile] = field(default_factory=dict)
    parts: dict[tuple[int, str, tuple[int, ...]], _ItemParts] = field(default_factory=dict)
    items: dict[bytes, bytes] = field(default_factory=dict)

    def in_order(self) -> list[TargetFile]:
        return [self.files[rank] for rank in sorted(self.files)]

    def _open(self, rank: int) -> TargetFile:
        file = self.files.get(rank)
        if file is None:
            file = self.files[rank] = TargetFile(self.links.free_name(rank))
        return file

    def tensor(self, tensor: Tensor, dtype: DType, rank: int, box: Box) -> StoredChunk:
        """One box of a tensor as an item of a linked file, or else of the rank's file."""
        linked = self.links.take(tensor, box)
        if linked is not None:
            return linked
        file = self._open(rank)
        parts = self.parts.get((rank, dtype.name, box.sizes))
        if parts is None:
            parts = self.parts[rank, dtype.name, box.sizes] = _item_parts(file, dtype, box.sizes)
        begin = file.repeat(parts.before, parts.before_nbytes)
        if parts.data_nbytes:
            data = file.nbytes
            file.write_items.append(WriteItem(data, parts.data_nbytes, tensor, box.offsets, box.sizes, dtype))
            file.nbytes = data + parts.data_nbytes
        file.repeat(parts.after, parts.after_nbytes)
        for first, end, (local, central) in parts.checksums:
            file.checksums.append((begin + first, begin + end, (begin + local, begin + central)))
        return StoredChunk(box.offsets, box.sizes, file.path, begin, parts.item_nbytes)

    def value(self, value: Value, rank: int) -> StoredChunk:
        """A value that is not a tensor (it may hold some) as an item of the rank's file."""
        file = self._open(0 if self.links else rank)  # the linked files hold the data: one small one for all the rest
        begin = file.nbytes
        if any(True for _ in leaf_tensors(value)):
            lay_out_file(file, value, casts=self.casts, sharers=[], stem=_STEM)
        else:
            pickled = dumps(value)
            item = self.items.get(pickled)
            if item is None:
                item = self.items[pickled] = _value_item(pickled)
            file.literal(item)
        end = file.nbytes
        file.literal(bytes(-end % ALIGNMENT))
        return StoredChunk((), (), file.path, begin, end - begin)


def _item_parts(file: TargetFile, dtype: DType, size: tuple[int, ...]) -> _ItemParts:
    """Put the bytes around the data of such tensors into the blob of ``file``; the file does not grow."""
    before, after, nbytes, checksums = _tensor_item(dtype, size)
    item = len(before) + nbytes + len(after)
    padding = bytes(-item % ALIGNMENT)
    begin = len(file.blob)
    file.blob += before + after + padding
    return _ItemParts(begin, len(before), begin + len(before), len(after) + len(padding), nbytes, item, checksums)


def _value_item(pickled: bytes) -> bytes:
    file = TargetFile("")
    archive = TorchZip(file, stem=_STEM)
    archive.pickle(pickled)
    archive.finish()
    return bytes(file.blob)


@lru_cache(maxsize=16384)
def _tensor_item(
    dtype: DType, size: tuple[int, ...]
) -> tuple[bytes, bytes, int, list[tuple[int, int, tuple[int, ...]]]]:
    """One row-major tensor's archive: the bytes before and after the data, their number, checksums from its begin."""
    nbytes = dtype.itemsize
    for extent in size:
        nbytes *= extent
    writer = PickleOpcodes()
    writer.view(StorageView("0", dtype, 0, size, contiguous_stride(size), nbytes))
    file = TargetFile("")
    archive = TorchZip(file, stem=_STEM)
    archive.pickle(writer.finish())
    archive.begin_data("0", nbytes)
    split = len(file.blob)
    file.nbytes += nbytes
    archive.finish()
    return bytes(file.blob[:split]), bytes(file.blob[split:]), nbytes, file.checksums


Path: TypeAlias = tuple[str | int, ...]


class Leaf(NamedTuple):
    """One entry of the flat state dict: its key, the path it was nested under, and what it is."""

    key: str
    path: Path
    value: Value


@dataclass(frozen=True, slots=True)
class _Walk:
    """Collects the leaves of one section. ``ids``: the dict whose keys may be parameter ids, which readers restore."""

    leaves: list[Leaf]
    notes: list[Note]
    ids: Path = ()

    def enter(self, path: Path, prefix: str, value: Value) -> None:
        if isinstance(value, dict):
            self.mapping(path, prefix, value)
        elif isinstance(value, list) and not _plain(value):
            for index, item in enumerate(value):
                self.enter((*path, index), f"{prefix}.{index}", item)
        else:
            self.leaves.append(Leaf(prefix, path, value))

    def mapping(self, path: Path, prefix: str, value: dict[Key, Value]) -> None:
        if not value and path != self.ids:
            self.notes.append(
                Note("dropped", f"{prefix} is an empty dict: a DCP directory has no place for it", prefix)
            )
        for key, item in value.items():
            part = key if type(key) is str else self.renamed(prefix, key)
            inner = f"{prefix}.{part}" if prefix else part
            if type(item) is Tensor:
                self.leaves.append(Leaf(inner, (*path, part), item))
            else:
                self.enter((*path, part), inner, item)

    def renamed(self, prefix: str, key: Key) -> str:
        if not (self.ids and prefix == _dotted(self.ids)):
            where = prefix or "the extras"
            self.notes.append(Note("renamed", f"key {key!r} of {where} becomes the text {str(key)!r}", str(key)))
        return str(key)


def _dotted(path: Path) -> str:
    return ".".join(map(str, path))


def _plain(values: list[Value]) -> bool:
    """Whether DCP keeps a list as one value: no tensor, mapping or entered list in it."""
    return not any(isinstance(item, (Tensor, dict)) or (isinstance(item, list) and not _plain(item)) for item in values)


def flatten(checkpoint: Checkpoint, nesting: Nesting = PLAIN_NESTING) -> tuple[list[Leaf], list[Note]]:
    """All leaves in ``dcp.save``'s order under DCP's flat keys, with notes on what the flat form cannot hold.

    As ``torch.distributed.checkpoint._nested_dict`` and ``_traverse`` do: mappings are always entered, their keys as
    text; lists only when they hold tensors or non-empty containers that do; tuples never. An empty mapping leaves no
    trace, which is why it is noted.

    Raises SourceUnsupportedError when several entries get the same flat key.
    """
    leaves: list[Leaf] = []
    notes: list[Note] = []
    walk = _Walk(leaves, notes)
    if checkpoint.model is not None:
        model: dict[Key, Value] = dict(checkpoint.model.params.items())
        walk.mapping(nesting.model, _dotted(nesting.model), model)
        if checkpoint.model.metadata is not None:
            what = "the model state dict's _metadata (module versions)"
            notes.append(Note("dropped", f"{what} has no place in a DCP directory"))
    if checkpoint.optim is not None:
        if nesting.flattened:
            leaves.extend(_flat_optimizer(checkpoint.optim, nesting.optim, notes))
        else:
            root, state = optim_dict(checkpoint.optim), (*nesting.optim, "state")
            _Walk(leaves, notes, ids=state).enter(state, _dotted(state), root.pop("state"))
            if root:
                walk.mapping(nesting.optim, _dotted(nesting.optim), root)
    extra, dropped = extras_of_one(checkpoint)
    if extra:
        walk.mapping((), "", extra)
    _refuse_duplicates(leaves)
    return leaves, notes + dropped


def _flat_optimizer(optim: OptimState, at: Path, notes: list[Note]) -> Iterator[Leaf]:
    """What ``StateDictOptions(flatten_optimizer_state_dict=True)`` makes of an optimizer keyed by name.

    Raises SourceUnsupportedError for ids, which have no place in that form.
    """
    if optim.key_type == "id":
        raise SourceUnsupportedError(
            "flattened optimizer keys begin with parameter names, and this optimizer is keyed by id",
            next_step="--key-type name",
        )
    entries: list[tuple[str, Value]] = []
    for param, states in optim.state.items():
        for name, value in states.items():
            entries.append((f"state.{param}.{name}" if name != BARE_VALUE else f"state.{param}", value))
    for group in optim.param_groups or []:
        for param in group_params(group) or ():
            for setting, value in group.items():
                if setting != "params":
                    entries.append((f"param_groups.{param}.{setting!s}", value))
    for key, value in entries:
        yield Leaf(_dotted((*at, key)), (*at, key), value)
    if len(optim.param_groups or []) > 1:
        notes.append(
            Note("groups-flattened", "each parameter has its own settings: the order of the groups is not kept")
        )
    for extra in optim.extra:
        notes.append(Note("dropped", f"{extra!s} of the optimizer has no place among flattened keys", str(extra)))


def _refuse_duplicates(leaves: list[Leaf]) -> None:
    if len({leaf.key for leaf in leaves}) == len(leaves):
        return
    seen: set[str] = set()
    double = [leaf.key for leaf in leaves if leaf.key in seen or seen.add(leaf.key)]  # type: ignore[func-returns-value]
    raise SourceUnsupportedError(
        "several entries would get the same key in a DCP directory",
        details=double,
        why="DCP joins nested keys with dots, and two of them become equal",
        next_step="leave one of them out with --exclude, or rename it with --rename OLD=NEW",
        key=double[0],
    )
