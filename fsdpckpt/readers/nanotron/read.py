"""Joins the files of one nanotron checkpoint: parameters with their float32 weights and states, by name.

The header of a weight's file says which slices of the whole tensor it holds (``serialize/metadata.py``,
``TensorMetadata``). States are cut as their parameter is; with ZeRO each data-parallel rank has a range of the elements
of that (``optim/zero.py``, ``_partition_parameters``).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import cast

from fsdpckpt import flags
from fsdpckpt.errors import SourceCorruptError, SourceUnsupportedError, damaged
from fsdpckpt.formats.pickle.check import check_size
from fsdpckpt.formats.safetensors import HeaderTensor, read_header
from fsdpckpt.formats.torch import TorchArchive, read_archive
from fsdpckpt.formats.torch.tensors import StoredTensor
from fsdpckpt.ir.checkpoint import Checksums, Evidence, EvidenceKind, Layout, Note
from fsdpckpt.ir.dtypes import DType
from fsdpckpt.ir.tensors import Box, Chunks, Tensor, contiguous_stride
from fsdpckpt.ir.values import Key, Value, equal
from fsdpckpt.layouts.flattened import flat_boxes
from fsdpckpt.readers.model_shards import ModelShard, Piece
from fsdpckpt.readers.nanotron.files import ModelRank, StateFile, WeightFile
from fsdpckpt.readers.protocol import ChunkedTensor, FileTable, PartContents, build_tensors
from fsdpckpt.storage import Entry
from fsdpckpt.storage.sources import Sources
from fsdpckpt.text import plural, shape_text, some_of

_DATA = "data"
_SLICES, _SHAPE = "local_global_slices_pairs", "unsharded_shape"
_MASTERS = "gradient_accumulator"
_WRAPPER = "module."  # of DistributedDataParallel
_MAX_SLICES = 4096  # of one file: fused weights have three
_MAX_NAMES = 4
_MIXED = "the file was damaged or edited, or files of two saves are mixed"


_NUMBER = ModelShard.of_whole(())  # a step, which every rank has whole


@dataclass(slots=True)
class _Rows:
    """The chunks of one tensor, in columns."""

    rank: list[int] = field(default_factory=list)
    file: list[int] = field(default_factory=list)
    offset: list[int] = field(default_factory=list)
    start: list[tuple[int, ...]] = field(default_factory=list)
    size: list[tuple[int, ...]] = field(default_factory=list)
    stride: list[tuple[int, ...]] = field(default_factory=list)

    def add(
        self, rank: int, file: int, at: int, itemsize: int, shard: ModelShard, held: Iterable[Box], first: int
    ) -> None:
        """Add what ``held``, boxes of a rank's tensor, are of the whole one. ``at``: the byte of its element number
        ``first``.
        """
        stride = contiguous_stride(shard.shape)
        for box in held:
            for piece in shard.pieces:
                common = _common(box, piece.shard)
                if common is None:
                    continue
                element = sum(start * step for start, step in zip(common.offsets, stride, strict=True)) - first
                moved = zip(piece.whole.offsets, common.offsets, piece.shard.offsets, strict=True)
                self.rank.append(rank)
                self.file.append(file)
                self.offset.append(at + element * itemsize)
                self.start.append(tuple(whole + start - local for whole, start, local in moved))
                self.size.append(common.sizes)
                self.stride.append(stride)

    def tensor(self, name: str, dtype: DType, shape: tuple[int, ...]) -> ChunkedTensor:
        columns = (self.rank, self.file, self.offset, self.start, self.size, self.stride)
        rank, file, offset, start, size, stride = columns
        chunks = Chunks.rows(
            ndim=len(shape), rank=rank, file=file, offset=offset, start=start, size=size, stride=stride
        )
        return ChunkedTensor(name, dtype, shape, chunks)


@dataclass(slots=True)
class _Parameter:
    """``shards``: by rank; under None the whole, if it is not cut."""

    name: str
    dtype: DType
    shape: tuple[int, ...]
    shards: dict[ModelRank | None, ModelShard] = field(default_factory=dict)
    rows: _Rows = field(default_factory=_Rows)

    def shard_of(self, place: ModelRank) -> ModelShard | None:
        """What ``place`` has of it; None if it has none."""
        for at in (place, ModelRank(place.pp, place.tp, None), None):
            if at in self.shards:
                return self.shards[at]
        return None


def read_nanotron(
    directory: str,
    weights: Sequence[WeightFile],
    states: Sequence[StateFile],
    metadata: Entry,
    table: FileTable,
    sources: Sources,
) -> PartContents:
    """The model, the optimizer and the counters of the checkpoint in ``directory``.

    Raises SourceCorruptError for files that contradict each other, SourceUnsupportedError for states that are not cut
    as the weights are.
    """
    ranks = _Ranks([file.place for file in weights if file.place is not None], states)
    sources.prefetch_ends([file.path for file in weights], tails=False)
    parameters = _read_weights(weights, ranks, table, sources)
    optimizer = _Optimizer(parameters, ranks, table, sources)
    for file in sorted(states, key=lambda file: (file.place.pp, file.place.tp, file.place.exp or 0, file.dp or 0)):
        optimizer.add(file)
    tensors = [each.rows.tensor(each.name, each.dtype, each.shape) for each in parameters.values()]
    model: dict[str, Tensor] = build_tensors(tensors, world_size=ranks.count)
    masters = optimizer.masters()
    root: dict[Key, Value] = {"model": cast(Value, {**model, **masters})}
    if states:
        root["optimizer"] = optimizer.state_dict()
    root["checkpoint_metadata"] = _counters(metadata, sources)
    tree = PartContents(
        root, Layout.SHARDED if ranks.count > 1 else Layout.FULL, "nanotron", ranks.count, flavor="nanotron"
    )
    tree.checksums = Checksums.joined([archive.checksums for archive in optimizer.archives])
    tree.copies = {name: weight for name, weight in model.items() if name in masters}
    files = plural(len(weights), "file")
    message = f"{directory} has nanotron's {files} of {plural(len(parameters), 'parameter')}"
    tree.evidence.append(Evidence(EvidenceKind.CONTAINER, message))
    tree.keys_in_order = False  # files are in the order of their names
    tree.notes += optimizer.notes(masters)
    return tree


class _Ranks:
    """Numbers the ranks that saved: by stage, data-parallel rank, tensor-parallel rank and rank of experts."""

    def __init__(self, places: Sequence[ModelRank], states: Sequence[StateFile]) -> None:
        all_places = [*places, *(file.place for file in states)]
        self._tp = 1 + max((place.tp for place in all_places), default=0)
        self._exp = 1 + max((place.exp or 0 for place in all_places), default=0)
        self._dp = max((file.dp_size for file in states), default=1)
        self.count = (1 + max((place.pp for place in all_places), default=0)) * self._dp * self._tp * self._exp

    def number(self, place: ModelRank | None, dp: int = 0) -> int:
        if place is None:
            return 0
        return ((place.pp * self._dp + dp) * self._tp + place.tp) * self._exp + (place.exp or 0)


def _read_weights(
    files: Sequence[WeightFile], ranks: _Ranks, table: FileTable, sources: Sources
) -> dict[str, _Parameter]:
    parameters: dict[str, _Parameter] = {}
    for file in files:
        source = sources.open(file.path)
        header = read_header(source)
        stored = header.tensors.get(_DATA)
        if stored is None or len(header.tensors) != 1:
            found = some_of(list(header.tensors), _MAX_NAMES) or "nothing"
            raise damaged(
                file.path, f"it holds no tensor {_DATA} of a nanotron parameter alone", found=found, why=_MIXED
            )
        shape, shard = _shard(file, stored, header.metadata)
        known = parameters.setdefault(file.name, _Parameter(file.name, stored.dtype, shape))
        if (known.dtype, known.shape) != (stored.dtype, shape):
            raise _contradiction(
                file.path,
                f"{file.name} is {known.dtype.name} {shape_text(known.shape)} in another file, and here "
                f"{stored.dtype.name} {shape_text(shape)}",
            )
        number = table.add(file.path, source.nbytes)
        known.shards[file.place] = shard
        whole = [Box.whole(shard.shape)]
        known.rows.add(ranks.number(file.place), number, stored.offset, stored.dtype.itemsize, shard, whole, 0)
    return parameters


def _shard(file: WeightFile, stored: HeaderTensor, metadata: Mapping[str, str]) -> tuple[tuple[int, ...], ModelShard]:
    """The shape of the whole parameter, and what the file has of it. Raises SourceCorruptError."""
    if file.place is None:
        return stored.shape, ModelShard.of_whole(stored.shape)
    try:
        shape = tuple(_extent(each) for each in metadata[_SHAPE].strip("()").split(",") if each.strip())
        texts = metadata[_SLICES].split(";")
        if len(texts) > _MAX_SLICES or len(shape) != len(stored.shape):
            raise ValueError(f"{len(texts)} slices of {len(shape)} dimensions")
        pieces = []
        for text in texts:
            of_rank, of_all = text.split("#")
            piece = Piece(_box(of_rank, stored.shape), _box(of_all, shape))
            if piece.shard.sizes != piece.whole.sizes:
                raise ValueError(text)
            pieces.append(piece)
    except (KeyError, ValueError) as error:
        what = f"its header does not say which slices of {file.name} it holds"
        raise damaged(
            file.path, what, found=f"{type(error).__name__}: {error}"[:200], key=file.name, why=_MIXED
        ) from None
    return shape, ModelShard(stored.shape, tuple(pieces))


def _extent(text: str) -> int:
    """A number, also as numpy prints it: ``np.int64(4)``."""
    extent = int(text.strip().removeprefix("np.int64(").removesuffix(")"))
    if not 0 <= extent < 1 << 59:
        raise ValueError(text)
    return extent


def _box(text: str, shape: tuple[int, ...]) -> Box:
    """``0,4,None|None,None,None``: the box of a slice of each dimension. Raises ValueError."""
    starts, sizes = [], []
    for part, extent in zip(text.split("|"), shape, strict=True):
        start, stop, step = (None if word == "None" else int(word) for word in part.split(","))
        first, last = start or 0, extent if stop is None else stop
        if step not in (None, 1) or not 0 <= first <= last <= extent:
            raise ValueError(part)
        starts.append(first)
        sizes.append(last - first)
    return Box(tuple(starts), tuple(sizes))


def _common(one: Box, other: Box) -> Box | None:
    """The elements in both boxes; None if there are none."""
    starts, sizes = [], []
    for start, size, begin, extent in zip(one.offsets, one.sizes, other.offsets, other.sizes, strict=True):
        first, last = max(start, begin), min(start + size, begin + extent)
        if last <= first:
            return None
        starts.append(first)
        sizes.append(last - first)
    return Box(tuple(starts), tuple(sizes))


class _Optimizer:
    """The optimizer and the float32 weights, joined file by file."""

    def __init__(self, parameters: Mapping[str, _Parameter], ranks: _Ranks, table: FileTable, sources: Sources) -> None:
        self._parameters, self._ranks, self._table, self._sources = parameters, ranks, table, sources
        self._rows: dict[tuple[str, str], tuple[DType, tuple[int, ...], _Rows]] = {}  # by parameter and state
        self._values: dict[str, dict[Key, Value]] = {}
        self._groups: list[dict[Key, Value]] = []
        self._members: list[dict[str, None]] = []
        self._unknown: dict[str, None] = {}
        self.archives: list[TorchArchive] = []

    def add(self, file: StateFile) -> None:
        """Add what one rank saved."""
        source = self._sources.open(file.path)
        number = self._table.add(file.path, source.nbytes)
        archive = read_archive(source, number)
        self.archives.append(archive)
        root = _mapping(archive.root, file.path, "its content")
        names = {
            key: str(name).removeprefix(_WRAPPER)
            for key, name in _mapping(root.get("names"), file.path, "names").items()
        }
        states = _mapping(root.get("state"), file.path, "state")
        if states.keys() != names.keys():
            raise _contradiction(file.path, f"it has the states of {len(states)} parameters, and {len(names)} names")
        for key, of_parameter in states.items():
            for state, leaf in _mapping(of_parameter, file.path, f"state.{key!r}").items():
                self._add_state(file, number, names[key], str(state), leaf)
        masters = root.get(_MASTERS)
        for name, leaf in _mapping(masters, file.path, _MASTERS).items() if masters is not None else ():
            self._add_state(file, number, str(name).removeprefix(_WRAPPER), _MASTERS, leaf)
        self._add_groups(file, names, root.get("param_groups"))

    def _add_state(self, file: StateFile, number: int, name: str, state: str, leaf: object) -> None:
        parameter = self._parameters.get(name)
        shard = parameter.shard_of(file.place) if parameter is not None else None
        if parameter is None or shard is None:
            self._unknown[name] = None  # tied to a parameter that is saved under another name
            return
        if not isinstance(leaf, StoredTensor):
            value = cast(Value, leaf)
            known = self._values.setdefault(name, {}).setdefault(state, value)
            if not equal(known, value):
                raise _contradiction(file.path, f"{state} of {name} is {value!r}, and {known!r} on another rank")
            return
        flat = file.dp is not None and bool(leaf.shape)
        if not leaf.shape:
            shard = _NUMBER
        if leaf.stride != contiguous_stride(leaf.shape):
            raise _contradiction(file.path, f"{state} of {name} is not stored row by row")
        numel = prod(shard.shape)
        first, count = _range_of(numel, file.dp or 0, file.dp_size) if flat else (0, numel)
        expected = (count,) if flat else shard.shape
        if leaf.shape != expected:
            raise SourceUnsupportedError(
                f"{file.path}: the state {state} of {name} is not split like the weight",
                file=file.path,
                key=name,
                expected=shape_text(expected),
                found=shape_text(leaf.shape),
                why="the optimizer factors or quantizes its states, or the files are those of two saves",
                next_step=f"convert the weights alone with {flags.only('model')}",
            )
        held = flat_boxes(shard.shape, first, count) if flat and count else [Box.whole(shard.shape)] * bool(count)
        shape = parameter.shape if leaf.shape else ()
        dtype, known_shape, rows = self._rows.setdefault((name, state), (leaf.dtype, shape, _Rows()))
        if (dtype, known_shape) != (leaf.dtype, shape):
            raise _contradiction(
                file.path,
                f"{state} of {name} is {leaf.dtype.name} {shape_text(shape)}, and {dtype.name} "
                f"{shape_text(known_shape)} on another rank",
            )
        rank = self._ranks.number(file.place, file.dp or 0)
        rows.add(rank, number, leaf.offset, leaf.dtype.itemsize, shard, held, first)

    def _add_groups(self, file: StateFile, names: Mapping[Key, str], groups: object) -> None:
        """The param groups, which each rank has with the parameters that it trains."""
        if not isinstance(groups, list):
            raise _contradiction(file.path, "it has no param_groups")
        for at, group in enumerate(groups):
            settings = dict(_mapping(group, file.path, "param_groups"))
            members = settings.pop("params", None)
            listed = list(members) if isinstance(members, (list, tuple)) else [None]
            unnamed = [key for key in listed if key not in names]
            if unnamed:
                raise _contradiction(file.path, f"nothing names the parameters {some_of(list(map(str, unnamed)))}")
            if at == len(self._groups):
                self._groups.append(cast("dict[Key, Value]", settings))
                self._members.append({})
            if at > len(self._groups) or repr(settings) != repr(self._groups[at]):
                raise _contradiction(file.path, f"param group {at} has other settings than on another rank")
            self._members[at].update(dict.fromkeys(names[key] for key in listed))

    def state_dict(self) -> Value:
        """The optimizer by name."""
        tensors = build_tensors(
            [
                rows.tensor(f"{name}/{state}", dtype, shape)
                for (name, state), (dtype, shape, rows) in self._rows.items()
                if state != _MASTERS
            ],
            world_size=self._ranks.count,
        )
        tensors_of: dict[str, dict[Key, Value]] = {}
        for name, state in self._rows:
            if state != _MASTERS:
                tensors_of.setdefault(name, {})[state] = tensors[f"{name}/{state}"]
        trained = [name for members in self._members for name in members if name not in self._unknown]
        states: dict[Key, Value] = {
            name: cast(Value, {**self._values.get(name, {}), **tensors_of.get(name, {})}) for name in trained
        }
        groups: list[Value] = []
        for group, members in zip(self._groups, self._members, strict=True):
            known: list[Value] = [name for name in members if name not in self._unknown]
            groups.append(cast(Value, {**group, "params": known}))
        return cast(Value, {"state": states, "param_groups": groups})

    def masters(self) -> dict[str, Tensor]:
        """The float32 weights that the optimizer keeps."""
        chunked = [
            rows.tensor(name, dtype, shape)
            for (name, state), (dtype, shape, rows) in self._rows.items()
            if state == _MASTERS
        ]
        return build_tensors(chunked, world_size=self._ranks.count)

    def notes(self, masters: Mapping[str, Tensor]) -> list[Note]:
        found = []
        if masters:
            message = f"{plural(len(masters), 'parameter')} are the optimizer's float32 weights ({_MASTERS})"
            found.append(Note("master-weights", message))
        if self._unknown:
            names = tuple(self._unknown)
            message = (
                f"the states of {some_of(list(names), _MAX_NAMES)} are left out: no file of the model has the name"
            )
            found.append(Note("not-carried", message, keys=names, warning=True))
        return found


def _range_of(numel: int, rank: int, ranks: int) -> tuple[int, int]:
    """The elements of a flattened weight that the data-parallel ``rank`` updates: the first, and how many. The last
    ranks have one less where they do not divide.
    """
    most = -(-numel // ranks)
    fewer = most * ranks - numel
    full = ranks - fewer
    first = rank * most - max(0, rank - full)
    return first, most - (rank >= full)


def _counters(metadata: Entry, sources: Sources) -> Value:
    source = sources.open(metadata.path)
    check_size(source.nbytes, metadata.path)
    try:
        document = json.loads(source.read(0, source.nbytes))
    except (ValueError, RecursionError):
        document = None
    if not isinstance(document, dict):
        raise damaged(metadata.path, "it is not a JSON object", why="the file was truncated or edited")
    return cast(Value, document)


def _mapping(value: object, path: str, what: str) -> Mapping[Key, object]:
    if not isinstance(value, dict):
        raise _contradiction(path, f"{what} is {'missing' if value is None else 'no dict'}")
    return value


def _contradiction(path: str, what: str) -> SourceCorruptError:
    return SourceCorruptError(
        f"{path}: {what}",
        file=path,
        why=_MIXED,
        next_step="copy the checkpoint again",
    )
