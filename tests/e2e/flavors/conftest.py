"""Checkpoints saved by the producers' own libraries, once per session, and the result of loading our output."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from fsdpckpt.api import verify
from fsdpckpt.comm.protocol import Solo
from fsdpckpt.converters import Report
from fsdpckpt.converters.pipeline import convert
from fsdpckpt.options import ConvertOptions
from fsdpckpt.progress import NoProgress
from fsdpckpt.verify.resumption import Resumption
from tests.oracle.launch import torchrun
from tests.oracle.session import Oracle, void

SAVED_BY, LOADED_BY = 3, 2  # ranks
RANKS = {"verl": 4, "torch_checkpointing": 4}  # of those that save on a mesh with replicas
LIMIT = 280.0  # seconds; 8 to 20 on two idle cores


@dataclass(frozen=True)
class Job:
    """One checkpoint to be loaded by a producer, in its form ``form``."""

    id: str
    form: str
    path: Path


@dataclass(frozen=True)
class Library:
    """Checkpoints that a library saved, below ``saved``."""

    module: str
    saved: Path

    def losses(self, jobs: list[Job], scratch: Path, *, ranks: int = LOADED_BY) -> dict[str, list[list[str]]]:
        """Let it load each of ``jobs``; what every rank says of the steps after that, exactly."""
        listed = [{"id": job.id, "form": job.form, "path": str(job.path)} for job in jobs]
        (scratch / "jobs.json").write_text(json.dumps(listed))
        torchrun(self.module, "load", str(scratch), world_size=ranks, limit=LIMIT)
        found: dict[str, list[list[str]]] = json.loads((scratch / "losses.json").read_text())
        return found


@pytest.fixture(scope="session")
def library(oracle: Oracle) -> Callable[[str], Library]:
    """``library("lightning")``: what it saved on its ranks. Skips the test where it is not installed."""

    def made(name: str) -> Library:
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"{name} is not installed: scripts/env installs it")
        module = f"tests.e2e.flavors.with_{name}"
        ranks = RANKS.get(name, SAVED_BY)
        saved = oracle.once(
            f"flavors-{name}",
            lambda directory: void(torchrun(module, "save", str(directory), world_size=ranks, limit=LIMIT)),
        )
        return Library(module, saved)

    return made


def written(source: Path, target: Path, **options: object) -> Report:
    return convert(Solo(), str(source), str(target), ConvertOptions(**options), NoProgress())  # type: ignore[arg-type]


def resumption(path: Path, flavor: str, *, ranks: int | None = LOADED_BY) -> Resumption:
    """What ``verify --for`` says."""
    found = verify(path, flavor=flavor, world_size=ranks).resumption
    assert found is not None
    return found
