"""The optimizer's ``step`` must be the same for all parameters of a group: a mix of two saves shows here first."""

from __future__ import annotations

import numpy as np

from fsdpckpt.ir.checkpoint import OptimState, ParamKey, Problem, Section, group_params
from fsdpckpt.ir.dtypes import numpy_dtype
from fsdpckpt.ir.tensors import Tensor
from fsdpckpt.ir.values import Value
from fsdpckpt.verify.blocks import BlockReader

__all__ = ["check_steps"]


def check_steps(reader: BlockReader, optim: OptimState, unreadable: frozenset[str]) -> list[Problem]:
    """A problem for each param group whose parameters have different steps.

    ``unreadable``: keys (``<param>.step``) to leave out, because they have a problem of their own.
    """
    groups = [group_params(group) for group in optim.param_groups] if optim.param_groups else [list(optim.state)]
    found: list[Problem] = []
    for number, keys in enumerate(groups):
        steps: dict[float, list[ParamKey]] = {}
        for key in keys or ():
            states = optim.state.get(key)
            value = states.get("step") if states else None
            step = _number(reader, value) if f"{key}.step" not in unreadable else None
            if step is not None:
                steps.setdefault(step, []).append(key)
        if len(steps) > 1:
            found.append(_disagreement(number, steps))
    return found


def _number(reader: BlockReader, value: Tensor | Value) -> float | None:
    if isinstance(value, (int, float)):
        return float(value)
    if not isinstance(value, Tensor) or value.numel != 1 or value.dtype.numpy is None or value.dtype.kind == "complex":
        return None
    block = next(reader.blocks(value))
    return float(block.view(numpy_dtype(value.dtype)).astype(np.float64)[0])


def _disagreement(number: int, steps: dict[float, list[ParamKey]]) -> Problem:
    """Named after the parameters in the minority."""
    by_size = sorted(steps.items(), key=lambda item: -len(item[1]))
    told = []
    for step, keys in by_size:
        names = ", ".join(map(str, keys[:3])) + (", ..." if len(keys) > 3 else "")
        told.append(f"{step:g} for {len(keys)} ({names})")
    message = f"optim param group {number}: the steps disagree: {'; '.join(told)}"
    return Problem("step", message, fatal=False, key=f"{by_size[-1][1][0]}.step", section=Section.OPTIM)
