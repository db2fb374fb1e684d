"""A report says how to load DST where it is, not where it was put together."""

from __future__ import annotations

import uuid
from pathlib import Path

import pytest
import torch

import fsdpckpt
from tests.cli.conftest import at_step

pytestmark = pytest.mark.filterwarnings("ignore::fsdpckpt.FsdpckptWarning")


@pytest.fixture
def named(tmp_path: Path) -> Path:
    """A full checkpoint whose optimizer is keyed by name, which every framework's form can hold."""
    torch.save(at_step(3), tmp_path / "a.pt")
    fsdpckpt.convert(tmp_path / "a.pt", tmp_path / "named", to="sharded", world_size=2, key_type="name")
    return tmp_path / "named"


@pytest.mark.parametrize(
    ("flavor", "said"),
    [
        ("accelerate", 'accelerator.load_state("{}")'),
        ("fabric", 'fabric.load("{}", state)'),
        ("lightning", 'trainer.fit(model, ckpt_path="{}")'),
    ],
)
def test_a_target_in_a_store_is_copied_before_it_is_loaded(named: Path, tmp_path: Path, flavor: str, said: str) -> None:
    url = f"memory://{uuid.uuid4()}/on-3"
    staged = fsdpckpt.convert(named, url, staging=tmp_path, flavor=flavor, world_size=3)
    assert staged.target == url
    assert staged.loads == f"{said.format('COPY')}, where COPY is a copy of {url} on disk"
    local = fsdpckpt.convert(named, tmp_path / "on-3", flavor=flavor, world_size=3)
    assert local.loads == said.format(tmp_path / "on-3")


def test_a_plain_target_in_a_store_has_no_words_of_a_framework(named: Path, tmp_path: Path) -> None:
    assert not fsdpckpt.convert(named, f"memory://{uuid.uuid4()}/plain", staging=tmp_path).loads
