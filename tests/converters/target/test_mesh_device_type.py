"""DTensors in files by rank say the device type of the mesh that a loading model has."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import fsdpckpt
from fsdpckpt.errors import NeedsInformationError

CUT = {"to": "sharded", "container": "torch", "world_size": 3, "buffers": ["none"]}


@pytest.fixture
def full(tmp_path: Path) -> str:
    path = str(tmp_path / "full.pt")
    torch.manual_seed(7)
    torch.save({"model": {"a.weight": torch.rand(7, 3), "b.weight": torch.rand(2, 5)}}, path)
    return path


def _devices(directory: Path) -> set[str]:
    """The device types of the meshes in the files of ``directory``."""
    files = sorted(directory.glob("*.pt"))
    assert len(files) == 3
    held = [torch.load(file, weights_only=False) for file in files]
    return {tensor.device_mesh.device_type for state in held for tensor in state.values()}


def test_a_source_that_does_not_say_gives_a_cpu_mesh_and_a_note(full: str, tmp_path: Path) -> None:
    report = fsdpckpt.convert(full, str(tmp_path / "ranks"), **CUT)
    assert _devices(tmp_path / "ranks") == {"cpu"}
    assert [note.message for note in report.notes if "a mesh of cpu devices" in note.message]


def test_the_device_type_of_the_source_is_kept(full: str, tmp_path: Path) -> None:
    fsdpckpt.convert(full, str(tmp_path / "gpu"), mesh_device="cuda", **CUT)
    report = fsdpckpt.convert(str(tmp_path / "gpu"), str(tmp_path / "again"), **CUT)
    assert _devices(tmp_path / "again") == {"cuda"}
    assert not [note for note in report.notes if "record a mesh of" in note.message]
    fsdpckpt.convert(str(tmp_path / "gpu"), str(tmp_path / "other"), mesh_device="cpu", **CUT)
    assert _devices(tmp_path / "other") == {"cpu"}


def test_two_device_types_in_one_source_have_to_be_decided(full: str, tmp_path: Path) -> None:
    mixed = tmp_path / "mixed"
    mixed.mkdir()
    for device in ("cuda", "xla"):
        fsdpckpt.convert(full, str(tmp_path / device), mesh_device=device, **CUT)
    for rank, device in enumerate(("cuda", "cuda", "xla")):
        name = f"model_world_size_3_rank_{rank}.pt"
        (mixed / name).write_bytes((tmp_path / device / name).read_bytes())
    with pytest.raises(NeedsInformationError, match="several device types") as caught:
        fsdpckpt.convert(str(mixed), str(tmp_path / "out"), **CUT)
    assert "--mesh-device" in str(caught.value.next_step)
