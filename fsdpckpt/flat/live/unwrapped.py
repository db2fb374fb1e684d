"""What a live model without FSDP1 knows and its checkpoints may lack: the order of its parameters and of the optimizer.

FSDP2, DDP or a single process: every parameter is still in the model, under its name and with its whole shape.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DataParallel, DistributedDataParallel

from fsdpckpt.errors import UsageError
from fsdpckpt.flat.live.modules import Optimizers, optimizer_groups, unit_param
from fsdpckpt.ir.names import clean
from fsdpckpt.ir.unit_lists import units_of_lists
from fsdpckpt.ir.units import Units


def units_without_fsdp1(model: nn.Module, optimizer: Optimizers) -> Units:
    """Names, shapes and order of the parameters of ``model``, and the groups of ``optimizer``, or of each of
    several, without any unit.

    Raises UsageError for a model without parameters, or an optimizer of a different one.
    """
    module = model.module if isinstance(model, DataParallel | DistributedDataParallel) else model
    names: dict[nn.Parameter, str] = {}
    shared: list[tuple[str, str]] = []
    for raw, param in module.named_parameters(remove_duplicate=False):
        name = clean(raw)
        if names.setdefault(param, name) != name:
            shared.append((name, names[param]))
    if not names:
        raise UsageError(
            "this model has no parameters",
            why="there is nothing whose order could be recorded",
            next_step="call it with the model that the optimizer trains",
        )
    one, several = optimizer_groups(optimizer, dict[torch.Tensor, str](names.items()))
    return units_of_lists(
        units=(),
        use_orig_params=True,
        parameters=tuple(names.values()),
        unmanaged=tuple(unit_param(name, param) for param, name in names.items()),
        shared=tuple(shared),
        groups=one,
        optimizers=several,
    )


def rank_of_unwrapped(model: nn.Module) -> int:
    """This rank's number in the checkpoint of ``model``: in the largest mesh of its parameters, else in the world.

    Each pipeline stage has a mesh of its own.
    """
    if not dist.is_available() or not dist.is_initialized():
        return 0
    meshes = [param.device_mesh for param in model.parameters() if isinstance(param, DTensor)]
    if not meshes:
        return dist.get_rank()
    ranks = max(meshes, key=lambda mesh: mesh.size()).mesh.flatten().tolist()
    return ranks.index(dist.get_rank()) if dist.get_rank() in ranks else dist.get_rank()
