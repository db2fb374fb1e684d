"""Knows which tensors of a model are buffers: of these alone a checkpoint may hold another copy on each rank.

A parameter is the same on all ranks, or cut. Of a tensor that ranks hold differently, one rank's copy is therefore a
part, or one of several experts, unless it is known to be a buffer: no name, shape or size shows that. It is known of

- the running statistics of a normalization layer: ``running_mean`` and ``running_var`` beside ``num_batches_tracked``;
- a number without dimensions that is an integer or a bool: a counter, which no optimizer trains and nothing cuts;
- what the units file beside the checkpoint does not list: ``save_units`` lists every parameter;
- what the user says (``--buffers``).

What the optimizer has states for, or lists by name, is a parameter, whatever it is called.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace

from fsdpckpt.globs import matches_any
from fsdpckpt.ir.attached_states import param_keys
from fsdpckpt.ir.checkpoint import Checkpoint, ModelState, Problem, Section
from fsdpckpt.ir.names import clean
from fsdpckpt.ir.placements import PerRank
from fsdpckpt.ir.tensors import Tensor
from fsdpckpt.ir.values import Value

NO_BUFFERS = ("none",)
"""What ``--buffers`` says when every model key that may be a parameter is one."""

UNKNOWN_COPIES = "they may be copies of a buffer, parts, or each rank's own"

_COUNTER = "num_batches_tracked"
_STATISTICS = frozenset({_COUNTER, "running_mean", "running_var"})


def known_buffers(checkpoint: Checkpoint, globs: Sequence[str] = ()) -> frozenset[str]:
    """The keys of the model that are known to be buffers. ``globs``: those of ``--buffers``."""
    model = checkpoint.model
    if model is None:
        return frozenset()
    trained = trained_keys(checkpoint)
    listed: Collection[str] = ()
    if checkpoint.units is not None:
        units = checkpoint.units
        listed = {*units.parameters, *(later for later, _ in units.shared)}
    found: set[str] = set()
    for key, leaf in model.params.items():
        if key in trained:
            continue
        name = clean(key)
        unlisted = bool(listed) and name not in listed
        by_itself = unlisted or _is_statistic(key, model.params) or _is_counter(leaf)
        if by_itself or matches_any(key, globs) or matches_any(name, globs):
            found.add(key)
    return frozenset(found)


def trained_keys(checkpoint: Checkpoint) -> frozenset[str]:
    """The keys of the model that the optimizer has states for, or lists, by name."""
    model, optim = checkpoint.model, checkpoint.optim
    if model is None or optim is None:
        return frozenset()
    return frozenset(param_keys(model.params, optim).values())


def _is_statistic(key: str, params: Mapping[str, Tensor | Value]) -> bool:
    module, dot, name = key.rpartition(".")
    return name in _STATISTICS and f"{module}{dot}{_COUNTER}" in params


def _is_counter(leaf: Tensor | Value) -> bool:
    return isinstance(leaf, Tensor) and not leaf.ndim and leaf.dtype.kind in ("int", "uint", "bool")


def with_named_buffers(checkpoint: Checkpoint, globs: Sequence[str]) -> Checkpoint:
    """``checkpoint`` without the problems that ``globs``, those of ``--buffers``, settle."""
    per_rank = _per_rank(checkpoint)
    known = known_buffers(checkpoint, globs) & per_rank.keys() if per_rank else frozenset()
    if checkpoint.model is None or not known:
        return checkpoint
    buffers: dict[str, Tensor | Value] = {}
    for key in known:
        leaf, cut = per_rank[key]
        buffers[key] = replace(leaf, cut=replace(cut, buffer=True))
    settled = set(undecided_copies(checkpoint)) - set(undecided_copies(checkpoint, globs))
    problems = tuple(problem for problem in checkpoint.problems if problem not in settled)
    model = ModelState({**checkpoint.model.params, **buffers}, checkpoint.model.metadata)
    return replace(checkpoint, model=model, ledger=replace(checkpoint.ledger, problems=problems))


def undecided_copies(checkpoint: Checkpoint, globs: Sequence[str] = ()) -> Iterator[Problem]:
    """A problem for each tensor of which a rank's own may be all or a part (``PerRank``), unless it is a known buffer.

    It stops a conversion only as long as ``--buffers`` does not settle it: so it is not fatal.
    """
    per_rank = _per_rank(checkpoint)
    buffers = known_buffers(checkpoint, globs) if per_rank else frozenset()
    for key, (leaf, cut) in per_rank.items():
        if key in buffers or cut.buffer:
            continue
        held = f"each rank holds {list(leaf.shape)}, which may be all of it or a part"
        if cut.differing is not None:
            held = copies_differ(*cut.differing, UNKNOWN_COPIES)
        rank = None if cut.differing is None else cut.differing[1]
        yield Problem("copies", f"model {key}: {held}", fatal=False, key=key, rank=rank, section=Section.MODEL)


def copies_differ(first_rank: int, rank: int, consequence: str) -> str:
    return f"the copies of rank {first_rank} and of rank {rank} differ, and {consequence}"


def _per_rank(checkpoint: Checkpoint) -> dict[str, tuple[Tensor, PerRank]]:
    """The tensors of the model that ranks may hold differently."""
    params = checkpoint.params
    return {
        key: (leaf, leaf.cut)
        for key, leaf in params.items()
        if isinstance(leaf, Tensor) and isinstance(leaf.cut, PerRank)
    }
