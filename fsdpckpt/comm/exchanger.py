"""Exchanges bytes between all ranks (``exchange``), or from one rank to all (``spread``), through bounded buffers.

The caller states how many bytes go where, and reads and writes them in chunks; this module does not interpret them.
Gloo has no all-to-all, so an exchange is a sequence of ``SendRecv``: in number k, rank r sends to r + k and receives
from r - k. On GPUs several such k are one ``SendRecv``: each message is a kernel, in which NCCL moves the bytes of all
of its peers at the same time.

All ranks order all chunks the same way, and each has several in flight: it posts the next ones before it waits for the
first. There is no deadlock: of the chunks that have not been transferred, all ranks of the first one in that order
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
from fsdpckpt.comm.transport import ALIGNMENT, Transfer, TransferBuffers, chunk_bytes
from fsdpckpt.errors import InternalError

BUDGET = 32 << 20
"""Bytes of buffers by default: chunks of some MiB, beyond which neither Gloo nor NCCL gets faster."""

IN_FLIGHT = 3  # chunks: with fewer, a rank that pauses for a moment delays the others
SEND_BUFFERS = IN_FLIGHT + 1  # one buffer is filled while the others are in flight
DEPTH = 4  # chunks in flight in ``spread``
PEERS_AT_ONCE = 4  # on GPUs

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
            SendRecv(*of_pairs(pairs, sends, receives), read, write=write) for pairs in exchanger.pairs_at_once()
        )


def of_pairs(
    pairs: Iterable[tuple[int, int]], sends: Mapping[int, int], receives: Mapping[int, int]
) -> tuple[dict[int, int], dict[int, int]]:
    """What is sent to the first of each pair of peers, and what is received from the second; not of peers without
    bytes.
    """
    sent: dict[int, int] = {}
    received: dict[int, int] = {}
    for to, source in pairs:
        if sends.get(to):
            sent[to] = sends[to]
        if receives.get(source):
            received[source] = receives[source]
    return sent, received


@dataclass(frozen=True, slots=True)
class SendRecv:
    """Send ``sends[rank]`` bytes to each of some ranks, while ``receives[rank]`` bytes come from each of some.

    ``receive_into``: the tensors that get the bytes, on the CPU as they arrive, from a GPU in one copy; ``write`` is
    not called then.
    ``has_room()``: whether there is room to receive; if not, ``wait_for_room()`` returns once there is.
    ``on_received()`` is called once everything has arrived, of this ``SendRecv`` and of those before it.
    """

    sends: Mapping[int, int]
    receives: Mapping[int, int]
    read: Read
    write: Write | None = None
    receive_into: ReceiveInto | None = None
    has_room: Callable[[], bool] | None = None
    wait_for_room: Callable[[], None] | None = None
    on_received: Callable[[], None] | None = None


@dataclass(frozen=True, slots=True)
class _Span:
    """``count`` bytes of ``peer`` from ``offset`` on, which begin at byte ``at`` of a buffer."""

    peer: int
    offset: int
    count: int
    at: int


@dataclass(frozen=True, slots=True)
class _Chunk:
    """What one message of ``operation`` sends from buffer ``send_buffer``, and receives, in buffer ``receive_buffer``
    unless ``operation`` has memory that the process group can fill.
    """

    operation: SendRecv
    sends: Sequence[_Span]
    receives: Sequence[_Span]
    send_buffer: int
    receive_buffer: int
    first: bool
    last: bool


class Exchanger:
    """Runs exchanges through the same buffers, inside a step of the caller's. Collective.

    ``largest``: the most bytes that a ``SendRecv`` sends to one rank, or receives from one; ``budget`` and
    ``on_device`` as for ``exchange``. ``device_budget``: bytes of buffers on a GPU, if not ``budget``. ``in_place``:
    every ``SendRecv`` has ``receive_into``, so that no host memory is needed to receive, and ``budget`` is for what is
    sent. ``peers_at_once``: how many ranks a ``SendRecv`` sends to, at most (default: one, on GPUs ``PEERS_AT_ONCE``).
    """

    def __init__(
        self,
        group: Group,
        *,
        budget: int = BUDGET,
        device_budget: int | None = None,
        largest: int,
        on_device: bool = False,
        in_place: bool = False,
        peers_at_once: int | None = None,
    ) -> None:
        self._group = group
        device = torch.device(group.device)
        self._on_cpu = device.type == "cpu"
        self._on_device = on_device
        most = peers_at_once or (1 if self._on_cpu else PEERS_AT_ONCE)
        self._peers = max(min(most, group.world_size - 1), 1)
        host_count = SEND_BUFFERS if in_place else SEND_BUFFERS + IN_FLIGHT
        count = host_count if self._on_cpu else SEND_BUFFERS + IN_FLIGHT  # a GPU always receives into its own memory
        share = chunk_bytes(budget, host_count)
        size = share if self._on_cpu or device_budget is None else chunk_bytes(device_budget, count)
        self._span = min(chunk_bytes(size, self._peers), chunk_bytes(largest + ALIGNMENT - 1, 1))
        self._buffers = TransferBuffers(
            device,
            count=count,
            size=self._span * self._peers,
            piece=min(share, self._span),
            to_send=SEND_BUFFERS,
            received=0 if in_place else 1,
            on_device=on_device,
        )

    @property
    def chunk(self) -> int:
        """The largest number of bytes in one call of ``read`` or ``write``."""
        return min(self._buffers.piece, self._span)

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

    def pairs_at_once(self) -> list[list[tuple[int, int]]]:
        """The peers that this rank sends to and receives from at the same time: (to, source). For each ``SendRecv``."""
        rank, world_size = self._group.rank, self._group.world_size
        pairs = [((rank + distance) % world_size, (rank - distance) % world_size) for distance in range(1, world_size)]
        return [pairs[begin : begin + self._peers] for begin in range(0, len(pairs), self._peers)]

    def to_itself(self, total: int, read: Read, write: Write) -> None:
        """Copy what this rank sends to itself, without communication."""
        device = self._group.device if self._on_device else "cpu"
        buffer = torch.empty(min(self.chunk, total), dtype=torch.uint8, device=device)
        for offset in range(0, total, self.chunk):
            part = buffer[: total - offset]
            read(self._group.rank, offset, part)
            write(self._group.rank, offset, part)
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
                    if chunk.first and chunk.operation.wait_for_room is not None:
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
            total = max([*operation.sends.values(), *operation.receives.values(), 1])
            for offset in range(0, total, self._span):
                sends, receives = (self._spans(counts, offset) for counts in (operation.sends, operation.receives))
                if sends:
                    free.acquire()
                    if ended.is_set():  # after a failure: what is in the buffers may still be in flight
                        return
                    for span in sends:
                        _read(self._buffers, outgoing, span, operation.read)
                first, last = offset == 0, offset + self._span >= total
                yield _Chunk(operation, sends, receives, outgoing, SEND_BUFFERS + incoming, first, last)
                outgoing, incoming = (outgoing + bool(sends)) % SEND_BUFFERS, (incoming + 1) % IN_FLIGHT

    def _spans(self, counts: Mapping[int, int], offset: int) -> list[_Span]:
        """The next bytes of each peer from ``offset`` on; each peer has its own place in a buffer."""
        return [
            _Span(peer, offset, min(nbytes - offset, self._span), number * self._span)
            for number, (peer, nbytes) in enumerate(counts.items())
            if nbytes > offset
        ]

    def _post(self, chunk: _Chunk) -> Transfer | None:
        if not chunk.sends and not chunk.receives:
            return None
        receive_into = chunk.operation.receive_into if self._on_cpu else None
        receives = [
            (
                self._buffers.part(chunk.receive_buffer, span.at, span.count)
                if receive_into is None
                else receive_into(span.peer, span.offset, span.count),
                span.peer,
            )
            for span in chunk.receives
        ]
        sends = [(self._buffers.part(chunk.send_buffer, span.at, span.count), span.peer) for span in chunk.sends]
        self._buffers.wait_for_copies()
        transfer: Transfer = self._group.transport.send_recv(sends=sends, receives=receives)
        return transfer

    def _complete(self, chunk: _Chunk, transfer: Transfer | None, free: Semaphore) -> None:
        operation = chunk.operation
        if transfer is not None:
            transfer.wait()
        if chunk.sends:
            free.release()
        for span in chunk.receives:
            self._hand_over(span, operation, chunk.receive_buffer)
        if chunk.last and operation.on_received is not None:
            operation.on_received()

    def _hand_over(self, span: _Span, operation: SendRecv, slot: int) -> None:
        """Give what has arrived to ``operation``, unless it has arrived in memory of that."""
        if operation.receive_into is None:
            if operation.write is not None:
                _write(self._buffers, slot, span, operation.write)
        elif not self._on_cpu:
            self._buffers.to_host(slot, span.at, operation.receive_into(span.peer, span.offset, span.count))


def _read(buffers: TransferBuffers, slot: int, span: _Span, read: Read) -> None:
    buffers.fill(slot, span.at, span.count, lambda begin, piece: read(span.peer, span.offset + begin, piece))


def _write(buffers: TransferBuffers, slot: int, span: _Span, write: Write) -> None:
    buffers.empty(slot, span.at, span.count, lambda begin, piece: write(span.peer, span.offset + begin, piece))


def _has_room(chunk: _Chunk) -> bool:
    return not chunk.first or chunk.operation.has_room is None or chunk.operation.has_room()


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
        size = min(chunk_bytes(budget, DEPTH), chunk_bytes(max([*sizes, 1]) + ALIGNMENT - 1, 1))
        buffers = TransferBuffers(torch.device(group.device), count=DEPTH, size=size, to_send=2, on_device=on_device)
        chunks = [
            (s, offset) for offset in range(0, max(sizes), size) for s, total in enumerate(sizes) if offset < total
        ]
        in_flight: deque[tuple[int, _Span, Transfer]] = deque()

        def complete() -> None:
            slot, span, transfer = in_flight.popleft()
            transfer.wait()
            if span.peer != group.rank:
                _write(buffers, slot, span, write)

        for number, (source, offset) in enumerate(chunks):
            if len(in_flight) == DEPTH:
                complete()
            slot, span = number % DEPTH, _Span(source, offset, min(size, sizes[source] - offset), 0)
            if source == group.rank:
                _read(buffers, slot, span, read)
                buffers.wait_for_copies()
            sent = group.transport.broadcast(buffers.part(slot, 0, span.count), source)
            in_flight.append((slot, span, sent))
        while in_flight:
            complete()
