"""Checks what must hold for a checkpoint to be converted without losing or inventing data: pure functions over the IR.

Each returns every problem and raises nothing; ``fatal`` turns the fatal ones into one error.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import gcd

import numpy as np

from fsdpckpt.ir.attached_states import misshapen_states
from fsdpckpt.ir.buffers import undecided_copies
from fsdpckpt.ir.checkpoint import Checkpoint, NamedTensor, Problem, Section
from fsdpckpt.ir.copies import DifferentCopies, contradicting_copies, copies_of_plain_tensors
from fsdpckpt.ir.coverage import Flaw, box_text, flaws
from fsdpckpt.ir.files import path_of
from fsdpckpt.ir.optimizer import Optimizer, ParamKey
from fsdpckpt.ir.sections import alone
from fsdpckpt.ir.state_parts import state_parts
from fsdpckpt.ir.state_shapes import without_states
from fsdpckpt.ir.tensors import Boxes, Chunks, Tensor, ranges_of
from fsdpckpt.ir.values import Value
from fsdpckpt.text import plural, some_of


def problems(checkpoint: Checkpoint, copies: Iterable[DifferentCopies] | None = None) -> list[Problem]:
    """Every problem of ``checkpoint`` that can be found without reading tensor data. ``copies``: those of its plain
    tensors, if they are found already.
    """
    all_problems = [problem for _, problem in coverage(checkpoint)]
    all_problems.extend(undecided_copies(checkpoint))
    all_problems.extend(contradicting_copies(copies_of_plain_tensors(checkpoint) if copies is None else copies))
    all_problems.extend(_of_optimizer(checkpoint))
    for section in checkpoint.named:
        if section.section is Section.OPTIM:
            all_problems.extend(map(section.problem, _of_optimizer(alone(checkpoint, section))))
    all_problems.extend(misshapen_states(checkpoint))
    return all_problems


def coverage(checkpoint: Checkpoint) -> Iterator[tuple[Flaw, Problem]]:
    """What is wrong with the chunks of each tensor, as what it is and as a problem."""
    distinct = {_boxes(tensor): tensor for tensor in checkpoint.leaves()}  # many tensors share their boxes
    covered = {boxes for boxes, tensor in distinct.items() if not flaws(tensor)}
    for named in checkpoint.tensors() if len(covered) < len(distinct) else ():
        if _boxes(named.tensor) not in covered:
            for flaw in flaws(named.tensor):
                yield flaw, _coverage_problem(named, flaw, checkpoint)


def _of_optimizer(checkpoint: Checkpoint) -> Iterator[Problem]:
    """The problems of the main optimizer."""
    if checkpoint.optim is not None:
        yield from aliased_states(checkpoint.optim, checkpoint)
        yield from state_completeness(checkpoint.optim)


def _boxes(tensor: Tensor) -> tuple[tuple[int, ...], Boxes]:
    return tensor.shape, tensor.chunks.boxes


def _coverage_problem(named: NamedTensor, flaw: Flaw, checkpoint: Checkpoint) -> Problem:
    tensor = named.tensor
    where = f"{named.section} {named.key} {list(tensor.shape)}"
    box = box_text(flaw.start, flaw.size)
    holders = _ranks_text(flaw.ranks)
    if flaw.kind == "outside":
        message = f"{where}: {holders} holds {box}, which reaches outside the tensor"
    elif flaw.kind == "overlap":
        message = f"{where}: chunks overlap in {plural(flaw.elements, 'element')}, first {box} ({holders})"
    else:
        message = f"{where}: {flaw.elements} of {tensor.numel} elements are in no chunk, first {box}"
        message += _who_holds(tensor.chunks, checkpoint.world_size)
    rank = flaw.ranks[0] if flaw.ranks else None
    file = _file_of(tensor.chunks, rank, checkpoint)
    return Problem(flaw.kind, message, key=named.key, rank=rank, file=file, section=named.section)


def _ranks_text(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) != 1 else ''} {some_of(ranks, 8)}"


def _who_holds(chunks: Chunks, world_size: int) -> str:
    """Which ranks hold a part of the tensor, and which do not: a missing file usually belongs to one of the latter."""
    holders = sorted(set(chunks.rank.tolist()))
    if not holders:
        return " (no rank holds any of it)"
    absent = sorted(set(range(world_size)).difference(holders))
    nothing = f"; nothing from {_ranks_text(absent)}" if absent else ""
    return f" (parts from {_ranks_text(holders)}{nothing})"


def _file_of(chunks: Chunks, rank: int | None, checkpoint: Checkpoint) -> str | None:
    """The file of the first chunk of ``rank``."""
    numbers: list[int] = chunks.file[chunks.rank == rank].tolist() if rank is not None else []
    return path_of(checkpoint.files, numbers[0]) if numbers else None


def aliased_states(optim: Optimizer, checkpoint: Checkpoint) -> Iterator[Problem]:
    """A fatal problem for each parameter with two tensor states in the same bytes of a file."""
    params = list(optim.state)
    for number, first, second, file in _overlapping_states(optim):
        yield Problem(
            "aliased-states",
            f"optim {params[number]}: the states {first} and {second} share the same bytes, so at most one of them is "
            "what the optimizer had",
            key=f"{params[number]}.{first}",
            file=path_of(checkpoint.files, file),
            section=Section.OPTIM,
        )


_CHUNKS_AT_ONCE = 1 << 16  # whose byte ranges are compared: more take longer, and 60 bytes each


def _overlapping_states(optim: Optimizer) -> Iterator[tuple[int, str, str, int]]:
    """For each parameter with states that overlap its number, the names of the first two, and the file's number."""
    states: list[tuple[int, str, Tensor]] = []
    chunks = 0
    for number, entry in enumerate(optim.state.values()):
        for name, leaf in entry.items():
            if isinstance(leaf, Tensor):
                states.append((number, name, leaf))
                chunks += len(leaf.chunks)
        if chunks >= _CHUNKS_AT_ONCE:
            yield from _overlaps(states)
            states, chunks = [], 0
    if states:
        yield from _overlaps(states)


def _overlaps(states: Sequence[tuple[int, str, Tensor]]) -> Iterator[tuple[int, str, str, int]]:
    """What ``_overlapping_states`` yields for ``states``: the parameter's number, the name and the tensor of each.

    Compares the byte ranges of all chunks in columns, one row for each chunk; Python looks at the chunks of those
    parameters alone that have ranges that overlap.
    """
    tensors = [tensor for _, _, tensor in states]
    counts = np.array([len(tensor.chunks) for tensor in tensors], np.int64)
    first_rows = np.cumsum(counts) - counts
    param = np.repeat(np.array([number for number, _, _ in states], np.int64), counts)
    file, begin, end = ranges_of(tensors)
    order = np.lexsort((end, begin, file, param))
    order = order[(begin[order] >= 0) & (end[order] > begin[order])]  # located, and not empty
    before, after = order[:-1], order[1:]
    near = (param[before] == param[after]) & (file[before] == file[after]) & (begin[after] < end[before])

    def state_of(row: int) -> int:
        return int(np.searchsorted(first_rows + counts, row, "right"))

    furthest = reported = -1  # the row that reaches furthest into its file; the last parameter with a problem
    for row in order[np.isin(param[order], param[after[near]])].tolist():
        same_file = furthest >= 0 and param[row] == param[furthest] and file[row] == file[furthest]
        overlaps = same_file and begin[row] < end[furthest]
        if overlaps and param[row] != reported and state_of(row) != state_of(furthest):
            i, j = state_of(furthest), state_of(row)
            (_, first, first_tensor), (number, second, second_tensor) = states[i], states[j]
            first_chunk, second_chunk = int(furthest - first_rows[i]), int(row - first_rows[j])
            if _share_elements(first_tensor, first_chunk, second_tensor, second_chunk):
                reported = number
                yield number, first, second, int(file[row])
        if not overlaps or end[row] > end[furthest]:
            furthest = row


def _share_elements(first: Tensor, first_chunk: int, second: Tensor, second_chunk: int) -> bool:
    """Whether two chunks whose byte ranges overlap have an element in common.

    Interleaved views (``buffer[:, 0]`` beside ``buffer[:, 1]``) have none.
    """
    period = 0
    for tensor, chunk in ((first, first_chunk), (second, second_chunk)):
        strides = tensor.chunks.stride[chunk][tensor.chunks.size[chunk] > 1] * tensor.dtype.itemsize
        period = gcd(period, *strides.tolist())
    if period == 0:
        return True
    widest = max(first.dtype.itemsize, second.dtype.itemsize)
    distance = int(second.chunks.offset[second_chunk] - first.chunks.offset[first_chunk]) % period
    return not widest <= distance <= period - widest


def state_completeness(optim: Optimizer) -> Iterator[Problem]:
    """Problems of the optimizer's bookkeeping: parameters without state, states without a group.

    An id that no group lists is fatal: it is a place in the groups, and ``optimizer.state_dict()`` never makes one. All
    else may come from a real save.
    """
    if optim.groups is None or any(group.members is None for group in optim.groups):
        return  # the source does not list them
    groups = optim.in_groups()
    seen: set[ParamKey] = set()
    for number, keys in enumerate(groups):
        for key in keys:
            if key in seen:
                yield _state_problem(key, f"optim {key}: listed more than once in the param groups (again in {number})")
            seen.add(key)
    if optim.state:
        lacking = set(without_states(optim))
        for number, keys in enumerate(groups):
            for key in keys:
                if key in lacking:
                    yield _state_problem(key, f"optim {key}: in param group {number}, but has no optimizer state")
            yield from _uneven_states(number, keys, optim.state)
    for key in optim.state:
        if key not in seen:
            what = f"optim {key}: has state, but is in no param group"
            # Beside names a number is an entry that a user added; among ids it is a parameter that nothing trains.
            yield _state_problem(key, what, fatal=type(key) is int and optim.key_type == "id")


def _uneven_states(
    number: int, keys: list[ParamKey], state: Mapping[ParamKey, Mapping[str, Tensor | Value]]
) -> Iterator[Problem]:
    """States that a parameter lacks and most parameters of the group with as many dimensions have.

    By dimensions, because factored optimizers (Adafactor) keep different states for vectors and for matrices.
    """
    params: dict[int, list[ParamKey]] = {}  # by dimensions
    counts: dict[tuple[int, str], int] = {}  # of the parameters with a state, by dimensions and name
    for key in keys:
        states = state.get(key)
        if states:
            ndim = max((leaf.ndim for leaf in states.values() if isinstance(leaf, Tensor)), default=0)
            params.setdefault(ndim, []).append(key)
            parts = state_parts(states).names
            for name in [name for name in states if name not in parts]:
                counts[ndim, name] = counts.get((ndim, name), 0) + 1
    for (ndim, name), count in counts.items():
        members = params[ndim]
        if len(members) > 2 and len(members) // 2 < count < len(members):
            for key in members:
                if name not in state[key]:
                    yield _state_problem(
                        key,
                        f"optim {key}: no state {name}, which {count} of {len(members)} alike in group {number} have",
                    )


def _state_problem(key: ParamKey, message: str, *, fatal: bool = False) -> Problem:
    return Problem("state", message, fatal=fatal, key=str(key), section=Section.OPTIM)
