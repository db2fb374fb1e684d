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
from fsdpckpt.storage.local_target import WritableFile, aligned_buffer
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

    visible_before_commit = True

    def test_what_was_written_is_read_back_and_stored_once_it_is_committed(self) -> None:
        for name, content in (("file", CONTENT), ("empty", b"")):
            target = self.make(name, len(content))
            assert target.nbytes == len(content) and target.path
            target.write(0, content)
            assert self.visible_before_commit or self.stored(name) is None
            target.sync()
            buffer = bytearray(len(content) // 2)
            target.read_into(len(content) // 3, memoryview(buffer))
            assert bytes(buffer) == content[len(content) // 3 :][: len(buffer)]
            target.commit()
            assert self.stored(name) == content
            target.sync()
            for _ in range(2):
                target.close()
            assert self.stored(name) == content

    def test_bytes_that_were_not_written_are_zero_and_a_file_of_another_length_is_not_committed(self) -> None:
        target = self.make("file", 100_000)
        target.write(40_000, b"data")
        target.commit()
        assert self.stored("file") == bytes(40_000) + b"data" + bytes(59_996)
        target = self.make("longer", 100)
        target.write(90, b"0123456789more")
        with pytest.raises(TargetUnwritableError, match="104 bytes") as caught:
            target.commit()
        assert caught.value.exit_code == 5
        target.close()
        assert self.visible_before_commit or self.stored("longer") is None

    def test_an_abandoned_target_is_never_said_to_be_on_the_disk(self) -> None:
        target = self.make("file", 100)
        target.write(0, bytes(100))
        for _ in range(2):
            target.close()
        with pytest.raises(TargetUnwritableError, match="not known to be on the disk"):
            target.sync()
        assert self.visible_before_commit or (self.stored("file"), os.listdir(self.root)) == (None, [])

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


class PublishedTargetContract(ByteTargetContract):
    """Of targets whose ``commit`` also makes the file visible: before it, there is nothing under the name."""

    visible_before_commit = False


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
