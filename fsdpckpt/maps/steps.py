"""The steps of a rule: what is done with the tensors whose names match, in PyTorch's words.

A rule works on a *family*: the tensors by two numbers. The first is the position among the patterns of the rule, the
second what stands at the place of a stacked dimension; each is None where there is only one. Every step has an inverse,
which a map that is used backwards takes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from math import prod
from typing import TypeAlias

from fsdpckpt.ir.tensors import Tensor
from fsdpckpt.maps.boxes import Divide, Merge, Operation, Permute, Rearranger

Member: TypeAlias = tuple[int | None, int | None]
"""The position among the patterns, and the number at the place of a stacked dimension."""

Family: TypeAlias = dict[Member, Tensor]
Values: TypeAlias = Mapping[str, int]
"""The numbers that a map leaves open, by name."""


class StepError(Exception):
    """A step does not fit the tensors. ``member``: the one that shows it."""

    def __init__(self, what: str, member: Member) -> None:
        super().__init__(what)
        self.what = what
        self.member = member


@dataclass(frozen=True, slots=True)
class Size:
    """A number in a map: factors and divisors, each a number or the name of one, as in ``head_dim / 2``."""

    text: str

    @property
    def names(self) -> list[str]:
        return [word for word in re.split(r"[*/\s]+", self.text) if word and not word.isdigit()]

    def value(self, values: Values) -> int:
        """Raises ValueError if a division leaves a rest."""
        words = re.findall(r"[*/]|[^*/\s]+", self.text)
        result = _number(words[0], values)
        for sign, word in zip(words[1::2], words[2::2], strict=True):
            number = _number(word, values)
            if sign == "/" and (not number or result % number):
                raise ValueError(f"{self.text}: {number} does not divide {result}")
            result = result // number if sign == "/" else result * number
        return result


_SIZE = re.compile(r"\s*[A-Za-z0-9_]+\s*([*/]\s*[A-Za-z0-9_]+\s*)*", re.ASCII)


def size_of(text: str) -> Size:
    """The number that ``text`` writes. Raises ValueError."""
    if not _SIZE.fullmatch(text):
        raise ValueError(f"{text!r} is no number: names and whole numbers with * and / between them")
    return Size(text)


def _number(word: str, values: Values) -> int:
    return int(word) if word.isdigit() else values[word]


@dataclass(frozen=True, slots=True)
class Stack:
    """The tensors of all numbers at ``{place}`` become one, with a new dimension ``dim``, as ``torch.stack``."""

    place: str
    dim: int

    def inverse(self) -> Step:
        return Unstack(self.place, self.dim)

    def run(self, family: Family, rearranger: Rearranger, values: Values) -> Family:
        result: Family = {}
        for position, members in _by_position(family).items():
            tensors = [tensor for _, tensor in sorted(members.items())]
            first = (position, next(iter(sorted(members))))
            for number, tensor in sorted(members.items()):
                if tensor.shape != tensors[0].shape:
                    raise StepError(
                        f"its shape is {list(tensor.shape)}, and {list(tensors[0].shape)} before", (position, number)
                    )
            if self.dim > tensors[0].ndim:
                raise StepError(f"{_shape(tensors[0])} has no place for a new dimension {self.dim}", first)
            result[position, None] = rearranger.stack(tensors, self.dim)
        return result

    def __str__(self) -> str:
        return f"stack {self.place} {self.dim}"


@dataclass(frozen=True, slots=True)
class Unstack:
    """Each element of dimension ``dim`` becomes a tensor of its own, whose number is at ``{place}``."""

    place: str
    dim: int

    def inverse(self) -> Step:
        return Stack(self.place, self.dim)

    def run(self, family: Family, rearranger: Rearranger, values: Values) -> Family:
        result: Family = {}
        for (position, number), tensor in family.items():
            _require_dim(tensor, self.dim, (position, number))
            if not tensor.shape[self.dim]:
                what = f"{_shape(tensor)} has no element along dimension {self.dim}: nothing would be left of it"
                raise StepError(what, (position, number))
            for index, part in enumerate(rearranger.unstack(tensor, self.dim)):
                result[position, index] = part
        return result

    def __str__(self) -> str:
        return f"unstack {self.place} {self.dim}"


@dataclass(frozen=True, slots=True)
class Cat:
    """The tensors of all patterns become one, one after the other along dimension ``dim``, as ``torch.cat``.

    ``sizes``: how their sizes relate to each other.
    """

    dim: int
    sizes: tuple[Size, ...]

    def inverse(self) -> Step:
        return Split(self.dim, self.sizes)

    def run(self, family: Family, rearranger: Rearranger, values: Values) -> Family:
        sizes = [size.value(values) for size in self.sizes]
        by_number: dict[int | None, list[tuple[Member, Tensor]]] = {}
        for member, tensor in sorted(family.items(), key=lambda item: item[0][0] or 0):
            by_number.setdefault(member[1], []).append((member, tensor))
        result: Family = {}
        for number, members in by_number.items():
            unit: int | None = None
            for (member, tensor), size in zip(members, sizes, strict=True):
                _require_dim(tensor, self.dim, member)
                whole, rest = divmod(tensor.shape[self.dim], size) if size else (0, 1)
                unit = whole if unit is None else unit
                other = [extent for dim, extent in enumerate(tensor.shape) if dim != self.dim]
                first = [extent for dim, extent in enumerate(members[0][1].shape) if dim != self.dim]
                if rest or whole != unit or other != first:
                    raise StepError(
                        f"{_shape(tensor)} does not fit {_shape(members[0][1])} along dimension {self.dim} in the "
                        f"proportions {', '.join(map(str, sizes))}",
                        member,
                    )
            result[None, number] = rearranger.cat([tensor for _, tensor in members], self.dim)
        return result

    def __str__(self) -> str:
        return f"cat {self.dim}"


@dataclass(frozen=True, slots=True)
class Split:
    """One tensor becomes one for each pattern, along dimension ``dim``, as ``torch.split``.

    ``sizes``: how their sizes relate to each other.
    """

    dim: int
    sizes: tuple[Size, ...]

    def inverse(self) -> Step:
        return Cat(self.dim, self.sizes)

    def run(self, family: Family, rearranger: Rearranger, values: Values) -> Family:
        sizes = [size.value(values) for size in self.sizes]
        result: Family = {}
        for (position, number), tensor in family.items():
            _require_dim(tensor, self.dim, (position, number))
            unit, rest = divmod(tensor.shape[self.dim], sum(sizes)) if all(sizes) else (0, 1)
            if rest:
                raise StepError(
                    f"dimension {self.dim} of {_shape(tensor)} cannot be split in the proportions "
                    f"{', '.join(map(str, sizes))}",
                    (position, number),
                )
            parts = rearranger.split(tensor, self.dim, [unit * size for size in sizes])
            result.update({(part, number): each for part, each in enumerate(parts)})
        return result

    def __str__(self) -> str:
        return f"split {self.dim}"


@dataclass(frozen=True, slots=True)
class Transpose:
    """Two dimensions change places, as ``torch.transpose``. ``of``: see ``Rearrange``."""

    first: int
    second: int
    of: tuple[int, ...] | None = None

    def inverse(self) -> Step:
        return self

    def run(self, family: Family, rearranger: Rearranger, values: Values) -> Family:
        result: Family = {}
        for member, tensor in family.items():
            if not _concerns(self.of, member):
                result[member] = tensor
                continue
            for dim in (self.first, self.second):
                _require_dim(tensor, dim, member)
            order = list(range(tensor.ndim))
            order[self.first], order[self.second] = self.second, self.first
            result[member] = rearranger.apply(tensor, Permute(tuple(order)))
        return result

    def __str__(self) -> str:
        return f"transpose {self.first} {self.second}"


@dataclass(frozen=True, slots=True)
class Rearrange:
    """Dimensions are split, permuted and merged, in the notation of einops: ``(h d two) i -> (h two d) i``.

    ``before``, ``after``: the names of the axes in each dimension. ``sizes``: of axes; one in each dimension may be
    left open. ``of``: the positions of the tensors that are rearranged; None: all.
    """

    before: tuple[tuple[str, ...], ...]
    after: tuple[tuple[str, ...], ...]
    sizes: tuple[tuple[str, Size], ...]
    of: tuple[int, ...] | None = None

    def inverse(self) -> Step:
        return Rearrange(self.after, self.before, self.sizes, self.of)

    def run(self, family: Family, rearranger: Rearranger, values: Values) -> Family:
        known = {axis: size.value(values) for axis, size in self.sizes}
        result: Family = {}
        for member, tensor in family.items():
            operations = self._operations(tensor, member, known) if _concerns(self.of, member) else []
            result[member] = rearranger.apply(tensor, *operations)
        return result

    def _operations(self, tensor: Tensor, member: Member, known: Mapping[str, int]) -> list[Operation]:
        if tensor.ndim != len(self.before):
            raise StepError(f"{_shape(tensor)} does not have the {len(self.before)} dimensions of {self}", member)
        sizes = dict(known)
        for axes, extent in zip(self.before, tensor.shape, strict=True):
            left = [axis for axis in axes if axis not in known]
            given = prod(known[axis] for axis in axes if axis in known)
            if not given or extent % given or (not left and extent != given):
                raise StepError(f"{extent} of {_shape(tensor)} is no multiple of {given}, as {self} says", member)
            sizes.update(dict.fromkeys(left, extent // given))
        operations: list[Operation] = []
        for dim in range(len(self.before) - 1, -1, -1):  # from the last on, so that the others keep their places
            axes = self.before[dim]
            for at in range(len(axes) - 1):
                operations.append(Divide(dim + at, prod(sizes[each] for each in axes[at + 1 :])))
        flat = [axis for axes in self.before for axis in axes]
        order = tuple(flat.index(axis) for axes in self.after for axis in axes)
        if order != tuple(range(len(flat))):
            operations.append(Permute(order))
        for dim, axes in enumerate(self.after):
            for at in range(len(axes) - 2, -1, -1):  # the last two first
                operations.append(Merge(dim + at, prod(sizes[each] for each in axes[at + 1 :])))
        return operations

    def __str__(self) -> str:
        return f"{_axes_text(self.before)} -> {_axes_text(self.after)}"


Step: TypeAlias = Stack | Unstack | Cat | Split | Transpose | Rearrange


def count_after(step: Step, count: int) -> int:
    """How many tensors ``step`` makes of ``count``, for each member of a stack."""
    if isinstance(step, Cat):
        return 1
    return len(step.sizes) if isinstance(step, Split) else count


def _concerns(of: tuple[int, ...] | None, member: Member) -> bool:
    return of is None or member[0] in of


def rearrange(text: str, sizes: Mapping[str, Size], of: tuple[int, ...] | None = None) -> Rearrange:
    """The step that ``text`` writes. Raises ValueError."""
    before, arrow, after = text.partition("->")
    if not arrow:
        raise ValueError(f"{text!r} has no ->")
    step = Rearrange(_axes(before), _axes(after), tuple(sizes.items()), of)
    names, names_after = list(chain(*step.before)), list(chain(*step.after))
    if sorted(names) != sorted(names_after) or len(set(names)) != len(names) or not names:
        raise ValueError(f"{text!r}: both sides need the same axes, each once")
    unknown = next((axis for axis in sizes if axis not in names), None)
    if unknown is not None:
        raise ValueError(f"{text!r} has no axis {unknown}")
    for axes in (*step.before, *step.after):
        left = [axis for axis in axes if axis not in sizes]
        if len(left) > 1:
            raise ValueError(f"{text!r} leaves the sizes of {' and '.join(left)} open, which are in one dimension")
    return step


_GROUP = re.compile(r"\(\s*([A-Za-z_]\w*(?:\s+[A-Za-z_]\w*)*)\s*\)|([A-Za-z_]\w*)|(\S)", re.ASCII)


def _axes(text: str) -> tuple[tuple[str, ...], ...]:
    groups: list[tuple[str, ...]] = []
    for match in _GROUP.finditer(text):
        if match[3] is not None:
            raise ValueError(
                f"{text.strip()!r}: {match[3]!r} is no axis: names, in brackets where they are one dimension"
            )
        groups.append(tuple(match[1].split()) if match[1] is not None else (match[2],))
    return tuple(groups)


def _axes_text(groups: Sequence[Sequence[str]]) -> str:
    return " ".join(axes[0] if len(axes) == 1 else f"({' '.join(axes)})" for axes in groups)


def _by_position(family: Family) -> dict[int | None, dict[int, Tensor]]:
    result: dict[int | None, dict[int, Tensor]] = {}
    for (position, number), tensor in family.items():
        result.setdefault(position, {})[number or 0] = tensor
    return result


def _require_dim(tensor: Tensor, dim: int, member: Member) -> None:
    if dim >= tensor.ndim:
        raise StepError(f"{_shape(tensor)} has no dimension {dim}", member)


def _shape(tensor: Tensor) -> str:
    return f"a tensor of shape {list(tensor.shape)}"
