"""Selects sections and keys: ``--only``, ``--include``, ``--exclude``."""

from __future__ import annotations

import shlex
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from difflib import get_close_matches

from fsdpckpt import flags
from fsdpckpt.errors import NeedsInformationError, SourceMissingError, UsageError, to_copy
from fsdpckpt.flags import Flag
from fsdpckpt.globs import matches, printed
from fsdpckpt.ir import SectionName
from fsdpckpt.ir.checkpoint import Checkpoint, ModelState, NamedSection, NamedTensor, Note, Section
from fsdpckpt.ir.parameters import RowNumber
from fsdpckpt.ir.sections import alone
from fsdpckpt.ir.table import Table, names_of
from fsdpckpt.ir.values import with_tensors
from fsdpckpt.text import plural, some_of
from fsdpckpt.transform.spanning import refuse_spanning

KEYS_IN_MESSAGE = 5  # of a note: its ``keys``, in --json, has them all


def choose_section(checkpoint: Checkpoint, only: Section | SectionName | None) -> Checkpoint:
    """``checkpoint`` with the section that ``only`` names as its main one.

    Raises NeedsInformationError if it has several and none is the main one, UsageError for a name that it does not
    have.
    """
    if only is None:
        return checkpoint
    if not isinstance(only, SectionName):
        section = only
        others = [named for named in checkpoint.named if named.section is section]
        main = checkpoint.model if section is Section.MODEL else checkpoint.optim
        if main is not None or not others:
            return checkpoint
        if len(others) > 1:
            raise NeedsInformationError(
                f"{checkpoint.source} has {len(others)} {_WORDS[section]}s, and {flags.only(section)} takes one",
                details=[f"{flags.only(named.label)}" for named in others],
                file=checkpoint.source,
                next_step=f"{flags.only(others[0].label)}, or another of these",
            )
        return _chosen(checkpoint, others[0])
    chosen = find_section(checkpoint, only)
    return checkpoint if chosen is None else _chosen(checkpoint, chosen)


def named_section(checkpoint: Checkpoint, only: Section | SectionName | None) -> NamedSection | None:
    """The named section that ``only`` takes; None for a main one. Call it after ``choose_section``, which raises what
    there is to raise.
    """
    if isinstance(only, SectionName):
        return find_section(checkpoint, only)
    if only is None or (checkpoint.model if only is Section.MODEL else checkpoint.optim):
        return None
    return next((named for named in checkpoint.named if named.section is only), None)


def find_section(checkpoint: Checkpoint, only: SectionName, option: Flag = flags.only) -> NamedSection | None:
    """The section that ``only``, the value of ``option``, names; None for the main one. Raises UsageError for a name
    that ``checkpoint`` does not have.
    """
    section = only.section
    others = [named for named in checkpoint.named if named.section is section]
    main = checkpoint.model if section is Section.MODEL else checkpoint.optim
    path = ".".join(map(str, checkpoint.origin.nesting.get(section, ())))
    if main is not None and only.name in (path, str(section), _WORDS[section]):
        return None
    exact = [named for named in others if only.name in (named.name, named.dotted)]
    shown = [named for named in others if only.name in (printed(named.name), printed(named.dotted))]
    if exact or shown:
        return (exact or shown)[0]
    names = [named.label for named in others]
    names += [str(section)] if main is not None else []
    near = get_close_matches(only.name, [named.name for named in others], n=1)
    meant = f"{section}:{near[0]}" if near else next(iter(names), None)
    raise UsageError(
        f"{checkpoint.source} has no {_WORDS[section]} of the name {only.name}",
        expected=", ".join(names) or f"no {_WORDS[section]} at all",
        found=only.name,
        next_step=f"did you mean {option(meant)}?" if meant else f"drop {option}",
    )


def tensors_of(checkpoint: Checkpoint, section: Section | SectionName | None) -> Iterator[NamedTensor]:
    """The tensors in ``section``, the value of ``--section``; all for None. Raises UsageError for a name that
    ``checkpoint`` does not have.
    """
    label: str | None = None
    if isinstance(section, SectionName):
        named = find_section(checkpoint, section, flags.section)
        label = str(section.section) if named is None else named.label
    for tensor in checkpoint.tensors():
        if section is None or tensor.section is section or tensor.label == label:
            yield tensor


_WORDS = {Section.MODEL: "model", Section.OPTIM: "optimizer"}


def _chosen(checkpoint: Checkpoint, named: NamedSection) -> Checkpoint:
    """``named`` as the main section; the one whose place it takes is left out, with all other named ones."""
    chosen = alone(checkpoint, named)
    main = checkpoint.model if named.section is Section.MODEL else checkpoint.optim
    out = [str(named.section)] if main is not None else []
    # The model of an optimizer stays until it has said what the ids are: ``select_section`` drops it.
    kept = chosen.model if named.section is Section.OPTIM else None
    out += [other.label for other in checkpoint.named if other is not named and other.content is not kept]
    notes = [Note("dropped", f"{flags.only(named.label)}: the section {name} was left out") for name in out]
    ledger = checkpoint.ledger.with_notes(*notes)
    return replace(chosen, extra=checkpoint.extra, rank_extra=checkpoint.rank_extra, ledger=ledger)


def select_section(checkpoint: Checkpoint, only: Section | None) -> Checkpoint:
    """Keep the main section ``only``. Raises SourceMissingError if the checkpoint does not have it."""
    if only is None:
        return checkpoint
    sections = {Section.MODEL: checkpoint.model is not None, Section.OPTIM: checkpoint.optim is not None}
    if not sections[only]:
        present = (
            ", ".join(section for section, is_present in sections.items() if is_present)
            or "neither model nor optimizer"
        )
        raise SourceMissingError(
            f"{checkpoint.source} has no {only} section",
            expected=str(only),
            found=present,
            next_step=to_copy("see what it holds", f"fsdpckpt inspect {shlex.quote(checkpoint.source)}"),
        )
    dropped = [str(name) for name, is_present in sections.items() if is_present and name != only]
    dropped += [named.label for named in checkpoint.named]
    dropped.extend([Section.EXTRA] if checkpoint.extra or checkpoint.rank_extra else [])
    notes = [Note("dropped", f"{flags.only(only)}: the section {name} was left out") for name in dropped]
    return replace(
        checkpoint,
        model=checkpoint.model if only == Section.MODEL else None,
        optim=checkpoint.optim if only == Section.OPTIM else None,
        extra={},
        rank_extra=(),
        named=(),
    ).noted(*notes)


def copy_aliased_tensors(checkpoint: Checkpoint) -> Checkpoint:
    """Give the model and the states tensor objects that no other section holds.

    A dict that was saved under two keys is read as one object: a cast of the model must not reach its copy in the
    extras.
    """
    model, optim = checkpoint.model, checkpoint.optim
    if model is not None:
        model = ModelState(with_tensors(model.params, replace), model.metadata)
    if optim is not None:
        state = {key: with_tensors(states, replace) for key, states in optim.state.items()}
        optim = optim.with_state(state).map_own_values(replace)
    return replace(checkpoint, model=model, optim=optim)


class NoKeyMatchesError(UsageError):
    """An option that selects or renames keys applies to none of one section; another section may have one.

    ``given``: the glob or the prefix; None if what ``--include`` and ``--exclude`` leave is empty. ``of_selected``:
    whether it applies to the keys that are selected, and so to none of a section of which none is.
    """

    given: str | None = None
    of_selected: bool = False


def find_unmatched_globs(
    names_of_each: Mapping[str, Sequence[str]], include: Iterable[str], exclude: Iterable[str], source: str
) -> list[NoKeyMatchesError]:
    """An error for each glob that matches no name of any parameter. ``names_of_each``: as for ``find_kept``."""
    names = list(names_of_each.values())
    return [
        *find_unmatched(flags.include, include, names, source),
        *find_unmatched(flags.exclude, exclude, names, source),
    ]


def find_kept(
    checkpoint: Checkpoint,
    names_of_each: Mapping[str, Sequence[str]],
    *,
    include: Sequence[str],
    exclude: Sequence[str],
    shared: Sequence[tuple[str, str]] = (),
) -> Checkpoint | NoKeyMatchesError:
    """``checkpoint`` with the parameters that match a glob of ``include`` (all if empty) and none of ``exclude``; the
    error if none is left.

    Selects in the model and in the optimizer, which is keyed by name. A shared parameter stays under the names that are
    kept, with its states. ``names_of_each``: for each parameter all names that globs may match. ``shared``: (later
    name, first name) of shared parameters whose later names the checkpoint may lack. Raises SourceUnsupportedError for
    a state of several parameters of which some are left out.
    """
    kept = {name: name for name, names in names_of_each.items() if is_selected(names, include=include, exclude=exclude)}
    for later, first in shared:
        left_out = first in names_of_each and first not in kept and later not in names_of_each
        if left_out and is_selected((later,), include=include, exclude=exclude):
            kept.setdefault(first, later)
    if not kept:
        return none_left(checkpoint.source, len(names_of_each))
    dropped = [name for name in names_of_each if kept.get(name) != name]
    if not dropped:
        return checkpoint
    count = f"{len(dropped):,} of {plural(len(names_of_each), 'key')}"
    message = f"{flags.include}/{flags.exclude}: {count} left out: {some_of(dropped, KEYS_IN_MESSAGE)}"
    table = Table.of(checkpoint)
    rows = table.parameters.rows
    became = _other_names(table, {row for row, each in enumerate(rows) if each.name not in kept})
    stay = [(rows[old].name, rows[new].name) for old, new in became.items()]
    stay += [(old, new) for old, new in kept.items() if old != new]
    tied = [Note("tied", f"{old} is left out; the parameter stays as {new}, with its states", old) for old, new in stay]
    selected = with_names(checkpoint, kept, Note("dropped", message, keys=tuple(dropped)), table.moved(became))
    if _count_members(selected) < _count_members(checkpoint):
        refuse_spanning(checkpoint, f"{flags.include}/{flags.exclude} leave out {some_of(dropped, KEYS_IN_MESSAGE)}")
    return selected.noted(*tied)


def _count_members(checkpoint: Checkpoint) -> int:
    """How many parameters the optimizer trains."""
    return len(list(checkpoint.optim.grouped_keys())) if checkpoint.optim is not None else 0


def none_left(source: str, keys: int) -> NoKeyMatchesError:
    """The error for options that leave none of the ``keys`` of ``source``."""
    return NoKeyMatchesError(
        f"{flags.include} and {flags.exclude} leave none of the {plural(keys, 'key')} of {source}",
        next_step=_list_keys(source),
    )


def is_selected(names: Sequence[str], *, include: Sequence[str], exclude: Sequence[str]) -> bool:
    """Whether the globs keep a parameter that has these ``names``."""

    def is_one_of(globs: Sequence[str]) -> bool:
        return any(matches(name, glob) for glob in globs for name in names)

    return (not include or is_one_of(include)) and not is_one_of(exclude)


def require_globs(option: Flag, globs: Iterable[str], names_of_each: Sequence[Sequence[str]], source: str) -> None:
    """Raises UsageError for a glob of ``option`` that matches no name of any key of ``source``."""
    for error in find_unmatched(option, globs, names_of_each, source):
        raise error


def find_unmatched(
    option: Flag, globs: Iterable[str], names_of_each: Sequence[Sequence[str]], source: str
) -> Iterator[NoKeyMatchesError]:
    """An error for each glob of ``option`` that matches no name of any key of ``source``."""
    for glob in globs:
        if not any(matches(name, glob) for names in names_of_each for name in names):
            yield unmatched_error(f"{option(glob)} matches", glob, source, [names[0] for names in names_of_each])


def unmatched_error(
    what: str, given: str, source: str, names: Sequence[str], *, glob: bool = True
) -> NoKeyMatchesError:
    """The error for ``given``, a ``glob`` or a prefix that matches none of ``names``. ``what``: subject and verb."""
    closest = _closest(given, names, glob=glob)
    error = NoKeyMatchesError(f"{what} no key of {source}", details=closest, next_step=_list_keys(source))
    error.given = given
    return error


def prefixes_of(names: Iterable[str]) -> Iterator[str]:
    """Every module on the way to one of ``names``, once."""
    seen: set[str] = set()
    for name in names:
        words = name.split(".")
        for depth in range(len(words) - 1, 0, -1):
            prefix = ".".join(words[:depth])
            if prefix in seen:
                break
            seen.add(prefix)
            yield prefix


def _closest(given: str, names: Sequence[str], *, glob: bool) -> list[str]:
    """Names, and the dotted prefixes that they share, that look like ``given``."""
    existing = dict.fromkeys((*prefixes_of(names), *names))
    bare = given.strip("*.")
    if glob and bare in existing:  # a module: a glob is compared with whole keys
        return [f"did you mean '{bare}.*'?"]
    closest = get_close_matches(bare, existing, n=3, cutoff=0.6)
    closest = closest or [name for name in existing if bare and bare in name][:3]
    modules = set(prefixes_of(names)) if glob else set()
    return [f"did you mean '{name}.*'?" if name in modules else f"did you mean {name}?" for name in closest]


def _list_keys(source: str) -> str:
    return to_copy("list the keys", flags.command("inspect", source, flags.names_only))


def parameter_names(checkpoint: Checkpoint) -> list[str]:
    """Every parameter name in the model and the optimizer, once, in order."""
    return names_of(checkpoint)


def _other_names(table: Table, dropped: Collection[RowNumber]) -> dict[RowNumber, RowNumber]:
    """For each of the ``dropped`` rows that an optimizer has, the row of another name of its parameter that stays."""
    trained = set(table.rows)
    became: dict[RowNumber, RowNumber] = {}
    for shared in table.parameters.sharing():
        staying = [row for row in shared if row not in dropped]
        if staying and trained.isdisjoint(staying):
            became.update({row: staying[0] for row in shared if row in dropped and row in trained})
    return became


def with_names(checkpoint: Checkpoint, names: Mapping[str, str], note: Note, table: Table | None = None) -> Checkpoint:
    """Keep the parameters of ``names`` (old to new) under their new names, in the model and in the optimizer.

    ``table``: of ``checkpoint``.
    """
    table = table or Table.of(checkpoint)
    dropped = {row for row, name in enumerate(table.names()) if name not in names}
    # A number among names is an entry that the user added: it stays a number.
    changed = (table.without(dropped) if dropped else table).renamed(names).written(checkpoint)
    notes = [note]
    model, before = changed.model, checkpoint.model
    if model is not None and before is not None and list(model.params) != list(before.params):
        if model.metadata is not None:
            message = "the module versions in the model's _metadata were left out: their keys no longer fit"
            notes.append(Note("dropped", message))
        model = ModelState(model.params)
    return replace(changed, model=model).noted(*notes)
