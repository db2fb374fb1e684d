"""Fixtures every test may use: real PyTorch checkpoints, made once per session."""

from __future__ import annotations

import os
import signal

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported: two workers share two cores
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell's background job; programs under test would inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)

import pytest

from tests.oracle.session import Oracle, shared_directory


@pytest.fixture(scope="session")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    """Checkpoints that real FSDP saved: ``oracle.checkpoints(world_size)`` is a directory of ``tests.oracle.forms``."""
    return Oracle(shared_directory(tmp_path_factory))
