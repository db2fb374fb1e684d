"""Ctrl-C, SIGTERM and a closed terminal, as one exception that ends a run tidily. Imports nothing that takes time."""

from __future__ import annotations

import contextlib
import signal
from types import FrameType

__all__ = ["Interruption", "catch_signals", "ignore_signals"]

_SIGNALS = ("SIGINT", "SIGTERM", "SIGHUP")  # by name: not every system has all of them


class Interruption(BaseException):
    """A signal asked the program to end. No KeyboardInterrupt: the option parser would take that for itself."""


def catch_signals() -> None:
    """From now on a signal raises Interruption: the run ends tidily, can be resumed, and the exit code is 130.

    One that the caller had ignored, as ``nohup`` does with SIGHUP, stays ignored.
    """

    def stop(_number: int, _frame: FrameType | None) -> None:
        raise Interruption

    for number in _numbers():
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, stop)


def ignore_signals() -> None:
    """The run ends already: an impatient second Ctrl-C must not turn its last words into a traceback."""
    for number in _numbers():
        with contextlib.suppress(ValueError):  # not in the main thread
            signal.signal(number, signal.SIG_IGN)


def _numbers() -> list[signal.Signals]:
    return [getattr(signal, name) for name in _SIGNALS if hasattr(signal, name)]
