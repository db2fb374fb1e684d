"""Group file names that differ only in a rank number: one set is one checkpoint, a rank a file.

Patterns: ``model_world_size_4_rank_0.pt`` (verl, and what this program writes), ``pytorch_model_fsdp_0_rank3.bin``
(accelerate), ``model_0.pt``. The number of a step or an epoch is no rank.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

__all__ = ["NamedRank", "RankSet", "group_ranks", "named_rank"]

_WITH_WORLD = re.compile(r"^(?P<stem>.+?)[_-]world_size_(?P<world>\d+)_rank_(?P<rank>\d+)(?P<suffix>\.[^.]+)$")
_WITH_WORD = re.compile(r"^(?P<stem>.+?)[_.-]?rank[_-]?(?P<rank>\d+)(?P<suffix>\.[^.]+)$")
_BARE = re.compile(r"^(?P<stem>.+)[_.-](?P<rank>\d+)(?P<suffix>\.[^.]+)$")
_NO_RANK = re.compile(
    r"(?:-of|(?:^|[_.-])(?:step|steps|epoch|ep|ba|iter|iteration|checkpoint|ckpt|version|v))$", re.IGNORECASE
)


@dataclass(slots=True)
class RankSet:
    """Files of one stem by rank. ``world``: what the names say, None when they do not.

    ``bare``: the names hold a number only, so that it is a rank is an inference.
    """

    stem: str
    suffix: str
    files: dict[int, str]
    world: int | None
    bare: bool

    @property
    def world_size(self) -> int:
        return max(self.world or 0, max(self.files) + 1)

    def name(self, rank: int) -> str:
        """The file name that ``rank`` has or would have."""
        known_rank, known = next(iter(self.files.items()))
        if rank in self.files:
            return self.files[rank]
        head, _, tail = known.rpartition(str(known_rank))
        return f"{head}{rank}{tail}"

    def missing(self) -> list[str]:
        """Names of the files that ranks 0 .. world_size - 1 should have."""
        return [self.name(rank) for rank in range(self.world_size) if rank not in self.files]


class NamedRank(NamedTuple):
    """What a file name says: the pattern's words, the ranks that there are (None: not said) and the rank."""

    stem: str
    bare: bool
    world: int | None
    rank: int


def named_rank(stem: str) -> NamedRank | None:
    """What the name of a rank's file without its suffix says; None when it follows no pattern."""
    key, rank = _parse(f"{stem}.pt")
    return NamedRank(key[0], key[3], key[2], rank) if key is not None else None


def group_ranks(names: Iterable[str]) -> tuple[list[RankSet], list[str]]:
    """The rank sets among ``names``, and the names that belong to none. Both in sorted order."""
    sets: dict[tuple[str, str, int | None, bool], RankSet] = {}
    single: list[str] = []
    for name in sorted(names):
        key, rank = _parse(name)
        if key is None:
            single.append(name)
            continue
        stem, suffix, world, bare = key
        found = sets.setdefault(key, RankSet(stem, suffix, {}, world, bare))
        found.files[rank] = name
    accepted: list[RankSet] = []
    for found in sets.values():
        if found.bare and not _plausible(found):
            single.extend(found.files.values())
        else:
            accepted.append(found)
    return accepted, sorted(single)


def _parse(name: str) -> tuple[tuple[str, str, int | None, bool] | None, int]:
    found = _WITH_WORLD.match(name)
    if found:
        return (found["stem"], found["suffix"], int(found["world"]), False), int(found["rank"])
    found = _WITH_WORD.match(name)
    if found:
        return (found["stem"], found["suffix"], None, False), int(found["rank"])
    found = _BARE.match(name)
    if found and not _NO_RANK.search(found["stem"]):
        return (found["stem"], found["suffix"], None, True), int(found["rank"])
    return None, 0


def _plausible(found: RankSet) -> bool:
    """Bare numbers are ranks when several count from 0 with few holes: 0, 1, 3 do; 0, 1000, 2000 are steps."""
    return len(found.files) > 1 and 0 in found.files and len(found.missing()) < len(found.files)
