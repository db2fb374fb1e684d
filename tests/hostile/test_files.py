"""Directories, links, pipes and numbers made to lead a reader astray: exit code 3 at once, whatever lies behind."""

from __future__ import annotations

import json
import os
import pickle
import struct
import zipfile
from pathlib import Path
from typing import Any

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

from fsdpckpt import api
from fsdpckpt.cli.errors import as_fsdpckpt_error
from fsdpckpt.errors import FsdpckptError, SourceError

pytestmark = pytest.mark.timeout(60)


def refusal(path: Path) -> FsdpckptError:
    with pytest.raises((SourceError, OSError)) as error:
        api.inspect(str(path)).to_json(ranks=True)
    ours = as_fsdpckpt_error(error.value)
    assert ours.exit_code == 3
    return ours


def dcp(
    directory: Path, *, file: Any = "__0_0.distcp", offset: Any = 0, length: Any = 100, shape: Any = (3,), **more: Any
) -> Path:
    """A DCP directory of one tensor whose only chunk is said to lie there."""
    entry = TensorStorageMetadata(
        TensorProperties(torch.float32),
        torch.Size(shape),
        more.get("chunks", [ChunkStorageMetadata(torch.Size([0] * len(shape)), torch.Size(shape))]),
    )
    start = torch.Size([0] * len(shape))
    metadata = Metadata(
        {more.get("key", "w"): entry},
        more.get("planner"),
        {MetadataIndex(more.get("key", "w"), start): _StorageInfo(file, offset, length)},
    )
    directory.mkdir()
    (directory / ".metadata").write_bytes(pickle.dumps(metadata))
    (directory / "__0_0.distcp").write_bytes(os.urandom(200))
    return directory


@pytest.mark.parametrize(
    "path", ["../secret", "/etc/passwd", "a/../../secret", "..", "", "\\\\host\\x", "file://x", "a\0b"]
)
def test_a_dcp_path_that_leaves_the_directory_is_refused(tmp_path: Path, path: str) -> None:
    (tmp_path / "secret").write_bytes(b"secret" * 100)
    assert "outside the checkpoint directory" in refusal(dcp(tmp_path / "d", file=path)).what


@pytest.mark.parametrize(
    "changes",
    [
        *({key: value} for key in ("offset", "length") for value in (-1, 1 << 63)),
        *({"shape": shape} for shape in ((1 << 40, 1 << 40), (1 << 62, 4), (1,) * 500)),
        *({"file": file} for file in ("missing.distcp", "x" * 5000)),
        *({"offset": 1 << 80}, {"offset": 150}, {"planner": {"w": (1 << 60,)}}),
    ],
    ids=lambda changes: str(changes)[:40],
)
def test_dcp_metadata_with_impossible_numbers_is_refused(tmp_path: Path, changes: dict[str, Any]) -> None:
    refusal(dcp(tmp_path / "d", **changes))


@pytest.mark.parametrize("path", [("a",) * 3000, (-1,)], ids=["3000 deep", "negative"])
def test_planner_data_that_no_planner_writes_is_no_nesting(tmp_path: Path, path: Any) -> None:
    data = Path(tmp_path / "w.pt")
    torch.save(torch.randn(3), data)
    directory = dcp(tmp_path / "d", planner={"w": path}, length=data.stat().st_size)
    (directory / "__0_0.distcp").write_bytes(data.read_bytes())
    assert [named.key for named in api.inspect(str(directory)).tensors] == ["w"]


def test_a_list_position_beyond_memory_is_refused(tmp_path: Path) -> None:
    value = tmp_path / "value.pt"
    torch.save(3, value)
    data = value.read_bytes()
    directory = tmp_path / "d"
    directory.mkdir()
    metadata = Metadata(
        {"a": BytesStorageMetadata()},
        {"a": ("a", 1 << 40)},
        {MetadataIndex("a"): _StorageInfo("__0_0.distcp", 0, len(data))},
    )
    (directory / ".metadata").write_bytes(pickle.dumps(metadata))
    (directory / "__0_0.distcp").write_bytes(data)
    refusal(directory)


@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata"])
@pytest.mark.parametrize("kind", ["pipe", "directory", "device", "dangling link", "link to itself", "empty"])
def test_what_is_no_file_is_refused_and_never_waited_for(tmp_path: Path, name: str, kind: str) -> None:
    path = dcp(tmp_path / "d") / name
    path.unlink()
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "directory":
        path.mkdir()
    elif kind == "empty":
        path.write_bytes(b"")
    else:
        path.symlink_to({"device": "/dev/zero", "dangling link": "nowhere", "link to itself": name}[kind])
    refusal(path.parent)


@pytest.mark.parametrize("name", ["model.pt", "model.safetensors", "model.safetensors.index.json", "units.json"])
@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_a_pipe_among_the_files_is_never_waited_for(tmp_path: Path, name: str, kind: str) -> None:
    path = tmp_path / name
    if kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to("/dev/zero")
    refusal(tmp_path)


def test_links_to_data_elsewhere_are_followed_as_in_the_hub_cache(tmp_path: Path) -> None:
    """``snapshots/<revision>/model.safetensors`` links to ``blobs/<digest>``; the user named it, and may read it."""
    from safetensors.torch import save_file

    (tmp_path / "blobs").mkdir()
    (tmp_path / "snapshot").mkdir()
    save_file({"w": torch.randn(3, 5)}, tmp_path / "blobs" / "abc")
    (tmp_path / "snapshot" / "model.safetensors").symlink_to("../blobs/abc")
    assert [named.key for named in api.inspect(str(tmp_path / "snapshot")).tensors] == ["w"]


@pytest.mark.parametrize(
    "shard", ["../x.safetensors", "/etc/passwd", "..", ".", "", "a/b.safetensors", "a\\b", "x\0y", 5, None]
)
def test_an_index_that_leaves_its_directory_is_refused(tmp_path: Path, shard: Any) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"w": shard}}))
    refusal(tmp_path)


def sparse(path: Path, head: bytes, nbytes: int, tail: bytes = b"") -> Path:
    with open(path, "wb") as file:
        file.write(head)
        file.seek(nbytes - len(tail))
        file.write(tail)
        file.truncate(nbytes)
    return path


TERABYTE = 1 << 40


@pytest.mark.parametrize("name", ["model.safetensors.index.json", "fsdpckpt.json"])
def test_a_document_of_a_terabyte_of_nothing_is_refused_unread(tmp_path: Path, name: str) -> None:
    sparse(tmp_path / name, b"{", TERABYTE)
    refusal(tmp_path)


def test_metadata_of_a_terabyte_is_refused_unread(tmp_path: Path) -> None:
    directory = dcp(tmp_path / "d")
    sparse(directory / ".metadata", b"\x80\x02", TERABYTE)
    assert "impossibly large" in refusal(directory).what


def test_a_pickle_of_a_terabyte_is_refused_unread(tmp_path: Path) -> None:
    name, size = b"a/data.pkl", TERABYTE - 4096
    extra = struct.pack("<HHQQ", 1, 16, size, size)
    local = struct.pack("<4sHHHHHIIIHH", b"PK\3\4", 45, 0, 0, 0, 0, 0, 0xFFFFFFFF, 0xFFFFFFFF, len(name), len(extra))
    sizes = (0xFFFFFFFF, 0xFFFFFFFF, len(name), len(extra))
    central = struct.pack("<4sHHHHHHIIIHHHHHII", b"PK\1\2", 45, 45, 0, 0, 0, 0, 0, *sizes, 0, 0, 0, 0, 0)
    head = local + name + extra + b"\x80\x02"
    directory = central + name + extra
    at = TERABYTE - len(directory) - 98
    end64 = struct.pack("<4sQHHIIQQQQ", b"PK\6\6", 44, 45, 45, 0, 0, 1, 1, len(directory), at)
    locator = struct.pack("<4sIQI", b"PK\6\7", 0, at + len(directory), 1)
    end = struct.pack("<4sHHHHIIH", b"PK\5\6", 0, 0, 1, 1, 0xFFFFFFFF, 0xFFFFFFFF, 0)
    path = sparse(tmp_path / "m.pt", head, TERABYTE, directory + end64 + locator + end)
    assert "impossibly large" in refusal(path).what


def test_a_zip_directory_of_a_terabyte_is_refused_unread(tmp_path: Path) -> None:
    size = TERABYTE - 4096
    end64 = struct.pack("<4sQHHIIQQQQ", b"PK\6\6", 44, 45, 45, 0, 0, 1 << 60, 1 << 60, size, 0)
    locator = struct.pack("<4sIQI", b"PK\6\7", 0, TERABYTE - 98, 1)
    end = struct.pack("<4sHHHHIIH", b"PK\5\6", 0, 0, 1, 1, 0xFFFFFFFF, 0xFFFFFFFF, 0)
    refusal(sparse(tmp_path / "m.pt", b"PK\3\4" + bytes(100), TERABYTE, end64 + locator + end))


def test_a_deflated_gigabyte_is_refused_before_it_is_inflated(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "m.pt", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a/data.pkl", b"\x80\x02}.")
        with archive.open("a/data/0", "w") as record:
            for _ in range(64):
                record.write(bytes(1 << 20))
    assert "compressed" in refusal(tmp_path / "m.pt").what


@pytest.mark.parametrize("name", ["../data.pkl", "/data.pkl", "a/../data.pkl", "a/data/../../x"])
def test_names_of_records_are_names_and_no_paths(tmp_path: Path, name: str) -> None:
    before = sorted(tmp_path.parent.iterdir())
    with zipfile.ZipFile(tmp_path / "m.pt", "w") as archive:
        archive.writestr(name, b"\x80\x02]K\x01a.")
    refusal(tmp_path / "m.pt")
    assert sorted(tmp_path.parent.iterdir()) == before


def header(text: bytes | dict[str, Any], data: bytes = bytes(8)) -> bytes:
    encoded = text if isinstance(text, bytes) else json.dumps(text).encode()
    return len(encoded).to_bytes(8, "little") + encoded + data


def tensor(shape: Any, offsets: Any, dtype: Any = "F32") -> dict[str, Any]:
    return {"w": {"dtype": dtype, "shape": shape, "data_offsets": offsets}}


@pytest.mark.parametrize(
    "data",
    [
        header(tensor([2], [0, 1 << 64])),
        header(tensor([1 << 62, 1 << 62], [0, 8])),
        header(tensor([2], [-8, 0])),
        header(tensor([-2], [0, 8])),
        header(tensor([2], [8, 0])),
        header(tensor([2.0], [0, 8])),
        header(tensor([True, 2], [0, 8])),
        header(tensor(2, [0, 8])),
        header(tensor([2], [0, 8], dtype=["F32"])),
        header(tensor([2], [0, 8], dtype="\x1b[2J")),
        header(tensor([0] * 100_000, [0, 8])),
        header({"w": None}),
        header({"__metadata__": {"a": 1}}),
        header({"__metadata__": []}),
        header({**tensor([2], [0, 8]), "v": tensor([2], [4, 8])["w"]}),
        header({**tensor([1], [4, 8])}),
        header({**tensor([1], [0, 4])}),
        header(b'{"w":' * 100_000 + b"1" + b"}" * 100_000),
        header(b'{"w":' + b"[" * 1_000_000),
        header(b"{%s,%s}" % (2 * (b'"w":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}',))),
        header(b'{"w":NaN}'),
        header(b'{"w":' + b"9" * 100_000 + b"}"),
        header(b"\xef\xbb\xbf{}"),
        header(b'{"\xff":1}'),
        header(b"[]"),
        header(b""),
        (1 << 63).to_bytes(8, "little") + b"{}",
        ((1 << 64) - 1).to_bytes(8, "little") + b"{}",
        b"\x02\0\0\0\0\0\0\0{",
        b"\x02",
        b"",
    ],
    ids=lambda data: data[8:60].decode("ascii", "replace") + f"... {len(data)}",
)
def test_a_safetensors_header_that_lies_is_refused(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "m.safetensors").write_bytes(data)
    refusal(tmp_path)


def test_a_hundred_megabytes_of_nested_brackets_are_refused_in_seconds(tmp_path: Path) -> None:
    text = b'{"w":[' + b"[]," * 33_000_000 + b"[]]}"
    (tmp_path / "m.safetensors").write_bytes(header(text))
    assert "JSON" in str(refusal(tmp_path))
