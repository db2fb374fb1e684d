"""The communication core: workers, named collective steps whose errors reach all, state dicts and bytes between them.

    with Group.over() as group:                     # a live process group; Group.alone() where there is none
        full = gather(group, model.state_dict(), to=0, cpu_offload=True)

Imports torch, as the only part of the package that has to; nothing that works offline imports it.
"""

from __future__ import annotations

from fsdpckpt.comm.exchange import exchange, spread
from fsdpckpt.comm.group import Group
from fsdpckpt.comm.messages import all_gather_objects, broadcast_object
from fsdpckpt.comm.state_dicts import (
    StateDict,
    broadcast,
    check_similar,
    copy_state_dict,
    empty_on_cpu,
    gather,
    offload_to_cpu,
    scatter,
    shard,
)

__all__ = [
    "Group",
    "StateDict",
    "all_gather_objects",
    "broadcast",
    "broadcast_object",
    "check_similar",
    "copy_state_dict",
    "empty_on_cpu",
    "exchange",
    "gather",
    "offload_to_cpu",
    "scatter",
    "shard",
    "spread",
]
