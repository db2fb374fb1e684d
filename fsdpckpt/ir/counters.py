"""Knows the one state of an optimizer that is a count and no tensor of its parameter, whatever that one's shape is."""

from __future__ import annotations

from fsdpckpt.ir.tensors import Tensor

STEP = "step"
"""The name of the state that counts an optimizer's steps, in torch.optim and in all libraries that follow it."""


def is_counter(state: str, value: object) -> bool:
    """Whether it is a number of steps. Some libraries keep it in a tensor of shape (1,), as capturable optimizers do:
    then a parameter of one element has its shape, and the count is still every rank's, and never cut or cast with it.
    """
    return state == STEP and isinstance(value, Tensor) and value.shape in ((), (1,))
