"""Tells what this process is among several: whether it is a worker, whether it is the one that prints, how it must end.

A run of many workers prints everything once: rank 0 does, or rank 1 when rank 0 was lost. Imports nothing that takes
time, because every command asks.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass


def started_as_worker(environment: Mapping[str, str] | None = None) -> bool:
    """Whether torchrun (any elastic launch) or srun started this process as one of its workers.

    The same answer as ``comm.launch.rank_from_environment`` gives, without importing torch.
    """
    variables = os.environ if environment is None else environment
    if "RANK" in variables and "WORLD_SIZE" in variables:
        return True
    return "SLURM_STEP_ID" in variables and variables.get("SLURM_STEP_NUM_TASKS", "1") != "1"


def own_rank(environment: Mapping[str, str] | None = None) -> int:
    """The rank of this process; 0 when it is no worker."""
    variables = os.environ if environment is None else environment
    if not started_as_worker(variables):
        return 0
    text = variables.get("RANK" if "RANK" in variables else "SLURM_PROCID", "0")
    return int(text) if text.isdigit() else 0


@dataclass(slots=True)
class ProcessRole:
    """``worker``: this process takes part in a run of several. ``speaker``: the rank that prints. ``lost``: its group
    failed, so that it must end without the destructors of torch, which may hang.
    """

    worker: bool = False
    speaker: int = 0
    lost: bool = False

    @property
    def silent(self) -> bool:
        """Whether another process prints for this one."""
        return self.worker and own_rank() != self.speaker


process_role = ProcessRole()
"""This process's role."""
