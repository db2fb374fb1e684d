"""The scanner and the checked loader read the same, whatever is shared, named or numbered in a real pickle."""

from __future__ import annotations

import copy
import io
import pickle
import pickletools
from contextlib import nullcontext
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from fsdpckpt.formats.dcp.records import CHUNK, ITEM, TENSOR
from fsdpckpt.formats.pickle.opcodes import integer
from fsdpckpt.formats.pickle.operands import NotScannedError, numbers_of, references_of, sizes_of
from fsdpckpt.formats.pickle.records import Scan
from fsdpckpt.formats.pickle.scanner import Scanner
from tests.formats.test_dcp_records import framed, in_runs, is_read, opcodes_of, read, same_end, scanned

NAMES = st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=6) | st.sampled_from(
    ["w" * 255, "w" * 256, "\u00e4" * 128, "h\x00K\x01)\x81\x94}\x94(", "ub.", "a.b"]
)
NUMBERS = st.sampled_from([0, 1, 255, 256, 65535, 65536, (1 << 31) - 1, 1 << 31, 1 << 40, (1 << 62) + 5])


@st.composite
def metadata_files(draw: st.DrawFn) -> bytes:
    """What torch's classes are pickled to, with names, paths and offsets that are one object, equal ones or others."""
    entries: dict[str, Any] = {}
    stored: dict[Any, Any] = {}
    paths = draw(st.lists(st.sampled_from(["__0_0.distcp", "__1_0.distcp", "p" * 300]), min_size=1, max_size=3))
    # torch gathers what other ranks send: their objects are equal to those of this rank, but not the same.
    received = draw(st.booleans())
    for name in draw(st.lists(NAMES, unique=True, min_size=1, max_size=5)):
        dimensions = draw(st.integers(0, 9))
        rows = draw(st.integers(0, 3)) if dimensions else 1
        chunks = []
        for number in range(rows):
            start = torch.Size([number, *[0] * (dimensions - 1)][:dimensions])
            size = torch.Size([1, *[1] * (dimensions - 1)][:dimensions])
            chunks.append(ChunkStorageMetadata(start, size))
            path = draw(st.sampled_from(paths))
            index = MetadataIndex(name, start, draw(st.sampled_from([number, None, 7])))
            info = _StorageInfo(path, draw(NUMBERS), draw(NUMBERS))
            if received:
                index, info = pickle.loads(pickle.dumps((index, info)))
            stored[index] = info
        shape = torch.Size([rows, *[1] * (dimensions - 1)][:dimensions])
        dtype = draw(st.sampled_from([torch.float32, torch.bfloat16]))
        entries[name] = TensorStorageMetadata(TensorProperties(dtype), shape, chunks)
    protocol = draw(st.integers(2, 5))
    value = Metadata(entries, None if draw(st.booleans()) else {name: (name,) for name in entries}, stored)
    value = copy.copy(value)
    if draw(st.booleans()):
        buffer = io.BytesIO()
        pickle._Pickler(buffer, protocol).dump(value)  # Python's own
        return buffer.getvalue()
    return pickle.dumps(value, protocol=protocol)


@settings(max_examples=50, deadline=None)
@given(metadata_files())
def test_any_file_of_torchs_classes_is_read_as_the_loader_reads_it(data: bytes) -> None:
    same_end(data)


def indexes(names: list[str], paths: list[str]) -> bytes:
    """A pickle of items, each with its name and path."""
    empty = TensorStorageMetadata(TensorProperties(torch.float32), torch.Size([1]), [])
    entries: dict[str, Any] = {name: copy.deepcopy(empty) for name in set(names)}
    for name in names:
        entries[name].chunks.append(ChunkStorageMetadata(torch.Size([len(entries[name].chunks)]), torch.Size([1])))
        entries[name].size = torch.Size([len(entries[name].chunks)])
    count = dict.fromkeys(names, 0)
    stored = {}
    for name, path in zip(names, paths, strict=True):
        stored[MetadataIndex(name, torch.Size([count[name]]))] = _StorageInfo(path, 5, 6)
        count[name] += 1
    return pickle.dumps(Metadata(entries, None, stored), protocol=4)


def new(text: str) -> str:
    """An equal text that is another object."""
    return text.encode().decode()


@pytest.mark.parametrize("shared", ["names", "paths", "both", "neither", "some names"])
def test_whatever_is_shared_nearly_all_items_are_scanned(shared: str) -> None:
    name, path = "layer.weight", "__0_0.distcp"
    names = [name if shared in ("names", "both") else new(name) for _ in range(50)]
    if shared == "some names":  # each is a text once and then a reference
        names = [text for text in (new(name) for _ in range(10)) for _ in range(5)]
    paths = [path if shared in ("paths", "both") else new(path) for _ in range(50)]
    data = indexes(names, paths)
    read(data)
    assert in_runs(scanned(data))[1] >= 48


def test_a_reference_to_what_comes_later_is_refused() -> None:
    """The name of an item becomes a reference to each value around it: some are names, before it and after it."""
    opcodes = opcodes_of(indexes([new("layer.weight") for _ in range(12)], [new("__0_0.distcp") for _ in range(12)]))
    text = b"\x8c\x0clayer.weight\x94"
    at = opcodes.index(text, opcodes.index(b"storage_data"))
    for _ in range(5):
        at = opcodes.index(text, at + 1)
    memoised = sum(opcode.name == "MEMOIZE" and (place or 0) < at for opcode, _, place in pickletools.genops(opcodes))
    accepted = 0
    for number in range(memoised - 25, memoised + 25):
        edited = opcodes[:at] + b"j" + number.to_bytes(4, "little") + opcodes[at + len(text) :]
        accepted += is_read(same_end(framed(edited), number - memoised))
    assert accepted > 1, "no reference to a name before it was tried"


def scan(opcodes: bytes, *, numbered: bool = False) -> Scan:
    scanner = Scanner((TENSOR, CHUNK, ITEM), numbered=numbered)
    scanner.read(opcodes, len(opcodes))
    return scanner.finish(b"\x80\x04")


def test_what_has_no_records_is_copied() -> None:
    for value in (
        {"a": [1, 2.5, "b", None, True], "c": (1 << 70,)},
        ["x" * 300, {"x" * 70000: -5}],
        ("h\x94", "h\x94"),
    ):
        opcodes = opcodes_of(pickle.dumps(value, protocol=4))
        if len(opcodes) < 60000:
            assert pickle.loads(scan(opcodes).pickle) == value
    numbered = pickle.dumps({"a": ["a", "b", "a"]}, protocol=2)[2:]
    assert pickle.loads(scan(numbered, numbered=True).pickle) == {"a": ["a", "b", "a"]}


def test_references_keep_their_values_however_many_are_copied_at_once() -> None:
    names = [f"layers.{layer}.weight" for layer in range(400)]
    value = {"names": names, "paths": {name: ("state", name, other) for name, other in pairwise(names)}}
    opcodes = opcodes_of(pickle.dumps(value, protocol=4))
    assert pickle.loads(scan(opcodes).pickle) == value
    assert pickle.loads(scan(pickle.dumps(value, protocol=2)[2:], numbered=True).pickle) == value


def test_a_reference_to_a_value_that_is_copied_with_it_but_later_stays_one() -> None:
    assert pickle.loads(scan(b"(\x8c\x01a\x94h\x00\x8c\x01b\x94t.").pickle) == ("a", "a", "b")
    with pytest.raises(pickle.UnpicklingError, match="Memo value not found"):
        pickle.loads(scan(b"(\x8c\x01a\x94h\x01\x8c\x01b\x94t.").pickle)


def test_a_frame_may_end_after_each_opcode_that_is_copied_and_nowhere_else() -> None:
    names = [f"layers.{layer}.weight" for layer in range(30)]
    opcodes = opcodes_of(pickle.dumps([*names, *names], protocol=4))
    ends = {at for _, _, at in pickletools.genops(b"\x80\x04" + opcodes) if at}
    for end in range(1, len(opcodes)):
        scanner = Scanner((TENSOR, CHUNK, ITEM), numbered=False)
        with nullcontext() if end + 2 in ends else pytest.raises(NotScannedError, match="two frames"):
            scanner.read(opcodes, len(opcodes), [end])


@pytest.mark.parametrize(
    ("opcodes", "why"),
    [
        (b"N0N.", "opcode 0x30"),
        (b"N2.", "opcode 0x32"),
        (b"(K\x011N.", "opcode 0x31"),
        (b"\x80\x04N.", "opcode 0x80"),
        (b"\x82\x01.", "opcode 0x82"),
        (b"N.N", "bytes after the end"),
        (b"N", "no end"),
        (b"\x8c\x05ab.", "cut off"),
        (b"h\x00.", "a part of a record"),  # nothing has that number
        (b"Nq\x00.", "opcode 0x71"),  # a number of its own among values that are counted
        (b"\x95\x01\0\0\0\0\0\0\0N.", "opcode 0x95"),
    ],
)
def test_what_no_save_needs_is_not_scanned(opcodes: bytes, why: str) -> None:
    with pytest.raises(NotScannedError, match=why):
        scan(opcodes)


def test_a_memo_number_that_is_given_twice_is_not_scanned() -> None:
    with pytest.raises(NotScannedError, match="given twice"):
        scan(b"Nq\x01K\x05q\x01.", numbered=True)
    assert scan(b"Nq\x01K\x05q\x02.", numbered=True).pickle == b"\x80\x04Nq\x01K\x05q\x02."


@given(st.lists(st.integers(0, (1 << 63) - 1) | NUMBERS, min_size=1))
def test_numbers_of_any_width_are_read(numbers: list[int]) -> None:
    assert numbers_of([integer(number) for number in numbers]).tolist() == numbers


def test_negative_numbers_and_none() -> None:
    assert numbers_of([b"N", b"K\x05", b"N"]).tolist() == [0, 5, 0]
    for number in (-1, -(1 << 31), -(1 << 40)):
        with pytest.raises(NotScannedError, match="negative"):
            numbers_of([b"K\x05", integer(number)])


@given(st.lists(st.integers(0, (1 << 31) - 1) | st.integers(0, 300) | st.none(), min_size=1))
def test_references_of_any_width_are_read_and_texts_are_none(references: list[int | None]) -> None:
    opcodes = []
    for number in references:
        if number is None:
            opcodes.append(b"\x8c\x05hello\x94")
        else:
            opcodes.append(b"h%c" % number if number < 256 else b"j" + number.to_bytes(4, "little"))
    assert references_of(opcodes).tolist() == [-1 if number is None else number for number in references]


@settings(max_examples=40)
@given(st.lists(st.lists(NUMBERS, max_size=8), min_size=1))
def test_sizes_of_any_length_are_read(sizes: list[list[int]]) -> None:
    ends = {0: b")", 1: b"\x85\x94", 2: b"\x86\x94", 3: b"\x87\x94"}
    opcodes = [
        (b"(" if len(size) > 3 else b"") + b"".join(map(integer, size)) + ends.get(len(size), b"t\x94")
        for size in sizes
    ]
    table, ndim, memoised = sizes_of(opcodes)
    assert [row[:length].tolist() for row, length in zip(table, ndim, strict=True)] == sizes
    assert (np.zeros(len(sizes), int) + memoised).tolist() == [int(len(size) > 0) for size in sizes]
