"""Enumerates the units that names and ids may mean; the lengths of slices decide between them.

A list of names may not show which of them are buffers, which are one shared parameter, and which are outside the
wrapped modules. Each plausible choice is one ``Candidate``; ``inference`` finds those that the element counts allow.

The ids of an optimizer count group by group; within a group they follow ``model.parameters()``, and parameters that the
optimizer was not given have none. ``group_candidates`` finds the assignments in that order whose lengths match: if
there are two, the ids are ambiguous.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations
from math import prod
from typing import TypeAlias

import numpy as np

from fsdpckpt.flat.names import UnitPrefixes, raw_names
from fsdpckpt.flat.slices import is_number_per_rank, is_sliced, possible_numels, slice_lengths
from fsdpckpt.flat.units.build import Settings, build_units, innermost_unit
from fsdpckpt.ir.checkpoint import Checkpoint
from fsdpckpt.ir.dtypes import DType
from fsdpckpt.ir.listing import Listing
from fsdpckpt.ir.names import clean
from fsdpckpt.ir.optimizer import Optimizer
from fsdpckpt.ir.parameters import Parameter
from fsdpckpt.ir.placements import Slices
from fsdpckpt.ir.tensors import Tensor
from fsdpckpt.ir.units import FLAT_PARAM, Groups, Units
from fsdpckpt.layouts.flattened import is_flat_key, place_units
from fsdpckpt.text import some_of
from fsdpckpt.transform.assignment import in_order
from fsdpckpt.transform.parameter_order import split_by_sizes
from fsdpckpt.transform.stated_orders import groups_by_user

_PADDING = 16  # elements: an upper bound of the alignment that one parameter adds
_PARAMETERS = ("weight", "bias")  # of a layer of torch.nn: no buffer has these last components
_CLASSES = 3  # kinds of buffers (last components of names) that are left out at once: a norm layer alone has two


@dataclass(frozen=True, slots=True)
class Candidate:
    """Units whose settings are still unknown. ``ordered``: their parameters are in the model's order.

    ``label``: where they come from. ``assumed``: what some names are assumed to be. ``strides_known``:
    whether it has the parameters' strides. A later ``turn`` comes only if no candidate of an earlier one matches.
    ``alternatives``: the candidates in which a name that this one leaves out takes the place of another. ``groups``:
    the optimizer's, by original names, if the user lists the parameters in its order.
    """

    units: Units
    label: str
    ordered: bool = True
    assumed: tuple[str, ...] = ()
    turn: int = 0
    strides_known: bool = False
    alternatives: Callable[[], Iterable[Candidate]] = tuple
    groups: Groups | None = None


def candidates(
    checkpoint: Checkpoint,
    names: Listing,
    prefixes: UnitPrefixes,
    *,
    parameters: Sequence[str] | None = None,
    parameter_groups: Groups = (),
) -> Iterator[Candidate]:
    """The candidates for ``names``, lower tiers first. ``parameters``: exactly those of ``model.parameters()``, or
    those of the optimizer in its order; ``parameter_groups``: how blank lines divide them.
    """
    if parameters is None:
        return _Candidates(checkpoint, names, prefixes).all()
    groups = _given_groups(checkpoint, names, parameters, parameter_groups)
    options = _Candidates(checkpoint, names, prefixes, () if groups is None else parameters)
    if groups is None:
        return options.exact(parameters)
    return (replace(candidate, groups=groups) for candidate in options.all())


def _given_groups(checkpoint: Checkpoint, names: Listing, parameters: Sequence[str], divided: Groups) -> Groups | None:
    """The groups of an optimizer that is keyed by id, if the user lists its parameters in its order, which is not the
    model's; else None.
    """
    optim = checkpoint.optim
    if optim is None or optim.key_type != "id" or not set(parameters) <= set(names.names):
        return None
    in_model_order = names.ordered and names.in_model_order
    position = {name: place for place, name in enumerate(names.names)} if in_model_order else None
    return groups_by_user(tuple(parameters), divided, optim, position)


class _Candidates:
    def __init__(
        self, checkpoint: Checkpoint, names: Listing, prefixes: UnitPrefixes, trained: Collection[str] = ()
    ) -> None:
        """``trained``: names that are certainly parameters."""
        self.names = names
        self.world_size = checkpoint.world_size
        self.numels = possible_numels(checkpoint)
        self.prefixes = prefixes
        self.label = f"units: names from {names.source}, prefixes from {prefixes.label}"
        self.dtypes = _flat_dtypes(checkpoint)
        self.state_dtype = _state_dtype(checkpoint) if names.from_reference else None
        self.listed = _listed(checkpoint) | set(trained)
        beside = _whole_beside_flat(checkpoint)
        params = [
            replace(param, sharded=False) if beside.get(param.name) == param.numel else param for param in names.params
        ]
        self.possible = [param for param in params if param.possible or param.name in self.listed]
        self.unsharded = [
            param
            for param in params
            if param.sharded is False and _may_be_trained(param) and param.name not in self.listed
        ]

    def exact(self, parameters: Sequence[str]) -> Iterator[Candidate]:
        by_name = {param.name: param for param in self.names.params}
        chosen = [by_name[name] for name in parameters if name in by_name]
        order = replace(self.names, ordered=True)
        left = [param for param in self.possible if param.sharded and param.name not in set(parameters)]
        firsts: list[list[str]] = []  # of which each of the others may be a later name
        for param in left:
            firsts.append([first.name for first in chosen if _interchangeable(first, param)])
        for roots in self._roots(chosen):
            if all(len(names) == 1 for names in firsts):
                shared = [(param.name, names[0]) for param, names in zip(left, firsts, strict=True)]
                yield self._candidate(chosen, roots, shared=shared, names=order)

    def all(self) -> Iterator[Candidate]:
        for roots in self._roots(self.possible):
            yield self._candidate(self.possible, roots)
            if self.unsharded:
                both = {param.name: param for param in (*self.possible, *self.unsharded)}
                params = [both[param.name] for param in self.names.params if param.name in both]
                assumption = f"treated as parameters that FSDP does not manage: {_some_names(self.unsharded)}"
                yield self._candidate(params, roots, assumed=assumption)
            for params, assumption in self._without_buffers():
                yield self._candidate(params, roots, assumed=assumption)
        for turn, kinds in ((1, [None]), (2, self._kinds())):
            for roots in self._roots(self.possible):
                for kind in kinds:
                    buffers = [param for param in self._maybe_buffers() if _last_component(param) == kind]
                    treated = f"treated as buffers: {_some_names(buffers)}; " if buffers else ""
                    for later, first in self._possibly_shared(buffers):
                        left_out = {later, *(param.name for param in buffers)}
                        params = [param for param in self.possible if param.name not in left_out]
                        assumption = f"{treated}{later} treated as another name of {first}"
                        yield self._candidate(params, roots, shared=[(later, first)], assumed=assumption, turn=turn)

    def _maybe_buffers(self) -> list[Parameter]:
        """Names that may be buffers."""
        return [param for param in self.possible if param.sharded is None and param.name not in self.listed]

    def _kinds(self) -> list[str]:
        return list(dict.fromkeys(map(_last_component, self._maybe_buffers())))

    def _numel_fits(self, omitted: Iterable[Parameter], *, every_parameter_has_state: bool) -> bool:
        """Whether the slices can hold all names except ``omitted``, apart from padding.

        ``every_parameter_has_state``: the slices must not hold more than that either.
        """
        left = sum(param.numel for param in self.possible) - sum(param.numel for param in omitted)
        slack = self.world_size * (len(self.prefixes.prefixes) + 1)
        if self.dtypes:  # flat parameters as in the model section, alignment included
            slack += _PADDING * len(self.possible)
        return any(
            left + slack >= shown and (left - slack <= shown or not every_parameter_has_state) for shown in self.numels
        )

    def _roots(self, params: Sequence[Parameter]) -> Iterator[Collection[str]]:
        """The prefixes, with and without the root if nothing shows whether the root module is wrapped."""
        yield self.prefixes.prefixes
        inner = [prefix for prefix in self.prefixes.prefixes if prefix]
        if not self.prefixes.complete and inner:
            beside = [param for param in params if innermost_unit(param.name, inner) is None]
            if beside and not any(param.sharded for param in beside):
                yield inner

    def _without_buffers(self) -> Iterator[tuple[list[Parameter], str]]:
        """The parameters without some possible buffers; names with the same last component are all buffers or none."""
        kinds = self._kinds()
        for many in range(1, min(_CLASSES, len(kinds)) + 1):
            for left_out in combinations(kinds, many):
                buffers = [param for param in self._maybe_buffers() if _last_component(param) in left_out]
                names = {param.name for param in buffers}
                if len(names) < len(self.possible) and self._numel_fits(buffers, every_parameter_has_state=False):
                    params = [param for param in self.possible if param.name not in names]
                    yield params, f"treated as buffers: {_some_names(buffers)}"

    def _possibly_shared(self, omitted: Sequence[Parameter]) -> Iterator[tuple[str, str]]:
        """Pairs (later, first) that may be one shared parameter.

        Both have the same shape, and the optimizer does not list the later one, which is not among ``omitted``.
        """
        by_shape: dict[tuple[object, ...], list[str]] = {}
        for param in self.possible:
            earlier = by_shape.setdefault((param.shape, param.dtype.name), [])
            if param in omitted:
                continue
            if (
                param.name not in self.listed
                and earlier
                and self._numel_fits([param, *omitted], every_parameter_has_state=True)
            ):
                yield from ((param.name, first) for first in earlier)
            earlier.append(param.name)

    def _candidate(
        self,
        params: Sequence[Parameter],
        prefixes: Collection[str],
        *,
        shared: Sequence[tuple[str, str]] = (),
        assumed: str | None = None,
        turn: int = 0,
        names: Listing | None = None,
    ) -> Candidate:
        """``names``: where ``params`` are certain, in the model's order."""
        named = names or self.names
        units = build_units(
            [self._typed(param) for param in params],
            prefixes,
            Settings(use_orig_params=False),
            unmanaged=[param.name for param in params if param.sharded is False],
            shared=(*named.shared, *shared),
        )
        alternatives = partial(self._exchanged, params, prefixes, shared) if names is None else tuple
        return Candidate(
            units, self.label, named.ordered, (assumed,) if assumed else (), turn, alternatives=alternatives
        )

    def _exchanged(
        self, params: Sequence[Parameter], prefixes: Collection[str], shared: Sequence[tuple[str, str]]
    ) -> Iterator[Candidate]:
        """``params`` with a name that they leave out in place of one with as many elements in the same unit.

        Element counts do not tell them apart: names with the same last component need not all be buffers. What is
        called like a layer's parameter is taken for one.
        """
        chosen = {param.name for param in params}
        by_size: dict[tuple[str | None, int], list[str]] = {}
        for param in self._maybe_buffers():
            if param.name in chosen and _last_component(param) not in _PARAMETERS:
                by_size.setdefault((innermost_unit(param.name, prefixes), param.numel), []).append(param.name)
        for left in self.possible:
            same_size = by_size.get((innermost_unit(left.name, prefixes), left.numel), ())
            for name in same_size if left.name not in chosen else ():
                kept = {*chosen, left.name} - {name}
                yield self._candidate(
                    [param for param in self.possible if param.name in kept],
                    prefixes,
                    shared=[(later, first) for later, first in shared if first in kept and later != left.name],
                    assumed=f"{left.name} treated as a parameter, {name} as a buffer",
                )

    def _typed(self, param: Parameter) -> Parameter:
        """``param`` with the dtype in the checkpoint itself, since a reference may have been cast."""
        unit = innermost_unit(param.name, self.prefixes.prefixes)
        dtype = self.dtypes.get(unit or "", self.state_dtype)
        return param if dtype is None else replace(param, dtype=dtype)


def _whole_beside_flat(checkpoint: Checkpoint) -> dict[str, int]:
    """The number of elements of each tensor that is whole beside flat parameters, and so not in one."""
    params = checkpoint.params
    if not any(map(is_flat_key, params)):
        return {}
    numels: dict[str, int] = {}
    for key, leaf in params.items():
        if isinstance(leaf, Tensor) and not is_flat_key(key):
            lengths = slice_lengths(leaf, checkpoint.world_size) if isinstance(leaf.cut, Slices) else None
            if lengths is None or (lengths == lengths[0]).all():
                numels[clean(key)] = leaf.numel if lengths is None else int(lengths[0])
    return numels


def _may_be_trained(param: Parameter) -> bool:
    return bool(param.shape) and param.dtype.floating


def _last_component(param: Parameter) -> str:
    return param.name.rpartition(".")[2]


def _interchangeable(first: Parameter, second: Parameter) -> bool:
    return first.shape == second.shape and first.dtype == second.dtype


def _some_names(params: Sequence[Parameter]) -> str:
    return some_of([param.name for param in params])


def _flat_dtypes(checkpoint: Checkpoint) -> dict[str, DType]:
    params = checkpoint.params
    return {
        clean(key)[: -len(FLAT_PARAM)].rstrip("."): leaf.dtype
        for key, leaf in params.items()
        if is_flat_key(key) and isinstance(leaf, Tensor)
    }


def _state_dtype(checkpoint: Checkpoint) -> DType | None:
    """The dtype of the optimizer's slices, taken as that of its parameters, if all have the same."""
    dtypes = {
        leaf.dtype
        for states in checkpoint.states.values()
        for leaf in states.values()
        if isinstance(leaf, Tensor) and leaf.ndim and leaf.dtype.floating
    }
    return dtypes.pop() if len(dtypes) == 1 else None


def _listed(checkpoint: Checkpoint) -> set[str]:
    """Original names that the optimizer lists: these are certainly parameters."""
    optim = checkpoint.optim
    if optim is None:
        return set()
    keys = optim.grouped_keys()
    names = [*raw_names(checkpoint), *(key for key in keys if isinstance(key, str))]
    return {clean(name) for name in names if not is_flat_key(name)}


_Token: TypeAlias = bytes | tuple[int, ...]

_MOST = 2_000_000  # states of the search; two groups of a thousand parameters each need half of it


def group_candidates(checkpoint: Checkpoint, units: Units) -> list[Groups | None]:
    """The groups that match the ids of ``checkpoint``, at most two; [None] if ``match`` proves the ids by itself.

    It does not if the states are whole (of one rank, with ``use_orig_params=True``): their shapes are compared here.
    """
    optim = checkpoint.optim
    if optim is None or units.groups is not None or optim.key_type != "id" or not optim.groups:
        return [None]
    ids = optim.ids_in_groups()
    keys = units.optimizer_keys()
    if all(group.names() for group in optim.groups):
        return [None]
    listed = sum(map(len, ids))
    sliced = is_sliced(checkpoint, units)
    if sliced and ((len(ids) == 1 and listed == len(keys)) or listed > len(keys)):
        return [None]
    if prod(len(group) + 1 for group in ids) * (len(keys) - listed + 1) > _MOST:
        return [None]
    shown = _tokens(optim, checkpoint.world_size)
    expected = _expected(units, checkpoint.world_size)
    numbers = [number for group in ids for number in group]

    def fits(number: int, key: int) -> bool:
        token = shown.get(numbers[number])
        return token is None or token in expected[keys[key]]

    sizes = list(map(len, ids))
    groups: list[Groups | None] = []
    for positions in in_order(sizes, len(keys), fits, effort=_MOST) or ():
        groups.append(split_by_sizes([keys[position] for position in positions], sizes))
    return groups or ([None] if sliced else [])


def _tokens(optim: Optimizer, world_size: int) -> dict[int, _Token]:
    """For each id, from its first state with elements: the lengths by rank, or the shape of a whole tensor."""
    tokens: dict[int, _Token] = {}
    for key, states in optim.state.items():
        for leaf in states.values():
            if isinstance(key, int) and isinstance(leaf, Tensor) and leaf.ndim and not is_number_per_rank(leaf):
                lengths = slice_lengths(leaf, world_size)
                tokens.setdefault(key, leaf.shape if lengths is None else lengths.tobytes())
    return tokens


def _expected(units: Units, world_size: int) -> dict[str, set[_Token]]:
    """The possible tokens of each key of ``units``."""
    tokens: dict[str, set[_Token]] = {}
    for param in units.unmanaged:
        lengths = np.full(world_size, param.numel, np.int64)
        tokens[param.name] = {param.shape, *([lengths.tobytes()] if len(param.shape) == 1 else [])}
    for placed in place_units(units, world_size):
        unit, layout = placed.unit, placed.layout
        tokens[unit.key] = {np.full(world_size, layout.shard_numel, np.int64).tobytes()}
        for param, counts in zip(unit.params, layout.counts(), strict=True):
            tokens[param.name] = {np.resize(counts, world_size).tobytes()} | (
                {param.shape} if layout.shard_count == 1 else set()
            )
    return tokens
