"""The page on adding a format: its package is installed, its test and its commands run, exactly as printed."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.makers import files

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "adding-a-format.md").read_text()
BLOCKS = re.findall(r'^```(\w+)(?: title="([^"]+)")?\n(.*?)^```$', PAGE, re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project in which somebody followed the page."""
    project = tmp_path_factory.mktemp("project")
    for _, title, text in BLOCKS:
        if title:
            (project / title).write_text(text)
    return project


@pytest.fixture(scope="module")
def installed(project: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where pip has installed it, with nothing from the network."""
    site = tmp_path_factory.mktemp("site")
    options = ["--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--disable-pip-version-check"]
    copy = shutil.copytree(project, tmp_path_factory.mktemp("build") / "project")
    done = _run([sys.executable, "-m", "pip", "install", *options, "--target", str(site), str(copy)], site, project)
    assert done.returncode == 0, done.stderr
    return site


def _run(command: list[str], site: Path, directory: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(site), str(ROOT)])}
    return subprocess.run(
        command, cwd=directory, env=environment, capture_output=True, text=True, timeout=240, check=False
    )


def _commands() -> Iterator[tuple[str, str]]:
    """Every command of the page and what it prints."""
    for language, _, text in BLOCKS:
        for command, output in re.findall(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", text, re.MULTILINE):
            if language == "console":
                yield command, output


def test_the_commands_print_what_the_page_says(project: Path, installed: Path, tmp_path: Path) -> None:
    programs = {"python": [sys.executable], "fsdpckpt": [sys.executable, "-m", "fsdpckpt"]}
    shutil.copy(project / "save.py", tmp_path)
    commands = list(_commands())
    assert {command.split()[1] for command, _ in commands} >= {"inspect", "convert"}
    for command, output in commands:
        program, *arguments = shlex.split(command)
        done = _run([*programs[program], *arguments], installed, tmp_path)
        assert done.returncode == 0, done.stderr
        assert done.stdout.startswith(output.removesuffix("...\n")), command
        assert not output or output.endswith("...\n") or done.stdout == output, command


def test_formats_lists_the_package(installed: Path, tmp_path: Path) -> None:
    done = _run([sys.executable, "-m", "fsdpckpt", "formats", "--json"], installed, tmp_path)
    rows = {(row["kind"], row["name"]): row for row in json.loads(done.stdout)["formats"]}
    assert rows["reader", "rawbin"]["tested"] == "fsdpckpt-rawbin 1.0"
    assert rows["flavor", "rawbin-trainer"]["tested"] == "fsdpckpt-rawbin 1.0"


def test_the_reader_keeps_the_contract(project: Path, installed: Path) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--noconftest", "test_rawbin.py"]
    done = _run(command, installed, project)
    assert done.returncode == 0, done.stdout


def test_the_code_passes_the_linter(project: Path, installed: Path) -> None:
    """As everything else in the package has it."""
    modules = ["rawbin.py", "rawbin_flavor.py"]
    for command in (["ruff", "check"], ["ruff", "format", "--check"]):
        options = ["--config", str(ROOT / "pyproject.toml")]
        done = _run([sys.executable, "-m", *command, *options, *modules], installed, project)
        assert done.returncode == 0, done.stdout


def _inspect(site: Path, directory: Path, source: str, *options: str) -> subprocess.CompletedProcess[str]:
    return _run([sys.executable, "-m", "fsdpckpt", "inspect", source, *options], site, directory)


def _other_package(site: Path, content: str, group: str = "readers") -> None:
    """One more package, ``other`` 2.0, with a reader or flavor."""
    metadata = site / "other-2.0.dist-info"
    metadata.mkdir(parents=True)
    (site / "other.py").write_text(content)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: other\nVersion: 2.0\n")
    (metadata / "entry_points.txt").write_text(f"[fsdpckpt.{group}]\nother = other:Reader\n")


def test_packages_that_claim_the_same_files_are_named(project: Path, installed: Path, tmp_path: Path) -> None:
    site = Path(shutil.copytree(installed, tmp_path / "site"))
    _other_package(site, "from rawbin import RawbinReader\n\n\nclass Reader(RawbinReader):\n    pass\n")
    _run([sys.executable, str(project / "save.py")], site, tmp_path)
    done = _inspect(site, tmp_path, "saved")
    assert done.returncode == 2
    assert "rawbin of fsdpckpt-rawbin 1.0" in done.stderr and "other of other 2.0" in done.stderr, done.stderr
    assert "Traceback" not in done.stderr


def _reader(before: str = "", argument: str = "", file: str = "return None", directory: str = "return Claim()") -> str:
    return f"""
from fsdpckpt.ir.checkpoint import Layout
from fsdpckpt.readers.protocol import Claim, Part, PartContents
{before}
class Reader:
    def __init__(self{argument}): pass
    def recognise_file(self, file, sources): {file}
    def recognise_directory(self, path, files, options, sources): {directory}
"""


CLAIMS = "return Claim([Part(path, 'x', {})], set(files)) if 'rawbin.json' in files else Claim()"
FLAVOR = "from fsdpckpt.producers import Flavor, Signature\nReader = Flavor('f', 'f', (Signature(('(',)),))\n"


@pytest.mark.parametrize(
    ("content", "source", "said"),
    [
        ("import nothing_of_this_name\n", "saved", "other of other 2.0 cannot be imported"),
        ("from json import loads as Reader\n", "saved", "other of other 2.0 is not a reader"),
        (_reader(directory="raise ValueError('boom')"), "saved", "other of other 2.0 fails to recognise saved"),
        (_reader(directory="return None"), "saved", "expected a Claim, got NoneType"),
        (_reader(argument=", more"), "saved", "other of other 2.0 cannot be made a reader"),
        (_reader(directory=CLAIMS.format("lambda table, opened: {}['boom']")), "saved", "fails to read saved"),
        (
            _reader(directory=CLAIMS.format("lambda *_: None")),
            "saved",
            "expected a PartContents, got NoneType",
        ),
        (_reader(file="return 3"), "saved/model.bin", "other of other 2.0 fails to recognise saved/"),
        (_reader(file="raise SystemExit(0)"), "saved/model.bin", "SystemExit: 0"),
        (FLAVOR, "torch", "other of other 2.0 has a pattern that is no regular expression"),
    ],
)
def test_what_another_package_gets_wrong_is_named_and_is_no_error_of_this_program(
    content: str, source: str, said: str, tmp_path: Path
) -> None:
    _other_package(tmp_path / "site", content, "flavors" if content == FLAVOR else "readers")
    files({"saved/rawbin.json": "{}", "saved/model.bin": "{}", "torch/model.pt": {"weight": torch.ones(2)}})(tmp_path)
    done = _inspect(tmp_path / "site", tmp_path, source)
    assert done.returncode == 2, done.stderr
    assert said in done.stderr and "other of other 2.0" in done.stderr
    assert "pip uninstall other" in done.stderr or "is not a reader" in said or content == FLAVOR
    assert "bug in fsdpckpt" not in done.stderr and "Traceback" not in done.stderr


def test_what_a_reader_prints_is_not_among_the_data(tmp_path: Path) -> None:
    content = _reader(before="print('imported')", file="print('asked')", directory="print('looked'); return Claim()")
    _other_package(tmp_path / "site", content)
    torch.save({"weight": torch.ones(2)}, tmp_path / "model.pt")
    done = _inspect(tmp_path / "site", tmp_path, "model.pt", "--names-only")
    assert (done.returncode, done.stdout) == (0, "weight\n")
    assert "imported" in done.stderr and "asked" in done.stderr
