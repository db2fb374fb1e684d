"""Every reading of a list of names under unit prefixes that counts may have to decide between.

A list of names may not say which of them are buffers, which are one shared parameter, which lie beside the wrapped
modules. Each natural reading is one ``Wrapping``; ``units_inference`` finds those that the element counts allow.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

from fsdpckpt.flat.slice_lengths import is_flat_key, slice_lengths
from fsdpckpt.flat.units.build import Settings, build_units
from fsdpckpt.flat.units.globs import owner
from fsdpckpt.flat.units.lengths import elements
from fsdpckpt.flat.units.names import NamedParam, NameList
from fsdpckpt.flat.units.prefixes import Prefixes, raw_names
from fsdpckpt.ir.checkpoint import Checkpoint, group_params
from fsdpckpt.ir.dtypes import DType
from fsdpckpt.ir.names import clean
from fsdpckpt.ir.tensors import SLICES, Tensor
from fsdpckpt.ir.units import FLAT_PARAM, Units

__all__ = ["Wrapping", "wrappings"]

_PADDING = 16  # elements of alignment a parameter can bring, and more
_CLASSES = 3  # kinds of buffers (last words of names) that are left out at once: a norm has two of its own


@dataclass(frozen=True, slots=True)
class Wrapping:
    """Units whose settings are open. ``ordered``: the order of their parameters is the model's.

    ``label`` says where they come from, ``assumed`` what this reading takes some names for. ``strided``: strides are
    known too. Readings of a higher ``tier`` are for when none of a lower one fits.
    """

    units: Units
    label: str
    ordered: bool = True
    assumed: tuple[str, ...] = ()
    tier: int = 0
    strided: bool = False


def wrappings(
    checkpoint: Checkpoint, names: NameList, prefixes: Prefixes, *, parameters: Sequence[str] | None = None
) -> Iterator[Wrapping]:
    """The readings of ``names``, lower tiers first. ``parameters``: exactly the names of ``model.parameters()``."""
    reading = _Reading(checkpoint, names, prefixes)
    if parameters is not None:
        yield from reading.exact(parameters)
        return
    yield from reading.all()


class _Reading:
    def __init__(self, checkpoint: Checkpoint, names: NameList, prefixes: Prefixes) -> None:
        self.names = names
        self.world_size = checkpoint.world_size
        self.elements = elements(checkpoint)
        self.prefixes = prefixes
        self.label = f"units: names from {names.label}, prefixes from {prefixes.label}"
        self.dtypes = _flat_dtypes(checkpoint)
        self.state_dtype = _state_dtype(checkpoint) if names.foreign else None
        self.listed = _listed(checkpoint)
        beside = _beside(checkpoint)
        params = [
            replace(param, sharded=False) if beside.get(param.name) == param.numel else param for param in names.params
        ]
        self.possible = [param for param in params if param.possible or param.name in self.listed]
        self.plain = [
            param
            for param in params
            if param.sharded is False and param.shape and param.dtype.floating and param.name not in self.listed
        ]

    def exact(self, parameters: Sequence[str]) -> Iterator[Wrapping]:
        held = {param.name: param for param in self.names.params}
        chosen = [held[name] for name in parameters if name in held]
        order = replace(self.names, ordered=True)
        left = [param for param in self.possible if param.sharded and param.name not in set(parameters)]
        firsts = [[one.name for one in chosen if _alike(one, param)] for param in left]
        for roots in self._roots(chosen):
            if all(len(names) == 1 for names in firsts):
                shared = [(param.name, names[0]) for param, names in zip(left, firsts, strict=True)]
                yield self._wrapping(chosen, roots, shared=shared, names=order)

    def all(self) -> Iterator[Wrapping]:
        for roots in self._roots(self.possible):
            yield self._wrapping(self.possible, roots)
            if self.plain:
                both = {param.name: param for param in (*self.possible, *self.plain)}
                params = [both[param.name] for param in self.names.params if param.name in both]
                said = f"taken for parameters that FSDP does not manage: {_some(self.plain)}"
                yield self._wrapping(params, roots, assumed=said)
            for params, said in self._without_buffers():
                yield self._wrapping(params, roots, assumed=said)
        for roots in self._roots(self.possible):
            for later, first in self._ties():
                params = [param for param in self.possible if param.name != later]
                said = f"{later} taken for {first}, shared"
                yield self._wrapping(params, roots, shared=[(later, first)], assumed=said, tier=1)
        for roots in self._roots(self.possible):
            for kind in self._kinds():
                gone = [param for param in self._open() if _last(param) == kind]
                for later, first in self._ties(gone):
                    left_out = {later, *(param.name for param in gone)}
                    params = [param for param in self.possible if param.name not in left_out]
                    said = f"taken for buffers: {_some(gone)}; {later} taken for {first}, shared"
                    yield self._wrapping(params, roots, shared=[(later, first)], assumed=said, tier=2)

    def _open(self) -> list[NamedParam]:
        """Names that may be buffers."""
        return [param for param in self.possible if param.sharded is None and param.name not in self.listed]

    def _kinds(self) -> list[str]:
        return list(dict.fromkeys(map(_last, self._open())))

    def _explains(self, gone: Iterable[NamedParam], *, all_shown: bool) -> bool:
        """Whether the slices can hold all names but these: padding hides a few elements. ``all_shown``: no parameter
        is without state."""
        left = sum(param.numel for param in self.possible) - sum(param.numel for param in gone)
        slack = self.world_size * (len(self.prefixes.prefixes) + 1)
        if self.dtypes:  # flat parameters as they lie in the model section, alignment included
            slack += _PADDING * len(self.possible)
        return any(left + slack >= found and (left - slack <= found or not all_shown) for found in self.elements)

    def _roots(self, params: Sequence[NamedParam]) -> Iterator[Collection[str]]:
        """The prefixes; whether the root is wrapped is open when nothing names it and nothing in it must be sharded."""
        yield self.prefixes.prefixes
        inner = [prefix for prefix in self.prefixes.prefixes if prefix]
        if not self.prefixes.complete and inner:
            beside = [param for param in params if owner(param.name, inner) is None]
            if beside and not any(param.sharded for param in beside):
                yield inner

    def _without_buffers(self) -> Iterator[tuple[list[NamedParam], str]]:
        """Without the names that may be buffers, by their last words: all of a kind are, or none."""
        kinds = self._kinds()
        for many in range(1, min(_CLASSES, len(kinds)) + 1):
            for left_out in combinations(kinds, many):
                gone = [param for param in self._open() if _last(param) in left_out]
                names = {param.name for param in gone}
                if len(names) < len(self.possible) and self._explains(gone, all_shown=False):
                    params = [param for param in self.possible if param.name not in names]
                    yield params, f"taken for buffers: {_some(gone)}"

    def _ties(self, gone: Sequence[NamedParam] = ()) -> Iterator[tuple[str, str]]:
        """Pairs that may be one parameter: of one shape, the later one not in the optimizer's list. ``gone`` are left
        out before."""
        by_shape: dict[tuple[object, ...], list[str]] = {}
        for param in self.possible:
            earlier = by_shape.setdefault((param.shape, param.dtype.name), [])
            if param in gone:
                continue
            if param.name not in self.listed and earlier and self._explains([param, *gone], all_shown=True):
                yield from ((param.name, first) for first in earlier)
            earlier.append(param.name)

    def _wrapping(
        self,
        params: Sequence[NamedParam],
        prefixes: Collection[str],
        *,
        shared: Sequence[tuple[str, str]] = (),
        assumed: str | None = None,
        tier: int = 0,
        names: NameList | None = None,
    ) -> Wrapping:
        named = names or self.names
        units = build_units(
            [self._typed(param) for param in params],
            prefixes,
            Settings(use_orig_params=False),
            unmanaged=[param.name for param in params if param.sharded is False],
            shared=(*named.shared, *shared),
        )
        return Wrapping(units, self.label, named.ordered, (assumed,) if assumed else (), tier)

    def _typed(self, param: NamedParam) -> NamedParam:
        """With the dtype that the checkpoint itself shows: a reference may have been cast."""
        unit = owner(param.name, self.prefixes.prefixes)
        dtype = self.dtypes.get(unit or "", self.state_dtype)
        return param if dtype is None else replace(param, dtype=dtype)


def _beside(checkpoint: Checkpoint) -> dict[str, int]:
    """The elements of each tensor that every rank holds whole beside flat parameters: no flat parameter holds it."""
    params = checkpoint.model.params if checkpoint.model is not None else {}
    if not any(map(is_flat_key, params)):
        return {}
    found: dict[str, int] = {}
    for key, leaf in params.items():
        if isinstance(leaf, Tensor) and not is_flat_key(key):
            lengths = slice_lengths(leaf, checkpoint.world_size) if leaf.placement == SLICES else None
            if lengths is None or (lengths == lengths[0]).all():
                found[clean(key)] = leaf.numel if lengths is None else int(lengths[0])
    return found


def _last(param: NamedParam) -> str:
    return param.name.rpartition(".")[2]


def _alike(one: NamedParam, other: NamedParam) -> bool:
    return one.shape == other.shape and one.dtype == other.dtype


def _some(params: Sequence[NamedParam]) -> str:
    names = ", ".join(param.name for param in params[:4])
    return names + (f" and {len(params) - 4} more" if len(params) > 4 else "")


def _flat_dtypes(checkpoint: Checkpoint) -> dict[str, DType]:
    params = checkpoint.model.params if checkpoint.model is not None else {}
    return {
        clean(key)[: -len(FLAT_PARAM)].rstrip("."): leaf.dtype
        for key, leaf in params.items()
        if is_flat_key(key) and isinstance(leaf, Tensor)
    }


def _state_dtype(checkpoint: Checkpoint) -> DType | None:
    """The dtype of the slices of the optimizer, as of its parameters, when all have one."""
    found = {
        leaf.dtype
        for states in (checkpoint.optim.state.values() if checkpoint.optim is not None else ())
        for leaf in states.values()
        if isinstance(leaf, Tensor) and leaf.ndim and leaf.dtype.floating
    }
    return found.pop() if len(found) == 1 else None


def _listed(checkpoint: Checkpoint) -> set[str]:
    """Original names that the optimizer lists: parameters for certain."""
    optim = checkpoint.optim
    if optim is None:
        return set()
    keys = [key for group in optim.param_groups or () for key in group_params(group) or ()]
    names = [*raw_names(checkpoint), *(key for key in keys if isinstance(key, str))]
    return {clean(name) for name in names if not is_flat_key(name)}
