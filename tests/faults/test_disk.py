"""Disks that are full, fail, or answer in parts: the right exit code, and nothing half-made."""

from __future__ import annotations

import errno
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.faults.conftest import DCP, FULL
from tests.faults.runs import convert, faulty, finished, hidden, removing, same

Whole = Callable[..., Path]
# At every tenth write: the journal's thread comes to its turn, however busy the machine is.
SYNCED_BETWEEN = "import time; time.sleep(0.05); written.clear()"


@pytest.mark.parametrize("options", [FULL, DCP], ids=["full", "dcp"])
def test_reads_and_writes_that_transfer_a_part_are_gone_on_with(
    source: Path, tmp_path: Path, whole: Whole, shim: str, options: list[str]
) -> None:
    target = tmp_path / "target"
    whole(*options)
    shorter = faulty(shim, "pread,preadv,pwrite,write", str(tmp_path), 1, "short", FAULT_EVERY="1")
    done = convert(source, target, *options, **shorter)
    assert done.code == 0, done.err
    assert same(whole(*options), target)


@pytest.mark.parametrize("nth", [1, 3, 15, 40])
def test_a_read_error_is_3_names_the_file_and_can_be_resumed(
    source: Path, tmp_path: Path, whole: Whole, shim: str, nth: int
) -> None:
    target = tmp_path / "target"
    whole(*FULL)
    done = convert(source, target, *FULL, **faulty(shim, "pread,preadv", "source.pt", nth, errno.EIO))
    assert done.code == 3, done.err
    assert re.search(rf"{source} cannot be read at offset \d+: Input/output error", done.err)
    assert not target.exists()
    if hidden(target).exists():
        assert "run the command again: it continues from there" in done.err
    assert not hidden(target, "lock").exists()
    finished(source, target, *FULL, expected=whole(*FULL))


@pytest.mark.parametrize("nth", [1, 3, 20])
def test_a_source_that_ends_early_is_3_and_leaves_nothing(source: Path, tmp_path: Path, shim: str, nth: int) -> None:
    shorter = faulty(shim, "pread,preadv", "source.pt", nth, "end", FAULT_EVERY="1")
    done = convert(source, tmp_path / "target", *FULL, **shorter)
    assert done.code == 3, done.err
    assert sorted(os.listdir(tmp_path)) == ["source.pt"]


@pytest.mark.parametrize(
    ("calls", "nth", "number"),
    [
        ("pwrite", 1, errno.EIO),
        ("pwrite", 25, errno.ENOSPC),
        ("fsync", 1, errno.EIO),
        ("fdatasync", 1, errno.EIO),
        ("fdatasync", 4, errno.EIO),
        ("fallocate", 1, errno.ENOSPC),
        ("fallocate", 2, errno.ENOSPC),
        ("write", 2, errno.ENOSPC),
        ("open", 3, errno.EDQUOT),
        ("mkdir", 1, errno.EROFS),
        ("mkdir", 2, errno.ENOSPC),
        ("rename", 1, errno.EIO),
    ],
)
def test_whatever_the_disk_refuses_is_5_and_the_run_can_be_finished_later(
    source: Path, tmp_path: Path, whole: Whole, shim: str, calls: str, nth: int, number: int
) -> None:
    target = tmp_path / "target"
    whole(*DCP)
    # Every open from the nth on is refused: which file is opened when depends on the threads, and direct writes, which
    # need an open of their own, are done without where it fails.
    more = {"FAULT_EVERY": "1"} if calls == "open" else {}
    faults = faulty(shim, calls, "target.fsdpckpt-staging", nth, number, **more)
    done = convert(source, target, *DCP, hook=(10, SYNCED_BETWEEN), **faults)
    assert done.code == 5, done.err
    assert os.strerror(number) in done.err
    assert not target.exists()
    assert hidden(target).exists() == ("it continues from there" in done.err)
    assert not hidden(target, "lock").exists()
    finished(source, target, *DCP, expected=whole(*DCP))


def test_a_lost_write_that_only_the_journal_s_sync_is_told_of_ends_the_run(
    source: Path, tmp_path: Path, shim: str
) -> None:
    target = tmp_path / "target"
    done = convert(source, target, *FULL, **faulty(shim, "fdatasync", "output/target", 1, errno.EIO))
    assert done.code == 5
    assert not target.exists()


IN_NAMESPACE = """
import json, os, subprocess, sys
from pathlib import Path
from tests.faults.runs import convert, same
source, whole, mount, what = Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]), sys.argv[4]
options = sys.argv[5:]
def sh(*words): subprocess.run(words, check=True)
sh("mount", "-t", "tmpfs", "-o", "size=64m", "none", str(mount))
target = mount / "target"
if what == "too small":
    sh("mount", "-o", "remount,size=4m", str(mount))
    done = convert(source, target, *options)
    assert done.code == 5, done
    assert "not enough free space" in done.err
    assert os.listdir(mount) == []
    planned = convert(source, target, *options, "--dry-run")
    assert planned.code == 5, planned
    assert "free: NOT ENOUGH" in planned.out + planned.err
    stated = json.loads(convert(source, target, *options, "--dry-run", "--json").out)
    assert stated["disk_suffices"] is False
    assert stated["disk_needed"] > stated["disk_free"] > 2_000_000
elif what == "read-only":
    sh("mount", "-o", "remount,ro", str(mount))
    done = convert(source, target, *options)
    assert done.code == 5, done
    assert "read-only" in done.err
elif what == "no inodes":
    sh("mount", "-o", "remount,nr_inodes=4", str(mount))
    done = convert(source, target, *options)
    assert done.code == 5, done
    assert "not enough free inodes" in done.err
    assert os.listdir(mount) == []
else:
    words = ["cp", "/dev/zero", str(mount / "filler")]
    filler = f"import subprocess; subprocess.run({words}, stderr=subprocess.DEVNULL)"
    done = convert(source, target, *options, hook=(10, filler))
    assert done.code == 5, done
    assert "No space left on device" in done.err
    assert not target.exists()
    (mount / "filler").unlink()
    done = convert(source, target, *options)
    assert done.code == 0, done
    assert same(whole, target)
print("passed")
"""


@pytest.mark.parametrize("what", ["too small", "read-only", "no inodes", "fills"])
def test_a_real_file_system_that_is_small_or_fills_or_is_read_only(
    source: Path, tmp_path: Path, whole: Whole, what: str
) -> None:
    if shutil.which("unshare") is None or subprocess.run(["unshare", "-rm", "true"], check=False).returncode:
        pytest.skip("no mount namespace can be made here: real file systems are not tested")
    mount = tmp_path / "mount"
    mount.mkdir()
    words = [str(source), str(whole(*DCP)), str(mount), what, *DCP]
    command = ["unshare", "-rm", sys.executable, "-c", IN_NAMESPACE, *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout.strip() == "passed", done.stderr


@pytest.mark.parametrize(("target", "options"), [("target", FULL), ("below/target", DCP)])
def test_a_staging_directory_or_a_parent_of_the_target_that_vanishes_is_5(
    source: Path, tmp_path: Path, target: str, options: list[str]
) -> None:
    vanishes = hidden(tmp_path / target) if options == FULL else (tmp_path / target).parent
    done = convert(source, tmp_path / target, *options, hook=(20, removing(vanishes)))
    assert done.code == 5, done.err
    assert sorted(os.listdir(tmp_path)) == ["source.pt"]


@pytest.mark.parametrize("name", ["n" * 300, f"{'n' * 300}/target", "ü" * 130])
def test_a_name_the_file_system_cannot_hold_is_5_before_anything_is_read(
    source: Path, tmp_path: Path, name: str
) -> None:
    os.truncate(source, 100)  # whoever reads it says so
    done = convert(source, tmp_path / name, *FULL)
    assert done.code == 5, done.err
    assert "too long" in done.err
    assert "at most 255 bytes" in done.err


def test_the_longest_name_the_file_system_can_hold_is_written(source: Path, tmp_path: Path, whole: Whole) -> None:
    target = tmp_path / f"{'n' * 252}.pt"
    done = convert(source, target, *FULL)
    assert done.code == 0, done.err
    assert same(whole(*FULL), target)
