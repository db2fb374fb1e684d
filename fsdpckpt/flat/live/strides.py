"""Dtypes and strides of torch as units have them."""

from __future__ import annotations

import torch
from torch.distributed.fsdp import _flat_param

from fsdpckpt.ir.dtypes import DTYPES, DType

__all__ = ["dtype_of", "flattens_in_memory_order", "stride_of"]


def dtype_of(dtype: torch.dtype) -> DType:
    """The ``DType`` of a torch dtype."""
    return DTYPES[str(dtype).removeprefix("torch.")]


def stride_of(shape: tuple[int, ...], stride: tuple[int, ...]) -> tuple[int, ...] | None:
    """``stride``, or None when the elements lie row-major: strides of dimensions of one element say nothing."""
    said = [step for size, step in zip(shape, stride, strict=True) if size > 1]
    return None if said == sorted(said, reverse=True) else tuple(stride)


def flattens_in_memory_order() -> bool:
    """Whether the installed FSDP1 flattens a parameter that is not row-major as it lies in memory.

    torch 2.4 and older flatten every parameter row-major; they lack this function, which later ones decide by.
    """
    return hasattr(_flat_param, "_is_truly_contiguous")
