"""Real files to begin with: what PyTorch and this program wrote, the smallest of each kind."""

from __future__ import annotations

import collections
import io
import json
import pickle
import zipfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from tests.fuzz.layouts import SAVED, TINY, WRITTEN, files_of, inputs_of, pickle_in

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

_DOCUMENTS: tuple[object, ...] = (
    {"version": 1, "model_order": ["b", "a"], "model_values": {"v": 1}, "model_aliases": {"c": "a"}},
    {
        "version": 1,
        "extra": {"s": {"$tensor": "b"}},
        "raw": {"b": ["int32", [1]]},
        "model_metadata": {"": {"version": 1}},
    },
    {
        "version": 1,
        "optim": {
            "order": [["a", ["v"]]],
            "state_values": {"a": {"v": 2}},
            "param_groups": [{"lr": 0.5, "params": ["a"], "betas": {"$tuple": [0.5, 0.75]}}],
            "extra": {"k": None},
        },
    },
    {"version": 1, "sections": True},
)
_MANIFEST = {
    "version": "0.1.0",
    "flavor": "verl",
    "files": {"model.safetensors": {"nbytes": 9, "crc32": "00000000"}, "x.json": {"nbytes": 1, "crc32": "0000000a"}},
    "digests": {"model a": "00"},
}
_PAGES = (
    '<html><a href="../">up</a><a href="model.pt">m</a> <A class="x" HREF=\'/run/optim.pt\'>o</A></html>',
    '<a href="http://host/run/a%20b/"><a href=https://other/run/x><a href="?C=N"><a name="q"><a\thref="//h/x&amp;y#f">',
)
_NAMES = (
    "model_world_size_2_rank_0.pt\nmodel_world_size_2_rank_1.pt\noptim_world_size_2_rank_0.pt",
    "pytorch_model_fsdp_0/.metadata\npytorch_model_fsdp_0/__0_0.distcp\noptimizer_0/.metadata\nrandom_states_0.pkl",
    "model-00001-of-00002.safetensors\nmodel-00002-of-00002.safetensors\nmodel.safetensors.index.json",
    "shard-00001-model-00001-of-00001.safetensors\nshard-00002-model-00001-of-00001.safetensors",
    ".metadata\n__0_0.distcp\nmeta.pt",
    "__0.metadata\n__1.metadata\n__0_0.distcp",
    "global_step_2/actor/model_world_size_1_rank_0.pt\nglobal_step_2/data.pt",
    "checkpoint-1/model.safetensors\ncheckpoint-2/model.safetensors",
    "model_0.pt\nmodel_1.pt\noptim_0.pt\noptim_1.pt",
    "checkpoint_metadata.json\nmodel/model_w_pp-rank-0-of-1_tp-rank-0-of-2_exp-rank-0-of-1.safetensors\n"
    "optimizer/optimizer_pp-0-of-1_dp-0-of-1_tp-0-of-1_exp-0-of-1.pt",
    "policy/model_world_size_2_rank_0.pt\npolicy/optim_world_size_2_rank_0.pt\npolicy/huggingface/config.json\n"
    "trainer_state.pt\ndata.pt\npolicy/extra_state_world_size_2_rank_0.pt",
    "policy/weights/model/.metadata\npolicy/weights/model/__0_0.distcp\npolicy/optimizer/.metadata\n"
    "policy/optimizer/__0_0.distcp\ntrain_dataloader.pt\ntraining_info.json",
    "trainer/.metadata\ntrainer/__0_0.distcp\nrank_0.pt",
    "distributed_checkpoint/.metadata\ndistributed_checkpoint/__0_0.distcp\nconfig.json",
)


def seeds(target: str) -> list[bytes]:
    """What ``target`` begins with, smallest first."""
    made = {
        "pickle": _pickles,
        "plain-pickle": _plain_pickles,
        "dcp-metadata": lambda: iter([*_golden(".metadata"), *tiny("megatron/.metadata")]),
        "zip": lambda: _archives(small=True),
        "torch": lambda: _archives(small=False),
        "dcp-item": _items,
        "safetensors-header": _safetensors,
        "safetensors": _safetensors,
        "safetensors-index": _indexes,
        "units": lambda: iter([json.dumps(_UNITS).encode()]),
        "safetensors-document": lambda: _texts(*_DOCUMENTS),
        "sharding-info": lambda: _texts({"a": {"saved_offsets": [2, 0]}, "b": {"saved_offsets": [0]}}),
        "manifest": lambda: _texts(_MANIFEST, {**_MANIFEST, "units": _UNITS, "key_type": "id", "undetermined": ["a"]}),
        "journal": _journals,
        "index-page": lambda: iter([page.encode() for page in _PAGES]),
        "file-names": lambda: iter([name.encode() for name in _NAMES]),
        "torch-checkpoint": lambda: iter(tiny("pickle")),
        "rank-files": lambda: iter(tiny("pickle")),
        "dcp-checkpoint": lambda: iter([*tiny("directory/.metadata"), *tiny("dcp-metadata")]),
        "values-json": lambda: (json.dumps(value).encode() for value in (_VALUES, _VALUES_2, _VALUES_3)),
        "written-checkpoint": partial(inputs_of, *WRITTEN),
        **{f"{kind}-checkpoint": partial(inputs_of, kind) for kind in SAVED},
        "torch_checkpointing-checkpoint": _torch_checkpointing,
    }[target]()
    return sorted({*tiny(target), *(data for data in made if len(data) <= _MOST)}, key=lambda data: (len(data), data))


def tiny(target: str) -> list[bytes]:
    """The files for ``target`` that ``tests.fuzz.tiny`` has made."""
    with zipfile.ZipFile(TINY) as archive:
        return [archive.read(name) for name in archive.namelist() if name == target or name.startswith(f"{target}/")]


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
        yield pickle_in(path.read_bytes())


def _plain_pickles() -> Iterator[bytes]:
    value = {"a": [1, 2.5, None, True, "x", b"y", (1, (2, 3))], 3: collections.OrderedDict(k={1, 2}), "c": 1 - 2j}
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        yield pickle.dumps(value, protocol)


def _torch_checkpointing() -> Iterator[bytes]:
    """With the metadata of its first version, too."""
    yield from inputs_of("torch_checkpointing")
    (first,) = tiny("torch-checkpointing-checkpoint/1.0")
    yield bytes([0, sorted(files_of("torch_checkpointing")).index("metadata.pkl")]) + first


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
    yield json.dumps({"weight_map": {"a": "model.safetensors", "b": "model.safetensors"}}).encode()
    yield json.dumps({"weight_map": {"a": "../x", "b": "/etc/passwd"}}).encode()


def _texts(*documents: object) -> Iterator[bytes]:
    yield from (json.dumps(document).encode() for document in documents)


def _journals() -> Iterator[bytes]:
    first = {"format": 2, "version": "1", "plan": "ab", "options": {"to": "full"}}
    source = {"path": "a.pt", "nbytes": 9, "mtime_ns": 5, "inode": 3, "tag": ""}
    windows = {"windows": [[0, 0, 8, 77], [0, 4, 9, 78]], "parts": [[0, 1, 2, 3, 4]], "received": [[0, 0, 8]]}
    yield b"\n".join(_texts({**first, "sources": [[source]]}, windows, windows))
