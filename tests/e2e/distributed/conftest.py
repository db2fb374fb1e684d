"""The sources, and what one process makes of them: once per test session."""

from __future__ import annotations

from pathlib import Path

import pytest

from fsdpckpt.comm.protocol import Solo
from fsdpckpt.converters.pipeline import convert
from fsdpckpt.progress import NoProgress
from tests.e2e.distributed.cases import CASES, make_sources, options
from tests.oracle.session import Oracle


def _make(base: Path) -> None:
    (base / "disk").mkdir()
    make_sources(base / "disk")
    (base / "local").mkdir()
    for source, target, given in CASES.values():
        convert(Solo(), str(base / "disk" / source), str(base / "local" / target), options(given), NoProgress())


@pytest.fixture(scope="session")
def base(oracle: Oracle) -> Path:
    """``disk``: the sources. ``local``: every one of ``CASES``, converted by one process."""
    return oracle.once("distributed", _make)
