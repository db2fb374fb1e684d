"""The sources, and what one process makes of them: once per test session."""

from __future__ import annotations

from pathlib import Path

import pytest

import fsdpckpt
from tests.e2e.distributed.cases import CASES, make_sources
from tests.oracle.session import Oracle


def _make(base: Path) -> None:
    make_sources(base / "disk")
    (base / "local").mkdir()
    for source, target, given in CASES.values():
        fsdpckpt.convert(base / "disk" / source, base / "local" / target, **given)


@pytest.fixture(scope="session")
def base(oracle: Oracle) -> Path:
    """``disk``: the sources. ``local``: every one of ``CASES``, converted by one process."""
    return oracle.once("distributed", _make)
