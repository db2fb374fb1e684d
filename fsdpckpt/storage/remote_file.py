"""A file behind fsspec, read by byte ranges: small ones through a memory of what was fetched, each fetch retried."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

from fsdpckpt.storage.extents import Extents
from fsdpckpt.storage.identity import FileIdentity
from fsdpckpt.storage.protocol import ByteSource, ends_too_early
from fsdpckpt.storage.remote_errors import tried
from fsdpckpt.storage.remote_ranges import Fetch

__all__ = ["AHEAD", "REQUEST_COST", "RemoteFile", "prefetch", "request_cost"]

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
