"""Which sources of an order count, in which order, and what each is called."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from fsdpckpt.errors import NeedsInformationError
from fsdpckpt.flat.units import Settings, build_units
from fsdpckpt.ir.checkpoint import Checkpoint, Container, Layout, OptimState, ParamKey
from fsdpckpt.ir.tensors import Tensor
from fsdpckpt.ir.units import Units
from fsdpckpt.ir.values import Key, Value
from fsdpckpt.transform.parameter_order import parameter_orders
from fsdpckpt.transform.rekey import apply_key_type
from tests.flat.flat_synthetic import checkpoint, named, sharded_model, whole

PARAMS = (named("w", 5, 3), named("b", 5), named("v", 2, 5))
NAMES = tuple(param.name for param in PARAMS)
UNITS = build_units(PARAMS, ("",), Settings(use_orig_params=True))


def full(keys: Sequence[ParamKey] = (0, 1, 2), *, model: bool = False, **group: Value) -> Checkpoint:
    state: dict[ParamKey, dict[str, Tensor | Value]] = {
        key: {"exp_avg": whole(*param.shape)} for key, param in zip(keys, PARAMS, strict=True)
    }
    optim = OptimState(state, [{"lr": 0.1, "params": list(keys), **group}])
    return checkpoint(1, model=sharded_model(PARAMS) if model else None, optim=optim, layout=Layout.FULL)


def sources_of(held: Checkpoint, **given: object) -> list[str]:
    known: dict[str, object] = {"units": None, "reference": None, "parameters": None}
    return [order.source for order in parameter_orders(held, **{**known, **given})]  # type: ignore[arg-type]


def rekeyed(held: Checkpoint, key_type: object, units: Units | None = UNITS) -> Checkpoint:
    return apply_key_type(held, key_type, units=units, reference=None, parameters=None)  # type: ignore[arg-type]


def test_what_was_made_to_say_the_order_comes_first_and_the_model_last() -> None:
    held = full(model=True, param_names=list(NAMES))
    reference = replace(full(model=True), source="other")
    assert sources_of(held, units=UNITS, parameters=NAMES, reference=reference) == [
        "the units", "param_names in the groups", "--parameters", "the reference other",
        "the checkpoint's own model section",
    ]  # fmt: skip


def test_a_reference_that_keeps_no_order_comes_behind_what_does() -> None:
    reference = replace(full(model=True), source="other", container=Container.SAFETENSORS)
    assert sources_of(full(model=True), reference=reference) == [
        "the checkpoint's own model section", "the reference other"
    ]  # fmt: skip


def test_units_beside_the_checkpoint_are_called_by_their_file_and_count_where_none_are_given() -> None:
    beside = replace(full(), units=UNITS, units_from="SRC/units.json")
    assert sources_of(beside) == ["the units of SRC/units.json"]
    assert sources_of(beside, units=UNITS) == ["the units of SRC/units.json"]
    assert sources_of(beside, units=replace(UNITS, shared=())) == ["the units"]
    assert sources_of(replace(beside, units_from="")) == ["the units"]
    assert sources_of(full()) == []


def test_names_lose_module_unless_the_checkpoint_itself_uses_it() -> None:
    wrapped = [f"module.{name}" for name in NAMES]

    def names(held: Checkpoint) -> tuple[str, ...]:
        return parameter_orders(held, units=None, reference=None, parameters=wrapped)[0].names

    assert names(full()) == NAMES
    assert names(full(NAMES)) == NAMES
    assert names(full(wrapped)) == tuple(wrapped)
    assert names(replace(full(), optim=None)) == NAMES
    ddp = sharded_model([replace(param, name=f"module.{param.name}") for param in PARAMS])
    assert names(replace(full(), model=ddp)) == tuple(wrapped)


def test_keys_that_are_right_already_or_absent_stay_as_they_are() -> None:
    for held, key_type in (
        (full(), "id"), (full(NAMES), "name"), (full(), None), (full(NAMES), None),
        (checkpoint(1, layout=Layout.FULL), "id"),
        (checkpoint(1, optim=OptimState({}, []), layout=Layout.FULL), "id"),
        (checkpoint(1, optim=OptimState({}, None), layout=Layout.FULL), "name"),
    ):  # fmt: skip
        assert rekeyed(held, key_type, units=None) is held


def test_each_direction_uses_the_first_source() -> None:
    by_name = rekeyed(full(), "name")
    assert by_name.optim is not None and tuple(by_name.optim.state) == NAMES
    by_id = rekeyed(by_name, "id")
    assert by_id.optim is not None and tuple(by_id.optim.state) == (0, 1, 2)


@pytest.mark.parametrize(
    ("held", "key_type", "message"),
    [(full(), "name", "optimizer id is"), (full(NAMES), "id", "optimizer name's id is")],
)
def test_without_any_source_the_question_is_asked_in_the_direction_that_was_wanted(
    held: Checkpoint, key_type: str, message: str
) -> None:
    with pytest.raises(NeedsInformationError) as caught:
        rekeyed(held, key_type, units=None)
    assert caught.value.what.endswith(message)


@pytest.mark.parametrize("named_by", ["keys", "param_names", "parameters", "reference"])
def test_a_parameter_without_dimensions_that_something_names_is_one(named_by: str) -> None:
    params = (*PARAMS, named("temperature"))
    names = [param.name for param in params]
    state: dict[ParamKey, dict[str, Tensor | Value]] = {
        name if named_by in ("keys", "reference") else index: {"exp_avg": whole(*params[index].shape)}
        for index, name in enumerate(names)
    }
    group: dict[Key, Value] = {"lr": 0.1, "params": list(state)}
    if named_by == "param_names":
        group["param_names"] = list(names)
    model = sharded_model(params)
    held = checkpoint(1, model=None if named_by == "reference" else model, optim=OptimState(state, [group]))
    found = apply_key_type(
        held,
        "id" if named_by in ("keys", "reference") else "name",
        units=None,
        reference=checkpoint(1, model=model) if named_by == "reference" else None,
        parameters=names if named_by == "parameters" else None,
    )
    assert found.optim is not None
    assert list(found.optim.state) == ([0, 1, 2, 3] if named_by in ("keys", "reference") else names)
