"""The FSDP1 modules of a live model that have a flat parameter, in the order of the units."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fsdpckpt.ir.names import clean, joined
from fsdpckpt.ir.units import FLAT_PARAM

__all__ = ["Managed", "managed_modules"]


@dataclass(frozen=True, slots=True)
class Managed:
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
        """The dtype of the parameters, whichever one the flat parameter has just now.

        The handle's own note of it is brought up to date by the first forward, which sets ``_local_shard``: until then
        the flat parameter knows better, if the model was cast.
        """
        handle = self.handle if hasattr(self.flat_param, "_local_shard") else None
        return self.flat_param.dtype if handle is None else handle._orig_param_dtype  # type: ignore[no-any-return]

    @property
    def param_dtype(self) -> torch.dtype | None:
        """``MixedPrecision.param_dtype`` of this unit: none for BatchNorm and others that it leaves out."""
        return self.state.mixed_precision.param_dtype  # type: ignore[no-any-return]

    @property
    def groups(self) -> list[Any]:
        """The process group it is sharded over, and with HYBRID_SHARD the one over which that is replicated."""
        between = getattr(self.state, "_inter_node_pg", None)  # only set for hybrid strategies
        return [self.state.process_group, *([between] if between is not None else [])]


def managed_modules(model: nn.Module) -> list[Managed]:
    """Every FSDP1 module (``FullyShardedDataParallel``, or ``fully_shard`` of torch 2.1 to 2.5) that manages
    parameters, in module pre-order, which is the order of flat parameters in ``model.parameters()``."""
    from torch.distributed.fsdp._common_utils import _get_module_fsdp_state

    found: list[Managed] = []
    seen: set[int] = set()
    for name, module in model.named_modules():
        state = _get_module_fsdp_state(module)
        handle = getattr(state, "_handle", None)
        if handle is None or id(handle) in seen:
            continue
        seen.add(id(handle))
        found.append(Managed(clean(name), state, handle))
    return found
