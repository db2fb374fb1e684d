"""Units under the names of a target: the same as units that are made of the new names."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsdpckpt.flat.units import Settings, build_units, regrouped
from fsdpckpt.flat.units.changes import NameChanges
from fsdpckpt.ir.dtypes import DTYPES
from fsdpckpt.ir.parameters import Parameter
from fsdpckpt.ir.unit_lists import flaws
from fsdpckpt.ir.units import RankOrder, Units
from fsdpckpt.transform.renaming import Renaming
from tests.ir.relisted import relisted

FLOAT = DTYPES["float32"]
MODULES = ("", "a", "a.0", "a.1", "b", "b.c")
NAMES = tuple(f"{module}.{name}".lstrip(".") for module in MODULES for name in ("weight", "bias"))


def everything(_: str) -> bool:
    return True


def rule(**how: object) -> NameChanges:
    return NameChanges(everything, Renaming(**how).new_name)  # type: ignore[arg-type]


def made(names: list[str], prefixes: set[str], groups: list[list[str]] | None, *, orig: bool) -> Units:
    params = [Parameter(name, (len(name), 2), FLOAT) for name in names]
    sizes = {param.name: param for param in params}
    units = build_units([sizes[name] for name in names], prefixes, Settings(use_orig_params=orig))
    return units if groups is None else units.with_groups(regrouped(units, groups))


def sized(units: Units, like: Units, names: dict[str, str]) -> Units:
    """``units`` with the shapes that their parameters have in ``like``, under the old names."""
    shapes = {names[name]: param.shape for name, param in like.params().items() if name in names}
    changed = (
        replace(unit, params=tuple(replace(param, shape=shapes[param.name]) for param in unit.params))
        for unit in units.units
    )
    unmanaged = tuple(replace(param, shape=shapes[param.name]) for param in units.unmanaged)
    return replace(units, units=tuple(changed), unmanaged=unmanaged)


@given(
    names=st.lists(st.sampled_from(NAMES), unique=True, min_size=1).map(lambda some: [n for n in NAMES if n in some]),
    wrapped=st.sets(st.sampled_from(MODULES)),
    left_out=st.sets(st.sampled_from(NAMES)),
    how=st.sampled_from(
        [
            {},
            {"add_prefix": "net."},
            {"pairs": (("a", "blocks"),)},
            {"pairs": (("b.c", "b.d"), ("a.0", "a.7"))},
            {"pairs": (("a", "z"), ("b", "a"))},
        ]
    ),
    order=st.randoms(use_true_random=False),
    orig=st.booleans(),
)
def test_they_are_those_of_the_new_names(
    names: list[str], wrapped: set[str], left_out: set[str], how: dict[str, object], order: object, orig: bool
) -> None:
    listed = list(names)
    order.shuffle(listed)  # type: ignore[attr-defined]
    units = made(names, wrapped, [listed] if orig else None, orig=orig)
    renaming = rule(**how)
    changes = replace(renaming, keeps=lambda name: name not in left_out)
    new = {name: renaming.new_name(name) for name in names if name not in left_out}
    found = changes.applied_to(units)
    kept = [new[name] for name in listed if name in new]
    expected = made(
        list(new.values()), {renaming.new_path(path) for path in wrapped}, [kept] if orig else None, orig=orig
    )
    assert found == sized(expected, units, new)
    assert not flaws(found) or not found.units


def test_groups_and_orders_of_ranks_follow_and_units_without_parameters_are_none() -> None:
    names = ["weight", "a.weight", "b.weight"]
    units = made(names, {"", "a", "b"}, [["b.weight", "a.weight"], ["weight"]], orig=False)
    orders = (RankOrder((1,), (("a._flat_param", "b._flat_param"), ("_flat_param",))),)
    units = relisted(units, orders=orders, world_size=2)
    changes = replace(rule(pairs=(("b", "c"),)), keeps=lambda name: name != "a.weight")
    found = changes.applied_to(units)
    assert [unit.key for unit in found.units] == ["_flat_param", "c._flat_param"]
    assert found.groups == (("c._flat_param",), ("_flat_param",))
    assert found.orders == (RankOrder((1,), (("c._flat_param",), ("_flat_param",))),)


def test_a_shared_parameter_that_loses_its_first_name_has_the_next_one() -> None:
    units = relisted(made(["a.weight", "b.weight"], {""}, None, orig=True), shared=(("b.c.weight", "a.weight"),))
    found = replace(rule(), keeps=lambda name: name != "a.weight").applied_to(units)
    assert (found.parameters, found.shared) == (("b.c.weight", "b.weight"), ())
    without_other_name = replace(rule(), keeps=lambda name: name != "b.c.weight").applied_to(units)
    assert (without_other_name.parameters, without_other_name.shared) == (units.parameters, ())
    renamed = rule(pairs=(("a", "x"),)).applied_to(units)
    assert renamed.shared == (("b.c.weight", "x.weight"),)


@pytest.mark.parametrize("orig", [True, False])
def test_a_parameter_that_leaves_its_module_is_in_the_unit_of_its_new_one(orig: bool) -> None:
    units = made(["a.weight", "a.bias", "b.weight"], {"", "a", "b"}, None, orig=orig)
    found = rule(pairs=(("a.bias", "b.bias"),)).applied_to(units)
    assert {unit.prefix: [param.name for param in unit.params] for unit in found.units} == {
        "a": ["a.weight"],
        "b": ["b.bias", "b.weight"],
    }
    assert rule().applied_to(units) is units
