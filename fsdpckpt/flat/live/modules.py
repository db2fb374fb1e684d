"""What only a live FSDP1 model knows: its units, names and order, and the numbers that prove them.

Imports torch; reads no checkpoints. Attributes are those of ``torch/distributed/fsdp/_flat_param.py`` and
``_common_utils.py``, torch 2.4 to 2.13.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.distributed.fsdp import _flat_param

from fsdpckpt.errors import UsageError
from fsdpckpt.ir.dtypes import DTYPES, DType
from fsdpckpt.ir.names import clean, joined
from fsdpckpt.ir.parameters import Parameter
from fsdpckpt.ir.units import FLAT_PARAM, Groups, Unit
from fsdpckpt.layouts.flattened import alignment, layout_of
from fsdpckpt.text import plural

Optimizers: TypeAlias = torch.optim.Optimizer | Mapping[str, torch.optim.Optimizer] | None
"""The optimizer of a model, several by name, or none."""


@dataclass(frozen=True, slots=True)
class FsdpModule:
    """One FSDP1 state with a flat parameter. ``prefix``: FQN of the wrapped module."""

    prefix: str
    state: Any
    handle: Any

    @property
    def flat_param(self) -> Any:
        return self.handle.flat_param

    @property
    def key(self) -> str:
        return joined(self.prefix, FLAT_PARAM)

    @property
    def names(self) -> list[str]:
        """The original parameters in flattened order."""
        return [joined(self.prefix, clean(name)) for name in self.flat_param._fqns]

    @property
    def use_orig_params(self) -> bool:
        return bool(self.handle._use_orig_params)

    @property
    def orig_dtype(self) -> torch.dtype:
        """The dtype of the parameters, whatever dtype the flat parameter has at the moment.

        The first forward updates the handle's own record of it and sets ``_local_shard``; until then the flat parameter
        has the right dtype if the model was cast.
        """
        handle = self.handle if hasattr(self.flat_param, "_local_shard") else None
        return self.flat_param.dtype if handle is None else handle._orig_param_dtype  # type: ignore[no-any-return]

    @property
    def param_dtype(self) -> torch.dtype | None:
        """``MixedPrecision.param_dtype`` of this unit: None for BatchNorm and other modules that it leaves out."""
        return self.state.mixed_precision.param_dtype  # type: ignore[no-any-return]

    @property
    def groups(self) -> list[Any]:
        """The process group it is sharded over, and with HYBRID_SHARD the group of its replicas."""
        between = getattr(self.state, "_inter_node_pg", None)  # only set for hybrid strategies
        return [self.state.process_group, *([between] if between is not None else [])]


def fsdp_modules(model: nn.Module) -> list[FsdpModule]:
    """Every FSDP1 module (``FullyShardedDataParallel``, or ``fully_shard`` of torch 2.1 to 2.5) that manages
    parameters, in module pre-order, which is the order of flat parameters in ``model.parameters()``."""
    from torch.distributed.fsdp._common_utils import _get_module_fsdp_state

    modules: list[FsdpModule] = []
    seen: set[object] = set()
    for name, module in model.named_modules():
        state = _get_module_fsdp_state(module)
        handle = getattr(state, "_handle", None)
        if handle is None or handle in seen:
            continue
        seen.add(handle)
        modules.append(FsdpModule(clean(name), state, handle))
    return modules


@dataclass(frozen=True, slots=True)
class LiveNames:
    """Names by parameter object: ``original``, the parameters of units; ``flat``, flat parameters; ``keys``, what an
    optimizer may hold."""

    original: dict[torch.Tensor, str]
    flat: dict[torch.Tensor, str]
    keys: dict[torch.Tensor, str]


def names_of(modules: list[FsdpModule], model: nn.Module) -> LiveNames:
    """The names of all parameters of the wrapped model."""
    flat = {fsdp_module.flat_param: fsdp_module.key for fsdp_module in modules}
    original = {
        param: name
        for fsdp_module in modules
        if fsdp_module.flat_param._params is not None
        for param, name in zip(fsdp_module.flat_param._params, fsdp_module.names, strict=True)
    }
    keys = dict(original) if original else dict(flat)
    for name, param in model.named_parameters():
        if param not in flat:
            keys.setdefault(param, clean(name))
    return LiveNames(original, flat, keys)


def params_outside_units(model: nn.Module, names: LiveNames) -> Iterator[Parameter]:
    """The parameters of no unit."""
    for name, param in model.named_parameters():
        if param not in names.original and param not in names.flat:
            yield unit_param(clean(name), param)


def unit_param(name: str, param: nn.Parameter) -> Parameter:
    """An original parameter that is still in the model, as units record it."""
    shape = tuple(param.shape)
    row_major = param.is_contiguous() or not flattens_in_memory_order()
    stride = None if row_major else stride_of(shape, tuple(param.stride()))
    return Parameter(name, shape, dtype_of(param.dtype), stride, param.requires_grad)


def parameter_order(
    model: nn.Module, modules: list[FsdpModule], names: LiveNames, *, use_orig_params: bool
) -> Iterator[str]:
    """``model.parameters()`` as original names."""
    if use_orig_params:
        yield from (names.keys[param] for param in model.parameters())
        return
    # The modules no longer have the original parameters; the flat parameters record those of each module.
    for name, mixed in module_parameters(model, modules):
        if mixed:
            warnings.warn(
                f"module {name.rpartition('.')[0]!r} has parameters that FSDP ignores beside ones it manages: with "
                "use_orig_params=False it is not known which come first in model.parameters(), so ids that fsdpckpt "
                "gives to original parameters may differ there; the flattened layout is not affected",
                stacklevel=4,
            )
        yield name


def shared(
    model: nn.Module, modules: list[FsdpModule], names: LiveNames, outside: set[str]
) -> Iterator[tuple[str, str]]:
    """Every further name of a parameter, with the name it is listed under. ``outside``: parameters of no unit."""
    seen: set[str] = set()
    for fsdp_module in modules:
        for info in fsdp_module.flat_param._shared_param_infos:
            later = joined(fsdp_module.prefix, clean(joined(info.module_name, info.param_name)))
            first = joined(fsdp_module.prefix, clean(joined(info.prim_module_name, info.prim_param_name)))
            seen.add(later)
            yield later, first
    for raw, param in model.named_parameters(remove_duplicate=False):
        later, first = clean(raw), names.keys.get(param, "")
        listed = param in names.original or first in outside
        if listed and later != first and later not in seen:
            seen.add(later)
            yield later, first


def groups(optimizer: torch.optim.Optimizer, keys: dict[torch.Tensor, str]) -> tuple[tuple[str, ...], ...]:
    """Each group of the optimizer, in the order of ids. Raises UsageError for parameters of a different model."""
    named_groups = []
    for number, group in enumerate(optimizer.param_groups):
        foreign = [tuple(param.shape) for param in group["params"] if param not in keys]
        if foreign:
            raise UsageError(
                f"group {number} of the optimizer: {plural(len(foreign), 'parameter', 'are')} not in this model",
                details=[f"a parameter of shape {list(shape)}" for shape in foreign[:10]],
                why="the optimizer was made from the model before it was wrapped, or from a different model",
                next_step="make the optimizer after wrapping, from the wrapped model's parameters()",
            )
        named_groups.append(tuple(keys[param] for param in group["params"]))
    return tuple(named_groups)


def optimizer_groups(
    optimizer: Optimizers, keys: dict[torch.Tensor, str]
) -> tuple[Groups | None, tuple[tuple[str, Groups], ...]]:
    """The groups of the only optimizer, None without one, and those of each of several by name; what ``groups``
    raises, of them. Raises UsageError for a mapping without optimizers.
    """
    if optimizer is None or isinstance(optimizer, torch.optim.Optimizer):
        return (None if optimizer is None else groups(optimizer, keys)), ()
    by_name: list[tuple[str, Groups]] = []
    for name, each in optimizer.items():
        try:
            by_name.append((str(name), groups(each, keys)))
        except UsageError as error:
            error.what = f"{name}: {error.what}"
            raise
    if not by_name:
        raise UsageError(
            "the mapping of optimizers is empty",
            why="its groups are what the units file would record",
            next_step="give the optimizers by name, or None for a model without one",
        )
    return (by_name[0][1], ()) if len(by_name) == 1 else (None, tuple(by_name))


def module_parameters(model: nn.Module, modules: list[FsdpModule]) -> Iterator[tuple[str, bool]]:
    """(original name, whether its position among its module's parameters is unknown), module by module.

    Flat parameters keep the order of the parameters in each module. Of ignored parameters beside them only the order
    among themselves is known; they are listed first, as in the wrapped model.
    """
    flattened_names: dict[nn.Module, list[str]] = {}
    for fsdp_module in modules:
        for info, name in zip(fsdp_module.flat_param._param_infos, fsdp_module.names, strict=True):
            flattened_names.setdefault(info.module, []).append(name)
    seen: set[torch.Tensor] = set()
    for prefix, module in model.named_modules():
        plain = []
        for name, param in module.named_parameters(recurse=False):
            if name != FLAT_PARAM and param not in seen:
                seen.add(param)
                plain.append(joined(clean(prefix), name))
        flattened = flattened_names.get(module, [])
        mixed = bool(plain and flattened)
        yield from ((name, mixed and number == 0) for number, name in enumerate([*plain, *flattened]))


def with_aligning_dtype(unit: Unit, module: FsdpModule) -> Unit:
    """``unit`` with the ``param_dtype`` that decided its alignment.

    A model that was cast after it was wrapped (``model.half()``) keeps the alignment of its former dtype.
    """
    aligned = getattr(module.handle, "_aligned_numel", 0)
    if not aligned or alignment(unit.aligning_dtype.itemsize) == aligned:
        return unit
    for name in ("float32", "bfloat16", "float64", "float8_e4m3fn"):
        if alignment(DTYPES[name].itemsize) == aligned:
            return replace(unit, param_dtype=DTYPES[name])
    return unit


def contradictions(unit: Unit, module: FsdpModule, *, shard_size: int, use_orig_params: bool) -> Iterator[str]:
    """Each number of the live flat parameter that differs from the layout of ``unit``."""
    layout = layout_of(unit, use_orig_params=use_orig_params, world_size=shard_size, shard_size=shard_size)
    pairs = {
        "elements": (layout.total, _numel(getattr(module.flat_param, "_unpadded_unsharded_size", None))),
        "elements of a shard": (layout.shard_numel, _numel(getattr(module.flat_param, "_sharded_size", None))),
        "offsets of the parameters": (layout.start.tolist(), _offsets(module.flat_param)),
    }
    for what, (computed, live) in pairs.items():
        if live is not None and computed != live:
            yield f"{unit.key}: {what}: computed {computed}, FSDP has {live}"


def _numel(size: Any) -> int | None:
    return None if size is None else int(size.numel())


def _offsets(flat: Any) -> list[int] | None:
    numels, padding = getattr(flat, "_numels_with_padding", None), getattr(flat, "_is_padding_mask", None)
    if numels is None or padding is None:
        return None
    ends = accumulate(numels)
    return [end - numel for numel, end, filler in zip(numels, ends, padding, strict=True) if not filler]


def dtype_of(dtype: torch.dtype) -> DType:
    """The ``DType`` of a torch dtype."""
    return DTYPES[str(dtype).removeprefix("torch.")]


def stride_of(shape: tuple[int, ...], stride: tuple[int, ...]) -> tuple[int, ...] | None:
    """``stride``, or None if the elements are row-major: strides of dimensions of one element have no meaning."""
    strides = [step for size, step in zip(shape, stride, strict=True) if size > 1]
    return None if strides == sorted(strides, reverse=True) else tuple(stride)


def flattens_in_memory_order() -> bool:
    """Whether the installed FSDP1 flattens a parameter that is not row-major in memory order.

    torch 2.4 and older flatten every parameter row-major; they lack the function by which later versions decide.
    """
    return hasattr(_flat_param, "_is_truly_contiguous")
