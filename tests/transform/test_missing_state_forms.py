"""What decides the form, the place and the order of states that are made, in memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise

import pytest

from fsdpckpt.errors import NeedsInformationError, SourceIncompleteError
from fsdpckpt.flat.units import Settings, build_units
from fsdpckpt.ir.checkpoint import Checkpoint, Layout
from fsdpckpt.ir.dtypes import DTYPES
from fsdpckpt.ir.optimizer import Optimizer, ParamKey
from fsdpckpt.ir.tensors import Tensor
from fsdpckpt.ir.units import Units
from fsdpckpt.ir.values import Value
from fsdpckpt.transform import missing_state
from fsdpckpt.transform.missing_state import require_complete, without_state
from tests.flat.flat_synthetic import checkpoint, named, sharded_model, whole

PARAMS = (named("a.w", 5, 3), named("a.b", 5), named("b.w", 2, 5), named("b.b", 2), named("none", 0, 3))
NAMES = tuple(param.name for param in PARAMS)
SHAPES = {param.name: param.shape for param in PARAMS}

fill = partial(missing_state.fill, read=lambda _: b"")


def units(*, orig: bool = False, without: Sequence[str] = ()) -> Units:
    return build_units(PARAMS, ("", "a", "b"), Settings(orig), unmanaged=without)


def states(name: str, step: int, **more: Tensor | Value) -> dict[str, Tensor | Value]:
    return {"step": step, "exp_avg": whole(*SHAPES[name]), **more}


def source(
    *groups: Sequence[ParamKey],
    state: dict[ParamKey, dict[str, Tensor | Value]],
    model: bool = True,
    params: Sequence[str] = NAMES,
) -> Checkpoint:
    optim = Optimizer.of(state, [{"lr": 0.1, "params": list(group)} for group in groups])
    held = sharded_model([param for param in PARAMS if param.name in params]) if model else None
    return checkpoint(1, model=held, optim=optim, layout=Layout.FULL)


def order(found: Checkpoint) -> list[ParamKey]:
    assert found.optim is not None
    return list(found.optim.state)


def test_a_parameter_without_elements_or_gradient_is_not_missing_its_state() -> None:
    held = source(NAMES, state={name: states(name, 1) for name in NAMES[:3]})
    assert without_state(held) == ["b.b", "none"]
    assert without_state(held, units()) == ["b.b"]
    frozen = build_units([replace(PARAMS[3], requires_grad=False), PARAMS[4]], ("",), Settings(use_orig_params=True))
    assert without_state(held, frozen) == []


def test_the_units_beside_the_checkpoint_count_where_none_are_given() -> None:
    held = source(NAMES, state={name: states(name, 1) for name in NAMES[:4]})
    assert fill(replace(held, units=units()), "error") is not None
    with pytest.raises(SourceIncompleteError):
        fill(held, "error")
    with pytest.raises(SourceIncompleteError):  # the ones given come first
        fill(replace(held, units=units()), "error", units=Units((), use_orig_params=True, parameters=()))


@pytest.mark.parametrize("count", [1, 2, 13])
def test_all_are_counted_and_named(count: int) -> None:
    many = [f"p{number}" for number in range(count)]
    held = source(("a.w", *many), state={"a.w": states("a.w", 1)})
    skipped = fill(held, "skip")
    assert skipped.notes[-1].keys == tuple(many)
    assert skipped.notes[-1].message.startswith(f"{count} parameter{' has' if count == 1 else 's have'} no optimizer")
    with pytest.raises(SourceIncompleteError) as error:
        fill(held, "error")
    assert error.value.details == tuple(many)


def test_states_are_made_where_the_group_lists_their_parameter() -> None:
    held = source(
        ("a.w", "a.b"), ("b.w", "b.b"), state={"b.b": states("b.b", 2), "user": {"x": 1}, "a.b": states("a.b", 1)}
    )
    found = fill(held, "zeros")
    assert order(found) == ["a.w", "b.b", "user", "a.b", "b.w"]
    held = source(("a.w", "a.b"), state={"a.w": states("a.w", 1)})
    found = fill(held, "zeros")
    assert order(found) == ["a.w", "a.b"]
    assert found.notes[-1].message == "1 parameter had no optimizer state, and got zeros"


def test_states_behind_a_parameter_that_rightly_has_none_are_made_too() -> None:
    held = source(("a.w", "none", "b.w"), ("b.b",), state={"a.w": states("a.w", 1), "b.b": states("b.b", 1)})
    assert order(fill(held, "zeros", units=units())) == ["a.w", "b.w", "b.b"]


def test_an_entry_that_is_empty_is_filled_in_its_place() -> None:
    held = source(("a.w", "a.b", "b.w"), state={"a.w": {}, "a.b": states("a.b", 1), "b.w": {}})
    found = fill(held, "zeros")
    assert order(found) == ["a.w", "a.b", "b.w"]
    assert found.optim is not None and all(found.optim.state.values())


def test_the_flat_parameter_of_each_decides_and_the_group_only_where_it_has_no_states() -> None:
    """Each unit has taken its own number of steps."""
    held = source(NAMES[:4], state={"a.w": states("a.w", 3), "b.w": states("b.w", 9)}, params=NAMES[:4])
    found = fill(held, "zeros", units=units())
    assert found.optim is not None
    assert [found.optim.state[name]["step"] for name in NAMES[:4]] == [3, 3, 9, 9]
    with pytest.raises(NeedsInformationError) as error:
        fill(held, "zeros", units=units(without=["a.b", "b.b"]))
    assert error.value.details == tuple(
        f"{name}: the others of its group do not agree on step" for name in ("a.b", "b.b")
    )


def test_a_unit_without_any_state_takes_the_form_of_the_group() -> None:
    held = source(NAMES[:4], state={"a.w": states("a.w", 3), "a.b": states("a.b", 3)})
    found = fill(held, "zeros", units=units())
    assert found.optim is not None
    assert [found.optim.state[name]["step"] for name in NAMES[:4]] == [3, 3, 3, 3]


def test_each_group_has_a_form_of_its_own() -> None:
    held = source(
        ("a.w", "a.b"), ("b.w", "b.b"), state={"a.w": states("a.w", 3), "b.w": states("b.w", 9, momentum=None)}
    )
    found = fill(held, "zeros")
    assert found.optim is not None
    assert found.optim.state["a.b"]["step"] == 3 and found.optim.state["b.b"]["step"] == 9
    assert list(found.optim.state["b.b"]) == ["step", "exp_avg", "momentum"]


def test_a_state_is_sharded_as_its_parameter_is_and_else_as_the_others_states() -> None:
    def made(sharded: bool | None, known: bool | None) -> bool | None:
        tensor = replace(whole(5, 3), sharded=sharded)
        held = source(("a.w", "a.b"), state={"a.w": {"exp_avg": tensor}})
        model = sharded_model([replace(param, sharded=known) for param in PARAMS[:2]])
        found = fill(replace(held, model=model), "zeros").optim
        leaf = found.state["a.b"]["exp_avg"] if found is not None else None
        assert isinstance(leaf, Tensor)
        return leaf.sharded

    assert made(True, False) is False
    assert made(False, True) is True
    assert made(True, None) is True
    assert made(False, None) is False


def test_a_units_parameters_are_sharded_and_those_beside_are_not() -> None:
    held = source(("a.w", "a.b"), state={"a.w": states("a.w", 1)}, model=False)
    for known, sharded in ((units(), True), (units(without=["a.b"]), False)):
        found = fill(held, "zeros", units=known).optim
        leaf = found.state["a.b"]["exp_avg"] if found is not None else None
        assert isinstance(leaf, Tensor) and leaf.sharded is sharded and leaf.shape == (5,)


def test_a_group_that_keeps_no_tensors_needs_no_shapes() -> None:
    held = source(("a.w", "x"), state={"a.w": {"step": 4}}, model=False)
    found = fill(held, "zeros").optim
    assert found is not None and found.state["x"] == {"step": 4}


def test_ids_get_zeros_where_no_shape_has_to_be_known_and_are_refused_elsewhere() -> None:
    held = source((0, 1), state={0: {"step": 4}})
    found = fill(held, "zeros").optim
    assert found is not None and found.state[1] == {"step": 4}
    with pytest.raises(NeedsInformationError) as error:
        fill(source((0, 1), state={0: states("a.w", 4)}), "zeros", units=units())
    assert error.value.details == ("1: its shape is not known",)


def test_states_keep_the_dtype_that_all_others_have_whatever_the_parameter_is() -> None:
    half = whole(5, 3, dtype=DTYPES["bfloat16"])
    held = source(("a.w", "a.b"), state={"a.w": {"exp_avg": half}})
    found = fill(held, "zeros").optim
    leaf = found.state["a.b"]["exp_avg"] if found is not None else None
    assert isinstance(leaf, Tensor) and leaf.dtype is DTYPES["bfloat16"]


def test_no_two_zero_tensors_share_bytes() -> None:
    held = source(NAMES, state={"a.w": states("a.w", 3, exp_avg_sq=whole(5, 3))})
    found = fill(held, "zeros")
    assert found.optim is not None
    places = [
        (int(leaf.chunks.offset[0]), leaf.nbytes)
        for name in NAMES[1:]
        for leaf in found.optim.state[name].values()
        if isinstance(leaf, Tensor)
    ]
    assert len(places) == 8
    for (begin, nbytes), (following, _) in pairwise(places):
        assert following >= begin + max(nbytes, 1) and not begin % 64
    assert found.files[-1].nbytes >= places[-1][0] + max(places[-1][1], 1)
    assert found.notes[-1].message == "4 parameters had no optimizer state, and got zeros"


def test_only_flat_parameters_have_all_states_or_none() -> None:
    held = source(NAMES, state={"a.w": states("a.w", 1)})
    require_complete(held, units(orig=True))
    require_complete(replace(held, optim=None), units())
    with pytest.raises(NeedsInformationError) as error:
        require_complete(held, units())
    assert error.value.details == ("unit 'a': a.b",)
    require_complete(source(NAMES, state={name: states(name, 1) for name in NAMES[:2]}), units())


@pytest.mark.parametrize("bare", [4, 5])
def test_the_first_four_of_a_unit_are_named(bare: int) -> None:
    params = [named(f"p{number}", 3) for number in range(bare + 1)]
    one = build_units(params, ("",), Settings(use_orig_params=False))
    held = source([param.name for param in params], state={f"p{bare}": {"step": 1}})
    with pytest.raises(NeedsInformationError) as error:
        require_complete(held, one)
    assert error.value.details == ("the root unit: p0, p1, p2, p3" + (" and 1 more" if bare == 5 else ""),)
