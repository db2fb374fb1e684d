"""Runs a plan on all workers of a group: each writes its share, and gets what it cannot read from those that can.

The protocol, by all ranks: 1. agree on the plan, by its digest. 2. The first worker of every file that has several
makes it. 3. Windows whose sources a worker sees are copied by its threads; for all others the bytes come in rounds, and
the threads copy a round while the next one arrives. 4. What only several workers know together, the checksums of shared
files and of records that were read in parts, is brought together; files are finished, records judged.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import cast

import numpy as np
import numpy.typing as npt

from fsdpckpt.comm.exchanger import Exchanger
from fsdpckpt.comm.protocol import Group
from fsdpckpt.errors import WorkerError
from fsdpckpt.execute.copy_pool import PATIENCE, SLOWEST_DISK, Crew
from fsdpckpt.execute.kept import Kept
from fsdpckpt.execute.kept_together import Done, judge_again, keep_together
from fsdpckpt.execute.local import copy_window
from fsdpckpt.execute.receive_buffers import Arrivals, SourcesAndStreams, stream_file
from fsdpckpt.execute.recorder import Recorder
from fsdpckpt.execute.resume import Finished
from fsdpckpt.execute.send_recv import Legs
from fsdpckpt.execute.shared_files import Share, WorkerOutput
from fsdpckpt.execute.shipping import Job
from fsdpckpt.execute.stream_checksums import Sent, StreamCheck
from fsdpckpt.execute.window import Assembler
from fsdpckpt.plan.transfer import OwnWindow, find_routes
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
    recorder: Recorder | None = None,
    finished: Finished | None = None,
    output: type[WorkerOutput] = WorkerOutput,
) -> dict[str, int]:
    """Write every file of ``job`` where ``locate`` says on the worker that writes it, durably. All ranks.

    ``visible[file, worker]``: who sees which source. ``recorder`` keeps this worker's journal, where it writes.
    ``finished``, on rank 0: what the journals of an interrupted run say, of which ``job.claims`` are read back.

    Returns the CRC-32 of each target file by its path, on every rank.
    Raises WorkerError on all ranks for an error on any; its cause is carried (``executor.carried``).
    """
    with group.step("agree on the plan", agree=job.digest()):
        pass
    kept, done = keep_together(group, job, locate, threads)
    with group.step("find routes"), group.heartbeat():
        run = _Run(group, job, visible, locate, threads, progress, recorder, finished or Finished(), kept, done, output)
    try:
        with run.sources:
            with group.step("make shared files"):
                run.make_shared_files()
            with group.step("copy"):
                run.copy()
        with group.step("finish"):
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
        recorder: Recorder | None,
        finished: Finished,
        kept: Mapping[int, Kept],
        done: Done,
        output: type[WorkerOutput],
    ) -> None:
        self._group = group
        self._job = job
        self._threads = threads
        self._progress = progress
        self._visible = visible
        self._recorder = recorder
        self._finished = finished
        self._kept = kept
        self._kind = output
        self._routes = find_routes(
            job.plan,
            job.segments,
            visible,
            rank=group.rank,
            window=job.settings.window,
            round_bytes=job.settings.round_bytes,
            done=done,
        )
        arriving = Counter(window.round for window in self._routes.windows if window.round >= 0)
        self._arrivals = Arrivals(self._routes.receives, arriving, self._routes.rounds, job.settings.rounds)
        self._check = StreamCheck(job.files, job.checksums)
        self._sent = Sent()
        self._files = (*job.files, *map(stream_file, range(group.world_size)))
        self._crew: Crew | None = None
        self.sources = SourcesAndStreams(self._arrivals, group.world_size)
        count = Counter(window.segment for window in self._routes.windows)
        self._outputs = {segment: self._output(segment, count[segment], locate) for segment in count}

    def _output(self, number: int, windows: int, locate: Callable[[str], str]) -> WorkerOutput:
        segment = self._job.segments[number]
        file = self._routes.files[number]
        return self._kind(
            file,
            locate(file.path),
            windows,
            first=segment.begin == 0,
            alone=(segment.begin, segment.end) == (0, file.nbytes),
            expect_silence=self._expect_silence,
            kept=self._kept.get(number),
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
        """The run failed: name what is written in the journal, and let go of what is open."""
        if self._recorder is not None:
            self._recorder.close(complete=False, patience=PATIENCE)
        for output in self._outputs.values():
            output.abandon()

    def copy(self) -> None:
        """Every window of this worker; and everything that it sends."""
        settings = self._job.settings
        assemblers = [self._assembler(settings.window) for _ in range(self._threads)]

        def copy(thread: int, window: OwnWindow) -> None:
            output = self._outputs[window.segment]
            part = copy_window(output, assemblers[thread], window.begin, window.end)
            if self._recorder is not None:
                number = self._job.segments[window.segment].file
                self._recorder.wrote(number, output.open(), part, received=window.round >= 0)
            if window.round >= 0:
                self._arrivals.written(window.round)
            self._progress.advance(window.end - window.begin)

        if self._recorder is not None:
            self._check.fresh()
            self._recorder.start(self._check.fresh)
        self._progress.begin("copy", sum(window.end - window.begin for window in self._routes.windows))
        crew = self._crew = Crew(self._routes.windows, self._threads, copy)
        try:
            self._receive(crew)
            crew.wait(self._watch)
        finally:
            crew.stop()
            self._crew = None  # with it go the buffers, which the collector would find late
        self._arrivals.close()
        self._progress.end()

    def _assembler(self, window: int) -> Assembler:
        return Assembler(self._job.plan, self._files, self.sources, self._check, window)

    def _receive(self, crew: Crew) -> None:
        """All rounds: sends and receives, while the threads of ``crew`` write what has arrived."""
        if not self._job.settings.exchange_bytes:
            return  # the same on all workers, unlike the number of rounds
        on_host = self._group.device.type == "cpu"
        columns = (*self._routes.sends.values(), *self._routes.receives.values(), np.ones(1))
        exchanger = Exchanger(
            self._group,
            budget=self._job.settings.exchange_bytes,
            largest=max(int(column.max()) for column in columns),
            landing=on_host,
        )
        exchanger.check(_totals(self._routes.sends), _totals(self._routes.receives))
        reader = self._assembler(exchanger.chunk)
        legs = Legs(self._routes, self._arrivals, reader, crew, self._watch, self._sent, on_host=on_host)
        exchanger.run(legs.of(exchanger.pairs()), watch=self._watch)

    def finish(self) -> dict[str, int]:
        """Files that others wrote too, and records that others read too; the CRC-32 of every target file."""
        nbytes = sum(output.plan.nbytes for output in self._outputs.values() if not output.alone)
        with self._group.silent_for(nbytes / SLOWEST_DISK):
            mine = {number: output.share() for number, output in self._outputs.items() if not output.alone}
        found = [
            cast("tuple[FileShares, list[tuple[int, int, int, int, int]], dict[int, int]]", told)
            for told in self._group.all_gather_objects((mine, self._check.unfinished(), self._sent.sums), name="join")
        ]
        self._judge_streams([sums for _, _, sums in found])
        shares = {number: share for told, _, _ in found for number, share in told.items()}
        if self._group.rank == 0:  # one judge is enough
            for rank, (_, records, _) in enumerate(found):
                if rank:
                    self._check.absorb(records)
            self._check.absorb(self._finished.parts)
            self._check.finish()
        judge_again(self._group, self._job, self._check, self._finished, self._visible)
        with self._group.silent_for(nbytes / SLOWEST_DISK):
            self._finish_shared(shares)
        crcs = {output.plan.path: output.crc for output in self._outputs.values() if output.first}
        for theirs in self._group.all_gather_objects(crcs, name="checksums"):
            crcs.update(cast("dict[str, int]", theirs))
        if self._recorder is not None:
            self._recorder.close(complete=True)
        return crcs

    def _judge_streams(self, sums: Sequence[Mapping[int, int]]) -> None:
        """``sums[s]``: those of what worker s has sent, by receiver. What was written of damaged bytes is disowned."""
        rank = self._group.rank
        try:
            self._check.require_what_was_sent({s: theirs[rank] for s, theirs in enumerate(sums) if rank in theirs})
        except WorkerError:
            if self._recorder is not None:
                self._recorder.retract()
            raise

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
