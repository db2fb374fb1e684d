"""Runs the same commands with two clones of the repository, and compares their output, files and exit codes.

It uses only the command line, so that the clones may differ in every module. Each clone has one interpreter that forks
for every command; conversions by workers fork from one that has imported torch, with torchrun's variables. The sources
are real checkpoints of the test suite's oracle, made once, and the golden ones of the repository. The results of the
first clone are kept beside them, for the next comparison with the same code.

Not compared: durations, free disk space, temporary paths; without ``--words`` also the wording of errors.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
LIMIT = 60  # seconds for one command
MAX_DIFFERENCES = 40  # differences
VOLATILE = {"seconds", "disk_free"}  # keys of --json documents
ERROR_WORDS = {"what", "why", "next_step", "details"}  # keys of an error's document
# What describes the oracle's model; ``PARAMETERS`` is a file of the corpus.
BUFFERS = [f"--buffers={name}" for name in ("counter", "mask", "scale", "void", "coarse")]
PARAMETERS = "corpus/parameters.txt"


@dataclass(frozen=True)
class Case:
    """One command. ``id`` names its directory under ``out``; ``workers``: how many processes run it, 0 for one."""

    id: str
    arguments: tuple[str, ...]
    workers: int = 0


# --- The commands.


def looked_at(source: str, name: str, *, units: str | None = None, quick: bool = False) -> Iterator[Case]:
    """Every command that only reads."""
    beside = ("--units", units) if units else ()
    yield Case(f"inspect-json/{name}", ("inspect", source, "--json", "--ranks", *beside))
    yield Case(f"inspect-text/{name}", ("inspect", source, *beside))
    yield Case(f"verify/{name}", ("verify", source, "--json", "--digests", *beside))
    if quick:
        return
    yield Case(f"inspect-plain-json/{name}", ("inspect", source, "--json", *beside))
    yield Case(f"inspect-names/{name}", ("inspect", source, "--names-only", *beside))
    yield Case(f"inspect-ranks/{name}", ("inspect", source, "--ranks", *beside))
    yield Case(f"inspect-stats/{name}", ("inspect", source, "--stats", "--json", *beside))
    yield Case(f"inspect-report/{name}", ("inspect", source, "--report", f"out/report/{name}.html", *beside))
    yield Case(f"verify-text/{name}", ("verify", source, "--finite", *beside))


def converted(source: str, name: str, target: str, *options: str, dry: bool = True, workers: int = 0) -> Iterator[Case]:
    """A conversion to ``out/<name>/<target>``, and its plan."""
    to = f"out/{name}/{target}"
    yield Case(f"convert/{name}/{target}", ("convert", source, to, "--json", *options), workers)
    if dry and not workers:
        yield Case(f"dry-run/{name}/{target}", ("convert", source, f"{to}.dry", "--json", "--dry-run", *options))


UNITS = ["--use-orig-params", "--unit=blocks.*", "--unit=frozen"]
FEW = {
    "full.pt": ["--to=full", "--key-type=name"],
    "three": ["--to=sharded", "--container=torch", "--world-size=3"],
    "dcp3": ["--to=sharded", "--container=dcp", "--world-size=3"],
    "flat2": ["--to=flattened", "--world-size=2", *UNITS],
}
MORE = {
    "ids.pt": ["--to=full", "--key-type=id"],
    "as-is.pt": ["--to=full", "--verify=full", "--max-memory=1MiB", "--threads=1"],
    "as-is": [],
    "full-dcp": ["--to=full", "--container=dcp"],
    "weights": ["--container=safetensors", "--only=model", "--max-shard-size=1KB"],
    "weights.safetensors": ["--only=model", "--dtype=bfloat16"],
    "names2": ["--to=sharded", "--container=torch", "--world-size=2", "--key-type=name", "--mesh-device=cuda"],
    "ids2": ["--to=sharded", "--container=torch", "--world-size=2", "--key-type=id", "--mesh-device=cpu"],
    "sharded-tensor4": ["--to=sharded", "--container=torch", "--tensor=sharded-tensor", "--world-size=4"],
    "dcp1": ["--to=sharded", "--container=dcp", "--world-size=1"],
    "dcp-ids": ["--to=sharded", "--container=dcp", "--world-size=2", "--key-type=id"],
    "many": ["--to=sharded", "--container=torch", "--world-size=11"],
    "zeros": ["--to=sharded", "--container=dcp", "--world-size=2", "--missing-state=zeros", "--key-type=name"],
    "skip.pt": ["--to=full", "--missing-state=skip", "--key-type=id"],
    "optim.pt": ["--to=full", "--only=optim"],
    "selected.pt": ["--to=full", "--include=*blocks*", "--exclude=*bias", "--only=model"],
    "renamed.pt": ["--to=full", "--rename=blocks=layers", "--add-prefix=module.", "--key-type=name"],
    "stripped": ["--to=sharded", "--container=dcp", "--world-size=2", "--strip-prefix=blocks.", "--include=blocks.*"],
    "cast": ["--to=sharded", "--container=torch", "--world-size=2", "--dtype=bfloat16", "--optim-dtype=float64"],
    "flat3-orig": ["--to=flattened", "--world-size=3", *UNITS],
    "flat3": ["--to=flattened", "--world-size=3", "--no-use-orig-params", *UNITS[1:]],
    "flat4-hybrid": ["--to=flattened", "--world-size=4", "--strategy=hybrid-shard", "--shard-size=2", *UNITS],
    "flat2-none": ["--to=flattened", "--world-size=2", "--strategy=no-shard", *UNITS, "--key-type=name"],
    "flat2-bf16": ["--to=flattened", "--world-size=2", "--param-dtype=bfloat16", *UNITS],
}
FLAVORS = (
    "accelerate", "fabric", "huggingface", "lightning", "lightning-model-parallel", "torchtitan", "torchtitan-old",
    "trainer", "verl",
)  # fmt: skip


def flavored(source: str, name: str, *extra: str) -> Iterator[Case]:
    for flavor in FLAVORS:
        given = [f"--flavor={flavor}", *(["--only=model"] if flavor == "huggingface" else [])]
        ranks = [*given, "--to=sharded", "--world-size=2", *(() if flavor == "huggingface" else extra)]
        yield from converted(source, name, f"{flavor}-sharded", *ranks)
        yield from converted(source, name, f"{flavor}-full", *given, "--to=full", dry=False)


LAYERS = ["--unit=l.*"]
GOLDEN_UNITS = {  # of the checkpoints whose flat parameters say no names
    "f1_flat_raw": LAYERS, "f1_orig_raw": LAYERS, "f1_flat_local": LAYERS, "f1_orig_local": LAYERS,
    "f1_tiny_f": ["--unit=none"], "f1_tiny_o": ["--unit=none"], "f1_nested_o": ["--unit=outer.0", "--unit=outer.1"],
}  # fmt: skip


def golden_cases(side: Path, *, quick: bool) -> Iterator[Case]:
    """Checkpoints of old torch versions, with their truth as a reference."""
    for directory in sorted({Path(folder) for folder, _, files in os.walk(side / "golden") if files}):
        source = str(directory.relative_to(side))
        name = source.replace("/", "-")
        truth = source.replace("golden", "truth", 1) + ".pt"
        yield from looked_at(source, name, quick=True)
        for target in ("full.pt", "three"):
            yield from converted(source, name, target, *FEW[target], dry=target == "three" and not quick)
        if not (side / truth).exists():
            continue
        units = GOLDEN_UNITS.get(directory.name, [])
        if units:
            more = [f"--reference={truth}", *units]
            yield from converted(source, name, "named.pt", "--to=full", *more, "--key-type=name", dry=False)
            yield from converted(source, name, "told3", "--to=flattened", "--world-size=3", *more, dry=False)
            yield Case(f"units/{name}", ("units", "--from", source, *more, "--json"))
            yield Case(f"units-text/{name}", ("units", "--from", source, *more))
        if quick:
            continue
        yield Case(f"diff/{name}", ("diff", source, truth, "--json"))
        yield Case(f"diff-text/{name}", ("diff", source, truth))
        for target, options in (FEW | MORE).items():
            if target not in ("full.pt", "three", "flat2"):
                yield from converted(source, name, target, *options, dry=False)
    for file in sorted((side / "golden").rglob("*old*.pt")):
        source = str(file.relative_to(side))
        yield from looked_at(source, source.replace("/", "-"), quick=quick)


def about(options: list[str]) -> list[str]:
    """The options that the oracle's model needs to be converted with ``options``."""
    if any(option.startswith("--strip-prefix") for option in options):
        return ["--buffers=none"]
    if "--to=flattened" in options:
        return [*BUFFERS, f"--parameters={PARAMETERS}"]
    return BUFFERS if "--to=sharded" in options else []


def oracle_cases(base: Path, world: int, *, quick: bool) -> Iterator[Case]:
    """What real FSDP1 and FSDP2 saved, in every form."""
    rich = {"f1_dcp", "f2_ranks", "f2_dcp_ids", "f1_flat_full.pt", "f2_rich_ranks"}
    few = {"f2_ranks", "f1_dcp", "f2_full_ids.pt", "f1_flat_ranks", "f2_dcp_flattened"}
    for path in sorted((base / f"oracle-{world}").iterdir()):
        if path.name == "truth" or (quick and path.name not in few):
            continue
        source, name = f"corpus/oracle-{world}/{path.name}", f"oracle-{world}-{path.name}"
        yield from looked_at(source, name, quick=quick)
        truth = f"corpus/oracle-{world}/truth/{path.name.split('_')[0]}.pt"
        yield Case(f"diff/{name}", ("diff", source, truth, "--json"))
        wanted = FEW | MORE if path.name in (rich & few if quick else rich) else FEW
        for target, options in wanted.items():
            yield from converted(source, name, target, *options, *about(options), dry=not quick)
        if path.name in (("f2_ranks",) if quick else ("f2_ranks", "f1_full.pt", "f2_full_ids.pt")):
            yield from flavored(source, name, *BUFFERS)
    if not quick:
        full, ranks = (f"corpus/oracle-{world}/{form}" for form in ("f2_full.pt", "f2_ranks"))
        yield Case("diff/other", ("diff", full, f"corpus/oracle-{world}/f1_full.pt", "--json", "--rtol=1e-5"))
        yield Case("diff/only", ("diff", full, ranks, "--only=model"))


def flattened_cases(base: Path, world: int, *, quick: bool) -> Iterator[Case]:
    """What real FSDP1 saved flattened, with units files, and with what they are inferred from."""
    few = {"nested-orig", "nested-flat", "transformer-orig", "tiny-flat"}
    for path in sorted((base / f"oracle-flattened-{world}").iterdir()):
        if quick and path.name not in few:
            continue
        top = f"corpus/oracle-flattened-{world}/{path.name}"
        units, truth = f"{top}/units.json", f"{top}/truth.pt"
        for form in ("flat", "raw", "mix", "sharded", "dcp_local"):
            if not (path / form).is_dir() or (quick and form in ("dcp_local", "sharded")):
                continue
            source, name = f"{top}/{form}", f"flat-{world}-{path.name}-{form}"
            needs = units if form in ("raw", "mix", "dcp_local") else None
            yield from looked_at(source, name, units=needs, quick=quick or form != "flat")
            given = ["--units", needs] if needs else []
            yield Case(f"diff/{name}", ("diff", source, truth, "--json", *given))
            yield from converted(source, name, "full.pt", "--to=full", "--key-type=name", *given, dry=False)
            yield from converted(source, name, "ids.pt", "--to=full", "--key-type=id", *given, dry=not quick)
            yield from converted(source, name, "dcp3", "--to=sharded", "--world-size=3", *given, dry=False)
            three = [*FEW["three"], "--key-type=name", *(["--buffers=none"] if form != "raw" else [])]
            yield from converted(source, name, "three", *three, *given, dry=not quick)
            yield from converted(source, name, "again3", "--to=flattened", "--world-size=3", *given)
            yield from converted(source, name, "zeros.pt", "--to=full", "--missing-state=zeros", *given, dry=False)
            if form == "raw":
                modules = [unit["prefix"] for unit in json.loads((path / "units.json").read_text())["units"]]
                known = ["--reference", truth, *(f"--unit={module}" for module in modules if module)]
                yield Case(f"units/{name}", ("units", "--from", source, *known, "--json"))
                yield Case(f"units-proved/{name}", ("units", "--from", source, "--units", units))
                yield from converted(source, name, "inferred.pt", "--to=full", *known, "--key-type=name", dry=False)
            if form == "flat" and not quick:
                other = "--no-use-orig-params" if path.name.endswith("orig") else "--use-orig-params"
                yield from converted(source, name, "other", "--to=flattened", "--world-size=2", other)
                both = ["--to=flattened", "--world-size=4", "--strategy=hybrid-shard", "--shard-size=2"]
                yield from converted(source, name, "hybrid", *both)
                yield from converted(source, name, "none", "--to=flattened", "--world-size=2", "--strategy=no-shard")


def second_steps(first: list[Case], *, quick: bool) -> Iterator[Case]:
    """What reads the output of the commands before it: safetensors, every flavor, our own rank files."""
    ends = ["weights", "weights.safetensors", "sharded-tensor4", "full-dcp", "dcp-ids", "flat3-orig", "flat3"]
    ends += [] if quick else [*(f"{flavor}-{way}" for flavor in FLAVORS for way in ("sharded", "full")), "many"]
    for case in first:
        if case.id.startswith("convert/oracle-2-f2_ranks/") and case.id.rsplit("/", 1)[1] in ends:
            source, name = case.arguments[2], case.id.removeprefix("convert/").replace("/", "-") + "-again"
            yield from looked_at(source, name, quick=True)
            for target, options in FEW.items():
                yield from converted(source, name, target, *options, dry=False)


def refusals() -> Iterator[Case]:
    """Wrong command lines, and sources that are not checkpoints."""
    source = "corpus/oracle-2/f2_ranks"
    for number, arguments in enumerate(
        [
            ("inspect", "nowhere"), ("inspect", "golden"), ("convert", source), ("convert", source, source),
            ("convert", source, "out/x", "--world-size=0"), ("convert", source, "out/x", "--to=full", "--world-size=2"),
            ("convert", source, "out/x.pt", "--units=corpus/oracle-2/f2_full.pt"), ("diff", source),
            ("convert", source, "out/x.safetensors"), ("convert", source, "out/x", "--tensor=dtensor", "--to=full"),
            ("convert", source, "out/x.pt", "--include=nothing"), ("verify", source, "--units=nowhere"),
            ("convert", source, "out/x.pt", "--rename=blocks=embed"), ("units",), ("units", "--from", source),
            ("convert", source, "out/x.pt", "--dtype=int7"), ("convert", source, "out/x", "--flavor=none"),
            ("--version",),
        ]
    ):  # fmt: skip
        yield Case(f"refusal/{number}", arguments)
        yield Case(f"refusal-json/{number}", (*arguments, "--json"))


def worker_cases(base: Path) -> Iterator[Case]:
    forms = ("f1_dcp", "f1_flat_full.pt", "f2_ranks", "f2_ranks_ids", "f2_rich_ranks", "f2_dcp_flattened")
    for form in forms:
        source, name = f"corpus/oracle-2/{form}", f"workers-{form}"
        for target, options in FEW.items() if form != "f2_ranks" else (FEW | MORE).items():
            if "--threads=1" in options:
                continue
            yield from converted(source, name, target, *options, *about(options), workers=2)
    for variant in ("nested-orig", "nested-flat", "transformer-flat"):
        source, name = f"corpus/oracle-flattened-2/{variant}/flat", f"workers-{variant}"
        for target, options in {**FEW, "flat2": ["--to=flattened", "--world-size=3"]}.items():
            yield from converted(source, name, target, *options, "--buffers=none", workers=2)
    for directory in ("torch-2.4/f2_default/ckpt", "torch-2.1/f1_flat_sh_st"):
        for target, options in FEW.items():
            name = "workers-" + directory.replace("/", "-")
            yield from converted(f"golden/{directory}", name, target, *options, workers=2)


def all_cases(side: Path, base: Path, *, quick: bool) -> list[Case]:
    first = [*golden_cases(side, quick=quick), *oracle_cases(base, 2, quick=quick)]
    first += flattened_cases(base, 2, quick=quick)
    if not quick:
        first += [*oracle_cases(base, 3, quick=True), *flattened_cases(base, 3, quick=True), *worker_cases(base)]
    return [*first, *second_steps(first, quick=quick), *refusals()]


# --- Running them with one checkout.


def warming() -> list[list[str]]:
    """Commands that together import most of what any command imports."""
    source = "corpus/oracle-2/f2_ranks"
    return [
        ["inspect", source, "--json", "--ranks"],
        ["verify", source, "--digests"],
        ["diff", source, source],
        ["convert", source, "warm/full.pt", "--to=full", "--key-type=id"],
        *(
            ["convert", source, f"warm/{target}", *options, *BUFFERS]
            for target, options in FEW.items()
            if target != "full.pt"
        ),
        ["convert", source, "warm/x.safetensors", "--only=model"],
        ["inspect", "warm/flat2"],
    ]


def children(side: Path, cases: list[dict[str, Any]]) -> None:
    """What an interpreter of one checkout does: each case in forked processes, in this order, results to its stdout."""
    import runpy

    results = os.fdopen(os.dup(1), "w")
    os.chdir(side)

    def play(case: dict[str, Any], rank: int) -> int:
        said = Path("said", case["id"])
        said.mkdir(parents=True, exist_ok=True)
        for number, stream in ((1, "stdout"), (2, "stderr")):
            file = os.open(said / f"{stream}-{rank}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
            os.dup2(file, number)
            os.close(file)
        sys.argv = ["fsdpckpt", *case["arguments"]]
        try:
            runpy.run_module("fsdpckpt", run_name="__main__", alter_sys=True)
        except SystemExit as end:
            return end.code if isinstance(end.code, int) else int(end.code is not None)
        return 0

    def forked(case: dict[str, Any], rank: int, variables: dict[str, str]) -> int:
        child = os.fork()
        if child:
            return child
        signal.alarm(LIMIT)
        os.environ.update(variables)
        code = 99
        try:
            code = play(case, rank)
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    if any(case["workers"] for case in cases):
        import torch.distributed  # noqa: F401
    sys.stdout = sys.stderr = Path(os.devnull).open("w")  # noqa: SIM115
    for case in warming():  # imports what these commands import, once for all that fork from here
        sys.argv = ["fsdpckpt", *case]
        with contextlib.suppress(SystemExit):
            runpy.run_module("fsdpckpt", run_name="__main__", alter_sys=True)
    sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__
    shutil.rmtree("warm", ignore_errors=True)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    if threading.active_count() > 1:
        raise SystemExit(f"cannot fork beside threads: {threading.enumerate()}")
    for case in cases:
        shared = {"MASTER_ADDR": "127.0.0.1", "WORLD_SIZE": str(case["workers"]), "GROUP_RANK": "0"}
        shared |= {"LOCAL_WORLD_SIZE": str(case["workers"]), "TORCHELASTIC_RUN_ID": "same"}
        if case["workers"]:
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", 0))
                shared["MASTER_PORT"] = str(probe.getsockname()[1])
        ranks = range(case["workers"] or 1)
        started = [
            forked(case, rank, {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)} if case["workers"] else {})
            for rank in ranks
        ]
        codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in started]
        results.write(json.dumps([case["id"], codes]) + "\n")
        results.flush()


def play_all(checkout: Path, side: Path, cases: list[Case]) -> dict[str, list[int]]:
    """Run ``cases`` with the code of ``checkout`` in the directory ``side``; the exit codes of each."""
    found: dict[str, list[int]] = {}
    for part in ([case for case in cases if not case.workers], [case for case in cases if case.workers]):
        if not part:
            continue
        variables = {**os.environ, "PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}
        variables |= {
            "COLUMNS": "100",
            "TORCH_CPP_LOG_LEVEL": "ERROR",
            "PYTHONPYCACHEPREFIX": str(side.parent.parent / "pycache"),
        }
        variables.pop("FSDPCKPT_DEBUG", None)
        (side / "cases.json").write_text(json.dumps([asdict(case) for case in part]))
        command = [sys.executable, __file__, "--play", str(side), "-", "-"]
        done = subprocess.run(command, env=variables, stdout=subprocess.PIPE, text=True, check=False)
        found.update(map(json.loads, done.stdout.splitlines()))
        if done.returncode or len(done.stdout.splitlines()) != len(part):
            raise SystemExit(f"{checkout}: the interpreter ended early, with exit code {done.returncode}")
    return found


def run_side(checkout: Path, side: Path, base: Path, *, quick: bool) -> None:
    """Everything ``checkout`` does, in the new directory ``side``, with ``codes.json`` written last."""
    shutil.rmtree(side, ignore_errors=True)
    side.mkdir(parents=True)
    for folder, _, files in os.walk(ROOT / "tests" / "golden"):
        for file in files:
            path = (Path(folder) / file).relative_to(ROOT / "tests" / "golden")
            if path.parent.name == "truth" and file == "full.pt":
                target = side / "truth" / path.parent.parent.with_suffix(path.parent.parent.suffix + ".pt")
            elif file.endswith((".py", ".md", ".pyc")) or path.parent.name == "truth":
                continue
            else:
                target = side / "golden" / path
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(Path(folder) / file, target)
    (side / "corpus").symlink_to(base)
    (side / "out" / "report").mkdir(parents=True)  # nothing makes the directory of a report
    cases = all_cases(side, base, quick=quick)
    codes = play_all(checkout, side, cases)
    (side / "codes.json").write_text(json.dumps({"codes": codes, "arguments": {c.id: c.arguments for c in cases}}))


def code_of(checkout: Path) -> str:
    """The digest of everything that decides what a checkout does and what this program runs."""
    digest = hashlib.sha256(Path(__file__).read_bytes())
    for path in sorted((checkout / "fsdpckpt").rglob("*.py")):
        digest.update(str(path.relative_to(checkout)).encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def known(checkout: Path, base: Path, *, quick: bool) -> Path:
    """The directory in which ``checkout`` did everything; an earlier directory is reused if the code is the same."""
    side = base / "known" / f"{code_of(checkout)}-{'quick' if quick else 'full'}"
    side.parent.mkdir(parents=True, exist_ok=True)
    with side.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (side / "codes.json").exists():
            run_side(checkout, side, base, quick=quick)
    return side


# --- Comparing.


def comparable(value: Any, side: Path, *, words: bool) -> Any:
    """A JSON value without the parts that may differ from run to run."""
    if isinstance(value, dict):
        hidden = VOLATILE if words or "exit_code" not in value else VOLATILE | ERROR_WORDS
        return {key: comparable(child, side, words=words) for key, child in value.items() if key not in hidden}
    if isinstance(value, list):
        return [comparable(child, side, words=words) for child in value]
    return value.replace(str(side), "<here>") if isinstance(value, str) else value


def differences(one: Any, other: Any, where: str = "$") -> Iterator[str]:
    """The path of every value that differs; the order of keys counts."""
    if isinstance(one, dict) and isinstance(other, dict):
        if list(one) != list(other):
            yield f"{where}: keys {sorted(set(one) ^ set(other)) or 'in another order'}"
        pairs = [(f"{where}.{key}", one[key], other[key]) for key in one if key in other]
    elif isinstance(one, list) and isinstance(other, list):
        if len(one) != len(other):
            yield f"{where}: {len(one)} items, then {len(other)}"
        pairs = [(f"{where}[{index}]", a, b) for index, (a, b) in enumerate(zip(one, other, strict=False))]
    else:
        if type(one) is not type(other) or one != other:
            yield f"{where}: {json.dumps(one)[:150]}, then {json.dumps(other)[:150]}"
        return
    for path, a, b in pairs:
        yield from differences(a, b, path)


def unequal_bytes(one: bytes, other: bytes) -> str | None:
    if one == other:
        return None
    at = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    near = f"{one[at : at + 24]!r}, then {other[at : at + 24]!r}"
    return f"byte {at:,} of {len(one):,} and {len(other):,}: {near}"


def unequal_streams(one: Path, other: Path, sides: tuple[Path, Path], *, words: bool) -> str | None:
    """How two outputs of commands differ: everything if they are JSON, else the first byte."""
    texts = [path.read_text(errors="surrogateescape") for path in (one, other)]
    if all(text.startswith("{") for text in texts):
        documents = [comparable(json.loads(text), side, words=words) for text, side in zip(texts, sides, strict=True)]
        return "\n    ".join(differences(*documents)) or None
    plain = [
        re.sub(r"\d[\d.,]* (m?s|[KMG]?i?B/s)\b", "<time>", text.replace(str(side), "<here>"))
        for text, side in zip(texts, sides, strict=True)
    ]
    return unequal_bytes(*(text.encode(errors="surrogateescape") for text in plain))


def files_below(directory: Path) -> set[str]:
    return {str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file()}


def compared(old: Path, new: Path, *, words: bool) -> Iterator[str]:
    """Every output that differs, and how."""
    sides = (old, new)
    one, other = (json.loads((side / "codes.json").read_text()) for side in sides)
    for case, arguments in one["arguments"].items():
        command = "fsdpckpt " + " ".join(arguments)
        if one["codes"][case] != other["codes"][case]:
            codes = " then ".join(str(side["codes"][case]) for side in (one, other))
            yield f"{command}\n    exit code {codes}; see said/{case}/stderr-0"
            continue
        for rank in range(len(one["codes"][case])):
            said = (side / "said" / case / f"stdout-{rank}" for side in sides)
            found = unequal_streams(*said, sides, words=words)
            if found is not None:
                yield f"{command}\n    stdout of {case}: {found}"
    files = [files_below(side / "out") for side in sides]
    for path in sorted(files[0] ^ files[1]):
        yield f"out/{path}\n    only {'the first' if path in files[0] else 'the second'} wrote it"
    for path in sorted(files[0] & files[1]):
        pair = [side / "out" / path for side in sides]
        contents = [each.read_bytes() for each in pair]
        if path.endswith(".html"):
            contents = [re.sub(rb"[\d-]{10} [\d:]{5} UTC", b"<time>", content) for content in contents]
        found = unequal_bytes(*contents)
        if found is not None and path.endswith("fsdpckpt.json"):
            found = unequal_streams(*pair, sides, words=True) or found
        if found is not None:
            yield f"out/{path}\n    {found}"


def summary(side: Path) -> str:
    codes = json.loads((side / "codes.json").read_text())["codes"]
    counts: dict[str, int] = {}
    for some in codes.values():
        key = ",".join(sorted({str(code) for code in some}))
        counts[key] = counts.get(key, 0) + 1
    ended = ", ".join(f"{number} with exit code {code}" for code, number in sorted(counts.items()))
    return f"{len(codes)} commands ({ended}), {len(files_below(side / 'out'))} files"


def make_corpus(base: Path, worlds: tuple[int, ...]) -> None:
    sys.path.insert(0, str(ROOT))
    from tests.oracle.session import Oracle

    base.mkdir(parents=True, exist_ok=True)
    oracle = Oracle(base)
    for world in worlds:
        oracle.checkpoints(world)
        oracle.flattened(world)
    if not (base / "parameters.txt").exists():
        from tests.oracle.toy import seeded_model

        names = "".join(f"{name}\n" for name, _ in seeded_model().named_parameters())
        (base / "parameters.txt").write_text(names)


def main() -> int:
    if sys.argv[1:2] == ["--play"]:
        side = Path(sys.argv[2])
        children(side, json.loads((side / "cases.json").read_text()))
        return 0
    parser = argparse.ArgumentParser(prog="scripts/same_bytes", description=__doc__.splitlines()[0])
    parser.add_argument("old", type=Path, help="a checkout")
    parser.add_argument("new", type=Path, help="a checkout")
    parser.add_argument("--quick", action="store_true", help="fewer checkpoints, no workers: about a minute")
    parser.add_argument("--words", action="store_true", help="also compare the words of errors under --json")
    default = Path(tempfile.gettempdir()) / "fsdpckpt-corpus"
    parser.add_argument("--corpus", type=Path, default=default, help=f"where the sources are kept ({default})")
    options = parser.parse_args()
    base = options.corpus.resolve()
    began = time.monotonic()
    make_corpus(base, (2,) if options.quick else (2, 3))
    old = known(options.old.resolve(), base, quick=options.quick)
    new = base / "new" / f"{os.getpid()}-{random.getrandbits(32):08x}"
    run_side(options.new.resolve(), new, base, quick=options.quick)
    differences = list(compared(old, new, words=options.words))
    print("\n".join(differences[:MAX_DIFFERENCES]))
    seconds = time.monotonic() - began
    if differences:
        print(f"\n{len(differences)} differences; {summary(new)}; {seconds:.0f} s\n  first:  {old}\n  second: {new}")
        return 1
    print(f"the same: {summary(new)}; {seconds:.0f} s")
    shutil.rmtree(new)
    return 0


if __name__ == "__main__":
    sys.exit(main())
