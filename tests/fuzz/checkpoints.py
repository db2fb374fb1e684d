"""Readers as functions of bytes: checkpoints of one to a few files, one of them the input, opened in memory."""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Callable, Mapping
from dataclasses import replace

from fsdpckpt.errors import SourceMissingError
from fsdpckpt.execute.journal import Record, joined, run_of
from fsdpckpt.ir.checkpoint import Checkpoint
from fsdpckpt.ir.optimizer import Optimizer
from fsdpckpt.readers.detect import open_checkpoint
from fsdpckpt.readers.manifest import read_manifest, with_manifest
from fsdpckpt.readers.protocol import FileTable
from fsdpckpt.readers.safetensors import read_safetensors, read_safetensors_index
from fsdpckpt.storage import Entry
from fsdpckpt.storage.local import MemoryFile
from fsdpckpt.storage.remote_store import links_of
from fsdpckpt.storage.sources import Sources
from tests.fuzz.layouts import files_of, is_torch
from tests.readers.alike import Refusal, same_end

__all__ = [
    "checkpoint_with", "dcp_checkpoint", "file_names", "index_page", "journal", "manifest", "opened", "rank_files",
    "safetensors_document", "safetensors_index", "sharding_info", "torch_checkpoint",
]  # fmt: skip


class _Files(Sources):
    """``files``, path to content, and the directories above them."""

    def __init__(self, files: Mapping[str, bytes]) -> None:
        super().__init__()
        self._contents = files

    def open_new(self, path: str) -> MemoryFile:
        if path not in self._contents:
            raise SourceMissingError(f"{path} is no file", file=path)
        return MemoryFile(self._contents[path], path)

    def stat(self, path: str) -> Entry | None:
        name = path.rpartition("/")[2]
        if path in self._contents:
            return Entry(name, path, len(self._contents[path]), directory=False)
        below = any(known.startswith(f"{path}/") for known in self._contents)
        return Entry(name, path, 0, directory=True) if below else None

    def list_directory(self, path: str) -> list[Entry]:
        found: dict[str, Entry] = {}
        for known, data in self._contents.items():
            if known.startswith(f"{path}/"):
                name, deeper, _ = known[len(path) + 1 :].partition("/")
                found[name] = Entry(name, f"{path}/{name}", 0 if deeper else len(data), directory=bool(deeper))
        return [found[name] for name in sorted(found)]


def _opened(path: str, files: Mapping[str, bytes]) -> Checkpoint:
    with _Files(files) as sources:
        return open_checkpoint(path, sources=sources)


def _safetensors(metadata: Mapping[str, str]) -> bytes:
    header = {
        "a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
        "b": {"dtype": "U8", "shape": [4], "data_offsets": [24, 28]},
        "__metadata__": metadata,
    }
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + bytes(range(28))


_MODEL = _safetensors({"format": "pt"})


def _archive(records: Mapping[str, bytes]) -> bytes:
    """A zip of stored records without checksums."""
    body, directory = b"", b""
    for name, data in records.items():
        raw, n = name.encode(), len(data)
        directory += struct.pack("<4s12xIIIH12xI", b"PK\1\2", 0, n, n, len(raw), len(body)) + raw
        body += struct.pack("<4s14xIIHH", b"PK\3\4", n, n, len(raw), 0) + raw + data
    end = struct.pack("<4s4xHHIIH", b"PK\5\6", len(records), len(records), len(directory), len(body), 0)
    return body + directory + end


_CHECKPOINT = _opened("d/model.safetensors", {"d/model.safetensors": _MODEL})
_DATA = {f"it/data/{number}": bytes(range(64)) for number in range(6)}
_RANK_DATA = {f"m/data/{number}": bytes(range(64)) for number in range(6)}
_TINY_DCP = files_of("directory")
_TENSOR = (  # of two floats
    b"ctorch._utils\n_rebuild_tensor_v2\n((X\7\0\0\0storagectorch\nFloatStorage\nX\1\0\0\0000X\3\0\0\0cpuK\2tQK\0K\2\x85K\1\x85"
    b"\x89ccollections\nOrderedDict\n)RtR"
)
_TORCH = _archive({"it/data.pkl": b"\x80\x02}X\1\0\0\0a" + _TENSOR + b"s.", "it/data/0": b"12345678"})


def torch_checkpoint(data: bytes) -> object:
    """``data``: the pickle of a torch file."""
    return _opened("it.pt", {"it.pt": _archive({"it/data.pkl": data, **_DATA})})


def rank_files(data: bytes) -> object:
    """``data``: the pickle of rank 0 of two; that of rank 1 is the same but for its place in the mesh.

    Raises AssertionError when parsing both files, and parsing only what differs, do not come to the same end.
    """
    place = re.compile(rb"((?:_coordinate_on_dim|_rank)(?:q.|r....)[\](}lq-z\x94]*?(?:q.)?K)\0", re.DOTALL)
    pickles = {"d/model_0.pt": data, "d/model_1.pt": place.sub(b"\\1\1", data)}
    files = _Files({path: _archive({"m/data.pkl": each, **_RANK_DATA}) for path, each in pickles.items()})
    once = same_end({0: "d/model_0.pt", 1: "d/model_1.pt"}, files)
    if isinstance(once, Refusal):
        raise once.error
    return once


def dcp_checkpoint(data: bytes) -> object:
    """``data``: the metadata of a DCP directory."""
    return _opened("d", {**{f"d/{name}": content for name, content in _TINY_DCP.items()}, "d/.metadata": data})


def opened(kind: str) -> Checkpoint:
    """The checkpoint ``kind`` as it is."""
    return _opened("d", {f"d/{name}": content for name, content in files_of(kind).items()})


def checkpoint_with(*kinds: str) -> Callable[[bytes], object]:
    """The checkpoints ``kinds`` as a function of what is in one of their files, which is as ``inputs_of`` says."""

    def changed(data: bytes) -> object:
        kind = files_of(kinds[data[0] % len(kinds)]) if data else {}
        if len(data) < 2 or not kind:
            return None
        path = sorted(kind)[data[1] % len(kind)]
        content = _archive({"it/data.pkl": data[2:], **_DATA}) if is_torch(path, kind[path]) else data[2:]
        return _opened("d", {**{f"d/{name}": each for name, each in kind.items()}, f"d/{path}": content})

    return changed


def safetensors_index(data: bytes) -> object:
    path = "d/model.safetensors.index.json"
    return read_safetensors_index(path, FileTable(), _Files({path: data, "d/model.safetensors": _MODEL}))


def sharding_info(data: bytes) -> object:
    """``data``: what DCP's own writer says in the header."""
    content = _safetensors({"DCP_SHARDING_INFO": data.decode(errors="replace")})
    return read_safetensors(["d/it.safetensors"], FileTable(), _Files({"d/it.safetensors": content}))


def safetensors_document(data: bytes) -> object:
    """``data``: what this program says in the header."""
    text = data.decode(errors="replace")
    return _opened("d/it.safetensors", {"d/it.safetensors": _safetensors({"fsdpckpt": text})})


def manifest(data: bytes) -> object:
    """``data``: ``fsdpckpt.json`` beside a model and an optimizer whose keys may be ids."""
    optim = Optimizer.of({"0": {}, "11": {}}, [], {})
    with _Files({"d/fsdpckpt.json": data, "d/model.safetensors": _MODEL, "d/x.json": b"{}"}) as sources:
        names = ("fsdpckpt.json", "model.safetensors", "x.json")
        return with_manifest(replace(_CHECKPOINT, optim=optim), read_manifest("d", names, sources), sources)


def file_names(data: bytes) -> object:
    """``data``: names, a line each; the files are small and of the kind that their names say."""
    files: dict[str, bytes] = {}
    for line in data.decode(errors="replace").split("\n")[:12]:
        name = "/".join(part for part in line.split("/") if part not in ("", ".", ".."))
        if name and not any(f"d/{name}/".startswith(f"{known}/") or known.startswith(f"d/{name}/") for known in files):
            files[f"d/{name}"] = _content(name)
    return _opened("d", files) if files else None


def _content(name: str) -> bytes:
    if name.endswith(".safetensors"):
        return _MODEL
    if name.endswith("metadata"):
        return _TINY_DCP[".metadata"]
    if name.endswith(".distcp"):
        return _TINY_DCP["__0_0.distcp"]
    return b'{"weight_map": {"a": "model.safetensors"}}' if name.endswith(".json") else _TORCH


def index_page(data: bytes) -> object:
    """``data``: the page of a directory."""
    url = "http://host/run/"
    links = links_of(url, data.decode(errors="ignore"))
    if not all(f"{link}/".startswith(("http://host/", "https://host/")) for link in links):
        raise AssertionError(f"a link leads to another server: {links}")
    return links or None


def journal(data: bytes) -> object:
    """``data``: the records, a line each, of which the checksums are right."""
    records: list[Record] = []
    for line in data.split(b"\n"):
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            return None
        if not isinstance(record, dict):
            return None
        records.append(record)
    run = run_of(records)
    if run is None:
        return None
    journaled = joined([run[1], run[1]])
    return run[0].source_changes(run[0]), journaled.nbytes, journaled.longest, journaled.written().tolist()
