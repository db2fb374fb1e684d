"""The units file: encodes ``Units`` as a JSON document that people can read, and decodes it with every field checked.

``{"format": "fsdpckpt-units", "version": 1, ...}``: fields with their default value (row-major ``stride``,
``requires_grad`` true) are left out. Version 2 has ``orders``, which only optimizers that differ by rank need.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from math import prod
from typing import Any, NamedTuple, cast

from fsdpckpt.errors import SourceCorruptError, SourceUnrecognisedError, SourceUnsupportedError
from fsdpckpt.ir.dtypes import DTYPES
from fsdpckpt.ir.units import RankOrder, Strategy, Unit, UnitParam, Units, flaws
from fsdpckpt.version import __version__

Json = None | bool | int | float | str | list["Json"] | dict[str, "Json"]

FORMAT = "fsdpckpt-units"
VERSION = 2
UNITS_FILE = "units.json"
"""What ``save_units`` calls the file in a checkpoint's directory."""

MOST_BYTES = 1 << 26
"""Of a units file: a parameter takes about 200, and the models of today have fewer than 100,000."""

_AGAIN = "write it again with fsdpckpt.save_units in the training script, or with `fsdpckpt units`"
_UNIT_FIELDS = ("prefix", "strategy", "param_dtype", "params")
_PARAM_FIELDS = ("name", "shape", "dtype", "stride", "requires_grad")
_ORDER_FIELDS = ("ranks", "groups")
_FIELDS = (
    *("format", "version", "program", "how", "use_orig_params", "world_size", "shard_size"),
    *("units", "unmanaged", "shared", "parameters", "groups", "orders"),
)


def encode(units: Units, *, how: Sequence[str] = ()) -> dict[str, Json]:
    """``units`` as the JSON document of a units file; ``decode`` is the inverse.

    ``how``: how they were found and proved, for people who read the file; the program does not read it back.
    """
    return {
        "format": FORMAT,
        "version": VERSION if units.orders else 1,
        "program": f"fsdpckpt {__version__}",
        **({"how": list(how)} if how else {}),
        "use_orig_params": units.use_orig_params,
        "world_size": units.world_size,
        "shard_size": units.shard_size,
        "units": [_encode_unit(unit) for unit in units.units],
        "unmanaged": [_encode_param(param) for param in units.unmanaged],
        "shared": [list(pair) for pair in units.shared],
        "parameters": list(units.parameters),
        "groups": None if units.groups is None else [list(group) for group in units.groups],
        **({"orders": [_encode_order(order) for order in units.orders]} if units.orders else {}),
    }


def _encode_order(order: RankOrder) -> dict[str, Json]:
    return {"ranks": list(order.ranks), "groups": [list(group) for group in order.groups]}


def _encode_unit(unit: Unit) -> dict[str, Json]:
    return {
        "prefix": unit.prefix,
        "strategy": unit.strategy.value,
        "param_dtype": unit.param_dtype.name if unit.param_dtype is not None else None,
        "params": [_encode_param(param) for param in unit.params],
    }


def _encode_param(param: UnitParam) -> dict[str, Json]:
    fields: dict[str, Json] = {"name": param.name, "shape": list(param.shape), "dtype": param.dtype.name}
    if param.stride is not None:
        fields["stride"] = list(param.stride)
    if not param.requires_grad:
        fields["requires_grad"] = False
    return fields


def render(document: Mapping[str, Json]) -> str:
    """The text of a units file: indented, with one line a parameter, group and pair."""
    lines = [f" {json.dumps(name)}: {_lines(value, 1)}" for name, value in document.items()]
    return "{\n" + ",\n".join(lines) + "\n}\n"


def _lines(value: Json, depth: int) -> str:
    """A list with one line for each item, and a unit with one line for each field; everything smaller on one line."""
    indent = " " * (depth + 1)
    if isinstance(value, list) and value:
        return "[\n" + ",\n".join(indent + _lines(item, depth + 1) for item in value) + "\n" + " " * depth + "]"
    if isinstance(value, dict) and isinstance(value.get("params"), list):
        fields = [f"{indent}{json.dumps(name)}: {_lines(item, depth + 1)}" for name, item in value.items()]
        return "{\n" + ",\n".join(fields) + "\n" + " " * depth + "}"
    return json.dumps(value)


def loads(data: bytes, *, source: str) -> Units:
    """Parse a units file; ``source`` names the file in errors. Raises SourceError."""
    if len(data) > MOST_BYTES:
        raise SourceUnrecognisedError(
            f"{source} is larger than a units file can be",
            file=source,
            expected=f"at most {MOST_BYTES:,} bytes",
            next_step=_AGAIN,
        )
    try:
        document = json.loads(data, object_pairs_hook=_no_duplicates)
    except (ValueError, RecursionError) as error:
        raise SourceCorruptError(
            f"{source}: not a JSON document: {error}",
            file=source,
            why="the file was truncated, or is not a units file",
            next_step=_AGAIN,
        ) from None
    return decode(document, source=source)


def _no_duplicates(pairs: list[tuple[str, Json]]) -> dict[str, Json]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        raise ValueError(f"a field is given twice among {', '.join(repr(name) for name, _ in pairs[:12])}")
    return fields


def decode(document: object, *, source: str) -> Units:
    """The units of a parsed units file. ``source`` names the file (or what holds the document) in errors.

    Raises SourceUnrecognisedError for another kind of document, SourceUnsupportedError for a later version of it and
    SourceCorruptError, which lists every field that is wrong.
    """
    _recognise(document if isinstance(document, dict) else {}, source)
    complaints = _Complaints()
    units: Units | None = None
    with suppress(_TooManyWrongError):
        units = _decoded(_Fields(document, "", _FIELDS, complaints))
    wrong = complaints.texts or (flaws(units) if units is not None else [])
    if not wrong and units is not None:
        return units
    several = f"{len(wrong)} of its fields are wrong" + (", and more" if units is None else "")
    raise SourceCorruptError(
        f"{source}: not a valid units file: {several if len(wrong) > 1 else wrong[0]}",
        details=wrong if len(wrong) > 1 else (),
        file=source,
        key=complaints.where or None,
        why="it was edited by hand, or another program wrote it",
        next_step=_AGAIN,
    )


def _recognise(document: Mapping[str, object], source: str) -> None:
    found = document.get("format")
    if found != FORMAT:
        raise SourceUnrecognisedError(
            f"{source} is not a units file",
            file=source,
            key="format",
            expected=repr(FORMAT),
            found=repr(found)[:80],
            next_step=_AGAIN,
        )
    version = document.get("version")
    if type(version) is not int or version < 1:
        raise SourceCorruptError(
            f"{source}: the units file's version is not a number", file=source, key="version", next_step=_AGAIN
        )
    if version > VERSION:
        raise SourceUnsupportedError(
            f"{source}: the units file was written by a newer fsdpckpt",
            file=source,
            key="version",
            expected=f"at most {VERSION}",
            found=str(version),
            next_step="install a newer fsdpckpt",
        )


def _decoded(fields: _Fields) -> Units:
    fields.read("program", _STRING, absent="")  # nothing reads these two
    fields.read("how", _NAMES, absent=[])
    return Units(
        units=tuple(map(_decoded_unit, fields.records("units", _UNIT_FIELDS))),
        use_orig_params=fields.read("use_orig_params", _FLAG),
        parameters=fields.read("parameters", _NAMES),
        unmanaged=tuple(map(_decoded_param, fields.records("unmanaged", _PARAM_FIELDS))),
        shared=fields.items("shared", _PAIR),
        groups=fields.items("groups", _NAMES) if fields.has("groups") else None,
        world_size=fields.read("world_size", _COUNT),
        shard_size=fields.read("shard_size", _COUNT),
        orders=tuple(map(_decoded_order, fields.records("orders", _ORDER_FIELDS, absent=[]))),
    )


def _decoded_order(fields: _Fields) -> RankOrder:
    return RankOrder(fields.read("ranks", _RANKS), fields.items("groups", _NAMES))


def _decoded_unit(fields: _Fields) -> Unit:
    return Unit(
        prefix=fields.read("prefix", _STRING),
        params=tuple(map(_decoded_param, fields.records("params", _PARAM_FIELDS))),
        strategy=fields.read("strategy", _STRATEGY),
        param_dtype=fields.read("param_dtype", _DTYPE) if fields.has("param_dtype") else None,
    )


def _decoded_param(fields: _Fields) -> UnitParam:
    return UnitParam(
        name=fields.read("name", _STRING),
        shape=fields.read("shape", _SIZES),
        dtype=fields.read("dtype", _DTYPE),
        stride=fields.read("stride", _SIZES) if fields.has("stride") else None,
        requires_grad=fields.read("requires_grad", _FLAG, absent=True),
    )


class _Kind(NamedTuple):
    """What a field may hold, in words and as a check, and how to convert it."""

    expected: str
    accepts: Callable[[Any], bool]
    make: Callable[[Any], Any] = lambda value: value


_MOST = 2**62
"""Elements: more than any tensor has, and int64 still holds the bytes' sums that follow from half of it."""


def _is_numbers(value: object) -> bool:
    return isinstance(value, list) and all(type(item) is int and 0 <= item < _MOST for item in value)


def _is_names(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def _is_pair(value: object) -> bool:
    return _is_names(value) and len(cast("list[str]", value)) == 2


_LIST = _Kind("a list", lambda value: isinstance(value, list))
_STRING = _Kind("a string", lambda value: isinstance(value, str))
_FLAG = _Kind("true or false", lambda value: isinstance(value, bool))
_COUNT = _Kind("a number of ranks or null", lambda value: value is None or (type(value) is int and 1 <= value < _MOST))
_NAMES = _Kind("a list of names", _is_names, tuple)
_PAIR = _Kind("the later and the first name of a shared parameter", _is_pair, tuple)
_RANKS = _Kind("a list of ranks", _is_numbers, tuple)
_SIZES = _Kind("a list of numbers of elements", lambda value: _is_numbers(value) and prod(value) < _MOST, tuple)
_DTYPE = _Kind(
    "the name of a dtype, as float32", lambda value: isinstance(value, str) and value in DTYPES, DTYPES.__getitem__
)
_STRATEGY = _Kind(
    " or ".join(Strategy), lambda value: isinstance(value, str) and value in frozenset(Strategy), Strategy
)

_MOST_WRONG = 1000
"""Complaints: a file with more of them is no units file at all, and might go on for gigabytes."""


class _TooManyWrongError(Exception):
    """So many fields are wrong that the rest is not checked."""


@dataclass(slots=True)
class _Complaints:
    """What is wrong so far, one sentence each, and the first place of it."""

    texts: list[str] = field(default_factory=list)
    where: str = ""

    def add(self, where: str, text: str) -> None:
        self.where = self.where or where
        self.texts.append(text)
        if len(self.texts) >= _MOST_WRONG:
            raise _TooManyWrongError

    def refuse(self, value: object, where: str, expected: str) -> Any:
        """Complain that ``value`` is not what is ``expected``. Returns None in its place."""
        self.add(where, f"{where}: expected {expected}, found {_shortened(value)}")
        return None


class _Fields:
    """Reads the fields of the object ``value``, which is at ``where`` in the document.

    Complains of every field that is not ``known``: a misspelt one would otherwise count as left out.
    """

    def __init__(self, value: object, where: str, known: Collection[str], complaints: _Complaints) -> None:
        self._complaints = complaints
        self._head = f"{where}." if where else ""
        self._fields = value if isinstance(value, dict) else complaints.refuse(value, where, "an object") or {}
        for name in self._fields:
            if name not in known:
                place = f"{self._head}{name}"
                complaints.add(place, f"{_shortened(place)}: no such field; the fields are {', '.join(known)}")

    def has(self, name: str) -> bool:
        """Whether the field is there, and not null."""
        return self._fields.get(name) is not None

    def read(self, name: str, kind: _Kind, *, absent: object = None) -> Any:
        """The field converted by ``kind``, or ``absent`` if there is none. None for a wrong one."""
        value = self._fields.get(name, absent)
        if kind.accepts(value):
            return kind.make(value)
        return self._complaints.refuse(value, self._head + name, kind.expected)

    def items(self, name: str, kind: _Kind) -> tuple[Any, ...]:
        """Each item of the list in the field, converted by ``kind``."""
        refuse, head = self._complaints.refuse, self._head + name
        return tuple(
            kind.make(item) if kind.accepts(item) else refuse(item, f"{head}[{at}]", kind.expected)
            for at, item in enumerate(self.read(name, _LIST) or ())
        )

    def records(self, name: str, known: Collection[str], *, absent: object = None) -> Iterator[_Fields]:
        """The objects of the list in the field, each with fields that are ``known``."""
        for at, item in enumerate(self.read(name, _LIST, absent=absent) or ()):
            yield _Fields(item, f"{self._head}{name}[{at}]", known, self._complaints)


def _shortened(value: object) -> str:
    text = "nothing" if value is None else repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
