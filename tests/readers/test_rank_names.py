"""Files of raw optimizers say nowhere who saved them but in the name of the folder inside."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import torch

from fsdpckpt.ir.checkpoint import Layout
from fsdpckpt.readers.torch_ranks import check_names
from fsdpckpt.storage.sources import Sources
from tests.makers import Change, Make, add_copy, files, move, put, swap
from tests.readers.contents import opened
from tests.refusals import Refusal, corrupt, each_of

NAME = "optim_world_size_{w}_rank_{r}.pt"


def state(rank: int) -> Any:
    moment = torch.randn(9, generator=torch.Generator().manual_seed(rank))
    return {"state": {0: {"exp_avg": moment}}, "param_groups": [{"lr": 0.1, "params": [0]}]}


def saved(*changes: Change, world: int = 3, name: str = NAME) -> Make:
    return files({name.format(w=world, r=rank): state(rank) for rank in range(world)}, *changes)


def of_a_larger_run(directory: Path) -> None:
    """The second file is that of a run of four ranks."""
    four = NAME.format(w=4, r=1)
    put(four, state(1))(directory)
    (directory / four).replace(directory / NAME.format(w=3, r=1))


def swapped(name: str) -> Refusal:
    first, second = (name.format(w=3, r=rank) for rank in (1, 2))
    expected = (
        f"\n  - DIR/{first}: expected rank 1, saved as {Path(second).stem}, by rank 2",
        f"\n  - DIR/{second}: expected rank 2, saved as {Path(first).stem}, by rank 1",
    )
    says = ("swapped rank files: 2 files", *expected)
    return corrupt(f"swapped {name}", saved(swap(first, second), name=name), *says, about={"file": f"DIR/{first}"})


STALE = "expected 3 ranks, saved as optim_world_size_4_rank_1, by one of 4"
REFUSALS = (
    *(swapped(name) for name in (NAME, "optim_rank{r}.bin", "optim_{r}.pt")),
    corrupt("a file of a larger run", saved(of_a_larger_run), "stale rank files: 1 file was", STALE),
)


@each_of(REFUSALS)
def test_it_is_refused(refusal: Refusal, tmp_path: Path) -> None:
    refusal.require(tmp_path)


@pytest.mark.parametrize("name", ["random_states_{r}.pkl", "rng_state_{r}.pth"])
def test_random_states_that_more_ranks_share_are_not_called_swapped(name: str, tmp_path: Path) -> None:
    paths = [name.format(r=rank) for rank in range(3)]
    saved(add_copy(paths[0], paths[2]), name=name)(tmp_path)
    with Sources() as sources:
        check_names({rank: str(tmp_path / path) for rank, path in enumerate(paths)}, sources)


def through_file_objects(directory: Path) -> None:
    """torch.save does not know the names then."""
    for path in directory.iterdir():
        torch.save(torch.load(path), buffer := io.BytesIO())
        path.write_bytes(buffer.getvalue())


TURNED = [move(f"moments_rank_{rank}.pt", NAME.format(w=3, r=(rank + 1) % 3)) for rank in range(3)]
LONGER = [move(f"optim_rank_{rank}.pt", NAME.format(w=3, r=rank)) for rank in range(3)]


@pytest.mark.parametrize(
    "make",
    [
        saved(),
        saved(through_file_objects),
        saved(*TURNED, name="moments_rank_{r}.pt"),
        saved(*LONGER, name="optim_rank_{r}.pt"),
    ],
    ids=["as it is", "file objects", "names of another pattern", "longer names"],
)
def test_these_names_say_nothing(make: Make, tmp_path: Path) -> None:
    (tmp_path / "step_1").mkdir()
    make(tmp_path / "step_1")
    (tmp_path / "step_1").rename(tmp_path / "step_2")  # nor does that of the directory
    assert opened(tmp_path / "step_2").layout is Layout.FLATTENED
