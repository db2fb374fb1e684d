"""The inert stand-ins that a pickle's names resolve to, and what the calls made on them become.

The unpickler calls, fills and extends what ``find_class`` gives it; all of that lands in records (``ir.values.Object``)
or, for the classes that DTensor and ShardedTensor are made of, in ``Part`` instances. Nothing here imports a name, and
no class or name can be changed by a pickle.
"""

from __future__ import annotations

import pickle
import threading
from collections import OrderedDict
from collections.abc import Callable, Sized
from functools import cache
from typing import Protocol, cast

from fsdpckpt.formats.pickle.allowlist import NESTED_CLASSES, Kind, canonical, kind_of
from fsdpckpt.ir.values import Global, Key, Object, Value
from fsdpckpt.text import truncate

__all__ = ["RUN", "Part", "TensorResolver", "as_object", "finish", "resolve"]


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
    copied: int  # items and bytes that calls took over from their arguments
    most_copied: int
    tensors: TensorResolver | None


RUN = _Running()


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
    RUN.objects.append(made)
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
        tensors = RUN.tensors
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
                    return _stand_in(*nested) if RUN.tensors is None else _part(*nested)
            # Python 3.11.0 to 3.11.3 wrote an enum member as getattr(class, name).
            if isinstance(owner, _StandIn) and owner.function.name.endswith("MEM_FORMAT_ENCODING"):
                return _record(self, (owner.function, attribute), new=False)
        return _refuse(f"builtins.getattr({', '.join(map(_named, arguments))})")


class _Python(_Name):
    """A type whose value is plain data: made at once, by the one harmless way of calling it."""

    __slots__ = ()

    def __call__(self, *arguments: object) -> object:
        for argument in arguments:
            RUN.copied += len(argument) if isinstance(argument, Sized) else 0
        if RUN.copied > RUN.most_copied:
            raise pickle.UnpicklingError("the same data is copied again and again")
        made = _PYTHON[self.name](*arguments)
        if isinstance(made, OrderedDict):
            RUN.dicts.append(made)
        return made


def _named(argument: object) -> str:
    return str(argument) if isinstance(argument, (str, Global)) else truncate(argument)


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


def _ordered_dict() -> OrderedDict[object, object]:
    return OrderedDict()


def _set(items: object = ()) -> set[object]:
    if not isinstance(items, (list, tuple)):
        raise pickle.UnpicklingError("a set of something that is no list")
    RUN.copied += sum(len(item) for item in items if isinstance(item, tuple))
    if any(isinstance(part, tuple) for item in items if isinstance(item, tuple) for part in item):
        raise pickle.UnpicklingError("a set of nested tuples")  # each could take for ever to hash
    if RUN.copied > RUN.most_copied:
        raise pickle.UnpicklingError("the same data is copied again and again")
    return set(items)


_PYTHON: dict[str, Callable[..., object]] = {
    "OrderedDict": _ordered_dict,
    "set": _set,
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
    RUN.refused[name] = None
    return _Unknown()


_NAMES: dict[Kind, type[_Name]] = {
    Kind.VALUE: _Name,
    Kind.STORAGE: _Name,
    Kind.CALL: _Call,
    Kind.PYTHON: _Python,
    Kind.REBUILD: _Rebuild,
    Kind.GETATTR: _Getattr,
}


def resolve(module_name: str, global_name: str) -> object:
    """The stand-in for a name as the pickle writes it; a name outside the closed set is remembered as refused."""
    module, name = canonical(module_name, global_name)
    kind = kind_of(module, name)
    if kind is None:
        RUN.refused[f"{module}.{name}"] = None
        return _Unknown
    if kind is Kind.CLASS:
        parts = RUN.tensors is not None and module.startswith(_PART_MODULES)
        return _part(module, name) if parts else _stand_in(module, name)
    made = _NAMES[kind](module, name)
    RUN.names.append(made)
    return made


def finish() -> None:
    """Turn what the load in progress has made into plain ir values. Raises UnpicklingError for a booby trap."""
    for made in RUN.objects:
        made.__class__ = Object
    for name in RUN.names:
        object.__setattr__(name, "__class__", Global)
    for mapping in RUN.dicts:
        attributes = vars(mapping)
        if attributes and any(hasattr(OrderedDict, attribute) for attribute in attributes):
            raise pickle.UnpicklingError("an attribute hides a method of a dictionary")
