"""The commands as a user types them, on checkpoints PyTorch saved."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.cli.conftest import Run, run
from tests.e2e.conversions import expected, load_full, same_as_truth
from tests.oracle.forms import form
from tests.oracle.session import Oracle
from tests.oracle.toy import BUFFERS

__all__ = ["run"]

BUFFER_OPTIONS = [word for name in BUFFERS for word in ("--buffers", name)]
PROGRAM = os.path.join(os.path.dirname(sys.executable), "fsdpckpt")


def fsdpckpt(*arguments: str | Path, program: tuple[str, ...] = (PROGRAM,)) -> subprocess.CompletedProcess[str]:
    command = [*program, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL, check=False)


def test_sharded_to_full_to_three_ranks_and_back(oracle: Oracle, tmp_path: Path) -> None:
    source = oracle.checkpoints(4) / "f2_dcp"
    for step in (
        ("convert", source, tmp_path / "full.pt", "--to", "full"),
        ("convert", source, tmp_path / "three", "--to", "sharded", "--world-size", "3"),
        (
            "convert",
            tmp_path / "three",
            tmp_path / "ranks",
            "--container",
            "torch",
            "--world-size",
            "3",
            *BUFFER_OPTIONS,
        ),
        ("convert", tmp_path / "ranks", tmp_path / "again.pt", "--to", "full", "--verify", "full"),
    ):
        done = fsdpckpt(*step)
        assert done.returncode == 0, done.stderr
    truth = expected(oracle, form("f2_dcp"), 4)
    for name in ("full.pt", "again.pt"):
        assert same_as_truth(load_full(tmp_path / name), truth) == []
    assert (tmp_path / "ranks" / "model_world_size_3_rank_2.pt").is_file()
    assert (tmp_path / "ranks" / "optim_world_size_3_rank_2.pt").is_file()


def test_sharded_tensor_files_are_asked_for_by_an_option(run: Run, oracle: Oracle, tmp_path: Path) -> None:
    done = run(
        "convert", oracle.checkpoints(4) / "f1_dcp", tmp_path / "out", "--to", "sharded", "--container", "torch",
        "--tensor", "sharded-tensor", "--world-size", "2", *BUFFER_OPTIONS,
    )  # fmt: skip
    assert done.code == 0, done.err
    assert b"ShardedTensor" in (tmp_path / "out" / "model_world_size_2_rank_0.pt").read_bytes()


def test_a_dry_run_says_what_it_would_do_and_writes_nothing(run: Run, oracle: Oracle, tmp_path: Path) -> None:
    done = run("convert", oracle.checkpoints(4) / "f1_ranks", tmp_path / "full.pt", "--to", "full", "--dry-run")
    assert done.code == 0, done.err
    assert done.out.strip()
    assert list(tmp_path.iterdir()) == []


def test_json_is_one_document_and_nothing_else(run: Run, oracle: Oracle, tmp_path: Path) -> None:
    source = oracle.checkpoints(4) / "f1_mesh_ranks"
    listed = run("inspect", source, "--json")
    assert listed.code == 0, listed.err
    document = json.loads(listed.out)
    assert (document["layout"], document["container"], document["world_size"]) == ("sharded", "torch", 4)
    truth = expected(oracle, form("f1_mesh_ranks"), 4)
    model = {entry["key"]: entry for entry in document["tensors"] if entry["section"] == "model"}
    assert {key: tuple(entry["shape"]) for key, entry in model.items()} == {
        key: tuple(value.shape) for key, value in truth["model"].items()
    }
    written = run("convert", source, tmp_path / "dcp", "--to", "sharded", "--world-size", "2", "--json")
    assert written.code == 0, written.err
    assert isinstance(json.loads(written.out), dict)


def test_an_existing_target_is_refused_unless_it_may_be_overwritten(run: Run, oracle: Oracle, tmp_path: Path) -> None:
    source = oracle.checkpoints(4) / "f2_full.pt"
    (tmp_path / "full.pt").write_bytes(b"mine")
    refused = run("convert", source, tmp_path / "full.pt", "--to", "full")
    assert refused.code == 5
    assert (tmp_path / "full.pt").read_bytes() == b"mine"
    (tmp_path / "full.pt").write_bytes((oracle.checkpoints(4) / "f1_full.pt").read_bytes())
    assert run("convert", source, tmp_path / "full.pt", "--to", "full", "--overwrite").code == 0
    assert same_as_truth(load_full(tmp_path / "full.pt"), expected(oracle, form("f2_full.pt"), 4)) == []


def test_a_missing_rank_file_is_named_and_nothing_is_written(run: Run, oracle: Oracle, tmp_path: Path) -> None:
    source = tmp_path / "three-of-four"
    source.mkdir()
    for path in (oracle.checkpoints(4) / "f2_ranks").iterdir():
        if "rank_2" not in path.name:
            (source / path.name).write_bytes(path.read_bytes())
    done = run("convert", source, tmp_path / "full.pt", "--to", "full")
    assert done.code == 3
    assert "2" in done.err
    assert "Traceback" not in done.err
    assert not (tmp_path / "full.pt").exists()


def test_diff_sees_nothing_between_a_checkpoint_and_its_conversion(run: Run, oracle: Oracle, tmp_path: Path) -> None:
    source = oracle.checkpoints(4) / "h2_ranks"
    assert run("convert", source, tmp_path / "dcp", "--to", "sharded", "--world-size", "3").code == 0
    same = run("diff", source, tmp_path / "dcp")
    assert same.code == 0, same.out + same.err
    other = run("diff", tmp_path / "dcp", oracle.checkpoints(4) / "f1_dcp")
    assert other.code == 1


@pytest.mark.parametrize(
    "path", ["f1_dcp", "f1_ranks", "f1_full.pt", "f2_dcp_ids", "h1_ranks", "h2_dcp", "tp_dcp", "tp_ranks"]
)
def test_verify_finds_nothing_wrong_with_what_pytorch_saved(run: Run, oracle: Oracle, path: str) -> None:
    done = run("verify", oracle.checkpoints(4) / path)
    assert done.code == 0, done.out + done.err


def test_the_module_is_the_program_and_neither_imports_torch(oracle: Oracle) -> None:
    code = (
        "import sys; from fsdpckpt.cli import main\n"
        "try: main()\n"
        "except SystemExit as end: assert not end.code, end.code\n"
        "assert 'torch' not in sys.modules"
    )
    source = oracle.checkpoints(4) / "f2_dcp"
    listed = fsdpckpt("inspect", source, "--names-only", program=(sys.executable, "-m", "fsdpckpt"))
    assert listed.returncode == 0, listed.stderr
    assert "embed.weight" in listed.stdout
    quiet = fsdpckpt("inspect", source, "--names-only", program=(sys.executable, "-c", code))
    assert quiet.returncode == 0, quiet.stderr
    assert quiet.stdout == listed.stdout


def test_a_file_that_would_run_code_is_refused_by_name(run: Run, tmp_path: Path) -> None:
    class Harm:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return os.system, (f"touch {tmp_path / 'harmed'}",)

    torch.save({"model": {"w": torch.randn(3, 2)}, "extra": Harm()}, tmp_path / "bad.pt")
    for command in (("inspect", tmp_path / "bad.pt"), ("convert", tmp_path / "bad.pt", tmp_path / "out.pt")):
        done = run(*command)
        assert done.code == 3
        assert "system" in done.err
    assert not (tmp_path / "harmed").exists()
    assert not (tmp_path / "out.pt").exists()
