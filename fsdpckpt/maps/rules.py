"""A layout map: rules over the names of parameters, and what a rule may do."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from fsdpckpt.ir import Section
from fsdpckpt.maps.names import Pattern
from fsdpckpt.maps.steps import Cat, Rearrange, Size, Split, Stack, Step, Transpose, Unstack, count_after


@dataclass(frozen=True, slots=True)
class MapRule:
    """``sources`` become ``targets`` by ``steps``. ``optional``: a checkpoint may have none of them.

    ``copies``: "" for the steps; ``untie``: one tensor gets several names; ``tie``: several names of equal tensors
    become one. ``section``: the only one that the rule is for, None for both: a job may save the tensors of a model in
    another form than it trains them.
    """

    number: int  # in the file, from 1
    sources: tuple[Pattern, ...]
    targets: tuple[Pattern, ...]
    steps: tuple[Step, ...] = ()
    optional: bool = False
    copies: Literal["", "tie", "untie"] = ""
    section: Section | None = None

    @property
    def stacked(self) -> str | None:
        """The place in the names of the sources that a step stacks."""
        return next((step.place for step in self.steps if isinstance(step, Stack)), None)

    @property
    def unstacked(self) -> str | None:
        """The place in the names of the targets that a step fills."""
        return next((step.place for step in self.steps if isinstance(step, Unstack)), None)

    @property
    def renames_alone(self) -> bool:
        return not self.steps and not self.copies

    @property
    def value_names(self) -> list[str]:
        """The numbers of the map that the steps need."""
        sizes: list[Size] = []
        for step in self.steps:
            if isinstance(step, Cat | Split):
                sizes += step.sizes
            elif isinstance(step, Rearrange):
                sizes += [size for _, size in step.sizes]
        return [name for size in sizes for name in size.names]

    def inverse(self) -> MapRule:
        copies: Mapping[str, Literal["", "tie", "untie"]] = {"": "", "tie": "untie", "untie": "tie"}
        steps = tuple(step.inverse() for step in reversed(self.steps))
        return replace(self, sources=self.targets, targets=self.sources, steps=steps, copies=copies[self.copies])

    def __str__(self) -> str:
        return f"rule {self.number} ({_patterns(self.sources)} -> {_patterns(self.targets)})"


def _patterns(patterns: tuple[Pattern, ...]) -> str:
    more = f" and {len(patterns) - 1} more" if len(patterns) > 1 else ""
    return f"{patterns[0]}{more}"


@dataclass(frozen=True, slots=True)
class Value:
    """A number that the map leaves open. ``fields``: what of a ``config.json`` gives it, the first that is there.
    ``default``: the number that the map states, if it states one.
    """

    fields: tuple[Size, ...] = ()
    default: int | None = None


@dataclass(frozen=True, slots=True)
class LayoutMap:
    """``name``: that of a built-in map, or the path of the file. ``keeps_rest``: whether parameters that no rule names
    keep their names; else they are an error. ``sha256``: of the file. ``tested``: the library that it was
    compared with. ``inverted``: whether this is the inverse of what
    the file says.
    """

    name: str
    rules: tuple[MapRule, ...]
    keeps_rest: bool
    sha256: str
    values: Mapping[str, Value]
    description: str = ""
    tested: str = ""
    inverted: bool = False

    @property
    def by_section(self) -> bool:
        """Whether the model and the optimizer have rules of their own."""
        return any(rule.section is not None for rule in self.rules)

    def of_section(self, section: Section) -> LayoutMap:
        """The map with the rules for one section."""
        return replace(self, rules=tuple(rule for rule in self.rules if rule.section in (None, section)))

    def makes(self, name: str) -> bool:
        """Whether ``name`` may be one that the map makes."""
        return any(pattern.match(name) is not None for rule in self.rules for pattern in rule.targets)

    def inverse(self) -> LayoutMap:
        return replace(self, rules=tuple(rule.inverse() for rule in self.rules), inverted=not self.inverted)


def flaws(rule: MapRule) -> list[str]:
    """Why ``rule`` cannot be applied, and undone again; empty if it can."""
    if rule.copies:
        return _copy_flaws(rule)
    found: list[str] = []
    stacks = [step.place for step in rule.steps if isinstance(step, Stack)]
    unstacks = [step.place for step in rule.steps if isinstance(step, Unstack)]
    if len(stacks) > 1 or len(unstacks) > 1:
        return ["it stacks or unstacks twice"]
    places = _places(rule.sources, found), _places(rule.targets, found)
    for stacked, have, side in ((stacks, places[0], "from"), (unstacks, places[1], "to")):
        found += [f"{{{place}}} is not in {side}" for place in stacked if place not in have]
    for numbered, patterns in ((stacks, rule.sources), (unstacks, rule.targets)):
        found += [
            f"{{{place}}} counts from 0, and {pattern} would begin below"
            for place in numbered
            for pattern in patterns
            if place in pattern.computed and pattern.computed[place].offset < 0
        ]
    kept = places[0] - {*stacks}, places[1] - {*unstacks}
    for only, side in ((kept[0] - kept[1], "from"), (kept[1] - kept[0], "to")):
        found += [f"{{{place}}} is only in {side}: its value would be lost on the way back" for place in sorted(only)]
    return found or _count_flaws(rule, several=bool(stacks))


def _places(patterns: tuple[Pattern, ...], found: list[str]) -> frozenset[str]:
    first = patterns[0].places
    for other in patterns[1:]:
        if other.places != first:
            found.append(f"{patterns[0]} and {other} have different names in braces")
    return first


def _count_flaws(rule: MapRule, *, several: bool) -> list[str]:
    """Follow how many tensors there are from step to step."""
    count = len(rule.sources)
    for step in rule.steps:
        wrong = _step_flaw(step, count, several=several)
        if wrong:
            return [f"{step}: {wrong}"]
        count = count_after(step, count)
        several = (several or isinstance(step, Unstack)) and not isinstance(step, Stack)
    if count != len(rule.targets):
        return [f"its steps make {count} of {len(rule.sources)} tensors, and to has {len(rule.targets)} patterns"]
    return []


def _step_flaw(step: Step, count: int, *, several: bool) -> str:
    """Why ``step`` cannot follow where there are ``count`` tensors; "" if it can. ``several``: whether a place has
    several numbers.
    """
    match step:
        case Cat() if count == 1:
            return "there is one tensor, and nothing to join"
        case Cat() if len(step.sizes) != count:
            return f"there are {count} tensors and {len(step.sizes)} sizes"
        case Split() if count > 1:
            return f"there are {count} tensors, and only one can be split"
        case Unstack() if several:
            return "they are already several"
        case Rearrange() | Transpose() if step.of is not None and (count == 1 or max(step.of) >= count):
            return f"of has {max(step.of)}, and the number of tensors is {count}"
    return ""


def _copy_flaws(rule: MapRule) -> list[str]:
    found: list[str] = []
    one, several = (rule.targets, rule.sources) if rule.copies == "tie" else (rule.sources, rule.targets)
    if len(one) != 1 or len(several) < 2:
        takes = (
            "several patterns in from, and one in to" if rule.copies == "tie" else "one pattern in from, several in to"
        )
        found.append(f"{rule.copies} takes {takes}")
    if rule.steps:
        found.append(f"{rule.copies} has no steps beside it")
    if not found and _places(rule.sources, found) != _places(rule.targets, found):
        found.append("from and to have different names in braces")
    return found
