"""Prevents hung calls and processes from blocking the others. Imports no torch.

``Background`` runs calls that may never return: neither a store nor a process group of PyTorch can be interrupted from
Python. A call that hangs blocks a daemon thread, never the thread that notices, reports and ends. ``heartbeat`` reports
progress while a rank computes. ``end_with_launcher`` ends this process with its launcher, and ``kill_stopped`` kills
workers that were stopped (SIGSTOP, a debugger): they react to nothing, not even SIGTERM, and their launcher would wait
for them.
"""

from __future__ import annotations

import _thread
import contextlib
import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Generic, TypeAlias, TypeVar

from fsdpckpt.errors import WorkerError

T = TypeVar("T")


class Job(Generic[T]):
    """One submitted call. ``done`` is set when it has returned or raised."""

    def __init__(self, call: Callable[[], T]) -> None:
        self._call = call
        self._value: T | None = None
        self._error: BaseException | None = None
        self.done = threading.Event()

    def run(self) -> None:
        try:
            self._value = self._call()
        except BaseException as error:  # noqa: BLE001  # handed to the thread that waits
            self._error = error
        finally:
            self.done.set()

    def result(self) -> T:
        """The result of the call; raises what it raised. Only once ``done``."""
        if self._error is not None:
            raise self._error
        return self._value  # type: ignore[return-value]  # T may be None; set when there was no error


class Background:
    """A daemon thread that runs calls in the order in which they were submitted."""

    def __init__(self, name: str) -> None:
        self._jobs: SimpleQueue[Job[object] | None] = SimpleQueue()
        self._name = name
        self._thread: threading.Thread | None = None

    def submit(self, call: Callable[[], T]) -> Job[T]:
        job = Job(call)
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name=self._name, daemon=True)
            self._thread.start()
        self._jobs.put(job)  # type: ignore[arg-type]  # the queue never looks at the result
        return job

    def close(self, patience: float) -> None:
        """End the thread once it has run the submitted calls; waits at most ``patience`` seconds for it.

        A thread that is inside torch when the interpreter ends aborts the process.
        """
        self._jobs.put(None)
        if self._thread is not None:
            self._thread.join(patience)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            job.run()


POLL_INTERVAL = 0.2  # seconds between two checks
MOVED = 0.001  # seconds of processor time between two checks that count as progress


@contextmanager
def heartbeat(watch: Callable[[bool], None]) -> Iterator[None]:
    """While the body runs, call ``watch(moving)`` from another thread. ``moving``: the body used the processor
    meanwhile.

    A WorkerError of ``watch`` interrupts the body and is raised in its place. Only for the main thread.
    """
    heart = _Heart(watch)
    heart.start()
    try:
        yield
    except BaseException:
        if heart.failure is not None:  # this thread caused the interruption
            raise heart.failure from None
        raise
    finally:
        heart.stop()


class _Heart(threading.Thread):
    def __init__(self, watch: Callable[[bool], None]) -> None:
        super().__init__(name="fsdpckpt-heartbeat", daemon=True)
        self.failure: WorkerError | None = None
        self._watch = watch
        self._clock = time.pthread_getcpuclockid(threading.get_ident())
        self._ended = threading.Event()

    def run(self) -> None:
        before = 0.0
        while not self._ended.wait(POLL_INTERVAL):
            used = time.clock_gettime(self._clock)
            moving, before = used - before >= MOVED, used
            try:
                self._watch(moving)
            except WorkerError as error:
                self.failure = error
                if not self._ended.is_set():
                    _thread.interrupt_main()
                return

    def stop(self) -> None:
        self._ended.set()
        self.join()


LAUNCHER = "FSDPCKPT_LAUNCHER"
"""Environment variable: the process id of the launcher that started this worker."""

_SET_PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of linux/prctl.h


def end_with_launcher() -> None:
    """Ask Linux to kill this process when its launcher ends. Does nothing for workers that others started."""
    launcher = os.environ.get(LAUNCHER)
    if launcher is None or not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None, use_errno=True).prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() != int(launcher):  # it ended before the request
        os._exit(6)


ProcessIdentity: TypeAlias = "list[object]"
"""[machine, process id, when it started]; the machine is empty where processes cannot be told apart."""


def process_identity() -> ProcessIdentity:
    """This worker's identity, by which another one can kill it (``kill_stopped``)."""
    _, started = _process_status(os.getpid())
    return [_machine_id() if started else "", os.getpid(), started]


def kill_stopped(peers: Sequence[ProcessIdentity]) -> None:
    """Kill those of ``peers`` that run on this machine and are stopped."""
    here = _machine_id()
    for machine, process, started in peers:
        if machine != here or not isinstance(process, int) or process == os.getpid():
            continue
        if _process_status(process) == ("T", started):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(process, signal.SIGKILL)


def _machine_id() -> str:
    """The running system and its namespace of process ids; empty if it has neither."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return f"{file.read().strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _process_status(process: int) -> tuple[str, str]:
    """State and start time of a process in Linux's units: two processes with the same id differ in it."""
    try:
        with open(f"/proc/{process}/stat", encoding="utf-8", errors="replace") as file:
            fields = file.read().rpartition(")")[2].split()
    except OSError:
        return "", ""
    return fields[0], fields[19]
