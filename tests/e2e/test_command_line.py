"""The commands as a user types them, on checkpoints PyTorch saved."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.conftest import Run, run
from tests.e2e.conversions import expected, require_truth
from tests.makers import copied, lose
from tests.oracle.forms import form
from tests.oracle.session import Oracle
from tests.oracle.toy import BUFFERS

__all__ = ["run"]

RANKS = ("--to", "sharded", "--container", "torch", *(word for name in BUFFERS for word in ("--buffers", name)))
PROGRAM = os.path.join(os.path.dirname(sys.executable), "fsdpckpt")


def test_a_training_goes_through_dcp_and_rank_files_of_other_ranks_and_back(
    run: Run, oracle: Oracle, tmp_path: Path
) -> None:
    source, ranks = oracle.checkpoints(4) / "f2_dcp", tmp_path / "ranks"
    for step in (
        (source, tmp_path / "full.pt", "--to", "full"),
        (source, tmp_path / "three", "--to", "sharded", "--world-size", "3"),
        (tmp_path / "three", ranks, "--world-size", "3", *RANKS),
        (ranks, tmp_path / "again.pt", "--to", "full", "--verify", "full"),
    ):
        done = run("convert", *step)
        assert done.code == 0, done.err
    for name in ("full.pt", "again.pt"):
        require_truth(tmp_path / name, expected(oracle, form("f2_dcp"), 4))
    assert all((ranks / f"{section}_world_size_3_rank_2.pt").is_file() for section in ("model", "optim"))
    for target in (tmp_path / "three", ranks, tmp_path / "full.pt"):
        same = run("diff", source, target)
        assert same.code == 0, same.out + same.err
    assert run("diff", ranks, oracle.checkpoints(4) / "f1_dcp").code == 1


def test_sharded_tensor_files_are_asked_for_by_an_option(run: Run, oracle: Oracle, tmp_path: Path) -> None:
    given = (*RANKS, "--tensor", "sharded-tensor", "--world-size", "2")
    done = run("convert", oracle.checkpoints(4) / "f1_dcp", tmp_path / "out", *given)
    assert done.code == 0, done.err
    assert b"ShardedTensor" in (tmp_path / "out" / "model_world_size_2_rank_0.pt").read_bytes()


def test_what_is_listed_is_what_pytorch_saved(run: Run, oracle: Oracle) -> None:
    listed = run("inspect", oracle.checkpoints(4) / "f1_mesh_ranks", "--json")
    document = json.loads(listed.out)
    assert (document["layout"], document["container"], document["world_size"]) == ("sharded", "torch", 4)
    model = {each["key"]: tuple(each["shape"]) for each in document["tensors"] if each["section"] == "model"}
    truth = expected(oracle, form("f1_mesh_ranks"), 4)["model"]
    assert model == {key: tuple(value.shape) for key, value in truth.items()}


def test_a_missing_rank_file_is_named_and_nothing_is_written(run: Run, oracle: Oracle, tmp_path: Path) -> None:
    copied(oracle.checkpoints(4) / "f2_ranks", lose("*rank_2*"))(tmp_path / "three-of-four")
    done = run("convert", tmp_path / "three-of-four", tmp_path / "full.pt", "--to", "full")
    assert done.code == 3
    assert "rank_2.pt" in done.err and "Traceback" not in done.err
    assert not (tmp_path / "full.pt").exists()


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
    command = ["inspect", str(oracle.checkpoints(4) / "f2_dcp"), "--names-only"]
    said = [
        subprocess.run([*program, *command], capture_output=True, text=True, timeout=60, check=True).stdout
        for program in ((PROGRAM,), (sys.executable, "-m", "fsdpckpt"), (sys.executable, "-c", code))
    ]
    assert "embed.weight" in said[0] and said == said[:1] * 3
