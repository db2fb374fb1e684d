"""What errors about one of several models or optimizers propose: each way is followed, as in ``test_advice``."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

import fsdpckpt
from fsdpckpt.errors import FsdpckptError, NeedsInformationError
from tests.converters.test_advice import FLAT, RANK_FILES, Job, Options, Situation, in_job

pytestmark = pytest.mark.filterwarnings("ignore")

BY_NAME: Options = {"to": "full", "key_type": "name"}


class Model(nn.Module):
    """Vectors of one shape: of two trained layers, of a frozen one, and of a buffer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(width, width), nn.LayerNorm(width)])
        self.layers[0].bias.requires_grad_(requires_grad=False)
        self.layers[1].register_buffer("table", torch.randn(width))


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Job:
    """``two.pt`` (by id), ``named.pt``, ``dcp``: an actor whose optimizer lists the last module first, and a critic."""
    directory = tmp_path_factory.mktemp("sections")
    ids: dict[str, Any] = {}
    named: dict[str, Any] = {}
    lines: list[str] = []
    for section, width in (("actor", 4), ("critic", 6)):
        torch.manual_seed(width)
        model = Model(width)
        trained = {name: param for name, param in model.named_parameters() if param.requires_grad}
        groups = [list(trained)[:0:-1], list(trained)[:1]]
        optimizer = torch.optim.AdamW(
            [{"params": [trained[name] for name in group]} for group in groups], foreach=False
        )
        for param in trained.values():
            param.grad = torch.randn_like(param)
        optimizer.step()
        content = optimizer.state_dict()
        by_name = {
            "state": {name: optimizer.state[param] for name, param in trained.items()},
            "param_groups": [
                {**group, "params": names} for group, names in zip(content["param_groups"], groups, strict=True)
            ],
        }
        ids[section] = {"model": model.state_dict(), "optimizer": content}
        named[section] = {"model": model.state_dict(), "optimizer": by_name}
        lines += ["\n".join(f"{section}.{name}" for name in group) for group in groups]
        fsdpckpt.save_parameter_order(model, optimizer, directory / f"{section}.json")
    torch.save(ids, directory / "two.pt")
    torch.save(named, directory / "named.pt")
    dcp.save(named, checkpoint_id=str(directory / "dcp"))
    (directory / "order.txt").write_text("\n\n".join(lines))
    parameters = [f"{each}.{name}" for each in ids for name, _ in Model(1).named_parameters()]
    (directory / "model.txt").write_text("\n".join(parameters))
    fsdpckpt.convert(directory / "named.pt", directory / "ranks", **RANK_FILES, buffers=["*.table"])
    wrapped: Options = {"unit": ["layers.*"], "use_orig_params": True, "buffers": ["*.table"]}
    fsdpckpt.convert(directory / "named.pt", directory / "flat", **FLAT, **wrapped)
    return Job(directory)


def ids_of_actor(job: Job) -> dict[str, Options]:
    return {
        "--parameters": {"parameters": job / "order.txt"},
        "--reference": {"reference": job / "named.pt"},
        "--units": {"units": job / "actor.json", "only": "optim:actor"},
        "--only": {"only": "optim:actor", "parameters": job / "order.txt"},
    }


def buffers_of_both(job: Job) -> dict[str, Options]:
    return {
        "--buffers": {"buffers": ["*.table"]},
        "--reference": {"reference": job / "ranks"},
        "--units": {"units": job / "actor.json", "only": "optim:actor"},
        "--only": {"only": "optim:actor", "units": job / "actor.json"},
        "--parameters": {"only": "optim:actor", "parameters": job / "model.txt", "buffers": ["*.table"]},
    }


SITUATIONS = {
    "ids of two optimizers": Situation("two.pt", BY_NAME, ids_of_actor),
    "ids of two optimizers, for rank files": Situation(
        "two.pt", RANK_FILES | {"key_type": "name", "buffers": ["*.table"]}, ids_of_actor, target="out"
    ),
    "ids of two optimizers, for flat parameters": Situation(
        "two.pt",
        FLAT | {"unit": ["layers.*"], "use_orig_params": True, "buffers": ["*.table"]},
        ids_of_actor,
        target="out",
    ),
    "buffers of two models, for rank files": Situation("named.pt", RANK_FILES, buffers_of_both, target="out"),
    "buffers of two models of a DCP directory": Situation("dcp", RANK_FILES, buffers_of_both, target="out"),
    "modules of two models": Situation(
        "named.pt",
        FLAT | {"use_orig_params": True, "buffers": ["*.table"]},
        lambda job: {
            "--unit": {"unit": ["layers.*"]},
            "--units": {"units": job / "flat" / "fsdpckpt.json"},
            "--only": {"only": "model:actor", "unit": ["layers.*"]},
            "--parameters": {"parameters": job / "model.txt", "unit": ["layers.*"], "buffers": ()},
        },
        target="out",
    ),
    "a framework with one model": Situation(
        "named.pt",
        {"flavor": "verl", "world_size": 2, "buffers": ["*.table"]},
        lambda _: {
            "--only": {"only": "model:actor"},
            "--flavor": {"flavor": "plain", "to": "sharded"},
            "--to": {"flavor": "plain", "to": "sharded"},
        },
        target="out",
    ),
}


@pytest.mark.parametrize("name", SITUATIONS)
def test_every_way_that_an_error_about_a_section_names_leads_on(name: str, job: Job, tmp_path: Path) -> None:
    situation = SITUATIONS[name]
    options = in_job(situation.options, job)
    with pytest.raises(FsdpckptError) as asked:
        fsdpckpt.convert(job / situation.source, tmp_path / situation.target, **options)
    ways = situation.ways(job)
    advice = f"{asked.value.next_step} {asked.value.alternative or ''}"
    named = set(re.findall(r"--[a-z][a-z-]*", re.sub(r"`fsdpckpt units .*?`", "", advice)))
    assert named == ways.keys(), asked.value
    for number, (way, given) in enumerate(ways.items()):
        target = tmp_path / f"{number}{situation.target}"
        try:
            fsdpckpt.convert(job / situation.source, target, **{**options, **given})
        except NeedsInformationError as error:
            assert way not in re.findall(r"--[a-z][a-z-]*", str(error.next_step)), (way, error)
