"""Bytes between workers over the process group, with waits that end when any worker fails.

Gloo's and NCCL's own waits cannot be interrupted; they happen in the background, and the caller patrols meanwhile.
Tensors handed in lie on ``Transport.device``, are contiguous, and must stay untouched until the flight has landed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
import torch.distributed as dist

from fsdpckpt.comm.background import Background, Job
from fsdpckpt.comm.store_monitor import LOOK, Board

__all__ = ["Flight", "Transport"]

_Post: TypeAlias = "Callable[[], Sequence[dist.Work]]"


class Flight:
    """Communication on its way; ``land`` waits for it."""

    def __init__(self, transport: Transport, job: Job[None], peer: int | None) -> None:
        self._transport = transport
        self._job = job
        self._peer = peer

    def land(self) -> None:
        """Wait. Raises WorkerError when a worker failed meanwhile, be it another than the one waited for."""
        board = self._transport.board
        while not self._job.done.wait(LOOK):
            board.patrol()
        try:
            self._job.result()
        except RuntimeError as error:  # what process groups raise; its subclasses differ between versions
            raise board.connection_lost(error, self._peer) from error
        board.beat()


class Transport:
    """The process group ``group`` as seen by one worker of ``board``. Peers and sources are ranks in the group."""

    def __init__(self, group: dist.ProcessGroup, board: Board, device: torch.device) -> None:
        self.board = board
        self.device = device
        self._group = group
        self._background = Background("fsdpckpt-data")
        self._waiting: torch.cuda.Stream | None = None

    def swap(
        self, *, send: torch.Tensor | None, to: int | None, receive: torch.Tensor | None, source: int | None
    ) -> Flight:
        """Send to one rank and receive from one, together (either may be None). Both sides post in the same order."""
        operations: list[dist.P2POp] = []
        # One batch: NCCL would otherwise order a send and a receive of the same pair, and both sides would wait.
        if receive is not None and source is not None:
            operations.append(dist.P2POp(dist.irecv, receive, self._global(source), self._group))
        if send is not None and to is not None:
            operations.append(dist.P2POp(dist.isend, send, self._global(to), self._group))
        peers = {rank for rank, data in ((to, send), (source, receive)) if data is not None}
        blamed = peers.pop() if len(peers) == 1 else None
        return self._fly(lambda: dist.batch_isend_irecv(operations), blamed)

    def broadcast(self, tensor: torch.Tensor, source: int) -> Flight:
        """Rank ``source``'s ``tensor`` into everyone's. All ranks, in the same order."""

        def post() -> list[dist.Work]:
            return [dist.broadcast(tensor, self._global(source), group=self._group, async_op=True)]

        return self._fly(post, None)

    def all_counts(self, counts: Sequence[int]) -> list[list[int]]:
        """Every rank's ``counts``, of one length everywhere, by rank. All ranks."""
        mine = torch.tensor(list(counts), dtype=torch.int64, device=self.device)
        found = [torch.empty_like(mine) for _ in range(self.board.world_size)]
        self._fly(lambda: [dist.all_gather(found, mine, group=self._group, async_op=True)], None).land()
        return [tensor.tolist() for tensor in found]

    def _fly(self, post: _Post, peer: int | None) -> Flight:
        """Post now, in the caller's order; wait in the background."""
        self.board.raise_failure()
        try:
            works = post()
        except RuntimeError as error:
            raise self.board.connection_lost(error, peer) from error
        return Flight(self, self._background.submit(lambda: self._wait(works)), peer)

    def _wait(self, works: Sequence[dist.Work]) -> None:
        if self.device.type != "cuda":
            for work in works:
                work.wait()
            return
        # NCCL's wait only orders the stream that is current; the buffer may be used again once the device is through.
        # On a stream of its own, since others may have any amount of work of the caller's.
        torch.cuda.set_device(self.device)  # of this thread: a new one is on the first GPU, whichever the worker's is
        if self._waiting is None:
            self._waiting = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(self._waiting):
            for work in works:
                work.wait()
        self._waiting.synchronize()

    def _global(self, rank: int) -> int:
        return dist.get_global_rank(self._group, rank)

    def close(self) -> None:
        """End the background thread, unless it is stuck in a wait that will not end."""
        self._background.close(0.0 if self.board.failure else 1.0)
