"""The wheel that ``pip install fsdpckpt`` gets: built, installed into an empty environment without torch, and used."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tomllib
import venv
from collections.abc import Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
GOLDEN = ROOT / "tests" / "golden" / "torch-2.4"
SHARDED = GOLDEN / "f2_default" / "ckpt"
# Not this checkout, which PYTHONPATH may name.
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def pip(*words: str) -> str:
    """Run pip; what it complains of, "" when it succeeds."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", "-q", *words]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=200, check=False)
    return done.stderr.strip()[-500:] or "failed" if done.returncode else ""


def build(directory: Path, umask: int = 0o022, **environment: str) -> Path:
    """The wheel that ``scripts/wheel`` makes in ``directory``."""
    command = [sys.executable, str(ROOT / "scripts" / "wheel"), str(directory)]
    done = subprocess.run(
        command, env=ENVIRONMENT | environment, umask=umask, capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr
    return Path(done.stdout.splitlines()[0])


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The ``bin`` of an environment with nothing but the wheel and what it requires."""
    pytest.importorskip("setuptools", "77", reason="setuptools 77 is not installed: the wheel was not tested")
    place = tmp_path_factory.mktemp("wheel")
    build(place)
    venv.create(place / "env", with_pip=False, symlinks=True)
    python = place / "env" / "bin" / "python"
    if wrong := pip("--python", str(python), "install", "--no-compile", *map(str, place.glob("*.whl"))):
        if pip("download", "--no-deps", "-d", str(place), "fsspec"):
            pytest.skip(f"no package index can be reached, so the wheel was not tested: {wrong}")
        pytest.fail(wrong)
    return python.parent


def run(environment: Path, directory: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [str(environment / words[0]), *words[1:]]
    return subprocess.run(
        command, cwd=directory, env=ENVIRONMENT, capture_output=True, text=True, timeout=60, check=False
    )


def test_the_wheel_converts_inspects_compares_and_verifies_without_torch(environment: Path, tmp_path: Path) -> None:
    def fsdpckpt(*words: str, code: int = 0) -> subprocess.CompletedProcess[str]:
        done = run(environment, tmp_path, "fsdpckpt", *words)
        assert done.returncode == code, f"{words}\n{done.stdout}{done.stderr}"
        return done

    assert not list(environment.parent.glob("lib/*/site-packages/torch"))
    fsdpckpt("convert", str(SHARDED), "full.pt", "--verify", "full")
    fsdpckpt("convert", "full.pt", "weights.safetensors", "--only", "model")
    fsdpckpt("diff", str(SHARDED), "full.pt")
    assert json.loads(fsdpckpt("verify", "full.pt", "--digests", "--json").stdout)["whole"]
    fsdpckpt("inspect", str(SHARDED), "--stats", "--report", "report.html")
    assert (tmp_path / "report.html").stat().st_size > 1000
    flat = GOLDEN / "f1_orig_local"
    model = str(flat / "truth" / "full.pt")
    shutil.copytree(flat, tmp_path / "flat", ignore=shutil.ignore_patterns("truth"))
    fsdpckpt("units", "--from", "flat", "--reference", model, "-o", "units.json")
    fsdpckpt("convert", "flat", "three", "--to", "flattened", "--world-size", "3", "--units", "units.json")
    refused = fsdpckpt(
        "convert", "full.pt", "out", "--to", "sharded", "--world-size", "2", "--nproc-per-node", "2", code=2
    )
    assert refused.stderr.splitlines()[0] == "error: workers need PyTorch, which is not installed"
    assert refused.stderr.splitlines()[-1] == 'next: pip install "fsdpckpt[torch]"'
    read = (
        "import fsdpckpt, sys; names = dir(fsdpckpt); "
        "first = next(iter(fsdpckpt.open(sys.argv[1]).values())); "
        "print(first.numpy().dtype, 'comm' in names, 'StorageReader' in names)"
    )
    assert run(environment, tmp_path, "python", "-c", read, "full.pt").stdout == "float32 True False\n"


def test_the_wheel_says_what_a_package_index_shows(environment: Path) -> None:
    shown = "import json; from importlib.metadata import metadata; print(json.dumps(metadata('fsdpckpt').json))"
    found: Mapping[str, object] = json.loads(run(environment, environment, "python", "-c", shown).stdout)
    assert str(found["description"]).startswith("# fsdpckpt")
    assert (found["summary"], found["requires_python"]) == (SETTINGS["description"], SETTINGS["requires-python"])
    assert "Typing :: Typed" in list(found["classifier"])  # type: ignore[call-overload]
    required = [one for one in found["requires_dist"] if "extra ==" not in one]  # type: ignore[attr-defined]
    assert required and not any(one.startswith("torch") for one in required)
    assert list((environment.parent).glob("lib/*/site-packages/fsdpckpt/py.typed"))


def test_the_same_commit_always_gives_the_same_wheel(environment: Path, tmp_path: Path) -> None:
    first = next(environment.parent.parent.glob("*.whl"))
    again = build(tmp_path / "again", umask=0o077, TZ="Asia/Tokyo")
    assert again.name == first.name
    assert again.read_bytes() == first.read_bytes()
