"""Recognise FSDP1's flattened tensors in a DCP directory, and the saves that lost data by it.

``LOCAL_STATE_DICT`` gives ``<unit>._flat_param`` entries that DCP chunks correctly. A raw ``optimizer.state_dict()`` of
FSDP1 does not survive DCP: each rank's slice is a plain 1-D tensor under the same key, DCP takes them for copies of one
tensor and keeps one rank's (``torch/distributed/checkpoint/_dedup_save_plans.py``).
"""

from __future__ import annotations

import re

from fsdpckpt.containers.dcp_metadata import DcpMetadata
from fsdpckpt.ir.checkpoint import Layout, Note, Problem, Section

__all__ = ["Flattened", "find_flattened"]

_STATE_BY_ID = re.compile(r"(?:^|\.)state\.\d+\.[^.]+$")
_FLAT = "_flat_param"


class Flattened:
    """What was found: ``layout`` is FLATTENED or None; problems are fatal, notes are not."""

    def __init__(self) -> None:
        self.layout: Layout | None = None
        self.problems: list[Problem] = []
        self.notes: list[Note] = []


def find_flattened(metadata: DcpMetadata, *, directory: str, world_size: int) -> Flattened:
    """Judge by keys, shapes and chunks alone."""
    found = Flattened()
    flat = [key for key in metadata.tensors if _FLAT in key]
    if flat:
        found.layout = Layout.FLATTENED
        found.problems.append(
            Problem(
                "flattened",
                f"{directory} holds {len(flat)} flat parameters of FSDP1 (LOCAL_STATE_DICT), such as {flat[0]}",
                file=directory,
                key=flat[0],
            )
        )
        _judge_names_beside(metadata, directory, found)
    by_id = [key for key in metadata.tensors if _STATE_BY_ID.search(key)]
    if by_id and _is_lost(metadata, by_id, world_size):
        found.layout = Layout.FLATTENED
        found.problems.append(
            Problem(
                "flattened-lost",
                f"{directory} is the raw optimizer.state_dict() of FSDP1, saved through DCP by {world_size} ranks: "
                f"each rank held another slice of {by_id[0]}, DCP kept one, the slices of the other ranks are gone. "
                "Save it again with FSDP.optim_state_dict or torch.distributed.checkpoint.state_dict",
                file=directory,
                key=by_id[0],
                section=Section.OPTIM,
            )
        )
    return found


def _judge_names_beside(metadata: DcpMetadata, directory: str, found: Flattened) -> None:
    """With use_orig_params=True every parameter also has an entry by name: one rank's slice, often of size 0."""
    beside = [
        key
        for key, tensor in metadata.tensors.items()
        if _FLAT not in key and len(tensor.shape) == 1 and len(tensor.chunks) == 1 and ".state." not in f".{key}"
    ]
    empty = [key for key in beside if metadata.tensors[key].shape == (0,)]
    if empty:
        found.problems.append(
            Problem(
                "flattened-lost",
                f"{directory}: {len(beside)} entries beside the flat parameters hold one rank's slice only "
                f"({empty[0]} is empty); their whole data is in the {_FLAT} entries",
                file=directory,
                key=empty[0],
            )
        )
    elif beside:
        found.notes.append(
            Note(
                "flattened-names",
                f"{len(beside)} 1-D entries stand beside the flat parameters: buffers, or slices of one rank",
                beside[0],
            )
        )


def _is_lost(metadata: DcpMetadata, by_id: list[str], world_size: int) -> bool:
    """All states by id are 1-D and in one piece although several ranks wrote, and the model is not all 1-D itself."""
    if world_size < 2:
        return False
    sliced = 0
    for key in by_id:
        tensor = metadata.tensors[key]
        if len(tensor.shape) > 1 or len(tensor.chunks) > 1:
            return False
        sliced += len(tensor.shape)
    states = set(by_id)
    others = [tensor for key, tensor in metadata.tensors.items() if key not in states]
    model_is_flat = bool(others) and all(len(tensor.shape) < 2 for tensor in others)
    has_flat_param = any(_FLAT in key for key in metadata.tensors)
    return sliced > 0 and (has_flat_param or not model_is_flat)
