from __future__ import annotations

import zipfile
from collections import OrderedDict
from dataclasses import replace

import pytest
import torch

from fsdpckpt.ir.dtypes import DTYPES
from fsdpckpt.ir.optimizer import Optimizer
from fsdpckpt.ir.values import Global, Object
from fsdpckpt.writers import DtypeRule, WriteSpec
from fsdpckpt.writers.torch_full import lay_out
from tests.materialise import materialise
from tests.oracle.compare import identical, require_parts
from tests.writers.source import Raw, Trained, checkpoint, random_tensor
from tests.writers.writer_contract import WriterContract

SAVED_DTYPES = [name for name, dtype in DTYPES.items() if dtype.numpy is not None or name == "complex32"]


def written(tmp_path, ckpt, raw, *, dtypes=None, bare=False, weights_only=True):
    path = str(tmp_path / "full.pt")
    target = lay_out(ckpt, WriteSpec(dtypes=dtypes or DtypeRule(), unwrap=bare))
    assert [file.path for file in target.files] == [""]
    materialise(target, raw.files, path)
    assert zipfile.ZipFile(path).testzip() is None
    return torch.load(path, weights_only=weights_only), target


@pytest.mark.parametrize("key_type", ["id", "name"])
@pytest.mark.parametrize("ranks", [None, 4])
def test_model_and_optimizer_load_with_their_key_types_and_every_bit(tmp_path, key_type, ranks):
    source = Trained(seed=1, key_type=key_type, ranks=ranks)
    loaded, _ = written(tmp_path, source.checkpoint, source.raw)
    assert list(loaded) == ["model", "optimizer", "epoch"]
    assert list(loaded["model"]) == list(source.weights)
    require_parts(loaded["model"], source.weights)
    assert list(loaded["optimizer"]["state"]) == list(source.states)
    for key, states in source.states.items():
        assert list(loaded["optimizer"]["state"][key]) == list(states)
        require_parts(loaded["optimizer"]["state"][key], states)
    assert loaded["optimizer"]["param_groups"] == source.groups
    assert [type(group["betas"]) for group in loaded["optimizer"]["param_groups"]] == [tuple, tuple]
    assert loaded["epoch"] == 7


def test_torch_itself_takes_both_parts(tmp_path):
    model = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.BatchNorm1d(5))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(2):
        model(torch.randn(4, 3) + step).square().sum().backward()
        optimizer.step()
    raw = Raw()
    weights = model.state_dict()
    states = optimizer.state_dict()
    ckpt = checkpoint(
        OrderedDict((name, raw.whole(weight)) for name, weight in weights.items()),
        Optimizer.of(
            {key: {name: raw.whole(state) for name, state in entry.items()} for key, entry in states["state"].items()},
            states["param_groups"],
        ),
        metadata=weights._metadata,
    )
    loaded, _ = written(tmp_path, ckpt, raw)
    assert type(loaded["model"]) is OrderedDict
    assert loaded["model"]._metadata == weights._metadata
    other = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.BatchNorm1d(5))
    again = torch.optim.AdamW(other.parameters())
    other.load_state_dict(loaded["model"])
    again.load_state_dict(loaded["optimizer"])
    data = torch.randn(6, 3)
    for one, two in ((model, optimizer), (other, again)):
        two.zero_grad()
        one(data).square().sum().backward()
        two.step()
    assert all(identical(a, b) for a, b in zip(model.state_dict().values(), other.state_dict().values(), strict=True))


@pytest.mark.parametrize("name", SAVED_DTYPES)
def test_every_dtype_survives(tmp_path, name):
    generator = torch.Generator().manual_seed(9)
    tensors = {
        str(shape): random_tensor(getattr(torch, name), shape, generator) for shape in [(3, 5), (), (0, 2), (7,)]
    }
    raw = Raw()
    loaded, _ = written(tmp_path, checkpoint({key: raw.whole(tensor) for key, tensor in tensors.items()}), raw)
    require_parts(loaded["model"], tensors)


@pytest.mark.parametrize("ranks", [None, 4])
def test_tied_weights_are_stored_once_and_stay_tied(tmp_path, ranks):
    raw = Raw()
    weight = torch.randn(13, 7)
    one = raw.views(weight)[0] if ranks is None else raw.sharded(weight, ranks)
    twin = replace(one)
    loaded, target = written(tmp_path, checkpoint({"emb": one, "head": twin, "other": raw.whole(weight)}), raw)
    model = loaded["model"]
    assert identical(model["emb"], weight) and identical(model["head"], weight)
    assert model["emb"].data_ptr() == model["head"].data_ptr() != model["other"].data_ptr()
    assert len(target.files[0].write_items) == 2


@pytest.mark.parametrize("cast", [None, "bfloat16"])
def test_overlapping_views_share_one_record_over_their_union(tmp_path, cast):
    base = torch.randn(40)
    views = [base[2:22].view(4, 5), base[10:30], base[12:34:3], base[36:]]
    raw = Raw()
    ckpt = checkpoint({str(number): tensor for number, tensor in enumerate(raw.views(*views))})
    rule = DtypeRule(model=DTYPES[cast] if cast else None)
    loaded, target = written(tmp_path, ckpt, raw, dtypes=rule)
    dtype = getattr(torch, cast) if cast else torch.float32
    for number, view in enumerate(views):
        assert identical(loaded["model"][str(number)], view.to(dtype))
    storages = [loaded["model"][str(number)].untyped_storage() for number in range(4)]
    assert storages[0].data_ptr() == storages[1].data_ptr() == storages[2].data_ptr() != storages[3].data_ptr()
    assert [write_item.nbytes // dtype.itemsize for write_item in target.files[0].write_items] == [32, 4]
    loaded["model"]["0"][3, 0] = 123.0  # base[17]
    assert float(loaded["model"]["1"][7]) == 123.0


def test_views_of_several_dtypes_are_copied_apart_and_noted(tmp_path):
    base = torch.randn(8)
    raw = Raw()
    a, b = raw.views(base, base.view(torch.int32)[2:])
    loaded, target = written(tmp_path, checkpoint({"a": a, "b": b}), raw)
    assert identical(loaded["model"]["a"], base) and identical(loaded["model"]["b"], base.view(torch.int32)[2:].clone())
    assert [note.kind for note in target.notes] == ["unshared"]


def test_optimizer_views_of_one_large_buffer_become_compact(tmp_path):
    base = torch.randn(1000)
    raw = Raw()
    a, b = raw.views(base[3:13].view(2, 5), base[500:505])
    loaded, target = written(tmp_path, checkpoint(optim=Optimizer.of({0: {"m": a, "v": b}}, None)), raw)
    state = loaded["optimizer"]["state"][0]
    assert identical(state["m"], base[3:13].view(2, 5)) and identical(state["v"], base[500:505])
    assert sum(write_item.nbytes for write_item in target.files[0].write_items) == 60


def test_permuted_dense_memory_keeps_its_order_and_gaps_are_closed(tmp_path):
    tensors = {
        "transposed": torch.randn(5, 3).t(),
        "channels_last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "strided": torch.randn(6, 8)[::2, 1:7:3],
        "expanded": torch.randn(4, 1).expand(4, 3),
    }
    raw = Raw()
    ckpt = checkpoint({name: raw.views(tensor)[0] for name, tensor in tensors.items()})
    loaded, target = written(tmp_path, ckpt, raw)
    require_parts(loaded["model"], tensors)
    strides = [loaded["model"][name].stride() for name in tensors]
    assert strides == [(1, 3), (60, 1, 15, 3), (2, 1), (3, 1)]
    assert [write_item.nbytes for write_item in target.files[0].write_items] == [60, 480, 24, 48]


def test_casts_touch_floating_weights_and_moments_but_no_counter(tmp_path):
    source = Trained(seed=4, key_type="id")
    rule = DtypeRule(model=DTYPES["float16"], optim=DTYPES["bfloat16"])
    loaded, target = written(tmp_path, source.checkpoint, source.raw, dtypes=rule)
    for name, weight in source.weights.items():
        assert identical(loaded["model"][name], weight.half() if weight.is_floating_point() else weight)
    for key, states in source.states.items():
        for name, state in states.items():
            assert identical(loaded["optimizer"]["state"][key][name], state if name == "step" else state.bfloat16())
    assert sorted(note.message for note in target.notes) == [
        "model: 1 tensor cast from bfloat16 to float16",
        "model: 4 tensors cast from float32 to float16",
        "optim: 10 tensors cast from float32 to bfloat16",
    ]


def test_one_section_alone_is_its_own_dict_when_bare(tmp_path):
    raw = Raw()
    weight = torch.randn(3, 2)
    loaded, _ = written(tmp_path, checkpoint({"w": raw.whole(weight)}), raw, bare=True)
    assert list(loaded) == ["w"] and identical(loaded["w"], weight)
    optim = Optimizer.of({}, [{"params": [0], "lr": 0.1}], {"user": "entry"})
    loaded, _ = written(tmp_path, checkpoint(optim=optim), raw, bare=True)
    assert loaded == {"state": {}, "param_groups": [{"params": [0], "lr": 0.1}], "user": "entry"}
    loaded, _ = written(tmp_path, checkpoint({"w": raw.whole(weight)}, extra={"epoch": 1}), raw, bare=True)
    assert list(loaded) == ["model", "epoch"]


def test_values_that_are_no_tensor_survive_with_their_types(tmp_path):
    raw = Raw()
    lr = torch.tensor(0.25)
    optim = Optimizer.of(
        {0: {"step": 3, "name": "x", "none": None, "flag": True, "list": [1, 2.5]}, 1: {}},
        [{"params": [1, 0], "lr": raw.whole(lr), "betas": (0.9, 0.99), "big": 2**80}, {"params": [], "lr": 1}],
    )
    extra = {
        "rng": raw.whole(torch.arange(9, dtype=torch.uint8)),
        "size": Object(Global("torch", "Size"), ((2, 3),)),
        "bytes": b"\x00\xff",
        "set": {3, 1},
        9: (None, (1,)),
    }
    loaded, _ = written(tmp_path, checkpoint(optim=optim, extra=extra), raw)
    assert loaded["optimizer"]["state"] == optim.state
    groups = loaded["optimizer"]["param_groups"]
    assert identical(groups[0].pop("lr"), lr)
    assert groups == [{"params": [1, 0], "betas": (0.9, 0.99), "big": 2**80}, {"params": [], "lr": 1}]
    assert list(loaded) == ["optimizer", "rng", "size", "bytes", "set", 9]
    assert (loaded["bytes"], loaded["set"], loaded[9]) == (b"\x00\xff", {1, 3}, (None, (1,)))
    assert loaded["size"] == torch.Size((2, 3)) and loaded["rng"].tolist() == list(range(9))


def test_extras_that_differ_by_rank_come_from_rank_0_and_are_noted(tmp_path):
    raw = Raw()
    rank_extra = tuple({"rng": {"numpy": 1, "cpu": f"state {rank}"}} for rank in range(3))
    ckpt = checkpoint({"w": raw.whole(torch.randn(2))}, extra={"epoch": 4}, rank_extra=rank_extra)
    loaded, target = written(tmp_path, ckpt, raw)
    assert (loaded["epoch"], loaded["rng"]) == (4, {"numpy": 1, "cpu": "state 0"})
    assert [(note.kind, note.key) for note in target.notes] == [("dropped", "rng")]


def test_an_extra_that_is_not_a_number_on_every_rank_differs_on_none():
    rank_extra = tuple({"best": {"loss": float("nan")}} for _ in range(2))
    target = lay_out(checkpoint({}, rank_extra=rank_extra), WriteSpec())
    assert target.notes == []


class TestTorchFullWriter(WriterContract):
    writer = staticmethod(lay_out)
    specs = (WriteSpec(), WriteSpec(unwrap=True))
    single = True

    def load(self, path, spec):
        assert torch.load(path, weights_only=True).keys() == {"model", "optimizer", "epoch"}
