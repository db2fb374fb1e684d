"""Checkpoints whose tensors lie on several meshes of all ranks, as torchtitan has them with expert parallelism."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

import fsdpckpt
from fsdpckpt.errors import NeedsInformationError, UsageError
from tests.readers.played_ranks import as_rank, save_as_ranks
from tests.writers.experts import ExpertMesh
from tests.writers.meshes import assert_equal, with_moments

pytestmark = pytest.mark.filterwarnings("ignore")

FOUR, EIGHT, HYBRID = ExpertMesh(1, 4, 2), ExpertMesh(1, 8, 2), ExpertMesh(2, 4, 2)


def save(case: ExpertMesh, path: Path) -> None:
    """One file a rank and section, as ``torch.save`` of real state dicts makes them."""
    path.mkdir()
    for rank in range(case.world_size):
        with as_rank(rank, case.world_size):
            state = with_moments(case.sharded())
            torch.save(state["model"], path / f"model_world_size_{case.world_size}_rank_{rank}.pt")
            torch.save(state["optimizer"], path / f"optim_world_size_{case.world_size}_rank_{rank}.pt")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("experts")
    save(FOUR, base / "four")
    save(HYBRID, base / "hybrid")
    fsdpckpt.convert(base / "four", base / "full.pt", to="full")
    fsdpckpt.convert(base / "four", base / "dcp", to="sharded", container="dcp", world_size=4)
    return base


def to_ranks(source: Path, target: Path, **options: Any) -> Any:
    return fsdpckpt.convert(source, target, to="sharded", container="torch", **options)


def placements(case: ExpertMesh, path: Path) -> Path:
    path.write_text(json.dumps(case.placements))
    return path


def assert_held(path: Path, case: ExpertMesh, *, step: int = 1) -> None:
    """Every rank's files, or every ``step``-th's, hold what the real model holds there."""
    for rank in range(0, case.world_size, step):
        with as_rank(rank, case.world_size):
            expected = with_moments(case.sharded())
            for section, value in (("model", expected["model"]), ("optim", expected["optimizer"])):
                file = path / f"{section}_world_size_{case.world_size}_rank_{rank}.pt"
                assert_equal(torch.load(file, weights_only=True), value, section, first_mesh=False)


def test_each_mesh_is_resized_by_a_new_world_size(saved: Path, tmp_path: Path) -> None:
    report = to_ranks(saved / "four", tmp_path / "new", world_size=8, verify="full")
    assert any("fsdp=4 and efsdp=2,ep=2 are resized to fsdp=8 and efsdp=4,ep=2" in one.message for one in report.notes)
    assert_held(tmp_path / "new", EIGHT)
    to_ranks(tmp_path / "new", tmp_path / "back", world_size=4)
    assert_held(tmp_path / "back", FOUR)


@pytest.mark.parametrize(
    "case",
    [ExpertMesh(1, 2, 2), ExpertMesh(1, 4, 4), EIGHT, HYBRID, ExpertMesh(2, 8, 4), ExpertMesh(4, 16, 8)],
    ids=str,
)
def test_a_placements_file_puts_experts_on_a_mesh_of_their_own(saved: Path, tmp_path: Path, case: ExpertMesh) -> None:
    rules = placements(case, tmp_path / "placements.json")
    to_ranks(saved / "full.pt", tmp_path / "new", mesh=case.options, placements=rules)
    assert_held(tmp_path / "new", case, step=max(1, case.world_size // 5))


@pytest.mark.parametrize("options", [{}, {"world_size": 8}, {"mesh": EIGHT.options}], ids=str)
def test_like_a_checkpoint_with_several_meshes(saved: Path, tmp_path: Path, options: dict[str, Any]) -> None:
    to_ranks(saved / "dcp", tmp_path / "new", like=saved / "four", **options)
    assert_held(tmp_path / "new", EIGHT if options else FOUR)


def test_from_one_such_mesh_to_another(saved: Path, tmp_path: Path) -> None:
    to_ranks(saved / "four", tmp_path / "hybrid", like=saved / "hybrid")
    assert_held(tmp_path / "hybrid", HYBRID, step=3)
    to_ranks(tmp_path / "hybrid", tmp_path / "back", like=saved / "four")
    assert_held(tmp_path / "back", FOUR)


def test_the_meshes_of_the_source_in_other_sizes(saved: Path, tmp_path: Path) -> None:
    case = ExpertMesh(1, 4, 4)
    to_ranks(saved / "four", tmp_path / "new", mesh=case.options[::-1])
    assert_held(tmp_path / "new", case)


@pytest.mark.parametrize("flavor", ["plain", "torchtitan"])
@pytest.mark.parametrize(("case", "even"), [(ExpertMesh(2, 2, 2), True), (EIGHT, False)], ids=str)
def test_dcp_has_the_items_of_both_meshes(
    saved: Path, tmp_path: Path, case: ExpertMesh, even: bool, flavor: str
) -> None:
    options: dict[str, Any] = {"flavor": flavor, "container": "dcp", "mesh": case.options}
    rules = placements(case, tmp_path / "placements.json")
    fsdpckpt.convert(saved / "full.pt", tmp_path / "ours", to="sharded", placements=rules, **options)
    assert fsdpckpt.diff(tmp_path / "ours", saved / "full.pt").same
    ranks: list[dict[str, Any]] = []
    for rank in range(case.world_size):
        with as_rank(rank, case.world_size):
            ranks.append(with_moments(case.sharded()))
    flat = flavor == "torchtitan"  # whose model stands at the top, and has the optimizer's keys dotted beside it
    save_as_ranks(tmp_path / "theirs", lambda rank: ranks[rank]["model"] if flat else ranks[rank], case.world_size)
    ours, theirs = (pickle.loads((tmp_path / name / ".metadata").read_bytes()) for name in ("ours", "theirs"))
    names = ["dense.weight", "dense.bias", "router.weight"]
    for name in [*names, "experts.weight"] if even else names:  # torch declares wrong boxes of uneven _StridedShards
        key = name if flat else f"model.{name}"
        assert ours.state_dict_metadata[key] == theirs.state_dict_metadata[key]
        mine, real = (
            {index.offset: info.relative_path for index, info in one.storage_data.items() if index.fqn == key}
            for one in (ours, theirs)
        )
        assert mine.keys() == real.keys() and (flat or mine == real), name


@pytest.mark.parametrize(
    ("meshes", "rules", "message"),
    [
        (("fsdp=8", "efsdp=2,ep=2"), {"*": {"fsdp": "Shard(0)"}}, "fsdp=8' has 8 ranks, and mesh='efsdp=2,ep=2' has 4"),
        (("4", "efsdp=2,ep=2"), {"*": {"fsdp": "Shard(0)"}}, "mesh='4' is one of several, but has no names"),
        (("a=2,b=2", "b=1,a=4"), {"*": {"a": "Shard(0)"}}, "two meshes have the dimensions a, b"),
        (
            ("fsdp=4", "efsdp=2,ep=2"),
            {"*": {"tp": "Shard(0)"}},
            "mesh dimension tp, which mesh='fsdp=4' mesh='efsdp=2,ep=2' does",
        ),
        (("fsdp=4", "efsdp=2,ep=2"), {"*": {"fsdp": "Shard(0)", "ep": "Shard(1)"}}, r"\* does not say on which mesh"),
        (("a=2,b=2", "b=2,c=2"), {"*": {"b": "Shard(0)"}}, r"\* does not say on which mesh"),
    ],
)
def test_meshes_and_placements_that_do_not_fit_are_refused(
    saved: Path, tmp_path: Path, meshes: tuple[str, ...], rules: dict[str, Any], message: str
) -> None:
    (tmp_path / "placements.json").write_text(json.dumps(rules))
    with pytest.raises(UsageError, match=message):
        to_ranks(saved / "full.pt", tmp_path / "new", mesh=meshes, placements=tmp_path / "placements.json")


def test_a_dimension_of_several_meshes_is_of_any_where_it_has_the_same_ranks(saved: Path, tmp_path: Path) -> None:
    rules = {**HYBRID.placements, "router.*": {"dp_replicate": "Replicate()"}}
    order = dict(sorted(rules.items(), key=lambda entry: entry[0] == "*"))
    (tmp_path / "placements.json").write_text(json.dumps(order))
    to_ranks(saved / "full.pt", tmp_path / "new", mesh=HYBRID.options, placements=tmp_path / "placements.json")
    with as_rank(5, 8):
        found = torch.load(tmp_path / "new" / "model_world_size_8_rank_5.pt", weights_only=True)["router.weight"]
        assert found.device_mesh.mesh.tolist() == [1, 5] and found.to_local().shape == (6, 3)


def test_a_world_size_that_does_not_divide_names_all_meshes_to_type(saved: Path, tmp_path: Path) -> None:
    with pytest.raises(NeedsInformationError, match="does not fit the mesh") as error:
        to_ranks(saved / "four", tmp_path / "new", world_size=3)
    assert list(error.value.details) == ["--mesh fsdp=3 --mesh efsdp=3,ep=1"]
    assert error.value.expected == "a multiple of 2"
    with pytest.raises(NeedsInformationError, match="does not fit the mesh") as error:
        to_ranks(saved / "hybrid", tmp_path / "new", world_size=6)
    assert list(error.value.details) == [
        "--mesh dp_replicate=2,fsdp=3 --mesh dp_replicate=2,efsdp=3,ep=1",
        "--mesh dp_replicate=1,fsdp=6 --mesh dp_replicate=1,efsdp=3,ep=2",
        "--mesh dp_replicate=1,fsdp=6 --mesh dp_replicate=1,efsdp=6,ep=1",
    ]
    to_ranks(saved / "hybrid", tmp_path / "new", mesh=("dp_replicate=1,fsdp=6", "dp_replicate=1,efsdp=3,ep=2"))
    assert fsdpckpt.diff(tmp_path / "new", saved / "full.pt").same


def test_one_mesh_is_not_taken_for_several(saved: Path, tmp_path: Path) -> None:
    with pytest.raises(
        NeedsInformationError, match="cannot tell how tensors are placed on mesh='efsdp=2,ep=2'"
    ) as error:
        to_ranks(saved / "four", tmp_path / "new", mesh="efsdp=2,ep=2")
    assert "all its meshes (--mesh fsdp=4 --mesh efsdp=2,ep=2" in str(error.value.next_step)
    with pytest.raises(UsageError, match="does not have the dimensions of like"):
        to_ranks(saved / "dcp", tmp_path / "new", like=saved / "four", mesh="fsdp=4")
    to_ranks(saved / "four", tmp_path / "new", mesh="3")  # rows over one dimension
    assert fsdpckpt.diff(tmp_path / "new", saved / "full.pt").same
    with pytest.raises(UsageError, match="not fit flat parameters"):
        fsdpckpt.convert(saved / "four", tmp_path / "flat", to="flattened", mesh=FOUR.options, unit="none")


def test_process_groups_are_those_of_a_job_that_makes_the_meshes_in_this_order(saved: Path, tmp_path: Path) -> None:
    to_ranks(saved / "full.pt", tmp_path / "new", like=saved / "hybrid")
    for rank in (0, 3, 6):
        with as_rank(rank, 8):
            found = torch.load(tmp_path / "new" / f"model_world_size_8_rank_{rank}.pt", weights_only=True)
            expected = with_moments(HYBRID.sharded())["model"]
            for name in ("dense.weight", "experts.weight"):
                names = expected[name].device_mesh._dim_group_names
                assert found[name].device_mesh._dim_group_names == names and len(set(names)) == len(names)
