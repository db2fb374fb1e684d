"""The page on adding a format: its reader, its table line, its test and its commands, exactly as they are printed."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "adding-a-format.md").read_text()
BLOCKS = re.findall(r'^```(\w+)(?: title="([^"]+)")?\n(.*?)^```$', PAGE, re.MULTILINE | re.DOTALL)
SHARED_TESTS = ["__init__.py", "materialise.py", "readers/__init__.py", "readers/reader_contract.py"]


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the package in which somebody followed the page."""
    project = tmp_path_factory.mktemp("project")
    shutil.copytree(ROOT / "fsdpckpt", project / "fsdpckpt", ignore=shutil.ignore_patterns("__pycache__"))
    (project / "tests" / "readers").mkdir(parents=True)
    for name in SHARED_TESTS:
        shutil.copy(ROOT / "tests" / name, project / "tests" / name)
    for language, title, text in BLOCKS:
        if title:
            (project / title).parent.mkdir(exist_ok=True)
            (project / title).write_text(text)
        if language == "diff":
            _apply(text, project)
    return project


def _apply(diff: str, project: Path) -> None:
    """Put the lines with + behind the line of the file that precedes them in the diff."""
    name = re.findall(r"^\+\+\+ b/(.*)$", diff, re.MULTILINE)[0]
    lines = (project / name).read_text().splitlines()
    at = 0
    for line in diff.splitlines()[2:]:
        if line.startswith(" "):
            at = lines.index(line[1:], at) + 1
        elif line.startswith("+"):
            lines.insert(at, line[1:])
            at += 1
    (project / name).write_text("\n".join(lines) + "\n")


def _run(command: list[str], project: Path, directory: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(project)}
    return subprocess.run(
        command, cwd=directory, env=environment, capture_output=True, text=True, timeout=240, check=False
    )


def _commands() -> Iterator[tuple[str, str]]:
    """Every command of the page and what it prints."""
    for language, _, text in BLOCKS:
        for command, output in re.findall(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", text, re.MULTILINE):
            if language == "console":
                yield command, output


def test_the_commands_print_what_the_page_says(project: Path, tmp_path: Path) -> None:
    programs = {"python": [sys.executable], "fsdpckpt": [sys.executable, "-m", "fsdpckpt"]}
    shutil.copy(project / "save.py", tmp_path)
    commands = list(_commands())
    assert {command.split()[1] for command, _ in commands} >= {"inspect", "convert"}
    for command, output in commands:
        program, *arguments = shlex.split(command)
        done = _run([*programs[program], *arguments], project, tmp_path)
        assert done.returncode == 0, done.stderr
        assert done.stdout.startswith(output.removesuffix("...\n")), command
        assert not output or output.endswith("...\n") or done.stdout == output, command


def test_the_reader_keeps_the_contract(project: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "--noconftest",
        "tests/readers/test_rawbin.py",
    ]
    done = _run(command, project, project)
    assert done.returncode == 0, done.stdout


def test_the_code_passes_the_linter(project: Path) -> None:
    """As everything else in the package has it."""
    for command in (["ruff", "check"], ["ruff", "format", "--check"]):
        done = _run(
            [sys.executable, "-m", *command, "--config", str(ROOT / "pyproject.toml"), "fsdpckpt/readers/rawbin"],
            project,
            project,
        )
        assert done.returncode == 0, done.stdout
