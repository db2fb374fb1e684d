"""Sizes as people write them."""

from __future__ import annotations

import pytest

from fsdpckpt.options import parse_size


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("1000", 1000),
        ("128MiB", 128 << 20),
        ("128mib", 128 << 20),
        ("5GB", 5_000_000_000),
        ("5 g", 5_000_000_000),
        ("1.5KiB", 1536),
        ("2T", 2_000_000_000_000),
        ("7B", 7),
    ],
)
def test_decimal_and_binary_units_are_told_apart(text: str, nbytes: int) -> None:
    assert parse_size(text) == nbytes


@pytest.mark.parametrize(
    "text", ["", "MiB", "12 parsecs", "1 2MB", "-5MB", "0x10", "nan", "inf", "infGB", "nanMiB", "1_000", "1e3", "3iB"]
)
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r".+"):
        parse_size(text)
