"""One torch file per rank and section: ``{model,optim,extra_state}_world_size_{N}_rank_{r}.pt``.

Each holds its section's dict itself. Managed tensors hold rank r's rows (``torch.chunk`` along dimension 0);
everything else is whole in every rank's file.
"""

from __future__ import annotations

import os
import posixpath
from collections.abc import Mapping

from fsdpckpt.errors import UsageError
from fsdpckpt.ir.checkpoint import Checkpoint, Note
from fsdpckpt.ir.dtypes import DType
from fsdpckpt.ir.targets import Target, TargetFile
from fsdpckpt.ir.tensors import Tensor
from fsdpckpt.ir.values import Value
from fsdpckpt.producers.forms import PLAIN_MESH, PLAIN_NAMES, MeshForm, RankNames
from fsdpckpt.text import size_text
from fsdpckpt.writers.dtype_rule import DtypeRule
from fsdpckpt.writers.extras import extras_of_rank
from fsdpckpt.writers.rank_pickle import DTensorPickle, RankPickle, ShardedTensorPickle
from fsdpckpt.writers.storages import ties
from fsdpckpt.writers.torch_full import model_dict, optim_dict

__all__ = ["extra_notes", "lay_out", "memory_bytes", "require_memory"]

_FORMS: Mapping[str, type[RankPickle]] = {"dtensor": DTensorPickle, "sharded-tensor": ShardedTensorPickle}


def lay_out(
    checkpoint: Checkpoint,
    *,
    world_size: int,
    tensor: str,
    dtypes: DtypeRule,
    names: RankNames = PLAIN_NAMES,
    mesh: MeshForm = PLAIN_MESH,
) -> Target:
    """``world_size`` files for each section that the checkpoint has.

    ``tensor`` is ``"dtensor"`` or ``"sharded-tensor"``: what a tensor whose ``sharded`` is True becomes (0-dim ones
    stay whole). ``mesh``: what DTensors say of theirs. Target rank r gets the extras of source rank r modulo the
    source's ranks.
    """
    casts, notes = dtypes.casts(checkpoint)
    cut = frozenset(named.tensor for named in checkpoint.tensors() if named.tensor.sharded and named.tensor.shape)
    files = []
    if checkpoint.model is not None:
        model = model_dict(checkpoint.model)
        tied = ties([leaf for leaf in checkpoint.model.params.values() if isinstance(leaf, Tensor)])
        tied = {key: first for key, first in tied.items() if (key in cut) == (first in cut)}
        files += _section(names.model, [model] * world_size, tensor, cut, casts, tied, mesh)
    if checkpoint.optim is not None:
        files += _section(names.optim, [optim_dict(checkpoint.optim)] * world_size, tensor, cut, casts, {}, mesh)
    extras: list[Value] = [extras_of_rank(checkpoint, rank) for rank in range(world_size)]
    if any(extras):
        files += _section(names.extra, extras, tensor, cut, casts, {}, mesh)
        notes += extra_notes(checkpoint, world_size)
    return Target(files, notes=notes)


def _section(
    name: str, values: list[Value], form: str, cut: frozenset[Tensor], casts: Mapping[Tensor, DType],
    tied: Mapping[Tensor, Tensor], mesh: MeshForm,
) -> list[TargetFile]:  # fmt: skip
    """One file for each rank, called ``name``; ``values`` by rank."""
    files = []
    for rank, value in enumerate(values):
        file = TargetFile(name.format(rank=rank, world_size=len(values)))
        stem = posixpath.splitext(posixpath.basename(file.path))[0]
        writer = _FORMS[form](
            rank=rank, world_size=len(values), sharded_tensors=cut, casts=casts, canonical=tied, mesh=mesh
        )
        writer.value(value)
        writer.write(file, stem=stem)
        files.append(file)
        if not rank:
            require_memory(len(file.blob), len(values))
    return files


def require_memory(nbytes: int, world_size: int) -> None:
    """Raises UsageError when what surrounds the tensors in each file, ``nbytes``, does not fit into memory for all.

    Each names every rank, once or for every tensor, so that twice as many ranks make four times as much of it.
    """
    needed, there = nbytes * world_size, memory_bytes()
    if needed > there:
        raise UsageError(
            f"--world-size {world_size} with files for each rank is more than this machine can lay out",
            expected=f"up to {size_text(there)} of memory",
            found=f"{size_text(nbytes)} around the tensors of each of {world_size} files",
            why="every such file names every rank, and all are planned before the first is written",
            next_step="--container dcp, whose files do not, or a smaller --world-size",
        )


def memory_bytes() -> int:
    """The machine's memory."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def extra_notes(checkpoint: Checkpoint, world_size: int) -> list[Note]:
    """What happens to ranks' own extras when the number of ranks changes."""
    own = len(checkpoint.rank_extra)
    if own in (0, world_size):
        return []
    if own > world_size:
        return [Note("dropped", f"the extras of ranks {world_size} to {own - 1} have no rank in the target")]
    return [
        Note(
            "inferred",
            f"ranks {own} to {world_size - 1} get the extras of rank r modulo {own}: the source has no others",
        )
    ]
