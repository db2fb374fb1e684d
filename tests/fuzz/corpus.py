"""Real files to begin with: what PyTorch and this program wrote, the smallest of each kind."""

from __future__ import annotations

import collections
import io
import json
import pickle
import zipfile
from collections.abc import Iterator
from pathlib import Path

GOLDEN = Path(__file__).parent.parent / "golden"
_MOST = 60_000  # bytes of a file worth mutating

__all__ = ["seeds"]

_HEADER = {
    "a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
    "b": {"dtype": "BF16", "shape": [], "data_offsets": [24, 26]},
    "__metadata__": {"format": "pt", "DCP_SHARDING_INFO": '{"a":{"saved_offsets":[0,0]},"b":{"saved_offsets":[]}}'},
}
_UNITS = {
    "format": "fsdpckpt-units",
    "version": 1,
    "use_orig_params": True,
    "units": [
        {
            "prefix": "",
            "strategy": "full-shard",
            "param_dtype": None,
            "params": [{"name": "w", "shape": [3, 5], "dtype": "float32", "stride": [1, 3]}],
        }
    ],
    "parameters": ["w"],
    "unmanaged": [],
    "shared": [["v", "w"]],
    "groups": [["w"]],
    "world_size": 4,
    "shard_size": None,
}
_VALUES = {
    "$dict": [[1, {"$tuple": [{"$float": "7ff0000000000000"}, None]}], ["k", {"$bytes": "AAEC"}]],
    "attributes": {},
}
_VALUES_2 = {"a": [{"$ordered": [["x", {"$set": [1, 2]}]], "attributes": {"m": 1}}, {"$complex": [1.0, 2.0]}]}
_VALUES_3 = {"$object": {"function": ["torch", "device"], "args": ["cpu"], "state": {"$global": ["torch", "float32"]}}}


def seeds(target: str) -> list[bytes]:
    """What ``target`` begins with, smallest first."""
    made = {
        "pickle": _pickles,
        "plain-pickle": _plain_pickles,
        "dcp-metadata": lambda: _golden(".metadata"),
        "zip": lambda: _archives(small=True),
        "torch": lambda: _archives(small=False),
        "dcp-item": _items,
        "safetensors-header": _safetensors,
        "safetensors": _safetensors,
        "safetensors-index": _indexes,
        "units": lambda: iter([json.dumps(_UNITS).encode()]),
        "values-json": lambda: (json.dumps(value).encode() for value in (_VALUES, _VALUES_2, _VALUES_3)),
    }[target]()
    return sorted({data for data in made if len(data) <= _MOST}, key=len)


def _golden(pattern: str) -> Iterator[bytes]:
    yield from (path.read_bytes() for path in sorted(GOLDEN.rglob(pattern)))


def _archives(*, small: bool) -> Iterator[bytes]:
    yield from (path.read_bytes() for path in sorted(GOLDEN.rglob("*.pt")) if path.stat().st_size < _MOST)
    for path in sorted(GOLDEN.rglob("*.pt")):
        yield _without_data(path, keep=not small)


def _without_data(path: Path, *, keep: bool) -> bytes:
    """The archive at ``path`` packed again by Python: smaller, since it is not aligned."""
    stream = io.BytesIO()
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(stream, "w") as new:
        for name in old.namelist():
            if keep or not name.partition("/")[2].startswith("data/"):
                new.writestr(name, old.read(name))
    return stream.getvalue()


def _pickles() -> Iterator[bytes]:
    for path in sorted(GOLDEN.rglob("*.pt")):
        with zipfile.ZipFile(path) as archive:
            yield next(archive.read(name) for name in archive.namelist() if name.endswith("data.pkl"))


def _plain_pickles() -> Iterator[bytes]:
    value = {"a": [1, 2.5, None, True, "x", b"y", (1, (2, 3))], 3: collections.OrderedDict(k={1, 2}), "c": 1 - 2j}
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        yield pickle.dumps(value, protocol)


def _items() -> Iterator[bytes]:
    for path in sorted(GOLDEN.rglob("*.distcp")):
        data = path.read_bytes()
        begin = 0
        while (end := data.find(b"PK\5\6", begin)) >= 0 and begin < _MOST * 4:
            yield data[begin : end + 22]
            begin = end + 22


def _safetensors() -> Iterator[bytes]:
    for text in (json.dumps(_HEADER), json.dumps(_HEADER["__metadata__"] and {"a": _HEADER["a"]})):
        yield len(text).to_bytes(8, "little") + text.encode() + bytes(range(26))
        yield len(text).to_bytes(8, "little") + text.encode() + bytes(range(24))


def _indexes() -> Iterator[bytes]:
    yield json.dumps({"metadata": {"total_size": 9}, "weight_map": {"a": "model.safetensors"}}).encode()
    yield json.dumps({"weight_map": {"a": "../x", "b": "/etc/passwd"}}).encode()
