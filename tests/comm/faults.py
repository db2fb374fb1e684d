"""Workers of which one goes wrong: ``python -m tests.comm.faults OUT`` plays all ``SCENARIOS`` into OUT/results.json.

Each worker ends with exit code 6 and says ``rank|seconds|failed rank|step|cause`` when it knows of the failure. Under a
launcher, ``python -m tests.comm.faults PLACE TROUBLE`` is one worker.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from fsdpckpt import comm
from fsdpckpt.comm.torch_group import START_PATIENCE
from fsdpckpt.errors import WorkerError
from tests.comm.forked_workers import forked_workers
from tests.oracle.process import quiet_worker

LIMIT = 4.0
BYTES = 3_000_000
CULPRIT = 1


def _reading(group: comm.Group, trouble: Callable[[], None]) -> Callable[[int, int, torch.Tensor], None]:
    """Small chunks, in the middle of which the culprit's own trouble comes."""

    def read(_: int, offset: int, buffer: torch.Tensor) -> None:
        buffer.fill_(offset % 251)
        if group.rank == CULPRIT and offset > BYTES // 2:
            trouble()

    return read


def moving(group: comm.Group, trouble: Callable[[], None]) -> None:
    read, every = _reading(group, trouble), dict.fromkeys(range(group.world_size), BYTES)
    comm.exchange(group, sends=every, receives=every, read=read, write=lambda *_: None, budget=1 << 16, name="move")


def spreading(group: comm.Group, trouble: Callable[[], None]) -> None:
    """The same for a broadcast of everyone's bytes."""
    read, sizes = _reading(group, trouble), [BYTES] * group.world_size
    comm.spread(group, sizes=sizes, read=read, write=lambda *_: None, budget=1 << 16, name="move")


def fail() -> None:
    raise OSError("the disk is gone")


def between(group: comm.Group, trouble: Callable[[], None]) -> None:
    with group.step("first"):
        pass
    if group.rank == CULPRIT:
        trouble()
    with group.step("second"):
        pass


def inside(group: comm.Group, trouble: Callable[[], None]) -> None:
    with group.step("outer"), group.step("inner"):
        if group.rank == CULPRIT:
            trouble()


def elsewhere(group: comm.Group, _: Callable[[], None]) -> None:
    with group.step("here" if group.rank != CULPRIT else "there"):
        pass


def slowly(group: comm.Group, _: Callable[[], None]) -> None:
    """Slower than the limit, and well: it says so."""
    with group.step("slow"):
        if group.rank == CULPRIT:
            for _ in range(8):
                time.sleep(LIMIT / 8)
                group.beat()
            with group.silent_for(60):
                time.sleep(LIMIT)
    if group.rank == 0:
        print("done", flush=True)


PLACES = {f.__name__: f for f in (moving, spreading, between, inside, elsewhere, slowly)}
TROUBLES: dict[str, Callable[[], None]] = {
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "hang": lambda: time.sleep(60),
    "fail": fail,
    "nothing": lambda: None,
}
SCENARIOS = (
    *((place, "fail") for place in ("inside", "moving", "spreading", "elsewhere", "slowly")),
    *((place, "kill") for place in ("between", "moving", "spreading")),
    ("absent", "nothing"),
    ("between", "hang"),
    ("moving", "hang"),
    ("spreading", "stop"),
)
AT_ONCE = 3


def work(place: str, trouble: str, said: list[str]) -> int:
    """One worker; its exit code. What it has to say goes to ``said``."""
    if place == "absent" and os.environ["RANK"] == str(CULPRIT):
        return 0
    started = time.monotonic()
    try:
        patience = LIMIT if place == "absent" else START_PATIENCE
        with comm.TorchGroup.start(device="cpu", limit=LIMIT, patience=patience) as group:
            started = time.monotonic()
            PLACES[place](group, TROUBLES[trouble])
    except WorkerError as error:
        seconds = time.monotonic() - started
        cause = (error.cause or "").splitlines()[0]
        said.append(f"{os.environ['RANK']}|{seconds:.1f}|{error.rank}|{error.step}|{cause}")
        return error.exit_code
    return 0


def play(place: str, trouble: str, out: str) -> dict[str, object]:
    """The scenario with three workers and no launcher: ``{"codes": [...], "said": [...]}``, by rank."""

    def body(rank: int) -> int:
        said: list[str] = []
        code = work(place, trouble, said)
        with open(os.path.join(out, f"{place}-{trouble}-{rank}"), "w") as file:
            file.write("".join(said))
        return code

    unattended = {CULPRIT} if trouble in {"hang", "stop"} else set()
    codes = forked_workers(3, body, limit=40, unattended=unattended)
    paths = [Path(out, f"{place}-{trouble}-{rank}") for rank in range(3)]
    return {"codes": codes, "said": [path.read_text() if path.exists() else "" for path in paths]}


def main(arguments: list[str]) -> int:
    if os.environ.get("RANK") is not None:  # started by a launcher
        quiet_worker(limit=60)
        said: list[str] = []
        code = work(arguments[0], arguments[1], said)
        os._exit(code)
    (out,) = arguments
    parts = [f"part-{number}.json" for number in range(AT_ONCE)]
    for number, part in enumerate(parts):  # most of a scenario is waiting
        if not os.fork():
            results = {f"{place}-{trouble}": play(place, trouble, out) for place, trouble in SCENARIOS[number::AT_ONCE]}
            Path(out, part).write_text(json.dumps(results))
            os._exit(0)
    failed = [status for _, status in (os.wait() for _ in parts) if status]
    results = {name: one for part in parts for name, one in json.loads(Path(out, part).read_text()).items()}
    Path(out, "results.json").write_text(json.dumps(results))
    return len(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
