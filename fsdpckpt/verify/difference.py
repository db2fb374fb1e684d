"""What a comparison of two checkpoints found: an entry for each key of either."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, TypeAlias

from fsdpckpt.flags import Message
from fsdpckpt.ir.checkpoint import Section
from fsdpckpt.notebook import table
from fsdpckpt.text import count_text, setting_text

Sigil: TypeAlias = Literal["=", "*", "-", "+"]


@dataclass(frozen=True, slots=True)
class Change:
    """How far apart tensors are that have one shape and dtype, or all tensors of a module."""

    elements: int  # that differ
    numel: int  # of all
    largest: float | None  # |A - B|; None if no difference is a number
    squares: float  # the sum of the squares of A - B; of finite numbers, as the next
    squares_a: float  # the sum of the squares of A

    @property
    def norm(self) -> float:
        """The norm of A - B."""
        return math.sqrt(self.squares)

    @property
    def relative(self) -> float | None:
        """The norm of A - B divided by that of A; None if A is zero, or either is too large."""
        if not self.squares_a or not math.isfinite(self.squares) or not math.isfinite(self.squares_a):
            return None
        return math.sqrt(self.squares / self.squares_a)

    def __add__(self, other: Change) -> Change:
        numbers = [each.largest for each in (self, other) if each.largest is not None]
        return Change(
            self.elements + other.elements,
            self.numel + other.numel,
            max(numbers, default=None),
            self.squares + other.squares,
            self.squares_a + other.squares_a,
        )


@dataclass(frozen=True, slots=True)
class ComparedKey:
    """One key of either checkpoint. ``sigil``: ``=`` same, ``*`` differs, ``-`` only in A, ``+`` only in B.

    ``detail``: how the values differ, or the value if only one side has it; "" for ``=``. ``rank``: for the extras of
    one rank. ``counts``: False if only one side has the key because the other one's format cannot hold it: extras of a
    rank that it does not have, extras that B's framework does not keep or adds, and empty containers.
    """

    sigil: Sigil
    section: Section
    key: str
    detail: str = ""
    rank: int | None = None
    counts: bool = True
    param: str | None = None  # the parameter or buffer that a tensor is, or is a state of
    state: str | None = None
    setting: str | None = None  # of a param group
    change: Change | None = None  # of a tensor that differs
    numbers: tuple[float, float] | None = None  # A's and B's, where each is one number

    @property
    def text(self) -> str:
        """``detail`` for people: a learning rate with as many digits as one reads."""
        return setting_text(self.key, self.detail)


@dataclass(frozen=True, slots=True, repr=False)
class Difference:
    """Every key of both checkpoints, A's first, in their order. ``notes``: how keys of different types were matched.
    ``sources``: A and B.
    """

    entries: tuple[ComparedKey, ...]
    notes: tuple[str, ...] = ()
    sources: tuple[str, str] = ("A", "B")

    def __post_init__(self) -> None:
        object.__setattr__(self, "notes", tuple(map(Message, self.notes)))

    @property
    def same(self) -> bool:
        """Whether nothing that counts differs."""
        return all(entry.sigil == "=" or not entry.counts for entry in self.entries)

    def count(self, sigil: Sigil) -> int:
        return sum(1 for entry in self.entries if entry.sigil == sigil and entry.counts)

    @property
    def summary(self) -> str:
        a, b = self.sources
        same, differ, only_a, only_b = (count_text(self.count(sigil)) for sigil in ("=", "*", "-", "+"))
        return Message(f"{same} same, {differ} differ, {only_a} only in {a}, {only_b} only in {b}")

    def __repr__(self) -> str:
        return f"<{self.summary}>"

    def _repr_html_(self) -> str:
        """For notebooks: the keys that differ, those that count first; none that are the same."""
        differing = [entry for entry in self.entries if entry.sigil != "="]
        rows = [
            (entry.sigil, entry.section, entry.key, entry.text, "" if entry.counts else "does not count")
            for entry in sorted(differing, key=lambda entry: not entry.counts)
        ]
        return table(self.summary, ("", "section", "key", "detail", ""), rows, len(rows))

    def __bool__(self) -> bool:
        raise TypeError("a Difference is neither true nor false: use .same")
