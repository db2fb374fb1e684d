"""Files of raw optimizers say nowhere who saved them but in the name of the folder inside."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import torch

from fsdpckpt.errors import SourceCorruptError
from fsdpckpt.ir.checkpoint import Layout
from fsdpckpt.readers.torch_ranks import check_names
from fsdpckpt.storage.sources import Sources
from tests.readers.contents import opened


def state(rank: int) -> Any:
    moment = torch.randn(9, generator=torch.Generator().manual_seed(rank))
    return {"state": {0: {"exp_avg": moment}}, "param_groups": [{"lr": 0.1, "params": [0]}]}


def save(directory: Path, world: int = 3, name: str = "optim_world_size_{w}_rank_{r}.pt") -> list[Path]:
    directory.mkdir(exist_ok=True)
    paths = [directory / name.format(w=world, r=rank) for rank in range(world)]
    for rank, path in enumerate(paths):
        torch.save(state(rank), path)
    return paths


def swap(one: Path, other: Path) -> None:
    kept = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(kept)


@pytest.mark.parametrize("name", ["optim_world_size_{w}_rank_{r}.pt", "optim_rank{r}.bin", "optim_{r}.pt"])
def test_swapped_files_are_refused_and_listed(name: str, tmp_path: Path) -> None:
    paths = save(tmp_path, name=name)
    assert opened(tmp_path).layout is Layout.FLATTENED
    swap(paths[1], paths[2])
    with pytest.raises(SourceCorruptError, match="swapped rank files: 2 files") as error:
        opened(tmp_path)
    assert [detail.partition(": ")[0] for detail in error.value.details] == [str(paths[1]), str(paths[2])]
    assert f"expected rank 1, saved as {paths[2].stem}, by rank 2" in error.value.details[0]
    assert (error.value.exit_code, error.value.file) == (3, str(paths[1]))


def test_a_file_of_a_run_with_another_number_of_ranks_is_stale(tmp_path: Path) -> None:
    old = save(tmp_path / "old", 4)
    new = save(tmp_path / "new", 3)
    new[1].write_bytes(old[1].read_bytes())
    with pytest.raises(SourceCorruptError, match="stale rank files: 1 file was") as error:
        opened(tmp_path / "new")
    assert "expected 3 ranks, saved as optim_world_size_4_rank_1, by one of 4" in error.value.details[0]


@pytest.mark.parametrize("name", ["random_states_{r}.pkl", "rng_state_{r}.pth"])
def test_random_states_that_more_ranks_share_are_not_called_swapped(name: str, tmp_path: Path) -> None:
    paths = save(tmp_path, 3, name)
    paths[2].write_bytes(paths[0].read_bytes())
    with Sources() as sources:
        check_names({rank: str(path) for rank, path in enumerate(paths)}, sources)


def test_names_of_another_pattern_and_file_objects_say_nothing(tmp_path: Path) -> None:
    directories = tmp_path / "objects", tmp_path / "renamed", tmp_path / "shortened"
    for path in save(directories[0]):
        buffer = io.BytesIO()
        torch.save(state(int(path.stem[-1])), buffer)
        path.write_bytes(buffer.getvalue())
    for number, path in enumerate(save(directories[1], name="moments_rank_{r}.pt")):
        path.rename(directories[1] / f"optim_world_size_3_rank_{(number + 1) % 3}.pt")
    for number, path in enumerate(save(directories[2], name="optim_rank_{r}.pt")):
        path.rename(directories[2] / f"optim_world_size_3_rank_{number}.pt")
    assert [opened(directory).layout for directory in directories] == [Layout.FLATTENED] * 3


def test_a_renamed_directory_is_no_sign_of_anything(tmp_path: Path) -> None:
    save(tmp_path / "step_1")
    (tmp_path / "step_1").rename(tmp_path / "step_2")
    assert opened(tmp_path / "step_2").layout is Layout.FLATTENED
