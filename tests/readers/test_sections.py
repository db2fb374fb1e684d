"""Telling model, optimizer and extras apart in every nesting that producers write."""

from __future__ import annotations

import random
from collections import OrderedDict
from dataclasses import replace
from typing import Any

import pytest

from fsdpckpt.ir.checkpoint import ModelState, NamedSection, Section
from fsdpckpt.ir.dtypes import DTYPES
from fsdpckpt.ir.invariants import state_completeness
from fsdpckpt.ir.optimizer import Optimizer, OwnValue
from fsdpckpt.ir.sections import in_extras, model_dict, optimizer_dict
from fsdpckpt.ir.tensors import Chunks, Tensor
from fsdpckpt.ir.values import leaf_tensors, with_tensors
from fsdpckpt.readers.sections import Sections, split


def tensor(*shape: int) -> Tensor:
    return Tensor(DTYPES["float32"], shape, Chunks.whole(file=0, offset=0, shape=shape))


W, B, M, V, STEP = tensor(4, 3), tensor(4), tensor(4, 3), tensor(4, 3), tensor()
MODEL = {"l.weight": W, "l.bias": B}
BY_NAME = {"state": {"l.weight": {"step": STEP, "exp_avg": M}}, "param_groups": [{"lr": 0.1, "params": ["l.weight"]}]}
BY_ID = {"state": {0: {"step": STEP, "exp_avg": M}}, "param_groups": [{"lr": 0.1, "params": [0, 1]}]}


def outline(value: Any) -> Any:
    """The nesting of ``value`` with the identity of its leaves."""
    if isinstance(value, dict):
        return {key: outline(child) for key, child in value.items()}
    return [outline(child) for child in value] if isinstance(value, list) else id(value)


def check(root: Any, model: Any, optim: Any, extra: Any) -> Sections:
    before = outline(root)
    found = split(root)
    assert (found.model.params if found.model else None) == model
    assert ({"state": found.optim.state, "param_groups": found.optim.param_groups} if found.optim else None) == optim
    assert in_extras(found.extra, found.named, found.frame) == extra
    assert outline(root) == before, "the source's own dict was changed"
    return found


@pytest.mark.parametrize("optim", [BY_NAME, BY_ID])
@pytest.mark.parametrize(
    ("root", "extra"),
    [
        (lambda m, o: {"model": m, "optimizer": o}, {}),
        (lambda m, o: {"model": m, "optim": o, "epoch": 3}, {"epoch": 3}),
        (lambda m, o: {"model_state_dict": m, "optimizer_state_dict": o, "loss": 0.5}, {"loss": 0.5}),
        (lambda m, o: {"state_dict": m, "optimizer_states": [o], "lr_schedulers": []}, {"lr_schedulers": []}),
        (
            lambda m, o: {"state": {"model": m, "optimizers": {"AdamW": o}, "n": 1}, "rng": []},
            {"state": {"n": 1}, "rng": []},
        ),
        (lambda m, o: {"module": m, "nested": {"deep": {"optimizer": o}}}, {}),
        (lambda m, o: {**m, "optimizer": o, "train_state": {"step": STEP}}, {"train_state": {"step": STEP}}),
    ],
)
def test_model_and_optimizer_are_found_in_every_nesting(root: Any, extra: Any, optim: Any) -> None:
    check(root(MODEL, optim), MODEL, optim, extra)


def test_the_root_itself_can_be_either() -> None:
    check(MODEL, MODEL, None, {})
    check(BY_ID, None, BY_ID, {})


def test_other_entries_of_an_optimizer_stay_with_it() -> None:
    found = check({"optimizer": {**BY_ID, "loss_scaler": {"scale": 2.0}}}, None, BY_ID, {})
    assert found.optim is not None and found.optim.extra == {"loss_scaler": {"scale": 2.0}}


def test_an_empty_optimizer_and_one_whose_state_vanished_are_optimizers() -> None:
    groups = [{"lr": 0.1, "params": ["l.weight"]}]
    check({"optimizer": {"state": {}, "param_groups": groups}}, None, {"state": {}, "param_groups": groups}, {})
    check({"optimizer": {"param_groups": groups}, "model": MODEL}, MODEL, {"state": {}, "param_groups": groups}, {})


def test_a_state_without_groups_is_an_optimizer_when_its_name_or_its_states_say_so() -> None:
    check({"optim": {"state": {"w": {"mine": M}}}}, None, {"state": {"w": {"mine": M}}, "param_groups": None}, {})
    check({"state": {"w": {"exp_avg": M}}}, None, {"state": {"w": {"exp_avg": M}}, "param_groups": None}, {})


@pytest.mark.parametrize("path", ["opt", "optim", "myOptimizer", "optimizers.AdamW", "a.optimizer"])
def test_a_name_says_that_a_state_alone_is_an_optimizer_and_all_but_the_usual_are_noted(path: str) -> None:
    half: Any = {"state": {"0": {"mine": M}, "w": {"mine": M}}}
    root = half
    for key in reversed(path.split(".")):
        root = {key: root}
    found = check(root, None, {**half, "param_groups": None}, {})
    notes = [] if path == "optim" else [f"the optimizer was found under {path}"]
    assert [note.message for note in found.all_notes()] == notes


def test_a_state_alone_is_no_optimizer_if_neither_its_name_nor_its_states_say_so() -> None:
    half = {"state": {"w": {"mine": M}}}
    for root in (half, {"table": half}, {"optim": {"a": {"b": half}}}, {"table": {"state.w": 1}}):
        check(root, None, None, root)


def test_the_note_on_where_the_optimizer_was_comes_before_what_was_repaired() -> None:
    found = split({"a": {"state": {"0": {"exp_avg": M}}, "param_groups": [{"params": [0]}]}})
    assert [note.kind for note in found.all_notes()] == ["optimizer-found", "ids-repaired"]


def test_an_optimizer_inside_a_state_of_another_is_a_part_of_that() -> None:
    outer = {"state": {"w": {"exp_avg": M, "inner": BY_ID}}}
    check({"optim": outer}, None, {**outer, "param_groups": None}, {})


def test_a_model_under_a_key_called_state_is_no_optimizer() -> None:
    check({"state": {"model": MODEL}, "rng": [1]}, MODEL, None, {"rng": [1]})


def test_several_optimizers_all_stay_extra_with_a_note() -> None:
    root = {"model": MODEL, "optimizer_states": [BY_ID, BY_ID], "epoch": 1}
    found = check(root, MODEL, None, {"optimizer_states": [BY_ID, BY_ID], "epoch": 1})
    assert [note.kind for note in found.all_notes()] == ["several-optimizers"]
    assert "optimizer_states.0" in found.all_notes()[0].message and "optimizer_states.1" in found.all_notes()[0].message


def test_an_optimizer_with_a_state_that_has_no_name_is_one_of_several() -> None:
    unnamed = {"state": {0: {0: M}}, "param_groups": [{"params": [0]}]}
    found = check({"gen": unnamed, "disc": BY_ID}, None, None, {"gen": unnamed, "disc": BY_ID})
    assert [note.kind for note in found.all_notes()] == ["several-optimizers"]
    check({"model": MODEL, "gen": unnamed}, MODEL, None, {"gen": unnamed})


def test_ids_of_several_optimizers_are_repaired_and_a_users_own_value_stays() -> None:
    def optimizer(key: int | str) -> dict[str, Any]:
        return {"state": {key: {"exp_avg": M}, "tables": 7.5}, "param_groups": [{"params": [0]}]}

    found = check({"a": optimizer("0"), "b": optimizer(0)}, None, None, {"a": optimizer(0), "b": optimizer(0)})
    assert [note.kind for note in found.all_notes()] == ["several-optimizers", "ids-repaired"]


@pytest.mark.parametrize("groups", [{"param_groups": [{"params": [0]}]}, {}])
def test_no_model_is_looked_for_in_one_of_several_optimizers(groups: dict[str, Any]) -> None:
    optimizer = {"state": {0: {"exp_avg": M, "weights": {"left.0": M}}}, **groups}
    root = {"gen": {"optim": optimizer}, "disc": {"optim": optimizer}}
    assert [note.kind for note in check(root, None, None, root).notes] == ["several-optimizers"]


def test_sections_are_looked_for_at_any_depth_and_in_lists_of_any_length() -> None:
    root: Any = {"model": MODEL, "n": 1}
    for _ in range(50):
        root = {"a": root, "n": 1}
    found = split(root)
    assert found.model is not None and found.model_path == (*("a" * 50), "model")
    others = [{"n": number} for number in range(100)]
    check({"a": [*others, {"model": MODEL}]}, MODEL, None, {"a": others})


def test_of_two_models_the_outer_one_is_taken_and_equals_are_not_chosen_between() -> None:
    check({"model": MODEL, "ema": {"model": MODEL}}, MODEL, None, {"ema": {"model": MODEL}})
    found = check(
        {"gen": {"model": MODEL}, "disc": {"model": MODEL}},
        None,
        None,
        {"gen": {"model": MODEL}, "disc": {"model": MODEL}},
    )
    assert [note.kind for note in found.all_notes()] == ["several-models"]


@pytest.mark.parametrize("name", ["model", "state_dict"])
def test_weights_beside_what_is_called_a_model_are_those_of_something_else(name: str) -> None:
    """Of classes, or of the terms of a loss. Alone they are the model."""
    weights = {"first": tensor(1), "second": tensor(1)}
    found = check({name: MODEL, "weights": weights, "optim": BY_ID}, MODEL, BY_ID, {"weights": weights})
    message = f"{name} is the model; weights, which may be those of a loss, is an extra"
    assert message in [note.message for note in found.all_notes()]
    check({"weights": MODEL, "epoch": 1}, MODEL, None, {"epoch": 1})
    root = {"model": MODEL, "state_dict": MODEL, "weights": weights}
    assert [note.kind for note in check(root, None, None, root).notes] == ["several-models"]


def test_tensors_at_the_top_level_decide_nothing_between_two_models() -> None:
    root = {"gen": {"model": MODEL}, "disc": {"model": MODEL}, "best": W}
    assert [note.kind for note in check(root, None, None, root).notes] == ["several-models"]


@pytest.mark.parametrize("before", [0, 1, 9])
def test_sections_in_one_list_leave_the_other_items_where_they_are(before: int) -> None:
    """Texts of numbers have another order than numbers."""
    others = [{"n": number} for number in range(before)]
    left = {"parts": [*others, {}, {}, {"n": -1}]}
    check({"parts": [*others, MODEL, BY_ID, {"n": -1}]}, MODEL, BY_ID, left)
    check({"parts": [*others, BY_ID, MODEL, {"n": -1}]}, MODEL, BY_ID, left)


def test_a_model_under_a_name_of_its_own_is_found_and_noted() -> None:
    found = check({"student": MODEL, "epoch": 1}, MODEL, None, {"epoch": 1})
    assert [note.kind for note in found.all_notes()] == ["model-found"]


def test_random_states_are_no_model() -> None:
    rng = {"cpu": tensor(5056), "cuda": [tensor(16)], "numpy": ("MT19937", 1)}
    check({"lr_scheduler": {"last_epoch": 1}, "rng": rng}, None, None, {"lr_scheduler": {"last_epoch": 1}, "rng": rng})
    check({"rng": {"cpu": rng["cpu"]}}, None, None, {"rng": {"cpu": rng["cpu"]}})


def test_tensors_of_bytes_are_a_model_only_with_others_or_with_dimensions() -> None:
    """As ``torch.get_rng_state`` returns them, under whatever names."""
    state, quantized = (
        Tensor(DTYPES["uint8"], shape, Chunks.whole(file=0, offset=0, shape=shape)) for shape in [(16,), (4, 4)]
    )
    states = {"cpu": state, "cuda.0": state}
    for root in (states, {"model": states}, {"rng": states}, {**states, "epoch": 1}):
        check(root, None, None, root)
    for model in ({**states, "w": W}, {"w": quantized}, {**states, "w": tensor(16)}):
        check(model, model, None, {})
        check({"model": model, **states}, model, None, states)


def test_a_dict_called_a_model_holds_no_other_dicts_and_one_of_another_name_only_tensors() -> None:
    check({"model": {**MODEL, "version": 3}}, {**MODEL, "version": 3}, None, {})
    for root in ({"model": {**MODEL, "config": {"a": 1}}}, {"student": {**MODEL, "version": 3}}, {"student": {"w": W}}):
        check(root, None, None, root)


def test_a_model_with_an_empty_dict_in_it_is_still_the_model() -> None:
    for name in ("model", "student"):
        model = {**MODEL, "hooks": {}}
        check({name: model, "optimizer": BY_ID}, model, BY_ID, {})
    check({"model": {"hooks": {}}}, None, None, {"model": {"hooks": {}}})
    check({**MODEL, "hooks": {}}, MODEL, None, {"hooks": {}})  # beside the model, as it would be with entries


def test_of_several_dicts_that_may_be_the_model_none_is_taken() -> None:
    root = {"student": MODEL, "teacher": MODEL}
    found = check(root, None, None, root)
    assert [note.kind for note in found.all_notes()] == ["several-models"]


def test_a_model_at_the_top_level_is_noted_with_what_is_beside_it() -> None:
    found = check({**MODEL, "rng": {"cpu": B}}, MODEL, None, {"rng": {"cpu": B}})
    assert [(note.kind, note.message, note.key) for note in found.all_notes()] == [
        ("model-found", "the model's names are at the top level, beside rng", "l.weight")
    ]
    check({**MODEL, "epoch": 1}, {**MODEL, "epoch": 1}, None, {})
    check({"model": MODEL, "best": W}, MODEL, None, {"best": W})


def test_what_is_called_a_model_inside_an_extra_state_is_a_part_of_that() -> None:
    model = {**MODEL, "version": 3, "l._extra_state": {"weights": {"amax": W}}}
    check(model, model, None, {})


def test_extra_state_entries_belong_to_the_model() -> None:
    model = {**MODEL, "l._extra_state": {"amax": [1.0]}}
    check({"model": model}, model, None, {})
    check({**model, "optimizer": BY_NAME}, model, BY_NAME, {})


def test_the_metadata_of_a_state_dict_is_kept() -> None:
    model: OrderedDict[str, Tensor] = OrderedDict(MODEL)
    model._metadata = {"": {"version": 2}}  # type: ignore[attr-defined]
    found = split({"model": model})
    assert found.model is not None and found.model.metadata == {"": {"version": 2}}


def test_ids_that_became_strings_are_numbers_again_and_noted() -> None:
    broken = {"state": {"0": {"exp_avg": M}, "10": {"exp_avg": V}}, "param_groups": [{"params": [0, 10]}]}
    found = check({"optimizer": broken}, None, {**broken, "state": {0: {"exp_avg": M}, 10: {"exp_avg": V}}}, {})
    assert [note.kind for note in found.all_notes()] == ["ids-repaired"]


@pytest.mark.parametrize("params", [["0", "10"], [0, 1], ["a"], [0, "10"], None])
def test_names_made_of_digits_stay_names_unless_the_groups_list_these_ids(params: list[Any]) -> None:
    plain = {"state": {"0": {"exp_avg": M}, "10": {"exp_avg": V}}, "param_groups": [{"params": params}]}
    assert check({"optimizer": plain}, None, plain, {}).all_notes() == []


def flattened(groups: list[dict[str, Any]], state: dict[str, Any]) -> dict[str, Any]:
    flat = {f"state.{param}.{name}": value for param, states in state.items() for name, value in states.items()}
    for group in groups:
        for param in group["params"]:
            flat |= {f"param_groups.{param}.{key}": value for key, value in group.items() if key != "params"}
    return flat


STATE = {"l.weight": {"step": STEP, "exp_avg": M}, "l.bias": {"step": STEP, "exp_avg": B}, "n.0.w": {"exp_avg": V}}
GROUPS = [
    {"lr": 0.1, "betas": (0.9, 0.95), "fused": None, "params": ["l.weight", "n.0.w"]},
    {"lr": 0.1, "betas": [0.9, 0.95], "fused": None, "params": ["l.bias"]},
]


@pytest.mark.parametrize(
    "inside", [lambda flat: {**MODEL, "optimizer": flat}, lambda flat: {"model": MODEL, "optim": flat}]
)
def test_flattened_keys_become_states_and_groups_of_equal_hyper_parameters(inside: Any) -> None:
    found = check(inside(flattened(GROUPS, STATE)), MODEL, {"state": STATE, "param_groups": GROUPS}, {})
    assert "groups-rebuilt" in [note.kind for note in found.all_notes()]


def test_settings_in_another_order_are_equal_settings() -> None:
    keys = ["a.lr", "a.eps", "b.eps", "b.lr", "c.lr"]
    found = split({"optimizer": {f"param_groups.{key}": 0.5 for key in keys}})
    assert found.optim is not None
    assert found.optim.param_groups == [{"lr": 0.5, "eps": 0.5, "params": ["a", "b"]}, {"lr": 0.5, "params": ["c"]}]


def test_flattened_keys_at_the_root_are_an_optimizer() -> None:
    check(flattened(GROUPS, STATE), None, {"state": STATE, "param_groups": GROUPS}, {})


@pytest.mark.parametrize(
    "keys",
    [
        ("param_groups.w", "param_groups.1._flat_param"),
        ("state.w", "state.0.w"),
        ("state.exp_avg.w", "state.exp_avg", "param_groups.w"),
    ],
)
def test_a_model_with_modules_named_like_the_parts_of_an_optimizer_is_a_model(keys: tuple[str, ...]) -> None:
    model = dict(zip(keys, (W, B, M), strict=False))
    check(model, model, None, {})


def test_flattened_states_nested_below_a_parameter_keep_their_nesting() -> None:
    flat = flattened(GROUPS[:1], {}) | {"state.l.weight.shampoo.left.0": M, "state.l.weight.step": STEP}
    found = split({"optimizer": flat})
    assert found.optim is not None
    assert found.optim.state == {"l.weight": {"shampoo": {"left": {"0": M}}, "step": STEP}}


@pytest.mark.parametrize("names", [("a", "a.b"), ("a.b", "a"), ("a.b", "a", "a.b.c", "c.d")])
def test_flattened_states_of_which_one_name_begins_with_the_other_all_stay(names: tuple[str, ...]) -> None:
    flat = flattened(GROUPS[:1], {"l.weight": {name: tensor(number) for number, name in enumerate(names)}})
    found = split({"optimizer": flat})
    assert found.optim is not None
    leaves = {path: leaf.shape for path, leaf in leaf_tensors(found.optim.state["l.weight"])}
    assert sorted(leaves.values()) == [(number,) for number in range(len(names))]


def test_flattened_tensor_hyper_parameters_are_equal_only_when_they_lie_in_one_place() -> None:
    first, second = (Tensor(DTYPES["float32"], (), Chunks.whole(file=0, offset=at, shape=())) for at in (64, 128))
    groups = [{"lr": first, "params": ["l.weight"]}, {"lr": second, "params": ["l.bias"]}]
    found = split({"optimizer": flattened(groups, {})})
    assert found.optim is not None
    assert [group["params"] for group in found.optim.param_groups or []] == [["l.weight"], ["l.bias"]]
    groups[1]["lr"] = replace(first)
    found = split({"optimizer": flattened(groups, {})})
    assert [group["params"] for group in found.optim.param_groups or []] == [["l.weight", "l.bias"]]


def test_flat_keys_without_planner_data_are_grouped_by_their_first_word() -> None:
    flat = {f"optim.{key}": value for key, value in flattened(GROUPS, STATE).items()}
    root = {f"model.{key}": value for key, value in MODEL.items()} | flat
    check(root, MODEL, {"state": STATE, "param_groups": GROUPS}, {})
    check(
        {**root, "epoch": 1, "a.b": 2, 3: 4},
        MODEL,
        {"state": STATE, "param_groups": GROUPS},
        {"epoch": 1, "a.b": 2, 3: 4},
    )
    check({"model": MODEL, **flat}, MODEL, {"state": STATE, "param_groups": GROUPS}, {})


def test_a_models_own_names_may_begin_with_the_word_model() -> None:
    model = {"model.embed.weight": W, "lm_head.weight": B}
    check(model, model, None, {})
    check({**model, "optimizer": BY_NAME}, model, BY_NAME, {})


def test_what_is_no_state_dict_at_all_is_extra() -> None:
    check({"a": 1, "b": [W, {"c": M}]}, None, None, {"a": 1, "b": [W, {"c": M}]})
    check([W], None, None, {"": [W]})


def test_a_state_with_names_that_are_no_text_stays_extra() -> None:
    odd = {"state": {0: {1: M}}, "param_groups": [{"params": [0]}]}
    check({"optimizer": odd}, None, None, {"optimizer": odd})


def test_owns_tells_whose_a_path_is() -> None:
    found = split({**MODEL, "optimizer": BY_ID, "rng": {"cpu": B}})
    assert found.owns(("l.weight",)) and found.owns(("optimizer", "param_groups", 0, "lr"))
    assert not found.owns(("rng", "cpu")) and not found.owns(("optimizer_2",))
    found = split({"a": {"model": MODEL}, "rng": {"cpu": B}})
    assert found.owns(("a", "model", "l.weight")) and not found.owns(("a",)) and not found.owns(("rng", "cpu"))
    found = split({"rng": {"cpu": B}})
    assert not found.owns(("rng", "cpu")) and not found.overlaps(("rng", "cpu"))


def test_overlaps_is_true_of_what_contains_a_section_too() -> None:
    found = split({"a": {"model": MODEL, "n": 1}, "b": {"optimizer": BY_ID, "n": 1}})
    for path in [("a",), ("a", "model"), ("a", "model", "l.weight"), ("b",), ("b", "optimizer", "state", 0, "exp_avg")]:
        assert found.overlaps(path), path
    for path in [("a", "n"), ("b", "n"), ("c",), ("model",)]:
        assert not found.overlaps(path), path


def test_a_users_own_value_among_the_states_stays_there_without_being_a_parameters() -> None:
    """TorchRec's keyed optimizers allow it; a value that a group lists is a parameter's, and no dict of states."""
    optimizer = {"state": {0: {"step": 1}, "tables": 7.5}, "param_groups": [{"params": [0]}]}
    found = split({"optimizer": optimizer})
    assert found.optim is not None
    assert found.optim.state == {0: {"step": 1}}
    assert list(found.optim.items()) == [(0, {"step": 1}), ("tables", OwnValue(7.5))]
    assert (found.optim.key_type, list(state_completeness(found.optim))) == ("id", [])
    assert optimizer_dict(found.optim) == optimizer
    for state, params in (
        ({0: 7.5}, []),
        ({0: 7.5, 1: {"step": 1}}, [1]),
        ({"w": 1}, ["w"]),
        ({"w": 1, "v": {"step": 1}}, ["w", "v"]),
        ({"tables": 7.5}, []),
        ({None: {"step": 1}}, []),
        ([{"step": 1}], []),
    ):
        wrong = {"state": state, "param_groups": [{"params": params}]}
        check({"optimizer": wrong}, None, None, {"optimizer": wrong})


def test_tensors_under_keys_that_are_not_text_are_no_parameters() -> None:
    check({0: W, "0": B, "l.weight": M}, {"0": B, "l.weight": M}, None, {0: W})
    check({0: W, 1: B}, None, None, {0: W, 1: B})


def test_flat_keys_beside_a_dict_of_their_first_word_join_a_copy_of_it() -> None:
    flat = {"optim.state.w.exp_avg": M}
    for root in ({"optim": {"lr": 1}, **flat}, {**flat, "optim": {"lr": 1}}):
        check(root, None, None, {"optim": {"lr": 1, "state.w.exp_avg": M}})
    twice = {"optim": {"state.w.exp_avg": V}, **flat, "n": 1}
    check(twice, flat, {"state": {"w": {"exp_avg": V}}, "param_groups": None}, {"n": 1})


def test_an_id_that_is_there_as_a_number_and_as_text_stays_twice() -> None:
    both = {"state": {0: {"exp_avg": M}, "0": {"exp_avg": V}}, "param_groups": [{"params": [0]}]}
    check({"optimizer": both}, None, both, {})


def labels(found: Sections) -> list[str]:
    return [named.label for named in found.named]


def test_several_models_and_optimizers_have_the_names_that_tell_them_apart() -> None:
    root = {
        "actor": {"model": MODEL, "optimizer": BY_ID}, "critic": {"model": MODEL, "optimizer": BY_ID}, "step": 3,
    }  # fmt: skip
    found = check(root, None, None, root)
    assert labels(found) == ["optim:actor", "optim:critic", "model:actor", "model:critic"]
    assert found.extra == {"step": 3}
    assert found.place_of(("actor", "optimizer", "state")) is found.named[0]
    assert found.place_of(("critic", "model", "l.weight")) is found.named[3]
    assert found.place_of(("step",)) is Section.EXTRA


@pytest.mark.parametrize(
    ("optimizers", "expected"),
    [
        ({"optimizer_states": [BY_ID, BY_ID]}, ["optimizer_states.0", "optimizer_states.1"]),
        ({"optimizers": {"muon": BY_NAME, "adamw": BY_NAME}}, ["muon", "adamw"]),
        ({"optimizer_0": BY_ID, "optimizer_1": BY_ID}, ["optimizer_0", "optimizer_1"]),
    ],
)
def test_a_number_alone_is_no_name(optimizers: Any, expected: list[str]) -> None:
    assert labels(split({"model": MODEL, **optimizers})) == [f"optim:{name}" for name in expected]


@pytest.mark.parametrize("members", [2, 65, 300])
def test_all_models_of_an_ensemble_are_sections_however_many(members: int) -> None:
    root = {"models": [MODEL] * members, "optimizers": [BY_ID] * members, "samples": [{"id": 1}] * members}
    found = check(root, None, None, root)
    names = [f"models.{number}" for number in range(members)]
    assert [named.name for named in found.named if named.section is Section.MODEL] == names
    assert sum(named.section is Section.OPTIM for named in found.named) == members


def test_statistics_beside_a_model_are_no_model_and_an_average_of_it_is_one() -> None:
    statistics = {"loss.mean": B, "loss.std": B}
    root = {"model": MODEL, "average": MODEL, "statistics": statistics}
    found = check(root, MODEL, None, {"average": MODEL, "statistics": statistics})
    assert labels(found) == ["model:average"]


def test_a_model_nested_by_module_is_read_whole() -> None:
    """Megatron-LM's old format; the second module has no dot in its names, and alone would be no model."""
    nested = {"encoder": {"0.weight": W, "0.bias": B}, "head": {"weight": W}, "scale": B}
    whole = {"encoder.0.weight": W, "encoder.0.bias": B, "head.weight": W, "scale": B}
    found = check({"model": nested, "optimizer": BY_ID, "n": 1}, whole, BY_ID, {"n": 1})
    assert [note.kind for note in found.all_notes()] == ["model-found"]
    deeper = {"language_model": {"encoder": nested, "embedding": {"weight": W}}}
    expected = {f"language_model.encoder.{name}": leaf for name, leaf in whole.items()}
    check({"model": deeper}, {**expected, "language_model.embedding.weight": W}, None, {})


def test_the_module_versions_of_a_nested_model_are_those_of_the_whole() -> None:
    encoder: OrderedDict[str, Tensor] = OrderedDict({"0.weight": W})
    encoder._metadata = {"": {"version": 1}, "0": {"version": 2}}  # type: ignore[attr-defined]
    found = split({"model": {"encoder": encoder}})
    assert found.model is not None
    assert found.model.metadata == {"encoder": {"version": 1}, "encoder.0": {"version": 2}}


@pytest.mark.parametrize(
    "root",
    [
        {"model": {"generator": MODEL, "critic": MODEL}, "optimizer": {"generator": BY_ID, "critic": BY_ID}},
        {"model": {"state_dict": MODEL, "ema": MODEL}},
        {"model": {"encoder": MODEL, "config": {"layers": 3}}},
        {"model": {"a": {"b.w": W}, "a.b": {"w": W}}},
    ],
)
def test_dicts_in_a_model_that_are_models_themselves_or_none_are_not_joined(root: Any) -> None:
    """With an optimizer each, under a name of models, beside other values, or with a name that two would have."""
    model = split(root).model
    assert model is None or not any(name.startswith(("encoder.", "generator.", "a.")) for name in model.params)


def test_a_flattened_optimizer_beside_the_names_of_its_model_is_the_optimizer() -> None:
    flat = flattened(GROUPS[:1], {"l.weight": STATE["l.weight"]})
    found = split({**MODEL, "n.0.w": V, **flat})
    assert found.optim is not None and list(found.optim.state) == ["l.weight"]
    assert found.optim.param_groups == GROUPS[:1] and found.flattened
    assert found.model is not None and list(found.model.params) == ["l.weight", "l.bias", "n.0.w"]
    assert found.place_of(("state.l.weight.exp_avg",)) is Section.OPTIM
    assert found.place_of(("l.weight",)) is Section.MODEL


@pytest.mark.parametrize("key", ["state.weight", "state.l.other.exp_avg", "param_groups.l.weight"])
def test_a_module_called_state_is_no_optimizer(key: str) -> None:
    check({**MODEL, key: W}, {**MODEL, key: W}, None, {})


def test_what_is_left_of_a_wrapper_keeps_its_place() -> None:
    """Both sections are in dicts that have more: a full target keeps them there, too."""
    root = {"model": {"state_dict": MODEL, "config": 1}, "optimizer": {"inner": BY_ID, "scale": 2.0}}
    found = check(root, MODEL, BY_ID, {"model": {"config": 1}, "optimizer": {"scale": 2.0}})
    assert (found.model_path, found.optim_path) == (("model", "state_dict"), ("optimizer", "inner"))


def random_tree(generator: random.Random, depth: int = 0) -> Any:
    """A state dict of models, optimizers, wrappers around them, settings and random states, in any nesting."""
    pool: list[Any] = [
        dict(MODEL), {**MODEL, "version": 3}, {"encoder": dict(MODEL), "head": {"weight": W}}, {"w": W}, {"scale.a": B},
        BY_ID, BY_NAME, {"inner": BY_ID, "scale": 2.0}, {"state": {"w": {"exp_avg": M}}}, {"state": {}},
        flattened(GROUPS, STATE), 3, None, (1, 2), {}, [], W, {"cpu": tensor(16)},
    ]  # fmt: skip
    names = ["model", "state_dict", "ema", "critic", "optim", "optimizer", "opt_d", "weights", "rng", "state", "n"]
    if depth == 3 or (depth and generator.random() < 0.5):
        return generator.choice(pool)
    count = generator.randint(1, 4)
    if depth and generator.random() < 0.15:
        return [random_tree(generator, depth + 1) for _ in range(count)]
    return {name: random_tree(generator, depth + 1) for name in generator.sample(names, count)}


def test_every_entry_of_a_tree_goes_to_exactly_one_place() -> None:
    """Whatever the nesting: sections and extras have every tensor of the tree once, where ``place_of`` says it is."""
    generator = random.Random(5)
    kinds: set[object] = set()
    for _ in range(400):
        root = with_tensors(random_tree(generator), replace)  # each tensor is an object of its own
        found = split(root)
        places: list[tuple[object, Any]] = [
            (Section.MODEL, found.model), (Section.OPTIM, found.optim), (Section.EXTRA, found.extra),
            *((named, named.content) for named in found.named),
        ]  # fmt: skip
        leaves = [(id(leaf), place) for place, content in places for leaf in leaves_of(content)]
        held, every = dict(leaves), dict(leaf_tensors(root))
        assert len(leaves) == len(held) == len(every), "a tensor is in two places, or in none"
        for path, leaf in every.items():
            assert held[id(leaf)] is found.place_of(path), path
        kinds.update(place.section if isinstance(place, NamedSection) else place for place in held.values())
        kinds.update(type(named.content) for named in found.named)
    assert kinds == {*Section, ModelState, Optimizer}


def leaves_of(content: Any) -> list[Tensor]:
    if isinstance(content, (ModelState, Optimizer)):
        content = model_dict(content) if isinstance(content, ModelState) else optimizer_dict(content)
    return [leaf for _, leaf in leaf_tensors(content)] if content is not None else []


def test_each_of_several_flattened_optimizers_says_that_its_groups_were_rebuilt() -> None:
    root = {
        "model": MODEL,
        "gen_optim": flattened(GROUPS, STATE),
        "disc_optim": {"state": STATE, "param_groups": GROUPS},
    }
    found = split(root)
    rebuilt = {named.name: named.content.rebuilt for named in found.named if isinstance(named.content, Optimizer)}
    assert rebuilt == {"gen_optim": True, "disc_optim": False}


def test_what_is_known_of_an_optimizer_holds_for_what_is_made_of_it() -> None:
    optim = replace(Optimizer.of({"w": {"exp_avg": M}}, [{"params": ["w"]}]), rebuilt=True, doubt="sorted")
    made = [
        optim.with_groups([{"params": ["w"], "lr": 1.0}]),
        optim.with_state({}),
        optim.renamed({"w": "v"}),
        optim.map_tensors(lambda tensor: tensor),
        optim.remade({}, None, {}),
    ]
    assert [(each.rebuilt, each.doubt) for each in made] == [(True, "sorted")] * len(made)
