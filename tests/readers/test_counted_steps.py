"""The step that Megatron's fused Adam counts in its param groups is that of each parameter, as torch needs it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import fsdpckpt
from fsdpckpt.errors import FsdpckptError
from tests.readers.contents import opened
from tests.readers.test_megatron_torch import Saved
from tests.readers.test_megatron_torch_buffers import Distributed
from tests.readers.test_megatron_torch_grid import Run

ADAM = {"lr": 0.1, "betas": (0.9, 0.95), "eps": 1e-8}
"""What the groups of the fused Adam have for torch's: the same names."""


def one_rank(path: Path, change: Callable[[list[Any]], object]) -> Path:
    """One rank's file, whose groups ``change`` got."""
    source = Saved().save(path)
    file = source / "iter_0000500" / "mp_rank_00" / "model_optim_rng.pt"
    content = torch.load(file, weights_only=False)
    change(content["optimizer"]["optimizer"]["param_groups"])
    torch.save(content, file)
    return source


def stages(path: Path, change: Callable[[list[Any]], object]) -> Path:
    return Run(stages=2).save(path, lambda content: change(content["optimizer"]["optimizer"]["param_groups"]))


def buffers(path: Path, change: Callable[[list[Any]], object]) -> Path:
    return Distributed(stages=2).save(path, lambda content: change(content["optimizer"]["optimizer"]["param_groups"]))


def with_settings(groups: list[Any]) -> None:
    for group in groups:
        group.update(ADAM, weight_decay=0.1 * group.get("wd_mult", 1.0))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("save", "count"), [(one_rank, 500), (stages, 7), (buffers, 7)])
def test_torchs_adamw_goes_on_with_the_step_of_the_groups(
    save: Callable[..., Path], count: int, tmp_path: Path
) -> None:
    source = save(tmp_path / "run", with_settings)
    rule = {"no_weight_decay": ["standard"]} if save is buffers else {}
    assert not fsdpckpt.verify(source).problems
    fsdpckpt.convert(source, tmp_path / "full.pt", to="full", key_type="name", verify="full", **rule)
    state = torch.load(tmp_path / "full.pt", weights_only=False)
    groups, states = state["optimizer"]["param_groups"], state["optimizer"]["state"]
    # torch's optimizer takes the shapes from the states: the parameters may have any values.
    params = {name: torch.nn.Parameter(torch.zeros_like(entry["exp_avg"])) for name, entry in states.items()}
    named = [{"params": [(name, params[name]) for name in group["params"]]} for group in groups]
    optimizer = torch.optim.AdamW(named)
    ids = {name: number for number, name in enumerate(name for group in groups for name in group["params"])}
    by_id = [{**group, "params": [ids[name] for name in group["params"]]} for group in groups]
    optimizer.load_state_dict({"state": {ids[name]: states[name] for name in ids}, "param_groups": by_id})
    for param in params.values():
        param.grad = torch.rand_like(param)
    optimizer.step()
    assert {float(optimizer.state[param]["step"]) for param in params.values()} == {count + 1}
    for param in params.values():  # the correction of the moments, which has the step in it
        mean, square = (optimizer.state[param][moment] for moment in ("exp_avg", "exp_avg_sq"))
        change = mean / (1 - 0.9 ** (count + 1)) / ((square / (1 - 0.95 ** (count + 1))).sqrt() + 1e-8)
        torch.testing.assert_close(param.detach(), -0.1 * change)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("save", [one_rank, stages])
def test_what_is_converted_is_the_same_as_its_source(save: Callable[..., Path], tmp_path: Path) -> None:
    source = save(tmp_path / "run", with_settings)
    fsdpckpt.convert(source, tmp_path / "dcp", to="sharded", container="dcp", world_size=3, key_type="name")
    assert fsdpckpt.diff(source, tmp_path / "dcp").same
    assert not fsdpckpt.verify(tmp_path / "dcp").problems


@pytest.mark.filterwarnings("ignore")
def test_groups_of_different_steps_keep_them_where_they_list_parameters(tmp_path: Path) -> None:
    def change(groups: list[Any]) -> None:
        groups[1]["step"] = 499

    fsdpckpt.convert(one_rank(tmp_path / "listed", change), tmp_path / "listed.pt", to="full", key_type="name")
    optimizer = torch.load(tmp_path / "listed.pt")["optimizer"]
    steps = [
        {float(optimizer["state"][name]["step"]) for name in group["params"]} for group in optimizer["param_groups"]
    ]
    assert steps == [{500}, {499}]
    source = buffers(tmp_path / "buffers", change)
    problems = fsdpckpt.verify(source).problems
    assert len(problems) == 1 and "the param groups count the steps 7, 499" in problems[0].message
    with pytest.raises(FsdpckptError):
        fsdpckpt.convert(source, tmp_path / "full.pt", no_weight_decay=["standard"])


@pytest.mark.filterwarnings("ignore")
def test_a_group_without_a_step_has_that_of_the_others(tmp_path: Path) -> None:
    source = one_rank(tmp_path / "run", lambda groups: groups[1].pop("step"))
    fsdpckpt.convert(source, tmp_path / "full.pt", to="full", key_type="name")
    assert {float(entry["step"]) for entry in torch.load(tmp_path / "full.pt")["optimizer"]["state"].values()} == {500}


def test_other_optimizers_keep_their_groups_as_they_are(tmp_path: Path) -> None:
    """apex reads its step from the groups again."""
    state = {"state": {0: {"exp_avg": torch.rand(3)}}, "param_groups": [{"lr": 0.1, "step": 7, "params": [0]}]}
    torch.save({"model": {"w": torch.rand(3)}, "optimizer": state}, tmp_path / "full.pt")
    optim = opened(tmp_path / "full.pt").optim
    assert optim is not None and optim.state[0].keys() == {"exp_avg"}
    assert optim.param_groups is not None and optim.param_groups[0]["step"] == 7
