"""Whether files that exist already are, byte for byte, what a plan would write. Nothing is written."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence

import numpy as np

from fsdpckpt.errors import TargetExistsError
from fsdpckpt.execute.budget import Budget
from fsdpckpt.execute.local import Output, execute
from fsdpckpt.execute.resume import LatePlaces
from fsdpckpt.ir.checkpoint import Checksums, SourceFile
from fsdpckpt.plan.plan import Plan
from fsdpckpt.progress import Progress
from fsdpckpt.storage.local import WritableFile, target_errors
from fsdpckpt.storage.sources import Sources

__all__ = ["Compared", "is_written", "not_this"]


def not_this(path: str) -> TargetExistsError:
    """The error for a file that is there and should not be, or be another one."""
    return TargetExistsError(
        f"{path} exists, and is not what this command writes",
        file=path,
        why="--resume goes on with an interrupted run, and leaves what another one made alone",
        next_step="give another DST, or add --overwrite to replace it once the new one is complete",
    )


class _ExistingFile(WritableFile):
    """A file that is compared with what would be written to it."""

    def __init__(self, path: str, nbytes: int, late: LatePlaces) -> None:
        self.path = path
        self.nbytes = nbytes
        self._late = late
        self._direct = -1
        self._closing = threading.Lock()
        with target_errors(path):
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            if os.fstat(self._fd).st_size != nbytes:
                self.close()
                raise not_this(path)

    def write(self, offset: int, data: memoryview | bytes) -> None:
        found = memoryview(bytearray(len(data)))
        self.read_into(offset, found)
        self._late.clear(offset, found)
        self.expect(found, data)

    def expect(self, found: memoryview, data: memoryview | bytes) -> None:
        if not np.array_equal(np.frombuffer(found, np.uint8), np.frombuffer(data, np.uint8)):
            raise not_this(self.path)

    def commit(self) -> None:
        self.close()


class Compared(Output):
    """A target file that exists: nothing is written, and a byte that is another one is a TargetExistsError.

    To be mixed into an ``Output``, in front of it.
    """

    def create(self) -> WritableFile:
        if not os.path.isfile(self.path):
            raise not_this(self.path)
        return _ExistingFile(self.path, self.plan.nbytes, LatePlaces(self.plan))

    def patch(self, file: WritableFile, place: int, value: bytes) -> None:
        found = memoryview(bytearray(len(value)))
        file.read_into(place, found)
        if found != value:
            raise not_this(self.path)


def is_written(
    plan: Plan,
    *,
    files: Sequence[SourceFile],
    checksums: Checksums,
    sources: Sources,
    locate: Callable[[str], str],
    budget: Budget,
    progress: Progress,
) -> bool:
    """Whether every file of ``plan`` stands where ``locate`` says, with the bytes that ``execute`` would write.

    Holds half as much again as ``budget.nbytes``. Raises what reading the source raises.
    """
    try:
        execute(
            plan,
            files=files,
            checksums=checksums,
            sources=sources,
            locate=locate,
            budget=budget,
            progress=progress,
            output=Compared,
        )
    except TargetExistsError:
        return False
    return True
