"""What torch_xla's and fairscale's FSDP record beside their shards: which parameters lie in which stored tensor.

Both cut alike. A *backing* tensor is one parameter, or several flattened one after the other; its elements are padded
at the end and cut into equal chunks, rank by rank (torch_xla can cut rows instead). The record names the parameters and
their shapes; the number of elements that each rank holds has to follow from them, or the record is not believed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from math import gcd, isqrt, prod

from fsdpckpt.formats.torch.distributed import BoxInFile, Distributed
from fsdpckpt.formats.torch.tensors import StoredTensor, size_of
from fsdpckpt.ir.dtypes import MAX_DIMENSIONS
from fsdpckpt.ir.tensors import contiguous_stride
from fsdpckpt.layouts.flattened import flat_boxes

__all__ = [
    "Backing",
    "Original",
    "Record",
    "fits",
    "multiples",
    "originals_in",
    "ranks_of",
    "recorded_size",
    "without_wrappers",
]

PLACEMENT = "flattened"
_LARGEST = (1 << 63) - 1
_WRAPPERS = frozenset({"_fsdp_wrapped_module", "_fpw_module"})


@dataclass(frozen=True, slots=True)
class Original:
    """A parameter of the model before it was wrapped."""

    name: str
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        return prod(self.shape)


@dataclass(frozen=True, slots=True)
class Backing:
    """One tensor of the wrapped model. ``key``: its key in the state dict. ``module``: the wrapped module's name.

    ``params``: what it holds, front to back. ``flattened``: it is a flat parameter, even if of one parameter.
    ``padding``: the elements of padding on the rank whose file this is, None where they are not recorded. ``own``:
    every rank has one of its own, which is not cut. ``frozen``: it is a flat parameter of frozen parameters.
    """

    key: str
    module: str
    params: tuple[Original, ...]
    flattened: bool
    padding: int | None = None
    own: bool = False
    frozen: bool = False

    @property
    def title(self) -> str:
        """What to call it in a message."""
        if not self.flattened:
            return self.params[0].name
        _, word, number = self.key.rpartition("flat_param")
        return f"{word}{number} of {self.module or 'the root'}"

    @property
    def numel(self) -> int:
        return sum(param.numel for param in self.params)


@dataclass(frozen=True, slots=True)
class Record:
    """The record in one rank's file. ``producer``: whose, by the name of its flavor.

    ``backings``: in the order recorded. ``listed``: whether that is the order of the wrapped ``model.parameters()``.
    ``shared``: (name, name of the parameter that it shares). ``rank``, ``world_size``: None where they are not
    recorded. ``multiples``: to multiples of what the length of a chunk may be padded; () is any. ``buffers``: the
    names of all buffers, None where they are not recorded. ``buffer_types``: (name, type) of buffers that were cast.
    """

    producer: str
    backings: tuple[Backing, ...]
    listed: bool
    shared: tuple[tuple[str, str], ...] = ()
    rank: int | None = None
    world_size: int | None = None
    multiples: tuple[int, ...] = ()
    buffers: frozenset[str] | None = None
    buffer_types: tuple[tuple[str, str], ...] = ()

    @property
    def consistent(self) -> bool:
        """Whether there is something in it, and every key and every name once."""
        names = [param.name for backing in self.backings for param in backing.params]
        names += [later for later, _ in self.shared]
        keys = [backing.key for backing in self.backings]
        return bool(keys) and len(set(names)) == len(names) and len(set(keys)) == len(keys)

    @property
    def in_model_order(self) -> bool:
        """Whether the parameters stand in the order in which the model had them before it was wrapped.

        Flat parameters stand before the modules below theirs, and those of frozen parameters apart; torch_xla's shards
        all do so.
        """
        modules = {backing.module for backing in self.backings}
        flat = sum(backing.flattened for backing in self.backings)
        if not flat and not self.listed:
            return True
        return len(modules) == 1 and flat < 2

    def same_model(self, other: Record) -> bool:
        """Whether two ranks' records tell of one model."""
        return (
            (self.producer, self.shared, self.world_size) == (other.producer, other.shared, other.world_size)
            and [(one.key, one.params, one.own) for one in self.backings]
            == [(one.key, one.params, one.own) for one in other.backings]
        )  # fmt: skip


def recorded_size(value: object) -> tuple[int, ...] | None:
    """A shape that a tensor can have, None for anything else."""
    size = size_of(value)
    return size if size is not None and len(size) <= MAX_DIMENSIONS and max(size, default=0) <= _LARGEST else None


def without_wrappers(name: str) -> str:
    """``name`` without the words that both libraries' wrappers put into it."""
    return ".".join(word for word in name.split(".") if word not in _WRAPPERS)


def fits(backing: Backing, shape: Sequence[int], world_size: int, padded_to: Sequence[int]) -> bool:
    """Whether a rank of ``world_size`` may hold a tensor of ``shape`` of ``backing``."""
    if by_rows(backing, shape):
        rows = backing.params[0].shape
        return tuple(shape[1:]) == rows[1:] and shape[0] == -(-rows[0] // world_size)
    if len(shape) == 1:
        return any(shape[0] == -(-backing.numel // (world_size * one)) * one for one in padded_to)
    return world_size == 1 and not shape and [param.shape for param in backing.params] == [()]


def by_rows(backing: Backing, shape: Sequence[int]) -> bool:
    """Whether chunks of ``shape`` are rows of the one parameter (``shard_param_on_dim_0``), not slices."""
    return len(backing.params) == 1 and len(shape) > 1 and len(shape) == len(backing.params[0].shape)


def multiples(record: Record, held: Sequence[tuple[Backing, tuple[int, ...]]], world_size: int) -> tuple[int, ...]:
    """To multiples of what the lengths of ``held``, one rank's backings and their shapes, were padded.

    () when nothing explains them. A multiple of one's own (``_shard_size_multiple``) has to explain all of them.
    """
    usual = record.multiples or (128, 1)
    if all(fits(backing, shape, world_size, usual) for backing, shape in held):
        return usual
    if record.multiples:
        return ()
    common = gcd(*(shape[0] for _, shape in held if len(shape) == 1))
    for one in _divisors(common):
        if all(fits(backing, shape, world_size, (one,)) for backing, shape in held):
            return (one,)
    return ()


_MOST_TRIED = 1 << 20  # a length is believed before its bytes are seen


def _divisors(number: int) -> Iterator[int]:
    low = [one for one in range(1, min(isqrt(number), _MOST_TRIED) + 1) if number % one == 0]
    yield from low
    yield from (number // one for one in reversed(low) if one * one != number)


def originals_in(
    backing: Backing, stored: StoredTensor, *, rank: int, world_size: int, producer: str
) -> dict[str, Distributed]:
    """What ``rank``'s chunk of ``backing`` holds of each parameter in it; ``stored`` has a shape that fits."""
    if by_rows(backing, stored.shape):
        return {backing.params[0].name: _rows(backing.params[0], stored, rank, world_size, producer)}
    if not stored.shape:
        found = (BoxInFile((), (), stored.offset, ()),)
        return {backing.params[0].name: _distributed(backing.params[0], stored, found, rank, world_size, producer)}
    (length,), (step,) = stored.shape, stored.stride
    begin = rank * length
    result = {}
    start = 0
    for param in backing.params:
        low = max(begin - start, 0)
        high = min(begin + length - start, param.numel)
        boxes = tuple(_boxes(param, low, high, start - begin, stored, step)) if low < high else ()
        result[param.name] = _distributed(param, stored, boxes, rank, world_size, producer)
        start += param.numel
    return result


def _boxes(param: Original, low: int, high: int, place: int, stored: StoredTensor, step: int) -> Iterator[BoxInFile]:
    """Elements [low, high) of ``param``, whose element 0 would be element ``place`` of the stored tensor."""
    at = place + low
    for box in flat_boxes(param.shape, low, high - low):
        offset = stored.offset + at * step * stored.dtype.itemsize
        strides = tuple(one * step for one in contiguous_stride(box.sizes))
        yield BoxInFile(box.offsets, box.sizes, offset, strides)
        at += box.numel


def _rows(param: Original, stored: StoredTensor, rank: int, world_size: int, producer: str) -> Distributed:
    """Rows of ``param``, those that are padding left out."""
    begin = min(rank * stored.shape[0], param.shape[0])
    count = min(stored.shape[0], param.shape[0] - begin)
    start, size = (begin, *(0,) * (len(param.shape) - 1)), (count, *param.shape[1:])
    boxes = (BoxInFile(start, size, stored.offset, stored.stride),) if prod(size) else ()
    return _distributed(param, stored, boxes, rank, world_size, producer)


def _distributed(
    param: Original, stored: StoredTensor, boxes: tuple[BoxInFile, ...], rank: int, world_size: int, producer: str
) -> Distributed:
    world = ranks_of(world_size)
    return Distributed(f"{producer} shard", stored.dtype, param.shape, PLACEMENT, rank, world, world, boxes)


@cache
def ranks_of(world_size: int) -> tuple[int, ...]:
    """Every rank; one tuple for all tensors."""
    return tuple(range(world_size))
