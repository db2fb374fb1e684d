"""Read a set of torch.save files, one per rank: DTensor, ShardedTensor and plain values put together.

The world size and every rank's place come from the files' own metadata; the file names only say which file to expect
of whom, and a file that says another rank saved it is refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fsdpckpt.containers.pickle_read import collector_paused
from fsdpckpt.containers.torch_values import TorchArchive, read_archive
from fsdpckpt.errors import SourceCorruptError, SourceIncompleteError
from fsdpckpt.ir.checkpoint import Container, Layout
from fsdpckpt.ir.tensors import Tensor
from fsdpckpt.ir.values import Value, walk
from fsdpckpt.readers.flat_slices import flat_parameter_keys, flattened_problem, sliced_optimizer
from fsdpckpt.readers.rank_merge import Merge
from fsdpckpt.readers.sections import split
from fsdpckpt.readers.tree import FileTable, Tree
from fsdpckpt.storage.sources import Sources

__all__ = ["read_torch_ranks"]

# Extras above this many bytes are taken for what their kind says; random states, which ranks differ in, are 5 KB.
_COMPARED = 1 << 20


def read_torch_ranks(paths: Mapping[int, str], files: FileTable, sources: Sources) -> Tree:
    """The state dict that the files ``paths`` (rank to path) hold together.

    Raises SourceIncompleteError naming every missing rank, SourceCorruptError when a file was saved by another rank
    than its name says or by another run, and what ``read_archive`` raises. Keys that ranks lack, and flattened shards,
    are ``problems`` of the tree.
    """
    with collector_paused(sum(sources.open(path).nbytes for path in paths.values())):
        return _read(paths, sorted(paths), files, sources)


def _read(paths: Mapping[int, str], ranks: Sequence[int], files: FileTable, sources: Sources) -> Tree:
    numbers: list[int] = []
    archives: list[TorchArchive] = []
    for rank in ranks:
        source = sources.open(paths[rank])
        numbers.append(files.add(paths[rank], source.nbytes))
        archives.append(read_archive(source, numbers[-1]))
    _check_ranks(paths, ranks, archives)
    forms = sorted({form for archive in archives for form in archive.forms})
    tree = Tree(None, Layout.SHARDED if forms else Layout.FULL, Container.TORCH, len(ranks))
    slices = _flattened(tree, [archive.root for archive in archives], paths[ranks[0]])
    merge = Merge(ranks, numbers, sharded=bool(forms), slices=slices)
    tree.root = merge.value([archive.root for archive in archives])
    tree.problems.extend(merge.problems)
    tree.rank_values.update(merge.rank_values)
    if not slices:
        _separate_extras(tree, files, sources)
    for archive in archives:
        tree.checksums.extend(archive.checksums)
        tree.notes.extend(archive.notes)
    tree.evidence.append(_evidence(paths, ranks, forms))
    return tree


def _evidence(paths: Mapping[int, str], ranks: Sequence[int], forms: Sequence[str]) -> str:
    held = " and ".join(f"{form} values" for form in forms) or "plain tensors only"
    if len(ranks) == 1:
        return f"{paths[ranks[0]]} is one rank's torch.save file, of a world of one, holding {held}"
    return f"{len(ranks)} torch.save files, one a rank ({paths[ranks[0]]} ...), holding {held}"


def _check_ranks(paths: Mapping[int, str], ranks: Sequence[int], archives: Sequence[TorchArchive]) -> None:
    swapped = [
        f"{paths[rank]}: expected rank {rank}, saved by rank {', '.join(map(str, sorted(archive.ranks)))}"
        for rank, archive in zip(ranks, archives, strict=True)
        if archive.ranks - {rank}
    ]
    if swapped:
        raise SourceCorruptError(
            "swapped rank files: some files were not saved by the rank that their name says",
            details=swapped,
            file=paths[ranks[0]],
            why="files were renamed, or copied from another rank or run",
            next_step="give every file its own rank's name again, as listed above",
        )
    worlds = {id(world): world for archive in archives for world in archive.worlds}
    world = {rank for known in worlds.values() for rank in known} or set(range(ranks[-1] + 1))
    missing = sorted(world - set(ranks))
    if missing:
        raise SourceIncompleteError(
            f"{len(missing)} of {len(world)} ranks are missing: {', '.join(map(str, missing))}",
            details=[f"rank {rank} is missing" for rank in missing],
            file=paths[ranks[0]],
            rank=missing[0],
            expected=f"the files of {len(world)} ranks",
            found=f"those of {', '.join(map(str, ranks))}",
            why="each rank writes its own part, and every part is needed; other nodes may hold the rest on their disks",
            next_step="copy the files of all ranks into one directory and give that directory",
        )
    extra = sorted(set(ranks) - world)
    if extra:
        raise SourceCorruptError(
            f"files of ranks {', '.join(map(str, extra))} do not belong to a world of {len(world)} ranks",
            details=[paths[rank] for rank in extra],
            file=paths[extra[0]],
            rank=extra[0],
            expected=f"ranks {min(world)} to {max(world)}",
            found=f"rank {extra[0]}",
            why="files of an earlier run with more ranks were left in the directory",
            next_step="move these files away",
        )


def _flattened(tree: Tree, roots: Sequence[Value], file: str) -> bool:
    """Whether the files hold slices of flat parameters; says so in the tree."""
    keys = flat_parameter_keys(roots[0])
    reason = sliced_optimizer(roots) if len(roots) > 1 else None
    if keys:
        tree.problems.append(flattened_problem(keys, file))
        tree.evidence.append(f"keys of flat parameters: {', '.join(keys[:3])}")
    if reason is not None:
        tree.problems.append(flattened_problem(reason, file))
        tree.evidence.append(reason)
    if keys or reason is not None:
        tree.layout = Layout.FLATTENED
        return True
    return False


def _separate_extras(tree: Tree, files: FileTable, sources: Sources) -> None:
    """Plain tensors of the extras, random states for one, are each rank's own unless their bytes are equal.

    Tensors of the model and the optimizer are not looked at: there, a plain tensor is a replica by what it is.
    """
    sections = split(tree.root)
    if not sections.extra:
        return
    paths = [file.path for file in files.files()]
    for path, leaf in walk(tree.root):
        if not isinstance(leaf, Tensor) or leaf.managed or len(leaf.pieces) < 2 or sections.owns(path):
            continue
        if not 0 < leaf.nbytes <= _COMPARED:
            continue
        contents = {_bytes_of(leaf, row, paths, sources) for row in range(len(leaf.pieces))}
        if len(contents) > 1:
            tree.rank_values[path] = _by_rank(leaf, tree.world_size)


def _bytes_of(tensor: Tensor, row: int, paths: Sequence[str], sources: Sources) -> bytes:
    """The bytes between a piece's first and last element: equal for equal replicas of equal strides."""
    sizes, strides = tensor.pieces.size[row].tolist(), tensor.pieces.stride[row].tolist()
    extent = 1 + sum((n - 1) * step for n, step in zip(sizes, strides, strict=True))
    source = sources.open(paths[int(tensor.pieces.file[row])])
    return source.read(int(tensor.pieces.offset[row]), extent * tensor.dtype.itemsize)


def _by_rank(tensor: Tensor, world_size: int) -> tuple[Value, ...]:
    """Each rank's own copy as a tensor of one piece, None for ranks without one."""
    rows = {rank: row for row, rank in enumerate(tensor.pieces.rank.tolist())}
    return tuple(
        Tensor(tensor.dtype, tensor.shape, tensor.pieces.take(tensor.pieces.rank == rank), tensor.managed)
        if rank in rows
        else None
        for rank in range(world_size)
    )
