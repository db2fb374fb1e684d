"""Where the opcodes of a pickle end, and a writer of pickles from opcodes, for many values of the same form.

``PickleOpcodes`` writes protocol 2, as ``torch.save`` does, with two differences that no reader notices: equal strings
are written once, and the parts of a tensor that nothing refers to again are not memoised.
"""

from __future__ import annotations

import pickletools
import struct
from collections.abc import Callable, Hashable, Iterable, Sequence
from pickle import encode_long
from typing import Any, NamedTuple, TypeVar

from fsdpckpt.ir.dtypes import DType
from fsdpckpt.ir.tensors import contiguous_stride

_Opcodes = TypeVar("_Opcodes", bytes, tuple[bytes, bytes, bytes])

_UP_TO_NEWLINE = -1
_WIDTHS = {
    pickletools.TAKEN_FROM_ARGUMENT1: 1,
    pickletools.TAKEN_FROM_ARGUMENT4: 4,
    pickletools.TAKEN_FROM_ARGUMENT4U: 4,
    pickletools.TAKEN_FROM_ARGUMENT8U: 8,
}
_ARGUMENTS = {ord(opcode.code): 0 if opcode.arg is None else opcode.arg.n for opcode in pickletools.opcodes}

FIXED = {opcode: 1 + nbytes for opcode, nbytes in _ARGUMENTS.items() if nbytes >= 0}
"""Opcodes of fixed size: their bytes, operand included."""

COUNTED = {opcode: _WIDTHS[nbytes] for opcode, nbytes in _ARGUMENTS.items() if nbytes in _WIDTHS}
"""Opcodes with a text or a number of any length: the bytes of the count before it."""

LINES = {opcode: 2 if opcode in b"ci" else 1 for opcode, nbytes in _ARGUMENTS.items() if nbytes == _UP_TO_NEWLINE}
"""Opcodes with text up to a newline: how many of these follow."""

TUPLE_ENDS = (b"", b"\x85", b"\x86", b"\x87")  # for one to three items on the stack

_PROTOCOL_2 = b"\x80\x02"
# Protocol 2 names the modules of Python 2; every unpickler maps them back.
_PYTHON_2_MODULES = {"builtins": "__builtin__", "copyreg": "copy_reg"}


class StorageView(NamedTuple):
    """One tensor as a view of a stored record: the arguments of ``torch._utils._rebuild_tensor_v2``.

    ``key``: the record ``data/<key>``; ``offset`` and ``stride``: in elements of ``dtype``; ``nbytes``: the length of
    the whole record.
    """

    key: str
    dtype: DType
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    nbytes: int


def opcode_end(data: bytes, at: int) -> int:
    """Where the opcode at ``at`` ends; this may be past the end of ``data`` if it is cut off there.

    Raises IndexError if no opcode begins at ``at``, or a newline is missing.
    """
    opcode = data[at]
    nbytes = FIXED.get(opcode)
    if nbytes is not None:
        return at + nbytes
    if opcode in COUNTED:
        begin = at + 1 + COUNTED[opcode]
        return begin + int.from_bytes(data[at + 1 : begin], "little")
    end = at
    for _ in range(LINES.get(opcode, 0)):
        end = data.find(b"\n", end + 1)
        if end < 0:
            break
    if end <= at:
        raise IndexError(at)
    return end + 1


def integer(value: int) -> bytes:
    """The opcode of an int of any size."""
    if 0 <= value < 256:
        return b"K%c" % value
    if 0 <= value < 65536:
        return b"M" + struct.pack("<H", value)
    if -0x80000000 <= value <= 0x7FFFFFFF:
        return b"J" + struct.pack("<i", value)
    data = encode_long(value)
    return (b"\x8a%c" % len(data) if len(data) < 256 else b"\x8b" + struct.pack("<i", len(data))) + data


def flag(value: bool) -> bytes:  # noqa: FBT001 - a pickled bool
    return b"\x88" if value else b"\x89"


def integers(values: Sequence[int]) -> bytes:
    """The opcodes of a tuple of ints that is not memoised."""
    return tuple_of(list(map(integer, values)))


def tuple_of(items: Sequence[bytes]) -> bytes:
    """The opcodes of a tuple that is not memoised; ``items``: the opcodes of its content."""
    body = b"".join(items)
    if len(items) <= 3:
        return body + TUPLE_ENDS[len(items)] if items else b")"
    return b"(" + body + b"t"


def list_of(items: Iterable[bytes]) -> bytes:
    """The opcodes of a list that is not memoised; ``items``: the opcodes of its content."""
    return b"](" + b"".join(items) + b"e"


class PickleOpcodes:
    """One pickle, written front to back; ``finish`` ends it.

    ``text``, ``name``, ``once`` and ``constant`` return the opcodes of a string, an importable name or anything else:
    in full the first time, a memo reference later. The results must be written in the order of the calls.
    """

    def __init__(self) -> None:
        self.out = bytearray(_PROTOCOL_2)
        self._texts: dict[str, bytes] = {}
        self._names: dict[tuple[str, str], bytes] = {}
        self._once: dict[Hashable, bytes] = {}
        self._constants: dict[Hashable, Any] = {}
        self._memo = 0
        self._extents: dict[tuple[int, ...], bytes] = {}

    def finish(self) -> bytes:
        """The whole pickle. The object cannot be used afterwards."""
        self.out += b"."
        return bytes(self.out)

    def raw(self, opcodes: bytes) -> None:
        self.out += opcodes

    def put(self) -> tuple[bytes, bytes]:
        """A new memo number: the opcode that stores the top of the stack there, and the one that fetches it."""
        number = self._memo
        self._memo = number + 1
        if number < 256:
            return b"q%c" % number, b"h%c" % number
        packed = struct.pack("<I", number)
        return b"r" + packed, b"j" + packed

    def text(self, text: str) -> bytes:
        known = self._texts.get(text)
        if known is not None:
            return known
        put, get = self.put()
        self._texts[text] = get
        data = text.encode("utf-8", "surrogatepass")
        return b"X" + struct.pack("<I", len(data)) + data + put

    def name(self, module: str, name: str) -> bytes:
        """For names that this program chose itself: names from a checkpoint are checked in ``PickleWriter.value``."""
        known = self._names.get((module, name))
        if known is not None:
            return known
        put, get = self.put()
        self._names[(module, name)] = get
        written = _PYTHON_2_MODULES.get(module, module)
        return b"c" + f"{written}\n{name}\n".encode() + put

    def once(self, key: Hashable, build: Callable[[], bytes]) -> bytes:
        """The opcodes that ``build`` returns for one object; every later call with the same ``key`` refers to it."""
        known = self._once.get(key)
        if known is not None:
            return known
        opcodes = build()
        put, self._once[key] = self.put()
        return opcodes + put

    def constant(self, key: Hashable, build: Callable[[], _Opcodes]) -> _Opcodes:
        """The opcodes that ``build`` returns, made of texts and names; from the second time on these are memo
        references.

        Unlike ``once`` this makes the value anew each time: for values that must not be shared.
        """
        known: _Opcodes | None = self._constants.get(key)
        if known is not None:
            return known
        opcodes = build()
        self._constants[key] = build()
        return opcodes

    def view(self, view: StorageView, *, requires_grad: bool = False) -> None:
        """A tensor, as ``torch._utils._rebuild_tensor_v2`` (or ``_v3`` for dtypes without a typed storage)."""
        dtype = view.dtype
        start, location, end = self.constant(("tensor", dtype.name), lambda: self._head(dtype))
        key = view.key.encode()
        extents = self._extents
        shape = extents.get(view.shape)
        if shape is None:
            shape = extents[view.shape] = integers(view.shape)
        stride = extents.get(view.stride)
        if stride is None:
            stride = extents[view.stride] = integers(view.stride)
        if requires_grad:
            end = b"\x88" + end[1:]
        elements = view.nbytes if dtype.storage is None else view.nbytes // dtype.itemsize
        self.out += b"%bX%b%b%b%btQ%b%b%b%b" % (
            start,
            struct.pack("<I", len(key)),
            key,
            location,
            integer(elements),
            integer(view.offset),
            shape,
            stride,
            end,
        )

    def wrapper(
        self, cls: tuple[str, str], shape: tuple[int, ...], dtype: DType, *, requires_grad: bool = False
    ) -> None:
        """The call that rebuilds a tensor subclass, up to its state."""
        name = self.name
        self.raw(
            name("torch._tensor", "_rebuild_from_type_v2") + b"(" + name("torch._utils", "_rebuild_wrapper_subclass")
        )
        self.raw(name(*cls) + b"(" + name(*cls) + name("torch", dtype.name))
        self.raw(integers(shape) + integers(contiguous_stride(shape)) + b"K\x00" + self.layout() + self.cpu())
        self.raw(flag(requires_grad) + b"t")

    def layout(self) -> bytes:
        return self.once(
            "layout", lambda: self.name("torch.serialization", "_get_layout") + self.text("torch.strided") + b"\x85R"
        )

    def cpu(self) -> bytes:
        return self.once("cpu", lambda: self.name("torch", "device") + self.text("cpu") + b"\x85R")

    def size(self, shape: Sequence[int]) -> bytes:
        return self.name("torch", "Size") + integers(shape) + b"\x85R"

    def _head(self, dtype: DType) -> tuple[bytes, bytes, bytes]:
        function, storage = "_rebuild_tensor_v2", ("torch", dtype.storage or "")
        if dtype.storage is None:
            function, storage = "_rebuild_tensor_v3", ("torch.storage", "UntypedStorage")
        start = self.name("torch._utils", function) + b"((" + self.text("storage") + self.name(*storage)
        location = self.text("cpu")
        end = b"\x89" + self.name("collections", "OrderedDict") + b")R"
        if dtype.storage is None:
            end += self.name("torch", dtype.name)
        return start, location, end + b"tR"
