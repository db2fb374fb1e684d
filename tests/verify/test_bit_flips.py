"""One changed bit, in every container: found, or it makes no difference, or the container has no checksum of it.

``scripts/bit_flips.py`` tries every byte; here a sample is tried.
"""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import pytest

from tests.verify.bit_flips import FORMS, PROTECTED, WITHOUT_CHECKSUMS, WRITTEN, flip_each, make, places

SAMPLE = 25  # bytes of each form


def sampled(form: str, tmp_path: Path) -> Counter[str]:
    whole = make(form, tmp_path)
    chosen = random.Random(form).sample(places(whole), SAMPLE)
    return Counter(outcome.kind for outcome in flip_each(whole, chosen, tmp_path))


@pytest.mark.parametrize("form", WRITTEN)
def test_beside_its_manifest_no_bit_of_a_checkpoint_changes_unnoticed_by_verify_or_convert(
    form: str, tmp_path: Path
) -> None:
    assert sampled(form, tmp_path) == {"found": SAMPLE}


@pytest.mark.parametrize("form", [form for form in FORMS if form not in {*WRITTEN, *WITHOUT_CHECKSUMS}])
def test_without_one_a_bit_is_found_by_the_checksums_of_records_or_makes_no_difference(
    form: str, tmp_path: Path
) -> None:
    assert set(sampled(form, tmp_path)) <= PROTECTED
