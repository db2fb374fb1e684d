"""Several workers played in one process: whoever sees what, whoever writes what, the bytes are those of one process."""

from __future__ import annotations

import os
import pickle
import random
import tempfile
import zlib
from collections import Counter
from functools import partial
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fsdpckpt.errors import SourceMissingError, WorkerError
from fsdpckpt.execute.checks import SourceCheck
from fsdpckpt.execute.job import Job, JobSettings, pack_job, unpack_job
from fsdpckpt.execute.output import Output, write_window
from fsdpckpt.execute.send_recv import ReceiveBuffers, SentSums, StreamReader
from fsdpckpt.execute.streamed_output import StreamedOutput
from fsdpckpt.execute.window import Assembler
from fsdpckpt.ir.checkpoint import Checksums
from fsdpckpt.ir.dtypes import DTYPES, numpy_dtype
from fsdpckpt.ir.files import Stored
from fsdpckpt.ir.targets import Target, TargetFile
from fsdpckpt.ir.tensors import Chunks, Tensor
from fsdpckpt.plan import Plan, make_plan
from fsdpckpt.plan import transfer as partitioning
from fsdpckpt.plan.transfer import FILES_AT_ONCE, Segment, TransferPlan, partition, plan_transfers, target_node
from fsdpckpt.storage import ByteSource
from fsdpckpt.storage.object_file import ObjectFile
from fsdpckpt.storage.sources import Sources
from tests.execute.random_files import Disk, random_files


class Machine(Sources):
    """What one worker sees: some of the files."""

    def __init__(self, seen: set[str]) -> None:
        super().__init__()
        self._seen = seen

    def open_new(self, path: str) -> ByteSource:
        if path not in self._seen:
            raise SourceMissingError(f"{path} is on another machine", file=path)
        return super().open_new(path)


class Uploads:
    """What ``ObjectFile`` asks of a ``RemoteTarget`` and a ``PartsUpload``: a store that saves objects in ``folder``.

    ``sums``: the CRC-32 that an output has found of each object.
    """

    def __init__(self, folder: str, part: int, name: str = "", upload: str = "") -> None:
        self.url, self.part, self.name, self.upload = folder, part, name, upload or "new"
        self.tags: dict[int, str] = {}
        self.sums: dict[str, int] = {}

    def in_parts(self, name: str, upload: str = "") -> Uploads:
        return Uploads(self.url, self.part, name, upload)

    def send(self, number: int, data: bytearray) -> None:
        assert number not in self.tags
        self.tags[number] = bytes(data).hex()

    def put(self, name: str, data: bytearray) -> None:
        with open(os.path.join(self.url, name), "xb") as file:
            file.write(data)

    def complete(self) -> None:
        self.put(self.name, b"".join(bytes.fromhex(self.tags[number]) for number in sorted(self.tags)))

    def create(self, output: Output) -> ObjectFile:
        def completed() -> None:
            self.sums[plan.path] = output.crc

        plan, own = output.plan, output.own
        return ObjectFile(
            self, plan.path, plan.nbytes, part=self.part, checksums=plan.checksums, completed=completed, own=own
        )  # type: ignore[arg-type]


class Worker:
    """One worker's routes, buffers and files; or objects, for ``uploads``."""

    def __init__(self, rank: int, job: Job, seen_by: np.ndarray, folder: str, uploads: Uploads | None = None) -> None:
        window, round_bytes = job.settings.window, job.settings.round_bytes
        self.transfers: TransferPlan = plan_transfers(
            job.plan, job.segments, seen_by, rank=rank, window=window, round_bytes=round_bytes, written=job.written
        )
        windows_of_round = Counter(window.round for window in self.transfers.windows if window.round >= 0)
        self.buffers = ReceiveBuffers(
            *(self.transfers.receives, windows_of_round, self.transfers.rounds, job.settings.rounds_held),
            in_place=self.transfers.in_place,
        )
        workers = seen_by.shape[1]
        seen = {file.path for number, file in enumerate(job.files) if seen_by[number, rank]}
        check = SourceCheck(job.files, Checksums.of([]))
        self.sums = SentSums(self.transfers.streams)
        self.reader = StreamReader(job.files, Machine(seen), self.buffers, workers)
        self.assembler = Assembler(job.plan, self.reader, check, window)
        self.sender = Assembler(job.plan, self.reader, check, 64)
        count = Counter(window.segment for window in self.transfers.windows)
        self.outputs: dict[int, Output] = {}
        for number in count:
            segment, file = job.segments[number], self.transfers.files[number]
            make = Output if uploads is None else partial(StreamedOutput, uploads.create)
            self.outputs[number] = make(
                file,
                os.path.join(folder, file.path),
                own=(segment.begin, segment.end),
                may_exist=False,
                expect_silence=lambda _: None,
                windows_left=count[number],
            )

    def copy(self, number: int) -> None:
        for window in self.transfers.windows:
            if window.round == number:
                place = self.buffers.place_of(window)
                write_window(self.outputs[window.segment], self.assembler, window.begin, window.end, into=place)
                if number >= 0:
                    self.buffers.written(number)


def run(
    job: Job, seen_by: np.ndarray, folder: str, *, flip: int | None = None, uploads: Uploads | None = None
) -> list[int]:
    """As ``execute`` does, without processes. In the byte number ``flip`` that crosses one bit changes.

    Returns the workers that find what came to them changed.
    """
    crossed = 0
    workers = [Worker(rank, job, seen_by, folder, uploads) for rank in range(seen_by.shape[1])]
    for worker in workers:
        for output in worker.outputs.values():
            if not output.sole_writer:
                output.begin_shared() if output.creates_file else output.join("begun")
        worker.copy(-1)
    rounds = max(worker.transfers.rounds for worker in workers)
    sent: Counter[tuple[int, int]] = Counter()
    held = job.settings.rounds_held
    for number in range(rounds + held):
        for worker in workers if number < rounds else ():
            assert worker.buffers.reserve(number), "no room, though rounds are written as late as they may be"
        for rank, worker in enumerate(workers):
            for peer, counts in worker.transfers.sends.items() if number < rounds else ():
                expected = workers[peer].transfers.receives[rank]
                assert counts[number:].sum() == expected[number:].sum(), "one of them knows of later rounds"
                if number >= min(len(counts), len(expected)):
                    continue
                assert counts[number] == expected[number]
                for offset in range(0, int(counts[number]), 64):
                    begin = sent[rank, peer] + offset
                    end = sent[rank, peer] + min(offset + 64, int(counts[number]))
                    data = worker.sender.assemble(worker.transfers.streams[peer], begin, end)
                    worker.sums.add(peer, begin, end, worker.sender.sums(data))
                    place = workers[peer].buffers.part(rank, number, offset, len(data))
                    place[:] = np.frombuffer(data, np.uint8)
                    if flip is not None and crossed <= flip < crossed + len(data):
                        place[flip - crossed] ^= 1
                    crossed += len(data)
                sent[rank, peer] += int(counts[number])
        for worker in workers if number - held + 1 >= 0 else ():  # as late as the buffers allow
            worker.copy(number - held + 1)
    shared = {number: output for w in workers for number, output in w.outputs.items() if not output.sole_writer}
    states = {number: output.export() for number, output in shared.items()}
    files = [segment.file for segment in job.segments]
    others = {n: [s for other, s in states.items() if other != n and files[other] == files[n]] for n in shared}
    tags: dict[int, dict[int, str]] = {}
    for number, output in shared.items():
        tags.setdefault(files[number], {}).update(output.send_held(others[number]))
    for number, output in shared.items():
        if output.creates_file:
            output.finish_shared(others[number], tags[files[number]])
    for worker in workers:
        received = sum((int(counts.max()) for counts in worker.transfers.receives.values() if len(counts)), 0)
        assert received <= len(worker.transfers.receives) * job.settings.round_bytes
        totals = sum(worker.transfers.receives.values(), np.zeros(worker.transfers.rounds, np.int64))
        assert (totals <= job.settings.round_bytes).all(), "more than a round may hold"
    return [rank for rank in range(len(workers)) if changed(workers, rank)]


def changed(workers: list[Worker], rank: int) -> bool:
    sums = {s: worker.sums.by_rank[rank] for s, worker in enumerate(workers) if rank in worker.sums.by_rank}
    try:
        workers[rank].reader.require_what_was_sent(sums, workers[rank].transfers.received)
    except WorkerError:
        return True
    return False


@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.integers(0, 2**32))
def test_any_division_of_any_plan_writes_what_one_process_would(seed: int) -> None:
    rng = random.Random(seed)
    with tempfile.TemporaryDirectory() as folder:
        disk = Disk(folder, [bytearray() for _ in range(4)], rng)
        files, wanted = random_files(rng, disk, 3, 0)
        plan = make_plan(Target(files))
        sources = disk.save()
        count = rng.randrange(1, 5)
        seen_by = np.array([[rng.random() < 0.5 for _ in range(count)] for _ in sources])
        for row in seen_by:
            row[rng.randrange(count)] = True
        writers = sorted(rng.sample(range(count), rng.randrange(1, count + 1)))
        window = rng.choice([16, 48, 96, 4096])
        uploads = Uploads(folder, rng.choice([16, 48, 112, 1024])) if rng.random() < 0.5 else None
        with patch.object(partitioning, "_BLOCK", rng.choice([1, 16])):
            part = 0 if uploads is None else uploads.part
            segments = tuple(partition(plan, range(len(files)), writers, part=part))
        job = Job(
            plan,
            sources,
            Checksums.of([]),
            segments,
            JobSettings(window, 0, 4 * window, rng.randrange(1, 5), 256, FILES_AT_ONCE),
        )
        again = unpack_job(pack_job(job))
        assert pickle.dumps(pack_job(again)) == pickle.dumps(pack_job(job))
        assert run(again, seen_by, folder, uploads=uploads) == []
        for file, expected in zip(files, wanted, strict=True):
            with open(os.path.join(folder, file.path), "rb") as stream:
                assert stream.read() == expected
            assert uploads is None or uploads.sums[file.path] == zlib.crc32(expected)


@pytest.mark.parametrize("block", [1, 4, 16])
@pytest.mark.parametrize("name", ["float16", "float64"])
def test_what_is_cast_is_sent_as_it_was_and_never_cut_within_an_element(tmp_path, name: str, block: int) -> None:
    values = np.random.default_rng(block).standard_normal(5003).astype(np.float32)
    disk = Disk(str(tmp_path), [bytearray(values.tobytes())], random.Random(block))
    tensor = Tensor(DTYPES["float32"], (5003,), Chunks.whole(file=0, offset=0, shape=(5003,)))
    file = TargetFile("out")
    file.add_literal(bytes(3))
    file.add_write_item(tensor, dtype=DTYPES[name])
    plan = make_plan(Target([file]))
    with patch.object(partitioning, "_BLOCK", block):
        segments = tuple(partition(plan, [0], [0, 1, 2]))
    assert len(segments) == 3
    job = Job(plan, disk.save(), Checksums.of([]), segments, JobSettings(96, 0, 1000, 2, 0, FILES_AT_ONCE))
    apart = np.array([[False, False, False, True]])
    assert run(job, apart, str(tmp_path)) == []
    assert (tmp_path / "out").read_bytes() == bytes(3) + values.astype(numpy_dtype(DTYPES[name])).tobytes()
    (tmp_path / "out").unlink()
    assert len(run(job, apart, str(tmp_path), flip=random.Random(block).randrange(values.nbytes))) == 1


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.integers(0, 2**32), st.integers(0, 2**32))
def test_one_bit_that_changes_on_its_way_is_found_by_whoever_it_came_to(seed: int, where: int) -> None:
    rng = random.Random(seed)
    with tempfile.TemporaryDirectory() as folder:
        disk = Disk(folder, [bytearray() for _ in range(4)], rng)
        files, _ = random_files(rng, disk, 3, 0)
        plan = make_plan(Target(files))
        sources = disk.save()
        seen_by = np.array([[number % 2 == 0, number % 2 == 1] for number in range(len(sources))])
        with patch.object(partitioning, "_BLOCK", 16):
            segments = tuple(partition(plan, range(len(files)), [0, 1]))
        window = rng.choice([48, 96, 4096])
        job = Job(plan, sources, Checksums.of([]), segments, JobSettings(window, 0, 4 * window, 2, 256, FILES_AT_ONCE))
        transfers = [
            plan_transfers(plan, segments, seen_by, rank=r, window=window, round_bytes=4 * window, written=job.written)
            for r in (0, 1)
        ]
        crossing = [sum(int(counts.sum()) for counts in each.receives.values()) for each in transfers]
        if not sum(crossing):
            return
        (found,) = run(job, seen_by, folder, flip=where % sum(crossing))
        assert crossing[found]


def _plan_of(sizes: list[int]) -> Plan:
    files = []
    for number, nbytes in enumerate(sizes):
        file = TargetFile(f"f{number}")
        file.add_literal(bytes(range(1, 9)))
        shape = (max(nbytes - 8, 0),)
        file.add_write_item(Tensor(DTYPES["uint8"], shape, Chunks.whole(file=0, offset=0, shape=shape)))
        files.append(file)
    return make_plan(Target(files))


@pytest.mark.parametrize("workers", [1, 2, 3, 7])
def test_every_byte_of_every_file_has_one_writer_and_all_write_about_as_much(workers: int) -> None:
    rng = random.Random(workers)
    sizes = [rng.randrange(8, 3_000_000) for _ in range(20)]
    plan = _plan_of(sizes)
    segments = partition(plan, range(20), list(range(workers)))
    for number, nbytes in enumerate(sizes):
        own = [segment for segment in segments if segment.file == number]
        assert own[0].begin == 0 and own[-1].end == nbytes
        assert [segment.end for segment in own[:-1]] == [segment.begin for segment in own[1:]]
    load = Counter()
    for segment in segments:
        load[segment.owner] += segment.end - segment.begin
    assert max(load.values()) <= 1.15 * sum(sizes) / workers
    assert [segment.owner for segment in segments] == sorted(segment.owner for segment in segments)


def test_files_of_equal_ranks_are_not_shared_between_workers() -> None:
    segments = partition(_plan_of([1_000_000] * 8), range(8), [0, 1, 2, 3])
    assert [(s.file, s.owner) for s in segments] == [(number, number // 2) for number in range(8)]


def test_one_file_is_cut_between_blocks_of_the_disk() -> None:
    segments = partition(_plan_of([10_000_003]), [0], [0, 1, 2])
    assert [segment.owner for segment in segments] == [0, 1, 2]
    assert all(segment.begin % 65536 == 0 for segment in segments)


def test_files_without_bytes_are_written_too() -> None:
    plan = make_plan(Target([TargetFile("a"), TargetFile("b")]))
    assert partition(plan, [0, 1], [0, 1]) == [Segment(0, 0, 0, 0, 0), Segment(1, 0, 0, 0, 0)]


@pytest.mark.parametrize(
    ("ranks", "nodes", "expected"),
    [(8, {0: 0, 1: 0, 2: 1, 3: 1}, "00001111"), (5, {0: 0, 1: 0, 2: 1, 3: 1}, "00011"), (2, {0: 0, 1: 1, 2: 2}, "01")],
)
def test_a_target_rank_belongs_to_the_node_that_will_load_it(ranks: int, nodes: dict[int, int], expected: str) -> None:
    assert "".join(str(target_node(rank, ranks, nodes)) for rank in range(ranks)) == expected


def test_those_who_see_a_file_take_turns_in_sending_it() -> None:
    shape = (1000,)
    target, sources = [], []
    for number in range(12):
        sources.append(Stored(f"s{number}", 1000))
        file = TargetFile(f"t{number}")
        file.add_write_item(Tensor(DTYPES["uint8"], shape, Chunks.whole(file=number, offset=0, shape=shape)))
        target.append(file)
    plan = make_plan(Target(target))
    segments = partition(plan, range(12), [0])
    seen_by = np.array([[False, True, True, True]] * 12)
    found = plan_transfers(
        plan, segments, seen_by, rank=0, window=4096, round_bytes=1 << 20, written=np.zeros((0, 4), np.int64)
    )
    assert {sender: int(counts.sum()) for sender, counts in found.receives.items()} == {1: 4000, 2: 4000, 3: 4000}
