"""Lists the parameters of Megatron's param groups, whose checkpoints store only the groups' settings. Also splits the
single group of an optimizer that DeepSpeed made into the Trainer's two.

Megatron makes a group for each combination of ``wd_mult`` (1, or 0 for no weight decay), ``is_expert_parallel`` and
learning rates. By its standard rule vectors and biases have no weight decay (``megatron/core/optimizer/__init__.py``,
``_get_param_groups``); a training script may use its own rule.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

from fsdpckpt import flags
from fsdpckpt.errors import NeedsInformationError, SourceUnsupportedError, UsageError
from fsdpckpt.globs import matches
from fsdpckpt.ir.checkpoint import Checkpoint, Note
from fsdpckpt.ir.optimizer import PARAM_NAMES, PARAMS, Optimizer, ParamGroup
from fsdpckpt.ir.tensors import Tensor
from fsdpckpt.ir.values import Key, Value
from fsdpckpt.producers.recognition import flavor_named
from fsdpckpt.text import some_of

STANDARD = "standard"
_STACKED = re.compile(r"(?:^|\.)layers\.(?!\d)")  # all layers in one tensor, which has a dimension more
_EXPERTS = re.compile(r"\.experts\.")
_STACKED_EXPERTS = re.compile(r"\.experts\.experts\.")  # as above
_KEYS_IN_MESSAGE = 4


def list_parameters(checkpoint: Checkpoint, patterns: Sequence[str]) -> Checkpoint:
    """Return ``checkpoint`` with the parameters of each param group listed.

    ``patterns``: globs of parameters without weight decay, or ``standard``. Raises NeedsInformationError without any,
    and if the groups do not separate expert parameters and those without weight decay; UsageError for patterns that no
    group needs or that match nothing, and for ids; SourceUnsupportedError for states that do not belong to one named
    parameter.
    """
    optim = checkpoint.optim
    groups = (optim.groups if optim is not None else None) or ()
    listed = all(group.members is not None for group in groups)
    if optim is not None and patterns and has_one_group(checkpoint):
        _require_names(checkpoint.source, optim)
        names = list(map(str, optim.grouped_keys()))
        without = _without_decay(checkpoint, names, patterns)
        return _with_groups(checkpoint, optim, _split_group(groups[0], names, without), without)
    source = flavor_named(checkpoint.flavor)
    if optim is None or listed or source is None or not source.groups_without_params:
        if patterns:
            raise UsageError(
                f"{flags.no_weight_decay} is for Megatron's param groups, which list no parameters, and for an "
                f"optimizer with one group; {checkpoint.source} has neither",
                next_step=f"leave out {flags.no_weight_decay}",
            )
        return checkpoint
    names = [str(name) for name in optim.state]
    if not names and optim.extra:
        raise SourceUnsupportedError(
            f"the optimizer in {checkpoint.source} is saved as Megatron's buffers, which hold many parameters each",
            details=list(map(str, optim.extra))[:_KEYS_IN_MESSAGE],
            why="only the model's code says which elements of them belong to which parameter",
            next_step="load it with Megatron on the same ranks, save it with --dist-ckpt-optim-fully-reshardable (in "
            f"Python: distrib_optim_sharding_type=fully_reshardable), and convert that; or {flags.only('model')}, for "
            "the weights that the model computed with",
        )
    if not patterns:
        raise NeedsInformationError(
            f"the checkpoint does not say which parameters are in which of its {len(groups)} param groups",
            details=[_settings(group.settings) for group in groups],
            why="Megatron saves the settings of the groups, and makes the lists again from the model's code",
            next_step=f"{flags.no_weight_decay('standard')}, if training used Megatron's own rule (none for vectors "
            f"and biases); else {flags.no_weight_decay('GLOB')} for the parameters without weight decay; or "
            f"{flags.only('model')}",
        )
    without = _without_decay(checkpoint, names, patterns)
    settings = [group.settings for group in groups]
    filled = [group for group in _list_in_groups(settings, names, without) if group[PARAMS]]
    return _with_groups(checkpoint, optim, filled, without)


def has_one_group(checkpoint: Checkpoint) -> bool:
    """Whether the optimizer has one param group, which lists its parameters."""
    groups = checkpoint.groups
    return len(groups) == 1 and groups[0].members is not None


def note_one_group(checkpoint: Checkpoint) -> Checkpoint:
    """Add a note for the Trainer if the optimizer has one param group, as DeepSpeed makes them."""
    if len(checkpoint.groups) != 1:
        return checkpoint
    message = (
        "the optimizer has one param group: the Trainer's own has two, and does not load one. If DeepSpeed made this "
        f"optimizer, add {flags.no_weight_decay('standard')} (none for vectors and biases, the Trainer's rule)"
    )
    return checkpoint.lacks(message)


def _require_names(source: str, optim: Optimizer) -> None:
    """Raises UsageError for an optimizer that is keyed by id: a glob would match the digits."""
    if optim.key_type == "id":
        raise UsageError(
            f"{flags.no_weight_decay} needs the names of the parameters, and the optimizer of {source} is keyed by ids",
            next_step=f"convert it with {flags.key_type('name')} first, and what that writes with "
            f"{flags.no_weight_decay}",
        )


def _without_decay(checkpoint: Checkpoint, names: Sequence[str], patterns: Sequence[str]) -> set[str]:
    """The ``names`` that match a pattern. Raises UsageError for a pattern that matches none."""
    without: set[str] = set()
    for pattern in patterns:
        matched = [name for name in names if _matches(checkpoint, name, pattern)]
        if not matched:
            raise UsageError(
                f"{flags.no_weight_decay(pattern)} matches none of the parameters",
                details=names[:_KEYS_IN_MESSAGE],
                next_step="give globs of names as `fsdpckpt inspect --names-only` shows them",
            )
        without.update(matched)
    return without


def _with_groups(
    checkpoint: Checkpoint, optim: Optimizer, groups: list[dict[Key, Value]], without: set[str]
) -> Checkpoint:
    """``checkpoint`` with ``groups`` in its optimizer, and a note. ``without``: the parameters without weight decay."""
    changed = replace(optim.with_groups(groups), rebuilt=True)
    names = list(map(str, changed.grouped_keys()))
    message = f"param groups by weight decay: {len(without)} of {len(names)} parameters have none"
    note = Note("groups-rebuilt", message, keys=tuple(name for name in names if name in without))
    return replace(checkpoint, optim=changed).noted(note)


def _split_group(group: ParamGroup, names: Sequence[str], without: set[str]) -> list[dict[Key, Value]]:
    """Split ``group``, of the parameters ``names``, into those with and without weight decay."""
    settings = {key: value for key, value in group.settings.items() if key != PARAM_NAMES}
    decayed: list[Value] = [name for name in names if name not in without]
    others: list[Value] = [name for name in names if name in without]
    return [{**settings, PARAMS: decayed}, {**settings, PARAMS: others, "weight_decay": 0.0}]


def _list_in_groups(
    groups: Sequence[Mapping[Key, Value]], names: Sequence[str], without: set[str]
) -> list[dict[Key, Value]]:
    """``groups`` with their parameters: each name goes to the one group of its kind."""
    experts = any(group.get("is_expert_parallel") for group in groups)
    listed: list[dict[Key, Value]] = [{**group, PARAMS: []} for group in groups]
    for name in names:
        kind = (experts and bool(_EXPERTS.search(name)), name in without)
        fitting = [group for group in listed if _kind(group) == kind]
        if len(fitting) != 1:
            raise NeedsInformationError(
                f"{'several param groups fit' if fitting else 'no param group fits'} {name}",
                details=[_settings(group) for group in groups],
                key=name,
                expected="one group for the parameters with weight decay and one for those without, and the same for "
                "experts",
                why="the training script made groups by its own rule",
                next_step=f"{flags.only('model')} converts the weights",
            )
        params = fitting[0][PARAMS]
        if isinstance(params, list):
            params.append(name)
    return listed


def _kind(group: dict[Key, Value]) -> tuple[bool, bool]:
    """Whether ``group`` holds experts, and whether it has no weight decay."""
    return bool(group.get("is_expert_parallel")), group.get("wd_mult", group.get("weight_decay")) == 0


def _matches(checkpoint: Checkpoint, name: str, pattern: str) -> bool:
    """Whether ``pattern`` says that the parameter has no weight decay; ``standard``: a bias or a vector has none."""
    if pattern != STANDARD:
        return matches(name, pattern)
    if name.endswith(".bias"):
        return True
    weight = checkpoint.params.get(name)
    states = checkpoint.states.get(name, {})
    leaves = [leaf for leaf in (weight, *states.values()) if isinstance(leaf, Tensor) and leaf.ndim]
    stacked = bool(_STACKED.search(name)) + bool(_STACKED_EXPERTS.search(name))
    return bool(leaves) and leaves[0].ndim - stacked == 1


def _settings(group: Mapping[Key, Value]) -> str:
    """What distinguishes ``group`` from others, for messages."""
    settings = {key: group[key] for key in ("wd_mult", "weight_decay", "lr", "is_expert_parallel") if key in group}
    return ", ".join(f"{key} {value!r}" for key, value in settings.items()) or some_of(list(group), _KEYS_IN_MESSAGE)
