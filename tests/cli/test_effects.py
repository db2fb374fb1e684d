"""Every option that is given has an effect, or its user is told that it has none."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.conftest import Run

GOLDEN = Path(__file__).parents[1] / "golden" / "torch-2.4"
DCP = GOLDEN / "f2_default" / "ckpt"
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
    ],
)
@pytest.mark.parametrize("dry", [True, False])
def test_what_had_nothing_to_do_is_in_the_summary(
    run: Run, tmp_path: Path, options: tuple[str, ...], named: str, dry: bool
) -> None:
    given = [str(DCP.parent / "truth" / "full.pt") if word == "REFERENCE" else word for word in options]
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
