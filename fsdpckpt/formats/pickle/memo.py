"""The memo of a pickle that is scanned: where what it holds is in what is left, and which texts records put there."""

from __future__ import annotations

from bisect import bisect_right
from functools import cached_property

import numpy as np
import numpy.typing as npt

from fsdpckpt.ir.tensors import Int64Array


class Memo:
    """The memo of a pickle that numbers its values by itself: which number each value has in what is left of it.

    ``count``, ``kept``: values so far, in the pickle and in what is left.
    """

    def __init__(self) -> None:
        self.count = self.kept = 0
        self._first: list[int] = []  # of values kept one after the other: the number of the first, ...
        self._new: list[int] = []  # ... that number in what is left, ...
        self._end: list[int] = []  # ... and the number after the last

    def keep(self, values: int) -> None:
        if self._end and self._end[-1] == self.count:
            self._end[-1] += values
        else:
            self._first.append(self.count)
            self._new.append(self.kept)
            self._end.append(self.count + values)
        self.count += values
        self.kept += values

    def find(self, number: int) -> int | None:
        """The number in what is left of the value ``number``; None if it is not there."""
        at = bisect_right(self._first, number) - 1
        return None if at < 0 or number >= self._end[at] else self._new[at] + number - self._first[at]


class TextsInRun:
    """The texts that the records of one run memoise. ``base``: the number of the first value that they memoise.

    ``memoised``: for each part of a record, how many values it memoises (one number, or one for each record);
    ``numbers``: the numbers of the texts, by part.
    """

    def __init__(
        self,
        base: int,
        rows: int,
        memoised: list[int | npt.NDArray[np.uint8]],
        numbers: dict[int, npt.NDArray[np.signedinteger]],
    ) -> None:
        self.base, self.numbers = base, numbers
        self._rows, self._memoised = rows, memoised

    @cached_property
    def starts(self) -> Int64Array:
        """The memo number of the first value of each record."""
        total = np.zeros(self._rows, np.int64)
        for each in self._memoised:
            total += each
        return self.base + np.cumsum(total) - total

    def find(self, number: int) -> int | None:
        """The number of the text that is memoised as ``number``."""
        row = int(np.searchsorted(self.starts, number, "right")) - 1
        at = int(self.starts[row])
        for part, each in enumerate(self._memoised):
            here = each if isinstance(each, int) else int(each[row])
            if part in self.numbers and here and at == number:
                return int(self.numbers[part][row])
            at += here
        return None

    @property
    def end(self) -> int:
        """The memo number after the last value."""
        return self.base + sum(
            each * self._rows if isinstance(each, int) else int(each.sum()) for each in self._memoised
        )
