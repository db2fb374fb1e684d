"""Takes the runs of equal records out of a ``.metadata`` pickle: what is left is a small pickle, the runs are columns.

A checkpoint of a large run has millions of chunks, all described alike, and one object for each takes minutes and tens
of gigabytes. ``reduce_pickle`` walks the opcodes once. Where a run of records begins (``runs``), it puts a persistent
id in its place, and counts on after it; every other opcode is copied, with the memo numbers that it then has.

Every byte is accounted for: it is an opcode that is walked over, or part of a record of which each byte was compared or
parsed, right after the one before. Anything out of the ordinary ends the walk, and the general reader reads it
all: other opcodes, references into a run, runs that are used for something else than to be appended.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from fsdpckpt.formats.dcp.fields import END, PLANS, Block, NeedsGeneralReaderError, Plans, Texts
from fsdpckpt.formats.dcp.repeats import ENTRY, Begins, KnownItems, KnownLists, KnownTensors, Records
from fsdpckpt.formats.dcp.runs import CHUNK, INDEX, PUTS, Form, ItemForm, Matches, Memo, ReferenceIntoRunError, learn
from fsdpckpt.formats.pickle.opcodes import FIXED, opcode_end
from fsdpckpt.storage import ByteSource

_BLOCK = 4 << 20  # bytes processed at a time: the results take several times as much memory
_MAX_COPY = 16 << 20  # bytes that may be kept before most must turn out to be in runs
_WINDOW = 64 << 10  # bytes that are searched for records at first
_MAX_WINDOW = 1 << 20  # ... and in the end
_ROOM = 4096  # bytes at the end of a block in which no opcode or record begins that might not end there
_PROTOCOLS = (b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")
_FRAME = 0x95
_WIDTH = bytearray(256)  # patterns of opcodes that are copied unchanged
for _opcode in b")]}(teausbR\x81\x85\x86\x87\x88\x89NKMJG":
    _WIDTH[_opcode] = FIXED[_opcode]
_ALONE = re.escape(bytes(opcode for opcode, width in enumerate(_WIDTH) if width == 1))
_PLAIN = b"|".join(
    [b"[%b]" % _ALONE, *(b"%c.{%d}" % (opcode, width - 1) for opcode, width in enumerate(_WIDTH) if width > 1)]
)
_RUN_OF_PLAIN = re.compile(rb"(?:" + _PLAIN + rb")++", re.DOTALL)
_MEMOIZE, _STACK_GLOBAL, _SHORT_TEXT, _TEXT, _LONG, _STOP = 0x94, 0x93, 0x8C, ord("X"), 0x8A, ord(".")
_GET = ord("h")
_GETS = {_GET: 1, ord("j"): 4}
_MEMOISES = {_MEMOIZE: 1, ord("q"): 2, ord("r"): 5}
_GLOBAL = ord("c")
_MAX_UNLIKE = 1 << 10  # records of a kind that are read one by one: trying to learn their form costs more
_LIST = b"]\x94("  # memoised, then several elements

Columns: TypeAlias = dict[str, npt.NDArray[np.signedinteger]]


@dataclass(frozen=True, slots=True, eq=False)
class Run:
    """Takes the place of rows ``begin`` to ``end`` of the columns in the loaded value: in a list for chunks (``kind``
    is ``CHUNK``), in a dict as a key and its value for items. Of kind ``ENTRY`` it is a tensor with the same bytes as
    the first one that has run number ``begin``.
    """

    kind: tuple[bytes, bytes]
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class Reduced:
    """``pickle``: the rest, in which persistent id n stands for ``runs[n]``.

    ``chunks``: start and size (n, the largest number of dimensions) and ndim. ``items``, in parts: name and path
    (numbers of ``texts``), index, start, ndim, offset and length.
    """

    pickle: bytes
    runs: list[Run]
    chunks: Columns
    items: list[Columns]
    texts: list[str]


def reduce_pickle(source: ByteSource) -> Reduced | None:
    """``source`` without its runs; None if it has none, or contains anything that no DCP save writes."""
    try:
        return _reduce(source, shared_names=False)
    except ReferenceIntoRunError:
        pass
    except (NeedsGeneralReaderError, IndexError, ValueError):
        return None
    try:  # a run contains the first use of a name that others refer to: keep these out of runs
        return _reduce(source, shared_names=True)
    except (NeedsGeneralReaderError, IndexError, ValueError):
        return None


def _reduce(source: ByteSource, *, shared_names: bool) -> Reduced | None:
    walk = _Walk(shared_names=shared_names)
    walk.out += source.read(0, min(2, source.nbytes))
    for data, boundaries in _unframed(source):
        walk.read(data, boundaries)
    walk.finish()
    texts = [text.decode("utf-8", "surrogatepass") for text in walk.texts.all]
    if not walk.runs:
        return None
    chunks: Columns = {}
    parts = walk.columns[CHUNK]
    for name in list(parts[0]) if parts else ():
        chunks[name] = _concatenate([part.pop(name) for part in parts])
    return Reduced(bytes(walk.out), walk.runs, chunks, walk.columns[INDEX], texts)


def _concatenate(parts: list[npt.NDArray[np.signedinteger]]) -> npt.NDArray[np.signedinteger]:
    width = max(part.shape[1] for part in parts) if parts[0].ndim == 2 else 0
    if width:
        parts = [np.pad(part, ((0, 0), (0, width - part.shape[1]))) for part in parts]
    return np.concatenate(parts)


def _unframed(source: ByteSource) -> Iterator[tuple[bytes, list[int]]]:
    """The opcodes of a pickle without its frames, in blocks, and where frames end in each block."""
    if source.nbytes < 2 or source.read(0, 2) not in _PROTOCOLS:
        raise NeedsGeneralReaderError("another protocol")
    if source.nbytes > 2 and source.read(2, 1)[0] != _FRAME:
        for at in range(2, source.nbytes, _BLOCK):
            yield source.read(at, min(_BLOCK, source.nbytes - at)), []
        return
    at, block, begin = 2, b"", 0
    parts: list[bytes] = []
    ends: list[int] = []
    held = 0
    while at < source.nbytes:
        if at + 9 > begin + len(block):
            block, begin = source.read(at, min(_BLOCK, source.nbytes - at)), at
        inner = at - begin
        nbytes = int.from_bytes(block[inner + 1 : inner + 9], "little")
        if block[inner] != _FRAME or nbytes > min(_BLOCK - 9, source.nbytes - at - 9):
            raise NeedsGeneralReaderError("bytes in no frame, or in a large one")
        if inner + 9 + nbytes > len(block):
            block, begin, inner = source.read(at, min(_BLOCK, source.nbytes - at)), at, 0
        parts.append(block[inner + 9 : inner + 9 + nbytes])
        held += nbytes
        ends.append(held)
        at += 9 + nbytes
        if held >= _BLOCK:
            yield b"".join(parts), ends
            parts, ends, held = [], [], 0
    yield b"".join(parts), ends


def _run_of_numbered(kinds: Collection[bytes]) -> re.Pattern[bytes]:
    """A pattern for opcodes that are copied unchanged if memo numbers are written out: runs use none of them, so all
    GETs stay except those of the record classes ``kinds``.
    """
    other = b"".join(b"(?!%b)" % re.escape(kind) for kind in kinds)
    return re.compile(rb"(?:" + _PLAIN + rb"|" + other + rb"(?:h.|j.{4}))++", re.DOTALL)


class _Walk:
    """``out``: the opcodes that were kept, and the placeholders. ``shared_names``: an item can be in a run only if its
    name appeared before.
    """

    def __init__(self, *, shared_names: bool) -> None:
        self._shared_names = shared_names
        self.out = bytearray()
        self.runs: list[Run] = []
        self.columns: dict[tuple[bytes, bytes], list[Columns]] = {CHUNK: [], INDEX: []}
        self.texts = Texts()
        self._counts = {CHUNK: 0, INDEX: 0}
        self._forms: dict[tuple[bytes, bytes], Form] = {}
        self._entries, self._lists, self._items = KnownTensors(), KnownLists(), KnownItems()
        self._entry = -1, 0  # where the bytes after a text begin that have no other text, and values memoised before
        self._block, self._limit = Block(b""), 0
        self._windows: dict[tuple[bytes, bytes], _Window] = {}  # of this block, by the kind of record
        self._sizes = {CHUNK: _WINDOW, INDEX: _WINDOW}
        self._memo = Memo()
        self._gets: dict[bytes, bytes] = {}  # what a GET becomes
        self._kinds: list[bytes] = []  # the GETs of the classes of records, where memo numbers are written
        self._run = _RUN_OF_PLAIN
        self._rest, self._ends = b"", [0]  # bytes that were not walked yet, and where frames end in them
        self._read = 0
        self._stopped = False
        self._unlike = {CHUNK: 0, INDEX: 0}  # records whose form could not be learned
        self._plans: Plans | None = None  # once they have begun

    def read(self, data: bytes, ends: list[int]) -> None:
        """Walk the next block, up to the last record that may be incomplete."""
        self._read += len(data)
        self._ends += [end + len(self._rest) for end in ends]
        block = Block(self._rest + data)
        self._step(block, len(block.data) - _ROOM)
        if len(self.out) > _MAX_COPY + 3 * self._read // 4:
            raise NeedsGeneralReaderError("little of it is in runs")

    def finish(self) -> None:
        """Walk the rest."""
        self._step(Block(self._rest), len(self._rest))
        if not self._stopped or self._rest or (self._memo.numbers and self._memo.count):
            raise NeedsGeneralReaderError("no end, or memo numbers of both kinds")

    def _step(self, block: Block, limit: int) -> None:
        """Walk from the begin of ``block`` at least to ``limit``."""
        self._block, self._limit = block, limit
        at = self._copy(block.data, limit) if self._plans is None else 0
        if self._plans is not None:
            at = self._plans.past(block.data, at, limit)
            self.out += END if self._plans.ended and not self._stopped else b""
            self._stopped = self._plans.ended
        for kind in tuple(self._windows):
            self._close_window(kind)
        items = self._items.columns(block)
        if items is not None:
            self.columns[INDEX].append(self._compact(items))
        self._rest = block.data[at:]
        self._ends = [end - at for end in self._ends if end >= at]

    def _copy(self, data: bytes, limit: int) -> int:  # noqa: PLR0912, PLR0915 (one loop: it runs for every opcode)
        """Copy the opcodes of ``data`` except the runs; return where the walk ended."""
        memo, out, texts, gets, width_of = self._memo, self.out, self._memo.texts, self._gets, _WIDTH
        frames = iter([end for end in self._ends if end <= len(data)])
        frame = next(frames, -1)
        if data and self._stopped:
            raise NeedsGeneralReaderError("bytes after the end")
        at = kept = 0
        earlier = later = (0, 0, b"")  # the last two texts: begin, end, content
        while at < limit:
            if frame >= 0 and at >= frame:
                if at > frame:
                    raise NeedsGeneralReaderError("an opcode in two frames")
                frame = next(frames, -1)
                continue
            opcode = data[at]
            if width_of[opcode] or (opcode == _GET and memo.numbers):
                match = self._run.match(data, at, limit if frame < 0 else min(limit, frame))
                if match is not None:
                    at = match.end()
                    continue
            if opcode == _MEMOIZE:
                memo.count += 1
                at += 1
            elif opcode in _GETS:
                end = at + 1 + _GETS[opcode]
                raw = data[at:end]
                old = int.from_bytes(raw[1:], "little")
                name = memo.names.get(old)
                taken = self._take_records(name, at) if name in self._counts else None
                if name is not None and taken is not None:
                    out += data[kept:at]
                    out += self._placeholder(name, taken)
                    if name == CHUNK:
                        self._learn_entry(data, at, taken)
                    at = kept = taken.end
                    while 0 <= frame <= at:
                        _require_boundary(data, _last_before(taken.begins, frame), frame)
                        frame = next(frames, -1)
                    continue
                kept_text = texts.get(old)
                if kept_text is not None:
                    earlier, later = later, (at, end, kept_text)
                new = gets.get(raw)
                if new is None:
                    new = gets[raw] = _get(memo.left(old))
                if new != raw:
                    out += data[kept:at]
                    out += new
                    kept = end
                at = end
            elif opcode in (_SHORT_TEXT, _TEXT):
                begin = at + (2 if opcode == _SHORT_TEXT else 5)
                end = begin + int.from_bytes(data[at + 1 : begin], "little")
                text = data[begin:end]
                after = end + _MEMOISES.get(data[end], 0)
                if after > end:
                    texts[self._memoise(data, end)] = text
                earlier, later = later, (at, after, text)
                at = after
                if text == PLANS and data[end] == _MEMOIZE and data.startswith(_LIST, at):
                    out += data[kept:at] + b"N"
                    at = kept = at + len(_LIST)
                    self._plans = Plans()
                    break
                same = self._entries.take(data, at)
                if same is not None and (frame < 0 or same.end <= frame):
                    memo.remove(same.memoised)
                    out += data[kept:at]
                    out += _persistent(same.rows.start)
                    at = kept = same.end
                else:
                    self._entry = at, memo.count
            elif opcode == _STACK_GLOBAL:
                if data[at + 1] == _MEMOIZE and later[1] == at and earlier[1] == later[0]:
                    memo.names[memo.count] = (earlier[2], later[2])
                self._entry = -1, 0
                at += 1
            elif width_of[opcode]:
                at += width_of[opcode]
            elif opcode == _LONG:
                at += 2 + data[at + 1]
            elif opcode in PUTS:
                self._memoise(data, at)
                self._entry = -1, 0
                at += _MEMOISES[opcode]
            elif opcode == _GLOBAL:
                middle = data.index(b"\n", at)
                end = data.index(b"\n", middle + 1) + 1
                number = memo.next(data, end)
                name = data[at + 1 : middle], data[middle + 1 : end - 1]
                if number is not None:
                    memo.names[number] = name
                    if name in self._counts and data[end] in PUTS:
                        self._kinds.append(_get(number))
                        self._run = _run_of_numbered(self._kinds)
                at = end
            elif opcode == _STOP:
                self._stopped = True
                at += 1
                break
            else:
                raise NeedsGeneralReaderError(f"opcode {opcode:#x}")
        out += data[kept:at]
        return at

    def _memoise(self, data: bytes, at: int) -> int:
        """The memo number that the opcode at ``at`` gives a value."""
        memo = self._memo
        if data[at] == _MEMOIZE:
            memo.count += 1
            return memo.count - 1
        number = int.from_bytes(data[at + 1 : at + _MEMOISES[data[at]]], "little")
        if not memo.numbers:
            self._run = _run_of_numbered(self._kinds)
        memo.put(number)
        return number

    def _learn_entry(self, data: bytes, at: int, chunks: Records) -> None:
        """Remember the bytes of this tensor, whose chunks begin at ``at``, to recognise tensors described by the same
        bytes.
        """
        begin, before = self._entry
        self._entry = -1, 0
        number, memoised = len(self.runs), self._memo.count - before
        if begin >= 0 and self._entries.add(data, begin, at, chunks.end, number, memoised, self._memo):
            self.runs.append(Run(ENTRY, number - 1, number))

    def _take_records(self, kind: tuple[bytes, bytes], at: int) -> Records | None:
        """The records of this kind from ``at`` on; None if there is none of the known form."""
        block = self._block
        form = self._forms.get(kind) or self._learn_form(kind, at)
        if form is None:
            return None
        window = self._windows.get(kind)
        searched = window is not None and window.begin <= at < window.end
        taken: Records | None = None
        if not isinstance(form, ItemForm):
            taken = self._lists.take(block.data, at)
        elif not searched:
            taken = self._items.take(
                form, block, at, lambda at: self.texts.known(form.name(block.data, at, self._memo))
            )
            if taken is None and not form.may_stand(block.data, at):
                return None
            if taken is None and self._sizes[kind] == 1:  # a single one among known records is walked faster
                self._sizes[kind] = _WINDOW
                return None
        if taken is not None:
            self._sizes[kind] = _WINDOW if self._items.scattered else 1
            return taken
        return self._records_at(
            kind, window if window is not None and searched else self._open_window(kind, form, at), at
        )

    def _learn_form(self, kind: tuple[bytes, bytes], at: int) -> Form | None:
        if self._unlike[kind] == _MAX_UNLIKE:
            return None
        form = learn(kind, self._block.data, at, self._memo)
        if form is None:
            self._unlike[kind] += 1
            return None
        if isinstance(form, ItemForm) and self._shared_names:
            form = replace(form, shared_names=True)
        self._forms[kind] = form
        return form

    def _open_window(self, kind: tuple[bytes, bytes], form: Form, at: int) -> _Window:
        """Search for records from ``at`` on: first for one after those that were known, then for more and more."""
        self._close_window(kind)
        end = min(at + self._sizes[kind], max(self._limit, at + 1))
        self._sizes[kind] = min(max(2 * self._sizes[kind], _WINDOW), _MAX_WINDOW)
        window = self._windows[kind] = _Window(at, end, form.find(self._block, at, end), [])
        return window

    def _records_at(self, kind: tuple[bytes, bytes], window: _Window, at: int) -> Records | None:
        matches = window.matches
        row = int(np.searchsorted(matches.begin, at))
        if row == len(matches.begin) or matches.begin[row] != at:
            return None
        stop = int(matches.last[row]) + 1
        window.taken.append(slice(row, stop))
        count = self._counts[kind]
        self._counts[kind] += stop - row
        rows, begins = slice(count, count + stop - row), matches.begin[row:stop]
        taken = Records(rows, int(matches.memoised[row:stop].sum()), int(matches.end[stop - 1]), [(0, begins)])
        if kind == CHUNK:
            self._lists.add(self._block.data, begins, taken.end, rows, taken.memoised)
        return taken

    def _placeholder(self, kind: tuple[bytes, bytes], taken: Records) -> bytes:
        """The opcodes that take the place of the records."""
        form, data, end = self._forms[kind], self._block.data, taken.end
        self._memo.remove(taken.memoised)
        alone = taken.rows.stop - taken.rows.start == 1 and data[end] == form.append[1]
        if data[end] != form.append[0] and not alone and not data.startswith(form.prefix, end):
            raise NeedsGeneralReaderError("records that are not appended")
        self.runs.append(Run(kind, taken.rows.start, taken.rows.stop))
        return _persistent(len(self.runs) - 1) * form.objects

    def _close_window(self, kind: tuple[bytes, bytes]) -> None:
        """Store the fields of the records that were taken from the window."""
        window = self._windows.pop(kind, None)
        if window is None or not window.taken:
            return
        matches, block = window.matches, self._block
        rows = np.concatenate([np.arange(part.start, part.stop) for part in window.taken])
        columns = {name: column[rows] for name, column in matches.columns.items()}
        if kind == INDEX:
            text, nbytes = columns.pop("text"), columns.pop("nbytes")
            shared = isinstance(form := self._forms[kind], ItemForm) and form.shared_names
            columns["name"] = self._shared_numbers(text) if shared else self.texts.numbers(block.data, text, nbytes)
            self._items.add(block, matches, rows, columns)
        self.columns[kind].append(self._compact(columns))

    def _compact(self, columns: Columns) -> Columns:
        """The fields of items or chunks in the smallest integer types that hold them."""
        if "path" in columns:
            columns["path"] = self._shared_numbers(columns["path"])
            columns["index"] = np.minimum(columns["index"], np.iinfo(np.int32).max)
            columns = {name: _smallest_ints(column) for name, column in columns.items()}
        columns["ndim"] = columns["ndim"].astype(np.int8)
        return columns

    def _shared_numbers(self, references: npt.NDArray[np.signedinteger]) -> npt.NDArray[np.int32]:
        """The numbers of the texts that are referred to: there are few different ones, often repeated in a row."""
        changes = np.flatnonzero(np.diff(references, prepend=-1))
        different, first, inverse = np.unique(references[changes], return_index=True, return_inverse=True)
        numbers = np.empty(len(different), np.int32)
        for row in np.argsort(first).tolist():
            text = self._memo.texts.get(int(different[row]))
            if text is None:
                raise NeedsGeneralReaderError("a name that is no text")
            numbers[row] = self.texts.number(text)
        return np.repeat(numbers[inverse], np.diff(changes, append=len(references)))


@dataclass(frozen=True, slots=True)
class _Window:
    """The records that begin in a part of a block, and the rows of them that were taken."""

    begin: int
    end: int
    matches: Matches
    taken: list[slice]


def _smallest_ints(column: npt.NDArray[np.signedinteger]) -> npt.NDArray[np.signedinteger]:
    return column.astype(np.int32) if column.max(initial=0) <= np.iinfo(np.int32).max else column


def _last_before(runs: list[Begins], offset: int) -> int:
    """Where the last record before ``offset`` begins."""
    shift, begins = next(each for each in reversed(runs) if each[0] + each[1][0] < offset)
    return shift + int(begins[np.searchsorted(begins, offset - shift) - 1])


def _require_boundary(data: bytes, at: int, boundary: int) -> None:
    """Raises unless a frame begins between two opcodes, as the unpickler needs it."""
    while at < boundary:
        at = opcode_end(data, at)
    if at != boundary:
        raise NeedsGeneralReaderError("an opcode in two frames")


def _persistent(number: int) -> bytes:
    return b"J" + number.to_bytes(4, "little") + b"Q"


def _get(number: int) -> bytes:
    return b"h" + bytes((number,)) if number < 256 else b"j" + number.to_bytes(4, "little")
