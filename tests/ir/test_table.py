"""The table of parameters: what it makes of a checkpoint, and that a name stands in one cell of it."""

from __future__ import annotations

from typing import cast

import pytest
from hypothesis import given, settings

from fsdpckpt.ir.checkpoint import Checkpoint, ModelState
from fsdpckpt.ir.optimizer import Optimizer, ParamKey
from fsdpckpt.ir.rows import RowKind, undetermined
from fsdpckpt.ir.table import Table, names_of
from fsdpckpt.ir.tensors import Tensor
from fsdpckpt.ir.values import Key, Value
from tests.flat.flat_synthetic import checkpoint, whole
from tests.ir.table_strategy import any_checkpoint


def written(value: object) -> object:
    """``value`` with the order of its dicts, and with lists told from tuples."""
    if isinstance(value, dict):
        return [(key, written(item)) for key, item in value.items()]
    if isinstance(value, (list, tuple)):
        return type(value).__name__, [written(item) for item in value]
    return id(value) if isinstance(value, Tensor) else value


def contents(held: Checkpoint) -> list[object]:
    model, optim = held.model, held.optim
    of_model = None if model is None else [written(model.params), written(model.metadata)]
    of_optim = None if optim is None else [written(part) for part in (optim.state, optim.param_groups, optim.extra)]
    return [of_model, of_optim]


@settings(max_examples=300, deadline=None)
@given(any_checkpoint())
def test_a_checkpoint_that_goes_through_the_table_is_what_it_was(held: Checkpoint) -> None:
    table = Table.of(held)
    assert contents(table.written(held)) == contents(held)
    assert {*names_of(held)} == {*table.names()}


@settings(max_examples=200, deadline=None)
@given(any_checkpoint())
def test_names_that_change_and_change_back_leave_nothing_behind(held: Checkpoint) -> None:
    table = Table.of(held)
    new = {name: f"net.{number}" for number, name in enumerate(table.names())}
    there = table.renamed(new).written(held)
    assert not ({*names_in(there)} & {*new})
    back = Table.of(there).renamed({changed: name for name, changed in new.items()}).written(there)
    assert contents(back)[:1] == contents(held)[:1]
    assert keys(back) == keys(held)


def names_in(held: Checkpoint) -> list[str]:
    """The names in keys and groups."""
    names = [*held.model.params] if held.model is not None else []
    return names + [key for key in keys(held) if isinstance(key, str) and key != "user"]


def keys(held: Checkpoint) -> list[ParamKey]:
    return held.optim.all_keys() if held.optim is not None else []


def trained(groups: list[dict[Key, Value]], state: dict[ParamKey, dict[str, Tensor | Value]]) -> Checkpoint:
    held = checkpoint(1, optim=Optimizer.of(state, groups))
    held.model = ModelState({"w": whole(3), "b": whole(3), "rope": whole(3, sharded=None)})
    return held


def groups_of(held: Checkpoint) -> list[dict[Key, Value]]:
    assert held.optim is not None and held.optim.param_groups is not None
    return held.optim.param_groups


@pytest.mark.parametrize("lead", ["", "module.", "_orig_mod.", "_fsdp_wrapped_module."])
def test_param_names_beside_ids_get_the_new_name_behind_their_own_prefix(lead: str) -> None:
    held = trained([{"params": [0, 1], "param_names": (f"{lead}b", f"{lead}w")}], {0: {}, 1: {}})
    (group,) = groups_of(Table.of(held).renamed({"w": "weight"}).written(held))
    assert group == {"params": [0, 1], "param_names": (f"{lead}b", f"{lead}weight")}


def test_param_names_in_another_order_than_sorted_keys_follow_their_own_parameter() -> None:
    held = trained([{"params": ["b", "w"], "param_names": ["w", "b"]}], {"w": {}, "b": {}})
    table = Table.of(held)
    (group,) = groups_of(table.renamed({"w": "z"}).written(held))
    assert group == {"params": ["b", "z"], "param_names": ["z", "b"]}
    (group,) = groups_of(table.without({0}).written(held))
    assert group == {"params": ["b"], "param_names": ["b"]}


def test_a_name_that_only_the_groups_say_is_a_row_too() -> None:
    held = checkpoint(1, optim=Optimizer.of({}, [{"params": [0], "param_names": ["w"]}]))
    table = Table.of(held)
    assert table.names() == ["w"] and table.rows == (0,)
    (group,) = groups_of(table.renamed({"w": "v"}).written(held))
    assert group["param_names"] == ["v"]


def test_ids_that_nothing_names_are_open_and_keep_their_states() -> None:
    held = trained([{"params": [4, 2]}], {2: {"exp_avg": whole(3)}, 4: {"step": 1}})
    table = Table.of(held)
    assert table.rows == (None, None)
    assert held.optim is not None and held.optim.keys == (4, 2) and held.optim.counted() == {0: 0, 1: 1}


def test_rows_say_what_is_known_of_them() -> None:
    held = trained([{"params": ["w"]}], {"w": {}})
    held.model.params["b"] = whole(3, sharded=False, offset=64)
    table = Table.of(held)
    assert [row.kind for row in table.parameters.rows] == [
        RowKind.PARAMETER,
        RowKind.UNDETERMINED,
        RowKind.UNDETERMINED,
    ]
    assert table.parameters.sharing() == [(0, 2)] and table.parameters.rows[0].shape == (3,)
    assert undetermined(held) == []


def test_an_entry_of_a_user_keeps_its_key_beside_ids_and_is_a_name_beside_names() -> None:
    by_id = trained([{"params": [0]}], {0: {}, "user": {"seen": 1}})
    assert keys(Table.of(by_id).renamed({"user": "mine"}).written(by_id)) == [0, "user"]
    by_name = trained([{"params": ["w"]}], {"w": {}, "user": cast("dict[str, Tensor | Value]", {"seen": 1})})
    assert keys(Table.of(by_name).renamed({"user": "mine"}).written(by_name)) == ["w", "mine"]
