"""Checkpoints whose tensors lie on several meshes of all ranks, as torchtitan has them with expert parallelism."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import fsdpckpt
from fsdpckpt.errors import NeedsInformationError, UsageError
from tests.converters.jobs import RANK_FILES, messages, refused
from tests.converters.meshes import assert_held, on_each_rank, rules, state_of, to_ranks
from tests.readers.played_ranks import save_as_ranks
from tests.writers.experts import ExpertMesh

pytestmark = pytest.mark.filterwarnings("ignore")

FOUR, EIGHT, HYBRID = ExpertMesh(1, 4, 2), ExpertMesh(1, 8, 2), ExpertMesh(2, 4, 2)
OnMesh = Callable[..., Path]


@pytest.fixture
def four(on_mesh: OnMesh) -> Path:
    return on_mesh(FOUR)


@pytest.fixture
def full(on_mesh: OnMesh) -> Path:
    return on_mesh(FOUR, full=True)


def test_each_mesh_is_resized_by_a_new_world_size(four: Path) -> None:
    report = to_ranks(four, "new", world_size=8, verify="full")
    assert messages(report, "fsdp=4 and efsdp=2,ep=2 are resized to fsdp=8 and efsdp=4,ep=2")
    assert_held("new", EIGHT)
    to_ranks("new", "back", world_size=4)
    assert_held("back", FOUR)


@pytest.mark.parametrize(
    "case",
    [ExpertMesh(1, 2, 2), ExpertMesh(1, 4, 4), EIGHT, HYBRID, ExpertMesh(2, 8, 4), ExpertMesh(4, 16, 8)],
    ids=str,
)
def test_a_placements_file_puts_experts_on_a_mesh_of_their_own(full: Path, case: ExpertMesh) -> None:
    to_ranks(full, "new", mesh=case.options, placements=rules(case.placements))
    assert_held("new", case, range(0, case.world_size, max(1, case.world_size // 5)))


@pytest.mark.parametrize("options", [{}, {"world_size": 8}, {"mesh": EIGHT.options}], ids=str)
def test_like_a_checkpoint_with_several_meshes(four: Path, options: dict[str, Any]) -> None:
    fsdpckpt.convert(four, "dcp", to="sharded", container="dcp", world_size=4)
    to_ranks("dcp", "new", like=four, **options)
    assert_held("new", EIGHT if options else FOUR)


def test_from_one_such_mesh_to_another_and_to_other_sizes(on_mesh: OnMesh, four: Path) -> None:
    to_ranks(four, "hybrid", like=on_mesh(HYBRID))
    assert_held("hybrid", HYBRID, range(0, 8, 3))
    to_ranks("hybrid", "back", like=four)
    assert_held("back", FOUR)
    case = ExpertMesh(1, 4, 4)
    to_ranks(four, "new", mesh=case.options[::-1])
    assert_held("new", case)


@pytest.mark.parametrize("flavor", ["plain", "torchtitan"])
@pytest.mark.parametrize(("case", "even"), [(ExpertMesh(2, 2, 2), True), (EIGHT, False)], ids=str)
def test_dcp_has_the_items_of_both_meshes(full: Path, case: ExpertMesh, even: bool, flavor: str) -> None:
    options: dict[str, Any] = {"flavor": flavor, "container": "dcp", "mesh": case.options}
    fsdpckpt.convert(full, "ours", to="sharded", placements=rules(case.placements), **options)
    assert fsdpckpt.diff("ours", full).same
    ranks = [state_of(case) for _ in on_each_rank(case.world_size)]
    flat = flavor == "torchtitan"  # whose model stands at the top, and has the optimizer's keys dotted beside it
    save_as_ranks(Path("theirs"), lambda rank: ranks[rank]["model"] if flat else ranks[rank], case.world_size)
    ours, theirs = (pickle.loads(Path(name, ".metadata").read_bytes()) for name in ("ours", "theirs"))
    names = ["dense.weight", "dense.bias", "router.weight"]
    for name in [*names, "experts.weight"] if even else names:  # torch declares wrong boxes of uneven _StridedShards
        key = name if flat else f"model.{name}"
        assert ours.state_dict_metadata[key] == theirs.state_dict_metadata[key]
        mine, real = (
            {index.offset: info.relative_path for index, info in one.storage_data.items() if index.fqn == key}
            for one in (ours, theirs)
        )
        assert mine.keys() == real.keys() and (flat or mine == real), name


TWO = ("fsdp=4", "efsdp=2,ep=2")


@pytest.mark.parametrize(
    ("meshes", "placements", "message"),
    [
        (("fsdp=8", "efsdp=2,ep=2"), {"*": {"fsdp": "Shard(0)"}}, "fsdp=8' has 8 ranks, and mesh='efsdp=2,ep=2' has 4"),
        (TWO, {"*": {"tp": "Shard(0)"}}, "mesh dimension tp, which mesh='fsdp=4' mesh='efsdp=2,ep=2' does"),
        (TWO, {"*": {"fsdp": "Shard(0)", "ep": "Shard(1)"}}, r"\* does not say on which mesh"),
        (("a=2,b=2", "b=2,c=2"), {"*": {"b": "Shard(0)"}}, r"\* does not say on which mesh"),
    ],
)
def test_meshes_and_placements_that_do_not_fit_are_refused(
    full: Path, meshes: tuple[str, ...], placements: dict[str, Any], message: str
) -> None:
    refused(UsageError, message, full, "new", **RANK_FILES, mesh=meshes, placements=rules(placements))


def test_a_dimension_of_several_meshes_is_of_any_where_it_has_the_same_ranks(full: Path) -> None:
    placements = {**HYBRID.placements, "router.*": {"dp_replicate": "Replicate()"}}
    in_order = dict(sorted(placements.items(), key=lambda entry: entry[0] == "*"))
    to_ranks(full, "new", mesh=HYBRID.options, placements=rules(in_order))
    for _ in on_each_rank(8, [5]):
        found = torch.load("new/model_world_size_8_rank_5.pt")["router.weight"]
        assert found.device_mesh.mesh.tolist() == [1, 5] and found.to_local().shape == (6, 3)


def test_a_world_size_that_does_not_divide_names_all_meshes_to_type(on_mesh: OnMesh, full: Path) -> None:
    words = "does not fit the mesh"
    error = refused(NeedsInformationError, words, on_mesh(FOUR), "new", **RANK_FILES, world_size=3)
    assert list(error.details) == ["--mesh fsdp=3 --mesh efsdp=3,ep=1"] and error.expected == "a multiple of 2"
    error = refused(NeedsInformationError, words, on_mesh(HYBRID), "new", **RANK_FILES, world_size=6)
    assert list(error.details) == [
        "--mesh dp_replicate=2,fsdp=3 --mesh dp_replicate=2,efsdp=3,ep=1",
        "--mesh dp_replicate=1,fsdp=6 --mesh dp_replicate=1,efsdp=3,ep=2",
        "--mesh dp_replicate=1,fsdp=6 --mesh dp_replicate=1,efsdp=6,ep=1",
    ]
    to_ranks(on_mesh(HYBRID), "new", mesh=("dp_replicate=1,fsdp=6", "dp_replicate=1,efsdp=3,ep=2"))
    assert fsdpckpt.diff("new", full).same


def test_one_mesh_is_not_taken_for_several(four: Path, full: Path) -> None:
    words = "cannot tell how tensors are placed on mesh='efsdp=2,ep=2'"
    error = refused(NeedsInformationError, words, four, "new", **RANK_FILES, mesh="efsdp=2,ep=2")
    assert "all its meshes (--mesh fsdp=4 --mesh efsdp=2,ep=2" in str(error.next_step)
    refused(UsageError, "does not have the dimensions of like", full, "new", **RANK_FILES, like=four, mesh="fsdp=4")
    to_ranks(four, "new", mesh="3")  # rows over one dimension
    assert fsdpckpt.diff("new", full).same
    refused(UsageError, "not fit flat parameters", four, "flat", to="flattened", mesh=FOUR.options, unit="none")


def test_process_groups_are_those_of_a_job_that_makes_the_meshes_in_this_order(on_mesh: OnMesh, full: Path) -> None:
    to_ranks(full, "new", like=on_mesh(HYBRID))
    for rank in on_each_rank(8, (0, 3, 6)):
        found = torch.load(f"new/model_world_size_8_rank_{rank}.pt")
        expected = state_of(HYBRID)["model"]
        for name in ("dense.weight", "experts.weight"):
            names = expected[name].device_mesh._dim_group_names
            assert found[name].device_mesh._dim_group_names == names and len(set(names)) == len(names)
