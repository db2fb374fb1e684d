"""Files that are read are closed and opened again, so that a checkpoint of thousands needs few descriptors."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

import fsdpckpt
from fsdpckpt.errors import SourceCorruptError, SourceError, SourceMissingError
from fsdpckpt.storage import descriptors
from fsdpckpt.storage.local import LocalFile
from fsdpckpt.storage.sources import Sources

FEW = 3


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    descriptors._close_idle(0)  # of earlier tests
    monkeypatch.setattr(descriptors, "open_file_limit", lambda: FEW)


def open_files(directory: Path) -> int:
    links = [os.path.realpath(f"/proc/self/fd/{number}") for number in os.listdir("/proc/self/fd")]
    return sum(1 for link in links if link.startswith(f"{directory}/"))


def make(directory: Path, count: int) -> list[bytes]:
    content = [random.Random(number).randbytes(100 + number) for number in range(count)]
    for number, data in enumerate(content):
        (directory / str(number)).write_bytes(data)
    return content


@pytest.mark.usefixtures("few")
def test_any_number_of_files_is_read_in_any_order_with_few_of_them_open(tmp_path: Path) -> None:
    content = make(tmp_path, 20)
    files = [LocalFile(str(tmp_path / str(number))) for number in range(20)]
    for number in random.Random(1).choices(range(20), k=200):
        assert files[number].read(number, 50) == content[number][number : number + 50]
        assert open_files(tmp_path) <= FEW
    for file in files:
        file.close()
    assert open_files(tmp_path) == 0


@pytest.mark.usefixtures("few")
def test_threads_that_read_more_files_than_may_be_open_read_them_all(tmp_path: Path) -> None:
    content = make(tmp_path, 12)
    with Sources() as sources, ThreadPoolExecutor(6) as pool:

        def read(turn: int) -> bool:
            number = turn % 12
            return sources.open(str(tmp_path / str(number))).read(0, 100) == content[number][:100]

        assert all(pool.map(read, range(600)))
    assert open_files(tmp_path) == 0


@pytest.mark.usefixtures("few")
@pytest.mark.parametrize("change", ["replaced", "written", "gone"])
def test_a_file_that_is_another_one_when_it_is_opened_again_is_an_error(change: str, tmp_path: Path) -> None:
    make(tmp_path, 8)
    files = [LocalFile(str(tmp_path / str(number))) for number in range(8)]
    if change == "replaced":
        (tmp_path / "new").write_bytes(bytes(100))
        os.replace(tmp_path / "new", tmp_path / "0")
    elif change == "written":
        os.utime(tmp_path / "0", ns=(1, 1))
    else:
        os.unlink(tmp_path / "0")
    with pytest.raises(SourceMissingError if change == "gone" else SourceCorruptError):
        files[0].read(0, 5)
    assert len(files[7].read(0, 5)) == 5


@pytest.mark.usefixtures("few")
def test_a_conversion_of_many_rank_files_and_its_check_need_few(tmp_path: Path) -> None:
    torch.save({"w": torch.randn(90, 3)}, tmp_path / "source.pt")
    options = {"to": "sharded", "container": "torch", "buffers": ("none",)}
    fsdpckpt.convert(tmp_path / "source.pt", tmp_path / "ranks", world_size=40, **options)
    fsdpckpt.convert(tmp_path / "ranks", tmp_path / "again", world_size=30, verify="full", **options)
    assert fsdpckpt.diff(tmp_path / "source.pt", tmp_path / "again").same
    assert open_files(tmp_path) <= FEW


def test_a_process_that_may_open_little_converts_more_files_than_that(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(200, 2)}, tmp_path / "source.pt")
    code = """
import resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
from fsdpckpt.cli import main
sys.argv = "fsdpckpt convert source.pt out --to sharded --container torch --world-size 100 --buffers none".split()
sys.exit(main())
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_where_nothing_can_be_closed_the_error_says_how_to_allow_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> int:
        raise OSError(24, "Too many open files")

    (tmp_path / "file").write_bytes(b"x")
    descriptors._close_idle(0)
    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(SourceError, match="Too many open files") as caught:
        LocalFile(str(tmp_path / "file"))
    assert "ulimit -n" in str(caught.value.next_step)
