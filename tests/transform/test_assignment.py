"""The search behind every name of an id: it finds the only answer, and never hides a second one."""

from __future__ import annotations

from itertools import combinations, permutations, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fsdpckpt.ir.optimizer import Optimizer
from fsdpckpt.ir.state_shapes import ShownShapes, fits
from fsdpckpt.transform.assignment import in_any_order, in_order, may_fit_in_some_order
from tests.flat.flat_synthetic import whole


@pytest.mark.parametrize(
    ("shape", "states", "fit"),
    [
        ((5, 3), {"exp_avg": (5, 3), "exp_avg_sq": (5, 3)}, True),
        ((5, 3), {"exp_avg": (3, 5)}, False),
        ((5, 3), {"exp_avg": (15,)}, False),
        ((5, 3), {"exp_avg": (5,)}, False),  # a bias's state: one shape alone is never taken for a factor
        ((5, 3), {"row_var": (5, 1), "col_var": (1, 3)}, True),
        ((5, 5), {"exp_avg_sq_row": (5,), "exp_avg_sq_col": (5,)}, True),
        ((5, 3), {"v0": (5,), "v1": (3,)}, True),
        ((5, 3), {"v0": (5,), "v1": (4,)}, False),
        ((5, 3), {"v0": (5, 1), "v1": (1, 3)}, True),
        ((5, 3), {"v0": (5, 1), "v1": (1, 4)}, False),
        ((5, 3), {"state1": (5, 3), "absmax1": (1,), "qmap1": (256,)}, True),  # 8-bit blocks
        ((5, 3), {"exp_avg": (9, 3), "absmax": (1,)}, False),
        ((5, 3), {"step": ()}, True),
    ],
)
def test_what_states_say_about_the_shape_of_their_parameter(
    shape: tuple[int, ...], states: dict[str, tuple[int, ...]], fit: bool
) -> None:
    optim = Optimizer.of({0: {name: whole(*size) for name, size in states.items()}}, None)
    assert fits(shape, ShownShapes(optim).of(0)) is fit


def _all_answers(groups: list[int], names: int, allowed: list[list[bool]]) -> set[tuple[int, ...]]:
    """Every assignment by brute force: increasing names inside each group, no name twice."""
    chosen = [list(combinations(range(names), size)) for size in groups]
    found = set()
    for parts in product(*chosen):
        answer = tuple(name for part in parts for name in part)
        if len(set(answer)) == len(answer) and all(allowed[number][name] for number, name in enumerate(answer)):
            found.add(answer)
    return found


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_the_search_finds_an_only_answer_and_never_hides_a_second_one(data: st.DataObject) -> None:
    groups = data.draw(st.lists(st.integers(0, 3), min_size=1, max_size=3))
    names = data.draw(st.integers(sum(groups), 6)) if sum(groups) <= 6 else sum(groups)
    shapes = data.draw(st.lists(st.integers(0, 2), min_size=names, max_size=names))
    stated = data.draw(st.lists(st.integers(-1, 2), min_size=sum(groups), max_size=sum(groups)))
    allowed = [[want in (-1, shape) for shape in shapes] for want in stated]
    every = _all_answers(groups, names, allowed)
    found = in_order(groups, names, lambda number, name: allowed[number][name])
    assert found is not None and len(found) == min(len(every), 2)
    assert set(found) <= every and len(set(found)) == len(found)
    free = {
        chosen
        for chosen in permutations(range(names), sum(groups))
        if all(allowed[number][name] for number, name in enumerate(chosen))
    }
    only = in_any_order(sum(groups), names, lambda number, name: allowed[number][name])
    assert only is None or free == {only}
    assert may_fit_in_some_order(sum(groups), names, lambda number, name: allowed[number][name]) or not free


def test_a_name_that_an_id_has_is_free_for_no_other() -> None:
    fits = ({0, 1, 2}, {0}, {0, 1})
    assert in_any_order(3, 3, lambda number, name: name in fits[number]) == (2, 0, 1)
    assert in_any_order(2, 3, lambda number, name: name in fits[2 * number]) is None


def test_a_hundred_thousand_parameters_in_two_groups_are_named_in_a_moment() -> None:
    count = 100_000
    shapes = [(7, 5) if index % 2 else (5,) for index in range(count)]
    order = sorted(range(count), key=lambda index: len(shapes[index]) != 2)
    answers = in_order(
        [count // 2, count // 2], count, lambda number, name: len(shapes[name]) == 2 - number * 2 // count
    )
    assert answers == [tuple(order)]


def test_too_many_ways_to_try_prove_nothing() -> None:
    assert in_order([30, 30, 30, 30], 200, lambda number, name: number % 7 != name % 5) is None
