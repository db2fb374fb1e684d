"""Was this process started as one of several workers, by whom, and as which one?

torchrun (any elastic launch) sets RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT. srun
sets SLURM_PROCID, SLURM_STEP_NUM_TASKS, SLURM_LOCALID, SLURM_STEP_TASKS_PER_NODE, SLURM_NODEID and SLURM_STEP_NODELIST;
a batch script without srun has some of them, but no SLURM_STEP_ID.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from fsdpckpt.errors import UsageError

__all__ = ["Place", "first_host", "recognised"]

FIRST_PORT, PORTS = 20000, 20000  # for srun: a port that all tasks of a step find, and other steps avoid


@dataclass(frozen=True, slots=True)
class Place:
    """One worker among ``world_size``; ``local_rank`` of ``local_world_size`` on its node; where the workers meet."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    address: str
    port: int
    started_by: Literal["torchrun", "srun"]


def recognised(environment: Mapping[str, str] | None = None) -> Place | None:
    """The place of this process, None when it was started alone. UsageError when the variables contradict."""
    variables = os.environ if environment is None else environment
    if "RANK" in variables and "WORLD_SIZE" in variables:
        return _of_torchrun(variables)
    if "SLURM_STEP_ID" in variables and _number(variables, "SLURM_STEP_NUM_TASKS", 1) > 1:
        return _of_srun(variables)
    return None


def _of_torchrun(variables: Mapping[str, str]) -> Place:
    rank, world_size = _number(variables, "RANK"), _number(variables, "WORLD_SIZE")
    return _checked(
        Place(
            rank=rank,
            world_size=world_size,
            local_rank=_number(variables, "LOCAL_RANK", 0 if world_size == 1 else None),
            local_world_size=_number(variables, "LOCAL_WORLD_SIZE", 1 if world_size == 1 else None),
            address=variables.get("MASTER_ADDR", "127.0.0.1"),
            port=_number(variables, "MASTER_PORT"),
            started_by="torchrun",
        )
    )


def _of_srun(variables: Mapping[str, str]) -> Place:
    nodes = variables.get("SLURM_STEP_NODELIST") or variables.get("SLURM_NODELIST", "")
    job = f"{variables.get('SLURM_JOB_ID', '0')}.{variables['SLURM_STEP_ID']}"
    digits = int("".join(re.findall(r"\d", job)) or "0")
    return _checked(
        Place(
            rank=_number(variables, "SLURM_PROCID"),
            world_size=_number(variables, "SLURM_STEP_NUM_TASKS"),
            local_rank=_number(variables, "SLURM_LOCALID"),
            local_world_size=_tasks_here(variables),
            address=variables.get("MASTER_ADDR") or first_host(nodes),
            port=_number(variables, "MASTER_PORT", FIRST_PORT + digits % PORTS),
            started_by="srun",
        )
    )


def _tasks_here(variables: Mapping[str, str]) -> int:
    """SLURM_STEP_TASKS_PER_NODE, e.g. ``2(x3),1``: tasks of three nodes, then of one; SLURM_NODEID counts nodes."""
    counts: list[int] = []
    for part in variables.get("SLURM_STEP_TASKS_PER_NODE", "").split(","):
        if match := re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip()):
            counts += [int(match[1])] * int(match[2] or 1)
    node = _number(variables, "SLURM_NODEID", 0)
    if node < len(counts):
        return counts[node]
    raise UsageError(
        "srun does not say how many tasks run on this node",
        expected=f"SLURM_STEP_TASKS_PER_NODE with an entry for node {node}",
        found=variables.get("SLURM_STEP_TASKS_PER_NODE", "nothing"),
    )


def first_host(nodes: str) -> str:
    """The first host of a SLURM node list: ``gpu[03-07,9],login`` is ``gpu03``."""
    match = re.match(r"([^\[,]+)(?:\[(\d+)[^\]]*\]([^,\[]*))?", nodes)
    if not match:
        raise UsageError("srun does not name the nodes of this step", next_step="set MASTER_ADDR to the first of them")
    return match[1] + (match[2] or "") + (match[3] or "")


def _checked(place: Place) -> Place:
    if not 0 <= place.rank < place.world_size or not 0 <= place.local_rank < place.local_world_size <= place.world_size:
        raise UsageError(
            f"the variables of {place.started_by} contradict each other",
            expected="0 <= rank < world size, 0 <= local rank < local world size <= world size",
            found=f"{place.rank} of {place.world_size}, {place.local_rank} of {place.local_world_size}",
        )
    return place


def _number(variables: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = variables.get(name)
    if text is None and default is not None:
        return default
    if text is None or not text.isdigit():
        raise UsageError(f"the environment variable {name} has to be a number", found=text or "nothing")
    return int(text)
