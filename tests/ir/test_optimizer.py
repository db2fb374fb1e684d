"""How an optimizer is keyed, and what becomes of it under new keys."""

from __future__ import annotations

import pytest

from fsdpckpt.ir.checkpoint import KeyType
from fsdpckpt.ir.optimizer import Optimizer, OwnValue, ParamKey, StatesOrValue
from fsdpckpt.ir.values import Key, Value


@pytest.mark.parametrize(
    ("state", "groups", "key_type"),
    [
        ({}, [{"params": [0, 1]}], "id"),
        ({0: {}}, None, "id"),
        ({0: {}, "custom": {}}, [{"params": [0]}], "id"),  # a user's own entry
        ({0: {}, "custom": OwnValue(1)}, None, "id"),
        ({0: {}, "w": {}}, None, "name"),
        ({"w": {}}, [{"params": []}], "name"),
        ({}, [{"params": ["w"]}], "name"),
        ({}, [{"params": []}], None),
        ({}, None, None),
        ({"custom": OwnValue(1)}, None, None),
    ],
)
def test_the_groups_decide_how_an_optimizer_is_keyed_and_without_them_its_states(
    state: dict[ParamKey, StatesOrValue], groups: list[dict[Key, Value]] | None, key_type: KeyType | None
) -> None:
    assert Optimizer.of(state, groups).key_type == key_type


@pytest.mark.parametrize("sequence", [list, tuple])
def test_a_parameter_without_a_new_key_leaves_state_groups_and_param_names(sequence: type) -> None:
    groups: list[dict[Key, Value]] = [
        {"params": sequence(["a", "b"]), "param_names": sequence(["m.a", "m.b"])},
        {"lr": 1.0},
    ]
    optim = Optimizer.of({"a": {"step": 1}, "b": {"step": 2}}, groups, {"note": 3})
    renamed = optim.renamed({"b": "c"})
    assert renamed.state == {"c": {"step": 2}}
    assert renamed.param_groups == [{"params": sequence(["c"]), "param_names": sequence(["m.b"])}, {"lr": 1.0}]
    assert renamed.extra == {"note": 3}


def test_the_orders_of_single_ranks_follow_their_members() -> None:
    states: dict[ParamKey, dict[str, Value]] = {number: {"step": 1} for number in range(4)}
    optim = Optimizer.of(states, [{"params": [2, 0]}, {"params": [1, 3]}])
    ordered = optim.with_orders({1: [[0, 2], [3]], 5: [[0, 2], [3]], 2: [[2], [1, 3]]})
    assert [order.ranks for order in ordered.orders] == [(1, 5), (2,)]

    def listed(optim: Optimizer) -> list[list[list[ParamKey]]]:
        return [[[optim.keys[member] for member in group] for group in order.groups] for order in optim.orders]

    assert listed(ordered) == [[[0, 2], [3]], [[2], [1, 3]]]
    named = ordered.renamed({0: "a", 1: "b", 3: "d"})
    assert listed(named) == [[["a"], ["d"]], [[], ["b", "d"]]]
    again = named.with_state({key: {"step": 2} for key in reversed(named.keys)})
    assert listed(again) == listed(named)


def test_a_users_value_keeps_its_place_among_the_states_whatever_becomes_of_them() -> None:
    """It is no states of a parameter: what changes states does not see it, what writes them does."""
    entries: dict[ParamKey, StatesOrValue] = {
        "first": OwnValue(None), "a": {"step": 1}, "tables": OwnValue([7.5]), "b": {"step": 2}, "last": OwnValue(3),
    }  # fmt: skip
    found = Optimizer.of(entries, [{"params": ["a", "b"]}])
    assert found.keys == ("a", "b") and found.state == {"a": {"step": 1}, "b": {"step": 2}}
    assert found.stored_state() == {"first": None, "a": {"step": 1}, "tables": [7.5], "b": {"step": 2}, "last": 3}
    less = found.with_state({"b": {"step": 5}, "c": {}})
    assert list(less.stored_state().items()) == [
        ("first", None), ("tables", [7.5]), ("b", {"step": 5}), ("last", 3), ("c", {}),
    ]  # fmt: skip
    renamed = found.renamed({"a": 0, "b": 1, "first": "first", "tables": "tables"})  # without the last one
    assert list(renamed.stored_state()) == ["first", 0, "tables", 1]
    assert list(found.with_groups([{"params": ["b"]}]).stored_state()) == list(entries)


def test_a_state_without_a_name_is_a_state() -> None:
    states: dict[str, Value] = {"": 7.5}
    found = Optimizer.of({0: states}, [{"params": [0]}])
    assert found.state == {0: states} and found.stored_state() == {0: states}
