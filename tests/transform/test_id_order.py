"""What the order of names in a group proves, and what FSDP's own lists do not."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from fsdpckpt.transform.id_order import ListedOrder, listed_order

MODEL = ["tok.w", "layers.0.w", "layers.0.b", "layers.2.w", "layers.2.b", "layers.10.w", "layers.10.b", "head.w"]
PLACES = {name: place for place, name in enumerate(MODEL)}
BY_UNIT = [MODEL[0], MODEL[7], *MODEL[1:7]]


@pytest.mark.parametrize(
    ("groups", "own", "in_model_order", "doubt"),
    [
        ([MODEL], True, True, ""),
        ([[MODEL[7]], [MODEL[0]]], True, True, ""),
        ([[MODEL[4], MODEL[1]]], True, False, ""),
        ([sorted(MODEL)], False, False, "sorted by name"),
        ([sorted(MODEL[:4]), sorted(MODEL[4:])], False, False, "sorted by name"),
        ([["layers.0.b", "layers.0.w"], ["tok.w", "layers.2.b"]], True, False, ""),
        ([BY_UNIT], False, False, "unit by unit"),
        ([[BY_UNIT[1], *BY_UNIT[2:4]], BY_UNIT[4:]], False, False, "unit by unit"),
        ([[*BY_UNIT[:2], *BY_UNIT[4:6], *BY_UNIT[2:4]]], True, False, ""),
    ],
)
def test_a_list_is_the_jobs_own_unless_fsdp_makes_such_lists(
    groups: Sequence[Sequence[str]], own: bool, in_model_order: bool, doubt: str
) -> None:
    found = listed_order(groups, PLACES)
    assert found is not None and (found.own, found.in_model_order) == (own, in_model_order)
    assert doubt in found.doubt and bool(found.doubt) is bool(doubt)


@pytest.mark.parametrize(
    ("groups", "expected"),
    [
        ([["layers.0.b", "layers.0.w"], ["tok.w"]], None),
        ([MODEL], ListedOrder(own=True)),
        ([BY_UNIT], None),
        ([[MODEL[4], MODEL[1]]], ListedOrder(own=True)),
        ([["z.w", "c.w", "m.b.w"]], None),
        ([["z.w", "m.b.w", "c.w"]], ListedOrder(own=True)),
        ([[MODEL[7]], [MODEL[0]]], ListedOrder(own=True, in_model_order=True)),
    ],
)
def test_without_the_model_a_list_that_may_be_fsdps_proves_nothing(
    groups: Sequence[Sequence[str]], expected: ListedOrder | None
) -> None:
    assert listed_order(groups, None) == expected


@pytest.mark.parametrize(
    ("names", "doubt"),
    [
        (["y.w", "z.w", "m.own", "m.inner.w"], True),
        (["y.w", "z.w", "m.inner.w", "m.own"], False),
        (["z.w", "m.own", "m.inner.w", "y.w"], False),
        (["z.w", "y.w"], False),  # nobody wraps one layer
        (["z.w", "m.own"], True),
        (["z.w", "m.inner.w"], True),
    ],
)
def test_a_list_that_fsdp_makes_for_a_rare_wrapping_is_the_jobs_own_with_a_warning(
    names: list[str], doubt: bool
) -> None:
    places = {name: place for place, name in enumerate(["y.w", "m.own", "m.inner.w", "z.w"])}
    found = listed_order([names], places)
    assert found is not None and found.own and bool(found.doubt) is doubt
    assert not doubt or "--parameters" in found.doubt


def test_known_units_tell_their_own_lists() -> None:
    places = {"z": 0, "m.b": 1, "c": 2}
    assert listed_order([["z", "c", "m.b"]], places) == ListedOrder(own=True)
    found = listed_order([["z", "c", "m.b"]], places, by_unit=("z", "c", "m.b"))
    assert found is not None and not found.own


def test_long_lists_and_deep_names_take_a_moment() -> None:
    names = [f"layers.{number}.w" for number in range(20_000)]
    assert listed_order([[*names, "head.w"]], None) == ListedOrder(own=True)
    places = {name: -at for at, name in enumerate(names)}
    found = listed_order([names], places)
    assert found is not None and found.own
    deep = [".".join(["a", "0"] * depth) + ".w" for depth in range(60, 0, -1)]
    assert listed_order([deep], {name: place for place, name in enumerate(reversed(deep))}) is not None
