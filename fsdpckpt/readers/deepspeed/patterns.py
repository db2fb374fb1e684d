"""Reads how parameters are cut from the lists of names in ``universal_checkpoint_info``, which AutoTP wrote before it
recorded maps, and writes still.

The rules are those of ``merge_tp_slices`` in ``deepspeed/checkpoint/ds_to_universal.py``: a parameter is the same on
all ranks, or made of parts that are cut one by one, or cut along its second dimension, or, if it is in no list, along
its first. The lists have patterns. Those of AutoTP are names; others are not matched, as a checkpoint could bring one
that takes for ever.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fsdpckpt.ir.values import Key
from fsdpckpt.readers.deepspeed.partitions import is_count
from fsdpckpt.readers.model_shards import ModelShard, Shape, Shards, shards_of_parts

_REPLICATED = "tp_replicated_parameter_patterns"
_ROW = "parameter_with_row_parallelism_patterns"
_VOCABULARY = "vocabulary_parameter_patterns"
_FUSED, _WIDTHS = "parameter_with_sub_params", "sub_param_shard_widths"
_UNKNOWN = (
    "parameter_to_average_patterns", "parameter_with_2_sub_params_cat_dim_0", "pipeline_replicated_parameter_patterns",
)  # fmt: skip
_VERSIONS = (0.2, 0.3, 0.4)
_ANCHORS = ("^", "$")
_PLAIN = frozenset("_/:,@=<>!\"'%`;")  # what ``re.escape`` leaves as it is, beside letters and digits


class MapError(Exception):
    """Describes why nothing says how the shards of a parameter belong together."""


def name_of(pattern: object) -> str | None:
    """The one name that a pattern made by ``re.escape`` stands for, None if it is no such pattern."""
    if not isinstance(pattern, str) or pattern[:1] != _ANCHORS[0] or pattern[-1:] != _ANCHORS[1]:
        return None
    parts: list[str] = []
    escaped = False
    for character in pattern[1:-1]:
        plain = character.isalnum() or character in _PLAIN
        if escaped and character.isalnum():
            return None  # a class of characters
        if not escaped and character != "\\" and not plain:
            return None  # it stands for something else
        escaped = character == "\\" and not escaped
        if not escaped:
            parts.append(character)
    return None if escaped else "".join(parts)


@dataclass(frozen=True, slots=True)
class Patterns:
    """The names in each list. ``fused``: for each parameter of several parts its dimension, and the widths of each part
    on the ranks.
    """

    replicated: frozenset[str]
    row: frozenset[str]
    vocabulary: frozenset[str]
    fused: Mapping[str, tuple[int, Sequence[Sequence[int]]]]
    words: object

    def shards(self, name: str, local: Sequence[Shape]) -> Shards:
        """The parameter ``name`` of which each rank has ``local``. Raises MapError."""
        if name in self.replicated:
            if len(set(local)) > 1:
                raise MapError("it is the same on all ranks, and its shards have several shapes")
            return Shards(local[0], {rank: ModelShard.of_whole(shape) for rank, shape in enumerate(local)})
        dim, widths = self.fused.get(name, (1 if name in self.row else 0, ()))
        if any(len(shape) <= dim for shape in local):
            raise MapError(f"it has no dimension {dim}")
        widths = widths or [[shape[dim] for shape in local]]
        if any(len(of_part) != len(local) for of_part in widths):
            raise MapError(f"its widths are not those of {len(local)} ranks")
        others = {(*shape[:dim], *shape[dim + 1 :]) for shape in local}
        sums = list(map(sum, zip(*widths, strict=True)))
        if len(others) > 1 or sums != [shape[dim] for shape in local]:
            raise MapError("the shapes of its shards are not those of parts of one tensor")
        shards = shards_of_parts(local, dim, widths)
        if name in self.vocabulary and self.words is not None and shards.shape[0] != self.words:
            raise MapError(f"it has {shards.shape[0]} rows for {self.words!r} words, and the rest is padding")
        return shards


def patterns_of(info: Mapping[Key, object]) -> Patterns:
    """The lists in ``info``. Raises MapError for those that DeepSpeed's own program has to match."""
    if info.get("universal_checkpoint_version") not in _VERSIONS:
        raise MapError(f"its version is {info.get('universal_checkpoint_version')!r}")
    used = [key for key in _UNKNOWN if info.get(key)]
    if used:
        raise MapError(f"it has {used[0]}")
    fused: dict[str, tuple[int, Sequence[Sequence[int]]]] = {}
    entries, widths = info.get(_FUSED) or [], info.get(_WIDTHS) or {}
    for entry in entries if isinstance(entries, (list, tuple)) else [None]:
        patterns = entry.get("patterns") if isinstance(entry, dict) else None
        dim = entry.get("partition_dim") if isinstance(entry, dict) else None
        if not isinstance(patterns, (list, tuple)) or not isinstance(widths, dict) or type(dim) is not int or dim < 0:
            raise MapError(f"its {_FUSED} do not list parts of parameters")
        for pattern in patterns:
            fused[_name(pattern, _FUSED)] = (dim, _widths(widths.get(pattern)))
    names = [_names(info, key) for key in (_REPLICATED, _ROW, _VOCABULARY)]
    return Patterns(names[0], names[1], names[2], fused, info.get("original_vocab_size"))


def _names(info: Mapping[Key, object], key: str) -> frozenset[str]:
    patterns = info.get(key) or []
    if not isinstance(patterns, (list, tuple)):
        raise MapError(f"its {key} are not a list")
    return frozenset(_name(pattern, key) for pattern in patterns)


def _name(pattern: object, key: str) -> str:
    name = name_of(pattern)
    if name is None:
        raise MapError(f"its {key} have {pattern!r}, which is not the name of one parameter"[:200])
    return name


def _widths(value: object) -> Sequence[Sequence[int]]:
    """The widths of each part on the ranks."""
    parts = value if isinstance(value, (list, tuple)) else []
    if not parts or not all(isinstance(part, (list, tuple)) and all(map(is_count, part)) for part in parts):
        raise MapError(f"its {_FUSED} have no {_WIDTHS}")
    return parts
