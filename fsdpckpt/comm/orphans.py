"""A worker never outlives its launcher, however that ends."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

__all__ = ["LAUNCHER", "end_with_launcher"]

LAUNCHER = "FSDPCKPT_LAUNCHER"
"""Environment variable: the process id of the launcher that started this worker."""

_SET_PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of linux/prctl.h


def end_with_launcher() -> None:
    """Ask Linux to kill this process when its launcher ends. Does nothing for workers that others started."""
    launcher = os.environ.get(LAUNCHER)
    if launcher is None or not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None, use_errno=True).prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() != int(launcher):  # it ended before we asked
        os._exit(6)
