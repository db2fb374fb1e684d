"""What others put under the names that this program uses beside DST is not followed, waited for, written or removed."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fsdpckpt.errors import FsdpckptError, TargetUnwritableError
from fsdpckpt.execute.journal import Journal, read_records
from fsdpckpt.storage.hidden import lock_as_writer, lock_path, staging_root
from fsdpckpt.storage.staging import InterruptedRun, Staging, clear_leftover, restore_backup, was_interrupted
from fsdpckpt.storage.target_checks import contents_of

STAGING = ".out.fsdpckpt-staging"


def _linked(path: Path) -> None:
    path.symlink_to(path.parent / "nowhere")


def _hard_linked(path: Path) -> None:
    (path.parent / "second-name").write_bytes(b"someone's")
    os.link(path.parent / "second-name", path)


KINDS: dict[str, Callable[[Path], None]] = {
    "link": _linked,
    "pipe": os.mkfifo,
    "directory": Path.mkdir,
    "hard link": _hard_linked,
}


@pytest.fixture(autouse=True)
def nothing_hangs() -> Iterator[None]:
    """A pipe that is waited for would stop the suite."""
    import signal

    def hung(*_: object) -> None:
        raise TimeoutError("it waits")

    before = signal.signal(signal.SIGALRM, hung)
    signal.alarm(5)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def _everything(tmp_path: Path) -> list[str]:
    return sorted(str(path) for path in tmp_path.rglob("*"))


def _elsewhere(path: Path) -> None:
    """A link to a directory of someone."""
    (path.parent / "elsewhere" / "output").mkdir(parents=True)
    (path.parent / "elsewhere" / "journal").write_bytes(b"someone's")
    path.symlink_to(path.parent / "elsewhere")


Act = Callable[[str], object]
RUNS: tuple[Act, ...] = (
    lambda target: Staging(target, directory=True, resume=True),
    lambda target: Staging(target, directory=True),
    clear_leftover,
)
INTERRUPTED: Act = lambda target: InterruptedRun.of(target, resume=True)  # noqa: E731
FOLDERS = {"link": _elsewhere, "pipe": os.mkfifo}
HIDDEN: dict[str, tuple[dict[str, Callable[[Path], None]], tuple[Act, ...]]] = {
    ".out.fsdpckpt-lock": (KINDS, (*RUNS, was_interrupted)),
    f"{STAGING}/journal": (KINDS, (*RUNS, INTERRUPTED)),
    f"{STAGING}/journal-1": (KINDS, (*RUNS, INTERRUPTED)),
    STAGING: (FOLDERS, RUNS),
    f"{STAGING}/output": (FOLDERS, RUNS),
    ".out.fsdpckpt-old": ({kind: KINDS[kind] for kind in ("link", "pipe")}, (restore_backup,)),
    "writer-3": (KINDS, (lambda target: lock_as_writer(os.path.dirname(target), 3),)),
    "journal": (
        KINDS,
        (
            lambda target: read_records(os.path.join(os.path.dirname(target), "journal")),
            lambda target: Journal(os.path.join(os.path.dirname(target), "journal")).append([{}]),
        ),
    ),
}


@pytest.mark.parametrize(("name", "kind"), [(name, kind) for name, (kinds, _) in HIDDEN.items() for kind in kinds])
def test_what_is_not_what_this_program_keeps_there_is_named_and_left(tmp_path: Path, name: str, kind: str) -> None:
    kinds, acts = HIDDEN[name]
    if name.startswith(STAGING) or "lock" in name:
        (tmp_path / STAGING / "output").mkdir(parents=True)
    if kinds is FOLDERS:
        shutil.rmtree(tmp_path / name)
    kinds[kind](tmp_path / name)
    before = _everything(tmp_path)
    for act in acts:
        with pytest.raises(TargetUnwritableError, match="not what fsdpckpt keeps there") as error:
            act(str(tmp_path / "out"))
        assert f"rm {'-r ' if kind == 'directory' else ''}{tmp_path / name}" in (error.value.next_step or "")
        assert error.value.exit_code == 5
        assert _everything(tmp_path) == before
    if kind == "hard link":
        assert (tmp_path / name).with_name("second-name").read_bytes() == b"someone's"


@pytest.mark.parametrize("kind", KINDS)
def test_whatever_has_the_name_of_a_staged_file_gives_way(tmp_path: Path, kind: str) -> None:
    (tmp_path / STAGING / "output").mkdir(parents=True)
    (tmp_path / STAGING / "journal").touch()
    staging = Staging(str(tmp_path / "out"), directory=True, resume=True)
    Path(staging.locate("kept")).touch()
    KINDS[kind](Path(staging.locate("data")))
    staging.keep_only(["kept", "data"])
    assert os.listdir(staging.path) == ["kept"]
    staging.close()


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK])
def test_a_file_system_without_locks_is_written_to_with_a_warning(tmp_path: Path, monkeypatch, number: int) -> None:
    def refuses(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", refuses)
    staging = Staging(str(tmp_path / "out"), directory=True)
    lock_as_writer(staging.root, 1).close()
    staging.commit()
    staging.close()
    assert [note.kind for note in staging.warnings] == ["unlocked"]
    assert "has no locks" in staging.warnings[0].message
    assert os.listdir(tmp_path) == ["out"]
    (tmp_path / ".out.fsdpckpt-lock").touch()
    assert was_interrupted(str(tmp_path / "out"))


def test_a_lock_that_cannot_be_taken_for_another_reason_is_an_error(tmp_path: Path, monkeypatch) -> None:
    def refuses(*_: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(fcntl, "flock", refuses)
    with pytest.raises(OSError, match="Input/output"):
        lock_path(str(tmp_path / "lock"), os.O_RDWR | os.O_CREAT)


def test_a_lock_that_may_not_be_opened_is_named(tmp_path: Path, monkeypatch) -> None:
    """Another user's run was killed: the directory can be written to, its lock cannot."""
    opened = os.open

    def refuses(path: str, *more: int, **options: int) -> int:
        if str(path).endswith("fsdpckpt-lock"):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return opened(path, *more, **options)

    monkeypatch.setattr(os, "open", refuses)
    with pytest.raises(TargetUnwritableError, match=r"\.out\.fsdpckpt-lock: Permission denied"):
        Staging(str(tmp_path / "out"), directory=True)
    assert os.listdir(tmp_path) == []


def _fsync(path: Path, number: int) -> Callable[[int], None]:
    """``os.fsync`` that fails for the directory ``path``."""
    fsync, inode = os.fsync, path.stat().st_ino

    def failing(descriptor: int) -> None:
        if os.fstat(descriptor).st_ino == inode:
            raise OSError(number, os.strerror(number))
        fsync(descriptor)

    return failing


@pytest.mark.parametrize("number", [errno.EINVAL, errno.EOPNOTSUPP, errno.EIO])
@pytest.mark.parametrize("replaces", [True, False])
def test_a_directory_that_cannot_be_synced_after_publishing_is_a_warning(
    tmp_path: Path, monkeypatch, number: int, replaces: bool
) -> None:
    target = tmp_path / "out"
    if replaces:
        target.mkdir()
        (target / "old").touch()
    staging = Staging(str(target), directory=True, replaces=contents_of(str(target)) if replaces else None)
    Path(staging.locate("new")).touch()
    monkeypatch.setattr(os, "fsync", _fsync(tmp_path, number))
    staging.commit()
    staging.close()
    assert staging.committed and os.listdir(target) == ["new"]
    assert [note.kind for note in staging.warnings] == ["not-synced"]
    kept = replaces and number == errno.EIO  # after a crash the older target may be all that is left
    assert sorted(os.listdir(tmp_path)) == ([STAGING, "out"] if kept else ["out"])
    assert (f"kept in {staging.path}" in staging.warnings[0].message) == kept


@pytest.mark.parametrize("number", [errno.EINVAL, errno.EIO])
def test_a_directory_of_the_output_that_cannot_be_synced_is_an_error_unless_the_file_system_never_does(
    tmp_path: Path, monkeypatch, number: int
) -> None:
    staging = Staging(str(tmp_path / "out"), directory=True)
    monkeypatch.setattr(os, "fsync", _fsync(Path(staging.path), number))
    if number == errno.EINVAL:
        staging.commit()
        assert [note.kind for note in staging.warnings] == ["not-synced"]
    else:
        with pytest.raises(TargetUnwritableError):
            staging.commit()
        assert not staging.committed and not (tmp_path / "out").exists()
    staging.close()


def test_what_cannot_be_removed_after_publishing_is_a_warning(tmp_path: Path, monkeypatch) -> None:
    staging = Staging(str(tmp_path / "out"), directory=True)

    def refuses(*_: object) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    with monkeypatch.context() as patched:
        patched.setattr(shutil, "rmtree", refuses)
        patched.setattr(os, "unlink", refuses)
        staging.commit()
        staging.close()
    assert (tmp_path / "out").is_dir()
    assert [note.kind for note in staging.warnings] == ["left-behind", "left-behind"]
    assert f"remove {staging_root(str(tmp_path / 'out'))}" in staging.warnings[0].message
    assert all(isinstance(note.message, str) and not isinstance(note, FsdpckptError) for note in staging.warnings)
