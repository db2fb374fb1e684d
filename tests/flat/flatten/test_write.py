"""Flattened files against files that real FSDP1 ranks saved, and against plain concatenation."""

from __future__ import annotations

import warnings
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.distributed.fsdp import FullyShardedDataParallel

from fsdpckpt.flat.flatten import lay_out
from fsdpckpt.flat.flatten.keys import wrapped_metadata
from fsdpckpt.flat.flatten.states import unit_states
from fsdpckpt.ir.checkpoint import Container
from fsdpckpt.ir.dtypes import DTYPES
from fsdpckpt.ir.names import clean
from fsdpckpt.ir.optimizer import Optimizer
from fsdpckpt.ir.unit_lists import units_of_lists
from fsdpckpt.ir.units import RankOrder, Strategy, Unit
from fsdpckpt.ir.units_json import loads
from fsdpckpt.readers.detect import open_checkpoint
from fsdpckpt.readers.protocol import Locate
from fsdpckpt.storage.sources import Sources
from fsdpckpt.writers import DtypeRule, WriteSpec
from tests.flat.flat_source import ORDER, SHAPES, Model, flat, loaded, param, units, written
from tests.ir.checkpoints import with_origin
from tests.ir.optimizers import with_entry
from tests.ir.relisted import relisted
from tests.materialise import materialise
from tests.oracle.compare import differences, identical, require_parts
from tests.oracle.fake_group import as_rank
from tests.oracle.flat_scenarios import scenario
from tests.oracle.flat_train import built, wrap
from tests.writers.source import Raw, checkpoint
from tests.writers.writer_contract import WriterContract

# Eager Adagrad has states without elements on ranks without elements, where what FSDP1 loads has no entry; the others'
# files are keyed by prefixed names.
OTHER_KEYS = ("adagrad-orig", "named-flat", "named-orig", "keyed-orig")


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_every_file_is_the_one_fsdp1_saved_on_that_rank(oracle, tmp_path, world_size):
    directory = oracle.flattened(world_size)
    wrong = []
    for saved in sorted(path for path in directory.iterdir() if path.name not in OTHER_KEYS):
        with Sources() as sources:
            truth = open_checkpoint(str(saved / "truth.pt"), sources=sources, locate=Locate.ALL)
        of = loads((saved / "units.json").read_bytes(), source="units.json")
        target = lay_out(truth, WriteSpec(units=of, world_size=world_size, key_type="id"))
        materialise(target, truth.files, str(tmp_path / saved.name))
        for path in sorted((saved / "flat").glob("*.pt")):
            rank = int(path.stem.rpartition("_")[2])
            with as_rank(rank, world_size):
                found = torch.load(tmp_path / saved.name / path.name, weights_only=False)
                expected = torch.load(path, weights_only=False)
                wrong += differences(found, expected, f"{saved.name} {path.name}: ")
                if path.name.startswith("model"):
                    assert list(found) == list(expected), saved.name
    assert not wrong, "\n".join(wrong[:20])


@pytest.mark.parametrize("align", [None, 4])
@pytest.mark.parametrize("world_size", [2, 3, 5, 8, 64])
def test_ranks_hold_consecutive_shards_of_the_flat_parameters(tmp_path, world_size, align):
    model, of = Model(seed=world_size), units(orig=align is not None)
    target = written(tmp_path, model, of, world_size)
    for file in target.files[:3]:
        assert zipfile.ZipFile(tmp_path / file.path).testzip() is None
    for number, unit in enumerate(of.units):
        whole = flat([model.weights[p.name] for p in unit.params], world_size=world_size, align=align)
        total = len(whole) if align else sum(p.numel for p in unit.params)
        shard = len(whole) // world_size
        for rank in sorted({0, 1, world_size // 2, world_size - 1}):
            held = loaded(tmp_path, "model", rank, world_size)[unit.key]
            begin, end = min(rank * shard, total), min(rank * shard + shard, total)
            assert held.size() == (total,)
            assert [one.metadata.shard_offsets for one in held.local_shards()] == ([[begin]] if end > begin else [])
            for one in held.local_shards():
                assert identical(one.tensor, whole[begin:end]) and one.tensor.requires_grad
            sizes = [one.shard_sizes[0] for one in held.metadata().shards_metadata]
            assert sum(sizes) == total and all(sizes)
            if align is None:
                entry = loaded(tmp_path, "optim", rank, world_size)["state"][number]
                moments = flat([model.states[p.name]["exp_avg"] for p in unit.params], world_size=world_size)
                assert identical(entry["exp_avg"], moments[rank * shard : rank * shard + shard])
                assert entry["step"].item() == 7.0 and entry["step"].ndim == 0


def test_slices_of_parameters_share_the_memory_of_their_flat_parameter(tmp_path):
    model = Model(seed=2)
    target = written(tmp_path, model, units(orig=True), 2)
    held = loaded(tmp_path, "model", 0, 2)
    local = held["_flat_param"].local_shards()[0].tensor
    begin, end = local.data_ptr(), local.data_ptr() + local.nbytes
    assert held["top"].shape == (3,) and held["a.weight"].shape == (9,)
    assert all(begin <= held[name].data_ptr() < end for name in ("top", "a.weight"))
    assert identical(held["a.weight"], model.weights["a.weight"].reshape(-1)[:9])
    assert [file.path for file in target.files[:2]] == ["model_world_size_2_rank_0.pt", "model_world_size_2_rank_1.pt"]


def test_a_parameter_without_elements_on_a_rank_is_an_empty_tensor(tmp_path):
    """FSDP1 uses one empty tensor for all of them."""
    written(tmp_path, Model(seed=2), units(orig=True), 5)
    held = loaded(tmp_path, "model", 4, 5)
    for tensor in (held["top"], held["a.weight"]):
        assert (tensor.shape, tensor.stride(), tensor.storage_offset()) == ((0,), (1,), 0)
        assert tensor.dtype == torch.float32 and tensor.untyped_storage().nbytes() == 0
    with zipfile.ZipFile(tmp_path / "model_world_size_5_rank_4.pt") as file:
        assert [entry.file_size for entry in file.infolist() if "/data/" in entry.filename].count(0) == 1


def test_padding_of_a_dtype_that_numpy_lacks_is_zero(tmp_path):
    model = Model(seed=20)
    ckpt = model.checkpoint()
    assert ckpt.optim is not None
    for states in ckpt.optim.state.values():
        tensor = states["exp_avg"]
        states["exp_avg"] = replace(tensor, dtype=DTYPES["complex32"])  # of as many bytes
    written(tmp_path, model, units(orig=False), 3, ckpt=replace(ckpt, model=None))
    last = loaded(tmp_path, "optim", 2, 3)["state"][0]["exp_avg"]
    assert last.dtype == torch.complex32 and last.shape == (8,)
    assert not torch.view_as_real(last)[-1].any() and torch.view_as_real(last)[-2].any()


def test_a_parameter_has_states_only_on_ranks_that_hold_elements_of_it(tmp_path):
    model, world_size = Model(seed=3), 5
    written(tmp_path, model, units(orig=True), world_size, key_type="name")
    found = {name: [] for name in SHAPES}
    for rank in range(world_size):
        for name, entry in loaded(tmp_path, "optim", rank, world_size)["state"].items():
            assert entry["exp_avg"].ndim == 1 and entry["exp_avg"].numel() and entry["step"].item() == 7.0
            found[clean(name)].append(entry["exp_avg"])
    for name, chunks in found.items():
        assert identical(torch.cat(chunks), model.states[name]["exp_avg"].reshape(-1))
    assert len(found["b.bias"]) == 1 < len(found["a.weight"])


@pytest.mark.parametrize("orig", [True, False])
@pytest.mark.parametrize(("strategy", "world_size"), [(Strategy.NO_SHARD, 3), (Strategy.FULL_SHARD, 1)])
def test_what_is_not_sharded_is_whole_on_every_rank(tmp_path, orig, strategy, world_size):
    model, of = Model(seed=4), units(orig=orig, strategy=strategy)
    written(tmp_path, model, of, world_size)
    for rank in range(world_size):
        held = loaded(tmp_path, "model", rank, world_size)
        assert list(held) == list(of.parameters)
        require_parts(held, model.weights)
        state = loaded(tmp_path, "optim", rank, world_size)["state"]
        if orig:
            assert identical(state[1]["exp_avg_sq"], model.states["a.weight"]["exp_avg_sq"])
        else:
            parts = [model.states[p.name]["exp_avg_sq"] for p in of.units[0].params]
            assert identical(state[0]["exp_avg_sq"], flat(parts, world_size=1))


@pytest.mark.parametrize("orig", [True, False])
def test_hybrid_sharding_repeats_the_shards_in_every_group(tmp_path, orig):
    model, of = Model(seed=5), units(orig=orig, strategy=Strategy.HYBRID_SHARD, shard_size=3)
    written(tmp_path / "hybrid", model, of, 6)
    written(tmp_path / "group", model, units(orig=orig), 3)
    for rank in range(6):
        held = loaded(tmp_path / "hybrid", "model", rank, 6, group=3)
        alone = loaded(tmp_path / "group", "model", rank % 3, 3)
        for unit in of.units:
            shards, truth = held[unit.key], alone[unit.key]
            assert [s.metadata.shard_offsets for s in shards.local_shards()] == [
                s.metadata.shard_offsets for s in truth.local_shards()
            ]
            assert all(
                identical(one.tensor, two.tensor)
                for one, two in zip(shards.local_shards(), truth.local_shards(), strict=True)
            )
            ranks = [one.placement.rank() for one in shards.metadata().shards_metadata]
            assert ranks == [rank // 3 * 3 + place for place in range(len(ranks))]
        assert not differences(
            loaded(tmp_path / "hybrid", "optim", rank, 6), loaded(tmp_path / "group", "optim", rank % 3, 3)
        )


def test_alignment_follows_the_dtype_of_mixed_precision_and_the_filler_that_of_the_parameters(tmp_path):
    model = Model(seed=6)
    of = units(orig=True)
    of = units_of_lists(
        tuple(Unit(u.prefix, u.params, u.strategy, DTYPES["bfloat16"]) for u in of.units),
        of.parameters,
        use_orig_params=True,
    )
    written(tmp_path, model, of, 2)
    whole = flat([model.weights[p.name] for p in of.units[0].params], world_size=2, align=8)
    for rank in range(2):
        local = loaded(tmp_path, "model", rank, 2)["_flat_param"].local_shards()[0].tensor
        assert identical(local, whole[rank * len(whole) // 2 : (rank + 1) * len(whole) // 2])


def test_what_is_cast_is_filled_in_the_new_dtype(tmp_path):
    model, of = Model(seed=7), units(orig=True)
    rule = DtypeRule(model=DTYPES["bfloat16"], optim=DTYPES["float64"])
    target = written(tmp_path, model, of, 2, dtypes=rule)
    whole = flat([model.weights[p.name] for p in of.units[1].params], world_size=2, align=4).bfloat16()
    local = loaded(tmp_path, "model", 1, 2)["b._flat_param"].local_shards()[0].tensor
    assert identical(local, whole[len(whole) // 2 :]) and (local == 42).any()
    state = loaded(tmp_path, "optim", 0, 2)["state"]
    assert state[0]["exp_avg"].dtype == torch.float64 and state[0]["step"].dtype == torch.float32
    assert [note.kind for note in target.notes] == ["cast", "cast"]


def test_frozen_parameters_hold_elements_and_have_no_state(tmp_path):
    model = Model(seed=8)
    for name in ("b.weight", "b.bias"):
        del model.states[name]
    model.groups = [{"params": ["top", "a.weight", "a.bias"], "lr": 1.0, "param_names": ["top", "a.weight", "a.bias"]}]
    written(tmp_path, model, units(orig=False), 3)
    optim = loaded(tmp_path, "optim", 1, 3)
    assert list(optim["state"]) == [0]
    assert optim["param_groups"] == [{"params": [0], "lr": 1.0, "param_names": ["_fsdp_wrapped_module._flat_param"]}]
    assert loaded(tmp_path, "model", 1, 3)["b._flat_param"].size() == (15,)


def test_ids_count_group_by_group_in_the_order_of_the_models_parameters(tmp_path):
    model = Model(seed=9)
    model.groups = [{"params": ["b.bias", "a.bias"], "lr": 1.0}, {"params": ["b.weight", "top", "a.weight"], "lr": 2.0}]
    written(tmp_path, model, units(orig=True), 1)
    optim = loaded(tmp_path, "optim", 0, 1)
    assert [group["params"] for group in optim["param_groups"]] == [[0, 1], [2, 3, 4]]
    order = ["a.bias", "b.bias", "top", "a.weight", "b.weight"]
    for number, name in enumerate(order):
        assert identical(optim["state"][number]["exp_avg"], model.states[name]["exp_avg"])


def test_units_that_record_the_groups_say_the_order_of_ids(tmp_path):
    model = Model(seed=10)
    model.groups = [{"params": ["a.bias", "b.bias"]}, {"params": ["top", "a.weight", "b.weight"]}]
    groups = (("b.bias", "a.bias"), ("b.weight", "top", "a.weight"))
    written(tmp_path, model, units(orig=True, groups=groups), 1)
    state = loaded(tmp_path, "optim", 0, 1)["state"]
    for number, name in enumerate(name for group in groups for name in group):
        assert identical(state[number]["exp_avg"], model.states[name]["exp_avg"])


def test_ids_of_a_rank_whose_optimizer_has_another_order_or_lacks_parameters_are_its_own(tmp_path):
    model = Model(seed=17)
    own = ("b.weight", "b.bias", "a.weight")
    of = units(orig=True, world_size=2, groups=(ORDER,), orders=(RankOrder((1,), (own,)),))
    written(tmp_path, model, of, 2)
    for rank, names in enumerate((ORDER, own)):
        optim = loaded(tmp_path, "optim", rank, 2)
        assert optim["param_groups"][0]["params"] == list(range(len(names)))
        assert set(optim["state"]) == ({0, 1, 3} if rank == 0 else {0, 1, 2})
        for number, entry in optim["state"].items():
            values, whole = entry["exp_avg"], model.states[names[number]]["exp_avg"].reshape(-1)
            assert identical(values, whole[: len(values)] if rank == 0 else whole[-len(values) :])


def test_names_are_listed_in_the_order_of_the_ids(tmp_path):
    """torch.optim loads by position: a list in another order would give every parameter another's state."""
    model = Model(seed=11)
    listed = ["top", "b.weight", "a.weight", "a.bias", "b.bias"]
    model.groups = [{"params": listed, "param_names": list("tbaab")}]
    target = units(orig=True)
    written(tmp_path, model, target, 2, key_type="name")
    (group,) = loaded(tmp_path, "optim", 0, 2)["param_groups"]
    assert [clean(name) for name in group["params"]] == [name for name in target.optimizer_keys() if name in listed]
    assert group["param_names"] == group["params"]
    assert group["params"][0] == "_fsdp_wrapped_module.top"


def test_an_optimizer_without_groups_keeps_none(tmp_path):
    model = Model(seed=12)
    model.groups = None
    written(tmp_path, model, units(orig=False), 2)
    assert list(loaded(tmp_path, "optim", 0, 2)) == ["state"]


def test_what_a_user_added_to_the_optimizer_is_carried(tmp_path):
    model = Model(seed=13)
    ckpt = model.checkpoint()
    assert ckpt.optim is not None
    table = torch.randn(3, generator=torch.Generator().manual_seed(1))
    ckpt.optim = with_entry(ckpt.optim, "tables", {"rows": model.raw.whole(table), "kind": "hash"})
    ckpt.optim = with_entry(ckpt.optim, "nothing", {})
    ckpt.optim.extra["schedule"] = [1, (2, None)]
    written(tmp_path, model, units(orig=False), 2, ckpt=ckpt)
    optim = loaded(tmp_path, "optim", 1, 2)
    assert identical(optim["state"]["tables"]["rows"], table) and optim["state"]["tables"]["kind"] == "hash"
    assert optim["state"]["nothing"] == {}
    assert optim["schedule"] == [1, (2, None)]


@pytest.mark.parametrize("orig", [True, False])
def test_states_that_are_no_tensors_and_those_of_one_number_are_on_every_rank(tmp_path, orig):
    model = Model(seed=14)
    for entry in model.states.values():
        entry.update(kind="dense", master=None, history=[1, 2.5], count=torch.tensor([11], dtype=torch.int64))
    written(tmp_path, model, units(orig=orig), 4)
    for rank in range(4):
        for entry in loaded(tmp_path, "optim", rank, 4)["state"].values():
            assert (entry["kind"], entry["master"], entry["history"]) == ("dense", None, [1, 2.5])
            assert identical(entry["count"], torch.tensor([11]))


def test_a_tied_name_has_the_slice_of_the_first_one(tmp_path):
    model = Model(seed=15)
    model.weights["head.weight"] = model.weights["a.weight"]
    of = units(orig=True, shared=(("head.weight", "a.weight"),))
    written(tmp_path / "sharded", model, of, 2)
    held = loaded(tmp_path / "sharded", "model", 0, 2)
    assert list(held)[-2:] == ["head.weight", "_flat_param"]
    assert held["head.weight"].data_ptr() == held["a.weight"].data_ptr() and held["head.weight"].shape == (9,)
    written(tmp_path / "flat", model, units(orig=False, shared=of.shared), 2)
    assert "head.weight" not in loaded(tmp_path / "flat", "model", 0, 2)
    written(tmp_path / "whole", model, of, 1)
    assert identical(loaded(tmp_path / "whole", "model", 0, 1)["head.weight"], model.weights["a.weight"])


def test_unmanaged_parameters_and_buffers_are_whole(tmp_path):
    model = Model(seed=16)
    ckpt = model.checkpoint()
    assert ckpt.model is not None
    mask = torch.randn(5, generator=torch.Generator().manual_seed(2))
    ckpt.model.params["a.mask"] = model.raw.whole(mask, sharded=False)
    root = Unit("", (param("a.weight"), param("a.bias")))
    of = units_of_lists(
        (root, units(orig=False).units[1]),
        tuple(SHAPES)[-1:] + tuple(SHAPES)[:-1],
        use_orig_params=False,
        unmanaged=(param("top"),),
    )
    written(tmp_path, model, of, 3, ckpt=ckpt)
    held, optim = loaded(tmp_path, "model", 2, 3), loaded(tmp_path, "optim", 2, 3)
    assert list(held) == ["top", "_flat_param", "a.mask", "b._flat_param"]
    assert identical(held["a.mask"], mask) and identical(held["top"], model.weights["top"])
    assert identical(optim["state"][0]["exp_avg"], model.states["top"]["exp_avg"])
    assert optim["param_groups"][0]["params"] == [0, 1, 2]


def test_channels_last_parameters_are_cut_in_memory_order(tmp_path):
    raw = Raw()
    weight = torch.randn(3, 2, 5, 4, generator=torch.Generator().manual_seed(3)).to(memory_format=torch.channels_last)
    of = units_of_lists((Unit("", (param("w", (3, 2, 5, 4), stride=weight.stride()),)),), ("w",), use_orig_params=True)
    model = Model(raw=raw)
    ckpt = checkpoint(
        {"w": raw.whole(weight, sharded=True)},
        Optimizer.of({"w": {"exp_avg": raw.whole(weight)}}, [{"params": ["w"]}]),
    )
    memory = weight.permute(0, 2, 3, 1).reshape(-1)
    written(tmp_path, model, of, 7, ckpt=ckpt)
    chunks = [loaded(tmp_path, "optim", rank, 7)["state"][0]["exp_avg"] for rank in range(7)]
    assert identical(torch.cat(chunks), memory)
    written(tmp_path, model, of, 1, ckpt=ckpt)
    whole = loaded(tmp_path, "model", 0, 1)["w"]
    assert whole.stride() == weight.stride() and identical(whole, weight)


@pytest.mark.parametrize("source", [(), ("", "first", "outer.tail")])
def test_the_versions_of_modules_are_under_the_paths_of_the_new_wrapping(tmp_path, source):
    entry = scenario("nested")
    with as_rank(0, 1), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plain = built(entry)
        other = built(entry)
        metadata = plain.state_dict()._metadata
        if source:
            metadata = wrap(scenario("rewrapped"), other, orig=True).state_dict()._metadata
        wrapped = wrap(entry, built(entry), orig=True)
        assert isinstance(wrapped, FullyShardedDataParallel)
        expected = wrapped.state_dict()._metadata
    raw, shapes = Raw(), {name: tuple(p.shape) for name, p in plain.named_parameters()}
    of = units_of_lists(
        tuple(
            Unit(prefix, tuple(param(name, shape) for name, shape in shapes.items() if innermost_unit(name) == prefix))
            for prefix in ("", "outer", "outer.inner")
        ),
        tuple(shapes),
        use_orig_params=True,
    )
    ckpt = checkpoint({n: raw.whole(p.detach()) for n, p in plain.named_parameters()}, metadata=dict(metadata))
    written(tmp_path, Model(raw=raw), of, 2, ckpt=ckpt)
    found = loaded(tmp_path, "model", 0, 2)._metadata
    assert list(found.items()) == list(expected.items())


def innermost_unit(name: str) -> str:
    return next((p for p in ("outer.inner", "outer") if name.startswith(f"{p}.")), "")


def test_keys_that_lie_in_another_order_get_the_one_of_the_model(tmp_path):
    model = Model(seed=17)
    ckpt = model.checkpoint()
    ckpt = with_origin(ckpt, container=Container.SAFETENSORS)
    written(tmp_path, model, units(orig=True, strategy=Strategy.NO_SHARD), 2, ckpt=ckpt)
    assert list(loaded(tmp_path, "model", 0, 2)) == ["top", "a.weight", "a.bias", "b.weight", "b.bias"]


def test_a_module_that_has_only_buffers_stays_where_the_source_has_it(tmp_path):
    model = Model(seed=21)
    ckpt = model.checkpoint()
    assert ckpt.model is not None
    table = model.raw.whole(torch.ones(2), sharded=False)
    ordered = {name: ckpt.model.params[name] for name in ORDER}
    params = {"top": ordered.pop("top"), "positions.table": table, **ordered}
    ckpt = replace(ckpt, model=replace(ckpt.model, params=params))
    written(tmp_path, model, units(orig=True, strategy=Strategy.NO_SHARD), 1, ckpt=ckpt)
    assert list(loaded(tmp_path, "model", 0, 1)) == list(params)


def test_versions_of_wrapped_modules_move_to_the_modules_in_the_wrappers():
    of = units(orig=True)
    metadata = {"": {"version": 2}, "a": {"version": 3}, "b": {"version": 4}, "b.inner": {"version": 5}}
    lead = "_fsdp_wrapped_module"
    expected = {
        "": {"version": 1},
        lead: {"version": 2},
        f"{lead}.a": {"version": 3},
        f"{lead}.b": {"version": 1},
        f"{lead}.b.{lead}": {"version": 4},
        f"{lead}.b.{lead}.inner": {"version": 5},
    }
    found = wrapped_metadata(metadata, of)
    assert list(found.items()) == list(expected.items())
    assert list(wrapped_metadata(found, of).items()) == list(expected.items())
    assert wrapped_metadata(None, of) is None


def test_a_unit_has_one_step_even_if_all_its_parameters_have_one_element():
    raw, wrong = Raw(), []
    unit = Unit("", (param("a", (1,)), param("b", (1,))))
    step, exp_avg = raw.whole(torch.ones(1)), raw.whole(torch.ones(1))
    found = unit_states(
        unit, {"a": {"step": step, "exp_avg": exp_avg}, "b": {"step": step, "exp_avg": exp_avg}}, {}, wrong
    )
    assert found["step"] is step
    assert found["exp_avg"].tensors == [exp_avg, exp_avg]
    assert wrong == []


def test_the_states_of_a_parameter_without_elements_count_only_if_no_other_has_any():
    raw, wrong = Raw(), []
    unit = Unit("", (param("a", (0, 2)), param("b", (2,))))
    empty, filled = raw.whole(torch.ones(0, 2)), raw.whole(torch.ones(2))
    found = unit_states(unit, {"a": {"odd": empty}, "b": {"exp_avg": filled}}, {}, wrong)
    assert list(found) == ["exp_avg"] and found["exp_avg"].tensors == [filled, filled]
    alone = unit_states(Unit("", unit.params[:1]), {"a": {"exp_avg": empty}}, {}, wrong)
    assert alone["exp_avg"].tensors == [empty]
    assert unit_states(unit, {}, {}, wrong) is None and wrong == []


@pytest.mark.parametrize(
    ("orig", "strategy", "world_size", "kept"),
    [
        (False, Strategy.FULL_SHARD, 2, "flat parameter"),
        (False, Strategy.NO_SHARD, 2, "flat parameter"),
        (True, Strategy.FULL_SHARD, 2, "no rank"),
        (True, Strategy.FULL_SHARD, 1, None),
        (True, Strategy.NO_SHARD, 2, None),
    ],
)
def test_states_of_a_parameter_without_elements_that_have_no_place_are_noted(
    tmp_path, orig, strategy, world_size, kept
):
    model, of = Model(seed=19), units(orig=orig, strategy=strategy)
    model.weights["none"] = torch.zeros(0, 3)
    model.states["none"] = {"step": torch.tensor(2.0), "exp_avg": torch.zeros(0, 3), "exp_avg_sq": torch.zeros(0, 3)}
    model.groups[0]["params"].append("none")
    inner = replace(of.units[1], params=(*of.units[1].params, param("none", (0, 3))))
    of = relisted(of, units=(of.units[0], inner), parameters=(*ORDER, "none"))
    target = written(tmp_path, model, of, world_size)
    noted = [(note.kind, note.keys, kept in note.message) for note in target.notes]
    assert noted == ([] if kept is None else [("dropped", ("none",), True)])
    state = loaded(tmp_path, "optim", 0, world_size)["state"]
    assert orig and float(state[5]["step"]) == 2.0 if kept is None else 5 not in state


def test_each_rank_gets_the_extras_of_its_source_rank(tmp_path):
    model = Model(seed=18)
    ckpt = model.checkpoint(extra={"epoch": 4}, rank_extra=({"seed": 1}, {"seed": 2}))
    target = written(tmp_path, model, units(orig=False), 3, ckpt=ckpt)
    assert [loaded(tmp_path, "extra_state", rank, 3) for rank in range(3)] == [
        {"epoch": 4, "seed": 1}, {"epoch": 4, "seed": 2}, {"epoch": 4, "seed": 1}
    ]  # fmt: skip
    assert [note.kind for note in target.notes] == ["inferred"]


class TestTorchFlatWriter(WriterContract):
    writer = staticmethod(lay_out)
    specs = (
        WriteSpec(units=units(orig=True), world_size=3),
        WriteSpec(units=units(orig=True), world_size=2, key_type="name"),
        WriteSpec(units=units(orig=False), world_size=2),
    )

    def source(self):
        model = Model(seed=5)
        return model.checkpoint(extra={"epoch": 7}), model.raw

    def load(self, path, spec):
        for rank in range(spec.world_size):
            assert loaded(Path(path), "model", rank, spec.world_size)
