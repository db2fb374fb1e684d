"""Feeds damaged files to the parsers, guided by coverage (atheris, libFuzzer), until each has read ``--inputs`` of
them.

An input is a finding if the parser raises anything but an error of ``fsdpckpt.errors``, or needs more than 5 seconds or
512 MB. A finding is written to ``fuzz-run/TARGET/``, and ends the rounds of that target. A target runs in rounds, each
with another seed and the inputs that earlier rounds found; the same command continues from there. A table follows at
the end; exit code 1 means that there are findings.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, ROOT)
_STATE = re.compile(r"^#(\d+)\s.*?cov: (\d+) ft: (\d+)")
_EXECUTED = re.compile(r"^stat::number_of_executed_units: (\d+)")
_FINDINGS = ("crash-", "timeout-", "oom-", "leak-", "slow-unit-")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("targets", nargs="*", help="names of tests/fuzz/targets.py, or all; none: the table alone")
    parser.add_argument("--inputs", type=int, default=1_000_000, help="of each target, earlier rounds included")
    parser.add_argument("--round", type=int, default=100_000, help="inputs of one round")
    parser.add_argument("--output", default=os.path.join(ROOT, "fuzz-run"))
    return parser.parse_args()


def rounds_of(place: str) -> list[dict[str, float]]:
    try:
        with open(os.path.join(place, "rounds.jsonl"), encoding="utf-8") as file:
            return [json.loads(line) for line in file]
    except FileNotFoundError:
        return []


def findings(place: str) -> list[str]:
    return sorted(name for name in os.listdir(place) if name.startswith(_FINDINGS)) if os.path.isdir(place) else []


def run_round(target: str, place: str, inputs: int, seed: int, output: str) -> bool:
    """One round; returns whether it ended normally. What it tried is recorded either way."""
    begin = time.monotonic()
    before = os.times()
    found = {"seed": seed, "inputs": 0, "cov": 0, "features": 0}
    os.makedirs(place, exist_ok=True)
    command = [sys.executable, os.path.join(ROOT, "scripts", "fuzz_one.py"), target]
    command += [f"--inputs={inputs}", f"--seed={seed}", f"--output={output}"]
    with (
        open(os.path.join(place, "log"), "a", encoding="utf-8") as log,
        subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as child,
    ):
        assert child.stdout is not None
        for raw in child.stdout:
            line = raw.decode(errors="replace")
            if not line.startswith("#") or " DONE " in line or " INITED " in line:
                log.write(line)
            if state := _STATE.match(line):
                found |= {"inputs": int(state[1]), "cov": int(state[2]), "features": int(state[3])}
            elif executed := _EXECUTED.match(line):
                found["inputs"] = int(executed[1])
    after = os.times()
    used = after.children_user + after.children_system - before.children_user - before.children_system
    found |= {"seconds": round(time.monotonic() - begin, 1), "processor": round(used, 1)}
    with open(os.path.join(place, "rounds.jsonl"), "a", encoding="utf-8") as file:
        file.write(json.dumps(found) + "\n")
    return child.returncode == 0


def fuzz(target: str, options: argparse.Namespace) -> None:
    place = os.path.join(options.output, target)
    while True:
        done = rounds_of(place)
        missing = options.inputs - sum(int(each["inputs"]) for each in done)
        if missing <= 0:
            return
        if not run_round(target, place, min(missing, options.round), len(done) + 1, options.output):
            print(f"{target}: ended early, see {place}/log", file=sys.stderr)
            return


def table(targets: list[str], output: str) -> int:
    """Print the totals of all rounds; returns the number of findings."""
    print("| target | inputs | processor seconds | inputs/s | edges | features | findings |")
    print("|---|---|---|---|---|---|---|")
    total = 0
    for target in targets:
        place = os.path.join(output, target)
        done = rounds_of(place)
        if not done:
            continue
        inputs, used = sum(int(each["inputs"]) for each in done), sum(each["processor"] for each in done)
        edges, features = (int(max(each[name] for each in done)) for name in ("cov", "features"))
        total += (count := len(findings(place)))
        rate = inputs / max(used, 0.1)
        print(f"| {target} | {inputs:,} | {used:,.0f} | {rate:,.0f} | {edges:,} | {features:,} | {count} |")
    return total


def main() -> None:
    options = arguments()
    from tests.fuzz.targets import TARGETS

    chosen = list(TARGETS) if options.targets == ["all"] else options.targets
    unknown = [name for name in chosen if name not in TARGETS]
    if unknown:
        sys.exit(f"no target {', '.join(unknown)}: there are {', '.join(TARGETS)}")
    for target in chosen:
        fuzz(target, options)
    sys.exit(1 if table(chosen or list(TARGETS), options.output) else 0)


if __name__ == "__main__":
    main()
