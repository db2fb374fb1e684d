"""Units: what FSDP1 never saves, which parameters lie in which flat parameter, in which order and with which shapes.

A *unit* is one FSDP1-wrapped module; the parameters it manages form one flat parameter. Names are FQNs without the
prefixes that wrappers add. Order is everything here: of units (pre-order of the modules, the root first), of the
parameters in a unit, of ``model.parameters()``, of the optimizer's groups.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from math import prod

from fsdpckpt.ir.dtypes import DType

__all__ = ["FLAT_PARAM", "Strategy", "Unit", "UnitParam", "Units"]

FLAT_PARAM = "_flat_param"


class Strategy(StrEnum):
    """``torch.distributed.fsdp.ShardingStrategy``, as far as the layout is concerned."""

    FULL_SHARD = "full-shard"
    SHARD_GRAD_OP = "shard-grad-op"
    HYBRID_SHARD = "hybrid-shard"
    NO_SHARD = "no-shard"


@dataclass(frozen=True, slots=True)
class UnitParam:
    """One original parameter. ``shape``: elements a dimension.

    ``stride``: elements, as ``torch.Tensor.stride``, of a parameter that is not row-major (channels_last): FSDP1
    flattens it in memory order (``FlatParamHandle._init_flat_param_and_metadata``). None for row-major.
    """

    name: str
    shape: tuple[int, ...]
    dtype: DType
    stride: tuple[int, ...] | None = None
    requires_grad: bool = True

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def order(self) -> tuple[int, ...] | None:
        """The dimensions from slowest to fastest in memory, None for row-major.

        Those of one element come first: their strides say nothing, and PyTorch does not keep them.
        """
        if self.stride is None:
            return None
        strides, wide = self.stride, [dim for dim, size in enumerate(self.shape) if size > 1]
        ordered = sorted(wide, key=lambda dim: (-strides[dim], dim))
        if ordered == wide:
            return None
        return (*(dim for dim, size in enumerate(self.shape) if size <= 1), *ordered)


@dataclass(frozen=True, slots=True)
class Unit:
    """One flat parameter. ``prefix``: FQN of the wrapped module, "" for the root.

    ``params``: every parameter it holds, frozen ones too, a shared one once, at its first place.
    ``param_dtype``: ``MixedPrecision.param_dtype``, which decides the alignment under ``use_orig_params=True``; None
    when there is none.
    """

    prefix: str
    params: tuple[UnitParam, ...]
    strategy: Strategy = Strategy.FULL_SHARD
    param_dtype: DType | None = None

    @property
    def key(self) -> str:
        """The key of its flat parameter in a ``LOCAL_STATE_DICT``."""
        return f"{self.prefix}.{FLAT_PARAM}" if self.prefix else FLAT_PARAM

    @property
    def requires_grad(self) -> bool:
        return any(param.requires_grad for param in self.params)


@dataclass(frozen=True, slots=True)
class Units:
    """All units of one model, and what else is needed to read or write its flattened checkpoints.

    ``unmanaged``: parameters outside of every unit (ignored by FSDP, or beside the wrapped modules), whole on every
    rank. ``shared``: (later name, first name) of shared parameters. ``parameters``: ``model.parameters()`` order, as
    original names, a shared parameter once. ``groups``: for each group of the optimizer its parameters in the order of
    their ids: original names, or with ``use_orig_params=False`` the ``key`` of a unit; None when not known, which
    means one group in ``model.parameters()`` order. ``world_size``: ranks when it was recorded, None when it is for
    any. ``shard_size``: ranks in one sharding group, None for all of them (HYBRID_SHARD has fewer).
    """

    units: tuple[Unit, ...]
    use_orig_params: bool
    parameters: tuple[str, ...]
    unmanaged: tuple[UnitParam, ...] = ()
    shared: tuple[tuple[str, str], ...] = ()
    groups: tuple[tuple[str, ...], ...] | None = None
    world_size: int | None = None
    shard_size: int | None = None

    def params(self) -> dict[str, UnitParam]:
        """Every original parameter by name, in the order of units, unmanaged ones last."""
        found = {param.name: param for unit in self.units for param in unit.params}
        found.update({param.name: param for param in self.unmanaged})
        return found

    def unit_of(self) -> dict[str, Unit]:
        """Each managed original parameter's unit."""
        return {param.name: unit for unit in self.units for param in unit.params}

    def optimizer_keys(self) -> tuple[str, ...]:
        """What ``model.parameters()`` of the wrapped model holds, in its order: the order of ids of one group.

        With ``use_orig_params=True`` the original names, otherwise units' keys and unmanaged names: a module's own
        unmanaged parameters come first, then its flat parameter (it is registered last), then its children.
        """
        if self.use_orig_params:
            return self.parameters
        return _traversal(self)


@dataclass(slots=True)
class _Module:
    """One module on the way to parameters, its children in the order of ``model.parameters()``."""

    own: list[str]
    unit: str | None
    children: dict[str, _Module]

    def keys(self) -> list[str]:
        found = [*self.own, *([self.unit] if self.unit is not None else [])]
        for child in self.children.values():
            found.extend(child.keys())
        return found


def _traversal(units: Units) -> tuple[str, ...]:
    root = _Module([], None, {})

    def module(path: list[str]) -> _Module:
        at = root
        for word in path:
            at = at.children.setdefault(word, _Module([], None, {}))
        return at

    unmanaged = {param.name for param in units.unmanaged}
    for name in units.parameters:
        *path, _ = name.split(".")
        holder = module(path)
        if name in unmanaged:
            holder.own.append(name)
    for unit in units.units:
        module(unit.prefix.split(".") if unit.prefix else []).unit = unit.key
    return tuple(root.keys())
