"""Reads one rank's optimizer in Megatron-LM's torch format, and finds out which parameter each of its states is of.

``Float16OptimizerWithFloat16Params`` has the float32 weights of each param group in ``fp32_from_fp16_params``, in the
order of the ids (``megatron/core/optimizer/optimizer.py``). Nothing says which parameter each of them is: they round to
the model's copies, on every rank. Experts have an optimizer of their own, behind that of the other parameters in a list
(``get_megatron_optimizer`` and ``ChainedOptimizer.state_dict``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain
from typing import cast

from fsdpckpt.formats.torch import local_tensor
from fsdpckpt.formats.torch.tensors import StoredTensor
from fsdpckpt.ir.checkpoint import SourceFile
from fsdpckpt.ir.listing import divided
from fsdpckpt.ir.tensors import Tensor
from fsdpckpt.ir.values import Key
from fsdpckpt.readers.megatron_torch.names import StateDict, of_optimizer
from fsdpckpt.readers.same_weights import first_different, names_by_value
from fsdpckpt.readers.torch_ranks.rank_files import RankFile
from fsdpckpt.storage.sources import Sources

OPTIMIZER = "optimizer"
MASTERS = "fp32_from_fp16_params"


@dataclass(frozen=True, slots=True)
class RankGroup:
    """One param group of a rank: its settings, its ids, the float32 weights in the same order, and the states by id."""

    settings: StateDict
    ids: list[object]
    masters: list[StoredTensor]
    state: Mapping[Key, object]


@dataclass(frozen=True, slots=True)
class RankOptimizer:
    """One rank's optimizers, one behind the other in Megatron's list. ``others``: what else they hold."""

    optimizers: list[list[RankGroup]] = field(default_factory=list)
    others: StateDict = field(default_factory=dict)

    @property
    def groups(self) -> list[RankGroup]:
        return list(chain.from_iterable(self.optimizers))


def rank_optimizer(saved: object) -> RankOptimizer | None:
    """The optimizer that a file has, ``saved``. None if it has no states."""
    found = RankOptimizer()
    for number, entry in enumerate(saved if isinstance(saved, (list, tuple)) else [saved]):
        if not isinstance(entry, dict):
            return None
        inner = entry.get(OPTIMIZER, entry)
        groups = _groups(entry, inner)
        if groups is None:
            return None
        found.optimizers.append(groups)
        others = {key: value for key, value in entry.items() if key not in (OPTIMIZER, MASTERS)}
        for key, value in others.items() if inner is not entry else ():
            found.others[key if key not in found.others else f"{key}_{number}"] = value
    return found if found.optimizers else None


def _groups(entry: StateDict, inner: object) -> list[RankGroup] | None:
    """The param groups of one optimizer, ``entry``; ``inner`` is the state dict of torch's. None without states."""
    state, groups = (inner.get(key) if isinstance(inner, dict) else None for key in ("state", "param_groups"))
    if not isinstance(state, dict) or not isinstance(groups, list):
        return None
    masters = entry.get(MASTERS) if inner is not entry else None
    by_group = list(masters) if isinstance(masters, (list, tuple)) else []
    found = []
    for number, group in enumerate(groups):
        if not isinstance(group, dict):
            return None
        ids = group.get("params")
        of_group = by_group[number] if number < len(by_group) else []
        tensors = list(of_group) if isinstance(of_group, (list, tuple)) else [None]
        if not all(isinstance(tensor, StoredTensor) for tensor in tensors):
            return None
        listed = list(ids) if isinstance(ids, (list, tuple)) else []
        found.append(RankGroup(group, listed, cast("list[StoredTensor]", tensors), state))
    return found


def unlisted_states(optimizer: RankOptimizer) -> list[Key]:
    """The keys of states that no param group of their optimizer lists."""
    unlisted: list[Key] = []
    for groups in optimizer.optimizers:
        listed: set[object] = set()
        for number in chain.from_iterable(group.ids for group in groups):
            with suppress(TypeError):  # what cannot be hashed is no key of the states
                listed.add(number)
        unlisted += [key for key in (groups[0].state if groups else ()) if key not in listed]
    return unlisted


def names_of_groups(
    file: RankFile,
    optimizer: RankOptimizer,
    copies: Mapping[str, StoredTensor],
    files: Sequence[SourceFile],
    sources: Sources,
) -> list[list[str]] | None:
    """The parameters of each param group of ``optimizer``. None unless the values prove them.

    ``copies``: the model's weights in ``file``, in its order.
    """
    weights = {name: local_tensor(copy, file.file, file.rank) for name, copy in copies.items()}
    names: list[list[str]] = []
    for number, groups in enumerate(optimizer.optimizers):
        counts = [len(group.masters) for group in groups]
        if counts != [len(group.ids) for group in groups]:
            return None
        own = of_optimizer(weights, number, len(optimizer.optimizers))
        masters = [local_tensor(master, file.file, file.rank) for group in groups for master in group.masters]
        found = _in_order(own, masters, counts, files, sources)
        found = names_by_value(weights, masters, files, sources) if found is None else found
        if found is None:
            return None
        names += divided(found, counts)
    listed = list(chain.from_iterable(names))
    return names if listed and len(set(listed)) == len(listed) else None


def _in_order(
    copies: Mapping[str, Tensor],
    masters: Sequence[Tensor],
    counts: Sequence[int],
    files: Sequence[SourceFile],
    sources: Sources,
) -> list[str] | None:
    """All parameters in Megatron's order (``_get_param_groups``: matrices before vectors and biases, in each group in
    the order of the model); None unless each master rounds to the copy in its place.
    """
    matrices = [name for name, copy in copies.items() if copy.ndim > 1]
    vectors = [name for name, copy in copies.items() if copy.ndim <= 1]
    orders = [list(copies)] if sum(map(bool, counts)) == 1 else [matrices + vectors, vectors + matrices]
    for names in orders:
        pairs = [(name, copies[name], master) for name, master in zip(names, masters, strict=False)]
        fit = len(pairs) == len(masters) == len(names)
        if fit and first_different(pairs, files, sources) is None:
            return names
    return None
