"""One rank's part of a Megatron-LM model, under the names in the whole model."""

from __future__ import annotations

from dataclasses import dataclass, field

from fsdpckpt.formats.torch.tensors import StoredTensor
from fsdpckpt.readers.megatron_torch.names import StateDict
from fsdpckpt.readers.megatron_torch.places import RankPlace
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
