"""Compares two checkpoints logically: keys, shapes, dtypes, bytes, param groups and extras, whatever the layout.

Optimizers with different key types are matched by the order of the parameters in their param groups, but only when
the groups have the same lengths and the shapes of all states fit; otherwise the comparison is refused.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Literal, TypeAlias

from fsdpckpt.errors import NeedsInformationError, SourceCorruptError, to_copy
from fsdpckpt.ir import IdRule
from fsdpckpt.ir.checkpoint import (
    BARE_VALUE,
    Checkpoint,
    Layout,
    ModelState,
    NamedSection,
    OptimState,
    ParamKey,
    Section,
    group_params,
)
from fsdpckpt.ir.names import clean, keeps_order, under_first_names, without_fsdp
from fsdpckpt.ir.sections import alone
from fsdpckpt.ir.tensors import Tensor
from fsdpckpt.ir.values import Key, Value, equal, leaf_tensors, value_text, walk
from fsdpckpt.producers import PLAIN
from fsdpckpt.producers.table import flavor_named, id_rule_of
from fsdpckpt.progress import NO_PROGRESS, Progress
from fsdpckpt.storage.sources import Sources
from fsdpckpt.text import count_text, some_of
from fsdpckpt.transform.id_order import listed_order
from fsdpckpt.transform.model_positions import counts_over_model
from fsdpckpt.transform.rekey import apply_key_type
from fsdpckpt.verify.blocks import BlockReader, for_each, in_file_order, threads_for
from fsdpckpt.verify.elements import Tolerance, compare_tensors
from fsdpckpt.verify.measures import digest
from fsdpckpt.verify.repeated import is_endless, nbytes_to_read

Sigil: TypeAlias = Literal["=", "*", "-", "+"]


@dataclass(frozen=True, slots=True)
class Entry:
    """One key of either checkpoint. ``sigil``: ``=`` same, ``*`` differs, ``-`` only in A, ``+`` only in B.

    ``detail``: how the values differ, or the value if only one side has it; "" for ``=``. ``rank``: for the extras of
    one rank. ``counts``: False if only one side has the key because the other one's format cannot hold it: extras of a
    rank that it does not have, extras that B's framework does not keep or adds, and empty containers.
    """

    sigil: Sigil
    section: Section
    key: str
    detail: str = ""
    rank: int | None = None
    counts: bool = True


@dataclass(frozen=True, slots=True, repr=False)
class Difference:
    """Every key of both checkpoints, A's first, in their order. ``notes``: how keys of different types were matched.
    ``sources``: A and B.
    """

    entries: tuple[Entry, ...]
    notes: tuple[str, ...] = ()
    sources: tuple[str, str] = ("A", "B")

    @property
    def same(self) -> bool:
        """Whether nothing that counts differs."""
        return all(entry.sigil == "=" or not entry.counts for entry in self.entries)

    def count(self, sigil: Sigil) -> int:
        return sum(1 for entry in self.entries if entry.sigil == sigil and entry.counts)

    @property
    def summary(self) -> str:
        a, b = self.sources
        same, differ, only_a, only_b = (count_text(self.count(sigil)) for sigil in ("=", "*", "-", "+"))
        return f"{same} same, {differ} differ, {only_a} only in {a}, {only_b} only in {b}"

    def __repr__(self) -> str:
        return f"<{self.summary}>"

    def __bool__(self) -> bool:
        raise TypeError("a Difference is neither true nor false: ask .same")


_Path: TypeAlias = tuple[Key, ...]
_Address: TypeAlias = tuple[Section, _Path, int | None]  # the last: the rank, for the extras of one rank
_Leaves: TypeAlias = dict[_Address, Value]


def _one_of_several_copies(sides: Iterable[Checkpoint]) -> list[str]:
    """A note for each side of whose tensors ranks hold different copies, or perhaps parts."""
    notes: list[str] = []
    for side in sides:
        keys = [str(problem.key) for problem in side.problems if problem.kind == "copies"]
        if keys:
            notes.append(f"{side.source}: only the lowest rank's copy is compared of {some_of(keys, 5)}")
    return notes


def compare(
    a: Checkpoint,
    b: Checkpoint,
    *,
    sources: Sources,
    tolerance: Tolerance | None = None,
    strict: bool = False,
    threads: int | None = None,
    progress: Progress = NO_PROGRESS,
) -> Difference:
    """Compare every key of ``a`` and ``b``. ``tolerance`` None compares bytes; with ``strict`` every entry counts.

    Raises NeedsInformationError if the optimizers' key types differ and cannot be matched by order,
    SourceIncompleteError if a tensor that must be read is incomplete.
    """
    for units in (a.units, b.units):
        if units is not None:
            a, b = (under_first_names(each, units) for each in (a, b))
    saved, bare = (a, b), any(map(_has_bare_names, (a, b)))
    a, b = (_without_wrappers(each, bare=bare) for each in saved)
    matched = _match_optimizers(a, b)
    notes = [_UNWRAPPED] if a is not saved[0] or b is not saved[1] else []
    notes += _one_of_several_copies(saved)
    for side in saved:
        notes += [note.message for note in side.notes if note.kind == "unused"]
    leaves_a, leaves_b = _leaves(a, {}, matched.positions), _leaves(b, matched.keys, matched.positions)
    for named_a, named_b in _pair_sections(saved[0], saved[1]):
        more_a, more_b, more_notes = _named_leaves(saved, named_a, named_b, bare=bare)
        leaves_a.update(more_a)
        leaves_b.update(more_b)
        notes += more_notes
    in_b = _match_addresses(leaves_a, leaves_b)
    pair = _Pair(a, b, sources, leaves_b)
    details = pair.compare(
        {address: (leaves_a[address], leaves_b[address_b]) for address, address_b in in_b.items()},
        tolerance,
        threads if threads is not None else threads_for(a, b),
        progress,
    )

    def entry(sigil: Sigil, address: _Address, detail: str, *, count: bool = True) -> Entry:
        return Entry(sigil, address[0], _dotted(address), detail, address[2], count)

    entries = [
        entry("-", address, value_text(value), count=strict or pair.counts(address, value, b))
        if address not in in_b
        else entry("*" if address in details else "=", address, details.get(address, ""))
        for address, value in leaves_a.items()
    ]
    in_both = set(in_b.values())
    entries += [
        entry("+", address, value_text(value), count=strict or pair.counts(address, value, a))
        for address, value in leaves_b.items()
        if address not in in_both
    ]
    return Difference(tuple(entries), (*notes, *matched.notes), (a.source, b.source))


_PairedSections: TypeAlias = "tuple[NamedSection | None, NamedSection | None]"


def _pair_sections(a: Checkpoint, b: Checkpoint) -> Iterator[_PairedSections]:
    """The named sections of A with those of B: by place, else by name, else by their order if as many are left.

    A framework renames them: the optimizers of Lightning are ``optimizer_0`` or ``optimizer_states.0``.
    """
    for section in (Section.MODEL, Section.OPTIM):
        of_a, of_b = ([named for named in each.named if named.section is section] for each in (a, b))
        for same in ("path", "name"):
            for named in list(of_a):
                other = next((other for other in of_b if getattr(other, same) == getattr(named, same)), None)
                if other is not None:
                    of_a.remove(named)
                    of_b.remove(other)
                    yield named, other
        if len(of_a) == len(of_b):
            yield from zip(of_a, of_b, strict=True)
        else:
            yield from ((named, None) for named in of_a)
            yield from ((None, named) for named in of_b)


def _named_leaves(
    sides: tuple[Checkpoint, Checkpoint], a: NamedSection | None, b: NamedSection | None, *, bare: bool
) -> tuple[_Leaves, _Leaves, list[str]]:
    """The leaves of one named section of A and of that of B, by addresses below A's place, and notes."""
    alone_a, alone_b = (
        _without_wrappers(alone(side, named), bare=bare) if named is not None else None
        for side, named in zip(sides, (a, b), strict=True)
    )
    matched = _match_optimizers(alone_a, alone_b) if alone_a is not None and alone_b is not None else _Match()
    place = a or b
    if place is None:
        return {}, {}, []

    def below(checkpoint: Checkpoint | None, renamed: Mapping[ParamKey, ParamKey]) -> _Leaves:
        leaves = _leaves(checkpoint, renamed, matched.positions) if checkpoint is not None else {}
        return {
            (section, (*place.path, *path), rank): value
            for (section, path, rank), value in leaves.items()
            if section is place.section
        }

    notes = [f"{place.label}: {note}" for note in matched.notes]
    return below(alone_a, {}), below(alone_b, matched.keys), notes


@dataclass(frozen=True, eq=False)
class _Pair:
    """The checkpoints. ``leaves_b``: those of ``b``."""

    a: Checkpoint
    b: Checkpoint
    sources: Sources
    leaves_b: _Leaves
    _digests_b: dict[tuple[tuple[int, ...], str], set[str]] = field(default_factory=dict)  # of tensors of one form

    def readers(self) -> tuple[BlockReader, BlockReader]:
        return BlockReader(self.a.files, self.sources), BlockReader(self.b.files, self.sources)

    def compare(
        self,
        values: Mapping[_Address, tuple[Value, Value]],
        tolerance: Tolerance | None,
        threads: int,
        progress: Progress,
    ) -> dict[_Address, str]:
        """How ``values`` of A and B differ, for each that does."""
        details: dict[_Address, str] = {}
        tensors: list[tuple[_Address, Tensor, Tensor]] = []
        for address, (value_a, value_b) in values.items():
            if isinstance(value_a, Tensor) and isinstance(value_b, Tensor):
                tensors.append((address, value_a, value_b))
            elif not equal(value_a, value_b, as_loaded=True):
                details[address] = f"{value_text(value_a)} vs {value_text(value_b)}"

        def work(readers: tuple[BlockReader, BlockReader], pair: tuple[_Address, Tensor, Tensor]) -> str:
            return compare_tensors(readers[0], pair[1], readers[1], pair[2], tolerance, progress)

        progress.begin("compare", sum(nbytes_to_read(tensor) for _, tensor, _ in tensors))
        order = in_file_order([tensor for _, tensor, _ in tensors])
        differences = for_each(tensors, work, make_reader=self.readers, threads=threads, order=order)
        progress.end()
        return details | {address: text for (address, _, _), text in zip(tensors, differences, strict=True) if text}

    def counts(self, address: _Address, value: Value, other: Checkpoint) -> bool:
        """Whether it is a difference that ``other`` lacks this key."""
        section, path, rank = address
        if isinstance(value, (dict, list, tuple)) and not value:  # a DCP directory cannot hold it
            return False
        if section is Section.MODEL:
            if other is self.a:
                return not (_is_weights(self.a) and self._is_another_name_in_b(value))
            return section not in self._not_kept or not self._is_in_b(value)
        absent = self._absent_from_a if other is self.a else self._absent_from_b
        if section is Section.OPTIM and (path in absent or path[:2] in absent):
            return False
        return section not in self._not_kept and (rank is None or rank < len(other.rank_extra))

    @cached_property
    def _not_kept(self) -> frozenset[Section]:
        return _not_kept(self.a, self.b)

    @cached_property
    def _absent_from_a(self) -> set[_Path]:
        return _missing_lists(self.a) | _lost_groups(self.a, self.b)

    @cached_property
    def _absent_from_b(self) -> set[_Path]:
        return _missing_lists(self.b) | _lost_groups(self.b, self.a)

    def _is_another_name_in_b(self, value: Value) -> bool:
        """Whether B's model stores this tensor once, and has it under the name that A has, too."""
        place = value.location() if isinstance(value, Tensor) else None
        return place is not None and place in self._places_of_common_names

    @cached_property
    def _places_of_common_names(self) -> set[tuple[object, ...]]:
        params = self.a.model.params if self.a.model is not None else {}
        tensors = [
            leaf
            for (section, path, _), leaf in self.leaves_b.items()
            if section is Section.MODEL and isinstance(leaf, Tensor) and path[0] in params
        ]
        return {place for leaf in tensors if (place := leaf.location()) is not None}

    def _is_in_b(self, value: Value) -> bool:
        """Whether B's model has these bytes under a different name: some frameworks store tied weights once."""
        if not isinstance(value, Tensor) or is_endless(value):
            return False
        form = value.shape, value.dtype.name
        if form not in self._digests_b:  # once: comparing each with each would read the square of their number
            _, reader_b = self.readers()
            self._digests_b[form] = {
                digest(reader_b, candidate)
                for (section, _, _), candidate in self.leaves_b.items()
                if section is Section.MODEL and isinstance(candidate, Tensor)
                if (candidate.shape, candidate.dtype.name) == form and not is_endless(candidate)
            }
        return digest(self.readers()[0], value) in self._digests_b[form]


_UNWRAPPED = "prefixes of wrapper modules in the names do not count as differences"


def _dotted(address: _Address) -> str:
    """The key, as users see it."""
    section, path, rank = address
    if section is Section.OPTIM and path[0] == "state":
        path = path[1:]
    return ".".join(map(str, path if rank is None else (f"rank{rank}", *path)))


def _match_addresses(leaves_a: _Leaves, leaves_b: _Leaves) -> dict[_Address, _Address]:
    """B's address for each of A's that B has too.

    Some containers store keys as text, or a path as one key. So addresses that only one side has match if their dotted
    keys are equal.
    """
    matched = {address: address for address in leaves_a if address in leaves_b}
    only_in_b: dict[tuple[Section, str, int | None], list[_Address]] = {}
    for address in leaves_b:
        if address not in matched:
            only_in_b.setdefault((address[0], _dotted(address), address[2]), []).append(address)
    for address in leaves_a:
        if address not in matched and (candidates := only_in_b.get((address[0], _dotted(address), address[2]))):
            matched[address] = candidates.pop(0)
    return matched


def _not_kept(a: Checkpoint, b: Checkpoint) -> frozenset[Section]:
    """The sections in which B's framework does not keep everything, if it is a different framework than A's.

    Each framework has extras of its own beside a model and its optimizer. A format for weights alone has neither
    optimizer nor extras, and has tied weights once.
    """
    if b.flavor in (PLAIN, a.flavor):
        return frozenset()
    return frozenset(Section) if _is_weights(b) else frozenset({Section.EXTRA})


def _is_weights(checkpoint: Checkpoint) -> bool:
    """Whether it is in a format for weights alone."""
    flavor = flavor_named(checkpoint.flavor)
    return flavor is not None and bool(flavor.forms) and all(form.weights for form in flavor.forms)


def _missing_lists(checkpoint: Checkpoint) -> set[_Path]:
    """The paths of the ``params`` that param groups lack: Megatron does not store which parameters are in which group;
    ``--no-weight-decay`` says it.
    """
    groups = (checkpoint.optim.param_groups if checkpoint.optim is not None else None) or []
    return {("param_groups", index, "params") for index, group in enumerate(groups) if "params" not in group}


def _lost_groups(checkpoint: Checkpoint, other: Checkpoint) -> set[_Path]:
    """The paths of ``other``'s param groups without parameters, if ``checkpoint`` has flattened keys, which cannot hold
    them.
    """
    groups = (other.optim.param_groups if other.optim is not None and checkpoint.flattened_keys else None) or []
    return {("param_groups", index) for index, group in enumerate(groups) if not group_params(group)}


def _leaves(checkpoint: Checkpoint, renamed: Mapping[ParamKey, ParamKey], positions: Mapping[ParamKey, int]) -> _Leaves:
    """Every leaf by its address.

    ``renamed``: optimizer keys to replace. ``positions``: how to sort the keys that a param group lists.
    """
    leaves: _Leaves = {}
    if checkpoint.model is not None:
        for name, leaf in checkpoint.model.params.items():
            if isinstance(leaf, (dict, list, tuple)) and any(True for _ in leaf_tensors(leaf)):
                leaves.update(((Section.MODEL, (name, *path), None), inner) for path, inner in _walk(leaf))
            else:
                leaves[Section.MODEL, (name,), None] = leaf
    if checkpoint.optim is not None:
        for path, value in _optimizer_leaves(checkpoint.optim, renamed, positions):
            leaves[Section.OPTIM, path, None] = value
    for path, value in _walk(checkpoint.extra):
        leaves[Section.EXTRA, path, None] = value
    for rank, extra in enumerate(checkpoint.rank_extra):
        for path, value in _walk(extra):
            leaves[Section.EXTRA, path, rank] = value
    return leaves


def _walk(value: Value) -> Iterator[tuple[_Path, Value]]:
    """The leaves of ``value``; none if it is empty itself."""
    if value:
        yield from walk(value)


def _optimizer_leaves(
    optim: OptimState, renamed: Mapping[ParamKey, ParamKey], positions: Mapping[ParamKey, int]
) -> Iterator[tuple[_Path, Value]]:
    """The leaves of ``optim`` by their paths in its state dict."""
    for param, states in optim.state.items():
        name = renamed.get(param, param)
        if not states:
            yield ("state", name), {}
        for state, value in states.items():  # an optimizer may nest values in a state
            yield from walk(value, ("state", name) if state == BARE_VALUE else ("state", name, state))
    for index, group in enumerate(optim.param_groups or []):
        for key, value in group.items():
            if key == "params" and isinstance(value, (list, tuple)):
                params = [renamed.get(item, item) if isinstance(item, (int, str)) else item for item in value]
                if positions:
                    params.sort(key=lambda item: positions.get(item, 0) if isinstance(item, (int, str)) else 0)
                exact = isinstance(value, tuple) and not positions  # a list and a tuple are two things
                yield ("param_groups", index, key), tuple(params) if exact else params
            elif _has_dict_or_tensor(value):  # DCP stores these separately, and keys of dicts become text there
                yield from walk(value, ("param_groups", index, key))
            else:  # a tuple of betas is easiest to read whole
                yield ("param_groups", index, key), value
    yield from _walk(optim.extra)


def _has_dict_or_tensor(value: Value) -> bool:
    return isinstance(value, (dict, Tensor)) or (
        isinstance(value, (list, tuple)) and any(map(_has_dict_or_tensor, value))
    )


@dataclass(frozen=True, slots=True)
class _Match:
    """How the optimizers' keys match. ``keys``: A's key for each of B's if the key types differ. ``positions``: the
    position of each of A's keys in the model, if the order in which a param group lists names has no meaning.
    """

    keys: Mapping[ParamKey, ParamKey] = field(default_factory=dict)
    positions: Mapping[ParamKey, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def _has_bare_names(checkpoint: Checkpoint) -> bool:
    """Whether its format has no prefixes of wrapper modules: flat parameters, and weights for other libraries."""
    flat = checkpoint.units is not None and checkpoint.units.flat
    return checkpoint.layout is Layout.FLATTENED or flat or _is_weights(checkpoint)


def _without_wrappers(checkpoint: Checkpoint, *, bare: bool) -> Checkpoint:
    """``checkpoint`` without the prefixes of wrapper modules that depend on the layout: those of FSDP1 in the
    optimizer's names, which ``FSDP.optim_state_dict`` drops. ``bare``: without all of them.
    """
    model, optim = checkpoint.model, checkpoint.optim
    of_optim = _shortened(optim.all_keys() if optim is not None else (), clean if bare else without_fsdp)
    of_model = _shortened(model.params if model is not None and bare else (), clean)
    if optim is not None and of_optim:
        checkpoint = replace(checkpoint, optim=optim.renamed(of_optim))
    if model is not None and of_model:
        params = {str(of_model[name]): leaf for name, leaf in model.params.items()}
        checkpoint = replace(checkpoint, model=ModelState(params, model.metadata))
    return checkpoint


def _shortened(keys: Iterable[ParamKey], shorten: Callable[[str], str]) -> dict[ParamKey, ParamKey]:
    """The shortened name of each key; empty if none is shorter, or if two would become one."""
    names = {key: shorten(key) if isinstance(key, str) else key for key in keys}
    return names if len(set(names.values())) == len(names) and any(old != new for old, new in names.items()) else {}


def _match_optimizers(a: Checkpoint, b: Checkpoint) -> _Match:
    """Raises NeedsInformationError if the key types differ and the keys cannot be matched."""
    if a.optim is None or b.optim is None:
        return _Match()
    types = a.optim.key_type, b.optim.key_type
    groups_a, groups_b = _listed_keys(a.optim), _listed_keys(b.optim)
    if types == ("name", "name"):
        return _match_order(groups_a or [], groups_b or [], proved=all(map(_lists_in_order, (a, b))))
    if types == ("id", "id") and groups_a is not None and groups_b is not None:
        return _match_ids((a, groups_a), (b, groups_b))
    if types[0] == types[1] or None in types:
        return _Match()
    by_place = _match_places(a, b)
    if by_place is not None:
        return by_place
    if groups_a is None or groups_b is None:
        problem = "one of them has no param groups, so nothing says which id is which name"
    elif [len(group) for group in groups_a] != [len(group) for group in groups_b]:
        problem = f"their param groups have {_lengths(groups_a)} and {_lengths(groups_b)} parameters"
    else:
        pairs = _pair_keys(groups_a, groups_b)
        mismatch = _find_mismatch(a.optim, b.optim, pairs)
        matches = [_Match(pairs, notes=(_note("the param groups", types),))] if mismatch is None else []
        # Where the names were sorted, ids count in the order of the model.
        named = groups_a if types[0] == "name" else groups_b
        positions = _model_order(a if types[0] == "id" else b)
        listed = listed_order([list(map(str, names)) for names in named], _positions_by_name(positions))
        in_model_order = (
            [sorted(keys, key=lambda key: positions.get(key, 0)) for keys in groups] for groups in (groups_a, groups_b)
        )
        pairs = _pair_keys(*in_model_order)
        if positions and _find_mismatch(a.optim, b.optim, pairs) is None:
            if types[0] == "id":
                positions = {key: key for keys in groups_a for key in keys if isinstance(key, int)}
            by_model = _Match(pairs, positions, (_note("the model's parameters", types),))
            first = listed is None or not listed.own
            matches.insert(0 if first else len(matches), by_model)
        if matches:
            return min(matches, key=partial(_count_stateless, a.optim, b.optim))
        problem = str(mismatch)
    raise NeedsInformationError(
        f"the optimizers of {a.source} and {b.source} have different keys ({types[0]} and {types[1]}), "
        f"and cannot be matched: {problem}",
        why="ids count in the order of the param groups, so they match names only if both list the same parameters in "
        "the same order",
        next_step=_next_step(a, b, types[0]),
    )


def _lists_in_order(checkpoint: Checkpoint) -> bool:
    """Whether the order in which the groups of a checkpoint list names is that of the job's optimizer.

    Flat parameters, flattened keys, places in the model and names that FSDP sorted have lost it.
    """
    if id_rule_of(checkpoint) is IdRule.MODEL:
        return False
    if checkpoint.layout is Layout.FLATTENED or checkpoint.units is not None or checkpoint.flattened_keys:
        return False
    groups = _listed_keys(checkpoint.optim) if checkpoint.optim is not None else None
    places = _positions_by_name(_model_order(checkpoint))
    listed = listed_order([list(map(str, keys)) for keys in groups or ()], places)
    return listed is not None and listed.own


def _positions_by_name(positions: Mapping[ParamKey, int]) -> dict[str, int] | None:
    """``positions`` of names without the prefixes of wrappers; None if there are none."""
    return {clean(str(name)): position for name, position in positions.items()} or None


def _match_order(
    groups_a: Sequence[Sequence[ParamKey]], groups_b: Sequence[Sequence[ParamKey]], *, proved: bool
) -> _Match:
    """Match groups that list the same names in different orders. ``proved``: both list them as the optimizers did, so
    that the difference counts: it decides which ids the parameters get.
    """
    if proved or len(groups_a) != len(groups_b) or groups_a == groups_b:
        return _Match()
    if any(sorted(map(str, a)) != sorted(map(str, b)) for a, b in zip(groups_a, groups_b, strict=True)):
        return _Match()
    positions = {key: at for at, key in enumerate(key for group in groups_a for key in group)}
    return _Match(
        positions=positions,
        notes=("the param groups list the same names in a different order, which does not count as a difference",),
    )


_Groups: TypeAlias = Sequence[Sequence[ParamKey]]


def _match_ids(a: tuple[Checkpoint, _Groups], b: tuple[Checkpoint, _Groups]) -> _Match:
    """Match ids of one kind by number; those that count over the model with those of ``torch.optim`` by their names, or
    by place if nothing names them. Each side is a checkpoint and what its groups list.
    """
    counted = [_over_model(*side) for side in (a, b)]
    groups_a, groups_b = a[1], b[1]
    if counted[0] == counted[1]:
        return _Match()
    names = [_names_of_ids(each) for each, _ in (a, b)]
    if names[0] is not None and names[1] is not None and set(names[0]) == set(names[1]):
        pairs = {names[1][name]: key for name, key in names[0].items()}
        by_name = "optimizer keys matched by name: only one side counts all parameters of the model"
        positions = {key: place for place, key in enumerate(pairs.values())}
        return _Match(pairs, positions, (by_name,))
    if groups_a == groups_b or list(map(len, groups_a)) != list(map(len, groups_b)):
        return _Match()
    note = (
        "optimizer keys matched by their places in the param groups: only one side counts all parameters of the model"
    )
    return _Match(_pair_keys(groups_a, groups_b), notes=(note,))


def _names_of_ids(checkpoint: Checkpoint) -> dict[str, ParamKey] | None:
    """The id of each name, None if the checkpoint itself does not say it."""
    if checkpoint.optim is None:
        return None
    try:
        named = apply_key_type(checkpoint, "name", units=None, reference=None, parameters=None)
    except (NeedsInformationError, SourceCorruptError):
        return None
    if named.optim is None:
        return None
    pairs = zip(named.optim.grouped_keys(), checkpoint.optim.grouped_keys(), strict=True)
    return {clean(str(name)): number for name, number in pairs}


def _over_model(checkpoint: Checkpoint, groups: _Groups) -> bool:
    """Whether ids that ``groups`` list are places in the model, by the rule of the framework or to be seen."""
    numbers = [[key for key in group if isinstance(key, int)] for group in groups]
    return counts_over_model(numbers, id_rule_of(checkpoint))


def _match_places(a: Checkpoint, b: Checkpoint) -> _Match | None:
    """Match names with ids that count over all parameters of the model, which are not in the order of the lists; None
    if the ids are none of these, or if nothing names them. Raises NeedsInformationError if they certainly are, and
    several names fit: the order of the lists is then no other way.
    """
    ids, names = (a, b) if a.optim is not None and a.optim.key_type == "id" else (b, a)
    if ids.optim is None or not _over_model(ids, _listed_keys(ids.optim) or []):
        return None
    try:
        named = apply_key_type(ids, "name", units=None, reference=names, parameters=None)
    except NeedsInformationError:
        if id_rule_of(ids) is IdRule.MODEL:
            raise
        return None
    except SourceCorruptError:
        return None
    if named.optim is None:
        return None
    keys = dict(zip(ids.optim.grouped_keys(), named.optim.grouped_keys(), strict=True))
    pairs = keys if ids is b else {name: number for number, name in keys.items()}
    positions = {key: place for place, key in enumerate(pairs.values())}
    return _Match(pairs, positions, ("optimizer keys matched by the places of ids in the model",))


def _note(order: str, types: tuple[str | None, str | None]) -> str:
    return f"optimizer keys matched by the order of {order}: {types[1]}s of B to {types[0]}s of A"


def _pair_keys(
    groups_a: Sequence[Sequence[ParamKey]], groups_b: Sequence[Sequence[ParamKey]]
) -> dict[ParamKey, ParamKey]:
    """A's key for each of B's, group by group."""
    return {
        key_b: key_a
        for group_a, group_b in zip(groups_a, groups_b, strict=True)
        for key_a, key_b in zip(group_a, group_b, strict=True)
    }


def _model_order(checkpoint: Checkpoint) -> dict[ParamKey, int]:
    """The position of each name in the model of the checkpoint that uses ids; empty if it keeps no order."""
    names = list(checkpoint.model.params) if checkpoint.model is not None else []
    return {name: at for at, name in enumerate(names)} if keeps_order(checkpoint, names) else {}


def _next_step(a: Checkpoint, b: Checkpoint, key_type: str | None) -> str:
    unnamed = [checkpoint.source for checkpoint in (a, b) if any(note.kind == "unnamed" for note in checkpoint.notes)]
    if unnamed:
        return f"add --units FILE: it says which parameters are in the slices of {unnamed[0]}"
    if a.model is not None and b.model is not None:
        return "compare the models alone: add --only model"
    convert = f"fsdpckpt convert {shlex.quote(b.source)} DST --key-type {key_type}"
    return to_copy("convert B first, then compare A with the result", convert)


def _lengths(groups: Sequence[Sequence[ParamKey]]) -> str:
    return "+".join(str(len(group)) for group in groups) or "no"


def _listed_keys(optim: OptimState) -> list[list[ParamKey]] | None:
    """The keys that each param group lists; None without groups, or if a list is missing."""
    if optim.param_groups is None:
        return None
    groups = [group_params(group) for group in optim.param_groups]
    complete = [keys for keys in groups if keys is not None]
    return complete if len(complete) == len(groups) else None


def _find_mismatch(a: OptimState, b: OptimState, pairs: Mapping[ParamKey, ParamKey]) -> str | None:
    """Why keys cannot be matched by the order of the groups, None if every state matches."""
    for key_b, key_a in pairs.items():
        states_a = a.state.get(key_a, {})
        for name, state_b in b.state.get(key_b, {}).items():
            state_a = states_a.get(name)
            if isinstance(state_a, Tensor) and isinstance(state_b, Tensor) and state_a.shape != state_b.shape:
                return (
                    f"by that order {key_b} is {key_a}, but their states {name} have the shapes "
                    f"{list(state_b.shape)} and {list(state_a.shape)}"
                )
    added = a.state.keys() - pairs.values()  # by a user: such entries keep their keys
    stray = next((key for key in b.state if key not in pairs and key not in added), None)
    return None if stray is None else f"the state of {stray} is in no param group"


def _count_stateless(a: OptimState, b: OptimState, match: _Match) -> int:
    """The number of keys whose parameter has states on one side only. An order that is right has few."""
    return sum(bool(a.state.get(key_a)) != bool(b.state.get(key_b)) for key_b, key_a in match.keys.items())


def only_section(checkpoint: Checkpoint, section: Section | None) -> Checkpoint:
    """``checkpoint`` reduced to ``section``; unchanged for None."""
    if section is None:
        return checkpoint
    return replace(
        checkpoint,
        model=checkpoint.model if section is Section.MODEL else None,
        optim=checkpoint.optim if section is Section.OPTIM else None,
        extra=checkpoint.extra if section is Section.EXTRA else {},
        rank_extra=checkpoint.rank_extra if section is Section.EXTRA else (),
        named=(),
    )
