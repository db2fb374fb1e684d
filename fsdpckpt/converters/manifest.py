"""``fsdpckpt.json``: what every directory written by this program says about itself."""

from __future__ import annotations

import contextlib
import json
import os
import zlib
from collections.abc import Mapping

from fsdpckpt.converters.target_spec import TargetSpec
from fsdpckpt.converters.transform import TransformedCheckpoint
from fsdpckpt.ir.checkpoint import Note
from fsdpckpt.ir.targets import Target
from fsdpckpt.ir.units_json import encode
from fsdpckpt.producers.forms import PLAIN
from fsdpckpt.readers.beside import SEAL
from fsdpckpt.readers.protocol import MANIFEST
from fsdpckpt.storage.local import WritableFile
from fsdpckpt.storage.staging import Staging
from fsdpckpt.version import __version__

__all__ = ["put_manifest", "write_manifest"]


def write_manifest(
    staging: Staging,
    target: Target,
    transformed: TransformedCheckpoint,
    spec: TargetSpec,
    *,
    crcs: Mapping[str, int],
    digests: Mapping[str, str],
) -> bytes:
    """Write ``fsdpckpt.json`` into the staged output, replacing an earlier one. Returns its content.

    ``crcs``: CRC-32 of each file, by which ``verify`` finds damage in containers that carry no checksums of their own.
    ``digests``: SHA-256 of each tensor's row-major bytes, where ``--verify full`` computed them.
    """
    checkpoint = transformed.checkpoint
    keyed = checkpoint.optim.key_type if checkpoint.optim is not None else None
    notes = [*checkpoint.notes, *target.notes]
    document = {
        "program": "fsdpckpt",
        "version": __version__,
        "format": 1,
        "source": checkpoint.source,
        "source_layout": checkpoint.layout,
        "source_container": checkpoint.container,
        "source_world_size": checkpoint.world_size,
        "flavor": spec.flavor.name if spec.flavor is not None else PLAIN,
        "layout": spec.layout,
        "container": spec.container,
        "world_size": spec.world_size,
        "key_type": transformed.key_type if keyed is not None and transformed.units is not None else keyed,
        "units": encode(transformed.units) if transformed.units is not None else None,
        "notes": [_note(note) for note in notes],
        "undetermined": [key for note in notes if note.kind == "undetermined" for key in note.keys],
        "files": {file.path: {"nbytes": file.nbytes, "crc32": f"{crcs[file.path]:08x}"} for file in target.files},
        "digests": dict(digests),
    }
    body = json.dumps(document, indent=1).removesuffix("\n}")
    data = f'{body}{SEAL}{zlib.crc32(body.encode()):08x}"\n}}\n'.encode()
    put_manifest(staging, data)
    return data


def put_manifest(staging: Staging, data: bytes) -> None:
    """Make ``data`` the ``fsdpckpt.json`` of the staged output, in place of an earlier one."""
    path = staging.locate(MANIFEST)
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
    file = WritableFile(path, len(data))
    file.write(0, data)
    file.commit()


def _note(note: Note) -> dict[str, str | None]:
    return {"kind": note.kind, "key": note.key, "message": note.message}  # its keys, if many, have a field of their own
