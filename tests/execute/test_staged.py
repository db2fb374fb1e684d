"""What an interrupted run has staged is not believed because its journal says so: any changed byte is found."""

from __future__ import annotations

import random
import zlib
from pathlib import Path

import numpy as np
import pytest

from fsdpckpt.errors import SourceCorruptError, TargetUnwritableError
from fsdpckpt.execute.journal import JournaledWindows, Recorder
from fsdpckpt.execute.stored_checksums import DeferredChecksums
from fsdpckpt.ir.checkpoint import Checksums
from fsdpckpt.storage.sources import Sources
from tests.execute.running import run_plan
from tests.execute.test_resume import Scene, scene

NOTHING = JournaledWindows()


def _forged(made: Scene, rng: random.Random, *, cut: int) -> tuple[JournaledWindows, bool]:
    """All windows of a finished run, with one byte of one of them changed, and the journal changed to fit it.

    Returns also whether that byte belongs to a checksum that is written last, when all windows are there.
    """
    changed = rng.randrange(len(made.plan.files))
    place = rng.randrange(made.plan.files[changed].nbytes)
    rows, last = [], False
    for number, file in enumerate(made.plan.files):
        deferred, data = DeferredChecksums(file), bytearray(made.expected[file.path])
        if number == changed:
            data[place] ^= 1 << rng.randrange(8)
            Path(made.locate(file.path)).write_bytes(data)
            ones = bytearray(b"\xff" * len(data))
            for begin in range(0, len(data), cut):
                deferred.clear(begin, memoryview(ones)[begin : begin + cut])
            last = ones[place] == 0
        for begin in range(0, len(data), cut):
            view = memoryview(data)[begin : begin + cut]
            deferred.clear(begin, view)
            rows.append((number, begin, begin + len(view), zlib.crc32(view), 0))
    return JournaledWindows(np.array(rows)), last


def _resume(made: Scene, journaled: JournaledWindows, checksums: Checksums, *, reread: bool) -> dict[str, int]:
    with Sources() as sources:
        return run_plan(
            made.plan,
            files=made.files,
            checksums=checksums,
            sources=sources,
            locate=made.locate,
            budget=made.budget,
            recorder=Recorder(made.journal, made.identity, journaled),
            reread=reread,
        )


@pytest.mark.parametrize("reread", [False, True], ids=["checksums", "reread"])
@pytest.mark.parametrize("seed", range(40))
def test_any_byte_that_changed_with_its_journal_is_found(tmp_path: Path, seed: int, reread: bool) -> None:
    """By the checksums of the source's records, or, where it has none, by reading the source again."""
    made, rng = scene(str(tmp_path), seed, threads=1 + seed % 3), random.Random(seed)
    _resume(made, NOTHING, made.checksums, reread=False)
    journaled, last = _forged(made, rng, cut=rng.choice([50, 64, 100_000]))
    checksums = Checksums.of([]) if reread else made.checksums
    if last:
        made.require_expected(_resume(made, journaled, checksums, reread=reread))
        return
    with pytest.raises(TargetUnwritableError, match="was changed after an interrupted run") as error:
        _resume(made, journaled, checksums, reread=reread)
    assert error.value.exit_code == 5 and not error.value.resumable


@pytest.mark.parametrize("reread", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_what_nobody_changed_is_kept(tmp_path: Path, seed: int, reread: bool) -> None:
    made = scene(str(tmp_path), seed)
    journaled = made.stopped(3)
    made.require_expected(_resume(made, journaled, made.checksums, reread=reread))


def test_a_source_that_is_damaged_is_to_blame_and_not_what_was_staged_from_it(tmp_path: Path) -> None:
    made = scene(str(tmp_path), 3, damage=True)
    journaled = made.stopped(2)
    with pytest.raises(SourceCorruptError):
        while True:
            _resume(made, journaled, made.checksums, reread=False)
