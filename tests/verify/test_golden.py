"""Checkpoints real FSDP wrote with old torch versions: compared with the truth saved beside them, and verified."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import fsdpckpt
from fsdpckpt.errors import SourceUnsupportedError

GOLDEN = Path(__file__).parents[1] / "golden"


@pytest.mark.parametrize(
    ("directory", "model", "optimizer"),
    [
        ("torch-2.4/f2_default", "ckpt", "ckpt"),
        ("torch-2.4/f2_plain", "ckpt", "ckpt"),  # ids, matched with the truth's names through the groups
        ("torch-2.4/f1_orig_sh_dt_dcp", "model", "optim"),
        ("torch-2.4/f1_orig_full", "model.pt", "optim.pt"),
        ("torch-2.1/f1_flat_full", "model.pt", "optim.pt"),
    ],
)
def test_diff_and_verify_agree_with_what_pytorch_holds(directory: str, model: str, optimizer: str) -> None:
    truth = GOLDEN / directory / "truth" / "full.pt"
    for part, section in ((model, "model"), (optimizer, "optim")):
        source = GOLDEN / directory / part
        result = fsdpckpt.diff(source, truth, only=section)
        states = [entry for entry in result.entries if "param_groups" not in entry.key]
        assert states
        assert [entry for entry in states if entry.sigil != "="] == []
        checked = fsdpckpt.verify(source, digests=True)
        assert checked.problems == ()
        assert checked.records > 0


@pytest.mark.parametrize("name", ["full_old.pt", "full_old_rekeyed_ids.pt"])
def test_states_that_fsdp1_overwrote_on_cpu_are_named_for_every_parameter(name: str, tmp_path: Path) -> None:
    source = GOLDEN / "torch-2.4" / "f1_orig_full" / name
    result = [problem for problem in fsdpckpt.verify(source).problems if problem.kind == "aliased-states"]
    params = torch.load(source, weights_only=True)["param_groups"][0]["params"]
    assert sorted(problem.key or "" for problem in result) == sorted(f"{param}.exp_avg" for param in params)
    assert [problem.kind for problem in fsdpckpt.inspect(source).checkpoint.problems] == ["aliased-states"] * len(
        params
    )
    with pytest.raises(SourceUnsupportedError) as raised:
        fsdpckpt.convert(source, tmp_path / "out.pt", to="full")
    assert len(raised.value.details) == len(params)
    assert list(tmp_path.iterdir()) == []
