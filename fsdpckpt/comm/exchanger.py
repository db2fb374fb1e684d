"""Exchanges bytes between all ranks (``exchange``), or from one to all (``spread``), through bounded buffers.

The caller says how many bytes go where, and reads and writes them in chunks; nothing here knows what they mean. Gloo
has no all-to-all, so an exchange is a sequence of ``SendRecv``: in number k rank r sends to r + k and receives from
r - k.

All ranks order the chunks of all of them alike, and each has several under way: it posts the next ones before it waits
for the first. Nobody deadlocks: of the chunks that have not crossed, both sides of the first one in that order have
posted it, or wait for nothing but their own disks.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from threading import Event, Semaphore
from typing import Generic, Self, TypeAlias, TypeVar

import torch

from fsdpckpt.comm.protocol import Group
from fsdpckpt.comm.store_monitor import LOOK
from fsdpckpt.comm.transport import Flight, Staging, chunk_bytes
from fsdpckpt.errors import InternalError

__all__ = ["Ahead", "BUDGET", "Exchanger", "LEAVING", "Landing", "Leg", "Read", "Write", "exchange", "spread"]

MOST = 16  # items made and not taken; what they hold is bounded elsewhere
PATIENCE = 2.0  # seconds for the thread to end when its items are not wanted any more

T = TypeVar("T")


class Ahead(Generic[T]):
    """``items``, made by a daemon thread. ``watch`` is called while the caller waits for one, and may raise."""

    def __init__(self, items: Iterator[T], watch: Callable[[], None], name: str) -> None:
        self._items = items
        self._watch = watch
        self._made: SimpleQueue[tuple[T] | BaseException] = SimpleQueue()
        self._room = threading.Semaphore(MOST)
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> T:
        while True:
            try:
                found = self._made.get(timeout=LOOK)
            except Empty:
                self._watch()
                continue
            if isinstance(found, BaseException):
                self._made.put(found)  # for whoever asks again
                raise found
            self._room.release()
            return found[0]

    def close(self) -> None:
        """No further item is wanted. Waits a little for the thread, which may be in the middle of one."""
        self._stopped = True
        self._room.release()
        self._thread.join(PATIENCE)

    def _run(self) -> None:
        try:
            for item in self._items:
                self._made.put((item,))
                self._room.acquire()
                if self._stopped:
                    return
            self._made.put(StopIteration())
        except BaseException as error:  # noqa: BLE001  # raised by the thread that takes the items
            self._made.put(error)


BUDGET = 32 << 20
"""Bytes of buffers by default: chunks of some MiB, beyond which neither Gloo nor NCCL gets faster."""

UNDER_WAY = 3  # chunks: with fewer, a rank that is held up for a moment holds up the others
LEAVING = UNDER_WAY + 1  # buffers for what leaves: one is filled while the others are under way
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
        exchanger.to_itself(sends.get(group.rank, 0), read, write)
        exchanger.run(
            Leg(to, sends.get(to, 0), read, source, receives.get(source, 0), write=write)
            for to, source in exchanger.pairs()
        )


@dataclass(frozen=True, slots=True)
class Leg:
    """``leaving`` bytes to rank ``to``, while ``coming`` bytes come from rank ``source``.

    ``landing``: where what comes may arrive directly, on the group's device; ``write`` is not called then.
    ``may_begin()``: whether there is room for what comes; where it says no, ``wait()`` returns once there is.
    ``landed()``: all of it has come, and that of the legs before.
    """

    to: int
    leaving: int
    read: Read
    source: int
    coming: int
    write: Write | None = None
    landing: Landing | None = None
    may_begin: Callable[[], bool] | None = None
    wait: Callable[[], None] | None = None
    landed: Callable[[], None] | None = None


@dataclass(frozen=True, slots=True)
class _Hop:
    """One chunk of a leg: ``sent`` bytes from ``offset`` on, which lie in buffer ``out``; ``received`` bytes go to
    buffer ``into``, where the leg has no landing."""

    leg: Leg
    offset: int
    sent: int
    received: int
    out: int
    into: int
    last: bool


class Exchanger:
    """Exchanges through the same buffers, inside a step of the caller's. All ranks do the same.

    ``largest``: bytes of the largest leg there will be; ``budget`` and ``on_device`` as for ``exchange``. ``landing``:
    every leg has one, so that no buffer is needed for what comes.
    """

    def __init__(
        self, group: Group, *, budget: int = BUDGET, largest: int, on_device: bool = False, landing: bool = False
    ) -> None:
        self._group = group
        count = LEAVING if landing else LEAVING + UNDER_WAY
        size = min(chunk_bytes(budget, count), chunk_bytes(largest + 4095, 1))
        self._staging = Staging(torch.device(group.device), count=count, size=size, on_device=on_device)

    @property
    def chunk(self) -> int:
        """The most bytes that ``read``, ``write`` or ``landing`` are asked for."""
        return self._staging.size

    def check(self, sends: Mapping[int, int], receives: Mapping[int, int]) -> None:
        """Raises WorkerError when a peer has other counts than this rank. Counts of several exchanges may be added."""
        group = self._group
        strangers = [peer for peer in (*sends, *receives) if not 0 <= peer < group.world_size]
        if strangers or sends.get(group.rank, 0) != receives.get(group.rank, 0):
            raise InternalError(f"rank {group.rank} was to exchange what it cannot: {dict(sends)}, {dict(receives)}")
        for to, source in self.pairs():
            mine = torch.tensor([sends.get(to, 0)], dtype=torch.int64, device=group.device)
            found = torch.empty_like(mine)
            group.transport.swap(send=mine, to=to, receive=found, source=source).land()
            if int(found) != receives.get(source, 0):
                raise InternalError(
                    f"the plans of rank {source} and rank {group.rank} differ",
                    rank=group.rank,
                    expected=f"{receives.get(source, 0)} bytes from rank {source}",
                    found=f"{int(found)} bytes that it sends",
                )

    def pairs(self) -> list[tuple[int, int]]:
        """Whom this rank sends to, and whom it receives from meanwhile, leg by leg."""
        rank, world_size = self._group.rank, self._group.world_size
        return [((rank + distance) % world_size, (rank - distance) % world_size) for distance in range(1, world_size)]

    def to_itself(self, total: int, read: Read, write: Write) -> None:
        """What this rank sends to itself: nothing crosses."""
        for offset in range(0, total, self.chunk):
            buffer = self._staging.host(0, min(self.chunk, total - offset))
            read(self._group.rank, offset, buffer)
            write(self._group.rank, offset, buffer)
            self._group.beat()

    def run(self, legs: Iterable[Leg], *, watch: Callable[[], None] | None = None) -> None:
        """All ``legs``, in order and overlapping. Those of all ranks have to fit: nothing here finds out.

        ``watch``: given, another thread takes the legs and calls their ``read``, ahead of the communication; this one
        calls ``watch`` while it waits for that.
        """
        free, ended = Semaphore(LEAVING), Event()
        hops = self._hops(legs, free, ended)
        under_way: deque[tuple[_Hop, Flight | None]] = deque()
        with closing(hops if watch is None else Ahead(hops, watch, "fsdpckpt-read")) as filled:
            try:
                for hop in filled:
                    while under_way and (len(under_way) == UNDER_WAY or not _may_begin(hop)):
                        self._land(*under_way.popleft(), free)
                    if hop.offset == 0 and hop.leg.wait is not None:
                        hop.leg.wait()
                    under_way.append((hop, self._post(hop)))
                while under_way:
                    self._land(*under_way.popleft(), free)
            finally:
                ended.set()
                free.release(LEAVING)  # nobody waits for a buffer any more

    def _hops(self, legs: Iterable[Leg], free: Semaphore, ended: Event) -> Generator[_Hop]:
        """The chunks of ``legs`` in order, each as soon as there is a buffer for it, filled."""
        out = into = 0
        for leg in legs:
            total = max(leg.leaving, leg.coming)
            for offset in range(0, max(total, 1), self.chunk):
                sent, received = (min(max(part - offset, 0), self.chunk) for part in (leg.leaving, leg.coming))
                if sent:
                    free.acquire()
                    if ended.is_set():  # after a failure: what is in the buffers may still be under way
                        return
                    leg.read(leg.to, offset, self._staging.host(out, sent))
                yield _Hop(leg, offset, sent, received, out, LEAVING + into, offset + self.chunk >= total)
                out, into = (out + bool(sent)) % LEAVING, (into + 1) % UNDER_WAY

    def _post(self, hop: _Hop) -> Flight | None:
        leg, place = hop.leg, None
        if not (hop.sent or hop.received):
            return None
        if hop.received and leg.landing is not None:
            place = leg.landing(leg.source, hop.offset, hop.received)
        elif hop.received:
            place = self._staging.device(hop.into, hop.received)
        send = self._staging.to_device(hop.out, hop.sent) if hop.sent else None
        flight: Flight = self._group.transport.swap(send=send, to=leg.to, receive=place, source=leg.source)
        return flight

    def _land(self, hop: _Hop, flight: Flight | None, free: Semaphore) -> None:
        leg = hop.leg
        if flight is not None:
            flight.land()
        if hop.sent:
            free.release()
        if hop.received and leg.write is not None and leg.landing is None:
            leg.write(leg.source, hop.offset, self._staging.to_host(hop.into, hop.received))
        if hop.last and leg.landed is not None:
            leg.landed()


def _may_begin(hop: _Hop) -> bool:
    return hop.offset > 0 or hop.leg.may_begin is None or hop.leg.may_begin()


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
        staging = Staging(torch.device(group.device), count=DEPTH, size=size, on_device=on_device)
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
            under_way.append((source, offset, count, group.transport.broadcast(data, source)))
        for number, landing in enumerate(under_way, len(chunks) - len(under_way)):
            _deliver(group, staging, landing, number % DEPTH, write)


def _deliver(group: Group, staging: Staging, landing: tuple[int, int, int, Flight], slot: int, write: Write) -> None:
    source, offset, count, flight = landing
    flight.land()
    if source != group.rank:
        write(source, offset, staging.to_host(slot, count))
