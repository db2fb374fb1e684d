"""FSDP2 rank files with the ids of ``optimizer.state_dict()``, whose groups shapes cannot tell apart.

The truth: what ``get_optimizer_state_dict`` gives the same job by name.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict

import fsdpckpt
from fsdpckpt.errors import NeedsInformationError
from tests.oracle.compare import differences, identical
from tests.oracle.fake_group import as_rank

try:
    from torch.distributed.fsdp import fully_shard
except ImportError:  # torch before 2.6
    from torch.distributed._composable.fsdp import fully_shard

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
        param.grad = torch.distributed.tensor.DTensor.from_local(local, param.device_mesh, param.placements)
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
def two_groups(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[list[str]]]:
    directory = tmp_path_factory.mktemp("two-groups")
    return directory, saved(directory)


@pytest.fixture(scope="module")
def reversed_group(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[list[str]]]:
    directory = tmp_path_factory.mktemp("reversed")
    return directory, saved(directory, reverse=True)


def full(source: Path, target: Path, **options: Any) -> Any:
    report = fsdpckpt.convert(source, target, to="full", key_type="name", overwrite=True, **options)
    return torch.load(target, weights_only=True), report


def require_truth(directory: Path, tmp_path: Path, **options: Any) -> Any:
    truth, _ = full(directory / "named", tmp_path / "truth.pt")
    found, report = full(directory / "raw", tmp_path / "found.pt", **options)
    assert not differences(found, truth)
    return report


def listed(path: Path, groups: list[list[str]], between: str = "") -> Path:
    path.write_text(between.join("".join(f"{name}\n" for name in group) for group in groups))
    return path


@pytest.mark.parametrize("way", ["reference", "units", "list", "list with blank lines"])
@pytest.mark.parametrize("groups", ["two_groups", "reversed_group"])
def test_each_way_to_say_the_order_gives_the_names_of_the_job(
    groups: str, way: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """What is asked for without one, and what else a list may be, is in ``tests/transform/test_ids_and_names.py``."""
    directory, names = request.getfixturevalue(groups)
    between = "\n" if "blank" in way else ""
    ways: dict[str, Any] = {
        "reference": {"reference": directory / "named"},
        "units": {"units": directory / "order.json"},
    }
    given = ways.get(way) or {"parameters": listed(tmp_path / "order", names, between)}
    require_truth(directory, tmp_path, **given)


def test_what_the_job_saved_of_its_parameters_names_the_ids_and_tells_parameters_from_buffers(
    two_groups: tuple[Path, list[list[str]]], tmp_path: Path
) -> None:
    directory, _ = two_groups
    require_truth(directory, tmp_path, units=directory / "order.json")
    beside = tmp_path / "beside"
    shutil.copytree(directory / "raw", beside)
    shutil.copy(directory / "order.json", beside / "units.json")
    found, _ = full(beside, tmp_path / "found.pt")
    truth, _ = full(directory / "named", tmp_path / "truth.pt")
    assert not differences(found, truth)
    # A full file of the model alone: every parameter is cut, as FSDP2 does, without --buffers.
    torch.save(truth["model"], tmp_path / "model.pt")
    options = {"to": "sharded", "container": "torch", "world_size": 2}
    fsdpckpt.convert(tmp_path / "model.pt", tmp_path / "cut", units=directory / "order.json", **options)
    with as_rank(0, RANKS):
        cut = torch.load(tmp_path / "cut" / "model_world_size_2_rank_0.pt", weights_only=False)
        assert {type(value) for value in cut.values()} == {torch.distributed.tensor.DTensor}


@pytest.mark.parametrize("orig", [True, False])
def test_its_order_serves_flat_shards_too_which_then_need_only_the_wrapping(
    orig: bool, two_groups: tuple[Path, list[list[str]]], tmp_path: Path
) -> None:
    directory, groups = two_groups
    options = {"to": "flattened", "world_size": 2, "use_orig_params": orig, "units": directory / "order.json"}
    with pytest.raises(NeedsInformationError, match="cannot tell which modules"):
        fsdpckpt.convert(directory / "raw", tmp_path / "flat", **options)
    fsdpckpt.convert(directory / "raw", tmp_path / "flat", unit=["0", "1", "2", "3"], key_type="id", **options)
    ids = torch.load(tmp_path / "flat" / "optim_world_size_2_rank_0.pt", weights_only=True)
    assert [len(group["params"]) for group in ids["param_groups"]] == ([4, 4] if orig else [2, 2])
    found, _ = full(tmp_path / "flat", tmp_path / "found.pt")
    assert [group["params"] for group in found["optimizer"]["param_groups"]] == (
        groups if orig else [["0.weight", "0.bias", "2.weight", "2.bias"], groups[1]]
    )
    truth, _ = full(directory / "named", tmp_path / "truth.pt")
    assert not differences(found["optimizer"]["state"], truth["optimizer"]["state"])


def test_a_list_and_units_agree_where_there_is_no_model(
    two_groups: tuple[Path, list[list[str]]], tmp_path: Path
) -> None:
    """The units have the model's order, so the list is seen to be the optimizer's own."""
    directory, groups = two_groups
    for path in (directory / "raw").glob("optim*"):
        (tmp_path / "optim").mkdir(exist_ok=True)
        shutil.copy(path, tmp_path / "optim")
    truth, _ = full(directory / "named", tmp_path / "truth.pt", only="optim")
    given = {"units": directory / "order.json", "parameters": listed(tmp_path / "order", groups)}
    found, _ = full(tmp_path / "optim", tmp_path / "found.pt", **given)
    assert not differences(found["optimizer"], truth)


def test_names_that_ddp_saved_with_its_prefix_are_the_same_parameters(tmp_path: Path) -> None:
    """``ddp_model.state_dict()`` has ``module.`` before every name; the model inside of it has not."""
    with as_rank(0, RANKS):
        model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4)))
        inner = model.module
        groups = [[*inner[2].parameters(), *inner[0].parameters()], list(inner[1].parameters())]
        optimizer = torch.optim.AdamW([{"params": group} for group in groups], foreach=False)
        for param in model.parameters():
            param.grad = torch.randn_like(param)
        optimizer.step()
        fsdpckpt.save_parameter_order(model, optimizer, tmp_path / "order.json")
    names = {param: name for name, param in inner.named_parameters()}
    in_order = [[names[param] for param in group] for group in groups]
    moments = {name: optimizer.state[param]["exp_avg"] for param, name in names.items()}
    listed(tmp_path / "bare.txt", in_order)
    listed(tmp_path / "module.txt", [[f"module.{name}" for name in group] for group in in_order])
    for prefix, weights in (("module.", model.state_dict()), ("", inner.state_dict())):
        source = tmp_path / "source.pt"
        torch.save({"model": weights, "optimizer": optimizer.state_dict()}, source)
        ways: list[Any] = [{"units": tmp_path / "order.json"}]
        ways += [{"parameters": tmp_path / "bare.txt"}, {"parameters": tmp_path / "module.txt"}]
        ways += [{"reference": tmp_path / "named.pt"}] if (tmp_path / "named.pt").exists() else []
        for way in ways:
            found, _ = full(source, tmp_path / "found.pt", **way)
            assert {name: entry["exp_avg"] for name, entry in found["optimizer"]["state"].items()}.keys() == {
                prefix + name for name in moments
            }
            for name, moment in moments.items():
                assert identical(found["optimizer"]["state"][prefix + name]["exp_avg"], moment), (prefix, way, name)
        shutil.copy(tmp_path / "found.pt", tmp_path / "named.pt")
