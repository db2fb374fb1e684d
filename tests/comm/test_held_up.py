"""A failure while chunks are under way: what arrives all the same is what was meant."""

from __future__ import annotations

import json
from pathlib import Path

from tests.comm.held_up import LEGS, ROUND
from tests.oracle.launch import python


def test_a_buffer_under_way_is_not_filled_anew_when_another_worker_fails(tmp_path: Path) -> None:
    out = tmp_path / "arrived"
    said = python("tests.comm.held_up", str(out), limit=120)
    assert json.loads(said.splitlines()[-1]) == [6, 6, 6], said
    arrived = [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []
    assert arrived == [[leg * ROUND + n + 1 for n in range(ROUND)] for leg in range(LEGS)][: len(arrived)]
