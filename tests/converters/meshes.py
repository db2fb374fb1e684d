"""Rank files of real jobs on meshes of any kind, and conversions to rank files."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

import fsdpckpt
from tests.converters.jobs import RANK_FILES
from tests.oracle.fake_group import as_rank
from tests.writers.experts import ExpertMesh
from tests.writers.meshes import MeshCase, assert_equal, held, with_moments

__all__ = [
    "ODD", "PLACEMENTS", "SIZE", "Case", "assert_held", "on_each_rank", "placements_for", "require_held", "rules",
    "save", "save_each", "state_of", "to_ranks",
]  # fmt: skip

SIZE, ODD = 4, 3  # rows that no mesh here divides
PLACEMENTS: dict[str, Any] = {
    "col.*": {"dp_replicate": "Replicate()", "dp_shard": "Shard(0)", "tp": "Shard(0)"},
    "row.weight": {"dp_replicate": "Replicate()", "dp_shard": "Shard(0)", "tp": "shard(dim=1)"},
    "free.*": {"dp_replicate": "Replicate()", "dp_shard": "Shard(0)"},
    "seen": None,
    "*": {"dp_replicate": "Replicate()", "dp_shard": "Shard(0)", "tp": "replicate"},
}

Case = MeshCase | ExpertMesh


def placements_for(case: MeshCase) -> dict[str, Any]:
    """``PLACEMENTS`` for the dimensions that ``case`` has, in its order."""
    return {glob: entry and {n: entry[n] for n in case.shape if n in entry} for glob, entry in PLACEMENTS.items()}


def rules(placements: Any) -> str:
    """A file for ``--placements``."""
    Path("placements.json").write_text(placements if isinstance(placements, str) else json.dumps(placements))
    return "placements.json"


def state_of(case: Case, size: int = SIZE, odd: int = ODD) -> dict[str, Any]:
    """This rank's state dicts, as torch itself has them."""
    return held(case, odd, size) if isinstance(case, MeshCase) else with_moments(case.sharded())


def on_each_rank(world_size: int, ranks: Iterable[int] | None = None) -> Iterable[int]:
    """Each rank, while this process plays it."""
    for rank in ranks or range(world_size):
        with as_rank(rank, world_size):
            yield rank


def save(case: Case, path: Path, **size: int) -> Path:
    """One file a rank and section, as ``torch.save`` of real state dicts makes them."""
    path.mkdir()
    for rank in on_each_rank(case.world_size):
        state = state_of(case, **size)
        torch.save(state["model"], path / f"model_world_size_{case.world_size}_rank_{rank}.pt")
        torch.save(state["optimizer"], path / f"optim_world_size_{case.world_size}_rank_{rank}.pt")
    return path


def save_each(path: str, world_size: int, state: Callable[[int], Any]) -> str:
    """The model alone: what ``state`` gives each rank."""
    Path(path).mkdir()
    for rank in on_each_rank(world_size):
        torch.save(state(rank), Path(path, f"model_world_size_{world_size}_rank_{rank}.pt"))
    return path


def require_held(
    path: str, world_size: int, expected: Callable[[], Any], section: str = "model", ranks: Iterable[int] | None = None
) -> None:
    """The files of one section hold on each of ``ranks`` what is ``expected`` there."""
    for rank in on_each_rank(world_size, ranks):
        found = torch.load(Path(path, f"{section}_world_size_{world_size}_rank_{rank}.pt"))
        assert_equal(found, expected(), section)


def assert_held(path: str, case: Case, ranks: Iterable[int] | None = None, **size: int) -> None:
    """Every rank's files, or those of ``ranks``, hold what the real model holds there."""
    for rank in on_each_rank(case.world_size, ranks):
        expected = state_of(case, **size)
        for section, value in (("model", expected["model"]), ("optim", expected["optimizer"])):
            found = torch.load(Path(path, f"{section}_world_size_{case.world_size}_rank_{rank}.pt"))
            assert_equal(found, value, section, first_mesh=isinstance(case, MeshCase))


def to_ranks(source: str | Path, target: str, **options: Any) -> Any:
    return fsdpckpt.convert(source, target, **RANK_FILES, **options)
