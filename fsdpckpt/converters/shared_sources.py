"""Gives rank 0 the files on every rank's disks while it plans, and finds out by content which rank sees which file.

While rank 0 is in ``UnionSources``, the other ranks are in ``serve_sources``. Rank 0 sends requests to one rank, or to
all in turn; each answers until rank 0 is done. Rank 0 reads a file that it sees itself, and any other from the lowest
rank that has it. The same name on two machines may be two files: ``see_sources`` compares them, and lets a rank read
its own only if it provably is the same.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
import numpy.typing as npt

from fsdpckpt.comm.protocol import Group
from fsdpckpt.converters.same_files import checksum_proof, identity_proofs
from fsdpckpt.errors import FsdpckptError, SourceCorruptError
from fsdpckpt.ir.checkpoint import Note
from fsdpckpt.ir.files import SourceFile, Stored
from fsdpckpt.plan.transfer import SeenBy
from fsdpckpt.storage import is_url
from fsdpckpt.storage.sources import Sources
from fsdpckpt.text import names_text

SAMPLE = 4096  # bytes
SAMPLES = 16  # samples of each file: evenly spaced, the first at its head and the last at its tail


def content_identity(source_file: SourceFile, sources: Sources) -> bytes:
    """The length of a file and samples of its bytes: files in which these differ are different files. Empty if this
    rank does not see it.
    """
    if not isinstance(source_file, Stored):  # every rank makes the same
        return b"made"
    try:
        file = sources.open_file(source_file)
        total = hashlib.sha256(str(file.nbytes).encode())
        if is_url(source_file.path):  # the same for every worker that may read it, and each request costs time
            return total.digest()
        count = min(SAMPLE, file.nbytes)
        for sample in range(SAMPLES if file.nbytes > SAMPLE else 1):
            total.update(file.read((file.nbytes - count) * sample // (SAMPLES - 1), count))
    except (FsdpckptError, OSError):
        return b""
    return total.digest()


@dataclass(frozen=True, slots=True)
class SeenSources:
    """Who reads which file. ``seen_by[file, rank]``: which rank may read it; ``apart`` (files,): ranks may read copies
    of it that only their checksums prove to be the same. ``unproved[file, rank]``: which rank sees a file that nothing
    proves to be the one of the lowest rank, whose copy is then used for all.
    """

    seen_by: SeenBy
    apart: npt.NDArray[np.bool_]
    unproved: SeenBy

    def first(self, count: int) -> SeenSources:
        """Of the first ``count`` files."""
        return SeenSources(self.seen_by[:count], self.apart[:count], self.unproved[:count])

    def notes(self, paths: Sequence[str]) -> list[Note]:
        """Whose copies are used of files of which several were found. ``paths``: those of all files."""
        by_workers: dict[tuple[int, tuple[int, ...]], list[str]] = {}
        for number in np.flatnonzero(self.unproved.any(axis=1)).tolist():
            others = tuple(np.flatnonzero(self.unproved[number]).tolist())
            by_workers.setdefault((int(np.argmax(self.seen_by[number])), others), []).append(paths[number])
        return [
            Note(
                "copies",
                f"{names_text(names, 3)}: the copy of worker {worker} was used for all. The copy of "
                f"{_workers(others)} has the same length, but may have other bytes: the container does not checksum "
                "everything in it",
                keys=tuple(names),
            )
            for (worker, others), names in by_workers.items()
        ]


def see_sources(group: Group, files: Sequence[SourceFile], sources: Sources) -> SeenSources:
    """Find out which rank may read which of ``files``. Collective. Raises what ``find_visible`` raises.

    1. All compare length and samples: files that differ are refused. 2. A rank may read a file if it provably is the
    one that the lowest rank sees. 3. For the others, all compare the checksums of everything in the file. Whoever then
    has another copy gets the bytes from a rank that may read it.
    """
    paths = list(map(str, files))
    identities: list[bytes] = []
    proofs: list[tuple[bytes, ...]] = []
    with group.step("find visible sources"), group.heartbeat():
        for file in files:
            identities.append(content_identity(file, sources))
            on_disk = isinstance(file, Stored) and not is_url(file.path)  # all others are the same on every rank
            proofs.append(identity_proofs(f"{file}") if on_disk else (b"shared",))
            group.beat()
    gathered = group.all_gather_objects([identities, proofs], name="who sees what")
    everyone = cast("list[tuple[list[bytes], list[Sequence[bytes]]]]", gathered)
    with group.step("compare the sources"):
        if group.rank == 0:  # all would raise the same errors; one rank reports them
            find_visible(paths, [identities for identities, _ in everyone])
    seen = find_visible(paths, [identities for identities, _ in everyone])
    same = _like_the_lowest(seen, [proofs for _, proofs in everyone])
    unproved = np.flatnonzero((seen & ~same).any(axis=1)).tolist()
    if not unproved:  # the same on all ranks
        return SeenSources(seen, np.zeros(len(paths), np.bool_), np.zeros_like(seen))
    with group.step("compare checksums of copies"), group.heartbeat():
        sums = [(checksum_proof(paths[number], sources),) for number in unproved]
    everyones = cast("list[list[Sequence[bytes]]]", group.all_gather_objects(sums, name="checksums of copies"))
    by_sums = np.zeros_like(seen)
    by_sums[unproved] = _like_the_lowest(seen[unproved], everyones)
    apart = np.asarray((by_sums & ~same).any(axis=1), bool)
    return SeenSources(seen & (same | by_sums), apart, seen & ~same & ~by_sums)


def _like_the_lowest(seen: SeenBy, proofs: Sequence[Sequence[Sequence[bytes]]]) -> SeenBy:
    """``[file, rank]``: whether a rank's file has a proof in common with that of the lowest rank that sees it.

    ``proofs[rank][file]``; an empty one proves nothing.
    """
    same = np.zeros_like(seen)
    for number, ranks in enumerate(seen):
        holder = int(np.argmax(ranks))
        of_holder = {bytes(proof) for proof in proofs[holder][number] if proof}
        for rank in np.flatnonzero(ranks).tolist():
            same[number, rank] = rank == holder or not of_holder.isdisjoint(map(bytes, proofs[rank][number]))
    return same


def find_visible(paths: Sequence[str], identities: Sequence[Sequence[bytes]]) -> SeenBy:
    """``seen_by[path, worker]``, from ``identities[worker]``: the ``content_identity`` of each path.

    Raises SourceCorruptError that lists every path under which workers see different files, or which no worker sees.
    """
    wrong: list[str] = []
    for number, path in enumerate(paths):
        workers_by_identity: dict[bytes, list[int]] = {}
        for worker, identity in enumerate(column[number] for column in identities):
            workers_by_identity.setdefault(identity, []).append(worker)
        workers_by_identity.pop(b"", None)
        if len(workers_by_identity) != 1:
            groups = " and ".join(map(_workers, workers_by_identity.values()))
            wrong.append(f"{path}: {groups} see different files" if groups else f"{path}: gone on every worker")
    if wrong:
        raise SourceCorruptError(
            "the workers do not see the same source",
            details=wrong,
            file=paths[0] if len(paths) == 1 else None,
            why="each machine has a file of this name on its own disk, and they are not the same",
            next_step="remove the ones that do not belong to this checkpoint, or copy the right ones over them",
        )
    seen_by_worker = [list(map(bool, column)) for column in identities]
    return np.asarray(seen_by_worker, bool).reshape(-1, len(paths)).T


def _workers(workers: Sequence[int]) -> str:
    return f"worker{'s' if len(workers) > 1 else ''} {', '.join(map(str, workers))}"
