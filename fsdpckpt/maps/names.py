"""Patterns of parameter names: ``model.layers.{layer}.mlp.experts.{expert}.w1.weight``.

``{layer}`` stands for one word between dots; ``{before*}`` for any text, which may have dots or be empty. All other
characters stand for themselves. The whole name has to match.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

_PLACE = re.compile(r"\{([A-Za-z_][A-Za-z0-9_]*)(\*?)\}")


@dataclass(frozen=True)  # without slots: the expression is compiled once
class Pattern:
    """One pattern. Raises ValueError, when made, for one that is no pattern: the message says what is wrong."""

    text: str

    def __post_init__(self) -> None:
        left = _PLACE.sub("", self.text)
        if "{" in left or "}" in left:
            raise ValueError(f"{self.text!r} has a brace that is no {{name}} and no {{name*}}")
        if not self.text:
            raise ValueError("a pattern is empty")
        places = [match[1] for match in _PLACE.finditer(self.text)]
        twice = next((place for place in places if places.count(place) > 1), None)
        if twice is not None:
            raise ValueError(f"{self.text!r} has {{{twice}}} twice")

    @cached_property
    def places(self) -> frozenset[str]:
        """The names in braces."""
        return frozenset(match[1] for match in _PLACE.finditer(self.text))

    @cached_property
    def _expression(self) -> re.Pattern[str]:
        parts: list[str] = []
        end = 0
        for match in _PLACE.finditer(self.text):
            parts += [re.escape(self.text[end : match.start()]), f"(?P<{match[1]}>{'.*' if match[2] else '[^.]+'})"]
            end = match.end()
        return re.compile("".join([*parts, re.escape(self.text[end:])]), re.DOTALL)

    def match(self, name: str) -> dict[str, str] | None:
        """What stands in ``name`` at each place; None if it does not match."""
        found = self._expression.fullmatch(name)
        return None if found is None else found.groupdict()

    def format(self, words: Mapping[str, str]) -> str:
        """The name with ``words`` at the places."""
        return _PLACE.sub(lambda match: words[match[1]], self.text)

    def __str__(self) -> str:
        return self.text
