"""What the states of one parameter say about its shape: the proof that a key map is right.

Most optimizers keep their states in the parameter's shape (``torch.zeros_like``). Some keep factors of it (Adafactor:
``row_var`` and ``col_var``, or ``exp_avg_sq_row`` and ``exp_avg_sq_col``), or further tensors beside the ones that have
it (8-bit Adam: one maximum a block). 0-dim states and slices of flat parameters say nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

from fsdpckpt.ir.tensors import SLICES, Tensor
from fsdpckpt.ir.values import Value

__all__ = ["Shape", "StatedShapes", "fits", "stated_shapes"]

Shape: TypeAlias = tuple[int, ...]
StatedShapes: TypeAlias = frozenset[Shape]

_FACTORS = frozenset({"row", "col"})  # words in the names of factored states


def stated_shapes(states: Mapping[str, Tensor | Value]) -> StatedShapes:
    """The shapes of the states that say something about the parameter's; empty when none does."""
    return frozenset(
        state.shape
        for name, state in states.items()
        if isinstance(state, Tensor)
        and state.ndim
        and state.placement != SLICES
        and _FACTORS.isdisjoint(name.split("_"))
    )


def fits(shape: Shape | None, stated: StatedShapes) -> bool:
    """Whether a parameter of ``shape`` (None: not known) may have states of the ``stated`` shapes.

    One of them has to be its own shape. Several that are all smaller along some dimensions are taken for factors; a
    single other shape never is: it is what another parameter's states look like.
    """
    if shape is None or not stated or shape in stated:
        return True
    return len(stated) > 1 and all(_factor(part, shape) for part in stated)


def _factor(part: Shape, whole: Shape) -> bool:
    """True when ``part`` is ``whole`` with some dimensions dropped or shrunk to 1, and not ``whole`` itself."""
    if len(part) == len(whole):
        return all(have in (1, size) for have, size in zip(part, whole, strict=True))
    left = iter(whole)
    return len(part) < len(whole) and all(size in left for size in part)
