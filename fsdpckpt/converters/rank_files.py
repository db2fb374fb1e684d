"""Files by rank whose DTensors say a mesh of a device type: a live model takes them only from a mesh like its own."""

from __future__ import annotations

from dataclasses import replace

from fsdpckpt.errors import NeedsInformationError
from fsdpckpt.ir.checkpoint import Checkpoint, Note
from fsdpckpt.ir.targets import Target
from fsdpckpt.options import ConvertOptions, TensorForm
from fsdpckpt.producers.forms import PLAIN_NAMES, MeshForm, RankNames
from fsdpckpt.writers import torch_ranks
from fsdpckpt.writers.dtype_rule import DtypeRule

__all__ = ["lay_out_ranks"]


def lay_out_ranks(
    checkpoint: Checkpoint,
    *,
    world_size: int,
    options: ConvertOptions,
    dtypes: DtypeRule,
    mesh: MeshForm,
    names: RankNames = PLAIN_NAMES,
) -> Target:
    """The sharded files of ``world_size`` ranks; their mesh is ``mesh``, on the devices that ``--mesh-device`` gives.

    Without it on those of the source's own DTensors; a source without any leaves ``mesh`` as it is, with a note. Raises
    NeedsInformationError when the source names several device types.
    """
    device = options.mesh_device or _device_of(checkpoint)
    if device is not None:
        mesh = replace(mesh, device=device)
    target = torch_ranks.lay_out(
        checkpoint, world_size=world_size, tensor=options.tensor, dtypes=dtypes, names=names, mesh=mesh
    )
    if device is None and options.tensor is TensorForm.DTENSOR:
        said = f"DTensors say that their mesh is on {mesh.device} devices; the source does not say (--mesh-device)"
        target.notes.append(Note("inferred", said))
    return target


def _device_of(checkpoint: Checkpoint) -> str | None:
    found = sorted(checkpoint.mesh_devices)
    if len(found) > 1:
        raise NeedsInformationError(
            f"the DTensors of {checkpoint.source} are on meshes of several device types",
            file=checkpoint.source,
            found=", ".join(found),
            why="a model loads DTensors only from a mesh of its own device type",
            next_step=f"add --mesh-device {found[0]}, or the one that the loading job has",
        )
    return found[0] if found else None
