"""Sources that change while they are read, and checkpoints that a job is still writing."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

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


RANKS = ("--to", "sharded", "--container", "torch", "--world-size", "3", "--buffers", "none")
LONGEST = "longest.distcp"


@pytest.mark.parametrize(
    ("made", "missing", "short", "said"),
    [
        (DCP, [".metadata", "fsdpckpt.json"], None, [".metadata", "still"]),
        (DCP, [], LONGEST, [LONGEST]),
        (RANKS, ["fsdpckpt.json", "model_world_size_3_rank_1.pt"], None, ["rank_1"]),
        (None, [], "source.pt", []),
        ("safetensors", [], "source.pt", []),
    ],
    ids=["DCP without metadata", "DCP", "ranks", "torch", "safetensors"],
)
def test_a_checkpoint_that_is_still_being_written_is_3(
    source: Path, tmp_path: Path, whole: Whole, made: Any, missing: list[str], short: str | None, said: list[str]
) -> None:
    if made == "safetensors":
        header = json.dumps({"w": {"dtype": "F32", "shape": [1000], "data_offsets": [0, 4000]}}).encode()
        source = source.rename(tmp_path / "model.safetensors")
        source.write_bytes(struct.pack("<Q", len(header)) + header + os.urandom(4000))
    path = whole(*made) if isinstance(made, (list, tuple)) else source
    for name in missing:
        (path / name).unlink()
    if short is not None:
        victim = max(path.glob("*.distcp")) if path.is_dir() else path
        said = [victim.name if each == LONGEST else each for each in said]
        os.truncate(victim, victim.stat().st_size * 2 // 3)
    before = sorted(os.listdir(tmp_path))
    done = convert(path, tmp_path / "target", *FULL)
    assert done.code == 3, done.err
    assert all(words in done.err for words in said), done.err
    assert sorted(os.listdir(tmp_path)) == before
