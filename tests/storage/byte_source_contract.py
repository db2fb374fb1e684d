"""What every ``ByteSource`` promises, as tests that each implementation's test class inherits.

A subclass has the fixture ``source``, a source whose first bytes are ``content``.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from concurrent.futures import ThreadPoolExecutor

import pytest

from fsdpckpt.errors import SourceCorruptError, SourceMissingError
from fsdpckpt.storage import ByteSource

CONTENT = random.Random(3).randbytes(300_001)  # longer than what a remote file reads ahead, and odd


class ByteSourceContract:
    content = CONTENT

    def test_it_has_a_path_and_a_length(self, source: ByteSource) -> None:
        assert isinstance(source.path, str) and source.path
        assert source.nbytes == len(self.content)

    def test_all_or_nothing_is_read_into_the_buffer_that_was_given_and_closing_twice_is_closing_once(
        self, source: ByteSource
    ) -> None:
        assert source.read(0, len(self.content)) == self.content
        for begin in (0, 1000, len(self.content)):
            assert source.read(begin, 0) == b""
            source.read_into(begin, memoryview(bytearray()))
        buffer = bytearray(b"\xff" * 100)
        source.read_into(50, memoryview(buffer)[20:60])
        assert bytes(buffer) == b"\xff" * 20 + self.content[50:90] + b"\xff" * 40
        for _ in range(2):
            source.close()

    def test_any_range_is_read_exactly(self, source: ByteSource) -> None:
        chance = random.Random(1)
        for _ in range(30):
            nbytes = chance.choice([1, 30, 4096, 70_000, 200_000])
            begin = chance.randrange(len(self.content) - nbytes)
            assert source.read(begin, nbytes) == self.content[begin : begin + nbytes]
            buffer = bytearray(nbytes)
            source.read_into(begin, memoryview(buffer))
            assert bytes(buffer) == self.content[begin : begin + nbytes]

    @pytest.mark.parametrize("nbytes", [6, 100_000])
    @pytest.mark.parametrize("missing", [1, 5, 6])
    def test_a_range_that_leaves_the_file_at_either_end_is_an_error(
        self, source: ByteSource, nbytes: int, missing: int
    ) -> None:
        begin = source.nbytes - nbytes + missing
        with pytest.raises(SourceCorruptError, match="ends too early") as caught:
            source.read(begin, nbytes)
        assert caught.value.file == source.path
        with pytest.raises(SourceCorruptError, match="ends too early"):
            source.read_into(begin, memoryview(bytearray(nbytes)))
        with pytest.raises(SourceCorruptError):
            source.read(-1, 2)
        with pytest.raises(SourceCorruptError):
            source.read_into(-1, memoryview(bytearray(2)))

    def test_many_threads_read_at_once(self, source: ByteSource) -> None:
        begins = range(0, len(self.content) - 30_000, 9_001)
        with ThreadPoolExecutor(6) as pool:
            read = list(pool.map(lambda begin: source.read(begin, 30_000), begins))
        assert read == [self.content[begin : begin + 30_000] for begin in begins]


class NamedByteSourceContract(ByteSourceContract, ABC):
    """Of sources that are opened by a path or URL."""

    @abstractmethod
    def open_absent(self) -> ByteSource:
        """Open a name that nothing is stored under."""

    def test_opening_what_does_not_exist_is_an_error(self, source: ByteSource) -> None:
        with pytest.raises(SourceMissingError, match="does not exist") as caught:
            self.open_absent()
        assert caught.value.exit_code == 3
