"""Which parameters the ids of an optimizer mean: every answer that fits, up to two, because two are already too many.

Ids count group by group, and inside a group in the order of the model's parameters (``torch.optim.Optimizer.
state_dict``). Which group a parameter is in, and which are in none (buffers, frozen ones), may not be known: then an
answer is one way to deal the names out in their order, and only a single one proves anything.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import TypeAlias

__all__ = ["Answer", "in_any_order", "in_order"]

Answer: TypeAlias = tuple[int, ...]
"""For each id, group by group, the index of its name."""

Fits: TypeAlias = Callable[[int, int], bool]
"""(id, name index): whether the shapes allow it."""

_EFFORT = 200_000  # steps on top of what one answer takes: about a second; past it nothing is proved
_EFFORT_A_NAME = 16
_PAIRS = 4_000_000  # (id, name) pairs: a model this large has parameters of one shape, so it is not worth the look


class _Path:
    """The decisions so far, last first."""

    __slots__ = ("before", "name", "number")

    def __init__(self, before: _Path | None, number: int, name: int) -> None:
        self.before = before
        self.number = number
        self.name = name


def in_order(groups: Sequence[int], names: int, fits: Fits, *, effort: int | None = None) -> list[Answer] | None:
    """At most two ways to deal ``names`` ordered names out to groups of so many ids, some names left over.

    None when there are too many possibilities to try them all: more than ``effort`` beside those that one answer takes.
    """
    if len(groups) == 1:
        return _one_group(groups[0], names, fits)
    steps = (_EFFORT if effort is None else effort) + _EFFORT_A_NAME * names
    return _several_groups(groups, names, fits, steps)


def _one_group(ids: int, names: int, fits: Fits) -> list[Answer]:
    """The answers that take each name as early, and as late, as possible: equal when there is only one."""
    early: list[int] = []
    at = 0
    for number in range(ids):
        while at < names and not fits(number, at):
            at += 1
        if at == names:
            return []
        early.append(at)
        at += 1
    late: list[int] = []
    at = names - 1
    for number in reversed(range(ids)):
        while not fits(number, at):
            at -= 1
        late.append(at)
        at -= 1
    late.reverse()
    return [tuple(early)] if early == late else [tuple(early), tuple(late)]


def _several_groups(groups: Sequence[int], names: int, fits: Fits, effort: int) -> list[Answer] | None:
    """Name by name; a state of the search is how many ids of each group have their name."""
    total = sum(groups)
    first = [end - size for end, size in zip(accumulate(groups), groups, strict=True)]
    frontier: dict[tuple[int, ...], list[_Path | None]] = {(0,) * len(groups): [None]}
    for name in range(names):
        following: dict[tuple[int, ...], list[_Path | None]] = {}
        effort -= len(frontier)
        if effort < 0:
            return None
        for state, paths in frontier.items():
            for group, done in enumerate(state):
                if done < groups[group] and fits(first[group] + done, name):
                    after = (*state[:group], done + 1, *state[group + 1 :])
                    _extend(following, after, [_Path(path, first[group] + done, name) for path in paths])
            if total - sum(state) < names - name:
                _extend(following, state, paths)
        frontier = following
    return [_answer(path, total) for path in frontier.get(tuple(groups), [])]


def _extend(
    frontier: dict[tuple[int, ...], list[_Path | None]], state: tuple[int, ...], paths: Sequence[_Path | None]
) -> None:
    known = frontier.setdefault(state, [])
    known.extend(paths[: 2 - len(known)])


def _answer(path: _Path | None, total: int) -> Answer:
    found = [0] * total
    while path is not None:
        found[path.number] = path.name
        path = path.before
    return tuple(found)


def in_any_order(ids: int, names: int, fits: Fits) -> Answer | None:
    """The one way to give each id its own name when the names are in no order; None when there is none, or several.

    Only an id that fits a single name, or the last id for the last name, is settled.
    """
    if ids * names > _PAIRS:
        return None
    choices = [{name for name in range(names) if fits(number, name)} for number in range(ids)]
    found: dict[int, int] = {}
    taken: set[int] = set()
    while len(found) < ids:
        settled = {
            number: next(iter(left))
            for number, choice in enumerate(choices)
            if number not in found and len(left := choice - taken) == 1
        }
        if not settled or len(set(settled.values())) < len(settled):
            return None
        found.update(settled)
        taken.update(settled.values())
    return tuple(found[number] for number in range(ids))
