"""Opens the files of all ranks. Of files that differ only in the numbers of a rank, one is parsed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from fsdpckpt.formats.torch import ComparedRecords, TorchArchive, open_archive, parse_archive
from fsdpckpt.formats.torch.alike import Differences, RankLocations, RankTemplate, archive_of
from fsdpckpt.formats.torch.distributed import Distributed
from fsdpckpt.formats.torch.tensors import StoredTensor
from fsdpckpt.ir.checkpoint import Checksums
from fsdpckpt.ir.tensors import Boxes, Chunks, Int64Array
from fsdpckpt.readers.protocol import FileTable
from fsdpckpt.storage.sources import Sources

_MAX_ALIKE = 8  # archives with pickles of the same length with which others are compared


@dataclass(frozen=True, slots=True, eq=False)
class RankFile:
    """One rank's file, ``file`` in the table. ``locations``: where an archive that was not parsed itself has its data;
    else None.
    """

    rank: int
    file: int
    archive: TorchArchive
    locations: RankLocations | None = None

    def offset(self, stored: StoredTensor) -> int:
        """The byte offset in this rank's file of the first element of ``stored``, a leaf of its archive."""
        return stored.offset if self.locations is None else self.locations.offset(stored.offset)

    def rows(self, distributed: Distributed) -> list[tuple[int, ...]]:
        """This rank's boxes of ``distributed``, a leaf of its archive: (rank, file, offset, start, size, stride)."""
        boxes = distributed.boxes if self.locations is None else self.locations.boxes(distributed)
        return [(self.rank, self.file, box.offset, *box.start, *box.size, *box.stride) for box in boxes]

    def holders(self, distributed: Distributed) -> tuple[int, ...]:
        """The ranks that hold ``distributed``, as far as this file shows."""
        return distributed.holders if self.locations is None else self.locations.holders(distributed)


def open_ranks(paths: Mapping[int, str], files: FileTable, sources: Sources, *, alike: bool) -> list[RankFile]:
    """The files at ``paths`` (by rank), in the order of the ranks. ``alike=False``: each is parsed.

    Raises what ``read_archive`` raises.
    """
    opened: list[RankFile | None] = []
    parsed_by_length: dict[int, list[RankTemplate]] = {}
    pending: list[tuple[int, int, RankTemplate, Differences, Int64Array, Checksums]] = []
    ranks = sorted(paths)
    for index, rank in enumerate(ranks):
        source = sources.open(paths[rank])
        number = files.add(paths[rank], source.nbytes)
        archive = open_archive(source)
        candidates = parsed_by_length.setdefault(len(archive.pickle), [])
        for candidate in candidates:
            differences = candidate.differences_of(archive)
            if differences is not None:
                pending.append(
                    (index, number, candidate, differences, archive.records.offset, archive.checksums(number))
                )
                opened.append(None)
                break
        else:
            parsed = parse_archive(archive, number)
            opened.append(RankFile(rank, number, parsed))
            if alike and len(candidates) < _MAX_ALIKE and not any(candidate.unlike for candidate in candidates):
                candidates.append(RankTemplate(archive, parsed.root))
                pending.append((index, number, candidates[-1], {}, archive.records.offset, parsed.checksums))
    for index, number, model, differences, offsets, checksums in pending:
        path = paths[ranks[index]]
        source = ComparedRecords(sources.open(path), checksums)
        locations = model.locations_of(source, offsets, differences)
        if locations is not None:
            opened[index] = RankFile(ranks[index], number, archive_of(locations, checksums, path), locations)
        elif opened[index] is None:
            opened[index] = RankFile(ranks[index], number, parse_archive(open_archive(sources.open(path)), number))
    return [file for file in opened if file is not None]


class AlikeRanks:
    """The ranks whose files hold ``root``, in ascending order: one, or several that are alike."""

    def __init__(self, root: object, files: list[RankFile]) -> None:
        self.root, self.files = root, files
        self._starts: Int64Array | None = None
        self._cuts: dict[int, Int64Array] = {}
        self._boxes: dict[tuple[object, tuple[int, ...]], Boxes] = {}  # of a cut or a shape, and strides

    @property
    def ranks(self) -> list[int]:
        return [file.rank for file in self.files]

    def distributed(self, leaf: Distributed) -> Chunks | list[tuple[int, ...]]:
        """All ranks' boxes of ``leaf``, as chunks or as rows, rank after rank."""
        locations = self.files[0].locations
        if locations is None or len(self.files) == 1:
            return [row for file in self.files for row in file.rows(leaf)]
        number, local = locations.shared.cut_of[id(leaf)]
        table = self._cuts.get(number)
        if table is None:
            table = self._cuts[number] = self._cut(number, len(leaf.shape))
        index, ndim = table[:, 0], len(leaf.shape)
        offset = self._offsets(local.offset)[index] + table[:, 3] * local.dtype.itemsize
        boxes = self._boxes.get((number, local.stride))
        if boxes is None:
            stride = np.broadcast_to(np.array(local.stride, np.int64), (len(table), ndim))
            boxes = Boxes(table[:, 4 : 4 + ndim], table[:, 4 + ndim :], stride)
            self._boxes[number, local.stride] = boxes
        return Chunks(table[:, 1], table[:, 2], offset, boxes)

    def plain(self, leaf: StoredTensor) -> Chunks | list[tuple[int, ...]]:
        """The ranks' replicas of ``leaf``, in the form of ``distributed``."""
        ndim = len(leaf.shape)
        if len(self.files) == 1 or self.files[0].locations is None:
            zeros = (0,) * ndim
            return [(file.rank, file.file, file.offset(leaf), *zeros, *leaf.shape, *leaf.stride) for file in self.files]
        table = self._cuts.get(-1)
        if table is None:
            table = self._cuts[-1] = np.array([(file.rank, file.file) for file in self.files], np.int64)
        boxes = self._boxes.get((leaf.shape, leaf.stride))
        if boxes is None:
            box = np.array([(0,) * ndim, leaf.shape, leaf.stride], np.int64).reshape(3, 1, ndim)
            boxes = self._boxes[leaf.shape, leaf.stride] = Boxes(*np.broadcast_to(box, (3, len(table), ndim)))
        return Chunks(table[:, 0], table[:, 1], self._offsets(leaf.offset), boxes)

    def _cut(self, number: int, ndim: int) -> Int64Array:
        """Rows of (index of the file, rank, file, elements into the local tensor, start..., size...)."""
        rows = [
            (index, file.rank, file.file, at, *start, *size)
            for index, file in enumerate(self.files)
            if file.locations is not None
            for start, size, at in file.locations.boxes_by_cut[number]
        ]
        return np.array(rows, np.int64).reshape(len(rows), 4 + 2 * ndim)

    def _offsets(self, offset: int) -> Int64Array:
        """The byte offset in each rank's file of what is at ``offset`` of the archive that was parsed."""
        owns = [file.locations for file in self.files if file.locations is not None]
        if self._starts is None:
            self._starts = np.stack([locations.starts for locations in owns], axis=1)
        record = owns[0].shared.record(offset)
        moved: Int64Array = self._starts[record] + (offset - owns[0].shared.starts[record])
        return moved


def grouped(files: Sequence[RankFile], roots: Sequence[object]) -> list[AlikeRanks]:
    """``files`` by their roots, one object for ranks that are alike; in the order of the first rank of each."""
    groups: dict[int, AlikeRanks] = {}
    for file, root in zip(files, roots, strict=True):
        groups.setdefault(id(root), AlikeRanks(root, [])).files.append(file)
    return list(groups.values())
