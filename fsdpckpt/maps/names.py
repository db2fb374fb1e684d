"""Patterns of parameter names: ``model.layers.{layer}.mlp.experts.{expert}.w1.weight``.

``{layer}`` stands for one word between dots; ``{before*}`` for any text, which may have dots or be empty. ``{layer+1}``
stands for a number, and ``{rank*8+expert}`` for one of two: eight experts of each rank, counted through. All other
characters stand for themselves. The whole name has to match.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

from fsdpckpt.errors import InternalError

_NAME = r"[A-Za-z_][A-Za-z0-9_]*"
# Neither + 0 nor * 1: one says nothing, and beside the other the second name would always be 0.
_PLACE = re.compile(rf"\{{({_NAME})(?:(\*)|([+-])([1-9]\d{{0,8}})|\*([2-9]|[1-9]\d{{1,8}})\+({_NAME}))?\}}", re.ASCII)
NUMBER = re.compile(r"0|[1-9]\d{0,8}", re.ASCII)


@dataclass(frozen=True, slots=True)
class Placeholder:
    """What is in one pair of braces. ``text``: whether any text may stand there; ``offset``: what is added to a number.

    ``times``: where two names are one number, how many numbers the second has for each of the first; 0 for one name.
    """

    names: tuple[str, ...]
    text: bool = False
    offset: int = 0
    times: int = 0

    @property
    def is_number(self) -> bool:
        return bool(self.offset or self.times)

    @property
    def expression(self) -> str:
        if self.is_number:
            return NUMBER.pattern
        return ".*" if self.text else "[^.]+"

    def read(self, word: str) -> Mapping[str, str] | None:
        """What the names stand for where ``word`` stands; None for a number below those that the place can be."""
        if not self.is_number:
            return {self.names[0]: word}
        if self.times:
            return dict(zip(self.names, map(str, divmod(int(word), self.times)), strict=True))
        number = int(word) - self.offset
        return {self.names[0]: str(number)} if number >= 0 else None

    def written(self, words: Mapping[str, str]) -> str | None:
        """The inverse of ``read``; None for a number below zero."""
        first, *rest = (words[name] for name in self.names)
        if not self.is_number:
            return first
        number = int(first) * self.times + int(rest[0]) if self.times else int(first) + self.offset
        return str(number) if number >= 0 else None


def _place(match: re.Match[str]) -> Placeholder:
    name, text, sign, offset, times, second = match.groups()
    if times is not None:
        return Placeholder((name, second), times=int(times))
    return Placeholder((name,), text=text is not None, offset=int(f"{sign}{offset}") if sign is not None else 0)


@dataclass(frozen=True)  # without slots: the expression is compiled once
class Pattern:
    """One pattern. Raises ValueError, when made, for one that is no pattern: the message says what is wrong."""

    text: str

    def __post_init__(self) -> None:
        left = _PLACE.sub("", self.text)
        if "{" in left or "}" in left:
            raise ValueError(
                f"{self.text!r} has a brace that is no {{name}}, {{name*}}, {{name+1}} or {{name*8+other}}"
            )
        if not self.text:
            raise ValueError("a pattern is empty")
        names = [name for place in self._places for name in place.names]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise ValueError(f"{self.text!r} has {{{twice}}} twice")

    @cached_property
    def _parts(self) -> tuple[str | Placeholder, ...]:
        """The text between the braces, and what is in them, in order."""
        parts: list[str | Placeholder] = []
        end = 0
        for match in _PLACE.finditer(self.text):
            parts += [self.text[end : match.start()], _place(match)]
            end = match.end()
        return (*parts, self.text[end:])

    @cached_property
    def _places(self) -> tuple[Placeholder, ...]:
        return tuple(part for part in self._parts if isinstance(part, Placeholder))

    @cached_property
    def places(self) -> frozenset[str]:
        """The names in braces."""
        return frozenset(name for place in self._places for name in place.names)

    @cached_property
    def computed(self) -> Mapping[str, Placeholder]:
        """The places of which something is computed, by each of their names: only numbers can stand for these, also in
        other patterns.
        """
        return {name: place for place in self._places if place.is_number for name in place.names}

    @cached_property
    def _expression(self) -> re.Pattern[str]:
        parts = (re.escape(part) if isinstance(part, str) else f"({part.expression})" for part in self._parts)
        return re.compile("".join(parts), re.DOTALL | re.ASCII)

    def match(self, name: str) -> dict[str, str] | None:
        """What each name in braces stands for in ``name``; None if it does not match."""
        found = self._expression.fullmatch(name)
        if found is None:
            return None
        words: dict[str, str] = {}
        for place, text in zip(self._places, found.groups(), strict=True):
            read = place.read(text)
            if read is None:
                return None
            words.update(read)
        return words

    def can_write(self, words: Mapping[str, str]) -> bool:
        """Whether every number that is computed of ``words``, which may lack some, is one from 0 on."""
        known = (place for place in self._places if place.is_number and words.keys() >= {*place.names})
        return all(place.written(words) is not None for place in known)

    def format(self, words: Mapping[str, str]) -> str:
        """The name with ``words`` in the braces."""
        return "".join(self._written(words))

    def _written(self, words: Mapping[str, str]) -> Iterator[str]:
        for part in self._parts:
            text = part if isinstance(part, str) else part.written(words)
            if text is None:
                raise InternalError(f"{self.text} has no name for {dict(words)}")
            yield text

    def __str__(self) -> str:
        return self.text
