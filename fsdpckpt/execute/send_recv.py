"""The rounds of one worker's streams as legs of an exchange: read from its sources, received into its arrivals."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import numpy as np
import torch

from fsdpckpt.comm.exchanger import Leg
from fsdpckpt.execute.copy_pool import Crew
from fsdpckpt.execute.receive_buffers import Arrivals
from fsdpckpt.execute.stream_checksums import Sent
from fsdpckpt.execute.window import Assembler
from fsdpckpt.ir.tensors import Int64Array
from fsdpckpt.plan.transfer import Routes

__all__ = ["Legs"]


class Legs:
    """``reader`` assembles what is sent, of which ``sent`` keeps the sums.

    ``on_host``: what comes can arrive where it is kept.
    """

    def __init__(
        self,
        routes: Routes,
        arrivals: Arrivals,
        reader: Assembler,
        crew: Crew,
        watch: Callable[[], None],
        sent: Sent,
        *,
        on_host: bool,
    ) -> None:
        self._routes = routes
        self._arrivals = arrivals
        self._reader = reader
        self._crew = crew
        self._watch = watch
        self._sent = sent
        self._on_host = on_host
        self._begins = {peer: np.cumsum(column) - column for peer, column in routes.sends.items()}

    def of(self, pairs: Sequence[tuple[int, int]]) -> Iterator[Leg]:
        """Round by round, and in each the ``pairs`` of ranks (to whom, from whom) between which something crosses."""
        sends, receives = self._routes.sends, self._routes.receives
        near = [(to, source) for to, source in pairs if to in sends or source in receives]
        for number in range(self._routes.rounds):
            counts = [(to, _at(sends, to, number), source, _at(receives, source, number)) for to, source in near]
            legs = [each for each in counts if each[1] or each[3]]
            for index, (to, leaving, source, coming) in enumerate(legs):
                first, last = index == 0, index == len(legs) - 1
                yield Leg(
                    to,
                    leaving,
                    partial(self._read, number),
                    source,
                    coming,
                    write=partial(self._write, number),
                    landing=partial(self._landing, number) if self._on_host else None,
                    may_begin=partial(self._arrivals.claim, number) if first else None,
                    wait=partial(self._wait, number) if first else None,
                    landed=partial(self._crew.arrived, number) if last else None,
                )

    def _read(self, number: int, peer: int, offset: int, buffer: torch.Tensor) -> None:
        begin = int(self._begins[peer][number]) + offset
        stream, view = self._routes.streams[peer], buffer.numpy().data
        _, known = self._reader.assemble(stream, begin, begin + len(buffer), into=view)
        self._sent.add(peer, begin, view, known)

    def _landing(self, number: int, peer: int, offset: int, count: int) -> torch.Tensor:
        return torch.from_numpy(self._arrivals.place(peer, number, offset, count))

    def _write(self, number: int, peer: int, offset: int, buffer: torch.Tensor) -> None:
        self._arrivals.place(peer, number, offset, len(buffer))[:] = buffer.numpy()

    def _wait(self, number: int) -> None:
        self._crew.wait(self._watch, partial(self._arrivals.claim, number))


def _at(counts: Mapping[int, Int64Array], peer: int, number: int) -> int:
    return int(counts[peer][number]) if peer in counts else 0
