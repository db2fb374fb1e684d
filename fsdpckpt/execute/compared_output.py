"""One target file that exists, compared with what would be written: window by window, as ``Output`` writes it."""

from __future__ import annotations

import os
import threading

import numpy as np
import numpy.typing as npt

from fsdpckpt import flags
from fsdpckpt.errors import SourceMissingError, TargetExistsError
from fsdpckpt.execute.output import Output, read_bytes
from fsdpckpt.execute.stored_checksums import Bytes, DeferredChecksums
from fsdpckpt.storage import ByteSource, ByteTarget
from fsdpckpt.storage.local_target import WritableFile, target_errors
from fsdpckpt.storage.remote_store import RemoteStore


def target_differs(path: str) -> TargetExistsError:
    """The error for an existing file that should not exist, or should have other content."""
    return TargetExistsError(
        f"{path} already exists, and is not what this command writes",
        file=path,
        why=f"{flags.resume} accepts what the same command wrote: a different command wrote this, or the files of SRC "
        "have changed since",
        next_step=f"give another DST, or add {flags.overwrite} to replace it once the new one is complete",
    )


class ComparedOutput(Output):
    """A target file that exists: nothing is written, and a different byte raises TargetExistsError."""

    def _create(self) -> ByteTarget:
        if not os.path.isfile(self.path):
            raise target_differs(self.path)
        return _ExistingFile(self.path, self.plan.nbytes, DeferredChecksums(self.plan))

    def _patch(self, file: ByteTarget, begin: int, values: Bytes, is_patch: npt.NDArray[np.bool_]) -> None:
        if (values != read_bytes(file, begin, len(values)))[is_patch].any():
            raise target_differs(self.path)


class ComparedObject(ComparedOutput):
    """A target file in an object store that exists."""

    def _create(self) -> ByteTarget:
        try:
            source = RemoteStore().open(self.path)
        except SourceMissingError:
            raise target_differs(self.path) from None
        if source.nbytes != self.plan.nbytes:
            raise target_differs(self.path)
        return _ExistingObject(source, DeferredChecksums(self.plan))


class _ExistingFile(WritableFile):
    """A file that is compared with what would be written to it."""

    def __init__(self, path: str, nbytes: int, deferred: DeferredChecksums) -> None:
        self.path = path
        self.nbytes = nbytes
        self._deferred = deferred
        self._direct = -1
        self._closing = threading.Lock()
        with target_errors(path):
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            if os.fstat(self._fd).st_size != nbytes:
                self.close()
                raise target_differs(path)

    def write(self, offset: int, data: memoryview | bytes) -> None:
        _require_equal(self, self._deferred, offset, data)

    def sync(self) -> None:
        """Nothing was written."""

    def commit(self) -> None:
        self.close()


class _ExistingObject:
    """An object that is compared with what would be written to it."""

    def __init__(self, source: ByteSource, deferred: DeferredChecksums) -> None:
        self.path = source.path
        self.nbytes = source.nbytes
        self._source = source
        self._deferred = deferred

    def read_into(self, offset: int, buffer: memoryview) -> None:
        self._source.read_into(offset, buffer)

    def write(self, offset: int, data: memoryview | bytes) -> None:
        _require_equal(self, self._deferred, offset, data)

    def sync(self) -> None:
        """Nothing was written."""

    def commit(self) -> None:
        self.close()

    def close(self) -> None:
        self._source.close()


def _require_equal(file: ByteTarget, deferred: DeferredChecksums, offset: int, data: memoryview | bytes) -> None:
    existing = memoryview(bytearray(len(data)))
    file.read_into(offset, existing)
    deferred.clear(offset, existing)
    if not np.array_equal(np.frombuffer(existing, np.uint8), np.frombuffer(data, np.uint8)):
        raise target_differs(file.path)
