"""A remote file gives the bytes it was asked for, in as few requests as that takes, each tried again when it fails."""

from __future__ import annotations

import errno
import logging
import random
import sys
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from fsdpckpt.errors import SourceCorruptError, SourceError, SourceMissingError, TargetUnwritableError
from fsdpckpt.storage import FileIdentity, retry
from fsdpckpt.storage.remote_file import AHEAD, RangeCache, RemoteFile
from fsdpckpt.storage.remote_store import filesystem_of
from fsdpckpt.storage.retry import HttpStatusError, ShortAnswerError, target_error, with_retries

CONTENT = random.Random(7).randbytes(3 * AHEAD + 1234)


class Fetcher:
    """``asked``: every range that was fetched."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, int]] = []

    def __call__(self, offset: int, buffer: memoryview) -> None:
        self.asked.append((offset, len(buffer)))
        buffer[:] = CONTENT[offset : offset + len(buffer)]


@pytest.fixture
def fetcher() -> Fetcher:
    return Fetcher()


@pytest.fixture
def file(fetcher: Fetcher) -> RemoteFile:
    return RemoteFile(FileIdentity("s3://b/k", len(CONTENT)), fetcher, RangeCache())


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retry, "FIRST_PAUSE", 0.0)


def test_small_reads_near_each_other_are_one_request(file: RemoteFile, fetcher: Fetcher) -> None:
    for begin in range(1000, 1000 + AHEAD - 64, 4096):
        file.read(begin, 64)
    assert fetcher.asked == [(1000, AHEAD)]


def test_a_read_at_the_end_brings_what_lies_before_it(file: RemoteFile, fetcher: Fetcher) -> None:
    file.read(len(CONTENT) - 22, 22)
    file.read(len(CONTENT) - 60_000, 50_000)
    assert fetcher.asked == [(len(CONTENT) - AHEAD, AHEAD)]


def test_announced_ranges_are_fetched_exactly_and_neighbours_together(file: RemoteFile, fetcher: Fetcher) -> None:
    ranges = [(10, 30), (5000, 30), (200_000, 30), (300_000, 30)]
    file.prefetch(ranges)
    assert sorted(fetcher.asked) == [(10, 5020), (200_000, 30), (300_000, 30)]
    for begin, nbytes in ranges:
        assert file.read(begin, nbytes) == CONTENT[begin : begin + nbytes]
    assert len(fetcher.asked) == 3


def test_data_is_fetched_as_it_is_asked_for(file: RemoteFile, fetcher: Fetcher) -> None:
    buffer = bytearray(150_000)
    file.read_into(77, memoryview(buffer))
    file.read_into(77, memoryview(buffer)[:9])
    assert fetcher.asked == [(77, 150_000), (77, 9)]


def test_reading_behind_the_end_asks_nobody(file: RemoteFile, fetcher: Fetcher) -> None:
    for begin, nbytes in ((len(CONTENT) - 5, 6), (len(CONTENT), 1), (-1, 2), (0, len(CONTENT) + 1)):
        with pytest.raises(SourceCorruptError, match="ends too early"):
            file.read(begin, nbytes)
    assert fetcher.asked == []


@pytest.mark.parametrize(
    "error",
    [
        ConnectionResetError("reset"),
        TimeoutError(),
        ShortAnswerError("received 3 of 4 bytes"),
        HttpStatusError(503, "Slow Down"),
        HttpStatusError(429, ""),
        OSError(errno.EBUSY, "SlowDown"),
    ],
)
def test_what_passes_is_tried_again_until_it_is_too_often(error: OSError) -> None:
    failures = [error] * (retry.ATTEMPTS - 1)

    def work() -> str:
        if failures:
            raise failures.pop()
        return "done"

    assert with_retries(work, url="s3://b/k", action="reading") == "done"
    failures[:] = [error] * retry.ATTEMPTS
    with pytest.raises(SourceError, match=f"reading failed, gave up after {retry.ATTEMPTS} attempts") as caught:
        with_retries(work, url="s3://b/k", action="reading")
    assert caught.value.exit_code == 3
    assert failures == []


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (FileNotFoundError("k"), SourceMissingError),
        (PermissionError("k"), SourceError),
        (HttpStatusError(403, "Forbidden"), SourceError),
        (OSError(errno.EINVAL, "bad request"), SourceError),
    ],
)
def test_what_stays_is_not_tried_again(error: OSError, kind: type[SourceError]) -> None:
    work = Mock(side_effect=error)
    with pytest.raises(kind):
        with_retries(work, url="s3://b/k", action="reading")
    assert work.call_count == 1
    with pytest.raises(TargetUnwritableError):
        with_retries(work, url="s3://b/k", action="writing", make_error=target_error)


@pytest.mark.parametrize(
    ("status", "kind", "attempts"),
    [(None, SourceError, retry.ATTEMPTS), (503, SourceError, retry.ATTEMPTS), (404, SourceMissingError, 1)],
)
def test_errors_of_huggingface_hub_are_those_of_a_store(
    status: int | None, kind: type[SourceError], attempts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    class HTTPError(Exception):
        response = None if status is None else SimpleNamespace(status_code=status)

    monkeypatch.setitem(sys.modules, "httpx", SimpleNamespace(HTTPError=HTTPError))
    request = Mock(side_effect=HTTPError("no answer"))
    with pytest.raises(kind):
        with_retries(request, url="hf://models/x", action="looking it up")
    assert request.call_count == attempts


@pytest.mark.parametrize(
    ("raised", "seconds", "kind"), [(TimeoutError(), -1.0, SourceError), (KeyError("k"), 60, KeyError)]
)
def test_trying_ends_after_a_while_and_a_mistake_of_this_program_is_no_failing_store(
    monkeypatch: pytest.MonkeyPatch, raised: Exception, seconds: float, kind: type[Exception]
) -> None:
    monkeypatch.setattr(retry, "MAX_SECONDS", seconds)
    work = Mock(side_effect=raised)
    with pytest.raises(kind):
        with_retries(work, url="s3://b/k", action="reading")
    assert work.call_count == 1


def test_what_a_stores_package_logs_does_not_reach_the_screen_twice(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without a handler logging prints warnings, tracebacks included, on stderr."""
    filesystem_of("memory://x")
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    logging.getLogger("gcsfs.retry").error("a request failed")
    assert capsys.readouterr().err == ""
    logging.getLogger("another").error("a request failed")
    assert "a request failed" in capsys.readouterr().err


def test_a_cached_range_is_what_was_added_and_no_more_is_cached_than_allowed() -> None:
    chance = random.Random(4)
    content = {path: chance.randbytes(5000) for path in ("a", "b", "c")}
    cache = RangeCache(limit=3000)
    hits = 0
    for _ in range(3000):
        path = chance.choice("abc")
        begin, nbytes = chance.randrange(4990), chance.randrange(1, 400)
        data = content[path][begin : begin + nbytes]
        cached = cache.get(path, begin, len(data))
        assert cached is None or cached == data
        hits += cached is not None
        if cached is None:
            cache.add(path, begin, data)
        assert sum(map(len, cache._ranges.values())) <= 3000
    assert hits > 20


def test_the_least_recently_used_range_goes_first_and_one_that_is_cached_in_part_or_too_long_is_not_found() -> None:
    cache = RangeCache(limit=20)
    cache.add("a", 0, b"0123456789")
    cache.add("a", 100, b"abcdefghij")
    assert cache.get("a", 2, 3) == b"234"
    cache.add("b", 0, b"xyz")
    assert cache.get("a", 100, 1) is None
    assert cache.get("a", 9, 1) == b"9"
    cache = RangeCache(limit=6)
    for place in (("a", 10, b"abc"), ("a", 13, b"def"), ("c", 0, b"abcdefg")):
        cache.add(*place)
    assert [cache.get(*asked) for asked in (("a", 12, 2), ("a", 9, 2), ("b", 10, 1), ("c", 0, 1))] == [None] * 4
