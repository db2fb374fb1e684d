"""Conversions between meshes: what each rank gets is what FSDP2 itself holds there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

import fsdpckpt
from fsdpckpt.errors import NeedsInformationError, SourceMissingError, SourceUnrecognisedError, UsageError
from tests.cli.conftest import Run, run
from tests.converters.jobs import RANK_FILES, converted, messages, notes, recorded, refused, save
from tests.converters.meshes import (
    ODD,
    PLACEMENTS,
    SIZE,
    assert_held,
    on_each_rank,
    require_held,
    rules,
    save_each,
    state_of,
    to_ranks,
)
from tests.converters.test_ranks_apart import save_stages
from tests.oracle.compare import identical
from tests.writers.meshes import MeshCase, all_three, hsdp, over_tp

__all__ = ["run"]

pytestmark = pytest.mark.filterwarnings("ignore")

TP, HSDP, THREE = over_tp(2, 2), hsdp(2, 2), all_three(2, 2, 2)
DCP: dict[str, Any] = {"to": "sharded", "container": "dcp"}
OnMesh = Callable[..., Path]


@pytest.fixture
def full(on_mesh: OnMesh) -> Path:
    """One file, which says nothing of a mesh."""
    return on_mesh(TP, full=True)


# Another number of ranks


@pytest.mark.parametrize(
    ("source", "target"),
    [(TP, over_tp(4, 2)), (TP, over_tp(1, 2)), (HSDP, hsdp(2, 3)), (HSDP, hsdp(2, 1)), (THREE, all_three(2, 1, 2))],
    ids=str,
)
def test_a_new_world_size_changes_the_ranks_that_fsdp_shards_over(
    on_mesh: OnMesh, source: MeshCase, target: MeshCase
) -> None:
    report = to_ranks(on_mesh(source), "new", world_size=target.world_size, verify="full")
    assert_held("new", target)
    assert messages(report, f"is resized to {target.mesh}")


@pytest.mark.parametrize(
    ("source", "target"),
    [
        (over_tp(4, 4), over_tp(8, 4)),
        (hsdp(4, 4), hsdp(4, 8)),
        (all_three(2, 4, 4), all_three(2, 1, 4)),
        (MeshCase({"dp": 16}, ("dp",), rows=1), MeshCase({"dp": 64}, ("dp",), rows=1)),
    ],
    ids=str,
)
def test_files_of_many_ranks_are_read_and_resized(on_mesh: OnMesh, source: MeshCase, target: MeshCase) -> None:
    size = {"size": 16, "odd": 0} if source.rows else {"size": SIZE, "odd": ODD}  # 64 columns: both cut them
    to_ranks(on_mesh(source, **size), "target", world_size=target.world_size)
    assert_held("target", target, range(0, target.world_size, max(1, target.world_size // 5)), **size)


@pytest.mark.parametrize(("case", "there"), [(TP, 16), (THREE, 12)], ids=str)
def test_there_and_back_is_the_same_files(on_mesh: OnMesh, case: MeshCase, there: int) -> None:
    source, back = on_mesh(case), case.world_size
    to_ranks(source, "there", world_size=there)
    to_ranks("there", "back", world_size=back)
    to_ranks(source, "same", world_size=back)
    files = sorted(Path("back").glob("*.pt"))
    assert len(files) == 2 * back
    assert all(file.read_bytes() == Path("same", file.name).read_bytes() for file in files)
    assert_held("back", case, range(0, back, 3))


@pytest.mark.parametrize(
    ("case", "world_size", "meshes", "found"),
    [
        (TP, 3, ["dp_shard=3,tp=1"], over_tp(3, 1)),
        (
            THREE, 6,
            ["dp_replicate=1,dp_shard=3,tp=2", "dp_replicate=2,dp_shard=3,tp=1", "dp_replicate=1,dp_shard=6,tp=1"],
            all_three(1, 3, 2),
        ),
    ],
)  # fmt: skip
def test_a_world_size_that_does_not_divide_names_the_meshes_that_do_and_dcp_takes_it(
    on_mesh: OnMesh, case: MeshCase, world_size: int, meshes: list[str], found: MeshCase
) -> None:
    """A DCP directory loads on any mesh."""
    source = on_mesh(case)
    error = refused(NeedsInformationError, "", source, "new", **RANK_FILES, world_size=world_size)
    assert list(error.details) == [f"--mesh {mesh}" for mesh in meshes]
    to_ranks(source, "new", mesh=meshes[0])
    assert_held("new", found)
    ranks = 5 if case is THREE else world_size
    report = fsdpckpt.convert(source, "dcp", **DCP, world_size=ranks)
    assert messages(report, f"no mesh of {ranks} ranks has the other dimensions of")
    assert fsdpckpt.diff(source, "dcp").same


def test_replicas_that_do_not_divide_are_given_up_in_dcp_where_they_leave_no_trace(on_mesh: OnMesh) -> None:
    report = fsdpckpt.convert(on_mesh(HSDP), "dcp", **DCP, world_size=3)
    assert messages(report, "is resized to dp_replicate=1,dp_shard=3")
    assert fsdpckpt.diff(on_mesh(HSDP), "dcp").same
    refused(NeedsInformationError, "does not fit the mesh", on_mesh(HSDP), "new", **RANK_FILES, world_size=3)


# What --like and --placements say


@pytest.mark.parametrize("options", [{}, {"world_size": 8}, {"mesh": "dp_shard=1,tp=4"}])
def test_like_another_checkpoint(on_mesh: OnMesh, full: Path, options: dict[str, Any]) -> None:
    to_ranks(full, "new", like=on_mesh(TP), **options)
    assert_held("new", over_tp(4, 2) if "world_size" in options else over_tp(1, 4) if "mesh" in options else TP)


def test_a_dcp_directory_on_a_mesh_reads_back(on_mesh: OnMesh) -> None:
    fsdpckpt.convert(on_mesh(TP), "dcp", **DCP, world_size=8)
    assert fsdpckpt.diff(on_mesh(TP), "dcp").same
    assert recorded("dcp")["mesh"] == "dp_shard=4,tp=2"
    to_ranks("dcp", "back", like=on_mesh(TP))
    assert_held("back", TP)


def test_what_a_dcp_directory_has_in_one_chunk_is_cut_where_like_says_so(on_mesh: OnMesh) -> None:
    """One rank of FSDP cuts nothing: beside what tensor parallelism cuts, its parameters look like buffers."""
    fsdpckpt.convert(on_mesh(TP), "dcp", **DCP, world_size=2)
    to_ranks("dcp", "on-4", like=on_mesh(TP))
    assert_held("on-4", TP)
    (note,) = [note for note in to_ranks("dcp", "rows", mesh="4").notes if note.keys]
    assert "in one piece" in note.message and "--like PATH" in note.message
    assert sorted(note.keys) == ["free.bias", "free.weight", "norm.bias", "norm.weight", "row.bias"]


@pytest.mark.parametrize("key_type", ["name", "id"])
def test_placements_say_what_a_full_checkpoint_does_not_say(full: Path, key_type: str) -> None:
    mesh = "dp_replicate=2,dp_shard=2,tp=2"
    to_ranks(full, "new", mesh=mesh, placements=rules(PLACEMENTS), key_type=key_type)
    if key_type == "id":
        to_ranks("new", "named", mesh=mesh, key_type="name")
    assert_held("new" if key_type == "name" else "named", THREE, None if key_type == "name" else range(0, 8, 5))


def test_names_of_placements_are_those_that_are_written(full: Path) -> None:
    placements = {f"net.{glob}" if glob != "*" else glob: placed for glob, placed in PLACEMENTS.items()}
    options = {"mesh": "dp_replicate=1,dp_shard=1,tp=2", "placements": rules(placements)}
    to_ranks(full, "new", **options, add_prefix="net.")

    def expected() -> dict[str, Any]:
        return {f"net.{name}": value for name, value in state_of(all_three(1, 1, 2))["model"].items()}

    require_held("new", 2, expected, ranks=[1])


FULL = {"mesh": "dp_replicate=1,dp_shard=2,tp=2"}


@pytest.mark.parametrize(
    ("options", "placements", "error", "message"),
    [
        ({**FULL, "world_size": 8}, None, UsageError, "tp=2' has 1 x 2 x 2 = 4 ranks, and world_size says 8"),
        ({"mesh": "dp_shard=2,tp"}, None, UsageError, "'tp' is not a dimension"),
        ({}, PLACEMENTS, UsageError, "there is no mesh"),
        (FULL, {"seen": None, "*": {"tp": "Shard(1)"}}, UsageError,
         r"cuts col.bias along dimension 1, which its shape \[19\]"),
        (FULL, {**PLACEMENTS, "heads.*": None}, UsageError,
         r"heads.\* has no effect|heads.\* matches no parameter"),
        (FULL, {"*": {"tp": "Shard(0)"}, "col.*": None}, UsageError, r"col.\* has no effect"),
        (FULL, {"col.*": {"tp": "Shard(0)"}}, UsageError, "says nothing of 7 parameters"),
        ({**FULL, "like": TP}, PLACEMENTS, UsageError, "both say how"),
        ({"like": "full"}, None, UsageError, "does not say how its tensors are placed on a mesh"),
        ({"like": TP, "mesh": "a=2,b=2"}, None, UsageError, "does not have the dimensions of like"),
        (FULL, "[" * 200_000, UsageError, "is not JSON"),
        (FULL, "{", UsageError, "is not JSON"),
        ({**FULL, "placements": "nowhere"}, None, SourceMissingError, "^placements .* does not exist"),
        ({**FULL, "placements": "."}, None, SourceUnrecognisedError, "is a directory"),
        (FULL, None, NeedsInformationError, "cannot tell how tensors are placed"),
        ({"mesh": "1000,2000"}, None, UsageError, "rank"),
        ({"world_size": 10**20}, None, UsageError, "rank"),
    ],
)  # fmt: skip
def test_a_mesh_or_placements_that_do_not_fit_are_refused_with_the_key(
    on_mesh: OnMesh, full: Path, options: dict[str, Any], placements: object, error: Any, message: str
) -> None:
    """How each of both is written is in ``tests/transform/test_meshes.py``."""
    options = dict(options)
    if "like" in options:
        options["like"] = full if options["like"] == "full" else on_mesh(options["like"])
    if placements is not None:
        options["placements"] = rules(placements)
    found = refused(error, message, full, "new", **RANK_FILES, **options)
    if error is NeedsInformationError:
        assert "--placements" in str(found.next_step) and "--like" in str(found.next_step)


def test_a_mesh_is_for_sharded_targets(on_mesh: OnMesh) -> None:
    refused(UsageError, "mesh has no effect", on_mesh(TP), "full.pt", mesh="dp_shard=2,tp=2")


WITH_A_SCALE = {
    "model": {"kept": torch.randn(5, 3), "mask": torch.randn(4, 3), "scale": torch.randn(()), "w": torch.randn(7, 3)},
    "optimizer": {
        "state": {name: {"exp_avg": torch.randn(rows, 3)} for name, rows in (("kept", 5), ("w", 7))},
        "param_groups": [{"lr": 0.1, "params": ["kept", "w"]}],
    },
}
CUT = {"dp_shard": "Shard(0)", "tp": "Shard(1)"}
ON_FOUR: dict[str, Any] = {"mesh": "dp_shard=2,tp=2"}


def test_buffers_and_0_dim_tensors_stay_whole_whatever_a_glob_says() -> None:
    save(WITH_A_SCALE)
    for number, placements in enumerate(({"*": CUT}, {"mask": None, "scale": None, "*": CUT})):
        to_ranks("source.pt", f"new{number}", **ON_FOUR, placements=rules(placements), buffers=("mask",))
        for rank in on_each_rank(4):
            model = torch.load(f"new{number}/model_world_size_4_rank_{rank}.pt")
            assert all(identical(model[name], WITH_A_SCALE["model"][name]) for name in ("mask", "scale"))
            assert model["kept"].placements == model["w"].placements == (Shard(0), Shard(1))
    for name, why in (("mask", "buffers or reference say so"), ("scale", "it has no dimension to cut")):
        options = {**ON_FOUR, "placements": rules({name: CUT, "*": CUT}), "buffers": ("mask",)}
        words = f"places {name}, which every rank holds whole"
        assert why in str(refused(UsageError, words, "source.pt", "no", **RANK_FILES, **options))
    for placements, keys in (({"*": CUT}, [("mask",)]), ({"mask": CUT, "*": CUT}, [])):
        report = to_ranks("source.pt", f"noted{len(keys)}", **ON_FOUR, placements=rules(placements))
        assert [note.keys for note in notes(report, "undetermined")] == keys, "what may be a buffer is noted"


# Other tensors, and frameworks with a mesh of their own

FLAT: dict[str, Any] = {"to": "flattened", "unit": ("none",), "use_orig_params": True, "buffers": ("seen",)}


def test_flat_parameters_take_replicas_and_shards_from_a_mesh_and_no_others(full: Path) -> None:
    fsdpckpt.convert(full, "mesh", mesh="replicate=2,shard=3", **FLAT)
    fsdpckpt.convert(full, "said", **FLAT, world_size=6, strategy="hybrid-shard", shard_size=3)
    files = sorted(Path("mesh").glob("*.pt"))
    assert len(files) == 12
    assert all(file.read_bytes() == Path("said", file.name).read_bytes() for file in files)
    placements = {"mesh": "shard=2", "placements": rules({"*": {"shard": "Shard(0)"}})}
    for options in ({"mesh": "a=2,b=2,c=2"}, {"mesh": "a=2,b=2", "strategy": "full-shard"}, placements):
        refused(UsageError, "not fit flat parameters", full, "new", **FLAT, **options)


def test_sharded_tensors_take_replicas_and_shards_from_a_mesh(full: Path) -> None:
    to_ranks(full, "new", mesh="replicate=2,shard=2", tensor="sharded-tensor", buffers="seen")
    assert fsdpckpt.diff("new", full).same
    chunks = fsdpckpt.inspect("new").checkpoint.model.params["col.weight"].chunks
    assert chunks.size.tolist() == [[10, 6], [9, 6]] * 2


VERL: dict[str, Any] = {"flavor": "verl", "mesh_device": "cpu", "to": "sharded"}


def replicas(ddp: int, fsdp: int) -> MeshCase:
    return MeshCase({"ddp": ddp, "fsdp": fsdp}, ("ddp", "fsdp"))


@pytest.mark.parametrize(
    ("source", "options", "case"),
    [
        (None, {"mesh": "ddp=2,fsdp=2", "buffers": "seen"}, replicas(2, 2)),
        (HSDP, {"world_size": 4}, replicas(2, 2)),
        (TP, {"mesh": "ddp=2,fsdp=2"}, replicas(2, 2)),
        (None, {"mesh": "ddp=2,fsdp=8", "buffers": "seen"}, replicas(2, 8)),
        (None, {"mesh": "ddp=8,fsdp=8", "buffers": "seen"}, replicas(8, 8)),
        (TP, {"world_size": 4}, MeshCase({"fsdp": 4}, ("fsdp",))),
    ],
    ids=str,
)
def test_verl_gets_its_mesh_of_replicas(
    on_mesh: OnMesh, full: Path, source: MeshCase | None, options: dict[str, Any], case: MeshCase
) -> None:
    report = fsdpckpt.convert(on_mesh(source) if source else full, "new", **VERL, **options)
    some = [0, case.shape["fsdp"] - 1, case.shape["fsdp"] + 1, case.world_size - 1]
    ranks = [rank for rank in some if rank < case.world_size]
    require_held("new", case.world_size, lambda: state_of(case)["model"], ranks=ranks)
    left = "the source's mesh dp_shard=2,tp=2 is not kept: verl shards over fsdp=4 alone"
    assert (left in [note.message for note in report.notes]) is (len(case.shape) == 1)


def test_verls_model_beside_flat_parameters_is_on_the_same_mesh(full: Path) -> None:
    fsdpckpt.convert(full, "new", **{**VERL, **FLAT, "use_orig_params": False}, mesh="ddp=2,fsdp=2")
    require_held("new", 4, lambda: state_of(replicas(2, 2))["model"], ranks=[3])
    difference = fsdpckpt.diff("new", full)
    assert {entry.key for entry in difference.entries if entry.sigil != "="} == {"lr_scheduler"}  # verl's own


@pytest.mark.parametrize("flavor", ["torchtitan", "accelerate"])
def test_frameworks_that_save_dcp_get_the_items_of_the_mesh(on_mesh: OnMesh, flavor: str) -> None:
    boxes = []
    for path, options in (("new", {"flavor": flavor}), ("plain", {"flavor": "plain", "container": "dcp"})):
        fsdpckpt.convert(on_mesh(THREE), path, to="sharded", world_size=8, **options)
        chunks = fsdpckpt.inspect(path).checkpoint.model.params["col.weight"].chunks
        boxes.append(sorted(zip(chunks.start.tolist(), chunks.size.tolist(), strict=True)))
    assert boxes[0] == boxes[1] and len(boxes[0]) == 4


# Sources that are on no mesh of all ranks


def test_meshes_of_some_ranks_are_not_taken_for_one_of_all() -> None:
    save_stages(Path("stages"), names=True)
    error = refused(NeedsInformationError, "cannot tell how", "stages", "new", **RANK_FILES, world_size=4)
    assert "--mesh 4" in str(error.next_step)
    assert "some of the 4 ranks, as pipeline stages have them: dp=2" in str(error.why)
    to_ranks("stages", "new", mesh="4")
    assert messages(
        fsdpckpt.convert("stages", "dcp", **DCP, world_size=4), "sharded over one mesh dimension of 4 ranks"
    )
    assert fsdpckpt.diff("new", "dcp").same


@pytest.mark.parametrize("alone", [False, True])
def test_packed_weights_are_not_taken_for_others(alone: bool) -> None:
    weight = torch.randn(12, 6)

    def state(_: int) -> dict[str, Any]:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        placed = {"qkv": _StridedShard(0, split_factor=3)} | ({} if alone else {"out": Shard(1)})
        return {name: distribute_tensor(weight, mesh, [each], src_data_rank=None) for name, each in placed.items()}

    save_each("packed", 2, state)
    for options in ({"world_size": 2}, {"mesh": "tp=3"}, {"mesh": "tp=2"})[: 1 if alone else 3]:
        error = refused(NeedsInformationError, "cannot tell how", "packed", "new", **RANK_FILES, **options)
        assert "packed" in str(error.why)
    assert messages(fsdpckpt.convert("packed", "dcp", **DCP, world_size=2), "packed")
    assert identical(converted("packed", "full.pt", to="full")["model"]["qkv"], weight)
    assert fsdpckpt.diff("full.pt", "dcp").same


def test_inspect_names_the_mesh(on_mesh: OnMesh, full: Path, run: Run) -> None:
    line = "sharded, torch (plain), 8 ranks, mesh dp_replicate=2,dp_shard=2,tp=2"
    assert line in run("inspect", on_mesh(THREE)).out
    assert ", mesh" not in run("inspect", full).out


# The device type that DTensors in files by rank say of their mesh


def test_the_device_type_of_the_source_is_kept_and_several_have_to_be_decided() -> None:
    def to_three(source: str, target: str, devices: set[str], **options: Any) -> Any:
        report = to_ranks(source, target, world_size=3, buffers=["none"], **options)
        held = [torch.load(file, weights_only=False) for file in sorted(Path(target).glob("*.pt"))]
        assert len(held) == 3
        assert {tensor.device_mesh.device_type for state in held for tensor in state.values()} == devices
        return report

    save({"model": {"a.weight": torch.rand(7, 3), "b.weight": torch.rand(2, 5)}})
    assert messages(to_three("source.pt", "ranks", {"cpu"}), "a mesh of cpu devices"), "the source does not say"
    for device in ("cuda", "xla"):
        to_three("source.pt", device, {device}, mesh_device=device)
    assert not messages(to_three("cuda", "again", {"cuda"}), "record a mesh of")
    to_three("cuda", "other", {"cpu"}, mesh_device="cpu")
    name = "model_world_size_3_rank_2.pt"
    Path("cuda", name).write_bytes(Path("xla", name).read_bytes())
    Path("cuda/fsdpckpt.json").unlink()
    options = {**RANK_FILES, "world_size": 3, "buffers": ["none"]}
    error = refused(NeedsInformationError, "several device types", "cuda", "out", **options)
    assert "--mesh-device" in str(error.next_step)
