"""Param groups by weight decay, as ``--no-weight-decay`` makes them."""

from __future__ import annotations

from fsdpckpt.ir.checkpoint import Layout, OptimState, ParamKey
from fsdpckpt.ir.tensors import Tensor
from fsdpckpt.ir.values import Value
from fsdpckpt.transform.weight_decay import STANDARD, list_parameters
from tests.flat.flat_synthetic import checkpoint, whole


def test_the_note_lists_the_parameters_without_weight_decay_in_the_order_of_the_groups() -> None:
    names = [f"layers.{number}.{kind}" for number in range(8) for kind in ("weight", "bias")]
    state: dict[ParamKey, dict[str, Tensor | Value]] = {
        name: {"exp_avg": whole(5, 3) if name.endswith("weight") else whole(5)} for name in names
    }
    optim = OptimState(state, [{"lr": 0.1, "weight_decay": 0.5, "params": list(names)}])
    result = list_parameters(checkpoint(1, optim=optim, layout=Layout.FULL), [STANDARD])
    assert result.optim is not None and result.optim.param_groups is not None
    assert [group["params"] for group in result.optim.param_groups] == [names[::2], names[1::2]]
    assert result.notes[-1].keys == tuple(names[1::2])
