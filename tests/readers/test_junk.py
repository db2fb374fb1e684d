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
from tests.readers.contents import opened
from tests.readers.junk import refusals, save
from tests.readers.megatron_jobs import Run


def all_of(files: dict[str, Any]) -> Callable[[Path], dict[str, Any]]:
    return lambda directory: (save(files, directory), files)[1]


def tensor_parallel(directory: Path) -> dict[str, Any]:
    """Every value of a map, and of what is beside it."""
    job = test_deepspeed_parallel.Job(2, 1, 1, only=["norm"])
    save(job.files, directory)
    name = "mp_rank_01_model_states.pt"
    content = {key: job.files[name][key] for key in ("param_shapes", "universal_checkpoint_info")}
    return {name: {**content, "module": {"mask": torch.ones(2)}}}


def experts(directory: Path) -> dict[str, Any]:
    step = test_deepspeed_experts.plain_step(directory)
    name = "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    states = torch.load(step / name)["optimizer_state_dict"]
    base = {**states["base_optimizer_state"], "state": {}}
    return {f"step/{name}": {"optimizer_state_dict": {**states, "base_optimizer_state": base}}}


def megatron_ranks(directory: Path) -> dict[str, Any]:
    job = Run(tensor=2, layers=(2,), groups=2, fused=True)
    job.save(directory)
    content = job.content(1, 2, 1, 0, 0)
    content["args"] = vars(content["args"])
    content["model"] = {name: value for name, value in content["model"].items() if "final" in name}
    content["optimizer"]["optimizer"]["state"] = {}
    return {"iter_0000007/mp_rank_01/model_optim_rng.pt": content}


# A function that saves the files and returns those to change, and how many changed checkpoints at least are refused
CHANGED: dict[str, tuple[Callable[[Path], dict[str, Any]], int]] = {
    "zero-2": (all_of(test_deepspeed._old_files(2)), 80),
    "zero-3": (all_of(test_deepspeed._old_files(3)), 80),
    "universal": (all_of(test_deepspeed_universal._files()), 80),
    "universal-of-zero-3": (all_of(test_deepspeed_universal._files(flat=True)), 80),
    "tensor-parallel": (tensor_parallel, 30),
    "experts": (experts, 40),
    "megatron-ranks": (megatron_ranks, 60),
}


@pytest.mark.parametrize("name", CHANGED)
def test_whatever_the_files_hold_is_read_or_refused(name: str, tmp_path: Path) -> None:
    make, least = CHANGED[name]
    changed = make(tmp_path)
    assert opened(tmp_path).model is not None
    assert refusals(changed, tmp_path, seed=len(name)) > least
