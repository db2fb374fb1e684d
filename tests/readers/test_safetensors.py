"""safetensors: one file, shards, an index, DCP's Hugging Face writer, and the scheme fsdpckpt writes by."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch.distributed.checkpoint import HuggingFaceStorageWriter

from fsdpckpt.formats.safetensors import METADATA_KEY
from fsdpckpt.ir.checkpoint import Container, Layout
from fsdpckpt.ir.values import encode
from fsdpckpt.text import plural
from tests.makers import Change, Make, files, lose, safetensors, together
from tests.readers.contents import held, opened, same_values
from tests.readers.played_ranks import save_as_ranks, shard
from tests.refusals import Refusal, corrupt, each_of, incomplete, unsafe, unsupported

PT = {"format": "pt"}


def weights(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "e.weight": torch.randn(17, 9, generator=generator),
        "l.0.a.weight": torch.randn(28, 9, generator=generator, dtype=torch.float64),
        "l.0.a.bias": torch.randn(28, generator=generator).bfloat16(),
        "scale": torch.tensor(0.25),
    }


def test_one_file_is_a_model(tmp_path: Path) -> None:
    save_file(weights(), tmp_path / "w.safetensors", PT)
    found = opened(tmp_path / "w.safetensors")
    assert (found.layout, found.container, found.world_size) == (Layout.FULL, Container.SAFETENSORS, 1)
    same_values(found, model=weights())
    assert found.problems == ()


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


def test_a_dict_is_not_taken_for_a_call(tmp_path: Path) -> None:
    document = scheme(extra={"x": {"function": ["os", "system"]}})
    save_file({"w": torch.ones(3)}, tmp_path / "w.safetensors", document)
    assert opened(tmp_path / "w.safetensors").extra == {"x": {"function": ["os", "system"]}}


def of_hugging_face(*changes: Change) -> Make:
    """What DCP's Hugging Face writer saves on 4 ranks, changed."""

    def make(directory: Path) -> None:
        hf_sharded(directory, 4)
        for change in changes:
            change(directory)

    return make


def chunk(tensor: torch.Tensor, info: Any, rank: int = 1) -> Make:
    name = f"shard-{rank:05d}-model-00001-of-00001.safetensors"
    return safetensors(name, {"a": tensor}, DCP_SHARDING_INFO=json.dumps(info))


def chunks(other: torch.Tensor) -> Make:
    """Two chunks under one name."""
    at = [3] + [0] * (other.ndim - 1)
    first = chunk(torch.ones(3), {"a": {"saved_offsets": [0]}})
    return together(first, chunk(other, {"a": {"saved_offsets": at}}, rank=2))


def with_document(document: Any) -> Make:
    text = document if isinstance(document, str) else scheme(**document)[METADATA_KEY]
    return safetensors("w.safetensors", {"w": torch.ones(3), "e": torch.ones(0)}, **{METADATA_KEY: text})


def lacking_a_state(directory: Path) -> None:
    tensors, entry = optimizer_entry("")
    del tensors["state.0.exp_avg"]
    document = scheme(optim=entry, model_order=["gone"])
    safetensors("optimizer.safetensors", tensors, **document)(directory)


INDEX = "model.safetensors.index.json"
CALLS = ({"$global": ["os", "system"]}, {"$object": {"function": ["os", "system"], "args": ["true"]}})
TWO_TO_THE_40 = 1 << 40
DAMAGED = (
    "[]", "{", '{"version":1,"optim":[]}', '{"version":1,"optim":{"order":[[1]]}}', '{"version":1,"extra":[1]}',
    '{"version":1,"raw":{"w":["complex128",[9]]}}', '{"version":1,"raw":{"w":["uint8",[12' + "1" * 40 + ']]}}',
    f'{{"version":1,"raw":{{"e":["uint8",[0,{TWO_TO_THE_40},{TWO_TO_THE_40}]]}}}}',
    '{"version":1,"extra":{"model":1}}', '{"version":1,"raw":{"w":["uint8",[-3,-4]]}}',
    '{"version":1,"raw":{"w":["uint8",[12.0]]}}', '{"version":1,"optim":{"order":[[null,[]]]}}',
)  # fmt: skip
REFUSALS = (
    *(
        corrupt(f"an index that is none: {text}", files({INDEX: text}))
        for text in ("[]", "{}", '{"weight_map": [1]}', '{"weight_map": {"a": 1}}', "{", "")
    ),
    *(
        corrupt(f"an index that leads to {shard!r}", files({INDEX: {"weight_map": {"w": shard}}}), "outside")
        for shard in ("../w.safetensors", "/etc/passwd", "a/b.safetensors", "..", "")
    ),
    corrupt(
        "one name in two shards",
        together(*(safetensors(f"model-0000{n}-of-00002.safetensors", {"a": torch.ones(3)}) for n in (1, 2))),
        "a is in two files that do not fit together",
        about={"key": "a"},
    ),
    *(
        incomplete(f"rank {rank} is missing", of_hugging_face(lose(f"{name}-*")), f"\n  - {name}-*.safetensors\n")
        for rank, name in enumerate(("shard-00001", "shard-00002", "shard-00003"))
    ),
    corrupt("offsets of another tensor", chunk(torch.ones(3), {"b": {"saved_offsets": [0]}}), "DCP_SHARDING_INFO"),
    *(
        corrupt(
            f"offsets that do not fit: {at}", chunk(torch.ones(3), {"a": {"saved_offsets": at}}), "DCP_SHARDING_INFO"
        )
        for at in ([], [0, 0], [-1], [0.0], [True], ["0"], [1 << 62], None)
    ),
    *(
        corrupt(f"chunks of two tensors: {other.ndim}", chunks(other), "do not fit together", about={"key": "a"})
        for other in (torch.ones(3).double(), torch.ones(3, 1))
    ),
    incomplete("what the document promises is missing", lacking_a_state, "\n  - state.0.exp_avg\n", "\n  - gone\n"),
    *(corrupt(f"a damaged document: {text[:60]}", with_document(text)) for text in DAMAGED),
    unsupported("a document of a newer version", with_document('{"version":2}'), "newer fsdpckpt"),
    *(
        unsafe(f"a {kind} in {section}", with_document({section: entry}), "\n  - os.system\n", "DIR/w.safetensors")
        for call in CALLS
        for kind, extra in [(next(iter(call)), {"x": [call]})]
        for section, entry in (("extra", extra), ("model_values", extra), ("optim", {"order": [], "extra": extra}))
    ),
)


@each_of(REFUSALS)
def test_it_is_refused(refusal: Refusal, tmp_path: Path) -> None:
    refusal.require(tmp_path)
