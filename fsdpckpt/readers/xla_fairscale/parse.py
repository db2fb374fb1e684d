"""Parse the shard metadata of torch_xla and of fairscale, which is saved under any key.

torch_xla: ``XlaFullyShardedDataParallel.get_shard_metadata``. Follows ``consolidate_sharded_state_dicts`` of
``torch_xla/distributed/fsdp/state_dict_utils.py``. A module that shares its parameter with another is not in it: the
shared parameter is there once, under the name met first. fairscale: ``FullyShardedDataParallel.local_metadata_dict``.
Follows ``consolidate_shard_weights`` of ``fairscale/nn/data_parallel/fully_sharded_data_parallel.py`` and, for shared
parameters, what that class puts into the metadata.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from math import prod

from fsdpckpt.formats.torch.mesh import MAX_RANKS
from fsdpckpt.ir.names import joined
from fsdpckpt.readers.xla_fairscale.shard_metadata import Backing, Original, Record, recorded_size, without_wrappers

__all__ = [
    "FAIRSCALE",
    "TORCH_XLA",
    "fairscale_record",
    "is_fairscale",
    "is_shard",
    "is_torch_xla",
    "is_torch_xla_shard",
    "torch_xla_record",
]

TORCH_XLA = "torch_xla"
_SHARD = "_fsdp_shard"
_FLAT = "_fsdp_wrapped_module.flat_param_"


def is_torch_xla(value: Mapping[object, object]) -> bool:
    """Whether ``value`` is the record of one rank."""
    return value.keys() >= {"shard_info", "flatten_info", "world_size", "rank"}


def is_torch_xla_shard(key: str) -> bool:
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


FAIRSCALE = "fairscale"
_FAIRSCALE_SHARD = re.compile(r"(?:^|\.)flat_param_\d+$")


def is_fairscale(value: Mapping[object, object]) -> bool:
    """Whether ``value`` is the record of one rank."""
    return value.keys() >= {"param_metadata", "buffer_names"} and isinstance(value["param_metadata"], list)


def is_fairscale_shard(key: str) -> bool:
    """Whether a key of a state dict names a flat parameter."""
    return _FAIRSCALE_SHARD.search(key) is not None


def fairscale_record(value: Mapping[object, object]) -> Record | None:
    """The record that ``value`` is; None when it contradicts itself."""
    backings: list[Backing] = []
    shared: list[tuple[str, str]] = []
    modules = value["param_metadata"]
    for module in modules if isinstance(modules, list) else [None]:
        found = list(_of_module(module))
        aliases = _shared(module, [param.name for one in found if one is not None for param in one.params])
        if aliases is None or any(one is None for one in found):
            return None
        backings.extend(one for one in found if one is not None)
        shared.extend(aliases)
    if not backings:
        return None
    # Flat parameters stand before the modules below them, wherever in the model the parameters stood; one that is not
    # flattened stays in its own module, of which nothing here says the place.
    listed = all(backing.flattened for backing in backings) or len({backing.module for backing in backings}) == 1
    names = value["buffer_names"]
    if not isinstance(names, list):
        return None
    buffers = frozenset(str(name) for name in names)
    return Record(FAIRSCALE, tuple(backings), listed=listed, shared=tuple(shared), multiples=(1,), buffers=buffers)


def _of_module(module: object) -> Iterator[Backing | None]:
    """The backing tensors of one wrapped module; None for what is not in the form known."""
    entries = module.get("params") if isinstance(module, dict) else None
    if not isinstance(module, dict) or not isinstance(entries, dict) or not isinstance(module.get("fsdp_path"), str):
        yield None
        return
    for name, entry in entries.items():
        params = _params(module["fsdp_path"], entry)
        if params is None or not isinstance(name, str) or type(entry["padding"]) is not int:
            yield None
            continue
        own = bool(module.get("no_broadcast_optim_state"))
        key = joined(module["fsdp_path"], name)
        yield Backing(key, module["fsdp_path"], params, is_fairscale_shard(name), entry["padding"], own)


def _params(path: str, entry: object) -> tuple[Original, ...] | None:
    if not isinstance(entry, dict) or not entry.keys() >= {"names", "shapes", "numels", "padding"}:
        return None
    names, shapes, numels = (entry[column] for column in ("names", "shapes", "numels"))
    if not all(isinstance(column, (list, tuple)) and len(column) == len(names) for column in (names, shapes, numels)):
        return None
    found = []
    for name, shape, numel in zip(names, shapes, numels, strict=True):
        size = recorded_size(shape)
        if size is None or not isinstance(name, str) or prod(size) != numel:
            return None
        found.append(Original(joined(path, name), size))
    return tuple(found)


def _shared(module: object, names: Sequence[str]) -> list[tuple[str, str]] | None:
    """(later name, first name) of the module's shared parameters; None where the record does not settle them.

    The record has the last words of the two names swapped, which shows only where they differ: the parameter that is
    shared is one of ``names``, and the one that shares it is not.
    """
    path = module.get("fsdp_path") if isinstance(module, dict) else None
    pairs = module.get("shared_param_info", ()) if isinstance(module, dict) else ()
    if not isinstance(path, str) or not isinstance(pairs, (list, tuple)):
        return None
    found: list[tuple[str, str]] = []
    for pair in pairs:
        if not isinstance(pair, (list, tuple)) or len(pair) != 2 or not all(isinstance(name, str) for name in pair):
            return None
        first, later = (joined(path, name) for name in pair)
        possible = {(later, first), (_with_last_word(later, first), _with_last_word(first, later))}
        settled = [one for one in possible if one[1] in names and one[0] not in names]
        if len(settled) != 1:
            return None
        found.extend(settled)
    return found


def _with_last_word(name: str, other: str) -> str:
    """``name`` with the last word of ``other``."""
    return joined(name.rpartition(".")[0], other.rpartition(".")[2])


def is_shard(key: str) -> bool:
    """Whether a key has a form that only shards of the two libraries have."""
    return is_torch_xla_shard(key) or is_fairscale_shard(key)
