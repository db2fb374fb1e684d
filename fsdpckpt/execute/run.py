"""Runs a plan: each rank writes its segments of the target files, and receives what it cannot read from ranks that can.

A world of one sees every source and writes every file, by the same steps. All ranks:

1. Read back what an interrupted run has written. A window whose bytes match its journal is kept, any other is copied
   again.
2. Create the files that several ranks write; the first of these ranks does it.
3. Copy: threads assemble the windows whose sources this rank sees, and those whose bytes have been received, while the
   main thread communicates.
4. Combine what is spread over ranks: the checksums of shared files, and of source records that were read in parts.
   Finish the files, check the records.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import numpy as np

from fsdpckpt.comm.protocol import Group
from fsdpckpt.errors import WorkerError
from fsdpckpt.execute.checks import FILE, NO_PARTS, SourceCheck, joined_spans, sum_of, unverified_spans
from fsdpckpt.execute.compared_output import ComparedOutput
from fsdpckpt.execute.job import BUFFERS_PER_THREAD, Job
from fsdpckpt.execute.journal import JournaledWindows, Recording
from fsdpckpt.execute.output import Output, OutputState, write_window
from fsdpckpt.execute.staged import StagedCheck, StagedFile, staged_error
from fsdpckpt.execute.window import PATIENCE, SLOWEST_DISK, Assembler, CopyPool, SourceReader
from fsdpckpt.ir.tensors import Int64Array, distinct
from fsdpckpt.plan.transfer import SeenBy, TransferPlan, Window, plan_transfers
from fsdpckpt.plan.written import RECEIVED
from fsdpckpt.progress import Progress
from fsdpckpt.storage import ByteSource
from fsdpckpt.storage.local_target import aligned_buffer
from fsdpckpt.storage.sources import Sources
from fsdpckpt.text import size_text

if TYPE_CHECKING:
    from fsdpckpt.execute.send_recv import TransferRun

_Staged: TypeAlias = "tuple[Int64Array, str]"
"""What one rank found in the staging directory: parts of records, and a record that does not match."""


def execute(
    group: Group,
    job: Job,
    seen_by: SeenBy,
    *,
    sources: Sources,
    locate: Callable[[str], str],
    threads: int,
    progress: Progress,
    recorder: Recording | None,
    journaled: JournaledWindows,
    compare: bool,
    reread: bool = False,
    apart: frozenset[int] = frozenset(),
    make_output: Callable[..., Output] | None = None,
    in_parts: bool = False,
    unverified: Mapping[int, Int64Array] | None = None,
) -> dict[str, int]:
    """Write every file of ``job`` durably at ``locate(path)``, each part on the rank that owns it. Collective.

    ``seen_by[file, rank]``: which rank sees which source. ``sources`` opens those that this rank sees. ``recorder``
    keeps this rank's journal, if it writes. ``journaled``, on rank 0: the journals of an interrupted run;
    ``job.written`` from them are read back, and kept if they are as the journal says and ``execute.staged`` finds
    nothing against them; ``reread``: they are also compared with the source. ``compare``: the files exist and are
    compared with what would be written; raises TargetExistsError if they differ. ``apart``: the sources of which ranks
    read copies that only checksums prove to be the same, so that each has to check its own. ``make_output``: makes the
    target files, with the arguments of ``Output``; they are local files without it. ``in_parts``: they
    are objects that are sent in parts, of which none has two writers: each rank writes its own in order.
    ``unverified``, on rank 0: what an interrupted run has read without checksums for target files that are not in
    ``job``, as ``unverified_spans`` returns it.

    Returns the CRC-32 of each target file by its path, on every rank. Holds at most the buffers that ``job.settings``
    and ``threads`` allow. Raises SourceCorruptError if a record does not match its checksum or a file ended early,
    TargetUnwritableError if the file system refuses; the first error stops all threads. With several ranks all raise
    WorkerError, with the error as its ``original``.
    """
    run = _Run(
        group=group,
        job=job,
        seen_by=seen_by,
        sources=sources,
        locate=locate,
        threads=threads,
        progress=progress,
        recorder=recorder,
        journaled=journaled,
        compare=compare,
        reread=reread,
        apart=apart,
        in_parts=in_parts,
        unverified=unverified or {},
    )
    run.make_outputs(make_output or (ComparedOutput if compare else Output))
    try:
        written = run.read_back() if len(job.written) else job.written
        progress.begin("compare" if compare else "copy", run.bytes_left())
        with group.step("plan transfers"), group.heartbeat():
            run.plan_transfers(written)
        if group.world_size > 1:
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
    """This rank's part of one run. The fields are the arguments of ``execute``."""

    group: Group
    job: Job
    seen_by: SeenBy
    sources: Sources
    locate: Callable[[str], str]
    threads: int
    progress: Progress
    recorder: Recording | None
    journaled: JournaledWindows
    compare: bool
    reread: bool
    apart: frozenset[int]
    in_parts: bool
    unverified: Mapping[int, Int64Array]
    pool: CopyPool | None = None

    def __post_init__(self) -> None:
        job = self.job
        self.check = SourceCheck(job.files, job.checksums)
        self.staged = StagedCheck(job.files, job.checksums)
        self.reader = SourceReader(job.files, self.sources)
        self.transfers: TransferPlan
        self.exchange: TransferRun | None = None
        self.outputs: dict[int, Output] = {}

    def make_outputs(self, make_output: Callable[..., Output]) -> None:
        """Make this rank's target files; nothing is written yet."""
        job = self.job
        for number, segment in enumerate(job.segments):
            if segment.owner == self.group.rank:
                file = job.plan.files[segment.file]
                self.outputs[number] = make_output(
                    file,
                    self.locate(file.path),
                    own=(segment.begin, segment.end),
                    may_exist=bool(len(job.written)),
                    expect_silence=self._expect_silence,
                )

    def read_back(self) -> Int64Array:
        """Read back what an interrupted run has written. Returns the rows of ``Job.written`` that the ranks keep.

        Collective. The threads share the memory of the windows.
        """
        group, job = self.group, self.job
        rows: dict[Window, tuple[int, int]] = {}  # its number, and its CRC-32
        for row, (segment, begin, end, crc) in enumerate(job.written.tolist()):
            if segment in self.outputs:
                rows[Window(segment, begin, end, -1)] = row, crc
                self.outputs[segment].windows_left += 1
        longest = max((window.end - window.begin for window in rows), default=0)
        step = min(job.settings.window, max(longest, 1))
        memory = longest + (BUFFERS_PER_THREAD * step if self.reread else 0)
        threads = max(min(self.threads, job.settings.window_memory // max(memory, 1)), 1)
        lost: list[int] = []
        with group.step("read back what was written"):
            buffers = [aligned_buffer(longest) for _ in range(threads)]
            assemblers = [
                Assembler(job.plan, self.reader, self.check, step) for _ in range(threads if self.reread else 0)
            ]

            def read_back(thread: int, window: Window) -> None:
                row, crc = rows[window]

                def prove(file: StagedFile, view: memoryview) -> None:
                    self.staged.add_all(file.sums(window.begin, view))
                    if self.reread and self.seen_by[file.sources(window.begin, window.end), group.rank].all():
                        file.require_source(window.begin, view, assemblers[thread], step)

                output = self.outputs[window.segment]
                if not output.read_back(window.begin, window.end, crc, buffers[thread], prove):
                    lost.append(row)
                self.progress.advance(window.end - window.begin)

            nbytes = sum(window.end - window.begin for window in rows)
            self.progress.begin(f"checking {size_text(nbytes)} already written", nbytes)
            pool = CopyPool(tuple(rows), threads, read_back)
            try:
                pool.start()
                pool.wait(lambda: group.watch(moving=pool.moved()))
            finally:
                pool.stop(self._patience)
            self.progress.end()
        by_rank = cast("list[list[int]]", group.all_gather_objects(lost, name="lost windows"))
        return np.delete(job.written, [row for rows_lost in by_rank for row in rows_lost], axis=0)

    def bytes_left(self) -> int:
        """How many bytes this rank still has to write."""
        segments = (self.job.segments[number] for number in self.outputs)
        kept = sum(nbytes for output in self.outputs.values() for _, nbytes, _ in output.parts)
        return sum(segment.end - segment.begin for segment in segments) - kept

    def plan_transfers(self, written: Int64Array) -> None:
        """Plan what this rank writes, sends and receives. ``written``: from ``read_back``."""
        job, settings = self.job, self.job.settings
        self.transfers = plan_transfers(
            job.plan,
            job.segments,
            self.seen_by,
            rank=self.group.rank,
            window=settings.window,
            round_bytes=settings.round_bytes,
            written=written,
            files_at_once=1 if self.in_parts else settings.files_at_once,
        )
        for number, windows in Counter(window.segment for window in self.transfers.windows).items():
            self.outputs[number].plan = self.transfers.files[number]
            self.outputs[number].windows_left = windows
        if settings.exchange_bytes:  # the same on all ranks, unlike the number of rounds
            from fsdpckpt.execute.send_recv import TransferRun

            self.exchange = TransferRun(self.group, job, self.transfers, self.sources, self.check)
            self.reader = self.exchange.reader

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
        """Create them, and tell the other writers of an object what the store calls its upload."""
        shared = self._shared_outputs()
        begun = {}
        with self._silent_for([output for output in shared.values() if output.creates_file]):
            for number, output in shared.items():
                if output.creates_file:
                    begun[self.job.segments[number].file] = output.begin_shared()
        if self.in_parts:
            uploads: dict[int, str] = {}
            for each in self.group.all_gather_objects(begun, name="uploads"):
                uploads.update(cast("dict[int, str]", each))
            for number, output in shared.items():
                output.join(uploads[self.job.segments[number].file])

    def _silent_for(self, outputs: Iterable[Output]) -> AbstractContextManager[None]:
        """While this rank makes or ends these files, no other takes it for lost."""
        if self.in_parts:
            return self.group.heartbeat()
        return self.group.silent_for(sum(output.plan.nbytes for output in outputs) / SLOWEST_DISK)

    def _shared_outputs(self) -> dict[int, Output]:
        """The target files of this rank that others write, too, by segment."""
        return {number: output for number, output in self.outputs.items() if not output.sole_writer}

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
            place = self.exchange.buffers.place_of(window) if self.exchange is not None else None
            part = write_window(output, assemblers[thread], window.begin, window.end, into=place)
            if self.recorder is not None:
                number = self.job.segments[window.segment].file
                self.recorder.wrote(number, output.open(), part, received=window.round >= 0)
            if window.round >= 0 and self.exchange is not None:
                self.exchange.buffers.written(window.round)
            self.progress.advance(window.end - window.begin)

        if self.recorder is not None:
            self.check.new_parts()
            self.recorder.start(self.check.new_parts)
        pool = self.pool = CopyPool(self.transfers.windows, self.threads, copy, in_order=self.in_parts)
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
        group = self.group
        shared = self._shared_outputs()
        with self._silent_for(shared.values()):
            states = {number: list(output.export()) for number, output in shared.items()}
        sent = self.exchange.sums.by_rank if self.exchange is not None else {}
        staged = (self.staged.parts(), self.staged.wrong)
        parts = self.check.parts() if group.rank or len(self.job.written) else NO_PARTS
        gathered = group.all_gather_objects((states, parts, sent, staged), name="join")
        by_rank = cast("list[tuple[dict[int, list[Any]], Int64Array, dict[int, int], _Staged]]", gathered)
        self._check_streams([sums for _, _, sums, _ in by_rank])
        read = [parts for _, parts, _, _ in by_rank]
        if group.rank == 0:  # one rank is enough
            self.check.absorb([self.journaled.parts, *read[1:]])
        read.append(self._read_missing_parts())
        if len(self.job.written):
            self._check_staged(read, [staged for _, _, _, staged in by_rank])
        self._finish_shared(
            {number: OutputState(*state) for exported, *_ in by_rank for number, state in exported.items()}
        )
        crcs = {output.plan.path: output.crc for output in self.outputs.values() if output.creates_file}
        for crcs_of_rank in group.all_gather_objects(crcs, name="checksums"):
            crcs.update(cast("dict[str, int]", crcs_of_rank))
        if self.recorder is not None:
            self.recorder.close(complete=True)
        self.outputs.clear()  # each refers to this run: the plan would stay in memory until the collector runs
        return crcs

    def _check_streams(self, sums: Sequence[Mapping[int, int]]) -> None:
        """Compare what was received with what was sent. Windows written from damaged bytes are removed from the
        journal.
        """
        if self.exchange is None:
            return
        try:
            self.exchange.require_what_was_sent(sums)
        except WorkerError:
            if self.recorder is not None:
                self.recorder.retract()
            raise

    def _check_staged(self, read: Sequence[Int64Array], staged: Sequence[_Staged]) -> None:
        """Compare what an interrupted run has staged with the source's checksums, which ``check`` has found right.

        ``read``: the parts that this run has read. Raises TargetUnwritableError.
        """
        with self.group.step("check what was staged"), self.group.heartbeat():
            if self.group.rank:
                return
            self.staged.absorb([*(parts for parts, _ in staged[1:]), *read])
            wrong = next(filter(None, (wrong for _, wrong in staged)), "") or self.staged.find_wrong()
            if wrong:
                places = list(dict.fromkeys(os.path.dirname(output.path) for output in self.outputs.values()))
                raise staged_error(places[0] if places else "what is staged", f"other bytes than {wrong}")

    def _read_missing_parts(self) -> Int64Array:
        """Read what no rank has read of records, and of files that are compared as a whole; check these. Rank 0 knows
        the parts that were read. Returns, on rank 0, what was read now.
        """
        group, missing = self.group, cast("object", None)
        if group.rank == 0:
            with group.heartbeat():
                self.check.finish()
                written = self.journaled.written()
                spans = unverified_spans(self.job.plan, written[written[:, RECEIVED] > 0])
                of_records = self.check.missing_parts(joined_spans([spans, self.unverified]))
                missing = np.concatenate([of_records, self.check.rest_of_files(self.job.plan)])
        ranges = cast("Int64Array", group.broadcast_object(missing, name="missing parts"))
        if not len(ranges):
            return NO_PARTS
        with group.step("read missing parts of records"), group.heartbeat():
            own = self._own_ranges(ranges)
            crcs = [sum_of(self._source(file), offset, nbytes) for file, _, offset, nbytes in own.tolist()]
        parts = np.column_stack([own, np.array(crcs, np.int64)])
        by_rank = group.all_gather_objects(parts, name="missing parts")
        with group.step("compare checksums"):
            if group.rank == 0:
                self.check.absorb(cast("list[Int64Array]", by_rank))
                self.check.finish()
        return np.concatenate(cast("list[Int64Array]", by_rank))

    def _own_ranges(self, ranges: Int64Array) -> Int64Array:
        """The ranges that this rank reads. Each begins with its file: the ranks that see that file take turns, or, if
        each has a copy of its own, all read theirs.
        """
        own = np.zeros(len(ranges), np.bool_)
        for file in distinct(ranges[:, FILE]).tolist():
            rows, ranks = np.flatnonzero(ranges[:, FILE] == file), np.flatnonzero(self.seen_by[file])
            reads_own = file in self.apart and self.seen_by[file, self.group.rank]
            own[rows] = reads_own or ranks[rows % len(ranks)] == self.group.rank
        return ranges[own]

    def _source(self, file: int) -> ByteSource:
        return self.sources.open_file(self.job.files[file])

    def _finish_shared(self, states: Mapping[int, OutputState]) -> None:
        """All checksums are known. Of an object every rank sends the parts that waited for them, before the first one
        completes it.
        """
        shared, files = self._shared_outputs(), [segment.file for segment in self.job.segments]
        tags: dict[int, dict[int, str]] = {}
        if self.in_parts and self.group.world_size > 1:
            with self.group.step("send the last parts"), self._silent_for(shared.values()):
                sent = {number: output.send_held(self._of_others(number, states)) for number, output in shared.items()}
            for each in self.group.all_gather_objects(sent, name="parts"):
                for number, of_segment in cast("dict[int, dict[int, str]]", each).items():
                    tags.setdefault(files[number], {}).update(of_segment)
        with self._silent_for(shared.values()):
            for number, output in shared.items():
                if output.creates_file:
                    output.finish_shared(self._of_others(number, states), tags.get(files[number], {}))

    def _of_others(self, number: int, states: Mapping[int, OutputState]) -> list[OutputState]:
        """Those of ``states`` that are of the same file as segment ``number``, and not its own."""
        segments = self.job.segments
        same_file = (segments[number].file, segments[number].directory)
        return [
            state
            for other, state in states.items()
            if other != number and (segments[other].file, segments[other].directory) == same_file
        ]
