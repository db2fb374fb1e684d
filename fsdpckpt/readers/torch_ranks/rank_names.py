"""The names of files that differ in a rank: parsed, grouped, and checked to be of one saved set."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

from fsdpckpt.errors import NeedsInformationError, SourceCorruptError
from fsdpckpt.formats.torch.mesh import MAX_RANKS
from fsdpckpt.formats.zip import top_folder
from fsdpckpt.producers.recognition import copied_by_rank
from fsdpckpt.readers.protocol import file_name
from fsdpckpt.storage.sources import Sources
from fsdpckpt.text import plural

NO_STEM = "rank"  # of files whose names have nothing but the rank
MAX_NAMES = 1 << 16  # missing files that are named: a number in one file name can ask for a million
_WITH_WORLD = re.compile(r"^(?P<stem>.+?)[_-]world_size_(?P<world>\d+)_rank_(?P<rank>\d+)(?P<suffix>\.[^.]+)$")
_OF_WORLD = re.compile(
    r"^(?P<head>|.*?[_.-])rank-?(?P<rank>\d+)-of-(?P<world>\d+)(?P<tail>(?:[_.-].*?)?)(?P<suffix>\.[^.]+)$"
)
_SHARD = re.compile(r"^(?P<stem>.+?[_.-]shard)[_-]?(?P<rank>\d+)(?P<suffix>\.[^.]+)$")
_WITH_WORD = re.compile(r"^(?:(?P<stem>.*?)[_.-])?rank[_-]?(?P<rank>\d+)(?P<suffix>\.[^.]+)$")
_BARE = re.compile(r"^(?P<stem>.+)(?:[_.-]|(?<=rank))(?P<rank>\d+)(?P<suffix>\.[^.]+)$")
LAST_NUMBER = re.compile(r"^(?P<head>.*?)(?P<number>\d+)(?P<tail>\D*)$")
STEP = re.compile(r"(?:^|[_.-])(?:steps?|epoch|ep|ba|iter|iteration)[_.-]?$", re.IGNORECASE)
_NO_RANK = re.compile(
    r"(?:-of|(?:^|[_.-])(?:step|steps|epoch|ep|ba|iter|iteration|checkpoint|ckpt|version|v))$", re.IGNORECASE
)


class NamedRank(NamedTuple):
    """What a file name contains: the pattern's words, whether it has only a number, the number of ranks (None: not
    stated) and the rank. ``place``: where the rank's digits begin and end.
    """

    stem: str
    bare: bool
    world: int | None
    rank: int
    suffix: str = ""
    place: tuple[int, int] = (0, 0)


def _parse(name: str) -> NamedRank | None:
    """Parse the name of a rank file; None if it matches no pattern."""
    for pattern in (_WITH_WORLD, _OF_WORLD, _WITH_WORD, _SHARD, _BARE):
        match = pattern.match(name)
        words = match.groupdict("") if match else {}
        if match is None or any(int(words.get(number, 0)) >= MAX_RANKS for number in ("rank", "world")):
            continue  # a number larger than any number of ranks is something else
        if pattern is _BARE and _NO_RANK.search(words["stem"]):
            continue
        stem = words["stem"] if "stem" in words else f"{words['head']}{words['tail']}".strip("_.-")
        world = int(words["world"]) if "world" in words else None
        bare = pattern in (_SHARD, _BARE)
        return NamedRank(stem or NO_STEM, bare, world, int(words["rank"]), words["suffix"], match.span("rank"))
    return None


def named_rank(stem: str) -> NamedRank | None:
    """Parse the name of a rank file without its suffix; None if it matches no pattern."""
    return _parse(f"{stem}.pt")


@dataclass(slots=True)
class RankSet:
    """Files of one stem by rank. ``world``: the number of ranks in the names, None if they have none.

    ``bare``: the names have only a number, so that it is a rank is an inference. ``place``: where the rank is in the
    first name. ``again``: other names for ranks that ``files`` has, each with the name in ``files``.
    """

    stem: str
    bare: bool
    world: int | None
    place: tuple[int, int]
    files: dict[int, str] = field(default_factory=dict)
    again: dict[str, str] = field(default_factory=dict)

    @property
    def world_size(self) -> int:
        return max(self.world or 0, max(self.files) + 1)

    def name(self, rank: int) -> str:
        """The file name that ``rank`` has or would have."""
        if rank in self.files:
            return self.files[rank]
        first = next(iter(self.files.values()))
        begin, end = self.place
        digits = end - begin if first[begin] == "0" else 0
        return f"{first[:begin]}{rank:0{digits}}{first[end:]}"

    @property
    def glob(self) -> str:
        """What all of the file names match."""
        first = next(iter(self.files.values()))
        begin, end = self.place
        return f"{first[:begin]}*{first[end:]}"

    @property
    def absent(self) -> int:
        """How many of the ranks 0 .. world_size - 1 have no file."""
        return self.world_size - len(self.files)

    def missing(self) -> list[str]:
        """The names that the missing files should have, at most ``MAX_NAMES``."""
        absent = (rank for rank in range(self.world_size) if rank not in self.files)
        return [self.name(rank) for rank in islice(absent, MAX_NAMES)]

    def plausible(self, ranks: int) -> bool:
        """Whether the numbers are ranks. ``ranks``: how many the other sets show whose names have no number of ranks.

        Bare numbers are if there are several that count from 0 with few gaps. 0, 1, 3 are; 0, 1000, 2000 are steps. A
        single file after ``rank`` without the number of ranks is not if no other set has so many: ``lora_rank16.pt``.
        Two single files of one rank are: ``model_rank3.pt`` beside ``optim_rank3.pt``.
        """
        if self.bare:
            return len(self.files) > 1 and 0 in self.files and self.absent < len(self.files)
        return self.world is not None or len(self.files) > 1 or self.world_size <= max(ranks, 1)


def group_ranks(names: Iterable[str], directory: str) -> tuple[list[RankSet], list[str]]:
    """The rank sets among ``names``, the files in ``directory``, and the names that belong to none. Both in sorted
    order. Sets whose names have ``rank`` but not the number of ranks get the largest world size of all such sets.

    Raises NeedsInformationError for two names of one rank: nothing shows which save each belongs to.
    """
    sets: dict[tuple[str, bool, int | None, str], RankSet] = {}
    single: list[str] = []
    for name in sorted(names):
        named = _parse(name)
        if named is None:
            single.append(name)
            continue
        stem, bare, world, rank, suffix, place = named
        rank_set = sets.setdefault((stem, bare, world, suffix), RankSet(stem, bare, world, place))
        first = rank_set.files.setdefault(rank, name)
        if first != name:
            rank_set.again[name] = first
    unstated = [rank_set for rank_set in sets.values() if rank_set.world is None and not rank_set.bare]
    several = {rank_set.world_size for rank_set in unstated if len(rank_set.files) > 1}
    sizes = Counter(rank_set.world_size for rank_set in unstated)
    ranks = max((size for size in sizes if sizes[size] > 1 or size in several), default=0)
    plausible = [rank_set for rank_set in sets.values() if rank_set.plausible(ranks)]
    for rank_set in sets.values():
        if rank_set not in plausible:
            single += [*rank_set.files.values(), *rank_set.again]
        elif rank_set.again:
            raise NeedsInformationError(
                f"{directory}: {plural(len(rank_set.again), 'rank', 'have')} two files",
                details=[f"{first} and {name}" for name, first in rank_set.again.items()],
                why="they belong to two saves, which must not be mixed",
                next_step="move the files of one save into another directory, and give that directory",
                file=directory,
            )
    for rank_set in unstated:
        rank_set.world = ranks or rank_set.world
    return plausible, sorted(single)


def check_names(
    paths: Mapping[int, str], sources: Sources, named_rank: Callable[[str], NamedRank | None] = named_rank
) -> None:
    """Raises SourceCorruptError that lists the files among ``paths`` (rank to path) saved by another rank, or by a run
    of another number of ranks. A file saved under a name of another pattern, or without one, is accepted; so are files
    that a conversion to more ranks copies (random states). ``named_rank``: parses a name without suffix.
    """
    swapped: dict[str, str] = {}
    stale: dict[str, str] = {}
    for rank, path in sorted(paths.items()):
        name = file_name(path)
        stem = name.rpartition(".")[0]
        if copied_by_rank(path):
            continue
        was = top_folder(sources.open(path))
        named, saved = named_rank(stem), named_rank(was)
        if was == stem or named is None or saved is None or named[:2] != saved[:2]:
            continue
        if saved.rank != named.rank:
            swapped[path] = f"{path}: expected rank {rank}, saved as {was}, by rank {saved.rank}"
        elif named.world is not None and saved.world is not None and saved.world != named.world:
            stale[path] = f"{path}: expected {named.world} ranks, saved as {was}, by one of {saved.world}"
    if not swapped and not stale:
        return
    kinds = " and ".join(word for word, paths_of in (("swapped", swapped), ("stale", stale)) if paths_of)
    raise SourceCorruptError(
        f"{kinds} rank files: {plural(len(swapped) + len(stale), 'file', 'were')} saved under another rank's name",
        details=[*swapped.values(), *stale.values()],
        files=[*swapped, *stale],
        file=next(path for _, path in sorted(paths.items()) if path in swapped or path in stale),
        why="files were renamed, or copied from another rank or run; nothing else in them shows which rank saved them",
        next_step="rename every file to the name it was saved under, as listed above",
    )
