"""Small values between workers: everyone's to everyone, or one rank's to everyone. Encoded by ``comm.objects``."""

from __future__ import annotations

import torch

from fsdpckpt.comm.exchange import spread
from fsdpckpt.comm.group import Group
from fsdpckpt.comm.objects import decode, encode

__all__ = ["all_gather_objects", "broadcast_object"]


def all_gather_objects(group: Group, value: object, *, name: str = "exchange of values") -> list[object]:
    """Every rank's ``value``, by rank. All ranks. The own one is returned as it is."""
    if group.world_size == 1:
        return [value]
    with group.step(name):
        return _spread(group, value, has_value=True)


def broadcast_object(
    group: Group, value: object = None, *, source: int = 0, name: str = "broadcast of a value"
) -> object:
    """Rank ``source``'s ``value`` on every rank; what the others pass is ignored. All ranks."""
    if group.world_size == 1:
        return value
    with group.step(name):
        return _spread(group, value, has_value=group.rank == source)[source]


def _spread(group: Group, value: object, *, has_value: bool) -> list[object]:
    mine = encode(value) if has_value else b""
    sizes = [size for (size,) in group.wire.all_counts([len(mine)])]
    found = [bytearray(size if rank != group.rank else 0) for rank, size in enumerate(sizes)]

    def read(_: int, offset: int, buffer: torch.Tensor) -> None:
        buffer.copy_(torch.frombuffer(bytearray(mine[offset : offset + len(buffer)]), dtype=torch.uint8))

    def write(source: int, offset: int, buffer: torch.Tensor) -> None:
        found[source][offset : offset + len(buffer)] = buffer.numpy().tobytes()

    spread(group, sizes=sizes, read=read, write=write, name="values")
    others = [decode(bytes(data)) if data else None for data in found]
    others[group.rank] = value if has_value else None
    return others
