"""Lays out one file for each rank, where ranks that hold boxes of the same sizes have almost the same file.

Such ranks differ in their number, in the folder of their archive and in the checksums of both: one of them is laid out,
and the others are made of it when they are planned, so that the work and the memory of many ranks are those of a few.
"""

from __future__ import annotations

import posixpath
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from fsdpckpt.errors import InternalError
from fsdpckpt.formats.pickle.opcodes import integer
from fsdpckpt.formats.zip_write import TorchZip
from fsdpckpt.ir.mesh import Sharding
from fsdpckpt.ir.targets import TargetData, TargetFile, as_table
from fsdpckpt.ir.tensors import Int64Array, Tensor
from fsdpckpt.ir.values import Value
from fsdpckpt.layouts.sharded import mesh_box
from fsdpckpt.writers.rank_pickle import RankPickle


@dataclass(frozen=True, slots=True, eq=False)
class _Template:
    """The file of one rank, whose ``pickle`` is in ``archive``. ``cut``: of each write item the number of its tensor's
    cut, -1 for a whole tensor. ``names``: where in the blob the names of records are, which begin with the folder."""

    file: TargetFile
    pickle: RankPickle
    archive: TorchZip
    cut: Int64Array
    names: Int64Array


@dataclass(slots=True)
class RankFiles:
    """The files of one section. ``pickle`` makes the writer of a rank's, ``shardings`` say how tensors are cut."""

    pickle: Callable[[int], RankPickle]
    shardings: Mapping[Tensor, Sharding]
    data: TargetData = field(default_factory=TargetData)
    _cuts: dict[tuple[tuple[int, ...], Sharding], int] = field(default_factory=dict)
    _templates: dict[tuple[object, ...], _Template] = field(default_factory=dict)

    def of_value(self, value: Value, paths: Sequence[str]) -> Iterator[TargetFile]:
        """The file of each rank of a mesh of one dimension, all of which hold ``value``: tensors, and what is the same
        on all of them."""
        for tensor, sharding in self.shardings.items():
            self._cuts.setdefault((tensor.shape, sharding), len(self._cuts))
        for rank, path in enumerate(paths):
            kind = self._kind(rank, path)
            template = self._templates.get(kind)
            if template is None:
                template = self._templates[kind] = self._template(rank, path, value)
                yield template.file
            else:
                make = partial(self._file, template, rank)
                yield TargetFile(path, self.data, template.file.nbytes, make=make)

    def of_values(self, values: Sequence[Value], paths: Sequence[str]) -> Iterator[TargetFile]:
        """The file of each rank, which holds its own one of ``values``."""
        for rank, (value, path) in enumerate(zip(values, paths, strict=True)):
            yield self._one(rank, path, value)[0]

    def _one(self, rank: int, path: str, value: Value) -> tuple[TargetFile, RankPickle, TorchZip]:
        """The file of ``rank``, laid out from scratch."""
        file, pickle = TargetFile(path, self.data), self.pickle(rank)
        pickle.value(value)
        return file, pickle, pickle.write(file, stem=_stem(path))

    def _kind(self, rank: int, path: str) -> tuple[object, ...]:
        """Equal for ranks whose files differ in nothing but bytes of the same number at the same places."""
        sizes = [mesh_box(shape, sharding, rank).sizes for shape, sharding in self._cuts]
        return len(_stem(path)), len(integer(rank)), *sizes

    def _template(self, rank: int, path: str, value: Value) -> _Template:
        file, pickle, archive = self._one(rank, path, value)
        sharding = [self.shardings.get(tensor) for tensor, *_ in self.data.tensors]
        cut = np.array(
            [
                self._cuts[tensor.shape, cut] if cut is not None else -1
                for (tensor, *_), cut in zip(self.data.tensors, sharding, strict=True)
            ],
            np.int64,
        )
        names = _in_blob(file, np.array(archive.names(), np.int64))
        return _Template(file, pickle, archive, cut[as_table(file.item_columns, 4)[:, 2]], names)

    def _file(self, template: _Template, rank: int, file: TargetFile) -> TargetFile:
        """``file``, of a rank of the template's kind, with its columns."""
        path = file.path
        blob = bytearray(template.file.blob)
        begin = int(_in_blob(template.file, np.array([template.archive.pickle_at], np.int64))[0])
        pickle = bytearray(blob[begin : begin + template.archive.pickle_nbytes])
        for at, make in template.pickle.of_ranks:
            number = make(rank)
            if len(number) != len(make(template.pickle.rank)):
                raise InternalError(f"{path} is not like the file of rank {template.pickle.rank}")
            pickle[at : at + len(number)] = number
        changes = template.archive.with_pickle(pickle)
        for place, (_, content) in zip(
            _in_blob(template.file, np.array([at for at, _ in changes])), changes, strict=True
        ):
            blob[place : place + len(content)] = content
        stem = np.frombuffer(_stem(path).encode(), np.uint8)
        np.frombuffer(blob, np.uint8)[template.names[:, None] + np.arange(len(stem))] = stem
        items = as_table(template.file.item_columns, 4).copy()
        boxes = [mesh_box(shape, sharding, rank) for shape, sharding in self._cuts]
        places = np.array([self.data.box(box.offsets, box.sizes) for box in boxes], np.int64)
        cut = template.cut >= 0
        items[cut, 3] = places[template.cut[cut]]
        return TargetFile(
            path,
            self.data,
            template.file.nbytes,
            blob,
            template.file.literal_columns,
            array("q", items.tobytes()),
            template.file.checksum_columns,
        )


def _stem(path: str) -> str:
    return posixpath.splitext(posixpath.basename(path))[0]


def _in_blob(file: TargetFile, offsets: Int64Array) -> Int64Array:
    """Where in the blob the literal bytes at ``offsets`` of the file are."""
    literals = as_table(file.literal_columns, 3)
    row = literals[np.searchsorted(literals[:, 0], offsets, side="right") - 1]
    return row[:, 1] + offsets - row[:, 0]
