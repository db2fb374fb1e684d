"""The names of a live FSDP1 model: which parameter is which, in which order, under which further names."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from fsdpckpt.errors import UsageError
from fsdpckpt.flat.live.order import module_parameters
from fsdpckpt.flat.live.states import Managed
from fsdpckpt.flat.live.strides import dtype_of, flattens_in_memory_order, stride_of
from fsdpckpt.ir.names import clean, joined
from fsdpckpt.ir.units import UnitParam

__all__ = ["Names", "groups", "names_of", "parameter_order", "shared", "unmanaged"]


@dataclass(frozen=True, slots=True)
class Names:
    """By identity: ``managed``, original parameters of units; ``flat``, flat parameters; ``keys``, what an optimizer
    may hold."""

    managed: dict[int, str]
    flat: dict[int, str]
    keys: dict[int, str]


def names_of(managed: list[Managed], model: nn.Module) -> Names:
    """The names of all parameters of the wrapped model."""
    flat = {id(one.flat_param): one.key for one in managed}
    original = {
        id(param): name
        for one in managed
        if one.flat_param._params is not None
        for param, name in zip(one.flat_param._params, one.names, strict=True)
    }
    keys = dict(original) if original else dict(flat)
    for name, param in model.named_parameters():
        if id(param) not in flat:
            keys.setdefault(id(param), clean(name))
    return Names(original, flat, keys)


def unmanaged(model: nn.Module, names: Names) -> Iterator[UnitParam]:
    """The parameters of no unit."""
    for raw, param in model.named_parameters():
        if id(param) in names.managed or id(param) in names.flat:
            continue
        shape = tuple(param.shape)
        row_major = param.is_contiguous() or not flattens_in_memory_order()
        stride = None if row_major else stride_of(shape, tuple(param.stride()))
        yield UnitParam(clean(raw), shape, dtype_of(param.dtype), stride, param.requires_grad)


def parameter_order(model: nn.Module, managed: list[Managed], names: Names, *, use_orig_params: bool) -> Iterator[str]:
    """``model.parameters()`` as original names."""
    if use_orig_params:
        yield from (names.keys[id(param)] for param in model.parameters())
        return
    # The original parameters are gone from the modules: what flat parameters remember of each module stands in.
    for name, mixed in module_parameters(model, managed):
        if mixed:
            warnings.warn(
                f"module {name.rpartition('.')[0]!r} has parameters that FSDP ignores beside ones it manages: with "
                "use_orig_params=False it is not known which come first in model.parameters(), so ids that fsdpckpt "
                "gives to original parameters may differ there; the flattened layout is not affected",
                stacklevel=4,
            )
        yield name


def shared(model: nn.Module, managed: list[Managed], names: Names, outside: set[str]) -> Iterator[tuple[str, str]]:
    """Every further name of a parameter, with the one it is listed by. ``outside``: parameters of no unit."""
    seen: set[str] = set()
    for one in managed:
        for info in one.flat_param._shared_param_infos:
            later = joined(one.prefix, clean(joined(info.module_name, info.param_name)))
            first = joined(one.prefix, clean(joined(info.prim_module_name, info.prim_param_name)))
            seen.add(later)
            yield later, first
    for raw, param in model.named_parameters(remove_duplicate=False):
        later, first = clean(raw), names.keys.get(id(param), "")
        listed = id(param) in names.managed or first in outside
        if listed and later != first and later not in seen:
            seen.add(later)
            yield later, first


def groups(optimizer: torch.optim.Optimizer, keys: dict[int, str]) -> tuple[tuple[str, ...], ...]:
    """Each group of the optimizer, in the order of ids. Raises UsageError for parameters of another model."""
    found = []
    for number, group in enumerate(optimizer.param_groups):
        strange = [tuple(param.shape) for param in group["params"] if id(param) not in keys]
        if strange:
            raise UsageError(
                f"group {number} of the optimizer holds {len(strange)} parameters that are not this model's",
                details=[f"a parameter of shape {list(shape)}" for shape in strange[:10]],
                why="the optimizer was made from the model before it was wrapped, or from another model",
                next_step="make the optimizer after wrapping, from the wrapped model's parameters()",
            )
        found.append(tuple(keys[id(param)] for param in group["params"]))
    return tuple(found)
