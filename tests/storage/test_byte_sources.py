"""Every kind of source on this machine reads the same way. Web servers and S3: ``tests/e2e/remote``."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest

from fsdpckpt.errors import SourceUnrecognisedError
from fsdpckpt.ir.files import Inline, Stored, Zeros, pack_files, unpack_files
from fsdpckpt.storage import ByteSource
from fsdpckpt.storage.local import LocalFile, MemoryFile, ZeroFile
from fsdpckpt.storage.remote_store import RemoteStore
from fsdpckpt.storage.sources import Sources
from tests.storage.byte_source_contract import CONTENT, ByteSourceContract, NamedByteSourceContract


class TestLocalFile(NamedByteSourceContract):
    @pytest.fixture
    def source(self, tmp_path: Path) -> Iterator[ByteSource]:
        (tmp_path / "file").write_bytes(CONTENT)
        file = LocalFile(str(tmp_path / "file"))
        yield file
        file.close()

    def open_absent(self) -> ByteSource:
        return LocalFile("/nowhere/file")

    def test_a_pipe_is_refused_without_waiting_for_a_writer(self, tmp_path: Path) -> None:
        os.mkfifo(tmp_path / "pipe")
        with pytest.raises(SourceUnrecognisedError, match="a pipe or a device"):
            LocalFile(str(tmp_path / "pipe"))

    def test_a_directory_is_refused_for_what_it_is(self, tmp_path: Path) -> None:
        with pytest.raises(SourceUnrecognisedError, match="is a directory"):
            LocalFile(str(tmp_path))


class TestMemoryFile(ByteSourceContract):
    @pytest.fixture
    def source(self) -> ByteSource:
        return MemoryFile(CONTENT)


class TestZeroFile(ByteSourceContract):
    content = bytes(len(CONTENT))

    @pytest.fixture
    def source(self) -> ByteSource:
        return ZeroFile()

    def test_it_has_a_path_and_a_length(self, source: ByteSource) -> None:
        assert source.path
        assert source.nbytes > 1 << 60


class TestRemoteFileInAnFsspecStore(NamedByteSourceContract):
    """``memory://``: as any store that fsspec knows and this program has no code of its own for."""

    @pytest.fixture
    def source(self) -> Iterator[ByteSource]:
        filesystem = fsspec.filesystem("memory")
        filesystem.pipe_file("/contract/file", CONTENT)
        yield RemoteStore().open("memory://contract/file")
        filesystem.rm("/contract", recursive=True)

    def open_absent(self) -> ByteSource:
        return RemoteStore().open("memory://contract/absent")


def test_a_file_with_any_name_is_that_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names = ["zeros:", "bytes:616263", str(Zeros(3)), str(Inline(b"abc"))]
    for name in names:
        Path(name).write_bytes(name.encode())
    with Sources() as sources:
        assert [sources.open(name).read(0, len(name)).decode() for name in names] == names
        assert [sources.open_file(file).read(0, 3) for file in (Zeros(3), Inline(b"abc"))] == [b"\0\0\0", b"abc"]


def test_files_reach_other_ranks_as_what_they_are() -> None:
    files = [Stored("zeros:", 7), Zeros(9), Inline(b"abc"), Stored("s3://bucket/bytes:00", 0)]
    assert unpack_files(pack_files(files)) == files
