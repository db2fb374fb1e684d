"""Things made once per test session, however many pytest workers ask for them."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.oracle.launch import torchrun

__all__ = ["Oracle", "shared_directory"]

GENERATE_LIMIT = 120.0  # seconds; 5 to 15 on two idle cores
FLATTENED_LIMIT = 180.0  # seconds; 5 to 20 on two idle cores


def shared_directory(factory: pytest.TempPathFactory) -> Path:
    """A directory all workers of this test session share (pytest-xdist gives each worker a child of it)."""
    base = factory.getbasetemp()
    return base.parent if "PYTEST_XDIST_WORKER" in os.environ else base


class Oracle:
    """Real PyTorch checkpoints, by world size, under ``base``."""

    def __init__(self, base: Path) -> None:
        self.base = base

    def once(self, name: str, make: Callable[[Path], None]) -> Path:
        """``base/name`` as ``make`` filled it: by the first that needs it; others wait. A failure is not retried."""
        directory = self.base / name
        done, failed = self.base / f"{name}.done", self.base / f"{name}.failed"
        with (self.base / f"{name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if failed.exists():
                raise AssertionError(f"{name} failed before:\n{failed.read_text()}")
            if not done.exists():
                directory.mkdir(parents=True, exist_ok=True)
                try:
                    make(directory)
                except BaseException as error:
                    failed.write_text(str(error))
                    raise
                done.touch()
        return directory

    def checkpoints(self, world: int) -> Path:
        """The directory that holds every form of ``tests.oracle.forms`` saved at this world size, and ``truth/``."""
        return self._generated(f"oracle-{world}", "tests.oracle.generate", world, GENERATE_LIMIT)

    def flattened(self, world: int) -> Path:
        """The directory of ``tests.oracle.flat_generate`` at this world size: ``<scenario>-<orig|flat>/...``."""
        return self._generated(f"oracle-flattened-{world}", "tests.oracle.flat_generate", world, FLATTENED_LIMIT)

    def _generated(self, name: str, module: str, world: int, limit: float) -> Path:
        return self.once(name, lambda place: void(torchrun(module, str(place), world_size=world, limit=limit)))

    def truth(self, world: int, run: str) -> Path:
        """The truth file of one training run at one world size: ``{"model", "optimizer"}``, full, by name."""
        return self.checkpoints(world) / "truth" / f"{run}.pt"


def void(_: object) -> None:
    return None
