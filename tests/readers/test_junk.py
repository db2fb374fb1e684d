"""Files of other trainers in which one value after the other is replaced or lost: they are read, or refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.readers import (
    test_deepspeed,
    test_deepspeed_experts,
    test_deepspeed_parallel,
    test_deepspeed_universal,
)
from tests.readers.junk import refusals, save
from tests.readers.megatron_jobs import Run


def all_of(files: dict[str, Any]) -> Callable[[Path], dict[str, Any]]:
    return lambda _: files


def tensor_parallel(directory: Path) -> dict[str, Any]:
    job = test_deepspeed_parallel.Job(2, 1, 1, only=["norm"])
    save(job.files, directory)
    name = "mp_rank_01_model_states.pt"
    return {name: job.files[name]}


def experts(directory: Path) -> dict[str, Any]:
    step = test_deepspeed_experts.plain_step(directory)
    name = "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    return {f"step/{name}": torch.load(step / name)}


def megatron_ranks(directory: Path) -> dict[str, Any]:
    job = Run(tensor=2, layers=(1,), groups=2, fused=True)
    job.save(directory, lambda content: content.update(args=vars(content["args"])))
    content = job.content(1, 2, 1, 0, 0)
    return {"iter_0000007/mp_rank_01/model_optim_rng.pt": {**content, "args": vars(content["args"])}}


# Below which keys values change; a map, and what is beside it
BELOW: dict[str, list[tuple[Any, ...]]] = {
    "tensor-parallel": [("param_shapes",), ("universal_checkpoint_info",), ("module", "mask")],
    "megatron-ranks": [
        ("args",),
        ("iteration",),
        ("model", "decoder.final_layernorm.weight"),
        ("optimizer", "fp32_from_fp16_params"),
        ("optimizer", "optimizer", "param_groups"),
    ],
}
# A function that saves the files and returns those to change, and how many changed checkpoints at least are refused
CHANGED: dict[str, tuple[Callable[[Path], dict[str, Any]], int]] = {
    "zero-2": (all_of(test_deepspeed._old_files(2)), 80),
    "zero-3": (all_of(test_deepspeed._old_files(3)), 80),
    "universal": (all_of(test_deepspeed_universal._files()), 80),
    "universal-of-zero-3": (all_of(test_deepspeed_universal._files(flat=True)), 80),
    "tensor-parallel": (tensor_parallel, 200),
    "experts": (experts, 40),
    "megatron-ranks": (megatron_ranks, 60),
}


@pytest.mark.parametrize("name", CHANGED)
def test_whatever_the_files_hold_is_read_or_refused(name: str, tmp_path: Path) -> None:
    make, least = CHANGED[name]
    assert refusals(make(tmp_path), tmp_path, seed=len(name), below=BELOW.get(name, [()])) > least
