"""What ``--help`` and the shell's completion offer."""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys

import pytest

from fsdpckpt.cli.convert import FLAVORS, convert_command
from fsdpckpt.cli.convert_help import ConvertCommand
from fsdpckpt.producers.table import WRITABLE
from tests.cli.conftest import Run


def test_every_option_of_convert_stands_under_one_heading() -> None:
    listed = [name for names in ConvertCommand.groups.values() for name in names]
    given = set(inspect.signature(convert_command).parameters) - {"source", "target"}
    assert sorted(listed) == sorted(given | {"help"})


def test_every_flavor_that_is_written_is_named() -> None:
    assert sorted(re.split(r"[, ]+", FLAVORS.replace(" (default)", ""))) == sorted(WRITABLE)


def test_the_headings_of_convert_are_shown_with_their_options(run: Run) -> None:
    text = run("convert", "--help").out
    headings = [line[:-1] for line in text.splitlines() if re.fullmatch(r"[A-Z].*:", line)]
    assert headings[:2] == ["Arguments", "What is written"]
    assert set(ConvertCommand.groups) <= set(headings)
    assert text.index("Safety:") < text.index("--resume") < text.index("Resources:")
    assert "Examples:" in text


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        ("fsdpckpt conv", "convert"),
        ("fsdpckpt convert --world", "--world-size"),
        ("fsdpckpt convert --container ", "safetensors"),
    ],
)
def test_bash_completes_commands_options_and_choices(words: str, offered: str) -> None:
    environment = {
        **os.environ,
        "_FSDPCKPT_COMPLETE": "complete_bash",
        "COMP_WORDS": words,
        "COMP_CWORD": str(words.count(" ")),
    }
    program = "import sys; sys.argv = ['fsdpckpt']; from fsdpckpt.cli.main import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert offered in done.stdout.split(), done.stderr
    assert done.returncode == 0


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_completion_script_can_be_printed(shell: str, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHELL", f"/bin/{shell}")
    monkeypatch.setenv("_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION", "1")
    done = run("--show-completion", shell)
    assert "_FSDPCKPT_COMPLETE" in done.out
