"""Finds which rank has which file: a grid of file names and ranks, for a checkpoint that may be incomplete.

Only names and sizes are known of what cannot be read, so this is a description and no proof.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType

# The number after one of these is a rank: in the names of torch.save files, DCP data files and random states.
_RANK = re.compile(r"(?P<before>.*?(?:rank[-_]?|(?:^|/)__|rng_state_|random_states_|(?:^|/)extra_state_))(?P<rank>\d+)")
_WORLD = re.compile(r"world_size_(\d+)")
_DCP = re.compile(r"_\d+\.distcp$")
_MAX_RANKS = 1 << 20


class FileState(StrEnum):
    PRESENT = "present"
    MISSING = "missing"
    DAMAGED = "damaged"
    NONE = "none"  # nothing says that this rank has such a file


@dataclass(frozen=True, slots=True)
class FilesOfRanks:
    """The files of one name, with ``*`` in place of the rank. ``states``: by rank."""

    pattern: str
    states: tuple[FileState, ...]

    def ranks(self, state: FileState) -> list[int]:
        return [rank for rank, each in enumerate(self.states) if each is state]


@dataclass(frozen=True, slots=True)
class FileGrid:
    rows: tuple[FilesOfRanks, ...]

    @property
    def ranks(self) -> int:
        return max((len(row.states) for row in self.rows), default=0)


def rank_grid(
    names: Collection[str],
    missing: Collection[str],
    damaged: Collection[str],
    recorded: Mapping[str, tuple[str, int]] = MappingProxyType({}),
) -> FileGrid:
    """The grid of the files ``names`` of a directory, and of those that are known to be ``missing``.

    A name that several ranks have, or that says how many there are, is expected of each rank. ``recorded``: the pattern
    and the rank of each file that the checkpoint itself lists, whatever its name looks like.
    """
    rows: dict[str, dict[int, FileState]] = {}
    worlds: dict[str, int] = {}
    for name, state in _states(names, missing, damaged):
        found = recorded.get(name) or _pattern_and_rank(name)
        if found is None:
            continue
        pattern, rank = found
        of_pattern = rows.setdefault(pattern, {})
        if of_pattern.get(rank, FileState.PRESENT) is FileState.PRESENT:
            of_pattern[rank] = state
        world = _WORLD.search(name)
        worlds[pattern] = int(world[1]) if world is not None and int(world[1]) < _MAX_RANKS else 0
    several = [max(of_pattern) + 1 for of_pattern in rows.values() if len(of_pattern) > 1]
    ranks = max([*several, *worlds.values(), *(max(of_pattern) + 1 for of_pattern in rows.values())], default=0)
    grid = []
    for pattern, of_pattern in rows.items():
        of_each_rank = worlds[pattern] > 0 or (len(of_pattern) > 1 and not _DCP.search(pattern.replace("*", "0")))
        absent = FileState.MISSING if of_each_rank else FileState.NONE
        length = worlds[pattern] or ranks
        states = [of_pattern.get(rank, absent) for rank in range(max(length, max(of_pattern) + 1))]
        grid.append(FilesOfRanks(pattern, tuple(states)))
    return FileGrid(tuple(grid))


def _pattern_and_rank(name: str) -> tuple[str, int] | None:
    """``name`` with ``*`` in place of the rank, and the rank; None if it has none."""
    match = _RANK.match(name)
    if match is None or int(match["rank"]) >= _MAX_RANKS:
        return None
    rest = _DCP.sub("_*.distcp", name[match.end() :])  # a rank has several of these
    return f"{match['before']}*{rest}", int(match["rank"])


def _states(names: Iterable[str], missing: Iterable[str], damaged: Collection[str]) -> Iterable[tuple[str, FileState]]:
    for name in names:
        yield name, FileState.DAMAGED if name in damaged else FileState.PRESENT
    for name in missing:
        yield name, FileState.MISSING
