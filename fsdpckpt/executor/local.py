"""Runs a plan in this process: a few threads, each assembling windows and writing them in order of the files."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise

from fsdpckpt.executor.budget import Budget
from fsdpckpt.executor.checks import SourceCheck, TargetChecks
from fsdpckpt.executor.crc import Part, combine, patch_effect, window_crc
from fsdpckpt.executor.window import Assembler
from fsdpckpt.ir.checkpoint import Checksums, SourceFile
from fsdpckpt.planner.plan import FilePlan, Plan
from fsdpckpt.planner.windows import window_bounds
from fsdpckpt.progress import Progress
from fsdpckpt.storage.sources import Sources
from fsdpckpt.storage.targets import WritableFile

__all__ = ["execute"]


@dataclass(frozen=True, slots=True)
class _Window:
    file: int
    begin: int
    end: int


class _Output:
    """One target file while its windows arrive, in any order: created by the first, committed by the last."""

    def __init__(self, file: FilePlan, path: str, windows: int) -> None:
        self.plan = file
        self.checks = TargetChecks(file)
        self._path = path
        self._left = windows
        self._lock = threading.Lock()
        self._file: WritableFile | None = None
        self._parts: list[Part] = []
        self._patched = 0

    @property
    def crc(self) -> int:
        """The CRC-32 of the whole file, once it is finished."""
        return combine(self._parts) ^ self._patched

    def open(self) -> WritableFile:
        with self._lock:
            if self._file is None:
                os.makedirs(os.path.dirname(self._path), exist_ok=True)
                self._file = WritableFile(self._path, self.plan.nbytes)
            return self._file

    def finished(self, part: Part) -> None:
        """One window is written; the last one patches the checksums and makes the file durable."""
        with self._lock:
            self._parts.append(part)
            self._left -= 1
            if self._left > 0 or self._file is None:
                return
        for place, value in self.checks.patches():
            self._file.write(place, value)
            self._patched ^= patch_effect(value, self.plan.nbytes - place - len(value))
        self._file.commit()

    def abandon(self) -> None:
        if self._file is not None:
            self._file.close()


def execute(
    plan: Plan,
    *,
    files: Sequence[SourceFile],
    checksums: Checksums,
    sources: Sources,
    locate: Callable[[str], str],
    budget: Budget,
    progress: Progress,
) -> dict[str, int]:
    """Write every file of ``plan`` where ``locate`` says, and make it durable; returns the CRC-32 of each by its path.

    Holds at most ``budget.nbytes`` of buffers. Raises SourceCorruptError when a record does not match its checksum or a
    file ended early, TargetUnwritableError when the file system refuses; the first error stops all threads.
    """
    check = SourceCheck(files, checksums)
    bounds = [window_bounds(file, plan, budget.window).tolist() for file in plan.files]
    outputs = [
        _Output(file, locate(file.path), max(len(bound) - 1, 1)) for file, bound in zip(plan.files, bounds, strict=True)
    ]
    work = _Work(_windows(bounds))
    progress.begin("copy", plan.bytes_written)
    with ThreadPoolExecutor(budget.threads, thread_name_prefix="fsdpckpt-copy") as pool:
        assemblers = (Assembler(plan, files, sources, check, budget.window) for _ in range(budget.threads))
        try:
            futures = [pool.submit(_copy, work, outputs, assembler, progress) for assembler in assemblers]
            for future in futures:
                future.result()
        finally:  # also after a signal: the pool waits for its threads, and they would copy to the end
            work.stop()
    for output in outputs:
        output.abandon()
    check.finish()
    progress.end()
    return {output.plan.path: output.crc for output in outputs}


def _windows(bounds: Sequence[Sequence[int]]) -> Iterator[_Window]:
    for file, bound in enumerate(bounds):
        pairs = list(pairwise(bound)) or [(0, 0)]
        for begin, end in pairs:
            yield _Window(file, begin, end)


class _Work:
    """Hands out windows in order; empty once stopped."""

    def __init__(self, windows: Iterator[_Window]) -> None:
        self._windows = windows
        self._lock = threading.Lock()
        self._stopped = False

    def next(self) -> _Window | None:
        with self._lock:
            return None if self._stopped else next(self._windows, None)

    def stop(self) -> None:
        self._stopped = True


def _copy(work: _Work, outputs: Sequence[_Output], assembler: Assembler, progress: Progress) -> None:
    """One thread: take a window, assemble, sum, write, until there are none or another thread failed."""
    try:
        while (window := work.next()) is not None:
            output = outputs[window.file]
            target = output.open()
            view, known = assembler.assemble(output.plan, window.begin, window.end)
            output.checks.window(window.begin, view, known)
            part = (window.begin, len(view), window_crc(window.begin, view, known))
            target.write(window.begin, view)
            output.finished(part)
            progress.advance(window.end - window.begin)
    except BaseException:
        work.stop()
        raise
