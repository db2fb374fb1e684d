"""kill -9 at random moments of conversions to every target container: is DST absent or complete, and does ``--resume``
give the bytes of an undisturbed run?

Each conversion is a fork of this process, which has the program loaded already, so that the moments fall into its work
and not into its start; two of three fall behind the first thing that is written. The journal is synced every few
milliseconds instead of seconds, since the checkpoints are small. Every fourth conversion replaces an older DST, which
has to be there, whole, until the new one is.
"""

from __future__ import annotations

import argparse
import filecmp
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass

from fsdpckpt.cli.main import main as fsdpckpt
from fsdpckpt.converters import convert  # noqa: F401  # loaded before the forks
from fsdpckpt.executor import recorder

HERE = os.path.dirname(os.path.abspath(__file__))
SYNC_SECONDS = 0.003
ORDINARY = ["--threads", "2", "--max-memory", "2MiB", "--quiet"]  # many windows


@dataclass
class Job:
    """One target container, and what happened to it.

    ``seconds``: of an undisturbed run; ``writing``: of them from the first thing written to the end.
    """

    name: str
    target: str
    options: list[str]
    seconds: float = 0.0
    writing: float = 0.0
    moments: int = 0
    absent: int = 0
    complete: int = 0
    continued: int = 0
    replacing: int = 0


def jobs(units: str) -> list[Job]:
    return [
        Job("full torch", "full.pt", ["--to", "full"]),
        Job(
            "per-rank torch",
            "ranks",
            ["--to", "sharded", "--container", "torch", "--world-size", "3", "--buffers", "none"],
        ),
        Job("flattened", "flat", ["--to", "flattened", "--world-size", "3", "--units", units]),
        Job("dcp", "dcp", ["--to", "sharded", "--world-size", "3"]),
        Job("safetensors", "safetensors", ["--to", "full", "--container", "safetensors", "--max-shard-size", "9MB"]),
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
            command = [sys.executable, os.path.join(HERE, "bench_make.py"), form, path, str(size)]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)

    def start(self, job: Job, target: str, *more: str) -> int:
        """The process id of a conversion that has just begun."""
        process = os.fork()
        if process == 0:
            self._convert([self.source, target, *job.options, *ORDINARY, *more])
        return process

    def _convert(self, arguments: Sequence[str]) -> None:
        code = 99
        try:
            log = os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(log, 1)
            os.dup2(log, 2)
            recorder.SYNC_SECONDS = SYNC_SECONDS
            sys.argv = ["fsdpckpt", "convert", *arguments]
            fsdpckpt()
        except SystemExit as end:
            code = int(end.code or 0)
        except BaseException:  # noqa: BLE001  # the fork must never go on as its parent
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    def finish(self, job: Job, target: str, *more: str) -> str:
        """A whole conversion; returns what it said."""
        _, status = os.waitpid(self.start(job, target, *more), 0)
        with open(self.log) as file:
            said = file.read()
        if status:
            raise Failure(f"{job.name} {' '.join(more)} ended with {os.waitstatus_to_exitcode(status)}:\n{said}")
        return said

    def undisturbed(self, job: Job) -> None:
        """Make what the others are compared with, twice: the second time is timed."""
        again, whole = (os.path.join(self.directory, f"{name}-{job.target}") for name in ("again", "whole"))
        self.finish(job, whole)
        began = time.perf_counter()
        process = self.start(job, again)
        wrote = self.writes(process, again)
        if not wrote:
            job.writing = job.seconds = time.perf_counter() - began
        else:
            os.waitpid(process, 0)
            job.writing, job.seconds = time.perf_counter() - wrote, time.perf_counter() - began
        require_same(whole, again, f"{job.name}: two undisturbed runs differ")
        remove(again)

    def writes(self, process: int, target: str) -> float:
        """When a conversion has begun to write; 0 when it ended without being seen to."""
        staging = os.path.join(os.path.dirname(target), f".{os.path.basename(target)}.fsdpckpt-staging")
        while not os.path.exists(staging):
            if os.waitpid(process, os.WNOHANG)[0]:
                return 0.0
            time.sleep(0.001)
        return time.perf_counter()

    def moment(self, job: Job, rng: random.Random, *, replace: bool) -> None:
        """One conversion, killed; then what is there, and what ``--resume`` makes of it."""
        folder = os.path.join(self.directory, "work")
        whole = os.path.join(self.directory, f"whole-{job.target}")
        target = os.path.join(folder, job.target)
        os.mkdir(folder)
        more = ["--overwrite"] if replace else []
        if replace:
            os.mkdir(target)
            with open(os.path.join(target, "older"), "w") as file:
                file.write("older")
        process = self.start(job, target, *more)
        if rng.random() < 2 / 3:
            ended = not self.writes(process, target)
            time.sleep(rng.uniform(0, job.writing * 1.05))
        else:
            ended = False
            time.sleep(rng.uniform(0, job.seconds * 1.05))
        if not ended:
            os.kill(process, signal.SIGKILL)
            os.waitpid(process, 0)
        job.moments += 1
        job.replacing += replace
        older = replace and os.path.exists(os.path.join(target, "older"))
        if os.path.lexists(target) and not older:
            require_same(whole, target, f"{job.name}: a DST that is there is not complete")
            job.complete += 1
        else:
            job.absent += 1
            if (
                replace
                and not older
                and not os.path.exists(os.path.join(folder, f".{job.target}.fsdpckpt-old", "older"))
            ):
                raise Failure(f"{job.name}: the older DST is lost")
        said = self.finish(job, target, "--resume", *more)
        job.continued += "bytes were there already" in said
        require_same(whole, target, f"{job.name}: what --resume made is not what an undisturbed run makes")
        left = [name for name in os.listdir(folder) if name not in (job.target, f".{job.target}.fsdpckpt-lock")]
        if left:
            raise Failure(f"{job.name}: --resume left {left}")
        shutil.rmtree(folder)


def remove(path: str) -> None:
    if os.path.isdir(path):
        shutil.rmtree(path)
    else:
        os.unlink(path)


def require_same(expected: str, found: str, otherwise: str) -> None:
    """Raises Failure unless the two files, or all files of two directories, are equal byte for byte."""
    if os.path.isfile(expected):
        same = os.path.isfile(found) and filecmp.cmp(expected, found, shallow=False)
    else:
        names = sorted(os.listdir(expected))
        same = os.path.isdir(found) and names == sorted(os.listdir(found))
        same = same and filecmp.cmpfiles(expected, found, names, shallow=False)[0] == names
    if not same:
        raise Failure(f"{otherwise}: {expected} and {found}")


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/kill_test", description=__doc__)
    parser.add_argument("--moments", type=int, default=200, help="how many conversions are killed; default 200")
    parser.add_argument("--size", type=int, default=120_000_000, help="bytes of the source")
    parser.add_argument("--seed", type=int, default=None, help="of the moments; they also depend on the machine")
    parser.add_argument("--directory", default=None, help="where to work; default: a temporary directory")
    options = parser.parse_args()
    seed = options.seed if options.seed is not None else random.randrange(10**6)
    rng = random.Random(seed)
    with tempfile.TemporaryDirectory(dir=options.directory, prefix="kill-test-") as directory:
        trial = Trial(directory, options.size)
        table = jobs(trial.units)
        for job in table:
            trial.undisturbed(job)
        for number in range(options.moments):
            trial.moment(table[number % len(table)], rng, replace=number % 4 == 3)
            if sys.stderr.isatty():
                print(f"\r{number + 1} of {options.moments}", end="", file=sys.stderr, flush=True)
    print(f"seed {seed}, {options.size / 1e6:.0f} MB, no promise broken")
    print(
        "| target | undisturbed | killed | DST not there yet | DST complete | --resume went on with bytes | replacing |"
    )
    print("|---|---|---|---|---|---|---|")
    for job in table:
        counts = f"{job.moments} | {job.absent} | {job.complete} | {job.continued} | {job.replacing}"
        print(f"| {job.name} | {job.seconds * 1000:.0f} ms | {counts} |")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except Failure as failure:
        sys.exit(f"broken: {failure}")
