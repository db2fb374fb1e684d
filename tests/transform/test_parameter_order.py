"""Sources of the order of ``model.parameters()``, and what each says of its names."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from fsdpckpt import flags
from fsdpckpt.errors import NeedsInformationError, SourceCorruptError
from fsdpckpt.ir.checkpoint import Checkpoint, Checksums, Container, Layout, ModelState, Origin
from fsdpckpt.ir.dtypes import DTYPES
from fsdpckpt.ir.files import Stored
from fsdpckpt.ir.optimizer import Optimizer
from fsdpckpt.ir.parameters import Parameter
from fsdpckpt.ir.tensors import Chunks, Slices, Tensor, Whole
from fsdpckpt.ir.units import Unit, Units
from fsdpckpt.transform.order_sources import from_list, from_model, from_param_names, from_units
from fsdpckpt.transform.parameter_order import ParameterOrder
from fsdpckpt.transform.rekey import apply_key_type, to_names
from fsdpckpt.transform.stated_orders import parameter_orders
from tests.ir.checkpoints import with_origin
from tests.transform.orders import order_of

F32, I64 = DTYPES["float32"], DTYPES["int64"]


def tensor(*shape: int, at: int = 0, dtype: Any = F32, sharded: bool | None = None, slices: bool = False) -> Tensor:
    return Tensor(dtype, shape, Chunks.whole(file=0, offset=at, shape=shape), sharded, Slices() if slices else Whole())


def order(params: dict[str, Any], *, sums: list[tuple[int, int, int, int]] | None = None, **given: Any) -> Any:
    source = Checkpoint(
        Origin("it.pt", Layout.FULL, Container.TORCH, "plain", 1),
        files=(Stored("it.pt", 999),),
        model=ModelState(params),
        optim=None,
        extra={},
        checksums=Checksums.of(sums or []),
    )
    return from_model(source, "it", **given)


def names(params: dict[str, Any], **given: Any) -> tuple[str, ...]:
    found = order(params, **given)
    return found.names if isinstance(found, ParameterOrder) else ()


MODEL = {
    "w": tensor(3, 2), "count": tensor(at=64), "ids": tensor(3, at=128, dtype=I64), "extra": 7,
    "u._flat_param": tensor(9, at=192), "s": tensor(3, at=256, slices=True), "b": tensor(3, at=320),
}  # fmt: skip


def test_parameters_are_floating_have_dimensions_and_are_no_slices() -> None:
    assert names(MODEL) == ("w", "b")
    assert names(MODEL, keyed={"count"}) == ("w", "count", "b")  # the optimizer has states for it
    assert names(MODEL, scalars=True) == ("w", "count", "b")
    assert names({"ids": tensor(3, dtype=I64, sharded=True)}) == ("ids",)
    assert names({"c": tensor(3, dtype=DTYPES["complex64"])}) == ("c",)


def test_globs_of_buffers_leave_keys_out_unless_there_are_none() -> None:
    assert names(MODEL, buffers=("b*", "other")) == ("w",)
    assert names(MODEL, buffers=("none",)) == ("w", "b")
    assert order(MODEL, buffers=("*",)) is None
    assert order({"extra": 7}) is None
    assert order({}) is None


def test_without_a_model_section_there_is_no_order() -> None:
    source = Checkpoint(
        Origin("it.pt", Layout.FULL, Container.TORCH, "plain", 1), files=(), model=None, optim=None, extra={}
    )
    assert from_model(source, "it") is None


def test_where_something_is_sharded_only_that_is_surely_a_parameter() -> None:
    params = {"w": tensor(3, sharded=True), "r": tensor(3, at=64, sharded=False), "q": tensor(3, at=128)}
    assert order(params).uncertain == {"r", "q"}
    assert order(params).excludes_buffers
    assert order(params, buffers=("none",)).uncertain == frozenset()
    plain = {"w": tensor(3), "q": tensor(3, at=64)}
    assert order(plain).uncertain == frozenset()
    assert not order(plain).excludes_buffers
    assert order(plain, buffers=("none",)).excludes_buffers
    assert order({"r": tensor(3, sharded=False)}).excludes_buffers


def test_a_module_prefix_of_all_names_goes_unless_the_names_it_is_like_have_it() -> None:
    params = {"module.w": tensor(3), "module.b": tensor(3, at=64)}
    assert names(params) == ("module.w", "module.b")
    assert names(params, names_to_match=["w"]) == ("w", "b")
    assert names(params, names_to_match=["module.w"]) == ("module.w", "module.b")
    assert names({"_orig_mod.w": tensor(3)}) == ("w",)


def test_one_place_is_one_parameter_and_equal_checksums_may_be() -> None:
    params = {"a": tensor(3), "tied": tensor(3), "copy": tensor(3, at=64), "other": tensor(3, at=128)}
    sums = [(0, 0, 12, 99), (0, 64, 12, 99), (0, 128, 12, 98)]
    found = order(params, sums=sums)
    assert (found.names, found.uncertain) == (("a", "copy", "other"), frozenset({"copy"}))
    for wrong in ([(0, 0, 12, 0), (0, 64, 12, 0)], [(0, 0, 24, 99), (0, 64, 24, 99)], [(0, 0, 12, 99)], []):
        assert order(params, sums=wrong).uncertain == frozenset()  # no sum, or one of more than the tensor
    assert order({"a": tensor(0, 2), "b": tensor(0, 2)}).uncertain == frozenset()  # nothing is stored of either
    transposed = tensor(3, 2, at=64)
    assert order({"a": tensor(2, 3), "b": transposed}, sums=[(0, 0, 24, 9), (0, 64, 24, 9)]).uncertain == frozenset()


@pytest.mark.parametrize(
    ("params", "recorded", "expected"),
    [
        ([0, 1], ["a", "_orig_mod.b"], ("a", "b")),
        ([0, 1], ("a", "b"), ("a", "b")),
        ([0, 1], ["a"], None),
        ([0, 1], ["a", 7], None),
        ([0, 1], ["a", "a"], None),
        ([0, 1], ["a", "u._flat_param"], None),
        ([0, 1], "ab", None),
        ([0, 1], None, None),
        ([0, 1], ["module.a", "module.b"], ("a", "b")),
        (["b", "a"], ["a", "b"], ("a", "b")),
        (["c", "a"], ["a", "b"], None),
    ],
)
def test_param_names_count_if_there_is_one_for_each_key(params: list[Any], recorded: Any, expected: Any) -> None:
    found = from_param_names(Optimizer.of({}, [{"params": params, "param_names": recorded}]))
    assert (found.names if found is not None else None) == expected
    if found is not None:
        assert (found.groups, found.in_model_order, found.authoritative) == ((expected,), False, True)


def test_units_say_shapes_groups_and_what_may_lack_a_state() -> None:
    params = (Parameter("a", (3, 2), F32), Parameter("b", (4,), F32), Parameter("c", (5,), F32, requires_grad=False))
    units = Units(
        (Unit("", params[:2]),), use_orig_params=False, parameters=("b", "a", "c"), unmanaged=params[2:],
        shared=(("z", "a"),), groups=(("c",), ("_flat_param",)),
    )  # fmt: skip
    found, by_name = from_units(units, "units.json"), units.params()
    assert found.rows == tuple(by_name[name] for name in "bac")
    assert (found.source, found.authoritative, found.complete) == ("units.json", True, True)
    assert (found.uncertain, found.groups, found.shared) == ({"c"}, (("c",), ("b", "a")), (("z", "a"),))
    assert found.by_unit == ("c", "a", "b")
    named = replace(units, use_orig_params=True, groups=(("c", "a"), ("b",)))
    assert from_units(named, "x").groups == (("c", "a"), ("b",))
    assert from_units(replace(units, groups=None), "x").groups is None


def test_a_list_is_cleaned_and_says_names_only() -> None:
    found = from_list(["module._orig_mod.a", "module.b", "module.b"], ["a"])
    assert found == order_of(("a", "b"), source=f"{flags.parameters}", authoritative=True)
    assert from_list(["module.b"], ["module.a"]).names == ("module.b",)


def test_what_states_the_order_itself_comes_first_and_what_keeps_none_last() -> None:
    params = {"module.a": tensor(3, 2), "module.b": tensor(4, at=64)}
    optim = Optimizer.of({0: {"m": tensor(3, 2)}}, [{"params": [0, 1], "param_names": ["module.a", "module.b"]}])
    source = Checkpoint(
        Origin("it.pt", Layout.FULL, Container.TORCH, "plain", 1),
        files=(Stored("it.pt", 999),),
        model=ModelState(params),
        optim=optim,
    )
    bare = with_origin(
        replace(source, model=ModelState({"a": tensor(3, 2), "b": tensor(4, at=64)}), optim=None), source="ref.pt"
    )
    units = Units((Unit("", (Parameter("module.a", (3, 2), F32),)),), use_orig_params=True, parameters=("module.a",))
    given: dict[str, Any] = {"units": None, "reference": None, "parameters": None}

    def labels(checkpoint: Checkpoint, **options: Any) -> list[str]:
        return [found.source for found in parameter_orders(checkpoint, **{**given, **options})]

    own_order = ", in the optimizer's order"
    own, recorded = "the checkpoint's own model section", "param_names in the groups"
    assert labels(source) == [recorded, own]
    everything = {"units": units, "reference": bare, "parameters": ["b", "a"]}
    assert labels(source, **everything) == [
        "the units",
        recorded,
        f"{flags.parameters}{own_order}",
        "the reference ref.pt",
        own,
    ]
    beside = with_origin(replace(source, units=units), units_from="units.json")
    assert labels(beside) == ["the units of units.json", recorded, own]
    assert labels(beside, units=replace(units)) == ["the units", recorded, own]
    assert labels(source.without_order(), reference=bare)[-1] == own
    assert labels(bare.without_order(), reference=with_origin(bare, source="x")) == ["the reference x", own]
    assert labels(replace(source, model=None, optim=None)) == []
    # Names keep a prefix that the checkpoint itself has, in its model or, without one, in its optimizer.
    by_list = parameter_orders(source, **{**given, "parameters": ["module.a", "module.b"]})[1]
    assert by_list.names == ("module.a", "module.b")
    by_name = replace(source, model=None, optim=Optimizer.of({"module.a": {}}, None))
    assert parameter_orders(by_name, **{**given, "parameters": ["module.a"]})[0].names == ("module.a",)
    assert parameter_orders(bare, **{**given, "parameters": ["module.a"]})[0].names == ("a",)


def test_a_module_prefix_changes_rows_and_whatever_is_said_of_them_follows() -> None:
    named = ("a.w", "b.w")
    sets: dict[str, Any] = dict.fromkeys(("uncertain", "doubtful", "plain", "by_unit"), named)
    listed = order_of(
        named, dict.fromkeys(named, (3,)), "it", groups=(named[:1], named[1:]), shared=(("c.w", "a.w"),), **sets
    )
    renamed = listed.named_like(["module.c"])
    longer = ("module.a.w", "module.b.w")
    assert renamed.names == longer == renamed.by_unit and list(renamed.shapes) == list(longer)
    assert renamed.groups == (longer[:1], longer[1:]) and renamed.shared == (("module.c.w", "module.a.w"),)
    assert renamed.uncertain == renamed.doubtful == renamed.plain == frozenset(longer)
    assert renamed.named_like(["c"]) == listed


# The groups of a reference whose optimizer is keyed by name.


def optimizer(groups: list[list[Any]], *shapes: tuple[int, ...]) -> Optimizer:
    keys = [key for group in groups for key in group]
    moments = {key: {"exp_avg": tensor(*(shapes or ((3,),) * len(keys))[at])} for at, key in enumerate(keys)}
    return Optimizer.of(moments, [{"lr": 0.1, "params": list(group)} for group in groups], {})


def file_of(optim: Optimizer, model: list[str] | None = None, source: str = "it.pt") -> Checkpoint:
    section = None if model is None else ModelState({name: tensor(3, at=64 * at) for at, name in enumerate(model)})
    return Checkpoint(
        Origin(source, Layout.FULL, Container.TORCH, "plain", 1),
        files=(Stored(source, 9999),),
        model=section,
        optim=optim,
    )


def rekeyed(source: Checkpoint, key_type: Any, reference: Checkpoint) -> list[list[Any]]:
    found = apply_key_type(source, key_type, units=None, reference=reference, parameters=None).optim
    assert found is not None and found.param_groups is not None
    return [list(group["params"]) for group in found.param_groups]  # type: ignore[call-overload]


SORTED = file_of(optimizer([["a.w", "b.w", "c.w"]]), source="ref.pt")


def test_a_list_sorted_by_name_names_no_ids_without_the_order_of_the_model() -> None:
    with pytest.raises(NeedsInformationError) as error:
        rekeyed(file_of(optimizer([[0, 1, 2]])), "name", SORTED)
    assert "--parameters" in str(error.value.next_step) and "ref.pt" in error.value.text
    with pytest.raises(NeedsInformationError, match="cannot get ids in the order of the param groups of"):
        rekeyed(file_of(optimizer([["a.w", "b.w", "c.w"]])), "id", SORTED)
    unsorted = file_of(optimizer([["b.w", "c.w", "a.w"]]), source="ref.pt")
    assert rekeyed(file_of(optimizer([[0, 1, 2]])), "name", unsorted) == [["b.w", "c.w", "a.w"]]


def test_sorted_groups_still_say_which_names_are_in_each_where_shapes_decide_the_rest() -> None:
    source = file_of(optimizer([[0, 1], [2, 3]], (3, 2), (5,), (3, 2), (5,)))
    groups = optimizer([["a.w", "b.w"], ["c.w", "d.w"]])
    shapes = {"a.w": (5,), "b.w": (3, 2), "c.w": (5,), "d.w": (3, 2)}
    reference = replace(
        file_of(groups, source="ref.pt"),
        model=ModelState({name: tensor(*shapes[name], at=64 * at) for at, name in enumerate(shapes)}),
    ).without_order()
    assert rekeyed(source, "name", reference) == [["b.w", "a.w"], ["d.w", "c.w"]]


def test_a_sorted_reference_is_read_in_the_order_of_a_model_whose_names_have_module() -> None:
    model = ["module.c.w", "module.a.w", "module.b.w"]
    assert rekeyed(file_of(optimizer([[0, 1, 2]]), model), "name", SORTED) == [model]


def test_what_a_source_certainly_lists_itself_is_not_overridden_by_a_reference() -> None:
    own, model = ["c.w", "d.w", "b.w"], ["d.w", "b.w", "c.w"]
    for section in (None, model):
        source = file_of(optimizer([own]), section)
        other = file_of(optimizer([["d.w", "c.w", "b.w"]]), source="ref.pt")
        with pytest.raises(SourceCorruptError, match="contradict each other") as error:
            numbered(source, other)
        assert "ref.pt" in str(error.value)
        in_own_order = file_of(optimizer([own]), source="ref.pt")
        assert numbered(source, in_own_order) == own
        by_name = file_of(optimizer([sorted(own)]), source="ref.pt")
        assert numbered(source, by_name) == own  # the reference proves nothing


def test_a_sorted_source_takes_the_order_of_a_reference_that_lists_the_jobs() -> None:
    source = file_of(optimizer([["b.w", "c.w", "d.w"]]), ["d.w", "b.w", "c.w"])
    listed = file_of(optimizer([["c.w", "d.w", "b.w"]]), source="ref.pt")
    assert numbered(source, listed) == ["c.w", "d.w", "b.w"]


def numbered(source: Checkpoint, reference: Checkpoint) -> list[str]:
    """The names of a source in the order of the ids that they get."""
    rekeyed_source = apply_key_type(source, "id", units=None, reference=reference, parameters=None)
    found = rekeyed_source.optim
    assert found is not None and source.optim is not None
    name_of = {id(states): str(name) for name, states in source.optim.state.items()}
    assert [note for note in rekeyed_source.notes if note.warning] == []
    return [name_of[id(found.state[number])] for number in range(len(name_of))]


# Ids that count over the model.


def test_ids_without_gaps_are_those_of_torch_optim_where_the_known_groups_leave_no_other_way() -> None:
    source = with_origin(file_of(optimizer([[0, 1], [2, 3]])), flavor="lightning")
    shapes = dict.fromkeys(("a.w", "b.w", "c.w", "d.w"), (3,))
    model = order_of(tuple(shapes), shapes)
    groups = (("c.w", "a.w"), ("b.w", "d.w"))
    known = order_of(("c.w", "a.w", "b.w", "d.w"), shapes, authoritative=True, groups=groups, in_model_order=False)
    named = to_names(source, known, [model])
    assert named.optim is not None and list(named.optim.state) == ["c.w", "a.w", "b.w", "d.w"]
    with pytest.raises(NeedsInformationError, match="cannot name the 4 optimizer ids") as error:
        to_names(source, known)
    assert "--parameters" in str(error.value.next_step)
