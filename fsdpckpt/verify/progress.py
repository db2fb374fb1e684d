"""Progress as the verifier reports it: the same three calls as the executor's, which it must not import."""

from __future__ import annotations

from typing import Protocol

__all__ = ["Quiet", "Stages"]


class Stages(Protocol):
    """Told about one stage at a time, from any thread."""

    def begin(self, stage: str, total_bytes: int) -> None: ...

    def advance(self, nbytes: int) -> None: ...

    def end(self) -> None: ...


class Quiet:
    """Says nothing."""

    def begin(self, stage: str, total_bytes: int) -> None:
        del stage, total_bytes

    def advance(self, nbytes: int) -> None:
        del nbytes

    def end(self) -> None:
        return None
