"""``fsdpckpt.json``: what every directory written by this program says about itself."""

from __future__ import annotations

import json

from fsdpckpt.converters.goal import Goal
from fsdpckpt.ir.checkpoint import Checkpoint, Note
from fsdpckpt.ir.targets import Target, TargetFile
from fsdpckpt.readers.flavors import MANIFEST
from fsdpckpt.version import __version__

__all__ = ["add_manifest"]


def add_manifest(target: Target, checkpoint: Checkpoint, goal: Goal) -> None:
    """Append ``fsdpckpt.json`` to a directory target, before a DCP ``.metadata``, which must become visible last."""
    notes = [*checkpoint.notes, *target.notes]
    document = {
        "program": "fsdpckpt",
        "version": __version__,
        "format": 1,
        "source": checkpoint.source,
        "source_layout": checkpoint.layout,
        "source_container": checkpoint.container,
        "source_world_size": checkpoint.world_size,
        "layout": goal.layout,
        "container": goal.container,
        "world_size": goal.world_size,
        "key_type": checkpoint.optim.key_type if checkpoint.optim is not None else None,
        "notes": [_note(note) for note in notes],
        "undetermined": [key for note in notes if note.kind == "undetermined" for key in note.keys],
        "files": {file.path: file.nbytes for file in target.files},
    }
    file = TargetFile(MANIFEST)
    file.literal((json.dumps(document, indent=1) + "\n").encode())
    last = next((i for i, other in enumerate(target.files) if other.path == ".metadata"), len(target.files))
    target.files.insert(last, file)


def _note(note: Note) -> dict[str, str | None]:
    return {"kind": note.kind, "key": note.key, "message": note.message}  # its keys, if many, have a field of their own
