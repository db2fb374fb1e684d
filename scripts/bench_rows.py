"""Whole processes, timed in turn: fsdpckpt, ``cp -r`` of the source with an fsync of each file, other programs.

Every run starts with nothing left to write back (``sync``) and the source in the state ``--cache`` says: ``warm`` reads
it once before each run, ``cold`` drops it from the page cache. Outputs are deleted after each run. Memory is the
largest resident set of the process (or of its largest child), as the kernel reports it. This process imports nothing
large, since a child begins with its parent's peak.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field

HERE = os.path.dirname(os.path.abspath(__file__))
PROGRAM = os.path.join(os.path.dirname(sys.executable), "fsdpckpt")
SYNC = 'find "$1" -type f -exec sync {} +'
MIB = 1024 * 1024
MANY = 100_000  # tensors
UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "": 1}


@dataclass(frozen=True)
class Measurement:
    """``cpu``: seconds of processor time, all threads and child processes together; ``seconds``: by the clock."""

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
    """One job: its contenders, ours first."""

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
        """Where a target goes; no two benches share one."""
        return os.path.join(self.directory, f"{os.getpid()}-{name}")

    def make(self, form: str, amount: int, suffix: str = "") -> str:
        """A source of that form and size, made unless an earlier bench left it."""
        name = f"{form}-{amount}{suffix}"
        path = os.path.join(self.directory, name)
        self.made |= {path, os.path.join(self.directory, "random.bin")}
        if os.path.exists(path):
            return path
        talk(f"making {name}")
        python = [sys.executable]
        if form in ("dcp", "one-tensor"):
            python += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4"]
        command = [*python, os.path.join(HERE, "bench_make.py"), form, path, str(amount)]
        subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"}, stdin=subprocess.DEVNULL)
        return path

    def derive(self, flavor: str, source: str) -> str:
        """``source`` as a directory of that producer, made unless an earlier bench left it."""
        path = f"{source}-{flavor}"
        self.made.add(path)
        if not os.path.exists(path):
            talk(f"making {os.path.basename(path)}")
            subprocess.run([PROGRAM, "convert", source, path, "--quiet", "--flavor", flavor], check=True)
        return path

    def prepare(self, source: str, target: str) -> None:
        remove(target)
        subprocess.run(["sync"], check=True)
        for path in files(source):
            with open(path, "rb", buffering=0) as file:
                if self.options.cache == "cold":
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
                else:
                    buffer = bytearray(8 * MIB)
                    while file.readinto(buffer):
                        pass

    def run(self, row: Row) -> Row:
        """Run the row's contenders in turn, ``--pairs`` times; those that never ran are dropped."""
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
    """Run one process to its end. Raises SystemExit with its output when it fails or takes over ``limit`` seconds."""
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


def copying(source: str, target: str) -> Contender:
    return Contender("cp -r + fsync", ["sh", "-c", f'cp -r "$0" "$1" && {SYNC}', source, target])


def tool(direction: str, source: str, target: str) -> Contender:
    script = f'"$2" -W ignore -m torch.distributed.checkpoint.format_utils {direction} "$0" "$1" && {SYNC}'
    return Contender("format_utils + fsync", ["sh", "-c", script, source, target, sys.executable])


def converting(bench: Bench, source: str, target: str, *arguments: str) -> Contender:
    extra = bench.options.convert_options.split()
    return Contender("fsdpckpt", [PROGRAM, "convert", source, target, "--quiet", *arguments, *extra])


def dcp_full(bench: Bench) -> Row:
    source, target = bench.make("dcp", bench.options.size), bench.path("out.pt")
    contenders = [converting(bench, source, target, "--to", "full"), copying(source, target)]
    return Row("dcp -> full", source, target, [*contenders, tool("dcp_to_torch", source, target)])


def full_dcp(bench: Bench) -> Row:
    source, target = bench.make("full", bench.options.size, ".pt"), bench.path("out")
    ours = converting(bench, source, target, "--to", "sharded", "--world-size", "4")
    return Row(
        "full -> dcp of 4", source, target, [ours, copying(source, target), tool("torch_to_dcp", source, target)]
    )


def ranks_dcp(bench: Bench) -> Row:
    source, target = bench.make("ranks", bench.options.size), bench.path("out")
    ours = converting(bench, source, target, "--to", "sharded", "--world-size", "4")
    return Row("4 rank files -> dcp of 4", source, target, [ours, copying(source, target)])


def dcp_three(bench: Bench) -> Row:
    source, target = bench.make("dcp", bench.options.size), bench.path("out")
    ours = converting(bench, source, target, "--to", "sharded", "--world-size", "3")
    return Row("dcp of 4 -> dcp of 3", source, target, [ours, copying(source, target)])


def flat_full(bench: Bench) -> Row:
    source, target = bench.make("flat", bench.options.size), bench.path("out.pt")
    ours = converting(bench, source, target, "--to", "full")
    return Row("flattened of 4 -> full", source, target, [ours, copying(source, target)])


def full_flat(bench: Bench) -> Row:
    source, target = bench.make("full", bench.options.size, ".pt"), bench.path("out")
    units = bench.make("units", bench.options.size, ".json")
    ours = converting(bench, source, target, "--to", "flattened", "--world-size", "4", "--units", units)
    return Row("full -> flattened of 4", source, target, [ours, copying(source, target)])


def flat_three(bench: Bench) -> Row:
    source, target = bench.make("flat", bench.options.size), bench.path("out")
    ours = converting(bench, source, target, "--to", "flattened", "--world-size", "3")
    return Row("flattened of 4 -> flattened of 3", source, target, [ours, copying(source, target)])


def accelerate(bench: Bench) -> Row:
    whole = bench.derive("accelerate", bench.make("dcp", bench.options.size))
    source, target = os.path.join(whole, "pytorch_model_fsdp_0"), bench.path("out")
    ours = converting(bench, source, target, "--flavor", "huggingface")
    script = f'"$2" merge-weights "$0" "$1" && {SYNC}'
    program = os.path.join(os.path.dirname(sys.executable), "accelerate")
    theirs = Contender("accelerate merge-weights + fsync", ["sh", "-c", script, source, target, program])
    return Row("accelerate's weights of 4 -> safetensors", source, target, [ours, copying(source, target), theirs])


def lightning(bench: Bench) -> Row:
    source, target = bench.derive("fabric", bench.make("dcp", bench.options.size)), bench.path("out.ckpt")
    ours = converting(bench, source, target, "--flavor", "fabric", "--to", "full")
    script = f'"$2" -W ignore -m lightning.fabric.utilities.consolidate_checkpoint "$0" --output_file "$1" && {SYNC}'
    theirs = Contender(
        "Lightning's consolidate_checkpoint + fsync", ["sh", "-c", script, source, target, sys.executable]
    )
    return Row("Lightning's directory of 4 -> one file", source, target, [ours, copying(source, target), theirs])


def one_tensor(bench: Bench) -> Row:
    source, target = bench.make("one-tensor", 4 * 10**9), bench.path("out.pt")
    contenders = [converting(bench, source, target, "--to", "full"), copying(source, target)]
    return Row("dcp -> full, one tensor of 4 GB", source, target, contenders)


def inspect_thousand(bench: Bench) -> Row:
    source = bench.make("many", 1000, ".pt")
    return Row(
        "inspect of 1,000 tensors", source, bench.path("none"), [Contender("fsdpckpt", [PROGRAM, "inspect", source])]
    )


def layout(bench: Bench) -> Row:
    command = [sys.executable, os.path.join(HERE, "bench_layout.py")]
    name = "layout of 1,000 units on 4,096 ranks"
    return Row(name, bench.path("none"), bench.path("none"), [Contender("fsdpckpt", command)])


def help_text(bench: Bench) -> Row:
    return Row("--help", bench.path("none"), bench.path("none"), [Contender("fsdpckpt", [PROGRAM, "--help"])])


def hundred_thousand(bench: Bench) -> Row:
    source, target = bench.make("many", MANY, ".pt"), bench.path("out")
    ours = converting(bench, source, target, "--to", "sharded", "--container", "dcp", "--world-size", "4")
    row = Row("100,000 tensors, full -> dcp", source, target, [ours, copying(source, target)])
    row.note = "per-tensor"
    return row


def hundred_thousand_full(bench: Bench) -> Row:
    source, target = bench.make("many", MANY, ".pt"), bench.path("out.pt")
    row = Row("100,000 tensors, full -> full", source, target, [converting(bench, source, target, "--to", "full")])
    row.contenders.append(copying(source, target))
    row.note = "per-tensor"
    return row


def journal(bench: Bench) -> Row:
    """What the journal costs: the same conversion with one that is synced as it is, and with one that never is."""
    source, target = bench.make("full", bench.options.size, ".pt"), bench.path("out")
    words = ["convert", source, target, "--quiet", "--to", "sharded", "--world-size", "4"]
    run = "from fsdpckpt.executor import recorder; {}; from fsdpckpt.cli.main import main; main()"
    with_it, without = (run.format(code) for code in ("recorder.SYNC_SECONDS", "recorder.SYNC_SECONDS = 1e6"))
    contenders = [
        Contender("fsdpckpt", [sys.executable, "-c", with_it, *words]),
        Contender("without syncing the journal", [sys.executable, "-c", without, *words]),
    ]
    return Row("journal, full -> dcp of 4", source, target, contenders, note="journal")


ROWS: dict[str, Callable[[Bench], Row]] = {
    "dcp-full": dcp_full,
    "full-dcp": full_dcp,
    "ranks-dcp": ranks_dcp,
    "dcp-3": dcp_three,
    "flat-full": flat_full,
    "full-flat": full_flat,
    "flat-3": flat_three,
    "accelerate": accelerate,
    "lightning": lightning,
    "one-tensor": one_tensor,
    "inspect": inspect_thousand,
    "layout": layout,
    "help": help_text,
    "journal": journal,
    "many": hundred_thousand,
    "many-full": hundred_thousand_full,
}


def table(rows: list[tuple[Row, int]], options: argparse.Namespace) -> str:
    lines = [
        f"{options.pairs} runs in turn, medians; page cache {options.cache}; {os.cpu_count()} cores",
        "",
        "| job | source | program | seconds | of the copy | GB/s | CPU seconds | peak memory |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row, nbytes in rows:
        copy = next((entry.seconds for entry in row.contenders if entry.name.startswith("cp")), None)
        for entry in row.contenders:
            ratio = f"{entry.seconds / copy:.2f} x" if copy else ""
            rate = f"{nbytes / entry.seconds / 1e9:.2f}" if copy else ""
            if row.note == "per-tensor" and entry is row.contenders[0]:
                ratio = f"{entry.seconds / MANY * 1e6:.0f} us a tensor"
            if row.note == "journal" and entry is row.contenders[0]:
                ratio = f"{entry.seconds / row.contenders[1].seconds:.3f} x without"
            lines.append(
                f"| {row.name} | {nbytes / 1e9:.2f} GB | {entry.name} | {entry.seconds:.2f} | {ratio} | {rate} "
                f"| {entry.cpu:.2f} | {entry.peak_bytes // MIB} MiB |"
            )
    return "\n".join(lines)


def parse_size(text: str) -> int:
    digits = text.upper().rstrip("KMGIB")
    return int(float(digits) * UNITS[text.upper()[len(digits) :]])


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/bench", description=__doc__)
    parser.add_argument(
        "--size", type=parse_size, default=parse_size("4GB"), help="of the checkpoint: 4GB, 16GB, 200MB"
    )
    parser.add_argument("--rows", default=",".join(ROWS), help=f"any of {','.join(ROWS)}")
    parser.add_argument("--pairs", type=int, default=3, help="how often each contender runs")
    parser.add_argument("--tool-runs", type=int, default=1, help="how often other programs run, as they are slow")
    parser.add_argument("--cache", choices=("warm", "cold"), default="warm", help="state of the source's page cache")
    parser.add_argument("--limit", type=float, default=900, help="seconds one run may take")
    parser.add_argument("--directory", default=os.path.join(os.path.dirname(HERE), "bench-run"), help="scratch space")
    parser.add_argument("--convert-options", default="", help="more options for fsdpckpt convert, in one argument")
    parser.add_argument("--keep", action="store_true", help="leave the sources for the next time")
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of the table")
    options = parser.parse_args(arguments)
    unknown = set(options.rows.split(",")) - set(ROWS)
    if unknown:
        parser.error(f"no such rows: {', '.join(sorted(unknown))}")
    return options


def main() -> None:
    options = parse(sys.argv[1:])
    bench = Bench(options)
    rows = []
    try:
        for name in options.rows.split(","):
            row = bench.run(ROWS[name](bench))
            rows.append((row, size_of(row.source)))
    finally:
        if not options.keep:
            for path in bench.made:
                remove(path)
    if options.json:
        print(json.dumps([{**asdict(row), "source_bytes": nbytes} for row, nbytes in rows], indent=2))
    else:
        print(table(rows, options))


if __name__ == "__main__":
    main()
