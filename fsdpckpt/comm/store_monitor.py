"""Watches all ranks on a rendezvous store: named steps, heartbeats and the first failure.

Everything here bypasses the process group, because a failed collective takes the group with it. The protocol, with
the ranks that run each part:

1. All ranks enter a step with ``barrier``: each writes its position; the first rank stores the name and the digest of
   the step, the others compare theirs (ranks that are out of step fail here); the last one opens it.
2. Each rank that waits, for a step or for data, calls ``check_peers``: it renews its heartbeat, looks for a failure,
   and watches the next rank of the ring. A rank without a heartbeat for the limit is declared failed by the rank that
   watches it. A rank that works calls ``check_peers`` as it makes progress, so that a long step does not count as a
   hang, nor a hang as a long step.
3. The rank that fails, or notices that another one has, stores the failure. The first failure stored is the one that
   all ranks raise.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from concurrent.futures import wait
from contextlib import suppress
from typing import NamedTuple, TypeVar

from torch._C._distributed_c10d import Store

from fsdpckpt.comm.liveness import Background, wait_for
from fsdpckpt.comm.protocol import ErrorRecord, encode_error
from fsdpckpt.errors import FsdpckptError, InternalError, WorkerError


class Position(NamedTuple):
    """Where one rank is. ``sequence``: how many steps it has entered. ``progress``: a counter of its signs of progress.

    ``silence``: for how many seconds beyond the usual limit it announced that it may show no progress.
    """

    sequence: int
    step: str
    progress: int
    silence: float


class Failure(NamedTuple):
    """Rank ``rank`` failed in ``step``. ``exit_code``: that of a single process with the same cause.

    ``original``: the cause as a record, if the error has one (``protocol.encode_error``). ``stored_by``: the rank that
    says so: another one if the rank that failed was lost, and will never leave.
    """

    rank: int
    step: str
    cause: str
    exit_code: int
    original: ErrorRecord | None = None
    stored_by: int | None = None

    @property
    def _is_retryable(self) -> bool:
        """Whether a rank was lost, or failed for a cause that is retryable itself."""
        if self.original is not None:
            return bool(self.original.get("retryable"))
        return self.exit_code == WorkerError.exit_code

    def error(self) -> WorkerError:
        """The error that every rank raises."""
        error = WorkerError(
            f"worker {self.rank} failed in step '{self.step}': {self.cause}",
            rank=self.rank,
            next_step="find the cause on that rank",
            run_again=True,
            retryable=self._is_retryable,
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

# Parts of the limit:
SILENCE_LIMIT = 0.7  # without progress: the rank has failed, and there is time left to tell the others
HEARTBEAT_INTERVAL = 0.1  # between two heartbeats, and between two checks of the next rank
GRACE = 0.1  # to wait for another rank's failure that explains a broken connection

STORE_POLL = 0.1  # seconds between two looks at whether the store was lost; an answer ends the wait at once

T = TypeVar("T")


class StoreMonitor:
    """Rank ``rank`` of ``world_size`` on ``store``, which all ranks share.

    ``limit``: seconds within which every rank learns of a failure. ``patience``: seconds that a rank may come later
    than another, or show no progress until it calls ``allow_silence``, if that is longer. ``store`` must be a part of a
    store that nobody else uses (a ``PrefixStore``): keys are written without a further prefix.
    """

    def __init__(self, store: Store, rank: int, world_size: int, *, limit: float, patience: float = 0.0) -> None:
        self.rank = rank
        self.world_size = world_size
        self.limit = limit
        self.failure: Failure | None = None
        self._store = store
        self._control = Background("fsdpckpt-control")
        # 1,000 ranks that ask every half second are 2,000 requests a second: a store answers ten times that.
        self._max_interval = 0.02 + 0.0005 * world_size
        self._sequence = 0
        self._step = "start"
        self._progress = 0
        self._absence = self._silence = max(patience - limit, 0.0)
        self._heartbeat_at = self._polled_at = self._peer_checked_at = 0.0
        self._peer_position = ""
        self._peer_changed_at = 0.0
        self._store_is_lost = False
        self._call(self._write_heartbeat)

    # steps

    def barrier(self, name: str, digest: str = "", *, report_as: str | None = None) -> None:
        """Wait until all ranks have entered the step ``name``. ``digest``: must be the same on all ranks.

        ``report_as``: the step that this rank reports from now on, if not ``name``. Raises WorkerError if a rank is in
        a different step, has a different digest, failed, or makes no progress.
        """
        self.raise_failure()
        self._sequence += 1
        self._step = name if report_as is None else report_as
        self._report_position()
        (first_name, first_digest, first_rank), is_open = self._call(lambda: self._enter(name, digest))
        if name != first_name:
            where = f"rank {first_rank} is in '{first_name}' meanwhile"
            raise self.fail(f"the workers are out of step: {where}")
        if digest != first_digest:
            raise self.fail("its input to this step differs from that of the other ranks")
        interval = 0.0005
        while not is_open:
            time.sleep(interval)
            interval = min(interval * 1.5, self._max_interval)
            is_open = self._call(self._is_open)
            self.check_peers()

    def run_watched(self, call: Callable[[], T]) -> T:
        """The result of ``call``, in which this rank may wait for others; checks the peers meanwhile."""
        background = Background("fsdpckpt-call")
        try:
            result = wait_for(background.submit(call), self.check_peers)
        except RuntimeError as error:  # what torch raises when it cannot connect
            raise self.connection_lost(error, None) from error
        background.close(1.0)
        return result

    def _enter(self, name: str, digest: str) -> tuple[tuple[str, str, int], bool]:
        """What the first rank that entered the step has stored, and whether this rank is the last one."""
        key = f"step/{self._sequence}"
        self._write_heartbeat()
        entered = json.dumps([name, digest, self.rank])
        first = json.loads(self._store.compare_set(f"{key}/what", "", entered))
        if [name, digest] != first[:2] or self._store.add(f"{key}/count", 1) < self.world_size:
            return first, False
        self._store.set(f"{key}/open", "1")
        self._forget(self._sequence - 2)  # all ranks have left that one: all have arrived at a later one
        return first, True

    def _forget(self, sequence: int) -> None:
        if sequence > 0:
            for part in ("what", "count", "open"):
                self._store.delete_key(f"step/{sequence}/{part}")

    def _is_open(self) -> bool:
        return bool(self._store.check([f"step/{self._sequence}/open"]))

    # heartbeats

    def allow_silence(self, seconds: float) -> float:
        """Allow this rank ``seconds`` more than usual without progress. Returns what was allowed before."""
        before, self._silence = self._silence, seconds
        self._call(self._write_heartbeat)
        return before

    def check_peers(self, *, progress: bool = True) -> None:
        """Look for a failure, report progress unless ``progress`` is False, and watch the next rank.

        Call it while waiting, and as work proceeds; it asks the store only at intervals. Raises WorkerError if a rank
        failed.
        """
        now = time.monotonic()
        if now - self._polled_at > self._max_interval:
            self._polled_at = now
            self._check_failure()
        if progress and now - self._heartbeat_at > HEARTBEAT_INTERVAL * self.limit:
            self._progress += 1
            self._call(self._write_heartbeat)
        if self.world_size > 1 and now - self._peer_checked_at > HEARTBEAT_INTERVAL * self.limit:
            self._watch((self.rank + 1) % self.world_size, now)

    def _watch(self, peer: int, now: float) -> None:
        # After a longer pause the peer may have made progress that this rank did not see.
        continuous = now - self._peer_checked_at < 4 * HEARTBEAT_INTERVAL * self.limit
        self._peer_checked_at = now
        text = self._call(lambda: self._position(peer))
        if text != self._peer_position or not continuous:
            self._peer_position, self._peer_changed_at = text, now
            return
        allowed = Position(*json.loads(text)).silence if text else self._absence
        silence = now - self._peer_changed_at
        if silence > SILENCE_LIMIT * self.limit + allowed:
            raise self.fail(f"no progress for {silence:.0f} s", rank=peer, position=text)

    def _write_heartbeat(self) -> None:
        self._heartbeat_at = time.monotonic()
        position = Position(self._sequence, self._step, self._progress, self._silence)
        self._store.set(f"at/{self.rank}", json.dumps(position))

    def _position(self, rank: int) -> str:
        """The ``Position`` of ``rank`` as JSON; empty before it has written one."""
        key = f"at/{rank}"
        return str(self._store.get(key).decode()) if self._store.check([key]) else ""

    # failures

    def raise_failure(self) -> None:
        """Raise the failure that this rank knows of, if any."""
        if self.failure is not None:
            raise self.failure.error()

    def fail(self, cause: str, *, rank: int | None = None, position: str = "") -> WorkerError:
        """Store the failure of this rank, or of another ``rank`` that was last at ``position``. Returns the error to
        raise: that of the first failure stored.
        """
        if rank is None:
            rank, step = self.rank, self._step
        else:
            step = Position(*json.loads(position)).step if position else "start"
        return self._store_failure(Failure(rank, step, cause, WorkerError.exit_code, stored_by=self.rank))

    def fail_with(self, error: BaseException) -> WorkerError:
        """Store ``error`` as the failure of this rank. Returns the error to raise, as ``fail``."""
        return self._store_failure(
            Failure(self.rank, self._step, _cause_text(error), _exit_code_of(error), encode_error(error), self.rank)
        )

    def _store_failure(self, failure: Failure) -> WorkerError:
        if self.failure is None:
            self.failure = failure  # stays if the store does not answer
            text = json.dumps(failure)
            self._learn_failure(self._call(lambda: self._store.compare_set("failure", "", text).decode()))
        return self.failure.error()

    def _learn_failure(self, text: str) -> None:
        self.failure = Failure(*json.loads(text))
        self._report_failure()  # this node's launcher may have no failed worker of its own

    def connection_lost(self, error: BaseException, peer: int | None) -> WorkerError:
        """The error to raise when the process group broke: that of the rank that failed first, else of ``peer``, else
        of a silent rank.
        """
        deadline = time.monotonic() + GRACE * self.limit
        while time.monotonic() < deadline:
            try:
                self._check_failure()
            except WorkerError as stored:
                return stored
            time.sleep(0.02)
        if peer is not None:
            position = self._call(lambda: self._position(peer))
            return self.fail("its connection was closed: it may have ended", rank=peer, position=position)
        try:
            silent = self._first_silent_rank()
        except WorkerError as found:
            return found
        if silent is not None:
            return self.fail("its connections were closed: it may have ended", rank=silent[0], position=silent[1])
        return self.fail_with(error)

    def _first_silent_rank(self) -> tuple[int, str] | None:
        """The first rank without progress, with its last position; None if all make progress.

        Raises WorkerError if a rank is known to have failed, or was silent for long before.
        """
        ranks = [rank for rank in range(self.world_size) if rank != self.rank]
        before = self._call(lambda: {rank: self._position(rank) for rank in ranks})
        deadline = time.monotonic() + (SILENCE_LIMIT - GRACE) * self.limit
        silent = set(ranks)
        while silent and time.monotonic() < deadline:
            time.sleep(HEARTBEAT_INTERVAL * self.limit / 2)
            self.check_peers()
            now = self._call(lambda: {rank: self._position(rank) for rank in ranks})
            silent = {rank for rank in silent if now[rank] == before[rank]}
        return (min(silent), before[min(silent)]) if silent else None

    def _check_failure(self) -> None:
        if text := self._call(self._stored_failure):
            self._learn_failure(text)
            self.raise_failure()

    def _stored_failure(self) -> str:
        return str(self._store.get("failure").decode()) if self._store.check(["failure"]) else ""

    # the store, and the launcher

    def _call(self, call: Callable[[], T]) -> T:
        """Run ``call``, which talks to the store, in the background. A store as silent as a lost rank is lost, too."""
        patience = SILENCE_LIMIT * self.limit
        deadline = time.monotonic() + patience
        future = self._control.submit(call)
        try:
            # Several threads of this rank may call: once one of them has waited in vain, none waits any longer.
            while not wait([future], STORE_POLL).done:
                if self._store_is_lost or time.monotonic() > deadline:
                    raise self._store_lost(f"no answer within {patience:.0f} s")
            return future.result()
        except RuntimeError as error:  # what every store of torch raises; its subclasses differ between versions
            raise self._store_lost(str(error).splitlines()[0]) from error

    def _store_lost(self, cause: str) -> WorkerError:
        self._store_is_lost = True
        if self.failure is None:
            by_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
            server = "the launcher" if by_agent else "rank 0"
            lost = f"lost the rendezvous store: {server}, which runs it, ended or hangs ({cause})"
            self.failure = Failure(self.rank if by_agent else 0, self._step, lost, WorkerError.exit_code)
            self._report_failure()
        return self.failure.error()

    def _report_position(self) -> None:
        self._write_status(f"position-{self.rank}.json", Position(self._sequence, self._step, self._progress, 0.0))

    def _report_failure(self) -> None:
        self._write_status(f"failure-{self.rank}.json", self.failure)

    @staticmethod
    def _write_status(name: str, status: Position | Failure | None) -> None:
        """Replace a status file in one step: a worker may be killed at any time. The run goes on without it."""
        directory = os.environ.get(STATUS_DIRECTORY)
        if not directory:
            return
        unfinished = os.path.join(directory, f".{name}")
        with suppress(OSError):
            with open(unfinished, "w", encoding="utf-8") as file:
                json.dump(status, file)
            os.replace(unfinished, os.path.join(directory, name))

    def close(self) -> None:
        """End the background thread. Rank 0 waits until the others have left too: it may serve the store they use.

        After a failure all wait for all: a launcher that sees one worker end kills the others in the middle of their
        clean-up. Waits only briefly if a rank was lost, which may never leave.
        """
        if not self._store_is_lost:
            with suppress(WorkerError):
                self._wait_for_all("departed", wait=self.rank == 0 or self.failure is not None)
        self._control.close(0.0 if self._store_is_lost else 1.0)

    def all_stopped(self) -> None:
        """After a failure: wait until every rank has stopped, so that none still uses what is cleaned up next."""
        if not self._store_is_lost:
            with suppress(WorkerError):
                self._wait_for_all("stopped", wait=True)

    def _wait_for_all(self, key: str, *, wait: bool) -> None:
        failure = self.failure
        brief = failure is not None and failure.exit_code == WorkerError.exit_code
        deadline = time.monotonic() + (GRACE if brief else 1.0) * self.limit
        lost = failure is not None and failure.stored_by not in (None, failure.rank)
        expected = self.world_size - lost  # the rank that was lost does not come
        count = self._call(lambda: self._store.add(key, 1))
        while wait and count < expected and time.monotonic() < deadline:
            time.sleep(self._max_interval)
            count = self._call(lambda: self._store.add(key, 0))
