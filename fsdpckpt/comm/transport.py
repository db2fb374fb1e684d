"""Moves tensors between ranks over the process group, with waits that end when any rank fails.

``TransferBuffers``: double buffers of a fixed size between the caller's memory and the process group's device. On the
CPU both sides are one buffer. On CUDA the caller's side is pinned host memory, and copies run on a stream of their own,
beside the communication of the other buffers. What is sent waits for its copy, because the process group's stream waits
for the stream that is current when it is posted. A buffer is filled again only once its transfer is complete, for which
the host waits; so no copy has to wait for a send or a receive.

``Transport``: Gloo's and NCCL's own waits cannot be interrupted; they happen in the background, while the caller checks
its peers. NCCL's posts, too: the first one between two ranks connects them, and waits for a rank that may have ended.
Tensors handed in lie on ``Transport.device``, are contiguous, and stay untouched until their transfer is complete.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TypeAlias

import torch
import torch.distributed as dist

from fsdpckpt.comm.liveness import Background, wait_for
from fsdpckpt.comm.store_monitor import StoreMonitor

ALIGNMENT = 4096  # pages; also a multiple of every element size, so that no chunk cuts an element


def chunk_bytes(budget: int, buffers: int) -> int:
    """The size in bytes of each of ``buffers`` buffers that share ``budget``."""
    return max(budget // buffers // ALIGNMENT, 1) * ALIGNMENT


class TransferBuffers:
    """``count`` buffers of ``size`` bytes on ``device``; the first ``host_count`` (default: all) have a host side.

    ``on_device``: the caller fills and empties the device's buffers itself, because its data is there.
    """

    def __init__(
        self, device: torch.device, *, count: int, size: int, host_count: int | None = None, on_device: bool = False
    ) -> None:
        self.size = size
        self._device = [torch.empty(size, dtype=torch.uint8, device=device) for _ in range(count)]
        if device.type == "cpu" or on_device:
            self._host = self._device
        else:
            on_host = range(count if host_count is None else host_count)
            self._host = [torch.empty(size, dtype=torch.uint8, pin_memory=True) for _ in on_host]
        self._copies: torch.cuda.Stream | None = None
        if self._host is not self._device:
            self._copies = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            # The allocator may reuse memory that its last owner's queued work still writes to.
            self._copies.wait_stream(torch.cuda.current_stream(device))
            for buffer in self._device:
                buffer.record_stream(self._copies)  # nor may it hand out this memory while a copy is queued

    def host(self, slot: int, count: int) -> torch.Tensor:
        """The caller's side of buffer ``slot``: ``count`` bytes."""
        return self._host[slot][:count]

    def device(self, slot: int, count: int) -> torch.Tensor:
        """The process group's side of buffer ``slot``: ``count`` bytes."""
        return self._device[slot][:count]

    def to_device(self, slot: int, count: int) -> torch.Tensor:
        """What the caller filled, ready to send."""
        if self._copies is not None:
            with torch.cuda.stream(self._copies):
                self.device(slot, count).copy_(self.host(slot, count), non_blocking=True)
            torch.cuda.current_stream(self._device[slot].device).wait_stream(self._copies)
        return self.device(slot, count)

    def to_host(self, slot: int, count: int, into: torch.Tensor | None = None) -> torch.Tensor:
        """What was received, for the caller to read, in ``into`` if given; only once its transfer is complete."""
        if self._copies is None:
            return self.host(slot, count)
        host = self.host(slot, count) if into is None else into
        with torch.cuda.stream(self._copies):
            host.copy_(self.device(slot, count), non_blocking=True)
        self._copies.synchronize()
        return host


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
        self, *, send: tuple[torch.Tensor, int] | None = None, receive: tuple[torch.Tensor, int] | None = None
    ) -> Transfer:
        """Send a tensor to one rank and receive one from one rank, together. Both sides post in the same order."""
        # One batch: NCCL would otherwise order a send and a receive of the same pair, and both sides would wait.
        pairs = [(dist.irecv, receive), (dist.isend, send)]
        operations = [
            dist.P2POp(operation, pair[0], self._global(pair[1]), self._group)
            for operation, pair in pairs
            if pair is not None
        ]
        peers = {pair[1] for _, pair in pairs if pair is not None}
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
