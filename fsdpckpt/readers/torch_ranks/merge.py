"""Merges the state dicts of several ranks: chunks of one tensor, replicas, and values that differ.

The kind of value (DTensor, ShardedTensor, plain tensor) decides whether a tensor is cut or whole, never its content.
Every rank's keys count. Plain vectors are the exception: in an optimizer, or beside flat parameters, they may be slices
of FSDP1's flat parameters, and certainly are if ranks hold different lengths of them or none, unless one rank has a
whole optimizer and the others have no optimizer.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping, Sequence
from enum import Enum, auto
from itertools import chain
from math import prod
from typing import cast

import numpy as np

from fsdpckpt.formats.torch import local_tensor
from fsdpckpt.formats.torch.distributed import Distributed
from fsdpckpt.formats.torch.tensors import StoredTensor
from fsdpckpt.ir.bitsandbytes import BITSANDBYTES, may_be_codes, unwrapped
from fsdpckpt.ir.checkpoint import Layout, Problem, Section
from fsdpckpt.ir.coverage import flaws
from fsdpckpt.ir.placements import Replicate, Sharded, Slices
from fsdpckpt.ir.state_parts import state_parts
from fsdpckpt.ir.tensors import Boxes, Chunks, Tensor
from fsdpckpt.ir.torchao import Blocks, blocks_of, states_in_blocks
from fsdpckpt.ir.values import Key, Value, equal, leaf_tensors, like
from fsdpckpt.layouts.flattened import is_flat_key
from fsdpckpt.readers.optimizer_forms import is_optimizer
from fsdpckpt.readers.protocol import KeyPath, PartContents, dotted
from fsdpckpt.readers.torch_ranks.rank_files import AlikeRanks, RankFile


class _NotInRank:
    """Takes the place of a key that a rank does not have."""


_ABSENT = _NotInRank()


class _Place(Enum):
    """Where in a state dict a value is: this decides whether vectors may be slices."""

    ANYWHERE = auto()
    STATES = auto()  # an optimizer's "state"
    ENTRY = auto()  # the states of one parameter
    STATE = auto()  # one state
    BESIDE_FLAT = auto()  # in one dict with flat parameters
    INSIDE = auto()  # inside a state that is a container itself


class RankMerge:
    """One merge of the state dicts of ``groups`` of ranks.

    ``sharded``: some value is distributed, so plain tensors are whole on every rank. After ``value``: ``problems``,
    ``missing``, ``rank_values`` and ``absences``, as in ``PartContents``; ``last_cut_by_fsdp``: what empty shards show
    of it.
    """

    def __init__(self, groups: Sequence[AlikeRanks], *, sharded: bool) -> None:
        self._groups = groups
        self._sharded = False if sharded else None
        self._on_one_rank = False  # whether the optimizer at hand was gathered there (rank0_only=True)
        self.problems: list[Problem] = []
        self.missing: dict[KeyPath, Problem] = {}
        self.last_cut_by_fsdp: set[bool] = set()
        self.rank_values: dict[KeyPath, tuple[Value, ...]] = {}
        self.absences: dict[KeyPath, frozenset[int]] = {}

    def value(self, values: Sequence[object], path: KeyPath = (), place: _Place = _Place.ANYWHERE) -> Value:
        """Merge what each group has at ``path``, in the order of the groups."""
        present = [index for index, value in enumerate(values) if value is not _ABSENT]
        first = values[present[0]]
        kind = type(first)
        if kind is Distributed or kind is StoredTensor:
            return self._tensor(values, present, path, place)
        if kind is dict or kind is OrderedDict:
            if all(isinstance(values[i], dict) for i in present):
                return self._mapping(cast("Sequence[dict[Key, object]]", values), present, path, place)
        elif isinstance(first, (list, tuple)) and all(
            type(values[i]) is kind and len(cast("Sequence[object]", values[i])) == len(first) for i in present
        ):
            return self._sequence(values, present, path, place)
        return self._other(values, present, path)

    def _mapping(self, values: Sequence[dict[Key, object]], present: list[int], path: KeyPath, place: _Place) -> Value:
        if place is _Place.ENTRY:
            values = [unwrapped(value) for value in values]
        first = values[present[0]]
        states = dict(states_in_blocks(first))
        if states:
            values = self._without_empty(values, present, states, path)
        merged: dict[Key, Value] = like(first, {})
        keys = list(first)
        in_blocks: Collection[Key] = {*states, *state_parts(first).names} if states else ()
        inner, places = _inner_place(first, place), dict.fromkeys(in_blocks, _Place.INSIDE)
        in_optimizer = place is _Place.STATES or place is _Place.ENTRY  # a rank without elements may have no state
        if place is _Place.ANYWHERE and is_optimizer(first):
            places["state"] = _Place.STATES
            holders = [i for i in present if "state" in values[i]]
            self._on_one_rank = len(self._ranks_of(holders)) == 1 and _is_gathered(values[holders[0]]["state"])
        same = len(present) == len(values) and all(list(other) == keys for other in values[1:])
        if not same:
            values = [_with_common_nan(value) if isinstance(value, dict) else value for value in values]
            keys = list(dict.fromkeys(chain(*(values[i] for i in present))))
        checked = not same and not (place is _Place.ANYWHERE and self._gathered_on_one_rank(values))
        for key in keys:
            if same:
                column = [value[key] for value in values]
            else:
                column = [value.get(key, _ABSENT) if isinstance(value, dict) else _ABSENT for value in values]
            merged[key] = self.value(column, (*path, key), places.get(key, inner))
            if checked and key not in in_blocks and not (in_optimizer and _holds_slices(merged[key])):
                self._check_present(column, present, merged[key], (*path, key))
        return merged

    def _gathered_on_one_rank(self, values: Sequence[object]) -> bool:
        """Whether one rank has whole tensors and all others have an empty dict, as PyTorch returns it.

        It does with ``rank0_only=True``, and for a full state dict with ``cpu_offload=True``.
        """
        holders = [i for i, value in enumerate(values) if value != {}]
        return len(self._ranks_of(holders)) == 1 and _is_whole(values[holders[0]])

    def _without_empty(
        self, values: Sequence[dict[Key, object]], present: list[int], states: Mapping[Key, Blocks], path: KeyPath
    ) -> list[dict[Key, object]]:
        """``values`` without the plain tensors that ranks without elements have in place of ``states`` in blocks.

        States that are plain on ranks with elements, or slices of flat parameters, are problems.
        """
        changed = list(values)
        for name, blocks in states.items():
            plain = [i for i in present if isinstance(values[i].get(name), Distributed)]
            uneven = [i for i in plain if _has_elements(cast("Distributed", values[i][name]))]
            flat = self._sharded is None and len(self._ranks_of(present)) > 1
            if uneven or flat:
                key = dotted((*path, name))
                instead = "a rank's slice of a flat parameter"
                if not flat:
                    instead = f"not quantized on {_ranks_text(self._ranks_of(uneven))}"
                message = f"{key} is {blocks}, and {instead}: it cannot be converted to a different number of ranks"
                self.problems.append(Problem("quantized", message, key=key, section=Section.OPTIM))
            for i in plain:
                changed[i] = {key: item for key, item in changed[i].items() if key != name}
        return changed

    def _check_present(self, column: Sequence[object], expected: list[int], merged: Value, path: KeyPath) -> None:
        """Report a key that some of the groups ``expected`` (indexes) lack although they should hold a part of it."""
        absent = self._ranks_of(i for i in expected if column[i] is _ABSENT)
        if not absent:
            return
        holders: set[int] = set()
        for group, value in zip(self._groups, column, strict=True):
            _collect_holders(value, group, holders)
        if not holders:
            self.absences[path] = frozenset(absent)
        absent = [rank for rank in absent if not holders or rank in holders]
        if not absent:
            return
        lost = any(flaw.kind == "incomplete" for _, tensor in leaf_tensors(merged) for flaw in flaws(tensor))
        self.missing[path] = Problem(
            "missing-key",
            f"{dotted(path)} is not in the files of {_ranks_text(absent)}"
            + (", and the other ranks do not hold all of it" if lost else ""),
            fatal=lost,
            key=dotted(path),
            rank=absent[0],
        )

    def _sequence(self, values: Sequence[object], present: list[int], path: KeyPath, place: _Place) -> Value:
        first = cast("Sequence[object]", values[present[0]])
        inner = _Place.ANYWHERE if place is _Place.ANYWHERE else _Place.INSIDE
        items: list[Value] = []
        for index in range(len(first)):
            column = [value[index] if isinstance(value, (list, tuple)) else _ABSENT for value in values]
            items.append(self.value(column, (*path, index), inner))
        return items if isinstance(first, list) else tuple(items)

    def _tensor(self, values: Sequence[object], present: list[int], path: KeyPath, place: _Place) -> Value:
        first = values[present[0]]
        kind = type(first)
        if any(type(values[i]) is not kind for i in present):
            return self._other(values, present, path)
        if kind is Distributed:
            return self._distributed(cast("Sequence[Distributed]", values), present, path)
        stored = cast("Sequence[StoredTensor]", values)
        if self._are_slices([values[i] for i in present], place):
            return self._slices_of(stored, present, path)
        return self._plain(stored, present, path)

    def _distributed(self, values: Sequence[Distributed], present: list[int], path: KeyPath) -> Value:
        first = values[present[0]]
        if any(values[i].shape != first.shape or values[i].dtype is not first.dtype for i in present):
            return self._contradiction(values, present, path)
        ndim = len(first.shape)
        chunks = _join([self._groups[i].distributed(values[i]) for i in present], ndim)
        if not len(chunks) and 0 in first.shape:  # no rank holds an element
            file = self._groups[present[0]].files[0]
            chunks = _chunks([(file.rank, file.file, 0, *(0,) * ndim, *first.shape, *(1,) * ndim)], ndim)
        sharding = first.sharding if all(values[i].sharding is first.sharding for i in present) else None
        self._check_empty(values, present, path)
        return Tensor(first.dtype, first.shape, chunks, sharded=True, cut=first.cut, sharding=sharding)

    def _check_empty(self, values: Sequence[Distributed], present: list[int], path: KeyPath) -> None:
        """Report local tensors without elements in shapes that no job gives them: the model of that rank refuses them.

        Only these show who cut the tensor last, and they agree.
        """
        by_cuts: dict[frozenset[int | None], list[int]] = {}
        for i in present:
            last_cuts = values[i].last_cuts
            if last_cuts is not None:
                by_cuts.setdefault(last_cuts, []).append(i)
        if not by_cuts:
            return
        possible = frozenset.intersection(*by_cuts)
        if possible:
            by_fsdp = None not in possible
            if by_fsdp or _first_cut(values[present[0]]) not in possible:  # else both make such shapes
                self.last_cut_by_fsdp.add(by_fsdp)
            return
        wrong = by_cuts.get(frozenset()) or min(by_cuts.values(), key=len)
        ranks = self._ranks_of(wrong)
        message = f"{dotted(path)} is empty on {_ranks_text(ranks)}, with another shape than FSDP2 or DTensor gives it"
        message += ": load_state_dict refuses it there"
        problem = Problem("local-shape", message, fatal=False, key=dotted(path), rank=ranks[0], loads=False)
        self.problems.append(problem)

    def _are_slices(self, vectors: Sequence[object], place: _Place) -> bool:
        """Whether vectors in ``place`` are certain to be slices, judging by the ranks that have them."""
        if place is not _Place.STATE and place is not _Place.BESIDE_FLAT:
            return False
        shapes = {value.shape for value in vectors if isinstance(value, StoredTensor)}
        if any(len(shape) != 1 for shape in shapes):
            return False
        if place is _Place.BESIDE_FLAT or len(shapes) > 1:
            return True
        return len(vectors) < len(self._groups) and not self._on_one_rank

    def _slices_of(self, values: Sequence[StoredTensor], present: list[int], path: KeyPath) -> Value:
        """The slices one after the other, a chunk for each rank that has one; an empty slice is a chunk too."""
        dtype = values[present[0]].dtype
        other = [i for i in present if values[i].dtype is not dtype]
        if other and may_be_codes(path[-1]):
            ranks = _ranks_text(self._ranks_of(other))
            message = f"{dotted(path)} of {BITSANDBYTES} is {dtype.name}, and {values[other[0]].dtype.name} on {ranks}"
            self.problems.append(Problem("quantized", message, key=dotted(path), section=Section.OPTIM))
            return _located(values[present[0]], self._groups[present[0]].files[0])
        if other:
            return self._contradiction(values, present, path)
        chunks = _join([self._groups[i].plain(values[i]) for i in present], 1)
        ends = np.cumsum(chunks.size[:, 0])
        chunks = chunks.with_boxes(start=(ends - chunks.size[:, 0]).reshape(-1, 1))
        return Tensor(dtype, (int(ends[-1]),), chunks, sharded=True, cut=Slices())

    def _plain(self, values: Sequence[StoredTensor], present: list[int], path: KeyPath) -> Value:
        first = values[present[0]]
        ndim = len(first.shape)
        if any(values[i].shape != first.shape or values[i].dtype is not first.dtype for i in present):
            return self._other(values, present, path)
        sharded = first.sharded if self._sharded is None else self._sharded
        chunks = _join([self._groups[i].plain(values[i]) for i in present], ndim)
        return Tensor(first.dtype, first.shape, chunks, sharded)

    def _other(self, values: Sequence[object], present: list[int], path: KeyPath) -> Value:
        """Values that are not tensors, or of different kinds or shapes: one value if all are equal, else the value
        of each rank.
        """
        if any(_contains_distributed(values[i]) for i in present):
            return self._contradiction(values, present, path)
        first = _located(values[present[0]], self._groups[present[0]].files[0])
        if any(not equal(_located(values[i], self._groups[i].files[0]), first) for i in present[1:]):
            pairs = [(file, value) for group, value in zip(self._groups, values, strict=True) for file in group.files]
            pairs.sort(key=lambda pair: pair[0].rank)
            located = (None if value is _ABSENT else _located(value, file) for file, value in pairs)
            self.rank_values[path] = tuple(located)
        return first

    def _contradiction(self, values: Sequence[object], present: list[int], path: KeyPath) -> Value:
        """Report that ranks disagree on what a tensor is; the first rank's is shown."""
        kinds: dict[str, list[int]] = {}
        for i in present:
            kinds.setdefault(_described(values[i]), []).append(i)
        described = "; ".join(f"{what} in {_ranks_text(self._ranks_of(groups))}" for what, groups in kinds.items())
        self.problems.append(Problem("rank-mismatch", f"{dotted(path)} is {described}", key=dotted(path)))
        return _located(values[present[0]], self._groups[present[0]].files[0])

    def _ranks_of(self, groups: Iterable[int]) -> list[int]:
        """The ranks of the groups with these indexes."""
        return sorted(rank for i in groups for rank in self._groups[i].ranks)


def merge_distributed(files: Sequence[RankFile], roots: Sequence[object], container: str) -> PartContents:
    """Merge ``roots``, the state dicts of the ranks' ``files``, in which some values are distributed."""
    pairs = sorted(zip(files, roots, strict=True), key=lambda pair: pair[0].rank)
    merge = RankMerge([AlikeRanks(root, [file]) for file, root in pairs], sharded=True)
    tree = PartContents(merge.value([root for _, root in pairs]), Layout.SHARDED, container, len(files))
    tree.problems.extend(merge.problems)
    tree.missing.update(merge.missing)
    tree.rank_values.update(merge.rank_values)
    tree.absences.update(merge.absences)
    return tree


def _first_cut(distributed: Distributed) -> int | None:
    """The first dimension of the DTensor's mesh that cuts it."""
    placements = distributed.cut.placements if isinstance(distributed.cut, Sharded) else ()
    return next((dim for dim, placement in enumerate(placements) if not isinstance(placement, Replicate)), None)


def _inner_place(mapping: dict[Key, object], place: _Place) -> _Place:
    """The place of the values in ``mapping``."""
    if place is _Place.ANYWHERE:
        return _Place.BESIDE_FLAT if any(map(is_flat_key, mapping)) else _Place.ANYWHERE
    return {_Place.STATES: _Place.ENTRY, _Place.ENTRY: _Place.STATE}.get(place, _Place.INSIDE)


def _is_gathered(state: object) -> bool:
    """Whether an optimizer's states are whole, as ``FSDP.optim_state_dict`` gathers them: by name, and some in two
    dimensions.
    """
    entries = state if isinstance(state, dict) else {}
    leaves = [leaf for entry in entries.values() if isinstance(entry, dict) for leaf in entry.values()]
    by_name = all(isinstance(key, str) and not is_flat_key(key) for key in entries)
    return by_name and any(isinstance(leaf, StoredTensor) and len(leaf.shape) > 1 for leaf in leaves)


def _is_whole(value: object) -> bool:
    """Whether the tensors of a state dict are certain to be whole: none is distributed, and some have two dimensions,
    in each of the dicts that it consists of.
    """
    if not isinstance(value, dict) or any(map(is_flat_key, value)):
        return False
    if is_optimizer(value):
        return _is_gathered(value["state"]) and not _contains_distributed(value)
    if any(isinstance(leaf, StoredTensor) and len(leaf.shape) > 1 for leaf in value.values()):
        return not _contains_distributed(value)
    parts = [part for part in value.values() if isinstance(part, dict)]
    return bool(parts) and all(map(_is_whole, parts))


def _holds_slices(value: Value) -> bool:
    """Whether it is a tensor in slices, or the states of one parameter that include one."""
    leaves = value.values() if isinstance(value, dict) else (value,)
    return any(isinstance(leaf, Tensor) and isinstance(leaf.cut, Slices) for leaf in leaves)


def _chunks(rows: Sequence[tuple[int, ...]], ndim: int) -> Chunks:
    """Chunks from rows of (rank, file, offset, start..., size..., stride...)."""
    table = np.array(rows, np.int64).reshape(len(rows), 3 + 3 * ndim)
    rank, file, offset = table[:, :3].T
    start, size, stride = table[:, 3:].reshape(len(rows), 3, ndim).transpose(1, 0, 2)
    return Chunks(rank, file, offset, Boxes(start, size, stride))


def _join(parts: Sequence[Chunks | list[tuple[int, ...]]], ndim: int) -> Chunks:
    """The chunks of several groups, rank after rank."""
    columns = [part for part in parts if isinstance(part, Chunks)]
    rows = [row for part in parts if not isinstance(part, Chunks) for row in part]
    if rows or not columns:
        columns.append(_chunks(rows, ndim))
    joined = Chunks.joined(columns)
    return joined if len(columns) == 1 else joined.take(np.argsort(joined.rank, kind="stable"))


def _with_common_nan(mapping: dict[Key, object]) -> dict[Key, object]:
    """``mapping`` with ``math.nan`` for its first key that is NaN: the NaN of each rank's file equals no other."""
    own = next((key for key in mapping if key != key), None)  # noqa: PLR0124 (only NaN differs from itself)
    if own is None:
        return mapping
    return {math.nan if key is own else key: item for key, item in mapping.items()}


def _has_elements(held: Distributed) -> bool:
    return any(prod(box.size) for box in held.boxes)


def _located(value: object, file: RankFile) -> Value:
    """``value`` with its stored tensors as ir tensors of one chunk; distributed tensors keep the boxes in this file."""
    if isinstance(value, StoredTensor):
        return local_tensor(value, file.file, file.rank, offset=file.offset(value))
    if isinstance(value, Distributed):
        chunks = _chunks(file.rows(value), len(value.shape))
        return Tensor(value.dtype, value.shape, chunks, sharded=True, cut=value.cut)
    if isinstance(value, dict):
        return like(value, {key: _located(child, file) for key, child in value.items()})
    if isinstance(value, list):
        return [_located(child, file) for child in value]
    if isinstance(value, tuple):
        return tuple(_located(child, file) for child in value)
    return cast(Value, value)


def _children(value: object) -> Sequence[object]:
    if isinstance(value, dict):
        return list(value.values())
    return value if isinstance(value, (list, tuple)) else ()


def _contains_distributed(value: object) -> bool:
    return isinstance(value, Distributed) or any(_contains_distributed(child) for child in _children(value))


def _collect_holders(value: object, group: AlikeRanks, holders: set[int]) -> None:
    if isinstance(value, Distributed):
        for file in group.files:
            holders.update(file.holders(value))
    for child in _children(value):
        _collect_holders(child, group, holders)


def _described(value: object) -> str:
    if isinstance(value, Distributed):
        return f"a {value.form} of shape {value.shape} and type {value.dtype.name}"
    if (blocks := blocks_of(value)) is not None:
        return str(blocks)
    if isinstance(value, StoredTensor):
        return f"a plain tensor of shape {value.shape} and type {value.dtype.name}"
    return f"a value of type {type(value).__name__}"


def _ranks_text(ranks: Sequence[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))
