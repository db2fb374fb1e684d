"""FSDP1 settings of both libraries that do not work without a GPU."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.fsdp import FullyShardedDataParallel

__all__ = ["on_cpus", "without_offloading"]


def without_offloading() -> None:
    """On a CPU run ``offload_to_cpu`` segfaults for models, and gives exp_avg and exp_avg_sq one memory."""
    choose = FullyShardedDataParallel.state_dict_type

    def state_dict_type(*arguments: Any, **named: Any) -> Any:
        for config in (*arguments[2:], *named.values()):
            if hasattr(config, "offload_to_cpu"):
                config.offload_to_cpu = False
        return choose(*arguments, **named)

    FullyShardedDataParallel.state_dict_type = staticmethod(state_dict_type)


def on_cpus() -> None:
    """FSDP1 looks for a GPU when it is given no device, and Lightning passes none."""
    begin = FullyShardedDataParallel.__init__

    def init(self: FullyShardedDataParallel, *arguments: Any, device_id: Any = None, **named: Any) -> None:
        begin(self, *arguments, device_id=torch.device("cpu") if device_id is None else device_id, **named)

    FullyShardedDataParallel.__init__ = init
