"""Names of a model: where a checkpoint, an optimizer or units have them, and what is known of each."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fsdpckpt.flat.names import UnitPrefixes, parameter_order, prefixes_of, raw_names
from fsdpckpt.flat.units import Settings, build_units
from fsdpckpt.ir.checkpoint import Container, Layout, ModelState
from fsdpckpt.ir.dtypes import DTYPES
from fsdpckpt.ir.listing import Listing
from fsdpckpt.ir.optimizer import Optimizer
from fsdpckpt.ir.tensors import Chunks, Tensor
from fsdpckpt.transform.listings import model_names, optimizer_names, stride_of, units_names
from tests.flat.flat_synthetic import checkpoint, local_model, name_list, named, slices, whole
from tests.ir.checkpoints import with_origin
from tests.ir.optimizers import with_setting

F32, I64 = DTYPES["float32"], DTYPES["int64"]
A, B, C = named("a.weight", 5, 3), named("a.bias", 5), named("b.weight", 3, 5)


def held(params: dict[str, object], **more: object) -> Listing | None:
    model = ModelState(dict(params))  # type: ignore[arg-type]
    return model_names(checkpoint(2, model=model, layout=Layout.FULL, **more), "it")  # type: ignore[arg-type]


def test_names_are_put_into_another_order_only_if_that_has_every_parameter() -> None:
    counter = named("count", dtype="int64", sharded=None)
    names = replace(name_list(C, counter, A, ordered=False), in_model_order=False)
    ranked = names.reordered(["a.weight", "other", "b.weight"], "a file")
    assert [param.name for param in ranked.params] == ["a.weight", "b.weight", "count"]
    assert (ranked.ordered, ranked.in_model_order, ranked.source) == (True, True, "a list, ordered by a file")
    assert names.reordered(["a.weight"], "a file") is names


def test_what_a_flat_parameter_can_hold_is_floating_and_has_dimensions() -> None:
    for param in (named("w", 3), named("w", 3, sharded=None), named("w", 3, dtype="complex64")):
        assert param.possible and param.numel == 3
    for param in (named("w", 3, sharded=False), named("w"), named("w", 3, dtype="int64")):
        assert not param.possible and param.numel == (3 if param.shape else 1)


def test_a_model_section_says_names_shapes_and_what_is_one_tensor() -> None:
    tied, sliced = whole(4, 2, offset=64), slices([2, 1])
    found = held({
        "_orig_mod.a": whole(3, offset=0), "extra": 7, "s": sliced, "b": tied, "_fsdp_wrapped_module.c": tied,
        "empty": whole(0, 2), "void": whole(0, 2),
    })  # fmt: skip
    assert found is not None
    assert [(param.name, param.shape) for param in found.params] == [
        ("a", (3,)),
        ("b", (4, 2)),
        ("empty", (0, 2)),
        ("void", (0, 2)),
    ]
    assert (found.shared, found.ordered, found.source) == ((("c", "b"),), True, "it")
    assert (found.in_model_order, found.from_reference) == (True, False)
    assert {(param.dtype, param.stride, param.sharded) for param in found.params} == {(F32, None, True)}


def test_a_model_section_of_flat_parameters_or_of_none_says_nothing_and_one_without_order_no_order() -> None:
    assert held({"a": whole(3), "u._flat_param": slices([2, 2])}) is None
    assert held({"s": slices([2, 1]), "extra": 7}) is None
    assert model_names(checkpoint(2), "it") is None
    model = ModelState({"a": whole(3), "b": whole(3, offset=64)})
    source = checkpoint(1, model=model)
    sorted_names = checkpoint(1, model=model, container=Container.SAFETENSORS)
    for one, ordered in ((source, True), (sorted_names, False), (source.without_order(), False)):
        found = model_names(one, "it")
        assert found is not None and found.ordered is ordered


@pytest.mark.parametrize(
    ("shape", "chunk", "stride", "expected"),
    [
        ((2, 4, 5, 3), (2, 4, 5, 3), (60, 1, 12, 4), (60, 1, 12, 4)),  # channels_last
        ((2, 4, 5, 3), (1, 4, 5, 3), (60, 1, 12, 4), (60, 1, 12, 4)),  # a chunk of it
        ((4, 6), (4, 2), (1, 4), (1, 4)),
        ((4, 6), (4, 6), (6, 1), None),
        ((4, 6), (2, 6), (6, 1), None),
        ((4, 6), (4, 6), (1, 5), None),  # gaps
        ((4, 6), (4, 6), (2, 8), None),
        ((6,), (6,), (2,), None),
        ((4, 1, 6), (4, 1, 6), (1, 9, 4), (1, 24, 4)),
    ],
)
def test_strides_are_those_of_a_dense_parameter_in_another_order(shape, chunk, stride, expected) -> None:
    rows = Chunks.rows(
        ndim=len(shape), rank=[0, 1], file=[0, 0], offset=[0, 64], start=[(0,) * len(shape)] * 2,
        size=[(0,) * len(shape), chunk], stride=[stride] * 2,
    )  # fmt: skip
    assert stride_of(Tensor(F32, shape, rows)) == expected
    assert stride_of(Tensor(F32, shape, rows.take([False, False]))) is None  # type: ignore[arg-type]


def adam(shape: tuple[int, ...]) -> dict[str, object]:
    return {"step": whole(), "exp_avg": whole(*shape), "exp_avg_sq": whole(*shape)}


def optimizer(states: dict[object, dict[str, object]], *groups: list[str]) -> Optimizer:
    return Optimizer.of(states, [{"params": group} for group in groups] or None)  # type: ignore[arg-type]


def test_an_optimizer_by_name_says_the_parameters_that_have_whole_states() -> None:
    states: dict[object, dict[str, object]] = {
        "_orig_mod.b": adam((3, 5)), "a": adam((5,)), "factors": {"row": whole(3), "col": whole(4)},
        "sliced": {"exp_avg": slices([2, 1])}, "none": {"step": whole()},
    }  # fmt: skip
    source = checkpoint(2, optim=optimizer(states, ["a", "b", "frozen"]))
    found = optimizer_names(source, "it")
    assert found is not None
    assert [(param.name, param.shape, param.sharded) for param in found.params] == [
        ("a", (5,), True),
        ("b", (3, 5), True),
    ]
    assert (found.ordered, found.in_model_order) == (True, False)
    every = optimizer_names(checkpoint(2, optim=optimizer(states, ["a", "b"])), "it")  # each of the group has states
    assert every is not None and every.ordered and every.params == found.params
    for groups in ((["a"], ["b"]), (["b"],), ()):
        found = optimizer_names(checkpoint(2, optim=optimizer(states, *groups)), "it")
        assert found is not None and [param.name for param in found.params] == ["b", "a"] and not found.ordered
    assert optimizer_names(checkpoint(2, optim=optimizer({0: adam((3,))}, [])), "it") is None
    assert optimizer_names(checkpoint(2, optim=optimizer({"a": {"step": whole()}}, ["a"])), "it") is None
    assert optimizer_names(checkpoint(2), "it") is None
    momentum = optimizer_names(checkpoint(2, optim=optimizer({"a": {"momentum_buffer": whole(5)}}, ["a"])), "it")
    assert momentum is not None and [(param.name, param.shape) for param in momentum.params] == [("a", (5,))]


def test_units_say_everything_in_the_order_of_the_model() -> None:
    frozen = replace(B, requires_grad=False)
    units = build_units([A, frozen, C], ("", "b"), Settings(True), unmanaged=["b.weight"], shared=[("z", "a.weight")])
    found = units_names(units, "units.json")
    assert found == Listing((A, frozen, replace(C, sharded=False)), "units.json", shared=(("z", "a.weight"),))


def test_keys_show_where_units_begin() -> None:
    units = build_units([A, B, C], ("", "b"), Settings(False))
    flat = prefixes_of(checkpoint(2, model=local_model(units, 2)))
    assert flat == UnitPrefixes(("", "b"), complete=True, label="the flat parameters' keys", exact=True)
    inner = "_fsdp_wrapped_module"
    wrapped = [f"{inner}.a._checkpoint_wrapped_module.{inner}.w", f"{inner}.c"]
    found = prefixes_of(checkpoint(2, optim=optimizer(dict.fromkeys(wrapped, adam((3,))), wrapped)))
    assert found is not None and (found.prefixes, found.complete, found.exact) == (("", "a"), True, False)
    assert prefixes_of(checkpoint(2, model=ModelState({"a": whole(3)}), optim=optimizer({"a": adam((3,))}))) is None
    assert prefixes_of(checkpoint(2)) is None


def test_an_optimizer_calls_its_parameters_by_keys_and_by_param_names() -> None:
    optim = optimizer({0: adam((3,)), "b": adam((3,))}, ["b"])
    assert optim.param_groups is not None
    optim = with_setting(optim, 0, param_names=["_orig_mod.b", "b", 7])
    assert raw_names(checkpoint(2, optim=optim)) == ["b", "_orig_mod.b", "7"]
    optim = with_setting(optim, 0, param_names="b")
    assert raw_names(checkpoint(2, optim=optim)) == ["b"]
    assert raw_names(checkpoint(2)) == []


def test_the_order_of_parameters_is_that_of_slices_by_name_or_of_one_groups_param_names() -> None:
    model = ModelState({"_orig_mod.b": slices([2, 1]), "buffer": whole(3), "a": slices([1, 2])})
    named_too = optimizer({}, ["x"])
    assert named_too.param_groups is not None
    named_too = with_setting(named_too, 0, param_names=["_orig_mod.c", "u._flat_param", "d"])
    source = checkpoint(2, model=model, optim=named_too)
    assert parameter_order(source) == ["b", "a"]
    assert parameter_order(with_origin(source, container=Container.DCP)) == ["c", "d"]
    assert parameter_order(replace(source, model=None)) == ["c", "d"]
    assert named_too.param_groups is not None
    two = named_too.with_groups([*named_too.param_groups, {"params": [], "param_names": []}])
    assert parameter_order(replace(source, model=None, optim=two)) == []
    assert parameter_order(checkpoint(2)) == []
