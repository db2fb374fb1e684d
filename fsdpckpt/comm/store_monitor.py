"""Watches all ranks on a rendezvous store: named steps, heartbeats and the first failure.

Everything here goes past the process group, because a failed collective takes the group with it. The protocol, with
the ranks that run each part:

1. All ranks enter a step with ``barrier``: each writes its position; the first one pins name and digest of the step,
   the others compare theirs (ranks out of step fail here); the last one opens it.
2. Each rank that waits, for a step or for data, calls ``check_peers``: it renews its heartbeat, looks for a failure,
   and watches the next rank of the ring. A rank without a heartbeat for the limit is declared failed by its watcher. A
   rank that works calls ``beat`` as it makes progress, so that a long step is no hang and a hang is no long step.
3. The rank that fails, or finds another failed, pins the failure; the first one pinned stands. All raise that one.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Self, TypeVar, cast

from torch._C._distributed_c10d import Store

from fsdpckpt.comm.liveness import Background, Job
from fsdpckpt.comm.protocol import ErrorRecord, encode_error
from fsdpckpt.errors import FsdpckptError, InternalError, WorkerError

__all__ = ["Board", "Failure", "LOOK", "Position", "STATUS_DIRECTORY"]


@dataclass(frozen=True, slots=True)
class Position:
    """Where one worker is. ``sequence``: steps it has entered. ``beat`` changes as long as it lives and moves.

    ``silence``: seconds for which it may stay without a change beyond the usual limit, because it said so.
    """

    sequence: int
    step: str
    beat: int
    silence: float

    def text(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def parse(cls, text: str) -> Position:
        return cls(**cast("dict[str, int]", json.loads(text)))  # type: ignore[arg-type]  # written by text()


@dataclass(frozen=True, slots=True)
class Failure:
    """Worker ``rank`` failed in ``step``. ``exit_code``: what the cause would have ended a lone process with.

    ``original``: the cause as a record, where it is an error that a lone process would end with.
    """

    rank: int
    step: str
    cause: str
    exit_code: int
    original: ErrorRecord | None = None

    @classmethod
    def of(cls, error: BaseException, rank: int, step: str) -> Failure:
        """The failure of ``rank``, which raised ``error`` in ``step``."""
        return cls(rank, step, _words_of(error), _exit_code_of(error), encode_error(error))

    def text(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def parse(cls, text: str) -> Failure:
        return cls(**cast("dict[str, int]", json.loads(text)))  # type: ignore[arg-type]  # written by text()

    def error(self) -> WorkerError:
        """The one error that every worker raises."""
        error = WorkerError(
            f"worker {self.rank} failed in step '{self.step}': {self.cause}",
            rank=self.rank,
            next_step="find the cause on that rank",
            run_again=True,
        )
        error.step, error.cause, error.cause_exit_code = self.step, self.cause, self.exit_code
        error.original = self.original
        return error


def _words_of(error: BaseException) -> str:
    """An exception as the cause in a failure: our own in full, any other with its type."""
    if isinstance(error, FsdpckptError):
        return str(error)
    text = str(error)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _exit_code_of(error: BaseException) -> int:
    if isinstance(error, FsdpckptError):
        return error.exit_code
    return 130 if isinstance(error, KeyboardInterrupt) else InternalError.exit_code


LOOK = 0.05
"""Seconds between two patrols of a rank that waits for something else than a step; its coming ends the wait at once."""

STATUS_DIRECTORY = "FSDPCKPT_STATUS_DIRECTORY"
"""Environment variable: where a launcher wants each worker to leave its position, for the day it is killed."""

SILENT = 0.7  # of the limit without a sign, and a rank is declared failed: time is left to tell the others
SIGN = 0.1  # of the limit between two signs of life, and between two looks at a neighbour
GRACE = 0.1  # of the limit to see whether a broken connection is explained by another rank's failure

T = TypeVar("T")


class Board:
    """Rank ``rank`` of ``world_size`` on ``store``, which all ranks share. ``limit``: seconds until a fault is known.

    ``store`` must be the ranks' own part of a store (a ``PrefixStore``): this writes keys without further prefix.
    """

    def __init__(self, store: Store, rank: int, world_size: int, *, limit: float) -> None:
        self.rank = rank
        self.world_size = world_size
        self.limit = limit
        self.failure: Failure | None = None
        self._store = store
        self._control = Background("fsdpckpt-control")
        # 1,000 ranks that ask every half second are 2,000 requests a second: a store answers ten times that.
        self._most_interval = 0.02 + 0.0005 * world_size
        self._sequence = 0
        self._step = "start"
        self._beat = 0
        self._silence = 0.0
        self._signed = self._polled = self._looked = 0.0
        self._seen = ""
        self._changed = 0.0
        self._store_is_gone = False
        self._call(self._sign)

    # steps

    def arrive(self, name: str, digest: str = "", *, place: str | None = None) -> None:
        """Enter the step ``name`` together with all ranks. ``digest``: what else all have to agree on.

        ``place``: where this rank says it is from now on, if not in ``name``.

        Raises WorkerError when a rank is elsewhere, brought another digest, failed, or gives no sign of life.
        """
        self.raise_failure()
        self._sequence += 1
        self._step = name if place is None else place
        self._leave_position()
        mine = json.dumps([name, digest])
        pinned, opened = self._call(lambda: self._enter(mine))
        if pinned != mine:
            raise self._out_of_step(mine, pinned)
        interval = 0.0005
        while not opened:
            time.sleep(interval)
            interval = min(interval * 1.5, self._most_interval)
            opened = self._call(self._is_open)
            self.patrol()

    def attend(self, call: Callable[[], None]) -> None:
        """Make ``call``, in which this rank may wait for others, and patrol meanwhile."""
        background = Background("fsdpckpt-call")
        job = background.submit(call)
        while not job.done.wait(LOOK):
            self.patrol()
        background.close(1.0)
        try:
            job.result()
        except RuntimeError as error:  # what torch raises when it cannot connect
            raise self.connection_lost(error, None) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _enter(self, mine: str) -> tuple[str, bool]:
        key = f"step/{self._sequence}"
        self._sign()
        pinned = self._store.compare_set(f"{key}/what", "", mine).decode()
        if pinned == mine and self._store.add(f"{key}/count", 1) == self.world_size:
            self._store.set(f"{key}/open", "1")
            self._forget(self._sequence - 2)  # everybody has left that one: all have arrived at a later one
            return pinned, True
        return pinned, False

    def _forget(self, sequence: int) -> None:
        if sequence > 0:
            for part in ("what", "count", "open"):
                self._store.delete_key(f"step/{sequence}/{part}")

    def _is_open(self) -> bool:
        return bool(self._store.check([f"step/{self._sequence}/open"]))

    def _out_of_step(self, mine: str, pinned: str) -> WorkerError:
        (name, _), (other, _) = json.loads(mine), json.loads(pinned)
        if name == other:
            return self.fail(self.rank, "it brought something else to this step than the ranks before it", 6)
        elsewhere = self._call(self._ranks_elsewhere)
        where = f"rank {elsewhere[0]} is" if elsewhere else "others are"
        return self.fail(self.rank, f"the workers are out of step: {where} in '{other}' meanwhile", 6)

    def _ranks_elsewhere(self) -> list[int]:
        now = {rank: self._position(rank) for rank in range(self.world_size) if rank != self.rank}
        return [
            rank
            for rank, text in now.items()
            if text and (at := Position.parse(text)).sequence >= self._sequence and at.step != self._step
        ]

    # signs of life

    def beat(self) -> None:
        """Say that this rank moves. Cheap: it writes at most ten times in the limit."""
        self._beat += 1
        if time.monotonic() - self._signed > SIGN * self.limit:
            self.raise_failure()
            self._call(self._sign)
            self._look_for_failure()

    def allow_silence(self, seconds: float) -> float:
        """This rank may give no sign for ``seconds`` more than usual. Returns what was allowed before."""
        before, self._silence = self._silence, seconds
        self._call(self._sign)
        return before

    def patrol(self, *, alive: bool = True) -> None:
        """What a rank does while it waits. Raises WorkerError when a failure is known or found.

        ``alive`` False: it looks after the others, and gives no sign of life itself.
        """
        now = time.monotonic()
        if now - self._polled > self._most_interval:
            self._polled = now
            self._look_for_failure()
        if alive and now - self._signed > SIGN * self.limit:
            self._beat += 1
            self._call(self._sign)
        if now - self._looked > SIGN * self.limit:
            self._watch((self.rank + 1) % self.world_size, now)

    def _watch(self, neighbour: int, now: float) -> None:
        continuous = now - self._looked < 4 * SIGN * self.limit  # else it may have moved while nobody looked
        self._looked = now
        text = self._call(lambda: self._position(neighbour))
        if text != self._seen or not continuous:
            self._seen, self._changed = text, now
            return
        silence = Position.parse(text).silence if text else 0.0
        if now - self._changed > SILENT * self.limit + silence:
            raise self._lost(neighbour, text, f"no sign of life for {now - self._changed:.0f} s")

    def _lost(self, rank: int, position: str, cause: str) -> WorkerError:
        step = Position.parse(position).step if position else "start"
        return self.fail(rank, cause, WorkerError.exit_code, step=step)

    def _sign(self) -> None:
        self._signed = time.monotonic()
        position = Position(self._sequence, self._step, self._beat, self._silence)
        self._store.set(f"at/{self.rank}", position.text())

    def _position(self, rank: int) -> str:
        key = f"at/{rank}"
        return str(self._store.get(key).decode()) if self._store.check([key]) else ""

    # failures

    def raise_failure(self) -> None:
        """Raise the failure that is known here already."""
        if self.failure is not None:
            raise self.failure.error()

    def fail(self, rank: int, cause: str, exit_code: int, *, step: str | None = None) -> WorkerError:
        """Pin the failure of ``rank``, unless one is pinned already; returns the error to raise: the pinned one."""
        return self._pin(Failure(rank, self._step if step is None else step, cause, exit_code))

    def fail_with(self, error: BaseException) -> WorkerError:
        """Pin ``error`` as this rank's failure; returns the error to raise."""
        return self._pin(Failure.of(error, self.rank, self._step))

    def _pin(self, failure: Failure) -> WorkerError:
        if self.failure is None:
            self.failure = failure  # stands if the store cannot be asked
            pinned = self._call(lambda: self._store.compare_set("failure", "", failure.text()).decode())
            self.failure = Failure.parse(pinned)
            self._leave_failure()
        return self.failure.error()

    def connection_lost(self, error: BaseException, peer: int | None) -> WorkerError:
        """The error to raise when the process group broke: whoever failed first, then ``peer``, then who is silent."""
        deadline = time.monotonic() + GRACE * self.limit
        while time.monotonic() < deadline:
            try:
                self._look_for_failure()
            except WorkerError as known:
                return known
            time.sleep(0.02)
        if peer is not None:
            return self._lost(peer, self._call(lambda: self._position(peer)), "its connection broke: did it end?")
        silent = self._roll_call()
        if silent is not None:
            return self._lost(*silent, "its connections broke: did it end?")
        return self.fail_with(error)

    def _roll_call(self) -> tuple[int, str] | None:
        """The first rank that gives no sign of life, with its last one; None when all do."""
        ranks = [rank for rank in range(self.world_size) if rank != self.rank]
        before = self._call(lambda: {rank: self._position(rank) for rank in ranks})
        deadline = time.monotonic() + (SILENT - GRACE) * self.limit
        silent = set(ranks)
        while silent and time.monotonic() < deadline:
            time.sleep(SIGN * self.limit / 2)
            self._beat += 1
            self._call(self._sign)
            now = self._call(lambda: {rank: self._position(rank) for rank in ranks})
            silent = {rank for rank in silent if now[rank] == before[rank]}
            if self._call(self._pinned_failure):
                break
        return (min(silent), before[min(silent)]) if silent else None

    def _look_for_failure(self) -> None:
        if text := self._call(self._pinned_failure):
            self.failure = Failure.parse(text)
            self._leave_failure()  # the launcher of this node may have no worker that failed itself
            raise self.failure.error()

    def _pinned_failure(self) -> str:
        return str(self._store.get("failure").decode()) if self._store.check(["failure"]) else ""

    # the store, and the launcher

    def _call(self, call: Callable[[], T]) -> T:
        """``call``, which talks to the store, made in the background with the limit."""
        job: Job[T] = self._control.submit(call)
        if not job.done.wait(self.limit):
            raise self._without_store(f"no answer within {self.limit:.0f} s")
        try:
            return job.result()
        except RuntimeError as error:  # what every store of torch raises; its subclasses differ between versions
            raise self._without_store(str(error).splitlines()[0]) from error

    def _without_store(self, cause: str) -> WorkerError:
        self._store_is_gone = True
        if self.failure is None:
            by_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
            keeper = "the launcher" if by_agent else "rank 0"
            gone = f"the rendezvous store is gone ({cause}): the process that keeps it, {keeper}, ended or hangs"
            self.failure = Failure(self.rank if by_agent else 0, self._step, gone, WorkerError.exit_code)
            self._leave_failure()
        return self.failure.error()

    def _leave_position(self) -> None:
        self._leave(f"position-{self.rank}.json", Position(self._sequence, self._step, self._beat, 0.0).text())

    def _leave_failure(self) -> None:
        if self.failure is not None:
            self._leave(f"failure-{self.rank}.json", self.failure.text())

    @staticmethod
    def _leave(name: str, text: str) -> None:
        directory = os.environ.get(STATUS_DIRECTORY)
        if directory:
            with open(os.path.join(directory, name), "w", encoding="utf-8") as file:
                file.write(text)

    def close(self) -> None:
        """End the background thread. Rank 0 stays until the others have left too: it may keep the store they ask.

        After a failure all stay until all have left: a launcher that sees one end kills the others, in the middle of
        what they tidy up. It is a moment only when a rank was lost, since not all may be there to leave.
        """
        if not self._store_is_gone:
            with suppress(WorkerError):
                self._meet_at_the_end("left", wait=self.rank == 0 or self.failure is not None)
        self._control.close(0.0 if self._store_is_gone else 1.0)

    def all_stopped(self) -> None:
        """After a failure: wait until it stopped every rank, so that none works any more on what is tidied up now."""
        if not self._store_is_gone:
            with suppress(WorkerError):
                self._meet_at_the_end("stopped", wait=True)

    def _meet_at_the_end(self, key: str, *, wait: bool) -> None:
        lost = self.failure is not None and self.failure.exit_code == WorkerError.exit_code
        deadline = time.monotonic() + (GRACE if lost else 1.0) * self.limit
        met = self._call(lambda: self._store.add(key, 1))
        while wait and met < self.world_size and time.monotonic() < deadline:
            time.sleep(self._most_interval)
            met = self._call(lambda: self._store.add(key, 0))
