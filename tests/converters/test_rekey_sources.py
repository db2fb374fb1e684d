"""Which sources of an order count, in which order, what each is called, and what they contradict."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from fsdpckpt.errors import NeedsInformationError, SourceCorruptError
from fsdpckpt.flags import Message
from fsdpckpt.flat.units import Settings, build_units
from fsdpckpt.ir.checkpoint import Checkpoint, Container, Layout
from fsdpckpt.ir.optimizer import Optimizer, ParamKey
from fsdpckpt.ir.tensors import Tensor
from fsdpckpt.ir.units import Units
from fsdpckpt.ir.values import Key, Value
from fsdpckpt.transform.rekey import apply_key_type
from fsdpckpt.transform.stated_orders import parameter_orders
from tests.flat.flat_synthetic import checkpoint, named, sharded_model, whole
from tests.ir.checkpoints import with_origin

PARAMS = (named("w", 5, 3), named("b", 5), named("v", 2, 5))
NAMES = tuple(param.name for param in PARAMS)
UNITS = build_units(PARAMS, ("",), Settings(use_orig_params=True))


def full(keys: Sequence[ParamKey] = (0, 1, 2), *, model: bool = False, **group: Value) -> Checkpoint:
    state: dict[ParamKey, dict[str, Tensor | Value]] = {
        key: {"exp_avg": whole(*param.shape)} for key, param in zip(keys, PARAMS, strict=True)
    }
    optim = Optimizer.of(state, [{"lr": 0.1, "params": list(keys), **group}])
    return checkpoint(1, model=sharded_model(PARAMS) if model else None, optim=optim, layout=Layout.FULL)


def sources_of(held: Checkpoint, **given: object) -> list[str]:
    known: dict[str, object] = {"units": None, "reference": None, "parameters": None}
    return [str(Message(order.source)) for order in parameter_orders(held, **{**known, **given})]  # type: ignore[arg-type]


def rekeyed(held: Checkpoint, key_type: object, units: Units | None = UNITS) -> Checkpoint:
    return apply_key_type(held, key_type, units=units, reference=None, parameters=None)  # type: ignore[arg-type]


def test_what_was_made_to_say_the_order_comes_first_and_the_model_last() -> None:
    held = full(model=True, param_names=list(NAMES))
    reference = with_origin(full(model=True), source="other")
    assert sources_of(held, units=UNITS, parameters=NAMES, reference=reference) == [
        "the units", "param_names in the groups", "--parameters", "the reference other",
        "the checkpoint's own model section",
    ]  # fmt: skip


def test_a_reference_that_keeps_no_order_comes_behind_what_does() -> None:
    reference = with_origin(full(model=True), source="other", container=Container.SAFETENSORS)
    assert sources_of(full(model=True), reference=reference) == [
        "the checkpoint's own model section", "the reference other"
    ]  # fmt: skip


def test_units_beside_the_checkpoint_are_called_by_their_file_and_count_where_none_are_given() -> None:
    beside = with_origin(replace(full(), units=UNITS), units_from="SRC/units.json")
    assert sources_of(beside) == ["the units of SRC/units.json"]
    assert sources_of(beside, units=UNITS) == ["the units of SRC/units.json"]
    assert sources_of(beside, units=replace(UNITS, shared=())) == ["the units"]
    assert sources_of(with_origin(beside, units_from="")) == ["the units"]
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
        (checkpoint(1, optim=Optimizer.of({}, []), layout=Layout.FULL), "id"),
        (checkpoint(1, optim=Optimizer.of({}, None), layout=Layout.FULL), "name"),
    ):  # fmt: skip
        assert rekeyed(held, key_type, units=None) is held


def test_each_direction_uses_the_first_source() -> None:
    by_name = rekeyed(full(), "name")
    assert by_name.optim is not None and tuple(by_name.optim.state) == NAMES
    by_id = rekeyed(by_name, "id")
    assert by_id.optim is not None and tuple(by_id.optim.state) == (0, 1, 2)


def test_without_any_source_ids_are_a_question_and_names_count_as_they_are_listed() -> None:
    with pytest.raises(NeedsInformationError) as caught:
        rekeyed(full(), "name", units=None)
    assert caught.value.what.endswith("maps optimizer ids to parameters")
    found = rekeyed(full(NAMES), "id", units=None)
    assert found.optim is not None and tuple(found.optim.state) == (0, 1, 2)
    assert found.notes[-1].message == "3 optimizer keys became 3 ids, in the order of the optimizer's own groups"
    with pytest.raises(NeedsInformationError, match="in which order its optimizer has"):
        rekeyed(full(tuple(sorted(NAMES))), "id", units=None)


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
    held = checkpoint(1, model=None if named_by == "reference" else model, optim=Optimizer.of(state, [group]))
    found = apply_key_type(
        held,
        "id" if named_by in ("keys", "reference") else "name",
        units=None,
        reference=checkpoint(1, model=model) if named_by == "reference" else None,
        parameters=names if named_by == "parameters" else None,
    )
    assert found.optim is not None
    assert list(found.optim.state) == ([0, 1, 2, 3] if named_by in ("keys", "reference") else names)


def with_states(held: Checkpoint, **more: tuple[int, ...]) -> Checkpoint:
    """``held`` with further entries in its optimizer's state; ``_0`` is the number 0."""
    assert held.optim is not None
    added: dict[ParamKey, dict[str, Tensor | Value]] = {
        int(key[1:]) if key.startswith("_") else key: {"exp_avg": whole(*shape)} for key, shape in more.items()
    }
    return replace(held, optim=held.optim.with_state({**held.optim.state, **added}))


def without_groups(held: Checkpoint) -> Checkpoint:
    assert held.optim is not None
    return replace(held, optim=replace(held.optim, groups=None))


def refused(
    held: Checkpoint, key_type: str, error: type[SourceCorruptError | NeedsInformationError], **given: object
) -> SourceCorruptError | NeedsInformationError:
    known: dict[str, object] = {"units": None, "reference": None, "parameters": None}
    with pytest.raises(error) as caught:
        apply_key_type(held, key_type, **{**known, **given})  # type: ignore[arg-type]
    return caught.value


def test_ids_that_become_names_and_ids_again_are_what_they_were() -> None:
    held = full(model=True, param_names=list(NAMES))
    again = rekeyed(rekeyed(held, "name"), "id")
    assert held.optim is not None and again.optim is not None
    assert again.optim == held.optim
    assert [note.message for note in again.notes] == [
        "3 optimizer ids became 3 names, from the units; the states of 3 parameters have the shapes that this needs",
        "3 optimizer keys became 3 ids, in the order of the units",
    ]


@pytest.mark.parametrize(
    ("given", "what", "details"),
    [
        (
            {"parameters": NAMES[:2]},
            "the optimizer of run/step-7 does not fit --parameters",
            (
                "the optimizer has 3 ids, --parameters 2 parameters",
                "id 2 has states of shape [2, 5], which no parameter of --parameters has",
            ),
        ),
        (
            {"parameters": (NAMES[1], NAMES[0], NAMES[2])},
            "the optimizer of run/step-7 does not fit --parameters, in the optimizer's order",
            ("id 0 has states of shape [5, 3], b is [5]", "id 1 has states of shape [5], w is [5, 3]"),
        ),
        (
            {"parameters": NAMES, "units": replace(UNITS, parameters=(NAMES[0], NAMES[2], NAMES[1]))},
            "the optimizer of run/step-7 does not fit the units",
            ("id 1 has states of shape [5], v is [2, 5]", "id 2 has states of shape [2, 5], b is [5]"),
        ),
    ],
)
def test_a_source_that_does_not_fit_the_ids_is_refused_with_all_that_does_not_fit(
    given: dict[str, object], what: str, details: tuple[str, ...]
) -> None:
    error = refused(full(model=True), "name", SourceCorruptError, **given)
    assert (error.what, tuple(error.details)) == (what, details)


def test_param_names_that_contradict_the_units_are_refused() -> None:
    equal = (named("a", 5), named("b", 5))
    units = build_units(equal, ("",), Settings(use_orig_params=True))
    state: dict[ParamKey, dict[str, Tensor | Value]] = {number: {"exp_avg": whole(5)} for number in range(2)}
    held = checkpoint(1, optim=Optimizer.of(state, [{"params": [0, 1], "param_names": ["b", "a"]}]))
    error = refused(held, "name", SourceCorruptError, units=units)
    assert error.what == "the param_names of run/step-7 contradict the units"
    assert error.details == ("id 0 is b in param_names, a in the units", "id 1 is a in param_names, b in the units")


def test_names_that_a_source_lacks_are_all_listed() -> None:
    held = full(("w", "b", "u"))
    error = refused(held, "id", SourceCorruptError, units=UNITS)
    assert error.what == "the optimizer of run/step-7 does not fit the units"
    assert error.details == ("u is not in the units",)
    error = refused(full(("w", "v", "b")), "id", SourceCorruptError, units=UNITS)
    assert error.details == (
        "v has states of shape [5], and is [2, 5] in the units", "b has states of shape [2, 5], and is [5] in the units"
    )  # fmt: skip


def test_entries_of_the_user_keep_their_keys_in_both_directions() -> None:
    by_name = rekeyed(with_states(full(), custom=(4,)), "name")
    assert by_name.optim is not None and list(by_name.optim.state) == [*NAMES, "custom"]
    by_id = rekeyed(with_states(full(NAMES), _7=(4,)), "id")
    assert by_id.optim is not None and list(by_id.optim.state) == [0, 1, 2, 7]


def test_an_entry_of_the_user_under_the_id_of_a_parameter_is_not_overwritten() -> None:
    error = refused(with_states(full(NAMES), _1=(4,)), "id", SourceCorruptError, units=UNITS)
    assert error.what == "the optimizer of run/step-7 has states under both kinds of key"
    assert error.details == ("1",)


def test_states_without_groups_get_ids_only_from_what_lists_the_parameters_of_the_optimizer() -> None:
    error = refused(without_groups(full(NAMES, model=True)), "id", NeedsInformationError)
    assert error.what.endswith("and the checkpoint's own model section does not give its states ids")
    held = without_groups(full(NAMES))
    by_units = rekeyed(held, "id")
    assert by_units.optim is not None and list(by_units.optim.state) == [0, 1, 2]
    assert by_units.optim.param_groups is None
    listed = apply_key_type(held, "id", units=None, reference=None, parameters=("u", *NAMES))
    assert listed.optim is not None and list(listed.optim.state) == [1, 2, 3]  # u has no state


def test_ids_without_groups_are_places_in_a_list_and_nothing_is_beyond_it() -> None:
    held = without_groups(full((0, 1, 3)))
    found = apply_key_type(held, "name", units=None, reference=None, parameters=("w", "b", "u", "v"))
    assert found.optim is not None and tuple(found.optim.state) == NAMES
    error = refused(held, "name", SourceCorruptError, parameters=NAMES)
    assert error.details == ("id 3 is beyond the 3 parameters of --parameters",)


def test_groups_that_were_rebuilt_give_ids_only_in_the_order_of_the_model() -> None:
    held = full(NAMES, model=True)
    assert held.optim is not None
    held = replace(held, optim=replace(held.optim, rebuilt=True))
    found = rekeyed(held, "id", units=None)
    assert found.optim is not None and list(found.optim.state) == [0, 1, 2]
    assert held.optim is not None
    moved = held.optim.with_groups([{"params": ["v", "w", "b"]}])
    error = refused(replace(held, optim=moved), "id", NeedsInformationError)
    assert "in a different order than the checkpoint's own model section" in error.what
    assert error.next_step is not None and "--units FILE" in error.next_step
