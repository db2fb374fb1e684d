"""Names the ids of an optimizer where the checkpoint itself proves them: only for what people read, never for keys."""

from __future__ import annotations

from collections.abc import Mapping

from fsdpckpt.errors import FsdpckptError
from fsdpckpt.ir.checkpoint import Checkpoint
from fsdpckpt.ir.optimizer import ParamKey
from fsdpckpt.transform.rekey import find_named


def known_names(checkpoint: Checkpoint) -> Mapping[ParamKey, str]:
    """The name of each id; empty if the optimizer has names, or if nothing proves which id is which parameter."""
    optim = checkpoint.optim
    if optim is None or optim.key_type != "id":
        return {}
    named = find_named(checkpoint)
    if isinstance(named, FsdpckptError) or named.optim is None or named.optim.doubt:
        return {}
    numbers, names = optim.grouped_keys(), named.optim.grouped_keys()
    if len(numbers) != len(names):
        return {}
    return {number: str(name) for number, name in zip(numbers, names, strict=True)}
