"""Reads one remote file by byte ranges, each request retried; small ranges come from a cache.

S3 and HTTP answers are copied into the caller's buffer as they arrive, so that a range needs no second copy in memory,
and each answer is checked to be from the same state of the object. Other stores are read through fsspec.
"""

from __future__ import annotations

import threading
from bisect import bisect_right, insort
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from fsdpckpt.errors import SourceUnsupportedError
from fsdpckpt.storage.protocols import ByteSource, FileIdentity, change_between, changed_error
from fsdpckpt.storage.retry import HttpStatusError, ShortAnswerError, with_retries
from fsdpckpt.text import bytes_text

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

AHEAD = 128 << 10  # bytes: a small read fetches this many, since metadata lies close together
SMALL = 64 << 10  # bytes: reads up to this size go through the cache
NEAR = 24 << 10  # bytes: announced ranges with a gap up to this size are fetched in one request
REQUEST_COST = 256 << 10  # bytes a store sends in the time that another request takes (some 5 ms at 50 MB/s a stream)
REQUESTS = 16  # at a time: a store answers in tens of milliseconds
CACHE_BYTES = 16 << 20  # headers and metadata of many files; tensor data is never cached
STEP = 4 << 20  # bytes of one request to a store whose answers cannot be streamed into a buffer
MAX_DIGITS = 20  # of a length: Python refuses to parse a number of thousands of digits
STALLED = 30.0  # seconds without a byte after which a request is repeated

Fetch = Callable[[int, memoryview], None]
"""(offset, buffer): one attempt to fill the buffer. Raises what the store's package raises, or ShortAnswerError."""
AsyncFetch = Callable[[int, memoryview], Awaitable[None]]


class CachedFile(ByteSource):
    """A file of which each range is requested with ``fetch``; small ranges come from ``cache``.

    ``requests``: how many calls of ``fetch`` may run at a time.
    """

    def __init__(self, path: str, nbytes: int, fetch: Fetch, cache: RangeCache, *, requests: int) -> None:
        self.path = path
        self.nbytes = nbytes
        self._fetch = fetch
        self._cache = cache
        self._requests = requests

    def read(self, offset: int, nbytes: int) -> bytes:
        return self._read_small(offset, nbytes) if nbytes <= SMALL else super().read(offset, nbytes)

    def read_into(self, offset: int, buffer: memoryview) -> None:
        self.require_inside(offset, len(buffer))
        if len(buffer) <= SMALL:
            cached = self._cache.get(self.path, offset, len(buffer)) if buffer else b""
            if cached is not None:
                buffer[:] = cached
                return
        self._request(offset, buffer)

    def prefetch(self, ranges: Iterable[tuple[int, int]]) -> bool:
        """Fetch the small ranges (offset, nbytes) that will be read next into the cache, in parallel."""
        spans: list[list[int]] = []
        for offset, nbytes in sorted(ranges):
            end = min(offset + nbytes, self.nbytes)
            if nbytes > SMALL or offset >= end or self._cache.get(self.path, offset, end - offset) is not None:
                continue
            if spans and offset - spans[-1][1] <= NEAR and end - spans[-1][0] <= REQUEST_COST:
                spans[-1][1] = max(spans[-1][1], end)
            else:
                spans.append([offset, end])
        threads = min(self._requests, len(spans))
        if threads > 1:
            with ThreadPoolExecutor(threads) as pool:
                list(pool.map(lambda span: self._fetch_to_cache(*span), spans))
            return True
        for begin, end in spans:
            self._fetch_to_cache(begin, end)
        return True

    def _read_small(self, offset: int, nbytes: int) -> bytes:
        self.require_inside(offset, nbytes)
        if nbytes == 0:
            return b""
        cached = self._cache.get(self.path, offset, nbytes)
        if cached is not None:
            return cached
        # Near the end, fetch what lies before it instead, such as a zip file's directory.
        begin = max(min(offset, self.nbytes - AHEAD), 0)
        data = self._fetch_to_cache(begin, min(begin + AHEAD, self.nbytes))
        return data[offset - begin : offset - begin + nbytes]

    def _fetch_to_cache(self, begin: int, end: int) -> bytes:
        buffer = bytearray(end - begin)
        self._request(begin, memoryview(buffer))
        data = bytes(buffer)
        self._cache.add(self.path, begin, data)
        return data

    def _request(self, offset: int, buffer: memoryview) -> None:
        action = f"reading {len(buffer)} bytes at {offset}"
        with_retries(lambda: self._fetch(offset, buffer), url=self.path, action=action)


class RemoteFile(CachedFile):
    """One object in a store. ``identity``: the state of the object from which every answer must come."""

    def __init__(self, identity: FileIdentity, fetch: Fetch, cache: RangeCache) -> None:
        super().__init__(identity.path, identity.nbytes, fetch, cache, requests=REQUESTS)
        self.identity = identity


class RangeCache:
    """Byte ranges of many files, at most ``limit`` bytes in all; the least recently used are dropped first.

    Thread-safe.
    """

    def __init__(self, limit: int = CACHE_BYTES) -> None:
        self.limit = limit
        self._ranges: OrderedDict[tuple[str, int], bytes] = OrderedDict()
        self._begins: dict[str, list[int]] = {}
        self._nbytes = 0
        self._lock = threading.Lock()

    def get(self, path: str, offset: int, nbytes: int) -> bytes | None:
        """The bytes at ``offset``, None if no single cached range has all of them."""
        with self._lock:
            begins = self._begins.get(path, ())
            # The nearest range that begins before may be a short one inside a longer one: look at two.
            last = bisect_right(begins, offset)
            for begin in reversed(begins[max(last - 2, 0) : last]):
                data = self._ranges[path, begin]
                if offset + nbytes <= begin + len(data):
                    self._ranges.move_to_end((path, begin))
                    return data[offset - begin : offset - begin + nbytes]
        return None

    def add(self, path: str, begin: int, data: bytes) -> None:
        """Cache ``data`` from offset ``begin``, unless a longer range from there is cached."""
        with self._lock:
            cached = self._ranges.get((path, begin))
            if len(data) > self.limit or (cached is not None and len(cached) >= len(data)):
                return
            if cached is None:
                insort(self._begins.setdefault(path, []), begin)
            self._ranges[path, begin] = data
            self._ranges.move_to_end((path, begin))
            self._nbytes += len(data) - len(cached or b"")
            while self._nbytes > self.limit:
                (oldest, at), dropped = self._ranges.popitem(last=False)
                self._begins[oldest].remove(at)
                self._nbytes -= len(dropped)


def is_hub(filesystem: AbstractFileSystem) -> bool:
    """Whether it is that of the Hugging Face Hub, whose package need not be there."""
    return type(filesystem).__name__ == "HfFileSystem"


def fetcher(filesystem: AbstractFileSystem, name: str, identity: FileIdentity) -> Fetch:
    """A function that fetches ranges of the object ``name``, which must be in the state ``identity``."""
    asynchronous: AsyncFetch | None = None
    if type(filesystem).__module__.partition(".")[0] == "s3fs":
        asynchronous = _s3_fetch(filesystem, name, identity)
    elif type(filesystem).__name__ == "HTTPFileSystem":
        asynchronous = _http_fetch(filesystem, name, identity)
    if asynchronous is not None:
        from fsspec.asyn import sync

        return partial(sync, filesystem.loop, asynchronous)

    # The Hub's file objects would read 5 MiB ahead of every range.
    options = {"cache_type": "none"} if is_hub(filesystem) else {}

    def fetch(offset: int, buffer: memoryview) -> None:
        for begin in range(0, len(buffer), STEP):
            count = min(STEP, len(buffer) - begin)
            data = filesystem.cat_file(name, start=offset + begin, end=offset + begin + count, **options)
            if len(data) != count:
                raise ShortAnswerError(f"received {len(data)} of {count} bytes")
            buffer[begin : begin + count] = data

    return fetch


def _s3_fetch(filesystem: Any, name: str, identity: FileIdentity) -> AsyncFetch:
    bucket, key, version = filesystem.split_path(name)

    async def fetch(offset: int, buffer: memoryview) -> None:
        answer = await filesystem._call_s3(  # the public call_s3 cannot be awaited
            "get_object",
            Bucket=bucket,
            Key=key,
            Range=f"bytes={offset}-{offset + len(buffer) - 1}",
            **({"VersionId": version} if version else {}),
        )
        body = answer["Body"]
        try:
            content_range = str(answer.get("ContentRange", ""))
            _require_same(identity, f"ETag={answer.get('ETag')}", content_range.rpartition("/")[2])
            # A server may answer a request for all bytes without a range.
            if content_range or len(buffer) != identity.nbytes:
                _require_range(content_range, offset, len(buffer))
            await _fill(buffer, lambda: body.read(1 << 18))
        finally:
            body.close()

    return fetch


def _http_fetch(filesystem: Any, url: str, identity: FileIdentity) -> AsyncFetch:
    async def fetch(offset: int, buffer: memoryview) -> None:
        async with http_get(filesystem, url, offset, len(buffer), expected={200, 206, 416}) as answer:
            if answer.status == 200 and (offset or answer.content_length != len(buffer)):
                raise no_ranges_error(url)  # the whole file; unread, so that the connection is closed
            if answer.status == 416:  # the file has become shorter
                raise changed_error(url, f"shrank from {bytes_text(identity.nbytes)}")
            require_plain(url, answer.headers)
            content_range = answer.headers.get("Content-Range", "")
            _require_same(identity, http_tag(answer.headers), content_range.rpartition("/")[2])
            if answer.status == 206:
                _require_range(content_range, offset, len(buffer))
            await _fill(buffer, answer.content.readany)

    return fetch


async def _fill(buffer: memoryview, read: Callable[[], Awaitable[bytes]]) -> None:
    """Fill ``buffer`` with what ``read`` returns until it returns nothing."""
    done = 0
    while done < len(buffer):
        data = (await read())[: len(buffer) - done]
        if not data:
            raise ShortAnswerError(f"received {done} of {len(buffer)} bytes")
        buffer[done : done + len(data)] = data
        done += len(data)


def _require_same(identity: FileIdentity, tag: str, total: str) -> None:
    """Raises SourceCorruptError if an answer with ``tag`` and length ``total`` is from another state of the file."""
    nbytes = _length(total)
    same_kind = tag.partition("=")[0] == identity.tag.partition("=")[0]
    now = FileIdentity(
        identity.path, identity.nbytes if nbytes is None else nbytes, tag=tag if same_kind else identity.tag
    )
    change = change_between(identity, now)
    if change is not None:
        raise changed_error(identity.path, change)


def _length(text: str) -> int | None:
    return int(text) if text.isdecimal() and len(text) < MAX_DIGITS else None


def _require_range(content_range: str, offset: int, nbytes: int) -> None:
    """Raises ShortAnswerError unless ``content_range``, an answer's Content-Range, is the range requested."""
    expected = f"bytes {offset}-{offset + nbytes - 1}"
    if content_range.partition("/")[0].strip() != expected:
        raise ShortAnswerError(f"received {content_range or 'an answer without a range'} instead of {expected}")


def require_plain(url: str, headers: Any) -> None:
    """Raises SourceUnsupportedError if the body of an answer is a compressed form of the file."""
    encoding = headers.get("Content-Encoding", "identity")
    if encoding.strip().lower() not in ("", "identity"):
        raise SourceUnsupportedError(
            f"{url}: this server compresses what it sends ({encoding}), although it was asked not to",
            file=url,
            why="positions in a compressed file are not positions in the checkpoint",
            next_step=f"switch compression off for these files, or download it first (curl -O --compressed {url})",
        )


def http_identity(url: str, headers: Any) -> FileIdentity | None:
    """The identity of the file in the answer to a range request, None if the answer does not state the length."""
    nbytes = _length(headers.get("Content-Range", "").rpartition("/")[2])
    return None if nbytes is None else FileIdentity(url, nbytes, tag=http_tag(headers))


def http_tag(headers: Any) -> str:
    """What distinguishes states of a file behind HTTP, as ``FileIdentity.tag``."""
    return next((f"{name}={headers[name]}" for name in ("ETag", "Last-Modified") if headers.get(name)), "")


@asynccontextmanager
async def http_get(
    filesystem: Any, url: str, offset: int = 0, nbytes: int = 0, *, expected: Collection[int]
) -> AsyncIterator[Any]:
    """The answer to one GET with the user's own options; for ``nbytes`` of that range, never compressed.

    There is no limit on the whole transfer, but one on every wait within it. Raises FileNotFoundError, HttpStatusError
    for a status that is not ``expected``, and what the session raises.
    """
    from aiohttp import ClientTimeout

    options = {
        "timeout": ClientTimeout(total=None, sock_connect=STALLED, sock_read=STALLED),
        **filesystem.kwargs,
    }
    if nbytes:
        byte_range = {"Range": f"bytes={offset}-{offset + nbytes - 1}", "Accept-Encoding": "identity"}
        options["headers"] = {**filesystem.kwargs.get("headers", {}), **byte_range}
    session = await filesystem.set_session()
    async with session.get(filesystem.encode_url(url), **options) as answer:
        if answer.status not in expected:
            raise (
                FileNotFoundError(url) if answer.status == 404 else HttpStatusError(answer.status, answer.reason or "")
            )
        yield answer


def no_ranges_error(url: str) -> SourceUnsupportedError:
    return SourceUnsupportedError(
        f"{url}: this server sends whole files only (it ignores Range requests)",
        file=url,
        why="a checkpoint is read at many positions, each of which would cost the whole file",
        next_step=f"download it first (curl -O {url}), or serve it from nginx, Apache or an object store",
    )
