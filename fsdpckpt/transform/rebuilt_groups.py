"""Divides param groups that were rebuilt from equal hyper-parameters as a units file records those of the job."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain

from fsdpckpt.ir.checkpoint import Checkpoint, Note
from fsdpckpt.ir.names import clean
from fsdpckpt.ir.optimizer import PARAM_NAMES, PARAMS, Optimizer
from fsdpckpt.ir.values import Key, Value
from fsdpckpt.text import plural
from fsdpckpt.transform.parameter_order import ParameterOrder


def divided_as_recorded(
    checkpoint: Checkpoint, optim: Optimizer, order: ParameterOrder
) -> tuple[Checkpoint, Optimizer]:
    """``optim``, whose groups are rebuilt from equal settings, with those of ``order`` if each is a part of one."""
    own, recorded = optim.groups or (), order.groups or ()
    group_of = {clean(str(key)): number for key, number in optim.group_of().items()}
    holders = [{group_of.get(name) for name in names} for names in recorded]
    numbers = [number for each in holders if len(each) == 1 for number in each if number is not None]
    of_same_parameters = sorted(chain(*recorded)) == sorted(group_of) and len(group_of) == len(optim.keys)
    if len(numbers) != len(recorded) or len(recorded) <= len(own) or not of_same_parameters:
        return checkpoint, optim
    key_of = {clean(str(key)): key for key in optim.keys}
    groups: list[dict[Key, Value]] = []
    for names, number in zip(recorded, numbers, strict=True):
        settings = {key: value for key, value in own[number].settings.items() if key != PARAM_NAMES}
        groups.append({**settings, PARAMS: [key_of[name] for name in names]})
    optim = optim.with_groups(groups)
    message = f"{plural(len(own), 'rebuilt param group')} became {len(groups)}, as in {order.source}"
    return replace(checkpoint, optim=optim).noted(Note("groups-rebuilt", message)), optim
