"""Read a set of torch.save files, one per rank: DTensor, ShardedTensor and plain values put together.

The world size and every rank's place come from the files' own metadata; the file names only say which file to expect
of whom, and a file that says another rank saved it is refused.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from fsdpckpt.errors import SourceCorruptError, SourceIncompleteError
from fsdpckpt.formats.torch.archive import TorchArchive, notes_on_dropped
from fsdpckpt.formats.torch.bulk import read_tensors
from fsdpckpt.ir.checkpoint import Checksums, Container, Evidence, EvidenceKind, Layout
from fsdpckpt.ir.tensors import Tensor
from fsdpckpt.ir.values import Value, walk
from fsdpckpt.readers.flat_slices import flat_parameter_keys
from fsdpckpt.readers.protocol import FileTable, Tree
from fsdpckpt.readers.sections import split
from fsdpckpt.readers.torch_ranks import check_names
from fsdpckpt.readers.torch_ranks.merge import Merge
from fsdpckpt.readers.torch_ranks.orders import one_order
from fsdpckpt.readers.torch_ranks.rank_files import grouped, open_ranks
from fsdpckpt.readers.xla_fairscale import find_shard_metadata, name_shards, shards_without_metadata
from fsdpckpt.storage.sources import Sources
from fsdpckpt.text import first_of, listed, plural

_COMPARED = 1 << 20  # bytes: extras up to here are read and compared (random states are 5 KB), larger ones by CRC-32


def read_torch_ranks(paths: Mapping[int, str], files: FileTable, sources: Sources, *, extras: bool = False) -> Tree:
    """The state dict that the files ``paths`` (rank to path) hold together.

    ``extras``: the files' name says that they hold extras only, whatever these look like. Raises
    SourceIncompleteError naming every missing rank, SourceCorruptError when a file was saved by another rank than its
    name says or by another run, and what ``read_archive`` raises. Keys that ranks lack are ``problems`` of the tree.
    An optimizer's vectors of one length on all ranks are read as replicas: ``assembly.join`` knows the model and
    decides whether they are slices.
    """
    ranks = sorted(paths)
    opened = open_ranks(paths, files, sources, alike=True)
    roots = {id(file.archive.root): file.archive.root for file in opened}
    if any(find_shard_metadata(root) is not None for root in roots.values()):  # such shards are named rank by rank
        opened = open_ranks(paths, files, sources, alike=False)
    named = name_shards([file.archive for file in opened], ranks, paths)
    archives = named.archives
    _check_ranks(paths, ranks, archives)
    silent = [rank for rank, archive in zip(ranks, archives, strict=True) if not archive.ranks]
    check_names({rank: paths[rank] for rank in silent}, sources)
    forms = sorted({form for archive in archives for form in archive.forms})
    tree = Tree(None, Layout.SHARDED if forms else Layout.FULL, Container.TORCH, len(ranks), flavor=named.producer)
    ordered = one_order([archive.root for archive in archives], ranks, files.units)
    groups = grouped(opened, ordered.roots)
    merge = Merge(groups, sharded=bool(forms))
    tree.root = merge.value([group.root for group in groups])
    tree.orders = ordered.orders
    tree.notes.extend(ordered.notes)
    tree.problems.extend(ordered.problems)
    _recognise_slices(tree, merge)
    tree.problems.extend(merge.problems)
    tree.rank_values.update(merge.rank_values)
    tree.absences.update(merge.absences)
    tree.checksums = Checksums.joined(archive.checksums for archive in archives)
    tree.notes.extend(notes_on_dropped(archives))
    tree.devices.update(*(archive.devices for archive in archives))
    _separate_extras(tree, files, sources, extras=extras)
    tree.evidence.append(Evidence(EvidenceKind.CONTAINER, _held(paths, ranks, forms)))
    tree.evidence.extend(named.evidence)
    tree.problems.extend(named.problems)
    tree.notes.extend(named.notes)
    return tree


def _held(paths: Mapping[int, str], ranks: Sequence[int], forms: Sequence[str]) -> str:
    held = " and ".join(f"{form} values" for form in forms) or "plain tensors only"
    if len(ranks) == 1:
        return f"{paths[ranks[0]]} is one rank's torch.save file, of a world of one, holding {held}"
    return f"{len(ranks)} torch.save files, one per rank ({paths[ranks[0]]} ...), holding {held}"


def _check_ranks(paths: Mapping[int, str], ranks: Sequence[int], archives: Sequence[TorchArchive]) -> None:
    swapped = {
        paths[rank]: f"{paths[rank]}: expected rank {rank}, saved by rank {', '.join(map(str, sorted(archive.ranks)))}"
        for rank, archive in zip(ranks, archives, strict=True)
        if archive.ranks - {rank}
    }
    if swapped:
        raise SourceCorruptError(
            "swapped rank files: some files were not saved by the rank that their name says",
            details=list(swapped.values()),
            files=list(swapped),
            file=paths[ranks[0]],
            why="files were renamed, or copied from another rank or run",
            next_step="give every file its own rank's name again, as listed above",
        )
    worlds = {id(world): world for archive in archives for world in archive.worlds}
    world = {rank for known in worlds.values() for rank in known} or set(range(ranks[-1] + 1))
    missing = sorted(world - set(ranks))
    if missing:
        place = paths[ranks[0]] if len(paths) == 1 else os.path.dirname(paths[ranks[0]]) or "."
        raise SourceIncompleteError(
            f"{place}: {len(missing)} of {len(world)} ranks {'is' if len(missing) == 1 else 'are'} missing: "
            f"{listed(missing)}",
            file=place,
            rank=missing[0],
            expected=f"the files of {plural(len(world), 'rank')}",
            found=f"those of {listed(ranks)}",
            why="each rank writes its own part, and every part is needed; other nodes may hold the rest on their disks",
            next_step="copy the files of all ranks into one directory and give that directory",
        )
    extra = sorted(set(ranks) - world)
    if extra:
        raise SourceCorruptError(
            f"files of ranks {', '.join(map(str, extra))} do not belong to a world of {plural(len(world), 'rank')}",
            details=[paths[rank] for rank in extra],
            files=[paths[rank] for rank in extra],
            file=paths[extra[0]],
            rank=extra[0],
            expected=f"ranks {min(world)} to {max(world)}",
            found=f"rank {extra[0]}",
            why="files of an earlier run with more ranks were left in the directory",
            next_step="move these files away",
        )


def _recognise_slices(tree: Tree, merge: Merge) -> None:
    """Say in the tree that it holds flat parameters, where that is certain from the files alone."""
    keys = flat_parameter_keys(tree.root)
    if keys:
        message = f"keys of flat parameters: {first_of(keys, 3)}"
        tree.evidence.append(Evidence(EvidenceKind.LAYOUT, message))
    if keys or merge.slices:
        tree.layout = Layout.FLATTENED


def _separate_extras(tree: Tree, files: FileTable, sources: Sources, *, extras: bool) -> None:
    """Plain tensors of the extras, random states for one, are each rank's own unless their bytes are equal.

    Tensors of the model and the optimizer are not looked at: there, a plain tensor is a replica by what it is.
    """
    sections = None if extras else split(tree.root)
    if sections is not None and not sections.extra:
        return
    paths = [file.path for file in files.files()]
    records: dict[tuple[int, int], tuple[int, int]] = {}
    for path, leaf in walk(tree.root):
        if not isinstance(leaf, Tensor) or leaf.sharded or len(leaf.chunks) < 2 or not leaf.nbytes:
            continue
        if sections is not None and sections.owns(path):
            continue
        if leaf.nbytes > _COMPARED and not records:
            records = tree.checksums.by_place()
        if not _equal_on_all_ranks(leaf, paths, sources, records):
            tree.rank_values[path] = _by_rank(leaf, tree.world_size)


def _equal_on_all_ranks(
    tensor: Tensor, paths: Sequence[str], sources: Sources, records: Mapping[tuple[int, int], tuple[int, int]]
) -> bool:
    """Whether every rank saved the same bytes. Of a large tensor without a checksum of its own nobody knows: False."""
    chunks = tensor.chunks
    if not (chunks.stride == chunks.stride[0]).all():
        return False
    if tensor.nbytes <= _COMPARED:
        return len({_bytes_of(tensor, row, paths, sources) for row in range(len(chunks))}) == 1
    checksums = {records.get(place) for place in zip(chunks.file.tolist(), chunks.offset.tolist(), strict=True)}
    one = checksums.pop()
    return not checksums and one is not None and one[0] == tensor.nbytes


def _bytes_of(tensor: Tensor, row: int, paths: Sequence[str], sources: Sources) -> bytes:
    """The bytes between a chunk's first and last element: equal for equal replicas of equal strides."""
    sizes, strides = tensor.chunks.size[row].tolist(), tensor.chunks.stride[row].tolist()
    extent = 1 + sum((n - 1) * step for n, step in zip(sizes, strides, strict=True))
    source = sources.open(paths[int(tensor.chunks.file[row])])
    return source.read(int(tensor.chunks.offset[row]), extent * tensor.dtype.itemsize)


def _by_rank(tensor: Tensor, world_size: int) -> tuple[Value, ...]:
    """Each rank's own copy as a tensor of one chunk, None for ranks without one."""
    rows = {rank: row for row, rank in enumerate(tensor.chunks.rank.tolist())}
    return tuple(
        Tensor(tensor.dtype, tensor.shape, tensor.chunks.take(tensor.chunks.rank == rank), tensor.sharded)
        if rank in rows
        else None
        for rank in range(world_size)
    )


def read_torch_file(path: str, files: FileTable, sources: Sources) -> Tree:
    """The state dict in the torch file at ``path``.

    A file of DTensor or ShardedTensor values is one rank of several: it is read as such, and refused with
    SourceIncompleteError naming the missing ranks unless it is the only one. Raises what ``read_archive`` raises.
    """
    source = sources.open(path)
    file_id = files.add(path, source.nbytes)
    archive = read_tensors(source, file_id)
    metadata = find_shard_metadata(archive.root)
    if archive.forms or metadata is not None:
        rank = min(archive.ranks, default=0) if metadata is None or metadata.rank is None else metadata.rank
        return read_torch_ranks({rank: path}, files, sources)
    tree = Tree(archive.root, Layout.FULL, Container.TORCH, 1, checksums=archive.checksums)
    tree.notes.extend(notes_on_dropped([archive]))
    tree.evidence.append(Evidence(EvidenceKind.CONTAINER, f"{path} is one torch.save file of plain tensors"))
    keys = flat_parameter_keys(archive.root)
    if keys:
        tree.layout = Layout.FLATTENED
        tree.evidence.append(Evidence(EvidenceKind.LAYOUT, f"keys of flat parameters: {', '.join(keys[:3])}"))
    tree.problems.extend(shards_without_metadata(archive.root, path))
    return tree
