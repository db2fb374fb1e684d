"""Reads how AutoEP divided the experts of a model among expert-parallel ranks.

AutoEP puts a layer of its own in the place of every MoE block, with the weights of all experts of a rank in one tensor:
``<layer>.experts.w1``, ``w2`` and ``w3``, which have the expert as their first dimension. ``ds_autoep_layers`` of a
file of module states says for each layer which experts each rank has, in the order of its tensors
(``expert_placement``, and the same as blocks: ``affine_maps``). ZeRO divides a rank's tensors among the ranks that have
the same experts.

Without ZeRO 3 each expert is in a file of its own as well, as the model computed with it:
``<layer>.experts.w1.<expert>`` (``_save_moe_checkpoint`` of ``deepspeed/runtime/engine.py``, and
``deepspeed/checkpoint/autoep_affine.py``).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import cast

from fsdpckpt.formats.torch.distributed import BoxInFile
from fsdpckpt.formats.torch.tensors import StoredTensor
from fsdpckpt.ir.tensors import Box
from fsdpckpt.ir.values import Key, Value, equal
from fsdpckpt.readers.deepspeed.autotp import MAP_VERSION, shards_of_map
from fsdpckpt.readers.deepspeed.partitions import FlatGroup, is_count
from fsdpckpt.readers.deepspeed.patterns import MapError
from fsdpckpt.readers.deepspeed.required_files import MAX_NAMES, ExpertFile, unsupported
from fsdpckpt.readers.deepspeed.step import AUTOEP_LAYERS, StateDict, StepFile, as_mapping, contradiction
from fsdpckpt.readers.missing_ranks import ranks_missing
from fsdpckpt.readers.model_shards import ModelShard, Piece, RankGrid, Shape, Shards, shard_of
from fsdpckpt.text import plural

_OF_ALL_RANKS = (
    "moe_layer_id", "num_experts", "num_local_experts", "ep_size", "expert_placement", "affine_maps",
    "expert_key_prefix", "expert_data_parallel_world_size",
)  # fmt: skip
_WEIGHT = re.compile(r"^(.+)\.(w[123])(?:\.(\d{1,6}))?$", re.DOTALL)
_MAX_EXPERTS = 1 << 16


@dataclass(frozen=True, slots=True)
class AutoEpLayer:
    """One MoE layer. ``number``: that of its files; ``experts``: those of each rank; ``maps``: the same as blocks."""

    number: int
    prefix: str
    experts: Sequence[Sequence[int]]
    maps: Mapping[str, object]

    @property
    def count(self) -> int:
        return sum(map(len, self.experts))

    def shards(self, name: str, local: Shape) -> Shards:
        """The shards of the weights ``name``, of which rank 0 has ``local``. Raises MapError."""
        if not local:
            raise MapError("it has no dimension of experts")
        rest = local[1:]
        by_rank: dict[int, ModelShard] = {}
        for rank, experts in enumerate(self.experts):
            pieces = tuple(_row(at, expert, rest) for at, expert in enumerate(experts))
            by_rank[rank] = ModelShard((len(experts), *rest), pieces)
        shards = Shards((self.count, *rest), by_rank)
        if name in self.maps:
            _require_same_rows(shards_of_map(self.maps[name], len(self.experts)), shards)
        elif self.maps:
            raise MapError("it is not in affine_maps")
        return shards


@dataclass(frozen=True, slots=True)
class AutoExperts:
    """The experts of all layers, on ``size`` expert-parallel ranks."""

    size: int
    layers: Sequence[AutoEpLayer]

    def shards(self, directory: str, module: StepFile, groups: Sequence[FlatGroup]) -> dict[str, Shards]:
        """The shards of all weights of experts in ``groups``, the param groups of experts.

        Raises SourceUnsupportedError for others in these groups.
        """
        layers = {layer.prefix: layer for layer in self.layers}
        shards: dict[str, Shards] = {}
        unknown: list[str] = []
        for name, local in ((name, shape) for group in groups for name, shape in group.items()):
            match = _WEIGHT.match(name)
            try:
                if match is None or match[3] is not None or match[1] not in layers:
                    raise MapError("no layer of AutoEP has it")
                shards[name] = layers[match[1]].shards(name, local)
            except MapError as error:
                unknown.append(f"{name}: {error}")
        if unknown:
            raise unsupported(directory, "experts", [module.path], f"the weights of {AUTOEP_LAYERS}", unknown[0])
        return shards

    def shards_among(self, directory: str, module: StepFile, groups: Sequence[FlatGroup]) -> dict[str, Shards]:
        """``shards`` of the weights of experts in ``groups`` of any parameters."""
        prefixes = {layer.prefix for layer in self.layers}
        experts: list[FlatGroup] = []
        for group in groups:
            matches = {name: _WEIGHT.match(name) for name in group}
            own = [name for name, match in matches.items() if match is not None and match[1] in prefixes]
            experts.append({name: group[name] for name in own})
        return self.shards(directory, module, experts)

    def named(self, group: FlatGroup, expert_rank: int) -> dict[str, str]:
        """All ranks call a layer's weights the same."""
        del expert_rank
        return {name: name for name in group}

    def shapes(self, groups: Sequence[FlatGroup], expert_rank: int) -> FlatGroup:
        """The shapes of all parameters of each rank."""
        del expert_rank
        return {name: shape for group in groups for name, shape in group.items()}

    def joined(self, directory: str, files: Sequence[tuple[ExpertFile, StepFile]]) -> list[tuple[StepFile, StateDict]]:
        """The content of the ``files`` of experts, each as a part of the weights of its layer.

        Raises SourceIncompleteError that lists the experts without a file, SourceCorruptError for one that has others.
        """
        layers: dict[int | None, AutoEpLayer] = {layer.number: layer for layer in self.layers}
        holders: dict[int | None, list[int]] = {}
        for number, (expert, _) in enumerate(files):
            holders.setdefault(expert.layer, []).append(number)
        grid = RankGrid(1, len(files))
        opened: list[tuple[StepFile, StateDict]] = []
        found: set[tuple[int, int]] = set()
        for number, (expert, file) in enumerate(files):
            layer = layers.get(expert.layer)
            if layer is None or expert.expert >= layer.count:
                raise contradiction(file.path, f"it is of an expert that is not in {AUTOEP_LAYERS}")
            entries: StateDict = {}
            for key, value in as_mapping(file.root, file.path, "its content").items():
                match = _WEIGHT.match(str(key))
                if match is None or match[1] != layer.prefix or match[3] != str(expert.expert):
                    raise contradiction(file.path, f"it contains {key!s}, which is not of expert {expert.expert}")
                if not isinstance(value, StoredTensor):
                    raise contradiction(file.path, f"{key!s} is not a tensor")
                start = (0,) * len(value.shape)
                box = BoxInFile((expert.expert, *start), (1, *value.shape), value.offset, (0, *value.stride))
                own = ModelShard.of_whole((1, *value.shape))
                whole = Shards((layer.count, *value.shape), dict.fromkeys(holders[layer.number], own))
                entries[f"{match[1]}.{match[2]}"] = shard_of("expert", grid, number, whole, value, [box])
            found.add((layer.number, expert.expert))
            opened.append((replace(file, rank=number), entries))
        missing = [
            f"layer_{layer.number}_expert_{number}_mp_rank_00_model_states.pt"
            for layer in self.layers
            for number in range(layer.count)
            if (layer.number, number) not in found
        ]
        if missing:
            what = f"{directory}: the files of {plural(len(missing), 'expert')} are missing"
            path = f"{directory.rstrip('/')}/{missing[0]}"
            raise ranks_missing(what, missing, most_shown=MAX_NAMES, file=path)
        return opened


def auto_experts(directory: str, files: Sequence[StepFile], ranks: int) -> AutoExperts | None:
    """What ``files`` of module states say of AutoEP's layers; None without any. ``ranks``: that saved, 0 if not known.

    Raises SourceCorruptError for files that contradict themselves or each other.
    """
    found = [file.root.get(AUTOEP_LAYERS) for file in files]
    if not found[0]:
        return None
    first = files[0]
    layers: list[AutoEpLayer] = []
    entries = _entries(found[0], first.path)
    for file, own in zip(files, found, strict=True):
        others = _entries(own, file.path)
        same = len(others) == len(entries) and all(
            equal(cast(Value, entry.get(name)), cast(Value, other.get(name)))
            for entry, other in zip(entries, others, strict=True)
            for name in _OF_ALL_RANKS
        )
        if not same:
            raise contradiction(file.path, f"its {AUTOEP_LAYERS} are not those of the first rank")
    for entry in entries:
        try:
            layers.append(_layer(entry))
        except MapError as error:
            raise contradiction(first.path, f"its {AUTOEP_LAYERS} contradict themselves: {error}") from None
    sizes = {len(layer.experts) for layer in layers}
    if len(sizes) > 1:
        raise unsupported(directory, "experts", [first.path], "one number of expert-parallel ranks", str(sorted(sizes)))
    (size,) = sizes
    if ranks % size:
        raise contradiction(first.path, f"its experts are on {plural(size, 'rank')} of {ranks}")
    return AutoExperts(size, layers)


def require_places(files: Sequence[StepFile]) -> None:
    """Raises SourceCorruptError unless each rank's file of module states, in its place, was saved by the rank there."""
    for file in files:
        for entry in _entries(file.root.get(AUTOEP_LAYERS), file.path):
            saved = entry.get("ep_rank"), entry.get("expert_data_parallel_rank")
            if saved != (file.model_rank, file.data_rank):
                what = f"expert-parallel rank {saved[0]!r} and data-parallel rank {saved[1]!r} saved it"
                found = f"and its name is that of {file.model_rank} and {file.data_rank}"
                raise contradiction(file.path, f"{what[:100]}, {found}")


def _entries(value: object, path: str) -> list[StateDict]:
    if not isinstance(value, list) or not value:
        raise contradiction(path, f"its {AUTOEP_LAYERS} are not a list of layers")
    return [as_mapping(entry, path, AUTOEP_LAYERS) for entry in value]


def _layer(entry: StateDict) -> AutoEpLayer:
    """One layer's entry. Raises MapError."""
    number, prefix = entry.get("moe_layer_id"), entry.get("expert_key_prefix")
    count, size, local = (_count(entry.get(name), name) for name in ("num_experts", "ep_size", "num_local_experts"))
    if not is_count(number) or not isinstance(prefix, str):
        raise MapError(f"a layer {number!r} called {prefix!r}"[:200])
    placement = entry.get("expert_placement")
    experts = _uniform(count, size, local) if placement is None else _placed(placement, size)
    if sorted(expert for of_rank in experts for expert in of_rank) != list(range(count)):
        raise MapError(f"expert_placement does not have each of {count} experts on one rank")
    maps = entry.get("affine_maps")
    if not isinstance(maps, dict):
        return AutoEpLayer(cast(int, number), prefix, experts, {})
    if maps.get("version") != MAP_VERSION or not isinstance(maps.get("params"), dict):
        raise MapError(f"affine_maps have version {maps.get('version')!r}, and {MAP_VERSION} is known")
    return AutoEpLayer(cast(int, number), prefix, experts, {str(name): each for name, each in maps["params"].items()})


def _count(value: object, name: str) -> int:
    if not is_count(value) or not 1 <= cast(int, value) <= _MAX_EXPERTS:
        raise MapError(f"{name} is {value!r}"[:200])
    return cast(int, value)


def _uniform(count: int, size: int, local: int) -> list[list[int]]:
    """What ranks have where no placement is recorded: equally many, one rank after the other."""
    if local * size != count:
        raise MapError(f"{local} experts on each of {size} ranks are not {count}")
    return [list(range(rank * local, (rank + 1) * local)) for rank in range(size)]


def _placed(placement: object, size: int) -> list[list[int]]:
    ranks = placement.get("ranks") if isinstance(placement, dict) else None
    if not isinstance(ranks, list) or not isinstance(placement, dict) or placement.get("version") != 1:
        raise MapError("expert_placement has an unknown form")
    by_rank: dict[object, list[int]] = {}
    for entry in ranks:
        experts = entry.get("experts") if isinstance(entry, dict) else None
        if not isinstance(experts, list) or not all(map(is_count, experts)):
            raise MapError("expert_placement has an unknown form")
        by_rank[cast("dict[Key, object]", entry).get("rank")] = experts
    if set(by_rank) != set(range(size)) or len(ranks) != size:
        raise MapError(f"expert_placement is not of {plural(size, 'rank')}")
    return [by_rank[rank] for rank in range(size)]


def _row(at: int, expert: int, rest: Shape) -> Piece:
    """An expert of the model, which is number ``at`` of its rank."""
    start, sizes = (0,) * len(rest), (1, *rest)
    return Piece(Box((at, *start), sizes), Box((expert, *start), sizes))


def _require_same_rows(recorded: Shards, expected: Shards) -> None:
    """Raises MapError unless ``recorded``, whose pieces have any number of rows, are the ``expected`` experts."""
    if recorded.shape != expected.shape:
        raise MapError(f"affine_maps say {list(recorded.shape)}, and its shards make {list(expected.shape)}")
    for rank, shard in recorded.by_rank.items():
        rows: dict[int, int] = {}
        for piece in shard.pieces:
            if piece.whole.sizes[1:] != recorded.shape[1:]:
                raise MapError("affine_maps divide the weights of one expert")
            rows.update(
                (piece.shard.offsets[0] + at, piece.whole.offsets[0] + at) for at in range(piece.whole.sizes[0])
            )
        own = {piece.shard.offsets[0]: piece.whole.offsets[0] for piece in expected.by_rank[rank].pieces}
        if rows != own:
            raise MapError(f"affine_maps and expert_placement do not say the same of rank {rank}")
