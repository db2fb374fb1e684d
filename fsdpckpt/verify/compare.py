"""Compares two checkpoints logically: keys, shapes, dtypes, bytes, param groups and extras, whatever the layout."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TypeAlias, TypeGuard

from fsdpckpt.ir.buffers import undecided_copies
from fsdpckpt.ir.checkpoint import Checkpoint, NamedSection, Section
from fsdpckpt.ir.optimizer import ParamKey
from fsdpckpt.ir.row_names import rename_shared_states
from fsdpckpt.ir.sections import alone
from fsdpckpt.ir.tensors import Tensor
from fsdpckpt.ir.values import Value, as_float, equal, value_text
from fsdpckpt.progress import NO_PROGRESS, Progress
from fsdpckpt.storage.sources import Sources
from fsdpckpt.text import some_of
from fsdpckpt.transform.known_names import known_names
from fsdpckpt.verify.absence import Absence
from fsdpckpt.verify.blocks import BlockReader, for_each, in_file_order, threads_for
from fsdpckpt.verify.difference import ComparedKey, Difference, Sigil
from fsdpckpt.verify.elements import SAME, Compared, Tolerance, compare_tensors
from fsdpckpt.verify.leaves import Address, Leaves, dotted, leaves_of, match_addresses, parameter_of, setting_of
from fsdpckpt.verify.optimizer_keys import Match, match_optimizers
from fsdpckpt.verify.repeated import nbytes_to_read
from fsdpckpt.verify.wrappers import UNWRAPPED, differ_by_wrappers, has_bare_names, without_wrappers


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
    # Both sides by the same names: of shared parameters, and without the prefixes of wrappers.
    sides = (a, b)
    for units in (a.units, b.units):
        if units is not None:
            sides = (rename_shared_states(sides[0], units), rename_shared_states(sides[1], units))
    bare = any(map(has_bare_names, sides))
    unwrapped = [without_wrappers(side, bare=bare) for side in sides]
    plain_a, plain_b = (each.checkpoint for each in unwrapped)
    notes = [UNWRAPPED] if any(each.shortened for each in unwrapped) else []
    notes += _one_of_several_copies(sides)
    # Every leaf of each side by its address. Named sections are paired, and compared below A's place.
    matched = match_optimizers(plain_a, plain_b)
    flavors = (a.flavor, b.flavor)
    leaves_a = leaves_of(plain_a, {}, matched.positions, flavors)
    leaves_b = leaves_of(plain_b, matched.keys, matched.positions, flavors)
    for named_a, named_b in _pair_sections(*sides):
        more_a, more_b, more_notes = _named_leaves(sides, named_a, named_b, bare=bare)
        leaves_a.update(more_a)
        leaves_b.update(more_b)
        notes += more_notes
    in_b = match_addresses(leaves_a, leaves_b)
    compared = _compare_values(
        _Sides(plain_a, plain_b, sources),
        {address: (leaves_a[address], leaves_b[address_b]) for address, address_b in in_b.items()},
        tolerance,
        threads if threads is not None else threads_for(plain_a, plain_b),
        progress,
    )
    # A's leaves in A's order, then those that only B has.
    absence = Absence(plain_a, plain_b, sources, leaves_b)
    names = known_names(plain_a) or known_names(plain_b)
    entries: list[ComparedKey] = []
    for address, value in leaves_a.items():
        if address in in_b:
            entries.append(_entry_of_both(address, compared[address], names))
            continue
        counts = strict or absence.counts(address, value, plain_b)
        entries.append(_entry_of_one("-", address, value, names, counts=counts))
    in_both = set(in_b.values())
    for address, value in leaves_b.items():
        if address not in in_both:
            counts = strict or absence.counts(address, value, plain_a)
            entries.append(_entry_of_one("+", address, value, names, counts=counts))
    notes += differ_by_wrappers(entries)
    return Difference(tuple(entries), (*notes, *matched.notes), (a.source, b.source))


def _one_of_several_copies(sides: Iterable[Checkpoint]) -> list[str]:
    """A note for each side of whose tensors ranks hold different copies, or perhaps parts."""
    notes: list[str] = []
    for side in sides:
        keys = [str(problem.key) for problem in undecided_copies(side)]
        if keys:
            notes.append(f"{side.source}: only the lowest rank's copy is compared of {some_of(keys, 5)}")
    return notes


def _entry_of_both(address: Address, compared: Compared, names: Mapping[ParamKey, str]) -> ComparedKey:
    """``names``: of ids."""
    param, state = parameter_of(address, names)
    return ComparedKey(
        "*" if compared.text else "=",
        address.section,
        dotted(address),
        compared.text,
        address.rank,
        param=param,
        state=state,
        setting=setting_of(address),
        change=compared.change,
        numbers=compared.numbers,
    )


def _entry_of_one(
    sigil: Sigil, address: Address, value: Value, names: Mapping[ParamKey, str], *, counts: bool
) -> ComparedKey:
    param, state = parameter_of(address, names)
    text, rank = value_text(value), address.rank
    return ComparedKey(sigil, address.section, dotted(address), text, rank, counts, param, state, setting_of(address))


_PairedSections: TypeAlias = "tuple[NamedSection | None, NamedSection | None]"


def _pair_sections(a: Checkpoint, b: Checkpoint) -> Iterator[_PairedSections]:
    """The named sections of A with those of B: by place, else by name, else by their order if as many are left.

    A framework renames them: the optimizers of Lightning are ``optimizer_0`` or ``optimizer_states.0``.
    """
    for section in (Section.MODEL, Section.OPTIM):
        of_a = [named for named in a.named if named.section is section]
        of_b = [named for named in b.named if named.section is section]
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
) -> tuple[Leaves, Leaves, list[str]]:
    """The leaves of one named section of A and of that of B, by addresses below A's place, and notes."""
    unwrapped = [
        without_wrappers(alone(side, named), bare=bare) if named is not None else None
        for side, named in zip(sides, (a, b), strict=True)
    ]
    alone_a, alone_b = (None if each is None else each.checkpoint for each in unwrapped)
    matched = match_optimizers(alone_a, alone_b) if alone_a is not None and alone_b is not None else Match()
    place = a or b
    if place is None:
        return {}, {}, []

    def below(checkpoint: Checkpoint | None, renamed: Mapping[ParamKey, ParamKey]) -> Leaves:
        leaves = leaves_of(checkpoint, renamed, matched.positions) if checkpoint is not None else {}
        of_section: Leaves = {}
        for address, value in leaves.items():
            if address.section is place.section:
                of_section[address.below(place.path)] = value
        return of_section

    own = [UNWRAPPED] if any(each is not None and each.shortened for each in unwrapped) else []
    notes = [f"{place.label}: {note}" for note in (*own, *matched.notes)]
    return below(alone_a, {}), below(alone_b, matched.keys), notes


@dataclass(frozen=True, slots=True, eq=False)
class _Sides:
    a: Checkpoint
    b: Checkpoint
    sources: Sources

    def readers(self) -> tuple[BlockReader, BlockReader]:
        return BlockReader(self.a.files, self.sources), BlockReader(self.b.files, self.sources)


def _compare_values(
    sides: _Sides,
    values: Mapping[Address, tuple[Value, Value]],
    tolerance: Tolerance | None,
    threads: int,
    progress: Progress,
) -> dict[Address, Compared]:
    """How each of ``values``, A's and B's, differs."""
    results: dict[Address, Compared] = {}
    tensors: list[tuple[Address, Tensor, Tensor]] = []
    for address, (value_a, value_b) in values.items():
        if isinstance(value_a, Tensor) and isinstance(value_b, Tensor):
            tensors.append((address, value_a, value_b))
        else:
            results[address] = _compare_plain(value_a, value_b)

    def work(readers: tuple[BlockReader, BlockReader], pair: tuple[Address, Tensor, Tensor]) -> Compared:
        return compare_tensors(readers[0], pair[1], readers[1], pair[2], tolerance, progress)

    progress.begin("compare", sum(nbytes_to_read(tensor) for _, tensor, _ in tensors))
    order = in_file_order([tensor for _, tensor, _ in tensors])
    compared = for_each(tensors, work, make_reader=sides.readers, threads=threads, order=order)
    progress.end()
    for (address, _, _), result in zip(tensors, compared, strict=True):
        results[address] = result
    return results


def _compare_plain(a: Value, b: Value) -> Compared:
    """How two values differ of which at most one is a tensor."""
    text = "" if equal(a, b, as_loaded=True) else f"{value_text(a)} vs {value_text(b)}"
    numbers = None
    if _is_number(a) and _is_number(b):
        numbers = as_float(a), as_float(b)
    return Compared(text, numbers=numbers) if text or numbers else SAME


def _is_number(value: Value) -> TypeGuard[int | float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


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
