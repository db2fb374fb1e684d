"""Whole screens of 80 columns, as a user sees them: read them aloud before you change one."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import fsdpckpt
from tests.cli.conftest import Run, at_step

Screen = Callable[..., str]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two steps of one run, and a run: two checkpoints that are whole, one without a file, an empty one, and links."""
    top = tmp_path_factory.mktemp("made")
    torch.save(at_step(100), top / "a.pt")
    torch.save(at_step(250), top / "b.pt")
    run = top / "run"
    sharded: dict[str, Any] = {"to": "sharded", "key_type": "name"}
    fsdpckpt.convert(top / "a.pt", run / "checkpoint-900", world_size=2, **sharded)
    fsdpckpt.convert(top / "b.pt", run / "checkpoint-1000", world_size=4, **sharded)
    ranks = {**sharded, "container": "torch", "buffers": ["none"]}
    fsdpckpt.convert(top / "b.pt", run / "checkpoint-1100", world_size=4, **ranks)
    (run / "checkpoint-1100" / "optim_world_size_4_rank_2.pt").unlink()
    (run / "checkpoint-1200").mkdir()
    (run / "latest").write_text("checkpoint-1000\n")
    (run / "last").symlink_to("checkpoint-1000")
    return top


@pytest.fixture(autouse=True)
def here(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(made)


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


def test_inspect_of_a_run_is_a_table_in_natural_order(screen: Screen) -> None:
    assert (
        screen("inspect", "run")
        == """\
run: 4 checkpoints (model + optim + extra, sharded, dcp)
step  checkpoint          bytes  ranks  complete
 900  checkpoint-900   49.4 KiB      2  yes
1000  checkpoint-1000  83.5 KiB      4  yes
1100  checkpoint-1100         -      -  no
1200  checkpoint-1200         -      -  no
checkpoint-1100: 1 rank file is missing: optim_world_size_4_rank_2.pt
checkpoint-1200: empty: its save did not finish, or it was not copied
last -> checkpoint-1000
latest -> checkpoint-1000
newest: checkpoint-1200, which is not complete
newest complete: checkpoint-1000
next: fsdpckpt inspect run/checkpoint-1000
exit 0
"""
    )


def test_a_run_in_json_is_the_same_table_and_other_commands_ask_for_one(run: Run) -> None:
    document = json.loads(run("inspect", "run", "--json").out)
    rows = [(row["step"], row["name"], row["world_size"], row["complete"]) for row in document["checkpoints"]]
    assert rows == [
        (900, "checkpoint-900", 2, True),
        (1000, "checkpoint-1000", 4, True),
        (1100, "checkpoint-1100", None, False),
        (1200, "checkpoint-1200", None, False),
    ]
    assert (document["newest"], document["proposed"]) == ("checkpoint-1200", "checkpoint-1000")
    assert document["pointers"] == {"latest": "checkpoint-1000", "last": "checkpoint-1000"}
    for command in (
        ("inspect", "run", "--stats"),
        ("inspect", "run", "--names-only"),
        ("verify", "run"),
        ("convert", "run", "x.pt"),
    ):
        done = run(*command)
        assert (done.code, done.out) == (4, ""), command
        assert "give the path of one of them, for example run/checkpoint-1000" in done.err


def test_inspect_of_an_incomplete_checkpoint_shows_what_is_left(screen: Screen) -> None:
    assert (
        screen("inspect", "run/checkpoint-1100")
        == """\
files                                   ranks 0 to 3
extra_state_world_size_4_rank_*.pt      ++++
model_world_size_4_rank_*.pt            ++++
optim_world_size_4_rank_*.pt            ++-+
                                        + there  - missing  ! damaged
missing: optim_world_size_4_rank_2.pt
can be read: model (7 tensors, 56 elements, 224 B, float32)
error: source incomplete: run/checkpoint-1100: 1 rank file is missing
  - optim_world_size_4_rank_2.pt
why:  the save or the copy did not finish, or these ranks wrote to the disks of
      other machines
next: copy the files of all ranks into one directory; or, the model can be
      converted without the rest:
  fsdpckpt convert run/checkpoint-1100 DST --only model
exit 3
"""
    )


def test_an_option_in_a_warning_is_not_taken_apart_where_the_line_breaks(screen: Screen) -> None:
    shown = screen("convert", "a.pt", "trainer", "--flavor", "trainer", "--world-size", "2", "--dry-run")
    assert "add --no-weight-decay" in shown and "ufdd" not in shown and "no_weight_decay" not in shown


def test_a_command_to_copy_is_one_line_on_a_narrow_terminal(run: Run, narrow: None) -> None:
    done = run("verify", "a.pt", "--for", "accelerate", "--world-size", "2")
    (line,) = (line for line in done.err.splitlines() if line.startswith("next: "))
    assert line == "next: fsdpckpt convert a.pt a-for-accelerate --world-size 2 --flavor accelerate"


def test_units_of_repeated_layers_share_a_row(screen: Screen) -> None:
    flat = ("--to", "flattened", "--world-size", "2", "--no-use-orig-params", "--unit", "layers.*", "--key-type", "id")
    assert screen("convert", "a.pt", "flat", *flat, "-q").endswith("exit 0\n")
    lines = screen("units", "--from", "flat").splitlines()
    assert lines[2:5] == [
        "flat parameter                 strategy    parameters  elements  dtype",
        "_flat_param                    full-shard           1         8  float32",
        "layers.{0..2}._flat_param  x3  full-shard           2        16  float32",
    ]


def test_formats_fit_a_narrow_terminal(screen: Screen) -> None:
    lines = screen("formats").splitlines()
    assert lines[0].split() == ["name", "what", "it", "is", "written", "as"]
    assert any(line.startswith("verl ") and line.endswith("sharded, flattened") for line in lines)


def test_statistics_show_the_step_once(screen: Screen) -> None:
    rows = [line.split() for line in screen("inspect", "a.pt", "--stats").splitlines()]
    assert [row[:4] for row in rows if row and row[0].endswith(".step")] == [["*.step", "x7", "100", "100"]]


def test_convert_and_verify_say_one_size(run: Run, tmp_path: Path) -> None:
    done = run("convert", "a.pt", tmp_path / "out", "--to", "sharded", "--world-size", "2")
    said = re.search(r"28 tensors, ([\d.]+ \w+); verified: structure\n  4 files written,", done.out)
    assert said is not None, done.out
    assert f"28 tensors, {said[1]}, " in run("verify", tmp_path / "out").err
