"""What every ``ByteTarget`` promises, as tests that each implementation's test class inherits.

A subclass says how a target is made (``make``) and what can be read under its name afterwards (``stored``).
"""

from __future__ import annotations

import os
import random
from abc import ABC, abstractmethod
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

import pytest

from fsdpckpt.errors import TargetUnwritableError
from fsdpckpt.storage import ByteTarget
from fsdpckpt.storage.local import WritableFile, aligned_buffer
from fsdpckpt.storage.remote_dst import open_target
from fsdpckpt.storage.staging import Staging
from fsdpckpt.storage.target_checks import TargetState
from fsdpckpt.storage.upload import PART, UploadOptions

CONTENT = random.Random(4).randbytes((3 << 20) + 777)  # long enough for direct writes, no whole number of blocks


class ByteTargetContract(ABC):
    root: Path

    @pytest.fixture(autouse=True)
    def _set_root(self, tmp_path: Path) -> None:
        self.root = tmp_path

    @abstractmethod
    def make(self, name: str, nbytes: int) -> ByteTarget:
        """A new target of so many bytes, nothing of it written."""

    @abstractmethod
    def stored(self, name: str) -> bytes | None:
        """What can be read under ``name`` now; None when there is nothing."""

    def test_what_was_written_is_stored_once_it_is_committed(self) -> None:
        target = self.make("file", len(CONTENT))
        assert target.nbytes == len(CONTENT)
        assert target.path
        target.write(0, CONTENT)
        target.commit()
        assert self.stored("file") == CONTENT

    def test_order_and_alignment_of_the_writes_do_not_matter(self) -> None:
        target = self.make("file", len(CONTENT))
        chance = random.Random(2)
        ranges = list(pairwise(sorted({0, len(CONTENT), *(chance.randrange(len(CONTENT)) for _ in range(40))})))
        chance.shuffle(ranges)
        aligned = _aligned()
        for number, (begin, end) in enumerate(ranges):
            target.write(begin, aligned[begin:end] if number % 2 else CONTENT[begin:end])
        target.commit()
        assert self.stored("file") == CONTENT

    def test_many_threads_write_at_once(self) -> None:
        target = self.make("file", len(CONTENT))
        aligned = _aligned()
        with ThreadPoolExecutor(6) as pool:
            begins = range(0, len(CONTENT), 70_001)
            list(pool.map(lambda at: target.write(at, aligned[at : min(at + 70_001, len(CONTENT))]), begins))
        target.commit()
        assert self.stored("file") == CONTENT

    def test_bytes_that_were_not_written_are_zero(self) -> None:
        target = self.make("file", 100_000)
        target.write(40_000, b"data")
        target.commit()
        assert self.stored("file") == bytes(40_000) + b"data" + bytes(59_996)

    def test_an_empty_file_is_stored(self) -> None:
        target = self.make("file", 0)
        target.write(0, b"")
        target.commit()
        assert self.stored("file") == b""

    def test_a_file_of_another_length_is_not_committed(self) -> None:
        target = self.make("file", 100)
        target.write(90, b"0123456789more")
        with pytest.raises(TargetUnwritableError) as caught:
            target.commit()
        assert caught.value.exit_code == 5
        assert "104 bytes" in str(caught.value)
        target.close()

    def test_what_was_written_can_be_read_back_before_the_commit(self) -> None:
        target = self.make("file", len(CONTENT))
        target.write(0, CONTENT)
        target.sync()
        buffer = bytearray(100_000)
        target.read_into(70_000, memoryview(buffer))
        assert bytes(buffer) == CONTENT[70_000:170_000]
        target.close()

    def test_an_abandoned_target_is_never_said_to_be_on_the_disk(self) -> None:
        target = self.make("file", 100)
        target.write(0, bytes(100))
        target.close()
        with pytest.raises(TargetUnwritableError, match="not known to be on the disk"):
            target.sync()

    def test_a_committed_target_is_on_the_disk(self) -> None:
        target = self.make("file", 100)
        target.commit()
        target.sync()

    def test_closing_twice_is_closing_once(self) -> None:
        abandoned = self.make("abandoned", 100)
        abandoned.close()
        abandoned.close()
        committed = self.make("committed", 0)
        committed.commit()
        committed.close()


class PublishedTargetContract(ByteTargetContract):
    """Of targets whose ``commit`` also makes the file visible: before it, there is nothing under the name."""

    def test_nothing_is_visible_before_the_commit(self) -> None:
        target = self.make("file", len(CONTENT))
        target.write(0, CONTENT)
        assert self.stored("file") is None
        target.commit()
        assert self.stored("file") == CONTENT

    def test_an_abandoned_target_leaves_nothing(self) -> None:
        target = self.make("file", len(CONTENT))
        target.write(0, CONTENT)
        target.close()
        assert self.stored("file") is None
        assert os.listdir(self.root) == []

    def test_a_commit_that_failed_leaves_nothing_visible(self) -> None:
        target = self.make("file", 10)
        target.write(5, b"too long for it")
        with pytest.raises(TargetUnwritableError):
            target.commit()
        target.close()
        assert self.stored("file") is None


def _aligned() -> memoryview:
    """``CONTENT`` in memory that direct writes can take it from, as the executor's buffers are."""
    buffer = aligned_buffer(len(CONTENT))
    buffer[: len(CONTENT)] = CONTENT
    return buffer


class StagedFile:
    """A local DST of one file, put together as a conversion does it: written in staging, then renamed."""

    def __init__(self, path: str, nbytes: int) -> None:
        self.path = path
        self.nbytes = nbytes
        self._staging: Staging | None = Staging(path, directory=False)
        self._file = WritableFile(self._staging.locate(""), nbytes)

    def write(self, offset: int, data: memoryview | bytes) -> None:
        self._file.write(offset, data)

    def read_into(self, offset: int, buffer: memoryview) -> None:
        self._file.read_into(offset, buffer)

    def sync(self) -> None:
        self._file.sync()

    def commit(self) -> None:
        self._file.commit()
        self._staging.commit()
        self.close()

    def close(self) -> None:
        self._file.close()
        if self._staging is not None:
            self._staging.discard()
            self._staging.close()
            self._staging = None


class UploadedFile(StagedFile):
    """A DST in an object store, put together as a conversion does it: written to a local disk, then uploaded."""

    def __init__(self, url: str, folder: Path, nbytes: int) -> None:
        super().__init__(str(folder / "staged"), nbytes)
        self.path = url

    def commit(self) -> None:
        self._file.commit()
        remote = open_target(self.path, "/no/source", state=TargetState.ABSENT)
        options = UploadOptions(PART, lambda _: None, lambda *_: False, lambda *_: None, None, lambda: None)
        remote.send({"": self._file.path}, options)
        self.close()
