"""A Megatron-LM model and each rank's part of it, under the names in the whole model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import cast

from fsdpckpt.formats.torch.tensors import StoredTensor
from fsdpckpt.ir.tensors import Tensor
from fsdpckpt.ir.values import Key, Value
from fsdpckpt.readers.megatron_torch.names import StateDict
from fsdpckpt.readers.megatron_torch.places import RankPlace
from fsdpckpt.readers.model_shards import RankGrid, Shards, whole_shard
from fsdpckpt.readers.torch_ranks.merge import merge_distributed
from fsdpckpt.readers.torch_ranks.rank_files import RankFile

FORMAT = "megatron-torch"
MODEL = "model"


@dataclass(slots=True)
class ModelInFile:
    """One file's part of the model. ``weights``: by the names in the model, in the order of the file. ``others``: what
    is no tensor. ``chunks``: the parameters of each chunk of the model.
    """

    file: RankFile
    place: RankPlace
    weights: dict[str, StoredTensor] = field(default_factory=dict)
    others: StateDict = field(default_factory=dict)
    chunks: list[dict[str, StoredTensor]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class WholeModel:
    """The model of one iteration, of which each of ``files`` has a part."""

    directory: str
    files: Sequence[ModelInFile]
    order: Sequence[str]  # all names, in the model's order
    shards: Mapping[str, Shards]  # of each tensor: what each file has of it

    def copies(self, mastered: Set[str]) -> dict[str, Tensor]:
        """The weights that the model computed with, of the parameters ``mastered``: those of the optimizer are used."""
        if not mastered:
            return {}
        grid = RankGrid(1, len(self.files))
        roots: list[StateDict] = []
        for own in self.files:
            copies: StateDict = {
                name: whole_shard(grid, own.file.rank, own.file.rank, self.shards[name], leaf)
                for name, leaf in own.weights.items()
                if name in mastered
            }
            roots.append({MODEL: copies})
        root = cast("dict[Key, Value]", merge_distributed([own.file for own in self.files], roots, FORMAT).root)
        found = cast("dict[Key, Value]", root[MODEL])
        return {str(name): leaf for name, leaf in found.items() if isinstance(leaf, Tensor)}
