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

from fsdpckpt.comm.liveness import Background, wait_for
from fsdpckpt.comm.protocol import ErrorRecord, encode_error
from fsdpckpt.errors import FsdpckptError, InternalError, WorkerError


@dataclass(frozen=True, slots=True)
class Position:
    """Where one rank is. ``sequence``: how many steps it has entered. ``beat`` changes as long as it makes progress.

    ``silence``: for how many seconds beyond the usual limit it announced that it may show no progress.
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
    """Rank ``rank`` failed in ``step``. ``exit_code``: that of a single process with the same cause.

    ``original``: the cause as a record, if the error has one (``protocol.encode_error``).
    """

    rank: int
    step: str
    cause: str
    exit_code: int
    original: ErrorRecord | None = None

    @classmethod
    def of(cls, error: BaseException, rank: int, step: str) -> Failure:
        """The failure of ``rank``, which raised ``error`` in ``step``."""
        return cls(rank, step, _cause_text(error), _exit_code_of(error), encode_error(error))

    def text(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def parse(cls, text: str) -> Failure:
        return cls(**cast("dict[str, int]", json.loads(text)))  # type: ignore[arg-type]  # written by text()

    def error(self) -> WorkerError:
        """The error that every rank raises."""
        error = WorkerError(
            f"worker {self.rank} failed in step '{self.step}': {self.cause}",
            rank=self.rank,
            next_step="find the cause on that rank",
            run_again=True,
        )
        error.step, error.cause, error.cause_exit_code = self.step, self.cause, self.exit_code
        error.original = self.original
        return error


def _cause_text(error: BaseException) -> str:
    """``error`` as the text of a cause: this program's own errors in full, any other with its type."""
    if isinstance(error, FsdpckptError):
        return error.text
    text = str(error)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _exit_code_of(error: BaseException) -> int:
    if isinstance(error, FsdpckptError):
        return error.exit_code
    return 130 if isinstance(error, KeyboardInterrupt) else InternalError.exit_code


STATUS_DIRECTORY = "FSDPCKPT_STATUS_DIRECTORY"
"""Environment variable: where each worker leaves its position for its launcher, in case it is killed."""

SILENCE_LIMIT = (
    0.7  # part of the limit without progress: the rank has failed, and there is time left to tell the others
)
HEARTBEAT_INTERVAL = 0.1  # part of the limit, between two heartbeats, and between two checks of the next rank
GRACE = 0.1  # part of the limit, to wait for another rank's failure that explains a broken connection

T = TypeVar("T")


class StoreMonitor:
    """Rank ``rank`` of ``world_size`` on ``store``, which all ranks share.

    ``limit``: seconds within which every rank learns of a failure. ``store`` must be a part of a store that nobody else
    uses (a ``PrefixStore``): keys are written without a further prefix.
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
        self._heartbeat_at = self._polled_at = self._peer_checked_at = 0.0
        self._peer_position = ""
        self._peer_changed_at = 0.0
        self._store_is_gone = False
        self._call(self._write_heartbeat)

    # steps

    def barrier(self, name: str, digest: str = "", *, place: str | None = None) -> None:
        """Wait until all ranks have entered the step ``name``. ``digest``: must be the same on all ranks.

        ``place``: the step that this rank reports from now on, if not ``name``. Raises WorkerError if a rank is in a
        different step, has a different digest, failed, or makes no progress.
        """
        self.raise_failure()
        self._sequence += 1
        self._step = name if place is None else place
        self._report_position()
        entered = json.dumps([name, digest])
        pinned, opened = self._call(lambda: self._enter(entered))
        if pinned != entered:
            raise self._out_of_step(entered, pinned)
        interval = 0.0005
        while not opened:
            time.sleep(interval)
            interval = min(interval * 1.5, self._most_interval)
            opened = self._call(self._is_open)
            self.check_peers()

    def run_watched(self, call: Callable[[], None]) -> None:
        """Run ``call``, in which this rank may wait for others, while checking the peers."""
        background = Background("fsdpckpt-call")
        try:
            wait_for(background.submit(call), self.check_peers)
        except RuntimeError as error:  # what torch raises when it cannot connect
            raise self.connection_lost(error, None) from error
        background.close(1.0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _enter(self, entered: str) -> tuple[str, bool]:
        key = f"step/{self._sequence}"
        self._write_heartbeat()
        pinned = self._store.compare_set(f"{key}/what", "", entered).decode()
        if pinned == entered and self._store.add(f"{key}/count", 1) == self.world_size:
            self._store.set(f"{key}/open", "1")
            self._forget(self._sequence - 2)  # all ranks have left that one: all have arrived at a later one
            return pinned, True
        return pinned, False

    def _forget(self, sequence: int) -> None:
        if sequence > 0:
            for part in ("what", "count", "open"):
                self._store.delete_key(f"step/{sequence}/{part}")

    def _is_open(self) -> bool:
        return bool(self._store.check([f"step/{self._sequence}/open"]))

    def _out_of_step(self, entered: str, pinned: str) -> WorkerError:
        (name, _), (other, _) = json.loads(entered), json.loads(pinned)
        if name == other:
            return self.fail(self.rank, "it brought different data to this step than the ranks before it", 6)
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

    # heartbeats

    def beat(self) -> None:
        """Report progress. Cheap: it writes at most ten times per limit."""
        self._beat += 1
        if time.monotonic() - self._heartbeat_at > HEARTBEAT_INTERVAL * self.limit:
            self.raise_failure()
            self._call(self._write_heartbeat)
            self._check_failure()

    def allow_silence(self, seconds: float) -> float:
        """Allow this rank ``seconds`` more than usual without progress. Returns what was allowed before."""
        before, self._silence = self._silence, seconds
        self._call(self._write_heartbeat)
        return before

    def check_peers(self, *, alive: bool = True) -> None:
        """To be called while waiting: look for a failure, report progress, watch the next rank.

        ``alive`` False: without reporting progress. Raises WorkerError if a rank failed.
        """
        now = time.monotonic()
        if now - self._polled_at > self._most_interval:
            self._polled_at = now
            self._check_failure()
        if alive and now - self._heartbeat_at > HEARTBEAT_INTERVAL * self.limit:
            self._beat += 1
            self._call(self._write_heartbeat)
        if now - self._peer_checked_at > HEARTBEAT_INTERVAL * self.limit:
            self._watch((self.rank + 1) % self.world_size, now)

    def _watch(self, neighbour: int, now: float) -> None:
        continuous = (
            now - self._peer_checked_at < 4 * HEARTBEAT_INTERVAL * self.limit
        )  # else it may have made progress that this rank did not see
        self._peer_checked_at = now
        text = self._call(lambda: self._position(neighbour))
        if text != self._peer_position or not continuous:
            self._peer_position, self._peer_changed_at = text, now
            return
        silence = Position.parse(text).silence if text else 0.0
        if now - self._peer_changed_at > SILENCE_LIMIT * self.limit + silence:
            raise self._lost_rank_failure(neighbour, text, f"no sign of life for {now - self._peer_changed_at:.0f} s")

    def _lost_rank_failure(self, rank: int, position: str, cause: str) -> WorkerError:
        step = Position.parse(position).step if position else "start"
        return self.fail(rank, cause, WorkerError.exit_code, step=step)

    def _write_heartbeat(self) -> None:
        self._heartbeat_at = time.monotonic()
        position = Position(self._sequence, self._step, self._beat, self._silence)
        self._store.set(f"at/{self.rank}", position.text())

    def _position(self, rank: int) -> str:
        key = f"at/{rank}"
        return str(self._store.get(key).decode()) if self._store.check([key]) else ""

    # failures

    def raise_failure(self) -> None:
        """Raise the failure that this rank knows of, if any."""
        if self.failure is not None:
            raise self.failure.error()

    def fail(self, rank: int, cause: str, exit_code: int, *, step: str | None = None) -> WorkerError:
        """Record the failure of ``rank`` for all, unless one is recorded already; return the error to raise: the
        recorded one.
        """
        return self._pin(Failure(rank, self._step if step is None else step, cause, exit_code))

    def fail_with(self, error: BaseException) -> WorkerError:
        """Record ``error`` as this rank's failure; return the error to raise."""
        return self._pin(Failure.of(error, self.rank, self._step))

    def _pin(self, failure: Failure) -> WorkerError:
        if self.failure is None:
            self.failure = failure  # stays if the store does not answer
            pinned = self._call(lambda: self._store.compare_set("failure", "", failure.text()).decode())
            self.failure = Failure.parse(pinned)
            self._report_failure()
        return self.failure.error()

    def connection_lost(self, error: BaseException, peer: int | None) -> WorkerError:
        """The error to raise when the process group broke: that of the rank that failed first, else of ``peer``, else
        of a silent rank.
        """
        deadline = time.monotonic() + GRACE * self.limit
        while time.monotonic() < deadline:
            try:
                self._check_failure()
            except WorkerError as known:
                return known
            time.sleep(0.02)
        if peer is not None:
            return self._lost_rank_failure(
                peer, self._call(lambda: self._position(peer)), "its connection was closed: it may have ended"
            )
        silent = self._first_silent_rank()
        if silent is not None:
            return self._lost_rank_failure(*silent, "its connections were closed: it may have ended")
        return self.fail_with(error)

    def _first_silent_rank(self) -> tuple[int, str] | None:
        """The first rank without progress, with its last position; None if all make progress."""
        ranks = [rank for rank in range(self.world_size) if rank != self.rank]
        before = self._call(lambda: {rank: self._position(rank) for rank in ranks})
        deadline = time.monotonic() + (SILENCE_LIMIT - GRACE) * self.limit
        silent = set(ranks)
        while silent and time.monotonic() < deadline:
            time.sleep(HEARTBEAT_INTERVAL * self.limit / 2)
            self._beat += 1
            self._call(self._write_heartbeat)
            now = self._call(lambda: {rank: self._position(rank) for rank in ranks})
            silent = {rank for rank in silent if now[rank] == before[rank]}
            if self._call(self._pinned_failure):
                break
        return (min(silent), before[min(silent)]) if silent else None

    def _check_failure(self) -> None:
        if text := self._call(self._pinned_failure):
            self.failure = Failure.parse(text)
            self._report_failure()  # this node's launcher may have no failed worker of its own
            raise self.failure.error()

    def _pinned_failure(self) -> str:
        return str(self._store.get("failure").decode()) if self._store.check(["failure"]) else ""

    # the store, and the launcher

    def _call(self, call: Callable[[], T]) -> T:
        """Run ``call``, which talks to the store, in the background, and wait at most the limit."""
        try:
            return self._control.submit(call).result(self.limit)
        except TimeoutError:
            raise self._store_lost(f"no answer within {self.limit:.0f} s") from None
        except RuntimeError as error:  # what every store of torch raises; its subclasses differ between versions
            raise self._store_lost(str(error).splitlines()[0]) from error

    def _store_lost(self, cause: str) -> WorkerError:
        self._store_is_gone = True
        if self.failure is None:
            by_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
            keeper = "the launcher" if by_agent else "rank 0"
            gone = f"the rendezvous store is gone ({cause}): the process that runs it, {keeper}, ended or hangs"
            self.failure = Failure(self.rank if by_agent else 0, self._step, gone, WorkerError.exit_code)
            self._report_failure()
        return self.failure.error()

    def _report_position(self) -> None:
        self._write_status(f"position-{self.rank}.json", Position(self._sequence, self._step, self._beat, 0.0).text())

    def _report_failure(self) -> None:
        if self.failure is not None:
            self._write_status(f"failure-{self.rank}.json", self.failure.text())

    @staticmethod
    def _write_status(name: str, text: str) -> None:
        directory = os.environ.get(STATUS_DIRECTORY)
        if directory:
            with open(os.path.join(directory, name), "w", encoding="utf-8") as file:
                file.write(text)

    def close(self) -> None:
        """End the background thread. Rank 0 waits until the others have left too: it may serve the store they use.

        After a failure all wait for all: a launcher that sees one worker end kills the others in the middle of their
        clean-up. Waits only briefly if a rank was lost, which may never leave.
        """
        if not self._store_is_gone:
            with suppress(WorkerError):
                self._wait_for_all("left", wait=self.rank == 0 or self.failure is not None)
        self._control.close(0.0 if self._store_is_gone else 1.0)

    def all_stopped(self) -> None:
        """After a failure: wait until every rank has stopped, so that none still uses what is cleaned up next."""
        if not self._store_is_gone:
            with suppress(WorkerError):
                self._wait_for_all("stopped", wait=True)

    def _wait_for_all(self, key: str, *, wait: bool) -> None:
        lost = self.failure is not None and self.failure.exit_code == WorkerError.exit_code
        deadline = time.monotonic() + (GRACE if lost else 1.0) * self.limit
        met = self._call(lambda: self._store.add(key, 1))
        while wait and met < self.world_size and time.monotonic() < deadline:
            time.sleep(self._most_interval)
            met = self._call(lambda: self._store.add(key, 0))
