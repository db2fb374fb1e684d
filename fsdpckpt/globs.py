"""Matches keys with globs: whatever this program prints for a key can be typed to select it.

A key is printed with its control characters escaped, and repeated layers are printed as one key with braces. Both are
taken here, beside the globs of the shell (``*``, ``?``, ``[0-9]``). A key may contain the characters of globs itself:
``[`` in it is then no set of characters.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import lru_cache

from fsdpckpt.text import key_text, printable


def printed(key: str) -> str:
    """``key`` as lists and messages show it."""
    return key_text(printable(key))


def matches(key: str, glob: str) -> bool:
    """Whether ``glob`` selects ``key``: it is the key, or a glob or a folded key that the key fits."""
    if _matches_text(key, glob):
        return True
    shown = printed(key)
    return shown != key and _matches_text(shown, glob)


def matches_any(key: str, globs: Sequence[str]) -> bool:
    """Whether one of ``globs`` selects ``key``."""
    return any(matches(key, glob) for glob in globs)


def _matches_text(text: str, glob: str) -> bool:
    if text == glob or fnmatchcase(text, glob):
        return True
    folded = _folded(glob)
    return folded is not None and folded.matches(text)


@dataclass(frozen=True, slots=True)
class _Folded:
    """``layers.{0..3}.*`` as a regular expression with a group for each pair of braces. ``ranges``: the numbers that
    each group may be; None for one that lists words, which the expression itself does.
    """

    expression: re.Pattern[str]
    ranges: tuple[tuple[range, ...] | None, ...]

    def matches(self, text: str) -> bool:
        match = self.expression.fullmatch(text)
        if match is None:
            return False
        for number, ranges in zip(match.groups(), self.ranges, strict=True):
            if ranges is not None and not any(int(number) in each for each in ranges):
                return False
        return True


_BRACES = re.compile(r"\{([^{}]*)\}")
_RANGE = re.compile(r"(0|[1-9]\d{0,17})(?:\.\.(0|[1-9]\d{0,17})(?:\.\.([1-9]\d{0,17}))?)?", re.ASCII)
_NUMBER = r"(?<!\d)(0|[1-9]\d{0,17})(?!\d)"


@lru_cache(maxsize=256)
def _folded(glob: str) -> _Folded | None:
    """``glob`` as a folded key; None if it has neither braces nor brackets, which are no set of characters here."""
    if "{" not in glob and "[" not in glob:
        return None
    expression = ""
    ranges: list[tuple[range, ...] | None] = []
    for at, part in enumerate(_BRACES.split(glob)):
        if at % 2 == 0:
            expression += re.escape(part).replace(r"\*", ".*").replace(r"\?", ".")
            continue
        numbers = [_RANGE.fullmatch(word) for word in part.split(",")]
        if None in numbers:
            expression += f"({'|'.join(map(re.escape, part.split(',')))})"
            ranges.append(None)
        else:
            expression += _NUMBER
            ranges.append(tuple(_range(match) for match in numbers if match is not None))
    return _Folded(re.compile(expression, re.DOTALL), tuple(ranges))


def _range(match: re.Match[str]) -> range:
    """``7``, ``0..3`` or ``1..9..2``."""
    first, last, step = match.groups()
    return range(int(first), int(last or first) + 1, int(step or 1))
