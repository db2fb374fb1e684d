"""Ranks that work together: named collective steps whose errors reach all, state dicts and bytes between ranks.

    with TorchGroup.over() as group:                # the live process group; ``Solo`` where there is none
        full = gather(group, model.state_dict(), to=0, cpu_offload=True)

Names are imported on first use: ``Group`` and ``Solo`` need no torch, everything else does.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from fsdpckpt.errors import require_torch

if TYPE_CHECKING:
    from fsdpckpt.comm.exchanger import exchange, spread
    from fsdpckpt.comm.protocol import Group, Solo, broadcast_object
    from fsdpckpt.comm.state_dicts import broadcast, gather, scatter, shard
    from fsdpckpt.comm.torch_group import TorchGroup
    from fsdpckpt.comm.trees import StateDict, check_similar, copy_state_dict, empty_on_cpu, offload_to_cpu

__all__ = [
    "Group",
    "Solo",
    "StateDict",
    "TorchGroup",
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

_MODULES = {
    "protocol": ("Group", "Solo", "broadcast_object"),
    "torch_group": ("TorchGroup",),
    "exchanger": ("exchange", "spread"),
    "state_dicts": ("broadcast", "gather", "scatter", "shard"),
    "trees": ("StateDict", "check_similar", "copy_state_dict", "empty_on_cpu", "offload_to_cpu"),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}


def __dir__() -> list[str]:
    return __all__


def __getattr__(name: str) -> object:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'fsdpckpt.comm' has no attribute {name!r}")
    if _MODULE_OF[name] != "protocol":
        require_torch(f"fsdpckpt.comm.{name} needs")
    return getattr(import_module(f"fsdpckpt.comm.{_MODULE_OF[name]}"), name)
