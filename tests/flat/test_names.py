"""Units that agree with every length and stand in another order than the checkpoint: sizes cannot tell them apart."""

from __future__ import annotations

import pytest

from fsdpckpt.flat.match import FlatMatch, Mismatch, match
from fsdpckpt.flat.names import first_misplaced_module, order_contradictions
from fsdpckpt.flat.units import Settings, build_units
from fsdpckpt.ir.checkpoint import Checkpoint, Container
from fsdpckpt.ir.units import Units
from tests.flat.flat_synthetic import checkpoint, local_model, named, optimizer, sharded_model
from tests.ir.checkpoints import with_origin

LABEL = "the model section"
SAME = tuple(named(f"{layer}.{name}", 7, 7) for layer in ("a", "b.0", "b.1") for name in ("up", "down"))
PREFIXES = ("", "a", "b.0", "b.1")


def of(order: str, *, orig: bool) -> Units:
    """Units of the six parameters, in the order of their numbers."""
    return build_units([SAME[int(number)] for number in order], PREFIXES, Settings(orig))


def in_order(order: str) -> list[str]:
    return [SAME[int(number)].name for number in order]


def said(found: FlatMatch | Mismatch) -> str:
    return "\n".join(found.contradictions) if isinstance(found, Mismatch) else ""


def beside_weights(units: Units) -> Checkpoint:
    """Whole weights in the model's order beside the optimizer's slices, as verl saves."""
    return checkpoint(4, model=sharded_model(SAME), optim=optimizer(units, 4))


@pytest.mark.parametrize("orig", [False, True])
@pytest.mark.parametrize("order", ["230145", "014523", "103245"])
def test_equal_units_in_another_order_than_the_weights_beside_them_are_refused(order: str, orig: bool) -> None:
    source = beside_weights(of("012345", orig=orig))
    assert isinstance(match(source, of("012345", orig=orig)), FlatMatch)
    assert " differs" in said(match(source, of(order, orig=orig)))


def test_weights_whose_keys_were_sorted_or_lost_their_order_contradict_nothing() -> None:
    units = of("230145", orig=True)
    source = checkpoint(4, model=sharded_model(SAME), optim=optimizer(units, 4))
    for unordered in (with_origin(source, container=Container.SAFETENSORS), source.without_order()):
        assert isinstance(match(unordered, units), FlatMatch)


@pytest.mark.parametrize("orig", [False, True])
def test_the_order_of_flat_parameters_says_which_of_two_equal_units_an_id_is(orig: bool) -> None:
    units = of("012345", orig=orig)
    source = checkpoint(4, model=local_model(units, 4, by_name=orig), optim=optimizer(units, 4))
    assert isinstance(match(source, units), FlatMatch)
    assert "the order of units differs: b.1 in the units" in said(match(source, of("014523", orig=orig)))


def test_slices_by_name_say_the_order_inside_of_a_unit() -> None:
    """On 2 ranks four equal parameters lie two on each: no length changes when two of one rank trade places."""
    params = [named(name, 8) for name in ("w", "x", "y", "z")]
    units = build_units(params, ("",), Settings(use_orig_params=True))
    source = checkpoint(2, model=local_model(units, 2, by_name=True), optim=optimizer(units, 2))
    other = build_units([params[1], params[0], *params[2:]], ("",), Settings(use_orig_params=True))
    assert "x in the units, w in the model section" in said(match(source, other))


def test_a_unit_may_be_listed_before_or_after_those_in_it() -> None:
    units = ["", "a", "b", "b.x", "b.y", "c"]
    assert first_misplaced_module(units, ["a", "b.x", "b.y", "b", "c", ""]) is None
    assert first_misplaced_module(units, ["", "a", "b", "b.x", "b.y", "c"]) is None
    assert first_misplaced_module(units, ["a", "b.y", "b.x", "b", "c", ""]) == ("b.x", "b.y")
    assert first_misplaced_module(units, ["b.x", "a", "b.y", "b", "c", ""]) == ("a", "b")


NESTED = build_units([named("a", 3), named("b.w", 3), named("c", 3)], ("", "b"), Settings(use_orig_params=True))
OUTSIDE, OUTSIDE_LATER = (
    build_units([SAME[int(number)] for number in order], PREFIXES, Settings(use_orig_params=True),
                unmanaged=["b.0.up", "b.0.down"])
    for order in ("012345", "014523")
)  # fmt: skip
CASES: dict[str, tuple[Units, list[str], list[str]]] = {
    "names that only one side has": (
        of("012345", orig=True), ["buffer", *(param.name for param in SAME[2:]), "other"], []),
    # The writer of a model lists them first, whatever list the units were made of
    "own parameters before those of children": (NESTED, ["a", "c", "b.w"], []),
    "own parameters behind them, in another order": (NESTED, ["c", "b.w", "a"], [
        "the order of parameters differs in the root unit: a in the units, c in the model section"]),
    "units that are wrong inside and among each other are told once": (of("103254", orig=True), in_order("230145"), [
        "the order of parameters differs in unit 'a': a.down in the units, a.up in the model section"]),
    "units in another order": (of("012345", orig=True), in_order("230145"), [
        "the order of modules differs: a in the units, b in the model section"]),
    # FSDP1 registers the parameters it manages again, behind those that it ignores
    "parameters beside the units may stand before": (OUTSIDE, in_order("014523"), []),
    "and after": (OUTSIDE_LATER, in_order("012345"), []),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_an_order_that_contradicts_units_is_said(name: str) -> None:
    units, names, says = CASES[name]
    assert list(order_contradictions(units, names, LABEL)) == says
    if name == "units in another order":  # where only the order within units is known
        assert list(order_contradictions(units, names, LABEL, across=False)) == []
