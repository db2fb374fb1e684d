"""Tensors and checkpoints of which nothing is stored, and such as differ from another one in one thing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from fsdpckpt.ir.checkpoint import Checkpoint, Container, Layout, ModelState, Origin
from fsdpckpt.ir.dtypes import DTYPES
from fsdpckpt.ir.optimizer import Optimizer
from fsdpckpt.ir.tensors import Chunks, Tensor

__all__ = ["checkpoint", "tensor", "with_ledger", "with_origin"]


def tensor(
    *shape: int,
    dtype: str = "float32",
    file: int = 0,
    offset: int = 0,
    stride: Sequence[int] | None = None,
    **more: Any,
) -> Tensor:
    """A tensor in one chunk."""
    return Tensor(DTYPES[dtype], shape, Chunks.whole(file=file, offset=offset, shape=shape, stride=stride), **more)


def checkpoint(model: Mapping[str, Any] | None = None, optim: Optimizer | None = None, **more: Any) -> Checkpoint:
    """A full checkpoint of one file."""
    more = {"files": (), "extra": {}, **more}
    origin = Origin("SRC", Layout.FULL, Container.TORCH, "plain", 1)
    return Checkpoint(origin, model=None if model is None else ModelState(dict(model)), optim=optim, **more)


def with_origin(held: Checkpoint, **fields: Any) -> Checkpoint:
    """``held`` with other ``fields`` of its ``Origin``."""
    return replace(held, origin=replace(held.origin, **fields))


def with_ledger(held: Checkpoint, **fields: Any) -> Checkpoint:
    """``held`` with other ``fields`` of its ``Ledger``."""
    return replace(held, ledger=replace(held.ledger, **fields))
