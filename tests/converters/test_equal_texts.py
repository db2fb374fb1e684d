"""Keys that are different and have the same text, as 0 and "0": kept apart, or refused where keys are only text."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import fsdpckpt
from fsdpckpt.converters import check
from fsdpckpt.errors import InternalError, SourceUnsupportedError
from tests.converters.jobs import RANK_FILES, converted, messages, notes, refused, save
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
def test_they_are_kept_apart_or_refused(root: dict[str, Any], key: str) -> None:
    root = {"model": {"w": torch.ones(3)}, **root}
    assert_equal(converted(save(root), "same.pt"), root, "root")
    words = "several entries would get the same key"
    assert refused(SourceUnsupportedError, words, "source.pt", "dcp", container="dcp").key == key


def test_groups_that_list_an_id_and_its_text_are_kept_apart_in_rank_files() -> None:
    root = {
        "model": {"w": torch.ones(4), "v": torch.ones(4)},
        "optimizer": {
            "state": {key: {"a": torch.rand(4)} for key in (0, 1, "0", "1")},
            "param_groups": [{"params": [0, 1, "0", "1"], "lr": 0.1}],
        },
    }
    fsdpckpt.convert(save(root), "ranks", **RANK_FILES, world_size=2, buffers=("none",))
    assert_equal(converted("ranks", "back.pt", to="full"), root, "root")


def test_full_verification_compares_both_and_records_the_digest_of_neither(monkeypatch: pytest.MonkeyPatch) -> None:
    """A recorded digest is found by the text of its key."""
    state = {0: {"a": torch.rand(3)}, "0": {"a": torch.rand(3)}}
    save({"model": {"w": torch.ones(3)}, "optimizer": {"state": state, "param_groups": GROUPS}})
    options: dict[str, Any] = {**RANK_FILES, "world_size": 2, "verify": "full"}
    fsdpckpt.convert("source.pt", "ranks", **options)
    found = fsdpckpt.verify("ranks", digests=True)
    assert [problem.kind for problem in found.problems] == ["state"]  # "0" is in no param group
    compared = []

    def only_the_first_differs(*sides: Any, **_: object) -> int | None:
        compared.append(sides)
        return 0 if len(compared) == 2 else None  # after the model's tensor

    monkeypatch.setattr(check, "first_difference", only_the_first_differs)
    error = refused(InternalError, "", "source.pt", "again", **options)
    assert len(compared) == 3
    assert error.details == ("optim 0.a 1 differs from the source at element 0",)


@pytest.mark.parametrize(
    "root",
    [
        {"model": {"w": torch.randn(3, 5), 7: 5}},
        {"model": {"w": torch.randn(3, 5), 7: torch.randn(4)}},
        {"model": {"w": torch.randn(3, 5)}, "optim": {"state": {"w": {7: torch.randn(3, 5)}}, "param_groups": GROUPS}},
        {"state": {0: {7: torch.randn(3, 5), "exp_avg": torch.randn(3, 5)}}, "param_groups": GROUPS},
    ],
)
def test_keys_become_text_as_in_a_dcp_directory_of_pytorch(root: dict[str, Any]) -> None:
    report = fsdpckpt.convert(save(root), "dcp", container="dcp", verify="full")
    assert messages(report, "becomes the text '7'") or messages(report, "7 of")
    dcp.save(root, checkpoint_id="expected", no_dist=True)
    for directory in ("dcp", "expected"):
        dcp_to_torch_save(directory, f"{directory}.pt")
    assert_equal(torch.load("dcp.pt"), torch.load("expected.pt"), "root")


def test_many_keys_that_become_text_are_one_note() -> None:
    extra = {"queue": {number: {"at": number} for number in range(40)}, "more": {1.5: 3}}
    save({"model": {"w": torch.randn(3, 5)}, **extra})
    (note,) = notes(fsdpckpt.convert("source.pt", "dcp", container="dcp"), "renamed")
    assert note.message.startswith("41 keys that are not text become text: 0, 1, 2") and "1.5 of more" in note.message
    assert len(note.keys) == 41 and note.keys[-1] == "more.1.5"
