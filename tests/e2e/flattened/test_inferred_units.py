"""Units inferred from what real FSDP1 jobs saved read every slice as the units that the jobs themselves recorded."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

import fsdpckpt
from fsdpckpt.errors import NeedsInformationError
from fsdpckpt.flat.match import FlatMatch, match
from fsdpckpt.flat.units.inference import byte_mapping
from fsdpckpt.flat.units.request import UnitsRequest
from fsdpckpt.flat.units.source import source_units
from fsdpckpt.ir.units_json import loads
from fsdpckpt.readers.detect import open_checkpoint
from fsdpckpt.storage.sources import Sources
from tests.e2e.flattened.cases import Variant
from tests.ir.checkpoints import with_origin
from tests.oracle.compare import require_identical
from tests.oracle.session import Oracle

WORLD = 2


def _inferred_as_recorded(oracle: Oracle, variant: Variant, form: str, path: Path) -> bool:
    """Whether inference without the units file reads the checkpoint as the units file does."""
    directory = variant.directory(oracle, WORLD)
    recorded = loads((directory / "units.json").read_bytes(), source="units.json")
    reference = path / "reference.pt"
    torch.save(torch.load(directory / "truth.pt", weights_only=False)["model"], reference)
    globs = tuple(unit.prefix for unit in recorded.units if unit.prefix)
    request = UnitsRequest(
        globs=globs if form in ("raw", "mix") else (), reference=None if form == "mix" else str(reference)
    )
    with Sources() as sources:
        source = with_origin(
            replace(open_checkpoint(str(directory / form), sources=sources), units=None), units_from=""
        )
        found = source_units(source, request, sources)
        truth = match(source, recorded)
    assert isinstance(truth, FlatMatch)
    assert found.match is not None
    return byte_mapping(source, truth) == byte_mapping(source, found.match)


@pytest.mark.parametrize("orig", [False, True])
@pytest.mark.parametrize(
    ("scenario", "form"),
    [
        ("nested", "raw"),
        ("nested", "flat"),
        ("nested", "mix"),
        ("mixed", "raw"),
        ("mixed", "mix"),
        ("bf16", "raw"),
        ("same_sized", "raw"),
        ("same_sized", "mix"),
        ("transformer", "raw"),
        ("transformer", "mix"),
        ("ignored", "mix"),
        ("frozen_unit", "mix"),
        ("rewrapped", "flat"),
    ],
)
def test_units_inferred_without_a_units_file_are_those_of_the_job(
    scenario: str, form: str, orig: bool, oracle: Oracle, tmp_path: Path
) -> None:
    assert _inferred_as_recorded(oracle, Variant(scenario, orig), form, tmp_path)


def test_a_reference_whose_groups_name_flat_parameters_is_none_of_a_job_with_original_ones(
    oracle: Oracle, tmp_path: Path
) -> None:
    """``use_orig_params`` is tried both ways: with original parameters no optimizer holds ``_flat_param``."""
    directory = Variant("frozen_unit", False).directory(oracle, WORLD)
    given = {"reference": directory / "truth.pt", "unit": ["outer", "outer.inner"], "key_type": "name"}
    fsdpckpt.convert(directory / "raw", tmp_path / "full.pt", to="full", **given)
    truth = torch.load(directory / "truth.pt", weights_only=False)["optimizer"]
    found = torch.load(tmp_path / "full.pt", weights_only=True)["optimizer"]
    require_identical(found["state"], truth["state"])


@pytest.mark.parametrize(("scenario", "orig"), [("groups", True), ("channels_last", False), ("channels_last", True)])
def test_what_no_length_shows_is_asked(scenario: str, orig: bool, oracle: Oracle, tmp_path: Path) -> None:
    with pytest.raises(NeedsInformationError):
        _inferred_as_recorded(oracle, Variant(scenario, orig), "raw", tmp_path)
