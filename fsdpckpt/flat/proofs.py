"""Proves units by content: padding holds what FSDP1 writes there, and replicas of slices hold equal bytes.

Lengths alone are not enough: with ``use_orig_params=False``, flat parameters that differ by a few elements can have
shards of the same length. Three facts about the content decide more:

- Right padding (``FlatParamHandle._get_shard``) never gets a gradient, so each state has its initial value there: zero,
  or one constant in each param group (Adagrad's ``initial_accumulator_value``).
- The alignment gaps of a saved flat parameter under ``use_orig_params=True`` hold 42 (``_construct_padding_tensor``).
- Corresponding ranks of several sharding groups (HYBRID_SHARD), or all ranks (NO_SHARD), hold equal slices.

With the units of a different model, these elements would be values of parameters.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fsdpckpt import flags
from fsdpckpt.errors import SourceCorruptError
from fsdpckpt.flat.match import FlatMatch
from fsdpckpt.flat.slices import is_step
from fsdpckpt.ir.checkpoint import Checkpoint, Note, Problem, Section
from fsdpckpt.ir.dtypes import numpy_dtype
from fsdpckpt.ir.names import clean
from fsdpckpt.ir.placements import Slices
from fsdpckpt.ir.state_parts import state_parts
from fsdpckpt.ir.tensors import Tensor
from fsdpckpt.layouts.flattened import FILLER, is_flat_key
from fsdpckpt.storage.sources import Sources


@dataclass(frozen=True, slots=True)
class _Padding:
    """``count`` elements from element ``first`` of one chunk of ``tensor``. ``where`` names them in messages.

    ``group``: the param group of an optimizer's state, -1 for none. Each may have another initial value (Rprop's
    ``lr``, Adagrad's ``initial_accumulator_value``).
    """

    where: str
    tensor: Tensor
    row: int
    first: int
    count: int
    group: int = -1


def require_padding(checkpoint: Checkpoint, match: FlatMatch, sources: Sources) -> int:
    """Check all padding; return how many elements were read.

    Raises SourceCorruptError for padding with other values: the units are not those of this checkpoint.
    """
    wrong: list[str] = []
    checked = 0
    for gap in _alignment_gaps(checkpoint, match):
        values_read = _read(checkpoint, sources, gap)
        checked += len(values_read)
        if (values_read != np.asarray(FILLER, values_read.dtype)).any():
            wrong.append(f"{gap.where}: {gap.count} elements of alignment do not hold {FILLER}")
    tails: dict[tuple[str, str], list[_Padding]] = {}
    for state, tail in _right_padding(checkpoint, match):
        tails.setdefault((state, tail.tensor.dtype.name), []).append(tail)
    constants = _hyper_parameters(checkpoint)
    for (state, _), paddings in tails.items():
        values = [_read(checkpoint, sources, padding) for padding in paddings]
        checked += sum(map(len, values))
        if _is_initial(np.concatenate(values), constants):
            continue
        by_group: dict[int, list[npt.NDArray[np.generic]]] = {}
        for padding, values_read in zip(paddings, values, strict=True):
            by_group.setdefault(padding.group, []).append(values_read)
        initial = {group for group, of_group in by_group.items() if _is_initial(np.concatenate(of_group), constants)}
        wrong.extend(
            f"{padding.where} {state}: what is padding in the units holds values of a parameter"
            for padding, values_read in zip(paddings, values, strict=True)
            if padding.group not in initial and values_read.any()
        )
    if wrong:
        raise SourceCorruptError(
            f"the units do not fit {checkpoint.source}: its padding is elsewhere",
            details=wrong,
            file=checkpoint.source,
            why="the units are those of a different model or wrapping: the lengths agree by chance",
            next_step=f"give the units of this very model: {flags.units('FILE')} written by fsdpckpt.save_units in its "
            "training",
        )
    return checked


def _is_initial(values: npt.NDArray[np.generic], constants: set[float]) -> bool:
    """Whether ``values`` are an optimizer's initial ones: zeros, or one constant.

    A single element other than zero counts only if it is one of ``constants``, in the dtype of the values; otherwise it
    may be a coincidence.
    """
    if not values.any():
        return True
    first = values[:1]
    with np.errstate(all="ignore"):  # a number that the dtype does not have
        possible = np.array([*constants]).astype(values.dtype)
    return bool((values == first).all()) and (len(values) > 1 or bool((possible == first).any()))


def _hyper_parameters(checkpoint: Checkpoint) -> set[float]:
    """The numbers in the param groups, exact and rounded to float32."""
    groups = checkpoint.groups
    settings = [value for group in groups for value in group.settings.values()]
    numbers = {float(value) for value in settings if isinstance(value, (int, float))}
    return numbers | {float(np.float32(value)) for value in numbers}


def _right_padding(checkpoint: Checkpoint, match: FlatMatch) -> Iterator[tuple[str, _Padding]]:
    """The right padding of the optimizer's shards, each with the name of its state."""
    optim = checkpoint.optim
    if optim is None:
        return
    group_of = optim.group_of()
    for param, states in optim.state.items():
        layout = match.layouts.get(match.keys.get(param, ""))
        if state_parts(states).names:  # a code of zero need not be a value of zero
            continue
        for state, leaf in states.items():
            if (
                layout is None
                or not isinstance(leaf, Tensor)
                or not isinstance(leaf.cut, Slices)
                or is_step(state, leaf)
                or leaf.dtype.numpy is None
            ):
                continue
            for row, rank, size in _rows(leaf):
                begin, end = layout.shard_range(rank % layout.shard_count)
                if size == layout.shard_numel and end - begin < size:
                    where, first, group = f"optim {param}, rank {rank},", end - begin, group_of.get(param, -1)
                    yield state, _Padding(where, leaf, row, first, size - first, group)


def _alignment_gaps(checkpoint: Checkpoint, match: FlatMatch) -> Iterator[_Padding]:
    """The alignment between the parameters of the model's flat parameters."""
    for key, leaf in checkpoint.params.items():
        layout = match.layouts.get(clean(key))
        if layout is None or not isinstance(leaf, Tensor) or leaf.dtype.numpy is None:
            continue
        for row, rank, _ in _rows(leaf):
            first = 0
            for part in layout.parts(rank % layout.shard_count):
                if part.filler == FILLER:
                    yield _Padding(f"model {key}, rank {rank}", leaf, row, first, part.count)
                first += part.count


def _rows(tensor: Tensor) -> Iterator[tuple[int, int, int]]:
    ranks, sizes = tensor.chunks.rank.tolist(), tensor.chunks.size[:, 0].tolist()
    return ((row, rank, size) for row, (rank, size) in enumerate(zip(ranks, sizes, strict=True)))


def _read(checkpoint: Checkpoint, sources: Sources, padding: _Padding) -> npt.NDArray[np.generic]:
    tensor = padding.tensor
    data = sources.read_elements(checkpoint.files, tensor, row=padding.row, first=padding.first, count=padding.count)
    return np.frombuffer(data, numpy_dtype(tensor.dtype))


def compare_replicas(checkpoint: Checkpoint, match: FlatMatch) -> tuple[list[Problem], list[Note]]:
    """Problems of slices whose replicas differ, by the CRC-32 in the source's files; also a note on the comparison.

    Compares only records with checksums, without reading data: ``fsdpckpt verify`` reads the others.
    """
    shards = [layout.shard_count for layout in match.layouts.values()]
    if checkpoint.world_size // match.shard_size < 2 and all(count > 1 for count in shards):
        return [], []
    most = max(shards)
    checksums = checkpoint.checksums.by_offset()
    problems: list[Problem] = []
    compared = unknown = 0
    for section, key, tensor in _slice_tensors(checkpoint):
        layout = match.layouts.get(key) if section is Section.MODEL else None
        shard_count = layout.shard_count if layout is not None else most
        for rank, first in _differing_replicas(tensor, shard_count, checksums):
            if rank < 0:
                unknown += 1
                continue
            compared += 1
            if first >= 0:
                message = f"{section} {key}: ranks {first} and {rank} hold different bytes of the same shard"
                problems.append(Problem("replica", message, key=key, rank=rank, section=section))
    notes = []
    if compared:
        notes.append(Note("replicas", f"{compared} replicas of slices compared by checksum, one of each is taken"))
    if unknown:
        notes.append(Note("replicas", f"{unknown} replicas of slices carry no checksum and were not compared"))
    return problems, notes


def _slice_tensors(checkpoint: Checkpoint) -> Iterator[tuple[Section, str, Tensor]]:
    for named in checkpoint.tensors():
        flat = named.section is Section.MODEL and is_flat_key(named.key)
        if flat or isinstance(named.tensor.cut, Slices):
            yield named.section, named.key, named.tensor


def _differing_replicas(
    tensor: Tensor, shards: int, checksums: Mapping[tuple[int, int], tuple[int, int]]
) -> Iterator[tuple[int, int]]:
    """For each replica (rank, first rank with other bytes or -1 if equal); (-1, -1) if it has no checksum.

    Compares the records that begin with the slices. One may be longer than its slice: it then holds the slices of
    several parameters, which are replicas too.
    """
    chunks = tensor.chunks
    rows = zip(
        chunks.rank.tolist(), chunks.size[:, 0].tolist(), chunks.file.tolist(), chunks.offset.tolist(), strict=True
    )
    first: dict[tuple[int, int], tuple[int, int | None]] = {}  # rank and CRC-32 by shard and length
    for rank, size, file, offset in sorted(rows):
        if not size:
            continue
        shard = (rank % shards, size)
        _, crc = checksums.get((file, offset), (0, None))
        if shard not in first:
            first[shard] = (rank, crc)
            continue
        first_rank, expected = first[shard]
        if crc is None or expected is None:
            yield -1, -1
        else:
            yield rank, first_rank if crc != expected else -1
