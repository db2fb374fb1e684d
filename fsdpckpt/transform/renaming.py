"""Gives parameters new names: ``--strip-prefix``, ``--rename`` and ``--add-prefix``.

A parameter has one name, however a section spells it: with the prefixes of wrappers, with ``module.`` of
DistributedDataParallel, or plain. A rule may have any spelling that the checkpoint has, and changes all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain

from fsdpckpt import flags
from fsdpckpt.errors import UsageError
from fsdpckpt.flags import Wording
from fsdpckpt.ir.checkpoint import Checkpoint, Note
from fsdpckpt.ir.names import DISTRIBUTED, WRAPPERS, leading_wrappers, respelled
from fsdpckpt.ir.row_names import RowNames
from fsdpckpt.text import plural, some_of
from fsdpckpt.transform.selection import (
    KEYS_IN_MESSAGE,
    NoKeyMatchesError,
    parameter_names,
    unmatched_error,
    with_names,
)


@dataclass(frozen=True, slots=True)
class _Rule:
    """``given``: what it applies to, as the user wrote it. ``change``: makes a new name, None of one that it does not
    apply to.
    """

    option: Wording
    given: str
    change: Callable[[str], str | None]


@dataclass(frozen=True, slots=True)
class Renaming:
    """Strip a prefix, then apply OLD=NEW pairs (a whole key, or a dotted prefix), then add a prefix.

    ``leads``: what sections of the checkpoint have before the names of parameters (``ir.row_names.leads``), another
    section than the one that is renamed, too.
    """

    strip_prefix: str | None = None
    pairs: Sequence[tuple[str, str]] = ()
    add_prefix: str | None = None
    leads: tuple[str, ...] = ()

    def new_name(self, name: str) -> str:
        """The new name of a parameter."""
        spelled = [name, *(lead + name for lead in self._leads())]
        names, _ = self._changed({each: each for each in spelled}, [spelled])
        return self._prefixed(names[name])

    def applied_to(self, checkpoint: Checkpoint) -> tuple[Checkpoint, list[NoKeyMatchesError]]:
        """``checkpoint`` with the new names, and an error for each rule that applies to nothing.

        Raises UsageError if two parameters would get one name.
        """
        if self.strip_prefix is None and self.add_prefix is None and not self.pairs:
            return checkpoint, []
        keys = parameter_names(checkpoint)
        rows = RowNames.of(checkpoint)
        spellings = rows.spellings(self._leads(), keys)
        before = {name: name for name in (*keys, *chain(*spellings))}
        changed, unused = self._changed(before, spellings)
        unmatched = []
        for rule, present in unused:
            error = unmatched_error(
                f"{rule.option} applies to", rule.given, checkpoint.source, [present[key] for key in keys], glob=False
            )
            error.of_selected = True
            unmatched.append(error)
        names = {key: self._prefixed(changed[key]) for key in keys}
        _refuse_collisions(names, rows)
        listed = [f"{source} -> {name}" for source, name in names.items() if source != name]
        examples = f": {some_of(listed, KEYS_IN_MESSAGE)}" if listed else ""
        note = Note("renamed", f"{len(listed):,} of {plural(len(names), 'key')} renamed{examples}", keys=tuple(listed))
        return with_names(checkpoint, names, note), unmatched

    def _leads(self) -> list[str]:
        """``leads``, and the wrappers that the rules begin with: a plain name has them too."""
        return list(dict.fromkeys((*self.leads, *(leading_wrappers(rule.given) for rule in self._rules()))))

    def _rules(self) -> list[_Rule]:
        rules = []
        if self.strip_prefix is not None:
            strip = partial(_stripped, prefix=self.strip_prefix)
            rules.append(_Rule(flags.strip_prefix(self.strip_prefix), self.strip_prefix, strip))
        for old, new in self.pairs:
            rules.append(_Rule(flags.rename(f"{old}={new}"), old, partial(_renamed, old=old, new=new)))
        return rules

    def _changed(
        self, names: Mapping[str, str], spellings: Iterable[Sequence[str]]
    ) -> tuple[dict[str, str], list[tuple[_Rule, Mapping[str, str]]]]:
        """``names`` after all rules, and each rule that applied to none, with the names before it.

        ``spellings``: of each parameter that has several among ``names``.
        """
        names = dict(names)
        unused: list[tuple[_Rule, Mapping[str, str]]] = []
        spellings = list(spellings)
        for rule in self._rules():
            changed = {source: new for source, name in names.items() if (new := rule.change(name)) is not None}
            if not changed:
                unused.append((rule, dict(names)))
            for spelled in spellings:
                _follow(spelled, names, changed)
            names.update(changed)
        return names, unused

    def _prefixed(self, name: str) -> str:
        """``name`` with the prefix that is added, behind ``module.`` if another section has the name without it."""
        if self.add_prefix is None:
            return name
        once = self.add_prefix.removesuffix(".") in WRAPPERS  # a module is compiled once
        if once and name.startswith(self.add_prefix):
            return name
        distributed = (lead for lead in self.leads if lead.endswith(DISTRIBUTED) and name.startswith(lead))
        lead = max(distributed, key=len, default="")
        return lead + self.add_prefix + name.removeprefix(lead)


def _stripped(name: str, prefix: str) -> str | None:
    return name[len(prefix) :] if name.startswith(prefix) else None


def _renamed(name: str, old: str, new: str) -> str | None:
    if name == old:
        return new
    dotted = old if old.endswith(".") else old + "."
    if name.startswith(dotted):
        rest = name[len(dotted) :]
        return f"{new.rstrip('.')}.{rest}" if new else rest
    return None


def _follow(spelled: Sequence[str], names: Mapping[str, str], changed: dict[str, str]) -> None:
    """Change those of ``spelled``, the spellings of one parameter, that a rule did not apply to, like one that it
    ``changed``. ``names``: before this rule.
    """
    leading = next((source for source in spelled if source in changed), None)
    if leading is None:
        return
    for source in spelled:
        if source not in changed:
            changed[source] = respelled(names[source], names[leading], changed[leading])


def _refuse_collisions(names: Mapping[str, str], rows: RowNames) -> None:
    """Raises UsageError if two parameters get one name, or two keys of one section."""
    seen: dict[str, str] = {}
    for source, name in names.items():
        other = seen.setdefault(name, source)
        if name and (other == source or rows.are_spellings(other, source)):
            continue
        message = f"{source} would have no name"
        if name:
            message = f"{other} and {source} would both be named {name!r}"
        raise UsageError(message, key=source, next_step=f"give other {flags.rename} or prefix options")
