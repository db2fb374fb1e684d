"""What an error about names, units and order proposes, and what comes of it: each way is followed, word by word.

A situation is an error. Every option that its next step names is then given: the conversion
succeeds, or asks for something else. An option that is refused, or a question that is asked again, is bad advice.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

import fsdpckpt
from fsdpckpt.errors import FsdpckptError
from tests.advice import require_ways_on
from tests.converters.jobs import RANK_FILES, Job, listed

pytestmark = pytest.mark.filterwarnings("ignore")

Options = dict[str, Any]
BY_NAME: Options = {"to": "full", "key_type": "name"}
BY_ID: Options = {"to": "full", "key_type": "id"}
FLAT: Options = {"to": "flattened", "world_size": 2}
RANKS: Options = {**RANK_FILES, "world_size": 2}
TABLE: Options = {"buffers": ["*.table"]}
WRAPPED: Options = {"unit": ["layers.*"], "use_orig_params": True}


class Model(nn.Module):
    """Vectors of one shape: of two trained layers, of a frozen one, and of a buffer."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        torch.manual_seed(width)
        self.layers = nn.ModuleList([nn.Linear(width, width), nn.LayerNorm(width)])
        self.layers[0].bias.requires_grad_(requires_grad=False)
        self.layers[1].register_buffer("table", torch.randn(width))


WEIGHT, BIAS, GAIN, OFFSET = [name for name, _ in Model().named_parameters()]


def save_job(model: Model, name: str, groups: list[list[str]], *, frozen: bool = True) -> Job:
    """``NAME.json``: what it says of its parameters. ``frozen``: one has no states."""
    if not frozen:
        model.requires_grad_(requires_grad=True)
    job = Job(model, groups)
    fsdpckpt.save_parameter_order(model, job.optimizer, f"{name}.json")
    return job


def save_one_model() -> None:
    """One group without the frozen parameter; and as ``two-*`` two groups of all parameters, and flat shards of it."""
    for prefix, groups in (("", [[WEIGHT, GAIN, OFFSET]]), ("two-", [[BIAS, GAIN], [WEIGHT, OFFSET]])):
        job = save_job(Model(), f"{prefix}order", groups, frozen=not prefix)
        torch.save(job.saved(), f"{prefix}full.pt")
        torch.save(job.saved("name"), f"{prefix}named.pt")
        torch.save({"optimizer": job.ids}, f"{prefix}optim.pt")
        listed(groups, f"{prefix}order.txt")
        if prefix:
            continue
        torch.save({"model": job.model, "optimizer": {"state": job.named()["state"]}}, "no-groups.pt")
        in_order = job.named()
        in_order["param_groups"][0]["params"].sort()
        torch.save({"optimizer": in_order}, "sorted-optim.pt")
    listed([[WEIGHT, BIAS, GAIN, OFFSET]], "model.txt")
    fsdpckpt.convert("two-full.pt", "flat", **FLAT, **WRAPPED, **TABLE, units="two-order.json")
    Path("flat/fsdpckpt.json").rename("flat-units.json")
    for path in Path("flat").glob("model*"):
        path.unlink()
    fsdpckpt.convert("named.pt", "model.safetensors", only="model")
    fsdpckpt.convert("named.pt", "ranks", **RANKS, **TABLE)


def save_actor_and_critic() -> None:
    """``both-*``: an actor whose optimizer lists the last module first, and a critic."""
    groups = [[OFFSET, GAIN], [WEIGHT]]
    jobs = {section: save_job(Model(width), section, groups) for section, width in (("actor", 4), ("critic", 6))}
    torch.save({section: job.saved() for section, job in jobs.items()}, "both-ids.pt")
    named = {section: job.saved("name") for section, job in jobs.items()}
    torch.save(named, "both-named.pt")
    dcp.save(named, checkpoint_id="both-dcp")
    listed([[f"{section}.{name}" for name in group] for section in jobs for group in groups], "both-order.txt")
    listed([[f"{section}.{name}" for section in jobs for name in (WEIGHT, BIAS, GAIN, OFFSET)]], "both-model.txt")
    fsdpckpt.convert("both-named.pt", "both-ranks", **RANKS, **TABLE)
    fsdpckpt.convert("both-named.pt", "both-flat", **FLAT, **WRAPPED, **TABLE)


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of all files that the situations name."""
    directory = tmp_path_factory.mktemp("job")
    with pytest.MonkeyPatch.context() as there:
        there.chdir(directory)
        save_one_model()
        save_actor_and_critic()
    return directory


@dataclass(frozen=True)
class Situation:
    """``source`` converted with ``options``. ``ways``: for each option that is advised what a user gives."""

    source: str
    options: Options
    ways: dict[str, Options]


def by(**given: Any) -> dict[str, Options]:
    """Ways of which each gives its own option alone."""
    return {f"--{name.replace('_', '-')}": {name: value} for name, value in given.items()}


ORDER = by(parameters="order.txt", units="order.json")
TWO_ORDER = by(parameters="two-order.txt", reference="two-named.pt", units="two-order.json")
ORIG = by(use_orig_params=True)
ACTOR: Options = {"only": "optim:actor"}
IDS_OF_ACTOR = {
    **by(parameters="both-order.txt", reference="both-named.pt"),
    "--units": {"units": "actor.json", **ACTOR},
    "--only": {"parameters": "both-order.txt", **ACTOR},
}
BUFFERS_OF_BOTH = {
    **by(**TABLE, reference="both-ranks"),
    "--units": {"units": "actor.json", **ACTOR},
    "--only": {"units": "actor.json", **ACTOR},
    "--parameters": {"parameters": "both-model.txt", **ACTOR, **TABLE},
}
PLAIN: Options = {"flavor": "plain", "to": "sharded"}

# fmt: off
ONE: dict[str, Situation] = {
    "ids of groups that look alike": Situation("two-full.pt", BY_NAME, TWO_ORDER),
    "a buffer and a frozen parameter that look like trained ones": Situation("full.pt", BY_NAME, by(**TABLE) | ORDER),
    "an optimizer without its model": Situation("optim.pt", BY_NAME, by(reference="named.pt") | ORDER),
    "no model, and two groups": Situation("two-optim.pt", BY_NAME, TWO_ORDER),
    "flat slices that nothing names": Situation(
        "flat", BY_NAME, by(reference="two-named.pt", units="flat-units.json")),
    "flat slices of unknown modules": Situation(
        "flat", BY_NAME | {"reference": "two-named.pt"} | TABLE, by(unit=["layers.*"], units="flat-units.json")),
    "a target whose modules are unknown": Situation(
        "two-named.pt", FLAT, by(unit=["layers.*"], units="flat-units.json")),
    "a target whose use_orig_params is unknown": Situation(
        "named.pt", FLAT | {"unit": ["layers.*"]}, ORIG | {"--no-use-orig-params": {"use_orig_params": False}}),
    "a flat target of what may be buffers": Situation(
        "two-named.pt", FLAT | WRAPPED, by(**TABLE, parameters="model.txt", units="flat-units.json")),
    "a flat target of sorted names": Situation(
        "model.safetensors", FLAT | WRAPPED | TABLE,
        by(parameters="model.txt", reference="named.pt", units="flat-units.json")),
    "rank files of what may be buffers": Situation(
        "named.pt", RANKS, by(**TABLE, reference="ranks", units="order.json")),
    "a key type that flat parameters cannot have": Situation(
        "named.pt", FLAT | {"unit": ["none"], "use_orig_params": False, "key_type": "name", "only": "optim",
                            "parameters": "order.txt"},
        by(key_type=None) | ORIG),
    "flat slices of a buffer or a parameter": Situation(
        "flat", BY_NAME | {"reference": "two-named.pt", "unit": ["layers.*"]},
        by(parameters="model.txt", units="flat-units.json")),
    "ids, and names that are in no order": Situation(
        "optim.pt", BY_NAME | {"reference": "model.safetensors"}, by(**TABLE, reference="named.pt") | ORDER),
    "names that were sorted, for ids": Situation("sorted-optim.pt", BY_ID, by(reference="named.pt") | ORDER),
    "an optimizer without groups, for ids": Situation("no-groups.pt", BY_ID, ORDER),
    "sharding groups of unknown size": Situation(
        "two-named.pt", FLAT | {"units": "flat-units.json", "strategy": "hybrid-shard", "world_size": 4},
        by(shard_size=2)),
    "a flat parameter in two groups": Situation(
        "two-named.pt", FLAT | {"unit": ["layers.*"], "use_orig_params": False} | TABLE, ORIG),
    "a flat parameter of which a part has no state": Situation(
        "named.pt", FLAT | {"unit": ["none"], "use_orig_params": False, "parameters": "model.txt"}, ORIG),
}

SEVERAL: dict[str, Situation] = {
    "ids of two optimizers": Situation("both-ids.pt", BY_NAME, IDS_OF_ACTOR),
    "ids of two optimizers, for rank files": Situation(
        "both-ids.pt", RANKS | {"key_type": "name"} | TABLE, IDS_OF_ACTOR),
    "ids of two optimizers, for flat parameters": Situation("both-ids.pt", FLAT | WRAPPED | TABLE, IDS_OF_ACTOR),
    "buffers of two models, for rank files": Situation("both-named.pt", RANKS, BUFFERS_OF_BOTH),
    "buffers of two models of a DCP directory": Situation("both-dcp", RANKS, BUFFERS_OF_BOTH),
    "modules of two models": Situation("both-named.pt", FLAT | {"use_orig_params": True} | TABLE, {
        **by(unit=["layers.*"], units="both-flat/fsdpckpt.json"),
        "--only": {"only": "model:actor", "unit": ["layers.*"]},
        "--parameters": {"parameters": "both-model.txt", "unit": ["layers.*"], "buffers": ()}}),
    "a framework with one model": Situation("both-named.pt", {"flavor": "verl", "world_size": 2} | TABLE, {
        "--only": {"only": "model:actor"}, "--flavor": PLAIN, "--to": PLAIN}),
}
# fmt: on


@pytest.mark.parametrize("name", [*ONE, *SEVERAL])
def test_every_way_that_an_error_names_leads_on(
    name: str, job: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    situation = ONE.get(name) or SEVERAL[name]
    suffix = ".pt" if situation.options.get("to") == "full" else ""
    monkeypatch.chdir(job)
    with pytest.raises(FsdpckptError) as asked:
        fsdpckpt.convert(situation.source, tmp_path / f"out{suffix}", **situation.options)

    def follow(number: int, given: Options) -> None:
        fsdpckpt.convert(situation.source, tmp_path / f"{number}{suffix}", **{**situation.options, **given})

    require_ways_on(asked.value, situation.ways, follow, alternative=name in SEVERAL)
