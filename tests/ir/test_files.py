"""The kinds of sources of bytes: only a file has a path, and its number is that of its place."""

from __future__ import annotations

import pytest

from fsdpckpt.errors import InternalError
from fsdpckpt.ir.files import Inline, Stored, Zeros, path_of, paths_in, require_stored, stored_by_number

FILES = [Stored("a.pt", 3), Zeros(4), Inline(b"xy"), Zeros(4), Stored("zeros:", 5)]


def test_files_keep_the_numbers_that_chunks_know_them_by() -> None:
    assert stored_by_number(FILES) == {0: FILES[0], 4: FILES[4]}
    assert paths_in(FILES) == ["a.pt", "zeros:"]
    assert [path_of(FILES, number) for number in (-1, 0, 1, 2, 4, 5)] == [None, "a.pt", None, None, "zeros:", None]


def test_what_this_program_makes_is_no_file() -> None:
    assert require_stored(FILES[4]).path == "zeros:"  # a file may have any name
    for made in FILES[1:3]:
        with pytest.raises(InternalError, match="are taken for a file"):
            require_stored(made)
