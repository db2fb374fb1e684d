"""Applies a map to a checkpoint: to its model, and with it to the optimizer (``maps.states``)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from fsdpckpt.errors import SourceUnsupportedError
from fsdpckpt.ir.checkpoint import Checkpoint, ModelState, Note, Section
from fsdpckpt.ir.names import clean
from fsdpckpt.ir.table import names_of
from fsdpckpt.ir.tensors import Tensor
from fsdpckpt.ir.values import Value
from fsdpckpt.maps.match import Matched, Use, match_rules, require_bijection, require_used
from fsdpckpt.maps.rules import LayoutMap, MapRule
from fsdpckpt.maps.scales import require_scales
from fsdpckpt.maps.states import mapped_optimizer
from fsdpckpt.maps.steps import Family, Member, Values
from fsdpckpt.maps.work import Reading, Work
from fsdpckpt.text import plural, some_of

_KEYS_IN_NOTE = 3


@dataclass(frozen=True, slots=True)
class AppliedMap:
    """What was applied, for ``fsdpckpt.json``. ``times``: how often each rule was, by its number."""

    layout_map: LayoutMap
    values: Values
    times: Mapping[int, int]

    def to_json(self) -> dict[str, object]:
        return {
            "name": self.layout_map.name,
            "sha256": self.layout_map.sha256,
            "inverse": self.layout_map.inverted,
            "values": dict(self.values),
            "rules": list(map(self._rule_json, self.layout_map.rules)),
        }

    def _rule_json(self, rule: MapRule) -> dict[str, object]:
        return {
            "number": rule.number,
            "from": [pattern.text for pattern in rule.sources],
            "to": [pattern.text for pattern in rule.targets],
            "applied": self.times.get(rule.number, 0),
        }


def apply_map(
    checkpoint: Checkpoint,
    layout_map: LayoutMap,
    values: Values,
    reading: Reading,
    shapes: Mapping[str, tuple[int, ...]],
) -> tuple[Checkpoint, AppliedMap]:
    """``checkpoint``, whose optimizer is keyed by name, with the names and tensors that ``layout_map`` makes of it.

    ``shapes``: of parameters, also of those whose model section is left out. Raises UsageError for a map that does not
    fit, SourceIncompleteError, and SourceUnsupportedError for tensors and states that cannot be rearranged so.
    """
    work = Work(checkpoint, values, reading, shapes)
    in_model = _matched(checkpoint, layout_map, Section.MODEL, work)
    in_optim = _matched(checkpoint, layout_map, Section.OPTIM, work) if layout_map.by_section else in_model
    uses = {(use.rule.number, *use.words.items()): use for use in (*in_model.uses, *in_optim.uses)}
    sections = [section for section in (Section.MODEL, Section.OPTIM) if checkpoint.has(section)]
    rules = [use.rule for use in uses.values()]
    names = names_of(checkpoint)
    left_out = set(map(clean, shapes)).difference(names)
    require_used(layout_map, rules, names, left_out, checkpoint.source, sections)
    model = None
    if checkpoint.model is not None:
        model = _mapped_model(checkpoint.model, _by_source(in_model), work)
    optim = None
    if checkpoint.optim is not None:
        optim = mapped_optimizer(checkpoint.optim, _by_source(in_optim), work)
    times: dict[int, int] = {}
    for rule in rules:
        times[rule.number] = times.get(rule.number, 0) + 1
    needed = dict.fromkeys(name for rule in rules for name in rule.value_names)
    applied = AppliedMap(layout_map, {name: values[name] for name in needed}, times)
    notes = [_note(applied, list(uses.values()), work), *work.notes]
    if checkpoint.model is not None and checkpoint.model.metadata is not None:
        notes.append(
            Note("dropped", "the module versions in the model's _metadata were left out: their keys no longer fit")
        )
    files = work.files()
    mapped = replace(checkpoint, files=files, model=model, optim=optim, units=None).without_order()
    return mapped.noted(*notes), applied


def _matched(checkpoint: Checkpoint, layout_map: LayoutMap, section: Section, work: Work) -> Matched:
    """The uses of the rules for one section; for both at once if each rule is for both."""
    if not layout_map.by_section:
        alone = checkpoint
    elif section is Section.MODEL:
        alone = replace(checkpoint, optim=None)
    else:
        alone = replace(checkpoint, model=None)
    rules = layout_map.of_section(section) if layout_map.by_section else layout_map
    matched = match_rules(rules, names_of(alone), checkpoint.source)
    made = [(name, use) for use in matched.uses for name in work.targets(use)]
    require_bijection(rules, made, matched.rest)
    require_scales(layout_map, matched, alone)
    return matched


def _by_source(matched: Matched) -> dict[str, Use]:
    return {name: use for use in matched.uses for name in use.sources.values()}


def _note(applied: AppliedMap, uses: Sequence[Use], work: Work) -> Note:
    layout_map = applied.layout_map
    if not uses:  # all rules are optional, or what they name was left out
        return Note("unused", f"{layout_map.name} had no effect: its rules name nothing of what is converted")
    changes = [f"{_names(list(use.sources.values()))} -> {_names(work.targets(use))}" for use in uses]
    how = " (its inverse)" if layout_map.inverted else ""
    before = sum(len(use.sources) for use in uses)
    after = sum(len(work.targets(use)) for use in uses)
    message = (
        f"{layout_map.name}{how} makes {plural(after, 'parameter')} of {before}: {some_of(changes, _KEYS_IN_NOTE)}"
    )
    return Note("mapped", message, keys=tuple(changes))


def _names(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} .. {names[-1]}"


def _mapped_model(model: ModelState, use_of: Mapping[str, Use], work: Work) -> ModelState:
    params: dict[str, Tensor | Value] = {}
    done: set[Use] = set()
    for name, leaf in model.params.items():
        use = use_of.get(name)
        if use is None:
            params[name] = leaf
        elif use not in done:
            done.add(use)
            params.update(_mapped_params(model, use, work))
    return ModelState(params)


def _mapped_params(model: ModelState, use: Use, work: Work) -> Iterator[tuple[str, Tensor | Value]]:
    """The entries of the model that ``use`` makes."""
    targets = work.targets(use)
    leaves: dict[Member, Tensor | Value] = {}
    for member, name in use.sources.items():
        if name not in model.params:
            raise work.refuse_state(name, "", "the optimizer has it, but the model does not", use)
        leaves[member] = model.params[name]
    if use.rule.renames_alone:
        yield from zip(targets, leaves.values(), strict=True)
        return
    family: Family = {}
    for member, leaf in leaves.items():
        if not isinstance(leaf, Tensor):
            raise work.refuse_state(use.sources[member], "", "it is not a tensor", use)
        family[member] = leaf
    if use.rule.copies == "untie":
        first, *others = targets
        work.notes += [
            Note("tied", f"{name} is added: it is tied to {first}, which has the states", name) for name in others
        ]
        yield from ((target, next(iter(family.values()))) for target in targets)
        return
    if use.rule.copies == "tie":
        yield targets[0], _tied(family, use, work)
        return
    made = work.run(use, family, "")
    yield from ((use.target(member), tensor) for member, tensor in made.items())


def _tied(family: Family, use: Use, work: Work) -> Tensor:
    """The first of tensors that are equal. Raises SourceUnsupportedError if they are not."""
    (first, tensor), *others = family.items()
    for member, other in others:
        if not work.reading.equal(tensor, other):
            raise SourceUnsupportedError(
                f"{use.sources[first]} and {use.sources[member]} differ, and {use.rule} makes one of them",
                file=work.checkpoint.source,
                key=use.sources[member],
                why="they were not tied in this job, or only the checkpoint's copies are: one of them would be lost",
                next_step="use a map without this rule",
            )
    return tensor
