"""fairscale's record of its shards: ``FullyShardedDataParallel.local_metadata_dict``, saved under any key.

Follows ``consolidate_shard_weights`` of ``fairscale/nn/data_parallel/fully_sharded_data_parallel.py`` and, for shared
parameters, what that class puts into the record.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from math import prod

from fsdpckpt.ir.names import joined
from fsdpckpt.readers.xla_fairscale.records import Backing, Original, Record, recorded_size

__all__ = ["FAIRSCALE", "fairscale_record", "is_fairscale", "is_flat"]

FAIRSCALE = "fairscale"
_FLAT = re.compile(r"(?:^|\.)flat_param_\d+$")


def is_fairscale(value: Mapping[object, object]) -> bool:
    """Whether ``value`` is the record of one rank."""
    return value.keys() >= {"param_metadata", "buffer_names"} and isinstance(value["param_metadata"], list)


def is_flat(key: str) -> bool:
    """Whether a key of a state dict names a flat parameter."""
    return _FLAT.search(key) is not None


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
        yield Backing(key, module["fsdp_path"], params, is_flat(name), entry["padding"], own)


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
