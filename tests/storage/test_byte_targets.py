"""Every kind of target on this machine is written the same way. S3: ``tests/e2e/remote``."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fsspec
import pytest
from fsspec import AbstractFileSystem
from fsspec.implementations.memory import MemoryFile, MemoryFileSystem

from fsdpckpt.errors import TargetExistsError, TargetUnwritableError
from fsdpckpt.storage import ByteTarget, local_target
from fsdpckpt.storage.local_target import WritableFile
from fsdpckpt.storage.remote_dst import open_target
from fsdpckpt.storage.retry import ATTEMPTS
from fsdpckpt.storage.target_checks import TargetState
from fsdpckpt.storage.upload import PART, UploadOptions
from tests.storage.byte_target_contract import (
    ByteTargetContract,
    PublishedTargetContract,
    StagedFile,
    UploadedFile,
)


class TestWritableFile(ByteTargetContract):
    def make(self, name: str, nbytes: int) -> WritableFile:
        return WritableFile(str(self.root / name), nbytes)

    def stored(self, name: str) -> bytes | None:
        path = self.root / name
        return path.read_bytes() if path.exists() else None

    def test_a_name_that_exists_is_refused_and_left_alone(self) -> None:
        (self.root / "file").write_bytes(b"somebody's")
        with pytest.raises(TargetUnwritableError, match="cannot write"):
            self.make("file", 5)
        assert self.stored("file") == b"somebody's"

    def test_a_directory_that_does_not_exist_is_an_error_of_the_target(self) -> None:
        with pytest.raises(TargetUnwritableError) as caught:
            self.make("absent/file", 5)
        assert caught.value.file == str(self.root / "absent" / "file")

    @pytest.mark.parametrize("call", ["ftruncate", "posix_fallocate"])
    def test_a_full_disk_costs_no_descriptor(self, call: str, monkeypatch: pytest.MonkeyPatch) -> None:
        def full(*_: object) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        if call == "posix_fallocate" and not hasattr(os, "O_DIRECT"):
            pytest.skip("only files with direct writes are allocated")
        monkeypatch.setattr(os, call, full)
        monkeypatch.setattr(local_target, "is_in_memory", lambda _: False)
        before = os.listdir("/proc/self/fd")
        with pytest.raises(TargetUnwritableError, match="No space left"):
            self.make("file", 2 << 20)
        assert os.listdir("/proc/self/fd") == before


class TestWritableFileWithoutDirectWrites(TestWritableFile):
    @pytest.fixture(autouse=True)
    def _refuse_direct_writes(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delattr(os, "O_DIRECT")


class TestWritableFileInMemory(TestWritableFile):
    @pytest.fixture(autouse=True)
    def _in_memory(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(local_target, "is_in_memory", lambda _: True)
        monkeypatch.delattr(os, "posix_fallocate")  # writes zeros to all of it

    def test_a_full_disk_costs_no_descriptor(self, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[override]
        full = SimpleNamespace(f_blocks=0, f_bavail=0, f_frsize=4096)
        monkeypatch.setattr(os, "fstatvfs", lambda _: full)
        self.make("file", 2 << 20).close()  # no blocks: there is no limit
        full.f_blocks, full.f_bavail = 1000, 511
        before = os.listdir("/proc/self/fd")
        with pytest.raises(TargetUnwritableError, match="No space left"):
            self.make("other", 2 << 20)
        assert os.listdir("/proc/self/fd") == before
        full.f_bavail = 512
        self.make("third", 2 << 20).close()


class TestFileThatAnotherProcessMade(ByteTargetContract):
    def make(self, name: str, nbytes: int) -> WritableFile:
        first = WritableFile(str(self.root / name), nbytes)
        first.close()
        return WritableFile(first.path, nbytes, existing=True)

    def stored(self, name: str) -> bytes | None:
        return (self.root / name).read_bytes()


class TestStagedFile(PublishedTargetContract):
    def make(self, name: str, nbytes: int) -> ByteTarget:
        return StagedFile(str(self.root / name), nbytes)

    def stored(self, name: str) -> bytes | None:
        path = self.root / name
        return path.read_bytes() if path.exists() else None


class TestUploadToAnFsspecStore(PublishedTargetContract):
    @pytest.fixture(autouse=True)
    def _empty_store(self) -> Iterator[None]:
        yield
        filesystem = fsspec.filesystem("memory")
        if filesystem.exists("/targets"):
            filesystem.rm("/targets", recursive=True)

    def make(self, name: str, nbytes: int) -> ByteTarget:
        return UploadedFile(f"memory://targets/{name}", self.root, nbytes)

    def stored(self, name: str) -> bytes | None:
        filesystem = fsspec.filesystem("memory")
        path = f"/targets/{name}"
        return filesystem.cat_file(path) if filesystem.exists(path) else None


@pytest.mark.parametrize("failures", [1, ATTEMPTS])
def test_a_store_without_parts_keeps_nothing_of_an_upload_that_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failures: int
) -> None:
    """Its file is a plain one, which is visible from the first byte on; that of ``memory://`` is a BytesIO."""
    monkeypatch.setattr(MemoryFileSystem, "store", {})
    monkeypatch.setattr("fsdpckpt.storage.retry.FIRST_PAUSE", 0.0)
    (tmp_path / "file").write_bytes(b"x" * PART + b"y")
    left = [failures]

    class Failing(MemoryFile):
        def write(self, data: Any) -> int:
            if data == b"y" and left[0]:
                left[0] -= 1
                raise OSError("connection lost")
            return super().write(data)

    monkeypatch.setattr("fsspec.implementations.memory.MemoryFile", Failing)
    remote = open_target("memory://runs/file", "", state=TargetState.ABSENT)
    options = UploadOptions(PART, lambda _: None, lambda *_: False, lambda *_: None, None, lambda: None)
    if failures < ATTEMPTS:
        remote.send({"": str(tmp_path / "file")}, options)
        assert remote.filesystem.cat_file("/runs/file") == (tmp_path / "file").read_bytes()
        return
    with pytest.raises(TargetUnwritableError, match="uploading it failed") as error:
        remote.send({"": str(tmp_path / "file")}, options)
    assert "connection lost" in str(error.value.found) and not remote.filesystem.exists("/runs/file")


def test_a_listing_that_failed_is_repeated_and_not_taken_for_an_empty_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """``find`` is fsspec's, as for all file systems that do not bring their own."""
    listing, failed = MemoryFileSystem.ls, set()

    def flaky(self: MemoryFileSystem, path: str, **keywords: Any) -> Any:
        if path not in failed:
            failed.add(path)
            raise OSError("connection lost")
        return listing(self, path, **keywords)

    monkeypatch.setattr("fsdpckpt.storage.retry.FIRST_PAUSE", 0.0)
    monkeypatch.setattr(MemoryFileSystem, "store", {})
    monkeypatch.setattr(MemoryFileSystem, "find", AbstractFileSystem.find)
    filesystem = fsspec.filesystem("memory")
    for name in ("/bucket/run/a", "/bucket/run/below/b"):
        filesystem.pipe_file(name, b"1")
    monkeypatch.setattr(MemoryFileSystem, "ls", flaky)
    with pytest.raises(TargetExistsError):
        open_target("memory://bucket/run/", "", state=TargetState.ABSENT)
    for url, names in (("run", {"a", "below/b"}), ("run/a", {""}), ("none", set())):
        failed.clear()
        assert set(open_target(f"memory://bucket/{url}", "", state=TargetState.REPLACEABLE).names) == names
