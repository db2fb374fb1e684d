"""Times whole processes, one at a time: their seconds, processor time and peak memory.

This imports nothing large, since a child begins with its parent's peak.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

HERE = os.path.dirname(os.path.abspath(__file__))
PROGRAM = os.path.join(os.path.dirname(sys.executable), "fsdpckpt")
MIB = 1024 * 1024


@dataclass(frozen=True)
class Measurement:
    """``cpu``: processor seconds of all threads and child processes; ``seconds``: wall time."""

    seconds: float
    cpu: float
    peak_bytes: int


@dataclass
class Contender:
    name: str
    command: list[str]
    runs: list[Measurement] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        return statistics.median(run.seconds for run in self.runs)

    @property
    def cpu(self) -> float:
        return statistics.median(run.cpu for run in self.runs)

    @property
    def peak_bytes(self) -> int:
        return max(run.peak_bytes for run in self.runs)


@dataclass
class Row:
    """One job and the programs that do it, ours first."""

    name: str
    source: str
    target: str
    contenders: list[Contender]
    note: str = ""


class Bench:
    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.directory = os.path.abspath(options.directory)
        self.made: set[str] = set()
        os.makedirs(self.directory, exist_ok=True)

    def path(self, name: str) -> str:
        """The path of a target; no two benchmarks share one."""
        return os.path.join(self.directory, f"{os.getpid()}-{name}")

    def make(self, form: str, amount: int, suffix: str = "") -> str:
        """A source of that form and size, made unless an earlier benchmark left it."""
        path = os.path.join(self.directory, f"{form}-{amount}{suffix}")
        self.made.add(os.path.join(self.directory, "random.bin"))
        python = [sys.executable]
        if form in ("dcp", "one-tensor"):
            python += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4"]
        command = [*python, os.path.join(HERE, "bench_make.py"), form, path, str(amount)]
        return self._make_once(path, command, env={**os.environ, "OMP_NUM_THREADS": "1"})

    def make_parallel(self, form: str, tensors: int) -> str:
        """What several ranks of DeepSpeed or Megatron-LM save, made unless an earlier benchmark left it."""
        path = os.path.join(self.directory, f"{form}-{tensors}")
        command = [sys.executable, os.path.join(HERE, "bench_parallel_make.py"), form, path, str(tensors)]
        return self._make_once(path, command)

    def make_scale(self, ranks: int, *arguments: str) -> str:
        """Llama 3 405B as ``ranks`` ranks save it, with holes for data, made unless an earlier bench left it."""
        path = os.path.join(self.directory, "-".join(["scale", str(ranks), *arguments]).replace("--", ""))
        command = [sys.executable, os.path.join(HERE, "bench_scale_make.py"), path, str(ranks), *arguments]
        return self._make_once(path, command)

    def derive(self, flavor: str, source: str, *options: str) -> str:
        """``source`` as a directory of that producer, made unless an earlier benchmark left it."""
        path = f"{source}-{flavor}"
        command = [PROGRAM, "convert", source, path, "--quiet", "--flavor", flavor, *options]
        return self._make_once(path, command)

    def _make_once(self, path: str, command: list[str], env: Mapping[str, str] | None = None) -> str:
        """``path``, which ``command`` makes unless an earlier benchmark left it."""
        self.made.add(path)
        if not os.path.exists(path):
            talk(f"making {os.path.basename(path)}")
            subprocess.run(command, check=True, env=env, stdin=subprocess.DEVNULL)
        return path

    def prepare(self, source: str, target: str) -> None:
        remove(target)
        subprocess.run(["sync"], check=True)
        for path in files(source):
            if os.stat(path).st_blocks * 512 < os.path.getsize(path):
                continue  # holes: nothing that is timed reads them
            with open(path, "rb", buffering=0) as file:
                if self.options.cache == "cold":
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
                else:
                    buffer = bytearray(8 * MIB)
                    while file.readinto(buffer):
                        pass

    def run(self, row: Row) -> Row:
        """Run the programs of the row in turn, ``--pairs`` times; those that never ran are dropped."""
        for number in range(self.options.pairs):
            for place, contender in enumerate(row.contenders):
                if place > 1 and number >= self.options.tool_runs:
                    continue
                self.prepare(row.source, row.target)
                measured = measure(contender.command, self.options.limit)
                contender.runs.append(measured)
                talk(f"{row.name}: {contender.name} {measured.seconds:.2f} s, {measured.peak_bytes // MIB} MiB")
                remove(row.target)
        row.contenders = [contender for contender in row.contenders if contender.runs]
        return row


def talk(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def remove(path: str) -> None:
    if os.path.isdir(path):
        shutil.rmtree(path)
    elif os.path.exists(path):
        os.remove(path)


def files(path: str) -> list[str]:
    if os.path.isfile(path):
        return [path]
    return [os.path.join(where, name) for where, _, names in os.walk(path) for name in names]


def size_of(path: str) -> int:
    return sum(os.path.getsize(name) for name in files(path))


def measure(command: Sequence[str], limit: float) -> Measurement:
    """Run one process. Raises SystemExit with its output when it fails or takes over ``limit`` seconds."""
    with open(os.devnull) as nothing, tempfile.TemporaryFile() as log:
        began = time.perf_counter()
        process = subprocess.Popen(
            ["timeout", "--kill-after=5", str(limit), *command], stdin=nothing, stdout=log, stderr=log
        )
        _, status, usage = os.wait4(process.pid, 0)
        seconds = time.perf_counter() - began
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            log.seek(0)
            raise SystemExit(f"{' '.join(command)}\nended with {process.returncode}:\n{log.read().decode()[-4000:]}")
    return Measurement(seconds, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024)
