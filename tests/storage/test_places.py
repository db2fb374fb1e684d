"""A place is one place, whatever paths lead to it: the source is never written to, replaced or removed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from fsdpckpt.errors import UsageError
from fsdpckpt.storage.mounts import is_in_memory
from fsdpckpt.storage.places import DirectoryTree, is_within
from fsdpckpt.storage.target_checks import (
    TargetState,
    check_target,
    refuse_links_into,
    require_apart,
    require_outside_opened,
)

MOUNTED = """
import os, subprocess, sys
from fsdpckpt.errors import TargetExistsError, UsageError
from fsdpckpt.report import check_report
from fsdpckpt.storage.mounts import is_in_memory
from fsdpckpt.storage.places import DirectoryTree, is_within
from fsdpckpt.storage.target_checks import TargetState, check_target, refuse_links_into
from fsdpckpt.storage.target_checks import require_apart, require_source_apart

def bind(one, other):
    subprocess.run(["mount", "--bind", one, other], check=True)

def refused(words, check, *arguments, **options):
    try:
        check(*arguments, **options)
    except UsageError as error:
        assert words in error.what, error.what
    else:
        raise SystemExit(f"{check.__name__} {arguments} {options} is allowed")

os.chdir(sys.argv[1])
for name in ("p/src/part/deep", "alias", "part", "target/inside", "other", "own"):
    os.makedirs(name)
for name in ("p/src/part/deep/data", "p/src/one.pt", "file.pt"):
    open(name, "w").close()
bind("p", "alias")
bind("p/src/part", "part")
bind("p/src", "target/inside")
bind("p/src/one.pt", "file.pt")
for state in (TargetState.ABSENT, TargetState.REPLACEABLE):
    refused("alias/src is the source (p/src) by another path", check_target, "alias/src", "p/src", state=state)
    refused("lies inside the source", check_target, "alias/src/out", "p/src", state=state)
    refused("lies inside the source", check_target, "alias/src/not/there/yet", "p/src", state=state)
    refused("lies inside the source", check_target, "part/out", "p/src", state=state)
    refused("lies inside the source", check_target, "part", "alias/src", state=state)
    refused("is the source", check_target, "file.pt", "p/src/one.pt", state=state)
refused("would delete the source", check_target, "target", "p/src", state=TargetState.REPLACEABLE)
refused("would delete the source", check_target, "target", "part/deep", state=TargetState.REPLACEABLE)
refused("would delete the source", check_target, "p", "alias/src", state=TargetState.REPLACEABLE)
refused("would delete the source", require_source_apart, "target", "p/src", overwrite=True)
refused("lies inside the source", require_source_apart, "part/out", "p/src", overwrite=False)
require_source_apart("target", "p/src", overwrite=False)
require_source_apart("target/out", "own", overwrite=True)
refused("would delete part/deep/data", refuse_links_into, "target", "own", [], units="part/deep/data")
refused("lies inside the source", require_apart, "part/staged", "p/src")
refused("an interrupted upload left", require_apart, "alias", "p/src")
refused("inside the source", check_report, "part/page.html", "p/src")
os.makedirs("mounted here")
bind("own", "mounted here")
for state in (TargetState.ABSENT, TargetState.REPLACEABLE):
    try:
        check_target("mounted here", "p/src", state=state)
    except TargetExistsError as error:
        assert "is a mount point" in error.what, error.what
    else:
        raise SystemExit("a mount point would be renamed")
check_target("other/out", "p/src", state=TargetState.REPLACEABLE)
check_target("alias/out", "p/src", state=TargetState.ABSENT)
print("passed")
"""


def test_a_second_path_to_the_source_is_the_source(tmp_path: Path) -> None:
    if shutil.which("unshare") is None or subprocess.run(["unshare", "-rm", "true"], check=False).returncode:
        pytest.skip("no mount namespace can be made here: a directory has one path only")
    words = ["unshare", "-rm", sys.executable, "-c", MOUNTED, str(tmp_path)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.strip() == "passed", done.stdout + done.stderr


def test_a_link_to_the_source_is_the_source_and_another_name_of_a_file_is_not(tmp_path: Path) -> None:
    (tmp_path / "src" / "deep").mkdir(parents=True)
    (tmp_path / "src" / "deep" / "data").write_bytes(b"theirs")
    (tmp_path / "link").symlink_to(tmp_path / "src" / "deep")
    os.link(tmp_path / "src" / "deep" / "data", tmp_path / "mine")
    tree = DirectoryTree(str(tmp_path / "src"))
    assert tree.holds(str(tmp_path / "link" / "out"))
    assert not tree.holds(str(tmp_path / "mine")), "removing one name of a file leaves the other"
    assert not is_within(str(tmp_path / "mine"), str(tmp_path / "src" / "deep" / "data"))
    assert not tree.holds(str(tmp_path)) and not tree.holds(str(tmp_path / "srcs"))


@pytest.mark.parametrize("place", [".out.fsdpckpt-staging", ".out.fsdpckpt-old"])
def test_what_an_interrupted_run_left_is_no_source_for_the_run_that_removes_it(tmp_path: Path, place: str) -> None:
    source = tmp_path / place / "output"
    source.mkdir(parents=True)
    with pytest.raises(UsageError, match="part of what an interrupted run left"):
        check_target(str(tmp_path / "out"), str(source), state=TargetState.ABSENT)
    check_target(str(tmp_path / "other"), str(source), state=TargetState.ABSENT)


def test_the_units_of_the_source_are_not_deleted_with_what_is_replaced(tmp_path: Path) -> None:
    target, source = tmp_path / "out", tmp_path / "src"
    target.mkdir()
    source.mkdir()
    (target / "units.json").touch()
    (tmp_path / "link.json").symlink_to(target / "units.json")
    for units in (target / "units.json", tmp_path / "link.json"):
        with pytest.raises(UsageError, match="says what the source holds"):
            refuse_links_into(str(target), str(source), [], units=str(units))
    (tmp_path / "units.json").touch()
    refuse_links_into(str(target), str(source), [], units=str(tmp_path / "units.json"))


def test_a_directory_to_upload_from_lies_outside_of_the_source(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="lies inside the source"):
        require_apart(str(tmp_path / "src" / "staged"), str(tmp_path / "src"))
    require_apart(str(tmp_path / "staged"), str(tmp_path / "src"))


def test_what_a_link_in_the_source_leads_to_is_the_source_where_it_was_read(tmp_path: Path) -> None:
    source, data, cache = tmp_path / "src", tmp_path / "data", tmp_path / "cache"
    for folder in (source, data, cache):
        folder.mkdir()
    (source / "dcp").symlink_to(data)
    (source / "model.pt").symlink_to(cache / "blob")  # as a Hugging Face cache has it
    opened = [str(source / "dcp" / "__0_0.distcp"), str(source / "model.pt")]
    with pytest.raises(UsageError, match="leads there"):
        require_outside_opened(str(data / "out"), str(source), opened)
    require_outside_opened(str(data / "out"), str(source), opened[1:])
    for target in (tmp_path / "out", cache / "out", data.parent / "datas"):
        require_outside_opened(str(target), str(source), opened)


def test_which_file_systems_keep_their_files_in_memory() -> None:
    kinds = {line.split()[1]: line.split()[2] for line in Path("/proc/mounts").read_text().splitlines()}
    asked = [point for point, kind in kinds.items() if kind in {"tmpfs", "proc", "sysfs", "ext4", "overlay"}]
    readable = [point for point in asked if os.access(point, os.R_OK)]
    for point in readable:
        assert is_in_memory(os.stat(point).st_dev) is (kinds[point] == "tmpfs"), point
    if "tmpfs" not in {kinds[point] for point in readable}:
        pytest.skip("nothing is mounted in memory here")
