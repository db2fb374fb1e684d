"""What real workers found, made once per test session."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.oracle.launch import python
from tests.oracle.session import Oracle


def _played(oracle: Oracle, module: str, name: str) -> Path:
    def make(directory: Path) -> None:
        python(module, str(directory), limit=240)

    return oracle.once(name, make)


@pytest.fixture(scope="session")
def faults(oracle: Oracle) -> dict[str, Any]:
    """``{"place-trouble": {"codes": [...], "said": [...]}}`` of ``tests.comm.faults``."""
    return dict(json.loads((_played(oracle, "tests.comm.faults", "comm-faults") / "results.json").read_text()))


@pytest.fixture(scope="session")
def checks(oracle: Oracle) -> Path:
    """The directory that ``tests.comm.checks`` filled."""
    return _played(oracle, "tests.comm.checks", "comm-checks")
