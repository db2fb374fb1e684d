"""The operations on state dicts over a live process group, in one place; each works with no process group too."""

from __future__ import annotations

from fsdpckpt.comm.copies import copy_state_dict, empty_on_cpu, offload_to_cpu
from fsdpckpt.comm.gather import gather
from fsdpckpt.comm.scatter import broadcast, scatter, shard
from fsdpckpt.comm.similarity import check_similar
from fsdpckpt.comm.trees import StateDict

__all__ = [
    "StateDict",
    "broadcast",
    "check_similar",
    "copy_state_dict",
    "empty_on_cpu",
    "gather",
    "offload_to_cpu",
    "scatter",
    "shard",
]
