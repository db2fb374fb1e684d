"""The files of torch_checkpointing: an item for each top-level key, and ``metadata.pkl``, which says how it is cut.

Follows ``CheckpointWriter`` and ``DistributedMetadata.to_dict`` (version 2.0) of torch_checkpointing. Its loader reads
a checkpoint on another number of ranks, or on another mesh, by this file.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import cast

from fsdpckpt import flags
from fsdpckpt.errors import UsageError
from fsdpckpt.formats.pickle.write import dumps
from fsdpckpt.ir.checkpoint import Checkpoint, Section
from fsdpckpt.ir.dtypes import DType
from fsdpckpt.ir.placements import MeshShape, Placement, Replicate, Shard, Sharding, StridedShard
from fsdpckpt.ir.sections import model_dict, optimizer_dict
from fsdpckpt.ir.targets import TargetFile
from fsdpckpt.ir.tensors import Tensor, contiguous_stride
from fsdpckpt.ir.values import Key, Value, walk
from fsdpckpt.producers import SectionPath
from fsdpckpt.producers.torch_checkpointing import METADATA, OF_DTENSOR, VERSION
from fsdpckpt.writers.dtensor_pickle import ranks_along
from fsdpckpt.writers.protocol import WriteSpec
from fsdpckpt.writers.state_dicts import extras_of_rank, nested

_ITEM = re.compile(r"[^/\\\x00-\x1f{}]{1,200}")


def items_by_rank(
    checkpoint: Checkpoint, paths: Mapping[Section, SectionPath], world_size: int
) -> dict[str, dict[int, Value]]:
    """Each item with its value on the ranks that have it, or on rank 0 alone if all have the same.

    Raises UsageError for a key that cannot be in the name of a file.
    """
    ranks = range(world_size if checkpoint.rank_extra else 1)
    sections = _sections(checkpoint, paths)
    items: dict[str, dict[int, Value]] = {}
    for rank in ranks:
        extras = [((cast("str | int", key),), value) for key, value in extras_of_rank(checkpoint, rank).items()]
        root = nested([*sections, *extras])
        for key, value in root.items() if isinstance(root, dict) else ():
            if not isinstance(key, str) or not _ITEM.fullmatch(key):
                raise UsageError(
                    f"{key!r} cannot be an item of torch_checkpointing: each item has a file of its name",
                    key=str(key),
                    next_step=f"{flags.exclude(str(key))}, or {flags.flavor('plain')}",
                )
            items.setdefault(key, {})[rank] = value
    return items


def _sections(
    checkpoint: Checkpoint, paths: Mapping[Section, SectionPath]
) -> list[tuple[tuple[str | int, ...], Value]]:
    """The model and the optimizer with their paths in the state dict."""
    sections: list[tuple[tuple[str | int, ...], Value]] = []
    if checkpoint.model is not None:
        sections.append((paths[Section.MODEL].keys, model_dict(checkpoint.model)))
    if checkpoint.optim is not None:
        sections.append((paths[Section.OPTIM].keys, optimizer_dict(checkpoint.optim)))
    return sections


def sharding_metadata(
    checkpoint: Checkpoint,
    spec: WriteSpec,
    shardings: Mapping[Tensor, Sharding],
    casts: Mapping[Tensor, DType],
    device: str,
) -> TargetFile:
    """``metadata.pkl`` for the model and the optimizer. ``shardings``, ``casts``: of those that are cut, or cast."""
    world_size = spec.ranks()
    everyone = tuple(range(world_size))
    meshes = _Meshes(device, world_size)
    items: dict[Key, Value] = {}
    root = nested(_sections(checkpoint, spec.section_paths))
    for item, value in root.items() if isinstance(root, dict) else ():
        tensors: dict[Key, Value] = {}
        for path, leaf in walk(value):
            if not isinstance(leaf, Tensor):
                continue
            sharding = shardings.get(leaf)
            described: list[Value] = []
            # Ranks on different submeshes have descriptions of their own; mostly there is one for all ranks.
            for ranks, mesh in meshes.of(sharding):
                placements = _placements(sharding)
                described.append(
                    {
                        "sharding_metadata": {
                            "type": OF_DTENSOR,
                            "data": {
                                "global_shape": list(leaf.shape),
                                "dtype": f"torch.{casts.get(leaf, leaf.dtype).name}",
                                "stride": list(contiguous_stride(leaf.shape)),
                                "mesh_spec": mesh,
                                "placements": [_placement(each) for each in placements],
                            },
                        },
                        "ranks": ranks,
                    }
                )
            tensors[json.dumps(list(path), separators=(",", ":"))] = described
        items[str(item)] = {
            "nested_path_to_metadata": tensors,
            "rank_to_layout_info": dict.fromkeys(everyone),
        }
    file = TargetFile(METADATA)
    file.add_literal(dumps({"metadata": items, "world_size": world_size, "version": VERSION}))
    return file


class _Meshes:
    """The descriptions of meshes, each made once, so that the pickle has each once."""

    def __init__(self, device: str, world_size: int) -> None:
        self._device = device
        self._everyone = MeshShape((world_size,))
        self._known: dict[tuple[MeshShape, tuple[int, ...]], list[tuple[tuple[int, ...], Value]]] = {}

    def of(self, sharding: Sharding | None) -> list[tuple[tuple[int, ...], Value]]:
        """Each set of ranks with the description of the mesh that a tensor is on there; None: a plain tensor."""
        mesh, dims = (sharding.mesh, sharding.dims) if sharding is not None else (self._everyone, (0,))
        known = self._known.get((mesh, dims))
        if known is None:
            submeshes: dict[tuple[int, ...], None] = {}
            for rank in range(mesh.world_size):
                submeshes[tuple(ranks_along(mesh, dims, rank))] = None
            known = self._known[mesh, dims] = [(ranks, self._describe(mesh, dims, ranks)) for ranks in submeshes]
        return known

    def _describe(self, mesh: MeshShape, dims: tuple[int, ...], ranks: tuple[int, ...]) -> Value:
        names = tuple(mesh.names[dim] for dim in dims) if mesh.names is not None else None
        return {
            "device_type": self._device,
            "mesh_shape": tuple(mesh.sizes[dim] for dim in dims),
            "mesh_data": ranks,
            "mesh_dim_names": names,
        }


def _placements(sharding: Sharding | None) -> list[Placement]:
    """In the order of the tensor's own mesh. A plain tensor is a replica."""
    if sharding is None:
        return [Replicate()]
    placements = (sharding.placements[dim] for dim in sharding.dims)
    return [placement for placement in placements if placement is not None]


def _placement(placement: Placement) -> Value:
    match placement:
        case Replicate():
            return {"type": "Replicate"}
        case Shard(dim):
            return {"type": "Shard", "dim": dim}
        case StridedShard(dim, factor):
            return {"type": "StridedShard", "dim": dim, "split_factor": factor}
