"""Decides which tensors are searched for NaN and Inf: parameters and states, and buffers only when they are named."""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase

from fsdpckpt.ir.checkpoint import Checkpoint, NamedTensor, Section
from fsdpckpt.ir.names import clean
from fsdpckpt.ir.tensors import Tensor
from fsdpckpt.text import first_of, plural
from fsdpckpt.transform.selection import require_globs


@dataclass(frozen=True, slots=True)
class Finite:
    """Which tensors are searched. Globs match keys and parameter names.

    ``include``: only what matches, including buffers; ``exclude``: not what matches.
    """

    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()

    def require_matches(self, checkpoint: Checkpoint) -> None:
        """Raises UsageError for a glob that matches nothing: the intended tensors would not be searched."""
        names = [(named.key, named.param) for named in checkpoint.tensors()]
        require_globs("--include", self.include, names, checkpoint.source)
        require_globs("--exclude", self.exclude, names, checkpoint.source)

    def selects(self, named: NamedTensor, buffers: frozenset[str]) -> bool:
        if _matches_any(named, self.exclude):
            return False
        if self.include:
            return _matches_any(named, self.include)
        return named.section is not Section.MODEL or named.key not in buffers

    def note(self, buffers: frozenset[str]) -> tuple[str, ...]:
        """What is left out because it seems to be a buffer."""
        if self.include or not buffers:
            return ()
        seem = "seems to be a buffer" if len(buffers) == 1 else "seem to be buffers"
        count = f"{plural(len(buffers), 'model tensor')} {seem}"
        names = first_of(sorted(buffers), 3)
        return (f"{count}, not searched for NaN and Inf: {names}; --include GLOB searches what it matches",)


def _matches_any(named: NamedTensor, globs: tuple[str, ...]) -> bool:
    return any(fnmatchcase(named.key, glob) or fnmatchcase(named.param, glob) for glob in globs)


def buffer_keys(checkpoint: Checkpoint) -> frozenset[str]:
    """The model's keys that are not parameters, as far as this is known; frozen parameters may be among them.

    A parameter is what the optimizer lists by name, or what FSDP shards. Of the others, those are buffers that every
    rank holds whole although parameters are sharded, and, if nothing is sharded, those that the optimizer does not
    list. Without either (an optimizer by ids or none, in one full file) nothing counts as a buffer.
    """
    if checkpoint.model is None:
        return frozenset()
    tensors = {key: leaf for key, leaf in checkpoint.model.params.items() if isinstance(leaf, Tensor)}
    optim = checkpoint.optim
    in_optimizer: set[str] = set()
    if optim is not None:
        in_optimizer = {clean(name) for name in (*optim.grouped_keys(), *optim.state) if isinstance(name, str)}
    if in_optimizer.isdisjoint(map(clean, tensors)):  # by ids, or under other names than the model's
        in_optimizer = set()
    return frozenset(
        key
        for key, tensor in tensors.items()
        if clean(key) not in in_optimizer
        and tensor.sharded is not True
        and (bool(in_optimizer) or (tensor.sharded is False and tensor.ndim > 0))
    )
