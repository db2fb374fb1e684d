"""Pickles of files that people load themselves: ``torch.load`` takes them by default (``formats.torch.loadable``)."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from fsdpckpt.formats.pickle.write import PickleWriter, TensorHook, integer, integers
from fsdpckpt.formats.torch.loadable import ARRAY, Array, array_of, encoded, is_class, is_loadable
from fsdpckpt.ir.tensors import contiguous_stride
from fsdpckpt.ir.values import Global, Object, Value

__all__ = ["LoadablePickle"]


class LoadablePickle(PickleWriter):
    """``record`` keeps the elements of a NumPy array, and says under which key."""

    def __init__(self, tensors: TensorHook, record: Callable[[bytes], str]) -> None:
        super().__init__(tensors)
        self._record = record
        self.numbers = False  # whether NumPy numbers were written as Python numbers
        self._stand_ins: dict[int, tuple[Value, Value]] = {}  # what is said otherwise, kept: ids stay theirs

    def _object(self, value: Object) -> None:
        array = None if is_class(value.function) else array_of(value)
        if value.number is not None:
            self.numbers = True
            self.value(value.number.item())
        elif array is not None:
            self._array(value, array)
        elif is_class(value.function):
            super()._object(value)
        else:
            self._encoded(value)

    def _global(self, value: Global) -> None:
        if is_class(value) or is_loadable(value):
            super()._global(value)
        else:
            self._encoded(value)

    def _dict(self, value: dict[Value, Value]) -> None:
        if all(map(is_loadable, value)):
            super()._dict(value)
        else:
            self._encoded(value)  # type: ignore[arg-type]  # its keys are keys

    def _ordered_dict(self, value: OrderedDict[Value, Value]) -> None:
        if all(map(is_loadable, value)):
            super()._ordered_dict(value)
        else:
            self._encoded(value)  # type: ignore[arg-type]  # its keys are keys

    def _set(self, value: set[Any]) -> None:
        if all(map(is_loadable, value)):
            super()._set(value)
        else:
            self._encoded(value)

    def _encode(self, data: bytes) -> None:
        if data:
            super()._encode(data)
        else:  # pickle calls ``bytes``, which is refused
            self.out += self.name("_codecs", "encode") + self.text("") + self.text("latin1") + b"\x86R"

    def _encoded(self, value: Value) -> None:
        known = self._stand_ins.get(id(value))
        if known is None:
            known = self._stand_ins[id(value)] = value, encoded(value)
        self.value(known[1])

    def _array(self, value: Object, array: Array) -> None:
        """A tensor with an attribute: ``_rebuild_from_type_v2(_rebuild_tensor_v2, Tensor, (storage, ...), {...})``."""
        if self._fetch(value):
            return
        dtype = array.dtype
        function = "_rebuild_tensor_v2" if dtype.storage is not None else "_rebuild_tensor_v3"
        self.out += self.name("torch._tensor", "_rebuild_from_type_v2") + b"("
        self.out += self.name("torch._utils", function) + self.name("torch", "Tensor") + b"(("
        self.out += self.text("storage")
        if dtype.storage is not None:
            self.out += self.name("torch", dtype.storage)
        else:
            self.out += self.name("torch.storage", "UntypedStorage")
        elements = len(array.data) if dtype.storage is None else len(array.data) // dtype.itemsize
        self.out += self.text(self._record(array.data)) + self.text("cpu") + integer(elements) + b"tQ" + integer(0)
        self.out += integers(array.shape) + integers(contiguous_stride(array.shape))
        self.out += b"\x89" + self.name("collections", "OrderedDict") + b")R"
        if dtype.storage is None:
            self.out += self.name("torch", dtype.name)
        self.out += b"t}" + self.text(ARRAY) + self.text(array.call) + b"stR"
        self._remember(value)
