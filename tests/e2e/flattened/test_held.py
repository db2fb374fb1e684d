"""What is written for rank r of N is what real FSDP1 holds there: on Gloo for 2 and 3 ranks, played for others.

Each scenario is loaded by 2 ranks with one value of ``use_orig_params`` and by 3 ranks with the other: every scenario
meets every number of live ranks and every value. Three ranks divide nothing evenly, so what they do not load is
compared with played ranks. Five of eight ranks are compared, of more a few.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from tests.e2e.flattened.cases import Case, Variant, held_results
from tests.oracle.flat_scenarios import SCENARIOS
from tests.oracle.session import Oracle

EVERY = [Variant(entry.name, orig) for entry in SCENARIOS for orig in entry.orig]
FAR = [Variant("tiny", False)]
DEEP = [v for v in EVERY if v.scenario in ("nested", "tiny", "transformer", "mixed", "channels_last", "ignored")]
NOT_LOADED = ("odd_states", "named", "keyed", "hybrid", "adagrad", "frozen_all")  # torch.optim cannot take these
OTHER_WRAP = [("nested", "rewrapped"), ("rewrapped", "nested"), ("nested", "outside"), ("nested", "no_shard")]
OTHER_WRAP += [
    ("no_shard", "nested"),
    ("nested", "mixed"),
    ("mixed", "nested"),
    ("nested", "grad_op"),
    ("grad_op", "nested"),
]
SOME_RANKS = {8: (0, 1, 3, 6, 7), 16: (0, 1, 7, 14, 15), 64: (0, 1, 30, 62, 63), 512: (0, 1, 40, 90, 510, 511)}


def _fits(variant: Variant, world: int) -> bool:
    return variant.entry.group is None or world % variant.entry.group == 0


def _trained(variant: Variant, *wanted: int) -> int:
    """The first of these world sizes it was trained at, else its last."""
    return next((world for world in wanted if world in variant.entry.worlds), variant.entry.worlds[-1])


def _turn(onto: int) -> list[Variant]:
    """Half of the variants, the other half for an odd number of ranks; a scenario's two part."""
    return [v for v in EVERY if (SCENARIOS.index(v.entry) + v.orig + onto // 4) % 2 == onto % 2 or v.entry.group]


def _deep(onto: int) -> list[Variant]:
    """Half of ``DEEP`` for 16 ranks, the others for 64."""
    return [v for number, v in enumerate(DEEP) if (number // 2 + number + onto // 64) % 2]


def _rewrapped(onto: int) -> Iterator[Case]:
    """Sources of other units and of the other ``use_orig_params``: half of them for 2 ranks, the others for 3."""
    for number, (one, other) in enumerate(OTHER_WRAP):
        if number % 2 == onto % 2:
            orig = bool(number // 2 % 2)
            source, target = Variant(one, not orig), Variant(other, orig)
            yield Case(source, _trained(Variant(one, orig), 3), "flat", target, onto, load=True)


def _same(onto: int, variants: list[Variant]) -> Iterator[Case]:
    """Flattened files of another world for ``onto`` ranks, wrapped as they were."""
    for variant in variants:
        if variant.entry.group is None:
            load = variant.scenario not in NOT_LOADED
            yield Case(variant, _trained(variant, *((3,) if onto == 2 else (4, 2))), "flat", variant, onto, load=load)


def _live(onto: int) -> Iterator[Case]:
    """For ``onto`` real ranks, which load them and go on."""
    yield from _same(onto, _turn(onto))
    yield from _rewrapped(onto)


def _played(onto: int) -> Iterator[Case]:
    ranks = SOME_RANKS.get(onto, ())
    if onto == 3:
        yield from (replace(case, load=False) for case in _same(3, [v for v in EVERY if v not in _turn(3)]))
        return
    turns = {4: _turn(onto), 16: _deep(onto), 64: _deep(onto), 512: FAR}
    for variant in turns.get(onto, DEEP):
        if _fits(variant, onto):
            form = "truth.pt" if onto in (1, 4, 5, 64) or variant.entry.group else "flat"
            yield Case(variant, _trained(variant, 1 if onto == 8 else 3), form, variant, onto, ranks)
    for one, other in OTHER_WRAP if onto == 16 else ():
        for orig in (True, False):
            yield Case(
                Variant(one, not orig), _trained(Variant(one, orig), 3), "flat", Variant(other, orig), onto, ranks
            )
    for number, group in enumerate({8: (2, 4), 16: (2, 4, 8), 64: (2, 4, 8)}.get(onto, ())):
        variant = Variant("hybrid", bool(number % 2) is (onto == 16))
        yield Case(variant, 4, "truth.pt", variant, onto, ranks, group=group)
    if onto == 8:
        for source, group in ((Variant("nested", True), 4), (Variant("nested", False), 2)):
            yield Case(source, 3, "flat", Variant("hybrid", source.orig), 8, group=group)
        for variant in EVERY:
            if variant.entry.mix and variant.entry.group is None:
                yield Case(variant, 3, "sharded", variant, onto)


LIVE = {onto: list(_live(onto)) for onto in (2, 3)}
PLAYED = {onto: list(_played(onto)) for onto in (1, 3, 4, 5, 8, 16, 64, 512)}


def _parameters(tables: dict[int, list[Case]]) -> list[object]:
    return [pytest.param(onto, case, id=case.id) for onto, cases in tables.items() for case in cases]


Results = Callable[[int], dict[str, list[str]]]


@pytest.fixture
def live(oracle: Oracle) -> Results:
    return lambda onto: held_results(oracle, f"flattened-live-{onto}", LIVE[onto], live=True)


@pytest.fixture
def played(oracle: Oracle) -> Results:
    return lambda onto: held_results(oracle, f"flattened-played-{onto}", PLAYED[onto])


@pytest.mark.parametrize(("onto", "case"), _parameters(LIVE))
def test_a_real_rank_holds_what_was_written_for_it_and_trains_on(live: Results, onto: int, case: Case) -> None:
    assert live(onto)[case.id] == []


@pytest.mark.parametrize(("onto", "case"), _parameters(PLAYED))
def test_a_rank_of_a_larger_world_holds_what_was_written_for_it(played: Results, onto: int, case: Case) -> None:
    assert played(onto)[case.id] == []


@pytest.mark.parametrize("onto", [2, 16])
def test_the_comparison_notices_the_weights_of_another_run(live: Results, played: Results, onto: int) -> None:
    results = live(onto) if onto in LIVE else played(onto)
    for section in ("model", "optim"):
        assert any(section in problem and "differ" in problem for problem in results["control"])
