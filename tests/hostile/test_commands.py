"""Hostile files given to the commands: exit code 3 and one short message, whichever command meets them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.cli.conftest import Ran, Run, run, training_state
from tests.hostile.opcodes import P2, call_forms
from tests.hostile.pickles import ATTACKS, BOMBS, GADGETS, dcp_directory, torch_file

__all__ = ["run"]

SMALL = 50_000  # bytes: the larger ones take seconds, and ``test_pickles`` has them all
COMMANDS = ("inspect", "convert", "diff", "verify")
LONGEST = 12  # lines of a message


# Each name once, called in the first way there is
NAMES = {
    f"{module}.{attribute}": next(iter(call_forms(module, attribute, *arguments).values()))
    for (module, attribute), arguments in GADGETS.items()
}
HOSTILE = {title: data for title, data in (ATTACKS | BOMBS | NAMES).items() if len(data) < SMALL}


def _arguments(command: str, source: Path, whole: Path, target: Path) -> list[str]:
    more = {"convert": [str(target), "--to", "full"], "diff": [str(whole)]}
    return [command, str(source), *more.get(command, [])]


def _trouble(ran: Ran) -> str | None:
    lines = ran.err.splitlines()
    if ran.code != 3:
        return f"exit code {ran.code}: {ran.err[-300:]}"
    if ran.out or "Traceback" in ran.err or 'File "' in ran.err:
        return f"says more than a message: {ran.out[:100]} {ran.err[-500:]}"
    if not lines or not lines[0].startswith("error: ") or len(lines) > LONGEST or not all(map(str.strip, lines)):
        return f"is no short message: {ran.err[:500]}"
    return None


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_refuses_hostile_files_with_a_short_message(command: str, tmp_path: Path, run: Run) -> None:
    whole, target = tmp_path / "whole.pt", tmp_path / "target.pt"
    torch.save(training_state(), whole)
    wrong = {}
    for number, (title, data) in enumerate(HOSTILE.items()):
        if title in NAMES and number % len(COMMANDS) != COMMANDS.index(command):
            continue  # names outside the closed set are all alike: one command each
        # Every other file in both forms over the four commands.
        make = torch_file if (number + COMMANDS.index(command)) % 2 else dcp_directory
        ran = run(*_arguments(command, make(tmp_path / f"{number}", data), whole, target))
        trouble = _trouble(ran)
        if trouble or os.path.lexists(target):
            wrong[title] = trouble or "left a target"
    assert wrong == {}
    assert len(HOSTILE) > 60


@pytest.mark.parametrize("command", COMMANDS)
def test_the_program_itself_ends_with_code_3_and_no_traceback(command: str, tmp_path: Path) -> None:
    whole = tmp_path / "whole.pt"
    torch.save(training_state(), whole)
    title = {"inspect": "os.system", "convert": "a key of 2^60 items", "diff": "an unknown opcode"}.get(command)
    source = torch_file(tmp_path / "hostile.pt", HOSTILE.get(title or "", P2 + b"]q\x00h\x00a."))
    words = [sys.executable, "-m", "fsdpckpt", *_arguments(command, source, whole, tmp_path / "target.pt")]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)
    assert _trouble(Ran(done.returncode, done.stdout, done.stderr)) is None
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hostile.pt", "whole.pt"]
