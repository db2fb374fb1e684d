"""The output of workers read back: its structure by rank 0, its bytes by all who see them.

The protocol, by all ranks: 1. Rank 0 opens the output and matches its tensors with the source's, while the others serve
it. With ``--verify full``: 2. All get the pairs, and each compares its share of those of which it sees every file. 3.
Rank 0 compares the rest, while the others serve it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import cast

import numpy as np
import numpy.typing as npt

from fsdpckpt.comm.protocol import Group
from fsdpckpt.converters.check import Pair, Verdict, compared, digests_of, matched
from fsdpckpt.converters.convert import Prepared
from fsdpckpt.converters.lay_out import dtype_rule
from fsdpckpt.converters.pairs_shipped import packed_pairs, unpacked_pairs
from fsdpckpt.converters.staged import Places
from fsdpckpt.execute.shared_sources import serve_sources, union_sources
from fsdpckpt.ir.checkpoint import SourceFile
from fsdpckpt.options import ConvertOptions, VerifyLevel
from fsdpckpt.progress import Progress
from fsdpckpt.storage.sources import Sources

__all__ = ["CheckTogether", "divided"]

Visible = npt.NDArray[np.bool_]


class CheckTogether:
    """One rank's part. ``prepared``: rank 0's. ``files``: the source's; ``visible[file, worker]``: who sees which.

    ``holders``: by target file who sees it. ``written``: what rank 0 finds the output at, a directory or one file.
    """

    def __init__(
        self,
        group: Group,
        prepared: Prepared | None,
        options: ConvertOptions,
        progress: Progress,
        *,
        places: Places,
        files: Sequence[SourceFile],
        visible: Visible,
        holders: Mapping[str, Sequence[int]],
        written: str,
    ) -> None:
        self._group = group
        self._prepared = prepared
        self._options = options
        self._progress = progress
        self._places = places
        self._files = files
        self._visible = visible
        self._holders = holders
        self._written = written

    def run(self) -> dict[str, str]:
        """On rank 0, with ``--verify full``, the SHA-256 of each tensor; else none. Raises InternalError."""
        pairs, files = self._match()
        if self._options.verify is not VerifyLevel.FULL:
            return {}
        told = [packed_pairs(pairs), [self._name(file.path) for file in files], [file.nbytes for file in files]]
        received, names, lengths = cast(
            "tuple[object, list[str], list[int]]", self._group.broadcast_object(told, name="what is to be compared")
        )
        if self._group.rank:
            pairs = unpacked_pairs(received)
        shares = divided(pairs, self._visible, self._seen(names), self._group.world_size)
        found = self._compare(shares[self._group.rank], names, lengths)
        found |= self._compare_the_rest(shares[-1], files)
        with self._group.step("judge the output"):
            return digests_of(pairs, found, self._written) if self._prepared is not None else {}

    def _match(self) -> tuple[list[Pair], Sequence[SourceFile]]:
        with self._group.step("check the output"):
            if self._prepared is None:
                self._serve()
                return [], []
            with self._group.heartbeat(), union_sources(self._group) as opener:
                return matched(
                    self._prepared.transformed.checkpoint,
                    self._written,
                    units=self._prepared.transformed.units,
                    dtypes=dtype_rule(self._options),
                    level=self._options.verify,
                    opener=opener,
                )

    def _serve(self) -> None:
        root, mine = (self._places.paths[place][0] for place in (0, self._places.place[self._group.rank] or 0))
        serve_sources(self._group, roots={root: mine})

    def _name(self, path: str) -> str:
        return "" if path == self._written else os.path.relpath(path, self._written)

    def _seen(self, names: Sequence[str]) -> Visible:
        """``[file, worker]`` for the written files ``names``."""
        found = np.zeros((len(names), self._group.world_size), bool)
        for number, name in enumerate(names):
            found[number, list(self._holders.get(name, ()))] = True
        return found

    def _compare(self, pairs: Sequence[Pair], names: Sequence[str], lengths: Sequence[int]) -> dict[str, Verdict]:
        """This worker's share; on rank 0 what all found."""
        paths = [self._places.locate(self._group.rank, name) for name in names]
        written = [SourceFile(*each) for each in zip(paths, lengths, strict=True)]
        with self._group.step("compare the output"), self._group.heartbeat(), Sources() as sources:
            mine = self._compared(pairs, sources, written)
        found: dict[str, Verdict] = {}
        for theirs in self._group.all_gather_objects(mine, name="what was compared"):
            found.update(cast("dict[str, Verdict]", theirs))
        return found

    def _compare_the_rest(self, pairs: Sequence[Pair], files: Sequence[SourceFile]) -> dict[str, Verdict]:
        if not pairs:  # the same on all ranks
            return {}
        with self._group.step("compare what nobody sees whole"):
            if self._prepared is None:
                self._serve()
                return {}
            with self._group.heartbeat(), union_sources(self._group) as sources:
                return self._compared(pairs, sources, files)

    def _compared(self, pairs: Sequence[Pair], sources: Sources, written: Sequence[SourceFile]) -> dict[str, Verdict]:
        memory = self._options.max_memory
        return compared(pairs, (self._files, sources), (written, sources), self._progress, max_memory=memory)


def divided(pairs: Sequence[Pair], source: Visible, written: Visible, workers: int) -> list[list[Pair]]:
    """A share of ``pairs`` for each worker that sees all files of its pairs, about as many bytes each; last the rest.

    ``source``, ``written``: ``[file, worker]``, who sees which.
    """
    shares: list[list[Pair]] = [[] for _ in range(workers + 1)]
    load = np.zeros(workers, np.int64)
    for pair in pairs:
        sees = source[pair.source.chunks.file].all(axis=0) & written[pair.written.chunks.file].all(axis=0)
        able = np.flatnonzero(sees)
        worker = int(able[np.argmin(load[able])]) if len(able) else workers
        shares[worker].append(pair)
        if len(able):
            load[worker] += pair.written.nbytes
    return shares
