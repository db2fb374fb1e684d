"""A file behind fsspec, read by byte ranges: small ones through a memory of what was fetched, each fetch retried."""

from __future__ import annotations

import threading
from bisect import bisect_right, insort
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from fsdpckpt.errors import SourceUnsupportedError
from fsdpckpt.storage.protocols import ByteSource, FileIdentity, change_between, changed_error, too_short_error
from fsdpckpt.storage.retry import ShortAnswerError, Unavailable, tried

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

__all__ = [
    "AHEAD",
    "CACHE_BYTES",
    "Extents",
    "Fetch",
    "REQUEST_COST",
    "RemoteFile",
    "fetcher",
    "http_headers",
    "http_timeout",
    "no_ranges",
    "prefetch",
    "request_cost",
    "require_plain",
]

AHEAD = 128 << 10  # bytes: a small read fetches as many, since metadata lies close together
SMALL = 64 << 10  # bytes: reads up to this go through the memory
NEAR = 16 << 10  # bytes between two announced ranges that are fetched rather than asked around
REQUEST_COST = 256 << 10  # bytes a store sends in the time that another request takes (some 5 ms at 50 MB/s a stream)
REQUESTS = 16  # at a time, of announced ranges: a store answers in tens of milliseconds


class RemoteFile:
    """``identity``: the state of the object that every answer has to be from."""

    def __init__(self, identity: FileIdentity, fetch: Fetch, extents: Extents) -> None:
        self.path = identity.path
        self.nbytes = identity.nbytes
        self.identity = identity
        self._fetch = fetch
        self._extents = extents

    def read(self, offset: int, nbytes: int) -> bytes:
        if nbytes <= SMALL:
            return self._small(offset, nbytes)
        data = bytearray(nbytes)
        self.read_into(offset, memoryview(data))
        return bytes(data)

    def read_into(self, offset: int, buffer: memoryview) -> None:
        self._require(offset, len(buffer))
        if len(buffer) <= SMALL:
            found = self._extents.find(self.path, offset, len(buffer)) if buffer else b""
            if found is not None:
                buffer[:] = found
                return
        tried(lambda: self._fetch(offset, buffer), url=self.path, doing=f"reading {len(buffer)} bytes at {offset}")

    def prefetch(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Fetch the small ranges (offset, nbytes) that will be read next, at once and side by side."""
        spans: list[list[int]] = []
        for offset, nbytes in sorted(ranges):
            end = min(offset + nbytes, self.nbytes)
            if nbytes > SMALL or offset >= end or self._extents.find(self.path, offset, end - offset) is not None:
                continue
            if spans and offset - spans[-1][1] <= NEAR and end - spans[-1][0] <= REQUEST_COST:
                spans[-1][1] = max(spans[-1][1], end)
            else:
                spans.append([offset, end])
        if len(spans) == 1:
            self._hold(*spans[0])
        elif spans:
            with ThreadPoolExecutor(min(REQUESTS, len(spans))) as pool:
                list(pool.map(lambda span: self._hold(*span), spans))

    def close(self) -> None:
        return None

    def _small(self, offset: int, nbytes: int) -> bytes:
        self._require(offset, nbytes)
        if nbytes == 0:
            return b""
        found = self._extents.find(self.path, offset, nbytes)
        if found is not None:
            return found
        # Behind the end there is nothing to fetch ahead: what lies before it is, a zip's directory for one.
        begin = max(min(offset, self.nbytes - AHEAD), 0)
        data = self._hold(begin, min(begin + AHEAD, self.nbytes))
        return data[offset - begin : offset - begin + nbytes]

    def _hold(self, begin: int, end: int) -> bytes:
        data = bytearray(end - begin)
        tried(
            lambda: self._fetch(begin, memoryview(data)), url=self.path, doing=f"reading {end - begin} bytes at {begin}"
        )
        self._extents.add(self.path, begin, bytes(data))
        return bytes(data)

    def _require(self, offset: int, nbytes: int) -> None:
        if offset < 0 or offset + nbytes > self.nbytes:
            raise too_short_error(self.path, offset, nbytes, max(self.nbytes - max(offset, 0), 0))


def prefetch(source: ByteSource, ranges: Iterable[tuple[int, int]]) -> bool:
    """Tell ``source`` which small ranges (offset, nbytes) are read next; True where that brought them nearer."""
    if not isinstance(source, RemoteFile):
        return False
    source.prefetch(ranges)
    return True


def request_cost(source: ByteSource) -> int:
    """How many unwanted bytes cost less than one request more; 0 for a source that has none to spare."""
    return REQUEST_COST if isinstance(source, RemoteFile) else 0


CACHE_BYTES = 16 << 20  # headers and metadata of many files at a time; tensor data does not come here


class Extents:
    """Ranges of many files, at most ``limit`` bytes of them together; the ones used longest ago go first.

    Any thread may call any method.
    """

    def __init__(self, limit: int = CACHE_BYTES) -> None:
        self.limit = limit
        self._held: OrderedDict[tuple[str, int], bytes] = OrderedDict()
        self._begins: dict[str, list[int]] = {}
        self._nbytes = 0
        self._lock = threading.Lock()

    def find(self, path: str, offset: int, nbytes: int) -> bytes | None:
        """The bytes asked for, None when no one range that is held has all of them."""
        with self._lock:
            begins = self._begins.get(path, ())
            # The nearest range that begins before may be a short one inside a longer one: look at two.
            last = bisect_right(begins, offset)
            for begin in reversed(begins[max(last - 2, 0) : last]):
                data = self._held[path, begin]
                if offset + nbytes <= begin + len(data):
                    self._held.move_to_end((path, begin))
                    return data[offset - begin : offset - begin + nbytes]
        return None

    def add(self, path: str, begin: int, data: bytes) -> None:
        """Hold ``data``, found at ``begin``, unless a longer range that begins there is held."""
        with self._lock:
            known = self._held.get((path, begin))
            if len(data) > self.limit or (known is not None and len(known) >= len(data)):
                return
            if known is None:
                insort(self._begins.setdefault(path, []), begin)
            self._held[path, begin] = data
            self._held.move_to_end((path, begin))
            self._nbytes += len(data) - len(known or b"")
            while self._nbytes > self.limit:
                (old, at), dropped = self._held.popitem(last=False)
                self._begins[old].remove(at)
                self._nbytes -= len(dropped)


Fetch = Callable[[int, memoryview], None]
"""(offset, buffer): one attempt to fill the buffer. Raises what the store's package raises, or ShortAnswerError."""

STEP = 4 << 20  # bytes of one request to a store whose answers cannot be streamed into a buffer
MOST_DIGITS = 20  # of a length: Python refuses to read a number of thousands of them
STALLED = 30.0  # seconds without a byte after which a server is asked again


def fetcher(filesystem: AbstractFileSystem, name: str, identity: FileIdentity) -> Fetch:
    """How to fetch ranges of the object ``name``, which has to be what ``identity`` says."""
    kind = type(filesystem).__module__.partition(".")[0]
    if kind == "s3fs":
        return _S3(filesystem, name, identity).fetch
    if type(filesystem).__name__ == "HTTPFileSystem":
        return _Http(filesystem, name, identity).fetch
    return _Other(filesystem, name).fetch


class _Other:
    def __init__(self, filesystem: AbstractFileSystem, name: str) -> None:
        self._filesystem = filesystem
        self._name = name

    def fetch(self, offset: int, buffer: memoryview) -> None:
        for begin in range(0, len(buffer), STEP):
            count = min(STEP, len(buffer) - begin)
            data = self._filesystem.cat_file(self._name, start=offset + begin, end=offset + begin + count)
            if len(data) != count:
                raise ShortAnswerError(f"{len(data)} of {count} bytes came")
            buffer[begin : begin + count] = data


class _S3:
    def __init__(self, filesystem: Any, name: str, identity: FileIdentity) -> None:
        self._filesystem = filesystem
        self._bucket, self._key, self._version = filesystem.split_path(name)
        self._identity = identity

    def fetch(self, offset: int, buffer: memoryview) -> None:
        from fsspec.asyn import sync

        sync(self._filesystem.loop, self._fetch, offset, buffer)

    async def _fetch(self, offset: int, buffer: memoryview) -> None:
        version = {"VersionId": self._version} if self._version else {}
        answer = await self._filesystem._call_s3(  # what s3fs itself calls: the public one cannot be awaited
            "get_object",
            Bucket=self._bucket,
            Key=self._key,
            Range=f"bytes={offset}-{offset + len(buffer) - 1}",
            **version,
        )
        body = answer["Body"]
        try:
            there = str(answer.get("ContentRange", ""))
            _require_same(self._identity, f"ETag={answer.get('ETag')}", there.rpartition("/")[2])
            if there or len(buffer) != self._identity.nbytes:  # a server may answer with all of it, where that is asked
                _require_range(there, offset, len(buffer))
            await _pour(lambda: body.read(1 << 18), buffer)
        finally:
            body.close()


class _Http:
    def __init__(self, filesystem: Any, url: str, identity: FileIdentity) -> None:
        self._filesystem = filesystem
        self._url = url
        self._identity = identity

    def fetch(self, offset: int, buffer: memoryview) -> None:
        from fsspec.asyn import sync

        sync(self._filesystem.loop, self._fetch, offset, buffer)

    async def _fetch(self, offset: int, buffer: memoryview) -> None:
        session = await self._filesystem.set_session()
        options = {"timeout": http_timeout(), **self._filesystem.kwargs}
        options["headers"] = http_headers(self._filesystem, offset, len(buffer))
        async with session.get(self._filesystem.encode_url(self._url), **options) as answer:
            if answer.status == 200:  # the whole file; nobody reads it, so that the connection is closed
                if offset or answer.content_length != len(buffer):
                    raise no_ranges(self._url)
            elif answer.status == 416:  # the file has become shorter than it was
                raise changed_error(self._url, f"shrank from {self._identity.nbytes} bytes")
            elif answer.status != 206:
                if answer.status == 404:
                    raise FileNotFoundError(self._url)
                raise Unavailable(answer.status, answer.reason or "")
            require_plain(self._url, answer.headers)
            there = answer.headers.get("Content-Range", "")
            _require_same(self._identity, http_tag(answer.headers), there.rpartition("/")[2])
            if answer.status == 206:
                _require_range(there, offset, len(buffer))
            await _pour(answer.content.readany, buffer)


async def _pour(more: Callable[[], Awaitable[bytes]], buffer: memoryview) -> None:
    """Fill ``buffer`` with what ``more`` returns until it returns nothing."""
    done = 0
    while done < len(buffer):
        data = (await more())[: len(buffer) - done]
        if not data:
            raise ShortAnswerError(f"{done} of {len(buffer)} bytes came")
        buffer[done : done + len(data)] = data
        done += len(data)


def _require_same(identity: FileIdentity, tag: str, total: str) -> None:
    nbytes = int(total) if total.isdecimal() and len(total) < MOST_DIGITS else identity.nbytes
    same_kind = tag.partition("=")[0] == identity.tag.partition("=")[0]
    now = FileIdentity(identity.path, nbytes, tag=tag if same_kind else identity.tag)
    change = change_between(identity, now)
    if change is not None:
        raise changed_error(identity.path, change)


def _require_range(there: str, offset: int, nbytes: int) -> None:
    """Raises ShortAnswerError unless ``there``, the Content-Range of an answer, is what was asked for."""
    wanted = f"bytes {offset}-{offset + nbytes - 1}"
    if there.partition("/")[0].strip() != wanted:
        raise ShortAnswerError(f"{there or 'bytes of no stated range'} came, not {wanted}")


def require_plain(url: str, headers: Any) -> None:
    """Raises SourceUnsupportedError when the body of an answer is a compressed form of the file."""
    encoding = headers.get("Content-Encoding", "identity")
    if encoding.strip().lower() not in ("", "identity"):
        raise SourceUnsupportedError(
            f"{url}: this server compresses what it sends ({encoding}), although it was asked not to",
            file=url,
            why="positions in a compressed file are none of the checkpoint's",
            next_step=f"switch compression off for these files, or download it first (curl -O --compressed {url})",
        )


def http_tag(headers: Any) -> str:
    """What tells one state of a file behind HTTP from another, in the form of ``FileIdentity.tag``."""
    for name in ("ETag", "Last-Modified"):
        if headers.get(name):
            return f"{name}={headers[name]}"
    return ""


def http_headers(filesystem: Any, offset: int, nbytes: int) -> dict[str, str]:
    """Those of the user, and the range; the bytes themselves, not a compressed form of them."""
    headers = dict(filesystem.kwargs.get("headers", {}))
    return {**headers, "Range": f"bytes={offset}-{offset + nbytes - 1}", "Accept-Encoding": "identity"}


def http_timeout() -> Any:
    """No limit on a whole transfer, one on every wait within it."""
    from aiohttp import ClientTimeout

    return ClientTimeout(total=None, sock_connect=STALLED, sock_read=STALLED)


def no_ranges(url: str) -> SourceUnsupportedError:
    return SourceUnsupportedError(
        f"{url}: this server sends whole files only (it ignores Range requests)",
        file=url,
        why="a checkpoint is read at many places, each of which would cost the whole file",
        next_step=f"download it first (curl -O {url}), or serve it from nginx, Apache or an object store",
    )
