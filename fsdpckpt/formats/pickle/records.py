"""Takes the records of a save out of a pickle: equal objects by the million become columns, the rest stays a pickle.

A checkpoint of a large run describes millions of chunks in the same few opcodes, which differ in numbers and names
only. A ``Record`` says what these opcodes are, as a regular expression. ``Scanner`` walks the pickle from opcode to
opcode, copies each, and puts a persistent id in the place of records: their operands become columns. What is left is a
small pickle, which the checked loader reads as it reads any other.

The scanner gives no reference a meaning, neither classes nor names of attributes: the loader does. Where a *form* (all
opcodes of a record but its operands) occurs first, the record itself stays in the pickle, as an example beside the
persistent id, and ``ScanResolver`` has what the loader makes of it compared with its row. All records of one form have
the same references, so they differ from the example in their operands alone. References to texts go the same way: the
loader says which texts these are.

What cannot be proved to come out as the loader would read it is refused (``NotScannedError``), and the pickle is loaded
without the scanner: an opcode that no save needs; a value put twice under one memo number; a reference into a record to
something else than a text; a frame that begins within an opcode; records that are not added to a list or a dict.
"""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from functools import cached_property
from operator import itemgetter
from typing import NamedTuple, TypeAlias, cast

from fsdpckpt.formats.pickle.operands import Columns, NotScannedError
from fsdpckpt.formats.pickle.patterns import GET, INTEGER, SHORT_TEXT, SIZES

Row: TypeAlias = dict[str, object]
"""The fields of one record: an int, a tuple of ints, or the number of a text."""


class Reads(Enum):
    """What a field of a record is, and what its column has."""

    NUMBER = auto()  # from 0 on; None is 0
    SIZES = auto()  # a tuple of numbers: a row as long as the longest, the count of its numbers is in ``NAME_ndim``
    TEXT = auto()  # a text, or a reference to one: its number in ``Scan.texts``
    LIST = auto()  # records of another kind, in a list


class RecordPart(NamedTuple):
    """Consecutive opcodes of a record: a field, or (``reads`` is None) the same in all records of a form."""

    pattern: bytes
    name: str = ""
    reads: Reads | None = None


def same(*patterns: bytes) -> RecordPart:
    return RecordPart(b"".join(patterns))


def number(name: str) -> RecordPart:
    return RecordPart(INTEGER, name, Reads.NUMBER)


def number_or_none(name: str) -> RecordPart:
    return RecordPart(INTEGER + rb"|N", name, Reads.NUMBER)


def sizes(name: str) -> RecordPart:
    return RecordPart(SIZES, name, Reads.SIZES)


def text(name: str) -> RecordPart:
    return RecordPart(GET + rb"|" + SHORT_TEXT + rb"\x94", name, Reads.TEXT)


def list_of(record: Record) -> RecordPart:
    """The records of a list, appended in batches or as a single one."""
    batches = rb"(?:\((?:" + record.pattern + rb")++e)++"
    return RecordPart(batches + rb"|" + record.pattern + rb"a", record.name, Reads.LIST)


@dataclass(frozen=True, eq=False)
class Record:
    """One kind of record: an instance, so that its first opcodes are a reference and ``patterns.NEW``. ``end``: its
    opcodes after the last part.

    ``values``: how many values it leaves, one for a list or two for a dict. ``added``: the opcode that adds a batch of
    such values to the list or dict. ``inner``: the kind of record that it holds in a list, if it does.
    """

    name: str
    parts: tuple[RecordPart, ...]
    end: bytes
    values: int = 1
    added: bytes = b"e"
    inner: Record | None = None

    @cached_property
    def pattern(self) -> bytes:
        return b"".join(rb"(?:" + part.pattern + rb")" for part in self.parts) + self.end

    @cached_property
    def in_a_row(self) -> bytes:
        """A pattern for one or several such records; those with lists come one by one, between the keys of a dict."""
        return self.pattern if self.inner is not None else rb"(?=[hj])" + self.several(self.pattern) + rb"+"

    def several(self, pattern: bytes) -> bytes:
        """A pattern for one or several records, each of which is matched by ``pattern``, in batches."""
        return rb"(?:(?:" + self.added + rb"\()?" + pattern + rb")+"

    @cached_property
    def form_of(self) -> Callable[[Sequence[bytes]], tuple[bytes, ...]]:
        """Returns the parts that are no fields, of those of a record."""
        return itemgetter(*[at for at, part in enumerate(self.parts) if part.reads is None])

    @cached_property
    def by_parts(self) -> re.Pattern[bytes]:
        """A record, with a group for each part."""
        return re.compile(b"".join(rb"(" + part.pattern + rb")" for part in self.parts) + self.end, re.DOTALL)


class RecordForm:
    """All opcodes of a record that are no fields: ``opcodes``, by part. ``number``: of the form.

    ``fields`` matches a record of this form, with a group for each field; ``several`` matches one or several.
    """

    def __init__(self, record: Record, opcodes: Sequence[bytes], number: int) -> None:
        self.record, self.number = record, number
        fixed = iter(opcodes)
        self.parts = [(part, next(fixed) if part.reads is None else b"") for part in record.parts]
        self.fields, self.several = (
            re.compile(self._pattern(rb"("), re.DOTALL),
            re.compile(record.several(self._pattern(rb"(?:")) + rb"+", re.DOTALL),
        )

    def _pattern(self, group: bytes) -> bytes:
        """The opcodes, with fields in groups that begin so."""
        pattern = b"".join(
            re.escape(opcodes) if part.reads is None else group + part.pattern + rb")" for part, opcodes in self.parts
        )
        return pattern + self.record.end


@dataclass(frozen=True, slots=True, eq=False)
class RecordRun:
    """Takes the place of records in the loaded value: of rows ``begin`` to ``end`` of the columns. It is an item in a
    list, or a key in a dict, with the value None.

    A record that holds others in a list is a run by itself: these rows are those of its list, and ``holder`` is its
    number in ``Scan.holders``.
    """

    record: Record
    begin: int
    end: int
    holder: int = -1

    def __setstate__(self, _state: object) -> None:
        raise TypeError("what stands for records has no state")


class Example(NamedTuple):
    """The first record of form number ``form``, and what its columns say: the loader reads this one, too."""

    record: Record
    form: int
    row: Row


class Holder(NamedTuple):
    """A record that holds others in a list: the number of its form, and its own fields."""

    form: int
    row: Row


@dataclass(slots=True, eq=False)
class Scan:
    """``pickle``: the rest. Run n is in it as the persistent id n, or as (n, the values of its examples, its texts).

    ``columns``: by the name of the record, in parts. ``texts``: None for one that only the loader knows; ``named``:
    the numbers of the texts that run n brings. ``examples``: those of run n. ``forms``: how many there are.
    """

    pickle: bytes
    runs: list[RecordRun]
    columns: dict[str, list[Columns]]
    holders: list[Holder]
    texts: list[str | None]
    named: dict[int, list[int]]
    examples: dict[int, list[Example]]


class ScanResolver:
    """Resolves the persistent ids of ``scan``. ``compare``: raises if the values of an example are not what its row
    says; texts are resolved in it.

    Each run must come once and in order: so no persistent id that the file itself has can be taken for one.
    """

    def __init__(self, scan: Scan, compare: Callable[[Example, Sequence[object]], None]) -> None:
        self._scan, self._compare = scan, compare
        self._next = 0

    def run(self, persistent_id: object) -> RecordRun:
        """Raises UnpicklingError for a persistent id that stands for no run."""
        scan, expected = self._scan, self._next
        which = persistent_id if type(persistent_id) is tuple and len(persistent_id) == 3 else (persistent_id, (), ())
        number, values, texts = which
        if type(number) is not int or number != expected or expected >= len(scan.runs):
            raise pickle.UnpicklingError("unexpected persistent id")
        self._next += 1
        if number is persistent_id and expected not in scan.examples:  # as most are
            return scan.runs[expected]
        examples, named = scan.examples.get(expected, []), scan.named.get(expected, [])
        if not (isinstance(values, tuple) and isinstance(texts, tuple) and len(texts) == len(named)):
            raise pickle.UnpicklingError("unexpected persistent id")
        for place, name in zip(named, texts, strict=True):
            if type(name) is not str:
                raise pickle.UnpicklingError("a name that is no text")
            scan.texts[place] = name
        at = 0
        for example in examples:
            record = example.record
            row = self._with_texts(record, example.row)
            self._compare(example._replace(row=row), values[at : at + record.values])
            at += record.values
        if at != len(values):
            raise pickle.UnpicklingError("unexpected persistent id")
        return scan.runs[expected]

    def _with_texts(self, record: Record, row: Row) -> Row:
        """The row with texts in place of their numbers."""
        texts = {
            part.name: self._scan.texts[cast(int, row[part.name])] for part in record.parts if part.reads is Reads.TEXT
        }
        return {**row, **texts}

    def finish(self) -> None:
        """Raises NotScannedError unless every run was resolved."""
        if self._next != len(self._scan.runs):
            raise NotScannedError("a run that is not loaded")
