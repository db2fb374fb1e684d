"""The truth that every other test here compares with agrees with the slices in the ranks' own files."""

from __future__ import annotations

import pytest

from tests.e2e.flattened.cases import Variant, load
from tests.oracle.compare import differences
from tests.oracle.flat_naive import optimizer_states, parameters
from tests.oracle.flat_scenarios import variants
from tests.oracle.session import Oracle

CASES = [
    pytest.param(Variant(entry.name, orig), world, id=f"{entry.name}-{'orig' if orig else 'flat'}-of-{world}")
    for world in (1, 2, 3, 4)
    for entry, orig in variants(world)
]


@pytest.mark.parametrize(("variant", "world"), CASES)
def test_the_full_state_pytorch_gathers_is_the_slices_put_together(
    oracle: Oracle, variant: Variant, world: int
) -> None:
    directory = variant.directory(oracle, world)
    truth = load(directory / "truth.pt")
    weights = parameters(directory)
    assert weights
    assert differences(weights, {name: truth["model"][name] for name in weights}) == []
    assert differences(optimizer_states(directory, orig=variant.orig), truth["optimizer"]["state"]) == []


def test_slices_of_another_run_are_another_state(oracle: Oracle) -> None:
    one, other = (Variant("nested", True).directory(oracle, world) for world in (2, 3))
    assert differences(optimizer_states(one, orig=True), load(other / "truth.pt")["optimizer"]["state"])
