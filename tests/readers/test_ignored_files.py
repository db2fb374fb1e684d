"""``--ignore-file`` leaves one of two copies out, and the error that names both says how to type it."""

from __future__ import annotations

import re
import shlex
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

import fsdpckpt
from fsdpckpt.errors import NeedsInformationError, UsageError
from fsdpckpt.readers.protocol import glob_of

MODEL = {"a.w": torch.randn(5, 3), "a.b": torch.randn(5)}
EXPORT = {name: tensor + 1 for name, tensor in MODEL.items()}
STATE = {
    "state": {name: {"exp_avg": torch.randn_like(tensor)} for name, tensor in MODEL.items()},
    "param_groups": [{"lr": 0.1, "params": list(MODEL)}],
}


def put(content: dict[str, Any], path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(content, checkpoint_id=str(path))


def accelerate(path: Path, export: str) -> None:
    """State with an export in it, as a training script leaves it that ends with ``save_model``."""
    put({"model": MODEL}, path / "pytorch_model_fsdp_0")
    put({"optimizer": STATE}, path / "optimizer_0")
    (path / export).parent.mkdir(exist_ok=True)
    save_file(EXPORT, path / export)


def typed(error: NeedsInformationError) -> list[str]:
    """The globs that the message tells to type."""
    words = shlex.split(re.sub(r"[,:;]", " ", str(error.next_step)))
    return [words[at + 1] for at, word in enumerate(words) if word == "--ignore-file"]


def weight(path: Path, **options: Any) -> torch.Tensor:
    with fsdpckpt.open(path, **options) as checkpoint:
        found: torch.Tensor = checkpoint["a.w"].torch()
    return found


@pytest.mark.parametrize("export", ["final/model.safetensors", "model.safetensors"])
def test_an_export_beside_the_state_is_left_out(export: str, tmp_path: Path) -> None:
    accelerate(source := tmp_path / "state", export)
    with pytest.raises(NeedsInformationError, match="2 candidates for the model") as caught:
        fsdpckpt.inspect(source)
    assert typed(caught.value) == [export]
    ignored: dict[str, Any] = {"ignore_file": typed(caught.value)}
    assert torch.equal(weight(source, **ignored), MODEL["a.w"])
    assert len(fsdpckpt.inspect(source, **ignored).to_json()["sections"]) >= 2
    assert fsdpckpt.verify(source, **ignored).whole
    report = fsdpckpt.convert(source, tmp_path / "out", world_size=2, **ignored)
    assert report.flavor == "accelerate" and not (tmp_path / "out" / export).exists()
    assert any(export in note.keys for note in report.notes if note.kind == "ignored")
    assert fsdpckpt.diff(source, tmp_path / "out", **ignored).same
    assert torch.equal(weight(source, ignore_file=["pytorch_model_fsdp_0", "optimizer_0"]), EXPORT["a.w"])
    fsdpckpt.convert(source, tmp_path / "dir", world_size=2, ignore_file=[export.partition("/")[0] + "/"])


def test_a_file_in_a_dcp_directory_is_left_out(tmp_path: Path) -> None:
    put({"model": MODEL, "optimizer": STATE}, tmp_path / "dcp")
    torch.save(EXPORT, tmp_path / "dcp" / "model.pt")
    with pytest.raises(NeedsInformationError) as caught:
        fsdpckpt.convert(tmp_path / "dcp", tmp_path / "full.pt")
    assert typed(caught.value) == ["model.pt"]
    fsdpckpt.convert(tmp_path / "dcp", tmp_path / "full.pt", ignore_file="model.pt")
    assert torch.equal(torch.load(tmp_path / "full.pt")["model"]["a.w"], MODEL["a.w"])


def test_sets_of_files_are_left_out_by_one_glob(tmp_path: Path) -> None:
    (source := tmp_path / "both").mkdir()
    for rank in range(3):
        torch.save({**MODEL, "own": torch.tensor([rank])}, source / f"model_world_size_3_rank_{rank}.pt")
    for number in (1, 2):
        name = list(EXPORT)[number - 1]
        save_file({name: EXPORT[name]}, source / f"model-0000{number}-of-00002.safetensors")
    with pytest.raises(NeedsInformationError) as caught:
        fsdpckpt.inspect(source)
    (glob,) = typed(caught.value)
    assert fsdpckpt.inspect(source, ignore_file=[glob])


@pytest.mark.parametrize(
    ("label", "glob"),
    [
        ("/run/final/model.safetensors", "final/model.safetensors"),
        ("/run/model_world_size_12_rank_0.pt .. model_world_size_12_rank_11.pt", "model_world_size_12_rank_*.pt"),
        ("/run/x/rank0-of-2-model.bin .. rank1-of-2-model.bin", "x/rank*-of-2-model.bin"),
        ("/run/model-*.safetensors", "model-*.safetensors"),
        ("/run/model.safetensors.index.json", "model*.safetensors*"),
        ("/run", ""),
    ],
)
def test_a_part_is_named_by_the_glob_that_leaves_it_out(label: str, glob: str) -> None:
    assert glob_of(label, "/run/") == glob


def test_a_glob_that_matches_nothing_is_an_error(tmp_path: Path) -> None:
    accelerate(source := tmp_path / "state", "model.safetensors")
    shutil.rmtree(source / "optimizer_0")
    with pytest.raises(UsageError, match="matches no file"):
        fsdpckpt.inspect(source, ignore_file=["model.safetensors", "nowhere.pt"])
    torch.save(MODEL, tmp_path / "model.pt")
    with pytest.raises(UsageError, match="matches no file"):
        fsdpckpt.verify(tmp_path / "model.pt", ignore_file=["model.pt"])
