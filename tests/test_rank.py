"""Who started this worker, and as which rank."""

from __future__ import annotations

import pytest

from fsdpckpt.errors import UsageError
from fsdpckpt.process import first_host, rank_from_environment

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "node1",
    "MASTER_PORT": "29500",
}
SRUN = {
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "2",
    "SLURM_PROCID": "5",
    "SLURM_STEP_NUM_TASKS": "7",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "2",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2),3",
    "SLURM_STEP_NODELIST": "gpu[03-04,7]",
}


def test_a_process_started_alone_has_no_rank() -> None:
    assert rank_from_environment({"HOME": "/root"}) is None


def test_torchrun_says_rank_and_where_to_meet() -> None:
    info = rank_from_environment(TORCHRUN)
    assert info is not None
    assert (info.rank, info.world_size, info.local_rank, info.local_world_size) == (5, 8, 1, 4)
    assert (info.address, info.port, info.started_by) == ("node1", 29500, "torchrun")


def test_srun_says_rank_and_all_tasks_of_a_step_find_one_port() -> None:
    info, other = (
        rank_from_environment(SRUN),
        rank_from_environment({**SRUN, "SLURM_PROCID": "0", "SLURM_NODEID": "0", "SLURM_LOCALID": "0"}),
    )
    assert info is not None
    assert other is not None
    assert (info.rank, info.world_size, info.local_rank, info.local_world_size) == (5, 7, 1, 3)
    assert other.local_world_size == 2
    assert (info.address, info.started_by) == ("gpu03", "srun")
    assert info.port == other.port
    third = rank_from_environment({**SRUN, "SLURM_STEP_ID": "3"})
    assert third is not None
    assert third.port != info.port


def test_a_batch_script_without_srun_is_one_process() -> None:
    assert (
        rank_from_environment({"SLURM_JOB_ID": "1", "SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_LOCALID": "0"})
        is None
    )
    assert rank_from_environment({**SRUN, "SLURM_STEP_NUM_TASKS": "1"}) is None


@pytest.mark.parametrize(
    ("nodes", "host"),
    [("gpu[03-07,9],login", "gpu03"), ("login,gpu[1-2]", "login"), ("a1", "a1"), ("r[1-2]-eth", "r1-eth")],
)
def test_the_first_host_of_a_node_list(nodes: str, host: str) -> None:
    assert first_host(nodes) == host


@pytest.mark.parametrize("change", [{"RANK": "8"}, {"LOCAL_RANK": "4"}, {"RANK": "x"}, {"LOCAL_WORLD_SIZE": "9"}])
def test_variables_that_contradict_are_a_usage_error(change: dict[str, str]) -> None:
    with pytest.raises(UsageError):
        rank_from_environment({**TORCHRUN, **change})
