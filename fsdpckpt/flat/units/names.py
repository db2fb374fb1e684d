"""Ordered lists of parameter names with their shapes, from whatever has them: what units are made of."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

import numpy as np

from fsdpckpt.flat.slice_lengths import is_flat_key
from fsdpckpt.ir.checkpoint import Checkpoint, ParamKey, group_params
from fsdpckpt.ir.dtypes import DType
from fsdpckpt.ir.names import clean, keeps_order, sorted_by_a_tool
from fsdpckpt.ir.tensors import SLICES, Tensor, contiguous_stride
from fsdpckpt.ir.units import UnitParam, Units
from fsdpckpt.ir.values import Value

__all__ = ["NameList", "NamedParam", "model_names", "optimizer_names", "stride_of", "units_names"]


@dataclass(frozen=True, slots=True)
class NamedParam:
    """One name of a model. ``sharded`` as ``Tensor.sharded``: False for buffers and what FSDP does not shard, None
    when nothing says. ``stride``: elements, None for row-major.
    """

    name: str
    shape: tuple[int, ...]
    dtype: DType
    stride: tuple[int, ...] | None = None
    sharded: bool | None = None
    requires_grad: bool = True

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def possible(self) -> bool:
        """Whether it may lie in a flat parameter: FSDP1 refuses 0-dim ones, and trains floating ones."""
        return self.sharded is not False and bool(self.shape) and self.dtype.kind in ("float", "complex")

    def unit_param(self) -> UnitParam:
        return UnitParam(self.name, self.shape, self.dtype, self.stride, self.requires_grad)


@dataclass(frozen=True, slots=True)
class NameList:
    """Names in the order of ``model.state_dict()`` when ``ordered``, in any order when not.

    ``label`` says in words where they come from. ``shared``: (later name, first name) of tensors known to be one; the
    later names are not in ``params``. ``foreign``: they come from another checkpoint, which may have been cast.
    ``of_model``: False when only those of one unit are in the model's order, as where an optimizer lists them: with
    ``use_orig_params=False`` FSDP1 lists the parameters flat parameter by flat parameter, the root's first.
    """

    params: tuple[NamedParam, ...]
    ordered: bool
    label: str
    shared: tuple[tuple[str, str], ...] = ()
    foreign: bool = False
    of_model: bool = True

    def reordered(self, order: Sequence[str], label: str) -> NameList:
        """The same names, those of ``order`` first and in its order, if it has every possible parameter."""
        place = {name: index for index, name in enumerate(order)}
        if any(param.possible and param.name not in place for param in self.params):
            return self
        ranked = sorted(self.params, key=lambda param: place.get(param.name, len(place)))
        named = f"{self.label}, ordered by {label}"
        return replace(self, params=tuple(ranked), ordered=True, of_model=True, label=named)


def model_names(checkpoint: Checkpoint, label: str) -> NameList | None:
    """The whole tensors of a model section; None when it has none, or holds flat parameters (buffers are left then)."""
    found: list[NamedParam] = []
    shared: list[tuple[str, str]] = []
    first: dict[tuple[object, ...], str] = {}
    params = checkpoint.model.params if checkpoint.model is not None else {}
    for key, leaf in params.items() if not any(map(is_flat_key, params)) else ():
        if not isinstance(leaf, Tensor) or leaf.placement == SLICES:
            continue
        name = clean(key)
        same = first.setdefault(_place(leaf, name), name)
        if same != name:
            shared.append((name, same))
        else:
            found.append(NamedParam(name, leaf.shape, leaf.dtype, stride_of(leaf), leaf.sharded))
    if not found:
        return None
    ordered = keeps_order(checkpoint, [param.name for param in found])
    return NameList(tuple(found), ordered, label, tuple(shared))


def _place(tensor: Tensor, name: str) -> tuple[object, ...]:
    """What two names of one stored tensor have in common; a name of its own when that cannot be said."""
    chunks = tensor.chunks
    if not tensor.numel or not len(chunks) or (chunks.offset < 0).any():
        return (name,)
    return (tensor.shape, tensor.dtype.name, *(c.tobytes() for c in (chunks.file, chunks.offset, chunks.stride)))


def stride_of(tensor: Tensor) -> tuple[int, ...] | None:
    """The strides of the parameter in memory when it is dense and not row-major, else None.

    A chunk keeps the order of dimensions of the parameter that it was cut from.
    """
    chunks = tensor.chunks
    filled = np.flatnonzero((chunks.size > 0).all(axis=1))
    if tensor.ndim < 2 or not len(filled):
        return None
    row = int(filled[0])
    size, stride = chunks.size[row].tolist(), chunks.stride[row].tolist()
    wide = [dim for dim in range(tensor.ndim) if size[dim] > 1]
    order = sorted(wide, key=lambda dim: -stride[dim])
    step = 1
    for dim in reversed(order):
        if stride[dim] != step:
            return None
        step *= size[dim]
    if order == wide:
        return None
    return _dense(tensor.shape, [*(dim for dim in range(tensor.ndim) if dim not in wide), *order])


def _dense(shape: Sequence[int], order: Sequence[int]) -> tuple[int, ...]:
    """Strides of a dense tensor whose dimensions lie in ``order`` in memory, slowest first."""
    inner = contiguous_stride([shape[dim] for dim in order])
    by_dim = dict(zip(order, inner, strict=True))
    return tuple(by_dim[dim] for dim in range(len(shape)))


def optimizer_names(checkpoint: Checkpoint, label: str) -> NameList | None:
    """The parameters that a name-keyed optimizer with whole states names; None when it is none.

    Ordered when one param group lists them all.
    """
    optim = checkpoint.optim
    if optim is None or optim.key_type != "name":
        return None
    found: dict[str, NamedParam] = {}
    for key, states in optim.state.items():
        whole = _whole_state(states)
        if whole is not None:
            name = clean(str(key))
            found[name] = NamedParam(name, whole.shape, whole.dtype, stride_of(whole), sharded=True)
    groups = [group_params(group) or [] for group in optim.param_groups or ()]
    order = [clean(str(key)) for keys in groups for key in keys]
    ordered = len(groups) == 1 and set(found) <= set(order) and not sorted_by_a_tool(order)
    names = [name for name in order if name in found] if ordered else list(found)
    return NameList(tuple(found[name] for name in names), ordered, label, of_model=False) if found else None


def _whole_state(states: Mapping[str, Tensor | Value]) -> Tensor | None:
    """The state shaped like its parameter: the one shape that all states with dimensions have."""
    wide: list[Tensor] = [leaf for leaf in states.values() if isinstance(leaf, Tensor) and leaf.ndim]
    if len({leaf.shape for leaf in wide}) != 1 or any(leaf.placement == SLICES for leaf in wide):
        return None
    return wide[0]


def units_names(units: Units, label: str) -> NameList:
    """The parameters of units, in the order of ``model.parameters()``."""
    params, sharded = units.params(), units.unit_of()
    order: Iterable[ParamKey] = units.parameters
    return NameList(
        tuple(
            NamedParam(param.name, param.shape, param.dtype, param.stride, param.name in sharded, param.requires_grad)
            for param in (params[str(name)] for name in order)
        ),
        ordered=True,
        label=label,
        shared=units.shared,
    )
