"""Splits state dicts into structure and tensors, compares and encodes structures, and copies state dicts.

``split_tensors`` collects the tensors of a state dict in one list and leaves a ``Slot`` in the place of each. It
descends into dicts, lists and tuples and keeps their types and those of keys; any other value stays where it is.

``encode`` makes a structure, or any value of a closed set of types, bytes: nothing that another worker sends is
executed. Layout: 8 bytes (length of the JSON, little-endian), the JSON, then the blobs one after another. The JSON is
that of ``ir.values`` with a few more types; it refers to bytes and arrays by their index among the blobs. Every value
comes back equal and of the same type.

A trainer that saves every few minutes reuses one state dict in host memory (``empty_on_cpu``). Pinned memory lets the
GPU compute while it is copied from; shared memory lets another process write the file. These copies need no
communication: sharded tensors keep their shards.
"""

from __future__ import annotations

import hashlib
import io
import json
import struct
import weakref
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias, cast

import numpy as np
import torch
from torch.distributed._shard.sharded_tensor.api import ShardedTensor

from fsdpckpt.comm.boxes import empty_like, kind_of, local_tensors
from fsdpckpt.comm.dtensor import DTensor
from fsdpckpt.comm.protocol import Group
from fsdpckpt.errors import InternalError, StateDictMismatchError, UsageError
from fsdpckpt.ir.values import Decoder, Encoder, Json, like


@dataclass(frozen=True, slots=True)
class Slot:
    """The place of tensor number ``index`` in a tree that is sent without its tensors."""

    index: int


def encode(value: object) -> bytes:
    """``value`` as bytes. Raises UsageError for a type that cannot be sent, with its path in ``value``."""
    encoder = _Encoder()
    tree = encoder.encode(value, "")
    header = json.dumps({"tree": tree, "blobs": [len(blob) for blob in encoder.blobs]}).encode()
    return b"".join([struct.pack("<q", len(header)), header, *encoder.blobs])


def decode(data: bytes) -> object:
    """The inverse of ``encode``. Raises InternalError for any other bytes."""
    try:
        (length,) = struct.unpack_from("<q", data)
        header = json.loads(data[8 : 8 + length])
        blobs, offset = [], 8 + length
        for size in header["blobs"]:
            blobs.append(data[offset : offset + size])
            offset += size
        return _Decoder(blobs).decode(header["tree"])
    except (KeyError, IndexError, TypeError, ValueError, struct.error) as error:
        raise InternalError(f"another worker sent a value that cannot be read back: {error!r}") from None


class _Encoder(Encoder):
    def __init__(self) -> None:
        super().__init__()
        self.blobs: list[bytes] = []

    def encode_bytes(self, data: bytes) -> Json:
        self.blobs.append(data)
        return len(self.blobs) - 1

    def encode_other(self, value: object, where: str) -> Json:
        encode = _ENCODERS.get(type(value))
        if encode is not None:
            return encode(self, value, where)
        kind, plain_form = f"{type(value).__module__}.{type(value).__qualname__}", "its state_dict()"
        if isinstance(value, (np.ndarray, np.generic)):
            data = value.tobytes()
            if _arrives(value, data):
                tag = "$array" if isinstance(value, np.ndarray) else "$number"
                return {tag: [value.dtype.str, list(value.shape), self.encode_bytes(data)]}
            kind, plain_form = f"{kind} and dtype {value.dtype}", "numbers, text and lists with tolist()"
        raise UsageError(
            f"a value of type {kind} cannot be sent between workers",
            key=where.removeprefix(".") or None,
            why="only plain values do: numbers, text, bytes, lists, dicts, dtypes, plain arrays: objects may run code",
            next_step=f"leave it out, or turn it into {plain_form}",
        )


def _arrives(value: np.ndarray[Any, Any] | np.generic, data: bytes) -> bool:
    """Whether ``decode`` makes a value of the same type and dtype: not of NumPy's subclasses, nor ml_dtypes."""
    if value.dtype.kind not in "biufcSV" or value.dtype.names or not value.dtype.itemsize:
        return False
    array = _array(value.dtype.str, value.shape, data)
    copy = array if isinstance(value, np.ndarray) else array[()]
    return type(copy) is type(value) and copy.dtype == value.dtype


def _array(code: str, shape: Sequence[int], data: bytes | bytearray) -> np.ndarray[Any, Any]:
    return np.frombuffer(data, np.dtype(code)).reshape(shape)


_ENCODERS: dict[type, Callable[[_Encoder, Any, str], Json]] = {
    torch.Size: lambda _, value, where: {"$size": list(value)},
    frozenset: lambda encoder, value, where: {"$frozenset": encoder.encode_items(value, where)},
    torch.dtype: lambda _, value, where: {"$dtype": str(value).removeprefix("torch.")},
    torch.device: lambda _, value, where: {"$device": str(value)},
    Slot: lambda _, value, where: {"$slot": value.index},
    io.BytesIO: lambda encoder, value, where: {"$file": encoder.encode_bytes(value.getvalue())},
}


class _Decoder(Decoder):
    def __init__(self, blobs: list[bytes]) -> None:
        super().__init__()
        self._blobs = blobs

    def decode_bytes(self, data: Json) -> bytes:
        return self._blobs[int(data)]  # type: ignore[arg-type]  # a number, by encode

    def decode_other(self, tag: str, data: Json) -> object:
        return _DECODERS[tag](self, data)

    def array(self, data: Json) -> np.ndarray[Any, Any]:
        code, shape, blob = cast("list[Any]", data)
        return _array(str(code), shape, bytearray(self.decode_bytes(blob)))  # which can be written to


def _dtype(data: Json) -> torch.dtype:
    dtype = getattr(torch, str(data), None)
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"this torch has no dtype {data}")
    return dtype


_DECODERS: dict[str, Callable[[_Decoder, Json], object]] = {
    "$size": lambda decoder, data: torch.Size(decoder.decode_items(data)),
    "$frozenset": lambda decoder, data: frozenset(decoder.decode_items(data)),
    "$dtype": lambda _, data: _dtype(data),
    "$device": lambda _, data: torch.device(str(data)),
    "$slot": lambda _, data: Slot(int(data)),  # type: ignore[arg-type]
    "$file": lambda decoder, data: io.BytesIO(decoder.decode_bytes(data)),
    "$array": lambda decoder, data: decoder.array(data),
    "$number": lambda decoder, data: decoder.array(data)[()],
}


StateDict: TypeAlias = dict[str, object]


@dataclass(frozen=True, slots=True)
class Tree:
    """A split state dict: ``skeleton`` has ``Slot(i)`` for ``tensors[i]``, whose dotted key is ``keys[i]``.

    Where two tensors have one dotted key, as in ``{"a.b": x, "a": {"b": y}}``, their keys show the types of all parts.
    """

    skeleton: object
    keys: tuple[str, ...]
    tensors: tuple[torch.Tensor, ...]


def split_tensors(state: object) -> Tree:
    """Split ``state``; the tensors are in the order of the dicts. Raises UsageError for a tensor in a container of
    another type, which would stay as it is.
    """
    paths: list[_Path] = []
    tensors: list[torch.Tensor] = []

    def visit(value: object, path: _Path) -> object:
        if isinstance(value, torch.Tensor):
            paths.append(path)
            tensors.append(value)
            return Slot(len(tensors) - 1)
        if _has_tensors(value):
            raise UsageError(
                f"a {type(value).__module__}.{type(value).__qualname__} with tensors in it cannot be taken apart",
                key=_dotted(path, str),
                next_step="make it a dict, a list or a tuple",
            )
        return value

    skeleton = _map_leaves(state, visit, ())
    keys = [_dotted(path, str) for path in paths]
    counts = Counter(keys)
    unique = [key if counts[key] == 1 else _dotted(path, repr) for key, path in zip(keys, paths, strict=True)]
    return Tree(skeleton, tuple(unique), tuple(tensors))


def _has_tensors(value: object) -> bool:
    if isinstance(value, (Mapping, list, tuple, set, frozenset, deque)):
        return any(map(_has_tensors, value.values() if isinstance(value, Mapping) else value))
    return isinstance(value, torch.Tensor)


def join_tensors(skeleton: object, tensors: Sequence[torch.Tensor]) -> StateDict:
    """The inverse of ``split_tensors``: the state dict with ``tensors`` in the slots of ``skeleton``."""

    def filled(value: object, _: object) -> object:
        return tensors[value.index] if isinstance(value, Slot) else value

    return cast("StateDict", _map_leaves(skeleton, filled, ()))


_Path: TypeAlias = tuple[object, ...]
"""Keys of dicts, and a ``Slot`` for each index of a list or tuple."""


def _dotted(path: _Path, text: Callable[[object], str]) -> str:
    return "".join(f"[{part.index}]" if isinstance(part, Slot) else f".{text(part)}" for part in path).removeprefix(".")


def _map_leaves(value: object, visit: Callable[[object, _Path], object], path: _Path) -> object:
    if type(value) in {dict, OrderedDict, defaultdict}:
        mapping: dict[object, object] = value  # type: ignore[assignment]  # by the exact type
        entries = {name: _map_leaves(child, visit, (*path, name)) for name, child in mapping.items()}
        if isinstance(mapping, defaultdict):
            return defaultdict(mapping.default_factory, entries)
        return like(mapping, entries)  # with torch's _metadata
    named: Any = type(value) if isinstance(value, tuple) and hasattr(value, "_fields") else None
    if type(value) in {list, tuple} or named:
        children = [_map_leaves(child, visit, (*path, Slot(i))) for i, child in enumerate(value)]  # type: ignore[arg-type,var-annotated]
        if named:
            return named._make(children)
        return children if type(value) is list else tuple(children)
    return visit(value, path)


Description: TypeAlias = dict[str, str]
"""Dotted key to a description of the value: ``DTensor [5, 3] float32``, ``int``, ``dict of 2``."""

MAX_DIFFERENCES = 200  # differences listed in one message, which also gives their total number


def describe(state: object, *, plain_shapes: bool = True, layouts: bool = False) -> Description:
    """The structure of ``state``. ``plain_shapes`` False: without shapes and dtypes of plain tensors. ``layouts``: with
    the part of each sharded tensor that this rank holds.

    Keys that are not strings are shown by their ``repr``, and so are strings of digits, so that 0 and "0" differ.
    """
    description: Description = {}

    def visit(value: object, key: str) -> None:
        while key in description:  # {"a.b": x, "a": {"b": y}}
            key += "'"
        if isinstance(value, torch.Tensor):
            kind = kind_of(value)
            full = f"{kind} {list(value.shape)} {str(value.dtype).removeprefix('torch.')}"
            description[key] = full if plain_shapes or kind != "Tensor" else kind
            description[key] += _layout(value) if layouts else ""
        elif isinstance(value, Mapping):
            description[key] = f"dict of {len(value)}"
            for name, child in value.items():
                part = name if isinstance(name, str) and not name.isdigit() else repr(name)
                visit(child, f"{key}.{part}" if key else part)
        elif isinstance(value, (list, tuple)):
            description[key] = f"{type(value).__name__} of {len(value)}"
            for index, child in enumerate(value):
                visit(child, f"{key}[{index}]")
        else:
            description[key] = type(value).__name__

    visit(state, "")
    return description


def _layout(tensor: torch.Tensor) -> str:
    """Which part of ``tensor`` this rank holds; empty for a plain tensor, which is whole."""
    if isinstance(tensor, DTensor):
        return f" placed {list(tensor.placements)} on ranks {tensor.device_mesh.mesh.tolist()}"
    if isinstance(tensor, ShardedTensor):
        shards = [shard.metadata for shard in tensor.local_shards()]
        return f" with shards {[(list(shard.shard_offsets), list(shard.shard_sizes)) for shard in shards]}"
    return ""


def differences(left: Description, right: Description, names: tuple[str, str]) -> list[str]:
    """Every difference, one line each. A dict is not listed itself if only its entries differ."""
    lines = [f"{key}: only in {names[0]} ({text})" for key, text in left.items() if key not in right]
    lines += [f"{key}: only in {names[1]} ({text})" for key, text in right.items() if key not in left]
    for key, text in left.items():
        if key in right and text != right[key] and not (text.startswith("dict of") and "dict of" in right[key]):
            lines.append(f"{key or 'the whole'}: {text} in {names[0]}, {right[key]} in {names[1]}")
    return lines


def check_similar(state: object, companion: object) -> None:
    """Raises StateDictMismatchError unless both have the same keys, kinds, shapes and dtypes."""
    _raise_differences(describe(state), describe(companion))


def _raise_differences(state: Description, other: Description) -> None:
    _raise_mismatch(differences(state, other, ("the state dict", "the other")))


def agree_on_structure(group: Group, state: object, problems: list[str], *, to: int | None) -> None:
    """Collective. Raises the same StateDictMismatchError on all ranks if any has ``problems`` with its ``state``, or
    if the structures of their state dicts differ; UsageError if ``to`` differs, or is not a rank.

    Plain tensors may differ in shape and dtype from rank to rank.
    """
    description = {} if problems else describe(state, plain_shapes=False)
    digest = hashlib.sha256(json.dumps(description).encode()).hexdigest()
    gathered = cast(
        "list[tuple[str, list[str], Any]]", group.all_gather_objects((digest, problems, to), name="compare structures")
    )
    if {rank_to for *_, rank_to in gathered} != {None}:
        group.check_rank("to", [rank_to for *_, rank_to in gathered])
    _raise_merged([rank_problems for _, rank_problems, _ in gathered])
    if len({rank_digest for rank_digest, *_ in gathered}) == 1:
        return
    descriptions = cast("list[Description]", group.all_gather_objects(description, name="list the differences"))
    lines: list[str] = []
    for rank, other in enumerate(descriptions[1:], 1):
        lines += differences(descriptions[0], other, ("rank 0", f"rank {rank}"))
    _raise_mismatch(lines or ["the keys are in a different order"])


@contextmanager
def collected(problems: list[str], key: str = "") -> Iterator[None]:
    """Add a UsageError of the body to ``problems``: if only one rank raised it, the others would wait."""
    try:
        yield
    except UsageError as error:
        text = error.what if error.next_step is None else f"{error.what}: {error.next_step}"
        where = key or error.key
        problems.append(f"{where}: {text}" if where else text)


def raise_on_all_ranks(group: Group, problems: list[str]) -> None:
    """Collective. Raises StateDictMismatchError with the ``problems`` of all ranks on every rank, if there are any."""
    _raise_merged(cast("list[list[str]]", group.all_gather_objects(problems, name="compare structures")))


def _raise_merged(problems_by_rank: Sequence[Sequence[str]]) -> None:
    ranks_by_problem: dict[str, list[int]] = {}
    for rank, problems in enumerate(problems_by_rank):
        for problem in problems:
            ranks_by_problem.setdefault(problem, []).append(rank)
    everywhere = len(problems_by_rank)
    _raise_mismatch(
        [
            problem if len(ranks) == everywhere else f"{problem} (rank {ranks[0]})"
            for problem, ranks in ranks_by_problem.items()
        ]
    )


def _raise_mismatch(problems: list[str]) -> None:
    if not problems:
        return
    more = [f"and {len(problems) - MAX_DIFFERENCES} more"] if len(problems) > MAX_DIFFERENCES else []
    raise StateDictMismatchError(
        f"the state dicts do not match: {len(problems)} difference{'s' if len(problems) > 1 else ''}",
        details=[*problems[:MAX_DIFFERENCES], *more],
        next_step="build the same model and optimizer on every rank, wrapped the same way",
    )


def empty_on_cpu(state: StateDict, *, pin: bool = False, share: bool = False) -> StateDict:
    """A state dict with the structure of ``state`` and new, uninitialized tensors in host memory.

    ``pin``: page-locked, if torch supports that (it needs a GPU). ``share``: visible to other processes.
    """
    tree = split_tensors(state)
    make = partial(_host_memory, pin=pin, share=share)
    return join_tensors(tree.skeleton, [empty_like(tensor, make) for tensor in tree.tensors])


def copy_state_dict(state: StateDict, into: StateDict, *, non_blocking: bool = False) -> StateDict:
    """Copy every tensor of ``state`` to the one with the same key in ``into``; return ``state`` with the copies.

    Raises StateDictMismatchError, which lists every difference, before anything is copied; sharded tensors have to be
    sharded in the same way. ``non_blocking``: copies to pinned memory may still be running on return; synchronize the
    device before reading them.
    """
    _raise_differences(describe(state, layouts=True), describe(into, layouts=True))
    tree, target = split_tensors(state), split_tensors(into)
    target_by_key = dict(zip(target.keys, target.tensors, strict=True))
    copies = [target_by_key[key] for key in tree.keys]
    parts: list[tuple[torch.Tensor, torch.Tensor]] = []
    problems: list[str] = []
    for key, source, copy in zip(tree.keys, tree.tensors, copies, strict=True):
        with collected(problems, key):
            parts += zip(local_tensors(source), local_tensors(copy), strict=True)
    _raise_mismatch(problems)
    with torch.no_grad():
        for source_part, part in parts:
            part.copy_(source_part, non_blocking=non_blocking)
    return join_tensors(tree.skeleton, copies)


def offload_to_cpu(state: StateDict) -> StateDict:
    """A copy of ``state`` in host memory; tensors that are already on the CPU are copied too."""
    return copy_state_dict(state, empty_on_cpu(state))


def _host_memory(shape: Sequence[int], dtype: torch.dtype, *, pin: bool, share: bool) -> torch.Tensor:
    can_pin = pin and torch.cuda.is_available() and 0 not in shape
    tensor = torch.empty(shape, dtype=dtype, pin_memory=can_pin and not share)
    if share:
        tensor.share_memory_()  # type: ignore[no-untyped-call]
    if can_pin and share:
        # Shared memory cannot be allocated pinned: allocate it, then let the driver lock its pages.
        runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        address = tensor.data_ptr()
        torch.cuda.check_error(int(runtime.cudaHostRegister(address, tensor.numel() * dtype.itemsize, 0)))
        weakref.finalize(tensor.untyped_storage(), runtime.cudaHostUnregister, address)
    return tensor
