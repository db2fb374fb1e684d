"""Options about flat parameters that are wrong, useless or contradictory: the message, and nothing is written."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from fsdpckpt.ir.dtypes import DTYPES
from fsdpckpt.ir.parameters import Parameter
from fsdpckpt.ir.unit_lists import units_of_lists
from fsdpckpt.ir.units import Unit
from fsdpckpt.ir.units_json import encode
from tests.cli.conftest import Run

GOLDEN = Path(__file__).parent.parent / "golden"
OTHER = units_of_lists(
    (Unit("", (Parameter("other.weight", (7, 5), DTYPES["float32"]),)),),
    use_orig_params=False,
    parameters=("other.weight",),
)


@pytest.fixture
def raw(tmp_path: Path) -> Path:
    """The raw optimizer files of four ranks, and nothing that says what they are slices of."""
    target = tmp_path / "raw files"
    return Path(shutil.copytree(GOLDEN / "torch-2.4" / "f1_tiny_f", target, ignore=shutil.ignore_patterns("truth")))


@pytest.fixture
def units(tmp_path: Path) -> Path:
    path = tmp_path / "other.json"
    path.write_text(json.dumps(encode(OTHER)))
    return path


def test_a_units_file_that_nothing_needs_is_noted(run: Run, saved: Path, units: Path, tmp_path: Path) -> None:
    done = run("convert", saved, tmp_path / "out.pt", "--units", units)
    assert done.code == 0
    assert "--units had no effect" in done.out
    assert (tmp_path / "out.pt").exists()


def test_verify_says_what_it_could_not_prove(run: Run, raw: Path) -> None:
    done = run("verify", raw)
    assert done.code == 0
    assert "note: optimizer state stays keyed by id" in done.err
    (raw / "units.json").write_text('{"format": "fsdpckpt-units"')
    done = run("verify", raw, "--json")
    assert done.code == 1
    assert any("these units are not used" in problem["message"] for problem in json.loads(done.out)["problems"])
    assert "\nwarning: " in run("inspect", raw).out
