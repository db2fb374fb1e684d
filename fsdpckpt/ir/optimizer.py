"""An optimizer as groups of rows: its members, in the order in which the source's own optimizer lists them.

A *member* is one parameter of the optimizer. It is tied to a row of the table (``ir.parameters``), or *open*: keyed by
an id that nothing names yet. An id is the member's position, not its identity, and a name is its row's: both are ways
of writing.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Literal, TypeAlias

from fsdpckpt.ir.checkpoint import Checkpoint, OptimState, ParamKey, group_params
from fsdpckpt.ir.names import clean
from fsdpckpt.ir.parameters import Parameters, Row
from fsdpckpt.ir.tensors import Tensor
from fsdpckpt.ir.values import Key, Value

MemberNumber: TypeAlias = int

_PARAMS, _NAMES = "params", "param_names"
_DISTRIBUTED = "module."


@dataclass(slots=True, eq=False)  # Final, not frozen: there are many
class Member:
    """One parameter of the optimizer. ``key``: its id or name in the source. ``row``: None while it is open."""

    key: Final[ParamKey]
    row: Final[Row | None]

    @property
    def open(self) -> bool:
        return self.row is None


@dataclass(frozen=True, slots=True)
class Word:
    """One entry of a group's ``param_names``. ``row``: the parameter that it names, which ``named`` was the name of."""

    text: str
    row: Row
    named: str

    def written(self, parameters: Parameters) -> str:
        """The entry as it is written: prefixes that the source put before the name stay before a new one."""
        name = parameters.rows[self.row].name
        if name == self.named:
            return self.text
        return self.text.removesuffix(self.named) + name if self.text.endswith(self.named) else name


@dataclass(frozen=True, slots=True)
class Group:
    """One param group. ``members``: None if it has no list of parameters. ``words``: its ``param_names``, if each is a
    name; else they are a setting like any other.

    ``settings``: every entry in the source's order, lists included. ``form``, ``words_form``: whether these were lists
    or tuples.
    """

    members: tuple[MemberNumber, ...] | None
    settings: Mapping[Key, Value]
    form: Literal["list", "tuple"] = "list"
    words: tuple[Word, ...] | None = None
    words_form: Literal["list", "tuple"] = "list"

    def written(self, keys: Mapping[MemberNumber, ParamKey], parameters: Parameters) -> dict[Key, Value]:
        """The group as ``torch.optim`` has it, with these keys of its members."""
        group: dict[Key, Value] = dict(self.settings)
        if self.members is not None:
            group[_PARAMS] = _sequence([keys[member] for member in self.members], self.form)
        if self.words is not None:
            group[_NAMES] = _sequence([word.written(parameters) for word in self.words], self.words_form)
        return group


@dataclass(slots=True, eq=False)  # Final, not frozen: there are many
class Entry:
    """One entry of ``state``, in the source's order. ``member``: None for one that a user added; beside parameters that
    have names it has a name too, that of ``row``.
    """

    key: Final[ParamKey]
    member: Final[MemberNumber | None]
    states: Final[dict[str, Tensor | Value]]
    row: Final[Row | None] = None


@dataclass(frozen=True, slots=True)
class Optimizer:
    """Members, the groups that list them (None if the source has no groups), and their states.

    ``extra``: what a user added beside ``state`` and ``param_groups``.
    """

    members: tuple[Member, ...]
    groups: tuple[Group, ...] | None
    entries: tuple[Entry, ...]
    extra: dict[Key, Value] = field(default_factory=dict)

    def column(self, state: str) -> dict[MemberNumber, Tensor | Value]:
        """One state of every member that has it."""
        return {
            entry.member: entry.states[state]
            for entry in self.entries
            if entry.member is not None and state in entry.states
        }

    def open_members(self) -> Iterator[MemberNumber]:
        """The members that are not tied to a row."""
        return (number for number, member in enumerate(self.members) if member.open)

    def in_order(self) -> list[MemberNumber]:
        """The members group by group, each once: the order in which ``torch.optim`` counts ids."""
        if self.groups is None:
            return list(range(len(self.members)))
        return list(dict.fromkeys(member for group in self.groups for member in group.members or ()))

    def counted(self) -> dict[MemberNumber, ParamKey]:
        """The ids that ``torch.optim`` gives the members."""
        return {member: number for number, member in enumerate(self.in_order())}

    def names(self, parameters: Parameters) -> dict[MemberNumber, ParamKey]:
        """Each member's name; an open one keeps its key."""
        return {
            number: member.key if member.row is None else parameters.rows[member.row].name
            for number, member in enumerate(self.members)
        }

    def as_in_source(self, parameters: Parameters) -> dict[MemberNumber, ParamKey]:
        """Keys of the type that the source has: its ids, or the names that the rows have now."""
        names = self.names(parameters)
        return {
            number: names[number] if isinstance(member.key, str) else member.key
            for number, member in enumerate(self.members)
        }

    def reordered(self, members: Sequence[Sequence[MemberNumber]]) -> Optimizer:
        """The groups with their members in the order of ``members``, one list for each group that has one.

        ``param_names`` that were listed in the order of the members follow them.
        """
        lists = iter(members)
        groups = []
        for group in self.groups or ():
            if group.members is None:
                groups.append(group)
                continue
            listed = tuple(next(lists))
            words = group.words
            if words is not None and self._beside(group):
                word_of = dict(zip(group.members, words, strict=True))
                words = tuple(word_of[member] for member in listed)
            groups.append(replace(group, members=listed, words=words))
        return replace(self, groups=tuple(groups) if self.groups is not None else None)

    def _beside(self, group: Group) -> bool:
        """Whether each word stands beside the member that it names. Not if both name the same parameters in different
        orders: ``FSDP.rekey_optim_state_dict`` sorts ``params`` alone.
        """
        rows = [self.members[member].row for member in group.members or ()]
        words = [word.row for word in group.words or ()]
        if len(rows) != len(words):
            return False
        return rows == words or set(rows) != set(words)

    def without(self, dropped: Collection[Row]) -> Optimizer:
        """The optimizer without the members that are tied to rows ``dropped``."""
        gone = {number for number, member in enumerate(self.members) if member.row in dropped}
        groups = None if self.groups is None else tuple(self._less(group, gone, dropped) for group in self.groups)
        entries = tuple(
            entry
            for entry in self.entries
            if (entry.row not in dropped if entry.member is None else entry.member not in gone)
        )
        return replace(self, groups=groups, entries=entries)

    def _less(self, group: Group, gone: set[MemberNumber], dropped: Collection[Row]) -> Group:
        if group.members is None or gone.isdisjoint(group.members):
            return group
        words = group.words
        if words is not None and self._beside(group):
            pairs = zip(group.members, words, strict=True)
            words = tuple(word for member, word in pairs if member not in gone)
        elif words is not None:
            words = tuple(word for word in words if word.row not in dropped)
        return replace(group, members=tuple(member for member in group.members if member not in gone), words=words)

    def with_plain_words(self) -> Optimizer:
        """The optimizer with ``param_names`` that are the names of rows, without prefixes of wrappers."""
        groups = []
        for group in self.groups or ():
            words = group.words
            if words is not None:
                words = tuple(replace(word, text=clean(word.named)) for word in words)
            groups.append(replace(group, words=words))
        return replace(self, groups=tuple(groups) if self.groups is not None else None)

    def written(self, keys: Mapping[MemberNumber, ParamKey], parameters: Parameters) -> OptimState:
        """The optimizer's state dict with these keys of its members."""
        state: dict[ParamKey, dict[str, Tensor | Value]] = {}
        for entry in self.entries:
            name = entry.key if entry.row is None else parameters.rows[entry.row].name
            state[name if entry.member is None else keys[entry.member]] = entry.states
        groups = None if self.groups is None else [group.written(keys, parameters) for group in self.groups]
        return OptimState(state, groups, self.extra)


def _sequence(items: Sequence[Value], form: Literal["list", "tuple"]) -> Value:
    return tuple(items) if form == "tuple" else list(items)


@dataclass(frozen=True, slots=True)
class Table:
    """The parameters of a checkpoint, and the optimizer that trains them."""

    parameters: Parameters
    optimizer: Optimizer | None

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> Table:
        """The table of a checkpoint. Members that have a name are tied to its row: by their key, or by ``param_names``
        that are beside ids.
        """
        optim = checkpoint.optim
        if optim is None:
            return cls(Parameters.of(checkpoint), None)
        keys = list(dict.fromkeys(optim.param_keys()))
        names = [key for key in keys if isinstance(key, str)]
        lookup = _lookup(checkpoint, optim)
        words = [_words(group, lookup) for group in optim.param_groups or ()]
        named = [name for listed in words for _, name in listed or ()]
        others = [key for key in optim.state if isinstance(key, str)] if optim.key_type == "name" else []
        parameters = Parameters.of(checkpoint, (*names, *named), others)
        rows = parameters.by_name()
        row_of: dict[ParamKey, Row] = {name: rows[name] for name in names}
        for group, listed in zip(optim.param_groups or (), words, strict=True):
            listed_keys = group_params(group) or []
            if listed is not None and len(listed) == len(listed_keys):
                pairs = zip(listed_keys, listed, strict=True)
                row_of.update((key, rows[name]) for key, (_, name) in pairs if isinstance(key, int))
        members = tuple(Member(key, row_of.get(key)) for key in keys)
        number_of = {key: number for number, key in enumerate(keys)}
        groups = None
        if optim.param_groups is not None:
            pairs_of_groups = zip(optim.param_groups, words, strict=True)
            groups = tuple(_group(group, listed, number_of, rows) for group, listed in pairs_of_groups)
        users = set(others) - number_of.keys()
        entries = tuple(
            Entry(key, number_of.get(key), states, rows[key] if key in users and isinstance(key, str) else None)
            for key, states in optim.state.items()
        )
        return cls(parameters, Optimizer(members, groups, entries, optim.extra))

    def names(self) -> list[str]:
        """Every name, the model's first."""
        return [row.name for row in self.parameters.rows]

    def renamed(self, names: Mapping[str, str]) -> Table:
        """The table with new names (old to new)."""
        return replace(self, parameters=self.parameters.renamed(names))

    def written(self, checkpoint: Checkpoint, keys: Mapping[MemberNumber, ParamKey] | None = None) -> Checkpoint:
        """``checkpoint`` with the model and the optimizer of this table. ``keys``: of the members, None for keys of the
        type that the source has.
        """
        optim = None
        if self.optimizer is not None:
            of_members = self.optimizer.as_in_source(self.parameters) if keys is None else keys
            optim = self.optimizer.written(of_members, self.parameters)
        return replace(checkpoint, model=self.parameters.model(), optim=optim)

    def with_plain_words(self) -> Table:
        """See ``Optimizer.with_plain_words``."""
        return replace(self, optimizer=self.optimizer.with_plain_words() if self.optimizer is not None else None)

    def without(self, dropped: Collection[Row]) -> Table:
        """The table without the rows ``dropped``, and the optimizer without their members. Rows keep their numbers."""
        optimizer = self.optimizer.without(dropped) if self.optimizer is not None else None
        return Table(self.parameters.emptied(dropped), optimizer)


def names_of(checkpoint: Checkpoint) -> list[str]:
    """The names of the rows of ``Table.of(checkpoint)``, in another order of those that the model lacks."""
    names: dict[str, None] = dict.fromkeys(checkpoint.model.params if checkpoint.model is not None else ())
    optim = checkpoint.optim
    if optim is None:
        return list(names)
    if optim.key_type == "name":
        names.update(dict.fromkeys(key for key in optim.all_keys() if isinstance(key, str)))
    lookup = _lookup(checkpoint, optim)
    for group in optim.param_groups or ():
        names.update(dict.fromkeys(name for _, name in _words(group, lookup) or ()))
    return list(names)


class _Lookup:
    """Finds the row that a word of ``param_names`` means: by its name, or without the prefixes of wrappers."""

    def __init__(self, names: Collection[str]) -> None:
        self._names = names
        self._by_clean_name: dict[str, str | None] | None = None

    @property
    def _cleaned(self) -> Mapping[str, str | None]:
        """Each name by its clean form; None for two names of one."""
        if self._by_clean_name is None:
            found: dict[str, str | None] = {}
            for name in self._names:
                cleaned = clean(name)
                found[cleaned] = None if cleaned in found else name
            self._by_clean_name = found
        return self._by_clean_name

    def name(self, word: str) -> str:
        """The name of the row; ``word`` itself if no row has it."""
        if word in self._names:
            return word
        cleaned = clean(word)
        for each in (cleaned, cleaned.removeprefix(_DISTRIBUTED)):
            found = self._cleaned.get(each)
            if found is not None:
                return found
        return word


def _lookup(checkpoint: Checkpoint, optim: OptimState) -> _Lookup:
    """Finds rows by the names of the model and of the optimizer's parameters."""
    in_model = checkpoint.model.params if checkpoint.model is not None else {}
    in_optim = [key for key in optim.param_keys() if isinstance(key, str)]
    return _Lookup(dict.fromkeys((*in_model, *in_optim)))


def _words(group: Mapping[Key, Value], lookup: _Lookup) -> list[tuple[str, str]] | None:
    """Each word of a group's ``param_names`` with the name of its row; None unless there is a word for each key."""
    keys, words = group_params(group), group.get(_NAMES)
    if keys is None or not isinstance(words, (list, tuple)) or len(words) != len(keys):
        return None
    texts = [word for word in words if isinstance(word, str)]
    return [(word, lookup.name(word)) for word in texts] if len(texts) == len(words) else None


def _group(
    group: Mapping[Key, Value],
    listed: Sequence[tuple[str, str]] | None,
    number_of: Mapping[ParamKey, MemberNumber],
    rows: Mapping[str, Row],
) -> Group:
    keys = group_params(group)
    members = None if keys is None else tuple(number_of[key] for key in keys)
    words = None if listed is None else tuple(Word(text, rows[name], name) for text, name in listed)
    return Group(members, group, _form(group.get(_PARAMS)), words, _form(group.get(_NAMES)))


def _form(value: Value) -> Literal["list", "tuple"]:
    return "tuple" if isinstance(value, tuple) else "list"
