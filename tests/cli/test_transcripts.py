"""Whole screens of 80 columns, as a user sees them: read them aloud before you change one."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.cli.conftest import Run, at_step

Screen = Callable[..., str]


@pytest.fixture
def steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory to be in, with two steps of one run."""
    monkeypatch.chdir(tmp_path)
    torch.save(at_step(100), "a.pt")
    torch.save(at_step(250), "b.pt")
    return tmp_path


@pytest.mark.usefixtures("steps")
def test_diff_of_two_steps_begins_with_what_matters(screen: Screen) -> None:
    assert (
        screen("diff", "a.pt", "b.pt")
        == """\
A  a.pt  step 100  lr 0.001
B  b.pt  step 250  lr 0.0004

                              weights     exp_avg  exp_avg_sq
module                      max  rel.   max  rel.   max  rel.
embed                      0.15  0.14  0.75  0.75  0.38  0.75
layers.{0..2}.attn.q_proj  0.15  0.14  0.75  0.75  0.38  0.75
layers.{0..2}.norm         0.15  0.14  0.75  0.75  0.38  0.75
max: the largest |A - B|; rel.: the norm of A - B divided by the norm of A
weights changed most in embed.weight: by 0.15
exp_avg changed most in embed.weight: by 0.75
exp_avg_sq changed most in embed.weight: by 0.375

* optim param_groups.0.lr  0.001 vs 0.0004
* extra scheduler.last_epoch  100 vs 250
* extra rng.python.1  40 of 40 values differ
4 same, 70 differ, 0 only in a.pt, 0 only in b.pt
exit 1
"""
    )


@pytest.mark.usefixtures("steps")
def test_json_of_diff_has_numbers_and_one_entry_for_a_random_state(run: Run) -> None:
    document = json.loads(run("diff", "a.pt", "b.pt", "--json").out)
    assert document["steps"] == [[{"value": 100.0, "count": 7}], [{"value": 250.0, "count": 7}]]
    assert document["learning_rates"] == [[{"value": 0.001, "count": 1}], [{"value": 0.0004, "count": 1}]]
    of = {entry["key"]: entry for entry in document["entries"]}
    change = of["embed.weight"]["change"]
    assert (change["elements"], change["of"]) == (8, 8)
    assert change["relative"] == pytest.approx(0.15 / 1.1, rel=1e-5)
    assert of["rng.python.1"]["detail"] == "40 of 40 values differ"
    assert "rng.python.1.0" not in of
    everything = json.loads(run("diff", "a.pt", "b.pt", "--json", "--all").out)
    assert {f"rng.python.1.{n}" for n in range(40)} < {entry["key"] for entry in everything["entries"]}
    assert everything["counts"] == document["counts"], "joining entries changes no count"


@pytest.fixture
def run_of_steps(run: Run, steps: Path) -> Path:
    """A run: two checkpoints that are whole, one that lacks a file, one that is empty, and what names the newest."""
    sharded = ("--to", "sharded", "--key-type", "name", "-q")
    run("convert", "a.pt", "run/checkpoint-900", "--world-size", "2", *sharded)
    run("convert", "b.pt", "run/checkpoint-1000", "--world-size", "4", *sharded)
    ranks = ("--world-size", "4", "--container", "torch", "--buffers", "none")
    assert run("convert", "b.pt", "run/checkpoint-1100", *sharded, *ranks).code == 0
    (steps / "run" / "checkpoint-1100" / "optim_world_size_4_rank_2.pt").unlink()
    (steps / "run" / "checkpoint-1200").mkdir()
    (steps / "run" / "latest").write_text("checkpoint-1000\n")
    (steps / "run" / "last").symlink_to("checkpoint-1000")
    return steps


def test_inspect_of_a_run_is_a_table_in_natural_order(run_of_steps: Path, screen: Screen) -> None:
    assert (
        screen("inspect", "run")
        == """\
"""
    )


def test_a_run_in_json_is_the_same_table_and_other_commands_ask_for_one(run_of_steps: Path, run: Run) -> None:
    document = json.loads(run("inspect", "run", "--json").out)
    rows = [(row["step"], row["name"], row["world_size"], row["complete"]) for row in document["checkpoints"]]
    assert rows == [
        (900, "checkpoint-900", 2, True),
        (1000, "checkpoint-1000", 4, True),
        (1100, "checkpoint-1100", None, False),
        (1200, "checkpoint-1200", None, False),
    ]
    assert document["newest"] == "checkpoint-1000"
    assert document["pointers"] == {"latest": "checkpoint-1000", "last": "checkpoint-1000"}
    for command in (
        ("inspect", "run", "--stats"),
        ("inspect", "run", "--names-only"),
        ("verify", "run"),
        ("convert", "run", "x.pt"),
    ):
        done = run(*command)
        assert (done.code, done.out) == (4, ""), command
        assert "name the one to read, for example run/checkpoint-1000" in done.err


def test_inspect_of_an_incomplete_checkpoint_shows_what_is_left(run_of_steps: Path, screen: Screen) -> None:
    assert (
        screen("inspect", "run/checkpoint-1100")
        == """\
"""
    )
