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
from tests.fuzz.layouts import SAVED, WRITTEN
from tests.fuzz.mutations import mutated
from tests.fuzz.targets import TARGETS, harmless

FEWER = {
    **{f"{kind}-checkpoint": 100 for kind in SAVED},
    **{f"{kind}-checkpoint": 400 for kind in ("zero", "universal", "megatron", "nanotron", "torch_checkpointing")},
    **{f"{kind}-checkpoint": 200 for kind in ("autotp", "experts", "megatron-torch", "written")},
    **dict.fromkeys(("torch", "dcp-metadata", "file-names", "dcp-checkpoint"), 400),
    **dict.fromkeys(("torch-checkpoint", "rank-files"), 600),
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
    for _ in range(FEWER.get(name, 1500)):
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
