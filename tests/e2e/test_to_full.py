"""Every form PyTorch saves, at every world size, becomes one torch file that holds what PyTorch had, bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import fsdpckpt
from tests.e2e.conversions import converted, expected, load_full, require_truth
from tests.oracle.compare import differences
from tests.oracle.forms import FORMS, WORLDS, Form, form
from tests.oracle.session import Oracle
from tests.oracle.toy import adamw, seeded_model

CASES = [
    pytest.param(entry, world, id=f"{entry.path}-of-{world}")
    for world in WORLDS
    for entry in FORMS
    if world in entry.worlds
]


@pytest.mark.parametrize(("entry", "world"), CASES)
def test_a_checkpoint_becomes_the_full_state_that_pytorch_had(
    oracle: Oracle, tmp_path: Path, entry: Form, world: int
) -> None:
    verify = "full" if world == 4 else "structure"
    report = converted(oracle, entry, world, tmp_path / "full.pt", to="full", verify=verify)
    assert report.verified == verify
    found = require_truth(tmp_path / "full.pt", expected(oracle, entry, world), grouped=entry.grouped)
    if entry.path == "f2_dcp" and world == 3:  # what is neither model nor optimizer comes along
        assert differences(found["progress"], {"step": 3, "seen": torch.tensor(36)}) == []


def test_ids_stay_integers_so_that_a_plain_optimizer_takes_its_state(oracle: Oracle, tmp_path: Path) -> None:
    converted(oracle, form("f2_dcp_ids"), 2, tmp_path / "full.pt", to="full")
    content = load_full(tmp_path / "full.pt")
    model = seeded_model(seed=9)
    optimizer = adamw(model)
    model.load_state_dict(content["model"])
    optimizer.load_state_dict(content["optimizer"])
    truth = expected(oracle, form("f2_dcp_ids"), 2)
    assert differences({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, truth) == []


@pytest.mark.parametrize(("section", "key"), [("model", "model"), ("optim", "optimizer")])
def test_one_section_alone_is_written_without_a_wrapper(oracle: Oracle, tmp_path: Path, section: str, key: str) -> None:
    converted(oracle, form("f1_ranks"), 3, tmp_path / "part.pt", to="full", only=section)
    assert differences(load_full(tmp_path / "part.pt"), expected(oracle, form("f1_ranks"), 3)[key]) == []


def test_tied_weights_of_a_full_file_still_share_one_storage(tmp_path: Path) -> None:
    weight = torch.randn(5, 3)
    tied = {"a": weight, "b": weight, "c": weight[1:3]}
    torch.save({"model": tied}, tmp_path / "tied.pt")
    fsdpckpt.convert(tmp_path / "tied.pt", tmp_path / "again.pt", to="full")
    again = load_full(tmp_path / "again.pt")["model"]
    assert again["a"].data_ptr() == again["b"].data_ptr()
    assert differences(again, tied) == []
