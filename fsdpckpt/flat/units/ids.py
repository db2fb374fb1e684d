"""Which parameters the ids of an optimizer are, where neither the units nor ``param_names`` say it.

``torch.optim`` counts ids group by group; within a group they follow ``model.parameters()``. Parameters that an
optimizer was not given have none. Every assignment in that order whose lengths fit is counted: one is an answer, two
are a question.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import TypeAlias

import numpy as np

from fsdpckpt.flat.slice_lengths import carried_whole, is_sliced, slice_lengths
from fsdpckpt.ir.checkpoint import Checkpoint, OptimState, group_params
from fsdpckpt.ir.tensors import Tensor
from fsdpckpt.ir.units import Units
from fsdpckpt.layouts.flattened import layout_of

__all__ = ["group_candidates"]

Groups: TypeAlias = tuple[tuple[str, ...], ...]
_Token: TypeAlias = bytes | tuple[int, ...]

_MOST = 2_000_000  # states of the search; two groups of a thousand parameters each need half of it


def group_candidates(checkpoint: Checkpoint, units: Units) -> list[Groups | None]:
    """The groups that fit the ids of ``checkpoint``, at most two; [None] when ``match`` proves the ids by itself.

    It does not where the states are whole (of one rank, with ``use_orig_params=True``): their shapes are compared here.
    """
    optim = checkpoint.optim
    if optim is None or units.groups is not None or optim.key_type != "id" or not optim.param_groups:
        return [None]
    ids = [[key for key in group_params(group) or () if isinstance(key, int)] for group in optim.param_groups]
    keys = units.optimizer_keys()
    if all(group.get("param_names") for group in optim.param_groups):
        return [None]
    listed = sum(map(len, ids))
    sliced = is_sliced(checkpoint, units)
    if sliced and ((len(ids) == 1 and listed == len(keys)) or listed > len(keys)):
        return [None]
    if prod(len(group) + 1 for group in ids) * (len(keys) - listed + 1) > _MOST:
        return [None]
    found = _tokens(optim, checkpoint.world_size)
    expected = _expected(units, checkpoint.world_size)
    search = _Search([[found.get(key) for key in group] for group in ids], keys, [expected[key] for key in keys])
    return [*search.solutions()] or ([None] if sliced else [])


def _tokens(optim: OptimState, world_size: int) -> dict[int, _Token]:
    """What the first state with elements shows of each id: lengths by rank, or the shape when it is whole."""
    found: dict[int, _Token] = {}
    for key, states in optim.state.items():
        for leaf in states.values():
            if isinstance(key, int) and isinstance(leaf, Tensor) and leaf.ndim and not carried_whole(leaf):
                lengths = slice_lengths(leaf, world_size)
                found.setdefault(key, leaf.shape if lengths is None else lengths.tobytes())
    return found


def _expected(units: Units, world_size: int) -> dict[str, set[_Token]]:
    """What each key of ``units`` may show."""
    shard_size = units.shard_size or world_size
    found: dict[str, set[_Token]] = {}
    for param in units.unmanaged:
        lengths = np.full(world_size, param.numel, np.int64)
        found[param.name] = {param.shape, *([lengths.tobytes()] if len(param.shape) == 1 else [])}
    for unit in units.units:
        layout = layout_of(unit, use_orig_params=units.use_orig_params, world_size=world_size, shard_size=shard_size)
        found[unit.key] = {np.full(world_size, layout.shard, np.int64).tobytes()}
        slices = layout.slices()
        table = np.zeros((len(unit.params), layout.shards), np.int64)
        table[slices.param, slices.rank] = slices.count
        for index, param in enumerate(unit.params):
            tokens: set[_Token] = {np.resize(table[index], world_size).astype(np.int64).tobytes()}
            found[param.name] = tokens | ({param.shape} if layout.shards == 1 else set())
    return found


class _Search:
    """Interleavings of the groups' ids along the keys, keys without an id skipped."""

    def __init__(
        self, groups: Sequence[Sequence[_Token | None]], keys: Sequence[str], expected: Sequence[set[_Token]]
    ) -> None:
        self.groups = groups
        self.keys = keys
        self.expected = expected
        self.dead: set[tuple[int, ...]] = set()

    def solutions(self) -> list[Groups]:
        """The first two assignments, depth first; states from which none leads on are remembered."""
        found: list[Groups] = []
        start = (0,) * len(self.groups)
        path: list[int] = []  # for each key the group that takes it, -1 for none
        stack = [(start, iter(self._moves(start, 0)))]
        lived = [False]
        while stack and len(found) < 2:
            state, moves = stack[-1]
            step = next(moves, None)
            if step is None:
                stack.pop()
                if not lived.pop():
                    self.dead.add((len(stack), *state))
                elif lived:
                    lived[-1] = True
                if path and stack:
                    path.pop()
                continue
            taken = tuple(at + (number == step) for number, at in enumerate(state))
            path.append(step)
            if len(path) == len(self.keys):
                if all(at == len(group) for at, group in zip(taken, self.groups, strict=True)):
                    found.append(self._groups(path))
                    lived[-1] = True
                path.pop()
            elif (len(path), *taken) in self.dead:
                path.pop()
            else:
                stack.append((taken, iter(self._moves(taken, len(path)))))
                lived.append(False)
        return found

    def _moves(self, state: tuple[int, ...], depth: int) -> list[int]:
        left = sum(map(len, self.groups)) - sum(state)
        room = len(self.keys) - depth
        moves = [
            number
            for number, group in enumerate(self.groups)
            if state[number] < len(group) and group[state[number]] in (None, *self.expected[depth])
        ]
        return [*moves, *([-1] if left < room else [])]

    def _groups(self, path: Sequence[int]) -> Groups:
        return tuple(
            tuple(key for key, step in zip(self.keys, path, strict=True) if step == number)
            for number in range(len(self.groups))
        )
