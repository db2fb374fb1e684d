"""``dcp.load`` through ``StorageReader`` fills real FSDP models from every kind of source, at other world sizes.

All loads at one world size run in one torchrun (``tests.oracle.load_direct``); each test then looks up its own result.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

import fsdpckpt
from tests.oracle.forms import form
from tests.oracle.launch import torchrun
from tests.oracle.session import Oracle
from tests.oracle.toy import seeded_model

LOAD_LIMIT = 260.0  # seconds; 5 to 25 on two idle cores
WORLDS = (1, 2, 3, 4)


@dataclass(frozen=True)
class Case:
    """``source`` as saved by ``saved_by`` ranks fills the state dict ``form`` of a model wrapped as ``wrap``."""

    source: str
    saved_by: int
    wrap: str
    form: str
    world: int
    options: dict[str, Any] = field(default_factory=dict, hash=False)

    @property
    def name(self) -> str:
        return f"{self.source}-of-{self.saved_by}-into-{self.wrap}-{self.form}-of-{self.world}"

    def job(self, oracle: Oracle, directory: Path) -> dict[str, Any]:
        options = dict(self.options)
        if self.form == "flat":
            base = oracle.flattened(self.saved_by) / self.wrap
            path, truth = base / self.source, base / "truth.pt"
            if options.pop("units", None):
                options["units"] = str(base / "units.json")
        else:
            base = oracle.checkpoints(self.saved_by)
            path = directory / "safetensors" if self.source == "safetensors" else base / self.source
            run = "f2" if self.source == "safetensors" else form(self.source).truth
            truth = oracle.truth(self.saved_by, run)
            if options.pop("parameters", None):
                options["parameters"] = str(directory / "parameters.txt")
        return {
            "id": self.name,
            "form": self.form,
            "path": str(path),
            "truth": str(truth),
            "wrap": self.wrap,
            "options": options,
        }


APP = {"model": "app.model", "optimizer": "app.optim"}
FLATTENED = {"flatten_optimizer_state_dict": True}
IDS = {"key_type": "id"}

CASES = (
    Case("f1_full.pt", 2, "f1", "sharded", 3),
    Case("f1_full.pt", 2, "f2", "sharded", 3),
    Case("f1_ranks", 2, "f1_flat", "sharded", 3),
    Case("f1_ranks", 4, "f2", "sharded", 3),
    Case("f1_dcp", 2, "f1", "full", 3),
    Case("f1_dcp", 4, "f2", "app", 3, APP),
    Case("f1_flat_ranks", 2, "f1", "sharded", 3),
    Case("f1_mesh_ranks", 4, "f1_mesh", "sharded", 3),
    Case("f2_full.pt", 2, "f2", "flattened", 3, FLATTENED),
    Case("f2_ranks", 2, "f2", "sharded", 3),
    Case("f2_dcp_flattened", 4, "f2", "sharded", 3),
    Case("f2_dcp_ids", 2, "f2", "ids", 3, IDS),
    Case("h1_ranks", 4, "f1", "sharded", 3),
    Case("tp_dcp", 4, "f2", "sharded", 3),
    Case("safetensors", 2, "f2", "sharded", 3),
    Case("flat", 2, "nested-orig", "flat", 3),
    Case("flat", 4, "transformer-flat", "flat", 3),
    Case("mix", 2, "nested-flat", "flat", 3, {"units": True}),
    Case("f1_ranks", 3, "f1", "sharded", 2),
    Case("f1_mesh_ranks", 3, "f2", "full", 2),
    Case("f2_dcp", 3, "f2", "flattened", 2, FLATTENED),
    Case("f2_dcp", 3, "f1", "sharded", 2),
    Case("f2_ranks_ids", 3, "f2", "ids", 2, IDS),
    Case("f2_full_ids.pt", 3, "f2", "sharded", 2, {"parameters": True}),
    Case("tp_ranks", 4, "f2", "app", 2, APP),
    Case("flat", 3, "nested-flat", "flat", 2),
    Case("f1_full.pt", 2, "f1", "sharded", 4),
    Case("f2_dcp", 2, "f2", "sharded", 4),
    Case("f2_ranks", 3, "f2", "flattened", 4, FLATTENED),
    Case("f2_ranks", 4, "f2", "sharded", 1),
    Case("f1_dcp", 2, "f2", "app", 1, APP),
)


def _load(oracle: Oracle, world: int, directory: Path) -> None:
    cases = [case for case in CASES if case.world == world]
    if any(case.source == "safetensors" for case in cases):
        source = oracle.checkpoints(2) / "f2_ranks"
        fsdpckpt.convert(str(source), str(directory / "safetensors"), container="safetensors", to="full")
    # The names of the optimizer's parameters, as a user prints them from the model.
    names = [name for name, parameter in seeded_model().named_parameters() if parameter.requires_grad]
    (directory / "parameters.txt").write_text("\n".join(names))
    jobs = [case.job(oracle, directory) for case in cases]
    if world == 3:
        # The same load held against a run of other gradients: if this passed, the comparison would see nothing.
        jobs.append({**jobs[0], "id": "control", "truth": str(oracle.truth(4, "f1"))})
    (directory / "jobs.json").write_text(json.dumps(jobs))
    results = directory / "results.json"
    torchrun("tests.oracle.load_direct", str(directory / "jobs.json"), str(results), world_size=world, limit=LOAD_LIMIT)


def _results(oracle: Oracle, world: int) -> dict[str, list[str]]:
    directory = oracle.once(f"direct-{world}", lambda directory: _load(oracle, world, directory))
    return json.loads((directory / "results.json").read_text())


@pytest.mark.timeout(600)  # the first case of a world size waits for every checkpoint to be made and loaded
@pytest.mark.parametrize("case", [pytest.param(case, id=case.name) for case in CASES])
def test_a_model_filled_from_this_source_goes_on_as_pytorch_would(oracle: Oracle, case: Case) -> None:
    assert _results(oracle, case.world)[case.name] == []


@pytest.mark.timeout(600)
def test_the_comparison_notices_a_checkpoint_of_another_run(oracle: Oracle) -> None:
    assert any("differ" in problem for problem in _results(oracle, 3)["control"])
