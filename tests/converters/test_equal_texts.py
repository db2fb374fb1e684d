"""Keys that are different and have the same text, as 0 and "0": kept apart, or refused where keys are only text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

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
