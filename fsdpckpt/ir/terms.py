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


class IdRule(StrEnum):
    """How a producer counts ids.

    ``GROUPS``: the parameters of the optimizer, group by group, as ``torch.optim`` does. ``MODEL``: all of
    ``model.parameters()``, frozen ones included, whatever the groups, as ``FSDP.rekey_optim_state_dict`` does if it is
    not given the optimizer; a group lists the ids of its parameters in ascending order.
    """

    GROUPS = "groups"
    MODEL = "model"


class SectionName(str):
    """One of several models or optimizers, as ``--only`` takes it: ``model:generator_ema``."""

    __slots__ = ()

    @property
    def section(self) -> Section:
        return Section(self.partition(":")[0])

    @property
    def name(self) -> str:
        return self.partition(":")[2]


def section_of(only: Section | SectionName | None) -> Section | None:
    """Whether the model or the optimizer is selected; None: everything is."""
    return only.section if isinstance(only, SectionName) else only


class Strategy(StrEnum):
    """The values of ``torch.distributed.fsdp.ShardingStrategy`` that differ in layout."""

    FULL_SHARD = "full-shard"
    SHARD_GRAD_OP = "shard-grad-op"
    HYBRID_SHARD = "hybrid-shard"
    NO_SHARD = "no-shard"
