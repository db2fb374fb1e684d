"""Check a pickle's opcodes before the C unpickler sees them: sizes inside the data, memo numbers no larger than it.

The C unpickler believes such numbers: a memo number of two thousand million, which a few damaged bytes make, has it
fill a table of 32 GB. Layout of the opcodes: ``pickletools`` of the standard library.
"""

from __future__ import annotations

import re
from functools import lru_cache

from fsdpckpt.errors import SourceCorruptError, SourceUnsafeError

__all__ = ["check_pickle"]

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
_LINES = {**dict.fromkeys(b"ILFSVgP", 1), **dict.fromkeys(b"ci", 2)}  # opcodes with text up to a newline: how many
_PUT, _STOP = ord("p"), ord(".")
_EXTENSIONS = (0x82, 0x83, 0x84)


@lru_cache(maxsize=64)
def _run_of_fixed(limit: bytes) -> re.Pattern[bytes]:
    """A run of opcodes of fixed size, of which LONG_BINPUT's number is at most about ``limit`` (4 bytes)."""
    zeros = len(limit) - len(limit.lstrip(b"\0"))
    highest = b"[\\x00-\\x%02x]" % limit[zeros] if zeros < 4 else b"\\x00"
    number = b"." * (3 - zeros) + highest + b"\\x00" * zeros
    return re.compile(
        rb"(?:[(012NRQabde\]}l)ostu\x81\x85-\x89\x8f-\x94\x97\x98]++|[Khq\x80].|M..|[Jj]....|[G\x95].{8}|r"
        + number
        + rb")*+",
        re.DOTALL,
    )


def check_pickle(data: bytes, file: str, what: str = "holds a pickle that cannot be read") -> None:
    """Check that the pickle ``data`` is made of whole opcodes up to a STOP, its counts and numbers no larger than it.

    Raises SourceCorruptError when it is not (``file`` and ``what`` make its sentence), SourceUnsafeError for extension
    codes, which stand for any object.
    """
    run = _run_of_fixed(len(data).to_bytes(4, "big") if len(data) < 1 << 32 else b"\xff" * 4).match
    at, end = 0, len(data)
    while at < end:
        found = run(data, at)
        at = found.end() if found is not None else at
        if at == end:
            break
        opcode = data[at]
        width = _COUNTED.get(opcode)
        if width is not None:
            at += 1 + width
            at += int.from_bytes(data[at - width : at], "little")
        elif opcode == _STOP:
            return
        else:
            at = _after_line(data, at, opcode, file, what)
    raise _corrupt(f"{file} {what}", file, "an end", "none")


def _after_line(data: bytes, at: int, opcode: int, file: str, what: str) -> int:
    """The place after an opcode with text up to a newline; any other opcode is refused."""
    if opcode in _EXTENSIONS:
        raise SourceUnsafeError(
            f"{file} uses pickle extension codes",
            file=file,
            found=f"opcode {opcode:#04x} at byte {at}",
            why="an extension code stands for any object that some library registered",
        )
    lines = 1 if opcode == _PUT else _LINES.get(opcode)
    if lines is None:
        raise _corrupt(f"{file} {what}", file, "an opcode", f"byte {opcode:#04x} at {at}")
    after = at
    for _ in range(lines):
        after = data.find(b"\n", after + 1)
        if after < 0:
            raise _corrupt(f"{file} {what}", file, "a line", f"none after byte {at}")
    if opcode == _PUT and not (data[at + 1 : after].isdigit() and int(data[at + 1 : after][:20]) <= len(data)):
        raise _corrupt(f"{file} {what}", file, "a memo number", repr(data[at + 1 : after][:20]))
    return after + 1


def _corrupt(message: str, file: str, expected: str, found: str) -> SourceCorruptError:
    return SourceCorruptError(
        message,
        file=file,
        expected=expected,
        found=found,
        why="the file is damaged or truncated, or PyTorch did not write it",
        next_step="save or copy the checkpoint again",
    )
