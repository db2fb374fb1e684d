"""The README and the pages of docs/: each command in them runs, and links lead somewhere.

Commands on ``demo-run/`` run on what ``scripts/demo`` trains. All others name files of the reader's own: of those the
command line must accept every option, and find nothing wrong but the missing source.
"""

from __future__ import annotations

import ast
import inspect
import re
import runpy
import shlex
import shutil
from html import unescape
from pathlib import Path
from typing import Any

import pytest
import typer

import fsdpckpt
from fsdpckpt.cli.app import app
from tests.cli.conftest import Run, run
from tests.oracle.launch import torchrun
from tests.oracle.session import Oracle

__all__ = ["run"]

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
MISSING_SOURCE = 3
REFUSED = {"demo-run/two": 4}  # a page shows what this command prints when it needs more information


def shown_on(page: Path) -> dict[str, list[str]]:
    """The commands of a page's console blocks, in order, and the lines that it shows below each."""
    found: dict[str, list[str]] = {}
    for block in re.findall(r"^```console\n(.*?)^```", page.read_text(), re.M | re.S):
        shown: list[str] = []
        for line in block.replace("\\\n", " ").splitlines():
            if line.startswith("$ "):
                shown = found[shlex.join(shlex.split(line.removeprefix("$ "), comments=True))] = []
            elif line.strip() != "...":
                shown.append(line)
    return found


def commands(page: Path) -> list[str]:
    """Those of fsdpckpt."""
    return [command for command in shown_on(page) if "fsdpckpt" in shlex.split(command)]


COMMANDS = {page.name: commands(page) for page in PAGES}
OUTPUTS = {page.name: shown_on(page) for page in PAGES}


@pytest.fixture(scope="session")
def demo(oracle: Oracle) -> Path:
    """A directory with ``demo-run`` as the demo leaves it before its first conversion."""

    def trained(directory: Path) -> None:
        for action in ("train", "train1"):
            torchrun(
                str(ROOT / "scripts" / "demo_worker.py"), action, str(directory / "demo-run"), world_size=4, limit=240
            )

    return oracle.once("demo", trained)


@pytest.mark.parametrize("page", [page.name for page in PAGES if commands(page)])
def test_every_command_on_the_demos_checkpoints_runs(
    page: str, demo: Path, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(demo / "demo-run", tmp_path / "demo-run", copy_function=shutil.copy)
    monkeypatch.chdir(tmp_path)
    everywhere = [command for each in COMMANDS.values() for command in each if "demo-run/" in command]
    own = [command for command in COMMANDS[page] if "demo-run/" in command]
    needed = [command for command in everywhere if command not in own and makes_a_source_of(command, own)]
    for command in dict.fromkeys([*needed, *own]):
        words = shlex.split(command)[1:]
        target = words[2] if words[0] == "convert" else ""
        done = run(*words)
        assert done.code == REFUSED.get(target, 0), f"{command}\n{done.err}"
        printed = {_NUMBER.sub("#", line.rstrip()) for line in (done.out + done.err).splitlines()}
        for line in OUTPUTS[page].get(command, ()):
            assert _NUMBER.sub("#", line) in printed, f"{command}: {line}"


_NUMBER = re.compile(r"\d[\d,.]*( [KMGT]?i?B\b)?")  # sizes, times and rates differ between machines


def makes_a_source_of(command: str, others: list[str]) -> bool:
    words = shlex.split(command)
    return words[1] == "convert" and "--dry-run" not in words and any(f" {words[3]}" in other for other in others)


@pytest.mark.parametrize("page", [page.name for page in PAGES if commands(page)])
def test_the_command_line_accepts_every_other_command(
    page: str, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for command in COMMANDS[page]:
        words = shlex.split(command)
        options = words[words.index("fsdpckpt") + 1 :]
        theirs = words[0] != "fsdpckpt" or "--nproc-per-node" in words or "://" in command or "--model" in words
        if "demo-run/" in command or theirs or "[" in command or options in (["--help"], ["formats"]):
            continue
        assert run(*options).code == MISSING_SOURCE, command


def pieces(page: Path) -> list[list[str]]:
    """Every command of fsdpckpt on a page, in console blocks and in the middle of a sentence, also one that torchrun or
    srun starts or that reads from a store; without the commands that take no arguments.
    """
    found = [shlex.split(command) for command in commands(page)]
    found += [shlex.split(text) for text in re.findall(r"`(fsdpckpt [^`]*)`", page.read_text())]
    after = [words[words.index("fsdpckpt") + 1 :] for words in found]
    return [words for words in after if not {"--help", "--install-completion"} & {*words} and len(words) > 1]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_command_line_parses_each_of_them(page: Path) -> None:
    program: Any = typer.main.get_command(app)
    for words in pieces(page):
        filled = ["2" if word.strip("[]") == "N" else word.strip("[]").partition("|")[0] for word in words[1:]]
        program.commands[words[0]].make_context(words[0], filled).close()  # raises for what it does not take


def blocks(page: Path) -> list[str]:
    """The Python examples, but for whole modules, which other tests build and run."""
    return re.findall(r"^```python\n(.*?)^```", page.read_text(), re.M | re.S)


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page)], ids=lambda page: page.name)
def test_examples_in_python_call_what_there_is(page: Path) -> None:
    for block in blocks(page):
        for call in ast.walk(ast.parse(block)):
            function = call.func if isinstance(call, ast.Call) else None
            if isinstance(call, ast.Attribute) and ast.unparse(call.value) == "fsdpckpt":
                assert hasattr(fsdpckpt, call.attr), call.attr
            ours = isinstance(function, ast.Attribute) and ast.unparse(function.value) == "fsdpckpt"
            if isinstance(call, ast.Call) and isinstance(function, ast.Attribute) and ours:
                keywords = {str(each.arg): None for each in call.keywords}
                inspect.signature(getattr(fsdpckpt, function.attr)).bind(*call.args, **keywords)


@pytest.mark.parametrize("page", ["README.md", "docs/python.md"])
def test_the_first_examples_in_python_run(
    page: str, demo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "runs").mkdir()
    shutil.copytree(demo / "demo-run" / "dcp", tmp_path / "runs" / "step-1000")
    monkeypatch.chdir(tmp_path)
    found = runpy.run_path(str(_written(tmp_path / "example.py", blocks(ROOT / page)[0])))
    assert found["weight"].shape[1] == 96
    assert page != "README.md" or (found["rows"].shape[0] == 100 and "'model'" in capsys.readouterr().out)


def _written(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_scripts_that_a_page_names_are_there(page: Path) -> None:
    for name in re.findall(r"(?<![\w/])scripts/[\w.]+\w", page.read_text()):
        assert (ROOT / name).exists(), name


def test_there_are_commands_to_run() -> None:
    assert len(COMMANDS["README.md"]) >= 10
    assert sum(map(len, COMMANDS.values())) >= 25


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_pages_and_headings_that_are_there(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if target.startswith(("http://", "https://")):
            continue
        name, _, heading = target.partition("#")
        path = (page.parent / name).resolve() if name else page
        assert path.exists(), f"{page.name}: {target}"
        if heading:
            headings = [
                re.sub(r"[^\w -]", "", line.lstrip("# ").lower()).replace(" ", "-")
                for line in path.read_text().splitlines()
                if line.startswith("#")
            ]
            assert heading in headings, f"{page.name}: {target}"


def test_the_readme_fits_its_page() -> None:
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 200
    blocks = "\n".join(re.findall(r"^```\w+\n(.*?)^```", text, re.M | re.S))
    assert [line for line in blocks.splitlines() if len(line) > 100 and not line.startswith("note:")] == []


def test_the_terminal_of_the_readme_shows_its_commands_and_can_be_drawn_again(demo: Path) -> None:
    script = runpy.run_path(str(ROOT / "scripts" / "terminal"))
    shown, drawn = script["TARGET"].read_text(), script["record"](demo / "demo-run")
    assert "](docs/terminal.svg)" in (ROOT / "README.md").read_text()
    readme = [command.partition(" --keys")[0] for command in commands(ROOT / "README.md")]
    for svg in (shown, drawn):
        words = re.sub(r"<[^>]*>", "", unescape(svg)).replace("\xa0", " ")
        for command in script["COMMANDS"]:
            assert command.partition(" --keys")[0] in readme and f"$ {command}" in words
        for said in ("problems: none", "verified: structure", "is whole", "225 same, 0 differ"):
            assert said in words, said
        assert not re.search(r"@font-face|<script|href=|url\((?!#)", svg)  # it needs nothing from elsewhere
