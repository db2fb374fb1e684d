"""Several models and optimizers: a section's name, and the keys that ``inspect`` prints, are taken by every command."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import fsdpckpt
from tests.cli.conftest import Run, training_state
from tests.converters.test_named_parts import saved_by_accelerate


@pytest.fixture
def two(tmp_path: Path) -> Path:
    """A generator and a critic, each with its optimizer; the critic has a module that is named like itself."""
    content: dict[str, Any] = {}
    for name, seed in (("generator", 1), ("critic", 2)):
        saved: dict[str, Any] = training_state(seed)
        weights = saved["model"]
        if name == "critic":
            weights = {f"critic.{key}" if key.startswith("0") else key: value for key, value in weights.items()}
        content |= {name: weights, f"{name}_opt": saved["optimizer"]}
    path = tmp_path / "two.pt"
    torch.save({**content, "step": 2}, path)
    return path


def test_inspect_shows_one_of_several_sections(run: Run, two: Path) -> None:
    done = run("inspect", two, "--section", "model:critic", "--names-only")
    assert done.code == 0 and all(key.startswith("critic.") for key in done.out.split())
    assert len(done.out.split()) == 6
    done = run("inspect", two, "--section", "optim:generator_opt", "--names-only", "--keys", "*.exp_avg")
    assert done.out.split() == [f"generator_opt.{number}.exp_avg" for number in range(6)]
    done = run("inspect", two, "--section", "optim:generator_opt", "--keys", "critic*")
    assert done.code == 2 and "matches no key" in done.err
    done = run("inspect", two, "--section", "model:critik")
    assert done.code == 2 and "next: did you mean --section model:critic?" in done.err
    done = run("inspect", two, "--section", "extra:critic")
    assert done.code == 2 and "expected model, optim, extra, model:NAME, optim:NAME" in done.err
    with fsdpckpt.open(two) as found:
        assert len(found.section("model:critic")) == 6 and len(found.section("model")) == 12


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ("critic.critic.0.*", ["critic.0.weight", "critic.0.bias"]),  # as inspect prints them
        ("critic.0.*", ["critic.0.weight", "critic.0.bias"]),  # as the section itself has them
        ("critic.2.bias", ["2.bias"]),
        ("*.bias", ["critic.0.bias", "1.bias", "2.bias"]),
    ],
)
def test_a_key_may_be_given_as_inspect_prints_it_or_as_the_section_has_it(
    run: Run, two: Path, tmp_path: Path, given: str, kept: list[str]
) -> None:
    assert run("convert", two, tmp_path / "one.pt", "--only", "model:critic", "--include", given).code == 0
    assert list(torch.load(tmp_path / "one.pt")) == kept
    assert run("convert", two, tmp_path / "rest.pt", "--only", "model:critic", "--exclude", given).code == 0
    assert {*torch.load(tmp_path / "rest.pt"), *kept} == set(torch.load(two)["critic"])


def test_what_is_said_of_a_section_is_on_that_section_and_never_empty(run: Run, two: Path, tmp_path: Path) -> None:
    report = fsdpckpt.convert(two, tmp_path / "out.pt", include=["critic.*", "critic_opt.*"])
    notes = [note.message for note in report.notes]
    assert any("leave nothing of model:generator" in note for note in notes)
    assert not any("0 of" in note or note.endswith(": ") for note in notes)
    assert not any("optim:" in note and "module versions" in note for note in notes)
    # One model and one optimizer are left, and a reader finds them as such.
    assert torch.load(tmp_path / "out.pt")["model"].keys() == torch.load(two)["critic"].keys()
    assert run("convert", two, tmp_path / "three.pt", "--include", "critic.*", "--include", "*_opt.*").code == 0
    assert torch.load(tmp_path / "three.pt").keys() == {"generator_opt", "critic_opt", "model", "step"}


def test_a_framework_with_one_model_is_told_of_several(run: Run, two: Path) -> None:
    assert "the model is missing" not in run("verify", two, "--for", "fabric").out


def test_ids_of_an_optimizer_without_its_model_are_explained(run: Run, tmp_path: Path) -> None:
    first, second = (training_state(seed) for seed in (1, 2))
    content = {"a": first["model"], "b": second["model"], "optimizer": first["optimizer"]}
    torch.save(content, tmp_path / "unclear.pt")
    done = run("convert", tmp_path / "unclear.pt", tmp_path / "out.pt", "--key-type", "name")
    assert done.code == 4 and "no model in it is certainly that of the optimizer" in done.err


@pytest.mark.parametrize("full", [True, False], ids=["full", "dcp"])
def test_the_states_of_several_optimizers_fold_like_those_of_one(
    full: bool, screen: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved_by_accelerate(tmp_path / "state", full=full)
    monkeypatch.chdir(tmp_path)
    lines = screen("inspect", "state").splitlines()
    for number in (0, 1):
        (name,) = {line.split(".")[0] for line in lines if line.startswith("optimizer") and f"_{number}." in line}
        rows = [line for line in lines if line.startswith(f"{name}.")]
        assert [row.split()[0] for row in rows] == [f"{name}.*.step", f"{name}.*.{{exp_avg,exp_avg_sq}}"], rows


def test_ids_keep_their_sizes(screen: Callable[..., str], two: Path) -> None:
    """Two models, and ids: nothing shows here which parameter is which."""
    rows = [line.split()[:2] for line in screen("inspect", two).splitlines() if line.startswith("critic_opt.")]
    assert rows[0] == ["critic_opt.{0..5}.step", "x6"]
    assert ["critic_opt.{1..3}.{exp_avg,exp_avg_sq}", "x6"] in rows and len(rows) == 5


@pytest.mark.parametrize("made", ["full", "dcp", "ranks", "flat"])
def test_every_layout_shows_a_section_by_the_name_that_its_user_gave_it(
    made: str, run: Run, two: Path, tmp_path: Path
) -> None:
    """A second model whose name begins like that of the first, as an average of its weights has it."""
    content = torch.load(two)
    content["generator_ema"] = {name: weight + 1 for name, weight in content["generator"].items()}
    torch.save(content, tmp_path / "full")
    options: dict[str, Any] = {
        "dcp": {"container": "dcp", "to": "sharded"},
        "ranks": {"container": "torch", "to": "sharded", "world_size": 2},
        "flat": {"to": "flattened", "world_size": 2, "unit": ["none"], "use_orig_params": True},
    }
    if made != "full":
        fsdpckpt.convert(tmp_path / "full", tmp_path / made, buffers=["none"], **options[made])
    sections = json.loads(run("inspect", tmp_path / made, "--json").out)["sections"]
    assert sections.keys() == {
        "model:generator", "model:generator_ema", "model:critic", "optim:generator_opt", "optim:critic_opt"
    }  # fmt: skip
    for label, totals in sections.items():
        keys = run("inspect", tmp_path / made, "--section", label, "--names-only").out.split()
        assert len(keys) == totals["tensors"] and all(key.startswith(f"{label.partition(':')[2]}.") for key in keys)
        shown = json.loads(run("inspect", tmp_path / made, "--section", label, "--json").out)["tensors"]
        assert [each["key"] for each in shown] == keys and {each["section"] for each in shown} == {label}
        rows = run("inspect", tmp_path / made, "--section", label).out
        assert all(key in rows for key in keys)
    refused = run("inspect", tmp_path / made, "--section", "model:generator_em")
    assert refused.code == 2 and "did you mean --section model:generator_ema?" in refused.err
