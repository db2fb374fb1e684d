"""What ``--help`` and the shell's completion offer."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from fsdpckpt.option_fields import Group, parameters
from fsdpckpt.options import ConvertOptions, LaunchOptions, OutputOptions
from tests.cli.conftest import Run

COMMANDS = ["", "inspect", "convert", "diff", "verify", "units"]


def help_text(run: Run, command: str) -> str:
    return run(*filter(None, (command, "--help"))).out


def test_every_option_of_convert_is_shown_under_its_heading(run: Run) -> None:
    sections = dict(re.findall(r"^(\S[^\n]*):\n((?:  [^\n]*\n)+)", help_text(run, "convert"), re.MULTILINE))
    assert list(sections)[:2] == ["Arguments", "What is written"]
    assert set(sections) == {"Arguments", *(group.value for group in Group)}
    for record in (ConvertOptions, LaunchOptions, OutputOptions):
        for one in parameters(record):
            assert re.search(rf"(^|[ ,]){one.flag}( |$)", sections[one.option.group], re.MULTILINE), one.flag


def test_the_headings_of_convert_are_shown_in_order_and_followed_by_examples(run: Run) -> None:
    text = help_text(run, "convert")
    assert text.index("Safety:") < text.index("--resume") < text.index("Resources:") < text.index("Examples:")


@pytest.mark.parametrize("columns", ["80", "120"])
@pytest.mark.parametrize("command", COMMANDS)
def test_no_word_of_the_help_is_broken(command: str, columns: str, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    for line in help_text(run, command).splitlines():
        assert len(line) <= int(columns), line
        assert not line.endswith("-"), line


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        ("fsdpckpt conv", "convert"),
        ("fsdpckpt convert --world", "--world-size"),
        ("fsdpckpt convert --container ", "safetensors"),
        ("fsdpckpt convert --flavor t", "trainer"),
        ("fsdpckpt convert --dtype ", "bfloat16"),
    ],
)
def test_bash_completes_commands_options_and_values(words: str, offered: str) -> None:
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
