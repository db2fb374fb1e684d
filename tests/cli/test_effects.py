"""Every option that is given has an effect, or its user is told that it has none."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fsdpckpt.ir.dtypes import DTYPES
from fsdpckpt.ir.parameters import Parameter
from fsdpckpt.ir.unit_lists import units_of_lists
from fsdpckpt.ir.units import Unit
from fsdpckpt.ir.units_json import encode
from tests.cli.conftest import Run
from tests.makers import GOLDEN as ALL_GOLDEN
from tests.makers import copied

GOLDEN = ALL_GOLDEN / "torch-2.4"
DCP = GOLDEN / "f2_default" / "ckpt"
ROOT_UNIT = Unit("", (Parameter("other.weight", (7, 5), DTYPES["float32"]),))
OTHER = units_of_lists((ROOT_UNIT,), use_orig_params=False, parameters=("other.weight",))
RANKS = ("--to", "sharded", "--container", "torch", "--world-size", "2")


def test_limits_may_be_given_again_and_the_last_counts(run: Run, tmp_path: Path) -> None:
    done = run("convert", DCP, tmp_path / "out", "--threads", "9", "--threads", "1", "--json")
    assert done.code == 0 and json.loads(done.out)["threads"] == 1


def test_the_least_memory_that_is_suggested_suffices(run: Run, tmp_path: Path) -> None:
    refused = run("convert", DCP, tmp_path / "out", "--max-memory", "1KB")
    option, size = refused.err.rstrip().rpartition("next: ")[2].split()
    assert run("convert", DCP, tmp_path / "out", option, size).code == 0


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (("--reference", "REFERENCE"), "--reference"),
        (("--buffers", "none"), "--buffers"),
        (("--buffers", "none", "--reference", "REFERENCE"), "--buffers and --reference"),
        (("--staging", "/nowhere"), "--staging"),
        (("--clean-names",), "--clean-names"),
        (("--units", "UNITS"), "--units"),
    ],
)
@pytest.mark.parametrize("dry", [True, False])
def test_what_had_nothing_to_do_is_in_the_summary(
    run: Run, tmp_path: Path, options: tuple[str, ...], named: str, dry: bool
) -> None:
    (tmp_path / "units.json").write_text(json.dumps(encode(OTHER)))
    places = {"REFERENCE": str(DCP.parent / "truth" / "full.pt"), "UNITS": str(tmp_path / "units.json")}
    given = [places.get(word, word) for word in options]
    done = run("convert", DCP, tmp_path / "out", *given, *(["--dry-run"] if dry else []))
    assert done.code == 0, done.err
    assert f"note: {named} had no effect: " in done.out


def test_an_option_that_decides_is_not_called_useless(run: Run, tmp_path: Path) -> None:
    """A full model without an optimizer does not say which keys are buffers."""
    assert run("convert", DCP, tmp_path / "model.pt", "--only", "model").code == 0
    for options in (["--buffers", "buf"], ["--reference", DCP]):
        done = run("convert", tmp_path / "model.pt", tmp_path / options[0], *RANKS, *options)
        assert done.code == 0, done.err
        assert "had no effect" not in done.out


def test_a_damaged_source_can_be_checked_whole(run: Run, tmp_path: Path) -> None:
    source = tmp_path / "in"
    assert run("convert", DCP, source, *RANKS).code == 0
    path = source / "model_world_size_2_rank_0.pt"
    data = bytearray(path.read_bytes())
    data[len(data) * 3 // 4] ^= 1
    path.write_bytes(data)
    done = run("convert", source, tmp_path / "out.pt")
    assert done.code == 3 and f"  fsdpckpt verify {source}" in done.err, done.err


@pytest.mark.parametrize("options", [(), ("--to", "full", "--container", "safetensors"), RANKS])
def test_the_report_lists_every_file(run: Run, tmp_path: Path, options: tuple[str, ...]) -> None:
    planned = json.loads(run("convert", DCP, tmp_path / "out", *options, "--dry-run", "--json").out)
    report = json.loads(run("convert", DCP, tmp_path / "out", *options, "--json").out)
    there = {path.name: path.stat().st_size for path in (tmp_path / "out").iterdir()}
    assert {file["path"]: file["nbytes"] for file in report["files"]} == there
    assert planned["files"] == report["files"]
    inspected = json.loads(run("inspect", tmp_path / "out", "--json").out)
    if inspected["layout"] == "sharded":
        assert report["world_size"] == planned["world_size"] == inspected["world_size"] == 2


def test_verify_says_what_it_could_not_prove(run: Run, tmp_path: Path) -> None:
    """The raw optimizer files of four ranks, and nothing that says what they are slices of."""
    raw = tmp_path / "raw files"
    copied(GOLDEN / "f1_tiny_f")(raw)
    done = run("verify", raw)
    assert done.code == 0
    assert "note: optimizer state stays keyed by id" in done.err
    (raw / "units.json").write_text('{"format": "fsdpckpt-units"')
    done = run("verify", raw, "--json")
    assert done.code == 1
    assert any("these units are not used" in problem["message"] for problem in json.loads(done.out)["problems"])
    assert "\nwarning: " in run("inspect", raw).out
