"""Parses the shard metadata of torch_xla's and fairscale's FSDP: which parameters are in which stored tensor.

Both libraries save it under any key. torch_xla: ``XlaFullyShardedDataParallel.get_shard_metadata``; the rules are those
of ``consolidate_sharded_state_dicts`` in ``torch_xla/distributed/fsdp/state_dict_utils.py``. A module that shares its
parameter with another is not in it: the shared parameter appears once, under the first name. fairscale:
``FullyShardedDataParallel.local_metadata_dict``; the rules are those of ``consolidate_shard_weights`` in
``fairscale/nn/data_parallel/fully_sharded_data_parallel.py``, and for shared parameters what that class saves.

Both cut the same way. A stored tensor is one parameter, or several flattened one after the other; its elements are
padded at the end and cut into equal chunks, rank by rank (torch_xla can cut rows instead). The number of elements that
each rank holds must follow from the names and shapes in the metadata; otherwise the metadata is not trusted.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import gcd, prod
from typing import TypeVar

from fsdpckpt.formats.torch.distributed import BoxInFile, Distributed, all_ranks
from fsdpckpt.formats.torch.mesh import MAX_RANKS
from fsdpckpt.formats.torch.tensors import StoredTensor, size_of
from fsdpckpt.ir.dtypes import MAX_DIMENSIONS
from fsdpckpt.ir.names import joined
from fsdpckpt.ir.tensors import Flattened
from fsdpckpt.readers.flat_slices import boxes_of_range

TORCH_XLA, FAIRSCALE = "torch_xla", "fairscale"  # the names of their flavors
_XLA_SHARD = "_fsdp_shard"
_XLA_FLAT = "_fsdp_wrapped_module.flat_param_"
_FAIRSCALE_FLAT = re.compile(r"(?:^|\.)flat_param_\d+$")
_WRAPPERS = frozenset({"_fsdp_wrapped_module", "_fpw_module"})
_MAX_EXTENT = (1 << 63) - 1
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Param:
    """A parameter of the model before it was wrapped."""

    name: str
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        return prod(self.shape)


@dataclass(frozen=True, slots=True)
class ShardedTensor:
    """One tensor of the wrapped model. ``key``: its key in the state dict. ``module``: the wrapped module's name.

    ``params``: its content, front to back. ``flattened``: it is a flat parameter, even if of one parameter.
    ``padding``: the elements of padding on the rank whose file this is, None if not recorded. ``per_rank``: every rank
    has a different one, which is not cut. ``frozen``: it is a flat parameter of frozen parameters.
    """

    key: str
    module: str
    params: tuple[Param, ...]
    flattened: bool
    padding: int | None = None
    per_rank: bool = False
    frozen: bool = False

    @property
    def title(self) -> str:
        """Its name in messages."""
        if not self.flattened:
            return self.params[0].name
        _, word, number = self.key.rpartition("flat_param")
        return f"{word}{number} of {self.module or 'the root'}"

    @property
    def numel(self) -> int:
        return sum(param.numel for param in self.params)


@dataclass(frozen=True, slots=True)
class ShardMetadata:
    """The metadata in one rank's file. ``producer``: the name of its flavor.

    ``tensors``: in the order of the metadata. ``in_parameter_order``: whether that is the order of the wrapped
    ``model.parameters()``. ``shared``: (name, name of the parameter that it shares). ``rank``, ``world_size``: None if
    not recorded. ``multiples``: the multiples to which the length of a chunk may be padded; () is any. ``buffers``: the
    names of all buffers, None if not recorded. ``buffer_types``: (name, dtype before) of buffers that were cast.
    """

    producer: str
    tensors: tuple[ShardedTensor, ...]
    in_parameter_order: bool
    shared: tuple[tuple[str, str], ...] = ()
    rank: int | None = None
    world_size: int | None = None
    multiples: tuple[int, ...] = ()
    buffers: frozenset[str] | None = None
    buffer_types: tuple[tuple[str, str], ...] = ()

    @property
    def consistent(self) -> bool:
        """Whether it is not empty, and has every key and every name once."""
        names = [param.name for tensor in self.tensors for param in tensor.params]
        names += [later for later, _ in self.shared]
        keys = [tensor.key for tensor in self.tensors]
        return bool(keys) and len(set(names)) == len(names) and len(set(keys)) == len(keys)

    @property
    def in_model_order(self) -> bool:
        """Whether the parameters are in the order that the model had before it was wrapped.

        Flat parameters come before the modules below theirs, and those of frozen parameters separately; torch_xla's
        shards all do so.
        """
        flat = sum(tensor.flattened for tensor in self.tensors)
        if not flat and not self.in_parameter_order:
            return True
        return len({tensor.module for tensor in self.tensors}) == 1 and flat < 2

    def same_model(self, other: ShardMetadata) -> bool:
        """Whether the metadata of two ranks describe one model."""
        return self._model() == other._model()

    def _model(self) -> tuple[object, ...]:
        tensors = [(tensor.key, tensor.params, tensor.per_rank) for tensor in self.tensors]
        return self.producer, self.shared, self.world_size, tensors


def is_torch_xla_shard(key: str) -> bool:
    """Whether a key of a state dict names a shard of torch_xla."""
    return any(word.startswith(_XLA_SHARD) for word in key.split("."))


def is_shard(key: str) -> bool:
    """Whether a key has a form that only shards of the two libraries have."""
    return is_torch_xla_shard(key) or _FAIRSCALE_FLAT.search(key) is not None


def without_wrappers(name: str) -> str:
    """``name`` without the segments that both libraries' wrappers insert."""
    return ".".join(word for word in name.split(".") if word not in _WRAPPERS)


class _MalformedError(Exception):
    """The metadata has a form that this program does not know."""


def metadata_in(value: Mapping[object, object]) -> tuple[bool, ShardMetadata | None]:
    """Whether ``value`` is the metadata of one rank, and the parsed metadata: None if it contradicts itself."""
    try:
        if value.keys() >= {"shard_info", "flatten_info", "world_size", "rank"}:
            return True, _of_torch_xla(value)
        if value.keys() >= {"param_metadata", "buffer_names"} and isinstance(value["param_metadata"], list):
            return True, _of_fairscale(value, value["param_metadata"])
    except _MalformedError:
        return True, None
    return False, None


def _require(condition: bool) -> None:  # noqa: FBT001 (reads as a sentence)
    if not condition:
        raise _MalformedError


def _checked(value: object, kind: type[_T]) -> _T:
    if not isinstance(value, kind):
        raise _MalformedError
    return value


def _list(value: object) -> Sequence[object]:
    if not isinstance(value, (list, tuple)):
        raise _MalformedError
    return value


def _shape(value: object) -> tuple[int, ...]:
    """A possible shape of a tensor."""
    size = size_of(value)
    if size is None or len(size) > MAX_DIMENSIONS or max(size, default=0) > _MAX_EXTENT:
        raise _MalformedError
    return size


def _params(prefix: str, names: object, shapes: object, numels: object) -> tuple[Param, ...]:
    columns = _list(names), _list(shapes), _list(numels)
    _require(len({len(column) for column in columns}) == 1)
    params = []
    for name, shape, numel in zip(*columns, strict=True):
        params.append(Param(joined(prefix, _checked(name, str)), _shape(shape)))
        _require(params[-1].numel == numel)
    return tuple(params)


def _of_torch_xla(value: Mapping[object, object]) -> ShardMetadata:
    rank, world_size = value["rank"], value["world_size"]
    if type(rank) is not int or type(world_size) is not int or not 0 <= rank < world_size <= MAX_RANKS:
        raise _MalformedError
    flattened = _checked(value["flatten_info"], dict)
    tensors = tuple(
        _xla_tensor(_checked(module, str), _checked(name, str), _checked(entry, dict), flattened)
        for module, entries in _checked(value["shard_info"], dict).items()
        for name, entry in _checked(entries, dict).items()
    )
    _require(bool(tensors))
    info = value.get("buffer_info")
    buffers = tuple(  # those that were cast when the model was wrapped, and the dtype they had
        (without_wrappers(name), str(entry["_orig_dtype"]).rpartition(".")[2])
        for name, entry in (info.items() if isinstance(info, dict) else ())
        if isinstance(name, str) and isinstance(entry, dict) and "_orig_dtype" in entry
    )
    return ShardMetadata(
        TORCH_XLA, tensors, in_parameter_order=True, rank=rank, world_size=world_size, buffer_types=buffers
    )


def _xla_tensor(
    module: str, name: str, entry: Mapping[object, object], flattened: Mapping[object, object]
) -> ShardedTensor:
    shape, whole = _shape(entry.get("_orig_size")), joined(module, _checked(entry.get("_orig_name"), str))
    params: tuple[Param, ...] = (Param(without_wrappers(whole), shape),)
    if _XLA_FLAT in whole:
        columns = _list(flattened.get(whole))
        _require(len(columns) == 3)
        wrapped = _params(whole.rpartition(".")[0], *columns)
        params = tuple(Param(without_wrappers(param.name), param.shape) for param in wrapped)
    _require(bool(params) and sum(param.numel for param in params) == prod(shape))
    # Trainable and frozen parameters are flattened apart, and the trainable ones first.
    frozen = _XLA_FLAT in whole and not whole.endswith(f"{_XLA_FLAT}0")
    return ShardedTensor(joined(module, name), without_wrappers(module), params, _XLA_FLAT in whole, frozen=frozen)


def _of_fairscale(value: Mapping[object, object], modules: Sequence[object]) -> ShardMetadata:
    tensors: list[ShardedTensor] = []
    shared: list[tuple[str, str]] = []
    for entry in modules:
        module = _checked(entry, dict)
        of_module = list(_fairscale_tensors(module))
        shared.extend(_shared(module, [param.name for tensor in of_module for param in tensor.params]))
        tensors.extend(of_module)
    _require(bool(tensors))
    # Flat parameters come before the modules below theirs, wherever in the model the parameters were; a parameter that
    # is not flattened stays in its module, whose place is not recorded.
    in_order = all(tensor.flattened for tensor in tensors) or len({tensor.module for tensor in tensors}) == 1
    buffers = frozenset(map(str, _checked(value["buffer_names"], list)))
    return ShardMetadata(
        FAIRSCALE, tuple(tensors), in_parameter_order=in_order, shared=tuple(shared), multiples=(1,), buffers=buffers
    )


def _fairscale_tensors(module: Mapping[object, object]) -> Iterator[ShardedTensor]:
    path = _checked(module.get("fsdp_path"), str)
    for name, entry in _checked(module.get("params"), dict).items():
        column = _checked(entry, dict)
        params = _params(path, column.get("names"), column.get("shapes"), column.get("numels"))
        padding, flat = column.get("padding"), _FAIRSCALE_FLAT.search(_checked(name, str)) is not None
        if type(padding) is not int:
            raise _MalformedError
        per_rank = bool(module.get("no_broadcast_optim_state"))
        yield ShardedTensor(joined(path, _checked(name, str)), path, params, flat, padding, per_rank)


def _shared(module: Mapping[object, object], names: Sequence[str]) -> Iterator[tuple[str, str]]:
    """(later name, first name) of the module's shared parameters, if the metadata is unambiguous.

    It has the last components of the two names swapped, which shows only if they differ: the parameter that is shared
    is one of ``names``, and the one that shares it is not.
    """
    path = _checked(module.get("fsdp_path"), str)
    for pair in _list(module.get("shared_param_info", ())):
        _require(len(_list(pair)) == 2)
        first, later = (joined(path, _checked(name, str)) for name in _list(pair))
        possible = {(later, first), (_with_last_word(later, first), _with_last_word(first, later))}
        fitting = [(second, original) for second, original in possible if original in names and second not in names]
        _require(len(fitting) == 1)
        yield fitting[0]


def _with_last_word(name: str, other: str) -> str:
    """``name`` with the last component of ``other``."""
    return joined(name.rpartition(".")[0], other.rpartition(".")[2])


def fits(tensor: ShardedTensor, shape: Sequence[int], world_size: int, multiples: Sequence[int]) -> bool:
    """Whether a rank of ``world_size`` may hold a chunk of ``shape`` of ``tensor``."""
    if _by_rows(tensor, shape):
        rows = tensor.params[0].shape
        return tuple(shape[1:]) == rows[1:] and shape[0] == -(-rows[0] // world_size)
    if len(shape) == 1:
        return any(shape[0] == -(-tensor.numel // (world_size * step)) * step for step in multiples if step)
    return world_size == 1 and not shape and [param.shape for param in tensor.params] == [()]


def _by_rows(tensor: ShardedTensor, shape: Sequence[int]) -> bool:
    """Whether chunks of ``shape`` are rows of the one parameter (``shard_param_on_dim_0``), not slices."""
    return len(tensor.params) == 1 and len(shape) > 1 and len(shape) == len(tensor.params[0].shape)


def padding_multiples(
    metadata: ShardMetadata, shards: Sequence[tuple[ShardedTensor, tuple[int, ...]]], world_size: int
) -> tuple[int, ...]:
    """The multiples to which the lengths of ``shards``, one rank's tensors and their shapes, were padded.

    () if nothing explains them. A multiple that a user chose (``_shard_size_multiple``) must explain all of them, and
    then their greatest common divisor does, too.
    """
    common = gcd(*(shape[0] for _, shape in shards if len(shape) == 1))
    for multiples in (metadata.multiples,) if metadata.multiples else ((128, 1), (common,)):
        if all(fits(tensor, shape, world_size, multiples) for tensor, shape in shards):
            return multiples
    return ()


def params_in(
    tensor: ShardedTensor, stored: StoredTensor, *, rank: int, world_size: int, producer: str
) -> dict[str, Distributed]:
    """The part of each parameter in ``rank``'s chunk of ``tensor``; ``stored`` has a matching shape."""
    world = all_ranks(world_size)

    def distributed(param: Param, boxes: Sequence[BoxInFile]) -> Distributed:
        form = f"{producer} shard"
        return Distributed(form, stored.dtype, param.shape, Flattened(), rank, world, world, tuple(boxes))

    first = tensor.params[0]
    if _by_rows(tensor, stored.shape):
        return {first.name: distributed(first, _rows(first, stored, rank))}
    if not stored.shape:
        return {first.name: distributed(first, [BoxInFile((), (), stored.offset, ())])}
    begin = rank * stored.shape[0]
    result = {}
    start = 0
    for param in tensor.params:
        low, high = max(begin - start, 0), min(begin + stored.shape[0] - start, param.numel)
        result[param.name] = distributed(param, boxes_of_range(param.shape, low, high, start - begin, stored))
        start += param.numel
    return result


def _rows(param: Param, stored: StoredTensor, rank: int) -> list[BoxInFile]:
    """Rows of ``param``, without those that are padding."""
    begin = min(rank * stored.shape[0], param.shape[0])
    count = min(stored.shape[0], param.shape[0] - begin)
    start, size = (begin, *(0,) * (len(param.shape) - 1)), (count, *param.shape[1:])
    return [BoxInFile(start, size, stored.offset, stored.stride)] if prod(size) else []
