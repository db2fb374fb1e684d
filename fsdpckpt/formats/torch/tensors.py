"""Builds the tensors that a torch pickle describes: locates each in its file and validates it, loads none.

Follows ``torch.serialization``'s ``persistent_load`` (a storage is the record ``data/<key>``) and the rebuild functions
of ``torch._utils`` and ``torch._tensor``. A tensor that is not plain strided data becomes a ``Refused`` mark, so that
the walk over the tree can name its key.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from typing import NoReturn, cast

from fsdpckpt.errors import COPY_AGAIN, damaged
from fsdpckpt.formats.torch.loadable import ARRAY, has_valid_digest
from fsdpckpt.formats.zip import ZipRecord
from fsdpckpt.ir.dtypes import DTYPES, MAX_DIMENSIONS, STORAGE_DTYPES, DType
from fsdpckpt.ir.tensors import contiguous_stride
from fsdpckpt.ir.values import Global, Object
from fsdpckpt.text import bytes_text, truncate

_CLONED = "_has_been_cloned"  # FSDP1 marks what it gathered into a full state dict
_SHAPES_KEPT = 256  # checked shapes, with their strides: a model has few
_LARGEST_STRIDE = 1 << 59  # as the number of elements
_HARMLESS_ATTRIBUTES = frozenset({_CLONED, "_is_param", "_is_buffer", "persistent"})

# Rebuild functions whose result is not one strided tensor, and what that is.
_NOT_STRIDED = {
    "_rebuild_sparse_tensor": "a sparse tensor",
    "_rebuild_sparse_csr_tensor": "a sparse tensor",
    "_rebuild_nested_tensor": "a nested tensor",
    "_rebuild_qtensor": "a quantized tensor",
    "_rebuild_meta_tensor_no_storage": "a meta tensor, which has no data",
    "_rebuild_device_tensor_from_numpy": "a tensor of another device, saved as a numpy array",
}


class _Stateless:
    """A value that a pickle may hold but not change: BUILD is refused."""

    __slots__ = ()

    def __setstate__(self, _state: object) -> None:
        raise TypeError("a tensor has no state")


@dataclass(slots=True, eq=False)
class _Storage(_Stateless):
    """One storage: ``dtype`` None if untyped; ``offset`` and ``nbytes`` of its bytes in the file."""

    dtype: DType | None
    offset: int
    nbytes: int


@dataclass(slots=True, eq=False)
class StoredTensor(_Stateless):
    """One strided tensor. ``offset``: byte offset of its first element in the file; ``stride`` in elements.

    ``sharded`` as in ``ir.tensors.Tensor``; ``cloned``: it has the mark of an FSDP1 full state dict; ``array``: the
    call that makes the NumPy array it stands for (``formats.torch.loadable``), "" if it is a tensor.
    """

    dtype: DType
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    sharded: bool | None = None
    cloned: bool = False
    array: str = ""


@dataclass(slots=True, eq=False)
class Wrapped(_Stateless):
    """A tensor subclass that wraps others (DTensor, ShardedTensor): its class, dtype, global shape and state."""

    kind: Global
    dtype: DType
    shape: tuple[int, ...]
    state: object


@dataclass(slots=True, eq=False)
class Refused(_Stateless):
    """A value that this program does not convert, and a description of it."""

    what: str


def size_of(value: object) -> tuple[int, ...] | None:
    """A tuple of sizes, plain or as ``torch.Size``; None if it is neither."""
    if isinstance(value, Object) and value.function.name == "Size" and len(value.args) == 1:
        value = value.args[0]
    if isinstance(value, (tuple, list)) and all(type(n) is int and n >= 0 for n in value):
        return cast("tuple[int, ...]", tuple(value))
    return None


class TensorBuilder:
    """The ``TensorResolver`` of one archive: ``records`` are those of the zip, ``file`` is its name in messages."""

    def __init__(self, records: Mapping[str, ZipRecord], file: str) -> None:
        self._records = records
        self._file = file
        self._storages: dict[tuple[str, str, int], _Storage | Refused] = {}
        self._shapes: dict[tuple[object, object], tuple[tuple[int, ...], tuple[int, ...], int]] = {}
        self.any_cloned = False
        self.dropped: set[str] = set()

    def storage(self, persistent_id: object) -> object:
        """The storage of ``("storage", type, key, location, number of elements)``."""
        if not (isinstance(persistent_id, tuple) and len(persistent_id) == 5 and persistent_id[0] == "storage"):
            self._corrupt("a storage is named in an unknown way", "('storage', ...)", truncate(persistent_id))
        _, kind, key, _, numel = persistent_id
        if not (isinstance(kind, Global) and isinstance(key, str) and type(numel) is int and numel >= 0):
            self._corrupt("a storage is named in an unknown way", "('storage', ...)", truncate(persistent_id))
        known = self._storages.get((kind.name, key, numel))
        if known is None:
            known = self._storages[kind.name, key, numel] = self._locate(kind, key, numel)
        return known

    def _locate(self, kind: Global, key: str, numel: int) -> _Storage | Refused:
        dtype = STORAGE_DTYPES.get(kind.name)
        if dtype is None and kind.name != "UntypedStorage":
            return Refused(f"a tensor on torch.{kind.name}, a quantized type")
        record = self._records.get(f"data/{key}")
        if record is None:
            self._corrupt(f"the record data/{key} is missing", "one record for each storage", "none")
        nbytes = numel * (dtype.itemsize if dtype is not None else 1)
        if nbytes > record.nbytes:
            self._corrupt(f"the record data/{key} is too short", bytes_text(nbytes), bytes_text(record.nbytes))
        return _Storage(dtype, record.offset, nbytes)

    def rebuild(self, function: str, arguments: tuple[object, ...]) -> object:
        """The result of torch's rebuild function ``function`` for ``arguments``."""
        if function == "_rebuild_tensor_v2":
            return self._tensor(arguments, None, arguments[6] if len(arguments) > 6 else None)
        rule = _RULES.get(function)
        if rule is None:
            return Refused(_NOT_STRIDED.get(function, f"a tensor made by {function}"))
        return rule(self, arguments)

    def _tensor(self, arguments: tuple[object, ...], named: object, flags: object) -> object:
        storage, first, size, stride = arguments[:4]
        if isinstance(storage, Refused):
            return storage
        if not isinstance(storage, _Storage):
            self._corrupt("a tensor has no storage", "a storage", type(storage).__name__)
        if flags:
            return Refused("a lazily conjugated or negated tensor (call resolve_conj() or resolve_neg() before saving)")
        dtype = DTYPES.get(named.name) if isinstance(named, Global) else storage.dtype
        if dtype is None:
            if named is None:
                dtype = DTYPES["uint8"]
            else:
                return Refused(f"a tensor of type {named}")
        known = self._shapes.get((size, stride))
        if known is None:
            if len(self._shapes) >= _SHAPES_KEPT:  # a file may be made of shapes that have one hash
                self._shapes.clear()
            known = self._shapes[size, stride] = self._shape(size, stride)
        shape, strides, extent = known
        if type(first) is not int or first < 0:
            self._corrupt("a tensor has no valid storage offset", "a number", truncate(first))
        if extent and (first + extent) * dtype.itemsize > storage.nbytes:
            self._corrupt(
                f"a tensor of shape {shape} and stride {strides} does not fit its storage",
                f"{(first + extent) * dtype.itemsize} bytes",
                f"{storage.nbytes}",
            )
        return StoredTensor(dtype, shape, strides, storage.offset + first * dtype.itemsize)

    def _shape(self, size: object, stride: object) -> tuple[tuple[int, ...], tuple[int, ...], int]:
        """(shape, stride, elements from the first to the last one's end), validated."""
        shape, strides = size_of(size), size_of(stride)
        if shape is None or strides is None or len(shape) != len(strides):
            self._corrupt("a tensor has no valid shape", "sizes and strides", f"{truncate(size)}, {truncate(stride)}")
        if len(shape) > MAX_DIMENSIONS or prod(filter(None, shape)) >= 1 << 59:  # times the largest element: 2**63
            self._corrupt("a tensor is larger than any can be", f"{MAX_DIMENSIONS} dimensions", truncate(shape))
        extent = 0 if 0 in shape else 1 + sum((n - 1) * step for n, step in zip(shape, strides, strict=True))
        if max(strides, default=0) > _LARGEST_STRIDE:  # of a dimension in which no step is taken
            rows = zip(shape, strides, contiguous_stride(shape), strict=True)
            strides = tuple(step if n > 1 and extent else contiguous for n, step, contiguous in rows)
        return shape, strides, extent

    def _parameter(self, arguments: tuple[object, ...]) -> object:
        made = arguments[0]
        if isinstance(made, StoredTensor):
            made.sharded = True
        if len(arguments) > 3 and isinstance(arguments[3], dict):
            self.dropped.update(map(str, arguments[3]))
        return made

    def _typed(self, arguments: tuple[object, ...]) -> object:
        function, kind, inner, state = arguments
        if not (isinstance(function, Global) and isinstance(kind, Global) and isinstance(inner, tuple)):
            self._corrupt("a tensor is rebuilt in an unknown way", "a function and a type", truncate(function))
        if function.name == "_rebuild_wrapper_subclass":
            dtype = DTYPES.get(inner[1].name) if isinstance(inner[1], Global) else None
            shape = size_of(inner[2])
            if dtype is None or shape is None:
                return Refused(f"a {kind.name} of type {inner[1]!s:.60}")
            return Wrapped(kind, dtype, shape, state)
        made = self.rebuild(function.name, inner)
        if isinstance(made, StoredTensor):
            self._mark(made, kind, state)
        return made

    def _mark(self, made: StoredTensor, kind: Global, state: object) -> None:
        """Read from a tensor's Python attributes whether FSDP shards it; record the names of the other attributes."""
        if isinstance(state, tuple) and state:
            state = state[0]
        attributes = state if isinstance(state, dict) else {}
        array = attributes.get(ARRAY)
        if has_valid_digest(array):
            made.array = str(array)
        if attributes.get(_CLONED) is True:
            made.cloned = made.sharded = self.any_cloned = True
        elif kind.name == "Parameter" or attributes.get("_is_param") is True:
            made.sharded = True
        elif kind.name == "Buffer" or attributes.get("_is_buffer") is True:
            made.sharded = False
        known = {*_HARMLESS_ATTRIBUTES, ARRAY} if made.array else _HARMLESS_ATTRIBUTES
        self.dropped.update(str(name) for name in attributes if name not in known)

    def _corrupt(self, what: str, expected: str, found: str) -> NoReturn:
        why = "the file is damaged, or was changed after it was saved"
        raise damaged(self._file, what, expected, found, why=why, next_step=COPY_AGAIN, run_again=True)


# What ``rebuild`` does for functions other than ``_rebuild_tensor_v2``, which nearly every tensor has.
_RULES: Mapping[str, Callable[[TensorBuilder, tuple[object, ...]], object]] = {
    "_rebuild_tensor": lambda builder, arguments: builder._tensor(arguments, None, None),
    "_rebuild_tensor_v3": lambda builder, arguments: builder._tensor(
        arguments, arguments[6], arguments[7] if len(arguments) > 7 else None
    ),
    "_rebuild_parameter": TensorBuilder._parameter,
    "_rebuild_parameter_with_state": TensorBuilder._parameter,
    "_rebuild_from_type": TensorBuilder._typed,
    "_rebuild_from_type_v2": TensorBuilder._typed,
    "_rebuild_device_tensor_from_cpu_tensor": lambda _, arguments: arguments[0],
}
