"""A directory that this program wrote, held against its ``fsdpckpt.json`` before anything is made of it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

import fsdpckpt
from fsdpckpt.errors import SourceError, SourceIncompleteError
from fsdpckpt.ir.checkpoint import EvidenceKind
from fsdpckpt.ir.tensors import Tensor
from tests.readers.contents import opened

SHARDED = {"to": "sharded", "world_size": 2}
MODEL = "pytorch_model_fsdp_0"
OPTIMIZER = "optimizer_0"


def full(path: Path, seed: int) -> Path:
    draw = torch.Generator().manual_seed(seed)
    model = {"a.weight": torch.randn(7, 5, generator=draw), "a.bias": torch.randn(7, generator=draw)}
    states = {key: {"exp_avg": torch.randn(value.shape, generator=draw)} for key, value in model.items()}
    groups = [{"lr": 0.1, "params": list(model)}]
    torch.save({"model": model, "optimizer": {"state": states, "param_groups": groups}}, path)
    return path


@pytest.fixture
def accelerate(tmp_path: Path) -> Path:
    """accelerate's form: the model and the optimizer in directories of their own, below the manifest's."""
    source = full(tmp_path / "one.pt", 1)
    fsdpckpt.convert(source, tmp_path / "accelerate", flavor="accelerate", **SHARDED)
    return tmp_path / "accelerate"


def refusal(source: Path, tmp_path: Path, **options: object) -> str:
    """What a conversion says that it refuses."""
    with pytest.raises(SourceError) as refused:
        fsdpckpt.convert(source, tmp_path / "out.pt", to="full", **options)
    assert not (tmp_path / "out.pt").exists()
    return "\n".join(refused.value.details)


def test_metadata_of_another_save_in_a_directory_below_is_refused(accelerate: Path, tmp_path: Path) -> None:
    path = accelerate / MODEL / ".metadata"
    fsdpckpt.convert(full(tmp_path / "two.pt", 2), tmp_path / "two", flavor="accelerate", to="sharded", world_size=3)
    shutil.copy(tmp_path / "two" / MODEL / ".metadata", path)
    for data in (tmp_path / "two" / MODEL).glob("*.distcp"):
        shutil.copy(data, accelerate / MODEL)
    said = refusal(accelerate, tmp_path)
    assert f"{path} does not match" in said
    (accelerate / "fsdpckpt.json").unlink()
    fsdpckpt.convert(accelerate, tmp_path / "out.pt", to="full")


def test_metadata_of_the_same_length_is_refused_if_its_bytes_are_others(accelerate: Path, tmp_path: Path) -> None:
    path = accelerate / MODEL / ".metadata"
    path.write_bytes(path.read_bytes().replace(b"a.bias", b"a.bean"))
    assert f"{path} does not match" in refusal(accelerate, tmp_path)
    assert EvidenceKind.MANIFEST not in [each.kind for each in opened(accelerate).evidence]


def test_a_part_that_is_gone_is_an_error_and_not_a_smaller_checkpoint(accelerate: Path, tmp_path: Path) -> None:
    shutil.rmtree(accelerate / OPTIMIZER)
    assert f"{OPTIMIZER}/.metadata is missing" in refusal(accelerate, tmp_path)
    fsdpckpt.convert(accelerate, tmp_path / "model.pt", to="full", only="model")


@pytest.mark.parametrize("sealed", [True, False])
def test_a_missing_rank_file_of_the_optimizer_leaves_the_model_whole(tmp_path: Path, *, sealed: bool) -> None:
    source = full(tmp_path / "one.pt", 1)
    ranks = tmp_path / "ranks"
    fsdpckpt.convert(source, ranks, container="torch", buffers=["none"], **SHARDED)
    (ranks / "optim_world_size_2_rank_1.pt").unlink()
    if not sealed:
        (ranks / "fsdpckpt.json").unlink()
    with pytest.raises(SourceIncompleteError):
        fsdpckpt.convert(ranks, tmp_path / "all.pt", to="full")
    with pytest.raises(SourceIncompleteError):
        fsdpckpt.convert(ranks, tmp_path / "optim.pt", to="full", only="optim")
    report = fsdpckpt.convert(ranks, tmp_path / "model.pt", to="full", only="model")
    assert any("optim_world_size_2_rank_0.pt" in note.message for note in report.notes)
    fsdpckpt.convert(source, tmp_path / "truth.pt", to="full", only="model")
    assert fsdpckpt.diff(tmp_path / "model.pt", tmp_path / "truth.pt").same


def test_entries_that_this_program_does_not_write_are_not_used(tmp_path: Path) -> None:
    path = full(tmp_path / "model.pt", 1)
    file = {"nbytes": path.stat().st_size}
    wrong = {
        "short-checksum.pt": {**file, "crc32": "1234567"},
        "no-checksum.pt": {**file, "crc32": "1234567z"},
        "number.pt": {**file, "crc32": 7},
        "no-length.pt": {"nbytes": "7"},
        "nothing.pt": None,
        "../above.pt": file,
    }
    manifest = {"files": {"model.pt": file, "lost.pt": file, **wrong}, "digests": {"model a": "12", "model b": 12}}
    (tmp_path / "fsdpckpt.json").write_text(json.dumps(manifest))
    found = opened(tmp_path)
    assert [problem.file for problem in found.problems] == [f"{tmp_path}/lost.pt"]
    assert found.origin.manifest is not None and found.origin.manifest.digests == {"model a": "12"}


def test_what_the_source_left_open_is_not_settled_by_how_it_was_cut(tmp_path: Path) -> None:
    """A buffer that DCP's files have in pieces would be a DTensor in the files of ranks, which FSDP does not load."""
    states = {"w": {"exp_avg": torch.randn(5, 3)}}
    content = {"w": torch.randn(5, 3), "running": torch.randn(5)}
    optimizer = {"state": states, "param_groups": [{"lr": 0.1, "params": ["w"]}]}
    torch.save({"model": content, "optimizer": optimizer}, tmp_path / "full.pt")
    fsdpckpt.convert(tmp_path / "full.pt", tmp_path / "dcp", container="dcp", **SHARDED)
    found = opened(tmp_path / "dcp").model
    assert found is not None
    assert {key: leaf.sharded for key, leaf in found.params.items() if isinstance(leaf, Tensor)} == {
        "w": True,
        "running": None,
    }
