"""What ``--help`` and the shell's completion offer."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable

import pytest

import fsdpckpt
from fsdpckpt.options import DTYPE, ConvertOptions, EachOptions, LaunchOptions
from fsdpckpt.options.commands import DiffOptions, InspectOptions, OutputOptions, UnitsOptions, VerifyOptions
from fsdpckpt.options.declare import Heading, options_of
from fsdpckpt.producers.table import FLAVORS, WRITABLE
from tests.cli.conftest import Run
from tests.cli.test_schemas import checked

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
    text = help_text(run, "convert")
    assert text.index("Safety:") < text.index("--resume") < text.index("Resources:") < text.index("Examples:")
    sections = dict(re.findall(r"^(\S[^\n]*):\n((?:  [^\n]*\n)+)", text, re.MULTILINE))
    assert list(sections)[:2] == ["Arguments", "What is written"]
    assert set(sections) == {"Arguments", *(heading.value for heading in Heading)}
    for record in (ConvertOptions, LaunchOptions, EachOptions, OutputOptions):
        for each in options_of(record):
            assert re.search(rf"(^|[ ,]){each.flag!s}( |$)", sections[each.heading], re.MULTILINE), each.flag


@pytest.mark.parametrize("command", COMMANDS)
def test_the_help_has_the_same_words_at_every_width_and_breaks_none(
    command: str, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = []
    for columns in (80, 120, 300):
        monkeypatch.setenv("COLUMNS", str(columns))
        texts.append(help_text(run, command).split())
        for line in help_text(run, command).splitlines() if columns < 300 else ():
            assert len(line) <= columns and not line.endswith("-"), line
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
    variables = {**os.environ, **environment}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=60, check=False)
    assert (done.stdout.split(), done.returncode) == (["bfloat16"], 0), done.stderr


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_completion_script_can_be_printed(shell: str, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHELL", f"/bin/{shell}")
    monkeypatch.setenv("_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION", "1")
    done = run("--show-completion", shell)
    assert "_FSDPCKPT_COMPLETE" in done.out


def test_formats_lists_every_flavor_and_whether_it_is_written(run: Run) -> None:
    done = run("formats", "--json")
    rows = checked(done.out)["formats"]
    assert isinstance(rows, list)
    flavors = {row["name"]: row for row in rows if row["kind"] == "flavor"}
    assert flavors.keys() == {"plain", *(flavor.name for flavor in FLAVORS)}
    assert {name for name, row in flavors.items() if row["writes"]} == set(WRITABLE)
    assert {row["name"] for row in rows if row["kind"] == "container"} == {"torch", "dcp", "safetensors"}
    table = run("formats")
    assert table.code == 0 and len(table.out.splitlines()) == 1 + len(rows)


@pytest.mark.parametrize("words", [("--version",), ("-V",), ("version",)])
def test_each_way_to_ask_for_the_version_shows_it(run: Run, words: tuple[str, ...]) -> None:
    done = run(*words)
    assert (done.code, done.out) == (0, f"fsdpckpt {fsdpckpt.__version__}\n")


def test_help_is_the_help_of_the_program_or_of_a_command(run: Run) -> None:
    assert run("help").out.strip() == run("--help").out.strip()
    assert run("help", "verify").out.strip() == run("verify", "--help").out.strip()
    done = run("help", "convrt")
    assert done.code == 2 and "no such command: convrt" in done.err
    done = run("help", "units", "diff")
    assert done.code == 2 and "not units diff" in done.err
    assert "next: fsdpckpt help diff, or fsdpckpt help units" in done.err
