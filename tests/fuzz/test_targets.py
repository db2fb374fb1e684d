"""Each parser on damaged files, the same ones at each run; ``scripts/fuzz`` goes on for as long as one likes."""

from __future__ import annotations

import random

import pytest

from tests.fuzz.corpus import seeds
from tests.fuzz.mutations import mutated
from tests.fuzz.targets import TARGETS, harmless

INPUTS = {"torch": 400, "safetensors-index": 400, "dcp-metadata": 400}  # the slower ones


@pytest.mark.parametrize("name", TARGETS)
def test_the_files_that_damage_begins_with_are_understood(name: str) -> None:
    corpus = seeds(name)
    parsed = [harmless(TARGETS[name], data) for data in corpus]
    assert any(parsed) or name == "safetensors-index"  # its shard would have to be the same bytes


@pytest.mark.parametrize("name", TARGETS)
def test_damage_is_refused_in_our_words_or_not_noticed(name: str) -> None:
    corpus = seeds(name)
    generator = random.Random(11)
    refused = 0
    for _ in range(INPUTS.get(name, 1500)):
        data = mutated(generator, corpus[:40])
        refused += not harmless(TARGETS[name], data)
    assert refused or name == "values-json"
