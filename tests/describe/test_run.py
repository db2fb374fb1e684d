"""A run is a table: whichever way a trainer lays out its checkpoints, and whatever became of single ones."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import fsdpckpt
from fsdpckpt.api import inspect_run
from fsdpckpt.describe import Run
from fsdpckpt.describe.run import step_of
from fsdpckpt.errors import SeveralCheckpointsError, SourceCorruptError, SourceIncompleteError


def described(run: Path) -> Run:
    with pytest.raises(SeveralCheckpointsError) as raised:
        fsdpckpt.inspect(run)
    return inspect_run(run, raised.value)


def saved(path: Path, value: float = 1.0) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save({"model": {"layer.weight": torch.full((3, 2), value)}, "epoch": 1}, path)


def test_files_of_one_directory_are_a_run_and_a_link_is_what_it_leads_to(tmp_path: Path) -> None:
    for step in (900, 1000, 50):
        saved(tmp_path / f"epoch=1-step={step}.ckpt", step)
    (tmp_path / "last.ckpt").symlink_to("epoch=1-step=1000.ckpt")
    run = described(tmp_path)
    assert [(row.step, row.complete, row.sections) for row in run.checkpoints] == [
        (step, True, ("model", "extra")) for step in (50, 900, 1000)
    ]
    assert run.newest == "epoch=1-step=1000.ckpt"
    assert run.pointers == {"last.ckpt": "epoch=1-step=1000.ckpt"}


def test_several_models_of_a_step_are_rows_and_a_number_in_a_file_names_the_newest(tmp_path: Path) -> None:
    for step in (7, 14, 21):
        for part in ("actor", "critic"):
            saved(tmp_path / f"global_step_{step}" / part / "model.pt")
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("14")
    run = described(tmp_path)
    assert [(row.step, row.name.split("/")[1]) for row in run.checkpoints] == [
        (step, part) for step in (7, 14, 21) for part in ("actor", "critic")
    ]
    assert run.newest.startswith("global_step_21/")
    assert run.proposed.startswith("global_step_14/"), "21 may not be complete: the trainer does not name it"
    assert run.pointers == {"latest_checkpointed_iteration.txt": "global_step_14"}


@pytest.mark.parametrize("text", ["checkpoint-1200", "1200", "/elsewhere/checkpoint-1200\n", ""])
def test_a_latest_file_that_leads_nowhere_is_said_and_the_newest_is_proposed(tmp_path: Path, text: str) -> None:
    for step in (900, 1000):
        saved(tmp_path / f"checkpoint-{step}" / "model.pt")
    (tmp_path / "latest").write_text(text)
    run = described(tmp_path)
    (lost,) = run.lost
    assert "names no checkpoint" in lost if not text else "1200, which is not there" in lost
    assert (run.pointers, run.newest, run.proposed) == ({}, "checkpoint-1000", "checkpoint-1000")
    with pytest.raises(SeveralCheckpointsError) as error:
        fsdpckpt.verify(tmp_path)
    assert lost in str(error.value)


def test_a_link_that_leads_nowhere_is_said_if_it_is_one_to_a_checkpoint(tmp_path: Path) -> None:
    for step in (900, 1000):
        saved(tmp_path / f"checkpoint-{step}" / "model.pt")
    (tmp_path / "best").symlink_to("checkpoint-300")
    (tmp_path / "latest").symlink_to("gone")
    (tmp_path / "wandb").symlink_to("/nowhere/wandb")
    (tmp_path / "latest_metrics.json").write_text('{"loss": 2.5}')
    assert described(tmp_path).lost == (
        *("best names checkpoint-300, which is not there", "latest names gone, which is not there"),
    )


def test_a_latest_file_names_what_is_there_although_it_cannot_be_read(tmp_path: Path) -> None:
    for step in (900, 1000):
        saved(tmp_path / f"checkpoint-{step}" / "model.pt")
    (tmp_path / "checkpoint-1100").mkdir()
    (tmp_path / "latest").write_text("checkpoint-1100")
    run = described(tmp_path)
    assert run.lost == () and run.newest == "checkpoint-1100" and run.proposed == "checkpoint-1000"


def test_the_directory_that_a_latest_file_names_may_end_with_a_slash(tmp_path: Path) -> None:
    for step in (900, 1000):
        saved(tmp_path / f"checkpoint-{step}" / "model.pt")
    (tmp_path / "latest").write_text("runs/checkpoint-900/\n")
    run = described(tmp_path)
    assert (run.pointers, run.lost, run.proposed) == ({"latest": "checkpoint-900"}, (), "checkpoint-900")


@pytest.mark.parametrize("form", ["epoch={}-step=50", "ckpt_{}", "gpt-iter={}"])
def test_a_damaged_step_is_a_row_whatever_stands_before_its_number(tmp_path: Path, form: str) -> None:
    for number in (1, 2):
        saved(tmp_path / form.format(number) / "model.pt")
    saved(tmp_path / form.format(3) / "model_world_size_3_rank_0.pt")
    assert [row.complete for row in described(tmp_path).checkpoints] == [True, True, False]


def test_a_damaged_step_is_a_row_and_stops_no_other(tmp_path: Path) -> None:
    for step in (1, 2):
        saved(tmp_path / f"step-{step}" / "model.pt")
    for rank in (0, 2):
        saved(tmp_path / "step-3" / f"model_world_size_3_rank_{rank}.pt")
    (tmp_path / "step-4").mkdir()
    rows = described(tmp_path).checkpoints
    assert [row.complete for row in rows] == [True, True, False, False]
    assert rows[2].problems[0].endswith("model_world_size_3_rank_1.pt")
    assert rows[3].problems[0].startswith("empty")


def test_a_single_damaged_step_is_that_error_and_no_run(tmp_path: Path) -> None:
    saved(tmp_path / "step-3" / "model_world_size_2_rank_0.pt")
    with pytest.raises(SourceIncompleteError, match="step-3"):
        fsdpckpt.inspect(tmp_path)


@pytest.mark.parametrize(
    ("name", "step"),
    [
        ("checkpoint-500", 500),
        ("global_step_7/actor", 7),
        ("epoch=1-step=500.ckpt", 500),
        ("iter_0000014", 14),
        ("epoch_3", 3),
        ("run2/ckpt-9", 9),
        ("final", None),
    ],
)
def test_the_step_is_the_number_after_the_word_for_it(name: str, step: int | None) -> None:
    assert step_of(name) == step


@pytest.mark.parametrize("beside", ["best", "final/actor", "last.ckpt"])
def test_what_is_damaged_beside_the_steps_of_a_run_is_a_row_of_it(tmp_path: Path, beside: str) -> None:
    for step in (900, 1000):
        saved(tmp_path / f"checkpoint-{step}" / "model.pt")
    saved(tmp_path / beside / "model_world_size_2_rank_0.pt")
    run = described(tmp_path)
    assert {row.name: row.complete for row in run.checkpoints} == {
        "checkpoint-900": True,
        "checkpoint-1000": True,
        beside.split("/", maxsplit=1)[0]: False,
    }
    assert (run.newest, run.proposed) == ("checkpoint-1000", "checkpoint-1000")


def test_beside_one_step_what_is_damaged_is_the_error(tmp_path: Path) -> None:
    """It may belong to the step: then nothing else may be read in its place."""
    saved(tmp_path / "checkpoint-900" / "model.pt")
    saved(tmp_path / "best" / "model_world_size_2_rank_0.pt")
    with pytest.raises(SourceIncompleteError):
        fsdpckpt.inspect(tmp_path)


def ranks_saved(directory: Path, ranks: tuple[int, ...] = (0, 1, 2)) -> None:
    """The files of ``ranks`` of 3."""
    directory.mkdir(parents=True)
    for rank in ranks:
        torch.save({"w": torch.full((5, 2), 3.0)}, directory / f"model_world_size_3_rank_{rank}.pt")


def truncated(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:300])


def rows_of(run: Path) -> dict[str, bool]:
    return {row.name: row.complete for row in described(run).checkpoints}


def test_of_checkpoints_that_are_called_anything_the_damaged_ones_are_rows(tmp_path: Path) -> None:
    for name in ("baseline", "no-warmup", "run[2]"):
        ranks_saved(tmp_path / "ranks" / name)
        saved(tmp_path / "deeper" / "of" / name / "model.pt")
        saved(tmp_path / "files" / f"{name}.pt")
    ranks_saved(tmp_path / "ranks" / "tiny", (0, 2))
    ranks_saved(tmp_path / "ranks" / "big", (1,))
    truncated(tmp_path / "deeper" / "of" / "run[2]" / "model.pt")
    truncated(tmp_path / "files" / "no-warmup.pt")
    complete = {"baseline": True, "no-warmup": True, "run[2]": True}
    assert rows_of(tmp_path / "ranks") == {**complete, "big": False, "tiny": False}
    assert rows_of(tmp_path / "files") == {"baseline.pt": True, "no-warmup.pt": False, "run[2].pt": True}
    assert rows_of(tmp_path / "deeper") == {
        **{"of/baseline/model.pt": True, "of/no-warmup/model.pt": True, "of/run[2]": False}
    }
    with pytest.raises(
        SeveralCheckpointsError, match="contains 5 checkpoints, and 2 of them cannot be read"
    ) as several:
        fsdpckpt.verify(tmp_path / "ranks")
    assert "2 rank files are missing" not in str(several.value.next_step)
    assert "1 rank file is missing" in str(several.value.why)


def test_what_is_damaged_in_the_only_checkpoint_is_the_error(tmp_path: Path) -> None:
    """Also if it has several parts, or other models, which can be read."""
    ranks_saved(tmp_path / "of-ranks")
    truncated(tmp_path / "of-ranks" / "model_world_size_3_rank_1.pt")
    saved(tmp_path / "in-parts" / "model" / "model.pt")
    saved(tmp_path / "in-parts" / "optim" / "optim.pt")
    truncated(tmp_path / "in-parts" / "optim" / "optim.pt")
    saved(tmp_path / "one-of-two" / "whole" / "model.pt")
    saved(tmp_path / "one-of-two" / "damaged" / "model.pt")
    truncated(tmp_path / "one-of-two" / "damaged" / "model.pt")
    for name, damaged in (
        ("of-ranks", "model_world_size_3_rank_1.pt"),
        ("in-parts", "optim.pt"),
        ("one-of-two", "damaged/model.pt"),
    ):
        with pytest.raises(SourceCorruptError, match=damaged):
            fsdpckpt.inspect(tmp_path / name)
