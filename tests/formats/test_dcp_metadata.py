""".metadata: real files of several torch versions are understood, hostile ones refused, nothing in them runs."""

from __future__ import annotations

import os
import pathlib
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from fsdpckpt.errors import SourceCorruptError, SourceIncompleteError, SourceUnsafeError
from fsdpckpt.formats.dcp import DcpMetadata, merge_metadata, parse_metadata
from fsdpckpt.formats.pickle import instance_class
from fsdpckpt.ir.dtypes import DTYPES
from fsdpckpt.storage.local import MemoryFile

GOLDEN = Path(__file__).parent.parent / "golden"


def size(*extents: int) -> torch.Size:
    return torch.Size(extents)


def chunk(start: Any, extent: Any) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(start, extent)


def metadata(**changes: Any) -> Metadata:
    """A tensor of two chunks and a value."""
    tensor = TensorStorageMetadata(
        TensorProperties(torch.bfloat16), size(7, 3), [chunk(size(0, 0), size(4, 3)), chunk(size(4, 0), size(3, 3))]
    )
    fields: dict[str, Any] = {
        "state_dict_metadata": {"m.w": tensor, "m.lr": BytesStorageMetadata()},
        "planner_data": {"m.lr": ("m", "lr"), "m.w": ("m", "w")},
        "storage_data": {
            MetadataIndex("m.w", size(0, 0), 0): _StorageInfo("__0_0.distcp", 0, 100),
            MetadataIndex("m.w", size(4, 0), 1): _StorageInfo("__1_0.distcp", 7, 90),
            MetadataIndex("m.lr"): _StorageInfo("__0_0.distcp", 100, 50),
        },
        "storage_meta": StorageMeta(pathlib.PosixPath("/somewhere"), "save", None),
    }
    return Metadata(**{**fields, **changes})


def parse(value: Any) -> DcpMetadata:
    data = value if isinstance(value, bytes) else pickle.dumps(value, protocol=4)
    return parse_metadata(MemoryFile(data, "d/.metadata"))


def rows(found: DcpMetadata, key: str) -> list[tuple[Any, ...]]:
    """Start, size, path, offset and length of each chunk."""
    chunks = found.tensors[key].chunks
    columns = (column.tolist() for column in (chunks.start, chunks.size, chunks.file, chunks.item))
    return [
        (tuple(start), tuple(extent), found.files[file], *item)
        for start, extent, file, item in zip(*columns, strict=True)
    ]


def refusal(value: Any) -> SourceCorruptError:
    with pytest.raises(SourceCorruptError) as error:
        parse(value)
    assert error.value.file == "d/.metadata"
    return error.value


def test_every_field_is_understood() -> None:
    found = parse(metadata())
    tensor = found.tensors["m.w"]
    assert (tensor.dtype.name, tensor.shape) == ("bfloat16", (7, 3))
    assert rows(found, "m.w") == [
        ((0, 0), (4, 3), "__0_0.distcp", 0, 100),
        ((4, 0), (3, 3), "__1_0.distcp", 7, 90),
    ]
    assert found.items == {"m.lr": ("__0_0.distcp", 100, 50, ())}
    assert found.paths == {"m.lr": ("m", "lr"), "m.w": ("m", "w")}
    assert found.order == ["m.lr", "m.w"], "the order of the planner data, which is the state dict's own"


@pytest.mark.parametrize("path", sorted(str(p.relative_to(GOLDEN)) for p in GOLDEN.rglob(".metadata")))
def test_real_files_of_old_versions_are_read_as_torch_reads_them(path: str) -> None:
    found = parse((GOLDEN / path).read_bytes())
    expected = pickle.loads((GOLDEN / path).read_bytes())
    assert list(found.tensors) + list(found.items) != []
    for key, entry in expected.state_dict_metadata.items():
        if isinstance(entry, BytesStorageMetadata):
            info = expected.storage_data[MetadataIndex(key)]
            assert found.items[key][:3] == (info.relative_path, info.offset, info.length)
            continue
        tensor = found.tensors[key]
        assert (tensor.shape, tensor.dtype.name) == (tuple(entry.size), str(entry.properties.dtype)[6:])
        for ours, theirs in zip(rows(found, key), entry.chunks, strict=True):
            info = expected.storage_data[MetadataIndex(key, theirs.offsets)]
            assert ours[:2] == (tuple(theirs.offsets), tuple(theirs.sizes))
            assert ours[2:] == (info.relative_path, info.offset, info.length)
    assert found.paths == expected.planner_data


def test_a_python_3_13_path_and_a_newer_version_are_read() -> None:
    data = pickle.dumps(metadata(version="1.0.0"), protocol=4)
    assert b"\x8c\x07pathlib" in data
    newer = data.replace(b"\x8c\x07pathlib", b"\x8c\x0epathlib._local")
    frame = int.from_bytes(data[3:11], "little") + 7
    found = parse(newer[:3] + frame.to_bytes(8, "little") + newer[11:])
    assert found.version == "1.0.0"


def test_an_empty_chunk_that_several_ranks_declared_is_one() -> None:
    entry = TensorStorageMetadata(
        TensorProperties(torch.float32),
        size(1),
        [chunk(size(0), size(1)), chunk(size(1), size(0)), chunk(size(1), size(0))],
    )
    stored = {
        MetadataIndex("w", size(0)): _StorageInfo("__0_0.distcp", 0, 9),
        MetadataIndex("w", size(1)): _StorageInfo("__1_0.distcp", 0, 9),
    }
    found = parse(Metadata({"w": entry}, None, stored))
    assert [extent for _, extent, *_ in rows(found, "w")] == [(1,), (0,)]
    assert found.paths is None and found.order == ["w"]


def with_chunks(*chunks: ChunkStorageMetadata, shape: Any = None, dtype: Any = torch.bfloat16) -> Metadata:
    value = metadata()
    value.state_dict_metadata["m.w"] = TensorStorageMetadata(
        TensorProperties(dtype), size(7, 3) if shape is None else shape, list(chunks)
    )
    return value


def with_info(info: Any) -> Metadata:
    value = metadata()
    value.storage_data[MetadataIndex("m.w", size(0, 0))] = info  # type: ignore[index]
    return value


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (with_chunks(chunk(size(0, 0), size(8, 3))), "outside its tensor"),
        (with_chunks(chunk(size(5, 0), size(4, 3))), "outside its tensor"),
        (with_chunks(chunk((-1, 0), size(4, 3))), "dimensions"),
        (with_chunks(chunk(size(0), size(7))), "dimensions"),
        (with_chunks(chunk(size(0, 0), (7.0, 3))), "dimensions"),
        (with_chunks(chunk(size(0, 0), (True, 3))), "dimensions"),
        (with_chunks(chunk([0, 0], size(7, 3))), "dimensions"),
        (with_chunks(*[chunk(size(0, 0), size(4, 3))] * 2), "start at the same place"),
        (with_chunks(shape=[7, 3]), "no shape"),
        (with_chunks(shape=(7, -3)), "no shape"),
        (with_chunks(chunk(size(0, 0), size(7, 3)), dtype="float32"), "no dtype"),
        (with_info(_StorageInfo("../evil", 0, 1)), "outside the checkpoint directory"),
        (with_info(_StorageInfo("a/../../evil", 0, 1)), "outside the checkpoint directory"),
        (with_info(_StorageInfo("a\\..\\evil", 0, 1)), "outside the checkpoint directory"),
        (with_info(_StorageInfo("/etc/passwd", 0, 1)), "outside the checkpoint directory"),
        (with_info(_StorageInfo("C:/evil", 0, 1)), "outside the checkpoint directory"),
        (with_info(_StorageInfo("s3://bucket/evil", 0, 1)), "outside the checkpoint directory"),
        (with_info(_StorageInfo("a\0b", 0, 1)), "outside the checkpoint directory"),
        (with_info(_StorageInfo("", 0, 1)), "outside the checkpoint directory"),
        (with_info(_StorageInfo(b"x", 0, 1)), "outside the checkpoint directory"),  # type: ignore[arg-type]
        (with_info(_StorageInfo("x", -1, 1)), "impossible offset"),
        (with_info(_StorageInfo("x", 0, 1.5)), "impossible offset"),  # type: ignore[arg-type]
        (with_info("x"), "does not have the form"),
        (metadata(storage_data=None), "no table of stored items"),
        (metadata(state_dict_metadata=[]), "no table of entries"),
        (metadata(state_dict_metadata={"a": 3}), "neither a tensor nor a value"),
        (metadata(state_dict_metadata={3: BytesStorageMetadata()}), "neither a tensor nor a value"),
        (metadata(state_dict_metadata={"a": StorageMeta()}), "neither a tensor nor a value"),
        ({"state_dict": 1}, "not DCP metadata"),
        (StorageMeta(), "not DCP metadata"),
        (b"", "not a readable"),
        (b"no pickle", "not a readable"),
        (pickle.dumps(metadata(), protocol=4)[:-30], "not a readable"),
        (b"\x80\x04\x8c\x05helloQ.", "not a readable"),
    ],
)
def test_metadata_that_contradicts_itself_is_refused_saying_where(value: Any, words: str) -> None:
    assert words in str(refusal(value))


def test_all_entries_without_data_are_named() -> None:
    value = metadata()
    for index in (MetadataIndex("m.w", size(4, 0)), MetadataIndex("m.lr")):
        del value.storage_data[index]  # type: ignore[attr-defined]
    with pytest.raises(SourceIncompleteError) as error:
        parse(value)
    assert error.value.details == ("m.w at (4, 0)", "m.lr")


@pytest.mark.parametrize("paths", [{"m.w": "m"}, {"m.w": ()}, {"m.w": (1.5,)}, {1: ("m",)}, ["m"], {}])
def test_planner_data_of_another_planner_means_no_nesting(paths: Any) -> None:
    assert parse(metadata(planner_data=paths)).paths is None


class Calls:
    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = (function, arguments)

    def __reduce__(self) -> Any:
        return self.call


def test_nothing_runs_and_all_unknown_names_are_listed(tmp_path: Path) -> None:
    target = tmp_path / "ran"
    evil = [Calls(os.system, f"touch {target}"), Calls(eval, "1"), Calls(os.mkdir, str(target))]
    with pytest.raises(SourceUnsafeError) as error:
        parse(metadata(planner_data=evil))
    assert set(error.value.details) == {"posix.system", "builtins.eval", "posix.mkdir"}
    assert not target.exists()


def test_a_file_cannot_change_the_stub_classes_for_the_next() -> None:
    module = b"\x8c\x25torch.distributed.checkpoint.metadata"
    change = b"N}\x8c\x04kind\x8c\x04evils\x86b."  # BUILD with (None, {"kind": "evil"}) sets attributes
    assert "a class cannot have a state" in str(refusal(b"\x80\x04" + module + b"\x8c\x08Metadata\x93" + change))
    assert not hasattr(instance_class("torch.distributed.checkpoint.metadata", "Metadata"), "kind")
    assert parse(metadata()).tensors.keys() == {"m.w"}


def test_a_file_cannot_change_what_a_dtype_is() -> None:
    before = [getattr(DTYPES["float32"], name) for name in DTYPES["float32"].__slots__]
    state = b"](\x8c\x03badK\x09\x8c\x05floatNNNeb."  # BUILD with a list is what a frozen dataclass takes as state
    refusal(b"\x80\x04\x8c\x05torch\x8c\x07float32\x93" + state)
    assert [getattr(DTYPES["float32"], name) for name in DTYPES["float32"].__slots__] == before


def test_the_enum_members_of_early_python_3_11_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python 3.11.0 to 3.11.3 pickled enum members as getattr(class, name)."""
    named = lambda member, _protocol: (getattr, (type(member), member._name_))  # noqa: E731
    monkeypatch.setattr(_MEM_FORMAT_ENCODING, "__reduce_ex__", named)
    assert b"getattr" in pickle.dumps(metadata())
    assert parse(metadata()).tensors.keys() == {"m.w"}


def test_rank_local_descriptions_are_joined_and_contradictions_refused() -> None:
    def part(start: int, rows: int, shape: torch.Size, file: str) -> DcpMetadata:
        entry = TensorStorageMetadata(TensorProperties(torch.float32), shape, [chunk(size(start), size(rows))])
        stored = {
            MetadataIndex("w", size(start)): _StorageInfo(file, 0, 9),
            MetadataIndex("v"): _StorageInfo(file, 9, 9),
        }
        return parse(Metadata({"w": entry, "v": BytesStorageMetadata()}, {"w": ("w",), "v": ("v",)}, stored))

    first, second = part(0, 4, size(7), "__0_0.distcp"), part(4, 3, size(7), "__1_0.distcp")
    merged = merge_metadata([("a", first), ("b", second)])
    assert [(start, path) for start, _, path, *_ in rows(merged, "w")] == [
        ((0,), "__0_0.distcp"),
        ((4,), "__1_0.distcp"),
    ]
    assert merged.items["v"].relative_path == "__0_0.distcp" and merged.order == ["w", "v"]
    assert len(first.tensors["w"].chunks) == 1, "the parts were changed"
    with pytest.raises(SourceCorruptError, match="disagree"):
        merge_metadata([("a", first), ("b", part(4, 3, size(8), "x"))])
    second.unflattened = {"w": (7, 1)}
    assert merge_metadata([("a", first), ("b", second)]).unflattened == {"w": (7, 1)}
    first.unflattened = {"w": (1, 7)}
    with pytest.raises(SourceCorruptError, match="disagree"):
        merge_metadata([("a", first), ("b", second)])
