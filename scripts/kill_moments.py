"""Kills conversions to every target container, and checks what they leave.

DST must be absent or complete, and the same command must then write the bytes of an undisturbed run. Each conversion is
a fork of this process, which has the program loaded already, so that the kill (SIGKILL) hits its work and not its
start; two of three come after the first write. The journal is synced every few milliseconds instead of seconds, since
the checkpoints are small. Every fourth conversion replaces an older DST, which must stay whole until the new one is
complete.

With ``--workers 2,3`` each conversion, and each run that resumes it, uses one process or that many workers, chosen at
random; of the workers one or all are killed, and the others must end by themselves.

With ``--inside N`` the moments are no random times but numbers of bytes (``kill_hooks``): N kills inside each of copy,
read-back, verify and publish, for each target and each number of workers. The journal lists something by then, so each
next run must take it over; most are killed once more while they resume. Every other one is finished by as many workers
as were killed first, the rest by another number. What is taken over is counted.
"""

from __future__ import annotations

import argparse
import contextlib
import filecmp
import gc
import importlib
import io
import os
import pkgutil
import random
import re
import runpy
import shutil
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field

import fsdpckpt
from fsdpckpt.cli import main as run_program
from fsdpckpt.comm import torch_group
from fsdpckpt.execute import journal
from fsdpckpt.storage.hidden import journal_paths, staging_root

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from kill_hooks import PHASES, Kill, install

OLDER = "older.safetensors"  # what --overwrite is to replace: a checkpoint of one tensor
_HEADER = b'{"older":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}'
OLDER_CHECKPOINT = len(_HEADER).to_bytes(8, "little") + _HEADER + b"two f32s"

HERE = os.path.dirname(os.path.abspath(__file__))
SYNC_SECONDS = 0.003
LIMIT = 5.0  # seconds within which the workers notice that one was killed
PATIENCE = 120.0  # seconds for a conversion of a few MB on a busy machine
PER_RANK = ["--to", "sharded", "--world-size", "3", "--buffers", "none"]
FULL_CHECK = ["--verify", "full"]
ORDINARY = ["--threads", "2", "--max-memory", "2MiB"]  # many windows


@dataclass
class Phase:
    """What kills inside one phase of one number of workers came to.

    Each one that was ``killed`` left DST ``complete``, or was finished by the ``same`` number of workers or by
    ``others``, which took over ``percents`` of the output.
    """

    killed: int = 0
    again: int = 0  # killed once more while they resumed
    complete: int = 0
    same: int = 0
    others: int = 0
    percents: list[float] = field(default_factory=list)


@dataclass
class Job:
    """One target container, and what happened to it.

    ``seconds``: of an undisturbed run by so many workers (0: one process); ``writing``: of them from the first thing
    written to the end.
    """

    name: str
    target: str
    options: list[str]
    seconds: dict[int, float] = field(default_factory=dict)
    writing: dict[int, float] = field(default_factory=dict)
    totals: dict[tuple[str, int], int] = field(default_factory=dict)  # by phase and workers: bytes, or calls
    moments: int = 0
    absent: int = 0
    complete: int = 0
    continued: int = 0
    replacing: int = 0
    slowest: float = 0.0
    phases: dict[tuple[str, int], Phase] = field(default_factory=dict)  # by phase and workers


def jobs(units: str) -> list[Job]:
    return [
        Job("full torch", "full.pt", ["--to", "full"]),
        Job("per-rank DTensor", "ranks", [*PER_RANK, "--container", "torch", "--tensor", "dtensor"]),
        Job("per-rank ShardedTensor", "ranks1", [*PER_RANK, "--container", "torch", "--tensor", "sharded-tensor"]),
        Job("flattened", "flat", ["--to", "flattened", "--world-size", "3", "--units", units]),
        Job("dcp", "dcp", ["--to", "sharded", "--world-size", "3"]),
        Job("safetensors", "safetensors", ["--to", "full", "--container", "safetensors", "--max-shard-size", "9MB"]),
        Job("accelerate's directories", "accelerate", [*PER_RANK, "--flavor", "accelerate"]),
        Job("verl's side files", "verl", [*PER_RANK, "--flavor", "verl"]),
        Job("Lightning's, with meta.pt", "lightning", [*PER_RANK, "--flavor", "lightning"]),
    ]


class Failure(Exception):
    """A promise was broken."""


class Trial:
    """All conversions of one source below ``directory``."""

    def __init__(self, directory: str, size: int) -> None:
        self.directory = directory
        self.source = os.path.join(directory, "source.pt")
        self.units = os.path.join(directory, "units.json")
        self.log = os.path.join(directory, "log")
        for form, path in (("full", self.source), ("units", self.units)):
            process = os.fork()  # with torch, where it is imported already; here it need not be
            if process == 0:
                try:
                    sys.argv = ["bench_make.py", form, path, str(size)]
                    runpy.run_path(os.path.join(HERE, "bench_make.py"), run_name="__main__")
                    os._exit(0)
                finally:
                    os._exit(1)
            if ends([process]) != [0]:
                raise Failure(f"bench_make.py made no {form}")

    def start(self, job: Job, target: str, *more: str, workers: int = 0, kill: Kill | None = None) -> list[int]:
        """The process ids of a conversion that has just begun, by one process, or by ``workers`` of them.

        ``kill``: when the first of them that comes so far dies.
        """
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        processes = []
        for rank in range(max(workers, 1)):
            process = os.fork()
            if process == 0:
                if workers:
                    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "MASTER_ADDR": "127.0.0.1"}
                    os.environ |= {"WORLD_SIZE": str(workers), "LOCAL_WORLD_SIZE": str(workers)}
                    os.environ["MASTER_PORT"] = str(port)
                limit = ["--fault-limit", str(LIMIT)] if workers else []
                arguments = [self.source, target, *job.options, *ORDINARY, *limit, *more]
                self._convert(arguments, f"{self.log}-{rank}", kill)
            processes.append(process)
        return processes

    def _convert(self, arguments: Sequence[str], path: str, kill: Kill | None) -> None:
        code = 99
        try:
            log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(log, 1)
            os.dup2(log, 2)
            journal.SYNC_SECONDS = SYNC_SECONDS
            sys.argv = ["fsdpckpt", "convert", *arguments]
            if kill is not None:
                install(kill)
            run_program()
        except SystemExit as end:
            code = int(end.code or 0)
        except BaseException:  # noqa: BLE001  # the fork must never go on as its parent
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    def finish(self, job: Job, target: str, *more: str, workers: int = 0) -> str:
        """A whole conversion; returns its output."""
        codes = ends(self.start(job, target, *more, workers=workers))
        said = ""
        for rank in range(len(codes)):
            with open(f"{self.log}-{rank}") as file:
                said += file.read()
        if any(codes):
            raise Failure(f"{job.name} {' '.join(more)} by {workers} workers ended with {codes}:\n{said}")
        return said

    def undisturbed(self, job: Job, workers: int) -> None:
        """Make the output that others are compared with, and time a conversion by ``workers``."""
        again, whole = (os.path.join(self.directory, f"{name}-{job.target}") for name in ("again", "whole"))
        if not os.path.exists(whole):
            self.finish(job, whole)
        began = time.perf_counter()
        processes = self.start(job, again, workers=workers)
        wrote = self.writes(processes, again)
        ends(processes)
        job.seconds[workers] = time.perf_counter() - began
        job.writing[workers] = time.perf_counter() - wrote if wrote else job.seconds[workers]
        require_same(whole, again, f"{job.name}: two undisturbed runs differ")
        remove(again)

    def writes(self, processes: Sequence[int], target: str) -> float:
        """When a conversion began to write; 0 when it ended before that was seen."""
        staging = os.path.join(os.path.dirname(target), f".{os.path.basename(target)}.fsdpckpt-staging")
        while not os.path.exists(staging):
            if os.path.exists(target) and not os.path.exists(os.path.join(target, OLDER)):
                return 0.0
            if os.waitid(os.P_PID, processes[0], os.WEXITED | os.WNOHANG | os.WNOWAIT):
                return 0.0
            time.sleep(0.001)
        return time.perf_counter()

    def moment(self, job: Job, rng: random.Random, kinds: Sequence[int], *, replace: bool) -> None:
        """Kill one conversion; then check what is there, and what the same command makes of it."""
        workers, others = rng.choice(kinds), rng.choice(kinds)
        if workers not in job.seconds:
            self.undisturbed(job, workers)
        folder = os.path.join(self.directory, "work")
        whole = os.path.join(self.directory, f"whole-{job.target}")
        target = os.path.join(folder, job.target)
        os.mkdir(folder)
        more = ["--overwrite"] if replace else []
        if replace:
            os.mkdir(target)
            with open(os.path.join(target, OLDER), "wb") as file:
                file.write(OLDER_CHECKPOINT)
        processes = self.start(job, target, *more, workers=workers)
        if rng.random() < 2 / 3:
            self.writes(processes, target)
            time.sleep(rng.uniform(0, job.writing[workers] * 1.05))
        else:
            time.sleep(rng.uniform(0, job.seconds[workers] * 1.05))
        victims = processes if rng.random() < 1 / 3 else [rng.choice(processes)]
        for process in victims:
            os.kill(process, signal.SIGKILL)
        killed = time.perf_counter()
        codes = ends(processes)
        job.slowest = max(job.slowest, time.perf_counter() - killed)
        if set(codes) - {0, 6, -signal.SIGKILL}:
            raise Failure(f"{job.name}: workers of which one was killed ended with {codes}")
        job.moments += 1
        job.replacing += replace
        older = replace and os.path.exists(os.path.join(target, OLDER))
        complete = os.path.lexists(target) and not older
        if complete:
            require_same(whole, target, f"{job.name}: a DST that is there is not complete")
            job.complete += 1
        else:
            job.absent += 1
            if replace and not older and not os.path.exists(os.path.join(folder, f".{job.target}.fsdpckpt-old", OLDER)):
                raise Failure(f"{job.name}: the older DST is lost")
        again = ["--resume"] if complete and not replace else []  # which compares it; without, it exists
        said = self.finish(job, target, *again, *more, workers=others)
        job.continued += "continued an interrupted run" in said
        require_same(whole, target, f"{job.name}: what the next run made is not what an undisturbed run makes")
        left = [name for name in os.listdir(folder) if name not in (job.target, f".{job.target}.fsdpckpt-lock")]
        if left:
            raise Failure(f"{job.name}: the next run left {left}")
        shutil.rmtree(folder)

    def total(self, job: Job, phase: str, workers: int) -> int:
        """How many bytes (calls, in ``publish``) the first of ``workers`` has in ``phase`` of an undisturbed run."""
        if (phase, workers) not in job.totals:
            target, counted = os.path.join(self.directory, "counting"), f"{self.log}-counted"
            processes = self.start(job, target, *FULL_CHECK, workers=workers, kill=Kill(phase, 0, counted=counted))
            if any(ends(processes)):
                raise Failure(f"{job.name} by {workers} workers failed:\n{self.said(0)}")
            with open(counted) as file:
                job.totals[phase, workers] = int(file.read())
            whole = os.path.join(self.directory, f"full-{job.target}")
            if os.path.exists(whole):
                require_same(whole, target, f"{job.name}: two undisturbed runs differ")
                remove(target)
            else:
                os.rename(target, whole)
        return job.totals[phase, workers]

    def said(self, rank: int) -> str:
        with open(f"{self.log}-{rank}") as file:
            return file.read()

    def inside(self, job: Job, rng: random.Random, kinds: Sequence[int], phase: str, first: int) -> None:
        """Kill a conversion by ``first`` workers inside ``phase``, mostly one more that resumes it, and finish it."""
        row = job.phases.setdefault((phase, first), Phase())
        others = [kind for kind in kinds if kind != first]
        second, last = rng.choice(kinds), rng.choice(others) if others and row.killed % 2 else first
        self.total(job, "verify", 0)  # makes what others are compared with
        folder = os.path.join(self.directory, "work")
        target = os.path.join(folder, job.target)
        shutil.rmtree(folder, ignore_errors=True)
        os.mkdir(folder)
        begins = "copy" if phase == "read-back" else phase
        share = rng.uniform(0.3, 1.0) if begins == "copy" else rng.uniform(0, 1)
        self._kill(job, target, begins, first, share)
        if phase == "read-back" or (rng.random() < 0.7 and not os.path.lexists(target)):
            staged, everything = self._staged(target), self.total(job, "copy", 0)
            choices = ["read-back", "verify", *(["copy"] if everything - staged > everything // 10 else [])]
            again = "read-back" if phase == "read-back" else rng.choice(choices)
            of = {"read-back": staged, "copy": everything - staged}.get(again)
            self._kill(job, target, again, second, rng.uniform(0.05, 0.9), of=of)
            row.again += phase != "read-back"
        row.killed += 1
        complete = os.path.lexists(target)
        whole = os.path.join(self.directory, f"full-{job.target}")
        if complete:
            require_same(whole, target, f"{job.name}: a DST that is there is not complete")
            row.complete += 1
        text = self.finish(job, target, *FULL_CHECK, *(["--resume"] if complete else []), workers=last)
        require_same(whole, target, f"{job.name}: what the next run made is not what an undisturbed run makes")
        if not complete:
            taken = re.search(r"continued an interrupted run: ([\d.,]+ \w*) of ([\d.,]+ \w*) were already there", text)
            if taken is None or nbytes_of(taken[1]) <= 0:
                raise Failure(f"{job.name}: killed inside {phase}, and nothing was taken over:\n{text}")
            row.same += last == first
            row.others += last != first
            row.percents.append(100 * nbytes_of(taken[1]) / nbytes_of(taken[2]))
        left = [name for name in os.listdir(folder) if name not in (job.target, f".{job.target}.fsdpckpt-lock")]
        if left:
            raise Failure(f"{job.name}: the next run left {left}")

    def _staged(self, target: str) -> int:
        """How many bytes the journals list."""
        runs = [journal.read_run(path) for path in journal_paths(staging_root(target))]
        return journal.joined([windows for _, windows in filter(None, runs)]).nbytes

    def _kill(self, job: Job, target: str, phase: str, workers: int, share: float, *, of: int | None = None) -> None:
        """Run until one process dies after ``share`` of what there is in ``phase``. ``of``: what all have to do."""
        total = of if of is not None else self.total(job, phase, workers)
        if of is not None and workers:  # each has a part of it, not always the same
            total //= 4 * workers
        journals = os.path.join(staging_root(target), "journal*") if phase == "copy" else ""
        kill = Kill(phase, max(int(total * share), 1), journals)
        processes = self.start(job, target, *FULL_CHECK, workers=workers, kill=kill)
        began = time.perf_counter()
        codes = ends(processes)
        job.slowest = max(job.slowest, time.perf_counter() - began)
        if -signal.SIGKILL not in codes or set(codes) - {6, 0, -signal.SIGKILL}:
            said = "".join(self.said(rank) for rank in range(len(codes)))
            raise Failure(f"{job.name}: to be killed inside {phase} of {workers} workers, ended with {codes}:\n{said}")


def nbytes_of(text: str) -> float:
    """The bytes that a size in a message is."""
    number, unit = text.split()
    return float(number) * {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}[unit]


def ends(processes: Sequence[int]) -> list[int]:
    """The exit codes of ``processes`` once all have ended; Failure when one outlives the others for long."""
    codes = []
    deadline = time.monotonic() + PATIENCE
    for process in processes:
        while not (found := os.waitpid(process, os.WNOHANG))[0]:
            if time.monotonic() > deadline:
                for each in processes[len(codes) :]:
                    os.kill(each, signal.SIGKILL)
                raise Failure(f"worker {len(codes)} of {len(processes)} did not end within {PATIENCE:.0f} s")
            time.sleep(0.002)
        codes.append(os.waitstatus_to_exitcode(found[1]))
    return codes


def remove(path: str) -> None:
    if os.path.isdir(path):
        shutil.rmtree(path)
    else:
        os.unlink(path)


def files_below(directory: str) -> list[str]:
    """The paths of all files below ``directory``, relative to it; none if it is not a directory."""
    found = [os.path.join(folder, name) for folder, _, names in os.walk(directory) for name in names]
    return sorted(os.path.relpath(path, directory) for path in found)


def require_same(expected: str, found: str, otherwise: str) -> None:
    """Raises Failure unless the two files, or all files of two directories, are equal byte for byte."""
    if os.path.isfile(expected):
        same = os.path.isfile(found) and filecmp.cmp(expected, found, shallow=False)
    else:
        names = files_below(expected)
        same = names == files_below(found)
        same = same and filecmp.cmpfiles(expected, found, names, shallow=False)[0] == names
    if not same:
        raise Failure(f"{otherwise}: {expected} and {found}")


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/kill_test", description=__doc__)
    parser.add_argument("--moments", type=int, default=200, help="how many conversions are killed; default 200")
    parser.add_argument("--inside", type=int, default=0, help="instead: so many kills inside each phase of each target")
    parser.add_argument("--target", action="append", help="only these targets, by name; default: all")
    parser.add_argument("--size", type=int, default=120_000_000, help="bytes of the source")
    parser.add_argument("--seed", type=int, default=None, help="of the moments; they also depend on the machine")
    parser.add_argument("--directory", default=None, help="where to work; default: a temporary directory")
    parser.add_argument("--workers", default="", help="numbers of workers, as 2,3; default: one process only")
    options = parser.parse_args()
    kinds = [0, *map(int, filter(None, options.workers.split(",")))]
    # Workers of which one was killed before they met wait two minutes for it, unless a launcher ends them.
    torch_group.TorchGroup.start.__kwdefaults__["patience"] = LIMIT
    seed = options.seed if options.seed is not None else random.randrange(10**6)
    rng = random.Random(seed)
    with tempfile.TemporaryDirectory(dir=options.directory, prefix="kill-test-") as directory:
        trial = Trial(directory, options.size)
        load_program(trial.source)
        table = [job for job in jobs(trial.units) if not options.target or job.name in options.target]
        if options.inside:
            print(PHASES_HEAD, flush=True)
            for job in table:
                for phase in PHASES:
                    for first in kinds:
                        for _ in range(options.inside):
                            trial.inside(job, rng, kinds, phase, first)
                        print_phase(job, phase, first)
            print(f"seed {seed}, {options.size / 1e6:.0f} MB, no promise broken")
            print_sums(table)
            return 0
        for number in range(options.moments):
            trial.moment(table[number % len(table)], rng, kinds, replace=number % 4 == 3)
            if sys.stderr.isatty():
                print(f"\r{number + 1} of {options.moments}", end="", file=sys.stderr, flush=True)
    print(f"seed {seed}, {options.size / 1e6:.0f} MB, no promise broken")
    print(
        "| target | undisturbed | killed | DST not there yet | DST complete | continued | replacing "
        "| all ended within |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for job in table:
        counts = f"{job.moments} | {job.absent} | {job.complete} | {job.continued} | {job.replacing}"
        seconds = ", ".join(f"{each * 1000:.0f}" for each in job.seconds.values())
        print(f"| {job.name} | {seconds} ms | {counts} | {job.slowest:.1f} s |")
    return 0


PHASES_HEAD = """\
| target | inside | workers | kills | killed again | DST complete | resumed by as many | by others | taken over |
|---|---|---|---|---|---|---|---|---|"""


def print_phase(job: Job, phase: str, workers: int) -> None:
    row = job.phases[phase, workers]
    least = f"{min(row.percents):.0f} to {max(row.percents):.0f} %" if row.percents else "-"
    counts = f"{row.killed} | {row.again} | {row.complete} | {row.same} | {row.others} | {least}"
    print(f"| {job.name} | {phase} | {workers or 1} | {counts} |", flush=True)


def print_sums(table: Sequence[Job]) -> None:
    """One row for each target: what docs/guarantees.md shows."""
    print("| target | inside copy, read-back, verify, publish | killed again | DST complete | resumed | taken over |")
    print("|---|---|---|---|---|---|")
    for job in table:
        rows = list(job.phases.values())
        kills = [sum(row.killed for (name, _), row in job.phases.items() if name == phase) for phase in PHASES]
        percents = [percent for row in rows for percent in row.percents]
        again, complete = sum(row.again for row in rows), sum(row.complete for row in rows)
        taken = f"{min(percents):.0f} to {max(percents):.0f} %, on average {sum(percents) / len(percents):.0f} %"
        print(f"| {job.name} | {', '.join(map(str, kills))} | {again} | {complete} | {len(percents)} | {taken} |")


def load_program(source: str) -> None:
    """Load all that a conversion imports, and torch: otherwise each fork does, for two thirds of its time.

    A fork of this process then is what ``python -m fsdpckpt`` is once it has started.
    """
    for module in pkgutil.walk_packages(fsdpckpt.__path__, "fsdpckpt."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    sys.argv = ["fsdpckpt", "convert", source, f"{source}.dry/", "--to", "sharded", "--world-size", "2", "--dry-run"]
    with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
        run_program()  # typer loads what it needs on the way
    gc.collect()
    gc.freeze()  # or each fork copies the pages whose objects it counts


if __name__ == "__main__":
    try:
        sys.exit(main())
    except Failure as failure:
        sys.exit(f"broken: {failure}")
