"""How every byte reaches the worker that writes it: read by that worker itself, or sent by one that sees the file.

What worker s sends to worker o is one *stream*: the source bytes of o's copies that o cannot read and s shall, cut at
the windows of o, window by window. Streams travel in *rounds*: a round holds what whole windows need, and no worker
receives more than ``round_bytes`` in one. All workers derive all of it from the same plan, so nobody asks for anything.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fsdpckpt.ir.tensors import Int64Array
from fsdpckpt.plan.partition import Segment
from fsdpckpt.plan.plan import Copies, FilePlan, Plan
from fsdpckpt.plan.windows import Parts, Range, open_windows, split

__all__ = ["Window", "TransferPlan", "plan_transfers"]

Visible = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Window:
    """The bytes [begin, end) of segment number ``segment``. ``round``: when its bytes have come, -1 if none have to."""

    segment: int
    begin: int
    end: int
    round: int


@dataclass(frozen=True, slots=True, eq=False)
class TransferPlan:
    """What one worker does. ``files[segment]``: the plan by which it fills its windows of that segment; in it, source
    file ``first_stream + s`` is the stream of worker s.

    ``streams[o]``: the stream to worker o as a plan: a file of its bytes, made of this worker's sources.
    ``sends[o]``, ``receives[s]``: bytes of each round. ``rounds``: of those in which this worker has a part.
    """

    windows: tuple[Window, ...]
    files: dict[int, FilePlan]
    first_stream: int
    streams: dict[int, FilePlan]
    sends: dict[int, Int64Array]
    receives: dict[int, Int64Array]
    rounds: int


@dataclass(frozen=True, slots=True, eq=False)
class _Need:
    """What worker ``owner`` cannot read: parts by target file, who sends each, in which round."""

    owner: int
    windows: list[Window]
    parts: list[tuple[int, Parts]]
    sender: Int64Array
    round: Int64Array
    nbytes: Int64Array


def plan_transfers(
    plan: Plan,
    segments: Sequence[Segment],
    visible: Visible,
    *,
    rank: int,
    window: int,
    round_bytes: int,
    done: Mapping[int, Sequence[Range]] | None = None,
) -> TransferPlan:
    """The routes of worker ``rank``. ``visible[file, worker]``: who sees which source file, each seen by somebody.

    ``done``: by segment, in order, what an interrupted run has written of it; a segment of which that is all has an
    empty window. A window must not need more than ``round_bytes``; rounds are fuller the less it needs.
    """
    senders = _senders(visible)
    own: dict[int, list[int]] = {}
    for number, segment in enumerate(segments):
        own.setdefault(segment.owner, []).append(number)
    served = (~visible & (senders == rank)).any(axis=0)
    served[rank] = True
    needs = [
        _need(plan, segments, own[owner], visible, senders, owner, window, round_bytes, done or {})
        for owner in sorted(own)
        if served[owner]
    ]
    rounds = max((int(need.round.max()) + 1 for need in needs if len(need.round)), default=0)
    mine = next((need for need in needs if need.owner == rank), None)
    streams = {need.owner: _stream(need, rank) for need in needs if (need.sender == rank).any()}
    return TransferPlan(
        windows=tuple(mine.windows) if mine is not None else (),
        files=_own_files(plan, segments, mine, visible, rank) if mine is not None else {},
        first_stream=len(visible),
        streams=streams,
        sends={need.owner: _by_round(need, rank, rounds) for need in needs if need.owner in streams},
        receives={} if mine is None else {s: _by_round(mine, s, rounds) for s in np.unique(mine.sender).tolist()},
        rounds=rounds,
    )


def _senders(visible: Visible) -> Int64Array:
    """Who sends file f to worker o, as [f, o], where anybody has to: those who see f take turns."""
    found = np.zeros(visible.shape, np.int64)
    for file in np.flatnonzero(~visible.all(axis=1)).tolist():
        sees = np.flatnonzero(visible[file])
        found[file] = sees[(file + np.arange(visible.shape[1])) % len(sees)]
    return found


def _need(
    plan: Plan,
    segments: Sequence[Segment],
    own: Sequence[int],
    visible: Visible,
    senders: Int64Array,
    owner: int,
    window: int,
    round_bytes: int,
    done: Mapping[int, Sequence[Range]],
) -> _Need:
    bounds: list[tuple[int, int, int]] = []
    parts: list[tuple[int, Parts]] = []
    needing: list[Int64Array] = []
    for number in own:
        segment = segments[number]
        file = plan.files[segment.file]
        windows = open_windows(file, plan, window, begin=segment.begin, end=segment.end, done=done.get(number, ()))
        first = len(bounds)
        bounds += [(number, begin, end) for begin, end in windows] or [(number, segment.end, segment.end)]
        begins, ends = np.asarray(windows, np.int64).reshape(-1, 2).T
        foreign = ~visible[file.copies.file, owner]
        if foreign.any():
            found = split(file, plan, foreign, begins, ends)
            if len(found.copies):
                parts.append((number, found))
                needing.append(found.window + first)
    window_of = np.concatenate(needing) if needing else np.zeros(0, np.int64)
    nbytes = np.concatenate([found.nbytes for _, found in parts]) if parts else np.zeros(0, np.int64)
    sender = np.concatenate([senders[found.copies.file, owner] for _, found in parts]) if parts else nbytes
    per_window = np.bincount(window_of, weights=nbytes, minlength=len(bounds)).astype(np.int64)
    # Windows that begin within the same stretch take at most that and one window's bytes more.
    stretch = max(round_bytes - int(per_window.max(initial=0)), 1)
    round_of = (np.cumsum(per_window) - per_window) // stretch
    _, round_of = np.unique(np.where(per_window > 0, round_of, -1), return_inverse=True)  # without empty rounds
    round_of = round_of - (1 if (per_window == 0).any() else 0)
    found_windows = [Window(*bound, int(when)) for bound, when in zip(bounds, round_of, strict=True)]
    return _Need(owner, found_windows, parts, sender, round_of[window_of], nbytes)


def _by_round(need: _Need, sender: int, rounds: int) -> Int64Array:
    sent = need.sender == sender
    counts: Int64Array = np.bincount(need.round[sent], weights=need.nbytes[sent], minlength=rounds).astype(np.int64)
    return counts


def _stream(need: _Need, sender: int) -> FilePlan:
    """The stream from ``sender`` to the owner, as a file that an ``Assembler`` can fill."""
    table = np.concatenate([np.stack(_columns(found.copies)) for _, found in need.parts], axis=1)
    chosen = need.sender == sender
    file, source, source_pitch, _, _, _, rows, _ = table[:, chosen]
    nbytes = need.nbytes[chosen]
    width = nbytes // rows
    target = np.cumsum(nbytes) - nbytes
    return FilePlan(
        path=f"what worker {sender} sends to worker {need.owner}",
        nbytes=int(nbytes.sum()),
        blob=b"",
        literals=np.zeros((0, 3), np.int64),
        write_items=np.stack([target, nbytes], axis=1),
        first_copy=np.arange(len(nbytes) + 1),
        copies=Copies(file, source, source_pitch, target, width, width, rows, np.full(len(nbytes), -1)),
        checksums=np.zeros((0, 2), np.int64),
        places=(),
    )


def _columns(copies: Copies) -> list[Int64Array]:
    return [
        copies.file,
        copies.source,
        copies.source_pitch,
        copies.target,
        copies.target_pitch,
        copies.width,
        copies.rows,
        copies.cast,
    ]


def _own_files(
    plan: Plan, segments: Sequence[Segment], need: _Need, visible: Visible, rank: int
) -> dict[int, FilePlan]:
    """By segment: the plan of its file, with what comes by streams taken from there."""
    files = {window.segment: plan.files[segments[window.segment].file] for window in need.windows}
    position = np.zeros(len(need.nbytes), np.int64)
    for sender in np.unique(need.sender).tolist():
        sent = need.sender == sender
        position[sent] = np.cumsum(need.nbytes[sent]) - need.nbytes[sent]
    first = 0
    for number, found in need.parts:
        rows = slice(first, first + len(found.copies))
        first = rows.stop
        files[number] = _rewritten(files[number], found, visible, rank, need.sender[rows], position[rows])
    return files


def _rewritten(
    file: FilePlan, found: Parts, visible: Visible, rank: int, sender: Int64Array, position: Int64Array
) -> FilePlan:
    kept = np.flatnonzero(visible[file.copies.file, rank])
    parts = np.stack(_columns(found.copies))
    parts[0] = len(visible) + sender
    parts[1] = position
    parts[2] = found.nbytes // found.copies.rows  # rows lie end to end in a stream
    copy = np.concatenate([kept, found.copy])
    order = np.argsort(copy, kind="stable")
    table = np.concatenate([np.stack(_columns(file.copies))[:, kept], parts], axis=1)[:, order]
    return FilePlan(
        path=file.path,
        nbytes=file.nbytes,
        blob=file.blob,
        literals=file.literals,
        write_items=file.write_items,
        first_copy=np.searchsorted(copy[order], file.first_copy).astype(np.int64),
        copies=Copies(*np.ascontiguousarray(table)),
        checksums=file.checksums,
        places=file.places,
    )
