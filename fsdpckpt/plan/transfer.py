"""Divides the bytes of all target files among the ranks, and plans how each byte reaches the rank that writes it.

``partition``: lays the files end to end and cuts them into equal parts, one for each rank, so that the files of one
target rank stay together. A cut moves to the end of a file if one is near. Inside a file it falls on a disk block, or
between two parts of an object, but never inside an element that is cast or a window of an interrupted run.
``plan_transfers``: a byte is read by the rank that writes it, or sent by a rank that sees its file.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from fsdpckpt.ir.tensors import Int64Array
from fsdpckpt.plan.plan import Copies, CopyParts, FilePlan, Plan, open_windows, split_copies
from fsdpckpt.plan.streams import Parts, StreamLayout, bytes_held, lay_out_stream, parts_in_place
from fsdpckpt.plan.written import BEGIN, END, NOTHING_WRITTEN, rows_of

_SNAP = 0.05  # of a part: a rank may write this fraction more if a file then has one writer instead of two
# The same of objects: one that several ranks send is complete, and need not be sent again, only when all have ended.
_SNAP_OBJECTS = 0.4
_BLOCK = 1 << 16  # bytes: no system in use has larger pages, so no page of a file has two writers
# Most file systems let one thread at a time write to a file: threads that write to several do not wait for each other.
FILES_AT_ONCE = 8


@dataclass(frozen=True, slots=True)
class Segment:
    """The bytes [begin, end) of target file number ``file``, which rank ``owner`` writes.

    ``directory``: the number of the output directory if each node has its own; 0 if all ranks write to the same one.
    """

    file: int
    directory: int
    begin: int
    end: int
    owner: int


def partition(
    plan: Plan,
    files: Sequence[int],
    workers: Sequence[int],
    *,
    directory: int = 0,
    written: Int64Array = NOTHING_WRITTEN,
    part: int = 0,
) -> list[Segment]:
    """Divide ``files`` (numbers in ``plan``) among ``workers``. Every file has a segment, even an empty one.

    ``written``: rows of ``plan.written``, by file, in order: windows that an interrupted run has written. ``part``: the
    files are objects that are sent in parts of so many bytes, and none has two writers.
    """
    ends = np.cumsum([plan.files[number].nbytes for number in files], dtype=np.int64)
    total = int(ends[-1]) if len(ends) else 0
    share, snap = total // len(workers), _SNAP_OBJECTS if part else _SNAP
    equal_cuts = [total * number // len(workers) for number in range(1, len(workers))]
    marks = [_snap_to_end(cut, ends, share * snap) for cut in equal_cuts]
    segments: list[Segment] = []
    begin = 0
    worker = 0
    for number, end in zip(files, ends.tolist(), strict=True):
        file = plan.files[number]
        at = 0
        while worker < len(marks) and marks[worker] < end:
            stop = _last_allowed_cut(file, plan, marks[worker] - begin, part)
            stop = _outside_window(stop, rows_of(written, number))
            if stop > at:
                segments.append(Segment(number, directory, at, stop, workers[worker]))
                at = stop
            worker += 1
        if at < file.nbytes or file.nbytes == 0:
            segments.append(Segment(number, directory, at, file.nbytes, workers[worker]))
        begin = end
    return segments


def _snap_to_end(mark: int, ends: Int64Array, most: float) -> int:
    """``mark``, or the end of a file that is at most ``most`` bytes from it."""
    index = int(np.searchsorted(ends, mark))
    neighbours = [int(end) for end in ends[max(index - 1, 0) : index + 1]]
    nearest = min([0, *neighbours], key=lambda end: abs(end - mark))
    return nearest if abs(nearest - mark) <= most else mark


def _last_allowed_cut(file: FilePlan, plan: Plan, at: int, part: int) -> int:
    """The last offset up to ``at`` where ``file`` may be cut; 0 if there is none. ``part``: as for ``partition``."""
    at = at // (part or _BLOCK) * (part or _BLOCK)
    write_item = int(np.searchsorted(file.write_items[:, 0], at, side="right")) - 1
    if write_item < 0 or not plan.casts:
        return at
    offset, nbytes = file.write_items[write_item].tolist()
    rows = slice(int(file.first_copy[write_item]), int(file.first_copy[write_item + 1]))
    cast = int(file.copies.cast[rows].max())  # the same for all copies of a write item
    if at >= offset + nbytes or cast < 0:
        return at
    inside = (at - int(offset)) % plan.casts[cast][1].itemsize
    if part and inside:  # as between all parts of a tensor that is not aligned: look in front of it
        return _last_allowed_cut(file, plan, int(offset), part)
    # If the tensor is not aligned, the cut is inside a block, to which two workers then write different bytes.
    return at - inside


def _outside_window(at: int, written: Int64Array) -> int:
    """``at``, or the beginning of the window in ``written`` that contains it."""
    index = int(written[:, BEGIN].searchsorted(at)) - 1  # the last that begins before it
    return int(written[index, BEGIN]) if index >= 0 and written[index, END] > at else at


def target_node(target_rank: int, world_size: int, nodes: Mapping[int, int]) -> int:
    """The node that will load target rank ``target_rank`` of ``world_size``; ``nodes[worker]`` is each worker's node.

    Worker w of W takes the ranks from w * N / W on: N ranks on the same number of nodes as these workers, in the same
    order.
    """
    return nodes[target_rank * len(nodes) // world_size]


SeenBy: TypeAlias = npt.NDArray[np.bool_]
"""``[file, rank]``: which rank sees which source file."""


@dataclass(frozen=True, slots=True)
class Window:
    """The bytes [begin, end) of segment number ``segment``. ``round``: the round that brings its bytes; -1 if none is
    needed.
    """

    segment: int
    begin: int
    end: int
    round: int


@dataclass(frozen=True, slots=True, eq=False)
class TransferPlan:
    """What one rank writes, sends and receives.

    ``windows``: in the order in which they are written. ``files[segment]``: the plan by which it fills its windows of
    that segment; in it, the streams of all ranks follow the source files. ``streams[o]``: the stream to rank o, as the
    plan of a file made from this rank's sources. ``sends[o]``, ``receives[s]``: bytes in each round, with those that
    only keep windows in place. ``in_place``: the windows that are received where they are written from: the sender, and
    where in its stream they begin. ``received[s]``: bytes of tensors from rank s. ``rounds``: the number of rounds in
    which this rank takes part.
    """

    windows: tuple[Window, ...]
    files: dict[int, FilePlan]
    streams: dict[int, FilePlan]
    sends: dict[int, Int64Array]
    receives: dict[int, Int64Array]
    in_place: dict[Window, tuple[int, int]]
    received: dict[int, int]
    rounds: int


@dataclass(frozen=True, slots=True, eq=False)
class _Need:
    """What rank ``owner`` cannot read: copies by segment, all of their parts, and the streams of the ranks that send
    some: of each to the rank that plans, and to others only its own.

    ``windows``: by segment; ``order``: their numbers, in the order in which they are written.
    """

    owner: int
    windows: list[Window]
    order: list[int]
    copies: list[tuple[int, CopyParts]]
    parts: Parts
    streams: dict[int, StreamLayout]
    rounds: int


def plan_transfers(
    plan: Plan,
    segments: Sequence[Segment],
    seen_by: SeenBy,
    *,
    rank: int,
    window: int,
    round_bytes: int,
    written: Int64Array,
    files_at_once: int = FILES_AT_ONCE,
) -> TransferPlan:
    """Plan the transfers of rank ``rank``. ``seen_by[file, rank]``: which rank sees which source file; every file is
    seen by at least one.

    ``written``: rows of ``plan.written``, by segment, in order: windows that an interrupted run has written. A segment
    that is complete has an empty window. A window must not need more than ``round_bytes``; the less each window needs,
    the better rounds are filled. ``files_at_once``: the windows of so many files are written in turn.
    """
    owned: dict[int, list[int]] = {rank: []}
    for number, segment in enumerate(segments):
        owned.setdefault(segment.owner, []).append(number)
    served = {rank, *np.flatnonzero((~seen_by & seen_by[:, [rank]]).any(axis=0)).tolist()}
    search = _NeedSearch(plan, segments, seen_by, rank, window, round_bytes, written, files_at_once)
    needs = [search.of_owner(owner, owned[owner]) for owner in sorted(owned) if owner in served]
    rounds = max((need.rounds for need in needs), default=0)
    own_need = next(need for need in needs if need.owner == rank)
    sent = {need.owner: need.streams[rank] for need in needs if rank in need.streams}
    return TransferPlan(
        windows=tuple(own_need.windows[number] for number in own_need.order),
        files=_files_with_streams(plan, segments, own_need, seen_by, rank),
        streams={need.owner: _stream(need, rank) for need in needs if rank in need.streams},
        sends={owner: _in_rounds(stream.counts, rounds) for owner, stream in sent.items()},
        receives={sender: _in_rounds(stream.counts, rounds) for sender, stream in own_need.streams.items()},
        in_place={
            own_need.windows[number]: (sender, at)
            for sender, stream in own_need.streams.items()
            for number, at in stream.windows.items()
        },
        received={
            sender: int(own_need.parts.nbytes[stream.parts].sum()) for sender, stream in own_need.streams.items()
        },
        rounds=rounds,
    )


def _in_rounds(counts: Int64Array, rounds: int) -> Int64Array:
    """``counts`` of a rank, which may need fewer rounds than others."""
    return np.append(counts, np.zeros(rounds - len(counts), np.int64))


def _senders(seen_by: SeenBy, files: Int64Array, places: Int64Array, owner: int) -> Int64Array:
    """Who sends each part that ``owner`` needs: of file ``files[n]``, for the window that it writes as number
    ``places[n]``.

    The ranks that see a file take turns window by window, for each owner beginning with another one, so that all of
    them send in every round.
    """
    used, row = np.unique(files, return_inverse=True)
    seers = np.argsort(~seen_by[used], axis=1, kind="stable")  # the ranks that see the file come first
    counts = seen_by[used].sum(axis=1)
    turns: Int64Array = seers[row, (places + owner) % counts[row]]
    return turns


@dataclass(frozen=True, slots=True, eq=False)
class _NeedSearch:
    """Arguments as for ``plan_transfers``."""

    plan: Plan
    segments: Sequence[Segment]
    seen_by: SeenBy
    rank: int
    window: int
    round_bytes: int
    written: Int64Array
    files_at_once: int

    def of_owner(self, owner: int, numbers: Sequence[int]) -> _Need:
        """What ``owner`` cannot read of ``numbers``, its segments."""
        bounds: list[tuple[int, int, int]] = []
        copies: list[tuple[int, CopyParts]] = []
        windows_of_parts: list[Int64Array] = []
        for number in numbers:
            segment = self.segments[number]
            file = self.plan.files[segment.file]
            written = rows_of(self.written, number)[:, [BEGIN, END]].tolist()
            ranges = open_windows(file, self.plan, self.window, segment.begin, segment.end, written)
            first = len(bounds)
            bounds += [(number, begin, end) for begin, end in ranges] or [(number, segment.end, segment.end)]
            begins, ends = np.asarray(ranges, np.int64).reshape(-1, 2).T
            unreadable = ~self.seen_by[file.copies.file, owner]
            if unreadable.any():
                needed = split_copies(file, self.plan, unreadable, begins, ends)
                if len(needed.nbytes):
                    copies.append((number, needed))
                    windows_of_parts.append(needed.window + first)
        sizes = np.array([end - begin for _, begin, end in bounds], np.int64)
        window_of = np.concatenate([*windows_of_parts, np.zeros(0, np.int64)])
        order = _in_turn([segment for segment, _, _ in bounds], self.files_at_once)
        needed_parts = self._parts([needed for _, needed in copies], window_of, order, owner)
        in_place = parts_in_place(needed_parts, sizes)
        round_of = _fill_rounds(bytes_held(needed_parts, in_place, sizes), self.round_bytes, order)
        rounds = int(round_of.max(initial=-1)) + 1
        windows = [Window(*bound, int(number)) for bound, number in zip(bounds, round_of, strict=True)]
        streams = {
            sender: lay_out_stream(needed_parts, sender, in_place, windows, round_of, rounds)
            for sender in sorted(set(needed_parts.sender.tolist()))
            if self.rank in (owner, sender)  # this rank takes no part in the others
        }
        return _Need(owner, windows, order, copies, needed_parts, streams, rounds)

    def _parts(self, needed: Sequence[CopyParts], window_of: Int64Array, order: Sequence[int], owner: int) -> Parts:
        """All parts of ``needed``, which ``owner`` needs; ``window_of``: the number of the window of each; ``order``:
        these numbers, as ``owner`` writes the windows.
        """
        if not needed:
            nothing = np.zeros(0, np.int64)
            return Parts(nothing, nothing, nothing, nothing, nothing.astype(np.bool_))
        columns = np.concatenate([np.stack(each.copies) for each in needed], axis=1)
        file, _, _, target, _, _, rows, cast = columns
        nbytes = np.concatenate([each.nbytes for each in needed])
        place_of = np.empty(len(order), np.int64)  # by window
        place_of[order] = np.arange(len(order))
        senders = _senders(self.seen_by, file, place_of[window_of], owner)
        return Parts(window_of, senders, nbytes, target, (rows == 1) & (cast < 0))


def _in_turn(files: Sequence[int], files_at_once: int) -> list[int]:
    """The order in which windows are written: ``files_at_once`` files take turns, and the next file comes when one has
    no more windows. ``files``: of each window.
    """
    by_file: dict[int, deque[int]] = {}
    for number, file in enumerate(files):
        by_file.setdefault(file, deque()).append(number)
    files_left = iter(by_file.values())
    taken = deque(islice(files_left, files_at_once))
    order: list[int] = []
    while taken:
        windows = taken.popleft()
        order.append(windows.popleft())
        taken.extend([windows] if windows else islice(files_left, 1))
    return order


def _fill_rounds(nbytes: Int64Array, round_bytes: int, order: Sequence[int]) -> Int64Array:
    """The round of each window, which needs ``nbytes`` from other ranks; -1 for none. No round is empty.

    ``order``: the numbers of the windows, as they are written.
    """
    needs = nbytes > 0
    if not needs.any():  # as in a run of one process: skip np.unique, which imports much
        return np.full(len(nbytes), -1, np.int64)
    # A round has the windows whose bytes begin in the same ``step``: at most as many bytes and one window's more.
    step = max(round_bytes - int(nbytes.max()), 1)
    begins = np.zeros(len(nbytes), np.int64)
    begins[order] = np.cumsum(nbytes[order]) - nbytes[order]
    _, rounds = np.unique(np.where(needs, begins // step, -1), return_inverse=True)
    return rounds.astype(np.int64) - (0 if needs.all() else 1)


def _stream(need: _Need, sender: int) -> FilePlan:
    """The stream from ``sender`` to the owner, as a file that an ``Assembler`` can fill."""
    table = np.concatenate([np.stack(needed.copies) for _, needed in need.copies], axis=1)
    stream = need.streams[sender]
    file, source, source_pitch, _, _, _, rows, _ = table[:, stream.parts]
    nbytes = need.parts.nbytes[stream.parts]
    width = nbytes // rows
    return FilePlan(
        path=f"what worker {sender} sends to worker {need.owner}",
        nbytes=int(stream.counts.sum()),
        blob=b"",
        literals=np.zeros((0, 3), np.int64),
        write_items=np.stack([stream.offset, nbytes], axis=1),
        first_copy=np.arange(len(nbytes) + 1),
        copies=Copies(file, source, source_pitch, stream.offset, width, width, rows, np.full(len(nbytes), -1)),
        checksums=np.zeros((0, 4), np.int64),
    )


def _files_with_streams(
    plan: Plan, segments: Sequence[Segment], need: _Need, seen_by: SeenBy, rank: int
) -> dict[int, FilePlan]:
    """For each segment the plan of its file, taking from streams what this rank does not see."""
    files = {window.segment: plan.files[segments[window.segment].file] for window in need.windows}
    position = np.zeros(len(need.parts.nbytes), np.int64)
    for stream in need.streams.values():
        position[stream.parts] = stream.offset
    first = 0
    for number, needed in need.copies:
        rows = slice(first, first + len(needed.nbytes))
        first = rows.stop
        files[number] = _with_streams(files[number], needed, seen_by, rank, need.parts.sender[rows], position[rows])
    return files


def _with_streams(
    file: FilePlan, needed: CopyParts, seen_by: SeenBy, rank: int, sender: Int64Array, position: Int64Array
) -> FilePlan:
    readable = np.flatnonzero(seen_by[file.copies.file, rank])
    parts = np.stack(needed.copies)
    parts[0] = len(seen_by) + sender
    parts[1] = position
    parts[2] = needed.nbytes // needed.copies.rows  # rows lie end to end in a stream
    copy = np.concatenate([readable, needed.copy])
    order = np.argsort(copy, kind="stable")
    table = np.concatenate([np.stack(file.copies)[:, readable], parts], axis=1)[:, order]
    return replace(
        file,
        first_copy=np.searchsorted(copy[order], file.first_copy).astype(np.int64),
        copies=Copies(*np.ascontiguousarray(table)),
    )
