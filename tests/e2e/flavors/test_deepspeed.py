"""DeepSpeed itself goes on from an FSDP2 checkpoint that became a universal one. ``tests/writers/test_universal.py``
proves without DeepSpeed that the files are those that it was seen to load."""

from __future__ import annotations

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
