"""Refuses what would change the meaning of states that span all parameters of an optimizer, as LBFGS's.

It is one for all parameters: a count, or a vector that joins their elements in the order of the group. With fewer
parameters, or in another order, it is that of no optimizer.
"""

from __future__ import annotations

from collections.abc import Sequence

from fsdpckpt import flags
from fsdpckpt.errors import SourceUnsupportedError
from fsdpckpt.ir.checkpoint import Checkpoint
from fsdpckpt.ir.optimizer import ParamKey
from fsdpckpt.ir.state_shapes import spanning_key


def refuse_spanning(checkpoint: Checkpoint, why: str) -> None:
    """Raises SourceUnsupportedError if the optimizer has a state that spans all parameters."""
    found = spanning_key(checkpoint.optim) if checkpoint.optim is not None else None
    if found is None:
        return
    key, state = found
    raise SourceUnsupportedError(
        f"the state {state} of {key} is one for all parameters of the optimizer, and cannot be divided",
        file=checkpoint.source,
        key=f"{key}.{state}",
        why=why,
        next_step=f"{flags.only('model')} converts the model alone",
    )


def require_same_members(checkpoint: Checkpoint, left: Sequence[ParamKey], why: str) -> None:
    """Raises SourceUnsupportedError if ``left``, the parameters that the groups will list, are fewer than now or in
    another order, and a state spans all.
    """
    optim = checkpoint.optim
    if optim is not None and list(optim.grouped_keys()) != list(left):
        refuse_spanning(checkpoint, why)
