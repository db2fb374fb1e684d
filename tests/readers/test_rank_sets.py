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


@pytest.mark.parametrize("name", ["rank{}.pt", "optim_rank{}.pt", "rank_{}.bin"])
def test_rank_0_is_missed_where_the_names_say_rank(name: str) -> None:
    (found,), single = group_ranks([name.format(rank) for rank in (1, 2, 3)], "run")
    assert (found.missing(), single) == ([name.format(0)], [])


def test_files_of_other_worlds_and_other_parts_are_other_sets() -> None:
    names = [f"rank{rank}-of-{world}-{part}.pt" for world in (1, 2) for rank in range(world) for part in ("a", "b")]
    found, single = group_ranks(names, "run")
    assert sorted((one.stem, one.world, len(one.files)) for one in found) == [
        ("a", 1, 1), ("a", 2, 2), ("b", 1, 1), ("b", 2, 2),
    ]  # fmt: skip
    assert not single


@pytest.mark.parametrize("name", ["model-{:05d}-of-00003.bin", "checkpoint-{}000.pt", "step_{}.pt", "shard-{}.pt"])
def test_numbers_of_parts_and_of_steps_are_no_ranks(name: str) -> None:
    names = sorted(name.format(number) for number in (1, 2, 3))
    assert group_ranks(names, "run") == ([], names)


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


def test_numbers_that_are_no_ranks_may_come_twice() -> None:
    names = ["ab-7.pt", "ab_7.pt", "ab_9.pt"]
    assert group_ranks(names, "run") == ([], names)


@pytest.mark.parametrize(
    ("names", "sets"),
    [
        (["lora_rank16.pt", "model.pt"], []),
        (["lora_rank16.pt", "m_rank0.pt", "m_rank1.pt"], ["m"]),
        (["lora_rank16.pt", "m_rank3.pt", "o_rank3.pt"], ["m", "o"]),
        (["frank5.pt", "frank6.pt", "model.pt"], []),
        (["rank0.pt"], ["rank"]),
    ],
)
def test_the_number_of_one_file_that_is_beyond_all_ranks_is_none(names: list[str], sets: list[str]) -> None:
    found, single = group_ranks(names, "run")
    assert [rank_set.stem for rank_set in found] == sets
    assert single == sorted(set(names) - {name for rank_set in found for name in rank_set.files.values()})


def test_one_file_with_the_number_of_a_rank_that_others_have_lacks_the_other_ranks() -> None:
    found, _ = group_ranks(["model_rank0.pt", "model_rank1.pt", "model_rank2.pt", "optim_rank1.pt"], "run")
    assert [rank_set.missing() for rank_set in found] == [[], ["optim_rank0.pt", "optim_rank2.pt"]]
