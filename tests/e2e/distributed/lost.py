"""Conversions of which one worker is lost in one step: ``scripts/lost_test`` plays all of ``LOST``.

Every worker is a process of its own on a machine of its own: none sees another's files, so that headers and tensors
travel. A worker is lost by one of ``TROUBLES``; what the others then do goes into OUT/results.json.
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any, NamedTuple

from tests.e2e.distributed import processes
from tests.oracle.forked import Program
from tests.oracle.ranks import free_port

__all__ = ["LOST", "STEPS", "TROUBLES", "Lost", "make", "play", "unkept"]

TROUBLES = ("kill", "stop", "cut off", "unreachable")

PLAN, SERVE = "fsdpckpt.converters.pipeline:prepare,1", "fsdpckpt.converters.union_sources:answers_to,3"
STEPS: dict[str, tuple[str, str]] = {
    "read and plan": (PLAN, SERVE),
    "read back": ("fsdpckpt.execute.output:Output.read_back,1", "fsdpckpt.execute.run:_Run.read_back,1"),
    "copy": ("fsdpckpt.execute.output:write_window,3",) * 2,
    "exchange": ("fsdpckpt.execute.send_recv:TransferRun._read,2",) * 2,
    "finish": ("fsdpckpt.execute.run:_Run.finish,1",) * 2,
    "verify": ("fsdpckpt.converters.check:first_difference,1", "fsdpckpt.converters.check:OutputCheck.run,1"),
    "publish": ("fsdpckpt.converters.pipeline:_Conversion._publish,1",) * 2,
}
"""Where rank 0 and where any other rank gets lost in each step: a function, and which of its calls."""


class Lost(NamedTuple):
    """``rank`` of ``workers`` gets lost in ``step``."""

    step: str
    trouble: str
    rank: int
    workers: int

    @property
    def name(self) -> str:
        return f"{self.step}, {self.trouble}, rank {self.rank} of {self.workers}"

    @property
    def directory(self) -> str:
        return self.name.replace(",", "").replace(" ", "-")


LOST = [
    Lost(step, trouble, rank, workers)
    for workers in (2, 3)
    for step in STEPS
    for trouble in TROUBLES
    for rank in range(workers)
]


def make(base: Path) -> None:
    """The source, dealt out to the disks of 2 and of 3 workers, and what an interrupted run left of each."""
    import torch

    from fsdpckpt.api import convert

    generator = torch.Generator().manual_seed(1)
    model = {f"layers.{n}.weight": torch.randn(130, 257 + n, generator=generator) for n in range(6)}
    base.mkdir(parents=True, exist_ok=True)
    torch.save(model, base / "full.pt")
    convert(base / "full.pt", base / "ranks", to="sharded", container="torch", world_size=6, buffers="none")
    for workers in (2, 3):
        for number, path in enumerate(sorted((base / "ranks").glob("*.pt"))):
            disk = base / f"disks-{workers}" / str((number + 1) % workers)
            disk.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, disk / path.name)
        out = base / f"interrupted-{workers}"
        played = play(base, Lost("copy", "kill", 1, workers), out, limit=3.0, after=6, journal=True)
        if not any(path.name.startswith(".out") for path in (out / "target").iterdir()):
            raise AssertionError(f"the run that was to be interrupted left nothing: {played}")


def play(
    base: Path,
    lost: Lost,
    out: Path,
    *,
    limit: float,
    after: int | None = None,
    journal: bool = False,
    device: str = "cpu",
) -> dict[str, Any]:
    """``codes``, ``seconds`` from the loss to its end and ``failures`` (as each one knows it) of every worker.

    ``limit``: within which all others are to end. ``after``: lost in this call instead. ``journal``: every window is
    in the journal at once.
    """
    target, status = out / "target", out / "status"
    status.mkdir(parents=True, exist_ok=True)
    if lost.step == "read back":
        shutil.copytree(base / f"interrupted-{lost.workers}" / "target", target, symlinks=True)
    target.mkdir(exist_ok=True)
    place = STEPS[lost.step][lost.rank > 0]
    if after is not None:
        place = f"{place.partition(',')[0]},{after}"
    function, _, call = place.partition(",")
    port = str(free_port())
    command = ["-m", "fsdpckpt", "convert", str(base / "ranks"), str(target / "out"), "--to", "sharded"]
    command += ["--container", "torch", "--world-size", "3", "--max-memory", "1MiB", "--threads", "2", "--quiet"]
    command += ["--fault-limit", str(limit), "--verify", "full", "--launcher", "torchrun", "--device", device]
    started = []
    for rank in range(lost.workers):
        environment = {
            **processes.place(rank, lost.workers, port),
            **processes.trouble(lost.rank, function, lost.trouble, out / "when", int(call)),
            "FSDPCKPT_STATUS_DIRECTORY": str(status),
            "TORCH_CPP_LOG_LEVEL": "FATAL",
        }
        if device == "cuda":  # several machines of one GPU each, as far as NCCL can tell
            environment |= {"NCCL_HOSTID": f"node{rank}", "NCCL_SOCKET_IFNAME": "lo", "NCCL_NET": "Socket"}
        if journal:
            environment["SYNC_SECONDS"] = "0"
        disk = {str(base / "ranks"): str(base / f"disks-{lost.workers}" / str(rank))}
        with open(out / f"said-{rank}", "wb") as said:
            streams = {"stdout": said.fileno(), "stderr": said.fileno()}
            started.append(processes.on_machine(disk, *command, variables=environment, cwd=str(out), **streams))
    ended = _ends(started, lost, limit)
    when = float((out / "when").read_text()) if (out / "when").exists() else None
    failures = [_read(status / f"failure-{rank}.json") for rank in range(lost.workers)]
    seconds = [round(end - when, 2) if when is not None and end is not None else None for end in ended]
    return {"codes": [each.returncode for each in started], "seconds": seconds, "failures": failures}


def _ends(started: list[Program], lost: Lost, limit: float) -> list[float | None]:
    """When each worker ended, None for one that had to be killed. A worker that is stopped is not waited for."""
    ends: list[float | None] = [None] * len(started)
    deadline = time.time() + 60 + 2 * limit
    try:
        while time.time() < deadline:
            for rank, process in enumerate(started):
                if ends[rank] is None and process.poll() is not None:
                    ends[rank] = time.time()
            waited_for = (rank for rank in range(len(started)) if (lost.trouble, lost.rank) != ("stop", rank))
            if all(ends[rank] is not None for rank in waited_for):
                break
            time.sleep(0.02)
    finally:
        for process in started:
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)
                process.wait(10)
    return ends


def _read(path: Path) -> Any:
    return json.loads(path.read_text()) if path.exists() else None


def unkept(lost: Lost, ended: dict[str, Any], limit: float) -> list[str]:
    """What of the promise was not kept: every other worker ends within ``limit`` seconds with exit code 6 and names
    the worker that was lost; one that is only cut off ends by itself, too.
    """
    wrong = []
    for rank in range(lost.workers):
        code, seconds, failure = (ended[name][rank] for name in ("codes", "seconds", "failures"))
        if rank == lost.rank and lost.trouble in ("kill", "stop"):
            continue
        if code != 6:
            wrong.append(f"rank {rank} ended with {code}")
        if seconds is None or seconds > limit:
            wrong.append(f"rank {rank} ended after {seconds} s")
        if rank != lost.rank and (failure is None or failure[0] != lost.rank):
            wrong.append(f"rank {rank} names {failure}")
    return wrong


def main(arguments: list[str]) -> int:
    """Play the scenarios, several at a time, because most of each is waiting; exit code 1 if a promise is not kept."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", nargs="?", help="default: a temporary directory")
    parser.add_argument("--limit", type=float, default=15.0)
    parser.add_argument("--at-once", type=int, default=6)
    parser.add_argument("--only", default="", help="scenarios whose names contain this")
    given = parser.parse_args(arguments)
    out = Path(given.out or tempfile.mkdtemp(prefix="lost-"))
    make(out / "base")
    chosen = [lost for lost in LOST if given.only in lost.name]
    results = play_all(chosen, out, limit=given.limit, at_once=given.at_once)
    (out / "results.json").write_text(json.dumps(results))
    broken = 0
    for lost in chosen:
        ended = results[lost.name]
        wrong = unkept(lost, ended, given.limit)
        broken += bool(wrong)
        others = [seconds for rank, seconds in enumerate(ended["seconds"]) if rank != lost.rank]
        print(f"{lost.name:44} {others} s  {'; '.join(wrong) or 'kept'}", flush=True)
    print(f"{len(chosen)} losses, {broken} of which broke the promise")
    if given.out is None:
        shutil.rmtree(out)
    return int(broken > 0)


def play_all(
    chosen: Iterable[Lost],
    out: Path,
    *,
    limit: float,
    at_once: int,
    device: str = "cpu",
    ended: Callable[[Lost, dict[str, Any]], None] = lambda *_: None,
) -> dict[str, Any]:
    """What ``play`` says of each, by name; ``ended`` is called with it as soon as one has ended."""
    results = {}
    with ThreadPoolExecutor(at_once) as pool:
        futures = {
            pool.submit(play, out / "base", lost, out / lost.directory, limit=limit, device=device): lost
            for lost in chosen
        }
        for future in as_completed(futures):
            lost = futures[future]
            results[lost.name] = future.result()
            ended(lost, results[lost.name])
    return results


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
