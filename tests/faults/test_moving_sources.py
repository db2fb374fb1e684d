"""Sources that change while they are read, and checkpoints that a job is still writing."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.faults.conftest import DCP, FULL
from tests.faults.runs import convert

Whole = Callable[..., Path]
CHANGES = {
    "replaced": "data = open(SRC, 'rb').read(); open(SRC + '.new', 'wb').write(data); os.replace(SRC + '.new', SRC)",
    "truncated": "os.truncate(SRC, os.path.getsize(SRC) // 2)",
    "grown": "open(SRC, 'ab').write(bytes(100))",
    "written to": "file = open(SRC, 'r+b'); file.seek(2_000_000); file.write(b'x'); file.close()",
    "removed": "os.unlink(SRC)",
    "moved away": "os.rename(os.path.dirname(SRC), os.path.dirname(SRC) + '.old')",
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_source_that_changes_while_it_is_read_is_3_and_nothing_is_left(
    source: Path, tmp_path: Path, change: str
) -> None:
    (tmp_path / "in").mkdir()
    moved = source.rename(tmp_path / "in" / "source.pt")
    target = tmp_path / "out" / "target"
    done = convert(moved, target, *FULL, hook=(25, CHANGES[change].replace("SRC", repr(str(moved)))))
    assert done.code == 3, done.err
    assert str(moved) in done.err
    assert not target.exists()
    if change in ("removed", "moved away"):
        assert "vanished while it was read" in done.err
    else:
        assert not (tmp_path / "out").exists()


def test_one_file_of_many_that_is_replaced_before_it_was_opened_is_noticed(tmp_path: Path, whole: Whole) -> None:
    sharded = whole(*DCP)
    victim = str(max(sharded.glob("*.distcp")))
    done = convert(sharded, tmp_path / "target", *FULL, hook=(2, CHANGES["replaced"].replace("SRC", repr(victim))))
    assert done.code == 3, done.err
    assert f"{victim} changed while it was read: it was replaced by another file" in done.err
    assert not (tmp_path / "target").exists()


def test_a_new_save_over_the_metadata_is_noticed(tmp_path: Path, whole: Whole) -> None:
    sharded = whole(*DCP)
    metadata = str(sharded / ".metadata")
    done = convert(sharded, tmp_path / "target", *FULL, hook=(9, CHANGES["replaced"].replace("SRC", repr(metadata))))
    assert done.code == 3, done.err
    assert f"{metadata} changed while it was read" in done.err


def test_a_dcp_directory_without_metadata_is_still_being_written(tmp_path: Path, whole: Whole) -> None:
    sharded = whole(*DCP)
    (sharded / ".metadata").unlink()
    (sharded / "fsdpckpt.json").unlink()
    done = convert(sharded, tmp_path / "target", *FULL)
    assert done.code == 3, done.err
    assert ".metadata" in done.err
    assert "still" in done.err
    assert not (tmp_path / "target").exists()


def test_a_torch_file_that_is_still_growing_is_3(source: Path, tmp_path: Path) -> None:
    data = source.read_bytes()
    source.write_bytes(data[: len(data) * 2 // 3])
    done = convert(source, tmp_path / "target", *FULL)
    assert done.code == 3, done.err
    assert sorted(os.listdir(tmp_path)) == ["source.pt"]


def test_a_dcp_data_file_that_is_still_growing_is_3(tmp_path: Path, whole: Whole) -> None:
    sharded = whole(*DCP)
    victim = max(sharded.glob("*.distcp"))
    os.truncate(victim, victim.stat().st_size // 2)
    done = convert(sharded, tmp_path / "target", *FULL)
    assert done.code == 3, done.err
    assert victim.name in done.err
    assert not (tmp_path / "target").exists()


def test_a_safetensors_file_that_is_still_growing_is_3(tmp_path: Path) -> None:
    header = json.dumps({"w": {"dtype": "F32", "shape": [1000], "data_offsets": [0, 4000]}}).encode()
    path = tmp_path / "model.safetensors"
    path.write_bytes(struct.pack("<Q", len(header)) + header + os.urandom(3000))
    done = convert(path, tmp_path / "target", *FULL)
    assert done.code == 3, done.err
    assert sorted(os.listdir(tmp_path)) == ["model.safetensors"]


def test_a_directory_of_rank_files_of_which_one_is_not_there_yet_is_3(
    source: Path, tmp_path: Path, whole: Whole
) -> None:
    ranks = whole("--to", "sharded", "--container", "torch", "--world-size", "3", "--buffers", "none")
    (ranks / "fsdpckpt.json").unlink()
    (ranks / "model_world_size_3_rank_1.pt").unlink()
    done = convert(ranks, tmp_path / "target", *FULL)
    assert done.code == 3, done.err
    assert "rank 1" in done.err or "[1]" in done.err or "rank_1" in done.err
