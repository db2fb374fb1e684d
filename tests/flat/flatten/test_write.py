"""Flattened files against files that real FSDP1 ranks saved, and against plain concatenation."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed._shard.sharded_tensor import ShardedTensor

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
from tests.flat.flat_source import ORDER, Model, flat, loaded, param, units, written
from tests.ir.checkpoints import with_origin
from tests.ir.optimizers import with_entry
from tests.ir.relisted import relisted
from tests.materialise import materialise
from tests.oracle.compare import differences, identical, require_identical
from tests.oracle.fake_group import as_rank
from tests.writers.source import Raw, checkpoint
from tests.writers.writer_contract import WriterContract

# Eager Adagrad has states without elements on ranks without elements, where what FSDP1 loads has no entry.
OTHER_STATES = "adagrad-orig"
BY_NAME = ("named", "keyed")
"""Their groups list names in an order of their own."""


def laid_out(truth: Path, units_of: Path, target: Path, world_size: int, **options: Any) -> None:
    with Sources() as sources:
        ckpt = open_checkpoint(str(truth / "truth.pt"), sources=sources, locate=Locate.ALL)
    of = loads((units_of / "units.json").read_bytes(), source="units.json")
    made = lay_out(ckpt, WriteSpec(units=of, world_size=world_size, **options))
    materialise(made, ckpt.files, str(target))


def memory(model: dict[str, Any]) -> dict[str, object]:
    """Of the tensors of a rank: which of them share a storage, and where in it each lies."""
    storages: dict[int, int] = {}
    found: dict[str, object] = {}
    for key, value in model.items():
        for one in [each.tensor for each in value.local_shards()] if isinstance(value, ShardedTensor) else [value]:
            storage = storages.setdefault(one.untyped_storage()._cdata, len(storages))
            found[key] = storage, one.storage_offset(), one.stride(), one.requires_grad
    return found


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_every_file_is_the_one_fsdp1_saved_on_that_rank(oracle, tmp_path, world_size):
    directory = oracle.flattened(world_size)
    wrong = []
    for saved in sorted(path for path in directory.iterdir() if path.name != OTHER_STATES):
        by_name = saved.name.startswith(BY_NAME)
        laid_out(saved, saved, tmp_path / saved.name, world_size, key_type="name" if by_name else "id")
        for path in sorted((saved / "flat").glob("*.pt")):
            where = f"{saved.name} {path.name}: "
            with as_rank(int(path.stem.rpartition("_")[2]), world_size):
                found = torch.load(tmp_path / saved.name / path.name, weights_only=False)
                expected = torch.load(path, weights_only=False)
                for group in (*found.get("param_groups", ()), *expected.get("param_groups", ())) if by_name else ():
                    group["params"].sort()
                wrong += differences(found, expected, where)
                if path.name.startswith("model"):
                    wrong += differences(memory(found), memory(expected), where)
                    assert list(found) == list(expected), where
                    assert [*found._metadata.items()] == [*expected._metadata.items()], where
    assert not wrong, "\n".join(wrong[:20])


def test_the_versions_of_modules_are_under_the_paths_of_the_new_wrapping(oracle, tmp_path):
    wrapped_otherwise, saved = (oracle.flattened(2) / f"{name}-orig" for name in ("rewrapped", "nested"))
    laid_out(wrapped_otherwise, saved, tmp_path, 2)
    expected = loaded(saved / "flat", "model", 0, 2)._metadata
    assert [*loaded(tmp_path, "model", 0, 2)._metadata.items()] == [*expected.items()]


def test_the_version_of_a_module_goes_with_it_into_its_wrapper():
    """As that of a batch norm that is a unit: all modules of the oracle have version 1, as wrappers have."""
    root, metadata = "_fsdp_wrapped_module", {"": 2, "a": 3, "b": 4, "b.i": 5}
    wrapped = {"": 1, root: 2, f"{root}.a": 3, f"{root}.b": 1, f"{root}.b.{root}": 4, f"{root}.b.{root}.i": 5}
    source, expected = ({path: {"version": each} for path, each in of.items()} for of in (metadata, wrapped))
    for given in (source, expected):
        assert [*wrapped_metadata(given, units(orig=True)).items()] == [*expected.items()]
    assert wrapped_metadata(None, units(orig=True)) is None


@pytest.mark.parametrize("orig", [True, False])
def test_hybrid_sharding_repeats_the_shards_in_every_group(tmp_path, orig):
    """Of a rank outside the first group FSDP1 cannot save a model itself."""
    model, of = Model(seed=5), units(orig=orig, strategy=Strategy.HYBRID_SHARD, shard_size=3)
    written(tmp_path / "hybrid", model, of, 6)
    written(tmp_path / "group", model, units(orig=orig), 3)
    for rank in range(6):
        held = loaded(tmp_path / "hybrid", "model", rank, 6, group=3)
        alone = loaded(tmp_path / "group", "model", rank % 3, 3)
        for unit in of.units:
            (shards, truth), first = (held[unit.key], alone[unit.key]), rank // 3 * 3
            own, others = ([(one.metadata.shard_offsets, one.tensor) for one in each.local_shards()]
                           for each in (shards, truth))  # fmt: skip
            require_identical(own, others)
            ranks = [one.placement.rank() for one in shards.metadata().shards_metadata]
            assert ranks == list(range(first, first + len(ranks)))
        optims = loaded(tmp_path / "hybrid", "optim", rank, 6), loaded(tmp_path / "group", "optim", rank % 3, 3)
        require_identical(*optims)


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


@pytest.mark.parametrize("recorded", [None, (("b.bias", "a.bias"), ("b.weight", "top", "a.weight"))])
def test_ids_count_group_by_group_in_the_order_of_the_model_or_in_the_recorded_one(tmp_path, recorded):
    model = Model(seed=9)
    model.groups = [{"params": ["b.bias", "a.bias"], "lr": 1.0}, {"params": ["b.weight", "top", "a.weight"], "lr": 2.0}]
    written(tmp_path, model, units(orig=True, groups=recorded), 1)
    optim = loaded(tmp_path, "optim", 0, 1)
    assert [group["params"] for group in optim["param_groups"]] == [[0, 1], [2, 3, 4]]
    order = [name for group in recorded or (("a.bias", "b.bias"), ("top", "a.weight", "b.weight")) for name in group]
    for number, name in enumerate(order):
        assert identical(optim["state"][number]["exp_avg"], model.states[name]["exp_avg"])


def test_names_are_listed_in_the_order_of_the_ids(tmp_path):
    """torch.optim loads by position: a list in another order would give every parameter another's state."""
    model = Model(seed=11)
    listed = ["top", "b.weight", "a.weight", "a.bias", "b.bias"]
    model.groups = [{"params": listed, "param_names": list("tbaab")}]
    written(tmp_path, model, units(orig=True), 2, key_type="name")
    (group,) = loaded(tmp_path, "optim", 0, 2)["param_groups"]
    assert [clean(name) for name in group["params"]] == list(units(orig=True).optimizer_keys())
    assert group["param_names"] == group["params"]


def test_what_a_user_added_to_the_optimizer_is_carried_and_groups_that_it_lacks_are_not_made(tmp_path):
    model = Model(seed=13)
    model.groups = None
    ckpt = model.checkpoint()
    assert ckpt.optim is not None
    table = torch.randn(3, generator=torch.Generator().manual_seed(1))
    ckpt.optim = with_entry(ckpt.optim, "tables", {"rows": model.raw.whole(table), "kind": "hash"})
    ckpt.optim = with_entry(ckpt.optim, "nothing", {})
    ckpt.optim.extra["schedule"] = [1, (2, None)]
    written(tmp_path, model, units(orig=False), 2, ckpt=ckpt)
    optim = loaded(tmp_path, "optim", 1, 2)
    added = {key: entry for key, entry in optim.pop("state").items() if key in ("tables", "nothing")}
    require_identical(added, {"tables": {"rows": table, "kind": "hash"}, "nothing": {}})
    assert optim == {"schedule": [1, (2, None)]}


@pytest.mark.parametrize("orig", [True, False])
def test_states_of_one_element_are_on_every_rank(tmp_path, orig):
    model = Model(seed=14)
    for entry in model.states.values():
        entry["count"] = torch.tensor([11], dtype=torch.int64)
    written(tmp_path, model, units(orig=orig), 4)
    for rank in range(4):
        for entry in loaded(tmp_path, "optim", rank, 4)["state"].values():
            assert identical(entry["count"], torch.tensor([11]))


def test_what_is_not_cut_keeps_its_memory_order(tmp_path):
    raw = Raw()
    weight = torch.randn(3, 2, 5, 4, generator=torch.Generator().manual_seed(3)).to(memory_format=torch.channels_last)
    of = units_of_lists((Unit("", (param("w", (3, 2, 5, 4), stride=weight.stride()),)),), ("w",), use_orig_params=True)
    optim = Optimizer.of({"w": {"exp_avg": raw.whole(weight)}}, [{"params": ["w"]}])
    ckpt = checkpoint({"w": raw.whole(weight, sharded=True)}, optim)
    written(tmp_path, Model(raw=raw), of, 1, ckpt=ckpt)
    for whole in (loaded(tmp_path, "model", 0, 1)["w"], loaded(tmp_path, "optim", 0, 1)["state"][0]["exp_avg"]):
        assert whole.stride() == weight.stride() and identical(whole, weight)


@pytest.mark.parametrize("sorted_names", [True, False])
def test_keys_that_lie_in_another_order_get_the_one_of_the_model_and_modules_of_buffers_stay(tmp_path, sorted_names):
    model = Model(seed=17)
    ckpt = model.checkpoint()
    assert ckpt.model is not None
    expected = list(ORDER)
    if sorted_names:
        ckpt = with_origin(ckpt, container=Container.SAFETENSORS)
    else:
        expected.insert(1, "positions.table")
        held = {**ckpt.model.params, "positions.table": model.raw.whole(torch.ones(2), sharded=False)}
        ckpt = replace(ckpt, model=replace(ckpt.model, params={name: held[name] for name in expected}))
    written(tmp_path, model, units(orig=True, strategy=Strategy.NO_SHARD), 2, ckpt=ckpt)
    assert list(loaded(tmp_path, "model", 0, 2)) == expected


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
