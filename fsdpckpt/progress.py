"""Defines the Progress protocol: whatever takes long reports bytes, and the command line draws them."""

from __future__ import annotations

from typing import Protocol

__all__ = ["NoProgress", "Progress"]


class Progress(Protocol):
    """Gets the progress of one stage at a time, from any thread."""

    def begin(self, stage: str, total_bytes: int) -> None:
        """A stage starts: ``"read"``, ``"copy"``, ``"verify"``, ... ``total_bytes`` 0 when it has no size."""
        ...

    def advance(self, nbytes: int) -> None:
        """``nbytes`` more bytes are done."""
        ...

    def end(self) -> None:
        """The stage is complete."""
        ...


class NoProgress:
    """Ignores all progress."""

    def begin(self, stage: str, total_bytes: int) -> None:
        del stage, total_bytes

    def advance(self, nbytes: int) -> None:
        del nbytes

    def end(self) -> None:
        return None
