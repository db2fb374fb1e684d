"""Where a conversion runs: in this process, or as workers that torchrun, srun or this program started.

``python -m fsdpckpt.worker REQUEST`` is one worker of a launch by this program: the request is a JSON file, the report
(or what went wrong) lies beside it when all have ended. Workers that a user's torchrun or srun started call ``convert``
as anybody does, and find each other by the environment. Imports torch only where there are workers.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, NoReturn, cast

from fsdpckpt.converters.options import (
    ConvertOptions,
    Launcher,
    LaunchOptions,
    MissingState,
    TensorForm,
    VerifyLevel,
    Visibility,
)
from fsdpckpt.errors import InternalError, UsageError, WorkerError
from fsdpckpt.ir.checkpoint import Container, Layout, Section
from fsdpckpt.ir.units import Strategy
from fsdpckpt.progress import Progress

if TYPE_CHECKING:
    from fsdpckpt.comm.group import Group
    from fsdpckpt.converters.report import Report

__all__ = ["convert", "end_process", "is_silent", "main", "started_as_worker"]
