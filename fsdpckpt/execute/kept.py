"""Reads back what the journals name: a window that is as it was written is kept, any other one is copied again."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from fsdpckpt.execute.checks import TargetChecks
from fsdpckpt.execute.crc import Part, crc32
from fsdpckpt.execute.resume import LatePlaces
from fsdpckpt.plan.plan import Claim, FilePlan
from fsdpckpt.plan.windows import Range
from fsdpckpt.storage.local import BLOCK, WritableFile, aligned_buffer

__all__ = ["Kept", "ReadBack", "buffer_for", "longest_claim", "read_back", "threads_for_claims"]


@dataclass(frozen=True, slots=True)
class Kept:
    """Of one target file what is kept: ``parts`` of it, in order, and what ``TargetChecks.unfinished`` says of them."""

    parts: tuple[Part, ...] = ()
    rows: tuple[tuple[int, int, int, int], ...] = ()
    late: tuple[tuple[int, bytes], ...] = ()

    @property
    def ranges(self) -> list[Range]:
        return [(begin, begin + nbytes) for begin, nbytes, _ in self.parts]


class ReadBack:
    """The ``claims`` of one target file that an earlier run has left at ``path``. Any thread may call ``take``."""

    def __init__(self, file: FilePlan, path: str, claims: Sequence[Claim]) -> None:
        self._checks = TargetChecks(file)
        self._late = LatePlaces(file)
        self._parts: list[Part] = []
        there = os.path.isfile(path) and os.path.getsize(path) == file.nbytes
        self.claims = tuple(claims) if there else ()
        self._file = WritableFile(path, file.nbytes, existing=True) if self.claims else None

    def take(self, claim: Claim, buffer: memoryview) -> None:
        """Keep the window of ``claim`` if it is on the disk. ``buffer`` is as long as it at least."""
        if self._file is None:
            return
        begin, end, crc = claim
        view = buffer[: end - begin]
        self._file.read_into(begin, view)
        self._late.clear(begin, view)
        if crc32(view) == crc:
            self._checks.window(begin, view, {})
            self._parts.append((begin, end - begin, crc))

    def close(self) -> Kept:
        """What ``take`` has kept."""
        if self._file is not None:
            self._file.close()
        rows, late = self._checks.unfinished()
        return Kept(tuple(sorted(self._parts)), tuple(rows), tuple(late))


def buffer_for(longest: int) -> memoryview:
    """What one thread reads windows of at most ``longest`` bytes into."""
    return aligned_buffer(longest + BLOCK)


def longest_claim(backs: Iterable[ReadBack]) -> int:
    """Bytes of the longest window to be read back."""
    return max((end - begin for back in backs for begin, end, _ in back.claims), default=0)


def threads_for_claims(threads: int, nbytes: int, longest: int) -> int:
    """How many of ``threads`` have memory for a window of ``longest`` bytes when all together have ``nbytes``."""
    return max(min(threads, nbytes // max(longest, 1)), 1)


def read_back(backs: Sequence[ReadBack], threads: int, nbytes: int) -> None:
    """All claims of all ``backs``, on at most ``threads`` threads with ``nbytes`` of buffers together."""
    todo = deque((back, claim) for back in backs for claim in back.claims)
    longest = longest_claim(backs)
    most = threads_for_claims(threads, nbytes, longest)

    def work() -> None:
        buffer = buffer_for(longest)
        while True:
            try:
                back, claim = todo.popleft()
            except IndexError:
                return
            back.take(claim, buffer)

    with ThreadPoolExecutor(most, thread_name_prefix="fsdpckpt-keep") as pool:
        try:
            for future in [pool.submit(work) for _ in range(most)]:
                future.result()
        finally:
            todo.clear()
