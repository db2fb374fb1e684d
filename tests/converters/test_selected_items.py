"""Of a DCP directory no items are opened but those of what is taken, and what is written is the same."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp

import fsdpckpt
from fsdpckpt.converters import read_source
from fsdpckpt.errors import NeedsInformationError, SourceCorruptError, UsageError
from fsdpckpt.formats.dcp.items import ItemReader
from fsdpckpt.ir.dtypes import DTYPES
from fsdpckpt.ir.tensors import Boxes, Chunks, Tensor
from fsdpckpt.readers.dcp.item_numbers import have_items, items_of
from fsdpckpt.readers.detect import open_checkpoint
from fsdpckpt.readers.protocol import Locate
from fsdpckpt.storage.sources import Sources
from tests.converters.jobs import converted, refused, states
from tests.oracle.compare import identical, require_identical
from tests.readers.played_ranks import save_as_ranks, shard, shard_rows_twice

WEIGHTS = {f"w{rows}": torch.randn(rows, 3) for rows in (4, 5, 9)}
TENSORS, RANKS = 3, 2


def state(_rank: int) -> dict[str, Any]:
    model = shard(WEIGHTS, RANKS)
    states = {name: {"exp_avg": weight * 2, "step": torch.tensor(3.0)} for name, weight in model.items()}
    return {"model": model, "optim": {"state": states, "param_groups": [{"lr": 0.5, "params": list(states)}]}}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("selected") / "source"
    save_as_ranks(path, state, RANKS)
    return path


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """How many items were opened at a time."""
    counts: list[int] = []
    tensors = ItemReader.tensors

    def counting(self: ItemReader, begin: Any, length: Any) -> Any:
        counts.append(len(begin))
        return tensors(self, begin, length)

    monkeypatch.setattr(ItemReader, "tensors", counting)
    yield counts


def written(source: Path, target: str, **options: Any) -> dict[str, bytes]:
    fsdpckpt.convert(source, target, to="sharded", world_size=3, verify="none", **options)
    return {str(path.relative_to(target)): path.read_bytes() for path in Path(target).rglob("*") if path.is_file()}


# What is taken, and of how many tensors with two chunks and with one
TAKEN = {
    "model": ({"only": "model"}, TENSORS, 0),
    "optim": ({"only": "optim"}, TENSORS, TENSORS),
    "one": ({"include": ("w5.weight",)}, 2, 1),
    "all-but-one": ({"exclude": ("w5.weight",), "only": "model"}, TENSORS - 1, 0),
}


@pytest.mark.parametrize("name", TAKEN)
def test_only_the_items_of_what_is_taken_are_opened(
    name: str, source: Path, opened: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    options, cut, whole = TAKEN[name]
    found = written(source, "a", **options)
    assert sum(opened) == cut * RANKS + whole
    opened.clear()
    monkeypatch.setattr(read_source, "items_to_open", lambda *_: Locate.ALL)
    assert written(source, "b", **options) == found
    assert sum(opened) == 2 * TENSORS * RANKS + TENSORS


@pytest.mark.parametrize("globs", [{"include": ("w6*",)}, {"exclude": ("w*",)}, {"only": "model", "exclude": ("v*",)}])
def test_globs_that_match_nothing_and_that_leave_nothing_are_refused_before_an_item_is_opened(
    globs: dict[str, Any], source: Path, opened: list[int]
) -> None:
    refused(UsageError, r"match|leave none", source, "a", to="sharded", world_size=3, **globs)
    assert opened == []


def test_damage_of_what_is_taken_is_refused_and_of_the_rest_is_not_looked_at(source: Path) -> None:
    with Sources() as sources:
        chunks = open_checkpoint(str(source), sources=sources).model.params["w5.weight"].chunks
    shutil.copytree(source, "damaged")
    file = Path(f"damaged/__{int(chunks.rank[1])}_0.distcp")
    content = bytearray(file.read_bytes())
    begin, length = chunks.item[1].tolist()
    content[begin : begin + length] = bytes(length)
    file.write_bytes(content)
    fsdpckpt.convert("damaged", "optim", to="sharded", only="optim")
    refused(SourceCorruptError, "w5", "damaged", "model", to="sharded", only="model")


def test_rows_that_the_metadata_get_wrong_are_those_of_the_items() -> None:
    """FSDP2 over tensor parallelism with uneven rows: all items are opened then."""
    weights = {"a": torch.randn(7, 2), "b": torch.randn(5, 3)}
    save_as_ranks(Path("source"), lambda _: {"model": shard_rows_twice(weights, 2, 2), "other": {}}, 4)
    found = converted("source", "a.pt", to="full", include=("a*",), only="model")
    fsdpckpt.convert("source", "b", to="sharded", include=("a*",), only="model")
    again = converted("b", "b.pt", to="full", only="model")
    for each in (found, again):
        require_identical(dict(each), {"a.weight": weights["a"]})


@pytest.mark.parametrize("take", [{"only": "model"}, {"include": ("w5*",)}])
def test_master_weights_are_proved_by_their_bytes(take: dict[str, Any]) -> None:
    """What ties them to parameters are the copies, which are not taken; they lie in another order than the model."""
    masters = {name: torch.randn(9, 3) for name in WEIGHTS}
    model = {name: weight.bfloat16() for name, weight in masters.items()}
    listed = list(reversed(masters.values()))
    inner = {
        "state": {number: {"exp_avg": weight * 2} for number, weight in enumerate(listed)},
        "param_groups": [{"lr": 0.5, "params": [0, 1, 2]}],
    }
    saved: dict[str, Any] = {"model": model, "optimizer": {"optimizer": inner, "fp32_from_fp16_params": [listed]}}
    dcp.save(saved, checkpoint_id="source", no_dist=True)
    found = converted("source", "a.pt", to="full", **take)
    for name, weight in found.get("model", found).items():
        assert identical(weight, masters[name])


def test_all_items_are_opened_of_what_a_reader_joins() -> None:
    """Megatron FSDP separates the gate of SwiGLU from the value: the joined weight begins with the items of one."""
    halves = {"_w": torch.randn(6, 3), "_v": torch.randn(6, 3)}
    root = {"args": {}, "checkpoint_version": 3.0}

    def of_rank(_: int) -> dict[str, Any]:
        sharded = shard(halves, RANKS)
        model = {f"module.0.mlp.linear_fc1.weight{half}": sharded[f"{half}.weight"] for half in halves}
        state = {name: {"exp_avg": tensor * 2} for name, tensor in model.items()}
        settings = {"module.0.mlp.linear_fc1.weight": {"lr": 0.5}}
        return {**root, "model": model, "optimizer": {"state": state, "param_to_group_meta": settings}}

    save_as_ranks(Path("source"), of_rank, RANKS)
    fc1 = "0.mlp.linear_fc1.weight"
    model = converted("source", "model.pt", to="full", only="model")
    assert identical(model[fc1], torch.cat(list(halves.values())))
    one = converted("source", "one.pt", to="full", only="optim", include=(fc1,))
    assert identical(states(one)[fc1]["exp_avg"], model[fc1] * 2)


def test_a_tensor_is_chosen_by_any_of_its_items() -> None:
    """Those of chunks without elements are left out in what is taken."""
    file, item = np.array([0, 1, 1]), np.array([[0, 9], [0, 9], [64, 9]])
    rows = np.zeros((2, 1), np.int64)
    taken = Chunks(file[1:], file[1:], np.array([-1, -1]), Boxes(rows, rows + 1, rows + 1), item[1:])
    items = items_of([Tensor(DTYPES["uint8"], (2,), taken)])
    others = [(file[:1], item[:1]), (file[:0], item[:0])]
    assert have_items([others[0], (file, item), others[1]], items) == [False, True, False]
    assert have_items([*others, (file, item)], items_of([])) == [False, False, False]


def test_where_the_metadata_does_not_name_ids_all_items_are_opened_and_the_error_says_what_they_show(
    tmp_path: Path, opened: list[int]
) -> None:
    tied = torch.randn(6, 3)
    model = {"first.weight": tied, "middle.weight": torch.randn(6, 3), "last.weight": tied.clone()}
    states = [{"exp_avg": torch.randn(6, 3)} for _ in range(2)]
    for saved, keys in (("by-id", [0, 1]), ("by-name", list(model)[:2])):
        optim = {"state": dict(zip(keys, states, strict=True)), "param_groups": [{"lr": 0.5, "params": keys}]}
        dcp.save({"model": model, "optim": optim}, checkpoint_id=tmp_path / saved, no_dist=True)
    with pytest.raises(NeedsInformationError, match="same values"):
        fsdpckpt.convert(tmp_path / "by-id", tmp_path / "a.pt", to="full", include=("middle*",))
    assert sum(opened) == 5
    opened.clear()
    fsdpckpt.convert(tmp_path / "by-name", tmp_path / "b.pt", to="full", include=("middle*",))
    found = torch.load(tmp_path / "b.pt", weights_only=True)["optimizer"]["state"]
    assert identical(found["middle.weight"]["exp_avg"], states[1]["exp_avg"])
    assert sum(opened) == 2
