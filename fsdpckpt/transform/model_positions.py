"""Ids that count over all of ``model.parameters()``, frozen parameters included.

``FSDP.rekey_optim_state_dict`` gives such ids if it is not given the optimizer, as Lightning calls it: an id is a place
in the model, and a group lists the places of its parameters.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TypeAlias

from fsdpckpt.ir import IdRule
from fsdpckpt.transform.assignment import Answer, Fits

_Path: TypeAlias = tuple["_Path | None", int]
"""The names of the ids so far, last first: those before, then the index of the last one's name."""


def counts_over_model(groups: Sequence[Sequence[int]], rule: IdRule = IdRule.GROUPS) -> bool:
    """Whether the ids that ``groups`` list are places in the model: each list is sorted, and the framework counts so by
    its ``rule``, or they are not those of ``torch.optim``, which counts in the order of the lists.
    """
    if any(list(group) != sorted(group) for group in groups):
        return False
    numbers = [number for group in groups for number in group]
    return rule is IdRule.MODEL or numbers != list(range(len(numbers)))


def by_place(numbers: Sequence[int], name_count: int, optional: Collection[int], fits: Fits) -> list[Answer]:
    """At most two ways to give names to ids that count over all parameters, an index for each of ``numbers``.

    ``optional``: the indices of names that may be buffers, which have no id. ``fits``: see ``assignment``.
    """
    if not numbers:
        return [()]
    at = {number: index for index, number in enumerate(numbers)}
    last, free = max(numbers), set(optional)
    # Name by name. The state is how many parameters came before; two paths of each show that the answer is ambiguous.
    frontier: dict[int, list[_Path | None]] = {0: [None]}
    complete: list[_Path | None] = []
    for name in range(name_count):
        following: dict[int, list[_Path | None]] = {}
        for count, paths in frontier.items():
            if name in free:
                _extend(following.setdefault(count, []), paths)
            if count not in at:
                _extend(following.setdefault(count + 1, []), paths)
            elif fits(at[count], name):
                _extend(following.setdefault(count + 1, []), [(path, name) for path in paths])
        _extend(complete, following.pop(last + 1, []))
        frontier = following
    places = {number: index for index, number in enumerate(sorted(numbers))}
    answers: list[tuple[int, ...]] = []
    for found in map(_names, complete):
        answers.append(tuple(found[places[number]] for number in numbers))
    return answers


def _extend(paths: list[_Path | None], more: Sequence[_Path | None]) -> None:
    for path in more:
        if len(paths) < 2 and not any(path is known for known in paths):
            paths.append(path)


def _names(path: _Path | None) -> list[int]:
    """The indices of the names, in the order of ids."""
    names: list[int] = []
    while path is not None:
        path, name = path
        names.append(name)
    names.reverse()
    return names


def places_in_model(
    names: Sequence[str], trained: Collection[str], optional: Collection[str]
) -> tuple[Mapping[str, int], list[str]]:
    """The place of each of ``names`` among all parameters, and those of ``optional`` that would have to be decided:
    whether they are parameters changes the places of ``trained``.
    """
    may_be_none = set(optional) - set(trained)
    counted = [name for name in names if name not in may_be_none]
    places = {name: place for place, name in enumerate(counted)}
    last = max((index for index, name in enumerate(names) if name in trained), default=-1)
    return places, [name for name in names[: last + 1] if name in may_be_none]
