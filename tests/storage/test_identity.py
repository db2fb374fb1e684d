"""A file that changed since it was first opened is noticed, whichever way it changed."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path

import fsspec
import pytest

from fsdpckpt.errors import SourceCorruptError, SourceMissingError
from fsdpckpt.storage import FileIdentity, change_between, remote_identity
from fsdpckpt.storage.sources import Sources


def _replace(path: Path) -> None:
    other = path.with_suffix(".new")
    other.write_bytes(path.read_bytes())
    os.utime(other, ns=(path.stat().st_atime_ns, path.stat().st_mtime_ns))
    other.replace(path)


def _rewrite(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[3] ^= 1
    before = path.stat().st_mtime_ns
    path.write_bytes(data)
    os.utime(path, ns=(before + 1, before + 1))


CHANGES: dict[str, Callable[[Path], object]] = {
    "was replaced by another file": _replace,
    "was written to": _rewrite,
    "grew from 1,000 bytes to 1,001 bytes": lambda path: path.write_bytes(path.read_bytes() + b"x"),
    "shrank from 1,000 bytes to 999 bytes": lambda path: os.truncate(path, 999),
}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "source"
    path.write_bytes(random.Random(1).randbytes(1000))
    return path


@pytest.mark.parametrize("words", CHANGES)
def test_a_change_is_told_in_words(path: Path, words: str) -> None:
    with Sources() as sources:
        sources.open(str(path))
        sources.require_unchanged()
        CHANGES[words](path)
        with pytest.raises(SourceCorruptError, match=words):
            sources.require_unchanged()


@pytest.mark.parametrize("words", CHANGES)
def test_a_file_that_is_opened_again_must_be_the_one_it_was(
    path: Path, tmp_path: Path, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "other").write_bytes(b"other")
    monkeypatch.setattr("fsdpckpt.storage.sources.MAX_OPEN", 1)
    with Sources() as sources:
        sources.open(str(path))
        sources.open(str(tmp_path / "other"))
        CHANGES[words](path)
        with pytest.raises(SourceCorruptError, match=words):
            sources.open(str(path))


def test_a_file_that_was_only_asked_about_must_be_that_one_when_it_is_opened(path: Path) -> None:
    with Sources() as sources:
        assert sources.identity(str(path)).nbytes == 1000
        _replace(path)
        with pytest.raises(SourceCorruptError, match="replaced"):
            sources.open(str(path))


def test_a_file_that_vanished_is_missing(path: Path) -> None:
    with Sources() as sources:
        sources.open(str(path))
        path.unlink()
        with pytest.raises(SourceMissingError, match="vanished"):
            sources.require_unchanged()
        with pytest.raises(SourceMissingError):
            sources.identity(f"{path}-never")


def test_an_object_that_was_written_again_is_another(tmp_path: Path) -> None:
    del tmp_path
    url = "memory://identity/object"
    with fsspec.open(url, "wb") as file:
        file.write(b"abcd")
    with Sources() as sources:
        assert sources.identity(url).nbytes == 4
    tags = [remote_identity(url, {"size": 4, "ETag": tag}) for tag in ("one", "two", "one")]
    assert change_between(tags[0], tags[1]) == "was written to"
    assert change_between(tags[0], tags[2]) is None
    assert change_between(FileIdentity("a", 1, 2, 3), FileIdentity("./a", 1, 2, 3)) is None, "spelling does not count"
