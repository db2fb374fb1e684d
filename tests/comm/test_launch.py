"""Who started this worker, and what it communicates with."""

from __future__ import annotations

import pytest
import torch

from fsdpckpt.comm import launch
from fsdpckpt.comm.launch import first_host, rank_from_environment
from fsdpckpt.errors import UsageError
from fsdpckpt.options import LaunchOptions

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


def test_a_process_started_alone_has_no_place() -> None:
    assert rank_from_environment({"HOME": "/root"}) is None


def test_torchrun_says_rank_and_where_to_meet() -> None:
    place = rank_from_environment(TORCHRUN)
    assert place is not None
    assert (place.rank, place.world_size, place.local_rank, place.local_world_size) == (5, 8, 1, 4)
    assert (place.address, place.port, place.started_by) == ("node1", 29500, "torchrun")


def test_srun_says_rank_and_all_tasks_of_a_step_find_one_port() -> None:
    place, other = (
        rank_from_environment(SRUN),
        rank_from_environment({**SRUN, "SLURM_PROCID": "0", "SLURM_NODEID": "0", "SLURM_LOCALID": "0"}),
    )
    assert place is not None
    assert other is not None
    assert (place.rank, place.world_size, place.local_rank, place.local_world_size) == (5, 7, 1, 3)
    assert other.local_world_size == 2
    assert (place.address, place.started_by) == ("gpu03", "srun")
    assert place.port == other.port
    third = rank_from_environment({**SRUN, "SLURM_STEP_ID": "3"})
    assert third is not None
    assert third.port != place.port


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


@pytest.mark.parametrize(
    ("backend", "device", "own_gpu", "chosen"),
    [
        ("auto", "auto", True, ("nccl", "cuda")),
        ("auto", "auto", False, ("gloo", "cpu")),
        ("gloo", "auto", True, ("gloo", "cpu")),
        ("auto", "cpu", True, ("gloo", "cpu")),
        ("nccl", "auto", True, ("nccl", "cuda")),
        ("auto", "cuda", True, ("nccl", "cuda")),
    ],
)
def test_nccl_is_chosen_only_when_every_worker_has_a_gpu(
    backend: str, device: str, own_gpu: bool, chosen: tuple[str, str]
) -> None:
    assert launch.choose_backend(backend, device, all_have_gpu=lambda: own_gpu) == chosen


@pytest.mark.parametrize(
    ("backend", "device"), [("nccl", "auto"), ("auto", "cuda"), ("nccl", "cpu"), ("mpi", "auto"), ("auto", "tpu")]
)
def test_what_cannot_be_had_is_a_usage_error_never_another_backend(backend: str, device: str) -> None:
    with pytest.raises(UsageError):
        launch.choose_backend(backend, device, all_have_gpu=lambda: False)


def test_the_number_of_workers_follows_the_gpus_where_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    assert [launch.local_workers(text) for text in ("gpu", "auto", "5")] == [3, 3, 5]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert launch.local_workers("auto") == 1
    with pytest.raises(UsageError):
        launch.local_workers("gpu")
    for text in ("0", "many", 0):
        with pytest.raises(UsageError, match="--nproc-per-node takes a number"):
            LaunchOptions.of(nproc_per_node=text)
