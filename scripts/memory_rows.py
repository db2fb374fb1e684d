"""Compares the peak memory of whole conversions, as the kernel reports it, with ``--max-memory``.

The conversions are to every layout and container, with 1, 4 and 16 threads, of one large tensor, a transposed one, a
cast, many tiny tensors. The number of threads must not change a byte. With ``--cgroup`` all of them run once more in a
control group, which also counts the page cache, and which is limited to exactly the promised memory.

A conversion may use ``--max-memory``, the memory of the program itself (the first row), and that of its tensors' names;
if one needs 16 MiB more, the script ends with exit code 1. This process imports nothing large, since a child begins
with its parent's peak.
"""

from __future__ import annotations

import argparse
import filecmp
import json
import os
import shutil
import struct
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field

from memory_groups import Group, NoGroup, group_of

MIB = 1 << 20
PROGRAM = [sys.executable, "-m", "fsdpckpt"]
BUFFERED = [sys.executable, "-c", "import os; del os.O_DIRECT; from fsdpckpt.cli import main; main()"]
SHARDED = ["--to", "sharded", "--buffers", "none", "--world-size"]
FLATTENED = ["--to", "flattened", "--world-size", "3", "--unit", "none", "--buffers", "none", "--use-orig-params"]
ROW = 1024  # elements


@dataclass(frozen=True)
class Case:
    """One conversion: its source and options. ``tensors``: the number of names that it holds in memory."""

    name: str
    source: str
    options: Sequence[str]
    threads: Sequence[int] = (1, 4, 16)
    tensors: int = 1


CASES = (
    Case("one tensor -> full", "one", ["--to", "full"]),
    Case("one tensor -> dcp of 4", "one", [*SHARDED, "4", "--container", "dcp"]),
    Case("one tensor -> 3 rank files", "one", [*SHARDED, "3", "--container", "torch"]),
    Case(
        "one tensor -> flattened of 3",
        "one",
        FLATTENED,
    ),
    Case("one tensor -> safetensors", "one", ["--to", "full", "--container", "safetensors"]),
    Case("one tensor -> bfloat16", "one", ["--to", "full", "--dtype", "bfloat16"]),
    Case("one tensor -> float64", "one", ["--to", "full", "--dtype", "float64"]),
    Case("one tensor, --verify full", "one", ["--to", "full", "--verify", "full"], (4,)),
    Case("dcp of 4 -> full", "dcp", ["--to", "full"]),
    Case("dcp of 4 -> dcp of 3, --verify full", "dcp", [*SHARDED, "3", "--verify", "full"], (4,)),
    Case("flattened of 3 -> full", "flat", ["--to", "full"]),
    Case("transposed -> full", "transposed", ["--to", "full"]),
    Case("transposed -> dcp of 4, --verify full", "transposed", [*SHARDED, "4", "--verify", "full"], (4,)),
    Case("many tensors -> full", "many", ["--to", "full"], (4,), 1),
    Case("many tensors -> dcp of 4", "many", [*SHARDED, "4"], (4,), 1),
)


@dataclass
class Bench:
    """Sources of ``nbytes`` below ``directory``, each made when it is first needed."""

    directory: str
    nbytes: int
    many: int
    made: dict[str, str] = field(default_factory=dict)

    def source(self, name: str) -> str:
        if name not in self.made:
            path = os.path.join(self.directory, name)
            self.made[name] = getattr(self, f"_{name}")(path)
        return self.made[name]

    def _tiny(self, path: str) -> str:
        return safetensors(f"{path}.safetensors", {"w": (3, 5)})

    def _one(self, path: str) -> str:
        return safetensors(f"{path}.safetensors", {"w": (self.nbytes // (4 * ROW) + 1, ROW)})

    def _many(self, path: str) -> str:
        return safetensors(f"{path}.safetensors", {f"layers.{number}.weight": (3, 5) for number in range(self.many)})

    def _dcp(self, path: str) -> str:
        convert(self.source("one"), path, [*SHARDED, "4"])
        return path

    def _flat(self, path: str) -> str:
        convert(self.source("one"), path, FLATTENED)
        return path

    def _transposed(self, path: str) -> str:
        script = (
            "import sys, torch\n"
            "rows = int(sys.argv[2]) // 4096 + 1\n"
            "torch.save({'w': torch.randn(1024, rows, generator=torch.Generator().manual_seed(1)).t()}, sys.argv[1])\n"
        )
        subprocess.run([sys.executable, "-c", script, f"{path}.pt", str(self.nbytes // 8)], check=True)
        return f"{path}.pt"


def safetensors(path: str, shapes: dict[str, tuple[int, ...]]) -> str:
    """Random float32 in one file, written in small parts."""
    header, at = {}, 0
    for name, (rows, columns) in shapes.items():
        header[name] = {"dtype": "F32", "shape": [rows, columns], "data_offsets": [at, at + 4 * rows * columns]}
        at += 4 * rows * columns
    text = json.dumps(header).encode()
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        while at > 0:
            at -= file.write(os.urandom(min(at, MIB)))
    return path


def convert(
    source: str, target: str, options: Sequence[str], *, address_space: int = 0, group: Group | None = None
) -> int:
    """Peak bytes of one conversion. ``address_space``: of ulimit -v, in KiB. Raises SystemExit when it fails.

    In a ``group`` all that is written goes through the page cache, as on file systems without direct writes.
    """
    command = [*(PROGRAM if group is None else BUFFERED), "convert", source, target, "--quiet", *options]
    if group is not None:
        command = group.entering(command)
    if address_space:
        command = ["sh", "-c", f'ulimit -v {address_space} && exec "$@"', "sh", *command]
    with tempfile.TemporaryFile() as log, open(os.devnull) as nothing:
        process = subprocess.Popen(command, stdin=nothing, stdout=log, stderr=log)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            log.seek(0)
            raise SystemExit(f"{source} {' '.join(options)}: ended with {process.returncode}\n{log.read().decode()}")
    return usage.ru_maxrss * 1024


def forget(path: str) -> None:
    """Drop the files at ``path`` from the page cache, where they would be counted as this process's."""
    for name in [path] if os.path.isfile(path) else [entry.path for entry in os.scandir(path)]:
        with open(name, "rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def remove(path: str) -> None:
    shutil.rmtree(path) if os.path.isdir(path) else os.unlink(path)


def same(one: str, other: str) -> bool:
    if os.path.isfile(one):
        return filecmp.cmp(one, other, shallow=False)
    names = sorted(name for name in os.listdir(one))
    return names == sorted(os.listdir(other)) and filecmp.cmpfiles(one, other, names, shallow=False)[0] == names


def run(bench: Bench, case: Case, memory: int) -> tuple[list[int], bool]:
    """The peak with each number of threads, and whether all wrote the same bytes."""
    peaks, targets = [], []
    suffix = ".safetensors" if "safetensors" in case.options else ""
    for threads in case.threads:
        target = os.path.join(bench.directory, f"out-{threads}{suffix}")
        options = [*case.options, "--threads", str(threads), "--max-memory", str(memory)]
        peaks.append(convert(bench.source(case.source), target, options))
        targets.append(target)
    alike = all(same(targets[0], target) for target in targets[1:])
    for target in targets:
        remove(target)
    return peaks, alike


def run_in_group(bench: Bench, case: Case, memory: int, limit: int) -> str:
    """Run a conversion in a control group of ``limit`` bytes, where it has to write the same bytes."""
    suffix = ".safetensors" if "safetensors" in case.options else ""
    free, limited = (os.path.join(bench.directory, f"out-{name}{suffix}") for name in ("free", "limited"))
    options = [*case.options, "--threads", str(case.threads[-1]), "--max-memory", str(memory)]
    source = bench.source(case.source)
    convert(source, free, options)
    forget(source)
    with group_of(limit) as group:
        convert(source, limited, options, group=group)
        used = group.peak
    alike = same(free, limited)
    remove(free)
    remove(limited)
    if not alike:
        raise SystemExit(f"{case.name}: other bytes in a control group")
    return "" if used is None else f", {used // MIB} MiB used with the page cache"


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/memory_test", description=__doc__)
    parser.add_argument("--size", type=int, default=2000, help="MB of the one tensor; default 2000")
    parser.add_argument("--many", type=int, default=100_000, help="how many tiny tensors")
    parser.add_argument("--max-memory", type=int, default=128, help="MiB; default 128")
    parser.add_argument(
        "--constant", type=int, default=16, help="MiB a peak may lie over the first row's and --max-memory"
    )
    parser.add_argument("--a-tensor", type=int, default=16, help="KiB more that each of many tensors may take")
    parser.add_argument("--address-space", type=int, default=0, help="MiB of ulimit -v to run one conversion under")
    parser.add_argument("--cgroup", action="store_true", help="run all conversions in a control group too")
    parser.add_argument("--cases", default="", help="only those whose names hold this")
    parser.add_argument("--directory", default=None, help="where to work; default: a temporary directory")
    options = parser.parse_args()
    memory = options.max_memory * MIB
    missed = []
    print(f"| conversion, --max-memory {options.max_memory}MiB | peak with 1 / 4 / 16 threads | same bytes |")
    print("|---|---|---|")
    with tempfile.TemporaryDirectory(dir=options.directory, prefix="memory-test-") as directory:
        bench = Bench(directory, options.size * 1_000_000, options.many)
        least = convert(bench.source("tiny"), os.path.join(directory, "tiny.pt"), ["--to", "full"])
        print(f"| 60 bytes | {least // MIB} MiB | |")
        for case in (case for case in CASES if options.cases in case.name):
            peaks, alike = run(bench, case, memory)
            shown = " / ".join(f"{peak // MIB}" for peak in peaks)
            print(f"| {case.name} | {shown} MiB | {'yes' if alike else 'NO'} |", flush=True)
            names = options.many * options.a_tensor * 1024 if case.source == "many" else 0
            limit = least + memory + options.constant * MIB + names
            if not alike or max(peaks) > limit:
                missed.append(case.name)
            if options.cgroup:
                used = run_in_group(bench, case, memory, limit)
                print(f"| {case.name} in a cgroup of {limit // MIB} MiB | done{used} | yes |", flush=True)
        if options.address_space:
            target = os.path.join(directory, "limited")
            convert(bench.source("one"), target, ["--to", "full"], address_space=options.address_space * 1024)
            print(f"| one tensor -> full under ulimit -v {options.address_space} MiB | done | |")
    for name in missed:
        print(f"missed: {name}", file=sys.stderr)
    return 1 if missed else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except NoGroup as error:
        print(f"no control group can be made here: {error}", file=sys.stderr)
        sys.exit(3)
