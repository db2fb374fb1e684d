"""The model's ``LOCAL_STATE_DICT`` on each rank, in its order of keys.

``<unit>._flat_param`` is the flat parameter as a ShardedTensor; with ``use_orig_params=True`` every parameter's slice
stands beside it, on the same memory (``_local_post_state_dict_hook`` in ``_state_dict_utils.py``). A unit that FSDP1
does not shard (NO_SHARD, or one rank) is there in its full form.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

from fsdpckpt.errors import SourceUnsupportedError
from fsdpckpt.flat.flatten.names import state_dict_order, wrapped_metadata
from fsdpckpt.flat.flatten.pickle import FlatParameter, FlatShard, FlatView, WholeParam
from fsdpckpt.flat.flatten.units import PlacedUnit
from fsdpckpt.ir.checkpoint import Checkpoint, ModelState
from fsdpckpt.ir.dtypes import DType
from fsdpckpt.ir.tensors import Tensor
from fsdpckpt.ir.units import UnitParam, Units

__all__ = ["FlatModel"]


class FlatModel:
    """Everything about the model that is the same on all ranks; ``value`` is what one rank gets."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        model: ModelState,
        *,
        units: Units,
        placed: Sequence[PlacedUnit],
        casts: Mapping[Tensor, DType],
    ) -> None:
        """Raises SourceUnsupportedError for a unit whose parameters have several dtypes."""
        self._units = units
        self._metadata = wrapped_metadata(model.metadata, units)
        self._casts = casts
        self._first = dict(units.shared)
        self._params = units.params()
        self._leaves = {
            **model.params,
            **{n: model.params[first] for n, first in units.shared if n not in model.params},
        }
        self._cut = [unit for unit in placed if unit.sharded]
        self._tensors = {unit.unit.key: self._unit_tensors(unit) for unit in self._cut}
        self._dtypes = self._unit_dtypes(checkpoint)
        self._keys = self._ordered()

    def value(self, rank: int) -> OrderedDict[str, Any]:
        """The state dict of ``rank``."""
        held: dict[str, Any] = {}
        for placed in self._cut:
            held.update(self._of_unit(placed, rank))
        found: OrderedDict[str, Any] = OrderedDict()
        for key in self._keys:
            cut = held.get(self._first.get(key, key))
            found[key] = self._whole(key) if cut is None else cut
        if self._metadata is not None:
            vars(found)["_metadata"] = self._metadata
        return found

    def _of_unit(self, placed: PlacedUnit, rank: int) -> dict[str, Any]:
        """The flat parameter, and with ``use_orig_params=True`` the slice of every parameter in it."""
        unit, dtype = placed.unit, self._dtypes[placed.unit.key]
        parts = [part for part in placed.parts(rank) if part.param is not None or part.filler]
        numel = sum(part.count for part in parts)
        shard = FlatShard(unit.params, self._tensors[unit.key], parts, dtype, numel) if numel else None
        found: dict[str, Any] = {unit.key: FlatParameter(placed, shard, dtype)}
        if self._units.use_orig_params:
            nothing = FlatView(None, 0, 0, dtype)
            found.update(dict.fromkeys((param.name for param in unit.params), nothing))
            offset = 0
            for part in parts:
                if part.param is not None:
                    found[unit.params[part.param].name] = FlatView(shard, offset, part.count, dtype)
                offset += part.count
        return found

    def _whole(self, key: str) -> Any:
        leaf = self._leaves[key]
        param = self._params.get(self._first.get(key, key))
        if param is not None and param.stride is not None and isinstance(leaf, Tensor):
            return WholeParam(param, leaf, self._dtype(leaf))
        return leaf

    def _unit_tensors(self, placed: PlacedUnit) -> list[Tensor]:
        leaves = [self._leaves[param.name] for param in placed.unit.params]
        return [leaf for leaf in leaves if isinstance(leaf, Tensor)]

    def _unit_dtypes(self, checkpoint: Checkpoint) -> dict[str, DType]:
        found, wrong = {}, []
        for placed in self._cut:
            tensors = self._tensors[placed.unit.key]
            dtypes: dict[str, UnitParam] = {}
            for tensor, param in zip(tensors, placed.unit.params, strict=True):
                dtypes.setdefault(self._dtype(tensor).name, param)
            if len(dtypes) > 1:
                told = ", ".join(f"{param.name} is {dtype}" for dtype, param in dtypes.items())
                wrong.append(f"unit {placed.unit.prefix or 'root'!r}: {told}")
            found[placed.unit.key] = self._dtype(tensors[0])
        if wrong:
            raise SourceUnsupportedError(
                f"{checkpoint.source}: the parameters of a flat parameter have one dtype, and these have several",
                details=wrong,
                next_step="wrap them apart, or cast them to one: --dtype",
            )
        return found

    def _ordered(self) -> list[str]:
        cut = {unit.unit.key for unit in self._cut}
        managed = {param.name for unit in self._cut for param in unit.unit.params}
        flat = {unit.key for unit in self._units.units}
        keys = []
        for key in state_dict_order(self._names(), self._units):
            if key in flat:
                if key in cut:
                    keys.append(key)
            elif self._units.use_orig_params or self._first.get(key, key) not in managed:
                keys.append(key)
        return keys

    def _names(self) -> list[str]:
        """The names of the source, in ``model.parameters()`` order if they are not in it (safetensors sorts them)."""
        names = list(self._leaves)
        listed = [name for name in names if name in self._params]
        if listed == [name for name in self._units.parameters if name in self._params]:
            return names
        return list(dict.fromkeys([*self._units.parameters, *names]))

    def _dtype(self, tensor: Tensor) -> DType:
        return self._casts.get(tensor, tensor.dtype)
