"""Which worker sees which file, by what is in it: the same name on two machines may be two files."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from fsdpckpt.errors import FsdpckptError, SourceCorruptError
from fsdpckpt.ir.checkpoint import ZEROS
from fsdpckpt.storage.protocols import is_url
from fsdpckpt.storage.sources import Sources

__all__ = ["identities", "who_sees"]

SAMPLE = 4096  # bytes
SAMPLES = 16  # of each file: evenly spaced, the first at its head and the last at its tail


def identities(paths: Sequence[str], sources: Sources) -> list[bytes]:
    """For each path what tells its content from any other's: its length and samples of its bytes; empty if not seen.

    A torch file ends with the checksums of everything in it, so that its tail alone tells it apart.
    """
    return [_identity(path, sources) for path in paths]


def _identity(path: str, sources: Sources) -> bytes:
    if path == ZEROS:
        return b"zeros"
    try:
        file = sources.open(path)
        total = hashlib.sha256(str(file.nbytes).encode())
        if is_url(path):  # the same for whoever may read it, and each question costs
            return total.digest()
        count = min(SAMPLE, file.nbytes)
        for sample in range(SAMPLES if file.nbytes > SAMPLE else 1):
            total.update(file.read((file.nbytes - count) * sample // (SAMPLES - 1), count))
    except (FsdpckptError, OSError):
        return b""
    return total.digest()


def who_sees(paths: Sequence[str], found: Sequence[Sequence[bytes]]) -> npt.NDArray[np.bool_]:
    """``visible[path, worker]`` from every worker's ``identities``.

    Raises SourceCorruptError that lists every path under which workers see different files, or nobody sees one.
    """
    wrong: list[str] = []
    for number, path in enumerate(paths):
        seen: dict[bytes, list[int]] = {}
        for worker, identity in enumerate(column[number] for column in found):
            seen.setdefault(identity, []).append(worker)
        seen.pop(b"", None)
        if len(seen) != 1:
            groups = " and ".join(_workers(workers) for workers in seen.values())
            wrong.append(f"{path}: {groups} see different files" if seen else f"{path}: gone on every worker")
    if wrong:
        raise SourceCorruptError(
            "the workers do not see the same source",
            details=wrong,
            file=paths[0] if len(paths) == 1 else None,
            why="each machine has a file of this name on its own disk, and they are not the same",
            next_step="remove the ones that do not belong to this checkpoint, or copy the right ones over them",
        )
    return np.asarray([[bool(identity) for identity in column] for column in found], bool).reshape(-1, len(paths)).T


def _workers(workers: Sequence[int]) -> str:
    return f"worker{'s' if len(workers) > 1 else ''} {', '.join(map(str, workers))}"
