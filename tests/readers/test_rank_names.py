"""Names of rank files: which belong together, what the missing ones are called, and who saved which file.

Of a raw optimizer only the name of the folder inside of the file says it.
"""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import torch

from fsdpckpt.errors import NeedsInformationError
from fsdpckpt.ir.checkpoint import Layout
from fsdpckpt.readers.torch_ranks import check_names, group_ranks
from fsdpckpt.storage.sources import Sources
from tests.makers import Change, Make, add_copy, files, move, put, swap
from tests.readers.contents import opened
from tests.refusals import Refusal, corrupt, each_of


@pytest.mark.parametrize(
    ("name", "world", "bare"),
    [
        ("model_world_size_3_rank_{}.pt", 3, False),
        ("rank{}-of-3-optimizer.pt", 3, False),
        ("run_rank-{:08d}-of-00000003.pth", 3, False),
        ("step-20-rank-{:08d}-of-00000003.pt", 3, False),
        ("rank{}-of-3.pth", 3, False),
        ("rank{}.pt", 3, False),
        ("rank_{:02d}.pth", 3, False),
        ("pytorch_model_fsdp_0_rank{}.bin", 3, False),
        ("last-model_part-0-shard{}.pt", None, True),
        ("model_{}.pt", None, True),
    ],
)
def test_the_name_of_a_missing_rank_is_made_from_the_others(name: str, world: int | None, bare: bool) -> None:
    names = [name.format(rank) for rank in (0, 2)]
    (found,), single = group_ranks([*names, "vocab.pt"], "run")
    assert (found.world, found.bare, found.files, single) == (world, bare, {0: names[0], 2: names[1]}, ["vocab.pt"])
    assert found.missing() == [name.format(1)]


@pytest.mark.parametrize(
    ("names", "missing"),
    [
        *(([name.format(rank) for rank in (1, 2, 3)], [[name.format(0)]])
          for name in ("rank{}.pt", "optim_rank{}.pt", "rank_{}.bin")),  # rank 0 is missed where the names say rank
        (["o_0_rank0.bin", "o_0_rank3.bin"], [["o_0_rank1.bin", "o_0_rank2.bin"]]),
        (["model_rank0.pt", "model_rank1.pt", "model_rank2.pt", "optim_rank1.pt"],
         [[], ["optim_rank0.pt", "optim_rank2.pt"]]),
    ],
)  # fmt: skip
def test_the_ranks_that_a_set_lacks_are_named(names: list[str], missing: list[list[str]]) -> None:
    found, single = group_ranks(names, "run")
    assert ([rank_set.missing() for rank_set in found], single) == (missing, [])


OF_WORLDS = [f"rank{rank}-of-{world}-{part}.pt" for world in (1, 2) for rank in range(world) for part in ("a", "b")]
SETS: list[tuple[list[str], list[tuple[str, int | None, list[int]]]]] = [
    (["model_0.pt", "model_1.pt"], [("model", None, [0, 1])]),
    (["model_0.pt", "model_1.pt", "model_3.pt"], [("model", None, [0, 1, 3])]),
    (["optimizer_0_rank10.bin", "optimizer_0_rank9.bin"], [("optimizer_0", 11, [9, 10])]),
    (["rng_state_0.pth", "rng_state_1.pth", "scheduler.pt"], [("rng_state", None, [0, 1])]),
    (["a_world_size_2_rank_0.pt", "a_world_size_4_rank_0.pt"], [("a", 2, [0]), ("a", 4, [0])]),
    (OF_WORLDS, [("a", 1, [0]), ("a", 2, [0, 1]), ("b", 1, [0]), ("b", 2, [0, 1])]),
    # The number of one file that is beyond all ranks is none
    (["lora_rank16.pt", "model.pt"], []),
    (["lora_rank16.pt", "m_rank0.pt", "m_rank1.pt"], [("m", 2, [0, 1])]),
    (["lora_rank16.pt", "m_rank3.pt", "o_rank3.pt"], [("m", 4, [3]), ("o", 4, [3])]),
    (["frank5.pt", "frank6.pt", "model.pt"], []),
    (["rank0.pt"], [("rank", None, [0])]),
    # Numbers of parts and of steps are none of ranks, and may come twice
    (["m_0.pt", "m_1000.pt", "m_2000.pt"], []),
    (["m_1.pt", "m_2.pt"], []),
    (["epoch_0.pt", "epoch_1.pt", "step-0.pt", "step-1.pt"], []),
    (["model-00001-of-00002.bin", "model-00000-of-00002.bin"], []),
    (["optimizer.bin", "optimizer_1.bin"], []),
    (["ab-7.pt", "ab_7.pt", "ab_9.pt"], []),
    *(
        ([name.format(number) for number in (1, 2, 3)], [])
        for name in ("model-{:05d}-of-00003.bin", "checkpoint-{}000.pt", "step_{}.pt", "shard-{}.pt")
    ),
]


@pytest.mark.parametrize(("names", "sets"), SETS)
def test_names_are_grouped_by_rank(names: list[str], sets: list[tuple[str, int | None, list[int]]]) -> None:
    found, single = group_ranks(names, "run")
    assert sorted((one.stem, one.world, sorted(one.files)) for one in found) == sets
    assert single == sorted(set(names) - {name for one in found for name in one.files.values()})


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("m_rank_{}.pt", "m-rank{}.pt"),
        ("m_rank_{}.pt", "m_rank_{:02d}.pt"),
        ("rank{}-of-2-m.pt", "m-rank{}-of-2.pt"),
        ("model_{}.pt", "model-{}.pt"),
    ],
)
def test_files_of_two_saves_that_would_be_the_same_ranks_are_refused(one: str, other: str) -> None:
    both = sorted([one.format(1), other.format(1)])
    with pytest.raises(NeedsInformationError) as refused:
        group_ranks([one.format(0), *both], "run")
    assert list(refused.value.details) == [" and ".join(both)]
    assert (refused.value.what, refused.value.file) == ("run: 1 rank has two files", "run")


NAME = "optim_world_size_{w}_rank_{r}.pt"


def slices_of(rank: int) -> Any:
    moment = torch.randn(9, generator=torch.Generator().manual_seed(rank))
    return {"state": {0: {"exp_avg": moment}}, "param_groups": [{"lr": 0.1, "params": [0]}]}


def saved(*changes: Change, world: int = 3, name: str = NAME) -> Make:
    return files({name.format(w=world, r=rank): slices_of(rank) for rank in range(world)}, *changes)


def of_a_larger_run(directory: Path) -> None:
    """The second file is that of a run of four ranks."""
    four = NAME.format(w=4, r=1)
    put(four, slices_of(1))(directory)
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
