"""Runs a plan: each rank writes its segments of the target files, and receives what it cannot read from ranks that can.

A world of one sees every source and writes every file, by the same steps. All ranks:

1. Agree on the plan, by its digest, and read back what an interrupted run has written. 2. The first rank of every file
that several ranks write creates it. 3. Copy: threads assemble the windows whose sources this rank sees, and those whose
bytes have been received, while the main thread communicates. 4. Combine what is spread over ranks: the checksums of
shared files, and of source records that were read in parts. Finish the files, judge the records.

To resume an interrupted run, the ranks that would write the windows in its journals read them back. A window whose
bytes match the journal is kept, any other is copied again.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import numpy as np
from isal.isal_zlib import crc32

from fsdpckpt.comm.protocol import Group
from fsdpckpt.errors import WorkerError
from fsdpckpt.execute.checks import (
    Part,
    SourceCheck,
    SourcePart,
    SourceRecord,
    has_gaps,
    reread,
    sum_of,
    unproved,
)
from fsdpckpt.execute.job import Job
from fsdpckpt.execute.journal import Finished, Recorder
from fsdpckpt.execute.output import ComparedOutput, LatePlaces, Output, OutputState, TargetChecks, write_window
from fsdpckpt.execute.window import PATIENCE, SLOWEST_DISK, Assembler, CopyPool, SourceReader
from fsdpckpt.plan import Claim, FilePlan, Range
from fsdpckpt.plan.transfer import Segment, Visible, Window, plan_transfers
from fsdpckpt.progress import Progress
from fsdpckpt.storage import ByteSource
from fsdpckpt.storage.local import BLOCK, WritableFile, aligned_buffer
from fsdpckpt.storage.sources import Sources
from fsdpckpt.text import size_text

if TYPE_CHECKING:
    from fsdpckpt.execute.send_recv import TransferRun


def execute(
    group: Group,
    job: Job,
    visible: Visible | None = None,
    *,
    sources: Sources,
    locate: Callable[[str], str],
    threads: int,
    progress: Progress,
    recorder: Recorder | None = None,
    finished: Finished | None = None,
    compare: bool = False,
) -> dict[str, int]:
    """Write every file of ``job`` durably at ``locate(path)``, each part on the rank that owns it. Collective.

    ``visible[file, rank]``: which rank sees which source; None: every rank sees all of them. ``sources`` opens those
    that this rank sees. ``recorder`` keeps this rank's journal, if it writes. ``finished``, on rank 0: the journals of
    an interrupted run; ``job.claims`` from them are read back, and kept if they are as the journal says. ``compare``:
    the files exist and are compared with what would be written; raises TargetExistsError if they differ.

    Returns the CRC-32 of each target file by its path, on every rank. Holds at most the buffers that ``job.settings``
    and ``threads`` allow. Raises SourceCorruptError if a record does not match its checksum or a file ended early,
    TargetUnwritableError if the file system refuses; the first error stops all threads. With several ranks all raise
    WorkerError, with the error as its ``original``.
    """
    several = group.world_size > 1
    if visible is None:
        visible = np.ones((len(job.files), group.world_size), bool)
    with group.step("agree on the plan", agree=job.digest() if several else ""):
        pass
    resumed, written = resume(group, job, locate, threads, progress)
    owned_bytes = sum(segment.end - segment.begin for segment in job.segments if segment.owner == group.rank)
    kept = sum(nbytes for file in resumed.values() for _, nbytes, _ in file.parts)
    progress.begin("compare" if compare else "copy", owned_bytes - kept)
    with group.step("find routes"), group.heartbeat():
        run = _Run(
            group, job, visible, sources, locate, threads, progress, recorder, finished or Finished(), resumed, written,
            compare,
        )  # fmt: skip
    try:
        if several:
            with group.step("make shared files"):
                run.make_shared_files()
        with group.step("copy"):
            run.copy()
        with group.step("finish"):
            return run.finish()
    except BaseException:
        run.abandon()
        raise


@dataclass(eq=False)
class _Run:
    """This rank's part of one run. The fields are the arguments of ``execute`` and the result of ``resume``."""

    group: Group
    job: Job
    visible: Visible
    sources: Sources
    locate: Callable[[str], str]
    threads: int
    progress: Progress
    recorder: Recorder | None
    finished: Finished
    resumed: Mapping[int, OutputState]
    written: Written
    compare: bool
    pool: CopyPool | None = None

    def __post_init__(self) -> None:
        job = self.job
        self.transfers = plan_transfers(
            job.plan,
            job.segments,
            self.visible,
            rank=self.group.rank,
            window=job.settings.window,
            round_bytes=job.settings.round_bytes,
            written=self.written,
        )
        self.check = SourceCheck(job.files, job.checksums)
        self.reader = SourceReader(job.files, self.sources)
        self.exchange: TransferRun | None = None
        if job.settings.exchange_bytes:  # the same on all ranks, unlike the number of rounds
            from fsdpckpt.execute.send_recv import TransferRun

            self.exchange = TransferRun(self.group, job, self.transfers, self.sources, self.check)
            self.reader = self.exchange.reader
        kind = ComparedOutput if self.compare else Output
        self.outputs: dict[int, Output] = {}
        for number, windows in Counter(window.segment for window in self.transfers.windows).items():
            segment, file = job.segments[number], self.transfers.files[number]
            self.outputs[number] = kind(
                file,
                self.locate(file.path),
                windows,
                first=segment.begin == 0,
                alone=(segment.begin, segment.end) == (0, file.nbytes),
                expect_silence=self._expect_silence,
                resumed=self.resumed.get(number),
            )

    def _expect_silence(self, nbytes: int) -> None:
        if self.pool is not None:
            self.pool.expect_silence(nbytes)

    @property
    def _patience(self) -> float | None:
        """Seconds to wait for threads and the journal after a failure. If other ranks wait, a hung disk must not hold
        them up; alone, wait until the journal lists everything that was written.
        """
        return PATIENCE if self.group.world_size > 1 else None

    def make_shared_files(self) -> None:
        made = [output for output in self.outputs.values() if output.first and not output.alone]
        with self.group.silent_for(sum(output.plan.nbytes for output in made) / SLOWEST_DISK):
            for output in made:
                output.open()

    def abandon(self) -> None:
        """After a failure: write the journal, and close what is open."""
        if self.recorder is not None:
            self.recorder.close(complete=False, patience=self._patience)
        for output in self.outputs.values():
            output.abandon()

    def copy(self) -> None:
        """Write every window of this rank, and send everything it has to send."""
        assemblers = [
            Assembler(self.job.plan, self.reader, self.check, self.job.settings.window) for _ in range(self.threads)
        ]

        def copy(thread: int, window: Window) -> None:
            output = self.outputs[window.segment]
            part = write_window(output, assemblers[thread], window.begin, window.end)
            if self.recorder is not None:
                number = self.job.segments[window.segment].file
                self.recorder.wrote(number, output.open(), part, received=window.round >= 0)
            if window.round >= 0 and self.exchange is not None:
                self.exchange.buffers.written(window.round)
            self.progress.advance(window.end - window.begin)

        if self.recorder is not None:
            self.check.fresh()
            self.recorder.start(self.check.fresh)
        pool = self.pool = CopyPool(self.transfers.windows, self.threads, copy)
        try:
            pool.start()
            if self.exchange is not None:
                self.exchange.run(pool, self._watch)
            pool.wait(self._watch)
        finally:
            pool.stop(self._patience)
            self.pool = None  # frees the buffers now; the collector would find them late
        if self.exchange is not None:
            self.exchange.buffers.close()
        self.progress.end()

    def _watch(self) -> None:
        self.group.watch(moving=self.pool is None or self.pool.moved())

    def finish(self) -> dict[str, int]:
        """Finish the files and records that other ranks wrote or read too; return the CRC-32 of every target file."""
        nbytes = sum(output.plan.nbytes for output in self.outputs.values() if not output.alone)
        with self.group.silent_for(nbytes / SLOWEST_DISK):
            states = {number: list(output.state()) for number, output in self.outputs.items() if not output.alone}
        self._check_streams()
        gathered = cast(
            "list[tuple[dict[int, list[Any]], list[SourcePart]]]",
            self.group.all_gather_objects((states, self.check.unfinished() if self.group.rank else []), name="join"),
        )
        if self.group.rank == 0:  # one rank is enough
            for _, rows in gathered[1:]:
                self.check.absorb(rows)
            self.check.absorb(self.finished.parts)
            self.check.finish()
        self._read_rest()
        self._reread_unproved()
        with self.group.silent_for(nbytes / SLOWEST_DISK):
            self._finish_shared(
                {number: OutputState(*state) for theirs, _ in gathered for number, state in theirs.items()}
            )
        crcs = {output.plan.path: output.crc for output in self.outputs.values() if output.first}
        for theirs in self.group.all_gather_objects(crcs, name="checksums"):
            crcs.update(cast("dict[str, int]", theirs))
        if self.recorder is not None:
            self.recorder.close(complete=True)
        self.outputs.clear()  # each refers to this run: the plan would stay in memory until the collector runs
        return crcs

    def _check_streams(self) -> None:
        """Compare what was received with what was sent. Windows written from damaged bytes are removed from the
        journal.
        """
        if self.exchange is None:
            return
        gathered = self.group.all_gather_objects(self.exchange.sent, name="stream checksums")
        try:
            self.exchange.require_what_was_sent(cast("list[dict[int, int]]", gathered))
        except WorkerError:
            if self.recorder is not None:
                self.recorder.retract()
            raise

    def _read_rest(self) -> None:
        """When rank 0 has the known parts of every record: read the parts that are missing."""
        group = self.group
        rest: object = self.check.missing_parts() if group.rank == 0 else None
        ranges = cast("list[tuple[int, int, int, int]]", group.broadcast_object(rest, name="what was not read"))
        if not ranges:
            return
        with group.step("read the rest of records"):
            sums = [
                (file, record, offset, nbytes, sum_of(self._source(file), offset, nbytes, group.beat))
                for file, record, offset, nbytes in self._shared_out(ranges)
            ]
        everyone = cast("list[list[SourcePart]]", group.all_gather_objects(sums, name="sums"))
        with group.step("compare checksums"):
            if group.rank == 0:
                for rows in everyone:
                    self.check.absorb(rows)
                self.check.finish()

    def _reread_unproved(self) -> None:
        """When rank 0 has the known parts of every record: read the records again that still lack some."""
        group, job = self.group, self.job
        if not len(job.claims) and not has_gaps(job.plan):
            return
        unproved_ranges: object = None
        if group.rank == 0:
            with group.heartbeat():
                unproved_ranges = unproved(self.check, job.plan, self.finished.received_ranges())
        records = self._shared_out(cast("list[SourceRecord]", group.broadcast_object(unproved_ranges)))
        with group.step("read again what no sum proves"):
            reread(records, job.files, self.sources, group.beat)

    def _shared_out(self, ranges: Sequence[tuple[int, int, int, int]]) -> list[tuple[int, int, int, int]]:
        """The ranges that this rank reads. The first value of a range is its source file: the ranks that see it take
        turns.
        """
        seers = [np.flatnonzero(self.visible[file]) for file, *_ in ranges]
        return [
            row
            for number, (row, ranks) in enumerate(zip(ranges, seers, strict=True))
            if ranks[number % len(ranks)] == self.group.rank
        ]

    def _source(self, file: int) -> ByteSource:
        return self.sources.open(self.job.files[file].path)

    def _finish_shared(self, states: Mapping[int, OutputState]) -> None:
        segments = self.job.segments
        for number, output in self.outputs.items():
            if output.first and not output.alone:
                this = (segments[number].file, segments[number].place)
                output.finish(
                    [
                        state
                        for other, state in states.items()
                        if other != number and (segments[other].file, segments[other].place) == this
                    ]
                )


Written: TypeAlias = "dict[int, list[Range]]"
"""By segment, in order, what an interrupted run has written of it."""


class ReadBack:
    """Verifies the ``claims`` on one target file that an earlier run left at ``path``. ``take`` is thread-safe."""

    def __init__(self, file: FilePlan, path: str, claims: Sequence[Claim]) -> None:
        self._checks = TargetChecks(file)
        self._late = LatePlaces(file)
        self._parts: list[Part] = []
        there = os.path.isfile(path) and os.path.getsize(path) == file.nbytes
        self.claims = tuple(claims) if there else ()
        self._file = WritableFile(path, file.nbytes, existing=True) if self.claims else None

    def take(self, claim: Claim, buffer: memoryview) -> None:
        """Keep the window of ``claim`` if its bytes match. ``buffer`` is at least as long as the window."""
        if self._file is None:
            return
        begin, end, crc = claim
        view = buffer[: end - begin]
        self._file.read_into(begin, view)
        self._late.clear(begin, view)
        if crc32(view) == crc:
            self._checks.window(begin, view)
            self._parts.append((begin, end - begin, crc))

    def close(self) -> OutputState:
        """Close the file and return what ``take`` has kept."""
        if self._file is not None:
            self._file.close()
        return OutputState(sorted(self._parts), *self._checks.unfinished())


def read_back(
    group: Group, backs: Mapping[int, ReadBack], threads: int, nbytes: int, advance: Callable[[int], None]
) -> None:
    """Verify all claims of all ``backs`` with at most ``threads`` threads, which share ``nbytes`` of buffers."""
    longest = max((end - begin for back in backs.values() for begin, end, _ in back.claims), default=0)
    most = max(min(threads, nbytes // max(longest, 1)), 1)
    buffers = [aligned_buffer(longest + BLOCK) for _ in range(most)]
    crcs = {(number, begin): crc for number, back in backs.items() for begin, _, crc in back.claims}

    def take(thread: int, window: Window) -> None:
        claim = Claim(window.begin, window.end, crcs[window.segment, window.begin])
        backs[window.segment].take(claim, buffers[thread])
        advance(window.end - window.begin)

    windows = [Window(number, *claim[:2], -1) for number, back in backs.items() for claim in back.claims]
    pool = CopyPool(windows, most, take)
    try:
        pool.start()
        pool.wait(lambda: group.watch(moving=pool.moved()))
    finally:
        pool.stop(PATIENCE if group.world_size > 1 else None)


def resume(
    group: Group, job: Job, locate: Callable[[str], str], threads: int, progress: Progress
) -> tuple[dict[int, OutputState], Written]:
    """For each segment what this rank keeps of it, and what all ranks keep of theirs. Collective."""
    if not len(job.claims):
        return {}, {}
    claims = {number: _claims(job, segment) for number, segment in enumerate(job.segments)}
    backs: dict[int, ReadBack] = {}
    with group.step("read back what is there"):
        for number, segment in enumerate(job.segments):
            if segment.owner == group.rank:
                file = job.plan.files[segment.file]
                backs[number] = ReadBack(file, locate(file.path), claims[number])
        nbytes = sum(end - begin for back in backs.values() for begin, end, _ in back.claims)
        progress.begin(f"checking {size_text(nbytes)} already written", nbytes)
        try:
            read_back(group, backs, threads, job.settings.windows, progress.advance)
        finally:
            resumed = {number: back.close() for number, back in backs.items()}
        progress.end()
    lost: set[tuple[int, int]] = set()
    missing: list[list[int]] = []
    for number, each in resumed.items():
        there = set(each.ranges)
        missing += [[number, begin] for begin, end, _ in claims[number] if (begin, end) not in there]
    for theirs in cast("list[list[list[int]]]", group.all_gather_objects(missing, name="what is there")):
        lost |= {(number, begin) for number, begin in theirs}
    written = {
        number: [Range(begin, end) for begin, end, _ in windows if (number, begin) not in lost]
        for number, windows in claims.items()
    }
    return resumed, written


def _claims(job: Job, segment: Segment) -> list[Claim]:
    place, file, begin, end, _ = job.claims.T
    inside = (place == segment.place) & (file == segment.file) & (begin >= segment.begin) & (end <= segment.end)
    return [Claim(low, high, crc) for _, _, low, high, crc in job.claims[np.flatnonzero(inside)].tolist()]
