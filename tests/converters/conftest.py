"""Every test of conversions runs in an empty directory of its own: names of files are relative to it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import fsdpckpt
from tests.converters import meshes


@pytest.fixture(autouse=True)
def in_a_directory_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="session")
def on_mesh(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """``on_mesh(case)``: the rank files of such a job; ``full``: one file of them all. Each is made once."""
    base = tmp_path_factory.mktemp("meshes")

    def made(case: meshes.Case, *, full: bool = False, **size: int) -> Path:
        path = base / f"{case}{size}"
        if not path.exists():
            meshes.save(case, path, **size)
        one_file = path.with_name(f"{path.name}.pt")
        if full and not one_file.exists():
            fsdpckpt.convert(path, one_file)
        return one_file if full else path

    return made
