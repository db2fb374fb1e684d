"""Progress as a protocol: whatever takes long reports bytes, the command line draws them."""

from __future__ import annotations

from typing import Protocol

__all__ = ["NoProgress", "Progress"]


class Progress(Protocol):
    """Told about one stage at a time, from any thread."""

    def begin(self, stage: str, total_bytes: int) -> None:
        """A stage starts: ``"read"``, ``"copy"``, ``"verify"``, ... ``total_bytes`` 0 when it has no size."""
        ...

    def advance(self, nbytes: int) -> None:
        """``nbytes`` more are done."""
        ...

    def end(self) -> None:
        """The stage is complete."""
        ...


class NoProgress:
    """Says nothing."""

    def begin(self, stage: str, total_bytes: int) -> None:
        del stage, total_bytes

    def advance(self, nbytes: int) -> None:
        del nbytes

    def end(self) -> None:
        return None
