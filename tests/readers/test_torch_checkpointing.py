"""Checkpoints of torch_checkpointing: what its metadata says is used, and compared with the files."""

from __future__ import annotations

import json
import pickle
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from fsdpckpt import api
from fsdpckpt.describe import Incomplete
from fsdpckpt.describe.rank_grid import FileState
from fsdpckpt.errors import (
    NeedsInformationError,
    SourceCorruptError,
    SourceIncompleteError,
    SourceUnrecognisedError,
    SourceUnsupportedError,
    UsageError,
)
from tests.oracle.compare import identical

GOLDEN = Path(__file__).parent.parent / "golden" / "torch_checkpointing"


@pytest.fixture(params=["torch", "safetensors"])
def saved(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return Path(shutil.copytree(GOLDEN / request.param, tmp_path / request.param))


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    return Path(shutil.copytree(GOLDEN / "safetensors", tmp_path / "shards"))


def change(directory: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    """Edit metadata.pkl, which has plain values only."""
    path = directory / "metadata.pkl"
    metadata = pickle.loads(path.read_bytes())
    edit(metadata)
    path.write_bytes(pickle.dumps(metadata))


def described(metadata: dict[str, Any], name: str) -> dict[str, Any]:
    groups = metadata["metadata"]["model"]["nested_path_to_metadata"][json.dumps([name], separators=(",", ":"))]
    found: dict[str, Any] = groups[0]["sharding_metadata"]["data"]
    return found


def test_both_layouts_hold_what_the_job_saved(tmp_path: Path) -> None:
    assert api.diff(GOLDEN / "torch", GOLDEN / "safetensors").same
    document = api.inspect(GOLDEN / "safetensors").to_json()
    assert (document["flavor"], document["world_size"], document["problems"]) == ("torch_checkpointing", 2, [])
    api.convert(GOLDEN / "safetensors", tmp_path / "full.pt")
    full = torch.load(tmp_path / "full.pt")
    files = [load_file(GOLDEN / "safetensors" / f"model_{rank}.safetensors") for rank in range(2)]
    for name, weight in full["model"].items():
        assert identical(weight, torch.cat([file[name] for file in files]))
    assert full["step"] == 7


def test_it_is_written_as_its_loader_reads_it(saved: Path, tmp_path: Path) -> None:
    report = api.convert(saved, tmp_path / "on-3", world_size=3)
    assert report.flavor == "torch_checkpointing"
    names = {f"{item}_{rank}.pt" for item in ("model", "optimizer", "step") for rank in range(3)}
    assert {path.name for path in (tmp_path / "on-3").iterdir()} == {*names, "metadata.pkl", "fsdpckpt.json"}
    assert api.diff(saved, tmp_path / "on-3").same
    metadata = pickle.loads((tmp_path / "on-3" / "metadata.pkl").read_bytes())
    assert metadata["world_size"] == 3
    mesh = described(metadata, "0.weight")["mesh_spec"]
    assert mesh == {"device_type": "cpu", "mesh_shape": (3,), "mesh_data": (0, 1, 2), "mesh_dim_names": None}
    before = pickle.loads((saved / "metadata.pkl").read_bytes())
    for item, content in before["metadata"].items():
        assert content["nested_path_to_metadata"].keys() == metadata["metadata"][item]["nested_path_to_metadata"].keys()


def test_names_and_ids_are_both_kept(saved: Path, tmp_path: Path) -> None:
    api.convert(saved, tmp_path / "names", key_type="name", world_size=2)
    assert api.inspect(tmp_path / "names").to_json()["key_type"] == "name"
    api.convert(tmp_path / "names", tmp_path / "again", world_size=4)
    assert api.inspect(tmp_path / "again").to_json()["key_type"] == "name"


def test_a_missing_file_is_named(saved: Path) -> None:
    name = next(path.name for path in saved.iterdir() if path.name.startswith("model_1"))
    (saved / name).unlink()
    with pytest.raises(SourceIncompleteError, match=r"1 file that metadata\.pkl names is missing") as caught:
        api.inspect(saved)
    assert (caught.value.details, caught.value.files) == ((name,), (f"{saved}/{name}",))
    assert in_grid(api.inspect_incomplete(saved, caught.value)) == {
        pattern: "+-" if pattern.startswith("model") else "++"
        for pattern in {re.sub(r"_\d\.", "_*.", path.name) for path in saved.iterdir() if "_" in path.name}
    }


def in_grid(left: Incomplete | None) -> dict[str, str]:
    signs = {FileState.PRESENT: "+", FileState.MISSING: "-", FileState.DAMAGED: "!", FileState.NONE: " "}
    assert left is not None
    return {row.pattern: "".join(signs[state] for state in row.states) for row in left.grid.rows}


def test_the_model_can_be_read_without_a_file_of_the_optimizer(tmp_path: Path) -> None:
    api.convert(GOLDEN / "torch", tmp_path / "on-4", world_size=4)
    (tmp_path / "on-4" / "optimizer_2.pt").unlink()
    (tmp_path / "on-4" / "optimizer_3.pt").write_bytes(b"PK\x03\x04")
    (tmp_path / "on-4" / "fsdpckpt.json").unlink()
    with pytest.raises(SourceIncompleteError) as caught:
        api.inspect(tmp_path / "on-4")
    left = api.inspect_incomplete(tmp_path / "on-4", caught.value)
    assert in_grid(left) == {"model_*.pt": "++++", "optimizer_*.pt": "++-!", "step_*.pt": "++++"}
    assert left is not None and list(left.readable) == ["model"]
    api.convert(tmp_path / "on-4", tmp_path / "model.pt", only="model")
    whole = torch.load(GOLDEN / "torch" / "model_0.pt", weights_only=False)
    assert torch.load(tmp_path / "model.pt").keys() == whole.keys()


def test_the_file_of_another_save_is_refused(shards: Path) -> None:
    for change_of in (
        lambda tensors: tensors | {"0.bias": tensors["0.bias"][:-1].clone()},
        lambda tensors: tensors | {"0.bias": tensors["0.bias"].double()},
        lambda tensors: tensors | {"other": tensors["0.bias"].clone()},
        lambda tensors: {name: tensor for name, tensor in tensors.items() if name != "0.bias"},
    ):
        copy = Path(shutil.copytree(shards, shards.parent / "copy", dirs_exist_ok=True))
        save_file(change_of(load_file(copy / "model_1.safetensors")), copy / "model_1.safetensors")
        with pytest.raises(SourceCorruptError):
            api.inspect(copy)


def test_torch_files_that_contradict_the_metadata_are_a_problem(tmp_path: Path) -> None:
    copy = Path(shutil.copytree(GOLDEN / "torch", tmp_path / "copy"))
    change(copy, lambda metadata: described(metadata, "0.weight").update(global_shape=[12, 6]))
    report = api.verify(copy)
    assert [problem.key for problem in report.problems] == ["0.weight"]
    with pytest.raises(SourceCorruptError, match=r"model\.0\.weight is float32 \[10, 6\]"):
        api.convert(copy, tmp_path / "full.pt")


def test_one_ranks_safetensors_file_is_no_checkpoint(shards: Path) -> None:
    with pytest.raises(SourceUnrecognisedError, match="the part of one of 2 ranks"):
        api.inspect(shards / "model_0.safetensors")


def test_another_programs_metadata_is_not_loaded(tmp_path: Path) -> None:
    torch.save({"weight": torch.randn(3, 2)}, tmp_path / "model.pt")
    (tmp_path / "metadata.pkl").write_bytes(pickle.dumps(Path("x")))
    assert api.inspect(tmp_path).to_json()["flavor"] == "plain"


def test_version_1_has_the_same_facts(shards: Path) -> None:
    def as_version_1(metadata: dict[str, Any]) -> None:
        items = metadata.pop("metadata")
        paths = {
            json.dumps([item, *json.loads(path)]): groups
            for item, content in items.items()
            for path, groups in content["nested_path_to_metadata"].items()
        }
        layouts = {
            rank: {item: content["rank_to_layout_info"][rank] for item, content in items.items()} for rank in (0, 1)
        }
        metadata.update(version="1.0", metadata=paths, rank_to_layout_info_mappings=layouts)

    change(shards, as_version_1)
    assert api.diff(shards, GOLDEN / "torch").same


@pytest.mark.parametrize("path", ["../model_0.safetensors", "/etc/passwd", "a/../../b", ""])
def test_a_file_outside_the_checkpoint_is_refused(shards: Path, path: str) -> None:
    change(shards, lambda found: found["metadata"]["model"]["rank_to_layout_info"][0].update(file_path=path))
    with pytest.raises(SourceCorruptError, match="the file of rank 0 cannot be right"):
        api.inspect(shards)


def test_a_dtype_that_torch_does_not_have_is_refused(shards: Path) -> None:
    change(shards, lambda metadata: described(metadata, "0.weight").update(dtype="torch.float7"))
    with pytest.raises(SourceCorruptError, match="the dtype"):
        api.inspect(shards)


def test_a_resharder_of_the_jobs_own_is_named(shards: Path) -> None:
    def edit(metadata: dict[str, Any]) -> None:
        groups = metadata["metadata"]["model"]["nested_path_to_metadata"]
        next(iter(groups.values()))[0]["sharding_metadata"]["type"] = "OurOwn"

    change(shards, edit)
    with pytest.raises(SourceUnsupportedError, match="is cut as 'OurOwn'"):
        api.inspect(shards)


def test_a_tensor_may_say_itself_which_boxes_a_rank_holds(tmp_path: Path) -> None:
    whole = torch.randn(7, 5)
    boxes = {0: [((0, 0), (1, 0), (4, 5))], 1: [((4, 0), (0, 0), (3, 2)), ((4, 2), (0, 2), (3, 3))]}
    groups = []
    for rank, of_rank in boxes.items():
        local = torch.randn(5 if rank == 0 else 3, 5)
        for start, begin, size in of_rank:
            block = whole[start[0] : start[0] + size[0], start[1] : start[1] + size[1]]
            local[begin[0] : begin[0] + size[0], begin[1] : begin[1] + size[1]] = block
        save_file({"table": local}, tmp_path / f"model_{rank}.safetensors")
        starts, begins, sizes = zip(*of_rank, strict=True)
        data = {
            "global_shape": [7, 5],
            "global_offsets": list(starts),
            "local_offsets": list(begins),
            "local_sizes": list(sizes),
            "dtype": "torch.float32",
        }
        groups.append({"sharding_metadata": {"type": "default_tensor_v1", "data": data}, "ranks": (rank,)})
    form = {"type": "SafetensorsSerialization"}
    files = {rank: {"file_path": f"model_{rank}.safetensors", "serialization_format": form} for rank in (0, 1)}
    item = {"nested_path_to_metadata": {'["table"]': groups}, "rank_to_layout_info": files}
    metadata = {"metadata": {"model": item}, "world_size": 2, "version": "2.0"}
    (tmp_path / "metadata.pkl").write_bytes(pickle.dumps(metadata))
    full = tmp_path.parent / f"{tmp_path.name}.pt"
    api.convert(tmp_path, full)
    assert identical(torch.load(full)["model"]["table"], whole)


def test_sorted_keys_are_no_order_of_parameters(tmp_path: Path) -> None:
    """Two parameters of one shape and ids: safetensors sorts names, so nothing says which id is whose."""
    copy = Path(shutil.copytree(GOLDEN / "safetensors", tmp_path / "copy"))
    for rank in (0, 1):
        tensors = load_file(copy / f"model_{rank}.safetensors")
        tensors["1.weight"] = tensors["0.weight"].clone()
        save_file(tensors, copy / f"model_{rank}.safetensors")
    states = ("exp_avg", "exp_avg_sq")

    def edit(metadata: dict[str, Any]) -> None:
        model, optimizer = (metadata["metadata"][item]["nested_path_to_metadata"] for item in ("model", "optimizer"))
        model['["1.weight"]'] = model['["0.weight"]']
        for state in states:
            optimizer[f'["state",2,"{state}"]'] = optimizer[f'["state",0,"{state}"]']

    change(copy, edit)
    for rank in (0, 1):
        path = copy / f"optimizer_{rank}.pt"
        optimizer = torch.load(path, weights_only=False)
        for state in states:
            optimizer["state"][2][state] = optimizer["state"][0][state]
        torch.save(optimizer, path)
    with pytest.raises(NeedsInformationError, match="parameters=FILE"):
        api.convert(copy, tmp_path / "names.pt", key_type="name")


def test_an_item_has_to_be_the_name_of_a_file(tmp_path: Path) -> None:
    torch.save({"model": {"weight": torch.randn(4, 2)}, "a/b": 1}, tmp_path / "full.pt")
    with pytest.raises(UsageError, match="cannot be an item of torch_checkpointing"):
        api.convert(
            tmp_path / "full.pt", tmp_path / "out", flavor="torch_checkpointing", world_size=2, buffers=("none",)
        )


def test_json_and_bytes_are_extras(shards: Path, tmp_path: Path) -> None:
    def edit(metadata: dict[str, Any]) -> None:
        for item, form in (("settings", "JsonSerialization"), ("blob", "RawSerialization")):
            files = {rank: {"file_path": f"{item}_{rank}", "serialization_format": {"type": form}} for rank in (0, 1)}
            metadata["metadata"][item] = {"nested_path_to_metadata": {}, "rank_to_layout_info": files}

    change(shards, edit)
    for rank in (0, 1):
        (shards / f"settings_{rank}").write_text(json.dumps({"rank": rank, "seed": 3}))
        (shards / f"blob_{rank}").write_bytes(b"\x00same")
    api.convert(shards, tmp_path / "on-2", to="sharded", container="torch", flavor="plain", world_size=2)
    of_ranks = [torch.load(tmp_path / "on-2" / f"extra_state_world_size_2_rank_{rank}.pt") for rank in (0, 1)]
    assert [extra["settings"]["rank"] for extra in of_ranks] == [0, 1]
    assert {extra["blob"] for extra in of_ranks} == {b"\x00same"}


def test_the_last_rank_of_an_item_outside_the_metadata_may_be_missing_too(saved: Path) -> None:
    def of_three(metadata: dict[str, Any]) -> None:
        metadata["metadata"].pop("optimizer")
        metadata["world_size"] = 3
        layouts = metadata["metadata"]["model"]["rank_to_layout_info"]
        layouts[2] = layouts[1] and {**layouts[1], "file_path": "model_2.safetensors"}

    change(saved, of_three)
    for path in list(saved.glob("model_1.*")):
        shutil.copy(path, saved / path.name.replace("_1", "_2"))
    with pytest.raises(SourceIncompleteError) as caught:
        api.inspect(saved)
    assert set(caught.value.details) == {"optimizer_2.pt", "step_2.pt"}
