"""Sums up a comparison: where each side stood, and how far each module moved."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from fsdpckpt.ir.checkpoint import Section
from fsdpckpt.ir.counters import STEP
from fsdpckpt.text import fold
from fsdpckpt.verify.difference import Change, ComparedKey, Difference

WEIGHTS = "weights"
_RATE = "lr"


@dataclass(frozen=True, slots=True)
class Standing:
    """Where one side stood in its training, as far as both sides say it."""

    steps: Mapping[float, int]  # how many parameters are at each step of the optimizer
    rates: Mapping[float, int]  # how many param groups have each learning rate


def standings(result: Difference) -> tuple[Standing, Standing]:
    """Those of A and of B."""
    steps: tuple[Counter[float], Counter[float]] = (Counter(), Counter())
    rates: tuple[Counter[float], Counter[float]] = (Counter(), Counter())
    for entry in result.entries:
        if entry.section is not Section.OPTIM or entry.numbers is None:
            continue
        if entry.state == STEP:
            counted = steps
        elif entry.setting == _RATE:
            counted = rates
        else:
            continue
        for side, number in zip(counted, entry.numbers, strict=True):
            side[number] += 1
    return Standing(steps[0], rates[0]), Standing(steps[1], rates[1])


def kind_of(entry: ComparedKey) -> str | None:
    """``weights`` or the name of the optimizer's state; None for what is no tensor of a parameter."""
    if entry.param is None or entry.state == STEP:
        return None
    return WEIGHTS if entry.section is Section.MODEL else entry.state


@dataclass(frozen=True, slots=True)
class ModuleChange:
    """How far one module moved, or ``count`` of them, folded into ``module``. ``changes``: by kind (``kind_of``)."""

    module: str
    count: int
    changes: Mapping[str, Change]


def changed_kinds(result: Difference) -> list[str]:
    """The kinds of tensors that differ, the weights first."""
    changed = [kind_of(entry) for entry in result.entries if entry.change is not None]
    kinds = dict.fromkeys(filter(None, changed))
    return sorted(kinds, key=lambda kind: kind != WEIGHTS)


def module_changes(entries: Iterable[ComparedKey]) -> list[ModuleChange]:
    """How far each module moved, in the order of the model; modules that differ only in their numbers are one."""
    by_module: dict[str, dict[str, Change]] = {}
    for entry in entries:
        kind = kind_of(entry)
        if entry.change is None or kind is None or entry.param is None:
            continue
        of_module = by_module.setdefault(module_of(entry.param), {})
        of_module[kind] = of_module[kind] + entry.change if kind in of_module else entry.change
    names = list(by_module)
    rows = []
    # What moved in one layer and not in another stays apart: the row would claim it of all.
    for folded in fold((name, tuple(sorted(by_module[name]))) for name in names):
        total: dict[str, Change] = {}
        for member in folded.members:
            for kind, change in by_module[names[member]].items():
                total[kind] = total[kind] + change if kind in total else change
        rows.append(ModuleChange(folded.key, len(folded.members), total))
    return rows


def module_of(param: str) -> str:
    """The module that holds the parameter: its name without the last word."""
    return param.rpartition(".")[0] or param


def furthest(entries: Iterable[ComparedKey]) -> dict[str, ComparedKey]:
    """By kind, the tensor with the largest |A - B|."""
    found: dict[str, ComparedKey] = {}
    for entry in entries:
        kind = kind_of(entry)
        if kind is None or entry.change is None or entry.change.largest is None:
            continue
        best = found.get(kind)
        if best is None or best.change is None or entry.change.largest > (best.change.largest or 0.0):
            found[kind] = entry
    return found


def joined_lists(entries: Iterable[ComparedKey], longest: int) -> list[ComparedKey]:
    """``entries`` with one in place of the values of each list of an extra that has more than ``longest``: those of a
    random state are hundreds, and say nothing one by one.
    """
    entries = list(entries)
    lists: dict[tuple[str, int | None], list[ComparedKey]] = {}
    for entry in entries:
        if (parent := _list_of(entry)) is not None:
            lists.setdefault((parent, entry.rank), []).append(entry)
    joined: dict[tuple[str, int | None, str], ComparedKey] = {}
    result: list[ComparedKey] = []
    for entry in entries:
        parent = _list_of(entry)
        members = lists[parent, entry.rank] if parent is not None else []
        if parent is None or len(members) <= longest:
            result.append(entry)
            continue
        # What only one side has stays apart from what both have: the sigil says which.
        group = "both" if entry.sigil in "=*" else entry.sigil
        if (parent, entry.rank, group) not in joined:
            of_group = [each for each in members if ("both" if each.sigil in "=*" else each.sigil) == group]
            joined[parent, entry.rank, group] = one = _joined(parent, of_group)
            result.append(one)
    return result


def _list_of(entry: ComparedKey) -> str | None:
    """The key of the list that a value of an extra is in."""
    if entry.section is not Section.EXTRA or entry.change is not None:
        return None
    parent, _, last = entry.key.rpartition(".")
    return parent if parent and last.isdecimal() else None


def _joined(parent: str, members: list[ComparedKey]) -> ComparedKey:
    first = members[0]
    if first.sigil not in "=*":
        detail = f"{len(members)} values"
        return ComparedKey(first.sigil, first.section, parent, detail, first.rank, any(each.counts for each in members))
    differing = sum(each.sigil == "*" for each in members)
    detail = f"{differing} of {len(members)} values differ" if differing else ""
    return ComparedKey("*" if differing else "=", first.section, parent, detail, first.rank)
