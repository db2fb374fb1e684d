"""Checks a pickle opcode by opcode before the C unpickler sees it: whole, with honest numbers, cheap to load.

The C unpickler trusts numbers: for a memo number of two thousand million, which a few damaged bytes make, it allocates
a table of 32 GB. It makes an object of 200 bytes for an opcode of one byte. It hashes a tuple by hashing its items,
each time anew, in C, without checking signals or the stack: forty tuples, each of which holds the one before twice, are
a dict key that takes a year, and a million nested ones overrun the stack. BUILD copies a state each time it is used.

``OpcodeWalk`` therefore does what the unpickler will do (``Modules/_pickle.c``), with a number in place of each value.
``check_expansion`` limits what was loaded: its size with shared parts counted everywhere they occur.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NoReturn, cast

from fsdpckpt.errors import SourceCorruptError, SourceUnsafeError
from fsdpckpt.formats.pickle.opcodes import COUNTED, FIXED, LINES, opcode_end
from fsdpckpt.ir.values import Object, Value
from fsdpckpt.text import size_text

MAX_DEPTH = 200  # deeper nesting than any state dict, shallow enough for Python's stack
_MAX_PICKLE_BYTES = 4 << 30
"""More than the metadata of a million tensors on thousands of ranks. A larger size is damage, and is not read."""

_MAX_INTEGER_BYTES = 1785  # Python refuses to write an integer of more than 4300 digits as text
_MAX_INTEGER_TEXT = 4096
_MAX_MEMO_DIGITS = 20

_FREE_BYTES = 256 << 20  # bytes that a pickle of any size may allocate ...
_BYTES_PER_BYTE = 32  # ... and for each of its bytes; honest ones need 6 to 10
_FREE_ITEMS = 1_000_000  # items that may be hashed, copied or expanded in any pickle: no noticeable time ...
_ITEMS_PER_BYTE = 20  # ... and for each byte of the pickle
# Integers that differ by a multiple of 2^61 - 1 have one hash. Of those that fit into so many bytes, few have the same;
# of larger ones, and of tuples, any number can be chosen (``collisions``).
_NARROW_BYTES, _NARROW_TEXT = 9, 23  # the text with its opcode and the end of its line

# Each value is represented by one number: its items, all references followed, plus these constants. A call's result
# is an object unless the call had no arguments, as for a container.
_LEAF, _OBJECT, _CONTAINER = 1, 2, 3
_DEPTH = 1 << 40  # for each level of nested tuples
_SHARED = 1 << 56  # it is, or holds, a container that was referred back to
_WIDE = 1 << 57  # it is an integer of more than _NARROW_BYTES
_ITEMS = _DEPTH - 1
_DEPTHS = _SHARED - _DEPTH

# Kinds of opcodes, the most frequent ones first: they are tested in this order.
_PUSH, _GET, _TEXT, _PUT, _LONG_PUT, _LONG_GET, _MEMOIZE, _MARK, _TUPLE_N, _TUPLE, _NEW, _CALL = range(1, 13)
_UPDATE, _BUILD, _PERSISTENT_ID, _STOP, _RARE = range(13, 18)
_KIND_OF = {
    **dict.fromkeys(b"N)\x88\x89KMJG", _PUSH),
    **dict.fromkeys(b"UC\x8a\x8cXBT\x8d\x8e\x96", _TEXT),
    **dict.fromkeys(b"\x85\x86\x87", _TUPLE_N),
    **dict.fromkeys(b"]}\x8f", _NEW),
    **dict.fromkeys(b"R\x81", _CALL),
    **{ord("h"): _GET, ord("j"): _LONG_GET, ord("q"): _PUT, ord("r"): _LONG_PUT, 0x94: _MEMOIZE},
    **{ord("("): _MARK, ord("t"): _TUPLE, ord("u"): _UPDATE, ord("b"): _BUILD, ord("."): _STOP},
    ord("Q"): _PERSISTENT_ID,  # one for each tensor
}
_KINDS = bytes(_KIND_OF.get(opcode, _RARE) for opcode in range(256))
_SIZES = bytes(FIXED.get(opcode) or COUNTED.get(opcode, 0) for opcode in range(256))  # of its count if it has one
_LONG1, _LONG4, _FRAME, _REDUCE = 0x8A, 0x8B, 0x95, ord("R")
_EXTENSIONS = b"\x82\x83\x84"

# Bytes that an opcode makes the unpickler allocate (CPython 3.11, rounded up).
_LIST_BYTES, _DICT_BYTES, _SET_BYTES, _TUPLE_BYTES, _CALL_BYTES = 64, 72, 224, 72, 240
_ALLOCATED = bytes(
    {
        **dict.fromkeys(b"]l", _LIST_BYTES),
        **dict.fromkeys(b"}d", _DICT_BYTES),
        **dict.fromkeys(b"\x8f\x91", _SET_BYTES),
        **dict.fromkeys(b"t\x85\x86\x87", _TUPLE_BYTES),
        **dict.fromkeys(b"R\x81\x92io", _CALL_BYTES),
    }.get(opcode, 0)
    for opcode in range(256)
)


def check_size(nbytes: int, file: str) -> None:
    """Raises SourceCorruptError if ``nbytes`` is more than a pickle in ``file`` can have: it is not read then."""
    if nbytes > _MAX_PICKLE_BYTES:
        limit = f"up to {size_text(_MAX_PICKLE_BYTES)}"
        raise _corrupt(f"{file} holds an impossibly large pickle", file, limit, size_text(nbytes))


def check_pickle(data: bytes, file: str, what: str = "holds a pickle that cannot be read") -> int:
    """Check that the pickle ``data`` consists of whole opcodes up to a STOP, with counts and numbers no larger than it.
    Returns how many of its keys have a hash that can be chosen (``collisions``).

    Loading it then allocates at most 256 MiB and some 50 bytes for each of its bytes, in time proportional to its
    length. So does this check. Raises SourceCorruptError otherwise (``file`` and ``what`` form its sentence),
    SourceUnsafeError for extension codes, which can stand for any object.
    """
    walk = OpcodeWalk(data, file, what)
    walk.run()
    return walk.chosen_keys


def _corrupt(message: str, file: str, expected: str, found: str) -> SourceCorruptError:
    return SourceCorruptError(
        message,
        file=file,
        expected=expected,
        found=found,
        why="the file is damaged or truncated, PyTorch did not write it, or it was made to exhaust whoever reads it",
        next_step="save or copy the checkpoint again",
    )


class _Memo(list[int]):
    """The unpickler's memo, by memo number; ``holes``: how many numbers below the largest one are not used."""

    holes = 0

    def put(self, number: int, value: int) -> None:
        if number >= len(self):
            self.holes += number - len(self)
            self.extend([0] * (number + 1 - len(self)))
        elif not self[number]:
            self.holes -= 1
        self[number] = value

    def memoize(self, value: int) -> None:
        """Apply MEMOIZE: its memo number is how many numbers are used."""
        self.put(len(self) - self.holes, value)


class OpcodeWalk:
    """Runs a pickle on numbers. ``stack``, ``memo``: as the unpickler has them, with a number in place of each value.

    A number is never less than what a value costs. Where the unpickler fails, the walk may go on.
    """

    def __init__(self, data: bytes, file: str, what: str) -> None:
        self.stack: list[int] = []
        self.memo = _Memo()
        self._marks: list[int] = []
        self._data, self._file, self._what = data, file, what
        self._max_items = _FREE_ITEMS + _ITEMS_PER_BYTE * len(data)
        self._largest_container = 1 + len(data) // 8  # items that it may have in this pickle
        self.chosen_keys = self._spent = 0

    def _refuse(self, expected: str, found: str) -> NoReturn:
        raise _corrupt(f"{self._file} {self._what}", self._file, expected, found)

    def run(self) -> None:  # noqa: PLR0912, PLR0915 (one loop: it runs for every opcode)
        """Walk up to STOP. Raises what ``check_pickle`` raises."""
        data, kinds, sizes, number = self._data, _KINDS, _SIZES, int.from_bytes
        stack, marks, memo, largest = self.stack, self._marks, self.memo, len(self._data)
        push, pop, limit = stack.append, stack.pop, self._max_items
        append = memoize = memo.append
        at = opcode = allocated = 0
        try:
            while True:
                opcode = data[at]
                kind = kinds[opcode]
                if kind == _PUSH:
                    push(_LEAF)
                    at += sizes[opcode]
                elif kind == _GET:
                    value = memo[data[at + 1]]
                    push(value if value <= _OBJECT else value | _SHARED)
                    at += 2
                elif kind == _TEXT:
                    width = sizes[opcode]
                    at += 1 + width
                    length = data[at - 1] if width == 1 else number(data[at - width : at], "little")
                    at += length
                    push(_LEAF if opcode != _LONG1 or length <= _NARROW_BYTES else _LEAF + _WIDE)
                elif kind == _PUT:
                    if data[at + 1] == len(memo):
                        append(stack[-1])
                    else:
                        memo.put(data[at + 1], stack[-1])
                        memoize = memo.memoize
                    at += 2
                elif kind == _LONG_PUT:
                    place = number(data[at + 1 : at + 5], "little")
                    if place > largest:
                        self._refuse(f"memo numbers up to {largest}", f"{place}")
                    if place == len(memo):
                        append(stack[-1])
                    else:
                        memo.put(place, stack[-1])
                        memoize = memo.memoize
                    at += 5
                elif kind == _LONG_GET:
                    value = memo[number(data[at + 1 : at + 5], "little")]
                    push(value if value <= _OBJECT else value | _SHARED)
                    at += 5
                elif kind == _MEMOIZE:
                    memoize(stack[-1])
                    at += 1
                elif kind == _MARK:
                    marks.append(len(stack))
                    at += 1
                elif kind in (_TUPLE_N, _TUPLE):
                    begin = marks.pop() if kind == _TUPLE else len(stack) + 0x84 - opcode
                    items = stack[begin:]
                    total = sum(items) + 1
                    del stack[begin:]
                    push(total + _DEPTH if total < limit else self._nested(items))
                    allocated += _TUPLE_BYTES
                    at += 1
                elif kind == _NEW:
                    push(_CONTAINER)
                    allocated += _ALLOCATED[opcode]
                    at += 1
                elif kind == _CALL:
                    arguments = pop()
                    if arguments > _DEPTH + 64:
                        self._charge_copy(arguments)
                    # OrderedDict() is a dict, which BUILD may copy. What NEWOBJ makes never is.
                    stack[-1] = _CONTAINER if arguments == _LEAF and opcode == _REDUCE else _OBJECT
                    allocated += _CALL_BYTES
                    at += 1
                elif kind == _UPDATE:
                    begin = marks.pop()
                    keys = stack[begin::2]
                    if sum(keys) != len(keys):
                        self._charge_hash(keys)
                    del stack[begin:]
                    at += 1
                elif kind == _BUILD:
                    state = pop()
                    if state > _CONTAINER:
                        self._charge_copy(state)
                    at += 1
                elif kind == _PERSISTENT_ID:
                    self._charge_copy(stack[-1])
                    stack[-1] = _OBJECT
                    allocated += _ALLOCATED[opcode]
                    at += 1
                elif kind == _RARE:
                    allocated += _ALLOCATED[opcode]
                    at = self._rare(opcode, at)
                    if memo.holes:
                        memoize = memo.memoize
                else:  # STOP
                    break
        except IndexError:
            whole = f"opcode {opcode:#04x} at byte {at} without one"
            self._refuse("a value for each opcode, and an end", "no end" if at >= largest else whole)
        max_bytes = _FREE_BYTES + _BYTES_PER_BYTE * len(data)
        if allocated > max_bytes:
            self._refuse(f"values that fit into {size_text(max_bytes)}", f"{size_text(allocated)} of them")

    def _nested(self, items: Sequence[int]) -> int:
        """The number for the tuple of ``items``, one of which is a tuple, shared, or large."""
        total = 1
        depth = shared = 0
        for item in items:
            total += item & _ITEMS
            depth = max(depth, item & _DEPTHS)
            shared |= item & _SHARED
        depth += _DEPTH
        if depth > MAX_DEPTH * _DEPTH:
            self._refuse("values of bounded cost", f"tuples more than {MAX_DEPTH} deep")
        if total > self._max_items:
            self._refuse("values of bounded cost", f"a tuple of {total:.3g} items")
        return total + depth + shared

    def _charge_hash(self, items: Sequence[int]) -> None:
        self.chosen_keys += sum(1 for item in items if item >= _DEPTH)
        self._charge(sum(item & _ITEMS for item in items))

    def _charge_copy(self, item: int) -> None:
        """Count an argument or a state."""
        self._charge((item & _ITEMS) + (self._largest_container if item & _SHARED else 0))

    def _charge(self, items: int) -> None:
        self._spent += items
        if self._spent > self._max_items:
            self._refuse("values of bounded cost", "values that are hashed or copied again and again")

    def _rare(self, opcode: int, at: int) -> int:  # noqa: PLR0912 (a case for each)
        """Apply a rare opcode; return where it ends."""
        data, stack = self._data, self.stack
        if opcode in _EXTENSIONS:
            raise SourceUnsafeError(
                f"{self._file} uses pickle extension codes",
                file=self._file,
                found=f"opcode {opcode:#04x} at byte {at}",
                why="an extension code stands for any object that some library registered",
            )
        if opcode not in FIXED and opcode not in COUNTED and opcode not in LINES:
            self._refuse("an opcode", f"byte {opcode:#04x} at {at}")
        end = opcode_end(data, at)
        if opcode in b"IL" and end - at > _MAX_INTEGER_TEXT:
            self._refuse("a number", f"{end - at} digits")
        if opcode == _LONG4 and end - at > 5 + _MAX_INTEGER_BYTES:
            self._refuse(f"integers of up to {size_text(_MAX_INTEGER_BYTES)}", size_text(end - at - 5))
        if opcode in b"IL\x8b":
            stack.append(_LEAF if opcode != _LONG4 and end - at <= _NARROW_TEXT else _LEAF + _WIDE)
        elif opcode in b"FSVPc":
            stack.append(_LEAF)
        elif opcode == _FRAME:
            if int.from_bytes(data[at + 1 : end], "little") > len(data) - end:
                self._refuse("frames inside the pickle", f"one that ends after it, at byte {at}")
        elif opcode == ord("g"):
            value = self.memo[self._memo_number(at, end)]
            stack.append(value if value <= _OBJECT else value | _SHARED)
        elif opcode == ord("p"):
            self.memo.put(self._memo_number(at, end), stack[-1])
        elif opcode == 0x97:  # NEXT_BUFFER
            stack.append(_CONTAINER)
        elif opcode == ord("a"):
            stack.pop()
        elif opcode == ord("0"):
            if self._marks and self._marks[-1] == len(stack):
                self._marks.pop()
            else:
                stack.pop()
        elif opcode == ord("2"):
            stack.append(stack[-1] if stack[-1] <= _OBJECT else stack[-1] | _SHARED)
        elif opcode == ord("s"):
            stack.pop()
            self._charge_hash([stack.pop()])
        elif opcode == 0x93:  # STACK_GLOBAL
            stack.pop()
            stack[-1] = _LEAF
        elif opcode == 0x92:  # NEWOBJ_EX
            self._charge_copy(stack.pop())
            self._charge_copy(stack.pop())
            stack[-1] = _OBJECT
        elif opcode not in b"\x80\x98":  # PROTO, READONLY_BUFFER
            self._apply_to_mark(opcode)
        return end

    def _memo_number(self, at: int, end: int) -> int:
        """The memo number that a PUT or a GET with text writes in digits."""
        text = self._data[at + 1 : end - 1]
        if not (text.isdigit() and len(text) <= _MAX_MEMO_DIGITS and int(text) <= len(self._data)):
            self._refuse("a memo number", repr(text[:_MAX_MEMO_DIGITS]))
        return int(text)

    def _apply_to_mark(self, opcode: int) -> None:
        """Apply an opcode that takes everything above the topmost mark."""
        begin = self._marks.pop()
        items = self.stack[begin:]
        del self.stack[begin:]
        if opcode in b"\x90\x91":  # ADDITEMS, FROZENSET
            self._charge_hash(items)
        elif opcode == ord("d"):
            self._charge_hash(items[::2])
        elif opcode in b"io":
            for item in items:
                self._charge_copy(item)
        if opcode in b"dlio":
            self.stack.append(_CONTAINER)
        elif opcode == 0x91:  # comparing it compares its items
            self.stack.append(self._nested(items))


_REPEATS = 10  # how many times larger than the stored value the expanded one may be
_CONTAINERS = (dict, list, tuple, set, Object)


def check_expansion(root: Value, file: str) -> None:
    """Raises SourceCorruptError if ``root`` is too deep or too large, with shared parts counted wherever they occur."""
    measure = _Measure(file)
    entries, _ = measure.of(root)
    if entries > _FREE_ITEMS + _REPEATS * measure.stored:
        raise SourceCorruptError(
            f"{file} repeats values so often that reading them would never end",
            file=file,
            expected=f"at most {_FREE_ITEMS + _REPEATS * measure.stored} entries",
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
        if not keys and not attributes:
            return value.values()
        return [*value.values(), *keys, *(attributes or {}).values()]
    if isinstance(value, Object):
        return [value.args, value.state, *value.items, *(part for entry in value.entries for part in entry)]
    return cast("Collection[Value]", value)
