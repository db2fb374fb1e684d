"""Warnings: in the text, in JSON, in Python and in ``fsdpckpt.json``; the exit code with ``--fail-on warning``."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import pytest
import torch

import fsdpckpt
from tests.cli.conftest import Run
from tests.cli.test_schemas import checked
from tests.oracle.compare import optimizer_by_name


@pytest.fixture
def state(tmp_path: Path) -> Path:
    """What the Trainer saves with ``FULL_STATE_DICT``: an optimizer of two groups, keyed by name."""
    torch.manual_seed(5)
    model = torch.nn.Linear(5, 3)
    groups = [{"params": [model.weight]}, {"params": [model.bias], "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=0.1)
    model(torch.randn(4, 5)).sum().backward()
    optimizer.step()
    by_name = optimizer_by_name(model, optimizer)
    directory = tmp_path / "checkpoint-3"
    directory.mkdir()
    torch.save(dict(model.state_dict()), directory / "pytorch_model_fsdp.bin")
    torch.save(by_name, directory / "optimizer.bin")
    torch.save({"last_epoch": 3, "_last_lr": [0.1, 0.1]}, directory / "scheduler.pt")
    torch.save({"cpu": torch.get_rng_state()}, directory / "rng_state.pth")
    (directory / "trainer_state.json").write_text(json.dumps({"global_step": 3}))
    return directory


def test_what_the_framework_will_do_otherwise_is_a_warning_and_how_to_load_it_comes_last(
    run: Run, state: Path, tmp_path: Path
) -> None:
    done = run("convert", state, tmp_path / "on-3", "--to", "sharded", "--world-size", "3")
    assert done.code == 0
    assert done.err.startswith("warning: saved on 1 rank, for 3: ")
    assert "warning:" not in done.out and "global batch" not in done.out
    assert done.out.splitlines()[-1] == f'load it with: trainer.train(resume_from_checkpoint="{tmp_path / "on-3"}")'
    recorded = json.loads((tmp_path / "on-3" / "fsdpckpt.json").read_text())["notes"]
    assert [note["message"] for note in recorded if note["warning"]] == [done.err.removeprefix("warning: ").strip()]


def test_without_a_file_that_the_trainer_needs_the_summary_warns(run: Run, state: Path, tmp_path: Path) -> None:
    (state / "trainer_state.json").unlink()
    done = run("convert", state, tmp_path / "out", "--json")
    document = checked(done.out)
    assert done.code == 0
    (warning,) = document["warnings"]  # type: ignore[misc]
    assert "trainer stops with FileNotFoundError" in warning
    assert f"warning: {warning}" in done.err


def test_warnings_fail_a_command_only_if_asked_to(run: Run, state: Path, tmp_path: Path) -> None:
    options = ("--to", "sharded", "--world-size", "3", "-q")
    done = run("convert", state, tmp_path / "failed", *options, "--fail-on", "warning")
    assert (done.code, done.err) == (1, "")
    assert (tmp_path / "failed" / "fsdpckpt.json").exists()
    assert run("convert", state, tmp_path / "not", *options).code == 0
    assert run("convert", state, tmp_path / "same", "-q", "--fail-on", "warning").code == 0
    assert run("verify", state, "--for", "trainer", "--world-size", "3", "--fail-on", "warning").code == 1


def test_in_python_each_warning_is_issued_once(state: Path, tmp_path: Path) -> None:
    with pytest.warns(fsdpckpt.FsdpckptWarning, match="global batch") as issued:
        report = fsdpckpt.convert(state, tmp_path / "out", to="sharded", world_size=3)
    assert [str(each.message) for each in issued] == list(report.warnings)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert fsdpckpt.convert(state, tmp_path / "same").warnings == ()
