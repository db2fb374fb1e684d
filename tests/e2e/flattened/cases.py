"""Conversions of flattened checkpoints, and their results compared with what real FSDP1 holds on every rank."""

from __future__ import annotations

import json
import traceback
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import fsdpckpt
from tests.oracle.flat_scenarios import Scenario, scenario
from tests.oracle.launch import python, torchrun
from tests.oracle.session import Oracle

__all__ = ["Case", "Variant", "compared", "files", "held_results", "truth_of"]

HELD_LIMIT = 175.0  # seconds; 5 to 30 on two idle cores


@dataclass(frozen=True)
class Variant:
    """A scenario with a value of ``use_orig_params``."""

    scenario: str
    orig: bool

    @property
    def name(self) -> str:
        return f"{self.scenario}-{'orig' if self.orig else 'flat'}"

    @property
    def entry(self) -> Scenario:
        return scenario(self.scenario)

    @property
    def keys(self) -> str:
        """The key type of the dict its optimizer takes."""
        return "name" if self.entry.name_keyed and self.orig else "id"

    def directory(self, oracle: Oracle, world: int | None = None) -> Path:
        return oracle.flattened(world if world is not None else self.entry.worlds[-1]) / self.name

    def units(self, oracle: Oracle) -> Path:
        return self.directory(oracle) / "units.json"


@dataclass(frozen=True)
class Case:
    """``source`` saved by ``world`` ranks in ``form`` becomes flattened files for ``onto`` ranks of ``target``.

    ``ranks``: which of them are compared, all when empty. ``load``: also loaded live. ``group``: ranks in one sharding
    group, where it is not the scenario's. ``options`` of ``convert``.
    """

    source: Variant
    world: int
    form: str
    target: Variant
    onto: int
    ranks: tuple[int, ...] = ()
    load: bool = False
    group: int | None = None
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def id(self) -> str:
        groups = f"-in-groups-of-{self.group}" if self.group is not None else ""
        return f"{self.source.name}.{self.form}-of-{self.world}-to-{self.target.name}-of-{self.onto}{groups}"


def truth_of(case: Case, oracle: Oracle) -> Path:
    return case.source.directory(oracle, case.world) / "truth.pt"


def converted(case: Case, oracle: Oracle, target: Path) -> None:
    options = {"units": case.target.units(oracle), "key_type": case.target.keys, **case.options}
    if case.group is not None:
        options["mesh"] = f"replicate={case.onto // case.group},shard={case.group}"
    source = case.source.directory(oracle, case.world) / case.form
    fsdpckpt.convert(source, target, to="flattened", world_size=case.onto, **options)


def compared(cases: Iterable[Case], oracle: Oracle, directory: Path, *, live: bool) -> None:
    """Convert all, compare all in one process or one torchrun, leave ``results.json``: ``{id: [what is wrong]}``."""
    jobs, results = [], {}
    for case in cases:
        path = directory / case.id
        try:
            converted(case, oracle, path)
        except Exception:  # noqa: BLE001 - this case's own test shows it
            results[case.id] = ["the conversion failed: " + traceback.format_exc()]
            continue
        job = {"id": case.id, "scenario": case.target.scenario, "orig": case.target.orig, "path": str(path)}
        job |= {"group": case.group or case.target.entry.group}
        job |= {"truth": str(truth_of(case, oracle)), "world_size": case.onto, "keys": case.target.keys}
        jobs.append({**job, "ranks": list(case.ranks or range(case.onto)), "load": case.load})
    if jobs:
        # The same files held against the weights of another run: if this passed, the comparison would see nothing.
        jobs.append({**jobs[0], "id": "control", "truth": str(_other_truth(next(iter(cases)), oracle))})
        results.update(_held(jobs, directory, live=live))
    (directory / "results.json").write_text(json.dumps(results))


def _other_truth(case: Case, oracle: Oracle) -> Path:
    other = 2 if case.world != 2 else 3
    return case.source.directory(oracle, other) / "truth.pt"


def _held(jobs: list[dict[str, Any]], directory: Path, *, live: bool) -> dict[str, list[str]]:
    (directory / "jobs.json").write_text(json.dumps(jobs))
    arguments = [str(directory / "jobs.json"), str(directory / "found.json")]
    if live:
        torchrun("tests.oracle.flat_held", *arguments, "live", world_size=jobs[0]["world_size"], limit=HELD_LIMIT)
    else:
        python("tests.oracle.flat_held", *arguments, limit=HELD_LIMIT)
    return json.loads((directory / "found.json").read_text())


def held_results(oracle: Oracle, name: str, cases: Iterable[Case], *, live: bool = False) -> dict[str, list[str]]:
    """What is wrong with each case, by its id; converted and compared once in a test session."""
    directory = oracle.once(name, lambda directory: compared(cases, oracle, directory, live=live))
    return json.loads((directory / "results.json").read_text())


def files(directory: Path) -> dict[str, bytes]:
    """Every file in a directory of rank files, by name."""
    return {path.name: path.read_bytes() for path in sorted(directory.glob("*.pt"))}


def load(path: Path) -> dict[str, Any]:
    return torch.load(path, weights_only=True)
