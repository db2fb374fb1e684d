"""Reads torch.save files: single ones, and sets with one file for each rank, whose names differ in a number.

Patterns: ``model_world_size_4_rank_0.pt`` (verl, and what this program writes), ``pytorch_model_fsdp_0_rank3.bin``
(accelerate), ``rank0-of-4-optimizer.pt``, ``last-shard0.pt``, ``rank0.pt``, ``model_0.pt``. The number of a step or an
epoch is not a rank.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import islice

from fsdpckpt.errors import SourceCorruptError, SourceError
from fsdpckpt.producers import EXTRA_STEM
from fsdpckpt.readers.missing_ranks import ranks_missing
from fsdpckpt.readers.protocol import Claim, FileTable, Part, PartContents, ReadOptions, file_name, stem_of
from fsdpckpt.readers.side_files import auxiliary, section_of_name
from fsdpckpt.readers.torch_ranks.rank_names import (
    LAST_NUMBER,
    MAX_NAMES,
    NO_STEM,
    STEP,
    RankSet,
    group_ranks,
)
from fsdpckpt.storage import Entry
from fsdpckpt.storage.sources import Sources
from fsdpckpt.text import bytes_text, plural

_ZIP_MAGIC = b"PK\x03\x04"
_LEGACY_MAGIC = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19"  # protocol 2, then torch's magic number as a long
_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt", ".tar")
_SECTION = re.compile(r"model|optim|extra_state|state_dict|weights|params", re.IGNORECASE)
_FOLDER = re.compile(r"model|optim|extra_state|scheduler|rng|loader|train_state", re.IGNORECASE)


class TorchReader:
    """Files that begin as torch.save writes them, whatever their name."""

    def recognise_file(self, file: Entry, sources: Sources) -> Part | None:
        if not looks_like_torch(file, sources):
            return None
        return _file_part(file.path, stem_of(file_name(file.path)), optional=False)

    def recognise_directory(
        self, path: str, files: Mapping[str, Entry], options: ReadOptions, sources: Sources
    ) -> Claim:
        """One part for each set of rank files, then one for each other file. With ``options.only``, leaves out
        incomplete sets of other sections.
        """
        sources.prefetch_ends([file.path for name, file in files.items() if name.endswith(_SUFFIXES)])
        names = [name for name, file in files.items() if may_be_torch(file) and looks_like_torch(file, sources)]
        sets, single = group_ranks(names, path)
        claim = Claim(names=set(names))
        if options.only is not None:
            others = (None, options.only)
            unwanted = [each for each in sets if each.absent and section_of_name(each.stem) not in others]
            sets = [rank_set for rank_set in sets if rank_set not in unwanted]
            claim.left_out = [name for rank_set in unwanted for name in rank_set.files.values()]
        _require_all_ranks(sets, path, files, sources)
        sets += _ranks_by_content(single, files, sources)
        in_sets = {name for rank_set in sets for name in rank_set.files.values()}
        single = [name for name in single if name not in in_sets]
        claim.parts += [_ranks_part(rank_set, files, path) for rank_set in sets]
        for name in single:
            stem = stem_of(name)
            claim.parts.append(_file_part(files[name].path, stem, optional=not _SECTION.search(stem)))
        return claim


def may_be_torch(file: Entry) -> bool:
    """Whether a file that nobody named is worth opening; a broken link has no bytes."""
    return file.nbytes >= 16 and not auxiliary(file.name)


def looks_like_torch(file: Entry, sources: Sources) -> bool:
    """Whether the file begins as torch.save writes it."""
    return sources.open(file.path).read(0, min(16, file.nbytes)).startswith((_ZIP_MAGIC, _LEGACY_MAGIC))


def _file_part(path: str, stem: str, *, optional: bool) -> Part:
    def read(files: FileTable, sources: Sources) -> PartContents:
        from fsdpckpt.readers.torch_ranks.read import read_torch_file

        return read_torch_file(path, files, sources)

    return Part(path, stem, read, optional=optional)


def _ranks_part(rank_set: RankSet, files: Mapping[str, Entry], directory: str) -> Part:
    paths = {rank: files[name].path for rank, name in sorted(rank_set.files.items())}
    folder = directory.rstrip("/").rpartition("/")[2]
    # ``extra_state/rank_0.pt``: what the files are is in the name of their directory.
    stem = folder if rank_set.stem == NO_STEM and _FOLDER.search(folder) else rank_set.stem

    def read(table: FileTable, sources: Sources) -> PartContents:
        from fsdpckpt.readers.torch_ranks.read import read_torch_ranks

        return read_torch_ranks(paths, table, sources, only_extras=stem == EXTRA_STEM)

    first, last = rank_set.name(min(paths)), rank_set.name(max(paths))
    several = len(paths) > 1
    return Part(
        f"{directory.rstrip('/')}/{first}" + (f" .. {last}" if several else ""),
        stem,
        read,
        glob=rank_set.glob if several else "",
        ranks_inferred=rank_set.bare,
        optional=not _SECTION.search(stem),
    )


def _ranks_by_content(names: Sequence[str], files: Mapping[str, Entry], sources: Sources) -> list[RankSet]:
    """Sets of those of ``names`` that differ in a number which need not be a rank (``checkpoint_0.pt``, or counted from
    1), if the distributed tensors in each file show that rank.

    Raises SourceCorruptError if they show other ranks, each another one.
    """
    groups: dict[tuple[str, str], dict[int, str]] = {}
    for name in names:
        if (match := LAST_NUMBER.match(name)) and not STEP.search(match["head"]):
            groups.setdefault((match["head"], match["tail"]), {})[int(match["number"])] = name
    sets: list[RankSet] = []
    for (head, tail), group in groups.items():
        by_rank: dict[int, str] = {}
        for _, name in sorted(group.items()) if len(group) > 1 else ():
            rank = _saved_rank(files[name], sources)
            if rank is None or rank in by_rank:
                break
            by_rank[rank] = name
        if not by_rank or len(by_rank) < len(group):
            continue
        if {number - rank for number, rank in zip(sorted(group), by_rank, strict=True)} not in ({0}, {1}):
            raise SourceCorruptError(
                f"the numbers of {head}*{tail} are not the ranks that saved these files",
                details=[f"{name}: saved by rank {rank}" for rank, name in by_rank.items()],
                files=[files[name].path for name in by_rank.values()],
                file=files[by_rank[min(by_rank)]].path,
                why="files were renamed, or they are of different steps",
                next_step="if they are of one save, give every file the number of its rank, as listed above",
            )
        first = next(iter(by_rank.values()))
        place = len(head), len(first) - len(tail)
        sets.append(RankSet(head.strip("_.-") or NO_STEM, bare=False, world=None, place=place, files=by_rank))
    return sets


def _saved_rank(file: Entry, sources: Sources) -> int | None:
    """The rank that saved ``file``, None if its content does not show one."""
    from fsdpckpt.formats.torch import read_archive

    try:
        ranks = read_archive(sources.open(file.path), 0).ranks
    except SourceError:  # reported when it is read
        return None
    return next(iter(ranks)) if len(ranks) == 1 else None


def _with_saved_world(rank_set: RankSet, files: Mapping[str, Entry], sources: Sources) -> RankSet:
    """``rank_set`` with as many ranks as the meshes in its first file have, if their number is not in the names."""
    from fsdpckpt.formats.torch import read_archive

    if rank_set.world is not None:
        return rank_set
    try:
        worlds = read_archive(sources.open(files[rank_set.files[min(rank_set.files)]].path), 0).worlds
    except SourceError:  # the ranks that are missing are reported
        return rank_set
    return replace(rank_set, world=max((max(ranks) + 1 for ranks in worlds if ranks), default=None))


def _require_all_ranks(sets: Sequence[RankSet], directory: str, files: Mapping[str, Entry], sources: Sources) -> None:
    """Raises unless every set has ranks 0 .. W-1. ``files``: every file there, including damaged ones."""
    if not any(rank_set.absent for rank_set in sets):
        return
    sizes = {name: file.nbytes for name, file in files.items()}
    sets = [_with_saved_world(rank_set, files, sources) for rank_set in sets]
    count = sum(rank_set.absent for rank_set in sets)
    missing = list(islice((name for rank_set in sets for name in rank_set.missing()), MAX_NAMES))
    damaged = sum(name in sizes for name in missing)
    what = "missing or damaged"
    if damaged in (0, count):
        what = "damaged" if damaged else "missing"
    raise ranks_missing(
        f"{directory}: {plural(count, 'rank file', 'are')} {what}",
        [
            name if name not in sizes else f"{name} is not a torch.save file ({bytes_text(sizes[name])})"
            for name in missing
        ],
        files=[f"{directory.rstrip('/')}/{name}" for name in missing],
        file=f"{directory.rstrip('/')}/{missing[0]}",
    )
