"""Lays out one torch file for each rank and section: ``{model,optim,extra_state}_world_size_{N}_rank_{r}.pt``.

Each holds its section's dict itself. Sharded tensors hold rank r's part on their mesh, by default its rows
(``torch.chunk`` along dimension 0); everything else is whole in every rank's file.

Ranks that hold boxes of the same sizes have almost the same file: they differ in the rank's number, in the folder of
their archive and in the checksums of both. One of them is laid out, and the others are derived from it when they are
planned, so that the work and memory for many ranks are those for a few.
"""

from __future__ import annotations

import os
import posixpath
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np

from fsdpckpt import flags
from fsdpckpt.errors import InternalError, NeedsInformationError, UsageError
from fsdpckpt.formats.pickle.opcodes import integer
from fsdpckpt.formats.zip_write import TorchZip
from fsdpckpt.ir.checkpoint import Checkpoint, Note, Section
from fsdpckpt.ir.placements import Replicate, Shard, Sharding
from fsdpckpt.ir.sections import model_dict, optimizer_dict
from fsdpckpt.ir.targets import Target, TargetData, TargetFile, as_table
from fsdpckpt.ir.tensors import Int64Array, Tensor
from fsdpckpt.ir.values import Value
from fsdpckpt.layouts import mesh_box, row_sharding
from fsdpckpt.options import TensorForm
from fsdpckpt.producers.torch_checkpointing import default_file
from fsdpckpt.text import size_text
from fsdpckpt.writers.dtensor_pickle import DTensorPickle, target_version
from fsdpckpt.writers.protocol import WriteSpec
from fsdpckpt.writers.rank_pickle import RankPickle, ShardedTensorPickle
from fsdpckpt.writers.sharding_metadata import items_by_rank, sharding_metadata
from fsdpckpt.writers.state_dicts import extra_notes, extras_of_rank
from fsdpckpt.writers.torch_full import ties


@dataclass(frozen=True, slots=True, eq=False)
class _Template:
    """The file of one rank, whose ``pickle`` is in ``archive``. ``cut``: for each write item the number of its tensor's
    cut, -1 for a whole tensor. ``names``: where in the blob the names of records are, which begin with the folder.
    """

    file: TargetFile
    pickle: RankPickle
    archive: TorchZip
    cut: Int64Array
    names: Int64Array


@dataclass(slots=True)
class RankFiles:
    """The files of one section. ``pickle`` makes the writer for a rank, ``shardings`` cut the tensors."""

    pickle: Callable[[int], RankPickle]
    shardings: Mapping[Tensor, Sharding]
    data: TargetData = field(default_factory=TargetData)
    _cuts: dict[tuple[tuple[int, ...], Sharding], int] = field(default_factory=dict)
    _templates: dict[tuple[object, ...], _Template] = field(default_factory=dict)

    def of_value(self, value: Value, paths: Sequence[str]) -> Iterator[TargetFile]:
        """The file of each rank of a mesh of one dimension, if all hold ``value``: tensors, and what is equal on all of
        them.
        """
        for tensor, sharding in self.shardings.items():
            self._cuts.setdefault((tensor.shape, sharding), len(self._cuts))
        for rank, path in enumerate(paths):
            kind = self._kind(rank, path)
            template = self._templates.get(kind)
            if template is None:
                template = self._templates[kind] = self._template(rank, path, value)
                yield template.file
            else:
                build = partial(self._file, template, rank)
                yield TargetFile(path, self.data, template.file.nbytes, build=build)

    def of_values(self, values: Mapping[int, Value], paths: Sequence[str]) -> Iterator[TargetFile]:
        """The file of each rank of ``values``, if each holds its own."""
        for rank, value in values.items():
            yield self._one(rank, paths[rank], value)[0]

    def _one(self, rank: int, path: str, value: Value) -> tuple[TargetFile, RankPickle, TorchZip]:
        """The file of ``rank``, laid out from scratch."""
        file, pickle = TargetFile(path, self.data), self.pickle(rank)
        pickle.value(value)
        return file, pickle, pickle.write(file, stem=_stem(path))

    def _kind(self, rank: int, path: str) -> tuple[object, ...]:
        """Equal for ranks whose files differ only in the values of some bytes: one is the template of the others."""
        sizes = [mesh_box(shape, sharding, rank).sizes for shape, sharding in self._cuts]
        return len(_stem(path)), len(integer(rank)), *sizes

    def _template(self, rank: int, path: str, value: Value) -> _Template:
        file, pickle, archive = self._one(rank, path, value)
        cuts = [
            -1 if (sharding := self.shardings.get(tensor)) is None else self._cuts[tensor.shape, sharding]
            for tensor, *_ in self.data.tensors
        ]
        names = _in_blob(file, np.array(archive.names(), np.int64))
        cut = np.array(cuts, np.int64)[as_table(file.item_columns, 4)[:, 2]]
        return _Template(file, pickle, archive, cut, names)

    def _file(self, template: _Template, rank: int, file: TargetFile) -> TargetFile:
        """``file``, of a rank of the template's kind, with its columns."""
        blob = bytearray(template.file.blob)
        begin = int(_in_blob(template.file, np.array([template.archive.pickle_at], np.int64))[0])
        pickle = bytearray(blob[begin : begin + template.archive.pickle_nbytes])
        for at, make in template.pickle.rank_patches:
            number = make(rank)
            if len(number) != len(make(template.pickle.rank)):
                raise InternalError(f"{file.path} has other lengths than the file of rank {template.pickle.rank}")
            pickle[at : at + len(number)] = number
        offsets, contents = zip(*template.archive.with_pickle(pickle), strict=True)
        for start, content in zip(_in_blob(template.file, np.array(offsets)), contents, strict=True):
            blob[start : start + len(content)] = content
        stem = np.frombuffer(_stem(file.path).encode(), np.uint8)
        np.frombuffer(blob, np.uint8)[template.names[:, None] + np.arange(len(stem))] = stem
        items = as_table(template.file.item_columns, 4).copy()
        boxes = [mesh_box(shape, sharding, rank) for shape, sharding in self._cuts]
        positions = np.array([self.data.add_box(box.offsets, box.sizes) for box in boxes], np.int64)
        cut = template.cut >= 0
        items[cut, 3] = positions[template.cut[cut]]
        return replace(template.file, path=file.path, blob=blob, item_columns=array("q", items.tobytes()))


def _stem(path: str) -> str:
    return posixpath.splitext(posixpath.basename(path))[0]


def _in_blob(file: TargetFile, offsets: Int64Array) -> Int64Array:
    """Where in the blob the literal bytes at ``offsets`` of the file are."""
    literals = as_table(file.literal_columns, 3)
    row = literals[np.searchsorted(literals[:, 0], offsets, side="right") - 1]
    return row[:, 1] + offsets - row[:, 0]


_NOT_TIED: Mapping[Tensor, Tensor] = {}


@dataclass(frozen=True, slots=True)
class _RankLayout:
    """Lays out one file for each rank. ``pickles`` makes the writer of a rank, with the tensors that are tied."""

    world_size: int
    pickles: Callable[..., RankPickle]
    cut: Mapping[Tensor, Sharding]
    alike: bool  # whether the pickles of two ranks with equal shapes differ in numbers alone

    def same(self, path: str, value: Value, tied: Mapping[Tensor, Tensor] = _NOT_TIED) -> list[TargetFile]:
        """A file with ``value`` for each rank. ``path``: with ``{rank}`` and ``{world_size}`` in it."""
        if not self.alike:
            return self.files(path, dict.fromkeys(range(self.world_size), value), tied)
        return self._in_memory(self._rank_files(tied).of_value(value, self._paths(path)))

    def files(
        self, path: str, values: Mapping[int, Value], tied: Mapping[Tensor, Tensor] = _NOT_TIED
    ) -> list[TargetFile]:
        """A file for each rank of ``values``, with its own."""
        return self._in_memory(self._rank_files(tied).of_values(values, self._paths(path)))

    def _paths(self, path: str) -> list[str]:
        return [path.format(rank=rank, world_size=self.world_size) for rank in range(self.world_size)]

    def _rank_files(self, tied: Mapping[Tensor, Tensor]) -> RankFiles:
        def pickle(rank: int) -> RankPickle:
            return self.pickles(rank=rank, canonical=tied)

        return RankFiles(pickle, self.cut)

    def _in_memory(self, laid_out: Iterable[TargetFile]) -> list[TargetFile]:
        """All files. Raises UsageError after the first that shows that they do not fit."""
        files: list[TargetFile] = []
        for file in laid_out:
            files.append(file)
            require_memory(len(files[0].blob), self.world_size)
        return files


def lay_out(checkpoint: Checkpoint, spec: WriteSpec) -> Target:
    """``spec.world_size`` files for each section of the checkpoint.

    A tensor whose ``sharded`` is True becomes what ``spec.tensor`` names (0-dim ones stay whole). A live model takes
    DTensors only from a mesh of its own device type: that of ``spec.mesh_device``, else of the source's DTensors, else
    that of ``spec.mesh``, with a note. Target rank r gets the extras of source rank r modulo the source's ranks. Raises
    NeedsInformationError if the source's DTensors name several device types.
    """
    world_size = spec.ranks()
    device = spec.mesh_device or _mesh_device(checkpoint)
    mesh = replace(spec.mesh, device=device) if device is not None else spec.mesh
    casts, notes = spec.dtypes.casts(checkpoint)
    cut = {
        named.tensor: spec.sharding(named.tensor)
        for named in checkpoint.tensors()
        if named.tensor.sharded and named.tensor.shape
    }

    pickles: Callable[..., RankPickle] = ShardedTensorPickle
    if spec.tensor is TensorForm.SHARDED_TENSOR:
        _require_rows(checkpoint, spec)
    else:
        version, inferred = target_version(spec.torch_version)
        meshes = spec.meshes or (row_sharding(world_size, mesh.names).mesh,)
        pickles = partial(DTensorPickle, form=mesh, torch=version, meshes=meshes)
        notes += inferred

    # A ShardedTensor names its own rank before all others, a mesh of several dimensions names the groups of each rank:
    # then the pickles of two ranks differ in their memos too.
    one_dimension = all(len(sharding.mesh.sizes) == 1 for sharding in cut.values())
    alike = spec.tensor is TensorForm.DTENSOR and one_dimension
    pickles = partial(pickles, world_size=world_size, shardings=cut, casts=casts)
    ranks = _RankLayout(world_size, pickles, cut, alike=alike)
    files: list[TargetFile] = []
    leaves = checkpoint.params.values()
    tied = ties([leaf for leaf in leaves if isinstance(leaf, Tensor)])
    tied = {key: first for key, first in tied.items() if cut.get(key) == cut.get(first)}
    extras: list[Value] = [extras_of_rank(checkpoint, rank) for rank in range(world_size)]
    if spec.by_item:
        for item, values in items_by_rank(checkpoint, spec.section_paths, world_size).items():
            path = default_file(item, "{rank}")
            if checkpoint.rank_extra:
                files += ranks.files(path, values, tied)
            else:
                files += ranks.same(path, values[0], tied)
        files.append(sharding_metadata(checkpoint, spec, cut, casts, device or mesh.device))
    else:
        if checkpoint.model is not None:
            files += ranks.same(spec.section_paths[Section.MODEL].file, model_dict(checkpoint.model), tied)
        if checkpoint.optim is not None:
            files += ranks.same(spec.section_paths[Section.OPTIM].file, optimizer_dict(checkpoint.optim))
        if any(extras):
            files += ranks.files(spec.section_paths[Section.EXTRA].file, dict(enumerate(extras)))
    if any(extras):
        notes += extra_notes(checkpoint, world_size)
    if device is None and spec.tensor is TensorForm.DTENSOR:
        what = f"a mesh of {mesh.device} devices, which the source does not say ({flags.mesh_device} changes it)"
        notes.append(Note("inferred", f"DTensors record {what}"))
    return Target(files, notes=notes)


def _require_rows(checkpoint: Checkpoint, spec: WriteSpec) -> None:
    """Raises UsageError for tensors that a ShardedTensor of FSDP1 cannot hold: its ranks cut rows, on a mesh of two
    dimensions (HYBRID_SHARD) those of the second.
    """
    wanted = (Replicate(), Shard(0))
    for named in checkpoint.tensors() if spec.meshes else ():
        sharding = named.tensor.sharding
        if sharding is not None and sharding.placements != wanted[-len(sharding.placements) :]:
            raise UsageError(
                f"{named.key} is {sharding} on the mesh {sharding.mesh}, which a ShardedTensor cannot hold",
                key=named.key,
                expected="[Shard(0)], or [Replicate(), Shard(0)]",
                found=str(sharding),
                next_step=f"drop {flags.tensor('sharded-tensor')}, or give {flags.mesh} one dimension or replicas and "
                "shards",
            )


def _mesh_device(checkpoint: Checkpoint) -> str | None:
    devices = sorted(checkpoint.origin.mesh_devices)
    if len(devices) > 1:
        raise NeedsInformationError(
            f"the DTensors of {checkpoint.source} are on meshes of several device types",
            file=checkpoint.source,
            found=", ".join(devices),
            why="a model loads DTensors only from a mesh of its own device type",
            next_step=f"add {flags.mesh_device(devices[0])}, or the one that the loading job has",
        )
    return devices[0] if devices else None


def require_memory(nbytes: int, world_size: int) -> None:
    """Raises UsageError if the bytes around the tensors, ``nbytes`` in each file, do not fit in memory.

    Each file names every rank, once or for every tensor, so twice as many ranks need four times as many bytes.
    """
    needed, available = nbytes * world_size, memory_bytes()
    if needed > available:
        raise UsageError(
            f"{flags.world_size(world_size)} with files for each rank needs more memory than this machine has",
            expected=f"up to {size_text(available)} of memory",
            found=f"{size_text(nbytes)} around the tensors of each of {world_size} files",
            why="every such file names every rank, and all are planned before the first is written",
            next_step=f"{flags.container('dcp')}, whose files do not, or a smaller {flags.world_size}",
        )


def memory_bytes() -> int:
    """The size of the machine's memory in bytes."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
