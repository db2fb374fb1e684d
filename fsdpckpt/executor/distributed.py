"""Runs a plan on all workers of a group: each writes its share, and gets what it cannot read from those that can.

The protocol, by all ranks: 1. agree on the plan, by its digest. 2. The first worker of every file that has several
makes it. 3. Windows whose sources a worker sees are copied by its threads; for all others the bytes come in rounds, and
the threads copy a round while the next one arrives. 4. What only several workers know together, the checksums of shared
files and of records that were read in parts, is brought together; files are finished, records judged.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import cast

import numpy as np
import numpy.typing as npt
import torch

from fsdpckpt.comm.exchange import BUFFERS, Exchanger
from fsdpckpt.comm.group import Group
from fsdpckpt.comm.messages import all_gather_objects
from fsdpckpt.comm.staging import chunk_bytes
from fsdpckpt.executor.arrivals import HELD, Arrivals, SourcesAndStreams, stream_file
from fsdpckpt.executor.carried import carrying
from fsdpckpt.executor.checks import SourceCheck
from fsdpckpt.executor.crew import SLOWEST_DISK, Crew
from fsdpckpt.executor.local import copy_window
from fsdpckpt.executor.pulse import pulse
from fsdpckpt.executor.routes import OwnWindow, find_routes
from fsdpckpt.executor.shared_files import Share, WorkerOutput
from fsdpckpt.executor.shipping import Job
from fsdpckpt.executor.window import Assembler
from fsdpckpt.progress import Progress

__all__ = ["execute_together"]

Visible = npt.NDArray[np.bool_]
FileShares = dict[int, Share]
"""By segment: what the worker of that segment knows of it."""


def execute_together(
    group: Group,
    job: Job,
    visible: Visible,
    *,
    locate: Callable[[str], str],
    threads: int,
    progress: Progress,
) -> dict[str, int]:
    """Write every file of ``job`` where ``locate`` says on the worker that writes it, durably. All ranks.

    ``visible[file, worker]``: who sees which source. Returns the CRC-32 of each target file by its path, on every rank.
    Raises WorkerError on all ranks for an error on any; its cause is carried (``executor.carried``).
    """
    with group.step("agree on the plan", agree=job.digest()):
        pass
    with group.step("find routes"), carrying(), pulse(group):
        run = _Run(group, job, visible, locate, threads, progress)
    try:
        with run.sources:
            with group.step("make shared files"), carrying():
                run.make_shared_files()
            with group.step("copy"), carrying():
                run.copy()
        with group.step("finish"), carrying():
            return run.finish()
    except BaseException:
        run.abandon()
        raise


class _Run:
    """This worker's part of one run."""

    def __init__(
        self,
        group: Group,
        job: Job,
        visible: Visible,
        locate: Callable[[str], str],
        threads: int,
        progress: Progress,
    ) -> None:
        self._group = group
        self._job = job
        self._threads = threads
        self._progress = progress
        self._routes = find_routes(
            job.plan,
            job.segments,
            visible,
            rank=group.rank,
            window=job.settings.window,
            round_bytes=job.settings.round_bytes,
        )
        self._arrivals = Arrivals(self._routes.receives, self._routes.rounds)
        self._check = SourceCheck(job.files, job.checksums)
        self._files = (*job.files, *map(stream_file, range(group.world_size)))
        self._crew: Crew | None = None
        self.sources = SourcesAndStreams(self._arrivals, group.world_size)
        count = Counter(window.segment for window in self._routes.windows)
        self._outputs = {segment: self._output(segment, count[segment], locate) for segment in count}

    def _output(self, number: int, windows: int, locate: Callable[[str], str]) -> WorkerOutput:
        segment = self._job.segments[number]
        file = self._routes.files[number]
        return WorkerOutput(
            file,
            locate(file.path),
            windows,
            first=segment.begin == 0,
            alone=(segment.begin, segment.end) == (0, file.nbytes),
            expect_silence=self._expect_silence,
        )

    def _expect_silence(self, nbytes: int) -> None:
        if self._crew is not None:
            self._crew.expect_silence(nbytes)

    def _watch(self) -> None:
        self._group.watch(moving=self._crew is None or self._crew.moved())

    def make_shared_files(self) -> None:
        made = [output for output in self._outputs.values() if output.first and not output.alone]
        with self._group.silent_for(sum(output.plan.nbytes for output in made) / SLOWEST_DISK):
            for output in made:
                output.open()

    def abandon(self) -> None:
        """The run failed: let go of what is open."""
        for output in self._outputs.values():
            output.abandon()

    def copy(self) -> None:
        """Every window of this worker; and everything that it sends."""
        settings = self._job.settings
        assemblers = [self._assembler(settings.window) for _ in range(self._threads)]

        def copy(thread: int, window: OwnWindow) -> None:
            copy_window(self._outputs[window.segment], assemblers[thread], window.begin, window.end)
            self._progress.advance(window.end - window.begin)

        self._progress.begin("copy", sum(window.end - window.begin for window in self._routes.windows))
        crew = self._crew = Crew(self._routes.windows, self._threads, copy)
        try:
            self._receive(crew)
            crew.wait(None, self._watch)
        finally:
            crew.stop()
            self._crew = None  # with it go the buffers, which the collector would find late
        self._arrivals.close()
        self._progress.end()

    def _assembler(self, window: int) -> Assembler:
        return Assembler(self._job.plan, self._files, self.sources, self._check, window)

    def _receive(self, crew: Crew) -> None:
        """All rounds: sends and receives, while the threads of ``crew`` write what has arrived."""
        if not self._routes.rounds:
            return
        budget = self._job.settings.exchange_bytes
        reader = self._assembler(chunk_bytes(budget, BUFFERS))
        largest = max(
            int(column.max()) for column in (*self._routes.sends.values(), *self._routes.receives.values(), np.ones(1))
        )
        exchanger = Exchanger(self._group, budget=budget, largest=largest)
        exchanger.check(_totals(self._routes.sends), _totals(self._routes.receives))
        sent = dict.fromkeys(self._routes.sends, 0)
        for number in range(self._routes.rounds):
            crew.wait(number - HELD, self._watch)
            sends = _of_round(self._routes.sends, number)

            def read(peer: int, offset: int, buffer: torch.Tensor) -> None:
                begin = sent[peer] + offset
                reader.assemble(self._routes.streams[peer], begin, begin + len(buffer), into=buffer.numpy().data)

            def landing(peer: int, offset: int, count: int, number: int = number) -> torch.Tensor:
                return torch.from_numpy(self._arrivals.place(peer, number, offset, count))

            def write(peer: int, offset: int, buffer: torch.Tensor, number: int = number) -> None:
                self._arrivals.place(peer, number, offset, len(buffer))[:] = buffer.numpy()

            on_host = self._group.device.type == "cpu"
            receives = _of_round(self._routes.receives, number)
            exchanger.run(sends, receives, read, write, landing=landing if on_host else None)
            for peer, count in sends.items():
                sent[peer] += count
            crew.arrived(number)

    def finish(self) -> dict[str, int]:
        """Files that others wrote too, and records that others read too; the CRC-32 of every target file."""
        nbytes = sum(output.plan.nbytes for output in self._outputs.values() if not output.alone)
        with self._group.silent_for(nbytes / SLOWEST_DISK):
            mine = {number: output.share() for number, output in self._outputs.items() if not output.alone}
        found = [
            cast("tuple[FileShares, list[tuple[int, int, int, int, int]]]", told)
            for told in all_gather_objects(self._group, (mine, self._check.unfinished()), name="join")
        ]
        shares = {number: share for told, _ in found for number, share in told.items()}
        if self._group.rank == 0:  # one judge is enough
            for rank, (_, records) in enumerate(found):
                if rank:
                    self._check.absorb(records)
            self._check.finish()
        with self._group.silent_for(nbytes / SLOWEST_DISK):
            self._finish_shared(shares)
        crcs = {output.plan.path: output.crc for output in self._outputs.values() if output.first}
        for theirs in all_gather_objects(self._group, crcs, name="checksums"):
            crcs.update(cast("dict[str, int]", theirs))
        return crcs

    def _finish_shared(self, shares: Mapping[int, Share]) -> None:
        for number, output in self._outputs.items():
            if not output.first or output.alone:
                continue
            mine = self._job.segments[number]
            others = [
                share
                for other, share in shares.items()
                if other != number
                and (self._job.segments[other].file, self._job.segments[other].place) == (mine.file, mine.place)
            ]
            output.finish(others)


def _totals(counts: Mapping[int, npt.NDArray[np.int64]]) -> dict[int, int]:
    return {peer: int(column.sum()) for peer, column in counts.items()}


def _of_round(counts: Mapping[int, npt.NDArray[np.int64]], number: int) -> dict[int, int]:
    return {peer: int(column[number]) for peer, column in counts.items() if column[number]}
