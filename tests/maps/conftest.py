"""What tests of maps begin with."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.maps import experts
from tests.maps.experts import State


@pytest.fixture
def saved(tmp_path: Path) -> State:
    """``apart.pt``, and ``experts.toml``, the map that makes its experts one tensor."""
    (tmp_path / "experts.toml").write_text(experts.MAP)
    return experts.trained(tmp_path / "apart.pt")
