"""What is left of a checkpoint that cannot be read whole."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fsdpckpt.describe import describe_incomplete
from fsdpckpt.errors import FsdpckptError, SourceCorruptError, SourceIncompleteError
from fsdpckpt.ir.checkpoint import Section
from fsdpckpt.storage.sources import Sources


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    torch.save({"w": torch.randn(3)}, tmp_path / "model.pt")
    (tmp_path / "optim.pt").write_bytes(b"")
    return tmp_path


def test_a_section_beside_a_missing_or_damaged_file_can_be_read(checkpoint: Path) -> None:
    error = SourceIncompleteError("a file is missing", file=str(checkpoint))
    with Sources() as sources:
        left = describe_incomplete(str(checkpoint), error, sources, ())
    assert left is not None and list(left.readable) == [Section.MODEL]


def test_of_files_that_contradict_each_other_none_is_known_to_be_right(checkpoint: Path) -> None:
    state = {0: {"exp_avg": torch.randn(3)}}
    torch.save({"state": state, "param_groups": [{"lr": 0.1, "params": [0]}]}, checkpoint / "optim.pt")
    error: FsdpckptError = SourceCorruptError("two files contradict each other", file=str(checkpoint))
    with Sources() as sources:
        left = describe_incomplete(str(checkpoint), error, sources, ())
    assert left is None
