"""How many workers are launched, and what they communicate with."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from fsdpckpt.comm import launch
from fsdpckpt.errors import UsageError
from fsdpckpt.options import LaunchOptions
from fsdpckpt.process import RankInfo


@pytest.mark.parametrize(
    ("backend", "device", "own_gpu", "chosen"),
    [
        ("auto", "auto", True, ("nccl", "cuda")),
        ("auto", "auto", False, ("gloo", "cpu")),
        ("gloo", "auto", True, ("gloo", "cpu")),
        ("auto", "cpu", True, ("gloo", "cpu")),
        ("nccl", "auto", True, ("nccl", "cuda")),
        ("auto", "cuda", True, ("nccl", "cuda")),
        ("nccl", "auto", False, ("nccl", "cuda")),  # they share GPUs: whether they can, NCCL says
        ("auto", "cuda", False, ("nccl", "cuda")),
    ],
)
def test_nccl_is_chosen_when_every_worker_has_a_gpu_of_its_own_or_it_was_asked_for(
    backend: str, device: str, own_gpu: bool, chosen: tuple[str, str]
) -> None:
    assert launch.choose_backend(backend, device, votes=lambda: launch.GpuVotes(own=own_gpu, any=True)) == chosen


@pytest.mark.parametrize(
    ("backend", "device"), [("nccl", "auto"), ("auto", "cuda"), ("nccl", "cpu"), ("mpi", "auto"), ("auto", "tpu")]
)
def test_what_cannot_be_had_is_a_usage_error_never_another_backend(backend: str, device: str) -> None:
    with pytest.raises(UsageError):
        launch.choose_backend(backend, device, votes=lambda: launch.GpuVotes(own=False, any=False))


def test_ranks_take_the_gpus_that_they_see_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    infos = [RankInfo(rank, 4, rank, 4, "127.0.0.1", 1, "torchrun") for rank in range(4)]
    for count, numbers in ((4, [0, 1, 2, 3]), (2, [0, 1, 0, 1]), (1, [0, 0, 0, 0])):
        monkeypatch.setattr(torch.cuda, "device_count", lambda count=count: count)
        assert [launch.rank_device("cuda", info).index for info in infos] == numbers


def test_a_gpu_is_known_by_its_uuid_whatever_number_a_rank_gives_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """With ``srun --gpus-per-task`` each task calls its own GPU number 0."""
    info = RankInfo(2, 4, 2, 4, "127.0.0.1", 1, "srun")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda number: SimpleNamespace(uuid=f"GPU-5-{number}"))
    assert launch.gpu_identity(info) == "GPU-5-0"
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda number: SimpleNamespace())
    assert launch.gpu_identity(info).endswith("/0")


def test_what_nccl_refuses_is_said_in_its_words_with_the_way_out() -> None:
    said = RuntimeError(
        "NCCL error: invalid usage\nDuplicate GPU detected : rank 1 and rank 0 both on CUDA device 9000"
    )
    error = launch.nccl_refused(said)
    assert error is not None and error.found is not None and "rank 1 and rank 0" in error.found
    assert "NCCL_MULTI_RANK_GPU_ENABLE=1" in str(error) and "gloo" in str(error)
    assert launch.nccl_refused(RuntimeError("connection reset")) is None


def test_the_number_of_workers_follows_the_gpus_where_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    assert [launch.local_workers(text) for text in ("gpu", "auto", "5")] == [3, 3, 5]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert launch.local_workers("auto") == 1
    with pytest.raises(UsageError):
        launch.local_workers("gpu")
    for text in ("0", "many", 0, "9" * 5000):
        with pytest.raises(UsageError, match="nproc_per_node takes a number"):
            LaunchOptions.of(nproc_per_node=text)


def test_nccl_moves_more_at_a_time_where_gpus_are_shared_unless_the_user_has_chosen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(launch.os, "environ", {"NCCL_BUFFSIZE": "12345"})
    launch.enlarge_buffers_for_shared_gpus()
    assert launch.os.environ == {"NCCL_BUFFSIZE": "12345", "NCCL_P2P_NET_CHUNKSIZE": "1048576"}
