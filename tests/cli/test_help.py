"""What ``--help`` and the shell's completion offer."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable

import pytest

from fsdpckpt.options import DTYPE, ConvertOptions, EachOptions, LaunchOptions
from fsdpckpt.options.commands import DiffOptions, InspectOptions, OutputOptions, UnitsOptions, VerifyOptions
from fsdpckpt.options.declare import Heading, options_of
from tests.cli.conftest import Run

RECORDS: dict[str, tuple[type, ...]] = {
    "inspect": (InspectOptions,),
    "convert": (ConvertOptions, LaunchOptions, EachOptions),
    "diff": (DiffOptions,),
    "verify": (VerifyOptions,),
    "units": (UnitsOptions,),
}
COMMANDS = ["", "inspect", "convert", "diff", "verify", "units"]


def help_text(run: Run, command: str) -> str:
    return run(*filter(None, (command, "--help"))).out


def test_every_option_of_convert_is_shown_under_its_heading(run: Run) -> None:
    sections = dict(re.findall(r"^(\S[^\n]*):\n((?:  [^\n]*\n)+)", help_text(run, "convert"), re.MULTILINE))
    assert list(sections)[:2] == ["Arguments", "What is written"]
    assert set(sections) == {"Arguments", *(heading.value for heading in Heading)}
    for record in (ConvertOptions, LaunchOptions, EachOptions, OutputOptions):
        for each in options_of(record):
            assert re.search(rf"(^|[ ,]){each.flag!s}( |$)", sections[each.heading], re.MULTILINE), each.flag


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


@pytest.mark.parametrize("command", COMMANDS)
def test_the_help_has_the_same_words_at_every_width(command: str, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = []
    for columns in ("80", "120", "300"):
        monkeypatch.setenv("COLUMNS", columns)
        texts.append(help_text(run, command).split())
    assert texts[0] == texts[1] == texts[2]


@pytest.fixture
def complete(run: Run, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], list[str]]:
    def offered(words: str) -> list[str]:
        monkeypatch.setenv("_FSDPCKPT_COMPLETE", "complete_bash")
        monkeypatch.setenv("COMP_WORDS", words)
        monkeypatch.setenv("COMP_CWORD", str(words.count(" ")))
        done = run()
        assert done.code == 0, done.err
        return done.out.split()

    return offered


def test_bash_completes_commands_and_options(complete: Callable[[str], list[str]]) -> None:
    assert complete("fsdpckpt conv") == ["convert"]
    assert complete("fsdpckpt convert --world") == ["--world-size"]
    assert complete("fsdpckpt convert --flavor torcht") == ["torchtitan", "torchtitan-old", "torchtune"]


@pytest.mark.parametrize("command", sorted(RECORDS))
def test_bash_completes_the_values_of_every_option_that_lists_them(
    command: str, complete: Callable[[str], list[str]]
) -> None:
    for record in RECORDS[command]:
        for each in options_of(record):
            values = each.choices or each.completion
            if values:
                assert complete(f"fsdpckpt {command} {each.flag!s} ") == list(values), each.flag
            assert values or each.kind != DTYPE, each.flag


def test_completion_works_in_a_shell() -> None:
    environment = {"_FSDPCKPT_COMPLETE": "complete_bash", "COMP_WORDS": "fsdpckpt convert --dtype b", "COMP_CWORD": "3"}
    program = "import sys; sys.argv = ['fsdpckpt']; from fsdpckpt.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.stdout.split(), done.returncode) == (["bfloat16"], 0), done.stderr


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_completion_script_can_be_printed(shell: str, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHELL", f"/bin/{shell}")
    monkeypatch.setenv("_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION", "1")
    done = run("--show-completion", shell)
    assert "_FSDPCKPT_COMPLETE" in done.out


def test_help_is_about_one_command(run: Run) -> None:
    done = run("help", "units", "diff")
    assert done.code == 2 and "not units diff" in done.err
    assert "next: fsdpckpt help diff, or fsdpckpt help units" in done.err
    assert run("help", "units").out.startswith("Usage: fsdpckpt units")
