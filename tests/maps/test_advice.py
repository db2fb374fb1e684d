"""What errors about maps propose: each way is followed, as in ``tests.converters.test_advice``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import fsdpckpt
from fsdpckpt.errors import FsdpckptError
from tests.advice import require_ways_on
from tests.maps import experts
from tests.maps.experts import State

Options = dict[str, Any]
Ways = Callable[[Path], dict[str, Options]]
HALVES = """
format = 1
rest = "keep"
[values]
half = ["head_dim / 2"]
[[rule]]
from = "embed.weight"
to = "tokens.weight"
steps = [{ rearrange = "(half n) i -> (n half) i", axes = { half = "half" } }]
"""
EXPERTS: Options = {"map": "experts.toml"}
FLAT: Options = {**EXPERTS, "to": "flattened", "world_size": 2, "use_orig_params": True, "buffers": ["none"]}


@pytest.fixture
def job(saved: State, tmp_path: Path) -> Path:
    """``apart.pt``, ``ids.pt`` and ``fused.pt``, maps, and what a user has of the new model."""
    (tmp_path / "strict.toml").write_text(experts.MAP.replace('rest = "keep"', 'rest = "error"'))
    (tmp_path / "halves.toml").write_text(HALVES)
    fsdpckpt.convert(tmp_path / "apart.pt", tmp_path / "ids.pt", key_type="id")
    fsdpckpt.convert(tmp_path / "apart.pt", tmp_path / "fused.pt", map=tmp_path / "experts.toml")
    model = experts.fused()
    torch.save({"model": model.state_dict()}, tmp_path / "reference.pt")
    (tmp_path / "names.txt").write_text("\n".join(name for name, _ in model.named_parameters()))
    (tmp_path / "new").mkdir()  # beside SRC it would be taken for that of SRC
    fsdpckpt.save_units(model, None, tmp_path / "new" / "units.json")
    untrained = {**saved["optimizer"], "state": dict(saved["optimizer"]["state"])}
    lost = "blocks.1.experts.2.down.weight"
    del untrained["state"][lost]
    untrained["param_groups"] = [
        {**group, "params": [name for name in group["params"] if name != lost]} for group in untrained["param_groups"]
    ]
    torch.save({**saved, "optimizer": untrained}, tmp_path / "untrained.pt")
    for folder, width in (("base", 22), ("other", 2)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "config.json").write_text(f'{{"head_dim": {width}}}')
    return tmp_path


@dataclass(frozen=True)
class Situation:
    source: str
    options: Options
    ways: Ways


def order(job: Path) -> dict[str, Options]:
    return {
        "--key-type": {"key_type": "name"},
        "--parameters": {"parameters": job / "names.txt"},
        "--reference": {"reference": job / "reference.pt"},
    }


# fmt: off
SITUATIONS = {
    "a map of the other direction": Situation("fused.pt", EXPERTS, lambda _: {"--inverse": {"inverse": True}}),
    "a map that goes back already": Situation(
        "apart.pt", {**EXPERTS, "inverse": True}, lambda _: {"--no-inverse": {"inverse": False}}),
    "ids of the new model": Situation("ids.pt", EXPERTS, order),
    "ids of the new model, in DCP": Situation("ids.pt", {**EXPERTS, "to": "sharded", "world_size": 2}, order),
    "ids of the optimizer alone": Situation("ids.pt", {**EXPERTS, "only": "optim"}, order),
    "a name that no map has": Situation(
        "apart.pt", {"map": "experts"}, lambda job: {"--map": {"map": job / "experts.toml"}}),
    "parameters without a rule": Situation(
        "apart.pt", {"map": "strict.toml"}, lambda _: {"--exclude": {"exclude": ["*.router.*", "head.*"]}}),
    "a number that is unknown": Situation(
        "apart.pt", {"map": "halves.toml"},
        lambda job: {"--map-value": {"map_value": {"half": 11}}, "--reference": {"reference": job / "base"}}),
    "a number that a map does not have": Situation(
        "apart.pt", {**EXPERTS, "map_value": {"half": 11}}, lambda _: {"--map-value": {"map_value": None}}),
    "a number that is none": Situation(
        "apart.pt", {"map": "halves.toml", "map_value": {"half": 0}},
        lambda _: {"--map-value": {"map_value": {"half": 11}}}),
    "a number that contradicts the configuration": Situation(
        "apart.pt", {"map": "halves.toml", "map_value": {"half": 1}, "reference": "base"},
        lambda _: {"--map-value": {"map_value": None}}),
    "a number without a map": Situation(
        "apart.pt", {"map_value": {"half": 11}},
        lambda job: {"--map-value": {"map_value": None}, "--map": {"map": job / "halves.toml"}}),
    "the other direction of no map": Situation(
        "fused.pt", {"inverse": True},
        lambda job: {"--inverse": {"inverse": False}, "--map": {"map": job / "experts.toml"}}),
    "states that cannot be joined": Situation("untrained.pt", EXPERTS, lambda _: {"--only": {"only": "model"}}),
    "a flattened target of unknown modules": Situation("apart.pt", FLAT, lambda job: {
        "--unit": {"unit": ["blocks.*"], "parameters": job / "names.txt"},
        "--units": {"units": job / "new" / "units.json", "unit": ["blocks.*"]}}),
    "a flattened target in an unknown order": Situation("apart.pt", {**FLAT, "unit": ["none"]}, lambda job: {
        "--parameters": {"parameters": job / "names.txt"}, "--reference": {"reference": job / "reference.pt"},
        "--units": {"units": job / "new" / "units.json"}}),
}
# fmt: on


def in_job(options: Options, job: Path) -> Options:
    """``options`` with the files of ``job``; None takes an option away."""
    named = {name: value for name, value in options.items() if name in ("map", "reference")}
    files = {name: job / value for name, value in named.items() if isinstance(value, str) and value != "experts"}
    return {name: value for name, value in {**options, **files}.items() if value is not None}


@pytest.mark.parametrize("name", SITUATIONS)
def test_every_way_that_an_error_about_a_map_names_leads_on(name: str, job: Path) -> None:
    situation = SITUATIONS[name]
    suffix = "" if "to" in situation.options else ".pt"
    with pytest.raises(FsdpckptError) as asked:
        fsdpckpt.convert(job / situation.source, job / f"asked{suffix}", **in_job(situation.options, job))

    def follow(number: int, given: Options) -> None:
        options = in_job({**situation.options, **given}, job)
        fsdpckpt.convert(job / situation.source, job / f"{number}{suffix}", **options)

    require_ways_on(asked.value, situation.ways(job), follow)


def test_a_rule_for_what_options_leave_out_is_not_one_of_another_model(job: Path) -> None:
    fsdpckpt.convert(job / "apart.pt", job / "out.pt", map=job / "experts.toml", exclude=["embed.*"])
    fsdpckpt.convert(job / "fused.pt", job / "less.pt", exclude=["tokens.*"])
    assert fsdpckpt.diff(job / "out.pt", job / "less.pt").same


def test_a_map_that_has_nothing_to_do_says_so(job: Path) -> None:
    report = fsdpckpt.convert(job / "apart.pt", job / "none.pt", map=job / "experts.toml", include=["head.*"])
    (note,) = [note.message for note in report.notes if "experts.toml" in note.message]
    assert note.endswith("experts.toml had no effect: its rules name nothing of what is converted")
