"""How many workers are launched, and what they communicate with."""

from __future__ import annotations

import pytest
import torch

from fsdpckpt.comm import launch
from fsdpckpt.errors import UsageError
from fsdpckpt.options import LaunchOptions


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
