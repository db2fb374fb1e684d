"""Read a pickle without executing anything of it: names become inert stand-ins, calls become records.

The C unpickler does the parsing. Everything it could act on is replaced: ``find_class`` never imports, REDUCE and
NEWOBJ make ``ir.values.Object`` records, BUILD, APPENDS and SETITEMS land in those records, extension codes are
refused. Only plain containers, ``collections.OrderedDict``, ``set``, ``complex``, ``bytes`` and ``bytearray`` become
themselves. Names outside ``containers.allowlist`` are collected while the rest is parsed and refused all at once.
"""

from __future__ import annotations

import io
import pickle
import threading
from collections import OrderedDict
from collections.abc import Callable
from functools import cache
from typing import Protocol, cast

from fsdpckpt.containers.allowlist import NESTED_CLASSES, Kind, canonical, kind_of
from fsdpckpt.containers.pickle_scan import check_pickle
from fsdpckpt.errors import SourceCorruptError, SourceUnsafeError
from fsdpckpt.ir.values import Global, Key, Object, Value

__all__ = ["Part", "TensorResolver", "as_object", "buffered", "load"]

_LARGE = 1 << 20  # bytes; looking through this much takes some 20 ms, reading it twice that


class TensorResolver(Protocol):
    """What a torch file adds to a pickle: storages by persistent id, and tensors on them."""

    def storage(self, persistent_id: object) -> object:
        """The storage that a persistent id names."""
        ...

    def rebuild(self, function: str, arguments: tuple[object, ...]) -> object:
        """What ``torch``'s rebuild function of that name would return."""
        ...


class _Running(threading.local):
    """What the load in progress in this thread has made; records are finished when it ends."""

    objects: list[Object]
    names: list[Global]
    dicts: list[OrderedDict[object, object]]
    refused: dict[str, None]
    tensors: TensorResolver | None


_RUN = _Running()


class _Record(Object):
    """An Object while the unpickler still writes to it; becomes a plain Object when the load ends."""

    __slots__ = ()

    def __setstate__(self, state: Value) -> None:
        self.state = state
        self.has_state = True

    def append(self, item: Value) -> None:
        self.items.append(item)

    def extend(self, items: list[Value]) -> None:
        self.items.extend(items)

    def __setitem__(self, key: Value, value: Value) -> None:
        self.entries.append((key, value))  # type: ignore[arg-type]

    __hash__ = object.__hash__


_NEW = object.__new__


def _record(function: Global, arguments: tuple[object, ...], new: bool) -> Object:  # noqa: FBT001 (hot path)
    made = _NEW(_Record)
    made.function = function
    made.args = arguments  # type: ignore[assignment]
    made.new = new
    made.state = None
    made.has_state = False
    made.items = []
    made.entries = []
    _RUN.objects.append(made)
    return made


class _Name(Global):
    """A Global while the unpickler may still call it; becomes a plain Global when the load ends."""

    __slots__ = ()

    def __call__(self, *arguments: object) -> object:
        return _refuse(f"{self.module}.{self.name} (called)")

    def __setstate__(self, _state: object) -> None:
        raise pickle.UnpicklingError("a name cannot have a state")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Global) and (self.module, self.name) == (other.module, other.name)

    def __hash__(self) -> int:
        return hash((self.module, self.name))


class _Call(_Name):
    __slots__ = ()

    def __call__(self, *arguments: object) -> object:
        return _record(self, arguments, new=False)


class _Rebuild(_Name):
    __slots__ = ()

    def __call__(self, *arguments: object) -> object:
        tensors = _RUN.tensors
        if tensors is None:
            return _record(self, arguments, new=False)
        return tensors.rebuild(self.name, arguments)


class _Getattr(_Name):
    __slots__ = ()

    def __call__(self, *arguments: object) -> object:
        owner, attribute = arguments if len(arguments) == 2 else (None, None)
        if isinstance(attribute, str):
            if isinstance(owner, Global):
                nested = NESTED_CLASSES.get((owner.module, owner.name, attribute))
                if nested is not None:
                    return _stand_in(*nested) if _RUN.tensors is None else _part(*nested)
            # Python 3.11.0 to 3.11.3 wrote an enum member as getattr(class, name).
            if isinstance(owner, _StandIn) and owner.function.name.endswith("MEM_FORMAT_ENCODING"):
                return _record(self, (owner.function, attribute), new=False)
        return _refuse("builtins.getattr" + repr(tuple(map(str, arguments))))


class _Python(_Name):
    """A type whose value is plain data: made at once, by the one harmless way of calling it."""

    __slots__ = ()

    def __call__(self, *arguments: object) -> object:
        made = _PYTHON[self.name](*arguments)
        if isinstance(made, OrderedDict):
            _RUN.dicts.append(made)
        return made


def _encode(text: object = "", encoding: object = "latin1") -> bytes:
    if not isinstance(text, str) or encoding not in ("latin1", "latin-1", "utf-8", "ascii"):
        raise pickle.UnpicklingError("encode of something that is not text")
    return text.encode(str(encoding))


def _bytes(data: object = b"") -> bytes:
    if not isinstance(data, (bytes, bytearray, list, tuple)):
        raise pickle.UnpicklingError("bytes of something that is not data")  # an int would allocate that much
    return bytes(data)


def _bytearray(data: object = b"", encoding: object = "latin1") -> bytearray:
    return bytearray(_encode(data, encoding) if isinstance(data, str) else _bytes(data))


_PYTHON: dict[str, Callable[..., object]] = {
    "OrderedDict": OrderedDict,
    "set": set,
    "complex": complex,
    "bytes": _bytes,
    "bytearray": _bytearray,
    "encode": _encode,
}


class _StandIn(type):
    """The type of stand-in classes. NEWOBJ insists on a type; making an instance gives a record instead."""

    function: Global

    def __call__(cls, *arguments: object) -> object:
        if issubclass(cls, Part):
            return cls.__new__(cls, *arguments)
        return _record(cls.function, arguments, new=False)  # type: ignore[attr-defined]  # all but Part's bases have it

    def __setattr__(cls, name: str, value: object) -> None:
        raise pickle.UnpicklingError("a class cannot be changed")

    def __setstate__(cls, _state: object) -> None:
        raise pickle.UnpicklingError("a class cannot have a state")


@cache
def _stand_in(module: str, name: str) -> _StandIn:
    function = Global(module, name)

    def new(_cls: type, *arguments: object) -> Object:
        return _record(function, arguments, new=True)

    return _StandIn(name.replace(".", "_"), (), {"__slots__": (), "__new__": new, "function": function})


class Part(metaclass=_StandIn):
    """An instance of one of the classes that DTensor and ShardedTensor are made of: only its attributes count.

    A checkpoint has several for each tensor, so the C unpickler makes and fills them by itself; they are read by
    ``containers.torch_distributed`` and become Objects where they stand on their own (``as_object``).
    """

    def __init__(self, *_: object) -> None: ...  # never called; that it exists makes __new__ accept arguments


class _PartWithArguments(Part):
    """A Part whose class is made with arguments (a NamedTuple): kept under the attribute ``""``."""

    def __new__(cls, *arguments: object) -> _PartWithArguments:
        made = object.__new__(cls)
        vars(made)[""] = arguments
        return made


class _PartWithState(Part):
    """A Part whose state is no dict of attributes, and is not needed."""

    def __setstate__(self, state: object) -> None:
        vars(self)[""] = (state,)


_PART_MODULES = (
    "torch.distributed._shard",
    "torch.distributed._tensor",
    "torch.distributed.tensor",
    "torch.distributed.device_mesh",
    "torch.distributed._mesh_layout",
    "torch.distributed.remote_device",
)
_PART_BASES = {
    "ShardOrderEntry": _PartWithArguments,
    "_MeshLayout": _PartWithArguments,
    "_FlatLayout": _PartWithArguments,
    "TensorMeta": Part,
    "TensorProperties": _PartWithState,
    "MEM_FORMAT_ENCODING": _PartWithArguments,
}


@cache
def _part(module: str, name: str) -> _StandIn:
    base = _PART_BASES.get(name, Part)
    return _StandIn(name.replace(".", "_"), (base,), {"function": Global(module, name)})


def as_object(part: Part) -> Object:
    """The Object that ``part`` is as a value of its own."""
    attributes = cast("dict[Key, Value]", dict(vars(part)))
    arguments = attributes.pop("", ())
    function = type(part).function
    return Object(
        function, cast("tuple[Value, ...]", arguments), new=True, state=attributes, has_state=bool(attributes)
    )


class _Unknown:
    """A refused name: swallows whatever the pickle does with it, so that parsing reaches the other names."""

    __slots__ = ()

    def __new__(cls, *_: object, **__: object) -> _Unknown:
        return object.__new__(cls)

    def __call__(self, *_: object) -> _Unknown:
        return self

    def __setstate__(self, _state: object) -> None: ...

    def append(self, _item: object) -> None: ...

    def extend(self, _items: object) -> None: ...

    def add(self, _item: object) -> None: ...

    def __setitem__(self, _key: object, _value: object) -> None: ...


def _refuse(name: str) -> object:
    _RUN.refused[name] = None
    return _Unknown()


_NAMES: dict[Kind, type[_Name]] = {
    Kind.VALUE: _Name,
    Kind.STORAGE: _Name,
    Kind.CALL: _Call,
    Kind.PYTHON: _Python,
    Kind.REBUILD: _Rebuild,
    Kind.GETATTR: _Getattr,
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module_name: str, global_name: str, /) -> object:
        module, name = canonical(module_name, global_name)
        kind = kind_of(module, name)
        if kind is None:
            _RUN.refused[f"{module}.{name}"] = None
            return _Unknown
        if kind is Kind.CLASS:
            parts = _RUN.tensors is not None and module.startswith(_PART_MODULES)
            return _part(module, name) if parts else _stand_in(module, name)
        made = _NAMES[kind](module, name)
        _RUN.names.append(made)
        return made

    def persistent_load(self, persistent_id: object) -> object:
        if _RUN.tensors is None:
            raise pickle.UnpicklingError("a storage is named where no storages are")
        return _RUN.tensors.storage(persistent_id)


# Everything the C unpickler raises on bytes that are no pickle; nothing of the file runs, so no other can come.
_DAMAGE = (
    pickle.UnpicklingError,
    EOFError,
    LookupError,
    TypeError,
    ValueError,
    AttributeError,
    ArithmeticError,
    MemoryError,
    RecursionError,
    ImportError,
)


def buffered(data: bytes) -> io.BufferedReader:
    """``data`` as the stream the C unpickler reads fastest: it asks a plain BytesIO for every few bytes."""
    return io.BufferedReader(cast(io.RawIOBase, io.BytesIO(data)), 1 << 17)


def load(data: bytes, *, file: str, tensors: TensorResolver | None = None, checked: bool = False) -> Value:
    """The value that the pickle ``data`` holds, as ir values; ``file`` names it in messages.

    With ``tensors``, storages and rebuild calls of ``torch`` go to that resolver and its results stand in the
    value. Raises SourceUnsafeError naming every name outside the closed set, SourceCorruptError for bytes that
    are not a whole pickle. ``checked``: a checksum says that the bytes are those that were written; a large pickle
    is then not looked through for damage first.
    """
    if not (checked and len(data) > _LARGE):
        check_pickle(data, file)
    outer = dict(vars(_RUN))
    _RUN.objects, _RUN.names, _RUN.dicts, _RUN.refused, _RUN.tensors = [], [], [], {}, tensors
    try:
        value = cast(Value, _Unpickler(buffered(data), encoding="utf-8").load())
        _finish(file)
    except _DAMAGE as error:
        if not _RUN.refused:
            raise SourceCorruptError(
                f"{file} holds a pickle that cannot be read",
                file=file,
                found=f"{type(error).__name__}: {error}",
                why="the file is damaged, or was not written by torch.save",
                next_step="save or copy the checkpoint again",
            ) from None
        raise _unsafe(file) from None
    finally:
        vars(_RUN).clear()
        vars(_RUN).update(outer)
    return value


def _finish(file: str) -> None:
    """Turn the working records into plain ir values; raises when anything was refused."""
    if _RUN.refused:
        raise _unsafe(file)
    for made in _RUN.objects:
        made.__class__ = Object
    for name in _RUN.names:
        object.__setattr__(name, "__class__", Global)
    for mapping in _RUN.dicts:
        attributes = vars(mapping)
        if attributes and any(hasattr(OrderedDict, attribute) for attribute in attributes):
            raise pickle.UnpicklingError("an attribute hides a method of a dictionary")


def _unsafe(file: str) -> SourceUnsafeError:
    names = sorted(_RUN.refused)
    return SourceUnsafeError(
        f"{file} names {len(names)} thing{'s' * (len(names) != 1)} outside the closed set that fsdpckpt reads",
        details=names,
        file=file,
        found=", ".join(names),
        why="a pickle can run code; fsdpckpt reads only types it knows to be data, and runs nothing",
        next_step="save the checkpoint again without these objects (tensors, numbers, text, lists and dicts are fine)",
    )
