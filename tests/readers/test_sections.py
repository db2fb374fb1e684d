"""Telling model, optimizer and extras apart in every nesting that producers write."""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Callable
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


STATE = {"l.weight": {"step": STEP, "exp_avg": M}, "l.bias": {"step": STEP, "exp_avg": B}, "n.0.w": {"exp_avg": V}}
GROUPS = [
    {"lr": 0.1, "betas": (0.9, 0.95), "fused": None, "params": ["l.weight", "n.0.w"]},
    {"lr": 0.1, "betas": [0.9, 0.95], "fused": None, "params": ["l.bias"]},
]
BY_GROUPS = {"state": STATE, "param_groups": GROUPS}


def flattened(groups: list[dict[str, Any]], state: dict[str, Any]) -> dict[str, Any]:
    flat = {f"state.{param}.{name}": value for param, states in state.items() for name, value in states.items()}
    for group in groups:
        for param in group["params"]:
            flat |= {f"param_groups.{param}.{key}": value for key, value in group.items() if key != "params"}
    return flat


FLAT_OPTIM = {f"optim.{key}": value for key, value in flattened(GROUPS, STATE).items()}
FLAT = {f"model.{key}": value for key, value in MODEL.items()} | FLAT_OPTIM


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


def state_of(state: dict[Any, Any]) -> dict[str, Any]:
    """An optimizer without groups."""
    return {"state": state, "param_groups": None}


def half(state: dict[Any, Any]) -> dict[str, Any]:
    return {"state": state}


HALF = half({"w": {"mine": M}})
GEN_AND_DISC = {"gen": {"model": MODEL}, "disc": {"model": MODEL}}
RNG = {"cpu": tensor(5056), "cuda": [tensor(16)], "numpy": ("MT19937", 1)}
BYTES, CODES = (
    Tensor(DTYPES["uint8"], shape, Chunks.whole(file=0, offset=0, shape=shape)) for shape in [(16,), (4, 4)]
)
RNG_BYTES = {"cpu": BYTES, "cuda.0": BYTES}  # as torch.get_rng_state returns them, under whatever names
UNNAMED = {"state": {0: {0: M}}, "param_groups": [{"params": [0]}]}
NO_STATE = {"state": {}, "param_groups": [{"lr": 0.1, "params": ["l.weight"]}]}
LOSS_WEIGHTS = {"first": tensor(1), "second": tensor(1)}  # of classes, or of the terms of a loss
LIST_OF_N = [{"n": number} for number in range(100)]
EXTRA_STATE = {**MODEL, "l._extra_state": {"amax": [1.0]}}
WITH_DICT = {**MODEL, "version": 3, "l._extra_state": {"weights": {"amax": W}}}
HOOKS = {**MODEL, "hooks": {}}
ODD = {"state": {0: {1: M}}, "param_groups": [{"params": [0]}]}
TWICE = {"state": {0: {"exp_avg": M}, "0": {"exp_avg": V}}, "param_groups": [{"params": [0]}]}
TEXT_IDS = {"state": {"0": {"exp_avg": M}, "10": {"exp_avg": V}}, "param_groups": [{"params": [0, 10]}]}
REPAIRED = {**TEXT_IDS, "state": {0: {"exp_avg": M}, 10: {"exp_avg": V}}}
OWN_NAMES = {"model.embed.weight": W, "lm_head.weight": B}
FLAT_STATE = {"optim.state.w.exp_avg": M}
FLAT_JOINED = {"optim": {"lr": 1, "state.w.exp_avg": M}}
OUTER = {"w": {"exp_avg": M, "inner": BY_ID}}
OF_TWO = {"state": {0: {"exp_avg": M, "weights": {"left.0": M}}}, "param_groups": [{"params": [0]}]}

EXTRA: Any = object()  # the whole root is extra
PRODUCERS: list[tuple[Callable[[Any, Any], Any], Any]] = [  # where they have both, and what is left as extras
    (lambda m, o: {"model": m, "optimizer": o}, {}),
    (lambda m, o: {"model": m, "optim": o, "epoch": 3}, {"epoch": 3}),
    (lambda m, o: {"model_state_dict": m, "optimizer_state_dict": o, "loss": 0.5}, {"loss": 0.5}),
    (lambda m, o: {"state_dict": m, "optimizer_states": [o], "lr_schedulers": []}, {"lr_schedulers": []}),
    (lambda m, o: {"state": {"model": m, "optimizers": {"AdamW": o}, "n": 1}, "rng": []}, {"state": {"n": 1},
                                                                                        "rng": []}),
    (lambda m, o: {"module": m, "nested": {"deep": {"optimizer": o}}}, {}),
    (lambda m, o: {**m, "optimizer": o, "train_state": {"step": STEP}}, {"train_state": {"step": STEP}}),
]  # fmt: skip
SPLITS: dict[str, tuple[Any, Any, Any, Any]] = {  # the root, and its model, optimizer and extras
    **{
        f"producer {number} by {kind}": (root(MODEL, optim), MODEL, optim, extra)
        for number, (root, extra) in enumerate(PRODUCERS)
        for kind, optim in (("name", BY_NAME), ("id", BY_ID))
    },
    # Where they are
    "the root is the model": (MODEL, MODEL, None, {}),
    "the root is the optimizer": (BY_ID, None, BY_ID, {}),
    "a model in a list": ({"a": [*LIST_OF_N, {"model": MODEL}]}, MODEL, None, {"a": LIST_OF_N}),
    "a model under a key called state": ({"state": {"model": MODEL}, "rng": [1]}, MODEL, None, {"rng": [1]}),
    "the outer of two models": ({"model": MODEL, "ema": {"model": MODEL}}, MODEL, None, {"ema": {"model": MODEL}}),
    "names that begin with the word model": (OWN_NAMES, OWN_NAMES, None, {}),
    "and beside an optimizer": ({**OWN_NAMES, "optimizer": BY_NAME}, OWN_NAMES, BY_NAME, {}),
    "a name of its own": ({"student": MODEL, "epoch": 1}, MODEL, None, {"epoch": 1}),
    "the top level, with a value": ({**MODEL, "epoch": 1}, {**MODEL, "epoch": 1}, None, {}),
    "the top level, with a dict": ({**MODEL, "rng": {"cpu": B}}, MODEL, None, {"rng": {"cpu": B}}),
    "a tensor beside the model": ({"model": MODEL, "best": W}, MODEL, None, {"best": W}),
    "no state dict": ({"a": 1, "b": [W, {"c": M}]}, None, None, EXTRA),
    "a list": ([W], None, None, {"": [W]}),
    # What is an optimizer
    "an optimizer without states": ({"optimizer": NO_STATE}, None, NO_STATE, {}),
    "groups alone": ({"optimizer": {"param_groups": NO_STATE["param_groups"]}, "model": MODEL}, MODEL, NO_STATE, {}),
    "a state alone, by its name": ({"optim": HALF}, None, {**HALF, "param_groups": None}, {}),
    "a state alone, by its states": (half({"w": {"exp_avg": M}}), None, state_of({"w": {"exp_avg": M}}), {}),
    "a state alone by neither": (HALF, None, None, EXTRA),
    "a state alone in a table": ({"table": HALF}, None, None, EXTRA),
    "a state alone deep below the name": ({"optim": {"a": {"b": HALF}}}, None, None, EXTRA),
    "a flat state that is no tensor": ({"table": {"state.w": 1}}, None, None, EXTRA),
    "an optimizer in a state of another": ({"optim": half(OUTER)}, None, state_of(OUTER), {}),
    "a state that has no name": ({"model": MODEL, "gen": UNNAMED}, MODEL, None, {"gen": UNNAMED}),
    "names of states that are no text": ({"optimizer": ODD}, None, None, EXTRA),
    "an id as a number and as text": ({"optimizer": TWICE}, None, TWICE, {}),
    "ids that became text": ({"optimizer": TEXT_IDS}, None, REPAIRED, {}),
    # What is a model
    "weights beside the model": (
        {"model": MODEL, "weights": LOSS_WEIGHTS, "optim": BY_ID}, MODEL, BY_ID, {"weights": LOSS_WEIGHTS},
    ),
    "weights alone": ({"weights": MODEL, "epoch": 1}, MODEL, None, {"epoch": 1}),
    "random states": ({"lr_scheduler": {"last_epoch": 1}, "rng": RNG}, None, None, EXTRA),
    "one random state": ({"rng": {"cpu": RNG["cpu"]}}, None, None, EXTRA),
    "tensors of bytes": (RNG_BYTES, None, None, EXTRA),
    "tensors of bytes called a model": ({"model": RNG_BYTES}, None, None, EXTRA),
    "tensors of bytes called rng": ({"rng": RNG_BYTES}, None, None, EXTRA),
    "tensors of bytes beside a value": ({**RNG_BYTES, "epoch": 1}, None, None, EXTRA),
    "bytes with a matrix": ({**RNG_BYTES, "w": W}, {**RNG_BYTES, "w": W}, None, {}),
    "bytes of two dimensions": ({"w": CODES}, {"w": CODES}, None, {}),
    "bytes with other vectors": ({**RNG_BYTES, "w": B}, {**RNG_BYTES, "w": B}, None, {}),
    "bytes beside a model": ({"model": {"w": CODES}, **RNG_BYTES}, {"w": CODES}, None, RNG_BYTES),
    "a value in what is called a model": ({"model": {**MODEL, "version": 3}}, {**MODEL, "version": 3}, None, {}),
    "a dict in what is called a model": ({"model": {**MODEL, "config": {"a": 1}}}, None, None, EXTRA),
    "a value under another name": ({"student": {**MODEL, "version": 3}}, None, None, EXTRA),
    "one tensor under another name": ({"student": {"w": W}}, None, None, EXTRA),
    "an empty dict in a model": ({"model": HOOKS, "optimizer": BY_ID}, HOOKS, BY_ID, {}),
    "an empty dict under another name": ({"student": HOOKS, "optimizer": BY_ID}, HOOKS, BY_ID, {}),
    "an empty dict alone": ({"model": {"hooks": {}}}, None, None, EXTRA),
    "an empty dict beside the model": ({**MODEL, "hooks": {}}, MODEL, None, {"hooks": {}}),
    "what an extra state calls weights": (WITH_DICT, WITH_DICT, None, {}),
    "extra states": ({"model": EXTRA_STATE}, EXTRA_STATE, None, {}),
    "extra states at the top level": ({**EXTRA_STATE, "optimizer": BY_NAME}, EXTRA_STATE, BY_NAME, {}),
    "keys that are not text": ({0: W, "0": B, "l.weight": M}, {"0": B, "l.weight": M}, None, {0: W}),
    "no key that is text": ({0: W, 1: B}, None, None, EXTRA),
    # Several
    "two models": (GEN_AND_DISC, None, None, EXTRA),
    "two models beside a tensor": ({**GEN_AND_DISC, "best": W}, None, None, EXTRA),
    "two names of a model": ({"model": MODEL, "state_dict": MODEL, "weights": LOSS_WEIGHTS}, None, None, EXTRA),
    "a student and a teacher": ({"student": MODEL, "teacher": MODEL}, None, None, EXTRA),
    "two optimizers": (
        {"model": MODEL, "optimizer_states": [BY_ID, BY_ID], "epoch": 1}, MODEL, None,
        {"optimizer_states": [BY_ID, BY_ID], "epoch": 1},
    ),
    "an optimizer with an unnamed state": ({"gen": UNNAMED, "disc": BY_ID}, None, None, EXTRA),
    "no model in one of two optimizers": ({"gen": {"optim": OF_TWO}, "disc": {"optim": OF_TWO}}, None, None, EXTRA),
    "nor without groups": ({"gen": {"optim": half(OF_TWO["state"])}, "disc": {"optim": half(OF_TWO["state"])}},
                           None, None, EXTRA),
    # Flat keys
    "a flattened optimizer": (flattened(GROUPS, STATE), None, BY_GROUPS, {}),
    "a flattened optimizer beside names": ({**MODEL, "optimizer": flattened(GROUPS, STATE)}, MODEL, BY_GROUPS, {}),
    "a flattened optimizer beside a model": ({"model": MODEL, "optim": flattened(GROUPS, STATE)}, MODEL, BY_GROUPS, {}),
    "all flat": (FLAT, MODEL, BY_GROUPS, {}),
    "all flat, with values": (
        {**FLAT, "epoch": 1, "a.b": 2, 3: 4}, MODEL, BY_GROUPS, {"epoch": 1, "a.b": 2, 3: 4},
    ),
    "a flat optimizer": ({"model": MODEL, **FLAT_OPTIM}, MODEL, BY_GROUPS, {}),
    "flat keys after their word": ({"optim": {"lr": 1}, **FLAT_STATE}, None, None, FLAT_JOINED),
    "flat keys before their word": ({**FLAT_STATE, "optim": {"lr": 1}}, None, None, FLAT_JOINED),
    "flat keys that are there twice": (
        {"optim": {"state.w.exp_avg": V}, **FLAT_STATE, "n": 1}, FLAT_STATE, state_of({"w": {"exp_avg": V}}), {"n": 1},
    ),
    **{
        f"modules called {keys[0]}": (model, model, None, {})
        for keys in (
            ("param_groups.w", "param_groups.1._flat_param"),
            ("state.w", "state.0.w"),
            ("state.exp_avg.w", "state.exp_avg", "param_groups.w"),
            ("l.weight", "l.bias", "state.weight"),
            ("l.bias", "l.weight", "state.l.other.exp_avg"),
            ("l.b", "l.weight", "param_groups.l.weight"),
        )
        for model in [dict(zip(keys, (W, B, M), strict=False))]
    },
}  # fmt: skip


@pytest.mark.parametrize("name", SPLITS)
def test_a_tree_is_split_into_model_optimizer_and_extras(name: str) -> None:
    root, model, optim, extra = SPLITS[name]
    check(root, model, optim, root if extra is EXTRA else extra)


NOTED = {  # what is noted of the tree of a row
    "several-models": ("two models", "two models beside a tensor", "two names of a model", "a student and a teacher"),
    "several-optimizers": ("two optimizers", "an optimizer with an unnamed state", "nor without groups"),
    "model-found": ("a name of its own", "the top level, with a dict"),
    "ids-repaired": ("ids that became text",),
    "groups-rebuilt": ("a flattened optimizer beside a model",),
    "": ("the root is the model", "an id as a number and as text", "a state alone, by its name"),
}


@pytest.mark.parametrize("kind", NOTED)
def test_what_was_found_elsewhere_or_not_chosen_is_noted(kind: str) -> None:
    for name in NOTED[kind]:
        assert [note.kind for note in split(SPLITS[name][0]).all_notes()] == ([kind] if kind else []), name


def test_notes_say_where_things_were_found() -> None:
    (note,) = split({**MODEL, "rng": {"cpu": B}}).all_notes()
    assert (note.message, note.key) == ("the model's names are at the top level, beside rng", "l.weight")
    (note,) = split(SPLITS["two optimizers"][0]).all_notes()
    assert "optimizer_states.0" in note.message and "optimizer_states.1" in note.message
    message = "{} is the model; weights, which may be those of a loss, is an extra"
    for name in ("model", "state_dict"):
        notes = split({name: MODEL, "weights": LOSS_WEIGHTS, "optim": BY_ID}).all_notes()
        assert message.format(name) in [note.message for note in notes]
    ordered = split({"a": {"state": {"0": {"exp_avg": M}}, "param_groups": [{"params": [0]}]}})
    assert [note.kind for note in ordered.all_notes()] == ["optimizer-found", "ids-repaired"]


def test_other_entries_of_an_optimizer_stay_with_it() -> None:
    found = check({"optimizer": {**BY_ID, "loss_scaler": {"scale": 2.0}}}, None, BY_ID, {})
    assert found.optim is not None and found.optim.extra == {"loss_scaler": {"scale": 2.0}}


@pytest.mark.parametrize("path", ["opt", "optim", "myOptimizer", "optimizers.AdamW", "a.optimizer"])
def test_a_name_says_that_a_state_alone_is_an_optimizer_and_all_but_the_usual_are_noted(path: str) -> None:
    half: Any = {"state": {"0": {"mine": M}, "w": {"mine": M}}}
    root = half
    for key in reversed(path.split(".")):
        root = {key: root}
    found = check(root, None, {**half, "param_groups": None}, {})
    notes = [] if path == "optim" else [f"the optimizer was found under {path}"]
    assert [note.message for note in found.all_notes()] == notes


def test_ids_of_several_optimizers_are_repaired_and_a_users_own_value_stays() -> None:
    def optimizer(key: int | str) -> dict[str, Any]:
        return {"state": {key: {"exp_avg": M}, "tables": 7.5}, "param_groups": [{"params": [0]}]}

    found = check({"a": optimizer("0"), "b": optimizer(0)}, None, None, {"a": optimizer(0), "b": optimizer(0)})
    assert [note.kind for note in found.all_notes()] == ["several-optimizers", "ids-repaired"]


@pytest.mark.parametrize("before", [0, 1, 9])
def test_sections_in_one_list_leave_the_other_items_where_they_are(before: int) -> None:
    """Texts of numbers have another order than numbers."""
    others = [{"n": number} for number in range(before)]
    left = {"parts": [*others, {}, {}, {"n": -1}]}
    check({"parts": [*others, MODEL, BY_ID, {"n": -1}]}, MODEL, BY_ID, left)
    check({"parts": [*others, BY_ID, MODEL, {"n": -1}]}, MODEL, BY_ID, left)


def test_the_metadata_of_a_state_dict_is_kept() -> None:
    model: OrderedDict[str, Tensor] = OrderedDict(MODEL)
    model._metadata = {"": {"version": 2}}  # type: ignore[attr-defined]
    found = split({"model": model})
    assert found.model is not None and found.model.metadata == {"": {"version": 2}}


@pytest.mark.parametrize("params", [["0", "10"], [0, 1], ["a"], [0, "10"], None])
def test_names_made_of_digits_stay_names_unless_the_groups_list_these_ids(params: list[Any]) -> None:
    plain = {"state": {"0": {"exp_avg": M}, "10": {"exp_avg": V}}, "param_groups": [{"params": params}]}
    assert check({"optimizer": plain}, None, plain, {}).all_notes() == []


def test_settings_in_another_order_are_equal_settings() -> None:
    keys = ["a.lr", "a.eps", "b.eps", "b.lr", "c.lr"]
    found = split({"optimizer": {f"param_groups.{key}": 0.5 for key in keys}})
    assert found.optim is not None
    assert found.optim.param_groups == [{"lr": 0.5, "eps": 0.5, "params": ["a", "b"]}, {"lr": 0.5, "params": ["c"]}]


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
