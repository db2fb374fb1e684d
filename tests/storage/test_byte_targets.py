"""Every kind of target on this machine is written the same way. S3: ``tests/e2e/remote``."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator

import fsspec
import pytest

from fsdpckpt.errors import TargetUnwritableError
from fsdpckpt.storage import ByteTarget
from fsdpckpt.storage.local import WritableFile
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
        before = os.listdir("/proc/self/fd")
        with pytest.raises(TargetUnwritableError, match="No space left"):
            self.make("file", 2 << 20)
        assert os.listdir("/proc/self/fd") == before


class TestWritableFileWithoutDirectWrites(TestWritableFile):
    @pytest.fixture(autouse=True)
    def _refuse_direct_writes(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delattr(os, "O_DIRECT")


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
