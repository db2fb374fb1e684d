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


def _other_package(site: Path, name: str, content: str) -> None:
    """One more package with a reader."""
    (site / f"{name}.py").write_text(content)
    metadata = site / f"{name}-2.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 2.0\n")
    (metadata / "entry_points.txt").write_text(f"[fsdpckpt.readers]\n{name} = {name}:Reader\n")


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        (
            "rival",
            "from rawbin import RawbinReader as Reader\n\n\nclass Reader(Reader):\n    pass\n",
            ("rawbin of fsdpckpt-rawbin 1.0", "rival of rival 2.0"),  # both claim the directory
        ),
        (
            "broken",
            "import nothing_of_this_name\n",
            ("broken of broken 2.0 cannot be imported", "pip uninstall broken"),
        ),
        ("bad", "from json import loads as Reader\n", ("bad of bad 2.0 is not a reader",)),
    ],
)
def test_a_package_that_cannot_be_used_is_named(
    name: str, content: str, said: tuple[str, ...], project: Path, installed: Path, tmp_path: Path
) -> None:
    site = Path(shutil.copytree(installed, tmp_path / "site"))
    _other_package(site, name, content)
    _run([sys.executable, str(project / "save.py")], site, tmp_path)
    done = _run([sys.executable, "-m", "fsdpckpt", "inspect", "saved"], site, tmp_path)
    assert done.returncode == 2
    assert all(words in done.stderr for words in said), done.stderr
    assert "Traceback" not in done.stderr


FAILING = """
from fsdpckpt.ir.checkpoint import Layout
from fsdpckpt.readers.protocol import Claim, Part, PartContents
{before}
class Reader:
    def __init__(self{argument}): pass
    def recognise_file(self, file, sources): {file}
    def recognise_directory(self, path, files, options, sources): {directory}
"""
_CLAIMS = "return Claim([Part(path, 'x', {read})], set(files)) if 'rawbin.json' in files else Claim()"


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        ({"directory": "raise ValueError('boom')"}, "failing of failing 2.0 fails to recognise saved"),
        ({"file": "return 3"}, "failing of failing 2.0 fails to recognise saved/"),
        ({"directory": "return None"}, "expected a Claim, got NoneType"),
        ({"argument": ", more"}, "failing of failing 2.0 cannot be made a reader"),
        ({"directory": _CLAIMS.format(read="lambda table, opened: {}['boom']")}, "fails to read saved"),
        ({"directory": _CLAIMS.format(read="lambda table, opened: None")}, "expected a PartContents, got NoneType"),
        ({"file": "raise SystemExit(0)"}, "SystemExit: 0"),
    ],
)
def test_a_reader_that_fails_is_named_and_is_no_error_of_this_program(
    parts: dict[str, str], said: str, tmp_path: Path
) -> None:
    content = FAILING.format(
        **{"before": "", "argument": "", "file": "return None", "directory": "return Claim()"} | parts
    )
    (tmp_path / "site").mkdir()
    _other_package(tmp_path / "site", "failing", content)
    (tmp_path / "saved").mkdir()
    for name in ("rawbin.json", "model.bin"):
        (tmp_path / "saved" / name).write_text("{}")
    source = "saved/model.bin" if "file" in parts else "saved"
    done = _run([sys.executable, "-m", "fsdpckpt", "inspect", source], tmp_path / "site", tmp_path)
    assert done.returncode == 2, done.stderr
    assert said in done.stderr and "failing of failing 2.0" in done.stderr and "pip uninstall failing" in done.stderr
    assert "bug in fsdpckpt" not in done.stderr and "Traceback" not in done.stderr


def test_what_a_reader_prints_is_not_among_the_data(tmp_path: Path) -> None:
    content = FAILING.format(
        before="print('imported')", argument="", file="print('asked')", directory="print('looked'); return Claim()"
    )
    (tmp_path / "site").mkdir()
    _other_package(tmp_path / "site", "failing", content)
    torch.save({"weight": torch.ones(2)}, tmp_path / "model.pt")
    done = _run([sys.executable, "-m", "fsdpckpt", "inspect", "model.pt", "--names-only"], tmp_path / "site", tmp_path)
    assert (done.returncode, done.stdout) == (0, "weight\n")
    assert "imported" in done.stderr and "asked" in done.stderr


def test_a_flavor_with_a_broken_pattern_is_named(tmp_path: Path) -> None:
    (tmp_path / "site").mkdir()
    flavor = "from fsdpckpt.producers import Flavor, Signature\nReader = Flavor('f', 'f', (Signature(('(',)),))\n"
    _other_package(tmp_path / "site", "failing", flavor)
    points = next((tmp_path / "site").glob("*.dist-info")) / "entry_points.txt"
    points.write_text(points.read_text().replace("readers", "flavors"))
    (tmp_path / "saved").mkdir()
    torch.save({"weight": torch.ones(2)}, tmp_path / "saved" / "model.pt")
    done = _run([sys.executable, "-m", "fsdpckpt", "inspect", "saved"], tmp_path / "site", tmp_path)
    assert done.returncode == 2, done.stderr
    assert "failing of failing 2.0 has a pattern that is no regular expression" in done.stderr
