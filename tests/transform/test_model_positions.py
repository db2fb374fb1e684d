"""Ids that count over all parameters of the model, as ``FSDP.rekey_optim_state_dict`` does without the optimizer."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fsdpckpt.errors import NeedsInformationError
from fsdpckpt.ir import IdRule
from fsdpckpt.ir.checkpoint import Checkpoint, Layout
from fsdpckpt.ir.optimizer import Optimizer, ParamKey
from fsdpckpt.ir.tensors import Tensor
from fsdpckpt.ir.values import Value
from fsdpckpt.transform.model_positions import by_place, counts_over_model
from fsdpckpt.transform.order_sources import from_list, from_param_names
from fsdpckpt.transform.rekey import recounted, to_ids, to_names
from tests.flat.flat_synthetic import checkpoint, whole
from tests.ir.checkpoints import with_origin
from tests.ir.optimizers import with_setting
from tests.transform.orders import order_of

MODEL = order_of(tuple("abcde"), dict.fromkeys("abcde", (3,)), "the model", uncertain=frozenset("b"))


def optimizer(groups: Sequence[Sequence[ParamKey]]) -> Checkpoint:
    state: dict[ParamKey, dict[str, Tensor | Value]] = {key: {"exp_avg": whole(3)} for group in groups for key in group}
    listed = [{"lr": 0.1 * number, "params": list(group)} for number, group in enumerate(groups)]
    return checkpoint(1, optim=Optimizer.of(state, listed), layout=Layout.FULL)


def lists(held: Checkpoint) -> list[object]:
    assert held.optim is not None and held.optim.param_groups is not None
    return [group["params"] for group in held.optim.param_groups]


def test_ids_out_of_the_order_of_the_groups_are_places_in_the_model() -> None:
    """A frozen parameter has a place, and shapes say nothing here."""
    named = to_names(optimizer([[0, 4], [2]]), MODEL)
    assert lists(named) == [["a", "e"], ["c"]]
    assert lists(to_ids(named, MODEL, rule=IdRule.MODEL)) == [[0, 4], [2]]
    assert lists(to_ids(named, MODEL)) == [[0, 1], [2]]
    assert lists(recounted(optimizer([[0, 4], [2]]))) == [[0, 1], [2]]
    assert not counts_over_model([[0, 1], [2]]) and counts_over_model([[1, 2]]) and counts_over_model([[1], [0]])
    assert not counts_over_model([[4, 0], [2]])  # FSDP sorts what it lists


def test_a_source_that_knows_the_groups_names_the_places_in_whatever_order_it_lists_them() -> None:
    """Even where buffers may be among the names, and beside ``param_names`` that FSDP left in the optimizer's order."""
    doubtful = order_of(MODEL.names, MODEL.shapes, "the model", doubtful=frozenset("bd"))
    known = order_of(tuple("eac"), MODEL.shapes, "it", groups=(("e", "a"), ("c",)), in_model_order=False)
    assert lists(to_names(optimizer([[0, 3], [2]]), known, [doubtful])) == [["a", "e"], ["c"]]
    assert lists(to_names(optimizer([[0, 3], [2]]), doubtful, [known])) == [["a", "e"], ["c"]]
    held = optimizer([[0, 4], [2]])
    assert held.optim is not None
    for number, names in enumerate((["e", "a"], ["c"])):
        held.optim = with_setting(held.optim, number, param_names=list(names))
    words = from_param_names(held.optim)
    assert words is not None
    assert lists(to_names(held, words, [MODEL])) == [["a", "e"], ["c"]]


def test_what_may_be_a_buffer_is_a_question_only_before_the_last_id() -> None:
    for doubtful, settled in (("b", False), ("e", True)):
        order = order_of(MODEL.names, MODEL.shapes, "the model", doubtful=frozenset(doubtful))
        named = optimizer([["d"], ["a"]])
        if settled:
            assert lists(to_ids(named, order, rule=IdRule.MODEL)) == [[3], [0]]
            assert lists(to_names(optimizer([[3], [0]]), order)) == [["d"], ["a"]]
            continue
        with pytest.raises(NeedsInformationError, match="may be frozen parameters or buffers") as asked:
            to_ids(named, order, rule=IdRule.MODEL)
        assert asked.value.details == ("b",) and "--buffers" in str(asked.value.next_step)
        with pytest.raises(NeedsInformationError, match="for certain"):
            to_names(optimizer([[3], [0]]), order)
        listed = from_list("acd")  # which says that b is no parameter
        assert lists(to_ids(named, listed, [order], rule=IdRule.MODEL)) == [[2], [0]]


def test_plain_tensors_beside_distributed_ones_are_buffers_unless_the_user_says_otherwise() -> None:
    order = order_of(MODEL.names, MODEL.shapes, "the model", plain=frozenset("be"))
    named = optimizer([["d"], ["a"]])
    found = to_ids(named, order, rule=IdRule.MODEL)
    assert lists(found) == [[2], [0]] and lists(to_names(found, order)) == [["d"], ["a"]]
    assert "; b is taken for a buffer" in found.notes[-1].message and "--parameters" in found.notes[-1].message
    assert lists(to_ids(named, order, [from_list("abcde")], rule=IdRule.MODEL)) == [[3], [0]]


def test_ids_that_count_by_group_get_places_only_through_names() -> None:
    assert recounted(optimizer([[0, 1], [2]])).notes == ()
    shapes = dict.fromkeys("abcde", (3,))
    units = order_of(tuple("abcde"), shapes, "units", groups=(("d", "e"), tuple("abc")))
    named = to_names(optimizer([[0, 1], [2, 3, 4]]), units)
    assert lists(to_ids(named, MODEL, rule=IdRule.MODEL)) == [[3, 4], [0, 1, 2]]


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_the_search_finds_the_only_answer_and_never_hides_a_second_one(data: st.DataObject) -> None:
    names = data.draw(st.integers(1, 6))
    numbers = data.draw(st.permutations(range(names)))[: data.draw(st.integers(1, names))]
    optional = data.draw(st.sets(st.integers(0, names - 1)))
    shapes = data.draw(st.lists(st.integers(0, 1), min_size=names, max_size=names))
    stated = data.draw(st.lists(st.integers(-1, 1), min_size=len(numbers), max_size=len(numbers)))

    def fits(number: int, name: int) -> bool:
        return stated[number] in (-1, shapes[name])

    every: set[tuple[int, ...]] = set()
    for count in range(len(optional) + 1):
        for absent in combinations(sorted(optional), count):
            parameters = [name for name in range(names) if name not in absent]
            if max(numbers) < len(parameters):
                answer = tuple(parameters[number] for number in numbers)
                if all(fits(at, name) for at, name in enumerate(answer)):
                    every.add(answer)
    found = by_place(numbers, names, optional, fits)
    assert len(found) == min(len(every), 2) and set(found) <= every


def test_ids_without_gaps_are_those_of_torch_optim_where_the_known_groups_leave_no_other_way() -> None:
    held = with_origin(optimizer([[0, 1], [2, 3]]), flavor="lightning")
    shapes = dict.fromkeys("abcd", (3,))
    known = order_of(tuple("cabd"), shapes, authoritative=True, groups=(("c", "a"), ("b", "d")), in_model_order=False)
    assert lists(to_names(held, known, [order_of(tuple("abcd"), shapes)])) == [["c", "a"], ["b", "d"]]
    with pytest.raises(NeedsInformationError, match="cannot name the 4 optimizer ids") as error:
        to_names(held, known)
    assert "--parameters" in str(error.value.next_step)
