"""What a model section and a units file state of the order of parameters, and how surely."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from fsdpckpt.ir.checkpoint import Checkpoint, Checksums, Container, Layout, ModelState, Origin
from fsdpckpt.ir.dtypes import DTYPES
from fsdpckpt.ir.files import Stored
from fsdpckpt.ir.optimizer import Optimizer
from fsdpckpt.ir.parameters import Parameter
from fsdpckpt.ir.placements import Slices, Whole
from fsdpckpt.ir.tensors import Chunks, Tensor
from fsdpckpt.ir.unit_lists import units_of_lists
from fsdpckpt.ir.units import Unit
from fsdpckpt.transform.order_sources import from_groups, from_model, from_units
from fsdpckpt.transform.rekey import to_ids, to_names
from fsdpckpt.transform.stated_orders import GivenNames, parameter_orders
from tests.flat.flat_synthetic import checkpoint
from tests.ir.relisted import relisted
from tests.transform.orders import order_of

F32 = DTYPES["float32"]


def tensor(*shape: int, at: int = 0, dtype: Any = F32, sharded: bool | None = None, slices: bool = False) -> Tensor:
    return Tensor(dtype, shape, Chunks.whole(file=0, offset=at, shape=shape), sharded, Slices() if slices else Whole())


def order(
    params: dict[str, Any],
    *,
    sums: list[tuple[int, int, int, int]] | None = None,
    container: Container = Container.TORCH,
    **given: Any,
) -> Any:
    source = Checkpoint(
        Origin("it.pt", Layout.FULL, container, "plain", 1),
        files=(Stored("it.pt", 999),),
        model=ModelState(params),
        optim=None,
        extra={},
        checksums=Checksums.of(sums or []),
    )
    return from_model(source, "it", **given)


def test_flat_parameters_and_slices_are_no_parameters_by_name() -> None:
    params = {"w": tensor(3, 2), "u._flat_param": tensor(9, at=192), "s": tensor(3, at=256, slices=True)}
    assert order(params).names == ("w",)
    assert order({"ids": tensor(3, dtype=DTYPES["int64"], sharded=True)}).names == ("ids",)


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


def test_what_is_plain_beside_sharded_tensors_is_a_buffer_but_not_in_a_dcp_directory() -> None:
    params = {"w": tensor(3, sharded=True), "r": tensor(3, at=64, sharded=False), "q": tensor(3, at=128)}
    for container, plain, doubtful in ((Container.TORCH, {"r"}, {"q"}), (Container.DCP, set(), {"r", "q"})):
        found = order(params, container=container)
        assert (found.plain, found.doubtful) == (plain, doubtful)
        known = order(params, container=container, buffers=("r",))
        assert (known.plain, known.doubtful) == (set(), set())


@pytest.mark.parametrize(("key", "listed"), [(0, True), ("a", False), ("a", True)])
def test_groups_without_names_and_names_without_groups_are_no_order(key: int | str, listed: bool) -> None:
    optim = Optimizer.of({key: {"exp_avg": tensor(3)}}, [{"params": [key]}] if listed else None)
    found = from_groups(optim, "it")
    assert (None if found is None else found.names) == (("a",) if (key, listed) == ("a", True) else None)


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


def test_units_say_shapes_groups_and_what_may_lack_a_state() -> None:
    params = (Parameter("a", (3, 2), F32), Parameter("b", (4,), F32), Parameter("c", (5,), F32, requires_grad=False))
    units = units_of_lists(
        (Unit("", params[:2]),), use_orig_params=False, parameters=("b", "a", "c"), unmanaged=params[2:],
        shared=(("z", "a"),), groups=(("c",), ("_flat_param",)),
    )  # fmt: skip
    found, by_name = from_units(units, "units.json"), units.params()
    assert found.rows == tuple(by_name[name] for name in "bac")
    assert (found.source, found.authoritative, found.complete) == ("units.json", True, True)
    assert (found.uncertain, found.groups, found.shared) == ({"c"}, (("c",), ("b", "a")), (("z", "a"),))
    assert found.by_unit == ("c", "a", "b")
    named = relisted(units, use_orig_params=True, groups=(("c", "a"), ("b",)))
    assert from_units(named, "x").groups == (("c", "a"), ("b",))
    assert from_units(units.with_groups(None), "x").groups is None


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


def test_an_order_is_stated_without_an_optimizer_too() -> None:
    bare = checkpoint(1, model=ModelState({"module.a": tensor(3, 2)}))
    for held, names in ((bare, "module.a"), (replace(bare, model=None), "a")):
        stated = parameter_orders(held, GivenNames(reference=bare, parameters=["module.a"]))
        assert {each.names for each in stated} == {(names,)}
        assert to_names(held, stated[0]) is held
        assert to_ids(held, stated[0]) is held


def test_keys_that_are_right_already_are_left_alone() -> None:
    for key, change in ((0, to_ids), ("a", to_names)):
        held = checkpoint(1, optim=Optimizer.of({key: {"exp_avg": tensor(3)}}, [{"params": [key]}]))
        assert change(held, order_of("a", {"a": (3,)})) is held
