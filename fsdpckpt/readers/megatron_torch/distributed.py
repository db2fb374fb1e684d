"""Reads what Megatron-LM's distributed optimizer keeps in buffers: float32 weights and states, by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fsdpckpt.ir.checkpoint import Problem
from fsdpckpt.readers.megatron_torch.buffers import BufferSearch, OptimizerElements, flat_buffers
from fsdpckpt.readers.megatron_torch.names import StateDict, is_buffer
from fsdpckpt.readers.megatron_torch.optimizer import OPTIMIZER
from fsdpckpt.readers.megatron_torch.problems import no_places, without_states
from fsdpckpt.readers.megatron_torch.rank_model import FORMAT, MODEL, WholeModel
from fsdpckpt.readers.model_shards import RankGrid, Shards, whole_shard
from fsdpckpt.readers.protocol import FileTable, PartContents
from fsdpckpt.readers.torch_ranks.merge import merge_distributed
from fsdpckpt.readers.torch_ranks.rank_files import RankFile
from fsdpckpt.storage.sources import Sources


def read_distributed(
    model: WholeModel, buffers: Sequence[RankFile | None], saved: object, table: FileTable, sources: Sources
) -> PartContents | Problem:
    """The float32 weights and the states that the distributed optimizer's ``buffers`` have, one file for each of the
    model's. A fatal problem of the optimizer if the values do not prove where they are.

    ``saved``: the optimizer in the first rank's file, which has the settings of the groups.
    """
    placed: dict[int, dict[str, OptimizerElements]] = {}
    for own, flat in zip(model.files, buffers, strict=True):
        if flat is None:
            continue
        optimizers = flat_buffers(flat.archive.root)
        found = None
        if optimizers is not None:
            found = BufferSearch(own.file, flat, table.files(), sources).parameters(optimizers, own.chunks)
        if found is None:
            return no_places(flat)
        placed[own.file.rank] = found
    holders: dict[str, list[int]] = {}
    for rank, names in placed.items():
        for name in names:
            holders.setdefault(name, []).append(rank)
    trained = [name for name in model.order if name in model.shards and not is_buffer(name)]
    lost = [name for name in trained if name not in holders]
    if lost:
        return without_states(model.directory, lost)
    # Shards as parts of whole parameters, among the ranks whose buffers have them.
    shards: dict[str, Shards] = {}
    for name, ranks in holders.items():
        of_name = model.shards[name]
        shards[name] = Shards(of_name.shape, {rank: of_name.by_rank[rank] for rank in ranks})
    groups = _open_groups(saved, [name for name in model.order if name in holders])
    with_buffers = [flat for flat in buffers if flat is not None]
    roots = [_rewritten(placed[flat.rank], shards, flat.rank, len(buffers), groups) for flat in with_buffers]
    return merge_distributed(with_buffers, roots, FORMAT)


def _rewritten(
    parameters: Mapping[str, OptimizerElements],
    shards: Mapping[str, Shards],
    rank: int,
    ranks: int,
    groups: list[StateDict],
) -> StateDict:
    """One rank's ``parameters`` as parts of whole ones, as a file with a model and an optimizer has them."""
    grid = RankGrid(1, ranks)
    weights: StateDict = {}
    states: StateDict = {}
    for name, own in parameters.items():
        weights[name] = whole_shard(grid, rank, rank, shards[name], own.weights)
        states[name] = {
            state: whole_shard(grid, rank, rank, shards[name], stored) for state, stored in own.states.items()
        }
    return {MODEL: weights, OPTIMIZER: {"state": states, "param_groups": groups}}


def _open_groups(saved: object, names: Sequence[str]) -> list[StateDict]:
    """The settings of the distributed optimizer's param groups, which list no parameters; a single one has all."""
    groups: list[StateDict] = []
    for entry in saved if isinstance(saved, (list, tuple)) else [saved]:
        inner = entry.get(OPTIMIZER) if isinstance(entry, dict) else None
        listed = inner.get("param_groups") if isinstance(inner, dict) else None
        groups += [dict(group) for group in listed or () if isinstance(group, dict)]
    return [{**groups[0], "params": list(names)}] if len(groups) == 1 else groups
