"""Ids and names: the map is the only one that fits, or it is refused with what would settle it."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations, permutations, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fsdpckpt.errors import NeedsInformationError, SourceCorruptError
from fsdpckpt.ir.checkpoint import Checkpoint, Container, Layout, Origin
from fsdpckpt.ir.dtypes import DTYPES
from fsdpckpt.ir.optimizer import Optimizer
from fsdpckpt.ir.state_shapes import ShownShapes, fits
from fsdpckpt.ir.tensors import Chunks, Slices, Tensor, Whole
from fsdpckpt.transform.assignment import in_any_order, in_order
from fsdpckpt.transform.order_sources import from_list, from_param_names
from fsdpckpt.transform.parameter_order import ParameterOrder
from fsdpckpt.transform.rekey import to_ids, to_names
from tests.ir.optimizers import with_entry, with_setting
from tests.transform.orders import order_of

SHAPES = {"e": (17, 9), "a": (28, 9), "b": (28,), "c": (9, 28), "n": (9,), "h": (9,)}


def _tensor(*shape: int, slices: bool = False) -> Tensor:
    return Tensor(
        DTYPES["float32"], shape, Chunks.whole(file=0, offset=0, shape=shape), cut=Slices() if slices else Whole()
    )


def _adam(shape: tuple[int, ...]) -> dict[str, object]:
    return {"step": _tensor(), "exp_avg": _tensor(*shape), "exp_avg_sq": _tensor(*shape)}


def _checkpoint(groups: list[list[int | str]] | None, shapes: dict[int | str, tuple[int, ...] | None]) -> Checkpoint:
    state = {key: _adam(shape) for key, shape in shapes.items() if shape is not None}
    listed = None if groups is None else [{"lr": 0.1 * n, "params": keys} for n, keys in enumerate(groups)]
    return Checkpoint(
        Origin("SRC", Layout.FULL, Container.TORCH, "plain", 1), files=(), model=None, optim=Optimizer.of(state, listed)
    )


def _order(names: str = "eabcnh", **more: object) -> ParameterOrder:
    known = {name: SHAPES[name] for name in names}
    return order_of(**{"names": tuple(names), "shapes": known, "source": "the order", **more})


def _groups(checkpoint: Checkpoint) -> list[object]:
    return [group["params"] for group in checkpoint.optim.param_groups]


def test_ids_of_one_group_are_the_parameters_in_their_order() -> None:
    source = _checkpoint([[0, 1, 2, 3, 4, 5]], dict(enumerate(SHAPES.values())))
    found = to_names(source, _order())
    assert _groups(found) == [list("eabcnh")] and list(found.optim.state) == list("eabcnh")
    assert found.optim.state["c"] is source.optim.state[3]
    assert found.notes[-1].kind == "rekeyed" and "the order" in found.notes[-1].message


def test_groups_by_dimension_are_told_apart_by_shapes() -> None:
    by_id = dict(enumerate([(17, 9), (28, 9), (9, 28), (28,), (9,), (9,)]))
    found = to_names(_checkpoint([[0, 1, 2], [3, 4, 5]], by_id), _order())
    assert _groups(found) == [["e", "a", "c"], ["b", "n", "h"]]
    assert list(found.optim.state) == ["e", "a", "c", "b", "n", "h"]


def test_groups_whose_members_look_alike_are_refused_with_the_candidates() -> None:
    by_id = dict(enumerate([(17, 9), (28, 9), (28,), (9,), (9, 28), (9,)]))
    with pytest.raises(NeedsInformationError) as error:
        to_names(_checkpoint([[0, 1, 2, 3], [4, 5]], by_id), _order())
    assert error.value.details == ("id 3 may be n or h", "id 5 may be h or n")
    assert error.value.exit_code == 4 and "--units" in error.value.next_step


def test_groups_that_the_source_knows_need_no_proof_by_shapes() -> None:
    by_id = dict(enumerate([(17, 9), (28, 9), (28,), (9,), (9, 28), (9,)]))
    order = _order(groups=(("e", "a", "b", "h"), ("c", "n")))
    assert _groups(to_names(_checkpoint([[0, 1, 2, 3], [4, 5]], by_id), order)) == [["e", "a", "b", "h"], ["c", "n"]]


def test_known_groups_of_other_lengths_contradict_the_optimizer() -> None:
    by_id = dict(enumerate(SHAPES.values()))
    with pytest.raises(SourceCorruptError, match="does not fit"):
        to_names(_checkpoint([[0, 1, 2, 3], [4, 5]], by_id), _order(groups=(("e", "a", "b"), ("c", "n", "h"))))


def test_two_parameters_of_another_order_contradict_by_shape_and_all_are_listed() -> None:
    with pytest.raises(SourceCorruptError) as error:
        to_names(_checkpoint([[0, 1, 2, 3, 4, 5]], dict(enumerate(SHAPES.values()))), _order("ecbanh"))
    assert len(error.value.details) == 2 and error.value.exit_code == 3
    assert "id 1" in error.value.details[0] and "id 3" in error.value.details[1]


def test_fewer_parameters_than_ids_is_an_error_and_not_a_shorter_map() -> None:
    with pytest.raises(SourceCorruptError) as error:
        to_names(_checkpoint([[0, 1, 2, 3, 4, 5]], dict(enumerate(SHAPES.values()))), _order("eabcn"))
    assert "the optimizer has 6 ids, the order 5 parameters" in error.value.details


def test_a_frozen_parameter_is_left_out_where_shapes_say_which() -> None:
    by_id = dict(enumerate([(17, 9), (28,), (9, 28), (9,), (9,)]))  # a is frozen
    assert _groups(to_names(_checkpoint([[0, 1, 2, 3, 4]], by_id), _order())) == [["e", "b", "c", "n", "h"]]


def test_a_frozen_parameter_that_could_be_another_one_is_refused() -> None:
    by_id = dict(enumerate([(17, 9), (28, 9), (28,), (9, 28), (9,)]))  # n or h is frozen
    with pytest.raises(NeedsInformationError) as error:
        to_names(_checkpoint([[0, 1, 2, 3, 4]], by_id), _order())
    assert error.value.details == ("id 4 may be n or h",)
    assert "--parameters" in error.value.next_step


def test_a_parameter_known_to_be_frozen_settles_it() -> None:
    by_id = dict(enumerate([(17, 9), (28, 9), (28,), (9, 28), (9,)]))
    found = to_names(_checkpoint([[0, 1, 2, 3, 4]], by_id), _order(uncertain=frozenset("n")))
    assert _groups(found) == [["e", "a", "b", "c", "h"]]


def test_states_of_no_or_other_shapes_say_nothing_but_the_count_does() -> None:
    source = _checkpoint([[0, 1, 2, 3, 4, 5]], {})
    state = {0: {"step": _tensor()}, 3: {"exp_avg": _tensor(5, slices=True)}, 4: {"note": "x"}}
    source.optim = source.optim.with_state(state)
    assert _groups(to_names(source, _order())) == [list("eabcnh")]


def test_an_uncertain_order_serves_only_where_every_shape_is_another_one() -> None:
    by_id = dict(enumerate([(17, 9), (28, 9), (28,), (9, 28), (9,)]))
    found = to_names(_checkpoint([[0, 1, 2, 3, 4]], by_id), _order("ncbae", ordered=False))
    assert _groups(found) == [["e", "a", "b", "c", "n"]]
    by_id[5] = (9,)
    with pytest.raises(NeedsInformationError) as error:
        to_names(_checkpoint([[0, 1, 2, 3, 4, 5]], by_id), _order(ordered=False))
    assert error.value.details == ("id 4 may be n, h", "id 5 may be n, h")


def test_ids_without_groups_need_an_order_made_for_it() -> None:
    source = _checkpoint(None, {0: (17, 9), 4: (9,)})
    with pytest.raises(NeedsInformationError):
        to_names(source, _order())
    assert list(to_names(source, _order(authoritative=True)).optim.state) == ["e", "n"]
    with pytest.raises(SourceCorruptError):
        to_names(_checkpoint(None, {0: (17, 9), 5: (28,)}), _order(authoritative=True))
    with pytest.raises(SourceCorruptError):
        to_names(_checkpoint(None, {6: (17, 9)}), _order(authoritative=True))


def test_groups_of_another_source_contradict_those_that_are_used() -> None:
    used, other = _order(groups=(("e", "a"), ("b",))), _order(groups=(("a", "e"), ("b",)))
    source = _checkpoint([[0, 1], [2]], {0: (17, 9), 1: (28, 9), 2: (28,)})
    with pytest.raises(SourceCorruptError) as error:
        to_names(source, used, [other])
    assert error.value.details[0].startswith("group 0: the order and the order list different parameters")
    with pytest.raises(SourceCorruptError) as other_number:
        to_names(source, used, [_order(groups=(("e", "a", "b"),))])
    assert other_number.value.details == ("the order has 2 groups, the order 1",)
    to_names(source, used, [_order(groups=None)])


def test_a_state_that_no_group_lists_and_an_id_listed_twice_are_errors() -> None:
    with pytest.raises(SourceCorruptError) as error:
        to_names(_checkpoint([[0, 1, 1]], {0: (17, 9), 7: (9,)}), _order())
    assert error.value.details == ("id 7 has states, and no group lists it", "id 1 is listed 2 times")


def test_entries_a_user_put_into_state_survive_both_ways() -> None:
    source = _checkpoint([[0, 1]], {0: (17, 9), 1: (28, 9)})
    source.optim = with_entry(source.optim, "mine", {"seen": 5})
    named = to_names(source, _order("ea"))
    assert list(named.optim.state) == ["e", "a", "mine"] and named.optim.state["mine"] == {"seen": 5}
    again = to_ids(named, _order("ea"))
    assert list(again.optim.state) == [0, 1, "mine"] and _groups(again) == [[0, 1]]


def test_names_get_ids_group_by_group_in_the_order_in_which_the_groups_list_them() -> None:
    named = _checkpoint([["h", "b", "n"], ["c", "e", "a"]], {name: SHAPES[name] for name in "hnbeca"})
    named.optim = with_setting(named.optim, 0, param_names=["m.h", "m.b", "m.n"])
    found = to_ids(named, _order())
    assert _groups(found) == [[0, 1, 2], [3, 4, 5]]
    assert {
        key: states is named.optim.state[name] for key, states, name in _numbered(found, "hbncea")
    } == dict.fromkeys(range(6), True)
    assert found.optim.param_groups[0]["param_names"] == ["m.h", "m.b", "m.n"]
    assert list(found.optim.state) == [0, 2, 1, 4, 3, 5]  # as in the source, as rekey_optim_state_dict leaves it
    (note,) = found.notes
    assert note.message.endswith("in the order of the optimizer's own groups, which is not that of the order")


def test_names_that_were_sorted_get_ids_in_the_order_of_the_model_and_a_warning() -> None:
    named = _checkpoint([["b", "h", "n"], ["a", "c", "e"]], {name: SHAPES[name] for name in "hbncea"})
    named.optim = with_setting(named.optim, 0, param_names=["m.b", "m.h", "m.n"])
    found = to_ids(named, _order())
    assert [states is named.optim.state[name] for _, states, name in _numbered(found, "bnheac")] == [True] * 6
    assert found.optim.param_groups[0]["param_names"] == ["m.b", "m.n", "m.h"]
    rekeyed, doubt = found.notes
    assert rekeyed.message.endswith("in the order of the order")
    assert doubt.kind == "unproved-order" and "sorted by name" in doubt.message and "--parameters" in doubt.message
    own = _order("hbncea", groups=(("h", "b", "n"), ("c", "e", "a")), in_model_order=False)
    listed = to_ids(named, own, [_order()])
    assert [states is named.optim.state[name] for _, states, name in _numbered(listed, "hbncea")] == [True] * 6


def test_one_list_that_is_not_sorted_shows_that_none_was() -> None:
    named = _checkpoint([["a", "b", "e"], ["h", "c", "n"]], {name: SHAPES[name] for name in "hbncea"})
    found = to_ids(named, _order())
    assert [states is named.optim.state[name] for _, states, name in _numbered(found, "abehcn")] == [True] * 6
    assert len(found.notes) == 1


def _numbered(checkpoint: Checkpoint, names: str) -> list[tuple[int, object, str]]:
    return [(number, checkpoint.optim.state[number], name) for number, name in enumerate(names)]


def test_a_parameter_without_state_still_takes_an_id() -> None:
    found = to_ids(_checkpoint([list("eabcnh")], {"a": (28, 9), "h": (9,)}), _order())
    assert _groups(found) == [[0, 1, 2, 3, 4, 5]] and list(found.optim.state) == [1, 5]


def test_names_that_the_order_lacks_or_has_in_another_shape_are_all_listed() -> None:
    named = _checkpoint([["e", "x", "b"]], {"e": (9, 17), "b": (28,), "x": (3,)})
    with pytest.raises(SourceCorruptError) as error:
        to_ids(named, _order())
    assert len(error.value.details) == 2
    assert (
        error.value.details[0] == "x is not in the order" and "e has states of shape [9, 17]" in error.value.details[1]
    )


def test_a_parameter_whose_state_is_listed_by_no_group_is_no_entry_of_a_user() -> None:
    with pytest.raises(SourceCorruptError, match="does not fit"):
        to_ids(_checkpoint([["e"]], {"e": (17, 9), "a": (28, 9)}), _order())


def test_names_cannot_get_ids_by_an_order_that_is_uncertain() -> None:
    named = _checkpoint([["a", "e"]], {"e": (17, 9), "a": (28, 9)})
    with pytest.raises(NeedsInformationError, match="cannot get ids"):
        to_ids(named, _order(ordered=False))
    listed = _checkpoint([["e", "a"]], {"e": (17, 9), "a": (28, 9)})
    assert _groups(to_ids(listed, _order(ordered=False))) == [[0, 1]]
    single = _checkpoint([["e"], ["a"]], {"e": (17, 9), "a": (28, 9)})
    assert _groups(to_ids(single, _order(ordered=False))) == [[0], [1]]


def test_names_without_groups_get_ids_by_an_explicit_order_only() -> None:
    named = _checkpoint(None, {"a": (28, 9)})
    with pytest.raises(NeedsInformationError, match="no param_groups"):
        to_ids(named, _order())
    assert list(to_ids(named, _order(authoritative=True)).optim.state) == [1]
    with pytest.raises(SourceCorruptError) as error:
        to_ids(_checkpoint(None, {"a": (28, 9), "b": (28,)}), _order("ea", authoritative=True))
    assert error.value.details == ("b is not in the order",)


def test_rebuilt_groups_get_ids_only_where_a_lost_group_would_not_matter() -> None:
    named = _checkpoint([["a", "e"]], {"e": (17, 9), "a": (28, 9)})
    named.optim = replace(named.optim, rebuilt=True)
    with pytest.raises(NeedsInformationError, match="a different order"):
        to_ids(named, _order())
    named.optim = with_setting(named.optim, 0, params=["e", "a"])
    assert _groups(to_ids(named, _order())) == [[0, 1]]


def test_a_second_source_of_the_same_sizes_in_another_order_is_a_contradiction() -> None:
    by_id = dict(enumerate(SHAPES.values()))
    source = _checkpoint([[0, 1, 2, 3, 4, 5]], by_id)
    with pytest.raises(SourceCorruptError) as error:
        to_names(source, from_list("eabchn"), [_order(source="the model")])
    assert "h where the other has n" in error.value.details[0]
    assert _groups(to_names(source, from_list("eabcnh"), [_order()])) == [list("eabcnh")]
    uncertain = _order("hncbae", ordered=False)  # sorted names say nothing about order, and contradict none
    assert _groups(to_names(source, from_list("eabcnh"), [uncertain])) == [list("eabcnh")]


def test_a_second_source_with_other_names_or_shapes_is_a_contradiction() -> None:
    source = _checkpoint([[0, 1]], {0: (17, 9), 1: (28, 9)})
    with pytest.raises(SourceCorruptError) as error:
        to_names(source, _order("ea", complete=True), [_order("eb")])
    assert error.value.details == ("a is not in the order", "b of the order is not in the order")
    other = order_of(("e", "a"), {"e": (17, 9), "a": (9, 28)}, "the reference")
    with pytest.raises(SourceCorruptError, match="contradict"):
        to_ids(_checkpoint([["e", "a"]], {}), _order("ea"), [other])


def test_a_list_of_names_takes_its_shapes_from_the_further_sources() -> None:
    by_id = {0: (28, 9), 1: (17, 9)}
    with pytest.raises(SourceCorruptError, match="does not fit"):
        to_names(_checkpoint([[0, 1]], by_id), from_list("ea"), [_order("ea")])


def test_param_names_of_one_group_contradict_the_order() -> None:
    source = _checkpoint([[0], [1]], {0: (17, 9), 1: (28, 9)})
    source.optim = with_setting(source.optim, 1, param_names=["_orig_mod.a"])
    assert _groups(to_names(source, _order("ea"))) == [["e"], ["a"]]
    source.optim = with_setting(source.optim, 1, param_names=["_orig_mod.x"])
    with pytest.raises(SourceCorruptError, match="param_names"):
        to_names(source, _order("ea"))


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
    optim = Optimizer.of({0: {name: _tensor(*size) for name, size in states.items()}}, None)
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


@pytest.mark.parametrize(
    ("recorded", "names"),
    [
        ([["e", "a"], ["b"]], ("e", "a", "b")),
        ([["e", "a"], None], None),
        ([["e", "a"], ["a"]], None),
        ([["e"], ["b"]], None),
        ([[], []], None),
    ],
    ids=["every key has one", "a group has none", "twice", "fewer than keys", "none at all"],
)
def test_names_in_the_groups_count_only_if_every_key_has_its_own(
    recorded: list[list[str] | None], names: tuple[str, ...] | None
) -> None:
    keys = [[0, 1], [2]] if any(recorded) else [[], []]
    groups = [{"params": own, "param_names": of} for own, of in zip(keys, recorded, strict=True)]
    found = from_param_names(Optimizer.of({key: _adam(SHAPES["b"]) for own in keys for key in own}, groups))
    assert (found.names if found is not None else None) == names
