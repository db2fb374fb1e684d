"""Flattened checkpoints to and from every other layout, wrapping and world size, and back to the same bytes.

Every test meets every scenario, and both values of ``use_orig_params``; where it takes one of ``TURNS``, each scenario
with one of the two values.
"""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

import fsdpckpt
from tests.e2e.flattened.cases import Variant, files, load
from tests.oracle.compare import differences
from tests.oracle.flat_models import Nested
from tests.oracle.session import Oracle

MIX = ("nested", "transformer", "ignored", "frozen_unit", "mixed", "tiny", "same_sized")
BOTH = [Variant(name, orig) for name, orig in itertools.product(MIX, (True, False))]
TURNS = [[Variant(name, (number + turn) % 2 == 0) for number, name in enumerate(MIX)] for turn in (0, 1)]
WORLDS = [(4, 3), (3, 16), (2, 5)]
CONTAINERS = ["dcp", "torch"]


def flattened(source: Path, target: Path, world_size: int, **options: Any) -> Path:
    fsdpckpt.convert(source, target, to="flattened", world_size=world_size, **options)
    return target


def differing(one: Path, other: Path) -> list[Any]:
    """What differs, but for ``param_names``: those of a wrapped model say nothing about the full one."""
    entries = fsdpckpt.diff(one, other).entries
    return [entry for entry in entries if entry.sigil != "=" and "param_names" not in entry.key]


def named(variant: Variant, *more: Any) -> pytest.ParameterSet:
    words = [each.name if isinstance(each, Variant) else str(each) for each in (variant, *more) if each is not None]
    return pytest.param(variant, *more, id="-".join(words))


@pytest.mark.parametrize("variant", [named(variant) for variant in BOTH])
def test_slices_become_the_dtensor_files_that_fsdp_saves_over_a_mesh(
    oracle: Oracle, tmp_path: Path, variant: Variant
) -> None:
    directory = variant.directory(oracle, 3)
    fsdpckpt.convert(
        directory / "flat", tmp_path / "ranks", to="sharded", container="torch", world_size=3, key_type="name"
    )
    for section, rank in itertools.product(("model", "optim"), range(3)):
        name = f"{section}_world_size_3_rank_{rank}.pt"
        found, expected = (
            torch.load(place / name, weights_only=False) for place in (tmp_path / "ranks", directory / "sharded")
        )
        for content in (found, expected) if section == "optim" else ():
            for group in content["param_groups"]:
                group.pop("param_names", None)  # names of a model wrapped in another way
        assert differences(found, expected, f"{section} of rank {rank}") == []


@pytest.mark.parametrize("variant", [named(variant) for variant in TURNS[0]])
def test_every_form_of_one_run_becomes_the_same_slices(oracle: Oracle, tmp_path: Path, variant: Variant) -> None:
    directory = variant.directory(oracle, 3)
    options = {"units": directory / "units.json", "key_type": "id"}
    one = flattened(directory / "truth.pt", tmp_path / "one", 5, **options)
    for form in ("flat", "mix", "sharded"):
        other = flattened(directory / form, tmp_path / form, 5, **options)
        for rank in range(5):
            model, optimizer = (f"{section}_world_size_5_rank_{rank}.pt" for section in ("model", "optim"))
            assert (one / model).read_bytes() == (other / model).read_bytes(), form
            assert differences(load(other / optimizer), load(one / optimizer)) == [], form  # states in another order


@pytest.mark.parametrize(
    ("variant", "container"),
    [named(variant, CONTAINERS[number // 2 % 2]) for number, variant in enumerate(TURNS[1])],
)
def test_through_sharded_files_and_back_the_slices_are_the_same_bytes(
    oracle: Oracle, tmp_path: Path, variant: Variant, container: str
) -> None:
    directory = variant.directory(oracle, 3)
    source, options = directory / "flat", {"units": directory / "units.json", "key_type": "id"}
    if container == "dcp":  # which keeps no ``_metadata`` of modules: away with it first
        fsdpckpt.convert(source, tmp_path / "bare", to="full", container="dcp", key_type="name")
        source = tmp_path / "bare"
    before = flattened(source, tmp_path / "before", 3, **options)
    fsdpckpt.convert(before, tmp_path / "sharded", to="sharded", container=container, world_size=4, key_type="name")
    after = flattened(tmp_path / "sharded", tmp_path / "after", 3, **options)
    assert files(before) == files(after)


@pytest.mark.parametrize("orig", [True, False])
@pytest.mark.parametrize("name", ["nested", "unused"])
def test_one_rank_becomes_eight_and_eight_one(oracle: Oracle, tmp_path: Path, name: str, orig: bool) -> None:
    directory = Variant(name, orig).directory(oracle, 1)
    eight = flattened(directory / "flat", tmp_path / "eight", 8)
    one = flattened(eight, tmp_path / "one", 1)
    for section in ("model", "optim"):
        file = f"{section}_world_size_1_rank_0.pt"
        assert differences(load(one / file), load(directory / "flat" / file), section) == []


@pytest.mark.parametrize(("world_size", "strategy"), [(1, None), (2, "no-shard"), (3, None)])
def test_by_name_and_back_model_and_optimizer_have_the_names_of_the_source(
    oracle: Oracle, tmp_path: Path, world_size: int, strategy: str | None
) -> None:
    """What is not sharded looks whole: nothing but FSDP1's prefixes shows then that it was flattened."""
    directory = Variant("nested", True).directory(oracle, 3)
    options = {"units": directory / "units.json", "strategy": strategy, "key_type": "name"}
    flat = flattened(directory / "truth.pt", tmp_path / "flat", world_size, **options)
    there = load(flat / f"optim_world_size_{world_size}_rank_0.pt")
    assert all(name.startswith("_fsdp_wrapped_module.") for name in there["state"])
    fsdpckpt.convert(flat, tmp_path / "back.pt", to="full")
    back, truth = load(tmp_path / "back.pt"), load(directory / "truth.pt")
    assert differences(dict(back["model"]), dict(truth["model"])) == []
    assert differences(back["optimizer"]["state"], truth["optimizer"]["state"]) == []
    fsdpckpt.convert(flat, tmp_path / "optim.pt", to="full", only="optim")
    assert differences(load(tmp_path / "optim.pt")["state"], truth["optimizer"]["state"]) == []


REWRAPPED = [
    (Variant("nested", True), Variant("nested", False)),
    (Variant("nested", False), Variant("nested", True)),
    (Variant("nested", True), Variant("rewrapped", True)),
    (Variant("rewrapped", False), Variant("nested", True)),
    (Variant("nested", True), Variant("outside", False)),
    (Variant("nested", False), Variant("no_shard", True)),
    (Variant("mixed", True), Variant("nested", False)),
    (Variant("transformer", False), Variant("transformer", True)),
    (Variant("channels_last", True), Variant("channels_last", False)),
]


@pytest.mark.parametrize(
    ("variant", "one", "other", "target"),
    [
        *(named(variant, *WORLDS[number % 3], None) for number, variant in enumerate(TURNS[0])),
        *(named(source, 3, 4, target) for source, target in REWRAPPED),
    ],
)
def test_on_other_ranks_or_wrapped_in_another_way_and_back_the_slices_are_the_same_bytes(
    oracle: Oracle, tmp_path: Path, variant: Variant, one: int, other: int, target: Variant | None
) -> None:
    ours, theirs = (
        {"units": each.units(oracle), "key_type": "id"} if target else {} for each in (variant, target or variant)
    )
    first = flattened(variant.directory(oracle, one) / "flat", tmp_path / "first", one, **ours)
    there = flattened(first, tmp_path / "there", other, **theirs)
    back = flattened(there, tmp_path / "back", one, **ours)
    assert files(there) != {}
    assert files(first) == files(back)


@pytest.mark.parametrize("orig", [True, False])
def test_no_units_file_is_needed_to_flatten_when_the_wrapped_modules_are_named(
    oracle: Oracle, tmp_path: Path, orig: bool
) -> None:
    variant = Variant("nested", orig)
    directory = variant.directory(oracle, 3)
    one = flattened(directory / "sharded", tmp_path / "one", 4, units=variant.units(oracle), key_type="id")
    globs = ("outer", "outer.inner")
    other = flattened(directory / "sharded", tmp_path / "other", 4, unit=globs, use_orig_params=orig, key_type="id")
    assert files(one) == files(other)


@pytest.mark.parametrize("orig", [True, False])
def test_frozen_parameters_that_one_rank_held_whole_are_sharded_and_buffers_are_not(
    oracle: Oracle, tmp_path: Path, orig: bool
) -> None:
    variant = Variant("frozen_unit", orig)  # the optimizer does not list the frozen parameters
    truth = variant.directory(oracle, 3) / "truth.pt"
    of_one = flattened(truth, tmp_path / "one", 1, units=variant.units(oracle))
    fsdpckpt.convert(of_one, tmp_path / "ranks", to="sharded", container="torch", world_size=3)
    model = torch.load(tmp_path / "ranks" / "model_world_size_3_rank_0.pt", weights_only=False)
    parameters = {name for name, _ in Nested().named_parameters()}
    assert {name for name, leaf in model.items() if isinstance(leaf, DTensor)} == parameters
    assert {*model} > parameters
    assert differing(tmp_path / "ranks", truth) == []


def test_flat_parameters_with_param_names_get_the_ids_of_their_parameters(oracle: Oracle, tmp_path: Path) -> None:
    """The root's last parameters come after those of its units in ``model.parameters()``, not in its flat parameter."""
    directory = Variant("frozen_unit", False).directory(oracle, 3)
    fsdpckpt.convert(directory / "flat", tmp_path / "full.pt", to="full", key_type="id")
    (group,) = load(tmp_path / "full.pt")["optimizer"]["param_groups"]
    trained = [name for name, _ in Nested().named_parameters() if ".inner." not in name]
    assert (group["params"], group["param_names"]) == ([*range(len(trained))], trained)
    assert differing(tmp_path / "full.pt", directory / "truth.pt") == []


@pytest.mark.parametrize("variant", [named(variant) for variant in TURNS[1]])
def test_slices_and_the_full_state_are_compared_as_the_same_checkpoint(
    oracle: Oracle, tmp_path: Path, variant: Variant
) -> None:
    directory = variant.directory(oracle, 3)
    other = variant.directory(oracle, 2) / "truth.pt"
    assert differing(directory / "flat", directory / "truth.pt") == []
    assert not fsdpckpt.diff(directory / "flat", other).same
    assert fsdpckpt.verify(directory / "flat").whole
    flattened(directory / "flat", tmp_path / "ranks", 4, verify="full")
    assert fsdpckpt.verify(tmp_path / "ranks").whole
    assert fsdpckpt.diff(directory / "flat", tmp_path / "ranks").same


@pytest.mark.parametrize("orig", [True, False])
@pytest.mark.parametrize("mesh", ["replicate=2,shard=4", "replicate=4,shard=2", "replicate=1,shard=3", "5"])
def test_in_other_sharding_groups_and_back_the_slices_are_the_same_bytes(
    oracle: Oracle, tmp_path: Path, mesh: str, orig: bool
) -> None:
    source = Variant("hybrid", orig).directory(oracle, 4)
    sizes = [int(size.rpartition("=")[2]) for size in mesh.split(",")]
    first = flattened(source / "flat", tmp_path / "first", 4)
    there = flattened(first, tmp_path / "there", math.prod(sizes), mesh=mesh)
    back = flattened(there, tmp_path / "back", 4, mesh="replicate=2,shard=2")
    assert files(first) == files(back)
    assert json.loads((there / "fsdpckpt.json").read_text())["units"]["shard_size"] == (
        sizes[1] if len(sizes) > 1 else None
    )
    fsdpckpt.convert(there, tmp_path / "full.pt", to="full", key_type="name")
    found, truth = (load(path)["optimizer"]["state"] for path in (tmp_path / "full.pt", source / "truth.pt"))
    assert differences(found, truth) == []
