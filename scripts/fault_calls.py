"""Lets every call to the operating system that a conversion makes fail once, with every likely error.

For one small conversion to each target container: the n-th ``open``, ``read``, ``pread``, ``write``, ``pwrite``,
``fsync``, ``rename``, ``link``, ``unlink``, ``mkdir``, ... on the source, or at DST, fails with EIO, ENOSPC, EDQUOT or
EACCES, for every n until the conversion passes. Each time

- DST is absent, the older one, or complete;
- the exit code is 3 for a call on the source and 5 for one at DST, or 0 if DST is complete;
- the same command without a fault then makes what an undisturbed run makes, and leaves nothing else.

The calls fail in a library that is preloaded (``tests/faults/shim.c``), so that they are the real ones of every part of
the program and of Python. Each conversion is a fork of this process, which has the program loaded already.
"""

from __future__ import annotations

import argparse
import ctypes
import errno
import filecmp
import gc
import importlib
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

HERE = os.path.dirname(os.path.abspath(__file__))
SHIM = os.path.join(os.path.dirname(HERE), "tests", "faults", "shim.c")
PATIENCE = 60.0  # seconds for a conversion of a few hundred KB on a busy machine

# What a call may also be named in the C library.
CALLS = {
    "open": "open,openread",
    "read": "read",
    "pread": "pread,preadv",
    "write": "write",
    "pwrite": "pwrite",
    "fsync": "fsync,fdatasync",
    "allocate": "ftruncate,fallocate",
    "rename": "rename",
    "link": "link",
    "unlink": "unlink,rmdir",
    "mkdir": "mkdir",
    "flock": "flock",
}
ERRORS = (errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EACCES)
OF_SOURCE = ("open", "read", "pread")
PER_RANK = ["--to", "sharded", "--world-size", "2", "--container", "torch", "--buffers", "none"]


@dataclass
class Job:
    """One target. ``replaces``: an older DST is replaced. ``swaps``: the file system can swap two names.

    ``exits``: how often each exit code was seen.
    """

    name: str
    target: str
    options: list[str]
    replaces: bool = False
    swaps: bool = True
    exits: Counter[int] = field(default_factory=Counter)
    complete: int = 0
    calls: int = 0


def jobs(units: str) -> list[Job]:
    """A few of each layout and container; the last ones replace an older DST."""
    dcp = ["--to", "sharded", "--world-size", "2"]
    return [
        Job("full torch", "full.pt", ["--to", "full"]),
        Job("dcp", "dcp", dcp),
        Job("safetensors", "safetensors", ["--to", "full", "--container", "safetensors", "--max-shard-size", "200KB"]),
        Job("flattened", "flat", ["--to", "flattened", "--world-size", "2", "--units", units]),
        Job("per-rank DTensor", "ranks", [*PER_RANK, "--tensor", "dtensor"]),
        Job("per-rank ShardedTensor", "ranks1", [*PER_RANK, "--tensor", "sharded-tensor"]),
        Job("dcp, --verify full", "full-check", [*dcp, "--verify", "full"]),
        Job("dcp, hard links", "linked", ["--container", "dcp", "--link", "hardlink"]),
        Job("dcp over an older one", "over", [*dcp, "--overwrite"], replaces=True),
        Job("dcp over an older one, two renames", "two", [*dcp, "--overwrite"], replaces=True, swaps=False),
        Job("full torch over an older one", "over.pt", ["--to", "full", "--overwrite"], replaces=True),
    ]


class Failure(Exception):
    """A promise was broken."""


def write_source(directory: str) -> None:
    """Write a checkpoint of 300 KB and its units file. Needs torch."""
    sys.path.insert(0, HERE)
    import torch
    from bench_make import state_dicts, write_units

    torch.manual_seed(1)
    params = {"embed.weight": (61, 64), "norm.weight": (64,)}
    for number in range(2):
        params |= {f"layers.{number}.up.weight": (90, 64), f"layers.{number}.norm.weight": (7,)}
    torch.save(state_dicts(params, torch.randn), os.path.join(directory, "source.pt"))
    write_units(params, os.path.join(directory, "units.json"))


def make_source(directory: str) -> None:
    """``write_source`` in a fork, so that this process has no torch."""

    def make() -> int:
        write_source(directory)
        return 0

    log = os.path.join(directory, "log")
    if wait(fork(make, log)) != 0:
        raise Failure(f"no source was made: {said(log)}")


def fork(work: Callable[[], int], log: str) -> int:
    """Run ``work`` in a fork of this process, with its output in the file ``log``; returns its id."""
    process = os.fork()
    if process:
        return process
    code = 99
    try:
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        code = work()
    except SystemExit as end:
        code = int(end.code or 0)
    except BaseException:  # noqa: BLE001  # the fork must never go on as its parent
        traceback.print_exc()
    finally:
        try:
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(code)


def wait(process: int) -> int:
    deadline = time.monotonic() + PATIENCE
    while not (found := os.waitpid(process, os.WNOHANG))[0]:
        if time.monotonic() > deadline:
            os.kill(process, 9)
            os.waitpid(process, 0)
            return -9
        time.sleep(0.001)
    return os.waitstatus_to_exitcode(found[1])


def said(log: str) -> str:
    with open(log, errors="replace") as file:
        return file.read()


class Trial:
    """All conversions in ``directory``, which has the source. ``library``: the one that is preloaded."""

    def __init__(self, directory: str, library: ctypes.CDLL) -> None:
        self.directory = directory
        self.shim = library
        self.source = os.path.join(directory, "source.pt")
        self.folder = os.path.join(directory, "work")
        self.log = os.path.join(directory, "log")
        self.linked = os.path.join(directory, "source-dcp")
        if self.convert(self.source, self.linked, ["--to", "sharded", "--world-size", "2"]) != 0:
            raise Failure(said(self.log))

    def convert(
        self,
        source: str,
        target: str,
        options: Sequence[str],
        fault: tuple[str, str, int, str] | None = None,
        *,
        swaps: bool = True,
        count: str | None = None,
    ) -> int:
        """The exit code of a conversion, in which ``fault`` (names, path, n, errno) happens. ``count``: a file for the
        number of calls.
        """

        def work() -> int:
            from fsdpckpt.cli import main
            from fsdpckpt.storage import staging

            if not swaps:
                staging.swap_names = lambda *_: False
            sys.argv = ["fsdpckpt", "convert", source, target, *options, "--threads", "1", "--max-memory", "128KiB"]
            if fault is not None:
                names, path, nth, action = fault
                self.shim.fault_arm(names.encode(), path.encode(), nth, action.encode(), 0)
            try:
                main()
            finally:
                self.shim.fault_arm(b"", b"", 0, b"", 0)
                if count is not None:
                    self._write_counts(count)
            return 0

        return wait(fork(work, self.log))

    def _write_counts(self, path: str) -> None:
        """Write how many calls of each name there were, and which modules were loaded."""
        counts = {name: self.shim.fault_count(name.encode()) for names in CALLS.values() for name in names.split(",")}
        with open(path, "w") as file:
            json.dump([counts, [name for name in sys.modules if name.startswith("fsdpckpt") or "." not in name]], file)

    def source_of(self, job: Job) -> str:
        return self.linked if "--link" in job.options else self.source

    def whole(self, job: Job) -> str:
        """What an undisturbed run makes, made once."""
        path = os.path.join(self.directory, f"whole-{job.target}")
        if not os.path.exists(path):
            options = [option for option in job.options if option != "--overwrite"]
            if self.convert(self.source_of(job), path, options) != 0:
                raise Failure(f"{job.name}: {said(self.log)}")
        return path

    def older(self, job: Job) -> str:
        """What is replaced: the same container, of the model alone."""
        path = os.path.join(self.directory, f"older-{job.target}")
        if not os.path.exists(path):
            options = [option for option in job.options if option != "--overwrite"]
            if self.convert(self.source, path, [*options, "--only", "model"]) != 0:
                raise Failure(f"{job.name}: {said(self.log)}")
        return path

    def prepare(self, job: Job) -> str:
        """An empty folder for DST, or one with the older DST in it; returns DST."""
        shutil.rmtree(self.folder, ignore_errors=True)
        os.mkdir(self.folder)
        target = os.path.join(self.folder, job.target)
        if job.replaces:
            older = self.older(job)
            (shutil.copytree if os.path.isdir(older) else shutil.copyfile)(older, target)
        return target

    def counts(self, job: Job, path: str) -> dict[str, int]:
        """How many calls of each name a conversion makes on ``path``."""
        target, counts = self.prepare(job), os.path.join(self.directory, "counts")
        fault = (",".join(CALLS.values()), path, 0, "0")
        if self.convert(self.source_of(job), target, job.options, fault, swaps=job.swaps, count=counts) != 0:
            raise Failure(f"{job.name}: {said(self.log)}")
        numbers, modules = json.loads(said(counts))
        for name in modules:  # so that the next fork need not load them
            with suppress(ImportError):
                importlib.import_module(name)
        return {names: sum(numbers[name] for name in names.split(",")) for names in CALLS.values()}

    def fail(self, job: Job, names: str, path: str, nth: int, number: int) -> None:
        """Let one call fail; check what is there, and what the same command makes of it."""
        target, source = self.prepare(job), self.source_of(job)
        where = f"{job.name}: call {nth} of {names} on {os.path.basename(path)}, {errno.errorcode[number]}"
        code = self.convert(source, target, job.options, (names, path, nth, str(number)), swaps=job.swaps)
        output = said(self.log)
        complete = os.path.lexists(target) and same(self.whole(job), target)
        allowed = {0, 5} if path == self.folder else {0, 3}
        if code not in allowed or "Traceback" in output:
            raise Failure(f"{where}: exit {code}\n{output}")
        if complete != (code == 0):
            raise Failure(f"{where}: exit {code}, and DST is {'' if complete else 'not '}complete\n{output}")
        if not complete and job.replaces:
            kept = os.path.join(self.folder, f".{job.target}.fsdpckpt-old")
            if not same(self.older(job), target if os.path.lexists(target) else kept):
                raise Failure(f"{where}: the older DST is lost\n{output}")
        elif not complete and os.path.lexists(target):
            raise Failure(f"{where}: DST is there, and not complete\n{output}")
        job.calls += 1
        job.exits[code] += 1
        job.complete += complete
        again = job.options if job.replaces or not complete else [*job.options, "--resume"]
        if self.convert(source, target, again, swaps=job.swaps) != 0:
            raise Failure(f"{where}: the next run failed\n{said(self.log)}\nafter\n{output}")
        if not same(self.whole(job), target):
            raise Failure(f"{where}: what the next run made is not what an undisturbed run makes\n{output}")
        if os.listdir(self.folder) != [job.target]:
            raise Failure(f"{where}: the next run left {os.listdir(self.folder)}\n{output}")

    def cases(self, job: Job) -> Iterator[tuple[str, str, int]]:
        """Names of calls, a path, and the number of each call there."""
        for path, calls in ((self.folder, tuple(CALLS)), (self.source_of(job), OF_SOURCE)):
            counts = self.counts(job, path)
            for names in (CALLS[call] for call in calls):
                yield from ((names, path, nth) for nth in range(1, counts[names] + 1))


def same(expected: str, found: str) -> bool:
    """Whether two files, or all files of two directories, are equal byte for byte."""
    if os.path.isfile(expected):
        return os.path.isfile(found) and filecmp.cmp(expected, found, shallow=False)
    if not os.path.isdir(found):
        return False
    names, others = sorted(os.listdir(expected)), sorted(os.listdir(found))
    return names == others and filecmp.cmpfiles(expected, found, names, shallow=False)[0] == names


def preloaded(directory: str) -> ctypes.CDLL:
    """The library; starts this program once more if it was not preloaded."""
    loaded = os.environ.get("LD_PRELOAD", "")
    if loaded.endswith("fault-shim.so"):
        return ctypes.CDLL(loaded)
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        raise Failure("no C compiler is here")
    library = os.path.join(directory, "fault-shim.so")
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", library, SHIM, "-ldl"], check=True)
    done = subprocess.run([sys.executable, *sys.argv], env={**os.environ, "LD_PRELOAD": library}, check=False)
    sys.exit(done.returncode)


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/fault_test", description=__doc__)
    parser.add_argument("--job", action="append", help="only these targets, by name; default: all")
    parser.add_argument("--sample", type=int, default=None, help="only so many calls, chosen at random; default: all")
    parser.add_argument("--seed", type=int, default=0, help="of the choice")
    parser.add_argument("--source", default=None, help="a directory with what write_source makes; default: made here")
    parser.add_argument("--directory", default=None, help="where to work; default: a temporary directory")
    parser.add_argument("--keep-going", action="store_true", help="list all broken promises, not only the first")
    options = parser.parse_args()
    broken: list[str] = []
    with tempfile.TemporaryDirectory(dir=options.directory, prefix="fault-test-") as directory:
        library = preloaded(directory)
        if options.source is None:
            make_source(directory)
        else:
            shutil.copytree(options.source, directory, dirs_exist_ok=True)
        from fsdpckpt.converters import check, pipeline  # noqa: F401  # loaded before the forks

        gc.freeze()  # a fork need not copy what its collector would touch
        trial = Trial(directory, library)
        table = [job for job in jobs(f"{directory}/units.json") if not options.job or job.name in options.job]
        cases = [(job, *case) for job in table for case in trial.cases(job)]
        pairs = [(case, number) for case in cases for number in ERRORS]
        if options.sample is not None and options.sample < len(pairs):
            pairs = random.Random(options.seed).sample(pairs, options.sample)
        for done, ((job, names, path, nth), number) in enumerate(pairs):
            try:
                trial.fail(job, names, path, nth, number)
            except Failure as failure:
                if not options.keep_going:
                    raise
                broken.append(str(failure))
                print(f"broken: {failure}\n", file=sys.stderr, flush=True)
            if sys.stderr.isatty() or (options.keep_going and done % 500 == 0):
                print(f"\r{done + 1} of {len(pairs)}", end="", file=sys.stderr, flush=True)
    print(f"{len(pairs)} failing calls, {len(broken) or 'no'} promise{'s' if len(broken) > 1 else ''} broken")
    print("| target | calls failed | exit 0, DST complete | exit 3 | exit 5 |")
    print("|---|---|---|---|---|")
    for job in table:
        print(f"| {job.name} | {job.calls} | {job.complete} | {job.exits[3]} | {job.exits[5]} |")
    return 1 if broken else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except Failure as failure:
        sys.exit(f"broken: {failure}")
