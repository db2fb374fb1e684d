"""Files and units that do not belong together are refused, even where every count fits."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import fsdpckpt
from fsdpckpt.errors import FsdpckptError, NeedsInformationError, SourceError, UsageError
from tests.e2e.flattened.cases import Variant, load
from tests.oracle.session import Oracle

REFUSED = (SourceError, NeedsInformationError)
ORIG = pytest.mark.parametrize("orig", [True, False], ids=["orig", "flat"])


def refused(source: Path, target: Path, **options: Any) -> FsdpckptError:
    """The error of a conversion to full that must not happen."""
    with pytest.raises(REFUSED) as raised:
        fsdpckpt.convert(source, target, **{"to": "full", "key_type": "name", **options})
    assert not target.exists()
    assert raised.value.exit_code in (3, 4)
    return raised.value


def changed_units(path: Path, target: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    document = json.loads(path.read_text())
    change(document)
    target.write_text(json.dumps(document))
    return target


WRONG_UNITS = [
    ("nested", True, "rewrapped", True),
    ("nested", False, "rewrapped", False),
    ("nested", True, "nested", False),
    ("nested", False, "nested", True),
    ("nested", True, "mixed", True),
    ("mixed", True, "nested", True),
    ("nested", True, "no_shard", True),
    ("nested", False, "no_shard", False),
    ("no_shard", False, "nested", False),
    ("nested", True, "transformer", True),
    ("nested", False, "tiny", False),
    ("same_sized", True, "nested", True),
    ("frozen_unit", True, "rewrapped", True),
    ("outside", False, "nested", False),
    ("nested", False, "outside", False),
]


@pytest.mark.parametrize("form", ["raw", "flat"])
@pytest.mark.parametrize(("name", "orig", "other", "other_orig"), WRONG_UNITS)
def test_the_units_of_another_model_or_wrapping(
    oracle: Oracle, tmp_path: Path, name: str, orig: bool, other: str, other_orig: bool, form: str
) -> None:
    source = tmp_path / form
    shutil.copytree(Variant(name, orig).directory(oracle, 3) / form, source, ignore=shutil.ignore_patterns("*.json"))
    units = Variant(other, other_orig).directory(oracle, 3) / "units.json"
    options = {"only": "optim"} if form == "raw" else {}
    refused(source, tmp_path / "full.pt", units=units, **options)


@ORIG
def test_the_units_of_a_hybrid_run_for_one_that_shards_over_all_ranks(
    oracle: Oracle, tmp_path: Path, orig: bool
) -> None:
    one, other = (Variant(name, orig).directory(oracle, 4) for name in ("nested", "hybrid"))
    refused(one / "raw", tmp_path / "full.pt", only="optim", units=other / "units.json")
    refused(other / "raw", tmp_path / "full.pt", only="optim", units=one / "units.json")


@pytest.mark.parametrize("form", ["raw", "flat", "mix"])
@ORIG
def test_half_of_the_ranks_renamed_to_look_like_all(oracle: Oracle, tmp_path: Path, orig: bool, form: str) -> None:
    variant = Variant("nested", orig)
    whole, half = variant.directory(oracle, 4) / form, tmp_path / "half"
    half.mkdir()
    for path in whole.glob("*_world_size_4_rank_[01].pt"):
        shutil.copy(path, half / path.name.replace("_size_4_", "_size_2_"))
    refused(half, tmp_path / "full.pt", units=variant.directory(oracle, 4) / "units.json")
    refused(half, tmp_path / "full.pt", units=variant.directory(oracle, 2) / "units.json")


@pytest.mark.parametrize(
    ("form", "section"), [("raw", "optim"), ("flat", "optim"), ("mix", "optim"), ("flat", "model"), ("mix", "model")]
)
@ORIG
def test_the_files_of_two_ranks_swapped(oracle: Oracle, tmp_path: Path, orig: bool, form: str, section: str) -> None:
    variant = Variant("same_sized", orig)
    source, swapped = variant.directory(oracle, 3) / form, tmp_path / "swapped"
    shutil.copytree(source, swapped)
    names = [f"{section}_world_size_3_rank_{rank}.pt" for rank in (1, 2)]
    for name, other in (names, names[::-1]):
        shutil.copy(source / name, swapped / other)
    error = refused(swapped, tmp_path / "full.pt", units=variant.directory(oracle, 3) / "units.json")
    assert "rank" in str(error)


@pytest.mark.parametrize("form", ["raw", "flat", "mix"])
@ORIG
def test_the_file_of_a_rank_is_missing(oracle: Oracle, tmp_path: Path, orig: bool, form: str) -> None:
    variant = Variant("nested", orig)
    source = tmp_path / "two"
    shutil.copytree(variant.directory(oracle, 3) / form, source)
    (source / "optim_world_size_3_rank_1.pt").unlink()
    refused(source, tmp_path / "full.pt", units=variant.directory(oracle, 3) / "units.json")


def _swap(document: dict[str, Any], one: str, other: str) -> None:
    """Exchange two parameters of the same size everywhere in a units file."""
    text = (
        json.dumps(document).replace(f'"{one}"', '"?"').replace(f'"{other}"', f'"{one}"').replace('"?"', f'"{other}"')
    )
    document.update(json.loads(text))


@pytest.mark.parametrize("form", ["flat", "mix"])
def test_units_with_two_parameters_of_one_size_exchanged(oracle: Oracle, tmp_path: Path, form: str) -> None:
    directory = Variant("same_sized", True).directory(oracle, 3)
    source = tmp_path / form
    shutil.copytree(directory / form, source, ignore=shutil.ignore_patterns("*.json"))
    units = changed_units(
        directory / "units.json", tmp_path / "units.json", lambda d: _swap(d, "b.0.weight", "b.2.weight")
    )
    refused(source, tmp_path / "full.pt", units=units)


@ORIG
def test_units_with_two_parameters_of_one_size_exchanged_beside_a_named_model(
    oracle: Oracle, tmp_path: Path, orig: bool
) -> None:
    directory = Variant("same_sized", orig).directory(oracle, 3)
    units = changed_units(
        directory / "units.json", tmp_path / "units.json", lambda d: _swap(d, "b.0.weight", "b.2.weight")
    )
    refused(directory / "mix", tmp_path / "full.pt", units=units)


@ORIG
@pytest.mark.parametrize("form", ["flat", "mix"])
def test_a_reference_of_another_model_with_parameters_of_the_same_sizes(
    oracle: Oracle, tmp_path: Path, orig: bool, form: str
) -> None:
    directory = Variant("same_sized", orig).directory(oracle, 3)
    source = tmp_path / form
    shutil.copytree(directory / form, source, ignore=shutil.ignore_patterns("*.json"))
    weights = load(directory / "truth.pt")["model"]
    torch.save({f"other.{name}": value for name, value in weights.items()}, tmp_path / "reference.pt")
    modules = ("other.a.0", "other.a.1", "other.a.2", "other.b")
    refused(source, tmp_path / "full.pt", reference=tmp_path / "reference.pt")
    with pytest.raises((*REFUSED, UsageError)):
        fsdpckpt.convert(source, tmp_path / "full.pt", to="full", reference=tmp_path / "reference.pt", unit=modules)
    assert not (tmp_path / "full.pt").exists()


@ORIG
def test_a_reference_in_another_order_than_the_model_beside_the_slices(
    oracle: Oracle, tmp_path: Path, orig: bool
) -> None:
    directory = Variant("same_sized", orig).directory(oracle, 3)
    weights = load(directory / "truth.pt")["model"]
    names = sorted(weights, key=lambda name: not name.startswith("b."))  # an order that a module can have
    torch.save({name: weights[name] for name in names}, tmp_path / "reference.pt")
    refused(
        directory / "mix",
        tmp_path / "full.pt",
        reference=tmp_path / "reference.pt",
        unit=("a.0", "a.1", "a.2", "b"),
    )


@ORIG
def test_slices_that_nothing_names_need_units(oracle: Oracle, tmp_path: Path, orig: bool) -> None:
    directory = Variant("nested", orig).directory(oracle, 3)
    error = refused(directory / "raw", tmp_path / "full.pt", only="optim")
    assert error.exit_code == 4
    assert "--units" in error.text


def test_slices_beside_a_model_need_the_wrapped_modules(oracle: Oracle, tmp_path: Path) -> None:
    directory = Variant("nested", False).directory(oracle, 3)
    error = refused(directory / "mix", tmp_path / "full.pt")
    assert error.exit_code == 4
    assert "--unit" in error.text


@pytest.mark.parametrize("missing", ["unit", "use_orig_params"])
def test_a_target_whose_wrapping_is_not_said(oracle: Oracle, tmp_path: Path, missing: str) -> None:
    directory = Variant("nested", True).directory(oracle, 3)
    options = {"unit": ("outer", "outer.inner"), "use_orig_params": True}
    del options[missing]
    error = refused(directory / "sharded", tmp_path / "flat", to="flattened", world_size=2, **options)
    assert error.exit_code == 4
    assert f"--{missing.replace('_', '-')}" in error.text


@pytest.mark.parametrize("name", ["groups", "frozen_some"])
def test_groups_that_cut_across_units_do_not_fit_flat_parameters(oracle: Oracle, tmp_path: Path, name: str) -> None:
    directory = Variant(name, True).directory(oracle, 3)
    units = Variant("nested", False).directory(oracle, 3) / "units.json"
    refused(directory / "flat", tmp_path / "flat", to="flattened", world_size=2, units=units, key_type="id")


def test_the_command_line_ends_with_the_code_of_the_refusal(oracle: Oracle, tmp_path: Path) -> None:
    source, target = Variant("nested", True).directory(oracle, 3) / "raw", tmp_path / "full.pt"
    command = [sys.executable, "-m", "fsdpckpt", "convert", str(source), str(target), "--to", "full", "--only", "optim"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (ended.returncode, target.exists()) == (4, False)
    assert "--units" in ended.stderr
    units = Variant("rewrapped", True).directory(oracle, 3) / "units.json"
    ended = subprocess.run([*command, "--units", str(units)], capture_output=True, text=True, check=False)
    assert (ended.returncode, target.exists()) == (3, False)
