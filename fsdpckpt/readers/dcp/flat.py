"""Recognise FSDP1's flattened tensors in a DCP directory, and the saves that lost data by it.

``LOCAL_STATE_DICT`` gives ``<unit>._flat_param`` entries that DCP chunks correctly. A raw ``optimizer.state_dict()`` of
FSDP1 does not survive DCP: each rank's slice is a plain 1-D tensor under the same key, DCP takes them for copies of one
tensor and keeps one rank's (``torch/distributed/checkpoint/_dedup_save_plans.py``).
"""

from __future__ import annotations

import re

from fsdpckpt.formats.dcp.metadata import DcpMetadata
from fsdpckpt.ir.checkpoint import Layout, Note, Problem, Section
from fsdpckpt.layouts.flattened import is_flat_key

__all__ = ["FlattenedFindings", "find_flattened"]

_STATE_BY_ID = re.compile(r"(?:^|\.)state\.\d+\.[^.]+$")
# Of an optimizer: a producer (composer) that nests everything under "state." must not look like one.
_STATE = re.compile(r"\.state\.|^state\.\d|(?:^|\.)param_groups\.")


class FlattenedFindings:
    """What the metadata shows: ``layout`` is FLATTENED or None; problems are fatal, notes are not.

    ``beside``: keys of vectors beside flat parameters, see ``ir.tensors.ONE_SLICE``.
    """

    def __init__(self) -> None:
        self.layout: Layout | None = None
        self.beside: frozenset[str] = frozenset()
        self.problems: list[Problem] = []
        self.notes: list[Note] = []


def find_flattened(metadata: DcpMetadata, *, directory: str, world_size: int) -> FlattenedFindings:
    """Decide from keys, shapes and chunks alone whether a DCP directory holds flat parameters, or lost slices."""
    result = FlattenedFindings()
    flat = [key for key in metadata.tensors if is_flat_key(key)]
    if flat:
        result.layout = Layout.FLATTENED
        _find_beside(metadata, flat, result)
    by_id = [key for key in metadata.tensors if _STATE_BY_ID.search(key)]
    lost = _first_lost(metadata, by_id, world_size) if by_id else None
    if lost is not None:
        result.layout = Layout.FLATTENED
        result.problems.append(
            Problem(
                "flattened-lost",
                f"{directory} is the raw optimizer.state_dict() of FSDP1, saved through DCP by {world_size} ranks: "
                f"each rank held another slice of {lost}, DCP kept one, the slices of the other ranks are gone. "
                "Save it again with FSDP.optim_state_dict or torch.distributed.checkpoint.state_dict",
                file=directory,
                key=lost,
                section=Section.OPTIM,
            )
        )
    return result


def _find_beside(metadata: DcpMetadata, flat: list[str], result: FlattenedFindings) -> None:
    """With use_orig_params=True every parameter also has an entry by name: one rank's slice, often of size 0."""
    sections = {_section(metadata, key) for key in flat}
    beside = [
        key
        for key, tensor in metadata.tensors.items()
        if len(tensor.shape) == 1
        and len(tensor.chunks) == 1
        and not is_flat_key(key)
        and not _STATE.search(key)
        and _section(metadata, key) in sections
    ]
    result.beside = frozenset(beside)
    if beside:
        message = (
            f"{len(beside)} vectors stand beside the flat parameters: buffers, and one rank's slices of parameters, "
            "which are not converted: their data is in the flat parameters"
        )
        result.notes.append(Note("flattened-names", message, beside[0], tuple(beside)))


def _section(metadata: DcpMetadata, key: str) -> tuple[object, ...]:
    """The dict that ``key`` stands in; without planner data nothing tells, and all stand in one."""
    paths = metadata.paths
    return paths[key][:-1] if paths is not None and key in paths else ()


def _first_lost(metadata: DcpMetadata, by_id: list[str], world_size: int) -> str | None:
    """The first state by id that is one rank's slice; None when all are whole, or cut by DCP itself.

    They are slices when all of them are vectors in one chunk although several ranks wrote, and the model is not made
    of vectors itself. Where DCP cut the model and no state, any vector is one that has the shape of no tensor of the
    model: only the states of parameters outside of FSDP are whole.
    """
    states = {key: metadata.tensors[key] for key in by_id if metadata.tensors[key].shape}
    vectors = [key for key, tensor in states.items() if len(tensor.shape) == 1 and len(tensor.chunks) == 1]
    if world_size < 2 or not vectors:
        return None
    others = {key: tensor for key, tensor in metadata.tensors.items() if key not in set(by_id)}
    if len(vectors) == len(states):
        model_is_flat = bool(others) and all(len(tensor.shape) < 2 for tensor in others.values())
        has_flat_param = any(map(is_flat_key, metadata.tensors))
        return vectors[0] if has_flat_param or not model_is_flat else None
    if any(len(tensor.chunks) > 1 for tensor in states.values()):
        return None  # DCP cut them: they are no raw optimizer's, and a vector among them is a state of its own shape
    if not any(len(tensor.chunks) > 1 for tensor in others.values()):
        return None
    whole = {tensor.shape for tensor in others.values()}
    return next((key for key in vectors if states[key].shape not in whole and states[key].shape != (1,)), None)
