"""A NO_SHARD unit in a sharded model, held against what FSDP1's own ``SHARDED_STATE_DICT`` has of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    ShardingStrategy,
    StateDictType,
)

import fsdpckpt
from tests.oracle.compare import identical
from tests.oracle.fake_group import as_rank

pytestmark = pytest.mark.filterwarnings("ignore")

RANKS = 2
FULL, WHOLE = ShardingStrategy.FULL_SHARD, ShardingStrategy.NO_SHARD


def built() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5, bias=False), nn.Linear(5, 4, bias=False), nn.Linear(4, 3))


def stepped(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    return optimizer


def wrapped(strategies: tuple[ShardingStrategy, ...], *, orig: bool) -> nn.Module:
    """The root and the last two modules as units with these strategies. Each rank holds elements of every parameter."""

    def unit(module: nn.Module, strategy: ShardingStrategy) -> nn.Module:
        device = torch.device("cpu")
        return FullyShardedDataParallel(module, sharding_strategy=strategy, use_orig_params=orig, device_id=device)

    model, (root, *strategies_of_units) = built(), strategies
    for number, strategy in enumerate(strategies_of_units, start=1):
        model[number] = unit(model[number], strategy)
    return unit(model, root)


def fsdps_own(strategies: tuple[ShardingStrategy, ...], *, orig: bool, units: Path) -> tuple[Any, Any]:
    """Rank 0's sharded state dicts; writes the units file."""
    with as_rank(0, RANKS):
        model = wrapped(strategies, orig=orig)
        optimizer = stepped(model)
        fsdpckpt.save_units(model, optimizer, units)
        settings = ShardedStateDictConfig(), ShardedOptimStateDictConfig()
        with FullyShardedDataParallel.state_dict_type(model, StateDictType.SHARDED_STATE_DICT, *settings):
            return model.state_dict(), FullyShardedDataParallel.optim_state_dict(model, optimizer)


def truth(path: Path) -> tuple[Any, Any]:
    """The model and optimizer of a job without FSDP, which are saved to ``path``."""
    model = built()
    optimizer = stepped(model)
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)
    states = optimizer.state_dict()["state"]
    return model.state_dict(), {name: states[number] for number, (name, _) in enumerate(model.named_parameters())}


def rank_file(directory: Path, section: str) -> Any:
    with as_rank(0, RANKS):
        return torch.load(directory / f"{section}_world_size_{RANKS}_rank_0.pt", weights_only=False)


def types(values: Any) -> dict[str, type]:
    return {key: type(value) for key, value in values.items()}


@pytest.mark.parametrize(
    ("strategies", "orig"),
    [((FULL, FULL, WHOLE), True), ((FULL, WHOLE, FULL), False), ((WHOLE, FULL, WHOLE), True)],
    ids=["the last", "one in the middle, as flat parameters", "all but one"],
)
def test_it_is_whole_in_a_sharded_target_as_fsdp1_has_it(
    strategies: tuple[ShardingStrategy, ...], orig: bool, tmp_path: Path
) -> None:
    units = tmp_path / "units.json"
    model, optim = fsdps_own(strategies, orig=orig, units=units)
    weights, states = truth(tmp_path / "full.pt")
    fsdpckpt.convert(tmp_path / "full.pt", tmp_path / "flat", to="flattened", world_size=RANKS, units=units)
    options = {"to": "sharded", "container": "torch", "tensor": "sharded-tensor", "world_size": RANKS}
    report = fsdpckpt.convert(tmp_path / "flat", tmp_path / "ours", **options, key_type="name")
    found = rank_file(tmp_path / "ours", "model")
    assert types(found) == types(model)
    whole = [name for name, value in model.items() if type(value) is torch.Tensor]
    assert whole and all(identical(found[name], weights[name]) for name in whole)
    assert [note.keys for note in report.notes if note.kind == "units" and "NO_SHARD" in note.message] == [tuple(whole)]
    for name, entry in rank_file(tmp_path / "ours", "optim")["state"].items():
        assert types(entry) == types(optim["state"][name]), name
        for state, value in entry.items():
            if type(value) is torch.Tensor:
                assert identical(value, states[name][state]), (name, state)


def test_a_job_that_cuts_nothing_says_nothing_of_a_target_that_is_cut(tmp_path: Path) -> None:
    """All units are NO_SHARD: ``--to sharded`` is then for another job, which shards."""
    units = tmp_path / "units.json"
    fsdps_own((WHOLE, WHOLE, WHOLE), orig=True, units=units)
    truth(tmp_path / "full.pt")
    fsdpckpt.convert(tmp_path / "full.pt", tmp_path / "flat", to="flattened", world_size=RANKS, units=units)
    report = fsdpckpt.convert(tmp_path / "flat", tmp_path / "cut", to="sharded", container="torch", world_size=RANKS)
    assert torch.Tensor not in types(rank_file(tmp_path / "cut", "model")).values()
    assert not [note for note in report.notes if note.kind == "units" and "NO_SHARD" in note.message]
