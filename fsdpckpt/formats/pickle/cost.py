"""Refuses pickles whose values would take forever to hash or copy, although they are small.

CPython hashes a tuple by hashing its items, each time anew, in C, without checking signals or the stack: forty tuples,
each of which holds the one before twice, are a dict key that takes a year, and a million nested ones overrun the stack.
BUILD copies a state each time it is used. ``excessive_cost`` walks the opcodes once before the C unpickler sees them,
with a number in place of each value. ``check_expansion`` limits the size of a loaded value with its shared parts
counted everywhere they occur.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import cast

from fsdpckpt.errors import SourceCorruptError
from fsdpckpt.ir.values import Object, Value

MAX_DEPTH = 200  # deeper nesting than any state dict, shallow enough for Python's stack
_FREE_ITEMS = 1_000_000  # items that may be hashed or copied in any pickle: this takes no noticeable time ...
_PER_BYTE = 20  # ... and for each byte of the pickle

# Each value is represented by one number: its items, all references followed, plus these constants. A call's result
# is an object unless the call had no arguments, as for a container.
_LEAF, _OBJECT, _CONTAINER = 1, 2, 3
_DEPTH = 1 << 40  # for each level of nested tuples
_SHARED = 1 << 56  # it is, or holds, a container that was referred back to
_ITEMS = _DEPTH - 1

# Kinds of opcodes, the most frequent ones first: they are tested in this order.
_PUSH, _GET, _PUT, _TEXT, _MEMOIZE, _MARK, _TUPLE_N, _NEW, _TUPLE, _CALL, _UPDATE, _BUILD = range(1, 13)
_LONG_PUT, _LONG_GET, _SKIP, _OTHER = range(13, 17)


def _table() -> tuple[bytes, bytes]:
    """Kind by opcode, and the bytes of one of fixed size (of its count where a counted text follows)."""
    kinds, sizes = bytearray(256), bytearray(b"\1" * 256)
    for opcodes, kind, size in (
        (b"N)\x88\x89", _PUSH, 1),
        (b"K", _PUSH, 2),
        (b"M", _PUSH, 3),
        (b"J", _PUSH, 5),
        (b"G", _PUSH, 9),
        (b"h", _GET, 2),
        (b"q", _PUT, 2),
        (b"UC\x8a\x8c", _TEXT, 1),
        (b"XBT\x8b", _TEXT, 4),
        (b"\x8d\x8e\x96", _TEXT, 8),
        (b"\x94", _MEMOIZE, 1),
        (b"(", _MARK, 1),
        (b"\x85\x86\x87", _TUPLE_N, 1),
        (b"]}\x8f", _NEW, 1),
        (b"t", _TUPLE, 1),
        (b"R\x81", _CALL, 1),
        (b"u", _UPDATE, 1),
        (b"b", _BUILD, 1),
        (b"r", _LONG_PUT, 5),
        (b"j", _LONG_GET, 5),
        (b"\x80", _SKIP, 2),
        (b"\x95", _SKIP, 9),
        (b"\x98", _SKIP, 1),
    ):
        for opcode in opcodes:
            kinds[opcode], sizes[opcode] = kind, size
    for opcode in b"ILFSVPgpciae01246dlosQ\x90\x91\x92\x93\x97":
        kinds[opcode] = kinds[opcode] or _OTHER
    return bytes(kinds), bytes(sizes)


_KINDS, _SIZES = _table()
LINES = {**dict.fromkeys(b"ILFSVPgp", 1), **dict.fromkeys(b"ci", 2)}  # opcodes with text up to a newline: how many


class _TooCostlyError(Exception):
    pass


def excessive_cost(data: bytes) -> str | None:
    """Why the pickle ``data`` (whole opcodes up to a STOP) costs too much to load; None if it does not."""
    try:
        _walk(data, _Budget(len(data)))
    except _TooCostlyError as error:
        return str(error)
    except LookupError:
        return None  # the stack or the memo lacks a value: the unpickler reports it
    return None


class _Budget:
    """Counts items that are hashed or may be copied; raises _TooCostlyError if they are too many."""

    def __init__(self, nbytes: int) -> None:
        self.limit = _FREE_ITEMS + _PER_BYTE * nbytes
        self._spent = 0
        self._largest = 1 + nbytes // 8  # items that a container in this pickle may have

    def tuple_of(self, items: Sequence[int]) -> int:
        """The number for the tuple of ``items``, one of which is a tuple, shared, or large."""
        depth = max(((item >> 40) & 0xFFFF for item in items), default=0) + 1
        if depth > MAX_DEPTH:
            raise _TooCostlyError(f"tuples more than {MAX_DEPTH} deep")
        total = sum(item & _ITEMS for item in items) + 1
        if total > self.limit:
            raise _TooCostlyError(f"a tuple of {total:.3g} items")
        return total + depth * _DEPTH + (_SHARED if any(item >= _SHARED for item in items) else 0)

    def hashed(self, items: Sequence[int]) -> None:
        self._spent += sum(item & _ITEMS for item in items)
        self._check()

    def used(self, item: int) -> None:
        """``item`` is an argument or a state."""
        self._spent += item & _ITEMS
        if item >= _SHARED:
            self._spent += self._largest
        self._check()

    def _check(self) -> None:
        if self._spent > self.limit:
            raise _TooCostlyError("values that are hashed or copied again and again")


def _walk(data: bytes, budget: _Budget) -> None:  # noqa: PLR0912, PLR0915 (one loop: it runs for every opcode)
    """The unpickler's stack and memo with numbers for values. Raises _TooCostlyError, LookupError."""
    kinds, sizes, number = _KINDS, _SIZES, int.from_bytes
    stack: list[int] = []
    push, pop = stack.append, stack.pop
    marks: list[int] = []
    memo: dict[int, int] = {}  # what is not in it is a leaf
    memoised = at = 0
    used, limit = budget.used, budget.limit
    while True:
        opcode = data[at]
        kind = kinds[opcode]
        if kind == _PUSH:
            push(_LEAF)
            at += sizes[opcode]
        elif kind == _GET:
            push(memo.get(data[at + 1], _LEAF))
            at += 2
        elif kind == _TEXT:
            width = sizes[opcode]
            at += 1 + width
            at += data[at - 1] if width == 1 else number(data[at - width : at], "little")
            push(_LEAF)
        elif kind == _PUT:
            value = stack[-1]
            memo[data[at + 1]] = value if value <= _OBJECT else value | _SHARED
            memoised += 1
            at += 2
        elif kind == _LONG_PUT:
            value = stack[-1]
            memo[number(data[at + 1 : at + 5], "little")] = value if value <= _OBJECT else value | _SHARED
            memoised += 1
            at += 5
        elif kind == _MEMOIZE:
            if stack[-1] != _LEAF:
                _remember(memo, memoised, stack[-1])
            memoised += 1
            at += 1
        elif kind == _MARK:
            marks.append(len(stack))
            at += 1
        elif kind in (_TUPLE_N, _TUPLE):
            begin = marks.pop() if kind == _TUPLE else len(stack) + 0x84 - opcode
            items = stack[begin:]
            total = sum(items) + 1
            del stack[begin:]
            push(total + _DEPTH if total < limit else budget.tuple_of(items))
            at += 1
        elif kind == _NEW:
            push(_CONTAINER)
            at += 1
        elif kind == _CALL:
            arguments = pop()
            if arguments > _DEPTH + 64:
                used(arguments)
            stack[-1] = _OBJECT if arguments != _LEAF else _CONTAINER
            at += 1
        elif kind == _UPDATE:
            begin = marks.pop()
            keys = stack[begin::2]
            if sum(keys) != len(keys):
                budget.hashed(keys)
            del stack[begin:]
            at += 1
        elif kind == _BUILD:
            state = pop()
            if state > _CONTAINER:
                used(state)
            at += 1
        elif kind == _LONG_GET:
            push(memo.get(number(data[at + 1 : at + 5], "little"), _LEAF))
            at += 5
        elif kind == _SKIP:
            at += sizes[opcode]
        elif kind == _OTHER:
            at = _rare_opcode(data, at, stack, marks, memo, budget)
        else:  # STOP
            return


def _remember(memo: dict[int, int], number: int, value: int) -> None:
    memo[number] = value | _SHARED if value > _OBJECT else value


def _rare_opcode(  # noqa: PLR0912 (a case for each)
    data: bytes, at: int, stack: list[int], marks: list[int], memo: dict[int, int], budget: _Budget
) -> int:
    """Apply a rare opcode; returns the position after it."""
    opcode = data[at : at + 1]
    after = at + 1
    begin = at
    for _ in range(LINES.get(data[at], 0)):
        begin = after
        after = data.index(b"\n", after) + 1
    if opcode in b"ILFSVPc":
        stack.append(_LEAF)
    elif opcode == b"g":
        stack.append(memo.get(_index(data[begin:after]), _LEAF))
    elif opcode == b"p":
        _remember(memo, _index(data[begin:after]), stack[-1])
    elif opcode == b"\x97":
        stack.append(_CONTAINER)
    elif opcode == b"a":
        stack.pop()
    elif opcode == b"0":
        if marks and marks[-1] == len(stack):
            marks.pop()
        else:
            stack.pop()
    elif opcode == b"2":
        stack.append(stack[-1] | _SHARED if stack[-1] > _OBJECT else stack[-1])
    elif opcode == b"s":
        stack.pop()
        budget.hashed([stack.pop()])
    elif opcode == b"Q":
        budget.used(stack.pop())
        stack.append(_OBJECT)
    elif opcode == b"\x93":
        stack.pop()
        stack[-1] = _LEAF
    elif opcode == b"\x92":
        budget.used(stack.pop())
        budget.used(stack.pop())
        stack[-1] = _OBJECT
    else:
        _apply_to_mark(opcode, stack, marks, budget)
    return after


def _apply_to_mark(opcode: bytes, stack: list[int], marks: list[int], budget: _Budget) -> None:
    """Apply an opcode that takes everything above the topmost mark."""
    begin = marks.pop()
    items = stack[begin:]
    del stack[begin:]
    if opcode in b"\x90\x91":
        budget.hashed(items)
    elif opcode == b"d":
        budget.hashed(items[::2])
    elif opcode in b"io":
        for item in items:
            budget.used(item)
    if opcode in b"dlio\x91":
        stack.append(_CONTAINER)


def _index(text: bytes) -> int:
    return int(text) if text.strip().isdigit() else -1


_SHARING = 10  # how many times larger than the stored value the expanded one may be ...
_FREE_ENTRIES = 1_000_000  # ... above this many entries, which every walk can handle
_CONTAINERS = (dict, list, tuple, set, Object)


def check_expansion(root: Value, file: str) -> None:
    """Raises SourceCorruptError if ``root`` is too deep or too large, with shared parts counted wherever they occur."""
    measure = _Measure(file)
    entries, _ = measure.of(root)
    if entries > _FREE_ENTRIES + _SHARING * measure.stored:
        raise SourceCorruptError(
            f"{file} repeats values so often that reading them would never end",
            file=file,
            expected=f"at most {_FREE_ITEMS + _SHARING * measure.stored} entries",
            found=f"{entries:.3g}" if entries < 1e300 else "too many to count",
            why="training code does not save this: the file was made to exhaust whoever reads it",
        )


def too_deep(file: str, key: str | None = None) -> SourceCorruptError:
    """The error for a value in ``file`` that is too deep for Python's stack."""
    what = f"{file} nests values more than {MAX_DEPTH} deep, or a value contains itself"
    return SourceCorruptError(what, file=file, key=key)


class _Measure:
    def __init__(self, file: str) -> None:
        self._file = file
        self._known: dict[int, tuple[int, int] | None] = {}  # None: being measured right now
        self.stored = 0

    def of(self, value: Value) -> tuple[int, int]:
        """Entries and depth of a value with all its parts expanded; 1 and 0 for a value that is not a container."""
        if not isinstance(value, _CONTAINERS) or (not isinstance(value, Object) and not value):
            return 1, 0
        if id(value) in self._known:
            known = self._known[id(value)]
            if known is None:
                raise too_deep(self._file)
            return known
        self._known[id(value)] = None
        children = _children(value)
        self.stored += len(children)
        entries, depth = len(children), 0
        for child in children:
            if isinstance(child, _CONTAINERS):
                inner, below = self.of(child)
                entries += inner
                depth = max(depth, below)
        if depth >= MAX_DEPTH:
            raise too_deep(self._file)
        self._known[id(value)] = entries, depth + 1
        return entries, depth + 1


def _children(value: Value) -> Collection[Value]:
    """The content of a container; a key that is a container counts too."""
    if isinstance(value, dict):
        keys = [key for key in value if isinstance(key, (tuple, Object))]
        attributes = getattr(value, "__dict__", None)  # an OrderedDict has some
        return [*value.values(), *keys, *(attributes or {}).values()] if keys or attributes else value.values()
    if isinstance(value, Object):
        return [value.args, value.state, *value.items, *(part for entry in value.entries for part in entry)]
    return cast("Collection[Value]", value)
