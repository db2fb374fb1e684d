"""torch_xla's record of its shards: ``XlaFullyShardedDataParallel.get_shard_metadata``, saved under any key.

Follows ``torch_xla/distributed/fsdp/state_dict_utils.py`` (``consolidate_sharded_state_dicts``). A module that shares
its parameter with another is not recorded: the shared parameter is there once, under the name met first.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import prod

from fsdpckpt.formats.torch.mesh import MAX_RANKS
from fsdpckpt.ir.names import joined
from fsdpckpt.readers.xla_fairscale.records import Backing, Original, Record, recorded_size, without_wrappers

__all__ = ["TORCH_XLA", "is_shard", "is_torch_xla", "torch_xla_record"]

TORCH_XLA = "torch_xla"
_SHARD = "_fsdp_shard"
_FLAT = "_fsdp_wrapped_module.flat_param_"


def is_torch_xla(value: Mapping[object, object]) -> bool:
    """Whether ``value`` is the record of one rank."""
    return value.keys() >= {"shard_info", "flatten_info", "world_size", "rank"}


def is_shard(key: str) -> bool:
    """Whether a key of a state dict names a shard."""
    return any(word.startswith(_SHARD) for word in key.split("."))


def torch_xla_record(value: Mapping[object, object]) -> Record | None:
    """The record that ``value`` is; None when it contradicts itself."""
    rank, world_size = value["rank"], value["world_size"]
    if type(rank) is not int or type(world_size) is not int or not 0 <= rank < world_size <= MAX_RANKS:
        return None
    backings = list(_backings(value["shard_info"], value["flatten_info"]))
    found = tuple(one for one in backings if one is not None)
    if len(found) < len(backings) or not found:
        return None
    buffers = tuple(_buffer_types(value.get("buffer_info")))
    return Record(TORCH_XLA, found, listed=True, rank=rank, world_size=world_size, buffer_types=buffers)


def _backings(shards: object, flattened: object) -> Iterator[Backing | None]:
    """Every backing tensor, in the order of the wrapped modules; None for what is not in the form known."""
    if not isinstance(shards, dict) or not isinstance(flattened, dict):
        yield None
        return
    for module, entries in shards.items():
        if not isinstance(module, str) or not isinstance(entries, dict):
            yield None
            continue
        for name, entry in entries.items():
            yield _backing(module, name, entry, flattened)


def _backing(module: str, name: object, entry: object, flattened: Mapping[object, object]) -> Backing | None:
    if not isinstance(name, str) or not isinstance(entry, dict):
        return None
    shape, original = recorded_size(entry.get("_orig_size")), entry.get("_orig_name")
    if shape is None or not isinstance(original, str):
        return None
    whole = joined(module, original)
    params: tuple[Original, ...] | None = (Original(without_wrappers(whole), shape),)
    if _FLAT in whole:
        params = _flat(whole, flattened.get(whole))
    if not params or sum(param.numel for param in params) != prod(shape):
        return None
    # Trainable and frozen parameters are flattened apart, and the trainable ones first.
    frozen = _FLAT in whole and not whole.endswith(f"{_FLAT}0")
    return Backing(joined(module, name), without_wrappers(module), params, _FLAT in whole, frozen=frozen)


def _flat(name: str, entry: object) -> tuple[Original, ...] | None:
    """The parameters in the flat parameter ``name``, of which ``entry`` has the names, shapes and lengths."""
    if not isinstance(entry, (tuple, list)) or len(entry) != 3:
        return None
    names, shapes, numels = entry
    if not all(isinstance(column, (tuple, list)) and len(column) == len(names) for column in (names, shapes, numels)):
        return None
    sizes = [recorded_size(shape) for shape in shapes]
    if any(size is None or prod(size) != numel for size, numel in zip(sizes, numels, strict=True)):
        return None
    prefix = name.rpartition(".")[0]
    return tuple(
        Original(without_wrappers(joined(prefix, str(own))), size)
        for own, size in zip(names, sizes, strict=True)
        if size is not None
    )


def _buffer_types(info: object) -> Iterator[tuple[str, str]]:
    """Buffers that were cast when the model was wrapped, and the type they had."""
    for name, entry in info.items() if isinstance(info, dict) else ():
        if isinstance(name, str) and isinstance(entry, dict) and "_orig_dtype" in entry:
            yield without_wrappers(name), str(entry["_orig_dtype"]).rpartition(".")[2]
