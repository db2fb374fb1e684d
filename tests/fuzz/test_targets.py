"""Each parser on damaged files, the same ones at each run; ``scripts/fuzz`` goes on for as long as one likes.

What it found before is in ``found.tar.xz``: one that comes to another end is a change of the parser to be looked at.
"""

from __future__ import annotations

import random

import pytest

from fsdpckpt.producers.recognition import all_flavors
from tests.fuzz.checkpoints import opened
from tests.fuzz.corpus import seeds
from tests.fuzz.dictionary import dictionary
from tests.fuzz.found import found
from tests.fuzz.layouts import CHANGED, SAVED, WRITTEN
from tests.fuzz.mutations import mutated
from tests.fuzz.targets import TARGETS, harmless

INPUTS = {"torch": 400, "dcp-metadata": 400, "file-names": 400, "dcp-checkpoint": 400, "torch-checkpoint": 600} | {
    "rank-files": 600,
    "megatron-checkpoint": 400,
    "zero-checkpoint": 400,
    "universal-checkpoint": 400,
    "autotp-checkpoint": 200,
    "experts-checkpoint": 200,
    "megatron-ranks": 200,
    "nanotron-checkpoint": 400,
    "torch-checkpointing-checkpoint": 400,
    "written-checkpoint": 200,
    **{f"{kind}-checkpoint": 100 for kind in CHANGED},
}
LENIENT = frozenset({"manifest", "journal", "index-page"})  # what is damaged there says nothing


@pytest.mark.parametrize("name", TARGETS)
def test_the_files_that_damage_begins_with_are_understood(name: str) -> None:
    corpus = seeds(name)
    parsed = [harmless(TARGETS[name], data) for data in corpus]
    assert any(parsed)
    assert dictionary(name)


@pytest.mark.parametrize("name", TARGETS)
def test_damage_is_refused_in_our_words_or_not_noticed(name: str) -> None:
    corpus = seeds(name)
    generator = random.Random(11)
    refused = 0
    for _ in range(INPUTS.get(name, 1500)):
        data = mutated(generator, corpus[:40])
        refused += not harmless(TARGETS[name], data)
    assert (refused == 0) == (name in LENIENT)


@pytest.mark.parametrize("name", TARGETS)
def test_what_fuzzing_has_found_comes_to_the_same_end_as_then(name: str) -> None:
    changed = [each for each, data, parsed in found(name) if harmless(TARGETS[name], data) != parsed]
    assert not changed


def test_every_flavor_has_a_target() -> None:
    """Its checkpoints are in ``layouts``, which the collections of damaged and hostile files go through, too."""
    known = {*WRITTEN, *(opened(kind).flavor for kind in SAVED)}
    files_of_others = {"composer", "trainer-ddp"}  # torch and safetensors files, which have targets
    assert {flavor.name for flavor in all_flavors()} - known == files_of_others
