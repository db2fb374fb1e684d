"""Tell at the speed of a regular expression that a pickle is one of those that need no weighing.

What ``torch.save`` and DCP write refers back to texts, names and results of calls alone, never to a tuple, a list or a
dict, and nests few tuples. Then no tuple is larger than the bytes that made it, and no state is used twice.
"""

from __future__ import annotations

import re

__all__ = ["is_tame"]

_MAX_NESTED = 20_000  # tuples within each other that no stack of 8 MiB is too small for

_PUT = rb"(?:q.|r.{4})"
_MEMOISED = rb"(?:q.|r.{4}|\x94)"
_PLAIN = rb"[K\x80].|M..|J.{4}|[G\x95].{8}"
_SINGLE = rb"ScNRQabe\]}stu\x81\x85-\x89\x8f\x90\x91\x93"
_ITEM = rb"(?:S" + _MEMOISED + rb"?+|[Kh].|M..|[Jj].{4})"  # of a tuple that holds no other: a number, a text


def _references(put: bytes, *, skipped: bytes) -> re.Pattern[bytes]:
    """What is found: references, memoised values (those of ``skipped`` are not), and anything that is not tame."""
    return re.compile(
        rb"(?:" + skipped + _PLAIN + rb"|[" + _SINGLE + rb"](?![qr\x94])|\)R?+(?![qr\x94])|\((?!t))*+"
        rb"(h.|j.{4}|\)R" + put + rb"|[" + _SINGLE + rb"]" + put + rb"|\Z|.)",
        re.DOTALL,
    )


# Numbers of the memo are written by protocols up to 3, and counted since: a pickle that mixes them is not tame.
_COUNTED = _references(rb"\x94", skipped=b"")
_NUMBERED = _references(_PUT, skipped=rb"[Sc\x93R\x81]" + _PUT + b"|")
# A tuple of numbers and texts holds no tuple; one that a call, a state or a persistent id takes is in no tuple.
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


def is_tame(opcodes: bytes) -> bool:
    """Whether nothing but texts, names and results of calls is referred back to, and tuples nest little.

    ``opcodes``: with their operands, but S for one with a text, c for a name, ? for what needs a closer look. A call
    without arguments makes a container, and is no such result. False when in doubt.
    """
    references: set[int] = set()
    suspicious: set[int] = set()
    memoised = 0
    counted = opcodes[:1] == b"\x80" and opcodes[1:2] >= b"\x04"
    for match in (_COUNTED if counted else _NUMBERED).findall(opcodes):
        first = match[:1]
        if first in (b"h", b"j"):
            references.add(int.from_bytes(match[1:], "little"))
        elif len(match) > 1:
            put = match[2:] if first == b")" else match[1:]
            if first == b")" or match[0] not in _REFERABLE:
                suspicious.add(memoised if counted else int.from_bytes(put[1:], "little"))
            memoised += 1
        elif match:
            return False
    return suspicious.isdisjoint(references) and _nests_little(opcodes)


def _nests_little(opcodes: bytes) -> bool:
    if sum(opcodes.count(opcode) for opcode in (b"t", b"\x85", b"\x86", b"\x87")) <= _MAX_NESTED:
        return True
    return len(_NESTING.findall(opcodes)) <= _MAX_NESTED
