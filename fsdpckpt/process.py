"""This process: its role among several, what it waits for, and when Python collects its garbage.

A run of many workers prints everything once: rank 0 does, or rank 1 if rank 0 was lost. Imports nothing that takes
time, because every command uses it.
"""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


def started_as_worker() -> bool:
    """Whether torchrun (any elastic launch) or srun started this process as one of its workers.

    The same answer as ``comm.launch.rank_from_environment``, without importing torch.
    """
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        return True
    return "SLURM_STEP_ID" in os.environ and os.environ.get("SLURM_STEP_NUM_TASKS", "1") != "1"


def own_rank() -> int:
    """The rank of this process; 0 if it is not a worker."""
    if not started_as_worker():
        return 0
    text = os.environ.get("RANK" if "RANK" in os.environ else "SLURM_PROCID", "0")
    return int(text) if text.isdigit() else 0


@dataclass(slots=True)
class ProcessRole:
    """``worker``: this process takes part in a run of several. ``speaker``: the rank that prints. ``lost``: its group
    failed, so that it must end without the destructors of torch, which may hang.
    """

    worker: bool = False
    speaker: int = 0
    lost: bool = False

    @property
    def silent(self) -> bool:
        """Whether another process prints for this one."""
        return self.worker and own_rank() != self.speaker


process_role = ProcessRole()
"""This process's role."""


REQUEST_LIMIT = 300.0  # seconds: longer than any client package retries; after it, a request counts as hung


class PendingRequests:
    """``with pending_requests:`` a thread of this process waits for an object store or a web server.

    Workers do not count a rank as lost for that: the store's client gives up by itself. Thread-safe.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._count = 0
        self._last_begun = 0.0

    def __enter__(self) -> None:
        with self._lock:
            self._count += 1
            self._last_begun = time.monotonic()

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._count -= 1

    def __bool__(self) -> bool:
        return self._count > 0 and time.monotonic() - self._last_begun < REQUEST_LIMIT


pending_requests = PendingRequests()
"""True while a thread of this process waits for a store."""


@contextmanager
def without_collection() -> Iterator[None]:
    """Pause the collector while many objects are made: it would walk them repeatedly and make parsing take three times
    as long.

    Afterwards they count as old: as young ones they would all be walked by the next collection.
    """
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            with set_aside():
                gc.enable()


_entered: list[object] = []
"""One entry for each ``set_aside`` that has begun: counting frozen objects walks them all, so only the first counts."""


@contextmanager
def set_aside() -> Iterator[None]:
    """Inside the block, the collector walks only objects made there: for long work while many objects exist."""
    unfreeze = (
        not _entered and not gc.get_freeze_count()
    )  # otherwise other code froze objects, and they must stay frozen
    _entered.append(None)
    gc.freeze()
    try:
        yield
    finally:
        _entered.pop()
        if unfreeze:
            gc.unfreeze()
