"""The units file: encodes ``Units`` as a JSON document that people can read, and decodes it with every field checked.

``{"format": "fsdpckpt-units", "version": 1, ...}``: fields with their default value (row-major ``stride``,
``requires_grad`` true) are left out. Version 2 has ``orders``, which only optimizers that differ by rank need, version
3 ``optimizers``, which only several of one model need.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from math import prod
from typing import Any, TypeAlias

from fsdpckpt.errors import SourceCorruptError, SourceUnrecognisedError, SourceUnsupportedError
from fsdpckpt.ir.dtypes import DTYPES
from fsdpckpt.ir.parameters import Parameter
from fsdpckpt.ir.unit_lists import ContradictoryUnitsError, flaws, units_of_lists
from fsdpckpt.ir.units import Groups, RankOrder, Strategy, Unit, Units
from fsdpckpt.ir.values import Json
from fsdpckpt.text import truncate
from fsdpckpt.version import __version__

FORMAT = "fsdpckpt-units"
VERSION = 3
UNITS_FILE = "units.json"
"""The name that ``save_units`` gives the file in a checkpoint's directory."""

MAX_BYTES = 1 << 26
"""The longest units file: a parameter takes about 200 bytes, and today's models have fewer than 100,000."""

_WRITE_AGAIN = "write it again with fsdpckpt.save_units in the training script, or with `fsdpckpt units`"


def encode(units: Units, *, how: Sequence[str] = ()) -> dict[str, Json]:
    """``units`` as the JSON document of a units file; ``decode`` is the inverse.

    ``how``: how the units were found and proved, for people who read the file; ``decode`` ignores it.
    """
    return {
        "format": FORMAT,
        "version": _version(units),
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
        **({"optimizers": [_encode_optimizer(*each) for each in units.optimizers]} if units.optimizers else {}),
    }


def _version(units: Units) -> int:
    """The first version that has all that is in ``units``: programs of that time read the file."""
    if units.optimizers:
        return 3
    return 2 if units.orders else 1


def _encode_optimizer(name: str, groups: Groups) -> dict[str, Json]:
    return {"name": name, "groups": [list(group) for group in groups]}


def _encode_order(order: RankOrder) -> dict[str, Json]:
    return {"ranks": list(order.ranks), "groups": [list(group) for group in order.groups]}


def _encode_unit(unit: Unit) -> dict[str, Json]:
    return {
        "prefix": unit.prefix,
        "strategy": unit.strategy.value,
        "param_dtype": unit.param_dtype.name if unit.param_dtype is not None else None,
        "params": [_encode_param(param) for param in unit.params],
    }


def _encode_param(param: Parameter) -> dict[str, Json]:
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


def loads(data: bytes, *, source: str, labels: Sequence[str] = ()) -> Units | None:
    """``units_in`` what ``parsed`` makes of ``data``."""
    return units_in(parsed(data, source=source), source=source, labels=labels)


def parsed(data: bytes, *, source: str) -> object:
    """The JSON document in a units file, or in a manifest; ``source`` names the file in errors. Raises SourceError."""
    if len(data) > MAX_BYTES:
        raise SourceUnrecognisedError(
            f"{source} is larger than a units file can be",
            file=source,
            expected=f"at most {MAX_BYTES:,} bytes",
            next_step=_WRITE_AGAIN,
        )
    try:
        document: object = json.loads(data, object_pairs_hook=_no_duplicates)
    except (ValueError, RecursionError) as error:
        raise SourceCorruptError(
            f"{source}: not a JSON document: {error}",
            file=source,
            why="the file was truncated, or is not a units file",
            next_step=_WRITE_AGAIN,
        ) from None
    return document


def units_in(document: object, *, source: str, labels: Sequence[str] = ()) -> Units | None:
    """The units that a units file, or a manifest, records; ``document``: what ``parsed`` makes of it.

    ``labels``: those of a named section and its model. A manifest has units of each section: the first of these that
    it has, else those of the main ones, None if it has none of these either. Raises SourceError.
    """
    # Other JSON has no fields: a document of null is refused as one, and is no manifest of other sections' units.
    recorded = _recorded(document if isinstance(document, dict) else {}, source, labels)
    return None if recorded is None else decode(recorded, source=source)


def _recorded(document: dict[str, Json], source: str, labels: Sequence[str]) -> object:
    """The units that a manifest (``fsdpckpt.json``) records, None if only of other sections; every other document
    itself.
    """
    if document.get("program") != "fsdpckpt" or "units" not in document:
        return document
    entries = document.get("section_units")
    of_section = {
        f"{entry.get('section')}:{entry.get('name')}": entry.get("units")
        for entry in (entries if isinstance(entries, list) else ())
        if isinstance(entry, dict)
    }
    for label in labels:
        if label in of_section:
            return of_section[label]
    if document["units"] is None and of_section:
        return None
    if document["units"] is None:
        raise SourceUnrecognisedError(
            f"{source} records no units: what lies beside it is not flattened",
            file=source,
            key="units",
            next_step="give the fsdpckpt.json of a flattened target, or a units file: " + _WRITE_AGAIN,
        )
    recorded: object = document["units"]
    return recorded


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
    wrong: list[tuple[str, str]] = []  # where, and what is wrong there

    def complain(where: str, text: str) -> None:
        wrong.append((where, f"{where}: {text}"))
        if len(wrong) >= _MAX_WRONG:
            raise _TooManyWrongError

    fields: dict[str, Any] | None = None
    with suppress(_TooManyWrongError):
        fields = _UNITS(document, "", complain)
    texts = [text for _, text in wrong]
    if not texts and fields is not None:
        try:
            units = units_of_lists(**fields)
            texts = flaws(units)
        except ContradictoryUnitsError as error:
            texts = error.flaws
        else:
            if not texts:
                return units
    count = f"{len(texts)} of its fields are wrong" + (", and more" if fields is None else "")
    raise SourceCorruptError(
        f"{source}: not a valid units file: {count if len(texts) > 1 else texts[0]}",
        details=texts if len(texts) > 1 else (),
        file=source,
        key=wrong[0][0] if wrong else None,
        why="it was edited by hand, or another program wrote it",
        next_step=_WRITE_AGAIN,
    )


def _recognise(document: Mapping[str, object], source: str) -> None:
    found = document.get("format")
    if found != FORMAT:
        raise SourceUnrecognisedError(
            f"{source} is not a units file",
            file=source,
            key="format",
            expected=repr(FORMAT),
            found=truncate(found),
            next_step=_WRITE_AGAIN,
        )
    version = document.get("version")
    if type(version) is not int or version < 1:
        raise SourceCorruptError(
            f"{source}: the units file's version is not a number", file=source, key="version", next_step=_WRITE_AGAIN
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


_MAX_ELEMENTS = 2**62
"""More than any tensor has; sums of byte counts still fit in int64."""

_MAX_WRONG = 1000
"""Checking stops after this many errors, so that a wrong file does not fill memory."""

_MAX_NAME = 60  # characters of an unknown field's name in a message


class _TooManyWrongError(Exception):
    """So many fields are wrong that the rest is not checked."""


# A reader takes a value, its path in the document, and ``complain``, which it calls with what is wrong there.
_Complain: TypeAlias = Callable[[str, str], None]
_Reader: TypeAlias = Callable[[Any, str, _Complain], Any]


def _value(
    expected: str, accepts: Callable[[Any], bool], convert: Callable[[Any], Any] = lambda value: value
) -> _Reader:
    """A value that ``accepts`` takes, converted; ``expected`` describes it. None for any other."""

    def read(value: Any, where: str, complain: _Complain) -> Any:
        if accepts(value):
            return convert(value)
        return complain(where, f"expected {expected}, found {'nothing' if value is None else truncate(value)}")

    return read


def _list_of(item: _Reader) -> _Reader:
    """A list; ``item`` reads each of its items."""

    def read(value: Any, where: str, complain: _Complain) -> tuple[Any, ...]:
        items = _LIST(value, where, complain) or ()
        return tuple(item(value, f"{where}[{index}]", complain) for index, value in enumerate(items))

    return read


def _or_null(reader: _Reader) -> _Reader:
    return lambda value, where, complain: None if value is None else reader(value, where, complain)


def _record(
    make: Callable[..., Any], fields: Mapping[str, _Reader], defaults: Mapping[str, Any] | None = None
) -> _Reader:
    """An object with these ``fields``, as keywords of ``make``. ``defaults``: of the fields that may be left out.

    Complains of any other field: a misspelt one would otherwise count as left out.
    """

    def read(value: Any, where: str, complain: _Complain) -> Any:
        head = f"{where}." if where else ""
        record = {**(defaults or {}), **(_OBJECT(value, where, complain) or {})}
        for name in record:
            if name not in fields:
                complain(f"{head}{name[:_MAX_NAME]}", f"no such field; the fields are {', '.join(fields)}")
        return make(**{name: reader(record.get(name), head + name, complain) for name, reader in fields.items()})

    return read


def _is_numbers(value: object) -> bool:
    return isinstance(value, list) and all(type(item) is int and 0 <= item < _MAX_ELEMENTS for item in value)


def _is_names(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def _is_name_of(names: Collection[str]) -> Callable[[object], bool]:
    return lambda value: isinstance(value, str) and value in names


_OBJECT = _value("an object", lambda value: isinstance(value, dict))
_LIST = _value("a list", lambda value: isinstance(value, list))
_STRING = _value("a string", lambda value: isinstance(value, str))
_FLAG = _value("true or false", lambda value: isinstance(value, bool))
_RANKS_OR_NULL = _value(
    "a number of ranks or null",
    lambda value: value is None or (type(value) is int and 1 <= value < _MAX_ELEMENTS),
)
_NAMES = _value("a list of names", _is_names, tuple)
_PAIR = _value(
    "the later and the first name of a shared parameter", lambda value: _is_names(value) and len(value) == 2, tuple
)
_RANKS = _value("a list of ranks", _is_numbers, tuple)
_STRIDES = _value("a list of numbers of elements", _is_numbers, tuple)
_SIZES = _value(
    "a list of numbers of elements", lambda value: _is_numbers(value) and prod(value) < _MAX_ELEMENTS, tuple
)
_DTYPE = _value("the name of a dtype, as float32", _is_name_of(DTYPES), DTYPES.__getitem__)
_STRATEGY = _value(" or ".join(Strategy), _is_name_of(frozenset(Strategy)), Strategy)

_PARAM = _record(
    Parameter,
    {"name": _STRING, "shape": _SIZES, "dtype": _DTYPE, "stride": _or_null(_STRIDES), "requires_grad": _FLAG},
    defaults={"requires_grad": True},
)
_UNIT = _record(
    Unit, {"prefix": _STRING, "params": _list_of(_PARAM), "strategy": _STRATEGY, "param_dtype": _or_null(_DTYPE)}
)
_RANK_ORDER = _record(RankOrder, {"ranks": _RANKS, "groups": _list_of(_NAMES)})
_OPTIMIZER = _record(lambda name, groups: (name, groups), {"name": _STRING, "groups": _list_of(_NAMES)})
_HEAD: Mapping[str, _Reader] = {
    "format": lambda *_: None,  # checked before
    "version": lambda *_: None,
    "program": _STRING,
    "how": _NAMES,
}
_UNITS = _record(
    lambda **fields: {name: value for name, value in fields.items() if name not in _HEAD},
    {
        **_HEAD,
        "units": _list_of(_UNIT),
        "use_orig_params": _FLAG,
        "parameters": _NAMES,
        "unmanaged": _list_of(_PARAM),
        "shared": _list_of(_PAIR),
        "groups": _or_null(_list_of(_NAMES)),
        "world_size": _RANKS_OR_NULL,
        "shard_size": _RANKS_OR_NULL,
        "orders": _list_of(_RANK_ORDER),
        "optimizers": _list_of(_OPTIMIZER),
    },
    defaults={"program": "", "how": [], "orders": [], "optimizers": []},
)
