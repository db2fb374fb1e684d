"""Prevents hung calls and processes from blocking the others. Imports no torch.

``Background`` runs calls that may never return: neither a store nor a process group of PyTorch can be interrupted from
Python. A call that hangs blocks a daemon thread, never the thread that notices, reports and ends. ``heartbeat`` reports
progress while a rank computes. ``end_with_launcher`` ends this process with its launcher, and ``kill_stopped`` kills
workers that were stopped (SIGSTOP, a debugger): they react to nothing, not even SIGTERM, and their launcher would wait
for them.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from queue import SimpleQueue
from types import FrameType
from typing import Any, TypeAlias, TypeVar, cast

from fsdpckpt.errors import WorkerError

T = TypeVar("T")

WAIT_INTERVAL = 0.05  # seconds between two calls of ``watch`` in ``wait_for``; a result ends the wait at once
JOIN_SECONDS = 2.0  # to wait for a thread whose results are not needed any more


class Background:
    """A daemon thread that runs calls in the order in which they were submitted."""

    def __init__(self, name: str) -> None:
        self._submitted: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        self._name = name
        self._thread: threading.Thread | None = None

    def submit(self, call: Callable[[], T]) -> Future[T]:
        future: Future[T] = Future()
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name=self._name, daemon=True)
            self._thread.start()
        self._submitted.put((future, call))
        return future

    def close(self, patience: float) -> None:
        """End the thread once it has run the submitted calls; waits at most ``patience`` seconds for it.

        A thread that is inside torch when the interpreter ends aborts the process.
        """
        self._submitted.put(None)
        if self._thread is not None:
            self._thread.join(patience)

    def _work(self) -> None:
        while (submitted := self._submitted.get()) is not None:
            future, call = submitted
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(call())
            except BaseException as error:  # noqa: BLE001  # raised by the thread that waits
                future.set_exception(error)


def wait_for(future: Future[T], watch: Callable[[], None]) -> T:
    """The result of ``future``. Calls ``watch``, which may raise, until there is one."""
    while not wait([future], WAIT_INTERVAL).done:
        watch()
    return future.result()


MAX_AHEAD = 16  # items that ``prefetched`` makes and its caller has not taken yet
_END = object()


def prefetched(items: Iterator[T], watch: Callable[[], None], *, name: str) -> Generator[T]:
    """The ``items``, which a thread called ``name`` makes ahead; calls ``watch``, which may raise, while waiting."""
    background = Background(name)
    ahead = deque(background.submit(lambda: next(items, _END)) for _ in range(MAX_AHEAD))
    try:
        while (item := wait_for(ahead.popleft(), watch)) is not _END:
            yield cast("T", item)
            ahead.append(background.submit(lambda: next(items, _END)))
    finally:
        for future in ahead:
            future.cancel()
        background.close(JOIN_SECONDS)


HEARTBEAT_POLL = 0.2  # seconds between two calls of ``watch``
MIN_CPU_SECONDS = 0.001  # of processor time between two calls that count as progress


@contextmanager
def heartbeat(watch: Callable[[bool], None]) -> Iterator[None]:
    """While the body runs, call ``watch(progress)`` from another thread. ``progress``: this thread used the processor
    meanwhile.

    A WorkerError of ``watch`` is raised in place of what the body returns or raises. It interrupts the body if this is
    the main thread: by SIGINT, also where SIGINT is ignored, since that interrupts calls that block.
    """
    before = signal.getsignal(signal.SIGINT)  # None: a handler of a C library, which Python could not restore
    interrupts = threading.current_thread() is threading.main_thread() and before is not None
    thread = _HeartbeatThread(watch, interrupts=interrupts)

    def on_interrupt(number: int, frame: FrameType | None) -> None:
        if thread.failure is not None and not thread.ended.is_set():
            raise thread.failure
        if before is not signal.SIG_IGN:
            (before if callable(before) else signal.default_int_handler)(number, frame)

    if interrupts:
        signal.signal(signal.SIGINT, on_interrupt)
    thread.start()
    try:
        try:
            yield
        finally:
            thread.ended.set()  # from here on, nothing interrupts the rest of this function
    finally:
        thread.join()
        if interrupts:
            signal.signal(signal.SIGINT, before)
        if thread.failure is not None:
            raise thread.failure from None


class _HeartbeatThread(threading.Thread):
    def __init__(self, watch: Callable[[bool], None], *, interrupts: bool) -> None:
        super().__init__(name="fsdpckpt-heartbeat", daemon=True)
        self.failure: WorkerError | None = None
        self.ended = threading.Event()
        self._watch = watch
        self._interrupts = interrupts
        self._watched = threading.get_ident()
        self._clock = time.pthread_getcpuclockid(self._watched)

    def run(self) -> None:
        before = 0.0
        while not self.ended.wait(HEARTBEAT_POLL):
            used = time.clock_gettime(self._clock)
            progress, before = used - before >= MIN_CPU_SECONDS, used
            try:
                self._watch(progress)
            except WorkerError as error:
                self.failure = error
                if self._interrupts and not self.ended.is_set():
                    signal.pthread_kill(self._watched, signal.SIGINT)
                return


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
