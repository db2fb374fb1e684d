"""Units against a flattened checkpoint: what is proved, and what is said of everything that does not fit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest

from fsdpckpt.flat.match import FlatMatch, Mismatch, match
from fsdpckpt.flat.units import Settings, build_units
from fsdpckpt.ir.checkpoint import Checkpoint, Container, ModelState
from fsdpckpt.ir.optimizer import Optimizer, ParamKey
from fsdpckpt.ir.placements import OneSlice
from fsdpckpt.ir.tensors import Chunks, Tensor
from fsdpckpt.ir.units import Strategy, Units
from fsdpckpt.ir.values import Value
from tests.flat.flat_synthetic import (
    FLOAT,
    checkpoint,
    local_model,
    named,
    optimizer,
    replicas,
    sharded_model,
    whole,
)
from tests.flat.flat_synthetic import slices as cut

PARAMS = (named("e.weight", 4, 3), named("e.bias", 3), named("l.weight", 5, 2), named("l.bias", 6))
NAMES = tuple(param.name for param in PARAMS)
RANKS = 4


def units(*, orig: bool = False, without: tuple[str, ...] = (), strategy: Strategy = Strategy.FULL_SHARD) -> Units:
    """Two flat parameters: 15 elements and, without ``without``, 16."""
    return build_units(PARAMS, ("", "l"), Settings(orig, strategy), unmanaged=without)


def said(source: Checkpoint, by: Units) -> tuple[str, ...]:
    found = match(source, by)
    return found.contradictions if isinstance(found, Mismatch) else ()


def proved(source: Checkpoint, by: Units) -> FlatMatch:
    found = match(source, by)
    assert isinstance(found, FlatMatch), found
    return found


def local(by: Units, *, by_name: bool = False, **changed: Tensor | Value) -> Checkpoint:
    """A model as ``LOCAL_STATE_DICT`` has it; ``changed`` with dots as two underscores."""
    params = dict(local_model(by, RANKS, by_name=by_name).params)
    return checkpoint(RANKS, model=ModelState({**params, **{k.replace("__", "."): v for k, v in changed.items()}}))


# The ranks.


def test_units_that_were_recorded_on_other_ranks_are_not_those_of_this_checkpoint() -> None:
    recorded = replace(units(), world_size=RANKS)
    proved(local(units()), recorded)
    assert said(local(units()), replace(units(), world_size=6)) == (
        "the units were recorded on 6 ranks, the checkpoint has 4",
    )


def test_sharding_groups_that_do_not_divide_the_ranks_end_the_comparison() -> None:
    assert said(local(units()), replace(units(), shard_size=3)) == ("sharding groups of 3 ranks do not divide 4 ranks",)


# Flat parameters.


def test_wrapped_keys_are_those_of_the_units() -> None:
    params = local_model(units(), RANKS).params
    wrapped = {key.replace("_flat_param", "_fsdp_wrapped_module._flat_param"): leaf for key, leaf in params.items()}
    found = proved(checkpoint(RANKS, model=ModelState(wrapped)), units())
    assert found.proved == ("units check out: 2 of 2 flat parameters match in name and length",)


def test_a_flat_parameter_that_one_side_lacks_is_named() -> None:
    gone = "the checkpoint has no flat parameter l._flat_param"
    params = dict(local_model(units(), RANKS).params)
    assert said(local(units(), l___flat_param=None), units()) == (gone,)
    moved = {"x._flat_param": params.pop("l._flat_param"), **params}
    assert said(checkpoint(RANKS, model=ModelState(moved)), units()) == (
        "the checkpoint has a flat parameter x._flat_param, the units have no such unit",
        gone,
    )


def test_another_length_or_form_is_named() -> None:
    assert said(local(units(), l___flat_param=whole(15)), units()) == (
        "l._flat_param: 16 elements in the units, 15 in the checkpoint",
    )
    assert said(local(units(), l___flat_param=whole(4, 4)), units()) == (
        "l._flat_param: 16 elements in the units, [4, 4] in the checkpoint",
    )


def test_slices_that_begin_elsewhere_are_named_rank_by_rank() -> None:
    lines = said(local(units()), replace(units(), shard_size=2))
    assert len(lines) == 8
    assert lines[0] == "_flat_param: rank 0 holds 0:4, the units have 0:8"
    assert lines[3] == "_flat_param: rank 3 holds 12:15, the units have 8:15"


def test_replicas_and_ranks_without_elements_hold_what_the_units_say() -> None:
    proved(local(units(strategy=Strategy.NO_SHARD)), units(strategy=Strategy.NO_SHARD))
    few = build_units((named("w", 3),), ("",), Settings(use_orig_params=False))
    rows = Chunks.rows(
        ndim=1, rank=[0, 1, 2, 3], file=[0, 1, 2, 3], offset=[0] * 4,
        start=[[0], [1], [2], [0]], size=[[1], [1], [1], [0]],
    )  # fmt: skip
    flat = Tensor(FLOAT, (3,), rows, sharded=True)
    proved(checkpoint(RANKS, model=ModelState({"_flat_param": flat})), few)


def test_the_order_of_flat_parameters_matters_to_ids_alone_and_only_where_it_was_kept() -> None:
    same = tuple(named(f"{layer}.w", 4, 2) for layer in "abc")
    orig = Settings(use_orig_params=True)
    one, other = build_units(same, "abc", orig), build_units([same[0], same[2], same[1]], "abc", orig)
    model = local_model(one, RANKS)
    held = checkpoint(RANKS, model=model, optim=optimizer(one, RANKS))
    assert said(held, other) == ("the order of units differs: c in the units, b in the model section",)
    proved(checkpoint(RANKS, model=model), other)
    proved(replace(held, optim=optimizer(one, RANKS, by="name")), other)
    proved(held.without_order(), other)


# Names beside flat parameters, or instead of them.


def test_slices_by_name_have_the_lengths_of_their_parameters() -> None:
    proved(local(units(orig=True), by_name=True), units(orig=True))
    lines = said(local(units(orig=True), by_name=True, l__bias=cut([0, 0, 5, 1])), units(orig=True))
    assert len(lines) == 1 and lines[0].startswith("model l.bias: ") and lines[0].endswith("found 0, 0, 5, 1")


def test_values_and_buffers_among_them_say_nothing() -> None:
    params = local_model(units(orig=True), RANKS, by_name=True).params
    beside: Mapping[str, Tensor | Value] = {
        "e.bias": "no tensor", "note": None, "mean": cut([2] * RANKS), "count": whole(sharded=False)
    }  # fmt: skip
    proved(checkpoint(RANKS, model=ModelState({**beside, **params, "e.bias": "no tensor"})), units(orig=True))


def test_a_whole_parameter_that_the_units_lack_is_named() -> None:
    for model in (local_model(units(), RANKS), sharded_model(PARAMS)):
        held = checkpoint(RANKS, model=ModelState({**model.params, "x": whole(3, offset=999)}))
        assert said(held, units()) == ("the model has a parameter x, which the units do not have",)
        buffer = ModelState({**model.params, "x": whole(3, offset=999, sharded=False)})
        proved(checkpoint(RANKS, model=buffer), units())


def test_names_of_a_sharded_model_are_held_against_the_units() -> None:
    held = checkpoint(RANKS, model=sharded_model(PARAMS))
    assert proved(held, units()).proved == ("4 names and shapes of the units are those of the model section",)
    wrapped = {f"_orig_mod.{key}": leaf for key, leaf in sharded_model(PARAMS).params.items()}
    proved(replace(held, model=ModelState(wrapped)), units())
    assert said(replace(held, model=sharded_model(PARAMS[:3])), units()) == (
        "l.bias is in the units, not in the model section",
    )
    other = ModelState({**sharded_model(PARAMS).params, "e.weight": whole(3, 4, offset=999)})
    assert said(replace(held, model=other), units()) == ("e.weight: [4, 3] in the units, [3, 4] in the model section",)


def test_a_shared_parameter_has_the_shape_of_the_first_under_its_other_name() -> None:
    shared = replace(units(), shared=(("head", "e.weight"),))
    params = sharded_model(PARAMS).params
    proved(checkpoint(RANKS, model=ModelState({**params, "head": params["e.weight"]})), shared)
    assert said(checkpoint(RANKS, model=ModelState({**params, "head": whole(3, 4, offset=999)})), shared) == (
        "head: [4, 3] in the units, [3, 4] in the model section",
    )


def test_an_empty_model_section_says_nothing() -> None:
    proved(checkpoint(RANKS, model=ModelState({}), optim=optimizer(units(), RANKS)), units())


def test_a_dcp_directory_says_no_order_of_slices() -> None:
    params = (named("w", 8), named("x", 8), named("y", 8), named("z", 8))
    orig = Settings(use_orig_params=True)
    one, other = build_units(params, ("",), orig), build_units([params[1], params[0], *params[2:]], ("",), orig)
    model = local_model(one, 2, by_name=True)
    assert said(checkpoint(2, model=model), other) != ()
    proved(checkpoint(2, model=model, container=Container.DCP), other)


def test_parameters_beside_the_units_are_whole_on_every_rank() -> None:
    outside = units(without=("l.weight", "l.bias"))
    model = dict(local_model(outside, RANKS).params)
    model.update({"l.weight": whole(5, 2, sharded=False), "l.bias": cut([6] * RANKS)})
    proved(checkpoint(RANKS, model=ModelState(model)), outside)
    model.update({"l.weight": whole(2, 5, sharded=False), "l.bias": cut([6, 6, 6, 5])})
    assert said(checkpoint(RANKS, model=ModelState(model)), outside) == (
        "l.weight: [5, 2] in the units, [2, 5] in the model section",
        "l.bias: [6] in the units, [23] in the model section",
    )


# The optimizer.


def raw(held: Units, **changed: object) -> Optimizer:
    return optimizer(held, RANKS, **changed)  # type: ignore[arg-type]


def with_states(optim: Optimizer, key: int | str, **states: Tensor | Value) -> Checkpoint:
    return checkpoint(RANKS, optim=Optimizer.of({**optim.state, key: dict(states)}, optim.param_groups))


def test_groups_that_only_param_names_tell_become_the_units_groups() -> None:
    groups = (("l.weight", "e.bias"), ("e.weight", "l.bias"))
    held = checkpoint(RANKS, optim=raw(units(orig=True), groups=groups, param_names=groups))
    found = proved(held, units(orig=True))
    assert found.units.groups == groups
    assert found.proved == (
        "4 param_names of the groups agree with the units",
        "8 optimizer states have the units' number of elements on every rank",
    )
    recorded = replace(units(orig=True), groups=groups)
    assert proved(held, recorded).units is recorded


def test_an_entry_that_no_group_lists_is_named_if_it_may_be_a_parameter() -> None:
    assert said(with_states(raw(units()), 9, step=whole()), units()) == ("optim 9: no param group lists it",)
    by_name = raw(units(orig=True), by="name")
    proved(with_states(by_name, "user", table=whole(3)), units(orig=True))


def test_ids_without_groups_count_the_units() -> None:
    held = Optimizer.of(raw(units()).state, None)
    proved(checkpoint(RANKS, optim=held), units())
    recorded = replace(units(), groups=(("l._flat_param", "_flat_param"),))
    assert proved(checkpoint(RANKS, optim=held), recorded).keys == {0: "l._flat_param", 1: "_flat_param"}
    beyond = checkpoint(RANKS, optim=Optimizer.of({**held.state, 2: {"step": whole()}}, None))
    assert said(beyond, units()) == ("optim 2: the units have 2 parameters",)


def test_names_that_only_param_names_have_are_named_once() -> None:
    names = (("e.weight", "e.bias", "l.weight", "x"),)
    held = checkpoint(RANKS, optim=raw(units(orig=True), param_names=names))
    assert said(held, units(orig=True)) == ("param_names: x is not among the units' parameters",)


def test_a_slice_of_another_length_is_named_with_its_state() -> None:
    slices = raw(units()).state[0]["exp_avg"]
    held = with_states(raw(units()), 0, step=whole(), exp_avg=slices, exp_avg_sq=cut([4, 4, 4, 5]), note=None)
    assert said(held, units()) == (
        "optim 0 (_flat_param) exp_avg_sq: 4 elements on every rank in the units, found 4, 4, 4, 5",
    )
    square = with_states(raw(units()), 0, exp_avg=whole(4, 4))
    assert said(square, replace(units(), groups=(("_flat_param", "l._flat_param"),))) == (
        "optim 0 (_flat_param) exp_avg: 4 elements on every rank in the units, found shape [4, 4]",
    )


def test_one_number_a_rank_is_a_counter_beside_slices_and_a_contradiction_alone() -> None:
    slices = raw(units()).state[0]["exp_avg"]
    proved(with_states(raw(units()), 0, count=cut([1] * RANKS), exp_avg=slices), units())
    assert len(said(with_states(raw(units()), 0, count=cut([1] * RANKS)), units())) == 1
    two = with_states(raw(units()), 0, count=cut([2] * RANKS), exp_avg=slices)
    assert said(two, units()) == (
        "optim 0 (_flat_param) count: 4 elements on every rank in the units, found 2 (each of 4)",
    )


def test_states_of_parameters_beside_the_units_are_whole() -> None:
    outside = units(without=("l.weight", "l.bias"))
    key = list(outside.optimizer_keys()).index("l.bias")
    proved(checkpoint(RANKS, optim=raw(outside)), outside)
    held = with_states(raw(outside), key, exp_avg=cut([6, 6, 6, 5]))
    assert said(held, outside) == (f"optim {key} (l.bias) exp_avg: [6] in the units, found 6, 6, 6, 5",)
    other = list(outside.optimizer_keys()).index("l.weight")
    rows = with_states(raw(outside), other, exp_avg=cut([5] * RANKS))
    assert said(rows, outside) == (f"optim {other} (l.weight) exp_avg: [5, 2] in the units, found 5 (each of 4)",)
    turned = with_states(raw(outside), other, exp_avg=replicas(RANKS, 2, 5))
    assert said(turned, outside) == (f"optim {other} (l.weight) exp_avg: [5, 2] in the units, found shape [2, 5]",)


def test_an_optimizer_of_whole_tensors_by_name_beside_flat_parameters_is_held_against_their_shapes() -> None:
    state = {name: {"step": whole(), "exp_avg": whole(*param.shape)} for name, param in units().params().items()}
    optim = Optimizer.of({**state, "user": {"x": whole(9, 9)}}, [{"params": list(NAMES)}])
    held = replace(local(units()), optim=optim)
    found = proved(held, units())
    assert found.proved[-1] == "4 optimizer entries have the names and shapes of the units"
    assert not found.flat_optimizer
    turned = Optimizer.of({**optim.state, "e.weight": {"exp_avg": whole(3, 4)}}, optim.param_groups)
    assert said(replace(held, optim=turned), units()) == (
        "optim e.weight: [4, 3] in the units, [3, 4] in the checkpoint",
    )
    factors = Optimizer.of({**optim.state, "e.weight": {"row": whole(4), "own": whole(4, 3)}}, optim.param_groups)
    proved(replace(held, optim=factors), units())


def test_a_whole_state_is_no_slice_where_units_cut() -> None:
    held = with_states(raw(units(orig=True)), 0, exp_avg=replicas(RANKS, 4, 3))
    assert said(held, units(orig=True)) == (
        "optim 0 (e.weight) exp_avg: 4, 4, 4, 0 elements by rank in the units, found shape [4, 3]",
    )


def test_a_parameter_that_nothing_cut_is_whole_under_no_shard() -> None:
    none = units(orig=True, strategy=Strategy.NO_SHARD)
    proved(checkpoint(RANKS, optim=raw(none)), none)
    lines = said(with_states(raw(none), 0, exp_avg=replicas(RANKS, 3, 4)), none)
    assert lines == ("optim 0 (e.weight) exp_avg: 12 (each of 4) elements by rank in the units, found shape [3, 4]",)


def test_an_id_is_not_a_parameter_that_is_called_by_its_number() -> None:
    params = (named("w", 2, 4), named("0", 1, 5))
    one_rank = build_units(params, ("",), Settings(use_orig_params=True, strategy=Strategy.NO_SHARD))
    states = {number: {"exp_avg": replicas(1, *param.shape)} for number, param in enumerate(params)}
    model = ModelState({param.name: replicas(1, *param.shape) for param in params})
    for keys in ([0, 1], ["w", "0"]):
        optim = Optimizer.of(dict(zip(keys, states.values(), strict=True)), [{"params": [*keys]}])
        assert said(checkpoint(1, model=model, optim=optim), one_rank) == ()
    swapped = Optimizer.of({"w": states[1], "0": states[0]}, [{"params": ["w", "0"]}])
    assert len(said(checkpoint(1, model=model, optim=swapped), one_rank)) == 2


@pytest.mark.parametrize(("length", "fits"), [(4, True), (3, False)])
def test_the_one_slice_that_dcp_kept_may_be_any_ranks(length: int, fits: bool) -> None:
    """16 elements of e and l lie 4 a rank; e.bias is one slice of 3 and one of 0."""
    one = replace(whole(length), cut=OneSlice())
    held = with_states(raw(units(orig=True)), 0, exp_avg=one)
    assert (said(held, units(orig=True)) == ()) is fits
    if not fits:
        assert said(held, units(orig=True)) == (
            "optim 0 (e.weight) exp_avg: 4, 4, 4, 0 elements by rank in the units, found a slice of 3",
        )


def test_keys_of_groups_by_name_have_to_be_parameters_and_others_may_be_a_users() -> None:
    named_ = raw(units(orig=True), by="name")
    proved(with_states(named_, "user", x=whole(3)), units(orig=True))
    wrapped = Optimizer.of(
        {f"_fsdp_wrapped_module.{key}": states for key, states in named_.state.items()},
        [{"params": [f"_fsdp_wrapped_module.{key}" for key in NAMES]}],
    )
    found = proved(checkpoint(RANKS, optim=wrapped), units(orig=True))
    assert set(found.keys.values()) == set(NAMES)
    assert found.proved == ("8 optimizer states have the units' number of elements on every rank",)
    assert said(checkpoint(RANKS, optim=named_), units()) == tuple(
        f"optim: the groups list {name}, which the units do not have" for name in NAMES
    )
    listed = Optimizer.of(named_.state, [{"params": [*NAMES, "x"]}])
    assert said(checkpoint(RANKS, optim=listed), units(orig=True)) == (
        "optim: the groups list x, which the units do not have",
    )


def test_groups_of_other_sizes_are_named() -> None:
    keys = ("_flat_param", "l._flat_param")
    recorded = replace(units(), groups=((keys[0],), (keys[1],)))
    assert said(checkpoint(RANKS, optim=raw(units())), recorded) == (
        "the optimizer has 1 param groups, the units have 2",
    )
    one = replace(units(), groups=(keys,))
    held = checkpoint(RANKS, optim=raw(units(), groups=[[keys[0]]]))
    assert said(held, one) == ("param group 0 lists 1 parameter, the units have 2",)
    two = checkpoint(RANKS, optim=raw(units(), groups=[[keys[0]], [keys[1]]]))
    why = "the optimizer has 2 param groups, and the units do not say which parameters are in which"
    assert match(two, units()) == Mismatch((why,), uncompared=2)
    bare = Optimizer.of(raw(units()).state, [{"params": [0, 1]}, {"lr": 0.1}])
    assert said(checkpoint(RANKS, optim=bare), units()) == (why,)
    proved(checkpoint(RANKS, optim=bare), replace(units(), groups=(keys, ())))


def test_a_group_may_leave_out_what_is_frozen_and_nothing_else() -> None:
    still = [replace(one, requires_grad=False) for one in PARAMS[2:]]
    frozen = build_units([*PARAMS[:2], *still], ("", "l"), Settings(use_orig_params=False))
    proved(checkpoint(RANKS, optim=raw(frozen, groups=[["_flat_param"]])), frozen)
    proved(checkpoint(RANKS, optim=raw(frozen)), frozen)
    names = build_units(
        [*PARAMS[:3], replace(PARAMS[3], requires_grad=False)], ("", "l"), Settings(use_orig_params=True)
    )
    proved(checkpoint(RANKS, optim=raw(names, groups=[NAMES[:3]])), names)


def test_param_names_that_contradict_the_units_are_named_with_both() -> None:
    recorded = replace(units(orig=True), groups=(NAMES,))
    names = [NAMES[1], NAMES[0], *NAMES[2:]]
    held = checkpoint(RANKS, optim=raw(units(orig=True), param_names=[names]))
    assert said(held, recorded) == (
        "optim 0 is e.bias in param_names, e.weight in the units",
        "optim 1 is e.weight in param_names, e.bias in the units",
    )


def test_param_names_are_compared_without_the_wrappers() -> None:
    """``named_parameters()`` of a wrapped model has them."""
    names = [[f"_fsdp_wrapped_module.{name}" for name in NAMES]]
    held = checkpoint(RANKS, optim=raw(units(orig=True), param_names=names))
    assert proved(held, units(orig=True)).units.groups == (NAMES,)
    proved(held, replace(units(orig=True), groups=(NAMES,)))
    recorded = replace(units(orig=True), groups=((NAMES[1], NAMES[0], *NAMES[2:]),))
    assert said(held, recorded)[:2] == (
        "optim 0 is e.weight in param_names, e.bias in the units",
        "optim 1 is e.bias in param_names, e.weight in the units",
    )
    alien = checkpoint(RANKS, optim=raw(units(orig=True), param_names=[[*names[0][:3], "_fsdp_wrapped_module.x"]]))
    assert "param_names: x is not among the units' parameters" in said(alien, recorded)


def test_what_was_not_compared_is_not_said_to_be_proved() -> None:
    assert proved(checkpoint(RANKS, optim=raw(units())), units()).proved == (
        "4 optimizer states have the units' number of elements on every rank",
    )
    nothing = Optimizer.of({}, [{"params": [0, 1]}])
    assert proved(checkpoint(RANKS, optim=nothing), units()).proved == ()


def test_whole_states_by_wrapped_name_are_those_of_the_parameter() -> None:
    state: dict[ParamKey, dict[str, Tensor | Value]] = {
        "_orig_mod.e.weight": {"step": whole(), "mode": "fast", "exp_avg": whole(4, 3)}, "e.bias": {"step": whole()}
    }  # fmt: skip
    found = proved(replace(local(units()), optim=Optimizer.of(state, None)), units())
    assert found.keys == {"_orig_mod.e.weight": "e.weight", "e.bias": "e.bias"}
    users = Optimizer.of({"user": {"x": whole(9, 9)}}, None)
    assert len(proved(replace(local(units()), optim=users), units()).proved) == 1
