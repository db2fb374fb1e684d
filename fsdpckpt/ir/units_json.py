"""The units file: ``Units`` as a JSON document a person can read, and back, with everything in it checked.

``{"format": "fsdpckpt-units", "version": 1, ...}``: fields that hold their default (row-major ``stride``,
``requires_grad`` true) are left out. Version 2 has ``orders``, which only optimizers that differ by rank need.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from math import prod

from fsdpckpt.errors import SourceCorruptError, SourceUnrecognisedError, SourceUnsupportedError
from fsdpckpt.ir.dtypes import DTYPES, DType
from fsdpckpt.ir.units import Groups, RankOrder, Strategy, Unit, UnitParam, Units, flaws
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
    """``units`` as the JSON document of a units file; ``decode`` gives the same units back.

    ``how``: how they were found and proved, in words, for whoever reads the file; nothing reads it back.
    """
    return {
        "format": FORMAT,
        "version": VERSION if units.orders else 1,
        "program": f"fsdpckpt {__version__}",
        **({"how": list(how)} if how else {}),
        "use_orig_params": units.use_orig_params,
        "world_size": units.world_size,
        "shard_size": units.shard_size,
        "units": [_unit(unit) for unit in units.units],
        "unmanaged": [_param(param) for param in units.unmanaged],
        "shared": [list(pair) for pair in units.shared],
        "parameters": list(units.parameters),
        "groups": None if units.groups is None else [list(group) for group in units.groups],
        **({"orders": [_order(order) for order in units.orders]} if units.orders else {}),
    }


def _order(order: RankOrder) -> dict[str, Json]:
    return {"ranks": list(order.ranks), "groups": [list(group) for group in order.groups]}


def _unit(unit: Unit) -> dict[str, Json]:
    return {
        "prefix": unit.prefix,
        "strategy": unit.strategy.value,
        "param_dtype": unit.param_dtype.name if unit.param_dtype is not None else None,
        "params": [_param(param) for param in unit.params],
    }


def _param(param: UnitParam) -> dict[str, Json]:
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
    """A list one line an item, and a unit one line a field; everything smaller on one line."""
    indent = " " * (depth + 1)
    if isinstance(value, list) and value:
        return "[\n" + ",\n".join(indent + _lines(item, depth + 1) for item in value) + "\n" + " " * depth + "]"
    if isinstance(value, dict) and isinstance(value.get("params"), list):
        fields = [f"{indent}{json.dumps(name)}: {_params(name, item, depth + 1)}" for name, item in value.items()]
        return "{\n" + ",\n".join(fields) + "\n" + " " * depth + "}"
    return json.dumps(value)


def _params(name: str, value: Json, depth: int) -> str:
    if name != "params" or not isinstance(value, list) or not value:
        return json.dumps(value)
    indent = " " * (depth + 1)
    return "[\n" + ",\n".join(indent + json.dumps(item) for item in value) + "\n" + " " * depth + "]"


def loads(data: bytes, *, source: str) -> Units:
    """The units in the bytes of a units file; ``source`` names the file in errors. Raises SourceError."""
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
    fields = document if isinstance(document, dict) else {}
    _recognise(fields, source)
    reader = Fields(source)
    units: Units | None = None
    with suppress(TooManyWrongError):
        units = _decoded(fields, reader)
    wrong = reader.wrong or (flaws(units) if units is not None else [])
    if wrong or units is None:
        many = f"{len(wrong)} of its fields are wrong" + (", and more" if units is None else "")
        raise SourceCorruptError(
            f"{source}: not a valid units file: {many}"
            if len(wrong) > 1
            else f"{source}: not a valid units file: {wrong[0]}",
            details=wrong if len(wrong) > 1 else (),
            file=source,
            key=reader.where or None,
            why="it was edited by hand, or another program wrote it",
            next_step=_AGAIN,
        )
    return units


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


def _decoded(document: Mapping[str, object], reader: Fields) -> Units:
    reader.only(document, _FIELDS, "")
    if not isinstance(document.get("program", ""), str):
        reader.complain("program", "a string", document["program"])
    reader.strings(document.get("how", []), "how")
    return Units(
        units=tuple(
            _decoded_unit(reader.record(item, f"units[{number}]"), f"units[{number}]", reader)
            for number, item in enumerate(reader.items(document, "units", ""))
        ),
        use_orig_params=reader.flag(document, "use_orig_params", ""),
        parameters=reader.strings(document.get("parameters"), "parameters"),
        unmanaged=_decoded_params(document, "unmanaged", "", reader),
        shared=tuple(
            reader.pair(item, f"shared[{number}]") for number, item in enumerate(reader.items(document, "shared", ""))
        ),
        groups=None if document.get("groups") is None else _decoded_groups(document, "", reader),
        world_size=reader.count(document, "world_size"),
        shard_size=reader.count(document, "shard_size"),
        orders=tuple(
            _decoded_order(reader.record(item, f"orders[{number}]"), f"orders[{number}]", reader)
            for number, item in enumerate(reader.items(document, "orders", "") if "orders" in document else ())
        ),
    )


def _decoded_groups(fields: Mapping[str, object], where: str, reader: Fields) -> Groups:
    place = _place(where, "groups")
    groups = enumerate(reader.items(fields, "groups", where))
    return tuple(reader.strings(group, f"{place}[{number}]") for number, group in groups)


def _decoded_order(fields: Mapping[str, object], where: str, reader: Fields) -> RankOrder:
    reader.only(fields, _ORDER_FIELDS, where)
    return RankOrder(reader.ranks(fields.get("ranks"), f"{where}.ranks"), _decoded_groups(fields, where, reader))


def _decoded_unit(fields: Mapping[str, object], where: str, reader: Fields) -> Unit:
    reader.only(fields, _UNIT_FIELDS, where)
    return Unit(
        prefix=reader.string(fields, "prefix", where),
        params=_decoded_params(fields, "params", where, reader),
        strategy=reader.strategy(fields, "strategy", where),
        param_dtype=None if fields.get("param_dtype") is None else reader.dtype(fields, "param_dtype", where),
    )


def _decoded_params(fields: Mapping[str, object], name: str, where: str, reader: Fields) -> tuple[UnitParam, ...]:
    place = f"{where}.{name}" if where else name
    return tuple(
        _decoded_param(reader.record(item, f"{place}[{number}]"), f"{place}[{number}]", reader)
        for number, item in enumerate(reader.items(fields, name, where))
    )


def _decoded_param(fields: Mapping[str, object], where: str, reader: Fields) -> UnitParam:
    reader.only(fields, _PARAM_FIELDS, where)
    stride = fields.get("stride")
    return UnitParam(
        name=reader.string(fields, "name", where),
        shape=reader.sizes(fields.get("shape"), f"{where}.shape"),
        dtype=reader.dtype(fields, "dtype", where),
        stride=None if stride is None else reader.sizes(stride, f"{where}.stride"),
        requires_grad=reader.flag(fields, "requires_grad", where) if "requires_grad" in fields else True,
    )


_MOST = 2**62
"""Elements: more than any tensor has, and int64 still holds the bytes' sums that follow from half of it."""


_MOST_WRONG = 1000
"""Complaints: a file with more of them is no units file at all, and might go on for gigabytes."""


class TooManyWrongError(Exception):
    """So many fields are wrong that the rest was not looked at."""


class Fields:
    """Reads typed fields. ``wrong``: what was wrong so far, one sentence each; ``where``: the first place of it."""

    def __init__(self, source: str) -> None:
        self.source = source
        self.wrong: list[str] = []
        self.where = ""

    def complain(self, where: str, expected: str, found: object) -> None:
        """Note that the field at ``where`` is wrong."""
        self._note(where, f"{where}: expected {expected}, found {_brief(found)}")

    def _note(self, where: str, text: str) -> None:
        self.where = self.where or where
        self.wrong.append(text)
        if len(self.wrong) >= _MOST_WRONG:
            raise TooManyWrongError

    def only(self, fields: Mapping[str, object], known: Collection[str], where: str) -> None:
        """Complain of every field that is not ``known``: a misspelt one would otherwise count as left out."""
        for name in fields:
            if name not in known:
                place = f"{where}.{name}" if where else name
                self._note(place, f"{_brief(place)}: no such field; the fields are {', '.join(known)}")

    def record(self, value: object, where: str) -> Mapping[str, object]:
        if isinstance(value, dict):
            return value
        self.complain(where, "an object", value)
        return {}

    def items(self, fields: Mapping[str, object], name: str, where: str) -> Sequence[object]:
        value = fields.get(name)
        if isinstance(value, list):
            return value
        self.complain(_place(where, name), "a list", value)
        return ()

    def string(self, fields: Mapping[str, object], name: str, where: str) -> str:
        value = fields.get(name)
        if isinstance(value, str):
            return value
        self.complain(_place(where, name), "a string", value)
        return ""

    def flag(self, fields: Mapping[str, object], name: str, where: str) -> bool:
        value = fields.get(name)
        if isinstance(value, bool):
            return value
        self.complain(_place(where, name), "true or false", value)
        return False

    def count(self, fields: Mapping[str, object], name: str) -> int | None:
        value = fields.get(name)
        if value is None or (type(value) is int and 1 <= value < _MOST):
            return value
        self.complain(name, "a number of ranks or null", value)
        return None

    def strings(self, value: object, where: str) -> tuple[str, ...]:
        if isinstance(value, list) and all(isinstance(item, str) for item in value):
            return tuple(value)
        self.complain(where, "a list of names", value)
        return ()

    def pair(self, value: object, where: str) -> tuple[str, str]:
        if isinstance(value, list) and len(value) == 2 and all(isinstance(item, str) for item in value):
            return value[0], value[1]
        self.complain(where, "the later and the first name of a shared parameter", value)
        return "", ""

    def ranks(self, value: object, where: str) -> tuple[int, ...]:
        if isinstance(value, list) and all(type(item) is int and 0 <= item < _MOST for item in value):
            return tuple(value)
        self.complain(where, "a list of ranks", value)
        return ()

    def sizes(self, value: object, where: str) -> tuple[int, ...]:
        if (
            isinstance(value, list)
            and all(type(item) is int and 0 <= item < _MOST for item in value)
            and prod(value) < _MOST
        ):
            return tuple(value)
        self.complain(where, "a list of numbers of elements", value)
        return ()

    def dtype(self, fields: Mapping[str, object], name: str, where: str) -> DType:
        value = fields.get(name)
        if isinstance(value, str) and value in DTYPES:
            return DTYPES[value]
        self.complain(_place(where, name), "the name of a dtype, as float32", value)
        return DTYPES["float32"]

    def strategy(self, fields: Mapping[str, object], name: str, where: str) -> Strategy:
        value = fields.get(name)
        if isinstance(value, str) and value in frozenset(Strategy):
            return Strategy(value)
        self.complain(_place(where, name), " or ".join(Strategy), value)
        return Strategy.FULL_SHARD


def _place(where: str, name: str) -> str:
    return f"{where}.{name}" if where else name


def _brief(value: object) -> str:
    text = "nothing" if value is None else repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
