"""Finds which parameters each of several optimizers of one model holds, where each lists ids alone.

Units are those of the model, and all of its optimizers share them. What an id is shows in the lengths of its slices on
each rank. A division is used only if it is the only one in which every length fits: either each optimizer lists its
parameters in the order of the model, as one optimizer does of which nothing else is known, or no two parameters have
the same lengths. Nothing is chosen between two that fit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

Lengths: TypeAlias = tuple[int, ...]
"""Elements by rank."""

Listed: TypeAlias = Sequence[Lengths | None]
"""What one param group lists: the lengths of each member, None for one without states."""

_MAX_STATES = 1 << 14  # ways to have divided the first parameters that are followed at once


class UndividedError(ValueError):
    """No division fits, or several do; the text says which."""


@dataclass(frozen=True, slots=True)
class Divided:
    """``names``: of the members of each group. ``by_order``: whether the order of the model was needed."""

    names: tuple[tuple[str, ...], ...]
    by_order: bool


def divide(parameters: Mapping[str, Lengths], groups: Sequence[Listed], optional: frozenset[str]) -> Divided:
    """Divide ``parameters``, in the order of the model, among ``groups``, those of all optimizers.

    ``optional``: parameters that no group may list; all are if the groups list fewer than the others. Raises
    UndividedError.
    """
    listed = sum(map(len, groups))
    if listed > len(parameters):
        raise UndividedError(f"the optimizers list {listed} parameters, the units have {len(parameters)}")
    if listed == len(parameters):
        optional = frozenset()
    elif listed < len(parameters) - len(optional):
        optional = frozenset(parameters)
    in_order = _in_order(parameters, groups, optional)
    if in_order is not None:
        return Divided(in_order, by_order=True)
    by_lengths = _by_lengths(parameters, groups)
    if by_lengths is None:
        raise UndividedError("no division in the order of the model fits the lengths of all slices")
    return Divided(by_lengths, by_order=False)


_Position: TypeAlias = tuple[int, ...]
"""How many members of each group have a parameter."""


def _in_order(
    parameters: Mapping[str, Lengths], groups: Sequence[Listed], optional: frozenset[str]
) -> tuple[tuple[str, ...], ...] | None:
    """The only division in which every group is in the order of the model; None if there is none.

    Raises UndividedError if there are several.
    """
    begin = tuple(0 for _ in groups)
    # For each position that can be reached: in how many ways (2 stands for more), and the last step of one of them.
    ways: dict[_Position, int] = {begin: 1}
    steps: list[dict[_Position, int | None]] = []
    for name, lengths in parameters.items():
        after: dict[_Position, int] = {}
        step: dict[_Position, int | None] = {}
        for position, count in ways.items():
            taken_by = [number for number, listed in enumerate(groups) if _fits(listed, position[number], lengths)]
            for group in (*taken_by, *([None] if name in optional else [])):
                reached = position if group is None else _advanced(position, group)
                after[reached] = min(after.get(reached, 0) + count, 2)
                step[reached] = group
        if len(after) > _MAX_STATES:
            raise UndividedError("very many divisions fit the lengths of the slices so far")
        ways = after
        steps.append(step)
    end = tuple(map(len, groups))
    if end not in ways:
        return None
    if ways[end] > 1:
        raise UndividedError("several divisions fit the lengths of all slices")
    return _followed(tuple(parameters), steps, end)


def _fits(listed: Listed, at: int, lengths: Lengths) -> bool:
    return at < len(listed) and listed[at] in (None, lengths)


def _advanced(position: _Position, group: int) -> _Position:
    return (*position[:group], position[group] + 1, *position[group + 1 :])


def _followed(
    names: Sequence[str], steps: Sequence[Mapping[_Position, int | None]], end: _Position
) -> tuple[tuple[str, ...], ...]:
    """The names that each group gets on the only way to ``end``."""
    taken: list[list[str]] = [[] for _ in end]
    position = end
    for name, step in zip(reversed(names), reversed(steps), strict=True):
        group = step[position]
        if group is not None:
            taken[group].append(name)
            position = (*position[:group], position[group] - 1, *position[group + 1 :])
    return tuple(tuple(reversed(of_group)) for of_group in taken)


def _by_lengths(parameters: Mapping[str, Lengths], groups: Sequence[Listed]) -> tuple[tuple[str, ...], ...] | None:
    """The division by lengths alone, which needs no order; None if two parameters have equal ones, or nothing fits."""
    names = {lengths: name for name, lengths in parameters.items()}
    members = [lengths for listed in groups for lengths in listed]
    if len(names) < len(parameters) or len(set(members)) < len(members):
        return None
    divided: list[tuple[str, ...]] = []
    for listed in groups:
        divided.append(tuple(names[lengths] for lengths in listed if lengths in names))
    return tuple(divided) if sum(map(len, divided)) == len(members) else None
