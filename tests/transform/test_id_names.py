"""Ids by name: what each refusal lists, and which of several possible pools of names is dealt out."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from fsdpckpt.errors import NeedsInformationError, SourceCorruptError
from fsdpckpt.ir.checkpoint import Checkpoint, Layout
from fsdpckpt.ir.optimizer import Optimizer, ParamKey
from fsdpckpt.ir.tensors import Tensor
from fsdpckpt.ir.values import Value
from fsdpckpt.transform import assignment
from fsdpckpt.transform.parameter_order import ParameterOrder
from fsdpckpt.transform.rekey import to_ids, to_names
from tests.flat.flat_synthetic import checkpoint, whole
from tests.transform.orders import order_of

SHAPES = {"e": (17, 9), "a": (28, 9), "b": (28,), "c": (9, 28), "n": (9,), "h": (9,)}


def adam(*shape: int) -> dict[str, Tensor | Value]:
    return {"step": whole(), "exp_avg": whole(*shape)}


def source(groups: Sequence[Sequence[ParamKey]] | None, names: str, **more: Value) -> Checkpoint:
    """An optimizer whose ids 0, 1, ... have the states of ``names``; "-" has none."""
    state: dict[ParamKey, dict[str, Tensor | Value]] = {
        number: adam(*SHAPES[name]) for number, name in enumerate(names) if name != "-"
    }
    listed = [{"lr": 0.1, "params": list(group), **more} for group in groups] if groups is not None else None
    return checkpoint(1, optim=Optimizer.of(state, listed), layout=Layout.FULL)


def named(groups: Sequence[Sequence[str]] | None, **more: Value) -> Checkpoint:
    """The same keyed by name, its states in the order of its groups."""
    state: dict[ParamKey, dict[str, Tensor | Value]] = {
        name: adam(*SHAPES[name]) for group in groups or [list("eabcnh")] for name in group
    }
    listed = [{"lr": 0.1, "params": list(group), **more} for group in groups] if groups is not None else None
    return checkpoint(1, optim=Optimizer.of(state, listed), layout=Layout.FULL)


def order(names: str = "eabcnh", **more: object) -> ParameterOrder:
    known: dict[str, object] = {"shapes": {name: SHAPES[name] for name in names}, "source": "the order"}
    return order_of(names=tuple(names), **{**known, **more})  # type: ignore[arg-type]


def keys(found: Checkpoint) -> list[ParamKey]:
    assert found.optim is not None
    return list(found.optim.state)


def refused(
    held: Checkpoint, by: ParameterOrder, *others: ParameterOrder, error: type[Exception] = SourceCorruptError
) -> Exception:
    with pytest.raises(error) as caught:
        to_names(held, by, others)
    return caught.value


def test_nothing_changes_where_keys_are_right_already_or_there_are_none() -> None:
    by_id, by_name = source([[0]], "e"), named([["e"]])
    bare = checkpoint(1, layout=Layout.FULL)
    assert to_ids(by_id, order()) is by_id and to_names(by_name, order()) is by_name
    assert to_ids(bare, order()) is bare and to_names(bare, order()) is bare


def test_notes_say_how_many_and_from_where() -> None:
    found = to_names(source([[0, 1, 2]], "e-b"), order("eab"))
    assert found.notes[-1].message.startswith(
        "3 optimizer ids became 3 names, from the order; the states of 2 parameters"
    )
    assert to_ids(found, order("eab")).notes[-1].message == "3 optimizer keys became 3 ids, in the order of the order"


def test_what_groups_list_more_often_or_never_is_all_listed() -> None:
    wrong = refused(source([[0, 1, 1], [1]], "e-b"), order("eabc"))
    assert wrong.details == ("id 2 has states, and no group lists it", "id 1 is listed 3 times")


def test_every_contradiction_is_listed() -> None:
    by = order_of(tuple(f"p{number}" for number in range(30)), {f"p{n}": (4,) for n in range(30)}, "it")
    assert len(refused(source([range(30)], "e" * 30), by).details) == 30


# Groups that the order knows.


def test_groups_that_are_known_have_to_fit_in_shape() -> None:
    by = order(groups=(("e", "a"), ("b", "c")))
    assert keys(to_names(source([[0, 1], [2, 3]], "eabc"), by)) == list("eabc")
    assert refused(source([[0, 1], [2, 3]], "aebc"), by).details == (
        "id 0 has states of shape [28, 9], e is [17, 9]",
        "id 1 has states of shape [17, 9], a is [28, 9]",
    )


def test_groups_that_are_known_serve_ids_without_groups() -> None:
    by = order(groups=(("b", "c"), ("e",)))
    assert keys(to_names(source(None, "b-e"), by)) == ["b", "e"]
    assert refused(source(None, "bcee"), by).details == ("id 3 is beyond the 3 parameters of the order",)
    assert refused(source(None, "ec"), by).details == ("id 0 has states of shape [17, 9], b is [28]",)


def test_known_groups_of_other_sizes_are_both_shown() -> None:
    by = order(groups=(("e", "a"), ("b",)))
    assert refused(source([[0], [1, 2]], "eab"), by).details == (
        "groups of 1, 2 ids in the optimizer",
        "groups of 2, 1 parameters in the order",
    )


def test_an_id_without_groups_is_a_place_in_an_explicit_list() -> None:
    by = order(authoritative=True)
    assert keys(to_names(source(None, "-ab"), by)) == ["a", "b"]
    assert refused(source(None, "eabcnhh"), by).details == ("id 6 is beyond the 6 parameters of the order",)
    assert "id 0" in refused(source(None, "aab"), by).details[0]


def test_groups_may_number_their_ids_as_they_like() -> None:
    """A trimmed optimizer keeps the numbers it had: the places in the groups count."""
    state: dict[ParamKey, dict[str, Tensor | Value]] = {9: adam(17, 9), 4: adam(28)}
    held = checkpoint(1, optim=Optimizer.of(state, [{"params": [9]}, {"params": [4]}]), layout=Layout.FULL)
    for by in (order("eb", groups=(("e",), ("b",))), order("eb")):
        assert keys(to_names(held, by)) == ["e", "b"]


def test_an_optimizer_without_any_id_has_nothing_to_name() -> None:
    held = checkpoint(1, optim=Optimizer.of({}, []), layout=Layout.FULL)
    assert to_names(held, order()) is held


# One group, several, and names that the optimizer may lack.


def test_optional_names_are_left_out_where_the_others_are_enough_and_fit() -> None:
    by = order(uncertain=frozenset("n"))
    assert keys(to_names(source([[0, 1, 2, 3, 4]], "eabch"), by)) == list("eabch")


def test_an_optional_name_is_taken_where_the_others_are_too_few_or_do_not_fit() -> None:
    by = order("eabc", uncertain=frozenset("b"))
    assert keys(to_names(source([[0, 1, 2, 3]], "eabc"), by)) == list("eabc")
    assert keys(to_names(source([[0, 1, 2]], "eab"), by)) == list("eab")


def test_two_groups_leave_out_what_is_optional_first() -> None:
    by = order("eabcnh", uncertain=frozenset("n"))
    found = to_names(source([[0, 1, 2], [3, 4]], "eacbh"), by)
    assert [group["params"] for group in found.optim.param_groups] == [["e", "a", "c"], ["b", "h"]]  # type: ignore[union-attr]


def test_a_name_that_may_be_left_out_is_a_candidate_all_the_same() -> None:
    """Without it the shapes would settle the rest."""
    wrong = refused(source([[0, 1]], "eh"), order("eahn", uncertain=frozenset("n")), error=NeedsInformationError)
    assert wrong.details == ("id 1 may be h or n",)


def test_more_ways_than_can_be_tried_are_a_question(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(assignment, "_MAX_STEPS", -(10**6))
    wrong = refused(source([[0], [1]], "ea"), order("ea"), error=NeedsInformationError)
    assert wrong.why == "there are more ways to name them than can be tried" and wrong.details == ()


def test_too_few_names_and_no_name_of_a_shape_are_listed_together() -> None:
    wrong = refused(source([[0, 1], [2]], "ean"), order("eb"))
    assert wrong.details == (
        "the optimizer has 3 ids, the order 2 parameters",
        "id 1 has states of shape [28, 9], b is [28]",
        "id 1 has states of shape [28, 9], which no parameter of the order has",
        "id 2 has states of shape [9], which no parameter of the order has",
    )


def test_as_many_names_in_an_order_that_no_dealing_can_give() -> None:
    wrong = refused(source([[0, 1], [2]], "aeb"), order("eab"))
    assert wrong.details == (
        "id 0 has states of shape [28, 9], e is [17, 9]",
        "id 1 has states of shape [17, 9], a is [28, 9]",
    )
    more = refused(source([[0, 1], [2]], "aeb"), order("eabn"))
    assert more.details[0] == "the optimizer has 3 ids, the order 4 parameters"
    needed = refused(source([[0, 1], [2]], "aeb"), order("neab", uncertain=frozenset("n")))
    assert needed.details[0] == "the optimizer has 3 ids, the order 4 parameters" and len(needed.details) == 3
    assert needed.details[1] == "id 0 has states of shape [28, 9], e is [17, 9]"
    taken = refused(source([[0, 1], [2, 3]], "aebn"), order("neab", uncertain=frozenset("n")))
    assert taken.details[0] == "id 0 has states of shape [28, 9], n is [9]"


def test_what_would_settle_it_depends_on_what_is_open() -> None:
    one = refused(source([[0, 1]], "en"), order("enh", excludes_buffers=False), error=NeedsInformationError)
    assert one.details == ("id 1 may be n or h",) and one.why.endswith("do not decide which of them it has")
    assert "--buffers" in one.next_step and "--parameters" in one.next_step
    listed = refused(source([[0, 1]], "en"), order("enh", authoritative=True), error=NeedsInformationError)
    assert "--buffers" not in listed.next_step and "--parameters" in listed.next_step
    two = refused(source([[0], [1]], "nh"), order("nh"), error=NeedsInformationError)
    assert two.details == ("id 0 may be n or h", "id 1 may be h or n")
    assert two.why.endswith("do not decide which group has which of them")
    assert "a blank line between groups" in two.next_step and "--reference" in two.next_step
    frozen = refused(source([[0, 1]], "en"), order("enh"), error=NeedsInformationError)
    assert "--buffers" not in frozen.next_step and "--reference" not in frozen.next_step


@pytest.mark.parametrize("certain", [True, False])
def test_names_in_no_order_are_settled_by_shapes_or_shown(certain: bool) -> None:
    by = order("nhe", ordered=certain)
    groups = None if certain else [[0, 1, 2]]
    wrong = refused(source(groups, "nhe"), by, error=NeedsInformationError)
    assert wrong.details == ("id 0 may be n, h", "id 1 may be n, h")
    assert (
        "the groups that they are in are not" if certain else "the order of the parameters is not recorded"
    ) in wrong.why
    assert ("--reference" in wrong.next_step) is not certain
    assert "--parameters FILE with the names of the optimizer's parameters" in wrong.next_step
    assert keys(to_names(source(None if certain else [[0, 1]], "ae"), order("ea", ordered=certain))) == ["a", "e"]


@pytest.mark.parametrize("count", [4, 5])
def test_four_candidates_are_shown(count: int) -> None:
    names = "vwxyz"[:count]
    by = order_of(tuple(names), dict.fromkeys(names, (9,)), "it", ordered=False)
    wrong = refused(source([range(count)], "n" * count), by, error=NeedsInformationError)
    assert wrong.details[0] == "id 0 may be v, w, x, y" + (" and 1 more" if count == 5 else "")


def test_shapes_in_no_order_that_nothing_has_are_an_error_and_no_question() -> None:
    wrong = refused(source([[0, 1]], "en"), order("ea", ordered=False))
    assert wrong.details == ("id 1 has states of shape [9], which no parameter of the order has",)


# What groups say of names.


def test_param_names_are_held_against_the_order_under_any_wrapper() -> None:
    for lead in ("", "module.", "_orig_mod.", "_fsdp_wrapped_module."):
        held = source([[0, 1]], "ea", param_names=[f"{lead}e", f"{lead}a"])
        assert keys(to_names(held, order("ea"))) == ["e", "a"]
    wrong = refused(source([[0, 1]], "nh", param_names=["h", "_orig_mod.n"]), order("nh"))
    assert wrong.details == ("id 0 is h in param_names, n in the order", "id 1 is n in param_names, h in the order")


@pytest.mark.parametrize("param_names", [["h"], "nh", ["layer._flat_param", "_flat_param"], None])
def test_param_names_that_do_not_name_each_id_say_nothing(param_names: Value) -> None:
    assert keys(to_names(source([[0, 1]], "nh", param_names=param_names), order("nh"))) == ["n", "h"]


def test_param_names_follow_ids_and_stay_where_fsdp_sorted_the_keys_only() -> None:
    turned = named([["h", "n"]], param_names=["h", "n"])
    (group,) = to_ids(turned, order("nh")).optim.param_groups  # type: ignore[union-attr]
    assert group["params"] == [0, 1] and group["param_names"] == ["n", "h"]
    apart = named([["h", "n"]], param_names=["_orig_mod.n", "_orig_mod.h"])
    (group,) = to_ids(apart, order("nh")).optim.param_groups  # type: ignore[union-attr]
    assert group["param_names"] == ["_orig_mod.n", "_orig_mod.h"]
    fewer = named([["h", "n"]], param_names=["h"])
    (group,) = to_ids(fewer, order("nh")).optim.param_groups  # type: ignore[union-attr]
    assert group["param_names"] == ["h"]


# Names become ids.


def test_wrapped_names_get_the_ids_of_the_plain_ones() -> None:
    wrapped = {f"_orig_mod.{name}": adam(*SHAPES[name]) for name in "hn"}
    held = checkpoint(1, optim=Optimizer.of(dict(wrapped), [{"lr": 0.1, "params": list(wrapped)}]), layout=Layout.FULL)
    for by in (order("nh"), order("nh", groups=(("n", "h"),))):
        assert keys(to_ids(held, by)) == [1, 0]
    assert keys(to_ids(held, order("nh"), [order("hn", ordered=False)])) == [1, 0]


def test_a_name_in_another_group_than_the_order_says_is_listed() -> None:
    by = order("ean", groups=(("e", "a"), ("n",)))
    assert keys(to_ids(named([["a", "e"], ["n"]]), by)) == [1, 0, 2]
    with pytest.raises(SourceCorruptError) as error:
        to_ids(named([["e"], ["n", "a"]]), by)
    assert error.value.details == ("a is not in group 1 of the order",)
    with pytest.raises(SourceCorruptError) as error:
        to_ids(named([["e", "a"], ["n"]]), order("ean", groups=(("e", "a", "n"),)))
    assert error.value.details == ("n is not in group 1 of the order",)


def test_names_without_groups_get_ids_by_the_groups_of_the_order() -> None:
    held = named(None)
    by = order(groups=(("c", "h"), ("e", "a", "b", "n")), authoritative=True)
    assert keys(to_ids(held, by)) == [2, 3, 4, 0, 5, 1]
    assert keys(to_ids(held, order("hncbae", authoritative=True))) == [5, 4, 3, 2, 1, 0]


def test_a_name_listed_twice_is_an_error() -> None:
    with pytest.raises(SourceCorruptError) as error:
        to_ids(named([["e", "a"], ["e"]]), order("ea"))
    assert error.value.details == ("e is listed 2 times",)


def test_states_under_both_kinds_of_key_are_an_error_and_nothing_is_lost() -> None:
    held = source([[0, 1]], "nh")
    assert held.optim is not None
    both = checkpoint(1, optim=Optimizer.of({**held.optim.state, "h": adam(9)}, held.optim.param_groups))
    wrong = refused(both, order("nh"))
    assert wrong.details == ("h",)
    first, _ = held.optim.state.values()
    without_states = checkpoint(1, optim=Optimizer.of({0: first, "h": adam(9)}, held.optim.param_groups))
    assert refused(without_states, order("nh")).details == ("h",)  # not the states of id 1, which has none
    kept = checkpoint(1, optim=Optimizer.of({**held.optim.state, "user": adam(9)}, held.optim.param_groups))
    assert keys(to_names(kept, order("nh"))) == ["n", "h", "user"]
    back = to_names(held, order("nh")).optim
    assert back is not None
    numbered = checkpoint(1, optim=Optimizer.of({**back.state, 7: {"x": 1}}, back.param_groups))
    assert keys(to_ids(numbered, order("nh"))) == [0, 1, 7]


def test_a_group_without_params_stays_as_it_is() -> None:
    held = source([[0, 1]], "nh")
    assert held.optim is not None and held.optim.param_groups is not None
    odd = checkpoint(
        1, optim=Optimizer.of(held.optim.state, [*held.optim.param_groups, {"lr": 7, "param_names": ["x"]}])
    )
    found = to_names(odd, order("nh"))
    assert found.optim is not None and found.optim.param_groups is not None
    assert found.optim.param_groups[1] == {"lr": 7, "param_names": ["x"]}
