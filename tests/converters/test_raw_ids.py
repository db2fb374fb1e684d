"""FSDP2 rank files with the ids of ``optimizer.state_dict()``, whose groups shapes cannot tell apart.

The truth: what ``get_optimizer_state_dict`` gives the same job by name.
"""

from __future__ import annotations

import shutil
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import fsdpckpt
from fsdpckpt.errors import NeedsInformationError
from tests.converters.jobs import Job, converted, listed, refused, save, states
from tests.oracle.compare import require_identical
from tests.oracle.fake_group import as_rank

pytestmark = pytest.mark.filterwarnings("ignore")

RANKS = 2


def job(*, reverse: bool = False) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Linear and norm layers of one width: biases, gains and offsets look alike. Norms are a group of their own.

    ``reverse``: a single group that lists the parameters from the last to the first.
    """
    torch.manual_seed(4)
    model = nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6), nn.Linear(6, 6), nn.LayerNorm(6))
    generator = torch.Generator().manual_seed(8)
    gradients = {name: torch.randn(param.shape, generator=generator) for name, param in model.named_parameters()}
    fully_shard(model)
    groups: list[dict[str, Any]] = [
        {"params": [*model[2].parameters(), *model[0].parameters()]},
        {"params": [*model[1].parameters(), *model[3].parameters()], "weight_decay": 0.0},
    ]
    if reverse:
        groups = [{"params": list(model.parameters())[::-1]}]
    optimizer = torch.optim.AdamW(groups, lr=1e-2, foreach=False)
    for name, param in model.named_parameters():
        local = gradients[name].chunk(RANKS)[torch.distributed.get_rank()]
        param.grad = DTensor.from_local(local, param.device_mesh, param.placements)
    optimizer.step()
    return model, optimizer


def saved(directory: Path, **how: Any) -> list[list[str]]:
    """``raw``: rank files with ids; ``named``: the same by name. Returns the names of each group in its order."""
    for form in ("raw", "named"):
        (directory / form).mkdir()
    for rank in range(RANKS):
        with as_rank(rank, RANKS):
            model, optimizer = job(**how)
            file = f"world_size_{RANKS}_rank_{rank}.pt"
            named = get_optimizer_state_dict(model, optimizer)
            for form, optim in (("raw", optimizer.state_dict()), ("named", named)):
                torch.save(get_model_state_dict(model), directory / form / f"model_{file}")
                torch.save(optim, directory / form / f"optim_{file}")
            fsdpckpt.save_parameter_order(model, optimizer, directory / "order.json")
    return [group["params"] for group in named["param_groups"]]


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, tuple[Path, list[list[str]]]]:
    """A job with two groups, and one with a single group that is reversed."""
    folders = {reverse: tmp_path_factory.mktemp("job") for reverse in (False, True)}
    return {reverse: (folder, saved(folder, reverse=reverse)) for reverse, folder in folders.items()}


def full(source: Path | str, target: str, **options: Any) -> Any:
    return converted(source, target, to="full", key_type="name", overwrite=True, **options)


@pytest.mark.parametrize("reverse", [False, True], ids=["two groups", "reversed"])
def test_each_way_to_say_the_order_gives_the_names_of_the_job(reverse: bool, jobs: Any) -> None:
    """What is asked for without one, and what else a list may be, is in ``tests/transform/test_ids_and_names.py``."""
    directory, names = jobs[reverse]
    shutil.copytree(directory / "raw", "beside")
    shutil.copy(directory / "order.json", "beside/units.json")
    ways: dict[str, Any] = {
        "reference": {"reference": directory / "named"},
        "units": {"units": directory / "order.json"},
        "units beside it": {},
        "a list": {"parameters": listed([chain(*names)], "one.txt")},
        "a list with blank lines": {"parameters": listed(names, "groups.txt")},
    }
    truth = full(directory / "named", "truth.pt")
    for way, given in ways.items():
        require_identical(full("beside" if not given else directory / "raw", "found.pt", **given), truth, way)
    # The optimizer alone: the units have the model's order, so the list is seen to be the optimizer's own.
    Path("optim").mkdir()
    for path in (directory / "raw").glob("optim*"):
        shutil.copy(path, "optim")
    given = {"units": directory / "order.json", "parameters": "groups.txt"}
    require_identical(full("optim", "found.pt", **given)["optimizer"], truth["optimizer"])


def test_what_the_job_saved_of_its_parameters_tells_them_from_buffers(jobs: Any) -> None:
    """A full file of the model alone: every parameter is cut, as FSDP2 does, without ``--buffers``."""
    directory, _ = jobs[False]
    save(full(directory / "named", "truth.pt")["model"], "model.pt")
    options = {"to": "sharded", "container": "torch", "world_size": 2, "units": directory / "order.json"}
    fsdpckpt.convert("model.pt", "cut", **options)
    with as_rank(0, RANKS):
        cut = torch.load("cut/model_world_size_2_rank_0.pt")
        assert {type(value) for value in cut.values()} == {DTensor}


@pytest.mark.parametrize("orig", [True, False])
def test_its_order_serves_flat_shards_too_which_then_need_only_the_wrapping(orig: bool, jobs: Any) -> None:
    directory, groups = jobs[False]
    raw, units = directory / "raw", directory / "order.json"
    options = {"to": "flattened", "world_size": 2, "use_orig_params": orig, "units": units}
    refused(NeedsInformationError, "cannot tell which modules", raw, "flat", **options)
    fsdpckpt.convert(raw, "flat", unit=["0", "1", "2", "3"], key_type="id", **options)
    ids = torch.load("flat/optim_world_size_2_rank_0.pt")
    assert [len(group["params"]) for group in ids["param_groups"]] == ([4, 4] if orig else [2, 2])
    found = full("flat", "found.pt")["optimizer"]
    assert [group["params"] for group in found["param_groups"]] == (
        groups if orig else [["0.weight", "0.bias", "2.weight", "2.bias"], groups[1]]
    )
    require_identical(found["state"], full(directory / "named", "truth.pt")["optimizer"]["state"])


def test_names_that_ddp_saved_with_its_prefix_are_the_same_parameters() -> None:
    """``ddp_model.state_dict()`` has ``module.`` before every name; the model inside of it has not."""
    groups = [["2.weight", "2.bias", "0.weight", "0.bias"], ["1.weight", "1.bias"]]
    with as_rank(0, RANKS):
        model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4)))
        job = Job(model.module, groups)
        fsdpckpt.save_parameter_order(model, job.optimizer, "order.json")
        weights = {"module.": model.state_dict(), "": model.module.state_dict()}
    listed(groups, "bare.txt")
    listed([[f"module.{name}" for name in group] for group in groups], "module.txt")
    ways: list[Any] = [{"units": "order.json"}, {"parameters": "bare.txt"}, {"parameters": "module.txt"}]
    for prefix, held in weights.items():
        save({"model": held, "optimizer": job.ids})
        for way in ways:
            require_identical(
                states(full("source.pt", "found.pt", **way)), job.named(prefix)["state"], f"{prefix} {way}"
            )
        shutil.copy("found.pt", "named.pt")
        ways.append({"reference": "named.pt"})
