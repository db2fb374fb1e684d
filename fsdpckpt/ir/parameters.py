"""A row of the table of parameters: what is known of one parameter or buffer of a model.

A name stands in one row. Whoever lists parameters, a section of a checkpoint, a units file, an optimizer, lists rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import TypeAlias

from fsdpckpt.ir.dtypes import DType

RowNumber: TypeAlias = int
"""The place of a row in a table or a listing."""


@dataclass(frozen=True, slots=True)
class Named:
    """A row of which only the name is known: without prefixes of wrappers."""

    name: str


@dataclass(frozen=True, slots=True)
class Parameter(Named):
    """A parameter, or a tensor that may be one. ``shape``: the global one.

    ``stride``: in elements, as ``torch.Tensor.stride``, of a parameter that is not row-major (channels_last): FSDP1
    flattens it in memory order (``FlatParamHandle._init_flat_param_and_metadata``). None for row-major. ``sharded`` as
    ``Tensor.sharded``: False for buffers and for what FSDP does not shard, None if not known.
    """

    shape: tuple[int, ...]
    dtype: DType
    stride: tuple[int, ...] | None = None
    requires_grad: bool = True
    sharded: bool | None = None

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def possible(self) -> bool:
        """Whether it may be in a flat parameter: FSDP1 refuses 0-dim ones, and trains floating ones."""
        return self.sharded is not False and bool(self.shape) and self.dtype.kind in ("float", "complex")

    @property
    def order(self) -> tuple[int, ...] | None:
        """The dimensions from slowest to fastest in memory, None for row-major.

        Dimensions of one element come first: their strides have no meaning, and PyTorch does not keep them.
        """
        if self.stride is None:
            return None
        strides, wide = self.stride, [dim for dim, size in enumerate(self.shape) if size > 1]
        ordered = sorted(wide, key=lambda dim: (-strides[dim], dim))
        if ordered == wide:
            return None
        return (*(dim for dim, size in enumerate(self.shape) if size <= 1), *ordered)
