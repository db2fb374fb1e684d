"""Optimizers that differ in one thing from another one."""

from __future__ import annotations

from fsdpckpt.ir.optimizer import Optimizer, ParamKey, States
from fsdpckpt.ir.values import Value

__all__ = ["with_entry", "with_setting", "without_entry"]


def with_setting(optim: Optimizer, number: int, **settings: Value) -> Optimizer:
    """``optim`` with other ``settings`` in group ``number``; ``params`` is one of them."""
    groups = [dict(group) for group in optim.param_groups or ()]
    groups[number].update(settings)
    return optim.with_groups(groups)


def with_entry(optim: Optimizer, key: ParamKey, states: States) -> Optimizer:
    """``optim`` with an entry more in its ``state``, or another one under ``key``."""
    return optim.with_state({**optim.state, key: states})


def without_entry(optim: Optimizer, key: ParamKey) -> Optimizer:
    """``optim`` without the states of ``key``."""
    return optim.with_state({each: states for each, states in optim.state.items() if each != key})
