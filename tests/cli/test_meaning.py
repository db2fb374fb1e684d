"""What a user types does what they mean, or is answered with what they should type."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch

import fsdpckpt
from fsdpckpt.errors import SourceCorruptError
from tests.cli.conftest import Run, training_state


@pytest.mark.parametrize(
    "name", ["step-1.5", "v0.2", "Llama-3.1-8B", ".hidden", "run.2026-01-01", "out.dcp", "notes.json/"]
)
def test_a_directory_may_have_a_dot_in_its_name(run: Run, saved: Path, tmp_path: Path, name: str) -> None:
    done = run("convert", saved, f"{tmp_path}/{name}", "--to", "sharded")
    assert done.code == 0, done.err
    assert (tmp_path / name / ".metadata").is_file()


def test_quiet_prints_no_summary_but_errors_and_documents(run: Run, saved: Path, tmp_path: Path) -> None:
    done = run("convert", saved, tmp_path / "one.pt", "-q")
    assert (done.code, done.out, done.err) == (0, "", "")
    assert json.loads(run("convert", saved, tmp_path / "two.pt", "-q", "--json").out)["bytes_written"] > 0
    assert "exists" in run("convert", saved, tmp_path / "one.pt", "-q").err
    assert run("inspect", saved, "-q").out.startswith("section")
    assert run("verify", saved, "-q").out == ""


@pytest.mark.parametrize("as_json", [True, False])
def test_a_plan_that_does_not_fit_on_the_disk_is_5(
    run: Run, saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, as_json: bool
) -> None:
    monkeypatch.setattr("fsdpckpt.converters.make_report.free_bytes", lambda _: 100)
    done = run("convert", saved, tmp_path / "out.pt", "--dry-run", *(["--json"] if as_json else []))
    assert done.code == 5
    assert f"not enough free space for {tmp_path / 'out.pt'}" in done.err and "100 bytes free" in done.err
    if as_json:
        assert json.loads(done.out)["disk_suffices"] is False
    else:
        assert "NOT ENOUGH" in done.out and "nothing was written" in done.out


def test_the_plan_has_every_note_of_the_run(run: Run, tmp_path: Path) -> None:
    state = training_state()
    state["model"] = {f"module.{name}": value for name, value in state["model"].items()}  # type: ignore[attr-defined]
    torch.save(state, tmp_path / "a.pt")
    given = ["convert", tmp_path / "a.pt", tmp_path / "out", "--to", "sharded"]
    given += ["--dtype", "bfloat16", "--exclude", "module.1.*"]
    plan = json.loads(run(*given, "--dry-run", "--json").out)
    assert "notes" in plan, plan
    done = json.loads(run(*given, "--json").out)
    assert plan["notes"] == done["notes"] != []


def test_the_command_for_other_nodes_stands_on_a_line_of_its_own(run: Run, saved: Path, tmp_path: Path) -> None:
    run("convert", saved, tmp_path / "ranks", "--to", "sharded", "--container", "torch", "--world-size", "3")
    (tmp_path / "ranks" / "model_world_size_3_rank_1.pt").unlink()
    done = run("convert", tmp_path / "ranks", tmp_path / "full.pt")
    assert done.code == 3
    line = done.err.rstrip("\n").rpartition("\n")[2]
    assert line.startswith("  torchrun --nnodes NODES ")
    assert line.endswith(f"-m fsdpckpt convert {tmp_path / 'ranks'} {tmp_path / 'full.pt'}")
    document = json.loads(run("convert", tmp_path / "ranks", tmp_path / "full.pt", "--json").out)
    assert "\n" not in document["error"]["next_step"]


def test_a_source_that_is_replaced_before_it_is_read_again_is_no_fault_of_the_output(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fsdpckpt.converters import pipeline

    execute = pipeline.execute

    def and_replaced(*given: object, **named: object) -> object:
        crcs = execute(*given, **named)  # type: ignore[arg-type]
        (tmp_path / "other").mkdir()
        torch.save(training_state(2), tmp_path / "other" / saved.name)
        assert (tmp_path / "other" / saved.name).stat().st_size == saved.stat().st_size
        (tmp_path / "other" / saved.name).replace(saved)
        (tmp_path / "other").rmdir()
        return crcs

    monkeypatch.setattr(pipeline, "execute", and_replaced)
    with pytest.raises(SourceCorruptError, match="changed while it was read") as error:
        fsdpckpt.convert(saved, tmp_path / "out.pt", verify="full")
    assert error.value.exit_code == 3
    assert os.listdir(tmp_path) == [saved.name]
