"""File names that differ in a rank: which belong together, and what the missing ones are called."""

from __future__ import annotations

import pytest

from fsdpckpt.errors import NeedsInformationError
from fsdpckpt.readers.torch_ranks import group_ranks


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
