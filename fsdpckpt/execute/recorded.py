"""Decides which source files a conversion compares with the checksum that ``fsdpckpt.json`` records for the whole file.

A conversion that takes every tensor of a file reads the few bytes between them, too, and compares the file. One that
takes only a part of it (``--only``) does not read the rest for that where the file's own checksums prove the part. A
container without any (safetensors) is read to its end if that costs little, and else named in a warning.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np

from fsdpckpt.execute.checks import copy_spans
from fsdpckpt.execute.window import MAX_GAP
from fsdpckpt.ir.checkpoint import Checkpoint, Checksums, ManifestFile, Note
from fsdpckpt.ir.files import stored_by_number
from fsdpckpt.ir.spans import covered_bytes, tensor_bytes_by_file
from fsdpckpt.ir.tensors import distinct
from fsdpckpt.plan import Plan
from fsdpckpt.readers.protocol import MANIFEST
from fsdpckpt.storage import is_url
from fsdpckpt.storage.remote_file import REQUEST_COST
from fsdpckpt.text import names_text

# What may be read for the comparison beyond the tensors, where each request counts as the bytes it costs.
_FREE_BYTES = 16 << 20
_SHARE = 8  # and so large a part of the file: one eighth
_UNREAD_BYTES = 1 << 20  # of a file of which no tensor is needed


@dataclass(frozen=True, slots=True)
class RecordedChecksums:
    """``checksums``: those of whole files to compare. ``notes``: what is read and cannot be compared with any."""

    checksums: Checksums
    notes: tuple[Note, ...] = ()


def recorded_checksums(plan: Plan, checkpoint: Checkpoint, linked: frozenset[int] = frozenset()) -> RecordedChecksums:
    """The checksums in ``fsdpckpt.json`` of the files of ``checkpoint`` that ``plan`` reads, and of small files of
    which it needs no tensor: what else they hold was read when they were opened. Not of the ``linked`` files, which
    nobody reads (``linked_checksums``).
    """
    by_path = _listed(checkpoint)
    sums = checkpoint.checksums
    own = np.bincount(sums.file, minlength=len(checkpoint.files))
    summed = set(distinct(sums.file[sums.crc != 0]).tolist())  # all 0: saved without checksums
    read, selected = _bytes_read(plan), tensor_bytes_by_file(checkpoint.leaves()) or {}
    rows: list[tuple[int, int, int, int]] = []
    unchecked: list[str] = []
    for number, file in stored_by_number(checkpoint.files).items():
        listed = by_path.get(file.path)
        if listed is None or listed.crc is None or number in linked:
            continue
        if not file.nbytes or listed.nbytes != file.nbytes:
            continue
        records = int(own[number]) if number in summed else 0
        nbytes = read.get(number, 0)
        # Not one that is left out; and of one with records, their own checksums prove the part that is taken.
        partly = number in read and not records
        needed = partly or listed.tensor_bytes in (nbytes, selected.get(number, 0))
        if needed and _is_cheap(listed, nbytes, records, url=is_url(file.path)):
            rows.append((number, 0, file.nbytes, listed.crc))
        elif number in read and not records:
            unchecked.append(file.path)
    return RecordedChecksums(Checksums.of(rows), _notes(unchecked))


def linked_checksums(checkpoint: Checkpoint, linked: frozenset[int]) -> Checksums:
    """The checksums in ``fsdpckpt.json`` of the files ``linked``."""
    return _checksums_of(checkpoint, linked)


def whole_file_checksums(checkpoint: Checkpoint) -> Checksums:
    """The checksums in ``fsdpckpt.json`` of all files that have the length that it records."""
    by_path = _listed(checkpoint)
    return _checksums_of(
        checkpoint,
        {
            number
            for number, file in stored_by_number(checkpoint.files).items()
            if file.nbytes and (listed := by_path.get(file.path)) is not None and listed.nbytes == file.nbytes
        },
    )


def _checksums_of(checkpoint: Checkpoint, numbers: Collection[int]) -> Checksums:
    by_path = _listed(checkpoint)
    rows = [
        (number, 0, file.nbytes, listed.crc)
        for number, file in stored_by_number(checkpoint.files).items()
        if number in numbers and (listed := by_path.get(file.path)) is not None and listed.crc is not None
    ]
    return Checksums.of(rows)


def _listed(checkpoint: Checkpoint) -> dict[str, ManifestFile]:
    """What ``fsdpckpt.json`` says of each file, by its path."""
    manifest = checkpoint.origin.manifest
    if manifest is None:
        return {}
    return {manifest.path_of(name): listed for name, listed in manifest.files.items()}


def _bytes_read(plan: Plan) -> dict[int, int]:
    """By source file, how many of its bytes the plan reads."""
    spans = copy_spans(plan)
    if not spans:
        return {}
    file = np.repeat(list(spans), [each.shape[1] for each in spans.values()])
    return covered_bytes(file, *np.concatenate(list(spans.values()), axis=1))


def _is_cheap(listed: ManifestFile, read: int, records: int, *, url: bool) -> bool:
    """Whether it costs little to read what the plan does not: what lies between tensors, and copies of tensors that are
    read from another file.
    """
    cost = listed.nbytes - read + (records + 1 if read else 1) * (REQUEST_COST if url else MAX_GAP)
    return cost <= (_FREE_BYTES + listed.nbytes // _SHARE if read else _UNREAD_BYTES)


def _notes(unchecked: list[str]) -> tuple[Note, ...]:
    if not unchecked:
        return ()
    read = "was read in part, so its checksum" if len(unchecked) == 1 else "were read in part, so their checksums"
    checks = "checks it" if len(unchecked) == 1 else "checks them"
    message = f"{names_text(unchecked, 3)} {read} in {MANIFEST} could not be compared; `fsdpckpt verify` {checks}"
    return (Note("unchecked", message, keys=tuple(unchecked), warning=True),)
