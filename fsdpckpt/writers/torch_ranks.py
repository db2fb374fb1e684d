"""Lays out one torch file per rank and section: ``{model,optim,extra_state}_world_size_{N}_rank_{r}.pt``.

Each holds its section's dict itself. Sharded tensors hold what their mesh gives rank r, by default its rows
(``torch.chunk`` along dimension 0); everything else is whole in every rank's file.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

from fsdpckpt.errors import NeedsInformationError, UsageError
from fsdpckpt.ir.checkpoint import Checkpoint, Note
from fsdpckpt.ir.mesh import Replicate, Shard
from fsdpckpt.ir.targets import Target, TargetFile
from fsdpckpt.ir.tensors import Tensor
from fsdpckpt.ir.values import Value
from fsdpckpt.layouts.sharded import on_one_dimension
from fsdpckpt.options import TensorForm
from fsdpckpt.text import size_text
from fsdpckpt.writers.dtensor_pickle import DTensorPickle, target_version
from fsdpckpt.writers.protocol import WriteSpec
from fsdpckpt.writers.rank_files import RankFiles
from fsdpckpt.writers.rank_pickle import RankPickle, ShardedTensorPickle
from fsdpckpt.writers.state_dicts import extra_notes, extras_of_rank, model_dict, optim_dict
from fsdpckpt.writers.torch_full import ties


def lay_out(checkpoint: Checkpoint, spec: WriteSpec) -> Target:
    """``spec.world_size`` files for each section that the checkpoint has.

    A tensor whose ``sharded`` is True becomes what ``spec.tensor`` names (0-dim ones stay whole). A live model takes
    DTensors only from a mesh of its own device type: that of ``spec.mesh_device``, else of the source's DTensors, else
    that of ``spec.mesh``, with a note. Target rank r gets the extras of source rank r modulo the source's ranks. Raises
    NeedsInformationError when the source's DTensors name several device types.
    """
    world_size, names = spec.ranks(), spec.names
    device = spec.mesh_device or _mesh_device(checkpoint)
    mesh = replace(spec.mesh, device=device) if device is not None else spec.mesh
    casts, notes = spec.dtypes.casts(checkpoint)
    cut = {
        named.tensor: spec.sharding(named.tensor)
        for named in checkpoint.tensors()
        if named.tensor.sharded and named.tensor.shape
    }

    pickles: Callable[..., RankPickle] = ShardedTensorPickle
    if spec.tensor is TensorForm.SHARDED_TENSOR:
        _require_rows(checkpoint, spec)
    else:
        version, inferred = target_version(spec.torch_version)
        meshes = spec.meshes or (on_one_dimension(world_size, mesh.names).mesh,)
        pickles = partial(DTensorPickle, form=mesh, torch=version, meshes=meshes)
        notes += inferred

    # A ShardedTensor names its own rank before all others, a mesh of several dimensions names the groups of each rank:
    # then the memo of each rank's pickle is another one.
    alike = spec.tensor is TensorForm.DTENSOR and all(len(sharding.mesh.sizes) == 1 for sharding in cut.values())

    def section(name: str, values: list[Value], tied: Mapping[Tensor, Tensor] | None = None) -> list[TargetFile]:
        """One file for each rank, called ``name``; ``values`` by rank, or one for all of them."""

        def pickle(rank: int) -> RankPickle:
            return pickles(rank=rank, world_size=world_size, shardings=cut, casts=casts, canonical=tied or {})

        paths = [name.format(rank=rank, world_size=world_size) for rank in range(world_size)]
        laid_out = RankFiles(pickle, cut)
        if len(values) == 1 and alike:
            made = laid_out.of_value(values[0], paths)
        else:
            made = laid_out.of_values(values if len(values) > 1 else values * world_size, paths)
        files = []
        for file in made:
            files.append(file)
            require_memory(len(files[0].blob), world_size)
        return files

    files = []
    if checkpoint.model is not None:
        model = model_dict(checkpoint.model)
        tied = ties([leaf for leaf in checkpoint.model.params.values() if isinstance(leaf, Tensor)])
        tied = {key: first for key, first in tied.items() if cut.get(key) == cut.get(first)}
        files += section(names.model, [model], tied)
    if checkpoint.optim is not None:
        files += section(names.optim, [optim_dict(checkpoint.optim)])
    extras: list[Value] = [extras_of_rank(checkpoint, rank) for rank in range(world_size)]
    if any(extras):
        files += section(names.extra, extras)
        notes += extra_notes(checkpoint, world_size)
    if device is None and spec.tensor is TensorForm.DTENSOR:
        text = (
            f"DTensors record a mesh of {mesh.device} devices, which the source does not say (--mesh-device changes it)"
        )
        notes.append(Note("inferred", text))
    return Target(files, notes=notes)


def _require_rows(checkpoint: Checkpoint, spec: WriteSpec) -> None:
    """Raises UsageError for tensors that a ShardedTensor of FSDP1 cannot hold: its ranks cut rows, on a mesh of two
    dimensions (HYBRID_SHARD) those of the second."""
    wanted = (Replicate(), Shard(0))
    for named in checkpoint.tensors() if spec.meshes else ():
        sharding = named.tensor.sharding
        if sharding is not None and sharding.placements != wanted[-len(sharding.placements) :]:
            raise UsageError(
                f"{named.key} is {sharding} on the mesh {sharding.mesh}, which a ShardedTensor does not hold",
                key=named.key,
                expected="[Shard(0)], or [Replicate(), Shard(0)]",
                found=str(sharding),
                next_step="drop --tensor sharded-tensor, or give --mesh one dimension or replicas and shards",
            )


def _mesh_device(checkpoint: Checkpoint) -> str | None:
    devices = sorted(checkpoint.mesh_devices)
    if len(devices) > 1:
        raise NeedsInformationError(
            f"the DTensors of {checkpoint.source} are on meshes of several device types",
            file=checkpoint.source,
            found=", ".join(devices),
            why="a model loads DTensors only from a mesh of its own device type",
            next_step=f"add --mesh-device {devices[0]}, or the one that the loading job has",
        )
    return devices[0] if devices else None


def require_memory(nbytes: int, world_size: int) -> None:
    """Raises UsageError when the bytes around the tensors, ``nbytes`` in each file, do not fit into memory.

    Each file names every rank, once or for every tensor, so twice as many ranks need four times as many bytes.
    """
    needed, available = nbytes * world_size, memory_bytes()
    if needed > available:
        raise UsageError(
            f"--world-size {world_size} with files for each rank needs more memory than this machine has",
            expected=f"up to {size_text(available)} of memory",
            found=f"{size_text(nbytes)} around the tensors of each of {world_size} files",
            why="every such file names every rank, and all are planned before the first is written",
            next_step="--container dcp, whose files do not, or a smaller --world-size",
        )


def memory_bytes() -> int:
    """The machine's memory."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
