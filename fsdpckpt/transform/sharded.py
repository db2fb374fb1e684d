"""Decides, for a sharded target, which tensors FSDP shards and which every rank holds whole.

FSDP shards parameters and the optimizer states shaped like them; buffers, 0-dim states and what FSDP does not manage
are replicated. A sharded source says so itself (placements, chunks). A full one may not: then the optimizer's lists,
a reference or ``--buffers`` decide, and what none of them settles is an error, never a choice.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

from fsdpckpt.errors import NeedsInformationError, UsageError
from fsdpckpt.ir.checkpoint import Checkpoint, ModelState, Note, OptimState, ParamKey
from fsdpckpt.ir.tensors import Tensor
from fsdpckpt.ir.values import Key, Value

__all__ = ["ShardingHints", "decide_sharded"]

SHOWN = 12  # keys listed in one message: enough to recognise the model, short enough to read


@dataclass(frozen=True, slots=True)
class ShardingHints:
    """What the user gave.

    ``buffers``: globs of replicated model keys, or ``("none",)``. ``reference``: model key to its ``Tensor.sharded``.
    """

    buffers: tuple[str, ...] = ()
    reference: Mapping[str, bool | None] | None = None


def decide_sharded(checkpoint: Checkpoint, hints: ShardingHints, *, strict: bool) -> Checkpoint:
    """The same checkpoint with every ``Tensor.sharded`` True or False, and a note on what was inferred.

    ``strict`` (per-rank files, where a wrong answer does not load): what nothing settles raises
    NeedsInformationError. Otherwise (DCP, where any cut loads) it is cut like a parameter, and noted.
    """
    model, unsettled, inferred = _decide_model(checkpoint, hints)
    if unsettled and strict:
        raise NeedsInformationError(
            f"{checkpoint.source} does not say which of these {len(unsettled)} model keys are parameters (sharded) and "
            "which are buffers (whole on every rank)",
            details=_shown(unsettled),
            why="the source holds both alike there, and the optimizer does not list these keys",
            next_step="add --buffers GLOB for the buffers (--buffers none when there are none), or --reference PATH "
            "of a sharded checkpoint of this model",
        )
    optim, ambiguous = _decide_optim(checkpoint.optim, model)
    if ambiguous and strict:
        raise NeedsInformationError(
            f"{checkpoint.source} does not say which states of these {len(ambiguous)} parameters are sharded",
            details=_shown(ambiguous),
            why="their states have several shapes, and no model key of the same name says which one is the parameter's",
            next_step="write a DCP directory (--container dcp), which loads either way, or add --only model",
        )
    notes = list(checkpoint.notes)
    if inferred:
        what = f"{inferred} model {'key is a parameter' if inferred == 1 else 'keys are parameters'}"
        notes.append(Note("inferred", f"{what}: the optimizer lists {'it' if inferred == 1 else 'them'}"))
    if unsettled:
        many = len(unsettled) > 1
        what = f"{len(unsettled)} model key{'s' * many} may be parameter{'s' * many} or buffer{'s' * many}, and "
        what += f"{'are' if many else 'is'} cut like parameters: {', '.join(_shown(unsettled, 5))}"
        notes.append(Note("undetermined", what, keys=tuple(unsettled)))
    _require_buffers(checkpoint, hints)
    extra = {key: _as_in_source(value) for key, value in checkpoint.extra.items()}
    rank_extra = tuple({key: _as_in_source(value) for key, value in extras.items()} for extras in checkpoint.rank_extra)
    return replace(checkpoint, model=model, optim=optim, extra=extra, rank_extra=rank_extra, notes=tuple(notes))


def _require_buffers(checkpoint: Checkpoint, hints: ShardingHints) -> None:
    """Raises UsageError for a glob of buffers that is the name of nothing: misspelt, it would cut what is whole."""
    names = checkpoint.model.params if checkpoint.model is not None else {}
    for glob in hints.buffers if names and hints.buffers != ("none",) else ():
        if not any(fnmatchcase(name, glob) for name in names):
            raise UsageError(
                f"--buffers {glob} matches no model key of {checkpoint.source}",
                next_step=f"fsdpckpt inspect --names-only --section model {shlex.quote(checkpoint.source)}",
            )


def _shown(keys: Sequence[str], most: int = SHOWN) -> list[str]:
    more = [f"... and {len(keys) - most} more"] if len(keys) > most else []
    return [*keys[:most], *more]


def _decide_model(checkpoint: Checkpoint, hints: ShardingHints) -> tuple[ModelState | None, list[str], int]:
    model = checkpoint.model
    if model is None:
        return None, [], 0
    tied = _ties(model)
    listed = _listed_by_optimizer(checkpoint.optim, model, tied)
    unsettled: list[str] = []
    inferred = 0
    params: dict[str, Tensor | Value] = {}
    for name, leaf in model.params.items():
        if not isinstance(leaf, Tensor):
            params[name] = leaf
            continue
        sharded = _from_source(leaf, name, hints)
        if sharded is None and not listed.isdisjoint(tied.get(name, (name,))):
            sharded = True
            inferred += 1
        if sharded is None:
            unsettled.append(name)
        params[name] = replace(leaf, sharded=True if sharded is None else sharded)
    return ModelState(params, model.metadata), unsettled, inferred


def _from_source(tensor: Tensor, name: str, hints: ShardingHints) -> bool | None:
    """What the tensor itself, the options or the reference say; None when none of them does."""
    if tensor.ndim == 0:  # FSDP refuses to shard a 0-dim parameter, so it can only be a buffer
        return False
    if tensor.sharded is not None:
        return tensor.sharded
    if hints.buffers:
        return hints.buffers == ("none",) or not any(fnmatchcase(name, glob) for glob in hints.buffers)
    if hints.reference is not None:
        return hints.reference.get(name)
    return None


def _listed_by_optimizer(optim: OptimState | None, model: ModelState, tied: Mapping[str, tuple[str, ...]]) -> set[str]:
    """Names the optimizer proves to be parameters: its own keys, or all when there are as many ids as model tensors."""
    if optim is None:
        return set()
    keys = [*optim.state, *optim.grouped_keys()]
    if optim.key_type == "name":
        return {str(key) for key in keys}
    tensors = [name for name, leaf in model.params.items() if isinstance(leaf, Tensor)]
    distinct = len({tied.get(name, (name,)) for name in tensors})
    return set(tensors) if distinct == len(set(map(str, keys))) else set()


def _ties(model: ModelState) -> dict[str, tuple[str, ...]]:
    """Each model key that shares its bytes with others, with all keys of that group."""
    places: dict[tuple[object, ...], list[str]] = {}
    for name, leaf in model.params.items():
        if isinstance(leaf, Tensor) and (place := leaf.place()) is not None:
            places.setdefault(place, []).append(name)
    return {name: tuple(names) for names in places.values() if len(names) > 1 for name in names}


def _decide_optim(optim: OptimState | None, model: ModelState | None) -> tuple[OptimState | None, list[str]]:
    """The optimizer decided, and the keys of those parameters for which nothing settles it."""
    if optim is None:
        return None, []
    ambiguous: list[str] = []
    state = {key: _decide_entry(key, entry, model, ambiguous) for key, entry in optim.state.items()}
    groups = None
    if optim.param_groups is not None:
        groups = [{name: _as_in_source(value) for name, value in group.items()} for group in optim.param_groups]
    return OptimState(state, groups, {key: _as_in_source(value) for key, value in optim.extra.items()}), ambiguous


def _decide_entry(
    key: ParamKey, entry: Mapping[str, Tensor | Value], model: ModelState | None, ambiguous: list[str]
) -> dict[str, Tensor | Value]:
    """One parameter's states: those shaped like the parameter follow it, all others are whole on every rank."""
    param = model.params.get(key) if model is not None and isinstance(key, str) else None
    shapes = {leaf.shape for leaf in entry.values() if isinstance(leaf, Tensor) and leaf.ndim}
    like = param.shape if isinstance(param, Tensor) else next(iter(shapes), None) if len(shapes) == 1 else None
    follows = param.sharded if isinstance(param, Tensor) else True
    if like is None and any(isinstance(leaf, Tensor) and leaf.ndim and leaf.sharded is None for leaf in entry.values()):
        ambiguous.append(str(key))
    decided: dict[str, Tensor | Value] = {}
    for name, leaf in entry.items():
        if isinstance(leaf, Tensor):
            sharded = leaf.sharded if leaf.sharded is not None else leaf.shape == like and bool(follows)
            decided[name] = replace(leaf, sharded=sharded and leaf.ndim > 0)
        else:
            decided[name] = leaf
    return decided


def _as_in_source(value: Value) -> Value:
    """Tensors outside of the model and the states: sharded only where the source had them sharded."""
    if isinstance(value, Tensor):
        return replace(value, sharded=value.sharded is True)
    if isinstance(value, dict):
        changed: dict[Key, Value] = {key: _as_in_source(child) for key, child in value.items()}
        if type(value) is dict:
            return changed
        copy = type(value)(changed)
        vars(copy).update(vars(value))
        return copy
    if isinstance(value, list):
        return [_as_in_source(child) for child in value]
    if isinstance(value, tuple):
        return tuple(_as_in_source(child) for child in value)
    return value
