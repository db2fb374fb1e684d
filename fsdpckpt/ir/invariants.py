"""Checks what must hold for a checkpoint to be converted without losing or inventing data: pure functions over the IR.

Each returns every problem and raises nothing; ``fatal`` turns the fatal ones into one error.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import gcd
from typing import NamedTuple

import numpy as np

from fsdpckpt.errors import SourceCorruptError, SourceError, SourceIncompleteError, SourceUnsupportedError
from fsdpckpt.ir.checkpoint import (
    BARE_VALUE,
    Checkpoint,
    NamedTensor,
    OptimState,
    ParamKey,
    Problem,
    Section,
    group_params,
)
from fsdpckpt.ir.coverage import Flaw, box_text, flaws
from fsdpckpt.ir.quantized import maps_in, parts_in, scales_in
from fsdpckpt.ir.tensors import Chunks, Tensor, spans_of
from fsdpckpt.ir.values import Value
from fsdpckpt.text import plural

INCOMPLETE = frozenset(
    {"incomplete", "missing-rank", "missing-key", "missing-file", "missing-section", "missing-state"}
)
UNSUPPORTED = frozenset({"aliased-states", "flattened", "flattened-lost"})

ALIASED_WHY = (
    "FSDP1 with use_orig_params=True, trained on CPU and gathered with offload_to_cpu=True, hands out every state of a "
    "parameter as a view of one reused buffer: the other states were overwritten before they reached the disk"
)

ALIASED_NEXT = "save again with FullOptimStateDictConfig(offload_to_cpu=False), or as SHARDED_STATE_DICT"


def problems(checkpoint: Checkpoint) -> list[Problem]:
    """Every problem of ``checkpoint`` that can be found without reading tensor data."""
    all_problems: list[Problem] = []
    several = {_boxes(tensor): tensor for tensor in checkpoint.leaves()}  # many share theirs
    covered = {boxes for boxes, tensor in several.items() if not flaws(tensor)}
    for named in checkpoint.tensors() if len(covered) < len(several) else ():
        if _boxes(named.tensor) not in covered:
            all_problems.extend(_coverage_problem(named, flaw, checkpoint) for flaw in flaws(named.tensor))
    if checkpoint.optim is not None:
        all_problems.extend(aliased_states(checkpoint.optim, checkpoint))
        all_problems.extend(state_completeness(checkpoint.optim))
    return all_problems


def _boxes(tensor: Tensor) -> tuple[tuple[int, ...], int, int]:
    return tensor.shape, id(tensor.chunks.start), id(tensor.chunks.size)


def _coverage_problem(named: NamedTensor, flaw: Flaw, checkpoint: Checkpoint) -> Problem:
    tensor = named.tensor
    where = f"{named.section} {named.key} {list(tensor.shape)}"
    box = box_text(flaw.start, flaw.size)
    held_by = _ranks_text(flaw.ranks)
    if flaw.kind == "outside":
        message = f"{where}: {held_by} holds {box}, which reaches outside the tensor"
    elif flaw.kind == "overlap":
        message = f"{where}: pieces overlap in {plural(flaw.elements, 'element')}, first {box} ({held_by})"
    else:
        message = f"{where}: {flaw.elements} of {tensor.numel} elements are in no piece, first {box}"
        message += _who_holds(tensor.chunks, checkpoint.world_size)
    rank = flaw.ranks[0] if flaw.ranks else None
    file = _file_of(tensor.chunks, rank, checkpoint)
    return Problem(flaw.kind, message, key=named.key, rank=rank, file=file, section=named.section)


def _ranks_text(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
    return f"rank{'s' if len(ranks) != 1 else ''} {shown}"


def _who_holds(chunks: Chunks, world_size: int) -> str:
    """Which ranks hold some of the tensor, and which do not: a missing file usually belongs to one of the latter."""
    held = sorted(set(chunks.rank.tolist()))
    if not held:
        return " (no rank holds any of it)"
    absent = sorted(set(range(world_size)).difference(held))
    text = f" (held: {_ranks_text(held)}"
    return text + (f"; nothing from {_ranks_text(absent)})" if absent else ")")


def _file_of(chunks: Chunks, rank: int | None, checkpoint: Checkpoint) -> str | None:
    """The file of the first chunk of ``rank``."""
    numbers: list[int] = chunks.file[chunks.rank == rank].tolist() if rank is not None else []
    number = numbers[0] if numbers else -1
    return checkpoint.files[number].path if 0 <= number < len(checkpoint.files) else None


def aliased_states(optim: OptimState, checkpoint: Checkpoint) -> Iterator[Problem]:
    """A fatal problem for each parameter with two tensor states in the same bytes of a file."""
    every = [leaf for states in optim.state.values() for leaf in states.values() if isinstance(leaf, Tensor)]
    if not every or _plainly_apart(every):
        return
    for param, states in optim.state.items():
        tensors = [(name, leaf) for name, leaf in states.items() if isinstance(leaf, Tensor)]
        if len(tensors) < 2:
            continue
        shared = _overlapping_states(tensors)
        if shared:
            one, other, number = shared
            path = checkpoint.files[number].path if 0 <= number < len(checkpoint.files) else None
            yield Problem(
                "aliased-states",
                f"optim {param}: the states {one} and {other} share the same bytes, so at most one of them is what "
                "the optimizer had",
                key=f"{param}.{one}",
                file=path,
                section=Section.OPTIM,
            )


class _Span(NamedTuple):
    """The bytes of ``file`` from the first element of a chunk to the end of the last: that of ``row`` of the tensor
    with number ``tensor`` in a list.
    """

    file: int
    begin: int
    end: int
    tensor: int
    row: int


def _overlapping_states(tensors: list[tuple[str, Tensor]]) -> tuple[str, str, int] | None:
    """Two states that overlap, and their file."""
    if _plainly_apart([tensor for _, tensor in tensors]):
        return None
    spans: list[_Span] = []
    for index, (_, tensor) in enumerate(tensors):
        begin = tensor.chunks.offset
        ranges = zip(tensor.chunks.file.tolist(), begin.tolist(), (begin + spans_of([tensor])).tolist(), strict=True)
        spans += [_Span(*places, index, row) for row, places in enumerate(ranges)]
    spans.sort()
    reached: _Span | None = None
    for span in spans:
        if span.begin < 0 or span.end <= span.begin:  # not located, or empty
            continue
        overlaps = reached is not None and reached.file == span.file and span.begin < reached.end
        if reached is not None and overlaps and reached.tensor != span.tensor and _collide(tensors, reached, span):
            return tensors[reached.tensor][0], tensors[span.tensor][0], span.file
        if reached is None or not overlaps or span.end > reached.end:
            reached = span
    return None


def _plainly_apart(tensors: Sequence[Tensor]) -> bool:
    """True if no two located chunks overlap, computed in columns; False leaves it open."""
    number = np.concatenate([tensor.chunks.file for tensor in tensors])
    begin = np.concatenate([tensor.chunks.offset for tensor in tensors])
    span = spans_of(tensors)
    kept = (begin >= 0) & (span > 0)
    number, begin, span = number[kept], begin[kept], span[kept]
    order = np.lexsort((begin, number))
    number, begin, span = number[order], begin[order], span[order]
    return not ((number[1:] == number[:-1]) & (begin[1:] < begin[:-1] + span[:-1])).any()


def _collide(tensors: list[tuple[str, Tensor]], one: _Span, other: _Span) -> bool:
    """False for interleaved views (``buffer[:, 0]`` beside ``buffer[:, 1]``): their spans overlap, no element does."""
    period = 0
    widest = 0
    for span in (one, other):
        tensor = tensors[span.tensor][1]
        chunks, itemsize = tensor.chunks, tensor.dtype.itemsize
        widest = max(widest, itemsize)
        for count, step in zip(chunks.size[span.row].tolist(), chunks.stride[span.row].tolist(), strict=True):
            if count > 1:
                period = gcd(period, step * itemsize)
    if period == 0:
        return True
    apart = (other.begin - one.begin) % period
    return not widest <= apart <= period - widest


def state_completeness(optim: OptimState) -> Iterator[Problem]:
    """Non-fatal problems of the optimizer's bookkeeping: parameters without state, states without a group."""
    if optim.param_groups is None:
        return
    groups: list[list[ParamKey]] = []
    for group in optim.param_groups:
        params = group_params(group)
        if params is None:  # undecided
            return
        groups.append(params)
    seen: set[ParamKey] = set()
    for number, keys in enumerate(groups):
        for key in keys:
            if key in seen:
                yield _state_problem(key, f"optim {key}: listed more than once in the param groups (again in {number})")
            seen.add(key)
    if optim.state:
        for number, keys in enumerate(groups):
            for key in keys:
                if not optim.state.get(key):
                    yield _state_problem(key, f"optim {key}: in param group {number}, but has no optimizer state")
            yield from _uneven_states(number, keys, optim.state)
    for key, states in optim.state.items():
        if key not in seen and BARE_VALUE not in states:
            yield _state_problem(key, f"optim {key}: has state, but is in no param group")


def _uneven_states(
    number: int, keys: list[ParamKey], state: Mapping[ParamKey, Mapping[str, Tensor | Value]]
) -> Iterator[Problem]:
    """States absent from one parameter that every other parameter of the group with the same number of dimensions has.

    By dimensions, because factored optimizers (Adafactor) keep other states for vectors than for matrices.
    """
    kinds: dict[int, list[ParamKey]] = {}
    names: dict[tuple[int, str], int] = {}
    for key in keys:
        states = state.get(key)
        if states:
            kind = max((len(leaf.shape) for leaf in states.values() if isinstance(leaf, Tensor)), default=0)
            kinds.setdefault(kind, []).append(key)
            parts = {*parts_in(states), *scales_in(states), *maps_in(states)}
            for name in [name for name in states if name not in parts]:
                names[kind, name] = names.get((kind, name), 0) + 1
    for (kind, name), count in names.items():
        members = kinds[kind]
        if len(members) > 2 and len(members) // 2 < count < len(members):
            for key in members:
                if name not in state[key]:
                    yield _state_problem(
                        key,
                        f"optim {key}: no state {name}, which {count} of {len(members)} alike in group {number} have",
                    )


def _state_problem(key: ParamKey, message: str) -> Problem:
    return Problem("state", message, fatal=False, key=str(key), section=Section.OPTIM)


def fatal(problems: Iterable[Problem], *, source: str = "the checkpoint") -> SourceError:
    """One error that lists every fatal problem; their kinds decide its class.

    Raises ValueError if none is fatal: check before.
    """
    wrong = [problem for problem in problems if problem.fatal]
    if not wrong:
        raise ValueError("no fatal problem")
    first = wrong[0]
    one, what, why, next_step = _class_of({problem.kind for problem in wrong}, source)
    for problem in wrong if {problem.kind for problem in wrong} == {"replica"} else ():
        reason = _OWN.get((problem.key or "").rpartition(".")[2])
        if reason is not None:
            one, what = SourceUnsupportedError, f"{source} holds optimizer states that each rank keeps for itself"
            why, next_step = reason, "--only model converts the model alone"
    if first.kind == "missing-section":
        present = Section.MODEL if first.section is Section.OPTIM else Section.OPTIM
        why = "the copy or the save did not finish"
        next_step = f"copy the missing files there, or convert what there is: add --only {present}"
    if first.kind == "missing-rank" and first.file == source:
        why = "each rank writes its own file, and this is one of them"
        next_step = f"give the directory with the files of all ranks: {shlex.quote(os.path.dirname(source) or '.')}"
    return one(
        what,
        details=[problem.message for problem in wrong],
        why=why,
        next_step=next_step,
        file=first.file,
        key=first.key,
        rank=first.rank,
    )


_OWN = {
    "d_numerator": "Prodigy (prodigyopt) without fsdp_in_use=True sums over its own shard alone, so that each rank has "
    "learned another step size: made with it, it can be converted",
    "RMS": "CAME keeps the root mean square of a rank's own slice, which says nothing about other slices",
}


def _class_of(kinds: set[str], source: str) -> tuple[type[SourceError], str, str | None, str | None]:
    """The class of an error about problems of these kinds, what it says, why, and what to do next."""
    verify = f"fsdpckpt verify {source}"
    if "quantized" in kinds:
        what = f"{source} holds optimizer states that are quantized in blocks of each rank's own"
        why = "a scale is that of a block of one rank's slice, and other slices have other blocks"
        return SourceUnsupportedError, what, why, "--only model converts the model alone"
    if kinds & INCOMPLETE:
        why = "a rank's file was not copied, or the save did not finish"
        return SourceIncompleteError, f"{source} is not whole", why, verify
    if kinds <= {"flattened"}:
        what = f"{source} holds shards whose contents are not known for certain"
        return SourceUnsupportedError, what, None, None
    if "aliased-states" in kinds and kinds <= UNSUPPORTED:
        what = f"{source} has lost optimizer states"
        return SourceUnsupportedError, what, ALIASED_WHY, ALIASED_NEXT
    if kinds <= UNSUPPORTED:
        return SourceUnsupportedError, f"{source} has lost data", "the way it was saved lost it", None
    why = "files of different saves were mixed, or bytes were damaged"
    if kinds == {"replica"}:
        why = (
            "files of different saves were mixed; or the optimizer keeps something of its own on each rank, which "
            "other ranks cannot take over"
        )
    return SourceCorruptError, f"{source} contradicts itself", why, verify
