"""Kills this process at a moment that is a number of bytes, or of calls, inside one phase of a conversion.

Installed in the fork that converts. Seconds would hit the start of Python, or the pauses of a busy machine; bytes hit
the same place on every machine. Phases:

- ``copy``: so many bytes were written to the output, the last of them in the middle of a write.
- ``read-back``: a resumed run has read so many bytes of what was staged.
- ``verify``: so many bytes of source and output were read by ``--verify full``.
- ``publish``: before the n-th call that makes the output visible or cleans up (sync, rename, unlink, ...).
"""

from __future__ import annotations

import functools
import glob
import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fsdpckpt.converters.check import OutputCheck
from fsdpckpt.execute import journal
from fsdpckpt.execute.run import _Run
from fsdpckpt.storage import local, local_target, renameat2, staging

PHASES = ("copy", "read-back", "verify", "publish")
_BLOCK = 4096
_PATIENCE = 20.0  # seconds for the journal on a busy disk


@dataclass(frozen=True)
class Kill:
    """``amount``: bytes, or in ``publish`` calls; 0: nothing is killed, and what there is is counted.

    ``journals``: the kill waits until one of these files, a pattern, lists something that a next run can take over.
    ``counted``: a file for the count.
    """

    phase: str
    amount: int
    journals: str = ""
    counted: str = ""


class _Counter:
    """Counts in any thread, and kills this process once the amount is reached."""

    def __init__(self, kill: Kill) -> None:
        self.kill = kill
        self.total = 0
        self.active = False
        self._lock = threading.Lock()

    def left(self, more: int) -> int | None:
        """Count ``more``; how many of them come before the kill, None if there is none yet."""
        if not self.active:
            return None
        with self._lock:
            before, self.total = self.total, self.total + more
        amount = self.kill.amount
        return amount - before if amount and before < amount <= self.total else None

    def die(self) -> None:
        deadline = time.monotonic() + _PATIENCE
        while self.kill.journals and time.monotonic() < deadline and not _lists_something(self.kill.journals):
            time.sleep(0.001)
        os.kill(os.getpid(), signal.SIGKILL)

    def within(self, owner: Any, name: str) -> None:
        """Count only while the method ``name`` of ``owner`` runs."""
        method = getattr(owner, name)

        @functools.wraps(method)
        def counted(*arguments: Any, **options: Any) -> Any:
            self.active = True
            try:
                return method(*arguments, **options)
            finally:
                self.active = False
                if self.kill.counted and not os.environ.get("RANK", "0").strip("0"):
                    with open(self.kill.counted, "w") as file:
                        file.write(str(self.total))

        setattr(owner, name, counted)


def _lists_something(pattern: str) -> bool:
    runs = [journal.read_run(path) for path in glob.glob(pattern)]
    return any(windows.nbytes for _, windows in filter(None, runs))


def install(kill: Kill) -> None:
    """Let this process die as ``kill`` says."""
    counter = _Counter(kill)
    {"copy": _in_copy, "read-back": _in_read_back, "verify": _in_verify, "publish": _in_publish}[kill.phase](counter)


def _in_copy(counter: _Counter) -> None:
    write = local_target._write_all

    def counted(descriptor: int, view: memoryview, offset: int) -> None:
        left = counter.left(len(view))
        if left is not None:
            write(descriptor, view[: left // _BLOCK * _BLOCK], offset)
            counter.die()
        write(descriptor, view, offset)

    local_target._write_all = counted
    counter.within(_Run, "copy")


def _in_read_back(counter: _Counter) -> None:
    _count_reads(local_target.WritableFile, "read_into", counter)
    counter.within(_Run, "read_back")


def _in_verify(counter: _Counter) -> None:
    _count_reads(local.LocalFile, "read_into", counter)
    _count_reads(local.LocalFile, "read", counter)
    counter.within(OutputCheck, "run")


def _count_reads(owner: Any, name: str, counter: _Counter) -> None:
    read = getattr(owner, name)

    def counted(self: Any, offset: int, wanted: memoryview | int) -> Any:
        data = read(self, offset, wanted)
        if counter.left(wanted if isinstance(wanted, int) else len(wanted)) is not None:
            counter.die()
        return data

    setattr(owner, name, counted)


def _in_publish(counter: _Counter) -> None:
    def before(call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        def counted(*arguments: Any, **options: Any) -> Any:
            if counter.left(1) is not None:
                counter.die()
            return call(*arguments, **options)

        return counted

    for name in ("fsync", "rename", "unlink", "rmdir", "mkdir"):
        setattr(os, name, before(getattr(os, name)))
    renameat2._renameat2 = before(renameat2._renameat2)
    counter.within(staging.Staging, "commit")
