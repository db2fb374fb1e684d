"""Words that a parser looks for, for ``-dict`` of libFuzzer: by chance it would find few of them."""

from __future__ import annotations

from tests.fuzz.layouts import CHANGED

__all__ = ["MOST_BYTES", "dictionary"]

_MEGATRON = ("mcore_data", "nd_reformulated_orig_global_shape", "all_local_plans", "common_step", "chained_0.")
_AUTOTP = (
    "universal_checkpoint_info",
    "affine_map",
    "logical_shape",
    "shard_shape",
    "pieces",
    "source",
    "dest",
    "scale",
)
_MEGATRON_RANKS = ("args", "tensor_model_parallel_size", "swiglu", "ffn_hidden_size", "fp32_from_fp16_params")
_NANOTRON = (
    "local_global_slices_pairs",
    "unsharded_shape",
    "data",
    "names",
    "gradient_accumulator",
    "None",
    "#",
    "|",
    ";",
)
_CHECKPOINTING = (
    "world_size",
    "metadata",
    "version",
    "rank_to_layout_info",
    "nested_path_to_metadata",
    "sharding_metadata",
    "DTensorShardingMetadata",
    "default_tensor_v1",
    "global_shape",
    "mesh_spec",
    "mesh_shape",
    "mesh_data",
    "placements",
    "Shard",
    "StridedShard",
    "split_factor",
    "file_path",
    "serialization_format",
    "RawSerialization",
    "global_offsets",
)
_ZERO = (
    "param_shapes",
    "group_paddings",
    "zero_stage",
    "base_optimizer_state",
    "single_partition_of_fp32_groups",
    "optimizer_state_dict",
    "frozen_param_shapes",
    "frozen_param_fragments",
    "shared_params",
    "fp32_flat_groups",
    "vocab_tensor",
    "cat_dim",
)

_AUTOEP = ("ds_autoep_layers", "expert_placement", "affine_maps", "expert_key_prefix", "num_local_experts", "ep_rank")
_BUFFERS = ("buckets_coalesced", "param", "numel_unpadded", "iteration", "num_layers", "num_experts", "world_size")
_OF_RANKS = (*_ZERO, *_AUTOEP, *_BUFFERS, "param_slice_mappings", "num_experts", "moe", "pieces", "source", "params")

MOST_BYTES = {
    "pickle": 1536,
    "plain-pickle": 512,
    "dcp-metadata": 2048,
    "megatron-checkpoint": 2048,
    "written-checkpoint": 3072,
    **dict.fromkeys(("autoep-checkpoint", "autoep-zero3-checkpoint", "autoep-universal-checkpoint"), 1536),
    "torch-checkpointing-checkpoint": 2048,
    "zip": 2048,
    "torch": 2048,
    "dcp-item": 1600,
    "torch-checkpoint": 1536,
    "dcp-checkpoint": 1536,
    "file-names": 256,
}
"""Bytes of an input, 1024 where nothing else is said: real ones of the kind fit, and most of the damage counts."""

_JSON = [
    b"null",
    b"true",
    b"[]",
    b"{}",
    b'""',
    b"-1",
    b"1e999",
    b"NaN",
    b"9223372036854775808",
    b'"\\ud800"',
    b'":',
    b"[[",
]
_OPCODES = [
    b"\x80\x02",
    b"\x80\x04",
    b"}(",
    b"](",
    b"(t",
    b")R",
    b"\x86R",
    b"\x87R",
    b"u.",
    b"sb.",
    b"\x8c\x01a",
    b"X\1\0\0\0a",
]
_OPCODES += [
    b"q\0",
    b"h\0",
    b"\x94",
    b"\x93",
    b"Q",
    b"\x81",
    b"\x82\1",
    b"K\1",
    b"\x8a\x08",
    b"\x8f",
    b"\x90",
    b"\x91",
    b"N.",
]
_ZIP = [
    b"PK\1\2",
    b"PK\3\4",
    b"PK\5\6",
    b"PK\6\6",
    b"PK\6\7",
    b"\1\0\x10\0",
    b"\xff\xff\xff\xff",
    b"a/data.pkl",
    b"a/byteorder",
]
_TORCH = ["_rebuild_tensor_v2", "_rebuild_tensor_v3", "_rebuild_parameter", "_rebuild_from_type_v2", "_rebuild_tensor"]
_GLOBALS = [b"ctorch._utils\n%s\n" % name.encode() for name in _TORCH]
_GLOBALS += [
    b"ccollections\nOrderedDict\n",
    b"c__builtin__\nset\n",
    b"ctorch\nSize\n",
    b"ctorch\nfloat16\n",
    b"storage",
]
_GLOBALS += [b"ctorch\nFloatStorage\n", b"c_codecs\nencode\n", b"cbuiltins\ngetattr\n", b"c__builtin__\nbytearray\n"]
_KEYS = [
    "state",
    "param_groups",
    "params",
    "model",
    "optimizer",
    "step",
    "exp_avg",
    "_flat_param",
    "_metadata",
    "names",
]
_DCP = [
    "state_dict_metadata",
    "storage_data",
    "planner_data",
    "offsets",
    "sizes",
    "chunks",
    "fqn",
    "relative_path",
    "../x",
]
_NAMES = [
    "model",
    "optim",
    "_world_size_",
    "_rank_",
    "rank",
    "-of-",
    "shard-",
    ".safetensors",
    ".pt",
    ".bin",
    ".distcp",
]
_NAMES += [
    "__0_0",
    ".metadata",
    "__1.metadata",
    "fsdpckpt.json",
    "units.json",
    ".safetensors.index.json",
    "99999999999",
]
_NAMES += [
    "checkpoint-1/",
    "pytorch_model_fsdp_0/",
    "optimizer_0/",
    "global_step1/",
    "actor/",
    "random_states_0.pkl",
    "\n",
]
_HEADER = [
    "dtype",
    "shape",
    "data_offsets",
    "__metadata__",
    "DCP_SHARDING_INFO",
    "saved_offsets",
    "F32",
    "BF16",
    "fsdpckpt",
]
_DOCUMENT = [
    "version",
    "sections",
    "optim",
    "order",
    "state_values",
    "param_groups",
    "extra",
    "model_values",
    "raw",
    "$tensor",
]
_DOCUMENT += [
    "model_order",
    "model_aliases",
    "model_metadata",
    "$tuple",
    "$float",
    "$dict",
    "$ordered",
    "attributes",
    "$set",
]
_MANIFEST = ["files", "nbytes", "crc32", "digests", "key_type", "undetermined", "flavor", "units", "version", "id"]
_JOURNAL = [
    "format",
    "sources",
    "options",
    "plan",
    "windows",
    "parts",
    "received",
    "path",
    "nbytes",
    "mtime_ns",
    "inode",
    "tag",
]
_PAGE = ['<a href="', '">', "http://", "https://host/run/", "../", "?C=N", "%2F", "%00", "//", "[", "]", "\u212a", "#"]


def _quoted(*words: str) -> list[bytes]:
    return [f'"{word}"'.encode() for word in words]


_WORDS = {
    "pickle": [*_OPCODES, *_GLOBALS],
    "plain-pickle": [*_OPCODES, *_GLOBALS],
    "dcp-metadata": [*_OPCODES, *map(str.encode, _DCP)],
    "zip": _ZIP,
    "torch": [*_ZIP, *_OPCODES, *_GLOBALS],
    "dcp-item": [*_ZIP, *_OPCODES, *_GLOBALS],
    "torch-checkpoint": [*_OPCODES, *_GLOBALS, *map(str.encode, _KEYS)],
    "dcp-checkpoint": [*_OPCODES, *map(str.encode, [*_DCP, *_KEYS])],
    "megatron-checkpoint": [*_OPCODES, *map(str.encode, [*_DCP, *_MEGATRON, *_KEYS])],
    "rank-files": [*_OPCODES, *_GLOBALS, *map(str.encode, _KEYS)],
    "zero-checkpoint": [*_OPCODES, *_GLOBALS, *map(str.encode, [*_ZERO, *_KEYS])],
    "autotp-checkpoint": [*_OPCODES, *_GLOBALS, *map(str.encode, [*_ZERO, *_AUTOTP])],
    "experts-checkpoint": [*_OPCODES, *_GLOBALS, *map(str.encode, [*_ZERO, "moe", "ep_size_2", "deepspeed_experts"])],
    "megatron-ranks": [*_OPCODES, *_GLOBALS, *map(str.encode, [*_KEYS, *_MEGATRON_RANKS])],
    "universal-checkpoint": [*_OPCODES, *_GLOBALS, *map(str.encode, [*_ZERO, *_KEYS])],
    "nanotron-checkpoint": [*_JSON, *_OPCODES, *_GLOBALS, *map(str.encode, [*_NANOTRON, *_KEYS])],
    "torch-checkpointing-checkpoint": [*_OPCODES, *map(str.encode, [*_CHECKPOINTING, *_KEYS])],
    **{f"{kind}-checkpoint": [*_OPCODES, *_GLOBALS, *map(str.encode, _OF_RANKS)] for kind in CHANGED},
    "written-checkpoint": [*_JSON, *_OPCODES, *_GLOBALS, *map(str.encode, [*_DCP, *_KEYS])],
    "safetensors-header": [*_JSON, *_quoted(*_HEADER)],
    "safetensors": [*_JSON, *_quoted(*_HEADER)],
    "safetensors-index": [*_JSON, *_quoted("weight_map", "metadata", "model.safetensors", "a", "b")],
    "safetensors-document": [*_JSON, *_quoted(*_DOCUMENT, *_KEYS, "a", "b")],
    "sharding-info": [*_JSON, *_quoted("saved_offsets", "a", "b")],
    "units": [*_JSON, *_quoted("units", "prefix", "params", "name", "shape", "shared", "groups", "strategy")],
    "values-json": [*_JSON, *_quoted(*_DOCUMENT)],
    "manifest": [*_JSON, *_quoted(*_MANIFEST)],
    "journal": [*_JSON, *_quoted(*_JOURNAL), b"\n"],
    "file-names": [name.encode() for name in _NAMES],
    "index-page": [mark.encode() for mark in _PAGE],
}


def dictionary(target: str) -> str:
    """The words for ``target`` as libFuzzer reads them."""
    lines = ("".join(f"\\x{byte:02x}" for byte in word) for word in _WORDS[target])
    return "".join(f'"{line}"\n' for line in lines)
