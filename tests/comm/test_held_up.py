"""A failure while chunks are in flight: what arrives all the same is what was meant."""

from __future__ import annotations

import json
from pathlib import Path

from tests.comm.held_up import EXCHANGES, ROUND
from tests.oracle.launch import python


def test_a_buffer_in_flight_is_not_filled_anew_when_another_worker_fails(tmp_path: Path) -> None:
    out = tmp_path / "arrived"
    said = python("tests.comm.held_up", str(out), limit=120)
    assert json.loads(said.splitlines()[-1]) == [6, 6, 6], said
    arrived = [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []
    expected = [[exchange * ROUND + n + 1 for n in range(ROUND)] for exchange in range(EXCHANGES)]
    assert arrived == expected[: len(arrived)]
