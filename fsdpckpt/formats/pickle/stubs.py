"""What stands for an importable name while a pickle is read: nothing is imported, and no code of the pickle runs.

A *name* (``_Name``) may be called as far as its kind in ``allowlist`` says. A *stub class* makes records
(``ir.values.Object``) in place of instances, or ``StubInstance``s for the classes that DTensor, ShardedTensor and DCP's
metadata are made of.
"""

from __future__ import annotations

import pickle
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence, Sized
from functools import cache
from typing import cast

from fsdpckpt.formats.pickle.allowlist import ALLOWED, NESTED_CLASSES, Kind, kind_of
from fsdpckpt.formats.pickle.collisions import FREE_KEYS, count_new
from fsdpckpt.formats.pickle.load_state import THREAD, Swallow, charge, open_object, refuse
from fsdpckpt.ir.values import Global, Key, Object, Value
from fsdpckpt.text import truncate


def stub_for(module: str, name: str) -> object | None:
    """The stub for an importable name, None if it is outside the closed set of ``allowlist``."""
    kind = kind_of(module, name)
    if kind is None:
        return None
    if kind is Kind.CLASS:
        of_tensors = THREAD.load.tensors is not None and module.startswith(_INSTANCE_MODULES)
        return instance_class(module, name) if of_tensors else _stub_class(module, name)
    stub = _Name(module, name)
    THREAD.load.names.append(stub)
    return stub


class _Name(Global):
    """A Global that the unpickler may still call; becomes a plain Global when the load ends."""

    __slots__ = ()

    def __call__(self, *arguments: object) -> object:
        return _CALLS[ALLOWED[self.module, self.name]](self, arguments)

    def __setstate__(self, _state: object) -> None:
        raise pickle.UnpicklingError("a name cannot have a state")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Global) and (self.module, self.name) == (other.module, other.name)

    def __hash__(self) -> int:
        return hash((self.module, self.name))


def _call_value(name: Global, _arguments: tuple[object, ...]) -> object:
    return refuse(f"{name} (called)")


def _call(name: Global, arguments: tuple[object, ...]) -> object:
    return open_object(name, arguments, new=False)


def _rebuild(name: Global, arguments: tuple[object, ...]) -> object:
    tensors = THREAD.load.tensors
    if any(argument is Swallow for argument in arguments):
        return Swallow()  # a tensor of a class that is refused
    return _call(name, arguments) if tensors is None else tensors.rebuild(name.name, arguments)


def _getattr(name: Global, arguments: tuple[object, ...]) -> object:
    owner, attribute = arguments if len(arguments) == 2 else (None, None)
    if isinstance(attribute, str):
        if isinstance(owner, Global):
            nested = NESTED_CLASSES.get((owner.module, owner.name, attribute))
            if nested is not None:
                return _stub_class(*nested) if THREAD.load.tensors is None else instance_class(*nested)
        # Python 3.11.0 to 3.11.3 wrote an enum member as getattr(class, name).
        if isinstance(owner, _StubClass) and owner.function.name.endswith("MEM_FORMAT_ENCODING"):
            return _call(name, (owner.function, attribute))
    return refuse(f"builtins.getattr({', '.join(map(_named, arguments))})")


def _python(name: Global, arguments: tuple[object, ...]) -> object:
    """The value of a type that is plain data, made at once."""
    for argument in arguments:
        charge(len(argument) if isinstance(argument, Sized) else 0)
    value = _PYTHON[name.name](*arguments)
    if isinstance(value, OrderedDict):
        THREAD.load.dicts.append(value)
    elif isinstance(value, complex):
        of_hash = THREAD.load.complexes.setdefault(hash(value), set())
        of_hash.add(value)
        if len(of_hash) > FREE_KEYS:
            raise pickle.UnpicklingError("many complex numbers with one hash, chosen to exhaust whoever reads them")
    return value


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
        raise pickle.UnpicklingError("a set of something that is not a list")
    _charge_hashing(items)
    count_new(items)
    return set(items)


def _charge_hashing(items: Sequence[object]) -> None:
    """Count the items of the tuples in ``items``: hashing a tuple hashes its items, each time anew."""
    for item in items:
        if isinstance(item, tuple):
            charge(len(item))
            _charge_hashing(item)


_PYTHON: dict[str, Callable[..., object]] = {
    "OrderedDict": _ordered_dict,
    "set": _set,
    "complex": complex,
    "bytes": _bytes,
    "bytearray": _bytearray,
    "encode": _encode,
}


_CALLS: Mapping[Kind, Callable[[Global, tuple[object, ...]], object]] = {
    Kind.VALUE: _call_value,
    Kind.CALL: _call,
    Kind.PYTHON: _python,
    Kind.REBUILD: _rebuild,
    Kind.GETATTR: _getattr,
}


class _StubClass(type):
    """The type of stub classes. NEWOBJ requires a type; making an instance returns a record instead."""

    function: Global

    def __call__(cls, *arguments: object) -> object:
        if issubclass(cls, StubInstance):
            return cls.__new__(cls, *arguments)
        return open_object(cls.function, arguments, new=False)  # type: ignore[attr-defined]  # all but StubInstance's bases have it

    def __setattr__(cls, name: str, value: object) -> None:
        raise pickle.UnpicklingError("a class cannot be changed")

    def __setstate__(cls, _state: object) -> None:
        raise pickle.UnpicklingError("a class cannot have a state")


@cache
def _stub_class(module: str, name: str) -> _StubClass:
    function = Global(module, name)

    def new(_cls: type, *arguments: object) -> Object:
        return open_object(function, arguments, new=True)

    return _StubClass(name.replace(".", "_"), (), {"__slots__": (), "__new__": new, "function": function})


class StubInstance(metaclass=_StubClass):
    """An instance of a class used by DTensor, ShardedTensor or DCP metadata: only its attributes count.

    A checkpoint has several for each tensor, so the C unpickler makes and fills them directly; ``torch.distributed``
    and ``dcp.metadata`` read them. Those that are values by themselves become Objects (``as_object``).
    """

    def __init__(self, *_: object) -> None: ...  # never called; its existence makes __new__ accept arguments


class _StubWithArguments(StubInstance):
    """A StubInstance whose class is made with arguments (a NamedTuple). They are no attribute of the pickle's."""

    __slots__ = ("arguments",)
    arguments: tuple[object, ...]

    def __new__(cls, *arguments: object) -> _StubWithArguments:
        made = object.__new__(cls)
        made.arguments = arguments
        return made


class _StubWithState(StubInstance):
    """A StubInstance whose state is not a dict of attributes."""

    __slots__ = ("state",)
    state: object

    def __setstate__(self, state: object) -> None:
        self.state = state


def arguments_of(value: object) -> tuple[object, ...]:
    """What the class of ``value`` was made with; () for any other value."""
    return value.arguments if isinstance(value, _StubWithArguments) else ()


def state_of(value: object) -> object:
    """The state that ``value`` was given in place of attributes; None without one."""
    return getattr(value, "state", None) if isinstance(value, _StubWithState) else None


_INSTANCE_MODULES = (
    "torch.distributed._shard",
    "torch.distributed._tensor",
    "torch.distributed.tensor",
    "torch.distributed.device_mesh",
    "torch.distributed._mesh_layout",
    "torch.distributed.remote_device",
)
_INSTANCE_BASES = {
    "ShardOrderEntry": _StubWithArguments,
    "_MeshLayout": _StubWithArguments,
    "_FlatLayout": _StubWithArguments,
    "TensorProperties": _StubWithState,
    "MEM_FORMAT_ENCODING": _StubWithArguments,
}


@cache
def instance_class(module: str, name: str) -> _StubClass:
    base = _INSTANCE_BASES.get(name, StubInstance)
    return _StubClass(name.replace(".", "_"), (base,), {"function": Global(module, name)})


def as_object(part: StubInstance) -> Object:
    """``part`` as an Object, a value by itself."""
    attributes = cast("dict[Key, Value]", dict(vars(part)))
    arguments = (part.state,) if isinstance(part, _StubWithState) and hasattr(part, "state") else arguments_of(part)
    function = type(part).function
    return Object(
        function, cast("tuple[Value, ...]", arguments), new=True, state=attributes, has_state=bool(attributes)
    )
