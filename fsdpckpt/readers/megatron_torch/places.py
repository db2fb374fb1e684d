"""Places of ranks in Megatron-LM's grid, and the directories that they save to.

A directory is named for the tensor-parallel rank, then for the pipeline stage if there are several, then for the
expert-parallel rank if there are several: ``mp_rank_01``, ``mp_rank_01_002``, ``mp_rank_01_002_003``
(``get_checkpoint_name`` of ``megatron/training/checkpointing.py``). Experts may be cut among fewer ranks than the other
weights (``--expert-tensor-parallel-size``); then not every pair of a tensor-parallel and an expert-parallel rank
exists (``RankGenerator`` of ``megatron/core/parallel_state.py``).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import lcm

from fsdpckpt.readers.megatron_torch.layout import LayoutError, RunArguments
from fsdpckpt.text import plural

BUFFERS_FILE = "distrib_optim.pt"  # of the distributed optimizer, in the same directories
DIRECTORY = re.compile(r"^mp_rank_(\d{2,5})(?:_(\d{3,5}))?(?:_(\d{3,5}))?$")
_MOST_RANKS = 1 << 16


@dataclass(frozen=True, slots=True, order=True)
class RankPlace:
    """Which part of the model a file has."""

    stage: int
    expert: int
    tensor: int


@dataclass(frozen=True)
class Grid:
    """The numbers of ranks: ``expert_tensor`` of them share the weights of one expert."""

    tensor: int
    stages: int
    experts: int
    expert_tensor: int

    @classmethod
    def of(cls, arguments: RunArguments) -> Grid:
        """The grid of a run. Raises LayoutError."""
        tensor = arguments.count("tensor_model_parallel_size")
        stages, experts = (
            arguments.count(name, 1) for name in ("pipeline_model_parallel_size", "expert_model_parallel_size")
        )
        expert_tensor = arguments.count("expert_tensor_parallel_size", tensor)
        if tensor % expert_tensor:
            what = f"experts are cut among {expert_tensor} ranks and other weights among {tensor}"
            raise LayoutError(f"{what}: several ranks then save to one file")
        if tensor * stages * experts > _MOST_RANKS:
            raise LayoutError(f"args name {tensor} x {stages} x {experts} ranks")
        return cls(tensor, stages, experts, expert_tensor)

    def place(self, numbers: Sequence[int]) -> RankPlace | None:
        """The place that ``numbers``, those of a directory's name, stand for; None if ranks of this grid have none."""
        expected = [True, self.stages > 1, self.experts > 1]
        if len(numbers) != sum(expected):
            return None
        left = list(numbers)
        tensor, stage, expert = (left.pop(0) if here else 0 for here in expected)
        if stage >= self.stages or (tensor, expert) not in self._possible:
            return None
        return RankPlace(stage, expert, tensor)

    def directory(self, place: RankPlace) -> str:
        """The name of a place's directory."""
        stage = f"_{place.stage:03}" if self.stages > 1 else ""
        expert = f"_{place.expert:03}" if self.experts > 1 else ""
        return f"mp_rank_{place.tensor:02}{stage}{expert}"

    def places(self) -> list[RankPlace]:
        """All that together have every shard, each of which some rank saves."""
        pairs = self._pairs(max(self.tensor, self._expert_ranks))
        return sorted(RankPlace(stage, expert, tensor) for stage in range(self.stages) for tensor, expert in pairs)

    def place_of_rank(self, rank: int, arguments: RunArguments) -> RankPlace | None:
        """Where the process ``rank`` is; None if the arguments do not say how many there are."""
        world = arguments.values.get("world_size")
        stage = 0
        if self.stages > 1:
            if type(world) is not int or world % self.stages or not 0 <= rank < world:
                return None
            stage = rank // (world // self.stages)
            if arguments.values.get("use_tp_pp_dp_mapping"):
                context = arguments.values.get("context_parallel_size") or 1
                if type(context) is not int:
                    return None
                stage = rank // (self.tensor * context) % self.stages
                if self.experts > 1 and stage != rank // self._expert_ranks % self.stages:
                    return None
        return RankPlace(stage, rank // self.expert_tensor % self.experts, rank % self.tensor)

    def part(self, place: RankPlace, *, of_expert: bool) -> int:
        """Which shard of a cut weight is at ``place``."""
        return place.tensor % self.expert_tensor if of_expert else place.tensor

    def parts(self, *, of_expert: bool) -> int:
        """Among how many ranks a weight is cut."""
        return self.expert_tensor if of_expert else self.tensor

    @property
    def kind(self) -> str:
        """What a rank is in words."""
        return "rank" if self.stages > 1 or self.experts > 1 else "tensor-parallel rank"

    def described(self) -> str:
        """The grid in words."""
        parts = [plural(self.tensor, "tensor-parallel rank")]
        parts += [plural(self.stages, "pipeline stage")] if self.stages > 1 else []
        parts += [plural(self.experts, "expert-parallel rank")] if self.experts > 1 else []
        return " x ".join(parts)

    @property
    def _expert_ranks(self) -> int:
        return self.expert_tensor * self.experts

    @cached_property
    def _possible(self) -> set[tuple[int, int]]:
        return self._pairs(lcm(self.tensor, self._expert_ranks))

    def _pairs(self, ranks: int) -> set[tuple[int, int]]:
        """The tensor-parallel and expert-parallel ranks of the first ``ranks`` processes."""
        return {(rank % self.tensor, rank // self.expert_tensor % self.experts) for rank in range(ranks)}
