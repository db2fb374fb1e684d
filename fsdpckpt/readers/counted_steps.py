"""Gives each parameter the step that its optimizer counts in the param group.

The fused Adams of apex and Transformer Engine, which Megatron-LM trains with, keep ``step`` in each group and none in
the states. ``torch.optim`` reads it from the states: its AdamW takes states without one for those of a run that has
just begun, or fails at the first step.
"""

from __future__ import annotations

from dataclasses import replace

from fsdpckpt.ir.checkpoint import Problem, Section
from fsdpckpt.ir.counters import STEP
from fsdpckpt.ir.optimizer import Optimizer, ParamGroup
from fsdpckpt.ir.tensors import Tensor
from fsdpckpt.ir.values import Value, like
from fsdpckpt.readers.optimizer_forms import step_tensor
from fsdpckpt.readers.protocol import FileTable

_MEGATRONS = frozenset({"args", "checkpoint_version"})
"""The keys by which a file of Megatron-LM's torch format is known, whatever its name."""


def is_megatrons(root: Value, flavor: str) -> bool:
    """Whether the content of a file or directory, ``root``, is Megatron-LM's torch format, as ``flavor`` may say."""
    return flavor == "megatron-torch" or (isinstance(root, dict) and root.keys() >= _MEGATRONS)


def with_step_of_each(optim: Optimizer, table: FileTable) -> tuple[Optimizer, Problem | None]:
    """``optim`` with the step of its group among the states of each parameter, and no more in the group.

    A parameter of a group without a step, or that no group lists, has the one step of all groups, as Megatron steps all
    of them together; a fatal problem if they count different ones. Parameters without states get none: they were not
    trained. An optimizer that keeps steps in its states stays as it is.
    """
    states = list(optim.state.values())
    if not any(states) or any(STEP in entry for entry in states):
        return optim, None
    tensors: dict[float, Tensor] = {}  # by the number that each holds
    of_group: list[Tensor | None] = []
    for group in optim.groups or ():
        step = group.settings.get(STEP)
        number = float(step) if isinstance(step, (int, float)) and abs(step) < 1 << 53 else None
        found = tensors.get(number) if number is not None else None
        found = step_tensor(step, table) if found is None else found
        if found is not None and number is not None:
            tensors[number] = found
        of_group.append(found)
    common = next((step for step in of_group if step is not None), None)
    if common is None:
        return optim, None
    own: dict[int, Tensor] = {}
    for group, step in zip(optim.groups or (), of_group, strict=True):
        own |= dict.fromkeys(group.members or (), step) if step is not None else {}
    entries = tuple(
        entry
        if entry.member is None or not entry.states
        else entry._replace(states={**entry.states, STEP: own.get(entry.member, common)})
        for entry in optim.entries
    )
    problem = None
    if len(tensors) > 1 and any(entry.states and entry.member not in own for entry in optim.entries):
        steps = ", ".join(f"{value:g}" for value in sorted(tensors))
        message = f"the param groups count the steps {steps}, and which parameter is in which is not saved"
        problem = Problem("step", message, section=Section.OPTIM)
    return replace(optim, entries=entries, groups=tuple(map(_without_step, optim.groups or ()))), problem


def _without_step(group: ParamGroup) -> ParamGroup:
    settings = {key: value for key, value in group.settings.items() if key != STEP}
    return replace(group, settings=like(group.settings, settings))
