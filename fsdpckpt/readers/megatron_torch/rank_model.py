"""A Megatron-LM model and each rank's part of it, under the names in the whole model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from fsdpckpt.formats.torch.tensors import StoredTensor
from fsdpckpt.readers.megatron_torch.names import StateDict
from fsdpckpt.readers.megatron_torch.places import RankPlace
from fsdpckpt.readers.model_shards import Shards
from fsdpckpt.readers.torch_ranks.rank_files import RankFile

FORMAT = "megatron-torch"
MODEL = "model"


@dataclass(slots=True)
class Held:
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
    files: Sequence[Held]
    order: Sequence[str]  # all names, in the model's order
    shards: Mapping[str, Shards]  # of each tensor: what each file has of it
