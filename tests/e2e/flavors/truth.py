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
    return compare.differences(_by_parameter(found), _by_parameter(expected))


def _by_parameter(content: dict[str, Any]) -> list[dict[str, Any]]:
    optimizer = content["optimizer"]
    groups = [{**group, "param_names": None} for group in optimizer["param_groups"]]
    return [content["model"], compare.settings_by_parameter({**optimizer, "param_groups": groups})]
