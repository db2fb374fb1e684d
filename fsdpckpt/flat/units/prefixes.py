"""Which modules were FSDP1 units, as far as the keys of a checkpoint show it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from fsdpckpt.flat.slice_lengths import is_flat_key
from fsdpckpt.ir.checkpoint import Checkpoint, Container
from fsdpckpt.ir.names import WRAPPERS, clean
from fsdpckpt.ir.tensors import SLICES, Tensor
from fsdpckpt.ir.units import FLAT_PARAM

__all__ = ["Prefixes", "parameter_order", "prefixes_of", "raw_names"]

_FSDP = "_fsdp_wrapped_module"


@dataclass(frozen=True, slots=True)
class Prefixes:
    """Prefixes of units, "" for the root. ``complete``: the root is a unit only when it is listed.

    ``exact``: every unit of the model is among them. ``label`` says in words where they come from.
    """

    prefixes: tuple[str, ...]
    complete: bool
    label: str
    exact: bool = False


def prefixes_of(checkpoint: Checkpoint) -> Prefixes | None:
    """The unit prefixes that the checkpoint's keys show; None when they show none.

    Flat parameters (``LOCAL_STATE_DICT``) name every unit. Names with FSDP's own path segments, in ``param_names`` or
    as the keys of ``_NamedOptimizer``, show where each wrapped module begins.
    """
    flat = [clean(key) for key in checkpoint.model.params if is_flat_key(key)] if checkpoint.model is not None else []
    if flat:
        own = tuple(key[: -len(FLAT_PARAM)].rstrip(".") for key in flat)
        return Prefixes(own, complete=True, label="the flat parameters' keys", exact=True)
    wrapped = [name for name in raw_names(checkpoint) if _FSDP in name.split(".")]
    if wrapped:
        return Prefixes(tuple(_boundaries(wrapped)), complete=True, label="the optimizer's names (param_names)")
    return None


def raw_names(checkpoint: Checkpoint) -> list[str]:
    """The names by which the optimizer calls its parameters, wrapper prefixes and all: ``param_names``, or its keys."""
    optim = checkpoint.optim
    if optim is None:
        return []
    found = [str(key) for key in optim.state if isinstance(key, str)]
    for group in optim.param_groups or ():
        names = group.get("param_names")
        found.extend(str(name) for name in names) if isinstance(names, (list, tuple)) else None
    return list(dict.fromkeys(found))


def parameter_order(checkpoint: Checkpoint) -> list[str]:
    """Parameters in the model's order as far as the checkpoint shows it: the by-name slices beside flat parameters, or
    the ``param_names`` of a single group; empty when it does not."""
    model = checkpoint.model.params if checkpoint.model is not None else {}
    sliced = [key for key, leaf in model.items() if isinstance(leaf, Tensor) and leaf.placement == SLICES]
    if sliced and checkpoint.container is Container.TORCH:
        return [clean(key) for key in sliced]
    groups = (checkpoint.optim.param_groups or []) if checkpoint.optim is not None else []
    names = groups[0].get("param_names") if len(groups) == 1 else None
    return [clean(str(name)) for name in names if not is_flat_key(str(name))] if isinstance(names, list) else []


def _boundaries(names: Iterable[str]) -> list[str]:
    found: dict[str, None] = {}
    for name in names:
        path: list[str] = []
        for word in name.split("."):
            if word == _FSDP:
                found[".".join(path)] = None
            elif word not in WRAPPERS:
                path.append(word)
    return list(found)
