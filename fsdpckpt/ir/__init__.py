"""Holds the IR, one description of a checkpoint for all readers and writers, and names what describes a whole one.

Imports nothing of this package but itself, ``errors`` and ``text``. This module imports neither numpy nor anything else
that takes time: the command line shows layouts, containers, sections and strategies as choices.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Literal, TypeAlias

KeyType: TypeAlias = Literal["name", "id"]


class Layout(StrEnum):
    FULL = "full"
    SHARDED = "sharded"
    FLATTENED = "flattened"


class Container(StrEnum):
    TORCH = "torch"
    DCP = "dcp"
    SAFETENSORS = "safetensors"


class Section(StrEnum):
    MODEL = "model"
    OPTIM = "optim"
    EXTRA = "extra"


class Strategy(StrEnum):
    """``torch.distributed.fsdp.ShardingStrategy``, as far as the layout is concerned."""

    FULL_SHARD = "full-shard"
    SHARD_GRAD_OP = "shard-grad-op"
    HYBRID_SHARD = "hybrid-shard"
    NO_SHARD = "no-shard"
