"""Reads what Megatron-LM's distributed optimizer keeps in buffers: float32 weights and states, by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fsdpckpt.formats.torch.tensors import StoredTensor
from fsdpckpt.ir.checkpoint import Problem
from fsdpckpt.readers.megatron_torch.buffers import PlacedParameter, flat_buffers, parameters_in
from fsdpckpt.readers.megatron_torch.names import StateDict, is_buffer
from fsdpckpt.readers.megatron_torch.optimizer import OPTIMIZER
from fsdpckpt.readers.megatron_torch.problems import no_places, without_states
from fsdpckpt.readers.megatron_torch.rank_model import FORMAT, MODEL, Held
from fsdpckpt.readers.model_shards import RankGrid, Shards, whole_shard
from fsdpckpt.readers.protocol import FileTable, PartContents
from fsdpckpt.readers.torch_ranks.merge import merge_distributed
from fsdpckpt.readers.torch_ranks.rank_files import RankFile
from fsdpckpt.storage.sources import Sources


def read_distributed(
    directory: str,
    saved: object,
    buffers: Sequence[RankFile | None],
    held: Sequence[Held],
    shards: Mapping[str, Shards],
    order: Sequence[str],
    problems: list[Problem],
    table: FileTable,
    sources: Sources,
) -> PartContents | None:
    """The float32 weights and the states that the distributed optimizer's ``buffers`` have. None, with a fatal
    problem of the optimizer, if the values do not prove where they are. ``saved``: the optimizer in the first rank's
    file, which has the settings of the groups.
    """
    placed: dict[int, dict[str, PlacedParameter]] = {}
    for own, flat in zip(held, buffers, strict=True):
        if flat is None:
            continue
        optimizers = flat_buffers(flat.archive.root)
        found = None
        if optimizers is not None:
            files = table.files()
            found = parameters_in(optimizers, own.chunks, own.file, flat, files, sources)
        if found is None:
            problems.append(no_places(flat))
            return None
        placed[own.file.rank] = found
    holders: dict[str, list[int]] = {}
    for rank, names in placed.items():
        for name in names:
            holders.setdefault(name, []).append(rank)
    lost = [name for name in order if name in shards and not is_buffer(name) and name not in holders]
    if lost:
        problems.append(without_states(directory, lost))
        return None
    grid = RankGrid(1, len(held))
    with_buffers: list[RankFile] = []
    roots: list[StateDict] = []
    own_shards = {
        name: Shards(shards[name].shape, {rank: shards[name].by_rank[rank] for rank in ranks})
        for name, ranks in holders.items()
    }
    groups = _open_groups(saved, [name for name in order if name in holders])
    for flat in buffers:
        if flat is None:
            continue

        def part(name: str, leaf: StoredTensor, rank: int = flat.rank) -> object:
            return whole_shard(grid, rank, rank, own_shards[name], leaf)

        parameters = placed[flat.rank]
        states: StateDict = {
            name: {state: part(name, leaf) for state, leaf in each.states.items()} for name, each in parameters.items()
        }
        with_buffers.append(flat)
        weights: StateDict = {name: part(name, each.weight) for name, each in parameters.items()}
        roots.append({MODEL: weights, OPTIMIZER: {"state": states, "param_groups": groups}})
    return merge_distributed(with_buffers, roots, FORMAT)


def _open_groups(saved: object, names: Sequence[str]) -> list[StateDict]:
    """The settings of the distributed optimizer's param groups, which list no parameters; a single one has all."""
    groups: list[StateDict] = []
    for entry in saved if isinstance(saved, (list, tuple)) else [saved]:
        inner = entry.get(OPTIMIZER) if isinstance(entry, dict) else None
        listed = inner.get("param_groups") if isinstance(inner, dict) else None
        groups += [dict(group) for group in listed or () if isinstance(group, dict)]
    return [{**groups[0], "params": list(names)}] if len(groups) == 1 else groups
