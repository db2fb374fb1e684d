"""Every scenario's slices become the full state PyTorch had, bit for bit."""

from __future__ import annotations

import functools
import shutil
from pathlib import Path
from typing import Any

import pytest

import fsdpckpt
from tests.e2e.flattened.cases import Variant, load
from tests.oracle.compare import differences, optimizer_by_id
from tests.oracle.flat_scenarios import variants
from tests.oracle.session import Oracle

ALL = [(Variant(entry.name, orig), world) for world in (1, 2, 3, 4) for entry, orig in variants(world)]
CASES = [pytest.param(variant, world, id=f"{variant.name}-of-{world}") for variant, world in ALL]
# Each variant at one of its world sizes; on one rank nothing is cut with original parameters.
TURNS = [
    pytest.param(variant, world, id=f"{variant.name}-of-{world}")
    for number, variant in enumerate(dict.fromkeys(variant for variant, _ in ALL))
    for world in [variant.entry.worlds[number % len(variant.entry.worlds)]]
]
MIXED = [
    case
    for case, (variant, world) in zip(CASES, ALL, strict=True)
    if variant.entry.mix and world == variant.entry.mix_world(orig=variant.orig)
]
LOCAL = [case for case, (variant, world) in zip(CASES, ALL, strict=True) if variant.entry.group is None]
DCP = [case for case, (variant, world) in zip(CASES, ALL, strict=True) if variant.entry.dcp and world == 3]


@functools.cache
def truth_in(directory: Path) -> dict[str, Any]:
    return load(directory / "truth.pt")


def without_param_names(optimizer: dict[str, Any]) -> dict[str, Any]:
    """An optimizer state dict without the wrapped model's names, which say nothing about a full state dict."""
    groups = [
        {key: value for key, value in group.items() if key != "param_names"} for group in optimizer["param_groups"]
    ]
    return {**optimizer, "param_groups": groups}


def same_optimizer(found: dict[str, Any], truth: dict[str, Any]) -> list[str]:
    return differences(without_param_names(found), without_param_names(truth), "optimizer")


@pytest.mark.parametrize(("variant", "world"), LOCAL)
def test_local_model_and_raw_optimizer_files_become_the_full_state_that_pytorch_had(
    oracle: Oracle, tmp_path: Path, variant: Variant, world: int
) -> None:
    directory = variant.directory(oracle, world)
    fsdpckpt.convert(directory / "flat", tmp_path / "full.pt", to="full", key_type="name", verify="full")
    found, truth = load(tmp_path / "full.pt"), truth_in(directory)
    assert differences(found["model"], truth["model"], "model") == []
    assert same_optimizer(found["optimizer"], truth["optimizer"]) == []


@pytest.mark.parametrize(("variant", "world"), TURNS)
def test_raw_optimizer_files_alone_become_the_full_state_with_a_units_file(
    oracle: Oracle, tmp_path: Path, variant: Variant, world: int
) -> None:
    directory = variant.directory(oracle, world)
    fsdpckpt.convert(
        directory / "raw",
        tmp_path / "full.pt",
        to="full",
        only="optim",
        key_type="name",
        units=directory / "units.json",
    )
    assert same_optimizer(load(tmp_path / "full.pt"), truth_in(directory)["optimizer"]) == []


@pytest.mark.parametrize(("variant", "world"), MIXED)
def test_optimizer_slices_beside_a_sharded_model_become_the_full_state_given_the_wrapped_modules(
    oracle: Oracle, tmp_path: Path, variant: Variant, world: int
) -> None:
    directory = variant.directory(oracle, world)
    modules = tuple(name for name in variant.entry.units if name)
    # Slices of one or two elements may be cut in either way.
    options = {"use_orig_params": variant.orig} if variant.scenario == "tiny" else {}
    fsdpckpt.convert(directory / "mix", tmp_path / "full.pt", to="full", key_type="name", unit=modules, **options)
    found, truth = load(tmp_path / "full.pt"), truth_in(directory)
    assert differences(found["model"], truth["model"], "model") == []
    assert same_optimizer(found["optimizer"], truth["optimizer"]) == []
    assert found["lr_scheduler"] == {"last_epoch": 2, "base_lrs": [0.01]}


@pytest.mark.parametrize(("variant", "world"), DCP)
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


def test_a_units_file_of_another_order_of_files_is_found_beside_the_checkpoint(oracle: Oracle, tmp_path: Path) -> None:
    directory = Variant("nested", False).directory(oracle, 2)
    shutil.copytree(directory / "raw", tmp_path / "raw")
    shutil.copy(directory / "units.json", tmp_path / "raw" / "how-it-was-wrapped.json")
    fsdpckpt.convert(tmp_path / "raw", tmp_path / "full.pt", to="full", only="optim", key_type="name")
    assert same_optimizer(load(tmp_path / "full.pt"), truth_in(directory)["optimizer"]) == []
