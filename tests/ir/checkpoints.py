"""Checkpoints that differ from another one in where they come from, or in what was found in them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fsdpckpt.ir.checkpoint import Checkpoint

__all__ = ["with_ledger", "with_origin"]


def with_origin(held: Checkpoint, **fields: Any) -> Checkpoint:
    """``held`` with other ``fields`` of its ``Origin``."""
    return replace(held, origin=replace(held.origin, **fields))


def with_ledger(held: Checkpoint, **fields: Any) -> Checkpoint:
    """``held`` with other ``fields`` of its ``Ledger``."""
    return replace(held, ledger=replace(held.ledger, **fields))
