"""``fsdpckpt.StorageReader`` in one process: keys, values, errors, and which bytes are read."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch.distributed.checkpoint import HuggingFaceStorageWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

import fsdpckpt
from fsdpckpt.errors import (
    NeedsInformationError,
    SourceCorruptError,
    SourceIncompleteError,
    SourceMissingError,
    SourceUnsafeError,
    SourceUnsupportedError,
    StateDictMismatchError,
)
from fsdpckpt.storage.local import LocalFile
from tests.oracle.compare import differences, identical
from tests.oracle.fake_group import as_rank
from tests.readers.played_ranks import save_as_ranks, shard_rows_twice
from tests.writers.experts import ExpertMesh, mixture
from tests.writers.meshes import MeshCase, all_three, hsdp, net, over_tp, sharded_model, with_moments

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

ROWS, WIDTH = 4021, 129


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed + 31 * sum(shape))
    return torch.randn(*shape, generator=generator).to(dtype)


def content() -> dict[str, Any]:
    """A full checkpoint with values of every kind a state dict has."""
    return {
        "model": {"up.weight": random(19, 7), "up.bias": random(19, seed=1, dtype=torch.bfloat16)},
        "optimizer": {
            "state": {
                "up.weight": {"step": torch.tensor(3.0), "exp_avg": random(19, 7, seed=2), "master": None},
                "up.bias": {"step": torch.tensor(3.0), "exp_avg": random(19, seed=3), "calls": 5},
            },
            "param_groups": [
                {"lr": torch.tensor(0.125), "betas": (0.9, 0.95), "label": "a", "params": ["up.weight"]},
                {"lr": 0.25, "betas": (0.8, 0.999), "label": None, "params": ["up.bias"]},
            ],
        },
        "progress": {"epoch": 7, "pair": (random(3, seed=4), "x")},
    }


def blank(value: Any) -> Any:
    """The same nesting with other values, as a state dict to be filled."""
    if isinstance(value, torch.Tensor):
        return torch.full_like(value, 77)
    if isinstance(value, dict):
        return {key: blank(child) for key, child in value.items()}
    if isinstance(value, list):
        return [blank(child) for child in value]
    return "not loaded"


@pytest.fixture
def full(tmp_path: Path) -> Path:
    path = tmp_path / "full.pt"
    torch.save(content(), path)
    return path


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    path = tmp_path / "dcp"
    dcp.save(content(), checkpoint_id=path, no_dist=True)
    return path


def filled(path: Path, state: dict[str, Any], **options: Any) -> dict[str, Any]:
    planner = options.pop("planner", None)
    dcp.load(state, storage_reader=fsdpckpt.StorageReader(path, **options), planner=planner)
    return state


@pytest.mark.parametrize("source", ["full", "directory"])
def test_every_kind_of_value_arrives_as_it_was_saved(source: str, request: pytest.FixtureRequest) -> None:
    loaded = filled(request.getfixturevalue(source), blank(content()))
    assert differences(loaded, content()) == []


def test_a_state_dict_may_have_the_sections_under_other_keys_or_a_model_alone_at_its_top(full: Path) -> None:
    expected = content()
    state = {"app": {"weights": blank(expected["model"]), "opt": blank(expected["optimizer"])}}
    loaded = filled(full, state, model="app.weights", optimizer="app.opt")
    assert differences(loaded, {"app": {"weights": expected["model"], "opt": expected["optimizer"]}}) == []
    assert differences(filled(full, blank(expected["model"]), model=""), expected["model"]) == []


@pytest.mark.parametrize(
    "nest", [lambda c: {"state": {"net": c["model"], "opt": c["optimizer"]}}, lambda c: c["model"]]
)
def test_a_dcp_source_is_loaded_by_its_own_keys_as_pytorch_does(nest: Any, tmp_path: Path) -> None:
    saved = nest(content())
    dcp.save(saved, checkpoint_id=tmp_path, no_dist=True)
    for reader in (FileSystemReader(tmp_path), fsdpckpt.StorageReader(tmp_path)):
        state = blank(saved)
        dcp.load(state, storage_reader=reader)
        assert differences(state, saved) == []


def test_sections_that_would_get_the_same_keys_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "full.pt"
    torch.save({**content(), "up.weight": 4}, path)
    with pytest.raises(SourceUnsupportedError, match=r"up\.weight") as caught:
        fsdpckpt.StorageReader(path, model="")
    assert "StorageReader(path, model=..., optimizer=...)" in str(caught.value)


def test_an_optimizer_keyed_by_id_has_no_flattened_form(full: Path) -> None:
    with pytest.raises(SourceUnsupportedError, match="keyed by id"):
        fsdpckpt.StorageReader(full, key_type="id", flatten_optimizer_state_dict=True)


def test_a_tensor_of_another_dtype_is_an_error_that_names_it_and_nothing_is_cast(full: Path) -> None:
    state = blank(content())
    state["model"]["up.bias"] = state["model"]["up.bias"].float()
    with pytest.raises((StateDictMismatchError, CheckpointException)) as caught:
        filled(full, state)
    assert "up.bias: bfloat16 in the checkpoint, float32 in the state dict" in str(caught.value)
    assert (state["model"]["up.weight"] == 77).all()


WRONG: dict[str, dict[str, Any]] = {
    "a key that is not there": {"model": {"up.other": torch.empty(3)}},
    "another shape": {"model": {"up.weight": torch.empty(19, 8)}},
    "a value where a tensor is stored": {"model": {"up.weight": "text"}},
}


@pytest.mark.parametrize("what", WRONG)
def test_a_state_dict_that_does_not_fit_is_refused_as_pytorch_refuses_it(
    what: str, full: Path, directory: Path
) -> None:
    messages = []
    for reader in (FileSystemReader(directory), fsdpckpt.StorageReader(full)):
        with pytest.raises(CheckpointException) as caught:
            dcp.load(dict(WRONG[what]), storage_reader=reader)
        messages.append(str(caught.value).strip().splitlines()[-1])
    # What the metadata calls the stored thing is PyTorch's own class in both.
    assert messages[0] == messages[1]


def test_a_partial_load_leaves_what_the_source_does_not_have(full: Path) -> None:
    kept = random(3, seed=9)
    state = {"model": {"up.weight": torch.empty(19, 7), "up.new": kept.clone()}}
    loaded = filled(full, state, planner=DefaultLoadPlanner(allow_partial_load=True))
    assert differences(loaded, {"model": {"up.weight": content()["model"]["up.weight"], "up.new": kept}}) == []


@pytest.mark.parametrize("at_once", [8, 60, 1 << 20])
def test_a_target_that_is_not_contiguous_is_filled_in_its_own_strides(
    at_once: int, full: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fsdpckpt.verify.blocks.BLOCK_BYTES", at_once)
    target = torch.full((7, 19), 77.0).t()
    filled(full, {"model": {"up.weight": target}})
    assert identical(target, content()["model"]["up.weight"])
    assert not target.is_contiguous()


@pytest.mark.parametrize("as_dcp", [False, True])
def test_a_tensor_inside_a_value_keeps_its_order_in_memory(as_dcp: bool, tmp_path: Path) -> None:
    """DCP stores a tuple as one value, whatever is in it."""
    images = random(2, 3, 4, 5).to(memory_format=torch.channels_last)
    value = random(4, 6).t(), images, random(4, 6)[:, ::2], random(6, 2, dtype=torch.bfloat16).t()
    saved = {"model": {"w": random(2)}, "buffers": value}
    if as_dcp:
        dcp.save(saved, checkpoint_id=tmp_path / "saved", no_dist=True)
    else:
        torch.save(saved, tmp_path / "saved")
    state: dict[str, Any] = {"model": {"w": torch.empty(2)}, "buffers": None}
    dcp.load(state, storage_reader=fsdpckpt.StorageReader(tmp_path / "saved"), no_dist=True)
    assert all(map(identical, state["buffers"], value))
    assert state["buffers"][0].stride() == value[0].stride()


@pytest.mark.parametrize(
    "target", [torch.zeros(5, 3, dtype=torch.complex64).conj(), torch._neg_view(torch.zeros(5))], ids=["conj", "neg"]
)
def test_a_conjugated_or_negated_view_is_filled_with_the_numbers_of_the_checkpoint(
    target: torch.Tensor, tmp_path: Path
) -> None:
    saved = torch.randn(target.shape, dtype=target.dtype)
    torch.save({"model": {"w": saved}}, tmp_path / "full.pt")
    filled(tmp_path / "full.pt", {"model": {"w": target}})
    assert identical(target, saved)
    assert target.is_conj() is target.is_complex() and target.is_neg() is not target.is_complex()


def test_each_rank_gets_the_extras_of_its_own(tmp_path: Path) -> None:
    for rank in range(2):
        torch.save({"up.weight": random(5, 3)}, tmp_path / f"model_world_size_2_rank_{rank}.pt")
        torch.save({"rng": random(4, seed=rank)}, tmp_path / f"extra_state_world_size_2_rank_{rank}.pt")
    for rank in (0, 1, 2):
        with as_rank(rank, 3):
            state = {"rng": torch.empty(4)}
            dcp.load(state, storage_reader=fsdpckpt.StorageReader(tmp_path), no_dist=True)
        assert identical(state["rng"], random(4, seed=rank % 2))


def test_an_optimizer_that_is_keyed_by_id_asks_for_what_would_name_it(tmp_path: Path) -> None:
    optimizer = {"state": {0: {"exp_avg": random(4, 3)}}, "param_groups": [{"lr": 0.5, "params": [0]}]}
    torch.save({"optimizer": optimizer}, tmp_path / "ids.pt")
    with pytest.raises(NeedsInformationError, match=r"reference=.*key_type='id'"):
        fsdpckpt.StorageReader(tmp_path / "ids.pt")
    state = {"optimizer": blank(optimizer)}
    assert differences(filled(tmp_path / "ids.pt", state, key_type="id"), {"optimizer": optimizer}) == []
    torch.save({"up.weight": random(4, 3, seed=8)}, tmp_path / "names.pt")
    named = {"state": {"up.weight": optimizer["state"][0]}, "param_groups": [{"lr": 0.5, "params": ["up.weight"]}]}
    loaded = filled(tmp_path / "ids.pt", {"optimizer": blank(named)}, reference=tmp_path / "names.pt", buffers="none")
    assert differences(loaded, {"optimizer": named}) == []


def test_another_source_can_be_named_when_loading(full: Path, tmp_path: Path) -> None:
    other = {"model": {"up.weight": random(19, 7, seed=50)}}
    torch.save(other, tmp_path / "other.pt")
    reader = fsdpckpt.StorageReader(full)
    state = blank(other)
    dcp.load(state, checkpoint_id=str(tmp_path / "other.pt"), storage_reader=reader)
    assert differences(state, other) == []
    assert reader.checkpoint_id == str(tmp_path / "other.pt")
    assert fsdpckpt.StorageReader.validate_checkpoint_id(full)
    assert not fsdpckpt.StorageReader.validate_checkpoint_id(tmp_path / "nothing")


def test_the_steps_can_be_called_as_older_torch_calls_them(full: Path) -> None:
    reader = fsdpckpt.StorageReader(full)
    metadata = reader.read_metadata()
    reader.set_up_storage_reader(metadata, True)
    state = {"model": blank(content()["model"])}
    planner = DefaultLoadPlanner()
    planner.set_up_planner(state, metadata, True)
    (plan,) = reader.prepare_global_plan([reader.prepare_local_plan(planner.create_local_plan())])
    reader.read_data(planner.finish_plan(plan), planner).wait()
    assert differences(state["model"], content()["model"]) == []


def test_a_tensor_of_another_shape_is_refused_although_the_planner_let_it_pass(full: Path) -> None:
    """As the planner of torch 2.4 does, which fills what overlaps."""
    reader = fsdpckpt.StorageReader(full)
    metadata = reader.read_metadata()
    metadata.state_dict_metadata["model.up.weight"].size = torch.Size((19, 8))
    planner = DefaultLoadPlanner()
    planner.set_up_planner({"model": {"up.weight": torch.empty(19, 8)}}, metadata, True)
    with pytest.raises(StateDictMismatchError, match=r"\[19, 7\] in the checkpoint, \[19, 8\] in the state dict"):
        reader.read_data(planner.create_local_plan(), planner)


@pytest.mark.parametrize(
    "export", [{"model": {"up.weight": torch.zeros(3)}}, {"optimizer": {"state": {}, "param_groups": []}}]
)
def test_an_export_in_a_dcp_directory_is_left_out_as_pytorch_leaves_it_out(tmp_path: Path, export: Any) -> None:
    dcp.save(content(), checkpoint_id=tmp_path / "dcp", no_dist=True)
    torch.save(export, tmp_path / "dcp" / "export.pt")
    torch.save({"epoch": 3}, tmp_path / "dcp" / "more.pt")
    assert differences(filled(f"{tmp_path}/dcp/", blank(content())), content()) == []
    reader = fsdpckpt.StorageReader(tmp_path / "dcp")
    assert [note.message for note in reader.checkpoint.notes if note.kind == "not-carried"] == [
        "data that neither an index nor the metadata of the checkpoint names: export.pt"
    ]
    assert "more.epoch" in reader.read_metadata().state_dict_metadata
    with pytest.raises(NeedsInformationError, match="2 candidates"):
        fsdpckpt.convert(tmp_path / "dcp", tmp_path / "full.pt")


@pytest.mark.parametrize("form", ["dcp", "torch", "safetensors"])
def test_what_was_saved_after_the_reader_was_made_is_what_is_loaded(tmp_path: Path, form: str) -> None:
    path, draw = tmp_path / "saved", torch.Generator().manual_seed(0)

    def save(names: str, rows: int) -> dict[str, torch.Tensor]:
        values = {name: torch.randn(rows + number, 3, generator=draw) for number, name in enumerate(names)}
        if form == "dcp":
            dcp.save(values, checkpoint_id=path, no_dist=True)
        elif form == "torch":
            torch.save(values, path)
        else:
            save_file(values, path)
        return values

    def loaded(like: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        state = blank(like)
        dcp.load(state, storage_reader=reader, no_dist=True)
        return dict(state)

    save("abc", 9)
    reader = fsdpckpt.StorageReader(path, model="")
    for names, rows in (("cba", 9), ("bcad", 11), ("a", 2)):
        saved = save(names, rows)
        assert differences(loaded(saved), saved) == []
        assert differences(loaded(saved), saved) == []


class FirstRows(DefaultLoadPlanner):
    """A job's own: it takes as many rows as its tensors have, from the second on."""

    def create_local_plan(self) -> LoadPlan:
        return LoadPlan(
            [
                ReadItem(
                    LoadItemType.TENSOR,
                    MetadataIndex(name, torch.Size([0, 0])),
                    torch.Size([0, 0]),
                    MetadataIndex(name, torch.Size([0, 0])),
                    torch.Size([1, 0]),
                    tensor.shape,
                )
                for name, tensor in self.state_dict.items()
            ]
        )


def test_a_planner_may_ask_for_a_part_of_a_tensor(full: Path) -> None:
    whole = content()["model"]["up.weight"]
    loaded = filled(full, {"model": {"up.weight": torch.empty(5, 7)}}, planner=FirstRows())
    assert identical(loaded["model"]["up.weight"], whole[1:6])
    with pytest.raises(CheckpointException, match="float64 in the state dict"):
        filled(full, {"model": {"up.weight": torch.empty(5, 7, dtype=torch.float64)}}, planner=FirstRows())


@pytest.mark.parametrize("saved", ["", "_orig_mod."])
@pytest.mark.parametrize("asked", ["", "_orig_mod."])
def test_names_of_a_compiled_model_are_those_of_the_state_dict_in_its_param_groups_too(
    tmp_path: Path, saved: str, asked: str
) -> None:
    def state(prefix: str, seed: int) -> dict[str, Any]:
        names = [prefix + name for name in ("b.w", "a.w", "c")]
        states = {name: {"exp_avg": random(4, seed=seed + at)} for at, name in enumerate(names)}
        groups = [{"lr": 0.5 + seed, "params": names[:2]}, {"lr": 0.25, "params": names[2:]}]
        model = {name: random(4, seed=seed + 7 + at) for at, name in enumerate(names)}
        return {"model": model, "optimizer": {"state": states, "param_groups": groups}}

    dcp.save(state(saved, 1), checkpoint_id=tmp_path, no_dist=True)
    assert differences(filled(tmp_path, state(asked, 50)), state(asked, 1)) == []


@pytest.mark.parametrize("saved", ["flattened", "nested", "file"])
def test_a_flattened_optimizer_state_needs_no_option(tmp_path: Path, saved: str) -> None:
    def state(seed: int, *, flattened: bool) -> dict[str, Any]:
        names = ["b.0.w", "a.w", "0.weight"]
        states = {name: {"step": torch.tensor(float(seed)), "exp_avg": random(4, seed=seed)} for name in names}
        settings: list[dict[str, Any]] = [
            {"lr": torch.tensor(0.5 + seed), "betas": (0.1 * seed, 0.9)},
            {"lr": 0.25 + seed, "betas": (0.2 * seed, 0.8)},
        ]
        listed = [names[:2], names[2:]]
        if not flattened:
            groups = [{**each, "params": params} for each, params in zip(settings, listed, strict=True)]
            return {"optim": {"state": states, "param_groups": groups}}
        flat = {f"state.{name}.{key}": value for name, entry in states.items() for key, value in entry.items()}
        for each, params in zip(settings, listed, strict=True):
            flat |= {f"param_groups.{name}.{key}": value for name in params for key, value in each.items()}
        return {"optim": flat}

    expected = state(1, flattened=True)
    if saved == "file":
        torch.save({"optimizer": state(1, flattened=False)["optim"]}, tmp_path / "full.pt")
        source, options = tmp_path / "full.pt", {"optimizer": "optim"}
    else:
        source, options = tmp_path, {}
        dcp.save(state(1, flattened=saved == "flattened"), checkpoint_id=source, no_dist=True)
    assert differences(filled(source, state(5, flattened=True), **options), expected) == []
    assert differences(filled(source, state(5, flattened=False), **options), state(1, flattened=False)) == []


def test_a_save_while_a_rank_loads_is_noticed(tmp_path: Path) -> None:
    first, second = {"a": random(40), "b": random(40)}, {"b": random(40), "a": random(40)}
    dcp.save(first, checkpoint_id=tmp_path, no_dist=True)
    reader, state, planner = fsdpckpt.StorageReader(tmp_path, model=""), blank(first), DefaultLoadPlanner()
    planner.set_up_planner(state, reader.read_metadata(), True)
    dcp.save(second, checkpoint_id=tmp_path, no_dist=True)
    with pytest.raises(SourceCorruptError, match="changed while it was read"):
        reader.read_data(planner.create_local_plan(), planner)


def test_a_source_behind_a_url_is_read_by_ranges() -> None:
    fsspec = pytest.importorskip("fsspec")
    with fsspec.open("memory://loading/full.pt", "wb") as file:
        torch.save(content(), file)
    state = blank(content())
    dcp.load(state, storage_reader=fsdpckpt.StorageReader("memory://loading/full.pt"))
    assert differences(state, content()) == []


def test_values_too_many_to_read_beforehand_are_read_when_asked_for(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fsdpckpt.readers.dcp.read._MAX_VALUES", 0)
    assert differences(filled(directory, blank(content())), content()) == []


def test_items_that_are_no_archives_of_their_own_are_loaded_by_opening_all_of_them(tmp_path: Path) -> None:
    filesystem = pytest.importorskip("torch.distributed.checkpoint.filesystem")
    if not hasattr(filesystem, "SerializationFormat"):
        pytest.skip("this torch has no serialization formats")
    saved = {"model": {"a": random(7, 5), "b": random(11, seed=1)}}
    writer = filesystem.FileSystemWriter(tmp_path, serialization_format=filesystem.SerializationFormat.SAFETENSORS)
    dcp.save(saved, storage_writer=writer, no_dist=True)
    assert differences(filled(tmp_path, blank(saved)), saved) == []


def test_chunks_that_pytorch_declared_wrongly_are_read_from_where_they_are(tmp_path: Path) -> None:
    """FSDP2 x tensor parallel with uneven rows: ``dcp.load`` itself fails on these, or fills in other rows."""
    weights = {"r9": random(9, 3), "r12": random(12, 3, seed=1)}
    save_as_ranks(tmp_path, lambda _: {"model": shard_rows_twice(weights, 4, 2)}, 8)
    saved = {f"{name}.weight": value for name, value in weights.items()}
    with pytest.raises(CheckpointException):
        dcp.load({"model": blank(saved)}, storage_reader=FileSystemReader(tmp_path))
    assert differences(filled(tmp_path, {"model": blank(saved)})["model"], saved) == []


def test_what_cannot_be_loaded_is_said_before_anything_is(tmp_path: Path, directory: Path) -> None:
    with pytest.raises(SourceMissingError):
        fsdpckpt.StorageReader(tmp_path / "nothing")
    for rank in (0, 2):
        torch.save({"a": random(3)}, tmp_path / f"model_world_size_3_rank_{rank}.pt")
    os.rename(directory, tmp_path.parent / "moved-away")
    with pytest.raises(SourceIncompleteError, match="rank"):
        fsdpckpt.StorageReader(tmp_path)


class Harmful:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("touch harmed",)


def test_a_pickle_that_would_run_something_is_refused_on_opening(tmp_path: Path) -> None:
    torch.save({"model": {"a": random(3)}, "x": Harmful()}, tmp_path / "bad.pt")
    with pytest.raises(SourceUnsafeError, match="system"):
        fsdpckpt.StorageReader(tmp_path / "bad.pt")


def test_a_file_that_lost_its_end_after_opening_is_an_error(directory: Path) -> None:
    reader = fsdpckpt.StorageReader(directory)
    reader._sources.__exit__()
    data = directory / "__0_0.distcp"
    data.write_bytes(data.read_bytes()[: data.stat().st_size // 2])
    with pytest.raises((SourceCorruptError, CheckpointException)) as caught:
        dcp.load(blank(content()), storage_reader=reader)
    assert "__0_0.distcp" in str(caught.value)


def sharded(*shape: int) -> DTensor:
    rows = torch.empty(shape).chunk(4)[dist.get_rank()]
    mesh = init_device_mesh("cpu", (4,))
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(rows.contiguous(), mesh, [Shard(0)], run_check=False, shape=shape, stride=stride)


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The length of every read of a local file."""
    reads: list[int] = []
    one, other = LocalFile.read, LocalFile.read_into

    def counted(self: LocalFile, offset: int, nbytes: int) -> bytes:
        reads.append(nbytes)
        return one(self, offset, nbytes)

    def counted_into(self: LocalFile, offset: int, buffer: memoryview) -> None:
        reads.append(len(buffer))
        other(self, offset, buffer)

    monkeypatch.setattr(LocalFile, "read", counted)
    monkeypatch.setattr(LocalFile, "read_into", counted_into)
    return reads


@pytest.mark.parametrize("container", ["torch", "dcp"])
def test_a_rank_reads_its_shard_of_a_large_file_and_little_else(
    container: str, tmp_path: Path, read: list[int]
) -> None:
    weights = {"a": random(ROWS, WIDTH), "b": random(WIDTH, ROWS, seed=1)}
    total = sum(tensor.nbytes for tensor in weights.values())
    path = tmp_path / container
    if container == "dcp":
        dcp.save({"model": weights}, checkpoint_id=path, no_dist=True)
    else:
        torch.save({"model": weights}, path)
    for rank in range(4):
        read.clear()
        with as_rank(rank, 4):
            state = {"model": {name: sharded(*tensor.shape) for name, tensor in weights.items()}}
            dcp.load(state, storage_reader=fsdpckpt.StorageReader(path), no_dist=True)
            for name, tensor in weights.items():
                assert identical(state["model"][name].to_local(), tensor.chunk(4)[rank])
        share = sum(tensor.chunk(4)[rank].nbytes for tensor in weights.values())
        assert share <= sum(read) <= share + total // 10


def test_items_that_a_rank_does_not_need_are_not_even_opened(tmp_path: Path, read: list[int]) -> None:
    weights = {f"w{number}": random(103, 101, seed=number) for number in range(60)}
    dcp.save({"model": weights}, checkpoint_id=tmp_path, no_dist=True)
    state = {"model": {"w41": torch.empty(103, 101)}}
    filled(tmp_path, state)
    assert identical(state["model"]["w41"], weights["w41"])
    assert sum(read) < 4 * weights["w41"].nbytes  # a look at all of them would be 60 times 8 KiB


def test_a_shard_in_other_strides_is_filled_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fsdpckpt.verify.blocks.BLOCK_BYTES", 100)
    weight = random(22, 7)
    torch.save({"model": {"w": weight}}, tmp_path / "full.pt")
    with as_rank(2, 4):
        mesh = init_device_mesh("cpu", (4,))
        local = torch.full((7, 6), 77.0).t()
        target = DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=(22, 7), stride=(7, 1))
        dcp.load({"model": {"w": target}}, storage_reader=fsdpckpt.StorageReader(tmp_path / "full.pt"), no_dist=True)
        assert not target.to_local().is_contiguous()
        assert identical(target.to_local(), weight[12:18])


def require_filled(path: Path, world_size: int, model: Any, step: int) -> None:
    """Every ``step``-th rank's model, which ``model`` makes there, is filled with what it holds."""
    for rank in range(0, world_size, step):
        with as_rank(rank, world_size):
            expected = dict(model())
            state = {"model": {name: torch.zeros_like(value) for name, value in expected.items()}}
            dcp.load(state, storage_reader=fsdpckpt.StorageReader(path), no_dist=True)
            assert not differences(state["model"], expected)


@pytest.mark.parametrize(
    "case",
    [
        hsdp(2, 4), over_tp(2, 2), all_three(2, 2, 2), MeshCase({"dp": 4}, ("dp",), rows=1),
        hsdp(4, 4), over_tp(4, 4), all_three(2, 4, 2), MeshCase({"dp": 16}, ("dp",), rows=1),
        hsdp(8, 8), over_tp(8, 8), all_three(4, 4, 4), MeshCase({"dp": 64}, ("dp",), rows=1),
    ],
    ids=str,
)  # fmt: skip
def test_every_mesh_is_filled(tmp_path: Path, case: MeshCase) -> None:
    size, odd = (case.world_size, 0) if case.rows else (4, 3)
    torch.save({"model": net(size, odd).state_dict()}, tmp_path / "full.pt")
    model = lambda: sharded_model(case, lambda: net(size, odd)).state_dict()  # noqa: E731
    require_filled(tmp_path / "full.pt", case.world_size, model, max(3, case.world_size // 4))


@pytest.mark.parametrize(("odd", "case"), [(3, over_tp(3, 2)), (5, over_tp(4, 2))], ids=["7 rows", "9 rows"])
def test_uneven_rows_cut_twice_are_filled_where_torch_asks_for_other_boxes(
    tmp_path: Path, odd: int, case: MeshCase
) -> None:
    """FSDP2 over tensor parallelism: the plan that torch makes for such a rank names wrong rows, or too many."""
    torch.save({"model": net(1, odd).state_dict()}, tmp_path / "full.pt")
    wrong: list[bool] = []

    def model() -> dict[str, Any]:
        held = sharded_model(case, lambda: net(1, odd)).state_dict()
        weight = held["col.weight"]
        size, _ = compute_local_shape_and_global_offset(weight.shape, weight.device_mesh, weight.placements)
        wrong.append(size != tuple(weight.to_local().shape))
        return held

    require_filled(tmp_path / "full.pt", case.world_size, model, 1)
    assert any(wrong)


@pytest.mark.parametrize("case", [ExpertMesh(1, 4, 2), ExpertMesh(2, 8, 4), ExpertMesh(4, 16, 8)], ids=str)
def test_both_meshes_of_a_mixture_of_experts_are_filled(tmp_path: Path, case: ExpertMesh) -> None:
    torch.save({"model": mixture().state_dict()}, tmp_path / "full.pt")
    model = lambda: with_moments(case.sharded())["model"]  # noqa: E731
    require_filled(tmp_path / "full.pt", case.world_size, model, max(1, case.world_size // 4))


class OwnPlanner(DefaultLoadPlanner):
    """A job's own: it looks names up under others, as torchtitan's and NeMo's planners do."""

    def set_up_planner(self, state_dict: Any, metadata: Any = None, is_coordinator: bool = False) -> None:
        named = {name.removeprefix("renamed."): value for name, value in state_dict.items()}
        super().set_up_planner(named, metadata, is_coordinator)


@pytest.mark.parametrize("case", [over_tp(2, 2), hsdp(2, 2), all_three(2, 2, 2)], ids=str)
def test_safetensors_of_a_mesh_of_one_dimension_fill_one_of_several_by_a_planner_of_the_job(
    tmp_path: Path, case: MeshCase
) -> None:
    size, saved = case.world_size, MeshCase({"dp": 4}, ("dp",))
    save_as_ranks(
        tmp_path,
        lambda _: dict(sharded_model(saved, lambda: net(size, 0)).state_dict()),
        4,
        writer=lambda path: HuggingFaceStorageWriter(path, save_distributed=True),
    )
    for rank in range(size):
        with as_rank(rank, size):
            expected = dict(sharded_model(case, lambda: net(size, 0)).state_dict())
            state = {f"renamed.{name}": torch.zeros_like(value) for name, value in expected.items()}
            reader = fsdpckpt.StorageReader(tmp_path, model="")
            dcp.load(state, storage_reader=reader, planner=OwnPlanner(allow_partial_load=True), no_dist=True)
            assert not differences({name.removeprefix("renamed."): value for name, value in state.items()}, expected)
