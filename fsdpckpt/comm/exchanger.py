"""Exchanges bytes between all ranks (``exchange``), or from one rank to all (``spread``), through bounded buffers.

The caller states how many bytes go where, and reads and writes them in chunks; this module does not interpret them.
Gloo has no all-to-all, so an exchange is a sequence of ``SendRecv``: in number k, rank r sends to r + k and receives
from r - k.

All ranks order all chunks the same way, and each has several in flight: it posts the next ones before it waits for the
first. There is no deadlock: of the chunks that have not been transferred, both sides of the first one in that order
have posted it, or wait only for their own disks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from threading import Event, Semaphore
from typing import TypeAlias

import torch

from fsdpckpt.comm.liveness import prefetched
from fsdpckpt.comm.protocol import Group
from fsdpckpt.comm.transport import Transfer, TransferBuffers, chunk_bytes
from fsdpckpt.errors import InternalError

BUDGET = 32 << 20
"""Bytes of buffers by default: chunks of some MiB, beyond which neither Gloo nor NCCL gets faster."""

IN_FLIGHT = 3  # chunks: with fewer, a rank that pauses for a moment delays the others
SEND_BUFFERS = IN_FLIGHT + 1  # one buffer is filled while the others are in flight
DEPTH = 4  # chunks in flight in ``spread``

Read: TypeAlias = Callable[[int, int, torch.Tensor], None]
"""``read(peer, offset, buffer)``: fill ``buffer`` (1-D uint8) with the bytes for ``peer`` from ``offset`` on."""

Write: TypeAlias = Callable[[int, int, torch.Tensor], None]
"""``write(peer, offset, buffer)``: take the bytes that came from ``peer`` at ``offset``; valid during the call."""

ReceiveInto: TypeAlias = Callable[[int, int, int], torch.Tensor]
"""``receive_into(peer, offset, count)``: a contiguous 1-D uint8 tensor of ``count`` elements in host memory, the
caller's own; pinned where the group's device is a GPU.
"""


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
    """Move ``sends[peer]`` bytes to each peer and ``receives[peer]`` bytes from each. Collective.

    A rank may be its own peer. ``budget``: bytes of buffers, on the device and, for CUDA, again in pinned memory.
    ``on_device``: the buffers passed to ``read`` and ``write`` are on the group's device, else in host memory. Raises
    WorkerError if a peer has other counts than this rank, before any byte is moved.
    """
    with group.step(name):
        largest = max([*sends.values(), *receives.values(), 1])
        exchanger = Exchanger(group, budget=budget, largest=largest, on_device=on_device)
        exchanger.check(sends, receives)
        exchanger.to_itself(sends.get(group.rank, 0), read, write)
        exchanger.run(
            SendRecv(to, sends.get(to, 0), read, source, receives.get(source, 0), write=write)
            for to, source in exchanger.pairs()
        )


@dataclass(frozen=True, slots=True)
class SendRecv:
    """Send ``send_bytes`` to rank ``to``, while ``receive_bytes`` come from rank ``source``.

    ``receive_into``: the tensors that get the bytes, on the CPU as they arrive, from a GPU in one copy; ``write`` is
    not called then.
    ``has_room()``: whether there is room to receive; if not, ``wait_for_room()`` returns once there is.
    ``on_received()`` is called once everything has arrived, of this ``SendRecv`` and of those before it.
    """

    to: int
    send_bytes: int
    read: Read
    source: int
    receive_bytes: int
    write: Write | None = None
    receive_into: ReceiveInto | None = None
    has_room: Callable[[], bool] | None = None
    wait_for_room: Callable[[], None] | None = None
    on_received: Callable[[], None] | None = None


@dataclass(frozen=True, slots=True)
class _Chunk:
    """``sent`` bytes from ``offset`` on, in buffer ``send_buffer``, and ``received`` bytes, which arrive in buffer
    ``receive_buffer`` unless ``operation`` has memory that the process group can fill.
    """

    operation: SendRecv
    offset: int
    sent: int
    received: int
    send_buffer: int
    receive_buffer: int
    last: bool


class Exchanger:
    """Runs exchanges through the same buffers, inside a step of the caller's. Collective.

    ``largest``: bytes of the largest ``SendRecv``; ``budget`` and ``on_device`` as for ``exchange``. ``in_place``:
    every ``SendRecv`` has ``receive_into``, so that no host memory is needed to receive, and ``budget`` is for what is
    sent.
    """

    def __init__(
        self, group: Group, *, budget: int = BUDGET, largest: int, on_device: bool = False, in_place: bool = False
    ) -> None:
        self._group = group
        device = torch.device(group.device)
        self._on_cpu = device.type == "cpu"
        host_count = SEND_BUFFERS if in_place else SEND_BUFFERS + IN_FLIGHT
        count = host_count if self._on_cpu else SEND_BUFFERS + IN_FLIGHT  # a GPU always receives into its own memory
        size = min(chunk_bytes(budget, host_count), chunk_bytes(largest + 4095, 1))
        self._buffers = TransferBuffers(device, count=count, size=size, host_count=host_count, on_device=on_device)

    @property
    def chunk(self) -> int:
        """The largest number of bytes in one call of ``read``, ``write`` or ``receive_into``."""
        return self._buffers.size

    def check(self, sends: Mapping[int, int], receives: Mapping[int, int]) -> None:
        """Raises WorkerError if a peer has other counts than this rank. Counts of several exchanges may be added."""
        group = self._group
        for peer in (*sends, *receives):
            group.check_rank("peer", [peer])
        counts = [sends.get(peer, 0) for peer in range(group.world_size)]
        sends_by_rank = [counts] if group.control is None else group.control.all_counts(counts)
        for source, row in enumerate(sends_by_rank):
            if row[group.rank] != receives.get(source, 0):
                raise InternalError(
                    f"the plans of rank {source} and rank {group.rank} differ",
                    rank=group.rank,
                    expected=f"{receives.get(source, 0)} bytes from rank {source}",
                    found=f"{row[group.rank]} bytes that it sends",
                )

    def pairs(self) -> list[tuple[int, int]]:
        """The peers that this rank sends to and receives from at the same time: (to, source), in order."""
        rank, world_size = self._group.rank, self._group.world_size
        return [((rank + distance) % world_size, (rank - distance) % world_size) for distance in range(1, world_size)]

    def to_itself(self, total: int, read: Read, write: Write) -> None:
        """Copy what this rank sends to itself, without communication."""
        for offset in range(0, total, self.chunk):
            buffer = self._buffers.host(0, min(self.chunk, total - offset))
            read(self._group.rank, offset, buffer)
            write(self._group.rank, offset, buffer)
            self._group.beat()

    def run(self, operations: Iterable[SendRecv], *, watch: Callable[[], None] | None = None) -> None:
        """Run ``operations``, in order and overlapping. Those of all ranks must match: this is not checked.

        ``watch``: if given, another thread takes the operations and calls their ``read``, ahead of the communication;
        this thread calls ``watch`` while it waits for that.
        """
        free, ended = Semaphore(SEND_BUFFERS), Event()
        chunks = self._chunks(operations, free, ended)
        in_flight: deque[tuple[_Chunk, Transfer | None]] = deque()
        with closing(chunks if watch is None else prefetched(chunks, watch, name="fsdpckpt-read")) as filled:
            try:
                for chunk in filled:
                    while in_flight and (len(in_flight) == IN_FLIGHT or not _has_room(chunk)):
                        self._complete(*in_flight.popleft(), free)
                    if chunk.offset == 0 and chunk.operation.wait_for_room is not None:
                        chunk.operation.wait_for_room()
                    in_flight.append((chunk, self._post(chunk)))
                while in_flight:
                    self._complete(*in_flight.popleft(), free)
            finally:
                ended.set()
                free.release(SEND_BUFFERS)  # nobody waits for a buffer any more

    def _chunks(self, operations: Iterable[SendRecv], free: Semaphore, ended: Event) -> Generator[_Chunk]:
        """The chunks of ``operations`` in order, each as soon as there is a buffer for it, filled."""
        outgoing = incoming = 0
        for operation in operations:
            total = max(operation.send_bytes, operation.receive_bytes)
            for offset in range(0, max(total, 1), self.chunk):
                sent, received = (
                    min(max(nbytes - offset, 0), self.chunk)
                    for nbytes in (operation.send_bytes, operation.receive_bytes)
                )
                if sent:
                    free.acquire()
                    if ended.is_set():  # after a failure: what is in the buffers may still be in flight
                        return
                    operation.read(operation.to, offset, self._buffers.host(outgoing, sent))
                last = offset + self.chunk >= total
                yield _Chunk(operation, offset, sent, received, outgoing, SEND_BUFFERS + incoming, last)
                outgoing, incoming = (outgoing + bool(sent)) % SEND_BUFFERS, (incoming + 1) % IN_FLIGHT

    def _post(self, chunk: _Chunk) -> Transfer | None:
        operation, send, receive = chunk.operation, None, None
        if chunk.received and operation.receive_into is not None and self._on_cpu:
            receive = operation.receive_into(operation.source, chunk.offset, chunk.received), operation.source
        elif chunk.received:
            receive = self._buffers.device(chunk.receive_buffer, chunk.received), operation.source
        if chunk.sent:
            send = self._buffers.to_device(chunk.send_buffer, chunk.sent), operation.to
        if send is None and receive is None:
            return None
        transfer: Transfer = self._group.transport.send_recv(send=send, receive=receive)
        return transfer

    def _complete(self, chunk: _Chunk, transfer: Transfer | None, free: Semaphore) -> None:
        operation = chunk.operation
        if transfer is not None:
            transfer.wait()
        if chunk.sent:
            free.release()
        if chunk.received:
            self._hand_over(chunk)
        if chunk.last and operation.on_received is not None:
            operation.on_received()

    def _hand_over(self, chunk: _Chunk) -> None:
        """Give what has arrived to its operation, unless it has arrived in memory of that."""
        operation, offset, count, slot = chunk.operation, chunk.offset, chunk.received, chunk.receive_buffer
        if operation.receive_into is None:
            if operation.write is not None:
                operation.write(operation.source, offset, self._buffers.to_host(slot, count))
        elif not self._on_cpu:
            self._buffers.to_host(slot, count, operation.receive_into(operation.source, offset, count))


def _has_room(chunk: _Chunk) -> bool:
    return chunk.offset > 0 or chunk.operation.has_room is None or chunk.operation.has_room()


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
    """Send rank s's ``sizes[s]`` bytes to all others, for every s. Collective, with the same ``sizes`` on all ranks.

    ``read(own rank, offset, buffer)`` is called on the sender, ``write(s, offset, buffer)`` on the others. For the
    rest, see ``exchange``.
    """
    if group.world_size == 1:
        return
    with group.step(name, agree=str(list(sizes))):
        size = min(chunk_bytes(budget, DEPTH), chunk_bytes(max([*sizes, 1]) + 4095, 1))
        buffers = TransferBuffers(torch.device(group.device), count=DEPTH, size=size, on_device=on_device)
        chunks = [
            (s, offset) for offset in range(0, max(sizes), size) for s, total in enumerate(sizes) if offset < total
        ]
        in_flight: deque[tuple[int, int, int, int, Transfer]] = deque()

        def complete() -> None:
            source, offset, count, slot, transfer = in_flight.popleft()
            transfer.wait()
            if source != group.rank:
                write(source, offset, buffers.to_host(slot, count))

        for number, (source, offset) in enumerate(chunks):
            if len(in_flight) == DEPTH:
                complete()
            count, slot = min(size, sizes[source] - offset), number % DEPTH
            if source == group.rank:
                read(source, offset, buffers.host(slot, count))
            data = buffers.to_device(slot, count) if source == group.rank else buffers.device(slot, count)
            in_flight.append((source, offset, count, slot, group.transport.broadcast(data, source)))
        while in_flight:
            complete()
