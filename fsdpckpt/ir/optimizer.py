"""An optimizer as its members: the parameters that it trains, in the order in which the source's own optimizer lists
them.

A member has a number and a key. The key is an id or a name, and stands in one place; groups and states refer to the
number. The dicts of ``torch.optim`` (``state``, ``param_groups``) are ways of reading and writing an optimizer.
``ir.table`` ties members to the parameters of a model.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from typing import Final, Literal, NamedTuple, TypeAlias

from fsdpckpt.ir import KeyType
from fsdpckpt.ir.tensors import Tensor
from fsdpckpt.ir.values import Key, Value, like, with_tensors

ParamKey: TypeAlias = int | str
MemberNumber: TypeAlias = int
States: TypeAlias = dict[str, Tensor | Value]
"""The states of one parameter by name."""


@dataclass(frozen=True, slots=True)
class OwnValue:
    """A value that a user put into an optimizer's ``state`` in place of a parameter's states.

    TorchRec's keyed optimizers allow it. ``_optim_state_dict`` copies such a value, and so do all writers.
    """

    value: Tensor | Value


StatesOrValue: TypeAlias = States | OwnValue
"""What ``state`` of a state dict has under one key."""

PARAMS: Final = "params"
PARAM_NAMES: Final = "param_names"


@dataclass(frozen=True, slots=True)
class ParamGroup:
    """One param group. ``members``: None if it has no list of parameters, or the list was not read.

    ``settings``: its entries in the source's order, without the list, at whose place is None. ``form``: whether the
    list was a list or a tuple.
    """

    members: tuple[MemberNumber, ...] | None
    settings: Mapping[Key, Value]
    form: Literal["list", "tuple"] = "list"

    def written(self, keys: Sequence[ParamKey]) -> dict[Key, Value]:
        """The group as ``torch.optim`` has it. ``keys``: of all members."""
        if self.members is None:
            return like(self.settings, self.settings)
        listed = sequence([keys[member] for member in self.members], self.form)
        return like(self.settings, {**self.settings, PARAMS: listed})

    def words(self) -> Sequence[Value]:
        """Its ``param_names``, strings or not; empty if it has none."""
        words = self.settings.get(PARAM_NAMES)
        return words if isinstance(words, (list, tuple)) else ()

    def names(self) -> list[str]:
        """Its ``param_names`` as text."""
        return list(map(str, self.words()))

    def map_tensors(self, change: Callable[[Tensor], Tensor]) -> ParamGroup:
        """The group with ``change`` applied to every tensor in its settings."""
        return replace(self, settings=like(self.settings, with_tensors(dict(self.settings), change)))

    def with_setting(self, name: Key, value: Value) -> ParamGroup:
        """The group with another value of one setting."""
        return replace(self, settings=like(self.settings, {**self.settings, name: value}))


@dataclass(frozen=True, slots=True)
class RankMembers:
    """What the groups of the optimizers on ``ranks`` list, in the order in which each of these ranks counts its ids, if
    it is not what ``Optimizer.groups`` list: another order, or fewer members.
    """

    ranks: tuple[int, ...]
    groups: tuple[tuple[MemberNumber, ...], ...]


class StateEntry(NamedTuple):
    """One entry of ``state``, in the source's order. ``member``: None for one that a user added, under ``key``.

    ``value``: what the user put in place of states, of which there are none then.
    """

    member: MemberNumber | None
    states: States
    key: ParamKey | None = None
    value: OwnValue | None = None


@dataclass(frozen=True)  # without slots: its views are made once
class Optimizer:
    """``keys``: of the members, by number. ``groups``: None if the source has no groups.

    ``extra``: top-level entries that a user added beside ``state`` and ``param_groups``. ``orders``: of the ranks whose
    own optimizers number the members otherwise; the keys here are the same on all ranks. ``rebuilt``: whether groups
    were made again from settings, so that the source's own may have been more, and list no order. ``doubt``: why its
    keys may be those of other parameters; "" if they are the source's, or proved.
    """

    keys: tuple[ParamKey, ...]
    groups: tuple[ParamGroup, ...] | None
    entries: tuple[StateEntry, ...]
    extra: dict[Key, Value] = field(default_factory=dict)
    orders: tuple[RankMembers, ...] = ()
    rebuilt: bool = False
    doubt: str = ""

    @classmethod
    def of(
        cls,
        state: Mapping[ParamKey, StatesOrValue],
        param_groups: Iterable[Mapping[Key, Value]] | None = None,
        extra: dict[Key, Value] | None = None,
    ) -> Optimizer:
        """The optimizer of a state dict. A value in ``state`` that is no dict of states is an ``OwnValue``.

        Its members are the parameters that the groups list; without any, those that have states, or None for them.
        Where groups list parameters, ``state`` may have other entries, which a user added.
        """
        listed = None if param_groups is None else [(group, group_params(group)) for group in param_groups]
        keys: dict[ParamKey, None] = dict.fromkeys(key for _, params in listed or () for key in params or ())
        if not keys:
            keys = dict.fromkeys(key for key, entry in state.items() if not _is_of_user(entry))
        number_of = {key: number for number, key in enumerate(keys)}
        groups = None
        if listed is not None:
            groups = tuple(_group(group, params, number_of) for group, params in listed)
        return cls(tuple(keys), groups, _entries(state, number_of), {} if extra is None else extra)

    @cached_property
    def state(self) -> Mapping[ParamKey, States]:
        """The states of each parameter by its key, and the dicts of states that users added."""
        return {key: entry for key, entry in self.items() if not isinstance(entry, OwnValue)}

    def items(self) -> Iterator[tuple[ParamKey, StatesOrValue]]:
        """What ``state`` of the state dict has, in its order: also the values that users put in place of states."""
        for member, states, own_key, value in self.entries:
            key = own_key if member is None else self.keys[member]
            if key is not None:
                yield key, states if value is None else value

    def stored_state(self) -> dict[ParamKey, States | Tensor | Value]:
        """``state`` of the state dict."""
        return {key: entry.value if isinstance(entry, OwnValue) else entry for key, entry in self.items()}

    @cached_property
    def param_groups(self) -> list[dict[Key, Value]] | None:
        """``param_groups`` of the state dict, each with its list ``params``."""
        return None if self.groups is None else [group.written(self.keys) for group in self.groups]

    @property
    def key_type(self) -> KeyType | None:
        """``"id"`` if the keys of all members are ints, ``"name"`` if not, None if there are none."""
        if not self.keys:
            return None
        return "id" if all(isinstance(key, int) for key in self.keys) else "name"

    def in_groups(self) -> list[list[ParamKey]]:
        """The keys of each group's members, in its order; none for a group without a list."""
        return [[self.keys[member] for member in group.members or ()] for group in self.groups or ()]

    def names_in_groups(self) -> list[list[str]]:
        """``in_groups`` of an optimizer that is keyed by name; ids as text."""
        return [list(map(str, keys)) for keys in self.in_groups()]

    def ids_in_groups(self) -> list[list[int]]:
        """``in_groups`` of an optimizer that is keyed by id."""
        groups: list[list[int]] = []
        for keys in self.in_groups():
            groups.append([key for key in keys if isinstance(key, int)])
        return groups

    def group_of(self) -> dict[ParamKey, int]:
        """The number of the group that lists each key."""
        return {key: number for number, keys in enumerate(self.in_groups()) for key in keys}

    def grouped_keys(self) -> list[ParamKey]:
        """The keys that the groups list, group by group. A key that two groups list appears twice."""
        return [key for keys in self.in_groups() for key in keys]

    def all_keys(self) -> list[ParamKey]:
        """Every key of ``state`` and of the groups, once."""
        return list(dict.fromkeys((*(key for key, _ in self.items()), *self.grouped_keys())))

    def counted(self) -> dict[MemberNumber, ParamKey]:
        """The ids that ``torch.optim`` gives the members: it counts group by group."""
        if self.groups is None:
            return {number: number for number in range(len(self.keys))}
        listed = dict.fromkeys(member for group in self.groups for member in group.members or ())
        return {member: number for number, member in enumerate(listed)}

    def map_tensors(self, change: Callable[[Tensor], Tensor]) -> Optimizer:
        """The optimizer with ``change`` applied to every tensor but those in param groups."""
        entries = (entry._replace(states=with_tensors(entry.states, change)) for entry in self.entries)
        changed = replace(self, entries=tuple(entries), extra=with_tensors(self.extra, change))
        return changed.map_own_values(change)

    def map_own_values(self, change: Callable[[Tensor], Tensor]) -> Optimizer:
        """The optimizer with ``change`` applied to every tensor in the values that users put in place of states."""
        entries: list[StateEntry] = []
        for entry in self.entries:
            if entry.value is None:
                entries.append(entry)
            else:
                entries.append(entry._replace(value=OwnValue(with_tensors(entry.value.value, change))))
        return replace(self, entries=tuple(entries))

    def with_state(self, state: Mapping[ParamKey, States]) -> Optimizer:
        """The optimizer with other states. Its members, and the values that users put in place of states, stay what
        they are.
        """
        number_of = {key: number for number, key in enumerate(self.keys)}
        return replace(self, entries=_entries(self._with_own_values(state), number_of))

    def _with_own_values(self, state: Mapping[ParamKey, States]) -> dict[ParamKey, StatesOrValue]:
        """``state`` with the values that users put in place of states, each after the states that it followed."""
        following: dict[ParamKey | None, list[tuple[ParamKey, OwnValue]]] = {}
        last: ParamKey | None = None
        for key, entry in self.items():
            if isinstance(entry, OwnValue):
                following.setdefault(last, []).append((key, entry))
            elif key in state:
                last = key
        entries: dict[ParamKey, StatesOrValue] = dict(following.get(None, ()))
        for key, states in state.items():
            entries[key] = states
            entries.update(following.get(key, ()))
        return entries

    def with_groups(self, param_groups: Iterable[Mapping[Key, Value]] | None) -> Optimizer:
        """The optimizer with other groups, which may list other members."""
        return self.remade(dict(self.items()), param_groups, self.extra)

    def remade(
        self,
        state: Mapping[ParamKey, StatesOrValue],
        param_groups: Iterable[Mapping[Key, Value]] | None,
        extra: dict[Key, Value],
    ) -> Optimizer:
        """An optimizer with other content, of which holds what is known of this one."""
        return replace(Optimizer.of(state, param_groups, extra), rebuilt=self.rebuilt, doubt=self.doubt)

    def renamed(self, names: Mapping[ParamKey, ParamKey]) -> Optimizer:
        """The optimizer with new keys, without the parameters that ``names`` (old to new) lacks.

        ``param_names`` in the groups are not keys: they keep their words.
        """
        gone = {number for number, key in enumerate(self.keys) if key not in names}
        users = [entry.key for entry in self.entries if entry.key is not None and entry.key not in names]
        kept = self.without(gone, users) if gone or users else self
        entries: list[StateEntry] = []
        for entry in kept.entries:
            entries.append(entry if entry.key is None else entry._replace(key=names[entry.key]))
        return replace(kept, keys=tuple(names[key] for key in kept.keys), entries=tuple(entries))

    def without(self, gone: Collection[MemberNumber], users: Collection[ParamKey] = ()) -> Optimizer:
        """The optimizer without the members ``gone``, and without the entries ``users`` that a user added.

        ``param_names`` that are as many as the members of their group lose those that stand beside the lost ones.
        """
        kept = [number for number in range(len(self.keys)) if number not in gone]
        new = {old: number for number, old in enumerate(kept)}
        entries = [
            entry._replace(member=new[entry.member]) if entry.member is not None else entry
            for entry in self.entries
            if (entry.key not in users if entry.member is None else entry.member in new)
        ]
        groups = None if self.groups is None else tuple(_less(group, new) for group in self.groups)
        return replace(
            self,
            keys=tuple(self.keys[number] for number in kept),
            groups=groups,
            entries=tuple(entries),
            orders=renumbered(self.orders, {old: (number,) for old, number in new.items()}),
        )

    def with_orders(self, by_rank: Mapping[int, Sequence[Sequence[ParamKey]]]) -> Optimizer:
        """The optimizer as one whose members the ranks of ``by_rank`` list in these groups, by the keys here."""
        number_of = {key: number for number, key in enumerate(self.keys)}
        ranks_of: dict[tuple[tuple[MemberNumber, ...], ...], list[int]] = {}
        for rank, groups in by_rank.items():
            listed: list[tuple[MemberNumber, ...]] = []
            for keys in groups:
                listed.append(tuple(number_of[key] for key in keys if key in number_of))
            ranks_of.setdefault(tuple(listed), []).append(rank)
        orders = (RankMembers(tuple(ranks), members) for members, ranks in ranks_of.items())
        return replace(self, orders=tuple(orders))


def renumbered(
    orders: Iterable[RankMembers], new: Mapping[MemberNumber, Sequence[MemberNumber]]
) -> tuple[RankMembers, ...]:
    """``orders`` with what became of each member in its place; a member that ``new`` lacks is gone."""
    changed: list[RankMembers] = []
    for order in orders:
        groups: list[tuple[MemberNumber, ...]] = []
        for group in order.groups:
            groups.append(tuple(chain.from_iterable(new.get(member, ()) for member in group)))
        changed.append(replace(order, groups=tuple(groups)))
    return tuple(changed)


def group_params(group: Mapping[Key, Value]) -> list[ParamKey] | None:
    """The parameter keys that one param group of a state dict lists; None if it has no list of keys."""
    params = group.get(PARAMS)
    if not isinstance(params, (list, tuple)):
        return None
    keys = [key for key in params if isinstance(key, (int, str))]
    return keys if len(keys) == len(params) else None


def sequence(items: Sequence[Value], form: Literal["list", "tuple"]) -> Value:
    """``items`` as a list or a tuple."""
    return tuple(items) if form == "tuple" else list(items)


def form_of(value: Value) -> Literal["list", "tuple"]:
    """What ``sequence`` makes a value like ``value`` from."""
    return "tuple" if isinstance(value, tuple) else "list"


def _group(
    group: Mapping[Key, Value], params: Sequence[ParamKey] | None, number_of: Mapping[ParamKey, MemberNumber]
) -> ParamGroup:
    if params is None:
        return ParamGroup(None, group)
    settings: dict[Key, Value] = like(group, {**group, PARAMS: None})
    return ParamGroup(tuple(number_of[key] for key in params), settings, form_of(group[PARAMS]))


def _is_of_user(entry: StatesOrValue) -> bool:
    return isinstance(entry, OwnValue) and entry.value is not None


def _entries(
    state: Mapping[ParamKey, StatesOrValue], number_of: Mapping[ParamKey, MemberNumber]
) -> tuple[StateEntry, ...]:
    entries = []
    for key, entry in state.items():
        member = number_of.get(key)
        own = entry if isinstance(entry, OwnValue) else None
        states = {} if isinstance(entry, OwnValue) else entry
        entries.append(StateEntry(member, states, key if member is None else None, own))
    return tuple(entries)


def _less(group: ParamGroup, new: Mapping[MemberNumber, MemberNumber]) -> ParamGroup:
    """``group`` of those members that have a ``new`` number."""
    if group.members is None:
        return group
    members, words = group.members, group.words()
    if words and len(words) == len(members):
        beside = [word for member, word in zip(members, words, strict=True) if member in new]
        group = group.with_setting(PARAM_NAMES, sequence(beside, form_of(group.settings[PARAM_NAMES])))
    return replace(group, members=tuple(new[member] for member in members if member in new))
