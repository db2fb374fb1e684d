"""Who of several workers sends which file or object to a store, and who compares which tensor."""

from __future__ import annotations

import fcntl
import os
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import fsdpckpt
from fsdpckpt.converters.check import divide_pairs, pack_pairs, unpack_pairs
from fsdpckpt.converters.output.division import assign_parts
from fsdpckpt.converters.output.spool import Spool, is_sent
from fsdpckpt.converters.output.upload import assign_senders
from fsdpckpt.converters.read_back import Pair
from fsdpckpt.errors import TargetExistsError, TargetUnwritableError
from fsdpckpt.ir.dtypes import DTYPES
from fsdpckpt.ir.tensors import Chunks, Tensor
from fsdpckpt.plan.plan import Copies, Plan, _outline
from fsdpckpt.storage.target_checks import existing_and_missing
from fsdpckpt.storage.upload import UPLOADED_LAST


def tensor(rng: random.Random, *, files: int) -> Tensor:
    """Of random shape (0-dim and empty ones too), in chunks in some of ``files`` files."""
    shape = tuple(rng.choice([0, 1, 3, 7, 13]) for _ in range(rng.randrange(4)))
    count = rng.randrange(1, 4)
    numbers = [rng.randrange(files) for _ in range(count)]
    boxes = [[rng.randrange(5) for _ in shape] for _ in range(2 * count)]
    chunks = Chunks.rows(
        ndim=len(shape),
        rank=[rng.randrange(9) for _ in range(count)],
        file=numbers,
        offset=[rng.randrange(1 << 40) for _ in range(count)],
        start=boxes[:count],
        size=boxes[count:],
    )
    return Tensor(DTYPES[rng.choice(["float32", "bfloat16", "int64"])], shape, chunks)


def pairs(seed: int, *, files: int = 3) -> list[Pair]:
    rng = random.Random(seed)
    return [Pair(f"model {n}", tensor(rng, files=files), tensor(rng, files=files)) for n in range(rng.randrange(60))]


@pytest.mark.parametrize("seed", range(20))
def test_pairs_that_cross_are_what_they_were(seed: int) -> None:
    before = pairs(seed)
    after = unpack_pairs(pack_pairs(before))
    assert [pair.name for pair in after] == [pair.name for pair in before]
    for one, other in zip(before, after, strict=True):
        for mine, theirs in ((one.source, other.source), (one.written, other.written)):
            assert (mine.dtype, mine.shape) == (theirs.dtype, theirs.shape)
            for column in ("rank", "file", "offset", "start", "size", "stride"):
                assert np.array_equal(getattr(mine.chunks, column), getattr(theirs.chunks, column)), column


@pytest.mark.parametrize("seed", range(20))
def test_each_tensor_is_compared_once_by_a_worker_that_sees_all_of_it_else_it_is_left(seed: int) -> None:
    rng = np.random.default_rng(seed)
    found = pairs(seed, files=4)
    source, written = (rng.random((4, 3)) < 0.7 for _ in range(2))
    shares = divide_pairs(found, source, written, 3)
    assert sorted(pair.name for share in shares for pair in share) == sorted(pair.name for pair in found)
    for worker, share in enumerate(shares):
        for pair in share:
            sees = source[pair.source.chunks.file].all(axis=0) & written[pair.written.chunks.file].all(axis=0)
            assert sees[worker] if worker < 3 else not sees.any()


def test_tensors_that_all_see_are_divided_evenly() -> None:
    found = pairs(3)
    everyone = np.ones((3, 4), bool)
    shares = divide_pairs(found, everyone, everyone, 4)
    load = [sum(pair.written.nbytes for pair in share) for share in shares]
    assert load[4] == 0
    assert max(load) - min(load[:4]) <= max(pair.written.nbytes for pair in found)


def test_files_go_up_from_where_they_are_and_from_all_workers_alike() -> None:
    rng = random.Random(4)
    sizes = {f"file {number}": rng.randrange(1, 1000) for number in range(101)}
    holders = {name: sorted(rng.sample(range(4), rng.randrange(1, 5))) for name in sizes}
    found = assign_senders(sizes, holders)
    assert found.keys() == sizes.keys()
    assert all(worker in holders[name] for name, worker in found.items())
    everywhere = assign_senders(sizes, {name: [1, 2, 3] for name in sizes})
    load = [sum(sizes[name] for name, worker in everywhere.items() if worker == each) for each in (1, 2, 3)]
    assert max(load) - min(load) <= max(sizes.values())


INFO = {"ETag": '"5d41"', "size": 5}


def test_what_was_sent_counts_for_the_upload_it_was_sent_in_alone(tmp_path: Path) -> None:
    stage = Spool.of("s3://runs/step-1", str(tmp_path))
    with stage.locked(resume=False) as first:
        stage.note_sent(first, 0, "a", INFO)
        Path(stage.path).touch()
    with stage.locked(resume=True) as again:
        assert again == first
        stage.note_sent(again, 1, "b", INFO)
        assert is_sent(stage.sent(again), "a", INFO)
        assert is_sent(stage.sent(again), "b", INFO)
        assert not is_sent(stage.sent(again), "a", {**INFO, "ETag": '"7d79"'})
        assert not is_sent(stage.sent(again), "c", INFO)
    kept = [path.read_bytes() for path in Path(stage.root).glob("sent-*")]
    with stage.locked(resume=False) as second:
        assert second != first
        assert stage.sent(second) == {}
        (Path(stage.root) / "sent-7").write_bytes(b"".join(kept))  # notes of a node that was not there meanwhile
        assert stage.sent(second) == {}
        stage.note_sent(second, 0, "a", INFO)
    with stage.locked(resume=True) as third:  # somebody removed the output: the next one may be of another checkpoint
        assert stage.sent(third) == {}


@pytest.mark.parametrize("to", ["full", "sharded"])
@pytest.mark.parametrize("name", ["upload", "sent-0", "output", "writer-0"])
def test_dst_may_be_called_what_our_notes_are_called(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, to: str
) -> None:
    monkeypatch.setattr("fsspec.implementations.memory.MemoryFileSystem.store", {})
    monkeypatch.setattr("fsspec.implementations.memory.MemoryFileSystem.pseudo_dirs", [""])
    torch.save({"model": {"w": torch.randn(7, 3)}}, tmp_path / "source.pt")
    url = f"memory://{to}/{name}"
    fsdpckpt.convert(tmp_path / "source.pt", url, to=to, staging=tmp_path / "staging")
    assert fsdpckpt.diff(tmp_path / "source.pt", url).same
    assert os.listdir(tmp_path) == ["source.pt"]


def test_what_a_run_leaves_empty_is_removed_by_the_next(tmp_path: Path) -> None:
    stage = Spool.of("s3://runs/step-1", str(tmp_path))
    with stage.locked(resume=True):
        Path(stage.path).mkdir()
    assert Path(stage.path).is_dir()
    with stage.locked(resume=False):
        pass
    assert list(tmp_path.iterdir()) == []


def test_one_run_at_a_time_writes_from_a_staging_directory_and_leaves_none_without_need(tmp_path: Path) -> None:
    stage = Spool.of("s3://runs/step-1", str(tmp_path))
    with stage.locked(resume=True) as upload:
        with pytest.raises(TargetExistsError), stage.locked(resume=False):
            pass
        assert stage.upload() == upload, "the other run took it away"
    assert list(tmp_path.iterdir()) == []
    with stage.locked(resume=True) as upload:
        stage.note_sent(upload, 0, "a", INFO)
    assert Path(stage.root).is_dir()


def test_a_link_in_place_of_the_staging_directory_is_refused_and_what_it_leads_to_stays(tmp_path: Path) -> None:
    home, shared = tmp_path / "home", tmp_path / "shared"
    (home / "step-1").mkdir(parents=True)
    (home / "step-1" / "thesis.txt").write_text("years of work")
    shared.mkdir()
    stage = Spool.of("s3://runs/step-1", str(shared))
    Path(stage.root).symlink_to(home)  # anyone can make it in /tmp
    with pytest.raises(TargetUnwritableError, match="is a symbolic link"), stage.locked(resume=False):
        pass
    assert (home / "step-1" / "thesis.txt").read_text() == "years of work"
    assert [path.name for path in home.iterdir()] == ["step-1"]


def test_a_lock_on_a_directory_that_another_run_removed_meanwhile_is_taken_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = Spool.of("s3://runs/step-1", str(tmp_path))
    lock, calls = fcntl.flock, []

    def after_another_run(descriptor: int, operation: int) -> None:
        calls.append(operation)
        if len(calls) == 1:  # the run that held the lock ends, and the next one begins
            os.rmdir(stage.root)
            os.mkdir(stage.root)
        lock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", after_another_run)
    with stage.locked(resume=True):
        with pytest.raises(TargetExistsError), stage.locked(resume=True):
            pass
        assert len(calls) == 3


def test_a_relative_staging_directory_that_does_not_exist_is_made_and_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    stage = Spool.of("s3://runs/step-1", "scratch")
    with stage.locked(resume=True):
        assert (tmp_path / stage.root).is_dir()
    assert list(tmp_path.iterdir()) == []
    assert existing_and_missing("scratch/uploads") == (".", ["scratch/uploads", "scratch"])


def test_the_directories_that_were_made_for_staging_are_removed_with_it(tmp_path: Path) -> None:
    stage = Spool.of("s3://runs/step-1", str(tmp_path / "scratch" / "uploads"))
    with stage.locked(resume=True):
        assert Path(stage.root).is_dir()
    assert list(tmp_path.iterdir()) == []
    with stage.locked(resume=True) as upload:
        stage.note_sent(upload, 0, "a", INFO)
    assert Path(stage.root).is_dir(), "what the next run needs stays"


# Objects: no part has two senders, and about as many bytes go to each worker


@pytest.mark.parametrize("seed", range(20))
def test_no_part_has_two_senders_and_no_worker_has_much_more_than_its_share(seed: int) -> None:
    rng = random.Random(seed)
    sizes = [rng.choice([0, 1, 700, 1000, 9000, 50_000]) for _ in range(rng.randrange(1, 30))]
    names = [f"x{number}{rng.choice(UPLOADED_LAST) if rng.random() < 0.2 else ''}" for number in range(len(sizes))]
    plan = Plan(tuple(_outline(name, nbytes) for name, nbytes in zip(names, sizes, strict=True)), (), 0)
    workers, part = list(range(rng.randrange(1, 9))), rng.choice([64, 100, 1000])
    segments = assign_parts(plan, workers, part)
    for number, (name, nbytes) in enumerate(zip(names, sizes, strict=True)):
        own = sorted((each.begin, each.end, each.owner) for each in segments if each.file == number)
        assert [begin for begin, _, _ in own] == [0, *(end for _, end, _ in own[:-1])], "each byte has one sender"
        assert own[-1][1] == nbytes
        assert all(begin % part == 0 for begin, _, _ in own)
        if name.endswith(UPLOADED_LAST):
            assert own == [(0, nbytes, 0)], "the first worker sends the lists"
    data = [each for each in segments if not names[each.file].endswith(UPLOADED_LAST)]
    assert [each.owner for each in data] == sorted(each.owner for each in data), "neighbours have one writer"
    share = sum(each.end - each.begin for each in data) / len(workers)
    for worker in workers:
        assert sum(each.end - each.begin for each in data if each.owner == worker) <= share * 1.8 + part


@pytest.mark.parametrize("workers", [2, 3, 8])
def test_equal_files_are_divided_equally_and_each_has_one_sender(workers: int) -> None:
    plan = Plan(tuple(_outline(str(number), 100) for number in range(2 * workers)), (), 0)
    segments = assign_parts(plan, range(workers), 10)
    assert [(each.begin, each.end) for each in segments] == [(0, 100)] * (2 * workers)
    assert [each.owner for each in segments] == [number // 2 for number in range(2 * workers)]


@pytest.mark.parametrize(("offset", "cut"), [(16, 100), (18, 0), (118, 100)])
def test_no_element_that_is_cast_has_two_senders(offset: int, cut: int) -> None:
    """A tensor that is not aligned to its elements is cut by all ends of parts: it has one sender."""
    columns = [0, 0, 0, offset, 4 * 90, 4 * 90, 1, 0]
    file = replace(
        _outline("x", offset + 4 * 90),
        write_items=np.array([[offset, 4 * 90]], np.int64),
        first_copy=np.array([0, 1]),
        copies=Copies(*np.array(columns, np.int64)[:, None]),
    )
    plan = Plan((file,), ((DTYPES["bfloat16"], DTYPES["float32"]),), 0)
    segments = assign_parts(plan, range(2), 100)
    assert [each.begin for each in segments] == ([0, cut] if cut else [0])
