"""Names the choices that describe a checkpoint: layout, container, section, key type, sharding strategy.

The command line shows them as choices, so this module imports neither numpy nor anything else that takes time.
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
