"""Checkpoints saved by the producers' own libraries, once per session, and the result of loading our output."""

from __future__ import annotations

import importlib.util
import json
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import fsdpckpt
from fsdpckpt.converters import Report
from fsdpckpt.verify.resumption import Resumption
from tests.oracle.launch import torchrun
from tests.oracle.session import Oracle, void

SAVED_BY, LOADED_BY = 3, 2  # ranks
RANKS = {"verl": 4, "torch_checkpointing": 4}  # of those that save on a mesh with replicas
LIMIT = 280.0  # seconds; 8 to 20 on two idle cores


Losses = dict[str, list[list[str]]]
"""What each rank says of each job, by the job's id."""
Loaded = tuple[Path, Losses]
"""Where the conversions are, and what was said of them."""
LibraryOf = Callable[[str], "Library"]


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

    def losses(self, jobs: list[Job], scratch: Path, *, ranks: int = LOADED_BY) -> Losses:
        """Let it load each of ``jobs``; what every rank says of the steps after that, exactly."""
        listed = [{"id": job.id, "form": job.form, "path": str(job.path)} for job in jobs]
        (scratch / "jobs.json").write_text(json.dumps(listed))
        torchrun(self.module, "load", str(scratch), world_size=ranks, limit=LIMIT)
        found: Losses = json.loads((scratch / "losses.json").read_text())
        return found


@pytest.fixture(scope="session")
def library(oracle: Oracle) -> LibraryOf:
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


def written(source: Path, target: Path, **options: Any) -> Report:
    """As ``fsdpckpt.convert``, whose warnings are in the report."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", fsdpckpt.FsdpckptWarning)
        return fsdpckpt.convert(source, target, **options)


def resumption(path: Path, flavor: str, *, ranks: int | None = LOADED_BY) -> Resumption:
    """What ``verify --for`` says."""
    found = fsdpckpt.verify(path, flavor=flavor, world_size=ranks).resumption
    assert found is not None
    return found
