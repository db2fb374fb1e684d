"""Lays out the stream of bytes from one rank to another, round by round.

What fills nearly all of a window is *in place*: the stream then has the whole window, with gaps where its other bytes
belong, at the same alignment as in the file. So the window is received where it will be written from, and not copied.
All else lies end to end behind these windows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from fsdpckpt.ir.tensors import Int64Array

SHORTEST_IN_PLACE = 128 * 1024  # bytes: a part or range of this length is read straight into its window
MOST_OF_A_WINDOW = 15 / 16  # that one rank sends in place, more than half of it: the gaps travel too
ALIGNMENT = 4096  # bytes, as direct writes need it


class Bounds(Protocol):
    """A window: the bytes [begin, end) of a file."""

    @property
    def begin(self) -> int: ...
    @property
    def end(self) -> int: ...


@dataclass(frozen=True, slots=True, eq=False)
class Parts:
    """What one rank needs from others, sorted by window: for each part its window and round, the rank that sends it,
    its bytes, its offset in the target file, and whether it is copied as it is.
    """

    window: Int64Array
    sender: Int64Array
    nbytes: Int64Array
    target: Int64Array
    plain: npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, eq=False)
class StreamLayout:
    """``parts``: numbers of the parts in it; ``offset``: where each begins. ``counts``: bytes of each round.
    ``windows``: the offset at which each window that is in place begins, by its number.
    """

    parts: Int64Array
    offset: Int64Array
    counts: Int64Array
    windows: dict[int, int]


def parts_in_place(parts: Parts, nbytes: Int64Array) -> npt.NDArray[np.bool_]:
    """Which of ``parts`` are in place. ``nbytes``: of each window."""
    found = parts.plain & (parts.nbytes >= SHORTEST_IN_PLACE)
    if not found.any():
        return found
    senders = int(parts.sender.max()) + 1
    key = parts.window * senders + parts.sender
    sent = np.bincount(key[found], weights=parts.nbytes[found], minlength=int(key.max()) + 1)
    mostly: npt.NDArray[np.bool_] = found & (sent[key] >= MOST_OF_A_WINDOW * nbytes[parts.window])
    return mostly


def bytes_held(parts: Parts, in_place: npt.NDArray[np.bool_], nbytes: Int64Array) -> Int64Array:
    """The bytes of each window that are held from when its round is received, gaps and alignment included."""
    held = np.bincount(parts.window, weights=np.where(in_place, 0, parts.nbytes), minlength=len(nbytes))
    windows = np.unique(parts.window[in_place])
    held[windows] += nbytes[windows] + 2 * ALIGNMENT  # in the stream, and where it begins in its buffer
    return held.astype(np.int64)


def lay_out_stream(
    parts: Parts,
    sender: int,
    in_place: npt.NDArray[np.bool_],
    windows: Sequence[Bounds],
    round_of: Int64Array,
    rounds: int,
) -> StreamLayout:
    """The stream from ``sender``. ``round_of[w]``: the round of window w."""
    chosen = np.flatnonzero(parts.sender == sender)
    direct = in_place[chosen]
    counts = np.zeros(rounds, np.int64)
    placed: dict[int, int] = {}  # at first with offsets from the beginning of their round
    for number in np.unique(parts.window[chosen[direct]]).tolist():
        at = int(counts[round_of[number]])
        placed[number] = at + (windows[number].begin - at) % ALIGNMENT
        counts[round_of[number]] = placed[number] + windows[number].end - windows[number].begin
    rest = chosen[~direct]
    rest = rest[np.argsort(round_of[parts.window[rest]], kind="stable")]
    round_of_rest = round_of[parts.window[rest]]
    behind = np.cumsum(parts.nbytes[rest]) - parts.nbytes[rest]
    of_round = np.bincount(round_of_rest, weights=parts.nbytes[rest], minlength=rounds).astype(np.int64)
    behind += counts[round_of_rest] - (np.cumsum(of_round) - of_round)[round_of_rest]
    counts += of_round
    begins = np.cumsum(counts) - counts
    placed = {number: at + int(begins[round_of[number]]) for number, at in placed.items()}
    in_windows = chosen[direct]
    numbers = parts.window[in_windows].tolist()
    offset_in_windows = [
        placed[number] - windows[number].begin + target
        for number, target in zip(numbers, parts.target[in_windows].tolist(), strict=True)
    ]
    found = np.concatenate([in_windows, rest])
    offset = np.concatenate([np.array(offset_in_windows, np.int64), behind + begins[round_of_rest]])
    order = np.argsort(offset, kind="stable")
    return StreamLayout(found[order], offset[order], counts, placed)
