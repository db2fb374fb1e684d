"""Knows torch archives of one tensor again, such as a universal checkpoint has thousands of.

Files of the same form have the same bytes but for the tensor's data and the checksums that depend on it: one is parsed,
the others are only compared with it.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace
from typing import cast

import numpy as np

from fsdpckpt.formats.torch.archive import OpenedArchive, TorchArchive
from fsdpckpt.formats.torch.tensors import StoredTensor
from fsdpckpt.formats.zip import SERIALIZATION_ID, checksum_places, find_directory
from fsdpckpt.ir.values import Value
from fsdpckpt.storage import ByteSource

_MOST_ALIKE = 16  # forms of one length that are remembered: comparing with more costs as much as parsing
_LONGEST = 1 << 15  # bytes of a form


@dataclass(frozen=True, slots=True, eq=False)
class _Form:
    """``head``: the file's bytes before the data; ``tail``: those from the zip's directory on, at ``tail_at``. Both
    with zeros for the checksums that differ, at ``head_crc`` (-1: none) and ``own``. ``crcs``: where in ``tail`` that
    of each record is."""

    head: bytes
    tail: bytes
    tail_at: int
    head_crc: int
    own: list[int]
    crcs: list[int]
    archive: TorchArchive

    def of(self, source: ByteSource, file_id: int) -> TorchArchive | None:
        """The archive in ``source``; None when it is of another form."""
        head, tail = source.read(0, len(self.head)), source.read(self.tail_at, len(self.tail))
        same = _without(tail, self.own) == self.tail
        if not same or _without(head, [self.head_crc] if self.head_crc >= 0 else []) != self.head:
            return None
        sums = self.archive.checksums
        crc = [int.from_bytes(tail[at : at + 4], "little") for at in self.crcs]
        if any(crc) != (len(sums.crc) > 0):
            return None
        crc = crc if len(sums.crc) else []
        checksums = replace(sums, file=np.full(len(crc), file_id, np.int64), crc=np.array(crc, np.int64))
        return replace(self.archive, root=_copied(self.archive.root), checksums=checksums, path=source.path)


class Forms:
    """The forms of the archives that were read, by what the caller calls their kind."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, int], list[_Form]] = defaultdict(list)

    def match(self, source: ByteSource, file_id: int, kind: str) -> TorchArchive | None:
        """What ``read_archive`` would read in ``source``, if an archive of this kind and form was remembered."""
        for form in self._known.get((kind, source.nbytes), ()):
            archive = form.of(source, file_id)
            if archive is not None:
                return archive
        return None

    def remember(self, opened: OpenedArchive, archive: TorchArchive, kind: str) -> None:
        """``archive`` was read from ``opened``. One that has more than a tensor and plain values is left out."""
        known = self._known[kind, opened.source.nbytes]
        form = _form(opened, archive) if len(known) < _MOST_ALIKE else None
        if form is not None:
            known.append(form)


def _form(opened: OpenedArchive, archive: TorchArchive) -> _Form | None:
    source, columns = opened.source, opened.columns
    data = [number for number, name in enumerate(columns.names) if name.startswith("data/")]
    values = list(archive.root.values()) if isinstance(archive.root, dict) else [archive.root]
    simple = all(isinstance(value, (StoredTensor, int, float, str)) for value in values)
    if len(data) > 1 or not simple or archive.dropped or archive.forms:
        return None
    directory, _, start = find_directory(source, 0, source.nbytes)
    end = int(columns.offset[data[0]]) if data else start
    if end > _LONGEST or source.nbytes - start > _LONGEST or start < end:
        return None
    head, tail = source.read(0, end), source.read(start, source.nbytes - start)
    places = checksum_places(directory) or []
    if len(places) != len(columns.names):
        return None
    head_crc = places[data[0]].local if data else -1
    own = [
        place.entry for number, place in enumerate(places) if number in data or place.name.endswith(SERIALIZATION_ID)
    ]
    crcs = [place.entry for place in places]
    if not tail.startswith(directory) or (head_crc >= 0 and head_crc + 4 > end):
        return None
    kept = replace(archive, root=_copied(archive.root))
    differing = [head_crc] if head_crc >= 0 else []
    return _Form(_without(head, differing), _without(tail, own), start, head_crc, own, crcs, kept)


def _without(data: bytes, places: list[int]) -> bytes:
    """``data`` with four zeros at each of ``places``."""
    cut = bytearray(data)
    for at in places:
        cut[at : at + 4] = bytes(4)
    return bytes(cut)


def _copied(root: Value) -> Value:
    """``root`` with tensors that may be changed, and that share no tuple: writers write one object once."""
    if isinstance(root, dict):
        return cast(Value, {key: _copied(value) for key, value in root.items()})
    if not isinstance(root, StoredTensor):
        return root
    copy = StoredTensor(root.dtype, (*root.shape,), (*root.stride,), root.offset, root.sharded, root.cloned, root.array)
    return cast(Value, copy)
