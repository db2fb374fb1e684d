"""Compares two checkpoints logically: keys, shapes, dtypes, bytes, param groups and extras, whatever the layout.

Optimizers with different key types are matched by the order of the parameters in their param groups, but only when
the groups have the same lengths and the shapes of all states fit; otherwise the comparison is refused.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, TypeAlias

from fsdpckpt.errors import NeedsInformationError, to_copy
from fsdpckpt.ir.checkpoint import BARE_VALUE, Checkpoint, OptimState, ParamKey, Section, group_params
from fsdpckpt.ir.names import keeps_order
from fsdpckpt.ir.tensors import Tensor
from fsdpckpt.ir.values import Global, Key, Object, Value, walk
from fsdpckpt.producers import PLAIN
from fsdpckpt.producers.table import flavor_named
from fsdpckpt.storage.sources import Sources
from fsdpckpt.text import count_text
from fsdpckpt.verify.blocks import DEFAULT_THREADS, Advance, BlockReader, for_each, in_file_order, no_progress
from fsdpckpt.verify.elements import Tolerance, compare_tensors

Sigil: TypeAlias = Literal["=", "*", "-", "+"]


@dataclass(frozen=True, slots=True)
class Entry:
    """One key of either checkpoint. ``sigil``: ``=`` same, ``*`` differs, ``-`` only in A, ``+`` only in B.

    ``detail``: how the values differ, or the value on the only side that has it; "" for ``=``. ``rank``: of the extras
    of one rank. ``counts``: False for what only one side has because the other has no place for it: extras of a rank
    that it does not have, extras that B's framework does not keep or adds, and empty containers.
    """

    sigil: Sigil
    section: Section
    key: str
    detail: str = ""
    rank: int | None = None
    counts: bool = True


@dataclass(frozen=True, slots=True, repr=False)
class Difference:
    """Every key of both, in A's order first. ``notes``: how keys of different types were matched. ``sources``: A, B."""

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


_Address: TypeAlias = tuple[Section, str, int | None]  # the rank whose extras it is among
_Leaves: TypeAlias = dict[_Address, Value]


def compare(
    a: Checkpoint,
    b: Checkpoint,
    *,
    sources: Sources,
    tolerance: Tolerance | None = None,
    strict: bool = False,
    threads: int = DEFAULT_THREADS,
    advance: Advance = no_progress,
) -> Difference:
    """Compare every key of ``a`` and ``b``. ``tolerance`` None compares bytes; with ``strict`` every entry counts.

    Raises NeedsInformationError if the optimizers' key types differ and cannot be matched by order,
    SourceIncompleteError if a tensor that must be read is incomplete.
    """
    matched = _match(a, b)
    left, right = _leaves(a, {}, matched.place), _leaves(b, matched.keys, matched.place)
    both = [address for address in left if address in right]
    same = _compare_values(both, left, right)
    pairs = [address for address in both if address not in same]

    def readers() -> tuple[BlockReader, BlockReader]:
        return BlockReader(a.files, sources), BlockReader(b.files, sources)

    def work(reader: tuple[BlockReader, BlockReader], address: _Address) -> str:
        one, other = left[address], right[address]
        if not isinstance(one, Tensor) or not isinstance(other, Tensor):
            return f"{value_text(one)} vs {value_text(other)}"
        return compare_tensors(reader[0], one, reader[1], other, tolerance, advance)

    order = in_file_order([left[address] for address in pairs])
    details = for_each(pairs, work, make_reader=readers, threads=threads, order=order)
    detail_of = dict(zip(pairs, details, strict=True))
    entries = [_entry(address, left, right, detail_of.get(address, "")) for address in left]
    entries.extend(_entry(address, left, right, "") for address in right if address not in left)
    if not strict:
        ranks = {"-": len(b.rank_extra), "+": len(a.rank_extra)}  # of the side that lacks the key
        not_kept = _not_kept(a, b)
        unlisted = {"-": _unlisted(b), "+": _unlisted(a)}

        def no_place(entry: Entry) -> bool:
            if entry.sigil not in ranks:
                return False
            value = (left if entry.sigil == "-" else right)[entry.section, entry.key, entry.rank]
            if entry.section is Section.MODEL:
                return entry.sigil == "-" and entry.section in not_kept and is_copy(value)
            if isinstance(value, (dict, list, tuple)) and not value:  # a DCP directory cannot hold it
                return True
            if entry.section is Section.OPTIM and entry.key in unlisted[entry.sigil]:
                return True
            return entry.section in not_kept or (entry.rank is not None and entry.rank >= ranks[entry.sigil])

        def is_copy(value: Value) -> bool:
            """Whether B has these bytes under another name: tied weights are kept once."""
            pair = readers()
            return isinstance(value, Tensor) and any(
                isinstance(other, Tensor)
                and (other.shape, other.dtype) == (value.shape, value.dtype)
                and not compare_tensors(pair[0], value, pair[1], other, None, advance)
                for (section, _, _), other in right.items()
                if section is Section.MODEL
            )

        entries = [replace(entry, counts=False) if no_place(entry) else entry for entry in entries]
    return Difference(tuple(entries), matched.notes, (a.source, b.source))


def _entry(address: _Address, left: _Leaves, right: _Leaves, detail: str) -> Entry:
    section, key, rank = address
    if address not in right:
        return Entry("-", section, key, value_text(left[address]), rank)
    if address not in left:
        return Entry("+", section, key, value_text(right[address]), rank)
    return Entry("*" if detail else "=", section, key, detail, rank)


def _not_kept(a: Checkpoint, b: Checkpoint) -> frozenset[Section]:
    """The sections in which B's framework keeps only what it needs, if it is another framework than A's.

    The extras beside a model and its optimizer are each framework's own. Weights without an optimizer have neither, and
    tied weights once.
    """
    if b.flavor in (PLAIN, a.flavor):
        return frozenset()
    flavor = flavor_named(b.flavor)
    weights = flavor is not None and bool(flavor.forms) and all(form.weights for form in flavor.forms)
    return frozenset(Section) if weights else frozenset({Section.EXTRA})


def _unlisted(checkpoint: Checkpoint) -> set[str]:
    """The keys of the lists that groups lack: Megatron does not store who is in which, and --no-weight-decay
    says it.
    """
    groups = (checkpoint.optim.param_groups if checkpoint.optim is not None else None) or []
    return {f"param_groups.{index}.params" for index, group in enumerate(groups) if "params" not in group}


def _compare_values(both: Sequence[_Address], left: _Leaves, right: _Leaves) -> set[_Address]:
    """The addresses whose values are equal and not tensors; everything else is left to ``work``."""
    same = set()
    for address in both:
        one, other = left[address], right[address]
        if not isinstance(one, Tensor) and not isinstance(other, Tensor) and same_value(one, other):
            same.add(address)
    return same


def _leaves(checkpoint: Checkpoint, renamed: Mapping[ParamKey, ParamKey], place: Mapping[ParamKey, int]) -> _Leaves:
    """Every leaf by section and dotted key. ``renamed``: optimizer keys to replace; ``place``: how to list them."""
    leaves: _Leaves = {}
    if checkpoint.model is not None:
        leaves.update(((Section.MODEL, name, None), leaf) for name, leaf in checkpoint.model.params.items())
    if checkpoint.optim is not None:
        for key, value in _optimizer_leaves(checkpoint.optim, renamed, place):
            leaves[Section.OPTIM, key, None] = value
    for path, value in _walk(checkpoint.extra):
        leaves[Section.EXTRA, path, None] = value
    for rank, extra in enumerate(checkpoint.rank_extra):
        for path, value in _walk(extra):
            leaves[Section.EXTRA, f"rank{rank}.{path}", rank] = value
    return leaves


def _walk(value: dict[Key, Value]) -> Iterator[tuple[str, Value]]:
    if value:
        for path, leaf in walk(value):
            yield ".".join(map(str, path)), leaf


def _optimizer_leaves(
    optim: OptimState, renamed: Mapping[ParamKey, ParamKey], place: Mapping[ParamKey, int]
) -> Iterator[tuple[str, Value]]:
    for param, states in optim.state.items():
        name = renamed.get(param, param)
        if not states:
            yield str(name), {}
        for state, leaf in states.items():
            if isinstance(leaf, (dict, list, tuple)):  # an optimizer may nest values in a state
                yield from ((".".join((str(name), state, *map(str, path))), item) for path, item in walk(leaf))
            else:
                yield (f"{name}.{state}" if state != BARE_VALUE else str(name)), leaf
    for index, group in enumerate(optim.param_groups or []):
        for key, value in group.items():
            if key == "params" and isinstance(value, (list, tuple)):
                params = [renamed.get(item, item) if isinstance(item, (int, str)) else item for item in value]
                if place:
                    params.sort(key=lambda item: place.get(item, 0) if isinstance(item, (int, str)) else 0)
                yield f"param_groups.{index}.params", params
            elif isinstance(value, Tensor):
                yield f"param_groups.{index}.{key!s}", value
            else:
                for path, leaf in _separate_values(value):
                    yield ".".join((f"param_groups.{index}.{key!s}", *map(str, path))), leaf
    yield from _walk(optim.extra)


def _separate_values(value: Value) -> Iterator[tuple[tuple[Key, ...], Value]]:
    """``value`` as one leaf (a tuple of betas is easiest to read whole), or by path what DCP stores separately:
    tensors, and the content of dicts, whose keys become text there.
    """
    if _has_dict_or_tensor(value):
        yield from walk(value)
    else:
        yield (), value


def _has_dict_or_tensor(value: Value) -> bool:
    return isinstance(value, (dict, Tensor)) or (
        isinstance(value, (list, tuple)) and any(map(_has_dict_or_tensor, value))
    )


@dataclass(frozen=True, slots=True)
class _Match:
    """``keys``: A's optimizer key for each of B's if the key types differ. ``place``: the place of each of A's keys in
    the model, if the order in which a param group lists names has no meaning.
    """

    keys: Mapping[ParamKey, ParamKey] = field(default_factory=dict)
    place: Mapping[ParamKey, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def _match(a: Checkpoint, b: Checkpoint) -> _Match:
    one, other = a.optim, b.optim
    if one is None or other is None:
        return _Match()
    types = one.key_type, other.key_type
    left, right = _orders(one), _orders(other)
    if types == ("name", "name"):
        return _other_order(left or [], right or [])
    if types[0] == types[1] or None in types:
        return _Match()
    if left is None or right is None:
        problem = "one of them has no param groups, so nothing says which id is which name"
    elif [len(group) for group in left] != [len(group) for group in right]:
        problem = f"their param groups have {_lengths(left)} and {_lengths(right)} parameters"
    else:
        pairs = _pair_keys(left, right)
        unfit = _why_unmatched(one, other, pairs)
        if unfit is None:
            return _Match(pairs, notes=(_note("the param groups", types),))
        # Names may be listed in any order; ids count in that of the model.
        place = _model_order(a if types[0] == "id" else b)
        in_model = ([sorted(keys, key=lambda key: place.get(key, 0)) for keys in each] for each in (left, right))
        pairs = _pair_keys(*in_model)
        if place and _why_unmatched(one, other, pairs) is None:
            if types[0] == "id":
                place = {key: key for keys in left for key in keys if isinstance(key, int)}
            return _Match(pairs, place, (_note("the model's parameters", types),))
        problem = unfit
    raise NeedsInformationError(
        f"the optimizers of {a.source} and {b.source} have different keys ({types[0]} and {types[1]}), "
        f"and cannot be matched: {problem}",
        why="ids count in the order of the param groups, and an order that does not fit proves nothing",
        next_step=_next_step(a, b, types[0]),
    )


def _other_order(left: Sequence[Sequence[ParamKey]], right: Sequence[Sequence[ParamKey]]) -> _Match:
    """Groups of names in any order: a name identifies its parameter, and its place in the list has no meaning."""
    if len(left) != len(right) or left == right:
        return _Match()
    if any(sorted(map(str, a)) != sorted(map(str, b)) for a, b in zip(left, right, strict=True)):
        return _Match()
    place = {key: at for at, key in enumerate(key for group in left for key in group)}
    return _Match(
        place=place,
        notes=("the param groups list the same names in another order, which does not count as a difference",),
    )


def _note(order: str, types: tuple[str | None, str | None]) -> str:
    return f"optimizer keys matched by the order of {order}: {types[1]}s of B to {types[0]}s of A"


def _pair_keys(left: Sequence[Sequence[ParamKey]], right: Sequence[Sequence[ParamKey]]) -> dict[ParamKey, ParamKey]:
    """A's key for each of B's, group by group."""
    return {
        key_b: key_a
        for group_a, group_b in zip(left, right, strict=True)
        for key_a, key_b in zip(group_a, group_b, strict=True)
    }


def _model_order(checkpoint: Checkpoint) -> dict[ParamKey, int]:
    """The place of each name in the model of the checkpoint that uses ids; empty if it keeps no order."""
    names = list(checkpoint.model.params) if checkpoint.model is not None else []
    return {name: at for at, name in enumerate(names)} if keeps_order(checkpoint, names) else {}


def _next_step(a: Checkpoint, b: Checkpoint, key_type: str | None) -> str:
    unnamed = [one.source for one in (a, b) if any(note.kind == "unnamed" for note in one.notes)]
    if unnamed:
        return f"add --units FILE: it says which parameters are in the slices of {unnamed[0]}"
    if a.model is not None and b.model is not None:
        return "compare the models alone: add --only model"
    convert = f"fsdpckpt convert {shlex.quote(b.source)} DST --key-type {key_type}"
    return to_copy("compare with what this writes to DST, a path of yours", convert)


def _lengths(groups: Sequence[Sequence[ParamKey]]) -> str:
    return "+".join(str(len(group)) for group in groups) or "no"


def _orders(optim: OptimState) -> list[list[ParamKey]] | None:
    if optim.param_groups is None:
        return None
    orders: list[list[ParamKey]] = []
    for group in optim.param_groups:
        params = group_params(group)
        if params is None:
            return None
        orders.append(params)
    return orders


def _why_unmatched(one: OptimState, other: OptimState, pairs: Mapping[ParamKey, ParamKey]) -> str | None:
    """Why keys cannot be matched by the order of the groups, None if every state matches."""
    for key_b, key_a in pairs.items():
        states_a, states_b = one.state.get(key_a, {}), other.state.get(key_b, {})
        for name, leaf in states_b.items():
            match = states_a.get(name)
            if isinstance(leaf, Tensor) and isinstance(match, Tensor) and leaf.shape != match.shape:
                return (
                    f"by that order {key_b} is {key_a}, but their states {name} have the shapes "
                    f"{list(leaf.shape)} and {list(match.shape)}"
                )
    stray = next((key for key in other.state if key not in pairs), None)
    return None if stray is None else f"the state of {stray} is in no param group"


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
    )


LONGEST = 60  # characters of a value in a message


def same_value(one: Value, other: Value) -> bool:
    """Equal in type and value. NaN equals NaN; the order of keys and the class of a dict do not matter, and a NumPy
    number equals the Python number of the same value, as in a full torch file.
    """
    if isinstance(one, Object) != isinstance(other, Object):
        one, other = (_number(each) for each in (one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same_value(value, other[key]) for key, value in one.items())
    if type(one) is not type(other):
        return False
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(same_value(a, b) for a, b in zip(one, other, strict=True))
    if isinstance(one, Object) and isinstance(other, Object):
        return _parts(one) == _parts(other) or all(
            same_value(a, b) for a, b in zip(_parts(one), _parts(other), strict=True)
        )
    return one == other or (isinstance(one, float) and one != one and other != other)  # noqa: PLR0124


def _number(value: Value) -> Value:
    number = value.number if isinstance(value, Object) else None
    return value if number is None else number.item()


def _parts(value: Object) -> list[Value]:
    entries: list[Value] = [(key, item) for key, item in value.entries]
    return [value.function, value.new, value.has_state, list(value.args), value.state, list(value.items), entries]


def _object_text(value: Global | Object) -> str:
    if isinstance(value, Object):
        return f"{value.function}(...)"
    return "(not read)" if (value.module, value.name) == ("fsdpckpt", "unread") else str(value)


def value_text(value: Value) -> str:
    """A value in at most ``LONGEST`` characters: scalars as Python writes them, tensors and objects by their type."""
    if isinstance(value, Tensor):
        return f"tensor {value.dtype.name} {list(value.shape)}"
    if isinstance(value, (Global, Object)):
        text = _object_text(value)
    elif isinstance(value, (bytes, bytearray)):
        text = f"{len(value)} bytes"
    elif isinstance(value, (list, tuple)) and len(value) > 8:
        kind = "a list" if isinstance(value, list) else "a tuple"
        text = f"{kind} of {len(value)}, beginning {', '.join(value_text(item) for item in value[:2])}"
    elif isinstance(value, (list, tuple)):
        inner = ", ".join(value_text(item) for item in value)
        text = f"[{inner}]" if isinstance(value, list) else f"({inner}{',' if len(value) == 1 else ''})"
    else:
        text = repr(value)
    return text if len(text) <= LONGEST else text[: LONGEST - 3] + "..."
