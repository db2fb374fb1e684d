"""A run is a table: whichever way a trainer lays out its checkpoints, and whatever became of single ones."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import fsdpckpt
from fsdpckpt.api import inspect_run
from fsdpckpt.describe import Run
from fsdpckpt.describe.run import step_of
from fsdpckpt.errors import SeveralCheckpointsError, SourceIncompleteError


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
    assert run.newest.startswith("global_step_14/"), "21 may not be complete: the trainer does not name it"
    assert run.pointers == {"latest_checkpointed_iteration.txt": "global_step_14"}


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
