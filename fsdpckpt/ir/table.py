"""The table of a checkpoint: the parameters and buffers of its model as rows, and what each member of the optimizer is.

A *member* (``ir.optimizer``) is tied to a row (``ir.parameters``), or *open*: keyed by an id that nothing names yet. An
id is a member's position, not its identity, and a name is its row's: both are ways of writing.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from fsdpckpt.ir.checkpoint import Checkpoint
from fsdpckpt.ir.names import DISTRIBUTED, clean, respelled
from fsdpckpt.ir.optimizer import PARAM_NAMES, MemberNumber, Optimizer, ParamGroup, ParamKey, form_of, sequence
from fsdpckpt.ir.parameters import RowNumber
from fsdpckpt.ir.rows import Parameters


@dataclass(frozen=True, slots=True)
class Word:
    """One entry of a group's ``param_names``. ``row``: the parameter that it names, which ``named`` was the name of."""

    text: str
    row: RowNumber
    named: str

    def written(self, parameters: Parameters) -> str:
        """The entry as it is written: prefixes that the source put before the name stay before a new one."""
        name = parameters.rows[self.row].name
        return self.text if name == self.named else respelled(self.text, self.named, name)


@dataclass(frozen=True, slots=True)
class Table:
    """The parameters of a checkpoint, and the optimizer that trains them.

    ``rows``: of each member, None while it is open. ``words``: the ``param_names`` of each group, if each is a name;
    else they are a setting like any other. ``users``: the rows of the entries that a user added to the states: beside
    parameters that have names they have a name too.
    """

    parameters: Parameters
    optimizer: Optimizer | None = None
    rows: tuple[RowNumber | None, ...] = ()
    words: tuple[tuple[Word, ...] | None, ...] = ()
    users: Mapping[ParamKey, RowNumber] = field(default_factory=dict)

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> Table:
        """The table of a checkpoint. Members that have a name are tied to its row: by their key, or by ``param_names``
        that are beside ids.
        """
        optim = checkpoint.optim
        if optim is None:
            return cls(Parameters.of(checkpoint))
        names = [key for key in optim.keys if isinstance(key, str)]
        lookup = _lookup(checkpoint, optim)
        listed = [_words(group, lookup) for group in optim.groups or ()]
        named = [name for words in listed for _, name in words or ()]
        by_name = optim.key_type == "name"
        others = [key for key, _ in optim.items() if isinstance(key, str)] if by_name else []
        parameters = Parameters.of(checkpoint, (*names, *named), others)
        row_of = parameters.by_name()
        rows = [row_of[key] if isinstance(key, str) else None for key in optim.keys]
        for group, words in zip(optim.groups or (), listed, strict=True):
            for member, (_, name) in zip(group.members or (), words or (), strict=False):
                if isinstance(optim.keys[member], int):
                    rows[member] = row_of[name]
        words_of: list[tuple[Word, ...] | None] = []
        for words in listed:
            if words is None:
                words_of.append(None)
            else:
                words_of.append(tuple(Word(text, row_of[name], name) for text, name in words))
        users = [entry.key for entry in optim.entries if by_name and isinstance(entry.key, str)]
        return cls(parameters, optim, tuple(rows), tuple(words_of), {key: row_of[key] for key in users})

    def names(self) -> list[str]:
        """Every name, the model's first."""
        return [row.name for row in self.parameters.rows]

    def member_names(self) -> dict[MemberNumber, ParamKey]:
        """Each member's name; an open one keeps its key."""
        if self.optimizer is None:
            return {}
        named = enumerate(zip(self.optimizer.keys, self.rows, strict=True))
        return {member: key if row is None else self.parameters.rows[row].name for member, (key, row) in named}

    def renamed(self, names: Mapping[str, str]) -> Table:
        """The table with new names (old to new)."""
        return replace(self, parameters=self.parameters.renamed(names))

    def with_plain_words(self) -> Table:
        """The table with ``param_names`` that are the names of rows, without prefixes of wrappers."""
        plain: list[tuple[Word, ...] | None] = []
        for words in self.words:
            if words is None:
                plain.append(None)
            else:
                plain.append(tuple(replace(word, text=clean(word.named)) for word in words))
        return replace(self, words=tuple(plain))

    def reordered(self, members: Sequence[Sequence[MemberNumber]]) -> Table:
        """The table with the members of groups in the order of ``members``, one list for each group that has one.

        ``param_names`` that were listed in the order of the members follow them.
        """
        if self.optimizer is None or self.optimizer.groups is None:
            return self
        lists = iter(members)
        groups, words_of = [], []
        for group, words in zip(self.optimizer.groups, self.words, strict=True):
            if group.members is None:
                groups.append(group)
                words_of.append(words)
                continue
            listed = tuple(next(lists))
            if words is not None and self._beside(group, words):
                word_of = dict(zip(group.members, words, strict=True))
                words_of.append(tuple(word_of[member] for member in listed))
            else:
                words_of.append(words)
            groups.append(replace(group, members=listed))
        return replace(self, optimizer=replace(self.optimizer, groups=tuple(groups)), words=tuple(words_of))

    def sorted_by(self, positions: Sequence[Mapping[str, int]]) -> Table:
        """The table with the members of groups sorted by the positions of their names: one mapping for each group that
        lists members, by names without prefixes of wrappers. Members without a position come last, in their order.
        """
        if self.optimizer is None:
            return self
        names = self.member_names()
        listing = [group.members for group in self.optimizer.groups or () if group.members is not None]
        in_order = []
        for members, position in zip(listing, positions, strict=True):
            of_member = {member: position.get(clean(str(names[member])), len(position)) for member in members}
            in_order.append(sorted(members, key=of_member.__getitem__))
        return self.reordered(in_order)

    def moved(self, became: Mapping[RowNumber, RowNumber]) -> Table:
        """The table with the members of rows tied to others, those of other names of the same parameters. A group that
        was in the order of the model is again.
        """
        optim = self.optimizer
        if optim is None or not became:
            return self
        rows = tuple(None if row is None else became.get(row, row) for row in self.rows)
        words = []
        for of_group in self.words:
            moved = (replace(word, row=became.get(word.row, word.row)) for word in of_group or ())
            words.append(None if of_group is None else tuple(moved))
        members = []
        for group in optim.groups or ():
            if group.members is None:
                continue
            places = {member: row for member in group.members if (row := rows[member]) is not None}
            before = [row for member in group.members if (row := self.rows[member]) is not None]
            in_order = len(places) == len(group.members) and before == sorted(before)
            members.append(sorted(group.members, key=places.__getitem__) if in_order else group.members)
        return replace(self, rows=rows, words=tuple(words)).reordered(members)

    def without(self, dropped: Collection[RowNumber]) -> Table:
        """The table without the rows ``dropped``, and the optimizer without their members. Rows keep their numbers."""
        parameters = self.parameters.emptied(dropped)
        if self.optimizer is None:
            return replace(self, parameters=parameters)
        gone = {member for member, row in enumerate(self.rows) if row in dropped}
        words_of = []
        for group, words in zip(self.optimizer.groups or (), self.words, strict=True):
            words_of.append(None if words is None else self._words_without(group, words, gone, dropped))
        return Table(
            parameters,
            self.optimizer.without(gone, [key for key, row in self.users.items() if row in dropped]),
            tuple(row for row in self.rows if row not in dropped),
            tuple(words_of),
            {key: row for key, row in self.users.items() if row not in dropped},
        )

    def _words_without(
        self, group: ParamGroup, words: tuple[Word, ...], gone: set[MemberNumber], dropped: Collection[RowNumber]
    ) -> tuple[Word, ...]:
        if group.members is not None and self._beside(group, words):
            pairs = zip(group.members, words, strict=True)
            return tuple(word for member, word in pairs if member not in gone)
        return tuple(word for word in words if word.row not in dropped)

    def _beside(self, group: ParamGroup, words: Sequence[Word]) -> bool:
        """Whether each word stands beside the member that it names. Not if both name the same parameters in different
        orders: ``FSDP.rekey_optim_state_dict`` sorts ``params`` alone.
        """
        rows = [self.rows[member] for member in group.members or ()]
        named = [word.row for word in words]
        if len(rows) != len(named):
            return False
        return rows == named or set(rows) != set(named)

    def written(self, checkpoint: Checkpoint, keys: Mapping[MemberNumber, ParamKey] | None = None) -> Checkpoint:
        """``checkpoint`` with the model and the optimizer of this table. ``keys``: of the members, None for keys of the
        type that the source has: its ids, or the names that the rows have now.
        """
        optim = self.optimizer
        if optim is not None:
            names = self.member_names()
            if keys is None:
                keys = {member: names[member] if isinstance(key, str) else key for member, key in enumerate(optim.keys)}
            entries = tuple(
                entry._replace(key=self.parameters.rows[self.users[entry.key]].name)
                if entry.key is not None and entry.key in self.users
                else entry
                for entry in optim.entries
            )
            of_members = tuple(keys[member] for member in range(len(optim.keys)))
            optim = replace(optim, keys=of_members, groups=self._groups(optim), entries=entries)
        return replace(checkpoint, model=self.parameters.model(), optim=optim)

    def _groups(self, optim: Optimizer) -> tuple[ParamGroup, ...] | None:
        """The groups with the words of this table as their ``param_names``."""
        if optim.groups is None:
            return None
        groups = []
        for group, words in zip(optim.groups, self.words, strict=True):
            if words is None:
                groups.append(group)
                continue
            texts = [word.written(self.parameters) for word in words]
            as_before = sequence(texts, form_of(group.settings[PARAM_NAMES]))
            groups.append(group.with_setting(PARAM_NAMES, as_before))
        return tuple(groups)


def names_of(checkpoint: Checkpoint) -> list[str]:
    """The names of the rows of ``Table.of(checkpoint)``, in another order of those that the model lacks."""
    names: dict[str, None] = dict.fromkeys(checkpoint.params)
    optim = checkpoint.optim
    if optim is None:
        return list(names)
    if optim.key_type == "name":
        names.update(dict.fromkeys(key for key in optim.all_keys() if isinstance(key, str)))
    lookup = _lookup(checkpoint, optim)
    for group in optim.groups or ():
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
        for each in (cleaned, cleaned.removeprefix(DISTRIBUTED), DISTRIBUTED + cleaned):
            found = self._cleaned.get(each)
            if found is not None:
                return found
        return word


def _lookup(checkpoint: Checkpoint, optim: Optimizer) -> _Lookup:
    """Finds rows by the names of the model and of the optimizer's parameters."""
    in_model = checkpoint.params
    in_optim = [key for key in optim.keys if isinstance(key, str)]
    return _Lookup(dict.fromkeys((*in_model, *in_optim)))


def _words(group: ParamGroup, lookup: _Lookup) -> list[tuple[str, str]] | None:
    """Each word of a group's ``param_names`` with the name of its row; None unless there is a word for each key."""
    words = group.words()
    if group.members is None or PARAM_NAMES not in group.settings or len(words) != len(group.members):
        return None
    texts = [word for word in words if isinstance(word, str)]
    return [(word, lookup.name(word)) for word in texts] if len(texts) == len(words) else None
