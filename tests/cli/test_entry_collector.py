"""``main`` leaves the garbage collector of a program that calls it as it was."""

from __future__ import annotations

import gc
import sys

import pytest

from fsdpckpt.cli.entry import main


def test_a_program_that_goes_on_after_a_command_can_still_collect(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = gc.get_freeze_count()
    monkeypatch.setattr(sys, "argv", ["fsdpckpt", "version"])
    with pytest.raises(SystemExit) as end:
        main()
    assert (end.value.code, gc.get_freeze_count()) == (0, before)
    assert "fsdpckpt" in capsys.readouterr().out
