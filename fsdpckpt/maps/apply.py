"""Applies a map to a checkpoint: to its model, and with it to the optimizer, whose states move with their parameters.

A state moves with its parameter if it has one element for each of the parameter's: it is rearranged as that is. Numbers
(``step``) have to be equal in all parameters that become one. Anything else is refused by name: half of a factor or of
a preconditioner belongs to nobody.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from fsdpckpt import flags
from fsdpckpt.errors import FsdpckptError, InternalError, NeedsInformationError, SourceUnsupportedError
from fsdpckpt.ir.checkpoint import Checkpoint, ModelState, Note, Section
from fsdpckpt.ir.dtypes import DTYPES
from fsdpckpt.ir.files import Inline, SourceFile
from fsdpckpt.ir.optimizer import BARE_VALUE, PARAM_NAMES, PARAMS, Optimizer, ParamKey, States, group_params
from fsdpckpt.ir.state_shapes import mirrors
from fsdpckpt.ir.table import names_of
from fsdpckpt.ir.tensors import Boxes, Chunks, Tensor
from fsdpckpt.ir.values import Key, Value, like
from fsdpckpt.maps.boxes import Rearranger
from fsdpckpt.maps.match import Matched, Use, match_rules, require_bijection, require_used
from fsdpckpt.maps.rules import LayoutMap
from fsdpckpt.maps.steps import Family, Member, StepError, Values
from fsdpckpt.text import plural, some_of

_KEYS_IN_NOTE = 5
_ANY_DTYPE = DTYPES["uint8"]  # of shapes without data


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
            "rules": [
                {
                    "number": rule.number,
                    "from": [pattern.text for pattern in rule.sources],
                    "to": [pattern.text for pattern in rule.targets],
                    "applied": self.times.get(rule.number, 0),
                }
                for rule in self.layout_map.rules
            ],
        }


@dataclass(frozen=True, slots=True)
class Reading:
    """What a map asks of data. ``number``: the bytes of a tensor without dimensions; ``equal``: whether two tensors
    hold the same bytes.
    """

    number: Callable[[Tensor], bytes]
    equal: Callable[[Tensor, Tensor], bool]


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
    work = _Work(checkpoint, values, reading, shapes)
    in_model = _matched(checkpoint, layout_map, Section.MODEL, work)
    in_optim = _matched(checkpoint, layout_map, Section.OPTIM, work) if layout_map.by_section else in_model
    uses = {(use.rule.number, *use.words.items()): use for use in (*in_model.uses, *in_optim.uses)}
    sections = [section for section in (Section.MODEL, Section.OPTIM) if checkpoint.has(section)]
    rules = [use.rule for use in uses.values()]
    require_used(layout_map, rules, names_of(checkpoint), checkpoint.source, sections)
    model = _mapped_model(checkpoint.model, _by_source(in_model), work) if checkpoint.model is not None else None
    optim = _mapped_optimizer(checkpoint.optim, _by_source(in_optim), work) if checkpoint.optim is not None else None
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


def _matched(checkpoint: Checkpoint, layout_map: LayoutMap, section: Section, work: _Work) -> Matched:
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
    return matched


def _by_source(matched: Matched) -> dict[str, Use]:
    return {name: use for use in matched.uses for name in use.sources.values()}


def _note(applied: AppliedMap, uses: Sequence[Use], work: _Work) -> Note:
    layout_map = applied.layout_map
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


class _Work:
    """Runs rules on tensors. ``notes``: what has to be said of it."""

    def __init__(
        self, checkpoint: Checkpoint, values: Values, reading: Reading, shapes: Mapping[str, tuple[int, ...]]
    ) -> None:
        self.checkpoint = checkpoint
        self.reading = reading
        self.notes: list[Note] = []
        self._values = values
        self._rearranger = Rearranger()
        self._shapes = shapes
        self._targets: dict[int, list[str]] = {}
        self._proved: set[str] | None = None
        self._numbers = bytearray()

    def files(self) -> tuple[SourceFile, ...]:
        """The files of the checkpoint that is made."""
        own = (Inline(bytes(self._numbers)),) if self._numbers else ()
        return (*self.checkpoint.files, *own)

    def copy_of(self, number: Tensor) -> Tensor:
        """A tensor without dimensions that has the same value and memory of its own.

        ``torch.save`` keeps what shares memory as one, and an optimizer would count the steps of all in one number.
        """
        place = Chunks.whole(file=len(self.checkpoint.files), offset=len(self._numbers), shape=())
        self._numbers += self.reading.number(number)
        return Tensor(number.dtype, (), place, number.sharded)

    def targets(self, use: Use) -> list[str]:
        """The names that ``use`` makes, in order."""
        key = id(use)
        if key not in self._targets:
            self._targets[key] = [use.target(member) for member in self._members(use)]
        return self._targets[key]

    def _members(self, use: Use) -> list[Member]:
        if use.rule.copies:
            several = len(use.rule.targets) > 1
            return [(position if several else None, None) for position in range(len(use.rule.targets))]
        if not use.rule.steps:
            return list(use.sources)
        outline = {member: _outline(self.shape(name)) for member, name in use.sources.items()}
        return sorted(self.run(use, outline, ""), key=lambda member: (member[1] or 0, member[0] or 0))

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a parameter: the model's, or that of its states."""
        shape = self._shapes.get(name)
        if shape is not None:
            return shape
        optim = self.checkpoint.optim
        states = optim.state.get(name, {}) if optim is not None else {}
        shapes = {
            leaf.shape for state, leaf in states.items() if isinstance(leaf, Tensor) and leaf.ndim and mirrors(state)
        }
        if len(shapes) != 1:
            raise NeedsInformationError(
                f"nothing says which shape {name} has: the model section is not there, and its states "
                f"{'have several' if shapes else 'show none'}",
                key=name,
                file=self.checkpoint.source,
                next_step="convert a checkpoint that has its model",
            )
        return shapes.pop()

    def run(self, use: Use, family: Family, state: str) -> Family:
        """The tensors that the steps of the rule make of ``family``. ``state``: of the optimizer, "" for parameters."""
        before = sum(tensor.numel for tensor in family.values())
        dtypes = {tensor.dtype.name: member for member, tensor in family.items()}
        if len(dtypes) > 1:
            listed = [f"{_key(use.sources[member], state)} is {dtype}" for dtype, member in dtypes.items()]
            raise self._refused(f"{use.rule} joins tensors of several dtypes", listed, use.sources[next(iter(family))])
        for step in use.rule.steps:
            try:
                family = step.run(family, self._rearranger, self._values)
            except StepError as error:
                name = use.sources.get(error.member, next(iter(use.sources.values())))
                raise self._refused(f"{_key(name, state)} does not fit {use.rule}", [error.what], name) from error
            except FsdpckptError:  # of a number that nothing gives
                raise
            except ValueError as error:
                raise self._refused(
                    f"{use.rule} cannot be applied", [str(error)], next(iter(use.sources.values()))
                ) from error
        if sum(tensor.numel for tensor in family.values()) != before:
            raise InternalError(f"{use.rule} makes other elements of {before}")
        return {member: self._rearranger.new(tensor) for member, tensor in family.items()}

    def _refused(self, what: str, details: Sequence[str], key: str) -> SourceUnsupportedError:
        return SourceUnsupportedError(
            what,
            details=details,
            file=self.checkpoint.source,
            key=key,
            why="the map, or a value that it was given, is of another model",
            next_step=f"see the shapes with {flags.command('inspect', self.checkpoint.source)}, and correct the map",
        )

    def refuse_state(self, name: str, state: str, why: str, use: Use) -> SourceUnsupportedError:
        return SourceUnsupportedError(
            f"{_key(name, state)} cannot be moved with its parameter, which {use.rule} rearranges",
            file=self.checkpoint.source,
            key=_key(name, state),
            why=why,
            next_step=f"{flags.only('model')} converts the model alone",
        )

    def is_elementwise(self, state: str) -> bool:
        """Whether every state of this name has one element for each of its parameter's, so far as shapes can show it.

        One whose shape only happens to be that of a square matrix, or of a vector, shows nothing.
        """
        if mirrors(state):
            return True
        if self._proved is None:
            self._proved = self._proved_states()
        return state in self._proved

    def _proved_states(self) -> set[str]:
        proved: set[str] = set()
        disproved: set[str] = set()
        optim = self.checkpoint.optim
        for name, states in optim.state.items() if optim is not None else ():
            shape = self._shapes.get(str(name))
            for state, leaf in states.items():
                if not isinstance(leaf, Tensor) or not leaf.ndim or shape is None:
                    continue
                if leaf.shape != shape:
                    disproved.add(state)
                elif len(set(shape)) > 1:
                    proved.add(state)
        return proved - disproved


def _key(name: str, state: str) -> str:
    return f"{name}.{state}" if state else name


def _outline(shape: tuple[int, ...]) -> Tensor:
    """A tensor of ``shape`` without chunks: it shows what steps make of shapes."""
    none = np.zeros(0, np.int64)
    boxes = np.zeros((0, len(shape)), np.int64)
    return Tensor(_ANY_DTYPE, shape, Chunks(none, none, none, Boxes(boxes, boxes, boxes)))


def _mapped_model(model: ModelState, use_of: Mapping[str, Use], work: _Work) -> ModelState:
    params: dict[str, Tensor | Value] = {}
    done: set[int] = set()
    for name, leaf in model.params.items():
        use = use_of.get(name)
        if use is None:
            params[name] = leaf
        elif id(use) not in done:
            done.add(id(use))
            params.update(_mapped_params(model, use, work))
    return ModelState(params)


def _mapped_params(model: ModelState, use: Use, work: _Work) -> Iterator[tuple[str, Tensor | Value]]:
    """The entries of the model that ``use`` makes."""
    targets = work.targets(use)
    leaves: dict[Member, Tensor | Value] = {}
    for member, name in use.sources.items():
        if name not in model.params:
            raise work.refuse_state(name, "", "the optimizer has it, and the model has not", use)
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
        yield from ((target, next(iter(family.values()))) for target in targets)
        return
    if use.rule.copies == "tie":
        yield targets[0], _tied(family, use, work)
        return
    made = work.run(use, family, "")
    yield from ((use.target(member), tensor) for member, tensor in made.items())


def _tied(family: Family, use: Use, work: _Work) -> Tensor:
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


def _mapped_optimizer(optim: Optimizer, use_of: Mapping[str, Use], work: _Work) -> Optimizer:
    """The optimizer with the members, states and groups of the new parameters."""
    if optim.key_type == "id":
        raise InternalError("a map is applied to an optimizer that is keyed by name")
    names = [str(key) for key in optim.all_keys() if key in use_of]
    uses = {id(use_of[name]): use_of[name] for name in names}
    group_of = optim.group_of()
    for use in uses.values():
        _require_one_group(use, optim, group_of, work)
    state: dict[ParamKey, States] = {}
    done: set[int] = set()
    for key, states in optim.state.items():
        moved = use_of.get(key) if isinstance(key, str) else None
        if moved is None:
            state[key] = states
        elif id(moved) not in done:
            done.add(id(moved))
            state.update(_mapped_states(optim, moved, work))
    new_names = _NewNames(use_of, work)
    groups = None
    if optim.param_groups is not None:
        groups = [_mapped_group(group, new_names) for group in optim.param_groups]
    return Optimizer.of(state, groups, optim.extra)


def _require_one_group(use: Use, optim: Optimizer, group_of: Mapping[ParamKey, int], work: _Work) -> None:
    """Raises SourceUnsupportedError unless the optimizer trains all parameters that become one, in one group."""
    members = list(use.sources.values())
    if use.rule.renames_alone or len(members) == 1:
        return
    known = set(optim.all_keys())
    if use.rule.copies == "tie":
        trained = [name for name in members if name in known]
        if len(trained) < 2:
            return
        raise work.refuse_state(
            trained[1], "", f"{trained[0]} has states of its own, and only one of both can stay", use
        )
    for name in members:
        if name not in known:
            other = next(each for each in members if each in known)
            raise work.refuse_state(
                other, "", f"the optimizer does not train {name}, which becomes a part of the same parameter", use
            )
    groups = {group_of.get(name): name for name in members}
    if len(groups) > 1:
        (first, name), (second, other), *_ = groups.items()
        why = f"{name} is in param group {first} and {other} in {second}; one parameter has one learning rate"
        raise work.refuse_state(other, "", why, use)


def _mapped_states(optim: Optimizer, use: Use, work: _Work) -> Iterator[tuple[ParamKey, States]]:
    """The entries of ``state`` that ``use`` makes."""
    targets = work.targets(use)
    if use.rule.renames_alone:
        yield from (
            (target, optim.state[name])
            for target, name in zip(targets, use.sources.values(), strict=True)
            if name in optim.state
        )
        return
    if use.rule.copies:
        present = [name for name in use.sources.values() if name in optim.state]
        yield from ((targets[0], optim.state[name]) for name in present[:1])
        return
    entries = {member: optim.state.get(name, {}) for member, name in use.sources.items()}
    made: dict[str, States] = {target: {} for target in targets}
    first = next(iter(entries.values()))
    for member, entry in entries.items():
        for odd in first.keys() ^ entry.keys():
            has, lacks = (next(iter(entries)), member) if odd in first else (member, next(iter(entries)))
            raise work.refuse_state(use.sources[has], odd, f"{use.sources[lacks]} has no such state", use)
    for state in first:
        leaves = {member: entry[state] for member, entry in entries.items()}
        for target, leaf in _mapped_state(state, leaves, use, work):
            made[target][state] = leaf
    if first:
        yield from made.items()


def _mapped_state(
    state: str, leaves: Mapping[Member, Tensor | Value], use: Use, work: _Work
) -> Iterator[tuple[str, Tensor | Value]]:
    """One state of the new parameters."""
    family: Family = {}
    for member, leaf in leaves.items():
        name = use.sources[member]
        if isinstance(leaf, Tensor) and leaf.shape == work.shape(name) and work.is_elementwise(state):
            family[member] = leaf
        elif not _is_number(leaf) or state == BARE_VALUE or (mirrors(state) and work.shape(name)):
            raise work.refuse_state(name, state, "it does not have one element for each of the parameter's", use)
    if len(family) == len(leaves):
        made = work.run(use, family, state)
        yield from ((use.target(member), tensor) for member, tensor in made.items())
        return
    first = next(iter(leaves))
    for member, leaf in leaves.items():
        if member in family or not _same_number(leaves[first], leaf, work):
            why = f"it differs from that of {use.sources[first]}, and one parameter has one value"
            raise work.refuse_state(use.sources[member], state, why, use)
    kept = leaves[first]
    for position, target in enumerate(work.targets(use)):
        yield target, work.copy_of(kept) if position and isinstance(kept, Tensor) else kept


def _is_number(leaf: Tensor | Value) -> bool:
    if isinstance(leaf, Tensor):
        return not leaf.ndim
    return leaf is None or isinstance(leaf, (int, float, bool))


def _same_number(first: Tensor | Value, other: Tensor | Value, work: _Work) -> bool:
    if first is other:
        return True
    if isinstance(first, Tensor) and isinstance(other, Tensor):
        return first.dtype is other.dtype and work.reading.number(first) == work.reading.number(other)
    return type(first) is type(other) and first == other


class _NewNames:
    """The new names in place of old ones, in lists of them."""

    def __init__(self, use_of: Mapping[str, Use], work: _Work) -> None:
        self._use_of = use_of
        self._work = work

    def of_list(self, names: Sequence[ParamKey]) -> list[ParamKey]:
        """The names that the parameters ``names`` become: those of several at the place of the first."""
        result: list[ParamKey] = []
        done: set[int] = set()
        for name in names:
            use = self._use_of.get(name) if isinstance(name, str) else None
            if use is None:
                result.append(name)
            elif use.rule.renames_alone:
                position = list(use.sources.values()).index(str(name))
                result.append(self._work.targets(use)[position])
            elif id(use) not in done:
                done.add(id(use))
                targets = self._work.targets(use)
                result += targets[:1] if use.rule.copies else targets
        return result


def _mapped_group(group: Mapping[Key, Value], new_names: _NewNames) -> dict[Key, Value]:
    changed: dict[Key, Value] = dict(group)
    params = group_params(group)
    if params is not None:
        changed[PARAMS] = list[Value](new_names.of_list(params))
    words = group.get(PARAM_NAMES)
    if isinstance(words, (list, tuple)) and all(isinstance(word, str) for word in words):
        changed[PARAM_NAMES] = list[Value](new_names.of_list([str(word) for word in words]))
    return like(group, changed)
