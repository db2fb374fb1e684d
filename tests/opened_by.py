"""``Sources`` of files that a test makes itself."""

from __future__ import annotations

from collections.abc import Callable

from fsdpckpt.storage import ByteSource
from fsdpckpt.storage.sources import Sources


class OpenedBy(Sources):
    """Opens a path with a function."""

    def __init__(self, open_path: Callable[[str], ByteSource]) -> None:
        super().__init__()
        self._open_path = open_path

    def open_new(self, path: str) -> ByteSource:
        return self._open_path(path)
