"""DCP directories: golden ones of old torch, live ones of this torch, and every way they are known to be wrong."""

from __future__ import annotations

import io
import os
import pickle
import random
import shutil
import zlib
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from numpy import array
from torch import nn
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint._extension import StreamTransformExtension
from torch.distributed.checkpoint.filesystem import SerializationFormat
from torch.distributed.checkpoint.metadata import BytesStorageMetadata
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

import fsdpckpt
from fsdpckpt.errors import SourceCorruptError, SourceIncompleteError, SourceUnsupportedError
from fsdpckpt.ir.checkpoint import Container, Layout
from fsdpckpt.ir.placements import OneSlice
from fsdpckpt.ir.tensors import Tensor
from fsdpckpt.ir.values import UNREAD, Global, Object
from fsdpckpt.readers.dcp import overlaps
from fsdpckpt.readers.protocol import Locate
from fsdpckpt.text import plural
from tests.makers import GOLDEN, Change, Make, cut, dcp_of, lose, move, put
from tests.oracle.fake_group import as_rank
from tests.readers.contents import held, opened, raw, same_values
from tests.readers.played_ranks import save_as_ranks, shard, shard_rows_twice
from tests.refusals import Refusal, corrupt, each_of, incomplete, unrecognised, unsafe, unsupported


def truth(form: str) -> Any:
    return torch.load(GOLDEN / form / "truth" / "full.pt", weights_only=False)


def by_id(optim: Any) -> Any:
    """Keyed by position, as the plain ``optimizer.state_dict()`` is."""
    order = [param for group in optim["param_groups"] for param in group["params"]]
    groups = [{**group, "params": [order.index(p) for p in group["params"]]} for group in optim["param_groups"]]
    return {"state": {order.index(param): states for param, states in optim["state"].items()}, "param_groups": groups}


@pytest.mark.parametrize(
    ("form", "chunked"),
    [
        ("torch-2.1/f1_flat_sh_st_dcp", True),
        ("torch-2.1/f1_full_dcp", False),
        ("torch-2.4/f1_orig_sh_dt_dcp", True),
        ("torch-2.4/f1_orig_sh_st_dcp", True),
        ("torch-2.4/f1_full_dcp", False),
    ],
)
def test_fsdp1_directories_of_old_torch_hold_the_truth(form: str, chunked: bool) -> None:
    expected = truth(form)
    model = opened(GOLDEN / form / "model")
    same_values(model, model=expected["model"])
    optim = opened(GOLDEN / form / "optim")
    assert optim.optim is not None
    assert held(optim.optim.state, optim.files) == held(expected["optim"]["state"], ())
    layout = Layout.SHARDED if chunked else Layout.FULL
    assert [(c.layout, c.container, c.world_size, c.problems) for c in (model, optim)] == [
        (layout, Container.DCP, 2, ())
    ] * 2


@pytest.mark.parametrize("form", ["f2_default", "f2_flatten", "f2_plain", "f2_tiny"])
def test_fsdp2_directories_of_old_torch_hold_the_truth(form: str) -> None:
    expected = truth(f"torch-2.4/{form}")
    optim = by_id(expected["optim"]) if form == "f2_plain" else expected["optim"]
    found = opened(GOLDEN / "torch-2.4" / form / "ckpt")
    same_values(found, model=expected["model"], optim=optim)
    assert found.optim is not None and found.optim.key_type == ("id" if form == "f2_plain" else "name")
    assert found.problems == () and found.layout is Layout.SHARDED
    assert "ids-repaired" not in [note.kind for note in found.notes], "DCP writes every key as text"
    assert list(found.optim.state) == list(optim["state"])
    assert type(found.optim.param_groups[0]["betas"]) is tuple  # type: ignore[index]


def test_the_raw_optimizer_of_fsdp1_saved_through_dcp_is_recognised_as_lost() -> None:
    found = opened(GOLDEN / "torch-2.1/f1_flat_local_dcp/optim")
    assert found.layout is Layout.FLATTENED
    assert [(problem.kind, problem.fatal) for problem in found.problems] == [("flattened-lost", True)]
    assert "gone" in found.problems[0].message


def test_flat_parameters_are_recognised_and_the_vectors_beside_them_are_marked() -> None:
    found = opened(GOLDEN / "torch-2.1/f1_flat_local_dcp/model")
    assert (found.layout, found.problems) == (Layout.FLATTENED, ())
    assert found.model is not None
    flat, buffer = found.model.params["_flat_param"], found.model.params["buf"]
    assert isinstance(flat, Tensor) and isinstance(buffer, Tensor)
    assert flat.chunks.start[:, 0].tolist() == [0, 162]
    assert (buffer.cut, buffer.sharded) == (OneSlice(), None)
    (note,) = [note for note in found.notes if note.kind == "flattened-names"]
    assert note.keys == ("buf",)


def test_vectors_of_an_optimizer_beside_flat_parameters_are_not_marked(tmp_path: Path) -> None:
    """Of a producer that nests everything under "state", which an optimizer's keys have too."""

    def state_of(_rank: int) -> dict[str, Any]:
        flat = distribute_tensor(torch.randn(9), init_device_mesh("cpu", (2,)), [Shard(0)], src_data_rank=None)
        optim = {"state": {"w": {"exp_avg": torch.randn(4)}}, "param_groups": [{"params": ["w"]}]}
        return {"state": {"model": {"l._flat_param": flat, "buf": torch.randn(3)}, "optimizers": {"Adam": optim}}}

    save_as_ranks(tmp_path, state_of, 2)
    found = opened(tmp_path)
    marked = [named.key for named in found.tensors() if isinstance(named.tensor.cut, OneSlice)]
    assert (found.layout, marked) == (Layout.FLATTENED, ["buf"])
    metadata = pickle.loads((tmp_path / ".metadata").read_bytes())
    metadata.planner_data = None
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
    found = opened(tmp_path)
    marked = [named.key for named in found.tensors() if isinstance(named.tensor.cut, OneSlice)]
    assert [key.rpartition(".")[2] for key in marked] == ["buf"]


def test_factors_beside_whole_moments_of_cut_parameters_are_no_slices(tmp_path: Path) -> None:
    """Adafactor by id: FSDP1 would have cut the moments, too."""
    model = {"a": torch.rand(8, 6), "b": torch.rand(5, 7)}
    state = {
        number: {"exp_avg": torch.rand_like(weight), "row": torch.rand(len(weight)), "col": torch.rand(weight.shape[1])}
        for number, weight in enumerate(model.values())
    }
    optimizer = {"state": state, "param_groups": [{"lr": 0.1, "params": [0, 1]}]}
    torch.save({"model": model, "optimizer": optimizer}, tmp_path / "full.pt")
    fsdpckpt.convert(tmp_path / "full.pt", tmp_path / "on-4", to="sharded", world_size=4, buffers=["none"])
    found = opened(tmp_path / "on-4")
    assert found.problems == () and found.layout is Layout.SHARDED
    assert fsdpckpt.diff(tmp_path / "full.pt", tmp_path / "on-4").same


@pytest.mark.parametrize(
    ("container", "key_type", "only"), [("dcp", "id", None), ("dcp", "id", "optim"), ("torch", "name", None)]
)
def test_factors_alone_are_no_slices_where_the_manifest_says_so(
    tmp_path: Path, container: str, key_type: str, only: str | None
) -> None:
    """Adafactor without momentum: each of its states is a vector, as each slice of FSDP1 is."""
    model = {"a": torch.rand(8, 6), "b": torch.rand(5, 7)}
    keys: list[Any] = list(model) if key_type == "name" else [0, 1]
    state = {
        key: {"row": torch.rand(len(weight)), "col": torch.rand(weight.shape[1])}
        for key, weight in zip(keys, model.values(), strict=True)
    }
    optimizer = {"state": state, "param_groups": [{"lr": 0.1, "params": keys}]}
    torch.save({"model": model, "optimizer": optimizer}, tmp_path / "full.pt")
    options: dict[str, Any] = {"only": only} if only else {"buffers": ["none"]}
    options |= {"to": "sharded", "world_size": 4, "container": container}
    fsdpckpt.convert(tmp_path / "full.pt", tmp_path / "on-4", **options)
    found = opened(tmp_path / "on-4")
    assert found.problems == () and found.layout is not Layout.FLATTENED
    fsdpckpt.convert(f"{tmp_path}/on-4/", tmp_path / "back.pt", to="full")
    back = torch.load(tmp_path / "back.pt")
    assert held(back["optimizer"]["state"], ()) == held(state, ())


def raw_fsdp1(rank: int) -> dict[str, Any]:
    """What FSDP1's ranks put into DCP: 1-D slices of the same keys, different values."""
    generator = torch.Generator().manual_seed(rank)
    state = {
        number: {"exp_avg": torch.randn(11 + number, generator=generator), "step": torch.tensor(3.0)}
        for number in (0, 1)
    }
    return {
        "model": {"w": torch.ones(4, 3)},
        "optim": {"state": state, "param_groups": [{"lr": 0.1, "params": [0, 1]}]},
    }


def ignoring_biases(rank: int) -> dict[str, Any]:
    """FSDP2 of a model whose biases alone are trained, and are not sharded: the optimizer's own state dict is whole."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))
    biases = [layer.bias for layer in model]
    fully_shard(model, mesh=init_device_mesh("cpu", (4,)), ignored_params=set(biases))
    optimizer = torch.optim.Adam(biases)
    for bias in biases:
        bias.grad = torch.ones_like(bias)
    optimizer.step()
    return {"model": model.state_dict(), "optim": optimizer.state_dict()}


@pytest.mark.parametrize("saved", [raw_fsdp1, ignoring_biases])
def test_vectors_in_one_piece_may_be_whole_or_one_ranks_slice(
    saved: Callable[[int], dict[str, Any]], tmp_path: Path
) -> None:
    """Both programs save the same form, so neither is named as the one that did."""
    save_as_ranks(tmp_path / "four", saved, 4)
    found = opened(tmp_path / "four")
    (problem,) = [problem for problem in found.problems if problem.fatal]
    assert problem.kind == "flattened" and problem.key in {f"optim.state.{number}.exp_avg" for number in (0, 1)}
    assert "It is whole if FSDP does not shard its parameter (ignored_params)" in problem.message
    with pytest.raises(SourceUnsupportedError, match="contents are not known for certain"):
        fsdpckpt.convert(tmp_path / "four", tmp_path / "full.pt")
    fsdpckpt.convert(tmp_path / "four", tmp_path / "model.pt", only="model")
    assert torch.load(tmp_path / "model.pt").keys() == found.model.params.keys()  # type: ignore[union-attr]


def over_two(*shape: int) -> torch.Tensor:
    return distribute_tensor(torch.ones(shape), init_device_mesh("cpu", (2,)), [Shard(0)], src_data_rank=None)


def adam(state: dict[Any, Any]) -> dict[str, Any]:
    return {"state": state, "param_groups": [{"lr": 0.1, "params": list(state)}]}


def beside_flat_parameters(rank: int) -> dict[str, Any]:
    return {**raw_fsdp1(rank), "model": {"l._flat_param": over_two(9)}}


def beside_states_outside_of_fsdp(rank: int) -> dict[str, Any]:
    """A parameter outside of FSDP has whole states of two dimensions; the model beside shows what is cut."""
    slices = torch.randn(11, generator=torch.Generator().manual_seed(rank))
    state = {number: {"exp_avg": value} for number, value in enumerate((torch.ones(4, 3), slices, torch.ones(5)))}
    return {"model": {"cut": over_two(6, 3), "whole": torch.ones(4, 3), "bias": torch.ones(5)}, "optim": adam(state)}


def factors(*, model: bool, state: bool) -> Callable[[int], dict[str, Any]]:
    """Adafactor's, for instance: vectors in no parameter's shape beside states in theirs. Which of both DCP cut."""

    def state_of(_rank: int) -> dict[str, Any]:
        states = {0: {"exp_avg": over_two(6, 3) if state else torch.ones(6, 3), "row": torch.ones(11)}}
        return {"model": {"w": over_two(6, 3) if model else torch.ones(6, 3)}, "optim": adam(states)}

    return state_of


BY_NUMBER_AND_NAME = {"0": torch.randn(2), "w": torch.randn(4, 3)}
BY_ID = adam({0: {"exp_avg": torch.randn(4, 3), "step": torch.tensor(3.0)}, 1: {"exp_avg": torch.randn(4)}})
FATAL_SLICES, LOST_SLICES = ([(kind, "optim.state.1.exp_avg", True)] for kind in ("flattened", "flattened-lost"))
# What is saved, of how many ranks, the layout that it has, and the problems, with whether each is fatal
VECTORS: dict[str, tuple[Callable[[int], dict[str, Any]], int, Layout, list[tuple[str, str | None, bool]]]] = {
    "raw beside flat parameters": (beside_flat_parameters, 2, Layout.FLATTENED, LOST_SLICES),
    "raw beside whole states": (beside_states_outside_of_fsdp, 2, Layout.FLATTENED, FATAL_SLICES),
    "factors beside states that are cut": (factors(model=True, state=True), 2, Layout.SHARDED, []),
    "factors of whole parameters": (factors(model=False, state=False), 2, Layout.FULL, []),
    "raw of one rank": (raw_fsdp1, 1, Layout.FULL, []),
    "a parameter whose name is a number": (lambda _: {"model": BY_NUMBER_AND_NAME, "optim": adam({
        name: {"exp_avg": weight} for name, weight in BY_NUMBER_AND_NAME.items()})}, 2, Layout.FULL, []),
    "a whole optimizer by id": (lambda _: {"optim": BY_ID}, 2, Layout.FULL, []),
}  # fmt: skip


@pytest.mark.parametrize("name", VECTORS)
def test_vectors_are_slices_or_whole(name: str, tmp_path: Path) -> None:
    state_of, world, layout, problems = VECTORS[name]
    save_as_ranks(tmp_path, state_of, world)
    found = opened(tmp_path)
    assert [(problem.kind, problem.key, problem.fatal) for problem in found.problems] == problems
    assert found.layout is layout
    assert all("gone" in problem.message for problem in found.problems if problem.kind == "flattened-lost")
    if name == "a whole optimizer by id":
        same_values(found, optim=BY_ID)


WEIGHTS = {
    "a": torch.randn(17, 5),
    "b": torch.randn(3, 4),
    "c": torch.randn(1, 4),
    "d": torch.randn(6, 2).bfloat16(),
    "e": torch.randn(24, 1, dtype=torch.float64),
}
MODEL = {f"{name}.weight": value for name, value in WEIGHTS.items()}


def with_buffers(world_size: int, _rank: int = 0) -> dict[str, Any]:
    return {
        "model": {
            **shard(WEIGHTS, world_size),
            "buf": torch.arange(7),
            "flag": torch.tensor(5),
            "row": torch.ones(1, 3),
        }
    }


@pytest.mark.parametrize("world_size", [1, 2, 4, 7])
def test_uneven_and_empty_shards_come_together(tmp_path: Path, world_size: int) -> None:
    save_as_ranks(tmp_path, partial(with_buffers, world_size), world_size)
    found = opened(tmp_path)
    buffers = {"buf": torch.arange(7), "flag": torch.tensor(5), "row": torch.ones(1, 3)}
    same_values(found, model={**MODEL, **buffers})
    assert (found.world_size, found.problems) == (world_size, ())
    assert found.layout is (Layout.SHARDED if world_size > 1 else Layout.FULL)
    params: dict[str, Tensor] = found.model.params  # type: ignore[union-attr,assignment]
    assert list(params) == [*MODEL, *buffers]
    several = world_size > 1
    assert {name: params[name].sharded for name in params} == {
        **dict.fromkeys(MODEL, True if several else None),
        "buf": False if several else None,
        "flag": False,
        "row": None,
    }
    if several:
        assert params["a.weight"].placement == "[Shard(0)]" and params["buf"].placement == "whole"
        rows = -(-17 // world_size)
        assert params["a.weight"].chunks.rank.tolist() == [start // rows for start in range(0, 17, rows)] + (
            [params["a.weight"].chunks.rank.tolist()[-1]] if 0 in params["a.weight"].chunks.size[:, 0] else []
        )


@pytest.mark.parametrize("how", [{"thread_count": 3}, {"single_file_per_rank": False}])
def test_several_files_a_rank_are_read(tmp_path: Path, how: dict[str, Any]) -> None:
    save_as_ranks(tmp_path, partial(with_buffers, 2), 2, writer=partial(FileSystemWriter, **how))
    assert len(list(tmp_path.glob("*.distcp"))) > 2
    found = opened(tmp_path)
    assert held(found.model.params["a.weight"], found.files) == raw(WEIGHTS["a"])  # type: ignore[union-attr]


def rank_local(directory: Path, world_size: int) -> None:
    """``use_collectives=False``: every rank writes its own metadata."""
    for rank in range(world_size):
        with as_rank(rank, world_size):
            state = with_buffers(world_size)
            state["optimizer"] = {"state": {}, "param_groups": [{"lr": 0.5, "params": ["a.weight"]}]}
            dcp.save(state, storage_writer=FileSystemWriter(directory), use_collectives=False)


def test_rank_local_metadata_is_put_together(tmp_path: Path) -> None:
    rank_local(tmp_path, 3)
    assert not (tmp_path / ".metadata").exists()
    found = opened(tmp_path)
    for name, value in MODEL.items():
        assert held(found.model.params[name], found.files) == raw(value)  # type: ignore[union-attr]
    assert found.optim is not None and found.optim.param_groups == [{"lr": 0.5, "params": ["a.weight"]}]
    assert found.problems == () and found.world_size == 3


RICH: dict[str, Any] = {
    "model": {"w": torch.randn(4, 3), "fp8": torch.randn(3).to(torch.float8_e4m3fn), "none": torch.empty(0, 3)},
    "optimizer": {
        "state": {0: {"step": torch.tensor(3.0), "exp_avg": torch.randn(4, 3), "note": None, "text": "a", "n": (1, 2)}},
        "param_groups": [
            {"lr": torch.tensor(0.5), "betas": (0.9, 0.95), "fused": None, "params": [0]},
            {"lr": 0.25, "params": []},
        ],
    },
    "lr_scheduler": {"last_epoch": 3, "base_lrs": [0.1, 0.2]},
    "mixed": [torch.arange(3), {"x": torch.ones(2)}, "word"],
    "nan": float("nan"),
}


def test_values_of_every_kind_keep_types_nesting_and_order(tmp_path: Path) -> None:
    dcp.save(RICH, checkpoint_id=tmp_path, no_dist=True)
    found = opened(tmp_path)
    same_values(found, model=RICH["model"], optim=RICH["optimizer"])
    extra = held(found.extra, found.files)
    assert np.isnan(extra.pop("nan"))
    assert extra == held({"lr_scheduler": RICH["lr_scheduler"], "mixed": RICH["mixed"]}, ())
    assert found.notes == () and found.problems == () and found.origin.keys_in_order
    assert list(found.optim.param_groups[0]) == list(RICH["optimizer"]["param_groups"][0])  # type: ignore[union-attr,index]


def test_entries_that_were_empty_keep_the_places_of_the_others(tmp_path: Path) -> None:
    dcp.save({"a": [{}, torch.ones(2), {}, torch.zeros(3)]}, checkpoint_id=tmp_path, no_dist=True)
    found = opened(tmp_path)
    assert held(found.extra, found.files) == {"a": [{}, raw(torch.ones(2)), {}, raw(torch.zeros(3))]}
    assert [note.kind for note in found.notes] == ["empty-entries"]


def test_top_level_names_beside_a_flattened_optimizer_are_the_model(tmp_path: Path) -> None:
    optim = {f"state.{name}.exp_avg": torch.randn_like(value) for name, value in MODEL.items()}
    optim |= {f"param_groups.{name}.lr": 0.5 for name in MODEL}
    blob = torch.save((1,), file := io.BytesIO()) or file.getvalue()
    root = {
        **MODEL,
        "optimizer": optim,
        "train_state": {"step": torch.tensor(5, dtype=torch.int32), "blob": io.BytesIO(blob)},
    }
    dcp.save(root, checkpoint_id=tmp_path, no_dist=True)
    found = opened(tmp_path)
    state = {name: {"exp_avg": optim[f"state.{name}.exp_avg"]} for name in MODEL}
    same_values(found, model=MODEL, optim={"state": state, "param_groups": [{"lr": 0.5, "params": list(MODEL)}]})
    kept = found.extra["train_state"]["blob"]  # type: ignore[index,call-overload]
    assert isinstance(kept, Object) and kept.function == Global("_io", "BytesIO")


def test_a_save_without_flattening_keeps_its_flat_keys(tmp_path: Path) -> None:
    flat = {"model.w": torch.randn(3, 4), "optim.state.w.exp_avg": torch.randn(3, 4), "optim.param_groups.w.lr": 0.5}
    dcp.save(flat, checkpoint_id=tmp_path, no_dist=True, planner=DefaultSavePlanner(flatten_state_dict=False))
    found = opened(tmp_path)
    state = {"w": {"exp_avg": flat["optim.state.w.exp_avg"]}}
    same_values(
        found, model={"w": flat["model.w"]}, optim={"state": state, "param_groups": [{"lr": 0.5, "params": ["w"]}]}
    )
    assert not found.origin.keys_in_order


def layers_of(path: Path, rates: list[float]) -> list[list[str]]:
    """One linear layer a learning rate, two parameters each; returns the parameter names of each group."""
    torch.manual_seed(7)
    layers = torch.nn.ModuleList(torch.nn.Linear(5, 3) for _ in rates)
    groups = [
        {"params": list(layer.parameters()), "lr": torch.tensor(rate)}
        for layer, rate in zip(layers, rates, strict=True)
    ]
    optimizer = torch.optim.AdamW(groups)
    sum(layer(torch.randn(2, 5)).sum() for layer in layers).backward()
    optimizer.step()
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    state = {"model": layers.state_dict(), "optimizer": get_optimizer_state_dict(layers, optimizer, options=options)}
    dcp.save(state, checkpoint_id=path, no_dist=True)
    return [[f"{number}.weight", f"{number}.bias"] for number in range(len(rates))]


@pytest.mark.parametrize("locate", [Locate.ALL, Locate.NOTHING])
@pytest.mark.filterwarnings("ignore")
def test_parameters_with_equal_tensor_rates_share_a_group_and_others_do_not(tmp_path: Path, locate: Locate) -> None:
    first, second, third = layers_of(tmp_path, [0.1, 0.25, 0.1])
    groups: Any = opened(tmp_path, locate=locate).optim.param_groups  # type: ignore[union-attr]
    assert [group["params"] for group in groups] == [first + third, second]
    rates = [group["lr"] for group in groups]
    assert rates[0] is not rates[1] and all(rate.shape == () for rate in rates)


def test_without_locating_no_tensor_is_opened(tmp_path: Path) -> None:
    save_as_ranks(tmp_path, partial(with_buffers, 2), 2)
    located = opened(tmp_path)
    for file in tmp_path.glob("*.distcp"):
        file.write_bytes(bytes(file.stat().st_size))
    found = opened(tmp_path, locate=Locate.NOTHING)
    for name, tensor in located.model.params.items():  # type: ignore[union-attr]
        other = found.model.params[name]  # type: ignore[union-attr]
        assert isinstance(tensor, Tensor) and isinstance(other, Tensor)
        assert (other.shape, other.dtype, other.sharded) == (tensor.shape, tensor.dtype, tensor.sharded)
        assert (other.chunks.offset == -1).all() and (other.chunks.start == tensor.chunks.start).all()
    with pytest.raises(SourceCorruptError):
        opened(tmp_path)


def test_very_many_pickled_values_are_unread_without_locating(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dcp.save(RICH, checkpoint_id=tmp_path, no_dist=True)
    found = opened(tmp_path, locate=Locate.NOTHING)
    assert found.optim is not None and found.optim.param_groups is not None
    assert found.optim.param_groups[0]["betas"] == (0.9, 0.95) and found.notes == ()
    monkeypatch.setattr("fsdpckpt.readers.dcp.read._MAX_VALUES", 3)
    found = opened(tmp_path, locate=Locate.NOTHING)
    assert found.optim is not None and found.optim.param_groups is not None
    assert found.optim.param_groups[0]["betas"] is UNREAD and found.extra["nan"] is UNREAD
    (note,) = [note.message for note in found.notes if note.kind == "unread"]
    saved = FileSystemReader(tmp_path).read_metadata().state_dict_metadata.values()
    pickled = sum(isinstance(item, BytesStorageMetadata) for item in saved)
    assert note == f"values that are not tensors were not read: {pickled}"


def test_equal_values_are_parsed_once_and_keep_their_own_checksums(tmp_path: Path) -> None:
    dcp.save({"model": MODEL, "a": (0.9, 1), "b": (0.9, 1), "c": (0.9, 2)}, checkpoint_id=tmp_path, no_dist=True)
    found = opened(tmp_path)
    assert found.extra == {"a": (0.9, 1), "b": (0.9, 1), "c": (0.9, 2)}
    sums = found.checksums
    rows = list(zip(sums.file.tolist(), sums.offset.tolist(), sums.nbytes.tolist(), sums.crc.tolist(), strict=True))
    assert len(set(rows)) == len(rows) > 3 * 3
    for file, offset, nbytes, crc in rows:
        data = Path(found.files[file].path).read_bytes()[offset : offset + nbytes]
        assert zlib.crc32(data) == crc


def test_data_files_of_another_save_are_noted(tmp_path: Path) -> None:
    save_as_ranks(tmp_path, partial(with_buffers, 2), 2)
    shutil.copy(tmp_path / "__0_0.distcp", tmp_path / "__5_0.distcp")
    found = opened(tmp_path)
    assert found.world_size == 2
    assert any("__5_0.distcp" in note.message for note in found.notes if note.kind == "stray")


class Shout(StreamTransformExtension):
    """Any transform does: the items are no archives any more."""

    @staticmethod
    def registry_name() -> str:
        return "stream.shout"

    @staticmethod
    def from_descriptor(version: str) -> Shout:
        return Shout()

    def get_descriptor(self) -> str:
        return "stream.shout/1"

    def transform_to(self, output: Any) -> Any:
        return output

    def transform_from(self, input: Any) -> Any:  # noqa: A002
        return input


class Evil:
    def __reduce__(self) -> Any:
        return os.system, ("touch ran",)


def as_safetensors(path: str) -> FileSystemWriter:
    return FileSystemWriter(path, serialization_format=SerializationFormat.SAFETENSORS)


def test_the_safetensors_format_is_read_by_its_own_headers(tmp_path: Path) -> None:
    optim = {
        "state": {"a.weight": {"exp_avg": torch.randn(17, 5)}},
        "param_groups": [{"lr": 0.5, "params": ["a.weight"]}],
    }
    save_as_ranks(tmp_path, lambda _: {"model": shard(WEIGHTS, 3), "optimizer": optim}, 3, writer=as_safetensors)
    found = opened(tmp_path)
    same_values(found, model=MODEL, optim=optim)
    assert found.problems == () and found.world_size == 3


def rows(*counts: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(sum(counts))
    return {f"r{count}": torch.randn(count, 3, generator=generator) for count in counts}


@pytest.mark.parametrize(
    ("data", "tensor", "counts", "wrong"),
    [(2, 2, (2, 5, 6, 7, 9), 0), (4, 2, (9, 17, 12, 3), 2), (3, 2, (7, 12), 1), (2, 4, (9, 13), 0)],
)
def test_uneven_rows_under_tensor_parallel_are_placed_where_they_belong(
    tmp_path: Path, data: int, tensor: int, counts: tuple[int, ...], wrong: int
) -> None:
    weights = rows(*counts)
    save_as_ranks(tmp_path, lambda _: {"model": shard_rows_twice(weights, data, tensor)}, data * tensor)
    found = opened(tmp_path)
    same_values(found, model={f"{name}.weight": value for name, value in weights.items()})
    notes = [note.message for note in found.notes if note.kind == "chunks-corrected"]
    assert found.problems == () and len(notes) == bool(wrong)
    assert not wrong or f"for {plural(wrong, 'tensor')}" in notes[0]


def test_rows_that_no_chunk_declares_are_a_problem(tmp_path: Path) -> None:
    save_as_ranks(tmp_path, partial(with_buffers, 4), 4)
    changed(tmp_path, lambda metadata: metadata.state_dict_metadata["model.a.weight"].chunks.pop(1))
    found = opened(tmp_path)
    assert [(problem.kind, problem.key, problem.fatal) for problem in found.problems] == [
        ("incomplete", "a.weight", True)
    ]


def changed(directory: Path, change: Callable[[Any], None]) -> None:
    path = directory / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    change(metadata)
    path.write_bytes(pickle.dumps(metadata, protocol=4))


def metadata(change: Callable[[Any], object]) -> Change:
    """What ``.metadata`` says is another."""
    return lambda directory: changed(directory, change)  # type: ignore[arg-type]


def played(world_size: int, *changes: Change, given: str = "", state: Any = None, **how: Any) -> Make:
    """What ranks save, changed: ``with_buffers`` if no other ``state`` is given."""

    def make(directory: Path) -> Path:
        save_as_ranks(directory, state or partial(with_buffers, world_size), world_size, **how)
        for change in changes:
            change(directory)
        return directory / given

    return make


def ranks_alone(*changes: Change) -> Make:
    """Every rank has metadata of its own."""

    def make(directory: Path) -> None:
        rank_local(directory, 3)
        for change in changes:
            change(directory)

    return make


def no_archive(directory: Path) -> None:
    """The bytes of one item are others."""
    place = next(info for index, info in storage_of(directory) if index.fqn == "model.v")
    with open(directory / place.relative_path, "r+b") as file:
        file.seek(place.offset)
        file.write(random.Random(3).randbytes(place.length))


def scrambled(name: str) -> Change:
    """As many bytes, and others."""
    return lambda directory: put(name, random.Random(3).randbytes((directory / name).stat().st_size))(directory)


def storage_of(directory: Path) -> list[tuple[Any, Any]]:
    return list(FileSystemReader(directory).read_metadata().storage_data.items())


def file_of_a_value(change: Callable[[str], Change]) -> Make:
    """Each item has a file of its own, and that of a value is changed."""

    def make(directory: Path) -> None:
        writer = FileSystemWriter(directory, single_file_per_rank=False)
        dcp.save({"model": {"w": torch.ones(3)}, "seen": (1, "a")}, storage_writer=writer, no_dist=True)
        (name,) = (info.relative_path for index, info in storage_of(directory) if index.fqn == "seen")
        change(name)(directory)

    return make


def another_name(directory: Path) -> None:
    """An entry lies elsewhere in the tree than its name says."""
    path = directory / ".metadata"
    assert STORED_NAME in path.read_bytes()
    path.write_bytes(path.read_bytes().replace(STORED_NAME, STORED_NAME.replace(b"w.w", b"w.v")))


def overwritten(directory: Path) -> None:
    """The data file is that of another save."""
    other = lambda _: {"model": {"w": torch.randn(4, 3).half(), "v": torch.arange(81.0).int()}}  # noqa: E731
    save_as_ranks(directory / "other", other, 1)
    data = (directory / "other" / DATA_0).read_bytes()
    size = (directory / DATA_0).stat().st_size
    (directory / DATA_0).write_bytes(data + bytes(max(0, size - len(data))))
    shutil.rmtree(directory / "other")


def other_dtype(found: Any) -> None:
    chunk = found.state_dict_metadata["model.v"]
    found.state_dict_metadata["model.v"] = replace(chunk, properties=replace(chunk.properties, dtype=torch.int32))


def in_one_file(found: Any) -> None:
    """As when one process writes what two ranks held: the file keeps the last of the chunks of one name."""
    for info in found.storage_data.values():
        info.relative_path = "__1_0.distcp"


def shifted(found: Any) -> None:
    """Sizes that no mesh explains."""
    for key in ("model.a.weight", "model.b.weight"):
        first, second = found.state_dict_metadata[key].chunks
        width = first.sizes[1]
        index = next(i for i in found.storage_data if i.fqn == key and i.offset == second.offsets)
        info = found.storage_data.pop(index)
        object.__setattr__(index, "offset", torch.Size((3, 0)))
        found.storage_data[index] = info
        first.sizes, second.offsets, second.sizes = map(torch.Size, ((3, width), (3, 0), (5, width)))


def transformed(directory: Path) -> None:
    writer = FileSystemWriter(directory, _extensions=[Shout()])
    dcp.save({"w": torch.ones(3)}, storage_writer=writer, no_dist=True)


STORED_NAME, DATA_0 = b"optimizer.state.w.weight.sq", "__0_0.distcp"
W_AND_V = lambda _: {"model": {"w": torch.randn(4, 3), "v": torch.randn(9, 9)}}  # noqa: E731
A_AND_B = lambda _: {"model": shard({"a": torch.randn(8, 3), "b": torch.randn(8, 2)}, 2)}  # noqa: E731
OVER_TP = lambda _: {"model": shard_rows_twice(rows(17), 8, 2)}  # noqa: E731
NAMED_STATE = {"model": {"w.weight": torch.randn(3)}, "optimizer": {"state": {"w.weight": {"sq": torch.rand(3)}}}}
LISTED = {"model": {"w": torch.ones(3)}, "a": [torch.ones(2), torch.ones(4)]}
THROUGH = "the nesting of {} runs through another entry"
REFUSALS = (
    incomplete("data files are missing", played(4, lose("__[13]_0.distcp")), "\n  - __1_0.distcp\n  - __3_0.distcp\n"),
    corrupt("data files are truncated", played(3, cut(DATA_0, "__2_0.distcp")), "truncated", "\n  - __0_0.distcp: ",
            "\n  - __2_0.distcp: "),
    incomplete("a data file of a value is missing", file_of_a_value(lose), "\n  - __0_"),
    corrupt("a data file of a value is truncated", file_of_a_value(cut), "truncated", "\n  - __0_"),
    incomplete("metadata of ranks is missing", ranks_alone(lose("__[02].*")), "\n  - __0.metadata\n  - __2.metadata\n"),
    incomplete("data without metadata", played(2, move(".metadata", ".metadata.tmp")), "did not finish"),
    unrecognised("the metadata alone", played(2, given=".metadata"), "next: ", "DIR"),
    unrecognised("one data file", played(2, given=DATA_0), "next: ", "DIR"),
    corrupt("a name elsewhere in the tree", dcp_of(NAMED_STATE, another_name), "contradicts itself",
            "optimizer.state.w.veight.sq", STORED_NAME.decode()),
    *(
        corrupt(f"{key} at {path}", dcp_of(LISTED, metadata(lambda found, key=key, path=path: found.planner_data.update(
                {key: path}))), says)
        for key, path, says in (
            ("a.0", ("model", "w", "x"), THROUGH.format("a.0")),
            ("model.w", ("a",), "runs through another entry"),
            ("a.0", ("model", "w"), "runs through another entry"),
            ("a.1", ("a", 1 << 40), "list positions beyond 1099511627776"),
            ("a.1", ("b", "c", 1 << 40), "list positions beyond 1099511627776"),
        )
    ),
    corrupt("an item that is no archive", played(1, no_archive, state=W_AND_V), "the item of model.v is not a torch",
            about={"key": "model.v", "file": f"DIR/{DATA_0}"}),
    corrupt("a value that is no archive", file_of_a_value(scrambled), "the item of seen is not a torch archive",
            about={"key": "seen"}),
    corrupt("data files of another save", played(1, overwritten, state=W_AND_V)),
    corrupt("another dtype", played(1, metadata(other_dtype), state=W_AND_V), "holds float32 (9, 9), not int32 (9, 9)"),
    unsupported("transformed items", transformed, "stream.shout/1"),
    unsafe("a pickled value that names a program", dcp_of({"model": {"w": torch.ones(3)}, "x": Evil()}),
           "\n  - posix.system\n"),
    incomplete("chunks that the safetensors format overwrote", played(2, metadata(in_one_file), writer=as_safetensors,
               state=lambda _: {"model": shard(WEIGHTS, 2)}), "model.a.weight at (0, 0): not in __1_0.distcp",
               *(f"\n  - model.{name} at " for name in MODEL)),
    corrupt("rows that two ranks declared as one", played(16, state=OVER_TP), "model.r17.weight", "never stored"),
    corrupt("sizes that no mesh explains", played(2, metadata(shifted), state=A_AND_B), "\n  - model.a.weight: ",
            "\n  - model.b.weight: "),
)  # fmt: skip


@each_of(REFUSALS)
def test_it_is_refused_and_nothing_runs(refusal: Refusal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    refusal.require(tmp_path)
    assert not list((tmp_path / "here").iterdir())


@pytest.mark.parametrize("make", [played(4, lose("__1_0.distcp")), file_of_a_value(cut), file_of_a_value(lose)])
def test_files_that_are_missing_or_cut_are_seen_without_opening_any(make: Make, tmp_path: Path) -> None:
    make(tmp_path)
    with pytest.raises((SourceIncompleteError, SourceCorruptError)):
        opened(tmp_path, locate=Locate.NOTHING)


Places = dict[Any, Any]


def moved(places: Places, name: str, change: Callable[[Any, Any], Any]) -> None:
    """Change the place of ``name``; the second argument is that of ``model.b``, another tensor of its size."""
    by_key = {index.fqn: index for index in places}
    places[by_key[name]] = change(places[by_key[name]], places[by_key["model.b"]])


@pytest.fixture
def three(tmp_path: Path) -> Path:
    torch.manual_seed(2)
    model = {name: torch.randn(5, 3) for name in "abc"}
    dcp.save({"model": model, "note": "text", "empty": torch.zeros(0, 3)}, checkpoint_id=tmp_path / "dcp")
    return tmp_path / "dcp"


CHANGES: dict[str, Callable[[Any, Any], Any]] = {
    "the place of another": lambda own, other: other,
    "longer": lambda own, other: replace(own, length=own.length + 1),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", ["model.a", "model.c"])
def test_an_item_in_the_place_of_another_is_a_contradiction(
    three: Path, tmp_path: Path, name: str, change: str
) -> None:
    assert fsdpckpt.verify(three).problems == ()
    changed(three, lambda metadata: moved(metadata.storage_data, name, CHANGES[change]))
    with pytest.raises(SourceCorruptError, match="one of them is somewhere else"):
        fsdpckpt.convert(three, tmp_path / "out.pt", to="full")
    assert any(problem.kind == "overlap" for problem in fsdpckpt.verify(three).problems)


@pytest.mark.parametrize("sorted_at_once", [True, False])
def test_items_are_compared_file_by_file(sorted_at_once: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same bytes of two files are two places."""
    apart = overlaps._Places(array([0, 1, 2]), array([0, 1, 1]), array([0, 0, 8]), array([8, 8, 9]))
    if not sorted_at_once:
        monkeypatch.setattr(overlaps, "_are_apart", lambda places: False)
    monkeypatch.setattr(overlaps, "_places", lambda metadata: apart)
    metadata: Any = SimpleNamespace(tensors=dict.fromkeys("ab"), items=dict.fromkeys("c"))
    assert list(overlaps.shared_bytes(metadata)) == []
    monkeypatch.setattr(overlaps, "_places", lambda metadata: apart._replace(end=array([8, 9, 9])))
    assert [problem.key for problem in overlaps.shared_bytes(metadata)] == ["c"]
