"""What PyTorch says of a checkpoint: its own DCP of the same training, as one file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from tests.oracle import compare

__all__ = ["differences", "of_reference"]


def of_reference(directory: Path, scratch: Path) -> dict[str, Any]:
    """``{"model": ..., "optimizer": ...}`` of a DCP directory, read by PyTorch."""
    dcp_to_torch_save(directory, scratch)
    content: dict[str, Any] = torch.load(scratch, weights_only=False)
    return content


def differences(found: dict[str, Any], expected: dict[str, Any]) -> list[str]:
    """What differs in model and optimizer between two checkpoints keyed by name, whatever their groups are."""
    return compare.differences(leaves(found), leaves(expected))


def leaves(content: dict[str, Any]) -> dict[str, Any]:
    optimizer = content["optimizer"]
    states = {f"{name} {key}": value for name, state in optimizer["state"].items() for key, value in state.items()}
    settings = {
        f"{name} setting {key}": value
        for group in optimizer["param_groups"]
        for name in group["params"]
        for key, value in group.items()
        if key not in ("params", "param_names")
    }
    return {**content["model"], **states, **settings}
