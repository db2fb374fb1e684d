"""Assigns parameter names to the ids of an optimizer: searches for every assignment that fits, and stops at two.

Ids count group by group, and within a group in the order of the model's parameters
(``torch.optim.Optimizer.state_dict``). If it is not known which group a parameter is in, or which names are in no group
(buffers, frozen parameters), every way to distribute the names in their order is a candidate. An assignment is proved
only if exactly one fits; two show that the answer is ambiguous.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import TypeAlias

Answer: TypeAlias = tuple[int, ...]
"""For each id, group by group, the index of its name."""

Fits: TypeAlias = Callable[[int, int], bool]
"""(id, name index): whether the shapes allow it."""

_MAX_STEPS = 200_000  # of a search, about a second: one that needs more proves nothing
_STEPS_PER_NAME = 16  # in addition, as even a single answer takes some for each name
_GROUPS_PER_STEP = 16  # a look at so many groups, or a copy of what is known of them, counts as one step
_MAX_PAIRS = 4_000_000  # (id, name) pairs: a model with more has parameters of equal shape, so a search is futile

_Path: TypeAlias = tuple["_Path | None", int, int]
"""The decisions so far, last first: those before, then the id's index and the name's index of the last one."""


def in_order(
    group_sizes: Sequence[int], name_count: int, fits: Fits, *, effort: int | None = None
) -> list[Answer] | None:
    """At most two ways to give the names, in their order, to the ids of groups of these sizes; names may be left over.

    None if the search needs more than ``effort`` steps beside those that a single answer takes.
    """
    if len(group_sizes) == 1:
        return _one_group(group_sizes[0], name_count, fits)
    looks = min(len(group_sizes) * name_count, _MAX_PAIRS) // _GROUPS_PER_STEP
    steps = (_MAX_STEPS if effort is None else effort) + _STEPS_PER_NAME * name_count + 4 * looks
    return _several_groups(group_sizes, name_count, fits, steps)


def _one_group(id_count: int, name_count: int, fits: Fits) -> list[Answer]:
    """The answers that use names as early and as late as possible: one if they are equal, none if none fits."""
    early: list[int] = []
    name = 0
    for number in range(id_count):
        while name < name_count and not fits(number, name):
            name += 1
        if name == name_count:
            return []
        early.append(name)
        name += 1
    late: list[int] = []
    name = name_count - 1
    for number in reversed(range(id_count)):
        while not fits(number, name):
            name -= 1
        late.append(name)
        name -= 1
    late.reverse()
    return [tuple(early)] if early == late else [tuple(early), tuple(late)]


def _several_groups(group_sizes: Sequence[int], name_count: int, fits: Fits, steps: int) -> list[Answer] | None:
    """Breadth-first search, name by name. Its state is how many ids of each group have a name already."""
    total = sum(group_sizes)
    first = [end - size for end, size in zip(accumulate(group_sizes), group_sizes, strict=True)]
    frontier: dict[tuple[int, ...], list[_Path | None]] = {(0,) * len(group_sizes): [None]}
    for name in range(name_count):
        following: dict[tuple[int, ...], list[_Path | None]] = {}
        steps -= len(frontier)
        for state, paths in frontier.items():
            # Each state has a number for each group: looking at it takes as long as there are groups.
            steps -= len(state) // _GROUPS_PER_STEP
            if steps < 0:
                return None
            for group, done in enumerate(state):
                if done < group_sizes[group] and fits(first[group] + done, name):
                    steps -= len(state) // _GROUPS_PER_STEP
                    after = (*state[:group], done + 1, *state[group + 1 :])
                    _extend(following, after, [(path, first[group] + done, name) for path in paths])
            if total - sum(state) < name_count - name:
                _extend(following, state, paths)
        frontier = following
    return [_answer(path, total) for path in frontier.get(tuple(group_sizes), [])]


def _extend(
    frontier: dict[tuple[int, ...], list[_Path | None]], state: tuple[int, ...], paths: Sequence[_Path | None]
) -> None:
    reached = frontier.setdefault(state, [])
    reached.extend(paths[: 2 - len(reached)])  # two show that the answer is ambiguous


def _answer(path: _Path | None, total: int) -> Answer:
    names = [0] * total
    while path is not None:
        path, number, name = path
        names[number] = name
    return tuple(names)


def in_any_order(id_count: int, name_count: int, fits: Fits) -> Answer | None:
    """The only way to give each id its own name if the names have no order; None if there is none, or several.

    Repeatedly assigns the ids that fit only one of the remaining names.
    """
    if id_count * name_count > _MAX_PAIRS:
        return None
    choices: list[set[int]] = []  # of each id
    for number in range(id_count):
        choices.append({name for name in range(name_count) if fits(number, name)})
    name_of: dict[int, int] = {}
    taken: set[int] = set()
    while len(name_of) < id_count:
        forced = {
            number: next(iter(free))
            for number, choice in enumerate(choices)
            if number not in name_of and len(free := choice - taken) == 1
        }
        if not forced or len(set(forced.values())) < len(forced):
            return None
        name_of.update(forced)
        taken.update(forced.values())
    return tuple(name_of[number] for number in range(id_count))


def may_fit_in_some_order(id_count: int, name_count: int, fits: Fits) -> bool:
    """False if ids that fit the same names outnumber these: then no order gives each id a name of its own."""
    if id_count * name_count > _MAX_PAIRS:
        return True
    ids_with = Counter[frozenset[int]]()  # how many ids fit just these names
    for number in range(id_count):
        ids_with[frozenset(name for name in range(name_count) if fits(number, name))] += 1
    return all(len(names) >= ids for names, ids in ids_with.items())
