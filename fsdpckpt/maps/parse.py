"""Reads the file of a map: TOML or JSON. It is data: nothing in it is run.

Raises UsageError for what is no map, with the rule that is wrong; SourceMissingError if there is no such file.
"""

from __future__ import annotations

import hashlib
import json
import tomllib
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Literal, NoReturn, TypeVar

from fsdpckpt import flags
from fsdpckpt.errors import SourceMissingError, UsageError
from fsdpckpt.ir import Section
from fsdpckpt.maps.names import Pattern
from fsdpckpt.maps.rules import LayoutMap, MapRule, Value, flaws
from fsdpckpt.maps.steps import Cat, Size, Split, Stack, Step, Transpose, Unstack, count_after, rearrange, size_of

FORMAT = 1
MAX_BYTES = 1 << 20  # a map is a page of text
_JSON = ".json"
_SECTIONS = (Section.MODEL.value, Section.OPTIM.value)
_Made = TypeVar("_Made")


def read_map(path: str) -> LayoutMap:
    """The map in the file at ``path``."""
    try:
        with open(path, "rb") as file:
            data = file.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:  # ValueError: a NUL byte in the path
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise SourceMissingError(
            f"{flags.map_(path)}: {reason}",
            file=path,
            next_step="give the path of a map, or the name of a built-in one",
        ) from error
    return parse_map(data, path)


def parse_map(data: bytes, name: str) -> LayoutMap:
    """The map that ``data`` is, in JSON if ``name`` ends so, else in TOML."""
    parser = _MapParser(name)
    if len(data) > MAX_BYTES:
        parser.fail(f"it has more than {MAX_BYTES:,} bytes, and is no map")
    try:
        text = data.decode()
        document = json.loads(text) if name.endswith(_JSON) else tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        parser.fail(f"it is no {'JSON' if name.endswith(_JSON) else 'TOML'}: {error}")
    return parser.layout_map(document, hashlib.sha256(data).hexdigest())


class _MapParser:
    """``name``: of the map, for messages; ``_at``: the rule that is being read."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._at = ""

    def fail(self, what: str, *, expected: str | None = None, found: object = None) -> NoReturn:
        raise UsageError(
            f"{self._name}: {self._at}{what}",
            file=self._name,
            expected=expected,
            found=None if found is None else repr(found),
            next_step="correct it; docs/maps.md describes the file",
        )

    def layout_map(self, document: object, sha256: str) -> LayoutMap:
        table = self._table(document, "it", ("format", "description", "tested", "rest", "values", "rule"))
        if table.get("format") != FORMAT:
            self.fail("its format is not known", expected=f"format = {FORMAT}", found=table.get("format", "none"))
        rest = table.get("rest")
        if rest not in ("keep", "error"):
            self.fail(
                "it does not say what becomes of parameters that no rule names",
                expected='rest = "keep" or rest = "error"',
                found=rest if rest is not None else "none",
            )
        values = {
            name: self._value(name, value) for name, value in self._table(table.get("values", {}), "values").items()
        }
        listed = table.get("rule")
        if not isinstance(listed, list) or not listed:
            self.fail("it has no rule")
        rules = tuple(self._rule(number, each, values) for number, each in enumerate(listed, 1))
        description, tested = (self._text(table, word) for word in ("description", "tested"))
        return LayoutMap(self._name, rules, rest == "keep", sha256, values, description, tested)

    def _text(self, table: Mapping[str, object], name: str) -> str:
        value = table.get(name, "")
        if not isinstance(value, str):
            self.fail(f"its {name} is no text", found=value)
        return value

    def _table(self, value: object, what: str, known: Collection[str] = ()) -> Mapping[str, object]:
        if not isinstance(value, dict):
            self.fail(f"{what} is no table", found=value)
        odd = next((name for name in value if known and name not in known), None)
        if odd is not None:
            self.fail(f"{what} has {odd!r}", expected=", ".join(known), found=odd)
        return value

    def _value(self, name: str, value: object) -> Value:
        self._at = f"value {name}: "
        if type(value) is int and value > 0:
            return Value(default=value)
        fields = [value] if isinstance(value, str) else value
        if not isinstance(fields, list) or not all(isinstance(field, str) for field in fields):
            self.fail("it is neither a number nor a field of config.json", found=value)
        sizes = tuple(self._of(size_of, field) for field in fields)
        self._at = ""
        return Value(sizes)

    def _rule(self, number: int, value: object, values: Mapping[str, Value]) -> MapRule:
        self._at = f"rule {number}: "
        table = self._table(value, "it", ("from", "to", "steps", "optional", "section", "tie", "untie"))
        sources, targets = (self._patterns(table.get(side), side) for side in ("from", "to"))
        words: tuple[Literal["tie", "untie"], ...] = ("tie", "untie")
        copies = [word for word in words if self._flag(table, word)]
        steps = self._steps(table.get("steps", []), len(sources), len(targets), values)
        if len(copies) > 1:
            self.fail("it has tie and untie")
        section = table.get("section")
        if section not in (None, *_SECTIONS):
            self.fail("section is no section", expected=" or ".join(_SECTIONS), found=section)
        rule = MapRule(
            number,
            sources,
            targets,
            steps,
            self._flag(table, "optional"),
            copies[0] if copies else "",
            Section(section) if section is not None else None,
        )
        for each in (rule, rule.inverse()):
            if wrong := flaws(each):
                self.fail("; ".join(wrong))
        self._at = ""
        return rule

    def _flag(self, table: Mapping[str, object], name: str) -> bool:
        value = table.get(name, False)
        if not isinstance(value, bool):
            self.fail(f"{name} is true or false", found=value)
        return value

    def _patterns(self, value: object, side: str) -> tuple[Pattern, ...]:
        texts = [value] if isinstance(value, str) else value
        if not isinstance(texts, list) or not texts or not all(isinstance(text, str) for text in texts):
            self.fail(f"{side} is no pattern of names, and no list of them", found=value)
        if len(set(texts)) != len(texts):
            self.fail(f"{side} has a pattern twice")
        return tuple(self._of(Pattern, text) for text in texts)

    def _of(self, make: Callable[[str], _Made], text: str) -> _Made:
        try:
            return make(text)
        except ValueError as error:
            self.fail(str(error))

    def _steps(self, value: object, count: int, last: int, values: Mapping[str, Value]) -> tuple[Step, ...]:
        """The steps of a rule with ``count`` patterns in from and ``last`` in to."""
        if not isinstance(value, list):
            self.fail("steps is no list", found=value)
        steps: list[Step] = []
        for each in value:
            step = self._step(self._table(each, "a step"), count, last, values)
            count = count_after(step, count)
            steps.append(step)
        return tuple(steps)

    def _step(self, table: Mapping[str, object], count: int, last: int, values: Mapping[str, Value]) -> Step:
        kind = next((name for name in _STEPS if name in table), None)
        if kind is None:
            self.fail("a step is not known", expected=", ".join(_STEPS), found=", ".join(table) or "nothing")
        self._table(table, f"{kind}", (kind, *_STEPS[kind]))
        match kind:
            case "stack" | "unstack":
                place = table[kind]
                if not isinstance(place, str):
                    self.fail(f"{kind} takes the name in braces whose numbers are stacked", found=place)
                dim = self._dim(table.get("dim", 0), kind)
                return Stack(place, dim) if kind == "stack" else Unstack(place, dim)
            case "cat" | "split":
                several = count if kind == "cat" else last
                sizes = self._sizes(table.get("sizes", [1] * several), values)
                dim = self._dim(table[kind], kind)
                return Cat(dim, sizes) if kind == "cat" else Split(dim, sizes)
            case "transpose":
                dims = table[kind]
                if not isinstance(dims, list) or len(dims) != 2:
                    self.fail("transpose takes two dimensions", found=dims)
                first, second = (self._dim(dim, kind) for dim in dims)
                return Transpose(first, second, self._positions(table))
        axes = self._table(table.get("axes", {}), "axes")
        sizes_of = {axis: self._size(size, values) for axis, size in axes.items()}
        text = table[kind]
        if not isinstance(text, str):
            self.fail("rearrange takes a text", found=text)
        of = self._positions(table)
        return self._of(lambda written: rearrange(written, sizes_of, of), text)

    def _positions(self, table: Mapping[str, object]) -> tuple[int, ...] | None:
        """Which of several tensors a step is for."""
        of = table.get("of")
        if of is None:
            return None
        if not isinstance(of, list) or not of:
            self.fail("of is no list of positions", found=of)
        return tuple(self._dim(each, "of") for each in of)

    def _dim(self, value: object, kind: str) -> int:
        if type(value) is not int or value < 0:
            self.fail(f"{kind}: {'a position' if kind == 'of' else 'a dimension'} is a number from 0 on", found=value)
        return value

    def _sizes(self, value: object, values: Mapping[str, Value]) -> tuple[Size, ...]:
        if not isinstance(value, list) or len(value) < 2:
            self.fail("sizes is no list of two or more", found=value)
        return tuple(self._size(each, values) for each in value)

    def _size(self, value: object, values: Mapping[str, Value]) -> Size:
        text = str(value) if type(value) is int and value > 0 else value
        if not isinstance(text, str):
            self.fail("a size is a number from 1 on, or the name of a value", found=value)
        size = self._of(size_of, text)
        missing = next((name for name in size.names if name not in values), None)
        if missing is not None:
            self.fail(f"{missing} is no value of the map", expected=_listed(values), found=missing)
        return size


_STEPS: Mapping[str, Sequence[str]] = {
    "stack": ("dim",),
    "unstack": ("dim",),
    "cat": ("sizes",),
    "split": ("sizes",),
    "transpose": ("of",),
    "rearrange": ("axes", "of"),
}


def _listed(values: Mapping[str, Value]) -> str:
    return ", ".join(values) or "a [values] table"
