"""Fixtures every test may use: real PyTorch checkpoints, made once per session."""

from __future__ import annotations

import os
import signal
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported: workers share the cores
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell's background job; programs under test would inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:  # started with nohup: the same
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

import hypothesis
import pytest

from tests.oracle.session import Oracle, shared_directory

# A busy machine is slow now and then. In CI the examples are always the same ones: new findings belong to no change.
hypothesis.settings.register_profile("suite", deadline=None, derandomize="CI" in os.environ)
hypothesis.settings.load_profile("suite")

SLOW_FIRST = (
    "e2e/flattened/test_held.py",
    "e2e/test_resharding.py",
    "e2e/distributed",
    "e2e/flavors",
    "e2e/remote",
    "e2e/flattened",
    "e2e",
    "faults",
    "comm",
    "loading",
    "writers/test_meshes.py",
    "test_wheel.py",
    "verify/test_bit_flips.py",
    "converters/target/test_mesh.py",
    "formats/test_dcp_records.py",
    "execute/test_distributed_routes.py",
    "plan/test_copies.py",
    "docs",
    "cli",
)
"""What takes longest begins, so that all workers have short files left to share at the end: a file goes to a worker
as a whole. Neighbours wait for different checkpoints."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Longest first; the order within a file stays."""
    tests = Path(__file__).parent

    def place(item: pytest.Item) -> int:
        path = item.path.relative_to(tests).as_posix()
        found = (number for number, name in enumerate(SLOW_FIRST) if path == name or path.startswith(f"{name}/"))
        return next(found, len(SLOW_FIRST))

    items.sort(key=place)


@pytest.fixture(scope="session")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    """Checkpoints that real FSDP saved: ``oracle.checkpoints(world_size)`` is a directory of ``tests.oracle.forms``."""
    return Oracle(shared_directory(tmp_path_factory))
