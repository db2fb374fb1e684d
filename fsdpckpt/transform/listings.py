"""What the sections of a checkpoint and units files list: one function for each of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

import numpy as np

from fsdpckpt.ir.checkpoint import Checkpoint, ModelState
from fsdpckpt.ir.listing import Listing
from fsdpckpt.ir.names import clean, keeps_order, revisits_a_module, sorted_by_a_tool
from fsdpckpt.ir.optimizer import Optimizer
from fsdpckpt.ir.parameters import Parameter
from fsdpckpt.ir.placements import Slices
from fsdpckpt.ir.tensors import Tensor, contiguous_stride
from fsdpckpt.ir.units import Units
from fsdpckpt.ir.values import Value
from fsdpckpt.layouts.flattened import is_flat_key


def whole_tensors(model: ModelState) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a model, by key, that are neither flat parameters nor slices of them."""
    for key, leaf in model.params.items():
        if isinstance(leaf, Tensor) and not isinstance(leaf.cut, Slices) and not is_flat_key(key):
            yield key, leaf


def model_names(checkpoint: Checkpoint, source: str) -> Listing | None:
    """The whole tensors of a model section; None if it has none, or holds flat parameters (only buffers are
    left then).
    """
    if checkpoint.model is None or any(map(is_flat_key, checkpoint.model.params)):
        return None
    named: list[Parameter] = []
    shared: list[tuple[str, str]] = []
    first: dict[tuple[object, ...], str] = {}
    for key, leaf in whole_tensors(checkpoint.model):
        name = clean(key)
        same = first.setdefault(leaf.location() or (name,), name)
        if same != name:
            shared.append((name, same))
        else:
            named.append(Parameter(name, leaf.shape, leaf.dtype, stride_of(leaf), sharded=leaf.sharded))
    if not named:
        return None
    possible = [param.name for param in named if param.possible]
    ordered = keeps_order(checkpoint, possible) and not revisits_a_module(possible)
    return Listing(tuple(named), source, ordered, shared=tuple(shared))


def stride_of(tensor: Tensor) -> tuple[int, ...] | None:
    """The strides of the parameter in memory if it is dense and not row-major, else None.

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
    order = [*(dim for dim in range(tensor.ndim) if dim not in wide), *order]  # slowest in memory first
    by_dim = dict(zip(order, contiguous_stride([tensor.shape[dim] for dim in order]), strict=True))
    return tuple(by_dim[dim] for dim in range(tensor.ndim))


def optimizer_names(checkpoint: Checkpoint, source: str) -> Listing | None:
    """The parameters in a name-keyed optimizer with whole states; None for any other optimizer.

    Ordered if one param group lists them all.
    """
    optim = checkpoint.optim
    if optim is None or optim.key_type != "name":
        return None
    named: dict[str, Parameter] = {}
    for key, states in optim.state.items():
        whole = _whole_state(states)
        if whole is not None:
            name = clean(str(key))
            named[name] = Parameter(name, whole.shape, whole.dtype, stride_of(whole), sharded=True)
    order = [clean(str(key)) for key in optim.grouped_keys()]
    ordered = len(optim.groups or ()) == 1 and set(named) <= set(order) and not sorted_by_a_tool(order)
    names = [name for name in order if name in named] if ordered else list(named)
    rows = tuple(named[name] for name in names)
    return Listing(rows, source, ordered, in_model_order=False) if named else None


def listed_names(optim: Optimizer) -> list[list[str]]:
    """The names that each param group lists; empty if there are no groups."""
    return [list(map(clean, names)) for names in optim.names_in_groups()]


def _whole_state(states: Mapping[str, Tensor | Value]) -> Tensor | None:
    """The state shaped like its parameter: the one shape that all states with dimensions have."""
    wide: list[Tensor] = [leaf for leaf in states.values() if isinstance(leaf, Tensor) and leaf.ndim]
    if len({leaf.shape for leaf in wide}) != 1 or any(isinstance(leaf.cut, Slices) for leaf in wide):
        return None
    return wide[0]


def units_names(units: Units, source: str) -> Listing:
    """The parameters of units, in the order of ``model.parameters()``."""
    return Listing(tuple(units.rows[row] for row in units.order), source, shared=units.shared)


def unwrapped_names(units: Units, source: str) -> Listing:
    """The parameters that the units file of a model without units lists, which may be in the units of another job."""
    listing = units_names(units, source)
    return replace(listing, rows=tuple(replace(param, sharded=bool(param.shape)) for param in listing.params))
