"""DST appears complete or not at all."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import random
import shutil
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fsdpckpt.errors import TargetExistsError, TargetUnwritableError, UsageError
from fsdpckpt.storage.hidden import journal_path, journal_paths, lock_as_writer, staging_root
from fsdpckpt.storage.local_target import WritableFile, aligned_buffer
from fsdpckpt.storage.renameat2 import swap_names
from fsdpckpt.storage.staging import (
    Staging,
    clear_leftover,
    free_bytes,
    restore_backup,
    was_interrupted,
)
from fsdpckpt.storage.target_checks import TargetState, check_target, contents_of


def _write(path: str, data: bytes) -> None:
    file = WritableFile(path, len(data))
    file.write(0, data)
    file.commit()


@pytest.fixture
def begin(tmp_path: Path) -> Iterator[Callable[..., Staging]]:
    """Begins a run into "out", which is discarded at the end."""
    begun: list[Staging] = []

    def begin(name: str = "out", **options: Any) -> Staging:
        begun.append(Staging(str(tmp_path / name), **{"directory": True, **options}))
        return begun[-1]

    yield begin
    for staging in begun:
        staging.discard()
        staging.close()


def test_workers_that_look_at_once_all_see_that_a_run_was_interrupted(tmp_path) -> None:
    target = tmp_path / "out"
    lock = tmp_path / ".out.fsdpckpt-lock"
    lock.touch()
    with open(lock) as other_worker:
        fcntl.flock(other_worker, fcntl.LOCK_SH)
        assert was_interrupted(str(target))
    with open(lock) as other_run:
        fcntl.flock(other_run, fcntl.LOCK_EX)
        assert not was_interrupted(str(target))
    rounds, together = 200, threading.Barrier(4)

    def look(_: int) -> bool:
        together.wait()
        return was_interrupted(str(target))

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(look, range(4 * rounds)))


@pytest.mark.parametrize("name", ["", "a"])
def test_a_file_or_directory_appears_under_its_name_only_after_commit(tmp_path, name: str) -> None:
    target = tmp_path / "below" / "out"
    for publish in (False, True):
        staging = Staging(str(target), directory=bool(name))
        _write(staging.locate(name), b"whole")
        assert not target.exists()
        staging.commit() if publish else staging.discard()
        staging.close()
        assert list(tmp_path.rglob("*")) == ([target.parent, target, *target.glob("a")] if publish else [])
    assert (target / name).read_bytes() == b"whole"


@pytest.mark.parametrize("exchanges", [True, False])
@pytest.mark.parametrize("directory", [True, False])
def test_replacing_leaves_only_the_new_output(tmp_path, monkeypatch, directory: bool, exchanges: bool) -> None:
    if not exchanges:
        monkeypatch.setattr("fsdpckpt.storage.staging.swap_names", lambda *_: False)
    target = tmp_path / "out"
    target.mkdir()
    (target / "old").write_bytes(b"old")
    staging = Staging(str(target), directory=directory, replaces=contents_of(str(target)))
    _write(staging.locate("" if not directory else "new"), b"new")
    assert (target / "old").exists()
    staging.commit()
    staging.close()
    assert (target.read_bytes() if not directory else (target / "new").read_bytes()) == b"new"
    assert sorted(os.listdir(tmp_path)) == ["out"]


@pytest.mark.parametrize("directory", [True, False])
def test_where_two_names_can_change_places_there_is_no_moment_without_a_target(
    tmp_path, monkeypatch, directory: bool
) -> None:
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
    if not swap_names(str(tmp_path / "one"), str(tmp_path / "other")):
        pytest.skip("this file system cannot exchange two names: a target that is replaced is moved aside")
    target = tmp_path / "out"
    target.mkdir()
    staging = Staging(str(target), directory=directory, replaces=contents_of(str(target)))
    _write(staging.locate("" if not directory else "new"), b"new")
    with monkeypatch.context() as refused:
        refused.setattr(os, "rename", lambda *_: pytest.fail("the older target was moved away"))
        staging.commit()
    staging.close()
    assert target.is_file() != directory


def test_names_that_cannot_be_exchanged_because_one_is_gone_are_an_error(tmp_path) -> None:
    (tmp_path / "one").mkdir()
    with pytest.raises(FileNotFoundError):
        swap_names(str(tmp_path / "one"), str(tmp_path / "other"))


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.EPERM])
def test_where_names_cannot_be_exchanged_the_target_is_replaced_all_the_same(tmp_path, monkeypatch, number) -> None:
    """EPERM is what a sandbox says of a system call that it does not know."""

    def refused(*_: object) -> int:
        ctypes.set_errno(number)
        return -1

    monkeypatch.setattr("ctypes.CDLL", lambda *_, **__: SimpleNamespace(renameat2=refused))
    (tmp_path / "out").mkdir()
    staging = Staging(str(tmp_path / "out"), directory=True, replaces={})
    _write(staging.locate("a"), b"new")
    staging.commit()
    staging.close()
    assert (tmp_path / "out" / "a").read_bytes() == b"new"
    assert os.listdir(tmp_path) == ["out"]


def test_links_among_what_was_staged_are_removed_and_never_followed(tmp_path, begin) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "one").write_bytes(b"someone's")
    staging = begin()
    os.symlink(tmp_path / "elsewhere", staging.locate("folder"))
    os.symlink(tmp_path / "elsewhere" / "one", staging.locate("one"))
    os.link(tmp_path / "elsewhere" / "one", staging.locate("two"))
    staging.keep_only(["one", "two", "folder/one"])
    assert os.listdir(staging.path) == []
    assert (tmp_path / "elsewhere" / "one").read_bytes() == b"someone's"


def test_a_path_that_no_disk_takes_leaves_no_directories(tmp_path) -> None:
    with pytest.raises(TargetUnwritableError):
        Staging(str(tmp_path / "/".join(["new", *["y" * 200] * 30])), directory=False, replaces={})
    assert list(tmp_path.iterdir()) == []


def test_what_an_interrupted_run_left_is_cleared_and_said(tmp_path) -> None:
    first = Staging(str(tmp_path / "out"), directory=True)
    _write(first.locate("half"), random.Random(1).randbytes(40))
    first.close()
    second = Staging(str(tmp_path / "out"), directory=True)
    assert second.interrupted.exists
    assert os.listdir(second.path) == []
    second.discard()
    second.close()


def test_two_runs_into_one_target_do_not_meet(tmp_path) -> None:
    first = Staging(str(tmp_path / "out"), directory=True)
    with pytest.raises(TargetExistsError, match="another fsdpckpt is writing"):
        Staging(str(tmp_path / "out"), directory=True)
    first.discard()
    first.close()
    Staging(str(tmp_path / "out"), directory=True).close()


ABSENT, REPLACEABLE = TargetState.ABSENT, TargetState.REPLACEABLE


@pytest.mark.parametrize(
    ("target", "source", "state", "error", "words"),
    [
        ("out", "in", ABSENT, TargetExistsError, ""),
        ("theirs.pt/", "in", ABSENT, TargetExistsError, ""),
        ("theirs.pt/out", "in", ABSENT, TargetUnwritableError, "theirs.pt is not a directory"),
        ("in", "in", REPLACEABLE, UsageError, "never written to"),
        ("in/below/deep", "in", REPLACEABLE, UsageError, "never written to"),
        ("out", "out/in", REPLACEABLE, UsageError, "would delete the source"),
        ("/", "in", REPLACEABLE, UsageError, "would delete the source"),
        ("", "in", REPLACEABLE, UsageError, "DST is empty"),
        *(
            (name, "/somewhere/else", REPLACEABLE, TargetExistsError, "which fsdpckpt does not replace")
            for name in (".", "..", "~", "fifo")
        ),
        *(
            (name, "in", ABSENT, TargetUnwritableError, "too long")
            for name in ("n" * 256, "ü" * 128, f"{'n' * 256}/out", f"out/{'n' * 256}/below")
        ),
    ],
)
def test_a_target_that_nobody_means_or_no_disk_takes_is_refused(
    tmp_path, monkeypatch, target: str, source: str, state: TargetState, error: type[Exception], words: str
) -> None:
    for name in ("in", "out/in", "empty"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "theirs.pt").write_bytes(b"someone's")
    os.mkfifo(tmp_path / "fifo")
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(error, match=words):
        check_target(os.path.expanduser(target), source, state=state)
    check_target("empty", "in", state=ABSENT)  # nothing is in it
    check_target("theirs.pt", "in", state=REPLACEABLE)
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("home", ["link", "real", "../here/real"])
def test_the_home_directory_is_not_replaced_by_any_of_its_names(tmp_path, monkeypatch, home: str) -> None:
    (tmp_path / "here" / "real").mkdir(parents=True)
    os.symlink("real", tmp_path / "here" / "link")
    monkeypatch.chdir(tmp_path / "here")
    for name in (home, str(tmp_path / "here" / "link")):
        monkeypatch.setenv("HOME", name)
        with pytest.raises(TargetExistsError, match="the home directory"):
            check_target(str(tmp_path / "here" / "real"), "/somewhere/else", state=TargetState.REPLACEABLE)


def test_what_came_to_be_at_the_target_meanwhile_is_not_replaced(tmp_path) -> None:
    target = tmp_path / "out.pt"
    staging = Staging(str(target), directory=False)
    _write(staging.locate(""), b"new")
    target.write_bytes(b"someone's")
    with pytest.raises(TargetExistsError):
        staging.commit()
    staging.discard()
    staging.close()
    assert target.read_bytes() == b"someone's"
    assert os.listdir(tmp_path) == ["out.pt"]


def test_what_another_program_wrote_while_a_killed_run_had_the_target_aside_costs_neither(tmp_path) -> None:
    target, aside = tmp_path / "out", tmp_path / ".out.fsdpckpt-old"
    staging = Staging(str(target), directory=True, replaces={})
    _write(staging.journal, b"some windows")
    staging.close()
    for each in (target, aside):
        each.mkdir()
        (each / "theirs").write_bytes(b"someone's")
    with pytest.raises(TargetExistsError, match="another program wrote"):
        Staging(str(target), directory=True, replaces=contents_of(str(target)), resume=True)
    assert (target / "theirs").exists() and (aside / "theirs").exists()


def test_a_target_that_a_killed_run_had_moved_aside_comes_back(tmp_path) -> None:
    (tmp_path / ".out.fsdpckpt-old").mkdir()
    (tmp_path / ".out.fsdpckpt-old" / "theirs").write_bytes(b"someone's")
    with pytest.raises(TargetExistsError):
        Staging(str(tmp_path / "out"), directory=True)
    assert sorted(os.listdir(tmp_path)) == ["out"]
    assert (tmp_path / "out" / "theirs").read_bytes() == b"someone's"


def test_a_disk_that_refuses_direct_writes_gets_ordinary_ones_from_every_thread(tmp_path, monkeypatch) -> None:
    data = random.Random(5).randbytes(3 << 20)
    path = str(tmp_path / "out")
    file = WritableFile(path, len(data))
    direct, real, refused = file._direct, os.pwrite, []
    if direct < 0:
        pytest.skip(f"{tmp_path} is on a file system without direct writes")

    def pwrite(descriptor: int, view: memoryview, offset: int) -> int:
        if descriptor == direct:
            refused.append(offset)
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(descriptor, view, offset)

    monkeypatch.setattr(os, "pwrite", pwrite)
    buffer = aligned_buffer(len(data))
    buffer[:] = data
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda at: file.write(at, buffer[at : at + (1 << 19)]), range(0, len(data), 1 << 19)))
    file.commit()
    assert refused
    assert (tmp_path / "out").read_bytes() == data
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(direct)


def _interrupted(target: str, *, journal: bool = True) -> None:
    staging = Staging(target, directory=True)
    _write(staging.locate("half"), random.Random(1).randbytes(70_000))
    if journal:
        _write(staging.journal, b"journal")
    staging.close()


def test_staging_with_a_journal_is_kept_for_a_run_that_resumes(tmp_path) -> None:
    _interrupted(str(tmp_path / "out"))
    staging = Staging(str(tmp_path / "out"), directory=True, resume=True)
    assert (staging.interrupted.exists, staging.interrupted.resumed, staging.interrupted.removed) == (True, True, 0)
    assert os.listdir(staging.path) == ["half"]
    staging.commit()
    staging.close()
    assert sorted(os.listdir(tmp_path)) == ["out"]
    assert sorted(os.listdir(tmp_path / "out")) == ["half"]


@pytest.mark.parametrize(("journal", "resume"), [(False, True), (True, False)])
def test_staging_is_emptied_for_a_run_that_does_not_or_cannot_resume(
    tmp_path, begin, journal: bool, resume: bool
) -> None:
    _interrupted(str(tmp_path / "out"), journal=journal)
    staging = begin(resume=resume)
    assert (staging.interrupted.exists, staging.interrupted.resumed) == (True, False)
    assert staging.interrupted.removed >= 70_000
    assert os.listdir(staging.path) == []
    assert not os.path.exists(staging.journal)


def test_a_resumed_run_that_starts_over_has_an_empty_directory(tmp_path, begin) -> None:
    _interrupted(str(tmp_path / "out"))
    staging = begin(resume=True)
    staging.restart()
    assert os.listdir(staging.root) == ["output"]
    assert os.listdir(staging.path) == []


def test_the_journal_goes_before_what_it_speaks_of(tmp_path, monkeypatch) -> None:
    _interrupted(str(tmp_path / "out"))
    staging = Staging(str(tmp_path / "out"), directory=True, resume=True)
    seen = []
    monkeypatch.setattr(shutil, "rmtree", lambda path: seen.append(os.path.exists(staging.journal)))
    staging.discard()
    staging.close()
    assert seen == [False]


def test_the_journals_of_several_writers_count_and_go_with_the_rest(tmp_path) -> None:
    _interrupted(str(tmp_path / "out"), journal=False)
    root = staging_root(str(tmp_path / "out"))
    for writer in (0, 3):
        _write(journal_path(root, writer), b"journal")
    staging = Staging(str(tmp_path / "out"), directory=True, resume=True)
    assert staging.interrupted.resumed
    assert [os.path.basename(path) for path in journal_paths(root)] == ["journal-0", "journal-3"]
    staging.discard()
    staging.close()
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("resume", [False, True])
def test_nobody_begins_while_a_worker_whose_leader_is_gone_still_writes(tmp_path, begin, resume: bool) -> None:
    _interrupted(str(tmp_path / "out"))
    lock = lock_as_writer(staging_root(str(tmp_path / "out")), 2)
    with pytest.raises(TargetExistsError, match="another fsdpckpt is writing"):
        begin(resume=resume)
    assert journal_paths(staging_root(str(tmp_path / "out")))
    lock.close()
    staging = begin(resume=resume)
    assert staging.interrupted.resumed is resume


def test_staged_files_that_others_shall_write_now_are_removed(tmp_path, begin) -> None:
    _interrupted(str(tmp_path / "out"))
    staging = begin(resume=True)
    for name in ("one", "two", "fsdpckpt.json"):
        _write(staging.locate(name), b"staged")
    staging.keep_only(["one", "three"])
    assert os.listdir(staging.path) == ["one"]
    assert journal_paths(staging.root)


def test_what_is_staged_already_counts_as_free_space(tmp_path, begin) -> None:
    _interrupted(str(tmp_path / "out"))
    staging = begin(resume=True)

    class Full:
        f_blocks, f_bavail, f_frsize, f_files, f_favail = 1, 0, 1, 0, 0

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "statvfs", lambda _: Full)
        staging.require_space(60_000)
        with pytest.raises(TargetUnwritableError, match="not enough free space"):
            staging.require_space(200_000)


def test_a_file_system_that_does_not_count_its_blocks_is_not_full(
    tmp_path, begin, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What FUSE says of itself without ``statfs``."""
    uncounted = os.statvfs_result((512, 0, 0, 0, 0, 0, 0, 0, 0, 255))
    monkeypatch.setattr(os, "statvfs", lambda _: uncounted)
    staging = begin()
    staging.require_space(2**62, files=2**30)
    assert free_bytes(str(tmp_path / "out")) is None


def test_more_bytes_or_files_than_the_disk_has_are_refused_before_the_first_write(tmp_path, begin) -> None:
    staging = begin()
    with pytest.raises(TargetUnwritableError, match="not enough free space"):
        staging.require_space(2**62)
    if os.statvfs(tmp_path).f_files:
        with pytest.raises(TargetUnwritableError, match="not enough free inodes"):
            staging.require_space(1, files=2**62)


def test_a_target_file_that_vanished_is_named(tmp_path, begin) -> None:
    staging = begin()
    _write(staging.locate("there"), b"there")
    with pytest.raises(TargetUnwritableError, match="gone vanished"):
        staging.require_files(["there", "gone"])


def test_what_a_run_left_that_ended_just_after_its_target_appeared_can_be_cleared(tmp_path) -> None:
    _interrupted(str(tmp_path / "out"))
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "theirs").write_bytes(b"someone's")
    clear_leftover(str(tmp_path / "out"))
    assert os.listdir(tmp_path) == ["out"]
    assert os.listdir(tmp_path / "out") == ["theirs"]


@pytest.mark.parametrize("by_us", [True, False])
def test_what_a_run_moved_aside_goes_only_if_the_target_is_what_it_put_there(tmp_path, by_us: bool) -> None:
    """It was killed after its second rename: the file is in place, and nothing of it is staged any more."""
    target, aside = tmp_path / "out.pt", tmp_path / ".out.pt.fsdpckpt-old"
    target.write_bytes(b"new")
    aside.mkdir()
    (aside / "older").write_bytes(b"replaced")
    (tmp_path / ".out.pt.fsdpckpt-staging" / "output").mkdir(parents=True)
    number = target.stat().st_ino + (0 if by_us else 1)
    (tmp_path / ".out.pt.fsdpckpt-staging" / "published").write_text(str(number))
    if by_us:
        clear_leftover(str(target))
        assert os.listdir(tmp_path) == ["out.pt"]
    else:
        with pytest.raises(TargetExistsError, match="another program wrote"):
            clear_leftover(str(target))
        assert (aside / "older").read_bytes() == b"replaced"
    assert target.read_bytes() == b"new"


def test_an_empty_target_beside_what_was_moved_aside_costs_nothing(tmp_path) -> None:
    """A job script makes its output directory first; what a killed run had moved aside was taken for replaced."""
    target, aside = tmp_path / "out", tmp_path / ".out.fsdpckpt-old"
    target.mkdir()
    aside.mkdir()
    (aside / "theirs").write_bytes(b"someone's")
    restore_backup(str(target))
    assert sorted(os.listdir(tmp_path)) == ["out"]
    assert (target / "theirs").read_bytes() == b"someone's"


@pytest.mark.parametrize("killed_before", ["first", "second", "removal"])
def test_a_replacement_in_two_renames_that_is_killed_is_settled_by_the_next_run(
    tmp_path, monkeypatch, killed_before: str
) -> None:
    monkeypatch.setattr("fsdpckpt.storage.staging.swap_names", lambda *_: False)
    target = tmp_path / "out"
    target.mkdir()
    (target / "old").write_bytes(b"old")
    staging = Staging(str(target), directory=True, replaces=contents_of(str(target)))
    _write(staging.locate("new"), b"new")
    process = os.fork()
    if process == 0:  # it dies where a kill would hit it: no handler runs
        renames, rename = {"first": 0, "second": 1, "removal": 2}[killed_before], os.rename

        def counted(one: str, other: str) -> None:
            nonlocal renames
            if renames == 0:
                os._exit(9)
            renames -= 1
            rename(one, other)

        os.rename = counted
        if killed_before == "removal":
            shutil.rmtree = lambda *_: os._exit(9)
        staging.commit()
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 9
    staging._lock.close()
    restore_backup(str(target))
    assert os.listdir(target) == (["new"] if killed_before == "removal" else ["old"])
    assert not (tmp_path / ".out.fsdpckpt-old").exists()
