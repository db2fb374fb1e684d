"""What stops a new user: each message names what to type, and typing it works."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import fsdpckpt
from fsdpckpt.cli.app import app
from tests.cli.conftest import Run
from tests.oracle.compare import identical


@pytest.fixture
def by_rank(tmp_path: Path) -> Path:
    """One file per rank of 3 ranks, model and optimizer."""
    directory = tmp_path / "by-rank"
    directory.mkdir()
    for rank in range(3):
        torch.save({"w": torch.full((5, 2), 3.0)}, directory / f"model_world_size_3_rank_{rank}.pt")
        optim = {"state": {0: {"exp_avg": torch.full((5, 2), 1.0)}}, "param_groups": [{"lr": 0.1, "params": [0]}]}
        torch.save(optim, directory / f"optim_world_size_3_rank_{rank}.pt")
    return directory


@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize("kept", [None, 300], ids=["missing", "truncated"])
def test_verify_names_what_can_be_converted_without_the_rest(
    run: Run, by_rank: Path, tmp_path: Path, rank: int, kept: int | None
) -> None:
    file = by_rank / f"optim_world_size_3_rank_{rank}.pt"
    left = b"" if kept is None else file.read_bytes()[:kept]
    file.unlink()
    if kept is not None:
        file.write_bytes(left)
    refused = run("verify", by_rank)
    assert refused.code == 3, refused.err
    (command,) = (line.split() for line in refused.err.splitlines() if line.startswith("  fsdpckpt convert"))
    assert command[3:] == ["DST", "--only", "model"]
    assert run(*command[1:3], tmp_path / "out.pt", "--to", "full", *command[4:]).code == 0
    assert identical(torch.load(tmp_path / "out.pt")["w"], torch.full((5, 2), 3.0))
    refused = run("convert", by_rank, tmp_path / "again.pt", "--to", "full")
    assert "take the model alone, which is complete: add --only model" in refused.err


@pytest.mark.parametrize(
    ("first", "second", "shown"),
    [
        (3e-4 / 3 * 3, 0.00029999999999999997 / 2, "0.0003 vs 0.00015"),
        (0.1 + 0.2, 0.3, "0.30000000000000004 vs 0.3"),  # else two equal numbers would differ
        (1e-05 / 3, 5e-05, "3.33333e-06 vs 5e-05"),
    ],
)
def test_learning_rates_have_as_many_digits_as_one_reads(
    run: Run, tmp_path: Path, first: float, second: float, shown: str
) -> None:
    for name, rate in (("a.pt", first), ("b.pt", second)):
        group = {"lr": rate, "initial_lr": rate, "eps": 1 / 3, "params": [0]}
        state = {"model": {"w": torch.ones(2)}, "optimizer": {"state": {}, "param_groups": [group]}}
        torch.save({**state, "schedule": {"base_lrs": [rate], "loss": 1 / 3}}, tmp_path / name)
    lines = [line.split("  ") for line in run("diff", tmp_path / "a.pt", tmp_path / "b.pt").out.splitlines()]
    details = {words[0].rpartition(".")[2]: words[-1] for words in lines if " vs " in words[-1]}
    assert details == {"lr": shown, "initial_lr": shown, "0": shown}
    entries = json.loads(run("diff", tmp_path / "a.pt", tmp_path / "b.pt", "--json").out)["entries"]
    assert {entry["detail"] for entry in entries if " vs " in entry["detail"]} == {f"{first!r} vs {second!r}"}
    inspected = run("inspect", tmp_path / "a.pt").out
    assert f"lr={first:.6g}, initial_lr={first:.6g}, eps={1 / 3!r}" in inspected


def test_a_module_in_place_of_a_glob_is_answered_with_the_glob(run: Run, tmp_path: Path) -> None:
    keys = [f"layers.{number}.mlp.{part}.weight" for number in range(2) for part in ("up", "down")]
    torch.save({key: torch.ones(2) for key in keys}, tmp_path / "a.pt")
    for module in ("layers.1", "layers.1.mlp", "layers.1."):
        refused = run("inspect", tmp_path / "a.pt", "--keys", module)
        assert refused.code == 2
        glob = refused.err.partition("did you mean '")[2].partition("'")[0]
        assert glob == f"{module.rstrip('.')}.*"
        shown = json.loads(run("inspect", tmp_path / "a.pt", "--keys", glob, "--json").out)["tensors"]
        assert [tensor["key"] for tensor in shown] == keys[2:]


def test_keys_are_completed_up_to_the_next_dot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = [f"layers.{number}.{part}.weight" for number in (0, 1) for part in ("up", "down")]
    torch.save({key: torch.ones(2) for key in [*keys, "head"]}, tmp_path / "a.pt")
    monkeypatch.chdir(tmp_path)
    for given, offered in (("", "layers. head"), ("layers.1.", "layers.1.up. layers.1.down."), ("he", "head")):
        words = f"fsdpckpt inspect a.pt --keys {given}"
        variables = {"_FSDPCKPT_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": "4"}
        done = CliRunner().invoke(app, env=variables, prog_name="fsdpckpt")
        assert done.output.split() == offered.split(), done.output
    (tmp_path / "a.pt").unlink()
    assert CliRunner().invoke(app, env=variables, prog_name="fsdpckpt").output.strip() == ""


def test_python_is_not_told_to_type_ls(run: Run, tmp_path: Path) -> None:
    assert "\n  ls " in run("inspect", tmp_path / "nothing").err
    with pytest.raises(fsdpckpt.SourceMissingError) as missing:
        fsdpckpt.inspect(tmp_path / "nothing")
    assert "see what is there" in str(missing.value) and "ls " not in str(missing.value)
