"""Fields of a parsed units file with their types: wrong ones are collected, each with its place, and none raises."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from math import prod

from fsdpckpt.ir.dtypes import DTYPES, DType
from fsdpckpt.ir.units import Strategy

__all__ = ["Fields", "TooManyWrongError"]

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
                self._note(place, f"{_brief(place)}: no such field; there are {', '.join(known)}")

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
