"""What a map makes of an optimizer: its states move with their parameters, its groups list the new ones.

A state moves with its parameter if it has one element for each of the parameter's: it is rearranged as that is. Numbers
(``step``) have to be equal in all parameters that become one. Anything else is refused by name: half of a factor or of
a preconditioner belongs to nobody.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from fsdpckpt.errors import InternalError
from fsdpckpt.ir.optimizer import (
    PARAM_NAMES,
    PARAMS,
    Optimizer,
    OwnValue,
    ParamKey,
    States,
    StatesOrValue,
    group_params,
)
from fsdpckpt.ir.state_shapes import mirrors, spanning_key
from fsdpckpt.ir.tensors import Tensor
from fsdpckpt.ir.values import Key, Value, like
from fsdpckpt.maps.match import Use
from fsdpckpt.maps.steps import Family, Member
from fsdpckpt.maps.work import Work


def mapped_optimizer(optim: Optimizer, use_of: Mapping[str, Use], work: Work) -> Optimizer:
    """The optimizer with the members, states and groups of the new parameters."""
    if optim.key_type == "id":
        raise InternalError("a map is applied to an optimizer that is keyed by name")
    names = [str(key) for key in optim.all_keys() if key in use_of]
    uses = dict.fromkeys(use_of[name] for name in names)
    group_of, trained = optim.group_of(), set(optim.all_keys())
    for use in uses:
        _require_one_group(use, trained, group_of, work)
    _refuse_spanning(optim, uses, work)
    state: dict[ParamKey, StatesOrValue] = {}
    done: set[Use] = set()
    for key, entry in optim.items():
        moved = use_of.get(key) if isinstance(key, str) else None
        if moved is None:
            state[key] = entry
        elif isinstance(entry, OwnValue) and moved.rule.renames_alone:
            state[work.new_name(moved, str(key))] = entry
        elif isinstance(entry, OwnValue):
            raise work.refuse_state(str(key), "", "it is one value, which does not belong to elements", moved)
        elif moved not in done:
            done.add(moved)
            state.update(_mapped_states(optim, moved, work))
    new_names = _NewNames(use_of, work)
    groups = None
    if optim.param_groups is not None:
        groups = [_mapped_group(group, new_names) for group in optim.param_groups]
    return Optimizer.of(state, groups, optim.extra)


def _refuse_spanning(optim: Optimizer, uses: Iterable[Use], work: Work) -> None:
    """Raises SourceUnsupportedError if a rule rearranges parameters of which another's state is one vector of all."""
    rearranging = next((use for use in uses if not use.rule.renames_alone), None)
    if rearranging is None:
        return
    found = spanning_key(optim)
    if found is not None:
        key, state = found
        why = f"it joins the elements of all parameters, {next(iter(rearranging.sources.values()))} among them"
        raise work.refuse_state(str(key), state, why, rearranging)


def _require_one_group(use: Use, known: Collection[ParamKey], group_of: Mapping[ParamKey, int], work: Work) -> None:
    """Raises SourceUnsupportedError unless the optimizer trains all parameters that become one, in one group.

    ``known``: the keys of all that it trains.
    """
    members = list(use.sources.values())
    if use.rule.renames_alone or len(members) == 1:
        return
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


def _mapped_states(optim: Optimizer, use: Use, work: Work) -> Iterator[tuple[ParamKey, States]]:
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
        for odd in (key for key in (*first, *entry) if key not in first or key not in entry):
            has, lacks = (next(iter(entries)), member) if odd in first else (member, next(iter(entries)))
            raise work.refuse_state(use.sources[has], odd, f"{use.sources[lacks]} has no such state", use)
    for state in first:
        leaves = {member: entry[state] for member, entry in entries.items()}
        for target, leaf in _mapped_state(state, leaves, use, work):
            made[target][state] = leaf
    if first:
        yield from made.items()


def _mapped_state(
    state: str, leaves: Mapping[Member, Tensor | Value], use: Use, work: Work
) -> Iterator[tuple[str, Tensor | Value]]:
    """One state of the new parameters."""
    family: Family = {}
    for member, leaf in leaves.items():
        name = use.sources[member]
        if isinstance(leaf, Tensor) and leaf.shape == work.shape(name) and work.is_elementwise(state):
            family[member] = leaf
        elif not (_is_number(leaf) and work.is_number(state)) or _sums_up(state, leaf, work.shape(name)):
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


def _sums_up(state: str, leaf: Tensor | Value, shape: tuple[int, ...]) -> bool:
    """Whether one number stands for all elements of a parameter, as NovoGrad's second moment: a part has another."""
    return mirrors(state) and bool(shape) and leaf is not None


def _is_number(leaf: Tensor | Value) -> bool:
    if isinstance(leaf, Tensor):
        return leaf.numel == 1
    return leaf is None or isinstance(leaf, (int, float, bool))


def _same_number(first: Tensor | Value, other: Tensor | Value, work: Work) -> bool:
    if first is other:
        return True
    if isinstance(first, Tensor) and isinstance(other, Tensor):
        return first.dtype is other.dtype and work.reading.number(first) == work.reading.number(other)
    return type(first) is type(other) and first == other


class _NewNames:
    """The new names in place of old ones, in lists of them."""

    def __init__(self, use_of: Mapping[str, Use], work: Work) -> None:
        self._use_of = use_of
        self._work = work

    def of_list(self, names: Sequence[ParamKey]) -> list[ParamKey]:
        """The names that the parameters ``names`` become: those of several at the place of the first."""
        result: list[ParamKey] = []
        done: set[Use] = set()
        for name in names:
            use = self._use_of.get(name) if isinstance(name, str) else None
            if use is None:
                result.append(name)
            elif use.rule.renames_alone:
                result.append(self._work.new_name(use, str(name)))
            elif use not in done:
                done.add(use)
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
