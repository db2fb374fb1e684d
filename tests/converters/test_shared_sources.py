"""Which rank sees which file, and files that only another rank sees."""

from __future__ import annotations

import random
import time

import numpy as np
import pytest

from fsdpckpt.converters.shared_sources import content_identity, find_visible
from fsdpckpt.errors import SourceCorruptError
from fsdpckpt.ir.files import Stored, Zeros
from fsdpckpt.storage.sources import Sources


def test_the_same_content_is_one_file_whatever_the_disk(tmp_path) -> None:
    data = random.Random(1).randbytes(100_000)
    for name in ("a", "b"):
        (tmp_path / name).write_bytes(data)
    with Sources() as sources:
        one, other, gone = (content_identity(Stored(str(tmp_path / name), 0), sources) for name in ("a", "b", "c"))
    assert one == other != b""
    assert gone == b""


@pytest.mark.parametrize("at", [0, 5_000, 99_999])
@pytest.mark.parametrize("nbytes", [1, 4096, 100_000])
def test_another_length_or_other_bytes_are_another_file(tmp_path, nbytes: int, at: int) -> None:
    data = bytearray(random.Random(2).randbytes(nbytes))
    (tmp_path / "a").write_bytes(data)
    (tmp_path / "longer").write_bytes(data + b"x")
    (tmp_path / "other").write_bytes(random.Random(3).randbytes(nbytes))
    data[min(at, nbytes - 1)] ^= 1
    sampled = at != 5_000 or nbytes < 100_000
    (tmp_path / "flipped").write_bytes(data)
    with Sources() as sources:
        found = {
            content_identity(Stored(str(tmp_path / name), 0), sources) for name in ("a", "longer", "other", "flipped")
        }
    assert len(found) == (4 if sampled else 3)


def test_what_reads_as_zeros_is_seen_by_all(tmp_path) -> None:
    with Sources() as sources:
        assert content_identity(Zeros(8), sources) != b""


def test_who_sees_which_file_is_a_table_of_files_and_workers() -> None:
    table = find_visible(["a", "b"], [[b"1", b""], [b"1", b"2"], [b"", b"2"]])
    assert table.tolist() == [[True, True, False], [False, True, True]]


def test_all_files_that_differ_or_are_gone_are_named() -> None:
    with pytest.raises(SourceCorruptError) as caught:
        find_visible(["a", "b", "c"], [[b"1", b"", b"3"], [b"2", b"", b"3"], [b"2", b"", b""]])
    assert caught.value.details == ("a: worker 0 and workers 1, 2 see different files", "b: gone on every worker")


def test_an_identity_reads_little_of_a_large_file(tmp_path) -> None:
    path = tmp_path / "large"
    with path.open("wb") as file:
        file.truncate(1 << 34)
    begun = time.monotonic()
    with Sources() as sources:
        assert content_identity(Stored(str(path), 0), sources) != b""
    assert time.monotonic() - begun < 2
    assert np.prod(path.stat().st_blocks) == 0
