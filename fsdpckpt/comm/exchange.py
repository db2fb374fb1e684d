"""Bytes from every rank to every rank (``exchange``), or from one to all (``spread``), through bounded buffers.

The caller says how many bytes go where, and reads and writes them in chunks; nothing here knows what they mean.
``exchange`` goes in rounds, because Gloo has no all-to-all: in round k rank r sends to r + k and receives from r - k.
A rank posts chunk i + 1 before it waits for chunk i, and no rank waits for a chunk whose sender has not posted it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import torch

from fsdpckpt.comm.group import Group
from fsdpckpt.comm.staging import Staging, chunk_bytes
from fsdpckpt.comm.wire import Flight
from fsdpckpt.errors import InternalError

__all__ = ["BUDGET", "Exchanger", "Landing", "Read", "Write", "exchange", "spread"]

BUDGET = 32 << 20
"""Bytes of buffers by default: four chunks of 8 MiB, beyond which neither Gloo nor NCCL gets faster."""

BUFFERS = 4  # of an exchange: two leave, two come
DEPTH = 4  # chunks under way in ``spread``

Read: TypeAlias = Callable[[int, int, torch.Tensor], None]
"""``read(peer, offset, buffer)``: fill ``buffer`` (1-D uint8) with the bytes for ``peer`` from ``offset`` on."""

Write: TypeAlias = Callable[[int, int, torch.Tensor], None]
"""``write(peer, offset, buffer)``: take the bytes that came from ``peer`` at ``offset``; valid during the call."""

Landing: TypeAlias = Callable[[int, int, int], torch.Tensor]
"""``landing(peer, offset, count)``: a contiguous 1-D uint8 tensor of ``count`` elements, the caller's own."""


def exchange(
    group: Group,
    *,
    sends: Mapping[int, int],
    receives: Mapping[int, int],
    read: Read,
    write: Write,
    budget: int = BUDGET,
    on_device: bool = False,
    name: str = "exchange",
) -> None:
    """Move ``sends[peer]`` bytes to each peer and ``receives[peer]`` bytes from each. All ranks of the group.

    A rank may be its own peer. ``budget``: bytes of buffers, on the device and, for CUDA, again in pinned memory.
    ``on_device``: the buffers handed to ``read`` and ``write`` lie on the group's device, else in host memory.
    Raises WorkerError when a peer has other counts than this rank, before any byte is moved.
    """
    with group.step(name):
        largest = max([*sends.values(), *receives.values(), 1])
        exchanger = Exchanger(group, budget=budget, largest=largest, on_device=on_device)
        exchanger.check(sends, receives)
        exchanger.run(sends, receives, read, write)


class Exchanger:
    """Exchanges one after the other through the same buffers, inside a step of the caller's. All ranks do the same.

    ``largest``: bytes of the largest part there will be; ``budget`` and ``on_device`` as for ``exchange``.
    """

    def __init__(self, group: Group, *, budget: int = BUDGET, largest: int, on_device: bool = False) -> None:
        self._group = group
        size = min(chunk_bytes(budget, BUFFERS), chunk_bytes(largest + 4095, 1))
        self._staging = Staging(group.device, count=BUFFERS, size=size, on_device=on_device)

    def check(self, sends: Mapping[int, int], receives: Mapping[int, int]) -> None:
        """Raises WorkerError when a peer has other counts than this rank. Counts of several exchanges may be added."""
        group = self._group
        strangers = [peer for peer in (*sends, *receives) if not 0 <= peer < group.world_size]
        if strangers or sends.get(group.rank, 0) != receives.get(group.rank, 0):
            raise InternalError(f"rank {group.rank} was to exchange what it cannot: {dict(sends)}, {dict(receives)}")
        for to, source in self._rounds():
            mine = torch.tensor([sends.get(to, 0)], dtype=torch.int64, device=group.device)
            found = torch.empty_like(mine)
            group.wire.swap(send=mine, to=to, receive=found, source=source).land()
            if int(found) != receives.get(source, 0):
                raise InternalError(
                    f"the plans of rank {source} and rank {group.rank} differ",
                    rank=group.rank,
                    expected=f"{receives.get(source, 0)} bytes from rank {source}",
                    found=f"{int(found)} bytes that it sends",
                )

    def run(
        self,
        sends: Mapping[int, int],
        receives: Mapping[int, int],
        read: Read,
        write: Write,
        *,
        landing: Landing | None = None,
    ) -> None:
        """One exchange. The counts of all ranks have to fit: nothing here finds out.

        ``landing(peer, offset, count)``: where these bytes may arrive directly, on the group's device; ``write`` is
        not called for them then.
        """
        _to_itself(self._group, self._staging, sends.get(self._group.rank, 0), read, write)
        for to, source in self._rounds():
            out, into = (to, sends.get(to, 0), read), (source, receives.get(source, 0), write)
            _round(self._group, self._staging, out, into, landing)

    def _rounds(self) -> list[tuple[int, int]]:
        """Whom this rank sends to, and whom it receives from, round by round."""
        rank, world_size = self._group.rank, self._group.world_size
        return [((rank + distance) % world_size, (rank - distance) % world_size) for distance in range(1, world_size)]


def _to_itself(group: Group, staging: Staging, total: int, read: Read, write: Write) -> None:
    for offset in range(0, total, staging.size):
        buffer = staging.host(0, min(staging.size, total - offset))
        read(group.rank, offset, buffer)
        write(group.rank, offset, buffer)
        group.beat()


def _round(
    group: Group,
    staging: Staging,
    out: tuple[int, int, Read],
    into: tuple[int, int, Write],
    landing: Landing | None,
) -> None:
    """One round: all chunks to one rank, all chunks from one rank, two of each under way."""
    to, leaving, read = out
    source, coming, write = into
    size = staging.size
    before: Flight | None = None
    for offset in range(0, max(leaving, coming) + size, size):
        flight: Flight | None = None
        slot = offset // size % 2  # 0 and 1 leave, 2 and 3 come
        sent, received = (min(max(total - offset, 0), size) for total in (leaving, coming))
        if sent:
            read(to, offset, staging.host(slot, sent))
        if sent or received:
            place = None
            if received:
                place = staging.device(2 + slot, received) if landing is None else landing(source, offset, received)
            flight = group.wire.swap(
                send=staging.to_device(slot, sent) if sent else None,
                to=to,
                receive=place,
                source=source,
            )
        if before is not None:
            before.land()
            arrived = min(max(coming - offset + size, 0), size)
            if arrived and landing is None:
                write(source, offset - size, staging.to_host(3 - slot, arrived))
        before = flight


def spread(
    group: Group,
    *,
    sizes: Sequence[int],
    read: Read,
    write: Write,
    budget: int = BUDGET,
    on_device: bool = False,
    name: str = "spread",
) -> None:
    """Rank s's ``sizes[s]`` bytes to all others, for every s. All ranks, with the same ``sizes``.

    ``read(own rank, offset, buffer)`` on the sender, ``write(s, offset, buffer)`` on the others. For the rest, see
    ``exchange``.
    """
    if group.world_size == 1:
        return
    with group.step(name, agree=str(list(sizes))):
        size = min(chunk_bytes(budget, DEPTH), chunk_bytes(max([*sizes, 1]) + 4095, 1))
        staging = Staging(group.device, count=DEPTH, size=size, on_device=on_device)
        chunks = [
            (s, offset) for offset in range(0, max(sizes), size) for s, total in enumerate(sizes) if offset < total
        ]
        under_way: list[tuple[int, int, int, Flight]] = []
        for number, (source, offset) in enumerate(chunks):
            if len(under_way) == DEPTH:
                _deliver(group, staging, under_way.pop(0), number % DEPTH, write)
            count = min(size, sizes[source] - offset)
            slot = number % DEPTH
            if source == group.rank:
                read(source, offset, staging.host(slot, count))
            data = staging.to_device(slot, count) if source == group.rank else staging.device(slot, count)
            under_way.append((source, offset, count, group.wire.broadcast(data, source)))
        for number, landing in enumerate(under_way, len(chunks) - len(under_way)):
            _deliver(group, staging, landing, number % DEPTH, write)


def _deliver(group: Group, staging: Staging, landing: tuple[int, int, int, Flight], slot: int, write: Write) -> None:
    source, offset, count, flight = landing
    flight.land()
    if source != group.rank:
        write(source, offset, staging.to_host(slot, count))
