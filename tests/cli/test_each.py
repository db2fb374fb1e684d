"""``convert --each``: every checkpoint of a run, again and again, and one that is broken does not stop the others."""

from __future__ import annotations

import shutil
import time
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

import fsdpckpt
from fsdpckpt import runs
from fsdpckpt.errors import TargetUnwritableError, UsageError
from fsdpckpt.options import ConvertOptions, EachOptions, LaunchOptions
from fsdpckpt.progress import NO_PROGRESS
from tests.cli.conftest import Run
from tests.cli.test_schemas import checked
from tests.oracle.compare import identical

STEPS = ("step-900", "step-1000", "step-1100")


@pytest.fixture
def run_of_three(tmp_path: Path) -> Path:
    """Three checkpoints, the second of which was cut off, and a directory that is none."""
    for number, name in enumerate(STEPS):
        (tmp_path / "run" / name).mkdir(parents=True)
        torch.manual_seed(number)
        torch.save({"weight": torch.randn(5, 3)}, tmp_path / "run" / name / "model.pt")
    broken = tmp_path / "run" / STEPS[1] / "model.pt"
    broken.write_bytes(broken.read_bytes()[:-100])
    (tmp_path / "run" / "logs").mkdir()
    return tmp_path / "run"


def test_a_broken_checkpoint_does_not_stop_the_others(run_of_three: Path, tmp_path: Path, run: Run) -> None:
    done = run("convert", str(run_of_three), str(tmp_path / "out"), "--each", "step-*", "--to", "full")
    assert done.code == 3
    assert [line.split(":")[0] for line in done.out.splitlines()[:3]] == list(STEPS)
    assert done.out.splitlines()[-1] == f"2 of 3 checkpoints are in {tmp_path / 'out'}, 1 failed"
    assert f"{run_of_three}/step-1000/model.pt" in done.err
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["step-1100", "step-900"]
    for name in (STEPS[0], STEPS[2]):
        (saved,) = (run_of_three / name).iterdir()
        written = torch.load(tmp_path / "out" / name)
        assert identical(written["model"]["weight"], torch.load(saved)["weight"])


def test_what_is_there_is_compared_and_not_written_again(run_of_three: Path, tmp_path: Path, run: Run) -> None:
    command = ("convert", str(run_of_three), str(tmp_path / "out"), "--each", "step-*", "--to", "full")
    run(*command)
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()}
    torch.save({"weight": torch.randn(5, 3)}, run_of_three / STEPS[1] / "model.pt")
    done = run(*command, "--json")
    assert done.code == 0
    checkpoints: Any = checked(done.out)["checkpoints"]
    assert [each["report"]["was_complete"] for each in checkpoints] == [True, False, True]
    assert {path: path.stat().st_mtime_ns for path in before} == before
    (tmp_path / "out" / STEPS[0]).write_bytes(b"something else")
    changed = run(*command, "--newer-than", "step-100")
    assert changed.code == 5
    assert (tmp_path / "out" / STEPS[0]).read_bytes() == b"something else"


def test_only_those_after_a_name_are_taken(run_of_three: Path, tmp_path: Path) -> None:
    attempts = fsdpckpt.convert_each(run_of_three, tmp_path / "out", "step-*", newer_than="step-1000", to="full")
    assert [attempt.name for attempt in attempts] == ["step-1100"]


def test_a_glob_has_as_many_components_as_the_names(run_of_three: Path, tmp_path: Path) -> None:
    for name in (STEPS[0], STEPS[2]):
        (run_of_three / name / "actor").mkdir()
        shutil.move(run_of_three / name / "model.pt", run_of_three / name / "actor" / "model.pt")
    attempts = fsdpckpt.convert_each(run_of_three, tmp_path / "out", "step-*/actor", to="full")
    assert [attempt.name for attempt in attempts] == ["step-900/actor", "step-1100/actor"]
    assert (tmp_path / "out" / "step-900" / "actor").is_file()
    again = fsdpckpt.convert_each(run_of_three, tmp_path / "out", "step-*/actor", to="full")
    assert [attempt.was_there for attempt in (*attempts, *again)] == [False, False, True, True]


def test_a_link_to_a_sibling_is_no_checkpoint_of_its_own(tmp_path: Path) -> None:
    for name in ("run/step-1", "run/step-2/actor", "elsewhere/step-3"):
        (tmp_path / name).mkdir(parents=True)
        torch.save({"weight": torch.randn(5, 3)}, tmp_path / name / "model.pt")
    run = tmp_path / "run"
    (run / "best").symlink_to("step-1")
    (run / "step-3").symlink_to(tmp_path / "elsewhere" / "step-3")
    (run / "again").symlink_to("step-3")
    (run / "last").symlink_to("step-2")
    assert runs.find_checkpoints(str(run), "*", None) == ["step-1", "step-2", "step-3"]
    assert runs.find_checkpoints(str(run), "*/actor", None) == ["step-2/actor"]
    assert runs.find_checkpoints(str(run), "best", None) == ["best"], "the user names it"
    attempts = fsdpckpt.convert_each(run, tmp_path / "out", "*", to="full")
    assert [(attempt.name, attempt.exit_code) for attempt in attempts] == [("step-1", 0), ("step-2", 0), ("step-3", 0)]


def test_an_error_is_in_json_what_a_single_conversion_prints(run_of_three: Path, tmp_path: Path, run: Run) -> None:
    each = run("convert", str(run_of_three), str(tmp_path / "out"), "--each", "step-1000", "--to", "full", "--json")
    alone = run("convert", str(run_of_three / "step-1000"), str(tmp_path / "out.pt"), "--to", "full", "--json")
    (attempt,) = checked(each.out)["checkpoints"]  # type: ignore[misc, attr-defined]
    expected: Any = checked(alone.out)["error"]
    found = attempt["error"]
    assert found.keys() == expected.keys() and found["retryable"] is False
    assert {name for name in found if found[name] != expected[name]} <= {"next_step"}


def test_watching_tries_an_incomplete_one_again(
    run_of_three: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited: list[float] = []

    def finish_the_save(seconds: float) -> None:
        waited.append(seconds)
        torch.save({"weight": torch.randn(5, 3)}, run_of_three / STEPS[1] / "model.pt")

    monkeypatch.setattr(time, "sleep", finish_the_save)
    each = EachOptions(each="step-*", watch=30.0)
    attempts = runs.convert_each(
        str(run_of_three), str(tmp_path / "out"), each, ConvertOptions.of(to="full"), LaunchOptions(), NO_PROGRESS
    )
    names = [(attempt.name, attempt.exit_code) for attempt in islice(attempts, 4)]
    assert names == [("step-900", 0), ("step-1000", 3), ("step-1100", 0), ("step-1000", 0)]
    assert waited == [30.0]


def test_a_link_to_itself_does_not_stop_the_others(run_of_three: Path, tmp_path: Path) -> None:
    (run_of_three / "step-1").symlink_to("step-1")
    attempts = fsdpckpt.convert_each(run_of_three, tmp_path / "out", "step-*", to="full")
    assert [(attempt.name, attempt.exit_code) for attempt in attempts] == [
        *(("step-1", 3), ("step-900", 0), ("step-1000", 3), ("step-1100", 0))
    ]


def test_a_file_that_names_the_last_step_is_no_checkpoint(run_of_three: Path) -> None:
    (run_of_three / "logs").rmdir()
    (run_of_three / "latest").write_text("step-1100")
    (run_of_three / "latest_checkpointed_iteration.txt").write_text("1100")
    torch.save({"weight": torch.randn(3)}, run_of_three / "latest.pt")
    assert runs.find_checkpoints(str(run_of_three), "*", None) == ["latest.pt", *STEPS]


def test_one_of_another_kind_does_not_stop_the_others_even_if_it_comes_first(tmp_path: Path, run: Run) -> None:
    for number in range(4):
        torch.manual_seed(number)
        torch.save({"model": {"weight": torch.randn(5, 3)}}, tmp_path / "full.pt")
        options = {"to": "sharded", "world_size": 2} if number else {"to": "full", "container": "torch"}
        fsdpckpt.convert(tmp_path / "full.pt", tmp_path / "run" / f"step-{number}", **options)
    done = run("convert", str(tmp_path / "run"), str(tmp_path / "out"), "--each", "step-*", "--world-size", "3")
    assert done.code == 2
    assert [line.partition(":")[0] for line in done.out.splitlines()[:4]] == [f"step-{n}" for n in range(4)]
    assert done.out.splitlines()[0] == "step-0: failed" and "3 of 4 checkpoints are in" in done.out
    assert "--world-size applies only to sharded targets" in done.err


def test_a_command_that_is_wrong_for_the_first_three_is_not_tried_on_all(
    run_of_three: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(5):
        (run_of_three / f"step-{number}").mkdir()
        torch.save({"weight": torch.randn(5, 3)}, run_of_three / f"step-{number}" / "model.pt")
    tried: list[str] = []
    convert = runs.convert

    def counted(source: str, *arguments: Any) -> Any:
        tried.append(source)
        return convert(source, *arguments)

    monkeypatch.setattr(runs, "convert", counted)
    with pytest.raises(UsageError, match="applies only to sharded targets"):
        fsdpckpt.convert_each(run_of_three, tmp_path / "out", "step-*", world_size=3)
    assert len(tried) == 3 and not (tmp_path / "out").exists()


def test_an_error_that_stays_is_said_once_and_what_may_pass_is_tried_again(
    run_of_three: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    passes: list[float] = []
    convert = runs.convert

    def with_a_store_that_sleeps(source: str, *arguments: Any) -> Any:
        if source.endswith(STEPS[0]) and len(passes) < 2:
            raise TargetUnwritableError("the store did not answer", retryable=True)
        return convert(source, *arguments)

    monkeypatch.setattr(runs, "convert", with_a_store_that_sleeps)
    monkeypatch.setattr(time, "sleep", passes.append)
    attempts = runs.convert_each(
        str(run_of_three), str(tmp_path / "out"), EachOptions(each="step-*", watch=1.0), ConvertOptions.of(to="full"),
        LaunchOptions(), NO_PROGRESS,
    )  # fmt: skip
    found = [(attempt.name, attempt.exit_code) for attempt in islice(attempts, 4)]
    assert found == [("step-900", 5), ("step-1000", 3), ("step-1100", 0), ("step-900", 0)]
    assert len(passes) == 2


@pytest.mark.parametrize("as_json", [False, True])
def test_an_interruption_does_not_lose_what_was_done(
    run_of_three: Path, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch, *, as_json: bool
) -> None:
    def interrupt(_: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(time, "sleep", interrupt)
    monkeypatch.setattr("fsdpckpt.cli.errors.ignore_signals", lambda: None)
    command = ("convert", str(run_of_three), str(tmp_path / "out"), "--each", "step-*", "--to", "full", "--watch", "1")
    done = run(*command, *(["--json"] if as_json else []))
    assert done.code == 130 and "interrupted" in done.err
    if as_json:
        document: Any = checked(done.out)
        assert document["error"]["exit_code"] == 130
        assert [each["error"] is None for each in document["checkpoints"]] == [True, False, True]
    else:
        assert [line.split(":")[0] for line in done.out.splitlines()] == list(STEPS)
