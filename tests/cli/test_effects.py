"""Every option that is given has an effect, or its user is told that it has none."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.conftest import Run

GOLDEN = Path(__file__).parents[1] / "golden" / "torch-2.4"
DCP = GOLDEN / "f2_default" / "ckpt"
RANKS = ("--to", "sharded", "--container", "torch", "--world-size", "2")


@pytest.mark.parametrize(
    ("options", "what"),
    [
        (("--rename", "l=l"), "--rename l=l has no effect"),
        (("--resume", "--no-resume"), "--resume or --no-resume is given more than once"),
        (("--to", "full", "--to", "sharded"), "--to is given more than once"),
        (("--mesh-device", "cuda"), "--mesh-device has no effect: the target is sharded, dcp"),
        ((*RANKS, "--mesh-device", "quux"), "--mesh-device quux is not a device type"),
        (("--launcher", "torchrun"), "their number is missing"),
        (("--nproc-per-node", "x"), "--nproc-per-node takes a number"),
        (("--max-memory", "1KB"), "at least 128.0 KiB"),
        (("--add-prefix", ""), "--add-prefix is empty"),
        (("--exclude", "nothing*"), "--exclude 'nothing*' matches no key"),
    ],
    ids=" ".join,
)
def test_what_is_surely_a_mistake_is_2(run: Run, tmp_path: Path, options: tuple[str, ...], what: str) -> None:
    done = run("convert", DCP, tmp_path / "out", *options)
    assert done.code == 2 and what in done.err, done.err
    assert not (tmp_path / "out").exists()


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


@pytest.mark.parametrize("other", ["--json", "--all", "--ranks"])
def test_names_alone_go_with_no_other_form(run: Run, other: str) -> None:
    done = run("inspect", DCP, "--names-only", other)
    assert done.code == 2 and f"--names-only cannot be combined with {other}" in done.err


@pytest.mark.parametrize("option", ["--include", "--exclude"])
def test_a_search_for_nothing_is_2(run: Run, option: str) -> None:
    done = run("verify", DCP, "--finite", option, "nothing*")
    assert done.code == 2 and f"{option} 'nothing*' matches no key" in done.err
    assert run("verify", DCP, "--finite", option, "*.exp_avg").code == 0


@pytest.mark.parametrize(
    ("command", "typed", "next_step"),
    [
        ("inspect", "--verbose", "fsdpckpt inspect --help"),
        ("convert", "--verbose", "fsdpckpt convert --help"),
        ("convert", "--version", "fsdpckpt --version"),
        ("verify", "--digest", "did you mean --digests?"),
        ("units", "--form", "did you mean --from?"),
        ("convert", "--overwite", "did you mean --overwrite?"),
    ],
)
def test_only_a_near_option_is_suggested(run: Run, command: str, typed: str, next_step: str) -> None:
    done = run(command, DCP, "out", typed)
    assert done.code == 2 and f"no such option: {typed}" in done.err
    assert next_step in done.err and ("--overwrite" in done.err) is ("--overwrite" in next_step)


def test_a_mistyped_value_has_a_near_one(run: Run) -> None:
    assert "did you mean --to sharded?" in run("convert", DCP, "out", "--to", "shared").err


@pytest.mark.parametrize("typed", ["s3://", "s3:", "gs:/bucket/x", "https:///x"])
@pytest.mark.parametrize("target", [True, False])
def test_an_unfinished_url_is_2(run: Run, tmp_path: Path, typed: str, target: bool) -> None:
    done = run("convert", *((DCP, typed) if target else (typed, tmp_path / "out")))
    assert done.code == 2 and f"{'DST' if target else 'SRC'} is not a complete URL: {typed}" in done.err


@pytest.mark.parametrize("typed", ["file:///tmp/x.pt", "file:/tmp/x.pt"])
@pytest.mark.parametrize("target", [True, False])
def test_a_file_url_is_2_and_the_path_is_suggested(run: Run, tmp_path: Path, typed: str, target: bool) -> None:
    done = run("convert", *((DCP, typed) if target else (typed, tmp_path / "out")))
    assert done.code == 2 and f"{'DST' if target else 'SRC'} is a local file" in done.err
    assert "next: give /tmp/x.pt\n" in done.err


@pytest.mark.parametrize("typed", ["hdfs:///user/x", "memory:///x"])
def test_a_url_of_the_default_host_is_opened(run: Run, typed: str) -> None:
    done = run("inspect", typed)
    assert done.code == 3 and "complete URL" not in done.err


def test_an_argument_too_many_and_a_missing_file_of_an_option_are_named(run: Run, tmp_path: Path) -> None:
    done = run("convert", DCP, tmp_path / "out", "more")
    assert done.code == 2 and "unexpected argument: more" in done.err
    for option in ("--reference", "--like", "--units"):
        done = run("convert", DCP, tmp_path / "out", *RANKS, option, tmp_path / "nowhere")
        assert option in done.err and "nowhere does not exist" in done.err, done.err


def test_a_damaged_source_can_be_checked_whole(run: Run, tmp_path: Path) -> None:
    source = tmp_path / "in"
    assert run("convert", DCP, source, *RANKS).code == 0
    path = source / "model_world_size_2_rank_0.pt"
    data = bytearray(path.read_bytes())
    data[len(data) * 3 // 4] ^= 1
    path.write_bytes(data)
    done = run("convert", source, tmp_path / "out.pt")
    assert done.code == 3 and f"  fsdpckpt verify {source}" in done.err, done.err


def test_the_current_directory_is_refused_with_no_word_of_overwrite(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notes").touch()
    done = run("convert", DCP, ".")
    assert done.code == 5 and "the current directory" in done.err and "--overwrite" not in done.err


def test_a_full_checkpoint_needs_the_name_of_a_file(run: Run, tmp_path: Path) -> None:
    done = run("convert", DCP, f"{tmp_path}/new/", "--to", "full", "--container", "torch")
    assert done.code == 2 and f"{tmp_path}/new/full.pt" in done.err and "--to sharded" not in done.err


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
