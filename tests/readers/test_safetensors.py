"""safetensors: one file, shards, an index, DCP's Hugging Face writer, and the scheme fsdpckpt writes by."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch.distributed.checkpoint import HuggingFaceStorageWriter

from fsdpckpt.errors import SourceCorruptError, SourceIncompleteError, SourceUnsafeError, SourceUnsupportedError
from fsdpckpt.formats.safetensors import METADATA_KEY
from fsdpckpt.ir.checkpoint import Container, Layout
from fsdpckpt.ir.values import encode
from fsdpckpt.text import plural
from tests.readers.contents import held, opened, same_values
from tests.readers.played_ranks import save_as_ranks, shard

PT = {"format": "pt"}


def weights(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "e.weight": torch.randn(17, 9, generator=generator),
        "l.0.a.weight": torch.randn(28, 9, generator=generator, dtype=torch.float64),
        "l.0.a.bias": torch.randn(28, generator=generator).bfloat16(),
        "scale": torch.tensor(0.25),
    }


def write_index(directory: Path, where: dict[str, str]) -> Path:
    index = directory / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": where}))
    return index


def sharded(directory: Path) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    model = weights()
    names = [f"model-0000{i + 1}-of-00003.safetensors" for i in range(3)]
    where = {key: names[i % 3] for i, key in enumerate(model)}
    for name in names:
        save_file({key: model[key] for key in model if where[key] == name}, directory / name, PT)
    return model, where


def test_one_file_is_a_model(tmp_path: Path) -> None:
    save_file(weights(), tmp_path / "w.safetensors", PT)
    found = opened(tmp_path / "w.safetensors")
    assert (found.layout, found.container, found.world_size) == (Layout.FULL, Container.SAFETENSORS, 1)
    same_values(found, model=weights())
    assert found.problems == ()


@pytest.mark.parametrize("index", [True, False])
def test_shards_are_one_model_with_and_without_an_index(tmp_path: Path, index: bool) -> None:
    model, where = sharded(tmp_path)
    if index:
        same_values(opened(write_index(tmp_path, where)), model=model)
    same_values(opened(tmp_path), model=model)


@pytest.mark.parametrize("index", [True, False])
def test_all_missing_shards_are_named(tmp_path: Path, index: bool) -> None:
    _, where = sharded(tmp_path)
    if index:
        write_index(tmp_path, where)
    for number in (1, 3):
        (tmp_path / f"model-0000{number}-of-00003.safetensors").unlink()
    with pytest.raises(SourceIncompleteError) as error:
        opened(tmp_path)
    assert error.value.details == ("model-00001-of-00003.safetensors", "model-00003-of-00003.safetensors")


def test_an_index_that_promises_what_its_shard_has_not_is_refused(tmp_path: Path) -> None:
    _, where = sharded(tmp_path)
    where["l.9.weight"] = where["scale"]
    where["e.weight"] = "model-00002-of-00003.safetensors"
    write_index(tmp_path, where)
    with pytest.raises(SourceIncompleteError) as error:
        opened(tmp_path)
    assert sorted(detail.partition(" ")[0] for detail in error.value.details) == ["e.weight", "l.9.weight"]


def test_a_tensor_the_index_does_not_list_is_noted(tmp_path: Path) -> None:
    model, where = sharded(tmp_path)
    del where["e.weight"]
    write_index(tmp_path, where)
    found = opened(tmp_path)
    same_values(found, model=model)
    assert [note.key for note in found.notes if note.kind == "unlisted"] == ["e.weight"]


@pytest.mark.parametrize("text", ["[]", "{}", '{"weight_map": [1]}', '{"weight_map": {"a": 1}}', "{", ""])
def test_an_index_that_is_none_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(SourceCorruptError):
        opened(tmp_path)


@pytest.mark.parametrize("shard", ["../w.safetensors", "/etc/passwd", "a/b.safetensors", "..", ""])
def test_an_index_cannot_leave_its_directory(tmp_path: Path, shard: str) -> None:
    write_index(tmp_path, {"w": shard})
    with pytest.raises(SourceCorruptError, match="outside"):
        opened(tmp_path)


def test_one_name_in_two_shards_is_refused(tmp_path: Path) -> None:
    save_file({"a": torch.ones(3)}, tmp_path / "model-00001-of-00002.safetensors", PT)
    save_file({"a": torch.ones(3)}, tmp_path / "model-00002-of-00002.safetensors", PT)
    with pytest.raises(SourceCorruptError) as error:
        opened(tmp_path)
    assert error.value.key == "a"


def hf_sharded(directory: Path, world_size: int, **how: Any) -> dict[str, torch.Tensor]:
    model = {name: tensor for name, tensor in weights(3).items() if tensor.ndim == 2}
    save_as_ranks(
        directory,
        lambda _: shard({name.replace(".", "_"): tensor for name, tensor in model.items()}, world_size),
        world_size,
        writer=lambda path: HuggingFaceStorageWriter(path, save_distributed=True, **how),
    )
    return {name.replace(".", "_") + ".weight": tensor for name, tensor in model.items()}


@pytest.mark.parametrize("files", [1, 2])
def test_the_shards_of_dcps_hugging_face_writer_are_put_together(tmp_path: Path, files: int) -> None:
    where = {"e_weight.weight": 1, "l_0_a_weight.weight": files}
    model = hf_sharded(tmp_path, 4, fqn_to_index_mapping=where)
    found = opened(tmp_path)
    assert (found.layout, found.world_size) == (Layout.SHARDED, 4)
    same_values(found, model=model)
    assert found.model is not None
    chunks = found.model.params["e_weight.weight"].chunks  # type: ignore[union-attr]
    assert chunks.rank.tolist() == [0, 1, 2, 3] and chunks.size[:, 0].tolist() == [5, 5, 5, 2]


@pytest.mark.parametrize("ranks", [1, 3, 4])
def test_that_nothing_shows_whether_shards_of_later_ranks_are_missing_is_said(tmp_path: Path, ranks: int) -> None:
    hf_sharded(tmp_path, 4)
    for rank in range(ranks, 4):
        (tmp_path / f"shard-{rank + 1:05d}-model-00001-of-00001.safetensors").unlink()
    (note,) = opened(tmp_path).notes
    assert note.kind == "inferred" and f"those of {plural(ranks, 'rank')} are here, and count as all" in note.message
    save_file({"a.weight": torch.ones(3)}, tmp_path / "model.safetensors")
    assert opened(tmp_path / "model.safetensors").notes == ()


def test_a_missing_rank_below_the_highest_is_named(tmp_path: Path) -> None:
    hf_sharded(tmp_path, 4)
    (tmp_path / "shard-00002-model-00001-of-00001.safetensors").unlink()
    with pytest.raises(SourceIncompleteError) as error:
        opened(tmp_path)
    assert error.value.details == ("shard-00002-*.safetensors",)


@pytest.mark.parametrize(
    "info",
    [
        {"b": {"saved_offsets": [0]}},
        *({"a": {"saved_offsets": offsets}} for offsets in ([], [0, 0], [-1], [0.0], [True], ["0"], [1 << 62], None)),
    ],
)
def test_sharding_information_that_does_not_fit_the_tensors_is_refused(tmp_path: Path, info: Any) -> None:
    metadata = {"DCP_SHARDING_INFO": json.dumps(info), **PT}
    save_file({"a": torch.ones(3)}, tmp_path / "shard-00001-model-00001-of-00001.safetensors", metadata)
    with pytest.raises(SourceCorruptError, match="DCP_SHARDING_INFO"):
        opened(tmp_path)


@pytest.mark.parametrize("other", [torch.ones(3).double(), torch.ones(3, 1)])
def test_chunks_of_one_name_that_are_not_of_one_tensor_are_refused(tmp_path: Path, other: torch.Tensor) -> None:
    for rank, tensor in enumerate((torch.ones(3), other)):
        info = {"DCP_SHARDING_INFO": json.dumps({"a": {"saved_offsets": [3 * rank] + [0] * (tensor.ndim - 1)}}), **PT}
        save_file({"a": tensor}, tmp_path / f"shard-0000{rank + 1}-model-00001-of-00001.safetensors", info)
    with pytest.raises(SourceCorruptError, match="do not fit together") as error:
        opened(tmp_path)
    assert error.value.key == "a"


def scheme(**document: Any) -> dict[str, str]:
    return {METADATA_KEY: json.dumps({"version": 1, **document}), **PT}


STATES = {0: {"step": torch.tensor(3.0), "exp_avg": torch.randn(3, 4), "note": None}, 1: {"step": 7}}
GROUPS = [{"lr": torch.tensor(0.5), "betas": (0.9, 0.95), "params": [0, 1]}]


def optimizer_entry(prefix: str) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """The tensors and the document entry of STATES and GROUPS."""
    tensors = {f"{prefix}state.0.{name}": STATES[0][name] for name in ("step", "exp_avg")}
    tensors["optimizer.param_groups.0.lr"] = GROUPS[0]["lr"]
    group = encode({**GROUPS[0], "lr": 0})
    group["lr"] = {"$tensor": "optimizer.param_groups.0.lr"}  # type: ignore[index,call-overload]
    entry = {
        "key_type": "id",
        "param_keys": [[0, 1]],
        "order": encode([[0, ["step", "exp_avg", "note"]], [1, ["step"]]]),
        "state_values": encode({0: {"note": None}, 1: {"step": 7}}),
        "param_groups": [group],
        "extra": encode({"loss_scale": 2.0}),
    }
    return tensors, entry


def check_optimizer(found: Any) -> None:
    same_values(found, model=None if found.model is None else MODEL, optim={"state": STATES, "param_groups": GROUPS})
    assert list(found.optim.state[0]) == ["step", "exp_avg", "note"]
    assert found.optim.extra == {"loss_scale": 2.0}
    assert type(found.optim.param_groups[0]["betas"]) is tuple


MODEL = {"head.weight": torch.randn(3, 4), "emb.weight": torch.randn(4)}


def test_model_and_optimizer_in_one_file_come_back_as_sections(tmp_path: Path) -> None:
    tensors, entry = optimizer_entry("optimizer.")
    tensors |= {f"model.{key}": value for key, value in MODEL.items()}
    tensors["extra.rng.0"] = torch.arange(3, dtype=torch.uint8)
    document = scheme(sections=True, optim=entry, extra={"rng": [{"$tensor": "extra.rng.0"}], "epoch": 3})
    save_file(tensors, tmp_path / "all.safetensors", document)
    found = opened(tmp_path / "all.safetensors")
    check_optimizer(found)
    assert held(found.extra, found.files) == held({"rng": [torch.arange(3, dtype=torch.uint8)], "epoch": 3}, ())


def test_model_and_optimizer_files_in_one_directory_come_back_as_sections(tmp_path: Path) -> None:
    tensors, entry = optimizer_entry("")
    save_file(MODEL, tmp_path / "model.safetensors", PT)
    save_file(tensors, tmp_path / "optimizer.safetensors", scheme(optim=entry))
    check_optimizer(opened(tmp_path))
    alone = opened(tmp_path / "optimizer.safetensors")
    assert alone.model is None and alone.extra == {}


def test_order_aliases_values_and_metadata_of_the_model_come_back(tmp_path: Path) -> None:
    versions = {"": {"version": 2}}
    document = scheme(
        model_aliases={"out.weight": "emb.weight"},
        model_order=["out.weight", "l._extra_state", "head.weight", "emb.weight"],
        model_values=encode({"l._extra_state": (1, b"x")}),
        model_metadata=encode(versions),
    )
    save_file(MODEL, tmp_path / "m.safetensors", document)
    found = opened(tmp_path / "m.safetensors")
    assert found.model is not None
    assert list(found.model.params) == ["out.weight", "l._extra_state", "head.weight", "emb.weight"]
    assert found.model.params["out.weight"] is found.model.params["emb.weight"]
    assert found.model.params["l._extra_state"] == (1, b"x") and found.model.metadata == versions


@pytest.mark.parametrize("rows", [3, 0])
def test_a_dtype_safetensors_has_not_comes_back(tmp_path: Path, rows: int) -> None:
    value = torch.randn(rows, 2, dtype=torch.complex128)
    bytes_ = torch.view_as_real(value).contiguous().view(torch.uint8).reshape(-1)
    save_file({"c": bytes_}, tmp_path / "c.safetensors", scheme(raw={"c": ["complex128", [rows, 2]]}))
    same_values(opened(tmp_path / "c.safetensors"), model={"c": value})


def test_every_tensor_the_document_promises_and_nobody_has_is_named(tmp_path: Path) -> None:
    tensors, entry = optimizer_entry("")
    del tensors["state.0.exp_avg"]
    save_file(tensors, tmp_path / "optimizer.safetensors", scheme(optim=entry, model_order=["gone"]))
    with pytest.raises(SourceIncompleteError) as error:
        opened(tmp_path)
    assert set(error.value.details) == {"state.0.exp_avg", "gone"}


@pytest.mark.parametrize(
    "document",
    ["[]", "{", '{"version":1,"optim":[]}', '{"version":1,"optim":{"order":[[1]]}}', '{"version":1,"extra":[1]}',
     '{"version":1,"raw":{"w":["complex128",[9]]}}', '{"version":1,"raw":{"w":["uint8",[12' + "1" * 40 + ']]}}',
     '{"version":1,"raw":{"e":["uint8",[0,1099511627776,1099511627776]]}}', '{"version":1,"extra":{"model":1}}',
     '{"version":1,"raw":{"w":["uint8",[-3,-4]]}}', '{"version":1,"raw":{"w":["uint8",[12.0]]}}',
     '{"version":1,"optim":{"order":[[null,[]]]}}'],
)  # fmt: skip
def test_a_document_that_was_damaged_is_refused(tmp_path: Path, document: str) -> None:
    save_file({"w": torch.ones(3), "e": torch.ones(0)}, tmp_path / "w.safetensors", {METADATA_KEY: document})
    with pytest.raises(SourceCorruptError):
        opened(tmp_path / "w.safetensors")


@pytest.mark.parametrize(
    "value", [{"$global": ["os", "system"]}, {"$object": {"function": ["os", "system"], "args": ["true"]}}]
)
@pytest.mark.parametrize("section", ["extra", "model_values", "optim"])
def test_a_name_outside_the_allow_list_is_refused(tmp_path: Path, value: Any, section: str) -> None:
    entry = {"x": [value]}
    document = scheme(**{section: {"order": [], "extra": entry} if section == "optim" else entry})
    save_file({"w": torch.ones(3)}, tmp_path / "w.safetensors", document)
    with pytest.raises(SourceUnsafeError) as refused:
        opened(tmp_path / "w.safetensors")
    assert refused.value.details == ("os.system",) and refused.value.file == str(tmp_path / "w.safetensors")


def test_a_dict_is_not_taken_for_a_call(tmp_path: Path) -> None:
    document = scheme(extra={"x": {"function": ["os", "system"]}})
    save_file({"w": torch.ones(3)}, tmp_path / "w.safetensors", document)
    assert opened(tmp_path / "w.safetensors").extra == {"x": {"function": ["os", "system"]}}


def test_a_document_of_a_newer_version_is_refused_saying_so(tmp_path: Path) -> None:
    save_file({"w": torch.ones(3)}, tmp_path / "w.safetensors", {METADATA_KEY: '{"version":2}'})
    with pytest.raises(SourceUnsupportedError, match="newer fsdpckpt"):
        opened(tmp_path / "w.safetensors")
