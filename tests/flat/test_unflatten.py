"""Slices of flat parameters, held against units: named when they fit, every contradiction listed when they do not."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fsdpckpt.flat.match import FlatMatch, Mismatch, match
from fsdpckpt.flat.unflatten import unflatten
from fsdpckpt.ir.checkpoint import Checkpoint, ModelState
from fsdpckpt.ir.coverage import flaws
from fsdpckpt.ir.dtypes import DTYPES
from fsdpckpt.ir.optimizer import Optimizer, ParamKey
from fsdpckpt.ir.parameters import Parameter
from fsdpckpt.ir.placements import OneSlice, Slices
from fsdpckpt.ir.tensors import Chunks, Tensor
from fsdpckpt.ir.units import Strategy, Units
from fsdpckpt.ir.values import Key, Value
from tests.flat.flat_checkpoints import FLOAT, Played, unit, units_of
from tests.ir.optimizers import with_setting
from tests.ir.relisted import relisted
from tests.materialise import gather

ROOT = {"e.weight": (17, 9), "h.weight": (17, 9), "h.bias": (17,)}
BLOCK = {"a.weight": (28, 9), "a.bias": (28,), "conv.weight": (3, 2, 5), "scale": (1,)}


def toy(*, use_orig_params: bool, **more: object) -> Units:
    return units_of(unit("", ROOT), unit("l.0", BLOCK), unit("l.1", BLOCK), use_orig_params=use_orig_params, **more)


def raw(
    units: Units, world_size: int, *, model: bool = False
) -> tuple[Played, Checkpoint, dict[str, dict[str, np.ndarray]]]:
    """Adam's states, and the model in LOCAL_STATE_DICT form when asked; and what they were before FSDP cut them."""
    played = Played(units, world_size)
    params = units.params()
    truth = {name: {key: played.values(param) for key, param in params.items()} for name in ("exp_avg", "exp_avg_sq")}
    order = list(units.optimizer_keys())
    states: dict[str, dict[str, object]] = {name: dict(played.moment(whole)) for name, whole in truth.items()}
    states["step"] = {key: played.replicas(np.float32(3).reshape(())) for key in order}
    states["kind"] = dict.fromkeys(order, "dense")
    weights = None
    if model:
        truth["weight"] = {key: played.values(param) for key, param in params.items()}
        weights = ModelState(
            {**played.flat_parameters(truth["weight"]), "buf": played.replicas(np.ones(3, np.float32))}
        )
    return played, played.checkpoint(model=weights, optim=played.optimizer(states, order)), truth


def named(checkpoint: Checkpoint, units: Units) -> Checkpoint:
    found = match(checkpoint, units)
    assert isinstance(found, FlatMatch), found
    return unflatten(checkpoint, found)


def require_states(checkpoint: Checkpoint, played: Played, truth: dict[str, dict[str, np.ndarray]]) -> None:
    files = played.files()
    assert checkpoint.optim is not None
    for name in ("exp_avg", "exp_avg_sq"):
        for param, expected in truth[name].items():
            tensor = checkpoint.optim.state[param][name]
            assert isinstance(tensor, Tensor)
            assert not flaws(tensor)
            assert gather(tensor, files).tobytes() == expected.tobytes(), (param, name)


def contradictions(checkpoint: Checkpoint, units: Units) -> str:
    found = match(checkpoint, units)
    assert isinstance(found, Mismatch)
    return "\n".join(found.contradictions)


@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize("world_size", [2, 3, 4, 7, 16, 300])
def test_the_states_of_every_parameter_are_found_in_the_slices(world_size: int, use_orig_params: bool) -> None:
    units = toy(use_orig_params=use_orig_params)
    played, checkpoint, truth = raw(units, world_size)
    found = named(checkpoint, units)
    require_states(found, played, truth)
    assert found.optim is not None
    assert found.optim.param_groups == [{"lr": 0.1, "params": list(units.parameters)}]
    assert found.optim.key_type == "name"
    entries = len(checkpoint.optim.state)  # type: ignore[union-attr]
    assert [note.message for note in found.notes] == [f"optimizer: states of 11 parameters, from {entries} keys"]
    steps = [states["step"] for states in found.optim.state.values()]
    assert {states["kind"] for states in found.optim.state.values()} == {"dense"}
    assert len(set(map(id, steps))) == 11, "one tensor of many parameters counts as tied"


@pytest.mark.parametrize("use_orig_params", [False, True])
def test_the_model_is_found_in_its_flat_parameters_and_buffers_stay_whole(use_orig_params: bool) -> None:
    units = toy(use_orig_params=use_orig_params, shared=(("tied.weight", "e.weight"),))
    played, checkpoint, truth = raw(units, 3, model=True)
    shapes = {"count": (), "grid": (2, 3), "one": (4,)}
    assert checkpoint.model is not None
    for name, shape in shapes.items():
        checkpoint.model.params[name] = played.replicas(np.ones(shape, np.float32))
    checkpoint.model.params["one"] = Tensor(FLOAT, (4,), Chunks.whole(file=0, offset=0, shape=(4,)), cut=OneSlice())
    found = named(checkpoint, units)
    require_states(found, played, truth)
    assert found.model is not None
    for name, shape in shapes.items():
        tensor = found.model.params[name]
        assert isinstance(tensor, Tensor) and (tensor.sharded, tensor.shape) == (False, shape)
        assert not isinstance(tensor.cut, OneSlice)
    # As ``state_dict`` lists them: what is the root's own, then its children.
    assert list(found.model.params) == ["buf", *shapes, *units.parameters, "tied.weight"]
    assert "model: 11 parameters were found in 3 flat parameters" in [note.message for note in found.notes]
    for name, expected in truth["weight"].items():
        tensor = found.model.params[name]
        assert isinstance(tensor, Tensor)
        assert gather(tensor, played.files()).tobytes() == expected.tobytes()
    assert found.model.params["tied.weight"] is found.model.params["e.weight"]
    buffer = found.model.params["buf"]
    assert isinstance(buffer, Tensor) and buffer.sharded is False and buffer.shape == (3,)


@pytest.mark.parametrize("use_orig_params", [False, True])
def test_hybrid_shards_repeat_in_every_group_of_ranks(use_orig_params: bool) -> None:
    blocks = [replace(one, strategy=Strategy.HYBRID_SHARD) for one in toy(use_orig_params=use_orig_params).units]
    units = units_of(*blocks, use_orig_params=use_orig_params, shard_size=2)
    played, checkpoint, truth = raw(units, 6)
    require_states(named(checkpoint, units), played, truth)
    assert "divide" in contradictions(checkpoint, replace(units, shard_size=4))
    assert "elements" in contradictions(checkpoint, replace(units, shard_size=3))


def test_no_shard_keeps_the_whole_flat_parameter_on_every_rank() -> None:
    blocks = [replace(one, strategy=Strategy.NO_SHARD) for one in toy(use_orig_params=False).units]
    units = units_of(*blocks, use_orig_params=False)
    played, checkpoint, truth = raw(units, 3)
    require_states(named(checkpoint, units), played, truth)


@pytest.mark.parametrize("use_orig_params", [False, True])
def test_a_unit_that_fsdp_does_not_shard_is_whole_beside_the_flat_parameters_of_others(use_orig_params: bool) -> None:
    """For a NO_SHARD module inside a sharded model, LOCAL_STATE_DICT saves whole parameters."""
    root, *blocks = toy(use_orig_params=use_orig_params).units
    units = units_of(
        root, *(replace(one, strategy=Strategy.NO_SHARD) for one in blocks), use_orig_params=use_orig_params
    )
    played, checkpoint, truth = raw(units, 3, model=True)
    assert checkpoint.model is not None
    params = {key: leaf for key, leaf in checkpoint.model.params.items() if not key.startswith("l.")}
    for one in units.units[1:]:
        for param in one.params:
            weight = truth["weight"][param.name]
            by_rank = dict.fromkeys(range(3), weight)  # the reader cannot tell a whole vector from slices
            params[param.name] = played.slices(by_rank) if weight.ndim == 1 else played.replicas(weight)
    checkpoint.model.params = params
    whole = named(replace(checkpoint, files=played.checkpoint().files), units)
    require_states(whole, played, truth)
    assert whole.model is not None
    for name, weight in truth["weight"].items():
        leaf = whole.model.params[name]
        assert isinstance(leaf, Tensor) and leaf.sharded is not name.startswith("l."), name
        assert leaf.shape == weight.shape
        assert gather(leaf, played.files()).tobytes() == weight.tobytes()
    assert "3 parameters were found in 1 flat parameter" in {
        note.message.removeprefix("model: ") for note in whole.notes
    }
    del params["l.0.a.weight"]
    assert "l.0.a.weight is in the units, not in the model section" in contradictions(checkpoint, units)


def test_a_channels_last_parameter_lies_in_memory_order() -> None:
    conv = Parameter("conv.weight", (5, 3, 4, 2), FLOAT, stride=(24, 1, 6, 3))
    plain = unit("", {"bias": (7,)})
    units = units_of(replace(plain, params=(*plain.params, conv)), use_orig_params=True)
    played, checkpoint, truth = raw(units, 4)
    require_states(named(checkpoint, units), played, truth)


def test_the_alignment_is_that_of_the_mixed_precision_dtype() -> None:
    blocks = [replace(one, param_dtype=DTYPES["bfloat16"]) for one in toy(use_orig_params=True).units]
    units = units_of(*blocks, use_orig_params=True)
    played, checkpoint, truth = raw(units, 3)
    require_states(named(checkpoint, units), played, truth)
    assert "in the units, found" in contradictions(checkpoint, toy(use_orig_params=True))


def test_a_step_of_one_element_is_carried_whole() -> None:
    units = toy(use_orig_params=True)
    played, checkpoint, _ = raw(units, 3)
    assert checkpoint.optim is not None
    for states in checkpoint.optim.state.values():
        holders = states["exp_avg"].chunks.rank.tolist()  # type: ignore[union-attr]
        states["step"] = played.slices({rank: np.full(1, 3, np.float32) for rank in holders})
    found = named(checkpoint, units)
    assert found.optim is not None
    assert {entry["step"].shape for entry in found.optim.state.values()} == {(1,)}  # type: ignore[union-attr]


def test_a_state_without_dimensions_is_that_of_the_ranks_that_hold_the_parameter() -> None:
    units = toy(use_orig_params=True)
    played, checkpoint, _ = raw(units, 16)
    assert checkpoint.optim is not None
    holders = {key: states["exp_avg"].chunks for key, states in checkpoint.optim.state.items()}  # type: ignore[union-attr]
    for states in checkpoint.optim.state.values():
        states["mu"] = played.replicas(np.float32(3).reshape(()))
    found = named(checkpoint, units)
    assert found.optim is not None
    for chunks, name in zip(holders.values(), units.parameters, strict=True):
        mu = found.optim.state[name]["mu"]
        assert isinstance(mu, Tensor) and mu.shape == ()
        assert mu.chunks.rank.tolist() == chunks.rank[chunks.size[:, 0] > 0].tolist()
        assert len(mu.chunks.rank) < 16


def by_name(source: Checkpoint) -> dict[ParamKey, dict[str, Tensor | Value]]:
    assert source.optim is not None
    return source.optim.state


@pytest.mark.parametrize("use_orig_params", [False, True])
def test_a_number_for_each_rank_beside_the_slices_stays_one_number(use_orig_params: bool) -> None:
    units = toy(use_orig_params=use_orig_params)
    played, checkpoint, _ = raw(units, 3)
    for states in by_name(checkpoint).values():
        holders = states["exp_avg"].chunks.rank.tolist()  # type: ignore[union-attr]
        states["updates"] = played.slices({rank: np.full(1, 3, np.float32) for rank in holders})
    found = by_name(named(checkpoint, units))
    assert set(found) == set(units.parameters)
    for name, states in found.items():
        updates = states["updates"]
        assert isinstance(updates, Tensor) and updates.shape == (1,)
        assert not updates.chunks.start.any()
        # A number for a parameter of one element is a slice of it too.
        assert updates.sharded is (use_orig_params and str(name).endswith("scale"))


@pytest.mark.parametrize("use_orig_params", [False, True])
def test_states_of_parameters_outside_every_unit_are_whole_on_every_rank(use_orig_params: bool) -> None:
    outside = (Parameter("bias", (4,), FLOAT), Parameter("table", (2, 3), FLOAT))
    block = unit("l", BLOCK)
    units = units_of(
        block,
        use_orig_params=use_orig_params,
        unmanaged=outside,
        parameters=("bias", "table", *(param.name for param in block.params)),
    )
    played = Played(units, 3)
    truth = {param.name: played.values(param) for param in (*outside, *block.params)}
    moments: dict[str, object] = {**played.moment(truth)}
    moments["bias"] = played.slices(dict.fromkeys(range(3), truth["bias"]))  # as a reader sees a vector of every rank
    moments["table"] = played.replicas(truth["table"])
    order = list(units.optimizer_keys())
    number: dict[str, object] = {key: played.replicas(np.float32(3).reshape(())) for key in order}
    source = played.checkpoint(optim=played.optimizer({"exp_avg": moments, "mu": number}, order))
    found = by_name(named(source, units))
    for param in outside:
        tensor = found[param.name]["exp_avg"]
        assert isinstance(tensor, Tensor)
        assert (tensor.shape, tensor.sharded, not isinstance(tensor.cut, Slices)) == (param.shape, False, True)
        assert not flaws(tensor)
        assert gather(tensor, played.files()).tobytes() == truth[param.name].tobytes()
        mu = found[param.name]["mu"]
        assert isinstance(mu, Tensor) and mu.chunks.rank.tolist() == [0, 1, 2]


def test_a_state_without_dimensions_of_a_parameter_without_elements_is_kept() -> None:
    units = units_of(unit("", {"w": (3, 2), "none": (0, 4)}), use_orig_params=True)
    played = Played(units, 2)
    number: dict[str, object] = {key: played.replicas(np.float32(3).reshape(())) for key in units.parameters}
    found = by_name(named(played.checkpoint(optim=played.optimizer({"mu": number}, list(units.parameters))), units))
    mu = found["none"]["mu"]
    assert isinstance(mu, Tensor) and mu.chunks.rank.tolist() == [0, 1]


@pytest.mark.parametrize("ranks", [[0, 1, 2], [1]])
def test_states_that_fsdp_does_not_cut_are_parts_of_a_model_that_it_shards(ranks: list[int]) -> None:
    """``ranks``: those that have the states."""
    blocks = [replace(one, strategy=Strategy.NO_SHARD) for one in toy(use_orig_params=True).units]
    units = units_of(*blocks, use_orig_params=True)
    played, checkpoint, truth = raw(units, 3)
    for key, states in zip(units.parameters, by_name(checkpoint).values(), strict=True):
        tensor = played.replicas(truth["exp_avg"][key])
        states["exp_avg"] = replace(tensor, chunks=tensor.chunks.take(np.isin(tensor.chunks.rank, ranks)))
    for name, states in by_name(named(checkpoint, units)).items():
        tensor = states["exp_avg"]
        assert isinstance(tensor, Tensor)
        if tensor.shape != (1,) or len(ranks) > 1:
            assert (tensor.sharded, tensor.placement) == (True, "flattened"), name
        assert gather(tensor, played.files()).tobytes() == truth["exp_avg"][str(name)].tobytes()


def test_replicas_of_a_slice_are_sorted_by_rank_wherever_they_lie() -> None:
    blocks = [replace(one, strategy=Strategy.HYBRID_SHARD) for one in toy(use_orig_params=False).units]
    units = units_of(*blocks, use_orig_params=False, shard_size=2)
    played, checkpoint, truth = raw(units, 4)
    for states in by_name(checkpoint).values():
        for item in ("exp_avg", "exp_avg_sq"):
            tensor = states[item]
            assert isinstance(tensor, Tensor)
            chunks = tensor.chunks.take(np.asarray([3, 0, 2, 1]))
            states[item] = replace(tensor, chunks=replace(chunks, file=3 - chunks.file))
    played.data.reverse()
    found = named(checkpoint, units)
    require_states(found, played, truth)
    weight = by_name(found)["h.weight"]["exp_avg"]
    assert isinstance(weight, Tensor)
    rows = [(*start, rank) for start, rank in zip(weight.chunks.start.tolist(), weight.chunks.rank, strict=True)]
    assert rows == sorted(rows) and len(rows) > 2


def test_a_parameter_without_elements_is_a_whole_tensor() -> None:
    units = units_of(unit("", {"w": (3, 2), "none": (0, 4)}), use_orig_params=False)
    played, checkpoint, _ = raw(units, 1, model=True)
    found = named(checkpoint, units)
    assert found.model is not None
    for tensor in (found.model.params["none"], by_name(found)["none"]["exp_avg"]):
        assert isinstance(tensor, Tensor) and tensor.shape == (0, 4)
        assert (tensor.chunks.file.tolist(), tensor.chunks.size.tolist()) == ([0], [[0, 4]])
        assert gather(tensor, played.files()).shape == (0, 4)


def test_parameters_are_in_the_order_of_the_model_although_files_have_inner_units_first() -> None:
    units = toy(use_orig_params=False)
    _, checkpoint, _ = raw(units, 2, model=True)
    assert checkpoint.model is not None
    inner_first = ModelState(dict(reversed(checkpoint.model.params.items())))
    found = named(replace(checkpoint, model=inner_first, optim=None), units)
    assert found.model is not None and list(found.model.params) == ["buf", *units.parameters]


@pytest.mark.parametrize("use_orig_params", [False, True])
def test_param_names_become_those_of_the_parameters(use_orig_params: bool) -> None:
    units = toy(use_orig_params=use_orig_params)
    _, checkpoint, _ = raw(units, 2)
    assert checkpoint.optim is not None and checkpoint.optim.param_groups is not None
    checkpoint.optim = with_setting(
        checkpoint.optim, 0, param_names=[f"_fsdp_wrapped_module.{key}" for key in units.optimizer_keys()]
    )
    found = named(checkpoint, units)
    assert found.optim is not None and found.optim.param_groups is not None
    (group,) = found.optim.param_groups
    assert group["params"] == group["param_names"] == list(units.parameters)


def test_entries_that_a_user_added_to_an_optimizer_keyed_by_name_stay_as_they_are() -> None:
    units = toy(use_orig_params=True)
    played, checkpoint, truth = raw(units, 2)
    states = dict(zip(units.parameters, by_name(checkpoint).values(), strict=True))
    keyed: dict[ParamKey, dict[str, Tensor | Value]] = {"tables": {"kind": "hash"}, **states}
    checkpoint.optim = Optimizer.of(keyed, [{"lr": 0.1, "params": list(units.parameters)}])
    found = named(checkpoint, units)
    require_states(found, played, truth)
    assert by_name(found)["tables"] == {"kind": "hash"}


def test_same_sized_parameters_in_another_order_are_contradicted_by_the_names_of_the_model() -> None:
    """Counts cannot tell: ``e.weight`` and ``h.weight`` have one shape. The model's files beside them can."""
    units = toy(use_orig_params=False)
    played, checkpoint, _ = raw(units, 4)
    whole = {name: played.replicas(played.values(param)) for name, param in units.params().items()}
    checkpoint.model = ModelState(dict(whole))
    assert isinstance(match(checkpoint, units), FlatMatch)
    first = units.units[0].params
    swapped = relisted(
        units, units=(replace(units.units[0], params=(first[1], first[0], *first[2:])), *units.units[1:])
    )
    assert "the order of parameters differs" in contradictions(checkpoint, swapped)


def test_names_in_the_groups_settle_several_groups_and_contradict_others() -> None:
    units = toy(use_orig_params=True)
    played, checkpoint, truth = raw(units, 3)
    assert checkpoint.optim is not None
    names = [f"_fsdp_wrapped_module.{name}" for name in units.parameters]
    groups: list[dict[Key, Value]] = [
        {"lr": 1.0, "params": list(range(4)), "param_names": names[:4]},
        {"lr": 2.0, "params": list(range(4, 11)), "param_names": names[4:]},
    ]
    checkpoint.optim = checkpoint.optim.with_groups(groups)
    require_states(named(checkpoint, units), played, truth)
    checkpoint.optim = with_setting(checkpoint.optim, 0, param_names=[names[1], names[0], *names[2:4]])
    assert "shape" in contradictions(checkpoint, units) or "elements" in contradictions(checkpoint, units)
    keyed_groups = relisted(units, groups=(units.parameters[:4], units.parameters[4:]))
    assert "in param_names" in contradictions(checkpoint, keyed_groups)


SHAPES = st.lists(st.integers(1, 6), min_size=1, max_size=4).map(tuple)


@settings(max_examples=60, deadline=None)
@given(
    shapes=st.lists(st.lists(SHAPES, min_size=1, max_size=4), min_size=1, max_size=3),
    world_size=st.integers(2, 12),
    use_orig_params=st.booleans(),
)
def test_any_tree_of_units_comes_back(
    shapes: list[list[tuple[int, ...]]], world_size: int, use_orig_params: bool
) -> None:
    blocks = [
        unit(f"m.{number}" if number else "", {f"p{index}": shape for index, shape in enumerate(own)})
        for number, own in enumerate(shapes)
    ]
    units = units_of(*blocks, use_orig_params=use_orig_params)
    played, checkpoint, truth = raw(units, world_size, model=True)
    require_states(named(checkpoint, units), played, truth)
