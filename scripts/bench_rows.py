"""Times whole processes in turn: fsdpckpt, ``cp -r`` of the source with an fsync of each file, other programs.

Before every run all writes are flushed (``sync``) and the source is in the state ``--cache`` names: ``warm`` reads it
once before each run, ``cold`` drops it from the page cache. Outputs are deleted after each run. Memory is the largest
resident set of the process (or of its largest child), as the kernel reports it. This process imports nothing large,
since a child begins with its parent's peak.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict

from bench_jobs import MANY, NAMED, ROWS, SCALE
from bench_measure import HERE, MIB, Bench, Row, remove, size_of

UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "": 1}


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
                ratio = f"{entry.cpu / MANY * 1e6:.0f} us of CPU a tensor"
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
    usual = [name for name in ROWS if not name.startswith((SCALE, NAMED))]
    groups = f"{SCALE}, {NAMED}: all {SCALE}-..., {NAMED}-..."
    parser.add_argument("--rows", default=",".join(usual), help=f"any of {','.join(ROWS)}; {groups}")
    parser.add_argument("--pairs", type=int, default=3, help="how often each contender runs")
    parser.add_argument("--tool-runs", type=int, default=1, help="how often other programs run, as they are slow")
    parser.add_argument("--cache", choices=("warm", "cold"), default="warm", help="state of the source's page cache")
    parser.add_argument("--limit", type=float, default=900, help="seconds one run may take")
    parser.add_argument("--directory", default=os.path.join(os.path.dirname(HERE), "bench-run"), help="scratch space")
    parser.add_argument("--convert-options", default="", help="more options for fsdpckpt convert, in one argument")
    parser.add_argument("--keep", action="store_true", help="leave the sources for the next time")
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of the table")
    options = parser.parse_args(arguments)
    if options.rows in (SCALE, NAMED):
        options.rows = ",".join(name for name in ROWS if name.startswith(options.rows))
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
