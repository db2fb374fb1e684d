"""A name stands in one row of units: no list of theirs can have another one, and a new name is in all of them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings

from fsdpckpt.errors import InternalError
from fsdpckpt.ir.parameters import Parameter
from fsdpckpt.ir.unit_lists import ContradictoryUnitsError
from fsdpckpt.ir.units import RankOrder, RankRows, Units
from fsdpckpt.ir.units_json import decode, encode, render
from tests.ir.relisted import relisted
from tests.ir.test_units_json import EXAMPLE
from tests.ir.units_strategy import any_units

NEW = "#new"


def with_every_list(units: Units) -> Units:
    """``units`` with the order of a rank and two optimizers, if they have groups."""
    if units.trained is None or units.world_size is None:
        return units
    of_rank = tuple(tuple(group[::-1]) for group in units.groups or ())
    ordered = relisted(units, orders=(RankOrder((0,), of_rank),))
    return replace(ordered, by_optimizer=(("actor", units.trained), ("critic", units.trained[1:])))


def renamed(params: tuple[Parameter, ...]) -> tuple[Parameter, ...]:
    return tuple(replace(param, name=param.name + NEW) for param in params)


@settings(max_examples=80, deadline=None)
@given(any_units())
def test_a_row_that_gets_a_new_name_has_it_in_every_list(units: Units) -> None:
    units = with_every_list(units)
    of_units = tuple(replace(unit, params=renamed(unit.params)) for unit in units.units)
    changed = replace(units, units=of_units, unmanaged=renamed(units.unmanaged))
    expected = render(encode(units))
    for name in sorted({param.name for param in units.rows}, key=len, reverse=True):
        old, new = (render({"": text})[len('{\n "": ') : -len("\n}\n")] for text in (name, name + NEW))
        expected = expected.replace(old, new)
    assert render(encode(changed)) == expected
    assert decode(encode(changed), source="units.json") == changed


def test_units_with_a_row_in_no_place_or_in_two_are_not_made() -> None:
    for order in (EXAMPLE.order[1:], (*EXAMPLE.order, 0), (0, *EXAMPLE.order[1:][:-1], 0), (*EXAMPLE.order[1:], 9)):
        with pytest.raises(InternalError, match="rows of 4 are in the order"):
            replace(EXAMPLE, order=order)
    with pytest.raises(InternalError):
        replace(EXAMPLE, unmanaged=())


def test_groups_of_what_no_row_is_are_not_made() -> None:
    with pytest.raises(InternalError, match="gone is nothing that an optimizer"):
        EXAMPLE.with_groups((("free",), ("gone",)))
    with pytest.raises(ContradictoryUnitsError, match="groups: gone is not a parameter of these units"):
        relisted(EXAMPLE, groups=(("gone",),))


def test_a_flat_parameter_is_all_of_its_rows() -> None:
    flat = relisted(EXAMPLE, use_orig_params=False, groups=None)
    of_flat = flat.with_groups((("_flat_param",), ("free", "l.0._flat_param")))
    assert of_flat.trained == ((0, 1), (3, 2))
    assert [of_flat.rows[row].name for row in (0, 1, 2, 3)] == ["e.weight", "h.bias", "l.0.c.weight", "free"]
    ranks = replace(of_flat, by_rank=(RankRows((1,), ((0, 1), ())),))
    assert ranks.orders == (RankOrder((1,), (("_flat_param",), ())),)
    assert ranks.groups_of(1) == (("_flat_param",), ())
