"""A bounded memory of byte ranges that were fetched: small reads near each other cost one request."""

from __future__ import annotations

import threading
from bisect import bisect_right, insort
from collections import OrderedDict

__all__ = ["CACHE_BYTES", "Extents"]

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
