"""Every scenario's slices become the full state PyTorch had, bit for bit."""

from __future__ import annotations

import functools
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import fsdpckpt
from tests.e2e.flattened.cases import Variant, load
from tests.oracle.compare import differences, optimizer_by_id
from tests.oracle.flat_scenarios import Scenario, variants
from tests.oracle.session import Oracle

ALL = [(Variant(entry.name, orig), world) for world in (1, 2, 3, 4) for entry, orig in variants(world)]
# Each variant at one of its world sizes; on one rank nothing is cut with original parameters.
TURNS = [
    (variant, variant.entry.worlds[number % len(variant.entry.worlds)])
    for number, variant in enumerate(dict.fromkeys(variant for variant, _ in ALL))
]


def each_of(
    cases: list[tuple[Variant, int]], wanted: Callable[[Scenario, bool, int], bool] = lambda *_: True
) -> pytest.MarkDecorator:
    rows = [
        pytest.param(variant, world, id=f"{variant.name}-of-{world}")
        for variant, world in cases
        if wanted(variant.entry, variant.orig, world)
    ]
    return pytest.mark.parametrize(("variant", "world"), rows)


@functools.cache
def truth_in(directory: Path) -> dict[str, Any]:
    return load(directory / "truth.pt")


def same_optimizer(found: dict[str, Any], truth: dict[str, Any]) -> list[str]:
    """But for ``param_names``: those of a wrapped model say nothing about a full state dict."""
    one, other = (
        {**each, "param_groups": [group | {"param_names": None} for group in each["param_groups"]]}
        for each in (found, truth)
    )
    return differences(one, other, "optimizer")


def require_truth(path: Path, directory: Path) -> dict[str, Any]:
    """What is in the file is the truth of the run."""
    found, truth = load(path), truth_in(directory)
    assert differences(found["model"], truth["model"], "model") == []
    assert same_optimizer(found["optimizer"], truth["optimizer"]) == []
    return found


def test_the_comparison_notices_another_run(oracle: Oracle) -> None:
    one, other = (truth_in(Variant("nested", True).directory(oracle, world)) for world in (2, 3))
    assert differences(one["model"], other["model"]) and same_optimizer(one["optimizer"], other["optimizer"])


@each_of(ALL, lambda entry, orig, world: entry.group is None)
def test_local_model_and_raw_optimizer_files_become_the_full_state_that_pytorch_had(
    oracle: Oracle, tmp_path: Path, variant: Variant, world: int
) -> None:
    directory = variant.directory(oracle, world)
    fsdpckpt.convert(directory / "flat", tmp_path / "full.pt", to="full", key_type="name", verify="full")
    require_truth(tmp_path / "full.pt", directory)


@each_of(TURNS)
def test_raw_optimizer_files_alone_become_the_full_state_with_a_units_file_given_or_beside_them(
    oracle: Oracle, tmp_path: Path, variant: Variant, world: int
) -> None:
    directory = variant.directory(oracle, world)
    options = {"to": "full", "only": "optim", "key_type": "name"}
    fsdpckpt.convert(directory / "raw", tmp_path / "full.pt", units=directory / "units.json", **options)
    assert same_optimizer(load(tmp_path / "full.pt"), truth_in(directory)["optimizer"]) == []
    if variant == Variant("nested", False):
        shutil.copytree(directory / "raw", tmp_path / "raw")
        shutil.copy(directory / "units.json", tmp_path / "raw" / "how-it-was-wrapped.json")
        fsdpckpt.convert(tmp_path / "raw", tmp_path / "beside.pt", **options)
        assert same_optimizer(load(tmp_path / "beside.pt"), truth_in(directory)["optimizer"]) == []


@each_of(ALL, lambda entry, orig, world: entry.mix and world == entry.mix_world(orig=orig))
def test_optimizer_slices_beside_a_sharded_model_become_the_full_state_given_the_wrapped_modules(
    oracle: Oracle, tmp_path: Path, variant: Variant, world: int
) -> None:
    directory = variant.directory(oracle, world)
    modules = tuple(name for name in variant.entry.units if name)
    # Slices of one or two elements may be cut in either way.
    options = {"use_orig_params": variant.orig} if variant.scenario == "tiny" else {}
    fsdpckpt.convert(directory / "mix", tmp_path / "full.pt", to="full", key_type="name", unit=modules, **options)
    found = require_truth(tmp_path / "full.pt", directory)
    assert found["lr_scheduler"] == {"last_epoch": 2, "base_lrs": [0.01]}


@each_of(ALL, lambda entry, orig, world: entry.dcp and world == 3)
def test_a_local_model_in_dcp_becomes_the_full_model(
    oracle: Oracle, tmp_path: Path, variant: Variant, world: int
) -> None:
    directory = variant.directory(oracle, world)
    fsdpckpt.convert(directory / "dcp_local", tmp_path / "full.pt", to="full", units=directory / "units.json")
    found = load(tmp_path / "full.pt")
    assert differences(found.get("model", found), truth_in(directory)["model"]) == []


@pytest.mark.parametrize("name", ["nested", "groups", "transformer"])
def test_without_a_key_type_original_parameters_keep_their_ids(oracle: Oracle, tmp_path: Path, name: str) -> None:
    directory = Variant(name, True).directory(oracle, 3)
    fsdpckpt.convert(directory / "flat", tmp_path / "full.pt", to="full")
    truth = truth_in(directory)["optimizer"]
    assert same_optimizer(load(tmp_path / "full.pt")["optimizer"], optimizer_by_id(truth)) == []
