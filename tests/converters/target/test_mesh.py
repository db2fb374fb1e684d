"""Conversions between meshes: what each rank gets is what FSDP2 itself holds there."""

from __future__ import annotations

import json
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
from tests.converters.test_ranks_apart import save_stages
from tests.oracle.compare import identical
from tests.readers.played_ranks import as_rank
from tests.writers.meshes import MeshCase, all_three, assert_equal, held, hsdp, over_tp

__all__ = ["run"]

pytestmark = pytest.mark.filterwarnings("ignore")

SIZE, ODD = 4, 3  # rows that no mesh here divides
PLACEMENTS: dict[str, Any] = {
    "col.*": {"dp_replicate": "Replicate()", "dp_shard": "Shard(0)", "tp": "Shard(0)"},
    "row.weight": {"dp_replicate": "Replicate()", "dp_shard": "Shard(0)", "tp": "shard(dim=1)"},
    "free.*": {"dp_replicate": "Replicate()", "dp_shard": "Shard(0)"},
    "seen": None,
    "*": {"dp_replicate": "Replicate()", "dp_shard": "Shard(0)", "tp": "replicate"},
}


def save(case: MeshCase, path: Path, *, size: int = SIZE, odd: int = ODD) -> None:
    """One file a rank and section, as ``torch.save`` of real state dicts makes them."""
    path.mkdir()
    for rank in range(case.world_size):
        with as_rank(rank, case.world_size):
            state = held(case, odd, size)
            for section, value in (("model", state["model"]), ("optim", state["optimizer"])):
                torch.save(value, path / f"{section}_world_size_{case.world_size}_rank_{rank}.pt")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("meshes")
    for name, case in (("tp", over_tp(2, 2)), ("hsdp", hsdp(2, 2)), ("three", all_three(2, 2, 2))):
        save(case, base / name)
    fsdpckpt.convert(base / "tp", base / "full.pt", to="full")
    return base


def assert_held(path: Path, case: MeshCase, *, ranks: range | None = None, size: int = SIZE, odd: int = ODD) -> None:
    for rank in ranks or range(case.world_size):
        with as_rank(rank, case.world_size):
            expected = held(case, odd, size)
            for section, value in (("model", expected["model"]), ("optim", expected["optimizer"])):
                file = path / f"{section}_world_size_{case.world_size}_rank_{rank}.pt"
                assert_equal(torch.load(file, weights_only=True), value, section)


def to_ranks(source: Path, target: Path, **options: Any) -> Any:
    return fsdpckpt.convert(source, target, to="sharded", container="torch", **options)


def test_what_a_dcp_directory_has_in_one_chunk_is_cut_where_like_says_so(saved: Path, tmp_path: Path) -> None:
    """One rank of FSDP cuts nothing: beside what tensor parallelism cuts, its parameters look like buffers."""
    fsdpckpt.convert(saved / "tp", tmp_path / "dcp", to="sharded", container="dcp", world_size=2)
    to_ranks(tmp_path / "dcp", tmp_path / "on-4", like=saved / "tp")
    assert_held(tmp_path / "on-4", over_tp(2, 2))
    (note,) = [note for note in to_ranks(tmp_path / "dcp", tmp_path / "rows", mesh="4").notes if note.keys]
    assert "in one piece" in note.message and "--like PATH" in note.message
    assert sorted(note.keys) == ["free.bias", "free.weight", "norm.bias", "norm.weight", "row.bias"]


@pytest.mark.parametrize(
    ("source", "world_size", "case"),
    [
        ("tp", 8, over_tp(4, 2)),
        ("tp", 2, over_tp(1, 2)),
        ("hsdp", 6, hsdp(2, 3)),
        ("hsdp", 2, hsdp(2, 1)),
        ("three", 4, all_three(2, 1, 2)),
    ],
)
def test_a_new_world_size_changes_the_ranks_that_fsdp_shards_over(
    saved: Path, tmp_path: Path, source: str, world_size: int, case: MeshCase
) -> None:
    report = to_ranks(saved / source, tmp_path / "new", world_size=world_size, verify="full")
    assert_held(tmp_path / "new", case)
    assert any(f"is resized to {case.mesh}" in note.message for note in report.notes)


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
def test_files_of_many_ranks_are_read_and_resized(tmp_path: Path, source: MeshCase, target: MeshCase) -> None:
    size, odd = (16, 0) if source.rows else (SIZE, ODD)  # 64 columns: both cut them
    save(source, tmp_path / "source", size=size, odd=odd)
    to_ranks(tmp_path / "source", tmp_path / "target", world_size=target.world_size)
    some = range(0, target.world_size, max(1, target.world_size // 5))
    assert_held(tmp_path / "target", target, ranks=some, size=size, odd=odd)


@pytest.mark.parametrize(("source", "there", "back"), [("tp", 16, 4), ("three", 12, 8)])
def test_there_and_back_is_the_same_files(saved: Path, tmp_path: Path, source: str, there: int, back: int) -> None:
    to_ranks(saved / source, tmp_path / "there", world_size=there)
    to_ranks(tmp_path / "there", tmp_path / "back", world_size=back)
    to_ranks(saved / source, tmp_path / "same", world_size=back)
    files = sorted((tmp_path / "back").glob("*.pt"))
    assert len(files) == 2 * back
    assert all(file.read_bytes() == (tmp_path / "same" / file.name).read_bytes() for file in files)
    assert_held(tmp_path / "back", over_tp(2, 2) if source == "tp" else all_three(2, 2, 2), ranks=range(0, back, 3))


@pytest.mark.parametrize(
    ("source", "world_size", "meshes"),
    [
        ("tp", 3, ["dp_shard=3,tp=1"]),
        (
            "three",
            6,
            ["dp_replicate=1,dp_shard=3,tp=2", "dp_replicate=2,dp_shard=3,tp=1", "dp_replicate=1,dp_shard=6,tp=1"],
        ),
    ],
)
def test_a_world_size_that_does_not_divide_names_the_meshes_that_do(
    saved: Path, tmp_path: Path, source: str, world_size: int, meshes: list[str]
) -> None:
    with pytest.raises(NeedsInformationError) as error:
        to_ranks(saved / source, tmp_path / "new", world_size=world_size)
    assert list(error.value.details) == [f"--mesh {mesh}" for mesh in meshes]
    to_ranks(saved / source, tmp_path / "new", mesh=meshes[0])
    sizes = [int(part.partition("=")[2]) for part in meshes[0].split(",")]
    assert_held(tmp_path / "new", over_tp(*sizes) if source == "tp" else all_three(*sizes))


def test_replicas_that_do_not_divide_are_given_up_in_dcp_where_they_leave_no_trace(saved: Path, tmp_path: Path) -> None:
    report = fsdpckpt.convert(saved / "hsdp", tmp_path / "dcp", to="sharded", container="dcp", world_size=3)
    assert any("is resized to dp_replicate=1,dp_shard=3" in note.message for note in report.notes)
    assert fsdpckpt.diff(saved / "hsdp", tmp_path / "dcp").same
    with pytest.raises(NeedsInformationError, match="does not fit the mesh"):
        to_ranks(saved / "hsdp", tmp_path / "new", world_size=3)


def test_dcp_takes_any_world_size_as_it_loads_on_any_mesh(saved: Path, tmp_path: Path) -> None:
    for source, world_size in (("tp", 3), ("three", 5)):
        path = tmp_path / source
        report = fsdpckpt.convert(saved / source, path, to="sharded", container="dcp", world_size=world_size)
        assert any(f"no mesh of {world_size} ranks has the other dimensions of" in one.message for one in report.notes)
        assert fsdpckpt.diff(saved / source, path).same


@pytest.mark.parametrize("key_type", ["name", "id"])
def test_placements_say_what_a_full_checkpoint_does_not_say(saved: Path, tmp_path: Path, key_type: str) -> None:
    (tmp_path / "placements.json").write_text(json.dumps(PLACEMENTS))
    options = {
        "mesh": "dp_replicate=2,dp_shard=2,tp=2",
        "placements": tmp_path / "placements.json",
        "key_type": key_type,
    }
    to_ranks(saved / "full.pt", tmp_path / "new", **options)
    if key_type == "name":
        assert_held(tmp_path / "new", all_three(2, 2, 2))
        return
    to_ranks(tmp_path / "new", tmp_path / "named", mesh=options["mesh"], key_type="name")
    assert_held(tmp_path / "named", all_three(2, 2, 2), ranks=range(0, 8, 5))


def test_names_of_placements_are_those_that_are_written(saved: Path, tmp_path: Path) -> None:
    placements = {f"net.{glob}" if glob != "*" else glob: placed for glob, placed in PLACEMENTS.items()}
    (tmp_path / "placements.json").write_text(json.dumps(placements))
    to_ranks(
        saved / "full.pt", tmp_path / "new",
        mesh="dp_replicate=1,dp_shard=1,tp=2", placements=tmp_path / "placements.json", add_prefix="net.",
    )  # fmt: skip
    with as_rank(1, 2):
        found = torch.load(tmp_path / "new" / "model_world_size_2_rank_1.pt", weights_only=True)
        expected = held(all_three(1, 1, 2), ODD, SIZE)["model"]
        assert_equal(found, {f"net.{name}": value for name, value in expected.items()}, "model")


@pytest.mark.parametrize("options", [{}, {"world_size": 8}, {"mesh": "dp_shard=1,tp=4"}])
def test_like_another_checkpoint(saved: Path, tmp_path: Path, options: dict[str, Any]) -> None:
    to_ranks(saved / "full.pt", tmp_path / "new", like=saved / "tp", **options)
    case = over_tp(4, 2) if "world_size" in options else over_tp(1, 4) if "mesh" in options else over_tp(2, 2)
    assert_held(tmp_path / "new", case)


def test_a_dcp_directory_on_a_mesh_reads_back(saved: Path, tmp_path: Path) -> None:
    fsdpckpt.convert(saved / "tp", tmp_path / "dcp", to="sharded", container="dcp", world_size=8)
    assert fsdpckpt.diff(saved / "tp", tmp_path / "dcp").same
    assert json.loads((tmp_path / "dcp" / "fsdpckpt.json").read_text())["mesh"] == "dp_shard=4,tp=2"
    to_ranks(tmp_path / "dcp", tmp_path / "back", like=saved / "tp")
    assert_held(tmp_path / "back", over_tp(2, 2))


FULL = {"mesh": "dp_replicate=1,dp_shard=2,tp=2"}


@pytest.mark.parametrize(
    ("options", "placements", "message"),
    [
        ({**FULL, "world_size": 8}, None, "tp=2' has 1 x 2 x 2 = 4 ranks, and world_size says 8"),
        ({"mesh": "dp_shard=2,tp"}, None, "'tp' is not a dimension"),
        ({"mesh": "dp_shard=2,dp_shard=2"}, None, "names dp_shard twice"),
        ({"mesh": "dp_shard=0"}, None, "'dp_shard=0' is not a dimension"),
        ({"mesh": "dp_shard==2"}, None, "'dp_shard==2' is not a dimension"),
        ({"mesh": "=2"}, None, "'=2' is not a dimension"),
        ({"mesh": f"dp_shard={'9' * 5000}"}, None, "is not a dimension"),
        ({}, PLACEMENTS, "there is no mesh"),
        (FULL, {"*": {"pp": "Shard(0)"}}, r"\* names the mesh dimension pp, which mesh"),
        (FULL, {"seen": None, "*": {"tp": "Shard(1)"}}, r"cuts col.bias along dimension 1, which its shape \[19\]"),
        (FULL, {"*": {"tp": "_StridedShard(0, sf=2)"}}, "a placement that cannot be written"),
        (FULL, {"*": {"tp": 0}}, "a placement that cannot be written: 0"),
        (FULL, {"*": {"tp": f"Shard({'9' * 5000})"}}, "a placement that cannot be written"),
        (FULL, {"*": "Shard(0)"}, "has no placements"),
        (FULL, {**PLACEMENTS, "heads.*": None}, r"heads.\* has no effect|heads.\* matches no parameter"),
        (FULL, {"*": {"tp": "Shard(0)"}, "col.*": None}, r"col.\* has no effect"),
        (FULL, {"col.*": {"tp": "Shard(0)"}}, "says nothing of 7 parameters"),
        (FULL, [], "is not a JSON object"),
        ({**FULL, "like": "tp"}, PLACEMENTS, "both say how"),
        ({"like": "full.pt"}, None, "does not say how its tensors are placed on a mesh"),
        ({"like": "tp", "mesh": "a=2,b=2"}, None, "does not have the dimensions of like"),
    ],
)
def test_a_mesh_or_placements_that_do_not_fit_are_refused_with_the_key(
    saved: Path, tmp_path: Path, options: dict[str, Any], placements: object, message: str
) -> None:
    options = {**options, **({"like": saved / options["like"]} if "like" in options else {})}
    if placements is not None:
        (tmp_path / "placements.json").write_text(json.dumps(placements))
        options["placements"] = tmp_path / "placements.json"
    with pytest.raises(UsageError, match=message):
        to_ranks(saved / "full.pt", tmp_path / "new", **options)


WITH_A_SCALE = {
    "model": {"kept": torch.randn(5, 3), "mask": torch.randn(4, 3), "scale": torch.randn(()), "w": torch.randn(7, 3)},
    "optimizer": {
        "state": {name: {"exp_avg": torch.randn(rows, 3)} for name, rows in (("kept", 5), ("w", 7))},
        "param_groups": [{"lr": 0.1, "params": ["kept", "w"]}],
    },
}
CUT = {"dp_shard": "Shard(0)", "tp": "Shard(1)"}


def with_a_scale(path: Path, placements: object) -> dict[str, Any]:
    """A full checkpoint in ``path`` with what FSDP cannot cut, and the options that convert it."""
    torch.save(WITH_A_SCALE, path / "scaled.pt")
    (path / "placements.json").write_text(json.dumps(placements))
    return {"mesh": "dp_shard=2,tp=2", "placements": path / "placements.json"}


@pytest.mark.parametrize("placements", [{"*": CUT}, {"mask": None, "scale": None, "*": CUT}])
def test_buffers_and_0_dim_tensors_stay_whole_whatever_a_glob_says(
    tmp_path: Path, placements: dict[str, object]
) -> None:
    options = with_a_scale(tmp_path, placements)
    to_ranks(tmp_path / "scaled.pt", tmp_path / "new", **options, buffers=("mask",))
    for rank in range(4):
        with as_rank(rank, 4):
            model = torch.load(tmp_path / "new" / f"model_world_size_4_rank_{rank}.pt", weights_only=True)
        assert identical(model["mask"], WITH_A_SCALE["model"]["mask"])
        assert identical(model["scale"], WITH_A_SCALE["model"]["scale"])
        assert model["kept"].placements == model["w"].placements == (Shard(0), Shard(1))


@pytest.mark.parametrize(
    ("name", "why"), [("mask", "buffers or reference say so"), ("scale", "it has no dimension to cut")]
)
def test_an_entry_that_cuts_what_every_rank_holds_whole_is_refused(tmp_path: Path, name: str, why: str) -> None:
    options = with_a_scale(tmp_path, {name: CUT, "*": CUT})
    with pytest.raises(UsageError, match=f"places {name}, which every rank holds whole") as error:
        to_ranks(tmp_path / "scaled.pt", tmp_path / "new", **options, buffers=("mask",))
    assert why in str(error.value)


def test_a_glob_that_cuts_what_may_be_a_buffer_is_noted(tmp_path: Path) -> None:
    report = to_ranks(tmp_path / "scaled.pt", tmp_path / "new", **with_a_scale(tmp_path, {"*": CUT}))
    assert [note.keys for note in report.notes if note.kind == "undetermined"] == [("mask",)]
    report = to_ranks(tmp_path / "scaled.pt", tmp_path / "named", **with_a_scale(tmp_path, {"mask": CUT, "*": CUT}))
    assert not [note for note in report.notes if note.kind == "undetermined"]


def test_two_entries_of_one_glob_are_refused(saved: Path, tmp_path: Path) -> None:
    (tmp_path / "placements.json").write_text('{"*": null, "*": {"tp": "Shard(0)"}}')
    with pytest.raises(UsageError, match=r"two entries for \*"):
        to_ranks(saved / "full.pt", tmp_path / "new", **FULL, placements=tmp_path / "placements.json")


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ("[" * 200_000, UsageError, "is not JSON"),
        ("{", UsageError, "is not JSON"),
        (None, SourceMissingError, "^placements .* does not exist"),
    ],
)
def test_a_file_of_placements_that_cannot_be_read_is_refused_under_the_name_of_its_option(
    saved: Path, tmp_path: Path, text: str | None, error: type[Exception], message: str
) -> None:
    if text is not None:
        (tmp_path / "placements.json").write_text(text)
    with pytest.raises(error, match=message):
        to_ranks(saved / "full.pt", tmp_path / "new", **FULL, placements=tmp_path / "placements.json")


def test_a_directory_of_placements_is_refused(saved: Path, tmp_path: Path) -> None:
    with pytest.raises(SourceUnrecognisedError, match="is a directory"):
        to_ranks(saved / "full.pt", tmp_path / "new", **FULL, placements=tmp_path)


def test_a_mesh_of_two_dimensions_needs_placements(saved: Path, tmp_path: Path) -> None:
    with pytest.raises(NeedsInformationError, match="cannot tell how tensors are placed") as error:
        to_ranks(saved / "full.pt", tmp_path / "new", **FULL)
    assert "--placements" in str(error.value.next_step) and "--like" in str(error.value.next_step)


def test_a_mesh_is_for_sharded_targets(saved: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="mesh has no effect"):
        fsdpckpt.convert(saved / "tp", tmp_path / "full.pt", mesh="dp_shard=2,tp=2")


FLAT: dict[str, Any] = {"to": "flattened", "unit": ("none",), "use_orig_params": True, "buffers": ("seen",)}


def test_flat_parameters_take_replicas_and_shards_from_a_mesh(saved: Path, tmp_path: Path) -> None:
    fsdpckpt.convert(saved / "full.pt", tmp_path / "mesh", mesh="replicate=2,shard=3", **FLAT)
    options = {"world_size": 6, "strategy": "hybrid-shard", "shard_size": 3}
    fsdpckpt.convert(saved / "full.pt", tmp_path / "said", **FLAT, **options)
    files = sorted((tmp_path / "mesh").glob("*.pt"))
    assert len(files) == 12
    assert all(file.read_bytes() == (tmp_path / "said" / file.name).read_bytes() for file in files)


@pytest.mark.parametrize(
    "options",
    [
        {"mesh": "a=2,b=2,c=2"},
        {"mesh": "a=2,b=2", "strategy": "full-shard"},
        {"mesh": "shard=2", "placements": "placements.json"},
    ],
)
def test_flat_parameters_have_no_other_mesh(saved: Path, tmp_path: Path, options: dict[str, Any]) -> None:
    if "placements" in options:
        (tmp_path / "placements.json").write_text('{"*": {"shard": "Shard(0)"}}')
        options = {**options, "placements": tmp_path / "placements.json"}
    with pytest.raises(UsageError, match="not fit flat parameters"):
        fsdpckpt.convert(saved / "full.pt", tmp_path / "new", **FLAT, **options)


def test_sharded_tensors_take_replicas_and_shards_from_a_mesh(saved: Path, tmp_path: Path) -> None:
    to_ranks(saved / "full.pt", tmp_path / "new", mesh="replicate=2,shard=2", tensor="sharded-tensor", buffers="seen")
    assert fsdpckpt.diff(tmp_path / "new", saved / "full.pt").same
    assert (
        fsdpckpt.inspect(tmp_path / "new").checkpoint.model.params["col.weight"].chunks.size.tolist()
        == [[10, 6], [9, 6]] * 2
    )


VERL: dict[str, Any] = {"flavor": "verl", "mesh_device": "cpu"}
REPLICAS = MeshCase({"ddp": 2, "fsdp": 2}, ("ddp", "fsdp"))


@pytest.mark.parametrize(
    ("source", "options"),
    [
        ("full.pt", {"mesh": "ddp=2,fsdp=2", "buffers": "seen"}),
        ("hsdp", {}),
        ("hsdp", {"world_size": 4}),
        ("tp", {"mesh": "ddp=2,fsdp=2"}),
    ],
)
def test_verl_gets_its_mesh_of_replicas(saved: Path, tmp_path: Path, source: str, options: dict[str, Any]) -> None:
    options = options or {"world_size": 4}
    fsdpckpt.convert(saved / source, tmp_path / "new", to="sharded", **VERL, **options)
    for rank in (0, 3):
        with as_rank(rank, 4):
            found = torch.load(tmp_path / "new" / f"model_world_size_4_rank_{rank}.pt", weights_only=True)
            assert_equal(found, held(REPLICAS, ODD, SIZE)["model"], "model")


@pytest.mark.parametrize(("replicas", "shards"), [(2, 8), (8, 8)])
def test_verls_mesh_of_many_replicas(saved: Path, tmp_path: Path, replicas: int, shards: int) -> None:
    case = MeshCase({"ddp": replicas, "fsdp": shards}, ("ddp", "fsdp"))
    options = {**VERL, "mesh": str(case.mesh), "buffers": "seen"}
    fsdpckpt.convert(saved / "full.pt", tmp_path / "new", to="sharded", **options)
    for rank in (0, shards + 1, case.world_size - 1):
        with as_rank(rank, case.world_size):
            name = f"model_world_size_{case.world_size}_rank_{rank}.pt"
            found = torch.load(tmp_path / "new" / name, weights_only=True)
            assert_equal(found, held(case, ODD, SIZE)["model"], "model")


def test_verl_and_tensor_parallelism_do_not_meet(saved: Path, tmp_path: Path) -> None:
    report = fsdpckpt.convert(saved / "tp", tmp_path / "new", to="sharded", **VERL, world_size=4)
    said = "the source's mesh dp_shard=2,tp=2 is not kept: verl shards over fsdp=4 alone"
    assert said in [note.message for note in report.notes]
    with as_rank(2, 4):
        found = torch.load(tmp_path / "new" / "model_world_size_4_rank_2.pt", weights_only=True)
        assert_equal(found, held(MeshCase({"fsdp": 4}, ("fsdp",)), ODD, SIZE)["model"], "model")


def test_verls_model_beside_flat_parameters_is_on_the_same_mesh(saved: Path, tmp_path: Path) -> None:
    options = {**FLAT, "to": "flattened", "use_orig_params": False, **VERL}
    fsdpckpt.convert(saved / "full.pt", tmp_path / "new", mesh="ddp=2,fsdp=2", **options)
    with as_rank(3, 4):
        found = torch.load(tmp_path / "new" / "model_world_size_4_rank_3.pt", weights_only=True)
        assert_equal(found, held(REPLICAS, ODD, SIZE)["model"], "model")
    difference = fsdpckpt.diff(tmp_path / "new", saved / "full.pt")
    assert {entry.key for entry in difference.entries if entry.sigil != "="} == {"lr_scheduler"}  # verl's own


@pytest.mark.parametrize("flavor", ["torchtitan", "accelerate"])
def test_frameworks_that_save_dcp_get_the_items_of_the_mesh(saved: Path, tmp_path: Path, flavor: str) -> None:
    fsdpckpt.convert(saved / "three", tmp_path / "new", to="sharded", flavor=flavor, world_size=8)
    fsdpckpt.convert(saved / "three", tmp_path / "plain", to="sharded", container="dcp", world_size=8, flavor="plain")
    boxes = []
    for path in (tmp_path / "new", tmp_path / "plain"):
        tensors = fsdpckpt.inspect(path).checkpoint.model.params
        chunks = tensors["col.weight"].chunks
        boxes.append(sorted(zip(chunks.start.tolist(), chunks.size.tolist(), strict=True)))
    assert boxes[0] == boxes[1] and len(boxes[0]) == 4


def test_meshes_of_some_ranks_are_not_taken_for_one_of_all(tmp_path: Path) -> None:
    save_stages(tmp_path / "stages", names=True)
    with pytest.raises(NeedsInformationError, match="cannot tell how") as error:
        to_ranks(tmp_path / "stages", tmp_path / "new", world_size=4)
    assert "--mesh 4" in str(error.value.next_step)
    assert "some of the 4 ranks, as pipeline stages have them: dp=2" in str(error.value.why)
    to_ranks(tmp_path / "stages", tmp_path / "new", mesh="4")
    report = fsdpckpt.convert(tmp_path / "stages", tmp_path / "dcp", to="sharded", container="dcp", world_size=4)
    assert any("sharded over one mesh dimension of 4 ranks" in note.message for note in report.notes)
    assert fsdpckpt.diff(tmp_path / "new", tmp_path / "dcp").same


@pytest.mark.parametrize("alone", [False, True])
def test_packed_weights_are_not_taken_for_others(tmp_path: Path, alone: bool) -> None:
    (tmp_path / "packed").mkdir()
    weight = torch.randn(12, 6, generator=torch.Generator().manual_seed(0))
    for rank in range(2):
        with as_rank(rank, 2):
            mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
            state = {"qkv": distribute_tensor(weight, mesh, [_StridedShard(0, split_factor=3)], src_data_rank=None)}
            if not alone:
                state["out"] = distribute_tensor(weight, mesh, [Shard(1)], src_data_rank=None)
            torch.save(state, tmp_path / "packed" / f"model_world_size_2_rank_{rank}.pt")
    for options in ({"world_size": 2}, {"mesh": "tp=3"}, {"mesh": "tp=2"})[: 1 if alone else 3]:
        with pytest.raises(NeedsInformationError, match="cannot tell how") as error:
            to_ranks(tmp_path / "packed", tmp_path / "new", **options)
        assert "packed" in str(error.value.why)
    report = fsdpckpt.convert(tmp_path / "packed", tmp_path / "dcp", to="sharded", container="dcp", world_size=2)
    assert any("packed" in note.message for note in report.notes)
    fsdpckpt.convert(tmp_path / "packed", tmp_path / "full.pt", to="full")
    assert fsdpckpt.diff(tmp_path / "full.pt", tmp_path / "dcp").same
    assert identical(torch.load(tmp_path / "full.pt")["model"]["qkv"], weight)


def test_inspect_names_the_mesh(saved: Path, run: Run) -> None:
    assert "sharded, torch (plain), 8 ranks, mesh dp_replicate=2,dp_shard=2,tp=2" in run("inspect", saved / "three").out
    assert ", mesh" not in run("inspect", saved / "full.pt").out


@pytest.mark.parametrize("options", [{"mesh": "1000,2000"}, {"world_size": 10**20}])
def test_more_ranks_than_any_job_has_are_refused_at_once(options: dict[str, Any], tmp_path: Path) -> None:
    torch.save({"w": torch.ones(4)}, tmp_path / "model.pt")
    with pytest.raises(UsageError, match="rank"):
        fsdpckpt.convert(str(tmp_path / "model.pt"), str(tmp_path / "out"), to="sharded", **options)
