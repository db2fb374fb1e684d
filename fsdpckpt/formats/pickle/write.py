"""Writes checkpoint values as protocol-2 pickles, as ``torch.save`` does, from the closed set the reader accepts.

The opcodes of plain values, dicts and tensors are those of ``pickle`` (protocol 2, the batches of its C implementation,
``torch``'s persistent ids), except for what ``opcodes`` leaves out, and for sets: they are written in sorted order, so
that a checkpoint gives the same bytes in every process. A name outside ``allowlist`` is refused.
"""

from __future__ import annotations

import struct
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any

from fsdpckpt import flags
from fsdpckpt.errors import InternalError, SourceUnsupportedError
from fsdpckpt.formats.pickle.allowlist import kind_of
from fsdpckpt.formats.pickle.opcodes import TUPLE_ENDS, PickleOpcodes, StorageView, flag, integer
from fsdpckpt.ir.quantized import Blockwise, joined_states
from fsdpckpt.ir.tensors import Tensor, contiguous_stride
from fsdpckpt.ir.torchao import SCALE
from fsdpckpt.ir.values import Global, Object, Value

# pickle's batch size: longer lists and dicts are appended in several steps.
_BATCH = 1000

TensorHook = Callable[[Tensor], StorageView]


def dumps(value: Value, tensors: TensorHook | None = None) -> bytes:
    """``value`` as one pickle; ``tensors`` returns where each tensor in it is stored."""
    writer = PickleWriter(tensors)
    writer.value(value)
    return writer.finish()


class PickleWriter(PickleOpcodes):
    """Writes checkpoint values into one pickle; ``tensors`` returns where each tensor in them is stored."""

    def __init__(self, tensors: TensorHook | None = None) -> None:
        super().__init__()
        self._tensors = tensors
        self._shared: dict[int, bytes] = {}
        self._open: set[int] = set()
        self._writers: dict[type, Callable[[Any], None]] = {
            type(None): lambda _: self.raw(b"N"),
            bool: lambda value: self.raw(flag(value)),
            int: lambda value: self.raw(integer(value)),
            float: lambda value: self.raw(b"G" + struct.pack(">d", value)),
            str: lambda value: self.raw(self.text(value)),
            complex: self._complex,
            bytes: self._bytes,
            bytearray: self._bytearray,
            list: self._list,
            tuple: self._tuple,
            dict: self._dict,
            OrderedDict: self._ordered_dict,
            set: self._set,
            Global: self._global,
            Object: self._object,
            Tensor: self.tensor,
            Blockwise: self.blockwise,
        }

    def value(self, value: Value | Blockwise) -> None:
        """Any checkpoint value.

        Raises InternalError for another type or a name the reader would refuse, SourceUnsupportedError for a
        value that contains itself.
        """
        write = self._writers.get(type(value))
        if write is None:
            raise InternalError(f"a value of type {type(value).__name__} cannot be written as a pickle")
        write(value)

    def _complex(self, value: complex) -> None:
        self.out += self.name("builtins", "complex")
        self.value(value.real)
        self.value(value.imag)
        self.out += b"\x86R"

    def _bytes(self, value: bytes) -> None:
        if not self._refer(value):
            self._encode(value)
            self._remember(value)

    def _encode(self, data: bytes) -> None:
        # Protocol 2 has no bytes: pickle writes them as Latin-1 text to encode.
        if not data:
            self.out += self.name("builtins", "bytes") + b")R"
            return
        self.out += self.name("_codecs", "encode")
        self.out += self.text(data.decode("latin-1"))
        self.out += self.text("latin1") + b"\x86R"

    def _bytearray(self, value: bytearray) -> None:
        if self._refer(value):
            return
        self.out += self.name("builtins", "bytearray")
        if value:
            self._encode(bytes(value))
            self.out += b"\x85R"
        else:
            self.out += b")R"
        self._remember(value)

    def _list(self, value: list[Value]) -> None:
        if self._refer(value):
            return
        self.out += b"]"
        self._remember(value)
        with self._guard_recursion(value):
            self._appends(value)

    def _tuple(self, value: tuple[Value, ...]) -> None:
        if not value:
            self.out += b")"
            return
        if self._refer(value):
            return
        with self._guard_recursion(value):
            self._items(value)
        self._remember(value)

    def _items(self, values: Sequence[Value]) -> None:
        """A tuple of ``values``, not memoised."""
        if not values:
            self.out += b")"
        elif len(values) <= 3:
            for item in values:
                self.value(item)
            self.out += TUPLE_ENDS[len(values)]
        else:
            self.out += b"("
            for item in values:
                self.value(item)
            self.out += b"t"

    def _dict(self, value: dict[Value, Value]) -> None:
        if self._refer(value):
            return
        self.out += b"}"
        self._remember(value)
        with self._guard_recursion(value):
            items = list(joined_states(value))
            if len(items) == 1:
                self._pairs(items, b"s")
            elif items:
                pairs = iter(items)
                for _ in range(len(items) // _BATCH + 1):  # pickle follows a full batch by another, even an empty one
                    self.out += b"("
                    self._pairs(islice(pairs, _BATCH), b"u")

    def _ordered_dict(self, value: OrderedDict[Value, Value]) -> None:
        if self._refer(value):
            return
        self.out += self.name("collections", "OrderedDict") + b")R"
        self._remember(value)
        with self._guard_recursion(value):
            self._setitems(list(joined_states(value)))
            attributes: Value = vars(value)  # type: ignore[assignment]  # a dict of str is one of Key
            if attributes:
                self.value(attributes)
                self.out += b"b"

    def _set(self, value: set[Any]) -> None:
        if self._refer(value):
            return
        self.out += self.name("builtins", "set") + b"]"
        # Sets have no order, and that of strings changes from run to run: sorting gives the same bytes every time.
        self._appends(sorted(value, key=lambda item: (type(item).__name__, repr(item))))
        self.out += b"\x85R"
        self._remember(value)

    def _global(self, value: Global) -> None:
        if kind_of(value.module, value.name) is None:
            raise InternalError(f"{value} is outside the names a checkpoint may hold", key=str(value))
        outer, _, inner = value.name.rpartition(".")
        if not outer:
            self.out += self.name(value.module, value.name)
            return
        # Protocol 2 has no dotted names: a nested class is an attribute of its outer one.
        self.out += self.name("builtins", "getattr") + self.name(value.module, outer) + self.text(inner) + b"\x86R"

    def _object(self, value: Object) -> None:
        if self._refer(value):
            return
        with self._guard_recursion(value):
            self._global(value.function)
            self._items(value.args)
            self.out += b"\x81" if value.new else b"R"
            self._remember(value)
            self._appends(value.items)
            self._setitems(value.entries)
            if value.has_state:
                self.value(value.state)
                self.out += b"b"

    def tensor(self, value: Tensor) -> None:
        """Write a tensor: subclasses wrap it."""
        self.view(self._stored(value))

    def _stored(self, value: Tensor) -> StorageView:
        if self._tensors is None:
            raise InternalError("a tensor was to be written into a pickle that has no storages")
        return self._tensors(value)

    def blockwise(self, value: Blockwise) -> None:
        """Write a state quantized in blocks: subclasses wrap it."""
        self.whole_blocks(value, self._stored)

    def whole_blocks(self, value: Blockwise, stored: TensorHook) -> None:
        """Write a state in blocks, whose tensors ``stored`` returns: all of it, or whole groups of its rows."""
        blocks, text = value.blocks, self.text
        views = {part: stored(tensor) for part, tensor in value.tensors.items()}
        shard = blocks.shard_of(views[SCALE].shape)
        shapes = blocks.stored_shapes(shard)
        self.wrapper((blocks.kind.module, blocks.kind.name), shard, blocks.dtype)
        self.raw(b"}(")
        for part, view in views.items():
            extents = shapes.get(part, view.shape)
            self.raw(text(part))
            self.view(view._replace(shape=extents, stride=contiguous_stride(extents)))
        for name, setting in blocks.settings(shard).items():
            self.raw(text(name))
            if isinstance(setting, bool):
                self.raw(flag(setting))
            elif isinstance(setting, int):
                self.raw(integer(setting))
            else:
                self.raw(self.size(setting))
        self.raw(b"utR")

    def _appends(self, values: Sequence[Value]) -> None:
        if len(values) == 1:
            self.value(values[0])
            self.out += b"a"
            return
        for begin in range(0, len(values), _BATCH):
            batch = values[begin : begin + _BATCH]
            self.out += b"("
            for item in batch:
                self.value(item)
            self.out += b"e"

    def _setitems(self, pairs: Sequence[tuple[Value, Value | Blockwise]]) -> None:
        for begin in range(0, len(pairs), _BATCH):
            batch = pairs[begin : begin + _BATCH]
            if len(batch) == 1:
                self._pairs(batch, b"s")
            else:
                self.out += b"("
                self._pairs(batch, b"u")

    def _pairs(self, pairs: Iterable[tuple[Value, Value | Blockwise]], end: bytes) -> None:
        texts, writers, out = self._texts, self._writers, self.out
        for key, item in pairs:
            known = texts.get(key) if type(key) is str else None
            if known is not None:
                out += known
            else:
                self.value(key)
            write = writers.get(type(item))
            if write is None:
                self.value(item)
            else:
                write(item)
        out += end

    def _refer(self, value: object) -> bool:
        """Refer to a container that was written before. Raises SourceUnsupportedError for a container that contains
        itself.
        """
        if id(value) in self._open:
            raise SourceUnsupportedError(
                f"a {type(value).__name__} contains itself",
                why="a value that refers to itself cannot be laid out in another container",
                next_step=f"leave it out with {flags.exclude}",
            )
        known = self._shared.get(id(value))
        if known is None:
            return False
        self.out += known
        return True

    def _remember(self, value: object) -> None:
        put, get = self.put()
        self._shared[id(value)] = get
        self.out += put

    @contextmanager
    def _guard_recursion(self, value: object) -> Iterator[None]:
        self._open.add(id(value))
        yield
        self._open.discard(id(value))
