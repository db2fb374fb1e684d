"""Moves tensors between ranks over the process group, with waits that end when any rank fails.

``TransferBuffers``: buffers of a fixed size on the process group's device, which the caller fills and empties piece by
piece. On the CPU it does so in place. On CUDA each piece goes through pinned host memory, and is copied on a stream of
its own, beside the communication of the other buffers. What is sent waits for its copies, because the process group's
stream waits for the stream that is current when it is posted. A buffer is filled again only once its transfer is
complete, for which the host waits; so no copy has to wait for a send or a receive.

``Transport``: Gloo's and NCCL's own waits cannot be interrupted; they happen in the background, while the caller checks
its peers. NCCL's posts, too: the first one between two ranks connects them, and waits for a rank that may have ended.
Tensors handed in lie on ``Transport.device``, are contiguous, and stay untouched until their transfer is complete.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import TypeAlias

import torch
import torch.distributed as dist

from fsdpckpt.comm.liveness import Background, wait_for
from fsdpckpt.comm.store_monitor import StoreMonitor

ALIGNMENT = 4096  # pages; also a multiple of every element size, so that no chunk cuts an element


def chunk_bytes(budget: int, buffers: int) -> int:
    """The size in bytes of each of ``buffers`` buffers that share ``budget``."""
    return max(budget // buffers // ALIGNMENT, 1) * ALIGNMENT


Fill: TypeAlias = Callable[[int, torch.Tensor], None]
"""``fill(offset, piece)``: fill ``piece`` (1-D uint8) with the bytes from ``offset`` on, of those that are wanted."""

Empty: TypeAlias = Callable[[int, torch.Tensor], None]
"""``empty(offset, piece)``: take the bytes from ``offset`` on, of those that came; valid during the call."""


class TransferBuffers:
    """``count`` buffers of ``size`` bytes on ``device``.

    Beside a GPU, ``to_send`` and ``received`` pieces of ``piece`` bytes of pinned memory (default: one of each, of
    ``size`` bytes); ``received`` may be 0 if only ``to_host`` is used. ``on_device``: the caller's data is there, too,
    so that nothing is copied.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        count: int,
        size: int,
        piece: int | None = None,
        to_send: int = 1,
        received: int = 1,
        on_device: bool = False,
    ) -> None:
        self._device = [torch.empty(size, dtype=torch.uint8, device=device) for _ in range(count)]
        self._staged = device.type == "cuda" and not on_device
        self.piece = size if piece is None or not self._staged else piece
        if not self._staged:
            return
        pinned = partial(torch.empty, self.piece, dtype=torch.uint8, pin_memory=True)
        self._to_send = [pinned() for _ in range(to_send)]
        self._received = [pinned() for _ in range(received)]
        self._next = 0  # of the pieces to send
        self._outgoing, self._incoming = (
            torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            for _ in range(2)
        )
        for copies in (self._outgoing, self._incoming):
            # The allocator may reuse memory that its last owner's queued work still writes to.
            copies.wait_stream(torch.cuda.current_stream(device))
            for buffer in self._device:
                buffer.record_stream(copies)  # nor may it hand out this memory while a copy is queued

    def part(self, slot: int, at: int, count: int) -> torch.Tensor:
        """The bytes [at, at + count) of buffer ``slot``, on the device."""
        return self._device[slot][at : at + count]

    def fill(self, slot: int, at: int, count: int, fill: Fill) -> None:
        """Have ``fill`` fill ``count`` bytes of buffer ``slot``, which is sent after ``wait_for_copies``."""
        for begin in range(0, count, self.piece):
            nbytes = min(self.piece, count - begin)
            part = self.part(slot, at + begin, nbytes)
            if not self._staged:
                fill(begin, part)
                continue
            if self._next == len(self._to_send):
                self._outgoing.synchronize()  # all pieces are used: by now nearly all are copied
                self._next = 0
            host = self._to_send[self._next][:nbytes]
            self._next += 1
            fill(begin, host)
            with torch.cuda.stream(self._outgoing):
                part.copy_(host, non_blocking=True)

    def wait_for_copies(self) -> None:
        """What is sent from now on waits until all that ``fill`` filled is on the device."""
        if self._staged:
            torch.cuda.current_stream(self._device[0].device).wait_stream(self._outgoing)

    def empty(self, slot: int, at: int, count: int, empty: Empty) -> None:
        """Have ``empty`` take ``count`` bytes of buffer ``slot``, whose transfer is complete."""
        for begin in range(0, count, self.piece):
            nbytes = min(self.piece, count - begin)
            if not self._staged:
                empty(begin, self.part(slot, at + begin, nbytes))
                continue
            host = self._received[0][:nbytes]
            self.to_host(slot, at + begin, host)
            empty(begin, host)

    def to_host(self, slot: int, at: int, into: torch.Tensor) -> None:
        """Copy from buffer ``slot``, whose transfer is complete, to ``into``: pinned memory of the caller."""
        with torch.cuda.stream(self._incoming):
            into.copy_(self.part(slot, at, len(into)), non_blocking=True)
        self._incoming.synchronize()


_Post: TypeAlias = "Callable[[], Sequence[dist.Work]]"


class Transfer:
    """Communication in flight."""

    def __init__(self, transport: Transport, future: Future[None], peer: int | None) -> None:
        self._transport = transport
        self._future = future
        self._peer = peer

    def wait(self) -> None:
        """Wait until it is complete. Raises WorkerError if any rank failed meanwhile, not only the peer."""
        monitor = self._transport.monitor
        try:
            wait_for(self._future, monitor.check_peers)
        except RuntimeError as error:  # what process groups raise; its subclasses differ between versions
            raise monitor.connection_lost(error, self._peer) from error
        monitor.check_peers()


class Transport:
    """The process group ``group`` of the rank that ``monitor`` watches. Peers and sources are ranks in the group."""

    def __init__(self, group: dist.ProcessGroup, monitor: StoreMonitor, device: torch.device) -> None:
        self.monitor = monitor
        self.device = device
        self._group = group
        self._posting = Background("fsdpckpt-post")
        self._background = Background("fsdpckpt-data")
        self._waiting: torch.cuda.Stream | None = None

    def send_recv(
        self, *, sends: Sequence[tuple[torch.Tensor, int]] = (), receives: Sequence[tuple[torch.Tensor, int]] = ()
    ) -> Transfer:
        """Send tensors to ranks and receive some from ranks, together. Both sides of a pair post in the same order."""
        # One batch: NCCL would otherwise order a send and a receive of the same pair, and both sides would wait.
        operations = [
            dist.P2POp(operation, tensor, self._global(peer), self._group)
            for operation, pairs in ((dist.irecv, receives), (dist.isend, sends))
            for tensor, peer in pairs
        ]
        peers = {peer for _, peer in (*sends, *receives)}
        return self._start(lambda: dist.batch_isend_irecv(operations), peers.pop() if len(peers) == 1 else None)

    def broadcast(self, tensor: torch.Tensor, source: int) -> Transfer:
        """Copy rank ``source``'s ``tensor`` to every rank's. Collective."""

        def post() -> list[dist.Work]:
            return [dist.broadcast(tensor, self._global(source), group=self._group, async_op=True)]

        return self._start(post, None)

    def all_counts(self, counts: Sequence[int]) -> list[list[int]]:
        """Every rank's ``counts``, of one length everywhere, by rank. Collective."""
        local = torch.tensor(list(counts), dtype=torch.int64, device=self.device)
        gathered = [torch.empty_like(local) for _ in range(self.monitor.world_size)]
        self._start(lambda: [dist.all_gather(gathered, local, group=self._group, async_op=True)], None).wait()
        return [tensor.tolist() for tensor in gathered]

    def _start(self, post: _Post, peer: int | None) -> Transfer:
        """Post in the caller's order; wait in the background."""
        self.monitor.raise_failure()
        if self.device.type == "cuda":
            stream = torch.cuda.current_stream(self.device)  # what is sent is ready once this stream has come here
            posted = self._posting.submit(lambda: self._post_on(stream, post))
            return Transfer(self, self._background.submit(lambda: self._wait(posted.result())), peer)
        try:
            works = post()
        except RuntimeError as error:
            raise self.monitor.connection_lost(error, peer) from error
        return Transfer(self, self._background.submit(lambda: self._wait(works)), peer)

    def _post_on(self, stream: torch.cuda.Stream, post: _Post) -> Sequence[dist.Work]:
        torch.cuda.set_device(self.device)  # per thread: a new one begins on the first GPU
        with torch.cuda.stream(stream):
            return post()

    def _wait(self, works: Sequence[dist.Work]) -> None:
        if self.device.type != "cuda":
            for work in works:
                work.wait()
            return
        # NCCL's wait only orders the current stream; the buffer may be reused once the device is done. On a stream of
        # its own, because other streams may hold any amount of the caller's work.
        torch.cuda.set_device(self.device)  # per thread: a new one begins on the first GPU
        if self._waiting is None:
            self._waiting = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(self._waiting):
            for work in works:
                work.wait()
        self._waiting.synchronize()

    def _global(self, rank: int) -> int:
        return dist.get_global_rank(self._group, rank)

    def close(self) -> None:
        """End the background threads, unless they are stuck in a wait that will not end."""
        patience = 0.0 if self.monitor.failure else 1.0
        self._posting.close(patience)
        self._background.close(patience)
