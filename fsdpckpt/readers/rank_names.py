"""Rank files whose contents name no rank must lie under the name they were saved as.

``torch.save`` puts all records of a file into a folder with the file's name. Files of plain tensors, a raw
``optimizer.state_dict()`` for one, carry no other trace of the rank that saved them: swapped, they would load.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from fsdpckpt.containers.zip_read import top_folder
from fsdpckpt.errors import SourceCorruptError
from fsdpckpt.flavors.table import copied_by_rank
from fsdpckpt.ir.checkpoint import Checkpoint, Problem, Section
from fsdpckpt.ir.tensors import Tensor
from fsdpckpt.readers.rank_sets import named_rank
from fsdpckpt.storage.sources import Sources

__all__ = ["check_names", "slices_of_one_rank"]


def check_names(paths: Mapping[int, str], sources: Sources) -> None:
    """Raises SourceCorruptError listing the files among ``paths`` (rank to path) that another rank, or a run of
    another number of ranks, saved. A file saved under a name of another pattern, or without one, says nothing; nor do
    files that a conversion to more ranks copies (random states)."""
    swapped: list[str] = []
    stale: list[str] = []
    first: str | None = None
    for rank, path in sorted(paths.items()):
        name = path.replace("\\", "/").rpartition("/")[2]
        stem = name.rpartition(".")[0]
        if copied_by_rank(name):
            continue
        was = top_folder(sources.open(path))
        named, saved = named_rank(stem), named_rank(was)
        if was == stem or named is None or saved is None or named[:2] != saved[:2]:
            continue
        if saved.rank != named.rank:
            swapped.append(f"{path}: expected rank {rank}, saved as {was}, by rank {saved.rank}")
        elif named.world is not None and saved.world is not None and saved.world != named.world:
            stale.append(f"{path}: expected {named.world} ranks, saved as {was}, by one of {saved.world}")
        else:
            continue
        first = first or path
    if first is None:
        return
    kinds = " and ".join(word for word, found in (("swapped", swapped), ("stale", stale)) if found)
    raise SourceCorruptError(
        f"{kinds} rank files: {len(swapped) + len(stale)} files were saved under another rank's name",
        details=[*swapped, *stale],
        file=first,
        why="files were renamed, or copied from another rank or run; nothing else in them says whose they are",
        next_step="give every file the name it was saved as again, as listed above",
    )


def slices_of_one_rank(checkpoint: Checkpoint, stem: str) -> Iterator[Problem]:
    """A fatal problem of a single file whose name says that it is one rank's, when it may hold this rank's slices.

    ``stem``: the file's name without suffix. An optimizer with a state of two dimensions, or without any, is whole.
    """
    named = named_rank(stem)
    ranks = max(named.world or 0, named.rank + 1) if named is not None and not named.bare else 1
    optim = checkpoint.optim
    if named is None or ranks < 2 or optim is None or checkpoint.world_size > 1:
        return
    leaves = [leaf for entry in optim.state.values() for leaf in entry.values() if isinstance(leaf, Tensor)]
    if {leaf.ndim for leaf in leaves if leaf.ndim} == {1}:
        yield Problem(
            "missing-rank",
            f"{checkpoint.source} is named as the file of rank {named.rank}, and its optimizer may be in FSDP1's "
            f"slices: give the directory with the files of all {'' if named.world is None else f'{named.world} '}ranks",
            file=checkpoint.source,
            rank=named.rank,
            section=Section.OPTIM,
        )
