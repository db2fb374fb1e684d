"""Runs a plan in this process: a few threads, each assembling windows and writing them in order of the files."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from fsdpckpt.execute.budget import Budget
from fsdpckpt.execute.checks import SourceCheck, TargetChecks
from fsdpckpt.execute.crc import Part, combine, patch_effect, window_crc
from fsdpckpt.execute.kept import Kept, ReadBack, read_back
from fsdpckpt.execute.recorder import Recorder
from fsdpckpt.execute.reread import read_again, unjudged
from fsdpckpt.execute.resume import Finished
from fsdpckpt.execute.window import Assembler
from fsdpckpt.ir.checkpoint import Checksums, SourceFile
from fsdpckpt.plan.plan import FilePlan, Plan
from fsdpckpt.plan.windows import Range, open_windows
from fsdpckpt.progress import Progress
from fsdpckpt.storage.local import WritableFile
from fsdpckpt.storage.sources import Sources

__all__ = ["Output", "Window", "copy_window", "execute"]


@dataclass(frozen=True, slots=True)
class Window:
    """The bytes [begin, end) of target file number ``file``."""

    file: int
    begin: int
    end: int


class Output:
    """One target file while its windows arrive, in any order: created by the first, committed by the last."""

    def __init__(self, file: FilePlan, path: str, windows: int, *, kept: Kept | None = None) -> None:
        """``windows``: how many will arrive. ``kept``: what an interrupted run left of the file; None of a new one."""
        self.plan = file
        self.checks = TargetChecks(file)
        self.path = path
        self.parts: list[Part] = []
        self._resumed = kept is not None
        self._left = windows
        self._lock = threading.Lock()
        self._file: WritableFile | None = None
        self._patched = 0
        if kept is not None:
            self.parts += kept.parts
            self.checks.absorb(kept.rows, kept.late)

    @property
    def crc(self) -> int:
        """The CRC-32 of the whole file, once it is finished."""
        return combine(self.parts) ^ self._patched

    def open(self) -> WritableFile:
        with self._lock:
            if self._file is None:
                self._file = self.create()
            return self._file

    def create(self) -> WritableFile:
        """The file itself: new, or the one an interrupted run left with its full length."""
        os.makedirs(os.path.dirname(self.path), exist_ok=True)
        existing = self._resumed and os.path.isfile(self.path)
        if existing and os.path.getsize(self.path) != self.plan.nbytes:
            os.unlink(self.path)
            existing = False
        return WritableFile(self.path, self.plan.nbytes, existing=existing)

    def finished(self, part: Part) -> None:
        """One window is written; the last one patches the checksums and makes the file durable."""
        with self._lock:
            self.parts.append(part)
            self._left -= 1
            if self._left > 0:
                return
        self.complete()

    def complete(self) -> None:
        """All windows are written: patch the checksums, make the file durable and close it."""
        if self._file is None:
            return
        for place, value in self.checks.patches():
            self.patch(self._file, place, value)
            self._patched ^= patch_effect(value, self.plan.nbytes - place - len(value))
        self._file.commit()

    def patch(self, file: WritableFile, place: int, value: bytes) -> None:
        """Put a checksum where the file wants it."""
        file.write(place, value)

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
    recorder: Recorder | None = None,
    output: type[Output] = Output,
) -> dict[str, int]:
    """Write every file of ``plan`` where ``locate`` says, and make it durable; returns the CRC-32 of each by its path.

    ``recorder`` keeps the journal, and knows which windows an interrupted run has finished: those are read back, and
    copied again only where they are not what the journal says. None is longer than ``budget.nbytes``.
    Holds at most ``budget.nbytes`` of buffers. Raises SourceCorruptError when a record does not match its checksum or a
    file ended early, TargetUnwritableError when the file system refuses; the first error stops all threads.
    """
    check = SourceCheck(files, checksums)
    progress.begin("copy", plan.bytes_written)
    kept = _read_back(plan, recorder.finished, locate, budget, progress) if recorder is not None else {}
    windows = [_windows(file, plan, budget.window, kept.get(number)) for number, file in enumerate(plan.files)]
    outputs = [
        output(file, locate(file.path), len(windows[number]), kept=kept.get(number))
        for number, file in enumerate(plan.files)
    ]
    work = _Work(Window(number, *each) for number, found in enumerate(windows) for each in found)
    if recorder is not None:
        check.absorb(recorder.finished.parts)
        check.fresh()
        recorder.start(check.fresh)
    complete = False
    try:
        with ThreadPoolExecutor(budget.threads, thread_name_prefix="fsdpckpt-copy") as pool:
            assemblers = (Assembler(plan, files, sources, check, budget.window) for _ in range(budget.threads))
            try:
                futures = [pool.submit(_copy, work, outputs, one, progress, recorder) for one in assemblers]
                for future in futures:
                    future.result()
            finally:  # also after a signal: the pool waits for its threads, and they would copy to the end
                work.stop()
        complete = True
    finally:
        if recorder is not None:
            recorder.close(complete=complete)
        for each in outputs:
            each.abandon()
    check.finish()
    received = recorder.finished.received_ranges() if recorder is not None else {}
    read_again(unjudged(check, plan, received), files, sources, moved=lambda: None)
    progress.end()
    return {each.plan.path: each.crc for each in outputs}


def _read_back(
    plan: Plan, finished: Finished, locate: Callable[[str], str], budget: Budget, progress: Progress
) -> dict[int, Kept]:
    """By file what is kept of it; every file has an entry when there is anything to go on with."""
    claims = finished.claims()
    if not claims:
        return {}
    backs = [ReadBack(file, locate(file.path), claims.get(number, ())) for number, file in enumerate(plan.files)]
    read_back(backs, budget.threads, budget.nbytes)
    kept = {number: back.close() for number, back in enumerate(backs)}
    progress.advance(sum(nbytes for each in kept.values() for _, nbytes, _ in each.parts))
    return kept


def _windows(file: FilePlan, plan: Plan, window: int, kept: Kept | None) -> list[Range]:
    """What is to be copied; a file of which nothing is gets an empty window, by which it is finished."""
    done = kept.ranges if kept is not None else ()
    return open_windows(file, plan, window, done=done) or [(file.nbytes, file.nbytes)]


class _Work:
    """Hands out windows in order; empty once stopped."""

    def __init__(self, windows: Iterator[Window]) -> None:
        self._windows = windows
        self._lock = threading.Lock()
        self._stopped = False

    def next(self) -> Window | None:
        with self._lock:
            return None if self._stopped else next(self._windows, None)

    def stop(self) -> None:
        self._stopped = True


def _copy(
    work: _Work, outputs: Sequence[Output], assembler: Assembler, progress: Progress, recorder: Recorder | None
) -> None:
    """One thread: take a window, assemble, sum, write, until there are none or another thread failed."""
    try:
        while (window := work.next()) is not None:
            output = outputs[window.file]
            part = copy_window(output, assembler, window.begin, window.end)
            if recorder is not None:
                recorder.wrote(window.file, output.open(), part)
            progress.advance(window.end - window.begin)
    except BaseException:
        work.stop()
        raise


def copy_window(output: Output, assembler: Assembler, begin: int, end: int) -> Part:
    """Assemble, sum and write the bytes [begin, end) of one target file. None to write: it is opened all the same."""
    target = output.open()
    part = (begin, 0, 0)
    if begin < end:
        view, known = assembler.assemble(output.plan, begin, end)
        output.checks.window(begin, view, known)
        part = (begin, len(view), window_crc(begin, view, known))
        target.write(begin, view)
    output.finished(part)
    return part
