"""What this process is among several: whether it is a worker, whether it is the one that speaks, how it has to end.

A run of many workers says everything once: rank 0 speaks, or rank 1 when rank 0 was lost. Imports nothing that takes
time: every command asks.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["Standing", "rank_here", "standing", "started_as_worker"]


def started_as_worker(environment: Mapping[str, str] | None = None) -> bool:
    """Whether torchrun (any elastic launch) or srun started this process as one of its workers.

    The same answer as ``comm.launch.recognised`` gives, without importing torch.
    """
    variables = os.environ if environment is None else environment
    if "RANK" in variables and "WORLD_SIZE" in variables:
        return True
    return "SLURM_STEP_ID" in variables and variables.get("SLURM_STEP_NUM_TASKS", "1") != "1"


def rank_here(environment: Mapping[str, str] | None = None) -> int:
    """This worker's rank, 0 for a process that is none."""
    variables = os.environ if environment is None else environment
    if not started_as_worker(variables):
        return 0
    text = variables.get("RANK" if "RANK" in variables else "SLURM_PROCID", "0")
    return int(text) if text.isdigit() else 0


@dataclass(slots=True)
class Standing:
    """``worker``: this process takes part in a run of several. ``speaker``: the rank that speaks. ``lost``: its group
    failed, so that it has to end without the destructors of torch, which may hang.
    """

    worker: bool = False
    speaker: int = 0
    lost: bool = False

    @property
    def silent(self) -> bool:
        return self.worker and rank_here() != self.speaker


standing = Standing()
"""This process's."""
