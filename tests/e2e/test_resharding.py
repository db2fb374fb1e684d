"""Saved by PyTorch at A ranks, converted, loaded by PyTorch at B ranks: every rank holds what PyTorch would give it.

All conversions to one B are loaded in one torchrun (``tests.oracle.load``); each test then looks up its own result.
The rows of the table are tried at one or two B each. Every pair of the other properties occurs
(``test_every_pair_is_tried``): each A with each B, each B with each kind of target and each way to wrap.
"""

from __future__ import annotations

import json
import traceback
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, Literal, get_args

import pytest

from tests.e2e.conversions import buffers, converted
from tests.oracle.forms import WORLDS, form
from tests.oracle.launch import torchrun
from tests.oracle.session import Oracle

LOAD_LIMIT = 180.0  # seconds; 10 to 50 on two cores
Kind = Literal["full", "dcp", "dcp_flat", "dcp_ids", "ranks", "ranks_ids", "ranks_st"]


@dataclass(frozen=True)
class Case:
    """``source`` at ``world`` ranks becomes a target of ``kind``, to be loaded into models wrapped as ``wraps`` say."""

    source: str
    kind: Kind
    wraps: tuple[str, ...]
    world: int
    target_world: int

    @property
    def name(self) -> str:
        return f"{self.source}-of-{self.world}-to-{self.kind}-of-{self.target_world}"

    def options(self) -> dict[str, Any]:
        if self.kind == "full":
            return {"to": "full"}
        container = "dcp" if self.kind.startswith("dcp") else "torch"
        meshed = self.source in ("h1_mesh_ranks", "h2_ranks", "tp_ranks")  # kept, if not told otherwise
        return {
            "mesh": str(self.target_world) if meshed and self.kind != "ranks_st" else (),
            "to": "sharded",
            "container": container,
            "world_size": self.target_world,
            "tensor": "sharded-tensor" if self.kind == "ranks_st" else "dtensor",
            "buffers": buffers(form(self.source), self.world, container),
        }


# Source, kind of target, what loads it, on how many ranks.
# What is not loaded (rich states: PyTorch casts them) is compared file by file.
TABLE: tuple[tuple[str, Kind, tuple[str, ...], tuple[int, ...]], ...] = (
    ("f1_dcp", "full", ("f1", "f2"), (3, 1)),
    ("f2_dcp", "full", ("f1_flat",), (2, 4)),
    ("f1_full.pt", "dcp", ("f1",), (3,)),
    ("f1_ranks", "dcp", ("f2",), (2,)),
    ("f1_dcp", "dcp", ("f1_flat",), (4,)),
    ("f1_flat_full.pt", "dcp", ("f2",), (3, 1)),
    ("f1_flat_ranks", "dcp", ("f1_flat",), (4,)),
    ("f1_mesh_ranks", "dcp", ("f1_mesh",), (2,)),
    ("f2_full.pt", "dcp", ("f2",), (3,)),
    ("f2_ranks", "dcp", ("f1",), (4,)),
    ("f2_dcp", "dcp", ("f2",), (2,)),
    ("f2_dcp_flattened", "dcp_flat", ("f2",), (3, 2)),
    ("h1_dcp", "dcp", ("f1",), (3,)),
    ("h2_ranks", "dcp", ("f2",), (2, 1)),
    ("tp_dcp", "dcp", ("f2",), (4,)),
    ("f2_dcp_ids", "dcp_ids", ("f2",), (3,)),
    ("f2_ranks_ids", "dcp_ids", ("f2",), (2,)),
    ("f2_full_ids.pt", "dcp_ids", ("f2",), (4, 1)),
    ("f1_mesh_dcp", "ranks", ("f1_mesh",), (3,)),
    ("f1_ranks", "ranks", ("f2",), (3, 1)),
    ("f2_full.pt", "ranks", ("f2",), (2,)),
    ("f2_dcp_flattened", "ranks", ("f2",), (4,)),
    ("f2_rich_dcp", "ranks", (), (3,)),
    ("f2_rich_ranks", "ranks", (), (2,)),
    ("h1_ranks", "ranks", ("f2",), (3,)),
    ("h1_mesh_ranks", "ranks", ("f1_mesh",), (4,)),
    ("tp_ranks", "ranks", ("f2",), (2,)),
    ("f2_ranks_ids", "ranks_ids", ("f2",), (3,)),
    ("f2_dcp_ids", "ranks_ids", ("f2",), (2,)),
    ("f1_full.pt", "ranks_st", ("f1",), (3,)),
    ("f1_flat_dcp", "ranks_st", ("f1_flat",), (3,)),
    ("f2_ranks", "ranks_st", ("f1",), (2,)),
    ("h1_mesh_dcp", "ranks_st", ("f1",), (4,)),
)


WRAPS = ("f1", "f1_flat", "f1_mesh", "f2")
RUNS = ("f1_mesh", "f1", "f1_flat", "f2", "f2_rich")


def _cases(target_world: int) -> list[Case]:
    cases = []
    for source, kind, wraps, targets in TABLE:
        if target_world not in targets:
            continue
        worlds, run = form(source).worlds, form(source).truth
        # From which world each training run comes differs between the runs, and between the targets.
        world = worlds[min(RUNS.index(run), 3) ^ target_world - 1] if len(worlds) > 1 else worlds[0]
        fitting = tuple(wrap for wrap in wraps if target_world > 1 or wrap == "f2" or kind == "full")
        cases.append(Case(source, kind, fitting, world, target_world))
    return cases


CASES = {world: _cases(world) for world in WORLDS}


def _convert_and_load(oracle: Oracle, target_world: int, directory: Path) -> None:
    """Leave ``results.json`` in ``directory``: what is wrong with each case, empty lists where nothing is."""
    results: dict[str, list[str]] = {}
    jobs = []
    for case in CASES[target_world]:
        target = directory / (f"{case.name}.pt" if case.kind == "full" else case.name)
        try:
            converted(oracle, form(case.source), case.world, target, **case.options())
        except Exception:  # noqa: BLE001 - this case's own test shows it
            results[case.name] = ["the conversion failed: " + traceback.format_exc()]
            continue
        truth = oracle.truth(case.world, form(case.source).truth)
        job = {"id": case.name, "kind": case.kind, "path": str(target), "truth": str(truth), "wraps": case.wraps}
        jobs.append(job)
        if case.kind == "dcp" and all(job["id"] != "control" for job in jobs):
            # The same files held against a run of other gradients: if this passed, the comparison would see nothing.
            other = oracle.truth(case.world % len(WORLDS) + 1, "f1")
            jobs.append({**job, "id": "control", "truth": str(other), "wraps": ["f2"]})
    (directory / "jobs.json").write_text(json.dumps(jobs))
    loaded = directory / "loaded.json"
    try:
        arguments = (str(directory / "jobs.json"), str(loaded))
        torchrun("tests.oracle.load", *arguments, world_size=target_world, limit=LOAD_LIMIT)
    except AssertionError as error:
        results.update({job["id"]: [f"not loaded: {error}"] for job in jobs})
    results.update(json.loads(loaded.read_text()) if loaded.exists() else {})
    (directory / "results.json").write_text(json.dumps(results))


@pytest.fixture
def results(oracle: Oracle, target_world: int) -> dict[str, list[str]]:
    for world in WORLDS:
        oracle.checkpoints(world)
    directory = oracle.once(
        f"resharded-{target_world}", lambda directory: _convert_and_load(oracle, target_world, directory)
    )
    return json.loads((directory / "results.json").read_text())


@pytest.mark.timeout(600)  # the first case of a world size waits for every checkpoint to be made and loaded
@pytest.mark.parametrize(
    ("case", "target_world"),
    [pytest.param(case, world, id=case.name) for world in WORLDS for case in CASES[world]],
)
def test_every_rank_holds_after_loading_what_pytorch_would_give_it(
    results: dict[str, list[str]], case: Case, target_world: int
) -> None:
    assert case.target_world == target_world
    assert results[case.name] == []


@pytest.mark.timeout(600)
@pytest.mark.parametrize("target_world", WORLDS)
def test_the_comparison_notices_a_checkpoint_of_another_run(results: dict[str, list[str]], target_world: int) -> None:
    del target_world
    assert any("differ" in problem for problem in results["control"])


def test_every_pair_is_tried() -> None:
    cases = [case for world in WORLDS for case in CASES[world]]
    live = [2, 3, 4]
    assert {(case.world, case.target_world) for case in cases} >= set(product(WORLDS, live))
    assert {(wrap, case.target_world) for case in cases for wrap in case.wraps} >= set(product(WRAPS, live))
    once = {"dcp_flat": [2, 3], "full": live, "ranks_ids": [2, 3]}
    for kind in get_args(Kind):
        assert {case.target_world for case in cases if case.kind == kind} >= set(once.get(kind, live)), kind
