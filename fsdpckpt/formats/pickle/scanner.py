"""Scans a pickle for records (``records``)."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from fsdpckpt.formats.pickle.memo import Memo, TextsInRun
from fsdpckpt.formats.pickle.opcodes import COUNTED, opcode_end
from fsdpckpt.formats.pickle.operands import (
    MEMOIZE,
    Columns,
    NotScannedError,
    by_value,
    numbers_of,
    references_of,
    sizes_of,
    smallest_integers,
)
from fsdpckpt.formats.pickle.patterns import MEMOIZES, memoising
from fsdpckpt.formats.pickle.records import Example, Holder, Reads, Record, RecordForm, RecordRun, Row, Scan
from fsdpckpt.formats.pickle.steps import (
    COPIED,
    SHORT_TEXT_OPCODE,
    Skipped,
    is_short_text,
    references_pattern,
    require_boundary,
    step_pattern,
    values_memoised,
)
from fsdpckpt.ir.tensors import Int64Array

_STOP, _GETS = ord("."), b"hj"
_MAX_FORMS = 256  # patterns that are made; a save has fewer than ten
_MAX_REMEMBERED = 32 << 20  # bytes of whole records with lists that are recognised when they come again


class _Known(NamedTuple):
    """A record with a list that was read before. ``memoised``: how many values it memoises."""

    run: RecordRun
    memoised: int


_Groups: TypeAlias = tuple[bytes, ...]
"""The opcodes of one record, by its parts."""


class _Added(NamedTuple):
    """``run``: what stands for rows that were added. ``examples``: with their opcodes. ``named``, ``new``: references
    to texts that the loader must read, as opcodes, and the numbers of these texts.
    """

    run: RecordRun
    examples: list[tuple[Example, bytes]]
    named: list[bytes]
    new: list[int]


class _TextColumn(NamedTuple):
    """``references``: the memo number that each of ``opcodes`` refers to, -1 for a text. ``numbers``: of the texts, -1
    until a reference is read.
    """

    opcodes: Sequence[bytes]
    references: Int64Array
    numbers: npt.NDArray[np.signedinteger]


class Scanner:
    """Reads a pickle in blocks, without its first opcode, which tells the protocol, and without frames.

    ``numbered``: its values have memo numbers of their own, as in protocols before 4. ``skipped``: what nobody reads.
    """

    def __init__(self, records: Sequence[Record], *, numbered: bool, skipped: Skipped | None = None) -> None:
        self._records, self._numbered, self._skipped = records, numbered, skipped
        self._step = step_pattern(tuple(records), numbered, b"" if skipped is None else skipped.key + skipped.begin)
        self._references_in = references_pattern(numbered)
        self._out = bytearray()
        self._memo = Memo()
        self._copied = bytearray()  # opcodes whose memo numbers have not been collected
        self._numbers: list[bytes] = []  # the opcodes that give a value a memo number
        self._gets: dict[bytes, bytes] = {}  # what a reference becomes
        self._texts_in_runs: list[TextsInRun] = []
        self._bases: list[int] = []  # of these
        self._text_numbers: dict[bytes, int] = {}  # by the opcodes of a text
        self._referred: dict[int, int] = {}  # the numbers of texts that records refer to, by memo number
        self._forms: dict[tuple[str, _Groups], RecordForm] = {}
        self._latest: dict[str, RecordForm] = {}
        self._shown: set[RecordForm] = set()  # those with an example
        self._known: dict[bytes, _Known] = {}
        inner = [record.inner for record in records if record.inner]
        self._counts = {record.name: 0 for record in (*records, *inner)}
        self._room = _MAX_REMEMBERED
        self._allowed = b""  # if not empty, the opcodes one of which must come next
        self._skipping = False
        self.ended = False
        self._scan = Scan(b"", [], {record.name: [] for record in records}, [], [], {}, {})

    def read(self, data: bytes, limit: int, frames: Sequence[int] = ()) -> int:
        """Walk ``data`` from its begin at least to ``limit``; return where the walk ended: the next block begins with
        the bytes from there on. ``frames``: where frames end in it, ascending.
        """
        boundaries = iter(frames)
        boundary = next(boundaries, -1)
        at = 0
        while at < limit and not self.ended:
            if self._skipping and self._skipped is not None:
                return self._skip(self._skipped, data, at, limit)
            if self._allowed and data[at] not in self._allowed:
                raise NotScannedError("records that are not added to a list or a dict")
            self._allowed = b""
            match = self._step.match(data, at)
            if match is None:
                raise NotScannedError("an opcode that cannot be read")
            found, copied, end = match.lastindex or 0, match.end(1), match.end()
            if copied > at:
                self._copy(match[1])
            number = found - COPIED - 1  # of the record that matched
            record = self._records[number] if 0 <= number < len(self._records) else None
            if record is not None:
                self._take(record, data, copied, end)
            elif found > COPIED:
                self._begin_skipping()
            elif end == at:
                copied = end = self._other(data, at)
            walked = at
            while 0 <= boundary <= end:
                if boundary > copied:
                    walked = self._past_records(record, data, max(walked, copied), boundary)
                require_boundary(data, walked, boundary)
                boundary = next(boundaries, -1)
            at = end
        if self.ended and at < len(data):
            raise NotScannedError("bytes after the end")
        self._collect_numbers()
        return at

    def finish(self, protocol: bytes) -> Scan:
        """What was found. ``protocol``: the first opcode."""
        if not self.ended:
            raise NotScannedError("no end")
        if self._numbered:
            self._require_numbers_once()
        self._scan.pickle = protocol + bytes(self._out)
        return self._scan

    def _past_records(self, record: Record | None, data: bytes, at: int, limit: int) -> int:
        """Where the last whole record of this kind ends that is before ``limit``; ``at`` if none is."""
        latest = self._latest.get(record.name) if record is not None else None
        passed = latest.several.match(data, at, limit) if latest is not None else None
        return at if passed is None else passed.end()

    def _copy(self, opcodes: bytes) -> None:
        """Copy opcodes, and replace the references among them."""
        if self._numbered:  # references stay as they are
            self._copied += opcodes
            self._out += opcodes
            return
        if is_short_text(opcodes):  # as a rule it is the key of a record
            self._memo.keep(1)
            self._out += opcodes
            return
        if MEMOIZES in opcodes:
            self._memo.keep(memoising(numbered=False).findall(opcodes).count(MEMOIZES))
        gets = self._gets
        for get, others in self._references_in.findall(opcodes):
            if get:
                self._out += gets.get(get) or self._reference(get)
            self._out += others

    def _other(self, data: bytes, at: int) -> int:
        """Copy a text of another protocol, or a long one, or a reference to the class of an instance that is no record,
        or end the walk; return where the opcode ends.
        """
        opcode = data[at]
        if opcode == _STOP:
            self._out.append(opcode)
            self.ended = True
            return at + 1
        if opcode not in COUNTED and opcode not in _GETS:
            raise NotScannedError(f"opcode {opcode:#x}")
        end = opcode_end(data, at)
        if end > len(data):
            raise NotScannedError("a text that is too long, or cut off")
        if opcode in _GETS:
            self._copy(data[at:end])
        else:
            self._out += data[at:end]
        return end

    def _collect_numbers(self) -> None:
        """Note the memo numbers in opcodes that were copied."""
        if self._copied:
            self._numbers += filter(None, memoising(numbered=True).findall(bytes(self._copied)))
            self._copied.clear()

    def _begin_skipping(self) -> None:
        if self._skipped is not None:
            self._out += self._skipped.key + b"N"
            self._skipping = True

    def _skip(self, skipped: Skipped, data: bytes, at: int, limit: int) -> int:
        at = skipped.past(data, at, limit)
        if skipped.ended:
            self._out += skipped.end
            self.ended = True
            if at < len(data):
                raise NotScannedError("bytes after the end")
        return at

    # References.

    def _reference(self, get: bytes) -> bytes:
        """The opcode for a reference to a value that was kept, or to a text in a record."""
        if self._numbered:
            new = get
        else:
            number = int.from_bytes(get[1:], "little")
            kept = self._memo.find(number)
            if kept is not None:
                new = b"h%c" % kept if kept < 256 else b"j" + kept.to_bytes(4, "little")
            else:
                name = self._scan.texts[self._text_in_run(number)] or ""
                encoded = name.encode("utf-8", "surrogatepass")
                new = b"X" + len(encoded).to_bytes(4, "little") + encoded
        self._gets[get] = new
        return new

    def _text_in_run(self, number: int) -> int:
        """The number of the text that a record memoised as ``number``. Raises NotScannedError if it is something else,
        or comes later.
        """
        at = bisect_right(self._bases, number) - 1
        found = self._texts_in_runs[at].find(number) if at >= 0 and number < self._memo.count else None
        if found is None:
            raise NotScannedError("a reference to a part of a record")
        return found

    def _number_of_text(self, opcodes: bytes) -> int:
        """The number of a text."""
        known = self._text_numbers.get(opcodes)
        if known is None:
            known = self._text_numbers[opcodes] = len(self._scan.texts)
            try:
                self._scan.texts.append(opcodes[2:-1].decode("utf-8", "surrogatepass"))
            except UnicodeDecodeError:
                raise NotScannedError("a text that is not UTF-8") from None
        return known

    # Records.

    def _take(self, record: Record, data: bytes, begin: int, end: int) -> None:
        """Put persistent ids in the place of the records from ``begin`` to ``end``."""
        if record.inner is not None:
            opcodes = data[begin:end]
            known = self._known.get(opcodes)  # as a rule these bytes come again and again
            if known is None:
                self._take_holder(record, record.inner, opcodes)
            else:
                self._memo.count += known.memoised
                self._placeholder(known.run)
            return
        count = 0
        for form, rows in self._by_form(record, data, begin, end):
            added = self._add(form, rows)
            self._placeholder(added.run, added)
            count += len(rows)
        if count > 1:
            self._allowed = record.added + b"hj"

    def _take_holder(self, record: Record, inner: Record, opcodes: bytes) -> None:
        """The same for a record that holds others in a list."""
        match = record.by_parts.fullmatch(opcodes)
        if match is None:
            raise NotScannedError("a record that is read in two ways")
        base, groups = self._memo.count, match.groups()
        listed = next(at for at, part in enumerate(record.parts) if part.reads is Reads.LIST)
        # The list is in its own group: (batch, e, (batch, e, or a single record and a.
        inside = groups[listed].removeprefix(b"(")
        forms = list(self._by_form(inner, inside, 0, len(inside) - 1))
        if len(forms) != 1:
            raise NotScannedError("a list of records of several forms")
        form = self._form(record, record.form_of(groups))
        # The example has an empty list.
        fields = [
            b"" if part.reads is Reads.LIST else group
            for part, group in zip(record.parts, groups, strict=True)
            if part.reads
        ]
        of_holder = self._add(form, [tuple(fields)])
        of_list = self._add(*forms[0])
        run = replace(of_list.run, record=record, holder=of_holder.run.holder)
        if len(opcodes) <= self._room:
            self._room -= len(opcodes)
            self._known[opcodes] = _Known(run, self._memo.count - base)
        examples = of_holder.examples + of_list.examples
        named, new = of_holder.named + of_list.named, of_holder.new + of_list.new
        self._placeholder(run, _Added(run, examples, named, new))

    def _form(self, record: Record, opcodes: _Groups) -> RecordForm:
        """The form of a record with these opcodes in the parts that are no fields."""
        form = self._forms.get((record.name, opcodes))
        if form is None:
            if len(self._forms) == _MAX_FORMS:
                raise NotScannedError("more forms of records than any save has")
            form = self._forms[record.name, opcodes] = RecordForm(record, opcodes, len(self._forms))
        return form

    def _by_form(self, record: Record, data: bytes, begin: int, end: int) -> Iterator[tuple[RecordForm, list[_Groups]]]:
        """The fields of the records from ``begin`` to ``end``, cut where the form changes."""
        at = begin
        while at < end:
            # As a rule all are of the form that the last one had.
            form = self._latest.get(record.name)
            several = form.several.match(data, at, end) if form is not None else None
            if form is None or several is None:
                match = record.by_parts.match(data, at + 2 * data.startswith(record.added + b"(", at), end)
                if match is None:
                    raise NotScannedError("a record that is read in two ways")
                self._latest[record.name] = self._form(record, record.form_of(match.groups()))
                continue
            yield form, form.fields.findall(data, at, several.end())
            at = several.end()

    def _add(self, form: RecordForm, rows: Sequence[_Groups]) -> _Added:
        """Add rows of one form to the columns."""
        record, columns = form.record, iter(zip(*rows, strict=True))
        made: Columns = {}
        memoised: list[int | npt.NDArray[np.uint8]] = []
        texts: dict[int, _TextColumn] = {}
        for at, (part, opcodes) in enumerate(form.parts):
            count: int | npt.NDArray[np.uint8] = 0
            column = next(columns) if part.reads is not None else ()
            if part.reads is None:
                count = values_memoised(opcodes)
            elif part.reads is Reads.NUMBER:
                made[part.name] = numbers_of(column)
            elif part.reads is Reads.SIZES:
                made[part.name], made[f"{part.name}_ndim"], count = sizes_of(column)
            elif part.reads is Reads.TEXT:
                texts[at], count = self._texts(column)
                made[part.name] = texts[at].numbers
            memoised.append(count)
        numbers = {at: each.numbers for at, each in texts.items()}
        in_run = TextsInRun(self._memo.count, len(rows), memoised, numbers)
        named: list[bytes] = []
        new: list[int] = []
        self._memo.count = in_run.end
        if texts and not self._numbered:
            self._texts_in_runs.append(in_run)
            self._bases.append(in_run.base)
        for each in texts.values():
            self._read_references(each, in_run, named, new)
        if self._numbered and in_run.end != in_run.base:
            raise NotScannedError("memo numbers of both kinds")
        examples = []
        row = _row(record, made)
        if form not in self._shown:
            self._shown.add(form)
            examples.append((Example(record, form.number, row), self._opcodes_of_example(form, rows[0])))
        if record.inner is not None:
            self._scan.holders.append(Holder(form.number, row))
            return _Added(RecordRun(record, 0, 0, len(self._scan.holders) - 1), examples, named, new)
        begin = self._counts[record.name]
        self._counts[record.name] += len(rows)
        smallest = {name: smallest_integers(column) for name, column in made.items()}
        self._scan.columns[record.name].append(smallest)
        return _Added(RecordRun(record, begin, begin + len(rows)), examples, named, new)

    def _texts(self, column: Sequence[bytes]) -> tuple[_TextColumn, int | npt.NDArray[np.uint8]]:
        """The numbers of texts, -1 for a reference; and which of them are memoised."""
        references = references_of(column)
        if (references >= 0).all():
            return _TextColumn(column, references, np.full(len(column), -1, np.int32)), 0
        different = dict.fromkeys(column)
        numbers = {opcodes: self._number_of_text(opcodes) if opcodes[0] not in _GETS else -1 for opcodes in different}
        memoised = {opcodes: opcodes[0] == SHORT_TEXT_OPCODE for opcodes in different}
        read = np.fromiter(map(numbers.__getitem__, column), np.int32, len(column))
        return _TextColumn(column, references, read), by_value(memoised, column)

    def _read_references(self, column: _TextColumn, in_run: TextsInRun, named: list[bytes], new: list[int]) -> None:
        """Put the numbers of texts that are referred to into the column. ``named``, ``new``: the references that the
        loader must read, as opcodes, and the numbers of these texts.
        """
        rows = np.flatnonzero(column.references >= 0)
        different, first, which = np.unique(column.references[rows], return_index=True, return_inverse=True)
        read = []
        for reference, row in zip(different.tolist(), rows[first].tolist(), strict=True):
            number = self._referred.get(reference)
            if number is None:
                if self._numbered or self._memo.find(reference) is not None:
                    number = len(self._scan.texts)
                    self._scan.texts.append(None)
                    named.append(self._reference(column.opcodes[row]))
                    new.append(number)
                elif reference < in_run.starts[row]:
                    number = self._text_in_run(reference)
                else:
                    raise NotScannedError("a reference to what comes later")
                self._referred[reference] = number
            read.append(number)
        column.numbers[rows] = np.array(read, np.int32)[which]

    def _opcodes_of_example(self, form: RecordForm, fields: _Groups) -> bytes:
        """The opcodes of one record as they are in what is left: not memoised."""
        left = iter(fields)
        parts = [next(left) if part.reads is not None else same for part, same in form.parts]
        opcodes = b"".join(parts) + form.record.end
        out = bytearray()
        at = 0
        while at < len(opcodes):
            end = opcode_end(opcodes, at)
            if opcodes[at] in b"hj":
                out += self._gets.get(opcodes[at:end]) or self._reference(opcodes[at:end])
            elif opcodes[at] != MEMOIZE:
                out += opcodes[at:end]
            at = end
        return bytes(out)

    def _placeholder(self, run: RecordRun, added: _Added | None = None) -> None:
        """Write what stands for records. ``added``: if they were added just now."""
        scan, number = self._scan, len(self._scan.runs)
        scan.runs.append(run)
        written = b"J" + number.to_bytes(4, "little")
        if added is not None and (added.examples or added.named):
            scan.examples[number] = [example for example, _ in added.examples]
            scan.named[number] = added.new
            opcodes = b"".join([opcodes for _, opcodes in added.examples])
            written = b"(%b(%bt(%btt" % (written, opcodes, b"".join(added.named))
        self._out += written + b"Q" + b"N" * (run.record.values - 1)

    def _require_numbers_once(self) -> None:
        """Raises unless every memo number is given to one value."""
        if len({int.from_bytes(put[1:], "little") for put in self._numbers}) < len(self._numbers):
            raise NotScannedError("a memo number that is given twice")


def _row(record: Record, columns: Columns) -> Row:
    """The fields of the first record."""
    row: Row = {}
    for part in record.parts:
        if part.reads is Reads.SIZES:
            row[part.name] = tuple(columns[part.name][0, : columns[f"{part.name}_ndim"][0]].tolist())
        elif part.name in columns:
            row[part.name] = int(columns[part.name][0])
    return row
