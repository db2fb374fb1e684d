"""Reads a pickle without executing anything of it: names become inert stubs, calls become records.

The C unpickler does the parsing, or Python's own where keys may have been chosen to collide (``collisions``).
Everything it could act on is replaced: ``find_class`` never imports, and what it returns instead is called, filled and
extended by the unpickler. REDUCE and NEWOBJ make ``ir.values.Object`` records; BUILD, APPENDS and SETITEMS land in
those records, or in a ``StubInstance`` for the classes that DTensor, ShardedTensor and DCP's metadata are made of;
extension codes are refused. Only plain containers, ``collections.OrderedDict``, ``set``, ``complex``, ``bytes`` and
``bytearray`` become themselves. Names outside ``allowlist`` are collected while the rest is parsed and refused all at
once. No class or name can be changed by a pickle.
"""

from __future__ import annotations

import io
import pickle
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence, Sized
from dataclasses import dataclass, field
from functools import cache
from typing import Protocol, cast

from fsdpckpt.errors import SourceCorruptError
from fsdpckpt.formats.pickle.allowlist import ALLOWED, NESTED_CLASSES, Kind, canonical, kind_of, unsafe_error
from fsdpckpt.formats.pickle.check import check_pickle
from fsdpckpt.formats.pickle.collisions import FREE_KEYS, CountingUnpickler, count_new
from fsdpckpt.ir.values import Global, Key, Object, Value
from fsdpckpt.text import truncate


class TensorResolver(Protocol):
    """Resolves the additions of a torch file to a pickle: storages by persistent id, and tensors on them."""

    def storage(self, persistent_id: object) -> object:
        """The storage that a persistent id names."""
        ...

    def rebuild(self, function: str, arguments: tuple[object, ...]) -> object:
        """The result of ``torch``'s rebuild function of that name."""
        ...


@dataclass(slots=True, eq=False)
class _Load:
    """One call of ``load``, and what it has made so far: ``finish`` makes ir values of that.

    ``hashed``: keys of dicts and items of sets, with the hash that was used. ``copied``: items and bytes that calls
    took over from their arguments, and keys compared.
    """

    tensors: TensorResolver | None
    stubs: Callable[[str, str], object | None]
    max_copied: int
    copied: int = 0
    objects: list[Object] = field(default_factory=list)
    hashed: list[tuple[Object, int]] = field(default_factory=list)
    names: list[Global] = field(default_factory=list)
    dicts: list[OrderedDict[object, object]] = field(default_factory=list)
    refused: dict[str, None] = field(default_factory=dict)
    complexes: dict[int, set[complex]] = field(default_factory=dict)  # by hash: they may become keys

    def finish(self) -> None:
        """Turn what was made into plain ir values.

        Raises UnpicklingError for a key that was changed after hashing, or a dict that hides its own methods.
        """
        for made in self.objects:
            made.__class__ = Object
        if any(hash(key) != used for key, used in self.hashed):
            raise pickle.UnpicklingError("a key was changed after it was used")
        for name in self.names:
            object.__setattr__(name, "__class__", Global)
        for mapping in self.dicts:
            attributes = vars(mapping)
            if attributes and any(hasattr(OrderedDict, attribute) for attribute in attributes):
                raise pickle.UnpicklingError("an attribute hides a method of a dictionary")


_FREE_COPIES = 1_000_000  # items and bytes that calls may copy or hash in any pickle; this takes no noticeable time
_COMPARED = 16  # what comparing two keys counts as: keys whose hashes are equal are compared in pairs


class _OpenObject(Object):
    """An Object to which the unpickler still writes; becomes a plain Object when the load ends."""

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

    def __eq__(self, other: object) -> bool:
        _charge(_COMPARED)
        return Object.__eq__(self, other)

    def __hash__(self) -> int:
        used = Object.__hash__(self)
        _THREAD.load.hashed.append((self, used))
        return used


_NEW = object.__new__


def _open_object(function: Global, arguments: tuple[object, ...], new: bool) -> Object:  # noqa: FBT001 (hot path)
    made = _NEW(_OpenObject)
    made.function = function
    made.args = arguments  # type: ignore[assignment]
    made.new = new
    made.state = None
    made.has_state = False
    made.items = []
    made.entries = []
    _THREAD.load.objects.append(made)
    return made


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
    return _refuse(f"{name} (called)")


def _call(name: Global, arguments: tuple[object, ...]) -> object:
    return _open_object(name, arguments, new=False)


def _rebuild(name: Global, arguments: tuple[object, ...]) -> object:
    tensors = _THREAD.load.tensors
    if any(argument is Swallow for argument in arguments):
        return Swallow()  # a tensor of a class that is refused
    return _call(name, arguments) if tensors is None else tensors.rebuild(name.name, arguments)


def _getattr(name: Global, arguments: tuple[object, ...]) -> object:
    owner, attribute = arguments if len(arguments) == 2 else (None, None)
    if isinstance(attribute, str):
        if isinstance(owner, Global):
            nested = NESTED_CLASSES.get((owner.module, owner.name, attribute))
            if nested is not None:
                return _stub_class(*nested) if _THREAD.load.tensors is None else instance_class(*nested)
        # Python 3.11.0 to 3.11.3 wrote an enum member as getattr(class, name).
        if isinstance(owner, _StubClass) and owner.function.name.endswith("MEM_FORMAT_ENCODING"):
            return _call(name, (owner.function, attribute))
    return _refuse(f"builtins.getattr({', '.join(map(_named, arguments))})")


def _python(name: Global, arguments: tuple[object, ...]) -> object:
    """The value of a type that is plain data, made at once."""
    for argument in arguments:
        _charge(len(argument) if isinstance(argument, Sized) else 0)
    value = _PYTHON[name.name](*arguments)
    if isinstance(value, OrderedDict):
        _THREAD.load.dicts.append(value)
    elif isinstance(value, complex):
        of_hash = _THREAD.load.complexes.setdefault(hash(value), set())
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
            _charge(len(item))
            _charge_hashing(item)


def _charge(items: int) -> None:
    load = _THREAD.load
    load.copied += items
    if load.copied > load.max_copied:
        raise pickle.UnpicklingError("the same data is copied again and again")


_PYTHON: dict[str, Callable[..., object]] = {
    "OrderedDict": _ordered_dict,
    "set": _set,
    "complex": complex,
    "bytes": _bytes,
    "bytearray": _bytearray,
    "encode": _encode,
}


class _StubClass(type):
    """The type of stub classes. NEWOBJ requires a type; making an instance returns a record instead."""

    function: Global

    def __call__(cls, *arguments: object) -> object:
        if issubclass(cls, StubInstance):
            return cls.__new__(cls, *arguments)
        return _open_object(cls.function, arguments, new=False)  # type: ignore[attr-defined]  # all but StubInstance's bases have it

    def __setattr__(cls, name: str, value: object) -> None:
        raise pickle.UnpicklingError("a class cannot be changed")

    def __setstate__(cls, _state: object) -> None:
        raise pickle.UnpicklingError("a class cannot have a state")


@cache
def _stub_class(module: str, name: str) -> _StubClass:
    function = Global(module, name)

    def new(_cls: type, *arguments: object) -> Object:
        return _open_object(function, arguments, new=True)

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


class Swallow:
    """A refused name: ignores whatever the pickle does with it, so that parsing reaches the other names."""

    __slots__ = ()

    def __new__(cls, *_: object, **__: object) -> Swallow:
        return object.__new__(cls)

    def __call__(self, *_: object) -> Swallow:
        return self

    def __setstate__(self, _state: object) -> None: ...

    def append(self, _item: object) -> None: ...

    def extend(self, _items: object) -> None: ...

    def add(self, _item: object) -> None: ...

    def __setitem__(self, _key: object, _value: object) -> None: ...


def _refuse(name: str) -> object:
    _THREAD.load.refused[name] = None
    return Swallow()


_CALLS: Mapping[Kind, Callable[[Global, tuple[object, ...]], object]] = {
    Kind.VALUE: _call_value,
    Kind.CALL: _call,
    Kind.PYTHON: _python,
    Kind.REBUILD: _rebuild,
    Kind.GETATTR: _getattr,
}


def stub_for(module: str, name: str) -> object | None:
    """The stub for an importable name, None if it is outside the closed set of ``allowlist``."""
    kind = kind_of(module, name)
    if kind is None:
        return None
    if kind is Kind.CLASS:
        of_tensors = _THREAD.load.tensors is not None and module.startswith(_INSTANCE_MODULES)
        return instance_class(module, name) if of_tensors else _stub_class(module, name)
    stub = _Name(module, name)
    _THREAD.load.names.append(stub)
    return stub


class _Thread(threading.local):
    """``load``: the call of ``load`` that runs in this thread, the innermost if several do."""

    load = _Load(None, stub_for, 0)


_THREAD = _Thread()


class _Resolving:
    """What both unpicklers make of names and persistent ids."""

    def find_class(self, module_name: str, global_name: str, /) -> object:
        module, name = canonical(module_name, global_name)
        stub = _THREAD.load.stubs(module, name)
        if stub is None:
            _THREAD.load.refused[f"{module}.{name}"] = None
            return Swallow
        return stub

    def persistent_load(self, persistent_id: object) -> object:
        tensors = _THREAD.load.tensors
        if tensors is None:
            raise pickle.UnpicklingError("unexpected persistent id")
        return tensors.storage(persistent_id)


class _Unpickler(_Resolving, pickle.Unpickler):
    """The C unpickler."""


class _CountingUnpickler(_Resolving, CountingUnpickler):
    """Python's own unpickler, for a pickle whose keys may have been chosen to have one hash."""


# Everything the C unpickler raises on bytes that are not a pickle; nothing in the file runs, so there are no others.
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


def load(
    data: bytes,
    *,
    file: str,
    tensors: TensorResolver | None = None,
    stubs: Callable[[str, str], object | None] = stub_for,
    what: str = "holds a pickle that cannot be read",
) -> Value:
    """The value in the pickle ``data``, as ir values; ``file`` and ``what``: what messages say of damage.

    With ``tensors``, this resolver handles storages and rebuild calls of ``torch``, and its results are part of the
    value. ``stubs`` returns what stands for an importable name, None for one outside the closed set. Raises
    SourceUnsafeError that lists every such name, SourceCorruptError for bytes that are not a whole pickle.
    """
    chosen_keys = check_pickle(data, file, what)
    unpickler = _CountingUnpickler if chosen_keys > FREE_KEYS else _Unpickler
    outer = _THREAD.load
    current = _THREAD.load = _Load(tensors, stubs, _FREE_COPIES + 16 * len(data))
    # The C unpickler reads a buffered stream fastest: it asks a plain BytesIO for every few bytes.
    stream = io.BufferedReader(cast(io.RawIOBase, io.BytesIO(data)), min(len(data) + 1, 1 << 17))
    try:
        value = cast(Value, unpickler(stream, encoding="utf-8").load())
        if current.refused:
            raise unsafe_error(file, current.refused)
        current.finish()
    except _DAMAGE as error:
        if current.refused:
            raise unsafe_error(file, current.refused) from None
        raise SourceCorruptError(
            f"{file} {what}",
            file=file,
            found=f"{type(error).__name__}: {error}".rstrip(": "),
            why="the file is damaged, truncated or still being written, or PyTorch did not write it",
            next_step="save or copy the checkpoint again",
        ) from None
    finally:
        _THREAD.load = outer
    return value
