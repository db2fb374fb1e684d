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


def in_strategy(units: Units, strategy: Strategy, **more: object) -> Units:
    blocks = [replace(one, strategy=strategy) for one in units.units]
    return units_of(*blocks, use_orig_params=units.use_orig_params, **more)


CONV = Parameter("conv.weight", (5, 3, 4, 2), FLOAT, stride=(24, 1, 6, 3))
FLAT, ORIG = toy(use_orig_params=False), toy(use_orig_params=True)
JOBS = {
    **{f"{ranks} ranks, {units.use_orig_params}": (units, ranks)
       for ranks in (2, 3, 4, 7, 16, 300) for units in (FLAT, ORIG)},
    "hybrid": (in_strategy(FLAT, Strategy.HYBRID_SHARD, shard_size=2), 6),
    "hybrid, original parameters": (in_strategy(ORIG, Strategy.HYBRID_SHARD, shard_size=2), 6),
    "not sharded": (in_strategy(FLAT, Strategy.NO_SHARD), 3),
    "a parameter in memory order": (units_of(
        replace(unit("", {"bias": (7,)}), params=(Parameter("bias", (7,), FLOAT), CONV)), use_orig_params=True), 4),
    "aligned for mixed precision": (units_of(
        *(replace(one, param_dtype=DTYPES["bfloat16"]) for one in ORIG.units), use_orig_params=True), 3),
}  # fmt: skip


@pytest.mark.parametrize("job", JOBS)
def test_the_states_of_every_parameter_are_found_in_the_slices(job: str) -> None:
    units, world_size = JOBS[job]
    played, checkpoint, truth = raw(units, world_size)
    found = named(checkpoint, units)
    require_states(found, played, truth)
    assert found.optim is not None and checkpoint.optim is not None
    assert found.optim.param_groups == [{"lr": 0.1, "params": list(units.parameters)}]
    assert found.optim.key_type == "name"
    count, entries = len(units.parameters), len(checkpoint.optim.state)
    assert [note.message for note in found.notes] == [f"optimizer: states of {count} parameters, from {entries} keys"]
    steps = [states["step"] for states in found.optim.state.values()]
    assert {states["kind"] for states in found.optim.state.values()} == {"dense"}
    assert len(set(map(id, steps))) == count, "one tensor of many parameters counts as tied"


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
    inner_first = ModelState(dict(reversed(checkpoint.model.params.items())))
    found = named(replace(checkpoint, model=inner_first, optim=None), units)
    assert found.model is not None
    assert [name for name in found.model.params if name in units.parameters] == list(units.parameters)


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
    mismatch = match(checkpoint, units)
    assert isinstance(mismatch, Mismatch)
    assert "l.0.a.weight is in the units, not in the model section" in mismatch.contradictions


def by_name(source: Checkpoint) -> dict[ParamKey, dict[str, Tensor | Value]]:
    assert source.optim is not None
    return source.optim.state


@pytest.mark.parametrize("units", [FLAT, ORIG], ids=["flat", "orig"])
def test_numbers_beside_the_slices_stay_numbers(units: Units) -> None:
    """One for each rank that holds elements, and one without dimensions on all ranks, also of those that hold none."""
    played, checkpoint, _ = raw(units, 16)
    holders = {key: states["exp_avg"].chunks for key, states in by_name(checkpoint).items()}  # type: ignore[union-attr]
    for key, states in by_name(checkpoint).items():
        ranks = holders[key].rank.tolist()
        states |= {name: played.slices({rank: np.full(1, 3, np.float32) for rank in ranks}) for name in ("step", "own")}
        states["mu"] = played.replicas(np.float32(3).reshape(()))
    found = by_name(named(checkpoint, units))
    assert set(found) == set(units.parameters)
    for number, (name, states) in enumerate(found.items()):
        step, own, mu = (states[key] for key in ("step", "own", "mu"))
        assert isinstance(step, Tensor) and isinstance(own, Tensor) and isinstance(mu, Tensor)
        assert (step.shape, own.shape, mu.shape) == ((1,), (1,), ())
        assert not own.chunks.start.any()
        # A number for a parameter of one element is a slice of it too.
        assert own.sharded is (units is ORIG and str(name).endswith("scale"))
        if units is ORIG:
            chunks = holders[number]
            assert mu.chunks.rank.tolist() == chunks.rank[chunks.size[:, 0] > 0].tolist()
            assert len(mu.chunks.rank) < 16


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


@pytest.mark.parametrize("ranks", [[0, 1, 2], [1]])
def test_states_that_fsdp_does_not_cut_are_parts_of_a_model_that_it_shards(ranks: list[int]) -> None:
    """``ranks``: those that have the states."""
    units = in_strategy(ORIG, Strategy.NO_SHARD)
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
    units = in_strategy(FLAT, Strategy.HYBRID_SHARD, shard_size=2)
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


def test_a_parameter_without_elements_is_a_whole_tensor_and_keeps_its_numbers() -> None:
    shapes = {"w": (3, 2), "none": (0, 4)}
    units = units_of(unit("", shapes), use_orig_params=False)
    played, checkpoint, _ = raw(units, 1, model=True)
    found = named(checkpoint, units)
    assert found.model is not None
    for tensor in (found.model.params["none"], by_name(found)["none"]["exp_avg"]):
        assert isinstance(tensor, Tensor) and tensor.shape == (0, 4)
        assert (tensor.chunks.file.tolist(), tensor.chunks.size.tolist()) == ([0], [[0, 4]])
        assert gather(tensor, played.files()).shape == (0, 4)
    units = units_of(unit("", shapes), use_orig_params=True)
    played = Played(units, 2)
    number: dict[str, object] = {key: played.replicas(np.float32(3).reshape(())) for key in units.parameters}
    held = by_name(named(played.checkpoint(optim=played.optimizer({"mu": number}, list(units.parameters))), units))
    mu = held["none"]["mu"]
    assert isinstance(mu, Tensor) and mu.chunks.rank.tolist() == [0, 1]


@pytest.mark.parametrize("units", [FLAT, ORIG], ids=["flat", "orig"])
def test_groups_list_the_parameters_and_param_names_become_their_names(units: Units) -> None:
    played, checkpoint, truth = raw(units, 2)
    assert checkpoint.optim is not None
    keys, root = units.optimizer_keys(), len(units.units[0].params)
    first = root if units is ORIG else 1
    ids = [list(range(first)), list(range(first, len(keys)))]
    groups: list[dict[Key, Value]] = [
        {"lr": 1.0, "params": of_group, "param_names": [f"_fsdp_wrapped_module.{keys[number]}" for number in of_group]}
        for of_group in ids
    ]
    checkpoint.optim = checkpoint.optim.with_groups(groups)
    found = named(checkpoint, units)
    require_states(found, played, truth)
    assert found.optim is not None and found.optim.param_groups is not None
    for group, names in zip(found.optim.param_groups, (units.parameters[:root], units.parameters[root:]), strict=True):
        assert group["params"] == group["param_names"] == list(names)


def test_entries_that_a_user_added_to_an_optimizer_keyed_by_name_stay_as_they_are() -> None:
    units = toy(use_orig_params=True)
    played, checkpoint, truth = raw(units, 2)
    states = dict(zip(units.parameters, by_name(checkpoint).values(), strict=True))
    keyed: dict[ParamKey, dict[str, Tensor | Value]] = {"tables": {"kind": "hash"}, **states}
    checkpoint.optim = Optimizer.of(keyed, [{"lr": 0.1, "params": list(units.parameters)}])
    found = named(checkpoint, units)
    require_states(found, played, truth)
    assert by_name(found)["tables"] == {"kind": "hash"}


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
