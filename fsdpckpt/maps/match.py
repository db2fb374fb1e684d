"""Finds which parameters each rule of a map applies to, and proves that none is missing and none is named twice."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from fsdpckpt import flags
from fsdpckpt.errors import SourceIncompleteError, UsageError, to_copy
from fsdpckpt.ir import Section
from fsdpckpt.maps.names import NUMBER, Pattern
from fsdpckpt.maps.rules import LayoutMap, MapRule
from fsdpckpt.maps.steps import Member
from fsdpckpt.text import first_lines, plural

_NAMES_IN_MESSAGE = 8


@dataclass(frozen=True, slots=True, eq=False)
class Use:
    """One use of a rule, equal to itself alone. ``words``: what stands at the places that from and to share.
    ``sources``: the names.
    """

    rule: MapRule
    words: Mapping[str, str]
    sources: Mapping[Member, str]

    def target(self, member: Member) -> str:
        """The name of one result."""
        position, number = member
        pattern = self.rule.targets[position or 0]
        place = self.rule.unstacked
        return pattern.format(self.words if place is None else {**self.words, place: str(number)})


@dataclass(frozen=True, slots=True)
class Matched:
    """``uses``: of all rules, in the order of the names. ``rest``: the names that no rule has."""

    uses: tuple[Use, ...]
    rest: tuple[str, ...]


def match_rules(layout_map: LayoutMap, names: Sequence[str], source: str) -> Matched:
    """The uses of the rules of ``layout_map`` among ``names``.

    Raises UsageError for a name that two rules have, and for names that no rule has where the map says so;
    SourceIncompleteError if a rule needs several parameters and some are not there.
    """
    found: dict[tuple[int, tuple[str, ...]], Use] = {}
    uses: dict[tuple[int, tuple[str, ...]], dict[Member, str]] = {}
    rest: list[str] = []
    for name in names:
        matches = [each for rule in layout_map.rules for each in _matches(rule, name)]
        if not matches:
            rest.append(name)
            continue
        if len(matches) > 1:
            rules = " and ".join(dict.fromkeys(str(rule) for rule, *_ in matches))
            raise _wrong(layout_map, f"{name} matches {rules}", "every parameter has one place in the target", name)
        rule, words, member = matches[0]
        key = rule.number, tuple(words[place] for place in sorted(words))
        members = uses.setdefault(key, {})
        members[member] = name
        found.setdefault(key, Use(rule, words, members))
    if rest and not layout_map.keeps_rest:
        raise UsageError(
            f"{layout_map.name} has no rule for {plural(len(rest), 'parameter')} of {source}",
            details=first_lines(rest, _NAMES_IN_MESSAGE),
            file=layout_map.name,
            key=rest[0],
            why='it says rest = "error"',
            next_step=f'give it rules for them, or rest = "keep"; {flags.exclude("GLOB")} leaves parameters out',
        )
    most = _most_stacked(found.values())
    for use in found.values():
        _require_complete(use, most.get(use.rule.number, 0), source)
    return Matched(tuple(found.values()), tuple(rest))


def _matches(rule: MapRule, name: str) -> Iterable[tuple[MapRule, dict[str, str], Member]]:
    for position, pattern in enumerate(rule.sources):
        words = pattern.match(name)
        if words is None:
            continue
        number = None
        if rule.stacked is not None:
            text = words.pop(rule.stacked)
            if not NUMBER.fullmatch(text):
                continue
            number = int(text)
        if not _can_be_written(rule, words):
            continue
        yield rule, words, (position if len(rule.sources) > 1 else None, number)


def _can_be_written(rule: MapRule, words: Mapping[str, str]) -> bool:
    """Whether each word of which a number is computed is one, and no number would be below zero."""
    computed = (place for pattern in (*rule.sources, *rule.targets) for place in pattern.computed)
    if not all(NUMBER.fullmatch(words[place]) for place in computed if place in words):
        return False
    return all(pattern.can_write(words) for pattern in rule.targets)


def require_used(
    layout_map: LayoutMap,
    used: Collection[MapRule],
    names: Collection[str],
    left_out: Collection[str],
    source: str,
    sections: Collection[Section],
) -> None:
    """Raises UsageError for a rule that applies to nothing. ``used``: those that apply; ``left_out``: names of SRC that
    are not selected; ``sections``: those that there are.
    """
    numbers = {rule.number for rule in used}
    unused: list[MapRule] = []
    for rule in layout_map.rules:
        may_stay_unused = rule.optional or (rule.section is not None and rule.section not in sections)
        if rule.number in numbers or may_stay_unused:
            continue
        if not any(any(_matches(rule, name)) for name in left_out):
            unused.append(rule)
    if not unused:
        return
    backwards = layout_map.inverse()
    fits_back = sum(any(_matches(rule, name)) for rule in backwards.rules for name in names)
    next_step = to_copy("see the names", flags.command("inspect", source, flags.names_only))
    if fits_back > len(numbers):
        next_step = f"did you mean {flags.inverse.off if layout_map.inverted else flags.inverse}?"
    raise UsageError(
        f"{layout_map.name} does not fit {source}: {plural(len(unused), 'rule', 'fit')} no name",
        details=first_lines([str(rule) for rule in unused], _NAMES_IN_MESSAGE),
        file=layout_map.name,
        why="it is a map of another model, or of the other direction",
        next_step=next_step,
    )


def _most_stacked(uses: Iterable[Use]) -> dict[int, int]:
    """The number of tensors that each rule, by its number, stacks in the layer that has most."""
    most: dict[int, int] = {}
    for use in uses:
        count = max((number or 0 for _, number in use.sources), default=0) + 1
        most[use.rule.number] = max(count, most.get(use.rule.number, 0))
    return most


def _require_complete(use: Use, most: int, source: str) -> None:
    """Raises SourceIncompleteError if the rule needs parameters that are not there. ``most``: how many it stacks in
    another layer: all of a model's layers have as many experts.
    """
    rule = use.rule
    positions = range(len(rule.sources)) if len(rule.sources) > 1 else (None,)
    numbers: Sequence[int | None] = (None,)
    if rule.stacked is not None:
        numbers = range(max(most, _stated_count(rule)))
    missing = [
        _source_name(rule.sources[position or 0], use.words, rule.stacked, number)
        for position in positions
        for number in numbers
        if (position, number) not in use.sources
    ]
    if missing:
        present = next(iter(use.sources.values()))
        raise SourceIncompleteError(
            f"{source} has {present}, and not all that {rule} joins with it",
            details=[f"{name} is missing" for name in first_lines(missing, _NAMES_IN_MESSAGE)],
            key=missing[0],
            why="it was left out when the checkpoint was saved or selected, or the map is of another model",
            next_step=to_copy("see the names", flags.command("inspect", source, flags.names_only)),
        )


def _stated_count(rule: MapRule) -> int:
    """How many tensors a pattern says that the rule stacks: eight for ``{rank*8+expert}``; 0 if none says it."""
    computed = [pattern.computed.get(rule.stacked or "") for pattern in rule.sources]
    stacked = [place for place in computed if place is not None and place.names[-1] == rule.stacked]
    return max((place.times for place in stacked), default=0)


def _source_name(pattern: Pattern, words: Mapping[str, str], place: str | None, number: int | None) -> str:
    return pattern.format(words if place is None else {**words, place: str(number)})


def _wrong(layout_map: LayoutMap, what: str, why: str, name: str) -> UsageError:
    return UsageError(
        f"{layout_map.name}: {what}",
        file=layout_map.name,
        key=name,
        why=why,
        next_step="correct the patterns; docs/maps.md describes the file",
    )


def require_bijection(layout_map: LayoutMap, new_names: Iterable[tuple[str, Use]], rest: Collection[str]) -> None:
    """Raises UsageError unless each new name is made once, and the inverse of the map leads from it back to where it
    came from.

    ``new_names``: with the use that makes each. ``rest``: the names that stay.
    """
    backwards = {rule.number: rule for rule in layout_map.inverse().rules}
    kept, made = set(rest), dict[str, Use]()
    for name, use in new_names:
        origin = next(iter(use.sources.values()))
        if name in kept:
            raise _wrong(layout_map, f"{use.rule} makes {name}, which is there already", _ONE_NAME, name)
        if name in made:
            other = next(iter(made[name].sources.values()))
            raise _wrong(layout_map, f"{name} would be made of {other} and of {origin}", _ONE_NAME, name)
        made[name] = use
        back = [words for _, words, _ in _matches(backwards[use.rule.number], name)]
        if back != [use.words]:
            raise _wrong(
                layout_map,
                f"{use.rule} makes {name}, and its inverse does not lead back to {origin}",
                "a factor is too small (rank 0 of {rank*8+expert} has no expert 8), or patterns with {name*} match in "
                "several ways",
                name,
            )


_ONE_NAME = "two parameters cannot have one name"
