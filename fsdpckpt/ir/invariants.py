"""Checks what must hold for a checkpoint to be converted without losing or inventing data: pure functions over the IR.

Each returns every problem and raises nothing; ``fatal`` turns the fatal ones into one error.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from math import gcd

import numpy as np

from fsdpckpt import flags
from fsdpckpt.errors import SourceCorruptError, SourceError, SourceIncompleteError, SourceUnsupportedError
from fsdpckpt.ir.attached_states import misshapen_states
from fsdpckpt.ir.buffers import undecided_copies
from fsdpckpt.ir.checkpoint import Checkpoint, NamedTensor, Problem, Section
from fsdpckpt.ir.copies import contradicting_copies
from fsdpckpt.ir.coverage import Flaw, box_text, flaws
from fsdpckpt.ir.optimizer import BARE_VALUE, Optimizer, ParamKey
from fsdpckpt.ir.quantized import maps_in, parts_in, scales_in
from fsdpckpt.ir.sections import alone
from fsdpckpt.ir.tensors import Boxes, Chunks, Tensor, spans_of
from fsdpckpt.ir.values import Value
from fsdpckpt.text import plural, some_of

INCOMPLETE = frozenset({"incomplete", "missing-rank", "missing-key", "missing-file", "missing-section"})
UNSUPPORTED = frozenset({"aliased-states", "flattened", "flattened-lost"})

ALIASED_WHY = (
    "FSDP1 with use_orig_params=True, trained on CPU and gathered with offload_to_cpu=True, hands out every state of a "
    "parameter as a view of one reused buffer: the other states were overwritten before they reached the disk"
)

ALIASED_NEXT = "save again with FullOptimStateDictConfig(offload_to_cpu=False), or as SHARDED_STATE_DICT"


def problems(checkpoint: Checkpoint) -> list[Problem]:
    """Every problem of ``checkpoint`` that can be found without reading tensor data."""
    all_problems: list[Problem] = []
    distinct = {_boxes(tensor): tensor for tensor in checkpoint.leaves()}  # many tensors share their boxes
    covered = {boxes for boxes, tensor in distinct.items() if not flaws(tensor)}
    for named in checkpoint.tensors() if len(covered) < len(distinct) else ():
        if _boxes(named.tensor) not in covered:
            all_problems.extend(_coverage_problem(named, flaw, checkpoint) for flaw in flaws(named.tensor))
    all_problems.extend(undecided_copies(checkpoint))
    all_problems.extend(contradicting_copies(checkpoint))
    all_problems.extend(_of_optimizer(checkpoint))
    for section in checkpoint.named:
        if section.section is Section.OPTIM:
            all_problems.extend(map(section.problem, _of_optimizer(alone(checkpoint, section))))
    all_problems.extend(misshapen_states(checkpoint))
    return all_problems


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
    number = numbers[0] if numbers else -1
    return checkpoint.files[number].path if 0 <= number < len(checkpoint.files) else None


def aliased_states(optim: Optimizer, checkpoint: Checkpoint) -> Iterator[Problem]:
    """A fatal problem for each parameter with two tensor states in the same bytes of a file."""
    params = list(optim.state)
    for number, first, second, file in _overlapping_states(optim):
        yield Problem(
            "aliased-states",
            f"optim {params[number]}: the states {first} and {second} share the same bytes, so at most one of them is "
            "what the optimizer had",
            key=f"{params[number]}.{first}",
            file=checkpoint.files[file].path if 0 <= file < len(checkpoint.files) else None,
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
    file = np.concatenate([tensor.chunks.file for tensor in tensors])
    begin = np.concatenate([tensor.chunks.offset for tensor in tensors])
    end = begin + spans_of(tensors)
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
        for number, keys in enumerate(groups):
            for key in keys:
                if not optim.state.get(key):
                    yield _state_problem(key, f"optim {key}: in param group {number}, but has no optimizer state")
            yield from _uneven_states(number, keys, optim.state)
    for key, states in optim.state.items():
        if key not in seen and BARE_VALUE not in states:
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
            parts = {*parts_in(states), *scales_in(states), *maps_in(states)}
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


def fatal(problems: Iterable[Problem], *, source: str) -> SourceError:
    """One error that lists every fatal problem; their kinds decide its class.

    Raises ValueError if none is fatal: check before.
    """
    wrong = [problem for problem in problems if problem.fatal]
    if not wrong:
        raise ValueError("no fatal problem")
    first = wrong[0]
    error, what, why, next_step = _describe(wrong, source)
    return error(
        f"{source} {what}",
        details=[problem.message for problem in wrong],
        why=why,
        next_step=next_step,
        file=first.file,
        key=first.key,
        rank=first.rank,
    )


_ONLY_MODEL = f"{flags.only('model')} converts the model alone"

_STATES_OF_ONE_RANK = {
    "d_numerator": "Prodigy (prodigyopt) without fsdp_in_use=True sums over its own shard alone, so each rank learned "
    "a different step size; checkpoints saved with fsdp_in_use=True can be converted",
    "RMS": "CAME keeps the root mean square of a rank's own slice, which says nothing about other slices",
}
"""Why optimizer states of this name differ between ranks."""


def _describe(wrong: Sequence[Problem], source: str) -> tuple[type[SourceError], str, str | None, str | None]:
    """For an error about these problems its class, what is wrong with ``source``, why, and what to do next."""
    kinds = {problem.kind for problem in wrong}
    if "quantized" in kinds:
        what = "holds optimizer states that are quantized in blocks that depend on how ranks cut them"
        why = "a scale belongs to a block of one rank's slice, and other slices have other blocks"
        return SourceUnsupportedError, what, why, _ONLY_MODEL
    if kinds & INCOMPLETE:
        return SourceIncompleteError, "is not whole", *_why_incomplete(wrong[0], source)
    if kinds == {"flattened"}:
        return SourceUnsupportedError, "holds shards whose contents are not known for certain", None, None
    if kinds <= UNSUPPORTED:
        aliased = "has lost optimizer states", ALIASED_WHY, ALIASED_NEXT
        other = "has lost data", "the way it was saved lost it", None
        return SourceUnsupportedError, *(aliased if "aliased-states" in kinds else other)
    return _contradiction(wrong, kinds, source)


def _contradiction(
    wrong: Sequence[Problem], kinds: Set[str], source: str
) -> tuple[type[SourceError], str, str | None, str | None]:
    """What ``_describe`` returns for things that are all there and do not fit together."""
    if kinds == {"shape"}:
        return SourceCorruptError, "holds a model and an optimizer of different shapes", *_why_misshapen(wrong)
    if kinds == {"config"}:
        why = "a shard of the model is missing, or one rank's part was saved; or config.json is another model's"
        next_step = f"copy the missing files; if config.json does not belong to these weights, add {flags.ignore_file}"
        return SourceCorruptError, "does not hold the model that its config.json describes", why, next_step
    if kinds == {"parameter-order"}:
        what = "does not say which parameter each of its optimizer's states belongs to"
        why = "an id, or a place in a list, may be one parameter for the optimizer or a rank, and another for the model"
        return SourceCorruptError, what, why, _ONLY_MODEL
    why = "files of different saves were mixed, or bytes were damaged"
    if kinds == {"replica"}:
        names = [(problem.key or "").rpartition(".")[2] for problem in wrong]
        reasons = [_STATES_OF_ONE_RANK[name] for name in names if name in _STATES_OF_ONE_RANK]
        if reasons:
            what = "holds optimizer states that each rank keeps for itself"
            return SourceUnsupportedError, what, reasons[-1], _ONLY_MODEL
        why = (
            "files of different saves were mixed; or the optimizer keeps states that only make sense on their own rank"
        )
    return SourceCorruptError, "contradicts itself", why, _verify(source)


def _why_misshapen(wrong: Sequence[Problem]) -> tuple[str, str]:
    """Why shapes differ, and what to do next."""
    short = {problem.section for problem in wrong}
    if short == {Section.MODEL}:
        why = "a shard of the model is missing, or each rank saved what it holds of a tensor as if it were the tensor"
        return why, (
            f"copy the missing files, or save the model again with get_model_state_dict; {flags.only('optim')} "
            "converts the optimizer alone"
        )
    if short == {Section.OPTIM}:
        why = "the states are what one rank holds of them, saved as if they were whole; or they are of another model"
        return why, _ONLY_MODEL
    return "the files are of different jobs, or the model was changed after the optimizer was saved", (
        "give a model and an optimizer of one save"
    )


def _why_incomplete(first: Problem, source: str) -> tuple[str, str]:
    """Why something is missing, and what to do next. ``first``: the first of the problems."""
    if first.kind == "missing-section":
        present = Section.MODEL if first.section is Section.OPTIM else Section.OPTIM
        next_step = f"copy the missing files there, or convert what there is: add {flags.only(present)}"
        return "the copy or the save did not finish", next_step
    if first.kind == "missing-rank" and first.file == source:
        directory = shlex.quote(os.path.dirname(source) or ".")
        why = "each rank writes its own file, and this is one of them"
        return why, f"give the directory with the files of all ranks: {directory}"
    return "a rank's file was not copied, or the save did not finish", _verify(source)


def _verify(source: str) -> str:
    return f"fsdpckpt verify {shlex.quote(source)}"
