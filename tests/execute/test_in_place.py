"""Windows of which one rank sends nearly all are received where they are written from."""

from __future__ import annotations

import os
import random
import tempfile
from itertools import pairwise
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fsdpckpt.execute import send_recv
from fsdpckpt.execute.job import Job, JobSettings
from fsdpckpt.execute.send_recv import ReceiveBuffers
from fsdpckpt.ir.checkpoint import Checksums
from fsdpckpt.ir.dtypes import DTYPES
from fsdpckpt.ir.files import Stored
from fsdpckpt.ir.targets import Target, TargetFile
from fsdpckpt.ir.tensors import Chunks, Tensor
from fsdpckpt.plan import make_plan, streams
from fsdpckpt.plan import transfer as partitioning
from fsdpckpt.plan.transfer import FILES_AT_ONCE, TransferPlan, partition, plan_transfers
from fsdpckpt.plan.written import NOTHING_WRITTEN
from fsdpckpt.storage.local_target import BLOCK
from tests.execute.random_files import Disk, random_files
from tests.execute.test_distributed_routes import run

KIB = 1024


def _plan_of(tensors: int, nbytes: int, files: int = 1) -> tuple[Target, list[Stored]]:
    """``files`` target files of ``tensors`` tensors each, with a header before each; tensor k is from source k % 2."""
    target = []
    for number in range(files):
        file = TargetFile(f"out{number}")
        for tensor in range(tensors):
            file.add_literal(bytes(100))
            chunks = Chunks.whole(file=tensor % 2, offset=(number * tensors + tensor) * nbytes, shape=(nbytes,))
            file.add_write_item(Tensor(DTYPES["uint8"], (nbytes,), chunks))
        target.append(file)
    return Target(target), [Stored(f"s{number}", files * tensors * nbytes) for number in range(2)]


def _transfers(target: Target, window: int, *, seen_by: np.ndarray, rank: int) -> TransferPlan:
    plan = make_plan(target)
    segments = partition(plan, range(len(plan.files)), [0])
    return plan_transfers(
        *(plan, segments, seen_by), rank=rank, window=window, round_bytes=4 * window, written=NOTHING_WRITTEN
    )


@pytest.mark.parametrize("window", [256 * KIB, 1 << 20])
def test_large_tensors_travel_in_their_windows_and_the_others_behind_them(window: int) -> None:
    target, _ = _plan_of(8, 4 << 20)
    seen_by = np.array([[False, True], [False, True]])
    found = _transfers(target, window, seen_by=seen_by, rank=0)
    whole = [each for each in found.windows if each.end - each.begin == window]
    assert len(found.in_place) >= 0.9 * len(whole)
    sent = int(found.receives[1].sum())
    assert found.received == {1: 32 << 20}
    assert sent <= 1.02 * found.received[1], "what keeps windows in place must cost little"
    begins = np.cumsum(found.receives[1]) - found.receives[1]
    for each, (sender, at) in found.in_place.items():
        assert sender == 1
        assert (at - int(begins[each.round]) - each.begin) % BLOCK == 0
    other = _transfers(target, window, seen_by=seen_by, rank=1)
    assert (other.sends[0] == found.receives[1]).all()


@pytest.mark.parametrize(
    ("tensors", "nbytes", "why"),
    [(64, 100 * KIB, "tensors are too small"), (8, 600 * KIB, "no window is of one sender")],
)
def test_small_tensors_and_windows_of_several_senders_travel_end_to_end(tensors: int, nbytes: int, why: str) -> None:
    target, _ = _plan_of(tensors, nbytes)
    found = _transfers(target, 1 << 20, seen_by=np.array([[False, True, False], [False, False, True]]), rank=0)
    assert not found.in_place, why
    assert {sender: int(counts.sum()) for sender, counts in found.receives.items()} == found.received


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.integers(0, 2**32))
def test_what_is_received_in_place_is_what_one_process_would_write(seed: int) -> None:
    rng = random.Random(seed)
    with tempfile.TemporaryDirectory() as folder, patch.object(streams, "SHORTEST_IN_PLACE", rng.choice([1, 8, 24])):
        disk = Disk(folder, [bytearray() for _ in range(4)], rng)
        files, wanted = random_files(rng, disk, 3, 0)
        plan = make_plan(Target(files))
        sources = disk.save()
        count = rng.randrange(2, 5)
        seen_by = np.array([[number % count == rank for rank in range(count)] for number in range(len(sources))])
        window = rng.choice([16, 48, 96, 4096])
        share, alignment = rng.choice([0.51, 0.7, 0.9]), rng.choice([1, 4, 16])
        with patch.object(partitioning, "_BLOCK", rng.choice([1, 16])):
            segments = tuple(partition(plan, range(len(files)), [0, count - 1]))
        settings = JobSettings(window, 0, 4 * (window + 2 * alignment), rng.randrange(1, 5), 256, FILES_AT_ONCE)
        with (
            patch.object(streams, "MOST_OF_A_WINDOW", share),
            patch.object(streams, "ALIGNMENT", alignment),
            patch.object(send_recv, "ALIGNMENT", alignment),
        ):
            assert run(Job(plan, sources, Checksums.of([]), segments, settings), seen_by, folder) == []
        for file, expected in zip(files, wanted, strict=True):
            with open(os.path.join(folder, file.path), "rb") as stream:
                assert stream.read() == expected


def test_what_changed_on_its_way_is_found_and_what_only_fills_a_gap_is_not_asked() -> None:
    rng = random.Random(7)
    with tempfile.TemporaryDirectory() as folder:
        disk = Disk(folder, [bytearray(), bytearray()], rng)
        file = TargetFile("out")
        tensors = [disk.put(rng.randbytes(512 * KIB)) for _ in range(2)]
        for number, offset in tensors:
            file.add_literal(bytes(range(100)))
            chunks = Chunks.whole(file=number, offset=offset, shape=(512 * KIB,))
            file.add_write_item(Tensor(DTYPES["uint8"], (512 * KIB,), chunks))
        plan, sources = make_plan(Target([file])), disk.save()
        seen_by = np.array([[False, True], [False, True]])
        segments = tuple(partition(plan, [0], [0]))
        job = Job(plan, sources, Checksums.of([]), segments, JobSettings(256 * KIB, 0, 1 << 20, 2, 256, FILES_AT_ONCE))
        found = plan_transfers(
            *(plan, segments, seen_by), rank=0, window=256 * KIB, round_bytes=1 << 20, written=NOTHING_WRITTEN
        )
        assert len(found.in_place) >= 3
        (stream,) = plan_transfers(
            *(plan, segments, seen_by), rank=1, window=256 * KIB, round_bytes=1 << 20, written=NOTHING_WRITTEN
        ).streams.values()
        begins, ends = stream.write_items[:, 0], stream.write_items.sum(axis=1)
        gaps = [int(end) for end, begin in zip(ends, begins[1:], strict=False) if begin > end]
        assert gaps
        for where, blamed in ((int(begins[1]), [0]), (int(ends[-1]) - 1, [0]), (gaps[0], [])):
            for name in os.listdir(folder):
                if name == "out":
                    os.unlink(os.path.join(folder, name))
            assert run(job, seen_by, folder, flip=where) == blamed


def test_the_buffer_of_a_round_has_room_for_the_alignment_of_every_sender() -> None:
    target, _ = _plan_of(12, 600 * KIB, files=2)
    found = _transfers(target, 300 * KIB, seen_by=np.array([[False, True, False], [False, False, True]]), rank=0)
    assert {sender for sender, _ in found.in_place.values()} == {1, 2}
    buffers = ReceiveBuffers(found.receives, {}, found.rounds, 1, in_place=found.in_place)
    for number in range(found.rounds):
        buffers._windows_left[number] = 1
        assert buffers.reserve(number)
        room = buffers._buffers[number]
        assert len(room) <= 4 * 300 * KIB
        ends = []
        for window, (sender, _) in found.in_place.items():
            if window.round == number:
                place = buffers.place_of(window)
                assert place is not None
                assert (np.frombuffer(place, np.uint8).ctypes.data - window.begin) % BLOCK == 0
                begin = np.frombuffer(place, np.uint8).ctypes.data - room.ctypes.data
                ends.append((begin, begin + len(place), sender))
        ends.sort()
        assert all(first[1] <= second[0] for first, second in pairwise(ends))
        assert not ends or ends[-1][1] <= len(room)
        buffers.written(number)
