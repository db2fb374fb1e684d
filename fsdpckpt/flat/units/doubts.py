"""Whether a match could be another one if the names came in another order, as names from sorted keys may."""

from __future__ import annotations

from collections import Counter
from math import prod

from fsdpckpt.flat.match import FlatMatch
from fsdpckpt.flat.slice_lengths import is_flat_key
from fsdpckpt.flat.units.lengths import key_lengths
from fsdpckpt.ir.checkpoint import Checkpoint
from fsdpckpt.ir.units import Units

__all__ = ["memory_doubt", "order_doubt"]


def memory_doubt(units: Units) -> list[str]:
    """The parameters that FSDP1 flattens in another order when the model is channels_last, which names and shapes do
    not show: kernels of convolutions with several channels and more than one place. Those with strides are settled.
    """
    return [
        param.name
        for unit in units.units
        for param in unit.params
        if len(param.shape) in (4, 5) and param.stride is None and param.shape[1] > 1 and prod(param.shape[2:]) > 1
    ]


def order_doubt(checkpoint: Checkpoint, match: FlatMatch) -> str | None:
    """Why the order matters and is not proved, None when every order reads the same.

    Flat parameters are cut by order alone. States by parameter name need none; by id they are certain only when each
    id's length is that of one single parameter.
    """
    units = match.units
    model = checkpoint.model.params if checkpoint.model is not None else {}
    flat = any(is_flat_key(key) for key in model) or (checkpoint.optim is not None and not units.use_orig_params)
    if flat:
        crowded = [unit for unit in units.units if sum(param.numel > 0 for param in unit.params) > 1]
        if crowded:
            many = len(crowded[0].params)
            return f"{many} parameters lie in unit {crowded[0].prefix!r}, in an order that nothing shows"
    optim = checkpoint.optim
    if optim is None or optim.key_type != "id":
        return None
    if not units.use_orig_params:
        shards = Counter(layout.shard for layout in match.layouts.values())
        return "several flat parameters are equally long" if max(shards.values()) > 1 else None
    params = units.params()
    times = Counter(param.numel for param in params.values())
    lengths = key_lengths(optim, checkpoint.world_size)
    for key, name in match.keys.items():
        numel = params[name].numel
        if times[numel] > 1:
            return f"several parameters have {numel:,} elements, {name} among them"
        if key not in lengths or int(lengths[key][: match.shard_size].sum()) != numel:
            return f"optimizer key {key} does not show how long its parameter {name} is"
    return None
