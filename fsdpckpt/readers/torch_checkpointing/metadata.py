"""Parses ``metadata.pkl`` of torch_checkpointing: which file holds an item of which rank, and how tensors are cut.

It is the pickle of ``DistributedMetadata.to_dict()`` (``distributed_metadata.py``), plain containers only. Version 2.0
groups the tensors by item; version 1.0 has one flat dict, with paths whose first component is the item. An item whose
values cannot be resharded is not in it: its files have the default names (``checkpoint_layout.py``).
"""

from __future__ import annotations

import json
import posixpath
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import NoReturn, cast

from fsdpckpt import flags
from fsdpckpt.errors import SourceUnsupportedError, damaged
from fsdpckpt.formats.pickle import load
from fsdpckpt.formats.pickle.check import check_size
from fsdpckpt.formats.torch.mesh import MAX_RANKS, as_int_tuple
from fsdpckpt.ir.dtypes import DTYPES, DType
from fsdpckpt.ir.placements import Placement, Replicate, Shard, StridedShard
from fsdpckpt.ir.values import Key, Value
from fsdpckpt.producers.torch_checkpointing import OF_DTENSOR, VERSION, default_file
from fsdpckpt.storage import Entry
from fsdpckpt.storage.sources import Sources
from fsdpckpt.text import truncate

VERSIONS = ("1.0", VERSION)
TORCH, SAFETENSORS, JSON, RAW = (
    "TorchSerialization",
    "SafetensorsSerialization",
    "JsonSerialization",
    "RawSerialization",
)

_KEYS = {"metadata", "world_size"}
_MARKS = (b"rank_to_layout_info", b"nested_path_to_metadata")


@dataclass(frozen=True, slots=True)
class MeshSpec:
    """A device mesh: ``ranks`` row-major over ``shape``; ``names`` None without any."""

    shape: tuple[int, ...]
    ranks: tuple[int, ...]
    device: str
    names: tuple[str, ...] | None


@dataclass(frozen=True, slots=True)
class DTensorSharding:
    """A DTensor (``DTensorShardingMetadata``)."""

    dtype: DType
    shape: tuple[int, ...]
    mesh: MeshSpec
    placements: tuple[Placement, ...]


@dataclass(frozen=True, slots=True)
class DefaultSharding:
    """A tensor that says itself which boxes a rank holds (``DefaultShardingMetadata``).

    ``boxes``: start in the whole, start in the rank's tensor, size; in elements.
    """

    dtype: DType
    shape: tuple[int, ...]
    boxes: tuple[tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]], ...]


class CutByRank:
    """How each rank's part of one tensor is cut, as a mapping by rank. Ranks that share a description share its set.

    A job of thousands of ranks describes most of its thousands of tensors for all ranks at once.
    """

    def __init__(self) -> None:
        self._single: dict[int, DTensorSharding | DefaultSharding] = {}
        self._groups: list[tuple[frozenset[int], DTensorSharding | DefaultSharding]] = []
        self.cuts: list[DTensorSharding | DefaultSharding] = []

    def add(self, ranks: frozenset[int], cut: DTensorSharding | DefaultSharding) -> None:
        self.cuts.append(cut)
        if len(ranks) > _FEW_RANKS:
            self._groups.append((ranks, cut))
        else:
            self._single.update(dict.fromkeys(ranks, cut))

    def of(self, rank: int) -> DTensorSharding | DefaultSharding | None:
        found = self._single.get(rank)
        return found or next((cut for ranks, cut in self._groups if rank in ranks), None)


_FEW_RANKS = 64
_NUMBERS_A_BYTE = 4  # described by ``metadata.pkl``, at most; a real one has less than one


@dataclass(frozen=True, slots=True)
class ItemFile:
    """Where a rank's part of an item is: ``path`` below the checkpoint, and how it is serialised."""

    path: str
    form: str


@dataclass(frozen=True, slots=True)
class Item:
    """One item. ``files``: by rank. ``tensors``: by path in the item, how each rank's part is cut from the whole."""

    name: str
    files: Mapping[int, ItemFile]
    tensors: Mapping[tuple[Key, ...], CutByRank]


@dataclass(frozen=True, slots=True)
class Metadata:
    world_size: int
    items: Mapping[str, Item]


def find_metadata(file: Entry | None, sources: Sources) -> Metadata | None:
    """The metadata in ``file``; None if it is not torch_checkpointing's: other programs use this name, too, and their
    pickles are not loaded.

    Raises SourceUnsafeError, SourceCorruptError for metadata that is damaged or contradicts itself,
    SourceUnsupportedError for another version.
    """
    if file is None:
        return None
    check_size(file.nbytes, file.path)
    data = sources.open(file.path).read(0, file.nbytes)
    if not any(mark in data for mark in _MARKS):
        return None
    content = load(data, file=file.path)
    if not isinstance(content, dict) or not content.keys() >= _KEYS:
        return None
    return _MetadataParser(file.path, _NUMBERS_A_BYTE * file.nbytes).parse(content)


class _MetadataParser:
    """``path``: of ``metadata.pkl``, for messages. ``most``: how many numbers it may describe: a pickle may list one
    sequence in many places.
    """

    def __init__(self, path: str, most: int) -> None:
        self._path = path
        self._left = most
        self._meshes: dict[int, MeshSpec] = {}  # the pickle shares the dict of one mesh among all tensors
        self._placements: dict[tuple[Placement, ...], tuple[Placement, ...]] = {}
        self._ranks: dict[int, frozenset[int]] = {}  # as of the meshes

    def parse(self, content: Mapping[Key, Value]) -> Metadata:
        version = content.get("version", "1.0")
        if version not in VERSIONS:
            raise SourceUnsupportedError(
                f"{self._path} has version {truncate(version)} of torch_checkpointing's metadata",
                file=self._path,
                expected=" or ".join(VERSIONS),
                found=truncate(version),
                why="a newer version of torch_checkpointing wrote it",
                next_step="update fsdpckpt, or save full state dicts",
            )
        world_size = content["world_size"]
        if type(world_size) is not int or not 0 < world_size <= MAX_RANKS:
            self._damaged("the number of ranks", f"1 to {MAX_RANKS}", world_size)
        items = self._dict(content["metadata"], "metadata")
        if version == "1.0":
            items = self._grouped(items, self._dict(content.get("rank_to_layout_info_mappings"), "layouts"))
        parsed: dict[str, Item] = {}
        for name, item in items.items():
            if not isinstance(name, str):
                self._damaged("the name of an item", "a text", name)
            parsed[name] = self._item(name, self._dict(item, name), world_size)
        self._require_own_files(parsed)
        return Metadata(world_size, parsed)

    def _grouped(self, paths: Mapping[Key, Value], layouts: Mapping[Key, Value]) -> dict[Key, Value]:
        """The flat dict of version 1.0 by item, as version 2.0 has it (``_convert_v1_to_v2``)."""
        by_item: dict[Key, dict[Key, Value]] = {}
        for text, groups in paths.items():
            item, *nested = self._path_of(text)
            by_item.setdefault(item, {})[json.dumps(nested)] = groups
        of_ranks = {rank: self._dict(layout, "layouts") for rank, layout in layouts.items()}
        grouped: dict[Key, Value] = {}
        for item, tensors in by_item.items():
            layout_of: dict[Key, Value] = {rank: layout.get(item) for rank, layout in of_ranks.items()}
            grouped[item] = {"nested_path_to_metadata": tensors, "rank_to_layout_info": layout_of}
        return grouped

    def _item(self, name: str, item: Mapping[Key, Value], world_size: int) -> Item:
        files: dict[int, ItemFile] = {}
        layouts = self._dict(item.get("rank_to_layout_info"), f"{name}: the layouts")
        for written, layout in layouts.items():
            rank = int(written) if isinstance(written, str) and written.isdecimal() else written
            if type(rank) is not int or not 0 <= rank < world_size:
                self._damaged(f"{name}: a rank", f"below {world_size}", written)
            files[rank] = self._file(name, rank, layout)
        if len(files) != world_size:
            self._damaged(f"{name}: the files", f"one of each of {world_size} ranks", len(files))
        tensors: dict[tuple[Key, ...], CutByRank] = {}
        for text, groups in self._dict(item.get("nested_path_to_metadata"), f"{name}: the tensors").items():
            nested = self._path_of(text)
            key = ".".join(map(str, (name, *nested)))
            of_ranks = tensors[nested] = CutByRank()
            if not isinstance(groups, (list, tuple)):
                self._damaged(key, "a list", groups)
            for group in groups:
                described = self._dict(group, key)
                cut = self._sharding(self._dict(described.get("sharding_metadata"), key), key)
                of_ranks.add(self._some_ranks(described.get("ranks"), world_size, key), cut)
            if len({(cut.dtype, cut.shape) for cut in of_ranks.cuts}) != 1:
                self._damaged(key, "one dtype and shape", [str(cut.shape) for cut in of_ranks.cuts])
        return Item(name, files, tensors)

    def _some_ranks(self, written: Value, world_size: int, key: str) -> frozenset[int]:
        known = self._ranks.get(id(written))
        if known is not None:
            return known
        self._count(written)
        ranks = as_int_tuple(written)
        if not ranks or not all(0 <= rank < world_size for rank in ranks):
            self._damaged(f"{key}: the ranks", f"some below {world_size}", written)
        found = self._ranks[id(written)] = frozenset(ranks)
        return found

    def _file(self, item: str, rank: int, layout: Value) -> ItemFile:
        if layout is None:
            return ItemFile(default_file(item, rank), TORCH)
        described = self._dict(layout, f"{item}: the layout of rank {rank}")
        path = described.get("file_path")
        form = self._dict(described.get("serialization_format"), f"{item}: the format of rank {rank}").get("type")
        inside = isinstance(path, str) and path and not path.startswith("/") and "\\" not in path
        if not inside or ".." in cast(str, path).split("/"):
            self._damaged(f"{item}: the file of rank {rank}", "a path below the checkpoint", path)
        if form not in (TORCH, SAFETENSORS, JSON, RAW):
            raise SourceUnsupportedError(
                f"{item} of rank {rank} is stored as {truncate(form)}, a format that fsdpckpt does not know",
                file=self._path,
                expected=", ".join((TORCH, SAFETENSORS, JSON, RAW)),
                found=truncate(form),
                next_step="save the item with one of these formats",
            )
        return ItemFile(posixpath.normpath(cast(str, path)), cast(str, form))

    def _require_own_files(self, items: Mapping[str, Item]) -> None:
        """Raises SourceCorruptError if two items, or two ranks, have the same file."""
        seen: dict[str, str] = {}
        for item in items.values():
            for rank, file in item.files.items():
                owner = f"{item.name} of rank {rank}"
                if file.path in seen:
                    self._damaged(f"the file of {owner}", f"another file than that of {seen[file.path]}", file.path)
                seen[file.path] = owner

    def _sharding(self, packed: Mapping[Key, Value], key: str) -> DTensorSharding | DefaultSharding:
        data, kind = self._dict(packed.get("data"), key), packed.get("type")
        dtype = DTYPES.get(str(data.get("dtype")).removeprefix("torch."))
        shape = self._sizes(data.get("global_shape"), f"{key}: the shape")
        if dtype is None:
            self._damaged(f"{key}: the dtype", "a dtype of torch", data.get("dtype"))
        if kind == OF_DTENSOR:
            mesh = self._mesh(self._dict(data.get("mesh_spec"), key), key)
            placements = self._placed(data.get("placements"), len(shape), key)
            if len(placements) != len(mesh.shape):
                self._damaged(f"{key}: the placements", f"{len(mesh.shape)}", len(placements))
            return DTensorSharding(dtype, shape, mesh, placements)
        if kind == "default_tensor_v1":
            return DefaultSharding(dtype, shape, self._boxes(data, shape, key))
        raise SourceUnsupportedError(
            f"{key} is cut as {truncate(kind)}, which fsdpckpt does not know",
            file=self._path,
            key=key,
            expected=f"{OF_DTENSOR} or default_tensor_v1",
            found=truncate(kind),
            why="the job uses its own resharder",
            next_step=f"save this item as DTensors, or leave its files out with {flags.ignore_file('GLOB')}",
        )

    def _mesh(self, spec: Mapping[Key, Value], key: str) -> MeshSpec:
        known = self._meshes.get(id(spec))
        if known is not None:
            return known
        shape = self._sizes(spec.get("mesh_shape"), f"{key}: the mesh")
        ranks = self._sizes(spec.get("mesh_data"), f"{key}: the ranks of the mesh")
        names, device = spec.get("mesh_dim_names"), spec.get("device_type")
        count = prod(shape)
        if count != len(ranks) or len(set(ranks)) != len(ranks):
            self._damaged(f"{key}: the ranks of the mesh", f"{count} different ones", ranks)
        named = isinstance(names, (tuple, list)) and len(names) == len(shape) and all(type(n) is str for n in names)
        own_names = tuple(cast("Sequence[str]", names)) if named else None
        mesh = self._meshes[id(spec)] = MeshSpec(shape, ranks, device if isinstance(device, str) else "", own_names)
        return mesh

    def _placed(self, written: Value, ndim: int, key: str) -> tuple[Placement, ...]:
        placements: list[Placement] = []
        for entry in written if isinstance(written, (list, tuple)) else ():
            spec = self._dict(entry, f"{key}: a placement")
            kind, dim, factor = spec.get("type"), spec.get("dim"), spec.get("split_factor")
            fits = type(dim) is int and 0 <= dim < ndim
            if kind == "Replicate":
                placements.append(Replicate())
            elif kind == "Shard" and fits:
                placements.append(Shard(cast(int, dim)))
            elif kind == "StridedShard" and fits and type(factor) is int and 0 < factor <= MAX_RANKS:
                placements.append(StridedShard(cast(int, dim), factor))
            else:
                self._damaged(f"{key}: a placement", f"Shard, StridedShard or Replicate of {ndim} dimensions", spec)
        placed = tuple(placements)
        return self._placements.setdefault(placed, placed)  # one object for equal ones

    def _boxes(
        self, data: Mapping[Key, Value], shape: tuple[int, ...], key: str
    ) -> tuple[tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]], ...]:
        columns = []
        for name in ("global_offsets", "local_offsets", "local_sizes"):
            column = data.get(name)
            self._count(column)
            rows = column if isinstance(column, (list, tuple)) else ()
            columns.append([self._sizes(row, f"{key}: {name}") for row in rows])
        if len({len(column) for column in columns}) != 1:
            self._damaged(f"{key}: its boxes", "as many starts as sizes", [len(column) for column in columns])
        boxes = tuple(zip(*columns, strict=True))
        for start, local, size in boxes:
            fits = len(start) == len(local) == len(size) == len(shape)
            if not fits or any(s + n > whole for s, n, whole in zip(start, size, shape, strict=True)):
                self._damaged(f"{key}: a box", f"inside {shape}", f"{start} + {size}")
        return boxes

    def _path_of(self, text: Key) -> tuple[Key, ...]:
        """A path in an item: a JSON list of keys and positions."""
        try:
            path = json.loads(text) if isinstance(text, str) else None
        except (ValueError, RecursionError):
            path = None
        if not isinstance(path, list) or not all(type(key) in (str, int) for key in path):
            self._damaged("the path of a tensor", "a JSON list of keys", text)
        return tuple(path)

    def _sizes(self, value: Value, what: str) -> tuple[int, ...]:
        self._count(value)
        sizes = as_int_tuple(value)
        if sizes is None or any(not 0 <= size < 1 << 62 for size in sizes):
            self._damaged(what, "numbers from 0", value)
        return sizes

    def _count(self, value: Value) -> None:
        """Raises SourceCorruptError if the file describes more numbers than one of its length does."""
        self._left -= len(value) if isinstance(value, (list, tuple)) else 0
        if self._left < 0:
            self._damaged("how much it describes", "less for a file of its length", "one list in very many places")

    def _dict(self, value: Value, what: str) -> dict[Key, Value]:
        if not isinstance(value, dict):
            self._damaged(what, "a dict", value)
        return value

    def _damaged(self, what: str, expected: str, found: object) -> NoReturn:
        why = "the file is damaged, or a version of torch_checkpointing that fsdpckpt does not know wrote it"
        raise damaged(self._path, f"{what} cannot be right", expected, truncate(found), why=why)
