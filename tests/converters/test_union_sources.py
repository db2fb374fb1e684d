"""Files that only other ranks see: what rank 0 reads of them, in how many messages, and which rank sees which file."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fsdpckpt.api import convert
from fsdpckpt.comm.protocol import Solo
from fsdpckpt.converters.shared_sources import content_identity, find_visible
from fsdpckpt.converters.union_sources import STEP, UnionSources, answers_to, joined_ranges
from fsdpckpt.errors import FsdpckptError, SourceCorruptError, SourceMissingError
from fsdpckpt.ir.files import Stored, Zeros
from fsdpckpt.readers.detect import open_checkpoint
from fsdpckpt.storage.remote_file import AHEAD
from fsdpckpt.storage.sources import Sources


class PlayedRanks(Solo):
    """Rank 0 of several. Rank r has the files of ``disks[r]`` under the same names in ``/view``; rank 0 has none.

    ``messages``: to each rank, the requests of each message.
    """

    def __init__(self, disks: Sequence[Path]) -> None:
        super().__init__()
        self.world_size = 1 + len(disks)
        self.messages: list[tuple[int, Sequence[Any]]] = []
        self._disks = disks
        self._waiting: dict[int, Sequence[Any]] = {}

    def send_object(self, value: object, *, to: int) -> None:
        assert to not in self._waiting, "a second message before the answer to the first one"
        assert isinstance(value, list)
        if value:
            self._waiting[to] = value
            self.messages.append((to, value))

    def receive_object(self, *, source: int) -> object:
        with Sources() as sources:
            return answers_to(Solo(), sources, self._waiting.pop(source), {"/view": str(self._disks[source - 1])})


def _deal(files: Sequence[Path], disks: Sequence[Path]) -> PlayedRanks:
    """The ``files``, one after the other on the next of ``disks``."""
    for number, path in enumerate(files):
        disk = disks[number % len(disks)]
        disk.mkdir(exist_ok=True)
        path.rename(disk / path.name)
    return PlayedRanks(disks)


def test_every_range_of_a_file_of_another_rank_is_what_it_has(tmp_path: Path) -> None:
    data = random.Random(5).randbytes(3 * AHEAD + 100)
    (tmp_path / "file").write_bytes(data)
    group = PlayedRanks([tmp_path])
    chosen = random.Random(6)
    with UnionSources(group) as sources:
        file = sources.open("/view/file")
        assert file.nbytes == len(data)
        for _ in range(200):
            offset = chosen.randrange(len(data))
            nbytes = chosen.randrange(min(len(data) - offset, chosen.choice([5, 5000, 500_000])) + 1)
            if chosen.random() < 0.3:
                assert file.prefetch([(offset, nbytes), (chosen.randrange(len(data)), 10)])
            assert file.read(offset, nbytes) == data[offset : offset + nbytes]
        buffer = bytearray(len(data))
        file.read_into(0, memoryview(buffer))
        assert buffer == data
        for offset, nbytes in ((len(data) - 1, 2), (-1, 1), (len(data) + 1, 0)):
            with pytest.raises(SourceCorruptError, match="ends too early"):
                file.read(offset, nbytes)
        with pytest.raises(SourceMissingError):
            sources.open("/view/gone")
    assert max(nbytes for _, asked in group.messages for request in asked for _, nbytes in request[2]) <= STEP


def test_ranges_that_are_known_in_advance_are_one_request(tmp_path: Path) -> None:
    data = random.Random(7).randbytes(1 << 20)
    (tmp_path / "file").write_bytes(data)
    group = PlayedRanks([tmp_path])
    ranges = [(number * 5000, 30) for number in range(200)]
    with UnionSources(group) as sources:
        file = sources.open("/view/file")
        before = len(group.messages)
        assert file.prefetch(ranges)
        assert all(file.read(offset, nbytes) == data[offset : offset + nbytes] for offset, nbytes in ranges)
    assert len(group.messages) == before + 1


def test_a_directory_is_listed_once_and_what_no_rank_lists_is_asked_of_none(tmp_path: Path) -> None:
    for rank in (1, 2):
        (tmp_path / str(rank) / "below").mkdir(parents=True)
        (tmp_path / str(rank) / "both").write_bytes(bytes(rank))
        (tmp_path / str(rank) / f"only{rank}").write_bytes(b"x" * rank)
    group = PlayedRanks([tmp_path / "1", tmp_path / "2"])
    with UnionSources(group) as sources:
        for _ in range(3):
            listed = sources.list_directory("/view")
        assert [(entry.name, entry.nbytes, entry.directory) for entry in listed] == [
            ("below", 0, True),
            ("both", 1, False),
            ("only1", 1, False),
            ("only2", 2, False),
        ]
        assert sources.stat("/view/none") is None
        assert sources.stat("/view/only2") == listed[3]
        assert len(group.messages) == 2, "one for each rank"
        assert sources.open("/view/only2").read(0, 2) == b"xx"
        assert sources.stat("/view/below/none") is None
    assert len(group.messages) == 2 + 1 + 2


def _saved(folder: Path, *, ranks: int, tensors: int) -> Path:
    """A model of ``tensors`` tensors in as many files as ``ranks``."""
    generator = torch.Generator().manual_seed(ranks)
    model = {f"layers.{n}.weight": torch.randn(64, 33 + n % 3, generator=generator) for n in range(tensors)}
    folder.mkdir()
    torch.save(model, folder / "full.pt")
    convert(folder / "full.pt", folder / "r", to="sharded", container="torch", world_size=ranks, buffers="none")
    (folder / "r" / "fsdpckpt.json").unlink()
    return folder / "r"


def _as_dcp(folder: Path, source: Path, *, ranks: int) -> Path:
    convert(source, folder / "dcp", to="sharded", world_size=ranks, buffers="none")
    (folder / "dcp" / "fsdpckpt.json").unlink()
    return folder / "dcp"


def _read(path: str, sources: Sources, **options: Any) -> dict[str, Any]:
    """Where each tensor's bytes are: file name, offset, start and size of each chunk."""
    checkpoint = open_checkpoint(path, sources=sources, **options)
    names = [Path(file.path).name for file in checkpoint.files]
    found = {}
    for named in checkpoint.tensors():
        chunks = named.tensor.chunks
        columns = (chunks.file.tolist(), chunks.offset.tolist(), chunks.start.tolist(), chunks.size.tolist())
        found[named.key] = [(names[file], *place) for file, *place in zip(*columns, strict=True)]
    return found


def _both(folder: Path, disks: int, **limits: int) -> tuple[PlayedRanks, dict[str, Any]]:
    """Read it alone, then with its files dealt out; the same must come of both."""
    with Sources() as sources:
        alone = _read(str(folder), sources)
    group = _deal(sorted(folder.iterdir()), [folder.parent / f"disk{n}" for n in range(disks)])
    with UnionSources(group, **limits) as union:
        assert _read("/view", union) == alone
    return group, alone


@pytest.mark.parametrize("tensors", [2, 40])
@pytest.mark.parametrize("ranks", [3, 9])
def test_headers_of_any_number_of_files_and_tensors_are_one_message_to_each_rank(
    tmp_path: Path, ranks: int, tensors: int
) -> None:
    group, _ = _both(_saved(tmp_path / "made", ranks=ranks, tensors=tensors), 3)
    kinds = [[request[0] for request in asked] for rank, asked in group.messages if rank == 1]
    files = ranks // 3
    assert kinds == [["stat"], ["list"], ["head"] * files, ["headers"] * files], kinds


def test_items_of_dcp_files_come_together_from_all_ranks(tmp_path: Path) -> None:
    made = _saved(tmp_path / "made", ranks=2, tensors=30)
    group, _ = _both(_as_dcp(tmp_path, made, ranks=8), 2)
    headers = [(rank, len(asked)) for rank, asked in group.messages if asked[0][0] == "headers"]
    assert headers == [(1, 4), (2, 4)] or headers == [(2, 4), (1, 4)], headers
    reads = [asked for _, asked in group.messages if asked[0][0] == "read"]
    assert all(".metadata" in request[1] for asked in reads for request in asked), reads


@pytest.mark.parametrize("headers", [100, 20_000, 40_000])
def test_headers_that_do_not_fit_come_later_and_are_the_same(tmp_path: Path, headers: int) -> None:
    group, _ = _both(_saved(tmp_path / "made", ranks=9, tensors=40), 3, headers=headers)
    rounds = sum(asked[0][0] == "headers" and rank == 1 for rank, asked in group.messages)
    assert rounds > 1, "all came at once"


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[data.index(b"layers.1") + 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("damage", [_cut, _flip])
def test_a_damaged_file_of_another_rank_is_the_error_of_a_lone_process(
    tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    folder = _saved(tmp_path / "made", ranks=4, tensors=3)
    damage(folder / "model_world_size_4_rank_2.pt")
    with Sources() as sources, pytest.raises(FsdpckptError) as alone:
        _read(str(folder), sources)
    group = _deal(sorted(folder.iterdir()), [tmp_path / "disk0", tmp_path / "disk1"])
    with UnionSources(group) as union, pytest.raises(FsdpckptError) as apart:
        _read("/view", union)
    assert type(apart.value) is type(alone.value)
    assert apart.value.what.replace("/view", str(folder)) == alone.value.what


def test_a_file_that_cannot_be_read_spoils_no_other(tmp_path: Path) -> None:
    folder = _saved(tmp_path / "made", ranks=4, tensors=3)
    names = sorted(path.name for path in folder.iterdir())
    data = (folder / names[0]).read_bytes()
    group = _deal(sorted(folder.iterdir()), [tmp_path / "disk0"])
    with UnionSources(group) as union:
        union.list_directory("/view")
        (tmp_path / "disk0" / names[1]).unlink()
        (tmp_path / "disk0" / names[2]).write_bytes(b"PK\3\4")
        union.prefetch_ends([f"/view/{name}" for name in names])
        assert union.open(f"/view/{names[0]}").read(len(data) - 2000, 2000) == data[-2000:]
        with pytest.raises(SourceMissingError):
            union.open(f"/view/{names[1]}").read(0, 4)
        with pytest.raises(SourceCorruptError):
            union.open(f"/view/{names[2]}").read(0, 8)


def test_ranges_that_touch_are_one() -> None:
    assert joined_ranges([(10, 5), (0, 4), (15, 1), (12, 2), (4, 0)]) == [(0, 4), (10, 6)]


# Which rank sees which file


def test_the_same_content_is_one_file_whatever_the_disk(tmp_path) -> None:
    data = random.Random(1).randbytes(100_000)
    for name in ("a", "b"):
        (tmp_path / name).write_bytes(data)
    with Sources() as sources:
        one, other, gone = (content_identity(Stored(str(tmp_path / name), 0), sources) for name in ("a", "b", "c"))
    assert one == other != b""
    assert gone == b""


@pytest.mark.parametrize("at", [0, 5_000, 99_999])
@pytest.mark.parametrize("nbytes", [1, 4096, 100_000])
def test_another_length_or_other_bytes_are_another_file(tmp_path, nbytes: int, at: int) -> None:
    data = bytearray(random.Random(2).randbytes(nbytes))
    (tmp_path / "a").write_bytes(data)
    (tmp_path / "longer").write_bytes(data + b"x")
    (tmp_path / "other").write_bytes(random.Random(3).randbytes(nbytes))
    data[min(at, nbytes - 1)] ^= 1
    sampled = at != 5_000 or nbytes < 100_000
    (tmp_path / "flipped").write_bytes(data)
    with Sources() as sources:
        found = {
            content_identity(Stored(str(tmp_path / name), 0), sources) for name in ("a", "longer", "other", "flipped")
        }
    assert len(found) == (4 if sampled else 3)


def test_what_reads_as_zeros_is_seen_by_all(tmp_path) -> None:
    with Sources() as sources:
        assert content_identity(Zeros(8), sources) != b""


def test_who_sees_which_file_is_a_table_of_files_and_workers() -> None:
    table = find_visible(["a", "b"], [[b"1", b""], [b"1", b"2"], [b"", b"2"]])
    assert table.tolist() == [[True, True, False], [False, True, True]]


def test_all_files_that_differ_or_are_gone_are_named() -> None:
    with pytest.raises(SourceCorruptError) as caught:
        find_visible(["a", "b", "c"], [[b"1", b"", b"3"], [b"2", b"", b"3"], [b"2", b"", b""]])
    assert caught.value.details == ("a: worker 0 and workers 1, 2 see different files", "b: gone on every worker")


def test_an_identity_reads_little_of_a_large_file(tmp_path) -> None:
    path = tmp_path / "large"
    with path.open("wb") as file:
        file.truncate(1 << 34)
    begun = time.monotonic()
    with Sources() as sources:
        assert content_identity(Stored(str(path), 0), sources) != b""
    assert time.monotonic() - begun < 2
    assert np.prod(path.stat().st_blocks) == 0
