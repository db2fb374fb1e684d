"""Groups of a flattened DCP optimizer, when their hyper-parameters are tensors."""

from __future__ import annotations

import pytest
import torch
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

from fsdpckpt.readers.detect import open_checkpoint
from fsdpckpt.readers.protocol import Locate
from fsdpckpt.storage.sources import Sources


def _save(path: str, rates: list[float]) -> list[list[str]]:
    """One linear layer a learning rate, two parameters each; returns the parameter names of each group."""
    torch.manual_seed(7)
    layers = torch.nn.ModuleList(torch.nn.Linear(5, 3) for _ in rates)
    groups = [
        {"params": list(layer.parameters()), "lr": torch.tensor(rate)}
        for layer, rate in zip(layers, rates, strict=True)
    ]
    optimizer = torch.optim.AdamW(groups)
    sum(layer(torch.randn(2, 5)).sum() for layer in layers).backward()
    optimizer.step()
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    state = {"model": layers.state_dict(), "optimizer": get_optimizer_state_dict(layers, optimizer, options=options)}
    dcp.save(state, checkpoint_id=path, no_dist=True)
    return [[f"{number}.weight", f"{number}.bias"] for number in range(len(rates))]


@pytest.mark.parametrize("locate", [Locate.ALL, Locate.NOTHING])
@pytest.mark.filterwarnings("ignore")
def test_parameters_with_equal_tensor_rates_share_a_group_and_others_do_not(tmp_path, locate: Locate) -> None:
    first, second, third = _save(str(tmp_path), [0.1, 0.25, 0.1])
    with Sources() as sources:
        checkpoint = open_checkpoint(str(tmp_path), sources=sources, locate=locate)
    groups = [group["params"] for group in checkpoint.optim.param_groups]
    assert groups == [first + third, second]
    rates = [group["lr"] for group in checkpoint.optim.param_groups]
    assert rates[0] is not rates[1] and all(rate.shape == () for rate in rates)
