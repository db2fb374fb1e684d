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


def _finding(found: bytes, *, skipped: bytes) -> re.Pattern[bytes]:
    """Finds ``found`` among opcodes of which nothing is memoised but ``skipped``; one match more at the end."""
    return re.compile(
        rb"(?:"
        + skipped
        + _PLAIN
        + rb"|["
        + _SINGLE
        + rb"](?![qr\x94])|\)R?+(?![qr\x94])|\((?!t))*+(?:"
        + found
        + rb")",
        re.DOTALL,
    )


# Numbers of the memo are written by protocols up to 3, and counted since: a pickle that mixes them is not tame.
# What is found is a reference, what memoises something, or any byte that makes the pickle not tame.
_COUNTED = _finding(rb"(h.|j.{4}|\)R\x94|[" + _SINGLE + rb"]\x94|\Z|.)", skipped=b"")
_NUMBERED = _finding(rb"(h.|j.{4}|\Z|.)", skipped=rb"\)R" + _PUT + rb"|[" + _SINGLE + rb"]" + _PUT + b"|")
# Where a tuple, a list, a dict or what a call without arguments made is put; of a pickle that is otherwise tame.
_PUTS = _finding(rb"(?:\)R|[" + _SINGLE + rb"])(" + _PUT + rb")|\Z", skipped=rb"h.|j.{4}|[Sc\x93R\x81]" + _PUT + rb"|")
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
_REFERENCES = (b"h", b"j")


def _evident(put: bytes) -> re.Pattern[bytes]:
    """A pickle that memoises nothing but what may be referred to, and of which every tuple is of numbers and texts or
    taken at once: what this program's DCP metadata is. Quicker than looking at each reference."""
    item = rb"(?:[hK].|S" + put + rb"?+|[Jj].{4}|M..)"
    few = item + rb"(?:" + item + rb"(?:" + item + rb"++[\x85-\x87]?+|[\x85\x86]?+)|\x85?+)"
    return re.compile(
        rb"(?:" + few + rb"|\)R?+|[\x81R]" + put + rb"?+|[NQabe\]}su\x88\x89\x8f\x90\x91]++|\(" + item + rb"++t"
        rb"|\((?!t)|[t\x85-\x87](?=[RbQ\x81])|[c\x93]" + put + rb"?+|[G\x95].{8}|\x80.)*+",
        re.DOTALL,
    )


_EVIDENT_COUNTED, _EVIDENT_NUMBERED = _evident(rb"\x94"), _evident(_PUT)


def is_tame(opcodes: bytes) -> bool:
    """Whether nothing but texts, names and results of calls is referred back to, and tuples nest little.

    ``opcodes``: with their operands, but S for one with a text, c for a name, ? for what needs a closer look. A call
    without arguments makes a container, and is no such result. False when in doubt.
    """
    counted = opcodes[:1] == b"\x80" and opcodes[1:2] >= b"\x04"
    if (_EVIDENT_COUNTED if counted else _EVIDENT_NUMBERED).fullmatch(opcodes):
        return True
    clean = _counted_are_clean if counted else _numbered_are_clean
    return clean(opcodes) and _nests_little(opcodes)


def _numbered_are_clean(opcodes: bytes) -> bool:
    """Whether no number that is referred to is that of a tuple, a list or a dict."""
    found = set(_NUMBERED.findall(opcodes))  # few: the same places are referred to again and again
    if any(len(match) == 1 for match in found):
        return False
    numbers = {match[1:].ljust(4, b"\0") for match in found if match}
    puts = {b"r" + number for number in numbers}
    puts |= {b"q" + number[:1] for number in numbers if number.endswith(b"\0\0\0")}
    return puts.isdisjoint(_PUTS.findall(opcodes))


def _counted_are_clean(opcodes: bytes) -> bool:
    """The same where what is memoised has no numbers, but is counted."""
    found = _COUNTED.findall(opcodes)
    kinds = set(found)
    if any(len(match) == 1 for match in kinds):
        return False
    references = {int.from_bytes(match[1:], "little") for match in kinds if match[:1] in _REFERENCES}
    memoised = [match[0] in _REFERABLE for match in found if match and match[:1] not in _REFERENCES]
    return all(memoised[number] for number in references if number < len(memoised))


def _nests_little(opcodes: bytes) -> bool:
    if sum(opcodes.count(opcode) for opcode in (b"t", b"\x85", b"\x86", b"\x87")) <= _MAX_NESTED:
        return True
    return len(_NESTING.findall(opcodes)) <= _MAX_NESTED
