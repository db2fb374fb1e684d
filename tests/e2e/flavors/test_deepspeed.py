"""DeepSpeed itself goes on from an FSDP2 checkpoint that became a universal one, and FSDP2 from one of DeepSpeed.
``tests/writers/test_universal.py`` and ``tests/readers/test_deepspeed.py`` prove it without it, on kept files."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import pytest

import fsdpckpt
from tests.oracle.launch import torchrun

pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        find_spec("deepspeed") is None,
        reason="DeepSpeed is not installed: DS_BUILD_OPS=0 pip install deepspeed==0.19.8",
    ),
]
RESUME = "tests.golden.deepspeed.resume"
ONWARD = "tests.golden.deepspeed.onward"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``dcp`` and ``truth.pt`` of FSDP2 on 2 ranks, and ``universal``."""
    directory = tmp_path_factory.mktemp("fsdp2")
    torchrun(RESUME, "train", str(directory), world_size=2, limit=300)
    fsdpckpt.convert(str(directory / "dcp"), str(directory / "universal"), flavor="deepspeed-universal")
    return directory


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_weights_states_and_next_losses_are_those_of_fsdp2(stage: int, trained: Path) -> None:
    said = torchrun(RESUME, "load", str(trained / "universal"), str(trained), str(stage), world_size=2, limit=300)
    assert said.count("every weight and state is equal") == 2


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize(("before", "after", "bf16"), [(2, 4, False), (4, 2, False), (4, 3, True)])
def test_fsdp2_goes_on_from_deepspeed_on_another_number_of_ranks(
    stage: int, before: int, after: int, bf16: bool, tmp_path: Path
) -> None:
    """Two param groups, a frozen parameter and a tied one. ZeRO 3 has a linear layer of its own, which rounds bf16 once
    more than PyTorch's."""
    zero = {"stage": stage, "memory_efficient_linear": False}
    config = json.dumps({"bf16": {"enabled": bf16}, "zero_optimization": zero})
    torchrun(ONWARD, "train", str(tmp_path / "run"), config, world_size=before, limit=300)
    fsdpckpt.convert(str(tmp_path / "run"), str(tmp_path / "dcp"), to="sharded", world_size=after)
    said = torchrun(ONWARD, "resume", str(tmp_path / "run"), str(tmp_path / "dcp"), world_size=after, limit=300)
    assert said.count("every loss is equal") == after
