"""Stops a conversion while its output is uploaded to a store."""

from __future__ import annotations

from fsdpckpt.progress import NoProgress

__all__ = ["StoppedUpload"]


class StoppedUpload(NoProgress):
    def begin(self, stage: str, total: int) -> None:
        self.stage = stage

    def advance(self, nbytes: int) -> None:
        if self.stage == "upload":
            raise KeyboardInterrupt
