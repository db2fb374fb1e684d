"""Words that a parser looks for, for ``-dict`` of libFuzzer: by chance it would find few of them."""

from __future__ import annotations

from tests.fuzz.layouts import SAVED

__all__ = ["MOST_BYTES", "dictionary"]

MOST_BYTES = {
    **{f"{kind}-checkpoint": 1536 for kind in ("autoep", "autoep-zero3", "autoep-universal", "torch", "dcp")},
    **{f"{kind}-checkpoint": 2048 for kind in ("megatron", "torch_checkpointing")},
    "written-checkpoint": 3072,
    "pickle": 1536,
    "plain-pickle": 512,
    "dcp-metadata": 2048,
    "zip": 2048,
    "torch": 2048,
    "dcp-item": 1600,
    "file-names": 256,
}
"""Bytes of an input, 1024 where nothing else is said: real ones of the kind fit, and most of the damage counts."""


def _words(text: str) -> list[bytes]:
    return text.encode().split()


def _quoted(text: str) -> list[bytes]:
    return [b'"%s"' % word for word in _words(text)]


_JSON = rb'null true [] {} "" -1 1e999 NaN 9223372036854775808 "\ud800" ": [['.split()
_OPCODES = [
    b"\x80\x02", b"\x80\x04", b"}(", b"](", b"(t", b")R", b"\x86R", b"\x87R", b"u.", b"sb.", b"\x8c\x01a", b"q\0",
    b"X\1\0\0\0a", b"h\0", b"\x94", b"\x93", b"Q", b"\x81", b"\x82\1", b"K\1", b"\x8a\x08", b"\x8f", b"\x90", b"\x91",
    b"N.",
]  # fmt: skip
_ZIP = [b"PK\1\2", b"PK\3\4", b"PK\5\6", b"PK\6\6", b"PK\6\7", b"\1\0\x10\0", b"\xff\xff\xff\xff"]
_ZIP += [b"a/data.pkl", b"a/byteorder"]
_NAMED = """
torch._utils._rebuild_tensor_v2 torch._utils._rebuild_tensor_v3 torch._utils._rebuild_parameter
torch._utils._rebuild_from_type_v2 torch._utils._rebuild_tensor collections.OrderedDict __builtin__.set torch.Size
torch.float16 torch.FloatStorage _codecs.encode builtins.getattr __builtin__.bytearray
"""
_GLOBALS = [b"c%s\n%s\n" % tuple(word.rsplit(b".", 1)) for word in _words(_NAMED)] + [b"storage"]
_KEYS = _words("state param_groups params model optimizer step exp_avg _flat_param _metadata names")
_DCP = _words("state_dict_metadata storage_data planner_data offsets sizes chunks fqn relative_path ../x")
_OF_OTHERS = _words("""
param_shapes group_paddings zero_stage base_optimizer_state single_partition_of_fp32_groups optimizer_state_dict
frozen_param_shapes frozen_param_fragments shared_params fp32_flat_groups vocab_tensor cat_dim param_slice_mappings
ds_autoep_layers expert_placement affine_maps expert_key_prefix num_local_experts ep_rank ep_size_2 deepspeed_experts
buckets_coalesced param numel_unpadded iteration num_layers num_experts world_size moe pieces source dest scale
universal_checkpoint_info affine_map logical_shape shard_shape mcore_data nd_reformulated_orig_global_shape
all_local_plans common_step chained_0. args tensor_model_parallel_size swiglu ffn_hidden_size fp32_from_fp16_params
local_global_slices_pairs unsharded_shape data gradient_accumulator None # | ; metadata version rank_to_layout_info
nested_path_to_metadata sharding_metadata DTensorShardingMetadata default_tensor_v1 global_shape mesh_spec mesh_shape
mesh_data placements Shard StridedShard split_factor file_path serialization_format RawSerialization global_offsets
""")
_NAMES = """
model optim _world_size_ _rank_ rank -of- shard- .safetensors .pt .bin .distcp __0_0 .metadata __1.metadata
fsdpckpt.json units.json .safetensors.index.json 99999999999 checkpoint-1/ pytorch_model_fsdp_0/ optimizer_0/
global_step1/ actor/ random_states_0.pkl
"""
_HEADER = "dtype shape data_offsets __metadata__ DCP_SHARDING_INFO saved_offsets F32 BF16 fsdpckpt"
_DOCUMENT = """
version sections optim order state_values param_groups extra model_values raw $tensor model_order model_aliases
model_metadata $tuple $float $dict $ordered attributes $set
"""
_MANIFEST = "files nbytes crc32 digests key_type undetermined flavor units version id"
_JOURNAL = "format sources options plan windows parts received path nbytes mtime_ns inode tag"
_PAGE = '"> http:// https://host/run/ ../ ?C=N %2F %00 // [ ] \u212a #'

_WORDS = {
    "pickle": [*_OPCODES, *_GLOBALS],
    "plain-pickle": [*_OPCODES, *_GLOBALS],
    "dcp-metadata": [*_OPCODES, *_DCP],
    "zip": _ZIP,
    "torch": [*_ZIP, *_OPCODES, *_GLOBALS],
    "dcp-item": [*_ZIP, *_OPCODES, *_GLOBALS],
    "torch-checkpoint": [*_OPCODES, *_GLOBALS, *_KEYS],
    "dcp-checkpoint": [*_OPCODES, *_DCP, *_KEYS],
    "rank-files": [*_OPCODES, *_GLOBALS, *_KEYS],
    **{f"{kind}-checkpoint": [*_JSON, *_OPCODES, *_GLOBALS, *_DCP, *_KEYS, *_OF_OTHERS] for kind in SAVED},
    "written-checkpoint": [*_JSON, *_OPCODES, *_GLOBALS, *_DCP, *_KEYS],
    "safetensors-header": [*_JSON, *_quoted(_HEADER)],
    "safetensors": [*_JSON, *_quoted(_HEADER)],
    "safetensors-index": [*_JSON, *_quoted("weight_map metadata model.safetensors a b")],
    "safetensors-document": [*_JSON, *_quoted(f"{_DOCUMENT} a b"), *(b'"%s"' % key for key in _KEYS)],
    "sharding-info": [*_JSON, *_quoted("saved_offsets a b")],
    "units": [*_JSON, *_quoted("units prefix params name shape shared groups strategy")],
    "values-json": [*_JSON, *_quoted(_DOCUMENT)],
    "manifest": [*_JSON, *_quoted(_MANIFEST)],
    "journal": [*_JSON, *_quoted(_JOURNAL), b"\n"],
    "file-names": [*_words(_NAMES), b"\n"],
    "index-page": [b'<a href="', *_words(_PAGE)],
}


def dictionary(target: str) -> str:
    """The words for ``target`` as libFuzzer reads them."""
    lines = ("".join(f"\\x{byte:02x}" for byte in word) for word in _WORDS[target])
    return "".join(f'"{line}"\n' for line in lines)
