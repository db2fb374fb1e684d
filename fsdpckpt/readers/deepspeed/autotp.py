"""Reads how AutoTP cut the parameters of a model among tensor-parallel ranks.

``universal_checkpoint_info.affine_map`` of a file of module states has for each parameter its whole shape, and for each
rank the *pieces* of its shard: the size of a block, and its first element and strides in the parameter (``source``) and
in the shard (``dest``) (``deepspeed/checkpoint/affine.py``, ``collect_autotp_universal_checkpoint_info`` of
``deepspeed/module_inject/layers.py``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import cast

from fsdpckpt.errors import SourceUnsupportedError
from fsdpckpt.formats.torch.tensors import StoredTensor, size_of
from fsdpckpt.ir.coverage import flaws
from fsdpckpt.ir.dtypes import DTYPES, MAX_DIMENSIONS
from fsdpckpt.ir.tensors import Box, Chunks, Tensor, contiguous_stride
from fsdpckpt.ir.values import Key, Value, equal
from fsdpckpt.readers.deepspeed.module_states import ModuleStates
from fsdpckpt.readers.deepspeed.partitions import MAX_ELEMENTS, is_count
from fsdpckpt.readers.deepspeed.patterns import MapError, name_of, patterns_of
from fsdpckpt.readers.deepspeed.pieces import MAP_INFO
from fsdpckpt.readers.deepspeed.required_files import IN_ITS_JOB, MAX_NAMES, to_universal, unsupported
from fsdpckpt.readers.deepspeed.step import StateDict, contradiction
from fsdpckpt.readers.model_shards import ModelShard, Piece, Shape, Shards

_AFFINE_MAP = "affine_map"
_REASONS = "autotp_unsupported_parameter_patterns"
MAP_VERSION = 1
_MAX_PIECES = 1 << 12  # of one shard: fused weights have three, CodeGen's a few for each rank


def shards_of_autotp(directory: str, module: ModuleStates, *, joined: bool = False) -> dict[str, Shards]:
    """How every parameter of ``module``, which tensor-parallel ranks saved, is cut. ``joined``: whether DeepSpeed's own
    program has joined the trained ones.

    Raises SourceUnsupportedError that lists the parameters of which the files do not say it, SourceCorruptError if the
    files of two ranks say different things.
    """
    info = _info(directory, module)
    local = _local_shapes(module)
    try:
        maps = _maps_by_name(info) if _AFFINE_MAP in info else None
        patterns = patterns_of(info) if maps is None else None
    except MapError as error:
        raise _undescribed(directory, module, info, str(error), joined=joined) from None
    shards: dict[str, Shards] = {}
    unknown: list[str] = []
    for name, shapes in local.items():
        try:
            reason = _reason(info, name)
            if reason is not None or (maps is not None and name not in maps):
                raise MapError(reason or "not recorded")
            if patterns is not None:
                shards[name] = patterns.shards(name, [shapes[rank] for rank in sorted(shapes)])
            elif maps is not None:
                shards[name] = shards_of_map(maps[name], module.grid.model)
        except MapError as error:
            unknown.append(f"{name}: {error}")
    if unknown:
        raise SourceUnsupportedError(
            f"{directory}: cannot tell how {len(unknown)} of {len(local)} parameters are split across "
            f"{module.grid.model} tensor-parallel ranks",
            details=unknown,
            most_shown=MAX_NAMES,
            file=module.first.path,
            key=unknown[0].partition(": ")[0],
            why=f"{MAP_INFO} does not describe their blocks, and a wrong guess would give wrong weights",
            next_step="gather them in the job that saved the checkpoint (its layers know the split), and save them "
            "with torch.save",
        )
    return shards


def records_shards(module: ModuleStates) -> bool:
    """Whether the files have the blocks of parameters, and not only lists of patterns."""
    info = module.first.root.get(MAP_INFO)
    return isinstance(info, dict) and _AFFINE_MAP in info


def _info(directory: str, module: ModuleStates) -> StateDict:
    """``universal_checkpoint_info``, which all ranks have."""
    found = [file.root.get(MAP_INFO) for file in module.files]
    first = found[0]
    for file, info in zip(module.files, found, strict=True):
        if not equal(cast(Value, info), cast(Value, first)):
            raise contradiction(file.path, f"its {MAP_INFO} is not that of the first rank")
    if isinstance(first, dict):
        return first
    paths = [file.path for file in module.of_model_ranks]
    raise unsupported(directory, "tensor parallel ranks", paths, f"with {MAP_INFO}", "none in the files")


def _undescribed(
    directory: str, module: ModuleStates, info: StateDict, what: str, *, joined: bool
) -> SourceUnsupportedError:
    """The error for files with ``universal_checkpoint_info`` that does not say by blocks how parameters are cut."""
    paths = [file.path for file in module.of_model_ranks]
    by_names = info.get(_AFFINE_MAP) is None and not module.partitioned and not joined
    next_step = to_universal(directory) if by_names else IN_ITS_JOB  # it joins by patterns of names
    return unsupported(
        directory, "tensor parallel ranks", paths, f"{MAP_INFO}.{_AFFINE_MAP}", what, next_step=next_step
    )


def _local_shapes(module: ModuleStates) -> dict[str, dict[int, Shape]]:
    """The shapes of the shards of all parameters, trained or frozen, by model-parallel rank. Raises SourceCorruptError
    for parameters that a rank does not have.
    """
    buffers, aliases = module.buffers(), module.aliases()
    local: dict[str, dict[int, Shape]] = {}
    for file in module.of_model_ranks:
        frozen = file.root.get("frozen_param_shapes")
        shapes = {str(name): size_of(shape) for name, shape in frozen.items()} if isinstance(frozen, dict) else {}
        for key, value in file.module.items():
            name = str(key)
            if name not in buffers and name not in aliases and name not in shapes:
                shapes[name] = value.shape if isinstance(value, StoredTensor) else None
        shapes.update({name: shape for group in module.groups(file) for name, shape in group.items()})
        for name, shape in shapes.items():
            local.setdefault(name, {})[file.model_rank] = () if shape is None else shape
    for name, by_rank in local.items():
        if len(by_rank) != module.grid.model:
            absent = next(rank for rank in range(module.grid.model) if rank not in by_rank)
            raise contradiction(module.of_model_ranks[absent].path, f"it has no {name}, which another rank has")
    return local


def _reason(info: StateDict, name: str) -> str | None:
    """Why DeepSpeed says that a parameter cannot be joined."""
    reasons = info.get(_REASONS)
    for pattern, reason in reasons.items() if isinstance(reasons, dict) else ():
        if name_of(pattern) == name:
            return str(reason)[:200]
    return None


def _maps_by_name(info: Mapping[Key, object]) -> dict[str, object]:
    """The maps of ``universal_checkpoint_info`` by the name of the parameter. Raises MapError.

    A pattern is the name of one parameter, between ``^`` and ``$`` and escaped. No pattern is ever matched.
    """
    found = info.get(_AFFINE_MAP)
    if not isinstance(found, dict) or not isinstance(found.get("params"), dict):
        raise MapError(f"it has no {_AFFINE_MAP}")
    if found.get("version") != MAP_VERSION:
        raise MapError(f"its {_AFFINE_MAP} has version {found.get('version')!r}, and {MAP_VERSION} is known")
    maps: dict[str, object] = {}
    for pattern, of_parameter in found["params"].items():
        name = name_of(pattern)
        if name is None or name in maps:
            raise MapError(f"its {_AFFINE_MAP} has {pattern!r}, which is not the name of one parameter")
        maps[name] = of_parameter
    return maps


def shards_of_map(entry: object, model_ranks: int) -> Shards:
    """The shards of one parameter on ``model_ranks`` ranks, from its map. Raises MapError."""
    shape = _extents(_field(entry, "logical_shape"))
    ranks = _field(entry, "ranks")
    if not isinstance(ranks, dict) or set(ranks) != set(range(model_ranks)):
        raise MapError(f"it describes the ranks {list(ranks) if isinstance(ranks, dict) else ranks!r}"[:200])
    return Shards(shape, {rank: _shard(of_rank, shape) for rank, of_rank in sorted(ranks.items())})


def _shard(entry: object, whole: Shape) -> ModelShard:
    shape = _extents(_field(entry, "shard_shape"))
    entries = _field(entry, "pieces")
    if not isinstance(entries, (list, tuple)) or len(entries) > _MAX_PIECES or len(shape) != len(whole):
        raise MapError("it has no list of pieces with the dimensions of the parameter")
    pieces = tuple(_piece(each, shape, whole) for each in entries)
    boxes = [piece.shard for piece in pieces if piece.shard.numel]
    # Equal boxes count as replicas there; here each element of the shard is in one piece.
    if sum(box.numel for box in boxes) != prod(shape) or (boxes and not _tile(boxes, shape)):
        raise MapError(f"its pieces do not fill a shard of shape {list(shape)}")
    return ModelShard(shape, tuple(piece for piece in pieces if piece.shard.numel))


def _tile(boxes: Sequence[Box], shape: Shape) -> bool:
    zeros = [0] * len(boxes)
    starts, sizes = [box.offsets for box in boxes], [box.sizes for box in boxes]
    chunks = Chunks.rows(ndim=len(shape), rank=zeros, file=zeros, offset=zeros, start=starts, size=sizes)
    return not flaws(Tensor(DTYPES["uint8"], shape, chunks))


def _piece(entry: object, shard: Shape, whole: Shape) -> Piece:
    sizes = _extents(_field(entry, "shape"))
    if isinstance(entry, dict) and entry.get("scale", 1.0) != 1.0:
        raise MapError(f"its shards hold a block multiplied by {entry['scale']!r}")
    if len(sizes) != len(whole):
        raise MapError(f"a piece has {len(sizes)} dimensions, but the parameter has {len(whole)}")
    boxes = []
    for side, shape in (("dest", shard), ("source", whole)):
        place = _field(entry, side)
        if not isinstance(place, (list, tuple)) or len(place) != 2:
            raise MapError(f"a piece has no place in the {'shard' if side == 'dest' else 'parameter'}")
        boxes.append(_box(sizes, place[0], place[1], shape))
    return Piece(*boxes)


def _box(sizes: Shape, first: object, strides: object, shape: Shape) -> Box:
    """The box of ``shape`` whose first element has the number ``first``. Raises MapError for anything but a box."""
    if not is_count(first) or not isinstance(first, int) or _extents(strides) is None:
        raise MapError("the offset of a piece is not a number of elements")
    rows = contiguous_stride(shape)
    own = _extents(strides)
    if not prod(sizes):
        return Box((0,) * len(shape), sizes)
    if len(own) != len(shape) or any(
        size > 1 and step != row for size, step, row in zip(sizes, own, rows, strict=True)
    ):
        raise MapError("a piece is not a block of rows and columns")
    starts, rest = [], first
    for row in rows:
        start, rest = divmod(rest, row)
        starts.append(start)
    if any(start + size > extent for start, size, extent in zip(starts, sizes, shape, strict=True)):
        raise MapError(f"a piece ends outside of the shape {list(shape)}")
    return Box(tuple(starts), sizes)


def _field(entry: object, name: str) -> object:
    if not isinstance(entry, dict) or name not in entry:
        raise MapError(f"it has no {name}")
    return entry[name]


def _extents(value: object) -> Shape:
    if not isinstance(value, (list, tuple)) or len(value) > MAX_DIMENSIONS or not all(map(is_count, value)):
        raise MapError(f"{value!r} is not a shape"[:200])
    shape = tuple(map(int, value))
    if prod(shape) >= MAX_ELEMENTS:
        raise MapError(f"{list(shape)} is not a shape")
    return shape
