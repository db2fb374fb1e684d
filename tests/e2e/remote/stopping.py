"""Stops a conversion while its output is uploaded to a store."""

from __future__ import annotations

from fsdpckpt.progress import NoProgress

__all__ = ["StoppedUpload"]


class StoppedUpload(NoProgress):
    """``stage``: "upload" of what was staged, "copy" where parts are sent while they are assembled."""

    def __init__(self, stopped: str = "upload") -> None:
        self.stopped = stopped
        self.stage = ""

    def begin(self, stage: str, total: int) -> None:
        self.stage = stage

    def advance(self, nbytes: int) -> None:
        if self.stage == self.stopped:
            raise KeyboardInterrupt
