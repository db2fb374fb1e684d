"""This process: its rank and its role among several, what it waits for, and when Python collects its garbage.

torchrun (any elastic launch) sets RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT. srun
sets SLURM_PROCID, SLURM_STEP_NUM_TASKS, SLURM_LOCALID, SLURM_STEP_TASKS_PER_NODE, SLURM_NODEID and SLURM_STEP_NODELIST;
a batch script without srun has some of them, but no SLURM_STEP_ID.

A run of many workers prints everything once: rank 0 does, or rank 1 if rank 0 was lost. Imports nothing that takes
time, because every command uses it.
"""

from __future__ import annotations

import gc
import os
import re
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Literal, TypeAlias

from fsdpckpt.errors import UsageError

FIRST_PORT, PORTS = 20000, 20000  # for srun: all tasks of a step compute the same port in this range from the step's id

Starter: TypeAlias = Literal["torchrun", "srun"]


@dataclass(frozen=True, slots=True)
class RankInfo:
    """This worker's rank, its local rank on its node, and the ``address`` and ``port`` of the rendezvous store."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    address: str
    port: int
    started_by: Starter


def started_as_worker() -> bool:
    """Whether torchrun (any elastic launch) or srun started this process as one of its workers."""
    return _started_by(os.environ) is not None


def own_rank() -> int:
    """The rank of this process; 0 if it is not a worker, or its variables are malformed."""
    started_by = _started_by(os.environ)
    if started_by is None:
        return 0
    text = os.environ.get("RANK" if started_by == "torchrun" else "SLURM_PROCID", "0")
    return int(text) if text.isdigit() else 0


def rank_from_environment(environment: Mapping[str, str] | None = None) -> RankInfo | None:
    """The rank of this process; None when it was started alone.

    Raises UsageError when the environment variables contradict each other.
    """
    variables = os.environ if environment is None else environment
    started_by = _started_by(variables)
    if started_by is None:
        return None
    info = _of_torchrun(variables) if started_by == "torchrun" else _of_srun(variables)
    if not 0 <= info.rank < info.world_size or not 0 <= info.local_rank < info.local_world_size <= info.world_size:
        raise UsageError(
            f"the variables of {started_by} contradict each other",
            expected="0 <= rank < world size, 0 <= local rank < local world size <= world size",
            found=f"{info.rank} of {info.world_size}, {info.local_rank} of {info.local_world_size}",
        )
    return info


def _started_by(variables: Mapping[str, str]) -> Starter | None:
    if "RANK" in variables and "WORLD_SIZE" in variables:
        return "torchrun"
    if "SLURM_STEP_ID" in variables and variables.get("SLURM_STEP_NUM_TASKS", "1") != "1":
        return "srun"
    return None


def _of_torchrun(variables: Mapping[str, str]) -> RankInfo:
    world_size = _number(variables, "WORLD_SIZE")
    return RankInfo(
        rank=_number(variables, "RANK"),
        world_size=world_size,
        local_rank=_number(variables, "LOCAL_RANK", 0 if world_size == 1 else None),
        local_world_size=_number(variables, "LOCAL_WORLD_SIZE", 1 if world_size == 1 else None),
        address=variables.get("MASTER_ADDR", "127.0.0.1"),
        port=_number(variables, "MASTER_PORT"),
        started_by="torchrun",
    )


def _of_srun(variables: Mapping[str, str]) -> RankInfo:
    nodes = variables.get("SLURM_STEP_NODELIST") or variables.get("SLURM_NODELIST", "")
    job = f"{variables.get('SLURM_JOB_ID', '0')}.{variables['SLURM_STEP_ID']}"
    digits = int("".join(re.findall(r"\d", job)) or "0")
    return RankInfo(
        rank=_number(variables, "SLURM_PROCID"),
        world_size=_number(variables, "SLURM_STEP_NUM_TASKS"),
        local_rank=_number(variables, "SLURM_LOCALID"),
        local_world_size=_local_tasks(variables),
        address=variables.get("MASTER_ADDR") or first_host(nodes),
        port=_number(variables, "MASTER_PORT", FIRST_PORT + digits % PORTS),
        started_by="srun",
    )


def _local_tasks(variables: Mapping[str, str]) -> int:
    """This node's number of tasks. SLURM_STEP_TASKS_PER_NODE ``2(x3),1`` is two on each of three nodes, then one."""
    counts: list[int] = []
    for part in variables.get("SLURM_STEP_TASKS_PER_NODE", "").split(","):
        if match := re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip()):
            counts += [int(match[1])] * int(match[2] or 1)
    node = _number(variables, "SLURM_NODEID", 0)
    if node < len(counts):
        return counts[node]
    raise UsageError(
        "srun does not say how many tasks run on this node",
        expected=f"SLURM_STEP_TASKS_PER_NODE with an entry for node {node}",
        found=variables.get("SLURM_STEP_TASKS_PER_NODE", "nothing"),
    )


def first_host(nodes: str) -> str:
    """The first host of a SLURM node list: ``gpu[03-07,9],login`` is ``gpu03``."""
    match = re.match(r"([^\[,]+)(?:\[(\d+)[^\]]*\]([^,\[]*))?", nodes)
    if not match:
        raise UsageError("srun does not name the nodes of this step", next_step="set MASTER_ADDR to the first of them")
    return match[1] + (match[2] or "") + (match[3] or "")


def _number(variables: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = variables.get(name)
    if text is None and default is not None:
        return default
    if text is None or not text.isdigit():
        raise UsageError(f"the environment variable {name} has to be a number", found=text or "nothing")
    return int(text)


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


_MANY_OBJECTS = 500_000


class _Uncollected:
    """How many objects were made while the collector was paused, since the last collection of all.

    They count as old without having been young, and so the collector does not know that there is something to collect.
    Of a program that reads checkpoint after checkpoint, the references in circles of each would stay for ever.
    """

    def __init__(self) -> None:
        self._made = 0
        self._alive = 0  # objects after the last collection: it walks all of them, and must not come too often

    def add(self, count: int) -> None:
        self._made += count

    def collect(self) -> None:
        """Collect all if it may be worth it, by the rule of the collector itself: a quarter more than there are."""
        if self._made < max(_MANY_OBJECTS, self._alive // 4) or _entered:
            return
        gc.collect()
        if gc.get_freeze_count():  # by other code, or by a thread that has begun ``gc_frozen`` meanwhile
            self._made = 0
            return
        gc.freeze()
        self._made, self._alive = 0, gc.get_freeze_count()
        gc.unfreeze()


_uncollected = _Uncollected()


@contextmanager
def gc_paused() -> Iterator[None]:
    """Pause the collector while many objects are made: it would walk them repeatedly and make parsing take three times
    as long.

    Afterwards they count as old: as young ones they would all be walked by the next collection. What has become of
    those of earlier pauses is looked at before.
    """
    collecting = gc.isenabled()
    if collecting:
        _uncollected.collect()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            _uncollected.add(gc.get_count()[0])
            with nullcontext() if _others_froze() else gc_frozen():  # what is frozen now would stay so with theirs
                gc.enable()


_entered: list[object] = []
"""One entry for each ``gc_frozen`` that has begun: counting frozen objects walks them all, so only the first counts."""


def _others_froze() -> bool:
    """Whether other code has frozen objects, which must stay frozen."""
    return not _entered and gc.get_freeze_count() > 0


@contextmanager
def gc_frozen() -> Iterator[None]:
    """Inside the block, the collector walks only objects made there: for long work while many objects exist."""
    unfreeze = not _entered and not _others_froze()
    _entered.append(None)
    gc.freeze()
    try:
        yield
    finally:
        _entered.pop()
        if unfreeze:
            gc.unfreeze()
