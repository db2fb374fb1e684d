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
from tests.makers import Change, put, together


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


def link(name: str, to: str) -> Change:
    return lambda run: (run / name).symlink_to(to)


LOST = "latest names checkpoint-1200, which is not there"
POINTERS: dict[str, tuple[Change, dict[str, str], tuple[str, ...], str, str]] = {
    "a name that is gone": (put("latest", "checkpoint-1200"), {}, (LOST,), "1000", "1000"),
    "a number that is gone": (put("latest", "1200"), {}, ("latest names 1200, which is not there",), "1000", "1000"),
    "a path that is gone": (put("latest", "/elsewhere/checkpoint-1200\n"), {}, (LOST,), "1000", "1000"),
    "no name": (put("latest", ""), {}, ("latest is empty and names no checkpoint",), "1000", "1000"),
    "links that lead nowhere": (
        together(
            link("best", "checkpoint-300"), link("latest", "gone"), link("wandb", "/nowhere/wandb"),
            put("latest_metrics.json", '{"loss": 2.5}'),
        ),
        {}, ("best names checkpoint-300, which is not there", "latest names gone, which is not there"), "1000", "1000",
    ),
    "what cannot be read": (
        together(lambda run: (run / "checkpoint-1100").mkdir(), put("latest", "checkpoint-1100")),
        {"latest": "checkpoint-1100"}, (), "1100", "1000",
    ),
    "a directory with a slash behind it": (
        put("latest", "runs/checkpoint-900/\n"), {"latest": "checkpoint-900"}, (), "1000", "900",
    ),
}  # fmt: skip


@pytest.mark.parametrize("pointer", POINTERS)
def test_what_latest_files_and_links_name_is_proposed_and_one_that_leads_nowhere_is_said(
    tmp_path: Path, pointer: str
) -> None:
    change, pointers, lost, newest, proposed = POINTERS[pointer]
    for step in (900, 1000):
        saved(tmp_path / f"checkpoint-{step}" / "model.pt")
    change(tmp_path)
    run = described(tmp_path)
    assert (run.pointers, run.lost) == (pointers, lost)
    assert (run.newest, run.proposed) == (f"checkpoint-{newest}", f"checkpoint-{proposed}")
    with pytest.raises(SeveralCheckpointsError) as error:
        fsdpckpt.verify(tmp_path)
    assert all(each in str(error.value) for each in lost)


@pytest.mark.parametrize("form", ["epoch={}-step=50", "ckpt_{}", "gpt-iter={}", "step-{}"])
def test_a_damaged_step_is_a_row_and_stops_no_other_whatever_stands_before_its_number(
    tmp_path: Path, form: str
) -> None:
    for number in (1, 2):
        saved(tmp_path / form.format(number) / "model.pt")
    for rank in (0, 2):
        saved(tmp_path / form.format(3) / f"model_world_size_3_rank_{rank}.pt")
    (tmp_path / form.format(4)).mkdir()
    rows = described(tmp_path).checkpoints
    assert [row.complete for row in rows] == [True, True, False, False]
    assert rows[2].problems[0].endswith("model_world_size_3_rank_1.pt")
    assert rows[3].problems[0].startswith("empty")


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


@pytest.mark.parametrize(("damaged", "beside"), [("best", []), ("best", ["checkpoint-900/model.pt"]), ("step-3", [])])
def test_without_two_steps_what_is_damaged_is_the_error(tmp_path: Path, damaged: str, beside: list[str]) -> None:
    """It may belong to the step: then nothing else may be read in its place."""
    for name in beside:
        saved(tmp_path / name)
    saved(tmp_path / damaged / "model_world_size_2_rank_0.pt")
    with pytest.raises(SourceIncompleteError, match=damaged):
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
