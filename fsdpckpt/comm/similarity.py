"""Are two state dicts, or those of all ranks, alike in structure? Every difference is listed, not the first one."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import TypeAlias, cast

import torch

from fsdpckpt.comm.boxes import kind_of
from fsdpckpt.comm.protocol import Group
from fsdpckpt.errors import StateDictMismatchError

__all__ = ["agree_on_structure", "check_similar", "describe", "differences", "raise_together"]

Description: TypeAlias = dict[str, str]
"""Dotted key -> what is there, in words: ``DTensor [5, 3] float32``, ``int``, ``dict of 2``."""

MOST_SHOWN = 200  # differences in one message; the number of all is said


def describe(state: object, *, plain_shapes: bool = True) -> Description:
    """The structure of ``state``. ``plain_shapes`` False: of plain tensors only that they are there.

    A key that is no string is shown as Python writes it, and a string of digits in quotes, so that 0 and "0" differ.
    """
    found: Description = {}
    _describe(state, "", found, plain_shapes=plain_shapes)
    return found


def _describe(value: object, key: str, found: Description, *, plain_shapes: bool) -> None:
    if isinstance(value, torch.Tensor):
        kind = kind_of(value)
        words = f"{kind} {list(value.shape)} {str(value.dtype).removeprefix('torch.')}"
        found[key] = words if plain_shapes or kind != "Tensor" else kind
    elif isinstance(value, Mapping):
        found[key] = f"dict of {len(value)}"
        for name, child in value.items():
            part = name if isinstance(name, str) and not name.isdigit() else repr(name)
            _describe(child, f"{key}.{part}" if key else part, found, plain_shapes=plain_shapes)
    elif isinstance(value, (list, tuple)):
        found[key] = f"{type(value).__name__} of {len(value)}"
        for index, child in enumerate(value):
            _describe(child, f"{key}[{index}]", found, plain_shapes=plain_shapes)
    else:
        found[key] = type(value).__name__


def differences(one: Description, other: Description, names: tuple[str, str] = ("one", "the other")) -> list[str]:
    """Every difference in words. A container whose entries differ is not listed beside them."""
    found = [f"{key}: only in {names[0]} ({words})" for key, words in one.items() if key not in other]
    found += [f"{key}: only in {names[1]} ({words})" for key, words in other.items() if key not in one]
    for key, words in one.items():
        if key in other and words != other[key] and not (words.startswith("dict of") and "dict of" in other[key]):
            found.append(f"{key or 'the whole'}: {words} in {names[0]}, {other[key]} in {names[1]}")
    return found


def check_similar(state: object, companion: object) -> None:
    """Raise StateDictMismatchError unless both have the same keys, kinds, shapes and dtypes."""
    _raise(differences(describe(state), describe(companion), ("the state dict", "its companion")))


def agree_on_structure(group: Group, state: object) -> None:
    """Raise StateDictMismatchError, the same on all ranks, unless all ranks' state dicts are alike. All ranks.

    Plain tensors may differ in shape: they are each rank's own.
    """
    mine = describe(state, plain_shapes=False)
    digest = hashlib.sha256(json.dumps(mine).encode()).hexdigest()
    if len(set(group.all_gather_objects(digest, name="compare structures"))) == 1:
        return
    every = cast("list[Description]", group.all_gather_objects(mine, name="list the differences"))
    found: list[str] = []
    for rank, other in enumerate(every[1:], 1):
        found += differences(every[0], other, ("rank 0", f"rank {rank}"))
    _raise(found or ["the keys come in another order"])


def raise_together(group: Group, problems: list[str]) -> None:
    """Raise StateDictMismatchError with every rank's ``problems``, on every rank. All ranks."""
    every = cast("list[list[str]]", group.all_gather_objects(problems, name="compare structures"))
    found: dict[str, list[int]] = {}
    for rank, each in enumerate(every):
        for problem in each:
            found.setdefault(problem, []).append(rank)
    everybody = len(every)
    _raise([text if len(ranks) == everybody else f"{text} (rank {ranks[0]})" for text, ranks in found.items()])


def _raise(found: list[str]) -> None:
    if not found:
        return
    more = [f"and {len(found) - MOST_SHOWN} more"] if len(found) > MOST_SHOWN else []
    raise StateDictMismatchError(
        f"the state dicts do not match: {len(found)} difference{'s' if len(found) > 1 else ''}",
        details=[*found[:MOST_SHOWN], *more],
        next_step="build the same model and optimizer on every rank, wrapped the same way",
    )
