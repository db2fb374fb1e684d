"""Taking sections out of a state dict and putting them back are inverse functions."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fsdpckpt.ir.frame import frame_of, joined, placed, remainder
from fsdpckpt.ir.values import equal, value_at

SECTION = "a section"
KEYS = st.sampled_from([0, 1, 3, "0", "a", "b.c", "", None, True, (1, 2)])


def containers(children: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    dicts = st.dictionaries(KEYS, children, max_size=4)
    lists = st.lists(children, max_size=4)
    return dicts | dicts.map(OrderedDict) | lists | lists.map(tuple)


TREES = st.dictionaries(KEYS, st.recursive(st.sampled_from([SECTION, 1, None]), containers, max_leaves=12), max_size=4)


def paths_of(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Where the sections are."""
    if value == SECTION:
        return [path]
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, (list, tuple)) else ()
    return [found for key, item in pairs for found in paths_of(item, (*path, key))]


@settings(max_examples=60, deadline=None)
@given(TREES, st.randoms())
def test_what_is_taken_out_is_put_back_where_it_was(tree: dict[Any, Any], random: Any) -> None:
    paths = paths_of(tree)
    frame, rest = frame_of(tree, paths), remainder(tree, paths)
    assert SECTION not in str(rest)
    back: Any = rest
    random.shuffle(paths)  # in any order
    for path in paths:
        back = placed(back, path, SECTION, frame)
    assert same(back, tree)


def same(a: Any, b: Any) -> bool:
    """Equal, with types; the order of keys is a part of an OrderedDict alone."""
    if type(a) is not type(b):
        return False
    if isinstance(a, OrderedDict) and list(a) != list(b):
        return False
    if isinstance(a, dict):
        types = {key: type(key) for key in a} == {key: type(key) for key in b}
        return types and all(same(item, b[key]) for key, item in a.items())
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return equal(a, b)


@pytest.mark.parametrize(
    ("tree", "rest"),
    [
        ({"a": [SECTION, {"x": SECTION, "n": 1}]}, {"a": [{}, {"n": 1}]}),  # no item moves
        ({"a": [{"x": SECTION}, (SECTION,)], "b": 1}, {"b": 1}),
        ({"a": [{}, SECTION], "b": {}}, {"a": [{}], "b": {}}),  # what was empty stays
        ({"a": (5, [SECTION])}, {"a": (5,)}),
        ({0: {"x": SECTION}, 1: {"x": SECTION, "n": 2}}, {1: {"n": 2}}),
    ],
)
def test_what_is_left_keeps_its_places(tree: dict[Any, Any], rest: dict[Any, Any]) -> None:
    assert remainder(tree, paths_of(tree)) == rest


def test_without_a_frame_a_number_is_a_position_and_other_keys_make_dicts() -> None:
    assert placed({}, ("a", 1, "b"), 5) == {"a": [{}, {"b": 5}]}
    assert placed({"a": {2: 1}}, ("a", 1), 5) == {"a": {2: 1, 1: 5}}


def test_a_section_that_is_gone_leaves_its_place_to_no_other() -> None:
    tree = {"a": [SECTION, SECTION]}
    frame = frame_of(tree, paths_of(tree))
    assert placed({}, ("a", 1), 5, frame) == {"a": [{}, 5]}


def test_frames_of_two_files_are_joined() -> None:
    first, second = {"a": OrderedDict(x=None)}, {"a": OrderedDict(y=[None]), "b": (None,)}
    both = joined(first, second)
    assert both == {"a": OrderedDict(x=None, y=[None]), "b": (None,)}
    assert type(value_at(both, ("a",))) is OrderedDict
    assert joined(None, first) is first
    assert joined(first, None) is first
