from __future__ import annotations

import json
import os

import pytest
import safetensors
import safetensors.torch
import torch

from fsdpckpt.errors import SourceUnsupportedError
from fsdpckpt.ir.dtypes import DTYPES
from fsdpckpt.ir.optimizer import Optimizer
from fsdpckpt.writers import DtypeRule, WriteSpec
from fsdpckpt.writers.safetensors import lay_out
from tests.materialise import materialise
from tests.oracle.compare import identical, require_parts
from tests.readers.contents import opened
from tests.writers.source import Raw, Trained, checkpoint, random_tensor
from tests.writers.writer_contract import WriterContract

HELD = [name for name, dtype in DTYPES.items() if dtype.safetensors is not None]


def written(tmp_path, ckpt, raw, *, limit=10**9, single=True, dtypes=None):
    target = lay_out(ckpt, WriteSpec(max_shard_size=limit, single_file=single, dtypes=dtypes or DtypeRule()))
    assert (target.files[0].path == "") is single
    path = str(tmp_path / ("one.safetensors" if single else "many"))
    materialise(target, raw.files, path)
    return path, target


def document(path):
    with safetensors.safe_open(path, "pt") as opened:
        metadata = opened.metadata()
    assert metadata["format"] == "pt"
    return json.loads(metadata["fsdpckpt"])


@pytest.mark.parametrize("ranks", [None, 3])
def test_one_file_holds_both_sections(tmp_path, ranks):
    source = Trained(seed=1, key_type="id", ranks=ranks)
    path, _ = written(tmp_path, source.checkpoint, source.raw)
    loaded = safetensors.torch.load_file(path)
    expected = {f"model.{name}": weight for name, weight in source.weights.items()}
    for key, states in source.states.items():
        expected |= {f"optimizer.state.{key}.{name}": state for name, state in states.items()}
    assert loaded.keys() == expected.keys()
    require_parts(loaded, expected)
    found = document(path)
    assert (found["version"], found["sections"], found["extra"]) == (1, True, {"epoch": 7})
    assert found["optim"]["key_type"] == "id" and found["optim"]["param_keys"] == [[0, 1], [2, 3, 4]]
    assert found["optim"]["order"] == [[key, ["step", "exp_avg", "exp_avg_sq"]] for key in range(5)]
    assert found["optim"]["param_groups"][0]["betas"] == {"$tuple": [0.9, 0.95]}


@pytest.mark.parametrize("name", HELD)
def test_every_dtype_safetensors_knows_loads(tmp_path, name):
    generator = torch.Generator().manual_seed(9)
    shapes = [(3, 5), (), (0, 2), (7,)]
    tensors = {str(shape): random_tensor(getattr(torch, name), shape, generator) for shape in shapes}
    tensors["odd"] = torch.tensor([True, False, True])  # one byte each: it must not shift what lies behind it
    raw = Raw()
    path, target = written(tmp_path, checkpoint({key: raw.whole(tensor) for key, tensor in tensors.items()}), raw)
    loaded = safetensors.torch.load_file(path)
    require_parts(loaded, tensors)
    assert all(write_item.offset % min(write_item.dtype.itemsize, 8) == 0 for write_item in target.files[0].write_items)


def test_all_tensors_of_dtypes_it_does_not_know_are_named(tmp_path):
    raw = Raw()
    model = {
        "good": raw.whole(torch.randn(2)),
        "bad": raw.whole(torch.randn(2, dtype=torch.complex128)),
        "worse": raw.whole(torch.tensor([1.0, 2.0]).to(torch.float8_e8m0fnu)),
    }
    with pytest.raises(SourceUnsupportedError) as caught:
        lay_out(checkpoint(model), WriteSpec(max_shard_size=100, single_file=True))
    assert caught.value.details == ("bad (complex128)", "worse (float8_e8m0fnu)")
    assert not list(tmp_path.iterdir())


def test_keys_that_no_header_can_hold_are_refused():
    """``__metadata__`` is the header's own entry, and JSON parsers other than Python's refuse half a surrogate pair."""
    raw = Raw()
    model = {
        "good": raw.whole(torch.randn(2)),
        "__metadata__": raw.whole(torch.randn(2)),
        "\ud800": raw.whole(torch.randn(2)),
    }
    with pytest.raises(
        SourceUnsupportedError, match="2 tensors have a key that a safetensors file cannot hold"
    ) as caught:
        lay_out(checkpoint(model), WriteSpec(single_file=True))
    assert caught.value.details == ("__metadata__", "\ud800")


def test_shards_follow_hugging_faces_names_and_index(tmp_path):
    raw = Raw()
    weights = {f"layer.{number}": torch.randn(10) for number in range(5)} | {
        "large": torch.randn(100),
        "small": torch.randn(1),
    }
    model = {name: raw.whole(weight) for name, weight in weights.items()}
    path, target = written(tmp_path, checkpoint(model), raw, limit=90, single=False)
    names = [f"model-{number:05d}-of-00005.safetensors" for number in range(1, 6)]
    assert [file.path for file in target.files] == [*names, "model.safetensors.index.json"]
    with open(os.path.join(path, "model.safetensors.index.json")) as stream:
        index = json.load(stream)
    assert index["metadata"] == {"total_size": sum(weight.nbytes for weight in weights.values())}
    assert list(index["weight_map"]) == list(weights)
    for name, weight in weights.items():
        loaded = safetensors.torch.load_file(os.path.join(path, index["weight_map"][name]))
        assert identical(loaded[name], weight)
    assert document(os.path.join(path, names[0]))["model_order"] == list(weights)
    with safetensors.safe_open(os.path.join(path, names[1]), "pt") as opened:
        assert opened.metadata() == {"format": "pt"}


def test_a_directory_keeps_model_and_optimizer_apart(tmp_path):
    source = Trained(seed=2)
    path, target = written(tmp_path, source.checkpoint, source.raw, single=False)
    names = ["model.safetensors", "optimizer.safetensors", "extra_state.safetensors"]
    assert [file.path for file in target.files] == names
    model = safetensors.torch.load_file(os.path.join(path, "model.safetensors"))
    optim = safetensors.torch.load_file(os.path.join(path, "optimizer.safetensors"))
    assert model.keys() == source.weights.keys()
    require_parts(model, source.weights)
    for key, states in source.states.items():
        assert all(identical(optim[f"state.{key}.{name}"], state) for name, state in states.items())
    assert "sections" not in document(os.path.join(path, "model.safetensors"))
    assert "extra" not in document(os.path.join(path, "model.safetensors"))


def test_a_directory_keeps_extras_in_a_file_of_their_own(tmp_path):
    """Weights are what every program takes a ``model.safetensors`` for."""
    source = Trained(seed=2)
    rng, average = torch.arange(5, dtype=torch.uint8), torch.randn(3, 2)
    extra = {"rng_state": {"cpu": source.raw.whole(rng)}, "ema": {"a.w": source.raw.whole(average)}, "epoch": 7}
    held = checkpoint(source.checkpoint.model.params, source.checkpoint.optim, extra)
    path, target = written(tmp_path, held, source.raw, single=False)
    assert safetensors.torch.load_file(os.path.join(path, "model.safetensors")).keys() == source.weights.keys()
    loaded = safetensors.torch.load_file(os.path.join(path, "extra_state.safetensors"))
    assert identical(loaded["extra.rng_state.cpu"], rng) and identical(loaded["extra.ema.a.w"], average)
    (note,) = (note for note in target.notes if note.kind == "carried")
    assert "extra_state.safetensors" in note.message and note.keys == ("rng_state", "ema", "epoch")
    again = opened(path)
    assert again.model.params.keys() == source.weights.keys(), "an average is no second model"
    assert list(again.extra) == ["rng_state", "ema", "epoch"] and again.extra["epoch"] == 7


def test_tied_weights_are_stored_once_under_their_first_name(tmp_path):
    raw = Raw()
    weight = torch.randn(4, 3)
    emb, head = raw.views(weight, weight)
    path, target = written(tmp_path, checkpoint({"emb": emb, "mid": raw.whole(weight), "head": head}), raw)
    assert sorted(safetensors.torch.load_file(path)) == ["emb", "mid"]
    assert document(path)["model_aliases"] == {"head": "emb"}
    assert [(note.kind, note.key) for note in target.notes] == [("tied", "head")]


def test_what_is_no_tensor_is_in_the_document_and_tensors_in_values_have_keys(tmp_path):
    raw = Raw()
    lr, rng = torch.tensor(0.5), torch.arange(5, dtype=torch.uint8)
    optim = Optimizer.of({"w": {"step": 3, "none": None}}, [{"params": ["w"], "lr": raw.whole(lr)}], {"user": 1})
    model = {"w": raw.whole(torch.randn(2)), "w._extra_state": {"scale": 2.0}}
    extra = {"rng": (raw.whole(rng),), 3: "int key"}
    path, _ = written(tmp_path, checkpoint(model, optim, extra), raw)
    loaded, found = safetensors.torch.load_file(path), document(path)
    assert identical(loaded["optimizer.param_groups.0.lr"], lr) and identical(loaded["extra.rng.0"], rng)
    assert found["optim"]["param_groups"] == [{"params": ["w"], "lr": {"$tensor": "optimizer.param_groups.0.lr"}}]
    assert found["optim"]["state_values"] == {"w": {"step": 3, "none": None}} and found["optim"]["extra"] == {"user": 1}
    assert found["extra"] == {"$dict": [["rng", {"$tuple": [{"$tensor": "extra.rng.0"}]}], [3, "int key"]]}
    assert found["model_values"] == {"w._extra_state": {"scale": 2.0}}
    assert found["model_order"] == ["w", "w._extra_state"]


def test_states_whose_dotted_keys_become_equal_are_refused():
    raw = Raw()
    optim = Optimizer.of({"a": {"b.c": raw.whole(torch.randn(2))}, "a.b": {"c": raw.whole(torch.randn(2))}}, None)
    with pytest.raises(SourceUnsupportedError) as caught:
        lay_out(checkpoint(optim=optim), WriteSpec(max_shard_size=100, single_file=True))
    assert caught.value.details == ("state.a.b.c",)


def test_views_and_casts_are_written_dense(tmp_path):
    raw = Raw()
    base = torch.randn(6, 8)
    model = {"t": raw.views(base.t())[0], "s": raw.views(base[::2, 1:4])[0]}
    path, _ = written(tmp_path, checkpoint(model), raw, dtypes=DtypeRule(model=DTYPES["bfloat16"]))
    loaded = safetensors.torch.load_file(path)
    assert identical(loaded["t"], base.t().bfloat16()) and identical(loaded["s"], base[::2, 1:4].bfloat16())


class TestSafetensorsFileWriter(WriterContract):
    writer = staticmethod(lay_out)
    specs = (WriteSpec(single_file=True),)
    single = True

    def load(self, path, spec):
        assert len(safetensors.torch.load_file(path)) == 21


class TestSafetensorsShardsWriter(WriterContract):
    writer = staticmethod(lay_out)
    specs = (WriteSpec(), WriteSpec(max_shard_size=300))

    def load(self, path, spec):
        shards = [os.path.join(path, name) for name in os.listdir(path) if name.endswith(".safetensors")]
        assert sum(len(safetensors.torch.load_file(shard)) for shard in shards) == 21
