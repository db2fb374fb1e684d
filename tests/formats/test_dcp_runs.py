"""Runs of records are read in columns: equal to what the general reader reads, for whole files and for damaged ones."""

from __future__ import annotations

import io
import pickle
import random
import runpy
import struct
import sys
import tarfile
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from fsdpckpt.errors import FsdpckptError
from fsdpckpt.formats.dcp import DcpMetadata, parse_metadata, reduce, repeats
from fsdpckpt.formats.dcp import metadata as reader
from fsdpckpt.formats.dcp.repeats import ENTRY, KnownTensors
from fsdpckpt.formats.dcp.runs import Memo
from fsdpckpt.formats.dcp.write_metadata import DcpEntry, StoredItems, metadata_pickle
from fsdpckpt.ir.dtypes import DTYPES
from fsdpckpt.storage.local import MemoryFile
from tests.fuzz.mutations import mutated

GOLDEN = Path(__file__).parent.parent / "golden"
FILES = sorted(GOLDEN.rglob(".metadata"))


def facts(found: DcpMetadata) -> tuple[object, ...]:
    """Everything in it, comparable."""
    tensors = {
        key: (
            tensor.dtype.name,
            tensor.shape,
            *(getattr(tensor.chunks, name).tolist() for name in ("start", "size", "file", "item")),
        )
        for key, tensor in found.tensors.items()
    }
    rest = (found.version, found.order, found.files, found.transforms, found.unflattened)
    return tensors, found.items, found.paths, *rest


def outcome(data: bytes) -> object:
    try:
        return facts(parse_metadata(MemoryFile(data, "d/.metadata")))
    except FsdpckptError as error:
        return type(error), str(error), error.details


def both(data: bytes, monkeypatch: pytest.MonkeyPatch) -> tuple[object, object]:
    """What comes of ``data`` with and without the reading of runs."""
    fast = outcome(data)
    with monkeypatch.context() as patch:
        patch.setattr(reader, "reduce_pickle", lambda _: None)
        return fast, outcome(data)


def in_runs(data: bytes) -> tuple[int, int]:
    """How many chunks and items are read in runs."""
    reduced = reduce.reduce_pickle(MemoryFile(data, "d/.metadata"))
    if reduced is None:
        return 0, 0
    return len(reduced.chunks.get("ndim", ())), sum(len(part["ndim"]) for part in reduced.items)


def read_in_runs(data: bytes) -> tuple[int, int]:
    """The same of a file that is read so to its end, and not by the general reader after all."""
    reduced = reduce.reduce_pickle(MemoryFile(data, "d/.metadata"))
    if reduced is not None:
        reader._Parser("d/.metadata", reduced).parse(reader._load(reduced.pickle, "d/.metadata", reduced.runs))
    return in_runs(data)


def copied(value: Any) -> Any:
    """Equal, but nothing in it is the same object: as what other ranks send."""
    return pickle.loads(pickle.dumps(value))


LENGTHS = (3, 300, 70_000, 1 << 31, 1 << 40, (1 << 63) - 1)


def saved(
    ranks: int,
    shapes: dict[str, tuple[int, ...]],
    *,
    protocol: int = 4,
    seed: int = 0,
    lengths: tuple[int, ...] = LENGTHS,
    offsets_of_items: tuple[int, ...] = (0, 255, 256, 65536, 1 << 31, 1 << 50),
) -> bytes:
    """A file as the coordinator writes it for ``ranks`` ranks; uneven rows, large offsets, empty chunks."""
    numbers = random.Random(seed)
    entries: dict[str, Any] = {"value": BytesStorageMetadata()}
    stored: dict[Any, Any] = {}
    rows = {name: -(-shape[0] // ranks) for name, shape in shapes.items() if shape}
    for name, shape in shapes.items():
        starts = range(0, shape[0] + 1, rows[name]) if shape else [None]
        chunks = []
        for start in list(starts)[:ranks]:
            offsets = torch.Size(() if start is None else (start, *(0 for _ in shape[1:])))
            sizes = torch.Size(() if start is None else (min(rows[name], shape[0] - start), *shape[1:]))
            chunks.append(copied(ChunkStorageMetadata(offsets, sizes)))
        entries[name] = TensorStorageMetadata(TensorProperties(torch.bfloat16), torch.Size(shape), chunks)
    for rank in range(ranks):
        path = f"__{rank}_0.distcp"
        for name in shapes:
            chunks = entries[name].chunks
            if rank < len(chunks):
                index = copied(MetadataIndex(name, chunks[rank].offsets, rank))
                stored[index] = _StorageInfo(path, numbers.choice(offsets_of_items), numbers.choice(lengths))
    stored[MetadataIndex("value")] = _StorageInfo("__0_0.distcp", 9, 9)
    paths = {key: tuple(key.split(".")) for key in entries}
    return pickle.dumps(Metadata(entries, paths, stored), protocol=protocol)


SHAPES = {
    "m.w": (17, 5),
    "m.b": (40,),
    "m.s": (),
    "m.conv": (9, 3, 2),
    "m.deep": (12, 2, 1, 3, 2),
    "m." + "long" * 60: (70000, 1),
    "m.\u00e4\u0434": (8, 2),
}


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(GOLDEN).parent))
def test_real_files_are_read_in_runs_and_as_the_general_reader_reads_them(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = path.read_bytes()
    chunks, items = read_in_runs(data)
    assert min(chunks, items) > 0
    fast, general = both(data, monkeypatch)
    assert fast == general


@pytest.mark.parametrize("protocol", [4, 5])
@pytest.mark.parametrize("ranks", [1, 7, 40])
def test_many_ranks_are_read_in_runs_whatever_their_numbers(
    ranks: int, protocol: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = saved(ranks, SHAPES, protocol=protocol, seed=ranks)
    fast, general = both(data, monkeypatch)
    assert fast == general and isinstance(fast, tuple)
    chunks, items = read_in_runs(data)
    total = sum(len(tensor[2]) for tensor in fast[0].values())
    assert chunks == total - 1, "the first has no form to be compared with"
    assert items >= total - 2 - ranks, "the first item of a file has its path as a text"


def layers(ranks: int, layers: int) -> bytes:
    """As ``saved``, for a model of equal layers: the same lists of chunks, and the same items on every rank."""
    shapes = {"head": (700, 1)}
    for layer in range(layers):
        shapes |= {f"{layer}.w": (3 * ranks, 2), f"{layer}.u": (ranks - 5, 3), f"{layer}.b": (2 * ranks,)}
        shapes |= {f"{layer}.conv": (ranks, 2, 3), f"step{layer}": ()}
    return saved(ranks, shapes, lengths=(1 << 20, 1 << 21, 1 << 30), offsets_of_items=(1 << 16,))


@pytest.fixture
def small_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Little is parsed at a time, so that also in small files most is known when it comes, and joined."""
    monkeypatch.setattr(reduce, "_WINDOW", 300)
    monkeypatch.setattr(repeats, "_MIN_RUN", 2)


@pytest.mark.usefixtures("small_windows")
def test_what_repeats_is_compared_and_read_as_the_general_reader_reads_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """300 ranks: numbers of one and of two bytes, and several batches of a thousand."""
    known = []
    take = repeats.KnownItems.take

    def counted(*arguments: Any) -> repeats.Records | None:
        taken = take(*arguments)
        known.append(taken.rows.stop if taken is not None else 0)
        return taken

    joined = []
    join = repeats._join
    monkeypatch.setattr(repeats.KnownItems, "take", counted)
    monkeypatch.setattr(repeats, "_join", lambda parts: joined.append(len(parts)) or join(parts))
    data = layers(300, 4)
    fast, general = both(data, monkeypatch)
    assert fast == general and isinstance(fast, tuple)
    total = sum(len(tensor[2]) for tensor in fast[0].values())
    chunks, items = read_in_runs(data)
    assert chunks < total // 3, "the lists of chunks were not known again"
    assert max(joined) > 2, "no items were joined"
    assert items > 0.8 * total, "only single items among known ones are walked over"
    assert sum(known) > 1.2 * items, "the items of two readings were not known again"


@pytest.mark.usefixtures("small_windows")
def test_a_byte_that_repeats_otherwise_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any byte of what is only compared, or taken for a number, may be another one."""
    corpus = layers(20, 2)
    generator = random.Random(9)
    accepted = refused = 0
    for _ in range(90):
        damaged = bytearray(corpus)
        at = generator.randrange(len(damaged) // 8, len(damaged))
        damaged[at] = generator.choice((damaged[at] ^ 1, damaged[at] ^ 128, 0, 255, *b"hKMJu(", damaged[at - 1]))
        fast, general = both(bytes(damaged), monkeypatch)
        assert fast == general, at
        accepted += isinstance(fast[0], dict)  # type: ignore[index]
        refused += not isinstance(fast[0], dict)  # type: ignore[index]
    assert min(accepted, refused) > 5, (accepted, refused)


def written(ranks: int, copies: int = 1) -> bytes:
    """What this program writes: empty chunks, and a value. ``copies``: of each tensor under another name."""
    none = np.zeros((1, 0), np.int64)
    value = StoredItems(none, none, np.array([0]), np.array([9]))
    entries = [DcpEntry("lr", ("lr",), None, (), value, np.array([0]))]
    for number, (name, shape) in enumerate(SHAPES.items()):
        starts = range(0, shape[0], -(-shape[0] // ranks)) if shape else [0]
        rest = (0,) * (len(shape) - 1)
        place = np.array([(start, *rest)[: len(shape)] for start in starts], np.int64).reshape(len(starts), len(shape))
        size = np.array([(0, *shape[1:])[: len(shape)] for _ in starts], np.int64).reshape(len(starts), len(shape))
        rank = np.arange(len(starts))
        items = StoredItems(place, size, rank, np.full(len(rank), 1 << 33))
        for copy in range(copies):
            key = f"copy{copy}.{name}" if copy else name
            entries.append(DcpEntry(key, ("m", number, copy), DTYPES["float32"], shape, items, 99 * rank))
    return bytes(metadata_pickle(entries, [f"__{rank}_0.distcp" for rank in range(ranks + 1)]))


def test_what_this_program_writes_is_read_in_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    fast, general = both(written(6), monkeypatch)
    assert fast == general
    chunks, items = read_in_runs(written(6))
    assert min(chunks, items) > 15


@pytest.mark.parametrize("protocol", [2, 3])
def test_older_protocols_are_left_to_the_general_reader(protocol: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of their records has memo numbers of its own."""
    data = saved(4, SHAPES, protocol=protocol)
    fast, general = both(data, monkeypatch)
    assert fast == general and in_runs(data) == (0, 0)


def blocks(data: bytes, nbytes: int) -> bytes:
    """The same opcodes in frames of ``nbytes`` (with no regard for where opcodes end)."""
    opcodes = b""
    at = 2
    while at < len(data):
        (size,) = struct.unpack_from("<Q", data, at + 1)
        opcodes += data[at + 9 : at + 9 + size]
        at += 9 + size
    parts = [opcodes[begin : begin + nbytes] for begin in range(0, len(opcodes), nbytes)]
    return data[:2] + b"".join(b"\x95" + struct.pack("<Q", len(part)) + part for part in parts)


def test_runs_reach_over_the_blocks_that_a_file_is_read_in(monkeypatch: pytest.MonkeyPatch) -> None:
    data = saved(40, SHAPES)
    whole = facts(parse_metadata(MemoryFile(data, "d/.metadata")))
    pieces = in_runs(data)
    monkeypatch.setattr(reduce, "_BLOCK", 9000)
    monkeypatch.setattr(reduce, "_ROOM", 700)
    for nbytes in (4000, 5000):  # of a frame: two fit into a block, or one and a part
        assert facts(parse_metadata(MemoryFile(at_opcodes(data, nbytes), "d/.metadata"))) == whole
        assert read_in_runs(at_opcodes(data, nbytes)) == pieces


def at_opcodes(data: bytes, nbytes: int) -> bytes:
    """The same pickle in frames of about ``nbytes``, as a pickler of that frame size writes it."""

    class Framer(pickle._Framer):  # type: ignore[name-defined,misc]
        _FRAME_SIZE_TARGET = nbytes

    class Small(pickle._Pickler):
        def __init__(self, file: Any) -> None:
            super().__init__(file, 4)
            self.framer = Framer(file.write)
            self.write = self.framer.write

    buffer = io.BytesIO()
    Small(buffer).dump(pickle.loads(data))
    return buffer.getvalue()


@pytest.mark.parametrize("nbytes", [1, 7, 64, 1000])
def test_a_frame_that_begins_within_an_opcode_is_not_taken_for_its_argument(
    nbytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    fast, general = both(blocks(saved(7, SHAPES), nbytes), monkeypatch)
    assert fast == general


@pytest.mark.parametrize("make", [lambda: layers(20, 5), lambda: written(6, copies=5)], ids=["torch", "own"])
def test_a_tensor_described_as_another_one_is_known_again(
    make: Callable[[], bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    data = make()
    reduced = reduce.reduce_pickle(MemoryFile(data, "d/.metadata"))
    assert reduced is not None
    fast, general = both(data, monkeypatch)
    assert fast == general and isinstance(fast, tuple)
    kinds = [run.kind for run in reduced.runs]
    again = sum(
        reduced.pickle.count(b"J%bQ" % n.to_bytes(4, "little")) for n, kind in enumerate(kinds) if kind == ENTRY
    )
    assert again > len(fast[0]) // 2, "each was walked over"


ENTRY_EDITS = {
    "popped": (b"", b"0"), "built": (b"", b"}b"), "with a state": (b"", b"(K\x00K\x00K\x00tb"),
    "memoised": (b"", b"\x94"), "in a tuple": (b"", b"\x85"), "twice": (b"", b"2"),
    "a value between": (b"N", b""), "a mark before": (b"(", b""),
    "a mark after": (b"", b"("), "set alone": (b"", b"s"), "set early": (b"", b"u("), "a stop": (b"", b"."),
    "after a number": (b"K\x01", b"0"), "popped and built": (b"", b"X\x01\0\0\0a0}b"), "a key changed": (b"N0", b""),
}  # fmt: skip


@pytest.mark.parametrize("name", ENTRY_EDITS)
def test_a_known_tensor_that_is_used_otherwise_is_judged_by_the_general_reader(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, after = ENTRY_EDITS[name]
    own = written(6, copies=4)
    key = own.index(b"copy3.m.w") + len(b"copy3.m.w") + 2
    torchs = layers(9, 4)[11:]
    of_torch = torchs.index(b"\x8c\x033.w\x94") + 6
    for data, begin in ((own, key), (torchs, of_torch)):
        end = data.index(b"ubeub", begin) + 5
        edited = data[:begin] + before + data[begin:end] + after + data[end:]
        fast, general = both(edited if data is own else framed(edited), monkeypatch)
        assert fast == general


def memo() -> Memo:
    """0 is the class of tensors, 1 and 2 are names of attributes."""
    made = Memo()
    made.names[0] = ENTRY
    made.texts.update({1: b"chunks", 2: b"size"})
    return made


@pytest.mark.parametrize(
    ("head", "end", "whole"),
    [
        (b"h\0)\x81}(h\2K\5\x85h\1](", b"eubX", True),
        (b"h\0)\x81\x94}\x94(h\2(K\5tj\1\0\0\0]\x94", b"aubu", True),
        (b"h\3)\x81}(h\2K\5\x85h\1](", b"eubX", False),  # another class
        (b"h\0)\x81}(h\2K\5\x85h\2](", b"eubX", False),  # of another attribute
        (b"h\2K\5\x85h\1](", b"eubX", False),  # a part of it
        (b"h\0)\x81}(h\2K\5\x85ub}(h\1](", b"eubX", False),  # two values
        (b"h\0)\x81}(h\2(K\5h\1](", b"eubX", False),  # an open tuple
        (b"h\0)\x81}(h\2K\0K\5\x85h\1]", b"eubX", False),  # no mark to append from
        (b"h\0)\x81}(h\2K\5\x85h\1](", b"eubb", False),  # something is done to it
    ],
)
def test_only_a_whole_tensor_is_known_again(head: bytes, end: bytes, whole: bool) -> None:
    data = head + b"h\4ub" + end
    known = KnownTensors()
    assert known.add(data, 0, len(head), len(head) + 4, 5, 2, memo()) is whole
    taken = known.take(b"--" + data, 2)
    assert (taken is not None and (taken.rows.start, taken.memoised, taken.end) == (5, 2, len(data) + 1)) is whole


def edits(data: bytes) -> Iterator[tuple[str, bytes]]:
    """Damage to the runs themselves, by name."""
    chunk_end = data.index(b"ub", data.index(b"sizes")) + 2
    second = data.index(b"ub", chunk_end) + 2
    record = data[chunk_end:second]
    yield "a record twice", data[:second] + record + data[second:]
    yield "a record less", data[:chunk_end] + data[second:]
    yield "popped", data[:second] + b"0" + data[second:]
    yield "popped twice", data[:second] + b"00" + data[second:]
    yield "memoised", data[:second] + b"\x94" + data[second:]
    yield "appended alone", data[:second] + b"a" + data[second:]
    yield "in a tuple", data[:second] + b"\x86" + data[second:]
    yield "appended early", data[:second] + b"e(" + data[second:]
    yield "a stop", data[:second] + b"." + data[second:]
    yield "bytes after the end", data + b"N"
    yield "built", data[:second] + b"}b" + data[second:]


@pytest.mark.parametrize("number", range(11))
def test_a_run_that_is_used_otherwise_is_judged_by_the_general_reader(
    number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, data = list(edits(saved(7, SHAPES)[11:]))[number]
    framed = b"\x80\x04\x95" + struct.pack("<Q", len(data)) + data
    fast, general = both(framed, monkeypatch)
    assert fast == general, name


@pytest.mark.parametrize("window", [300, 1 << 16])
def test_damaged_files_come_to_the_end_that_the_general_reader_finds(
    window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reduce, "_WINDOW", window)
    corpus = [path.read_bytes() for path in FILES if path.stat().st_size < 7000]
    corpus += [saved(5, {"w": (9, 2), "b": (7,)}), written(3), written(7)]
    generator = random.Random(window)
    reduced = accepted = 0
    for number in range(400):
        data = mutated(generator, corpus)
        if number % 2:  # a byte or two, so that most of it still has its form
            damaged = bytearray(generator.choice(corpus))
            for _ in range(generator.randint(1, 2)):
                at = generator.randrange(len(damaged))
                damaged[at] = generator.choice((damaged[at] ^ 1, 0, 1, 255, *b"(ebua0hK.", damaged[at - 1]))
            data = bytes(damaged)
        fast, general = both(data, monkeypatch)
        assert fast == general, data
        if in_runs(data) != (0, 0):
            reduced += 1
            accepted += isinstance(fast[0], dict)  # type: ignore[index]
    assert reduced > 80 and accepted > 5, "hardly any was read in runs"


def framed(opcodes: bytes, *ends: int) -> bytes:
    """``opcodes`` in frames that end there."""
    parts = [opcodes[begin:end] for begin, end in zip((0, *ends), (*ends, len(opcodes)), strict=True)]
    return b"\x80\x04" + b"".join(b"\x95" + struct.pack("<Q", len(part)) + part for part in parts)


def test_a_frame_that_ends_anywhere_is_read_as_the_unpickler_reads_it(monkeypatch: pytest.MonkeyPatch) -> None:
    opcodes = saved(3, {"w": (9, 2)})[11:]
    accepted = 0
    for end in range(1, len(opcodes), 2):
        fast, general = both(framed(opcodes, end), monkeypatch)
        assert fast == general, end
        accepted += isinstance(fast[0], dict)  # type: ignore[index]
    assert 100 < accepted < len(opcodes) // 2


def test_records_that_are_appended_one_by_one_are_no_run(monkeypatch: pytest.MonkeyPatch) -> None:
    opcodes = saved(3, {"m.v": (9, 2), "m.w": (9, 2)})[11:]
    begin = opcodes.index(b"]\x94(", opcodes.index(b"]\x94(") + 1)
    end = opcodes.index(b"ubeub", begin) + 2
    appended = opcodes[: begin + 2] + opcodes[begin + 3 : end] + b"a" + opcodes[end + 1 :]
    fast, general = both(framed(appended), monkeypatch)
    assert fast == general and not isinstance(fast[0], dict)  # type: ignore[index]


def test_a_reference_into_a_run_is_left_to_the_general_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where one process saves: the offset of an item is the very object that its chunk has."""
    value: Metadata = pickle.loads(saved(3, SHAPES))
    starts = {
        (key, tuple(chunk.offsets)): chunk.offsets
        for key, entry in value.state_dict_metadata.items()
        for chunk in getattr(entry, "chunks", ())
    }
    for index in value.storage_data:
        if index.offset is not None:
            object.__setattr__(index, "offset", starts[index.fqn, tuple(index.offset)])
    data = pickle.dumps(value, protocol=4)
    fast, general = both(data, monkeypatch)
    assert fast == general and isinstance(fast[0], dict)  # type: ignore[index]
    assert in_runs(data) == (0, 0)


MEGATRON = runpy.run_path(str(Path(__file__).parents[2] / "scripts" / "bench_megatron_make.py"))


def megatrons(tmp_path: Path, change: Callable[[Any], object] = lambda _: None) -> bytes:
    """``.metadata`` of Megatron-core from 5 ranks, which has the plans of all of them behind everything else."""
    MEGATRON["make"](str(tmp_path / "c"), 5, layers=4, experts=12)
    with (tmp_path / "c" / ".metadata").open("rb") as file:
        value = pickle.load(file)
    change(value)
    return pickle.dumps(value, protocol=4)


@pytest.mark.parametrize("block", [reduce._BLOCK, 9000])
def test_the_plans_that_megatron_leaves_are_gone_past(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: int
) -> None:
    data = at_opcodes(megatrons(tmp_path), 4000)
    monkeypatch.setattr(reduce, "_BLOCK", block)
    monkeypatch.setattr(reduce, "_ROOM", 700)
    fast, general = both(data, monkeypatch)
    assert fast == general and isinstance(fast[0], dict)  # type: ignore[index]
    chunks, items = read_in_runs(data)
    assert chunks > 90 and items > 300  # of 48 in each of 8 tensors, whose chunks repeat
    left = reduce.reduce_pickle(MemoryFile(data, "d"))
    assert left is not None and b"WriteItem" not in left.pickle


def one_plan(value: Any) -> None:
    del value.all_local_plans[1:]


def a_later_attribute(value: Any) -> None:
    value.mcore_data = {next(iter(value.state_dict_metadata)): {"nd_reformulated_orig_global_shape": (4, 12, 64, 64)}}


@pytest.mark.parametrize("change", [one_plan, a_later_attribute])
def test_plans_that_are_not_last_are_left_to_the_general_reader(
    change: Callable[[Any], object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = megatrons(tmp_path, change)
    fast, general = both(data, monkeypatch)
    assert fast == general and isinstance(fast[0], dict)  # type: ignore[index]
    assert in_runs(data) == (0, 0)
    found = parse_metadata(MemoryFile(data, "d/.metadata"))
    assert bool(found.unflattened) == (change is a_later_attribute)


def test_a_cut_within_the_plans_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = megatrons(tmp_path)
    begin = data.index(b"all_local_plans")
    for end in (begin + 20, (begin + len(data)) // 2, len(data) - 1):
        fast, general = both(data[:end], monkeypatch)
        assert fast == general and isinstance(fast[0], type)  # type: ignore[index]


@pytest.mark.parametrize("path", sorted((GOLDEN / "megatron").glob("*.tar.xz")), ids=lambda path: path.name)
def test_megatrons_files_are_read_in_runs(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In that of ``buffers`` the first mention of a name is a text in an item, and later items refer to it."""
    with tarfile.open(path) as packed:
        file = packed.extractfile(f"{path.name.partition('.tar')[0]}/.metadata")
        assert file is not None
        data = file.read()
    chunks, items = read_in_runs(data)
    assert chunks > 0 and items > 30
    fast, general = both(data, monkeypatch)
    assert fast == general and isinstance(fast[0], dict)  # type: ignore[index]


def test_the_storage_records_of_olmo_core_are_read_as_torchs_in_runs_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its storage writer pickles a dataclass of its own with the same three fields."""
    of_torch = saved(6, SHAPES)
    module = types.ModuleType("olmo_core.distributed.checkpoint.filesystem")
    module._StorageInfo = _StorageInfo  # type: ignore[attr-defined]
    for package in ("olmo_core", "olmo_core.distributed", "olmo_core.distributed.checkpoint", module.__name__):
        monkeypatch.setitem(sys.modules, package, module)
    monkeypatch.setattr(_StorageInfo, "__module__", module.__name__)
    of_olmo = saved(6, SHAPES)
    assert b"olmo_core" in of_olmo and outcome(of_olmo) == outcome(of_torch)
    assert read_in_runs(of_olmo) == read_in_runs(of_torch) != (0, 0)
    fast, general = both(of_olmo, monkeypatch)
    assert fast == general
