"""The IR: one description of a checkpoint for all readers and writers. This module names what a checkpoint is.

The package imports nothing of fsdpckpt but itself, ``errors``, ``text`` and ``version``. This module imports neither
numpy nor anything else that takes time, as the command line offers layouts, containers, sections and strategies.
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
    """The values of ``torch.distributed.fsdp.ShardingStrategy`` that differ in layout."""

    FULL_SHARD = "full-shard"
    SHARD_GRAD_OP = "shard-grad-op"
    HYBRID_SHARD = "hybrid-shard"
    NO_SHARD = "no-shard"
