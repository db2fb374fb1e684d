"""A file behind fsspec, read by byte ranges: small ones through a memory of what was fetched, each fetch retried."""

from __future__ import annotations

import threading
from bisect import bisect_right, insort
from collections import OrderedDict
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

from fsdpckpt.storage.identity import FileIdentity
from fsdpckpt.storage.protocol import ByteSource, ends_too_early
from fsdpckpt.storage.remote.errors import tried
from fsdpckpt.storage.remote.ranges import Fetch

__all__ = ["AHEAD", "CACHE_BYTES", "Extents", "REQUEST_COST", "RemoteFile", "prefetch", "request_cost"]

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
            raise ends_too_early(self.path, offset, nbytes, max(self.nbytes - max(offset, 0), 0))


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
