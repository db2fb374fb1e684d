"""What an error about names, units and order proposes, and what comes of it: each way is followed, word by word.

A situation is an error. Every option that its next step names is then given: the conversion
succeeds, or asks for something else. An option that is refused, or a question that is asked again, is bad advice.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fsdpckpt
from fsdpckpt.errors import FsdpckptError
from tests.advice import require_ways_on

Options = dict[str, Any]
FLAT: Options = {"to": "flattened", "world_size": 2}
RANK_FILES: Options = {"to": "sharded", "container": "torch", "world_size": 2}


class Model(nn.Module):
    """A buffer and a frozen parameter that look like trained ones of the same layers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(6)
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.LayerNorm(4)])
        self.layers[0].bias.requires_grad_(requires_grad=False)
        self.layers[1].register_buffer("table", torch.randn(4))


@dataclass(frozen=True)
class Job:
    """The files of one job in ``at``: ``full.pt``, and what else a user may have."""

    at: Path

    def __truediv__(self, name: str) -> Path:
        return self.at / name


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Job:
    """One group without the frozen parameter; and as ``two-*`` two groups of all parameters, and flat shards of it."""
    directory = tmp_path_factory.mktemp("job")
    for prefix in ("", "two-"):
        model = Model()
        vectors = [param for param in model.parameters() if param.ndim == 1]
        trained = [param for param in model.parameters() if param.requires_grad]
        groups = [{"params": trained}]
        if prefix:
            groups = [{"params": vectors[:2]}, {"params": [model.layers[0].weight, *vectors[2:]]}]
        optimizer = torch.optim.AdamW(groups, foreach=False)
        for param in model.parameters():
            param.grad = torch.randn_like(param)
        optimizer.step()
        names = {param: name for name, param in model.named_parameters()}
        listed = [[names[param] for param in group["params"]] for group in groups]
        content = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        by_name = {
            "state": {name: optimizer.state[param] for param, name in names.items() if param in optimizer.state},
            "param_groups": [
                {**group, "params": of_group}
                for group, of_group in zip(content["optimizer"]["param_groups"], listed, strict=True)
            ],
        }
        torch.save(content, directory / f"{prefix}full.pt")
        torch.save({"model": content["model"], "optimizer": by_name}, directory / f"{prefix}named.pt")
        torch.save({"optimizer": content["optimizer"]}, directory / f"{prefix}optim.pt")
        (directory / f"{prefix}order.txt").write_text("\n\n".join("\n".join(of_group) for of_group in listed))
        fsdpckpt.save_parameter_order(model, optimizer, directory / f"{prefix}order.json")
    (directory / "model.txt").write_text("\n".join(name for name, _ in Model().named_parameters()))
    wrapping: Options = {"unit": ["layers.*"], "use_orig_params": True, "buffers": ["*.table"]}
    fsdpckpt.convert(
        directory / "two-full.pt", directory / "flat", **FLAT, **wrapping, units=directory / "two-order.json"
    )
    manifest = directory / "flat" / "fsdpckpt.json"
    manifest.rename(directory / "flat-units.json")
    for path in (directory / "flat").glob("model*"):
        path.unlink()
    fsdpckpt.convert(directory / "named.pt", directory / "model.safetensors", only="model")
    content = torch.load(directory / "named.pt", weights_only=True)
    torch.save(
        {"model": content["model"], "optimizer": {"state": content["optimizer"]["state"]}}, directory / "no-groups.pt"
    )
    (group,) = content["optimizer"]["param_groups"]
    group["params"] = sorted(group["params"])
    torch.save({"optimizer": content["optimizer"]}, directory / "sorted-optim.pt")
    fsdpckpt.convert(directory / "named.pt", directory / "ranks", **RANK_FILES, buffers=["*.table"])
    return Job(directory)


@dataclass(frozen=True)
class Situation:
    """``source`` converted with ``options``. ``ways``: for each option that the next step names what a user gives."""

    source: str
    options: Options
    ways: Callable[[Job], dict[str, Options]]
    target: str = "out.pt"


BY_NAME: Options = {"to": "full", "key_type": "name"}

SITUATIONS = {
    "ids of groups that look alike": Situation(
        "two-full.pt",
        BY_NAME,
        lambda job: {
            "--parameters": {"parameters": job / "two-order.txt"},
            "--reference": {"reference": job / "two-named.pt"},
            "--units": {"units": job / "two-order.json"},
        },
    ),
    "a buffer and a frozen parameter that look like trained ones": Situation(
        "full.pt",
        BY_NAME,
        lambda job: {
            "--buffers": {"buffers": ["*.table"]},
            "--parameters": {"parameters": job / "order.txt"},
            "--units": {"units": job / "order.json"},
        },
    ),
    "an optimizer without its model": Situation(
        "optim.pt",
        BY_NAME,
        lambda job: {
            "--reference": {"reference": job / "named.pt"},
            "--parameters": {"parameters": job / "order.txt"},
            "--units": {"units": job / "order.json"},
        },
    ),
    "no model, and two groups": Situation(
        "two-optim.pt",
        BY_NAME,
        lambda job: {
            "--reference": {"reference": job / "two-named.pt"},
            "--parameters": {"parameters": job / "two-order.txt"},
            "--units": {"units": job / "two-order.json"},
        },
    ),
    "flat slices that nothing names": Situation(
        "flat",
        BY_NAME,
        lambda job: {"--reference": {"reference": job / "two-named.pt"}, "--units": {"units": job / "flat-units.json"}},
    ),
    "flat slices of unknown modules": Situation(
        "flat",
        BY_NAME | {"reference": "two-named.pt", "buffers": ["*.table"]},
        lambda job: {"--unit": {"unit": ["layers.*"]}, "--units": {"units": job / "flat-units.json"}},
    ),
    "a target whose modules are unknown": Situation(
        "two-named.pt",
        FLAT,
        lambda job: {"--unit": {"unit": ["layers.*"]}, "--units": {"units": job / "flat-units.json"}},
        target="out",
    ),
    "a target whose use_orig_params is unknown": Situation(
        "named.pt",
        FLAT | {"unit": ["layers.*"]},
        lambda _: {
            "--use-orig-params": {"use_orig_params": True},
            "--no-use-orig-params": {"use_orig_params": False},
        },
        target="out",
    ),
    "a flat target of what may be buffers": Situation(
        "two-named.pt",
        FLAT | {"unit": ["layers.*"], "use_orig_params": True},
        lambda job: {
            "--buffers": {"buffers": ["*.table"]},
            "--parameters": {"parameters": job / "model.txt"},
            "--units": {"units": job / "flat-units.json"},
        },
        target="out",
    ),
    "a flat target of sorted names": Situation(
        "model.safetensors",
        FLAT | {"unit": ["layers.*"], "use_orig_params": True, "buffers": ["*.table"]},
        lambda job: {
            "--parameters": {"parameters": job / "model.txt"},
            "--reference": {"reference": job / "named.pt"},
            "--units": {"units": job / "flat-units.json"},
        },
        target="out",
    ),
    "rank files of what may be buffers": Situation(
        "named.pt",
        RANK_FILES,
        lambda job: {
            "--buffers": {"buffers": ["*.table"]},
            "--reference": {"reference": job / "ranks"},
            "--units": {"units": job / "order.json"},
        },
        target="out",
    ),
    "a key type that flat parameters cannot have": Situation(
        "named.pt",
        FLAT
        | {"unit": ["none"], "use_orig_params": False, "key_type": "name", "only": "optim", "parameters": "order.txt"},
        lambda _: {"--key-type": {"key_type": None}, "--use-orig-params": {"use_orig_params": True}},
        target="out",
    ),
    "flat slices of a buffer or a parameter": Situation(
        "flat",
        BY_NAME | {"reference": "two-named.pt", "unit": ["layers.*"]},
        lambda job: {"--parameters": {"parameters": job / "model.txt"}, "--units": {"units": job / "flat-units.json"}},
    ),
    "ids, and names that are in no order": Situation(
        "optim.pt",
        BY_NAME | {"reference": "model.safetensors"},
        lambda job: {
            "--buffers": {"buffers": ["*.table"]},
            "--parameters": {"parameters": job / "order.txt"},
            "--reference": {"reference": job / "named.pt"},
            "--units": {"units": job / "order.json"},
        },
    ),
    "names that were sorted, for ids": Situation(
        "sorted-optim.pt",
        {"to": "full", "key_type": "id"},
        lambda job: {
            "--parameters": {"parameters": job / "order.txt"},
            "--reference": {"reference": job / "named.pt"},
            "--units": {"units": job / "order.json"},
        },
    ),
    "an optimizer without groups, for ids": Situation(
        "no-groups.pt",
        {"to": "full", "key_type": "id"},
        lambda job: {"--parameters": {"parameters": job / "order.txt"}, "--units": {"units": job / "order.json"}},
    ),
    "sharding groups of unknown size": Situation(
        "two-named.pt",
        FLAT | {"units": "flat-units.json", "strategy": "hybrid-shard", "world_size": 4},
        lambda _: {"--shard-size": {"shard_size": 2}},
        target="out",
    ),
    "a flat parameter in two groups": Situation(
        "two-named.pt",
        FLAT | {"unit": ["layers.*"], "use_orig_params": False, "buffers": ["*.table"]},
        lambda _: {"--use-orig-params": {"use_orig_params": True}},
        target="out",
    ),
    "a flat parameter of which a part has no state": Situation(
        "named.pt",
        FLAT | {"unit": ["none"], "use_orig_params": False, "parameters": "model.txt"},
        lambda _: {"--use-orig-params": {"use_orig_params": True}},
        target="out",
    ),
}


def in_job(options: Options, job: Job) -> Options:
    files = ("reference", "parameters", "units")
    return {name: job / value if name in files and isinstance(value, str) else value for name, value in options.items()}


@pytest.mark.parametrize("name", SITUATIONS)
def test_every_way_that_an_error_names_leads_on(name: str, job: Job, tmp_path: Path) -> None:
    situation = SITUATIONS[name]
    options = in_job(situation.options, job)
    with pytest.raises(FsdpckptError) as asked:
        fsdpckpt.convert(job / situation.source, tmp_path / situation.target, **options)

    def follow(number: int, given: Options) -> None:
        target = tmp_path / f"{number}{situation.target}"
        fsdpckpt.convert(job / situation.source, target, **{**options, **given})

    require_ways_on(asked.value, situation.ways(job), follow)
