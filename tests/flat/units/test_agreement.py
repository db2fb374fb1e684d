"""Units held against a checkpoint of whole tensors: everything that contradicts them is said, and nothing else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import pytest

from fsdpckpt.flat.units import Settings, build_units
from fsdpckpt.flat.units.request import contradictions
from fsdpckpt.ir.checkpoint import Checkpoint, Layout, ModelState
from fsdpckpt.ir.dtypes import DTYPES
from fsdpckpt.ir.optimizer import Optimizer
from fsdpckpt.ir.tensors import Chunks, Tensor
from fsdpckpt.ir.units import Units
from fsdpckpt.ir.values import Value
from tests.flat.flat_synthetic import checkpoint, named, sharded_model, whole
from tests.ir.checkpoints import with_origin

PARAMS = (named("a.weight", 5, 3), named("a.bias", 5), named("b.weight", 2, 5), named("b.bias", 2))
NAMES = tuple(param.name for param in PARAMS)
UNITS = build_units(PARAMS, ("", "a", "b"), Settings(use_orig_params=True))


def states(*shapes: tuple[int, ...], step: bool = True) -> dict[str, Tensor | Value]:
    found: dict[str, Tensor | Value] = {"step": whole()} if step else {}
    return {**found, **{f"state{number}": whole(*shape) for number, shape in enumerate(shapes)}}


def by_name(
    entries: Mapping[str, dict[str, Tensor | Value]] | None = None, *groups: Sequence[str], listed: bool = True
) -> Optimizer:
    """Adam's states of all parameters, unless given otherwise, in one group."""
    held = {param.name: states(param.shape, param.shape) for param in PARAMS} if entries is None else dict(entries)
    return Optimizer.of(
        dict(held), [{"lr": 0.1, "params": list(group)} for group in groups or (tuple(held),)] if listed else None
    )


def full(model: ModelState | None = None, optim: Optimizer | None = None) -> Checkpoint:
    return checkpoint(1, model=model, optim=optim, layout=Layout.FULL)


def with_leaf(name: str, leaf: Tensor | Value) -> ModelState:
    return ModelState({**sharded_model(PARAMS).params, name: leaf})


def said(source: Checkpoint, units: Units = UNITS, dtype: str | None = None) -> list[str]:
    return contradictions(units, source, dtype=DTYPES[dtype] if dtype is not None else None)


def test_units_of_this_very_model_contradict_nothing() -> None:
    assert said(full(sharded_model(PARAMS), by_name())) == []
    assert said(full(sharded_model(PARAMS))) == []
    assert said(full(optim=by_name())) == []


# The model.


def test_a_parameter_that_only_the_units_have_is_named() -> None:
    assert said(full(sharded_model(PARAMS[:3]))) == ["b.bias is in the units, not in the model section"]


def test_a_parameter_that_only_the_model_has_is_named_and_a_buffer_is_not() -> None:
    assert said(full(with_leaf("c", whole(4, offset=999)))) == ["the model section has a parameter c, the units do not"]
    assert said(full(with_leaf("c", whole(4, offset=999, sharded=False)))) == []
    assert said(full(with_leaf("c", whole(4, offset=999, sharded=None)))) == []


def test_another_shape_of_as_many_elements_is_named() -> None:
    assert said(full(with_leaf("a.weight", whole(3, 5)))) == [
        "a.weight: [5, 3] in the units, [3, 5] in the model section"
    ]


def test_another_dtype_is_named_and_what_a_cast_makes_of_it_is_what_counts() -> None:
    half = full(with_leaf("a.weight", whole(5, 3, dtype=DTYPES["bfloat16"])))
    assert said(half) == ["a.weight: float32 in the units, bfloat16 in the model section"]
    assert said(half, dtype="float32") == []
    assert said(half, dtype="float16")[0] == "a.weight: float32 in the units, float16 in the model section"


def test_a_cast_leaves_integers_what_they_are() -> None:
    params = (*PARAMS, named("table", 7, dtype="int32"))
    units = build_units(params, ("", "a", "b"), Settings(use_orig_params=True))
    assert said(full(sharded_model(params)), units, "float32") == []


def turned(name: str, *shape: int) -> Tensor:
    """A dense matrix whose columns lie one after the other."""
    one = whole(*shape, offset=4096)
    return replace(one, chunks=one.chunks.with_boxes(stride=np.asarray([[1, shape[0]]])))


def test_another_memory_order_is_named_for_a_flat_parameter_holds_the_memory() -> None:
    assert said(full(with_leaf("a.weight", turned("a.weight", 5, 3)))) == [
        "a.weight: strides None in the units, (1, 5) in the model section"
    ]


def test_the_same_memory_order_on_both_sides_contradicts_nothing() -> None:
    params = (replace(PARAMS[0], stride=(1, 5)), *PARAMS[1:])
    units = build_units(params, ("", "a", "b"), Settings(use_orig_params=True))
    assert said(full(with_leaf("a.weight", turned("a.weight", 5, 3))), units) == []


def test_a_row_major_copy_of_a_parameter_that_was_not_is_its_copy() -> None:
    """Containers that know no strides store row-major: only another order than both is a contradiction."""
    params = (replace(PARAMS[0], stride=(1, 5)), *PARAMS[1:])
    units = build_units(params, ("", "a", "b"), Settings(use_orig_params=True))
    assert said(full(sharded_model(PARAMS)), units) == []


def test_a_shared_parameter_may_be_stored_under_either_of_its_names_or_both() -> None:
    units = replace(UNITS, shared=(("head.weight", "a.weight"),))
    model = sharded_model(PARAMS)
    assert said(full(ModelState({**model.params, "head.weight": model.params["a.weight"]})), units) == []
    assert said(full(with_leaf("head.weight", whole(5, 3, offset=4096))), units) == []
    first = dict(model.params)
    params = {"head.weight": first["a.weight"], **first}
    assert said(full(ModelState(params)), units) == []


def test_another_order_than_the_models_is_named_unless_it_is_in_no_order() -> None:
    other = build_units([PARAMS[index] for index in (1, 0, 2, 3)], ("", "a", "b"), Settings(use_orig_params=True))
    (text,) = said(full(sharded_model(PARAMS)), other)
    assert "a.bias in the units, a.weight in the model section" in text
    alphabetical = sharded_model(sorted(PARAMS, key=lambda param: param.name))
    assert said(full(alphabetical)) == []


def test_the_names_that_unflattened_slices_got_from_the_sources_units_say_nothing_of_order() -> None:
    """They stand in the order of those units, which were proved; the target's may be wrapped otherwise."""
    other = build_units([PARAMS[index] for index in (1, 0, 2, 3)], ("", "a", "b"), Settings(use_orig_params=True))
    assert said(with_origin(full(sharded_model(PARAMS)), layout=Layout.FLATTENED), other) == []


# The optimizer.


def test_states_of_a_parameter_that_the_units_do_not_have_are_named_once() -> None:
    entries = {**by_name().state, "c": states((4,))}
    assert said(full(optim=by_name(entries))) == ["the optimizer has states of c, which the units do not have"]
    assert said(full(optim=by_name(entries, listed=False))) == [
        "the optimizer has states of c, which the units do not have"
    ]


def test_a_users_own_entry_beside_the_parameters_is_no_parameter() -> None:
    """TorchRec's keyed optimizers keep entries that no group lists, and some hold no tensor."""
    beside = {**by_name().state, "counts": states((4,))}
    assert said(full(optim=by_name(beside, NAMES))) == []
    plain = {**by_name().state, "notes": {"text": "kept"}}
    assert said(full(optim=by_name(plain, listed=False))) == []


def test_a_listed_name_without_states_is_named_too() -> None:
    assert said(full(optim=by_name(None, (*NAMES, "c")))) == ["the param groups list c, which the units do not have"]
    bare = {**by_name().state, "c": {}}
    assert said(full(optim=by_name(bare, (*NAMES, "c")))) == ["the param groups list c, which the units do not have"]


def test_states_that_all_have_another_shape_contradict_the_units() -> None:
    entries = {**by_name().state, "a.weight": states((3, 5), (3, 5))}
    assert said(full(optim=by_name(entries))) == ["a.weight: [5, 3] in the units, its optimizer states are [3, 5]"]


@pytest.mark.parametrize(
    "own",
    [states((5, 1), (1, 3)), states((5, 3), (9,)), states((1,), (5, 3)), {"note": "text", **states((5, 3))}, states()],
    ids=["factors", "one beside it", "a counter", "no tensor", "scalars only"],
)
def test_states_of_several_shapes_contradict_nothing(own: dict[str, Tensor | Value]) -> None:
    entries = {**by_name().state, "a.weight": own}
    assert said(full(optim=by_name(entries))) == []


def test_wrapped_names_of_the_optimizer_are_those_of_the_units() -> None:
    wrapped = {name.replace(".", "._fsdp_wrapped_module."): entry for name, entry in by_name().state.items()}
    assert said(full(optim=by_name(wrapped))) == []
    keyed_groups = replace(UNITS, groups=(NAMES,))
    assert said(full(optim=by_name(wrapped)), keyed_groups) == []
    alien = {**wrapped, "_orig_mod.c": states((4,))}
    assert said(full(optim=by_name(alien))) == ["the optimizer has states of c, which the units do not have"]


def test_an_optimizer_by_id_is_left_to_those_who_name_its_ids() -> None:
    optim = Optimizer.of({0: states((9, 9))}, [{"lr": 0.1, "params": [0, 1, 2, 3]}])
    assert said(full(optim=optim)) == []


def test_another_number_of_groups_is_named() -> None:
    units = replace(UNITS, groups=(NAMES[:2], NAMES[2:]))
    assert said(full(optim=by_name()), units) == ["the optimizer has 1 param groups, the units have 2"]


def test_a_parameter_in_another_group_is_named_once_for_each() -> None:
    units = replace(UNITS, groups=(NAMES[:2], NAMES[2:]))
    assert said(full(optim=by_name(None, NAMES[:2], NAMES[2:])), units) == []
    assert said(full(optim=by_name(None, NAMES[:1], NAMES[1:])), units) == [
        "param group 1 lists a.bias, and the units do not"
    ]
    assert said(full(optim=by_name(None, NAMES[2:], NAMES[:2])), units) == [
        "param group 0 lists b.bias, and the units do not",
        "param group 0 lists b.weight, and the units do not",
        "param group 1 lists a.bias, and the units do not",
        "param group 1 lists a.weight, and the units do not",
    ]


def test_a_parameter_that_no_group_lists_is_named_unless_fsdp_does_not_manage_it() -> None:
    units = replace(UNITS, groups=(NAMES,))
    fewer = full(optim=by_name(None, NAMES[1:]))
    assert said(fewer, units) == ["no param group lists a.weight, which is in group 0 of the units"]
    assert said(fewer, build_units(PARAMS, ("a", "b"), Settings(use_orig_params=True), unmanaged=["a.weight"])) == []
    whole_units = replace(
        build_units(PARAMS, ("a", "b"), Settings(use_orig_params=False)),
        groups=(("a._flat_param", "b._flat_param"),),
    )
    assert said(full(optim=by_name(None, NAMES[2:])), whole_units) == [
        "no param group lists a._flat_param, which is in group 0 of the units"
    ]
    nothing_listed = Optimizer.of({}, [{"lr": 0.1, "params": []}])
    assert len(said(full(optim=nothing_listed), units)) == len(NAMES)
    assert said(full(optim=Optimizer.of({}, [])), units) == ["the optimizer has 0 param groups, the units have 1"]


def test_a_parameter_in_two_groups_is_named() -> None:
    assert said(full(optim=by_name(None, NAMES, NAMES[:1]))) == ["a.weight is in 2 param groups"]


def test_groups_that_list_unknown_names_are_not_compared_any_further() -> None:
    units = replace(UNITS, groups=(NAMES[:2], NAMES[2:]))
    assert said(full(optim=by_name(None, (*NAMES, "c"))), units) == [
        "the param groups list c, which the units do not have"
    ]


def test_an_optimizer_without_groups_contradicts_no_groups() -> None:
    units = replace(UNITS, groups=(NAMES[:2], NAMES[2:]))
    assert said(full(optim=by_name(listed=False)), units) == []
    bare = Optimizer.of(dict(by_name().state), [{"lr": 0.1, "params": []}])
    assert said(full(optim=bare), replace(UNITS, groups=None)) == []


def test_chunks_of_no_elements_say_no_strides() -> None:
    empty = Tensor(DTYPES["float32"], (0, 3), Chunks.whole(file=0, offset=0, shape=(0, 3)), sharded=True)
    params = (*PARAMS, named("none", 0, 3))
    units = build_units(params, ("", "a", "b"), Settings(use_orig_params=True))
    assert said(full(with_leaf("none", empty)), units) == []
