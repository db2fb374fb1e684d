"""Reads the items of a torch_checkpointing directory into one state dict: ``{item: value}``, as ``save`` was given it.

An item of torch files is a set of rank files, whose DTensors say themselves how they are cut. A safetensors file has
the local tensors alone (``SafetensorsSerialization.prepare_tensors_for_save``): ``metadata.pkl`` says how they are cut.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from math import prod
from operator import mul
from typing import NoReturn, cast

from fsdpckpt.errors import InternalError, SourceCorruptError, damaged
from fsdpckpt.formats.pickle.check import check_size
from fsdpckpt.formats.safetensors import HeaderTensor, read_header
from fsdpckpt.formats.torch import TorchArchive
from fsdpckpt.formats.torch.distributed import BoxInFile, Cut, Distributed, DistributedParser, all_ranks
from fsdpckpt.formats.torch.mesh import Mesh, nesting_of
from fsdpckpt.formats.torch.tensors import StoredTensor
from fsdpckpt.ir import Section
from fsdpckpt.ir.checkpoint import Checksums, Container, Evidence, EvidenceKind, Layout, Problem
from fsdpckpt.ir.placements import MeshShape, Replicate, Sharded
from fsdpckpt.ir.tensors import Tensor, contiguous_stride
from fsdpckpt.ir.values import Key, Value, equal, find_value
from fsdpckpt.layouts import group_coordinate
from fsdpckpt.producers.torch_checkpointing import METADATA
from fsdpckpt.readers.protocol import FileTable, PartContents, dotted
from fsdpckpt.readers.side_files import section_of_name
from fsdpckpt.readers.torch_checkpointing.metadata import (
    JSON,
    SAFETENSORS,
    TORCH,
    DefaultSharding,
    DTensorSharding,
    Item,
    Metadata,
)
from fsdpckpt.readers.torch_ranks.merge import RankMerge
from fsdpckpt.readers.torch_ranks.rank_files import AlikeRanks, RankFile
from fsdpckpt.readers.torch_ranks.read import read_torch_ranks
from fsdpckpt.storage.sources import Sources
from fsdpckpt.text import plural, shape_text
from fsdpckpt.transform.meshes import with_fsdp_dimensions

_SECTIONS = (Section.MODEL, Section.OPTIM)


def read_items(
    directory: str, metadata: Metadata, items: Sequence[Item], files: FileTable, sources: Sources
) -> PartContents:
    """The state dict that ``items`` in ``directory`` hold together.

    Raises SourceCorruptError for files that contradict ``metadata.pkl``, and what the readers of their formats raise.
    """
    root: dict[Key, Value] = {}
    whole = PartContents(root, Layout.FULL, Container.TORCH, metadata.world_size, flavor="torch_checkpointing")
    count = plural(len(items), "item")
    message = f"{METADATA} of torch_checkpointing describes {count} of {plural(metadata.world_size, 'rank')}"
    whole.evidence.append(Evidence(EvidenceKind.CONTAINER, message))
    checksums: list[Checksums] = []
    for item in items:
        tree = _read_item(directory, item, files, sources)
        tree.problems += _contradictions(directory, item, tree.root)
        _add(whole, item.name, tree)
        checksums.append(tree.checksums)
    whole.checksums = Checksums.joined(checksums)
    return whole


def _add(whole: PartContents, name: str, tree: PartContents) -> None:
    """Put the item ``tree`` into ``whole`` under its name."""
    cast("dict[Key, Value]", whole.root)[name] = tree.root
    if tree.layout is not Layout.FULL:
        whole.layout = tree.layout
        whole.differs = tree.differs
    whole.rank_values.update({(name, *path): values for path, values in tree.rank_values.items()})
    whole.absences.update({(name, *path): ranks for path, ranks in tree.absences.items()})
    whole.missing.update({(name, *path): problem for path, problem in tree.missing.items()})
    whole.devices |= tree.devices
    whole.orders.update({(name, *path): by_rank for path, by_rank in tree.orders.items()})
    whole.problems += tree.problems
    whole.notes += tree.notes
    whole.evidence += tree.evidence


def _read_item(directory: str, item: Item, files: FileTable, sources: Sources) -> PartContents:
    paths = {rank: f"{directory}/{file.path}" for rank, file in item.files.items()}
    forms = {file.form for file in item.files.values()}
    if len(forms) > 1:
        raise SourceCorruptError(
            f"{directory}: the ranks stored {item.name} in different formats",
            file=f"{directory}/{METADATA}",
            found=", ".join(sorted(forms)),
            why="files of different saves are in one directory",
            next_step="use the checkpoint before this one",
        )
    form = forms.pop()
    if form == TORCH:
        only_extras = section_of_name(item.name) not in _SECTIONS
        return read_torch_ranks(paths, files, sources, only_extras=only_extras)
    if form == SAFETENSORS:
        return _read_safetensors(item, paths, files, sources)
    return _read_values(form, paths, files, sources)


def _read_safetensors(item: Item, paths: Mapping[int, str], files: FileTable, sources: Sources) -> PartContents:
    """The tensors of an item, joined from the files of all ranks."""
    groups: list[AlikeRanks] = []
    for rank, path in sorted(paths.items()):
        source = sources.open(path)
        number = files.add(path, source.nbytes)
        parser = DistributedParser(source)
        root: dict[Key, Value] = {}
        forms: set[str] = set()
        devices: set[str] = set()
        header = read_header(source)
        named = _paths_of(item, rank, header.tensors, path)
        for key, stored in header.tensors.items():
            leaf = _leaf(item, named[key], rank, stored, parser, path)
            if isinstance(leaf, Distributed):
                forms.add(leaf.form)
                devices.update({leaf.device} - {""})
            _put(root, named[key], cast(Value, leaf))
        archive = TorchArchive(
            root=root,
            checksums=Checksums.of([]),
            path=path,
            dropped=frozenset(),
            defaultdicts=frozenset(),
            ranks=frozenset({rank}),
            worlds=(all_ranks(len(paths)),),
            forms=frozenset(forms),
            devices=frozenset(devices),
        )
        groups.append(AlikeRanks(root, [RankFile(rank, number, archive)]))
    sharded = any(group.files[0].archive.forms for group in groups)
    merge = RankMerge(groups, sharded=sharded)
    merged = merge.value([group.root for group in groups])
    tree = PartContents(
        with_fsdp_dimensions(merged, by_fsdp=merge.last_cut_by_fsdp != {False}),
        Layout.SHARDED if sharded else Layout.FULL,
        Container.TORCH,
        len(paths),
        rank_values=merge.rank_values,
        absences=merge.absences,
        missing=merge.missing,
        problems=merge.problems,
    )
    for group in groups:
        tree.devices |= group.files[0].archive.devices
    first = paths[min(paths)]
    message = f"{plural(len(paths), 'safetensors file')}, one per rank ({first} ...), cut as {METADATA} says"
    tree.evidence.append(Evidence(EvidenceKind.CONTAINER, message))
    tree.keys_in_order = False  # safetensors sorts the tensors of a file
    return tree


def _paths_of(item: Item, rank: int, tensors: Mapping[str, HeaderTensor], file: str) -> dict[str, tuple[Key, ...]]:
    """The path in the item of each key of a file: its components joined by dots (``prepare_tensors_for_save``).

    Raises SourceCorruptError for a key that stands for several paths, or for none.
    """
    by_key: dict[str, list[tuple[Key, ...]]] = {}
    for path, of_ranks in item.tensors.items():
        if of_ranks.of(rank) is not None:
            by_key.setdefault(".".join(map(str, path)), []).append(path)
    unknown = [key for key in tensors if len(by_key.get(key, ())) != 1]
    missing = [key for key in by_key if key not in tensors]
    if unknown or missing:
        raise SourceCorruptError(
            f"{file} and {METADATA} do not have the same tensors",
            details=[f"{key}: only in the file" for key in unknown] + [f"{key}: only in {METADATA}" for key in missing],
            file=file,
            rank=rank,
            why="files of different saves are in one directory",
            next_step="use the checkpoint before this one",
        )
    return {key: by_key[key][0] for key in tensors}


def _leaf(
    item: Item, path: tuple[Key, ...], rank: int, tensor: HeaderTensor, parser: DistributedParser, file: str
) -> Distributed | StoredTensor:
    """The rank's part of the tensor at ``path``."""
    cut = item.tensors[path].of(rank)
    if cut is None:  # ``_paths_of`` has found it
        raise InternalError(f"{file}: nothing describes the part of rank {rank} of {dotted(path)}")
    stride = contiguous_stride(tensor.shape)
    local = StoredTensor(tensor.dtype, tensor.shape, stride, tensor.offset)
    key = dotted((item.name, *path))
    if tensor.dtype is not cut.dtype:
        _refuse(file, key, rank, f"{cut.dtype.name}, as {METADATA} says", tensor.dtype.name)
    if isinstance(cut, DefaultSharding):
        return _of_boxes(cut, rank, local, key, file)
    # A plain tensor is described as a replica on a mesh of all ranks: it stays plain, as in torch files.
    if all(isinstance(placement, Replicate) for placement in cut.placements):
        if tensor.shape != cut.shape:
            _refuse(file, key, rank, shape_text(cut.shape), shape_text(tensor.shape))
        return local
    mesh = _mesh(cut, rank)
    held, how, sharding, last_cuts = parser.boxes_of(Cut(cut.shape, mesh, cut.placements, None, local), key)
    itemsize = tensor.dtype.itemsize
    boxes = tuple(BoxInFile(start, size, tensor.offset + at * itemsize, stride) for start, size, at in held)
    return Distributed(
        form="DTensor",
        dtype=tensor.dtype,
        shape=cut.shape,
        cut=how,
        rank=rank,
        holders=mesh.ranks,
        world=mesh.world,
        boxes=boxes,
        device=mesh.device,
        sharding=sharding,
        last_cuts=last_cuts,
    )


def _of_boxes(cut: DefaultSharding, rank: int, local: StoredTensor, key: str, file: str) -> Distributed:
    boxes: list[BoxInFile] = []
    for start, begin, size in cut.boxes:
        ends = [at + n for at, n in zip(begin, size, strict=True)]
        if len(local.shape) != len(size) or any(end > held for end, held in zip(ends, local.shape, strict=True)):
            _refuse(file, key, rank, f"a local tensor that holds {size} from {begin}", shape_text(local.shape))
        at = sum(map(mul, begin, local.stride)) * local.dtype.itemsize
        if prod(size):
            boxes.append(BoxInFile(start, size, local.offset + at, local.stride))
    how = Sharded((), "ShardedTensor")
    return Distributed("ShardedTensor", local.dtype, cut.shape, how, rank, (rank,), (), tuple(boxes))


def _mesh(cut: DTensorSharding, rank: int) -> Mesh:
    spec = cut.mesh
    coordinate = None
    if rank in spec.ranks:
        coordinate = group_coordinate(MeshShape(spec.shape).coordinate(spec.ranks.index(rank)), spec.shape, spec.ranks)
    nesting = nesting_of(spec.shape, spec.ranks, spec.names or (), ())
    return Mesh(spec.shape, spec.ranks, coordinate, rank, spec.ranks, spec.device, spec.names, nesting)


def _refuse(file: str, key: str, rank: int, expected: str, found: str) -> NoReturn:
    raise SourceCorruptError(
        f"{file}: {key} is not what {METADATA} describes",
        file=file,
        key=key,
        rank=rank,
        expected=expected,
        found=found,
        why="files of different saves are in one directory",
        next_step="use the checkpoint before this one",
    )


def _put(root: dict[Key, Value], path: tuple[Key, ...], leaf: Value) -> None:
    """Put ``leaf`` at ``path`` below ``root``. Positions of lists become keys: an item has lists of tensors rarely."""
    inner = root
    for key in path[:-1]:
        inner = cast("dict[Key, Value]", inner.setdefault(key, {}))
    inner[path[-1]] = leaf


def _read_values(form: str, paths: Mapping[int, str], files: FileTable, sources: Sources) -> PartContents:
    """An item of JSON documents or of raw bytes, one for each rank."""
    values: list[Value] = []
    for _, path in sorted(paths.items()):  # the metadata names a file of every rank
        source = sources.open(path)
        check_size(source.nbytes, path)
        files.add(path, source.nbytes)
        data = source.read(0, source.nbytes)
        values.append(_json(data, path) if form == JSON else data)
    tree = PartContents(values[0], Layout.FULL, Container.TORCH, len(paths))
    if not all(equal(value, values[0]) for value in values[1:]):
        tree.rank_values[()] = tuple(values)
    return tree


def _json(data: bytes, path: str) -> Value:
    try:
        return cast(Value, json.loads(data))
    except (ValueError, RecursionError) as error:
        why = "the file is damaged, or is not what metadata.pkl says it is"
        raise damaged(path, "this is not JSON", found=str(error), why=why) from None


def _contradictions(directory: str, item: Item, root: Value) -> list[Problem]:
    """Fatal problems for tensors that are not what ``metadata.pkl`` describes: it was written by the same save."""
    section = section_of_name(item.name)
    problems: list[Problem] = []
    for path, of_ranks in item.tensors.items():
        described = of_ranks.cuts[0]
        leaf = find_value(root, path)
        key = dotted((item.name, *path))
        what = _difference(described, leaf)
        if what:
            message = f"{key} {what}, and {METADATA} says {described.dtype.name} {shape_text(described.shape)}"
            file = f"{directory}/{METADATA}"
            problems.append(Problem("rank-mismatch", message, file=file, key=dotted(path), section=section))
    return problems


def _difference(described: DTensorSharding | DefaultSharding, leaf: Value) -> str:
    """What is wrong with ``leaf``, "" if it is as ``described``."""
    if not isinstance(leaf, Tensor):
        return "is in none of the files"
    if leaf.shape != described.shape or leaf.dtype is not described.dtype:
        return f"is {leaf.dtype.name} {shape_text(leaf.shape)}"
    cut = isinstance(described, DTensorSharding) and any(
        size > 1 and not isinstance(placement, Replicate)
        for size, placement in zip(described.mesh.shape, described.placements, strict=True)
    )
    return "is whole in every file" if cut and not leaf.sharded else ""
