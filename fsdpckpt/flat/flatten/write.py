"""FSDP1's flattened checkpoints: ``{model,optim,extra_state}_world_size_{N}_rank_{r}.pt``, one of each a rank.

On rank r the model file holds what ``LOCAL_STATE_DICT`` gives there, the optimizer file the dict that
``optimizer.load_state_dict`` takes there: what ``FSDP.optim_state_dict_to_load`` returns. With HYBRID_SHARD rank r
holds shard r % ``shard_size``, and its flat parameters state the shards of r's own group; PyTorch itself cannot save a
``LOCAL_STATE_DICT`` outside of the first group, and this is the same form there.
"""

from __future__ import annotations

import posixpath
from collections.abc import Mapping
from typing import Any

from fsdpckpt.errors import InternalError
from fsdpckpt.flat.flatten.keys import settle_keys
from fsdpckpt.flat.flatten.model import FlatModel
from fsdpckpt.flat.flatten.optim import FlatOptimizer
from fsdpckpt.flat.flatten.pickle import FlatPickle
from fsdpckpt.flat.flatten.units import place, require_agreement
from fsdpckpt.ir.checkpoint import Checkpoint
from fsdpckpt.ir.dtypes import DType
from fsdpckpt.ir.targets import Target, TargetFile
from fsdpckpt.ir.tensors import Tensor
from fsdpckpt.writers.protocol import WriteSpec
from fsdpckpt.writers.state_dicts import extra_notes, extras_of_rank
from fsdpckpt.writers.torch_ranks import require_memory

__all__ = ["lay_out"]


def lay_out(checkpoint: Checkpoint, spec: WriteSpec) -> Target:
    """``spec.world_size`` files for each section that ``checkpoint`` (whole tensors, optimizer keyed by name) has.

    ``spec.units`` describe the target. Raises SourceCorruptError when they are those of another model,
    SourceUnsupportedError for what no flat parameter can hold, NeedsInformationError for missing optimizer states.
    """
    if spec.units is None:
        raise InternalError("flat parameters without units that describe them")
    units, world_size, names = spec.units, spec.ranks(), spec.names
    require_agreement(checkpoint, units)
    casts, notes = spec.dtypes.casts(checkpoint)
    placed = place(units, world_size)
    shard_size = units.shard_size or world_size
    files: list[TargetFile] = []
    if checkpoint.model is not None:
        model = FlatModel(checkpoint, checkpoint.model, units=units, placed=placed, casts=casts)
        files += [
            _file(names.model, model.value(rank), rank, world_size, shard_size, casts) for rank in range(world_size)
        ]
    if checkpoint.optim is not None:
        keys = settle_keys(checkpoint, units, spec.key_type)
        notes += keys.notes
        optim = FlatOptimizer(checkpoint, checkpoint.optim, units=units, placed=placed, keys=keys, casts=casts)
        files += [
            _file(names.optim, optim.value(rank), rank, world_size, shard_size, casts) for rank in range(world_size)
        ]
    extras = [extras_of_rank(checkpoint, rank) for rank in range(world_size)]
    if any(extras):
        files += [_file(names.extra, extra, rank, world_size, shard_size, casts) for rank, extra in enumerate(extras)]
        notes += extra_notes(checkpoint, world_size)
    return Target(files, notes=notes)


def _file(
    name: str, value: Any, rank: int, world_size: int, shard_size: int, casts: Mapping[Tensor, DType]
) -> TargetFile:
    file = TargetFile(name.format(rank=rank, world_size=world_size))
    stem = posixpath.splitext(posixpath.basename(file.path))[0]
    writer = FlatPickle(rank=rank, world_size=world_size, shard_size=shard_size, casts=casts)
    writer.value(value)
    writer.write(file, stem=stem)
    if not rank:
        require_memory(len(file.blob), world_size)
    return file
