"""Records of ``.metadata`` are scanned: equal to what the general reader reads, for whole files and damaged ones."""

from __future__ import annotations

import io
import pickle
import random
import runpy
import struct
import sys
import tarfile
import types
from collections.abc import Callable
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
from fsdpckpt.formats.dcp import DcpMetadata, metadata, parse_metadata, records
from fsdpckpt.formats.dcp.write_metadata import DcpEntry, StoredItems, metadata_pickle
from fsdpckpt.formats.pickle.operands import NotScannedError
from fsdpckpt.formats.pickle.records import Scan
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


def general(data: bytes) -> object:
    """What comes of ``data`` if nothing is scanned."""

    def not_scanned(_source: object) -> None:
        raise NotScannedError("switched off")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(metadata, "scan_metadata", not_scanned)
        return outcome(data)


def same_end(data: bytes, where: object = "") -> Any:
    """What comes of ``data``, with and without the scanner."""
    found = outcome(data)
    assert found == general(data), where
    return found


def is_read(found: Any) -> bool:
    """Whether the outcome is no error."""
    return isinstance(found[0], dict)


def read(data: bytes) -> Any:
    """The facts of a whole file, which both read."""
    found = same_end(data)
    assert is_read(found), found
    return found


def scanned(data: bytes, **limits: int) -> Scan:
    return records.scan_metadata(MemoryFile(data, "d/.metadata"), **limits)


def in_runs(scan: Scan) -> tuple[int, int]:
    """How many chunks and items are in runs."""
    counts = {True: 0, False: 0}
    for run in scan.runs:
        counts[run.record is records.ITEM] += run.end - run.begin
    return counts[False], counts[True]


def is_scanned(data: bytes) -> bool:
    try:
        return any(in_runs(scanned(data)))
    except NotScannedError:
        return False


def read_in_runs(data: bytes, **limits: int) -> tuple[int, int]:
    """How many chunks and items are read so, in a file that the general reader need not read after all."""
    scan = scanned(data, **limits)
    metadata._parse_scanned(scan, "d/.metadata")
    return in_runs(scan)


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
def test_real_files_are_read_in_runs_and_as_the_general_reader_reads_them(path: Path) -> None:
    read(path.read_bytes())
    assert min(read_in_runs(path.read_bytes())) > 0


@pytest.mark.parametrize("protocol", [4, 5])
@pytest.mark.parametrize("ranks", [1, 7, 40])
def test_many_ranks_are_read_in_runs_whatever_their_numbers(ranks: int, protocol: int) -> None:
    data = saved(ranks, SHAPES, protocol=protocol, seed=ranks)
    total = sum(len(tensor[2]) for tensor in read(data)[0].values())
    chunks, items = read_in_runs(data)
    assert chunks >= total - 2, "the first of two kinds has names as texts"
    assert items >= total - 2 - ranks, "the first item of a file has its path as a text"


def layers(ranks: int, layers: int) -> bytes:
    """As ``saved``, for a model of equal layers: the same lists of chunks, and the same items on every rank."""
    shapes: dict[str, tuple[int, ...]] = {"head": (700, 1)}
    for layer in range(layers):
        shapes |= {f"{layer}.w": (3 * ranks, 2), f"{layer}.u": (ranks - 5, 3), f"{layer}.b": (2 * ranks,)}
        shapes |= {f"{layer}.conv": (ranks, 2, 3), f"step{layer}": ()}
    return saved(ranks, shapes, lengths=(1 << 20, 1 << 21, 1 << 30), offsets_of_items=(1 << 16,))


def test_what_repeats_is_read_as_the_general_reader_reads_it() -> None:
    """300 ranks: numbers of one and of two bytes, and several batches of a thousand."""
    data = layers(300, 4)
    found = read(data)
    total = sum(len(tensor[2]) for tensor in found[0].values())
    chunks, items = read_in_runs(data)
    assert chunks > 0.9 * total and items > 0.99 * total
    holders = {run.holder for run in scanned(data).runs if run.holder >= 0}
    assert len(holders) < len(found[0]) // 2, "tensors of the same bytes were not known again"


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


def test_what_this_program_writes_is_read_in_runs() -> None:
    read(written(6))
    assert min(read_in_runs(written(6))) > 15


@pytest.mark.parametrize("protocol", [2, 3])
def test_older_protocols_are_left_to_the_general_reader(protocol: int) -> None:
    """Each of their records has memo numbers of its own."""
    data = saved(4, SHAPES, protocol=protocol)
    read(data)
    assert not is_scanned(data)


def opcodes_of(data: bytes) -> bytes:
    """Without frames."""
    found, at = b"", 2
    while at < len(data):
        (size,) = struct.unpack_from("<Q", data, at + 1)
        found += data[at + 9 : at + 9 + size]
        at += 9 + size
    return found


def framed(opcodes: bytes, *ends: int) -> bytes:
    """``opcodes`` in frames that end there."""
    parts = [opcodes[begin:end] for begin, end in zip((0, *ends), (*ends, len(opcodes)), strict=True)]
    return b"\x80\x04" + b"".join(b"\x95" + struct.pack("<Q", len(part)) + part for part in parts)


@pytest.mark.parametrize("nbytes", [1, 7, 64, 1000])
def test_a_frame_that_begins_within_an_opcode_is_not_taken_for_its_argument(nbytes: int) -> None:
    opcodes = opcodes_of(saved(7, SHAPES))
    same_end(framed(opcodes, *range(nbytes, len(opcodes), nbytes)))


def test_a_frame_that_ends_anywhere_is_read_as_the_unpickler_reads_it() -> None:
    opcodes = opcodes_of(saved(3, {"w": (9, 2)}))
    accepted = sum(is_read(same_end(framed(opcodes, end), end)) for end in range(1, len(opcodes), 2))
    assert 100 < accepted < len(opcodes) // 2


def test_runs_reach_over_the_blocks_that_a_file_is_read_in() -> None:
    data = saved(40, SHAPES)
    whole, (chunks, items) = facts(parse_metadata(MemoryFile(data, "d/.metadata"))), read_in_runs(data)
    for nbytes in (4000, 5000):  # of a frame: two fit into a block, or one and a part
        scan = scanned(at_opcodes(data, nbytes), block=9000, room=700)
        in_blocks = in_runs(scan)
        assert facts(metadata._parse_scanned(scan, "d/.metadata")) == whole
        assert in_blocks[0] >= chunks - 4 and in_blocks[1] >= items - 2


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


EDITS = {
    "popped": (b"", b"0"), "popped twice": (b"", b"00"), "built": (b"", b"}b"), "memoised": (b"", b"\x94"),
    "with a state": (b"", b"(K\x00K\x00K\x00tb"), "in a tuple": (b"", b"\x85"), "in a pair": (b"", b"\x86"),
    "twice": (b"", b"2"), "a value between": (b"N", b""), "a mark before": (b"(", b""), "a mark after": (b"", b"("),
    "set alone": (b"", b"s"), "set early": (b"", b"u("), "appended alone": (b"", b"a"), "appended early": (b"", b"e("),
    "a stop": (b"", b"."), "after a number": (b"K\x01", b"0"), "popped and built": (b"", b"X\x01\0\0\0a0}b"),
    "a key changed": (b"N0", b""),
}  # fmt: skip


@pytest.mark.parametrize("name", EDITS)
def test_what_is_used_otherwise_is_judged_by_the_general_reader(name: str) -> None:
    """A tensor of bytes that are known from another one, and one record of a run."""
    before, after = EDITS[name]
    own = written(6, copies=4)
    key = own.index(b"copy3.m.w") + len(b"copy3.m.w") + 2
    of_torch, run = opcodes_of(layers(9, 4)), opcodes_of(saved(7, SHAPES))
    first = run.index(b"ub", run.index(b"sizes")) + 2
    third = of_torch.index(b"\x8c\x033.w\x94") + 6
    for data, begin, last in ((own, key, b"ubeub"), (of_torch, third, b"ubeub"), (run, first, b"ub")):
        end = data.index(last, begin) + len(last)
        edited = data[:begin] + before + data[begin:end] + after + data[end:]
        same_end(edited if data is own else framed(edited))


def test_a_record_more_or_less_and_bytes_after_the_end_are_judged_by_the_general_reader() -> None:
    data = opcodes_of(saved(7, SHAPES))
    first = data.index(b"ub", data.index(b"sizes")) + 2
    second = data.index(b"ub", first) + 2
    for edited in (data[:second] + data[first:], data[:first] + data[second:], data + b"N"):
        same_end(framed(edited))


def damaged(generator: random.Random, data: bytes, first: int, others: bytes) -> bytes:
    """One byte is another one."""
    found = bytearray(data)
    at = generator.randrange(first, len(found))
    found[at] = generator.choice((found[at] ^ 1, *others, found[at - 1]))
    return bytes(found)


def test_a_byte_that_repeats_otherwise_is_seen() -> None:
    """Any byte of what is only compared, or taken for a number, may be another one."""
    corpus, generator = layers(20, 2), random.Random(9)
    found = [
        is_read(same_end(damaged(generator, corpus, len(corpus) // 8, bytes((0, 127, 128, 255)) + b"hKMJu(")))
        for _ in range(90)
    ]
    assert min(found.count(True), found.count(False)) > 5


@pytest.mark.parametrize("seed", [300, 1 << 16])
def test_damaged_files_come_to_the_end_that_the_general_reader_finds(seed: int) -> None:
    corpus = [path.read_bytes() for path in FILES if path.stat().st_size < 7000]
    corpus += [saved(5, {"w": (9, 2), "b": (7,)}), written(3), written(7)]
    generator = random.Random(seed)
    reduced = accepted = 0
    for number in range(400):
        data = mutated(generator, corpus)
        if number % 2:  # a byte or two, so that most of it still has its form
            data = generator.choice(corpus)
            for _ in range(generator.randint(1, 2)):
                data = damaged(generator, data, 0, bytes((0, 1, 255)) + b"(ebua0hK.")
        found = same_end(data, data)
        if is_scanned(data):
            reduced += 1
            accepted += is_read(found)
    assert reduced > 80 and accepted > 5, "hardly any was read in runs"


def test_records_that_are_appended_one_by_one_are_no_run() -> None:
    opcodes = opcodes_of(saved(3, {"m.v": (9, 2), "m.w": (9, 2)}))
    begin = opcodes.index(b"]\x94(", opcodes.index(b"]\x94(") + 1)
    end = opcodes.index(b"ubeub", begin) + 2
    appended = opcodes[: begin + 2] + opcodes[begin + 3 : end] + b"a" + opcodes[end + 1 :]
    assert not is_read(same_end(framed(appended)))


def test_a_reference_into_a_run_is_left_to_the_general_reader() -> None:
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
    read(data)
    assert not is_scanned(data)


MEGATRON = runpy.run_path(str(Path(__file__).parents[2] / "scripts" / "bench_megatron_make.py"))


def megatrons(tmp_path: Path, change: Callable[[Any], object] = lambda _: None) -> bytes:
    """``.metadata`` of Megatron-core from 5 ranks, which has the plans of all of them behind everything else."""
    MEGATRON["make"](str(tmp_path / "c"), 5, layers=4, experts=12)
    with (tmp_path / "c" / ".metadata").open("rb") as file:
        value = pickle.load(file)
    change(value)
    return pickle.dumps(value, protocol=4)


@pytest.mark.parametrize("block", [records._BLOCK, 9000])
def test_the_plans_that_megatron_leaves_are_gone_past(tmp_path: Path, block: int) -> None:
    data = at_opcodes(megatrons(tmp_path), 4000)
    fast = read(data)
    scan = scanned(data, block=block, room=700)
    chunks, items = in_runs(scan)
    assert chunks > 300 and items > 300  # of 48 in each of 8 tensors
    assert b"WriteItem" not in scan.pickle
    assert facts(metadata._parse_scanned(scan, "d/.metadata")) == fast


def one_plan(value: Any) -> None:
    del value.all_local_plans[1:]


def a_later_attribute(value: Any) -> None:
    value.mcore_data = {next(iter(value.state_dict_metadata)): {"nd_reformulated_orig_global_shape": (4, 12, 64, 64)}}


@pytest.mark.parametrize("change", [one_plan, a_later_attribute])
def test_plans_that_are_not_last_are_left_to_the_general_reader(
    change: Callable[[Any], object], tmp_path: Path
) -> None:
    data = megatrons(tmp_path, change)
    read(data)
    assert not is_scanned(data)
    found = parse_metadata(MemoryFile(data, "d/.metadata"))
    assert bool(found.unflattened) == (change is a_later_attribute)


def test_a_cut_within_the_plans_is_seen(tmp_path: Path) -> None:
    data = megatrons(tmp_path)
    begin = data.index(b"all_local_plans")
    for end in (begin + 20, (begin + len(data)) // 2, len(data) - 1):
        assert not is_read(same_end(data[:end]))


@pytest.mark.parametrize("path", sorted((GOLDEN / "megatron").glob("*.tar.xz")), ids=lambda path: path.name)
def test_megatrons_files_are_read_in_runs(path: Path) -> None:
    """In that of ``buffers`` the first mention of a name is a text in an item, and later items refer to it."""
    with tarfile.open(path) as packed:
        file = packed.extractfile(f"{path.name.partition('.tar')[0]}/.metadata")
        assert file is not None
        data = file.read()
    chunks, items = read_in_runs(data)
    assert chunks > 0 and items > 30
    read(data)


def test_the_storage_records_of_olmo_core_are_read_as_torchs_in_runs_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
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
    same_end(of_olmo)
