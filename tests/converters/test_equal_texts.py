"""Keys that are different and have the same text, as 0 and "0": kept apart, or refused where keys are only text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import fsdpckpt
from fsdpckpt.errors import SourceUnsupportedError
from tests.writers.meshes import assert_equal

ONES, ZEROS = torch.ones(3), torch.zeros(3)
GROUPS = [{"params": [0], "lr": 0.1}]


@pytest.mark.parametrize(
    ("root", "key"),
    [
        ({"optimizer": {"state": {0: {"a": ONES}, "0": {"a": ZEROS}}, "param_groups": GROUPS}}, "optimizer.state.0.a"),
        ({"optimizer": {"state": {0: {"a": ONES}, "0": {"b": ZEROS}}, "param_groups": GROUPS}}, "optimizer.state.0"),
        ({"seen": {1: {"a": ONES}, "1": {"b": ZEROS}}}, "seen.1"),
        ({"seen": {"1": ONES, 1: {"b": ZEROS}}}, "seen.1"),
        ({"None": ONES, None: {"b": ZEROS}}, "None"),
    ],
)
def test_they_are_kept_apart_or_refused(root: dict[str, Any], key: str, tmp_path: Path) -> None:
    root = {"model": {"w": torch.ones(3)}, **root}
    torch.save(root, tmp_path / "source.pt")
    fsdpckpt.convert(tmp_path / "source.pt", tmp_path / "same.pt", to="full")
    assert_equal(torch.load(tmp_path / "same.pt"), root, "root")
    with pytest.raises(SourceUnsupportedError, match="several entries would get the same key") as error:
        fsdpckpt.convert(tmp_path / "source.pt", tmp_path / "dcp", container="dcp")
    assert error.value.key == key


@pytest.mark.parametrize(
    "root",
    [
        {"model": {"w": torch.randn(3, 5), 7: 5}},
        {"model": {"w": torch.randn(3, 5), 7: torch.randn(4)}},
        {"model": {"w": torch.randn(3, 5)}, "optim": {"state": {"w": {7: torch.randn(3, 5)}}, "param_groups": GROUPS}},
        {"state": {0: {7: torch.randn(3, 5), "exp_avg": torch.randn(3, 5)}}, "param_groups": GROUPS},
    ],
)
def test_keys_become_text_as_in_a_dcp_directory_of_pytorch(root: dict[str, Any], tmp_path: Path) -> None:
    torch.save(root, tmp_path / "source.pt")
    report = fsdpckpt.convert(tmp_path / "source.pt", tmp_path / "dcp", container="dcp", verify="full")
    assert any("becomes the text '7'" in str(note) for note in report.notes)
    dcp.save(root, checkpoint_id=tmp_path / "expected", no_dist=True)
    for directory in ("dcp", "expected"):
        dcp_to_torch_save(tmp_path / directory, tmp_path / f"{directory}.pt")
    assert_equal(torch.load(tmp_path / "dcp.pt"), torch.load(tmp_path / "expected.pt"), "root")
