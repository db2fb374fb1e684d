"""Every form PyTorch saves, at every world size, becomes one torch file that holds what PyTorch had, bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fsdpckpt.ir.checkpoint import Layout, Section
from fsdpckpt.options import ConvertOptions, VerifyLevel
from tests.e2e.conversions import converted, expected, load_full, same_as_truth
from tests.oracle.compare import differences
from tests.oracle.forms import FORMS, WORLDS, Form, form
from tests.oracle.session import Oracle

CASES = [
    pytest.param(entry, world, id=f"{entry.path}-of-{world}")
    for world in WORLDS
    for entry in FORMS
    if world in entry.worlds
]
FULL = ConvertOptions(to=Layout.FULL)


@pytest.mark.parametrize(("entry", "world"), CASES)
def test_a_checkpoint_becomes_the_full_state_that_pytorch_had(
    oracle: Oracle, tmp_path: Path, entry: Form, world: int
) -> None:
    converted(oracle, entry, world, tmp_path / "full.pt", FULL)
    found, truth = load_full(tmp_path / "full.pt"), expected(oracle, entry, world)
    assert same_as_truth(found, truth, grouped=entry.grouped) == []


def test_ids_stay_integers_so_that_a_plain_optimizer_takes_its_state(oracle: Oracle, tmp_path: Path) -> None:
    from tests.oracle.toy import adamw, seeded_model

    converted(oracle, form("f2_dcp_ids"), 2, tmp_path / "full.pt", FULL)
    content = load_full(tmp_path / "full.pt")
    model = seeded_model(seed=9)
    optimizer = adamw(model)
    model.load_state_dict(content["model"])
    optimizer.load_state_dict(content["optimizer"])
    truth = expected(oracle, form("f2_dcp_ids"), 2)
    assert differences(optimizer.state_dict(), truth["optimizer"]) == []
    assert differences(model.state_dict(), truth["model"]) == []


def test_what_is_neither_model_nor_optimizer_comes_along(oracle: Oracle, tmp_path: Path) -> None:
    converted(oracle, form("f2_dcp"), 3, tmp_path / "full.pt", FULL)
    assert differences(load_full(tmp_path / "full.pt")["progress"], {"step": 3, "seen": torch.tensor(36)}) == []


@pytest.mark.parametrize("section", [Section.MODEL, Section.OPTIM])
def test_one_section_alone_is_written_without_a_wrapper(oracle: Oracle, tmp_path: Path, section: Section) -> None:
    converted(oracle, form("f1_ranks"), 3, tmp_path / "part.pt", ConvertOptions(to=Layout.FULL, only=section))
    truth = expected(oracle, form("f1_ranks"), 3)
    wanted = truth["model" if section is Section.MODEL else "optimizer"]
    assert differences(load_full(tmp_path / "part.pt"), wanted) == []


@pytest.mark.parametrize("path", ["f1_dcp", "f1_ranks", "f2_dcp", "f2_ranks_ids", "h1_ranks", "tp_ranks"])
def test_a_full_verification_finds_nothing_wrong(oracle: Oracle, tmp_path: Path, path: str) -> None:
    report = converted(
        oracle, form(path), 4, tmp_path / "full.pt", ConvertOptions(to=Layout.FULL, verify=VerifyLevel.FULL)
    )
    assert report.verified == "full"
    assert same_as_truth(load_full(tmp_path / "full.pt"), expected(oracle, form(path), 4)) == []


def test_tied_weights_of_a_full_file_still_share_one_storage(oracle: Oracle, tmp_path: Path) -> None:
    weight = torch.randn(5, 3)
    torch.save({"model": {"a": weight, "b": weight, "c": weight[1:3]}}, tmp_path / "tied.pt")
    from fsdpckpt.comm.protocol import Solo
    from fsdpckpt.converters.pipeline import convert
    from fsdpckpt.progress import NoProgress

    convert(Solo(), str(tmp_path / "tied.pt"), str(tmp_path / "again.pt"), FULL, NoProgress())
    again = load_full(tmp_path / "again.pt")["model"]
    assert again["a"].data_ptr() == again["b"].data_ptr()
    assert differences(again, {"a": weight, "b": weight, "c": weight[1:3]}) == []
