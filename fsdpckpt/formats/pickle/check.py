"""Checks a pickle's opcodes before the C unpickler sees them: complete, within bounds, and with honest counts.

The C unpickler trusts numbers: for a memo number of two thousand million, which a few damaged bytes make, it allocates
a table of 32 GB. It makes an object of 200 bytes for an opcode of one byte, and hashes nested tuples however long that
takes. Layout of the opcodes: ``pickletools`` of the standard library.

``fast_accept`` recognises, at the speed of a regular expression, pickles whose cost need not be computed. The pickles
of ``torch.save`` and DCP refer back only to texts, names and results of calls, never to a tuple, a list or a dict, and
nest few tuples. Then no tuple is larger than the bytes that made it, and no state is used twice.
"""

from __future__ import annotations

import re
from functools import lru_cache

from fsdpckpt.errors import SourceCorruptError, SourceUnsafeError
from fsdpckpt.formats.pickle.cost import LINES, excessive_cost
from fsdpckpt.text import size_text

_MAX_PICKLE_BYTES = 4 << 30
"""More than the metadata of a million tensors on thousands of ranks. A larger size is damage, and is not read."""

_COUNTED = {  # opcodes with a counted text: bytes of the count
    ord("U"): 1,
    ord("C"): 1,
    0x8A: 1,
    0x8C: 1,
    ord("X"): 4,
    ord("B"): 4,
    ord("T"): 4,
    0x8B: 4,
    0x8D: 8,
    0x8E: 8,
    0x96: 8,
}
_PUT, _STOP, _LONG4 = ord("p"), ord("."), 0x8B
_EXTENSIONS = (0x82, 0x83, 0x84)
_MAX_NUMBER = 1785  # bytes of an integer: Python refuses to write one of more than 4300 digits as text
_MAX_NUMBER_TEXT = 4096
_NUMBERS = b"IL"

# Placeholders for opcodes with texts in the input of ``fast_accept``.
_REPLACEMENTS = {**dict.fromkeys(b"ILFSVP", b"S"), ord("c"): b"c"}

# Bytes that an opcode of one byte makes the unpickler allocate (CPython 3.11, rounded up).
_ALLOCATED = (
    (b"]", 64),
    (b"}", 72),
    (b"\x8f", 224),
    (b"\x91", 224),
    (b"t", 64),
    (b"l", 64),
    (b"d", 72),
    (b"\x85", 64),
    (b"\x86", 64),
    (b"\x87", 72),
    (b"R", 240),
    (b"\x81", 240),
)
_FREE_BYTES = 256 << 20  # bytes that a pickle of any size may allocate ...
_PER_BYTE = 32  # ... and by each of its bytes; honest ones need 6 to 10
_MOST_ALLOCATED = max(nbytes for _, nbytes in _ALLOCATED)


@lru_cache(maxsize=64)
def _run_of_fixed(limit: bytes) -> re.Pattern[bytes]:
    """A pattern for opcodes of fixed size, with LONG_BINPUT numbers up to about ``limit`` (4 bytes)."""
    zeros = len(limit) - len(limit.lstrip(b"\0"))
    highest = b"[\\x00-\\x%02x]" % limit[zeros] if zeros < 4 else b"\\x00"
    number = b"." * (3 - zeros) + highest + b"\\x00" * zeros
    return re.compile(
        rb"(?:[(012NRQabde\]}l)ostu\x81\x85-\x89\x8f-\x94\x97\x98]++|[Khq\x80].|M..|[Jj]....|[G\x95].{8}|r"
        + number
        + rb")*+",
        re.DOTALL,
    )


def check_size(nbytes: int, file: str) -> None:
    """Raises SourceCorruptError if ``nbytes`` is more than a pickle in ``file`` can have: it is not read then."""
    if nbytes > _MAX_PICKLE_BYTES:
        raise _corrupt(
            f"{file} holds an impossibly large pickle",
            file,
            f"up to {size_text(_MAX_PICKLE_BYTES)}",
            size_text(nbytes),
        )


def check_pickle(data: bytes, file: str, what: str = "holds a pickle that cannot be read") -> None:
    """Check that the pickle ``data`` consists of whole opcodes up to a STOP, with counts and numbers no larger than it.

    Loading it then allocates at most 256 MiB and some 50 bytes for each of its bytes, in time proportional to its
    length. Raises SourceCorruptError otherwise (``file`` and ``what`` form its sentence), SourceUnsafeError for
    extension codes, which can stand for any object.
    """
    runs = _fixed_opcodes(data, file, what)
    joined = b"".join(runs)
    limit = _FREE_BYTES + _PER_BYTE * len(data)
    if len(data) * _MOST_ALLOCATED > limit:
        allocated = sum(joined.count(opcode) * nbytes for opcode, nbytes in _ALLOCATED)
        if allocated > limit:
            raise _corrupt(
                f"{file} {what}", file, f"values that fit into {size_text(limit)}", f"{size_text(allocated)} of them"
            )
    problem = None if fast_accept(joined) else excessive_cost(data)
    if problem is not None:
        raise _corrupt(f"{file} {what}", file, "values that end", problem)


def _fixed_opcodes(data: bytes, file: str, what: str) -> list[bytes]:
    """The opcodes of fixed size, run by run, with a placeholder for each opcode with text between the runs."""
    run = _run_of_fixed(len(data).to_bytes(4, "big") if len(data) < 1 << 32 else b"\xff" * 4).match
    at, end = 0, len(data)
    runs: list[bytes] = []
    while at < end:
        match = run(data, at)
        if match is not None:
            runs.append(match[0])
            at = match.end()
        if at == end:
            break
        opcode = data[at]
        width = _COUNTED.get(opcode)
        if width is not None:
            at += 1 + width
            nbytes = int.from_bytes(data[at - width : at], "little")
            if opcode == _LONG4 and nbytes > _MAX_NUMBER:
                raise _corrupt(f"{file} {what}", file, f"integers of up to {size_text(_MAX_NUMBER)}", size_text(nbytes))
            at += nbytes
            runs.append(b"S")
        elif opcode == _STOP:
            return runs
        else:
            at = _after_line(data, at, opcode, file, what)
            runs.append(_REPLACEMENTS.get(opcode, b"?"))
    raise _corrupt(f"{file} {what}", file, "an end", "none")


def _after_line(data: bytes, at: int, opcode: int, file: str, what: str) -> int:
    """The place after an opcode with text up to a newline; refuses any other opcode."""
    if opcode in _EXTENSIONS:
        raise SourceUnsafeError(
            f"{file} uses pickle extension codes",
            file=file,
            found=f"opcode {opcode:#04x} at byte {at}",
            why="an extension code stands for any object that some library registered",
        )
    lines = LINES.get(opcode)
    if lines is None:
        raise _corrupt(f"{file} {what}", file, "an opcode", f"byte {opcode:#04x} at {at}")
    after = at
    for _ in range(lines):
        after = data.find(b"\n", after + 1)
        if after < 0:
            raise _corrupt(f"{file} {what}", file, "a line", f"none after byte {at}")
    if opcode == _PUT and not (data[at + 1 : after].isdigit() and int(data[at + 1 : after][:20]) <= len(data)):
        raise _corrupt(f"{file} {what}", file, "a memo number", repr(data[at + 1 : after][:20]))
    if opcode in _NUMBERS and after - at > _MAX_NUMBER_TEXT:
        raise _corrupt(f"{file} {what}", file, "a number", f"{after - at} digits")
    return after + 1


def _corrupt(message: str, file: str, expected: str, found: str) -> SourceCorruptError:
    return SourceCorruptError(
        message,
        file=file,
        expected=expected,
        found=found,
        why="the file is damaged or truncated, PyTorch did not write it, or it was made to exhaust whoever reads it",
        next_step="save or copy the checkpoint again",
    )


_MAX_NESTED = 20_000  # nested tuples that fit in a stack of 8 MiB

_PUT_TO_NUMBER = rb"(?:q.|r.{4})"
_MEMOISED = rb"(?:q.|r.{4}|\x94)"
_PLAIN = rb"[K\x80].|M..|J.{4}|[G\x95].{8}"
_SINGLE = rb"ScNRQabe\]}stu\x81\x85-\x89\x8f\x90\x91\x93"
_ITEM = rb"(?:S" + _MEMOISED + rb"?+|[Kh].|M..|[Jj].{4})"  # content of a tuple without other tuples: a number, a text


def _pattern_of(opcode: bytes, *, skipped: bytes) -> re.Pattern[bytes]:
    """A pattern that finds ``opcode`` among opcodes of which only ``skipped`` memoise; it matches once more
    at the end.
    """
    return re.compile(
        rb"(?:"
        + skipped
        + _PLAIN
        + rb"|["
        + _SINGLE
        + rb"](?![qr\x94])|\)R?+(?![qr\x94])|\((?!t))*+(?:"
        + opcode
        + rb")",
        re.DOTALL,
    )


# Protocols up to 3 write memo numbers, later ones count: a pickle that mixes both is not accepted.
# A match is a reference, an opcode that memoises, or a byte for which the pickle is not accepted.
_COUNTED_REFERENCES = _pattern_of(rb"(h.|j.{4}|\)R\x94|[" + _SINGLE + rb"]\x94|\Z|.)", skipped=b"")
_NUMBERED_REFERENCES = _pattern_of(
    rb"(h.|j.{4}|\Z|.)", skipped=rb"\)R" + _PUT_TO_NUMBER + rb"|[" + _SINGLE + rb"]" + _PUT_TO_NUMBER + b"|"
)
# Where a tuple, a list, a dict or the result of a call without arguments is memoised, in an otherwise accepted pickle.
_PUTS = _pattern_of(
    rb"(?:\)R|[" + _SINGLE + rb"])(" + _PUT_TO_NUMBER + rb")|\Z",
    skipped=rb"h.|j.{4}|[Sc\x93R\x81]" + _PUT_TO_NUMBER + rb"|",
)
# A tuple of numbers and texts holds no tuple; one used by a call, a state or a persistent id is in no tuple.
_NESTING = re.compile(
    rb"(?:" + _ITEM + rb"(?:\x85|" + _ITEM + rb"(?:\x86|" + _ITEM + rb"\x87))|\(" + _ITEM + rb"*+t"
    rb"|[t\x85-\x87](?="
    + _MEMOISED
    + rb"?[RbQ\x81])|[ScNRQabe\]}()su\x81\x88\x89\x8f\x90\x91\x93]|h.|j.{4}|"
    + _PLAIN
    + rb"|"
    + _MEMOISED
    + rb")*+([t\x85-\x87]|\Z|.)",
    re.DOTALL,
)
_REFERABLE = b"Sc\x93R\x81"  # a text, a name, the result of a call
_REFERENCES = (b"h", b"j")


def _obviously_cheap(put: bytes) -> re.Pattern[bytes]:
    """Whether the pickle memoises only what may be referred to, and every tuple has only numbers and texts or is used
    at once, as in the DCP metadata of this program. Faster than following each reference.
    """
    item = rb"(?:[hK].|S" + put + rb"?+|[Jj].{4}|M..)"
    few = item + rb"(?:" + item + rb"(?:" + item + rb"++[\x85-\x87]?+|[\x85\x86]?+)|\x85?+)"
    return re.compile(
        rb"(?:" + few + rb"|\)R?+|[\x81R]" + put + rb"?+|[NQabe\]}su\x88\x89\x8f\x90\x91]++|\(" + item + rb"++t"
        rb"|\((?!t)|[t\x85-\x87](?=[RbQ\x81])|[c\x93]" + put + rb"?+|[G\x95].{8}|\x80.)*+",
        re.DOTALL,
    )


_CHEAP_COUNTED, _CHEAP_NUMBERED = _obviously_cheap(rb"\x94"), _obviously_cheap(_PUT_TO_NUMBER)


def fast_accept(opcodes: bytes) -> bool:
    """Whether only texts, names and results of calls are referred back to, and tuples nest little.

    ``opcodes``: with their operands, but S for one with a text, c for a name, ? for one that needs a closer look. A
    call without arguments makes a container, and does not count as a result. False when in doubt.
    """
    counted = opcodes[:1] == b"\x80" and opcodes[1:2] >= b"\x04"
    if (_CHEAP_COUNTED if counted else _CHEAP_NUMBERED).fullmatch(opcodes):
        return True
    accept = _no_counted_container if counted else _no_numbered_container
    return accept(opcodes) and _nests_rarely(opcodes)


def _no_numbered_container(opcodes: bytes) -> bool:
    """Whether no number that is referred to belongs to a tuple, a list or a dict."""
    references = set(_NUMBERED_REFERENCES.findall(opcodes))  # few: the same places are referred to repeatedly
    if any(len(match) == 1 for match in references):
        return False
    numbers = {match[1:].ljust(4, b"\0") for match in references if match}
    puts = {b"r" + number for number in numbers}
    puts |= {b"q" + number[:1] for number in numbers if number.endswith(b"\0\0\0")}
    return puts.isdisjoint(_PUTS.findall(opcodes))


def _no_counted_container(opcodes: bytes) -> bool:
    """The same for pickles that count memoised values instead of numbering them."""
    matches = _COUNTED_REFERENCES.findall(opcodes)
    kinds = set(matches)
    if any(len(match) == 1 for match in kinds):
        return False
    references = {int.from_bytes(match[1:], "little") for match in kinds if match[:1] in _REFERENCES}
    memoised = [match[0] in _REFERABLE for match in matches if match and match[:1] not in _REFERENCES]
    return all(memoised[number] for number in references if number < len(memoised))


def _nests_rarely(opcodes: bytes) -> bool:
    if sum(opcodes.count(opcode) for opcode in (b"t", b"\x85", b"\x86", b"\x87")) <= _MAX_NESTED:
        return True
    return len(_NESTING.findall(opcodes)) <= _MAX_NESTED
