"""Sends source bytes to the ranks that cannot read them, and receives what this rank cannot read.

Bytes travel in the rounds of a ``TransferPlan``: a rank reads what it sends from its sources, and keeps the rounds it
receives in buffers until its copy pool has written their windows. Both sides checksum every stream, and compare the
checksums once everything is written. Imports torch: ``execute`` imports this module only if bytes are exchanged.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from isal.isal_zlib import crc32, crc32_combine

from fsdpckpt.comm.exchanger import Exchanger, SendRecv, of_pairs
from fsdpckpt.comm.protocol import Group
from fsdpckpt.errors import InternalError, WorkerError
from fsdpckpt.execute.checks import Part, SourceCheck, combine
from fsdpckpt.execute.job import Job
from fsdpckpt.execute.window import CHECKSUM_BLOCK, Assembler, CopyPool, SourceReader
from fsdpckpt.execute.window_sums import WindowSums
from fsdpckpt.ir.checkpoint import SourceFile
from fsdpckpt.ir.tensors import Int64Array
from fsdpckpt.plan import FilePlan
from fsdpckpt.plan.streams import ALIGNMENT
from fsdpckpt.plan.transfer import TransferPlan, Window
from fsdpckpt.storage.local_target import aligned_buffer
from fsdpckpt.storage.sources import Sources

DEVICE_BYTES = 112 << 20
"""On a GPU, in place of the host memory's share: messages of up to 16 MiB. Each is a kernel that waits for its peers,
and the more it moves, the less it waits.
"""

Pairs: TypeAlias = Sequence[tuple[int, int]]
"""The peers of a rank: to whom it sends, from whom it receives."""


class TransferRun:
    """This rank's part in carrying out a ``TransferPlan``.

    ``reader``: reads the sources of the job, and what this rank receives. ``sums``: of all that it has sent so far.
    """

    def __init__(self, group: Group, job: Job, transfers: TransferPlan, sources: Sources, check: SourceCheck) -> None:
        self._group = group
        self._job = job
        self._transfers = transfers
        self._check = check
        windows_of_round = Counter(window.round for window in transfers.windows if window.round >= 0)
        held = job.settings.rounds_held
        pinned = torch.device(group.device).type == "cuda"  # a GPU copies to it directly
        self.buffers = ReceiveBuffers(
            transfers.receives, windows_of_round, transfers.rounds, held, in_place=transfers.in_place, pinned=pinned
        )
        self.reader = StreamReader(job.files, sources, self.buffers, group.world_size)
        self.sums = SentSums(transfers.streams)
        self._begins = {peer: np.cumsum(column) - column for peer, column in transfers.sends.items()}

    def run(self, pool: CopyPool, watch: Callable[[], None]) -> None:
        """Run all rounds while the threads of ``pool`` write what has been received. Collective."""
        columns = (*self._transfers.sends.values(), *self._transfers.receives.values(), np.ones(1))
        exchanger = Exchanger(
            self._group,
            budget=self._job.settings.exchange_bytes,
            device_budget=DEVICE_BYTES,
            largest=max(int(column.max()) for column in columns),
            in_place=True,
        )
        exchanger.check(_totals(self._transfers.sends), _totals(self._transfers.receives))
        assembler = Assembler(self._job.plan, self.reader, self._check, exchanger.chunk)
        exchanger.run(self._send_recvs(exchanger.pairs_at_once(), assembler, pool, watch), watch=watch)

    def _send_recvs(
        self, peers: Sequence[Pairs], assembler: Assembler, pool: CopyPool, watch: Callable[[], None]
    ) -> Iterator[SendRecv]:
        """What the ``peers`` exchange, those at once that can be, round by round."""
        for number in range(self._transfers.rounds):
            sends, receives = _of_round(self._transfers.sends, number), _of_round(self._transfers.receives, number)
            counts = [of_pairs(pairs, sends, receives) for pairs in peers]
            used = [each for each in counts if any(each)]
            reserve = partial(self.buffers.reserve, number)
            for index, (sent, received) in enumerate(used):
                first, last = index == 0, index == len(used) - 1
                yield SendRecv(
                    sent,
                    received,
                    partial(self._read, assembler, number),
                    receive_into=partial(self._receive_into, number),
                    has_room=reserve if first else None,
                    wait_for_room=partial(pool.wait, watch, reserve) if first else None,
                    on_received=partial(pool.received, number) if last else None,
                )

    def _read(self, assembler: Assembler, number: int, peer: int, offset: int, buffer: torch.Tensor) -> None:
        begin = int(self._begins[peer][number]) + offset
        stream, view = self._transfers.streams[peer], buffer.numpy().data
        assembler.assemble(stream, begin, begin + len(buffer), into=view)
        self.sums.add(peer, begin, begin + len(buffer), assembler.sums(view))

    def _receive_into(self, number: int, peer: int, offset: int, count: int) -> torch.Tensor:
        return torch.from_numpy(self.buffers.part(peer, number, offset, count))

    def require_what_was_sent(self, sums: Sequence[Mapping[int, int]]) -> None:
        """Raises WorkerError if this rank did not receive what was sent to it. ``sums[s]``: the
        ``SentSums.by_rank`` of rank s.
        """
        rank = self._group.rank
        self.reader.require_what_was_sent(
            {sender: sent[rank] for sender, sent in enumerate(sums) if rank in sent}, self._transfers.received
        )


class SentSums:
    """The CRC-32 of what was sent to each rank so far, ``by_rank``: of tensors' bytes, without the gaps in windows.

    ``streams``: of the ``TransferPlan``.
    """

    def __init__(self, streams: Mapping[int, FilePlan]) -> None:
        self.by_rank: dict[int, int] = {}
        self._runs = {rank: _runs(stream) for rank, stream in streams.items()}

    def add(self, rank: int, begin: int, end: int, sums: WindowSums) -> None:
        """The bytes [begin, end) of the stream to ``rank`` are sent; each stream is sent in order."""
        runs = self._runs[rank]
        low, high = int(runs[:, 1].searchsorted(begin, side="right")), int(runs[:, 0].searchsorted(end))
        for first, last in runs[low:high].tolist():
            first, last = max(first, begin), min(last, end)  # noqa: PLW2901
            self.by_rank[rank] = crc32_combine(self.by_rank.get(rank, 0), sums.of(first, last), last - first)


def _runs(stream: FilePlan) -> Int64Array:
    """Where the bytes of tensors in ``stream`` begin and end, as rows: those that follow each other are one row."""
    begins, ends = stream.write_items[:, 0], stream.write_items.sum(axis=1)
    apart = np.flatnonzero(begins[1:] != ends[:-1])
    return np.stack([begins[np.append(0, apart + 1)], ends[np.append(apart, len(ends) - 1)]], axis=1)


def _of_round(counts: Mapping[int, Int64Array], number: int) -> dict[int, int]:
    """The bytes of round ``number`` by peer, of the peers that have some."""
    return {peer: int(column[number]) for peer, column in counts.items() if column[number]}


def _totals(counts: Mapping[int, Int64Array]) -> dict[int, int]:
    return {peer: int(column.sum()) for peer, column in counts.items()}


class ReceiveBuffers:
    """Holds the rounds that were received until all of their windows are written.

    ``receives[s]``: bytes of each of the ``rounds`` from rank s. ``windows[n]``: how many windows need the bytes of
    round n. ``capacity``: how many rounds are held at once. ``in_place``: of the ``TransferPlan``. ``pinned``: in
    memory that a GPU copies to.
    """

    def __init__(
        self,
        receives: Mapping[int, Int64Array],
        windows: Mapping[int, int],
        rounds: int,
        capacity: int,
        *,
        in_place: Mapping[Window, tuple[int, int]] | None = None,
        pinned: bool = False,
    ) -> None:
        self._in_place = in_place or {}
        aligned = {(sender, window.round) for window, (sender, _) in self._in_place.items()}
        totals = np.zeros(rounds, np.int64)
        self._position: dict[int, Int64Array] = {}  # where in the buffer of each round the part of a sender begins
        self._begin: dict[int, Int64Array] = {}  # the offset in the stream of a sender at which a round begins
        for sender, counts in sorted(receives.items()):
            self._begin[sender] = np.cumsum(counts) - counts
            for number in (number for source, number in aligned if source == sender):
                totals[number] += -totals[number] % ALIGNMENT
            self._position[sender] = totals.copy()
            totals += counts
        self._size = int(totals.max()) if rounds else 0
        self._pinned = pinned
        self._windows_left = dict(windows)
        self._buffers: dict[int, npt.NDArray[np.uint8]] = {}
        self._free: list[npt.NDArray[np.uint8]] = []
        self._not_made = min(capacity, rounds)  # each is made when it is needed: the first bytes wait for one only
        self._lock = threading.Lock()

    def reserve(self, number: int) -> bool:
        """Make room for round ``number``, unless it has room or needs none; False while all room is taken.

        Reuses the buffer that was freed last: it is still in the processor's cache.
        """
        with self._lock:
            if number in self._windows_left and number not in self._buffers:
                if self._free:
                    self._buffers[number] = self._free.pop()
                elif self._not_made:
                    self._buffers[number] = self._make()
                    self._not_made -= 1
                else:
                    return False
            return True

    def _make(self) -> npt.NDArray[np.uint8]:
        """Memory for one round, as numpy copies without blocking other threads, unlike memoryviews."""
        if self._pinned:
            return torch.empty(self._size, dtype=torch.uint8, pin_memory=True).numpy()
        return np.frombuffer(aligned_buffer(self._size), np.uint8)

    def written(self, number: int) -> None:
        """One window of round ``number`` is written; the last one frees the round's buffer."""
        with self._lock:
            self._windows_left[number] -= 1
            if not self._windows_left[number]:
                self._free.append(self._buffers.pop(number))

    def part(self, sender: int, number: int, offset: int, nbytes: int) -> npt.NDArray[np.uint8]:
        """The buffer for ``nbytes`` from ``sender`` that begin ``offset`` bytes into its part of round ``number``."""
        begin = int(self._position[sender][number]) + offset
        return self._buffers[number][begin : begin + nbytes]

    def place_of(self, window: Window) -> memoryview | None:
        """The memory in which most of ``window`` was received, aligned as it is in the file; None if it was not."""
        if window not in self._in_place:
            return None
        sender, begin = self._in_place[window]
        return self.stream(sender, begin, window.end - window.begin).data

    def stream(self, sender: int, offset: int, nbytes: int) -> npt.NDArray[np.uint8]:
        """The buffer for ``nbytes`` of the stream of ``sender``, from a round that is held."""
        number = int(np.searchsorted(self._begin[sender], offset, side="right")) - 1
        return self.part(sender, number, offset - int(self._begin[sender][number]), nbytes)

    def read_into(self, sender: int, offset: int, buffer: memoryview) -> None:
        """Read bytes of the stream of ``sender``, from a round that is held. What is in its place is not copied."""
        received, target = self.stream(sender, offset, len(buffer)), np.frombuffer(buffer, np.uint8)
        if received.ctypes.data != target.ctypes.data:
            target[:] = received

    def close(self) -> None:
        """Free the memory. Nothing is read afterwards."""
        self._buffers.clear()
        self._free.clear()


class StreamReader(SourceReader):
    """Reads source files, and from number ``len(files)`` on the stream of each of ``senders`` ranks."""

    def __init__(self, files: Sequence[SourceFile], sources: Sources, buffers: ReceiveBuffers, senders: int) -> None:
        super().__init__(files, sources)
        self.widest_gap = np.append(self.widest_gap, np.zeros(senders, np.int64))  # every byte is read once
        self._buffers = buffers
        self._received: list[list[Part]] = [[] for _ in range(senders)]

    def read_into(self, file: int, offset: int, view: memoryview) -> None:
        sender = file - len(self._files)
        if sender < 0:
            super().read_into(file, offset, view)
        else:
            self.read_summed(file, offset, view)

    def read_summed(self, file: int, offset: int, view: memoryview) -> int:
        sender = file - len(self._files)
        if sender < 0:
            return super().read_summed(file, offset, view)
        crc = 0
        for at in range(0, len(view), CHECKSUM_BLOCK):
            block = view[at : at + CHECKSUM_BLOCK]
            self._buffers.read_into(sender, offset + at, block)
            crc = crc32(block, crc)
        self._received[sender].append((offset, len(view), crc))
        return crc

    def require_what_was_sent(self, sent: Mapping[int, int], nbytes: Mapping[int, int]) -> None:
        """Raises WorkerError if what was read differs from ``sent``: for each sender, the checksum of its stream.

        ``nbytes``: of tensors, from each sender.
        """
        for sender, parts in enumerate(self._received):
            parts.sort()
            twice = next((part[0] for last, part in pairwise(parts) if part[0] < last[0] + last[1]), None)
            total = sum(length for _, length, _ in parts)
            if twice is not None or total != nbytes.get(sender, 0):
                raise InternalError(
                    f"bytes of worker {sender}'s stream were read twice, or skipped",
                    expected=f"{nbytes.get(sender, 0)} bytes",
                    found=f"{total}" if twice is None else f"those at {twice} twice",
                )
            found, expected = combine(parts), sent.get(sender, 0)
            if found != expected:
                raise WorkerError(
                    f"the {total} bytes received from worker {sender} differ from what it sent",
                    expected=f"CRC-32 {expected:08x}",
                    found=f"{found:08x}",
                    why="the memory of one of the two machines, or the network between them, damages data",
                    next_step="run the command again, preferably on other machines",
                    retryable=True,
                )
