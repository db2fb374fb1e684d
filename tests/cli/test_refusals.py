"""What a user types and cannot mean: the exit code, what is said, and nothing is written.

A row is a command line. SAVED is a file with a model and its AdamW, DCP a directory that PyTorch saved, RAW the
optimizer files of four ranks that nothing names, HERE an empty current directory but for SAVED.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.cli.conftest import Run, training_state
from tests.makers import GOLDEN, Change, copied, cut, files, put, safetensors, together

TORCH_2_4 = GOLDEN / "torch-2.4"


@dataclass(frozen=True)
class Row:
    """``command`` ends with ``code`` and says all of ``says``, with the words of ``command`` in capitals replaced as in
    it; ``omits``: what it does not say. ``make``: fills HERE before.
    """

    command: str
    code: int
    says: Sequence[str] = ()
    omits: Sequence[str] = ()
    make: Change = lambda here: None


def no(command: str, *says: str, code: int = 2, omits: Sequence[str] = (), make: Change = lambda here: None) -> Row:
    return Row(command, code, says, omits, make)


def by_name(here: Path) -> None:
    state = {f"p{key}": value for key, value in training_state()["optimizer"]["state"].items()}  # type: ignore[index]
    torch.save({"optimizer": {"state": state, "param_groups": [{"lr": 0.1, "params": ["p0"]}]}}, here / "names.pt")


class Harm:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, ("touch harmed",)


def many(here: Path) -> None:
    for number in range(8):
        (here / f"run{number}x").mkdir()
        torch.save("no state dict", here / f"run{number}x" / "model.pt")


def adam(*shape: int) -> dict[str, Any]:
    """The state of an optimizer with one parameter."""
    return {"state": {0: {"exp_avg": torch.ones(shape)}}, "param_groups": [{"lr": 0.1, "params": [0]}]}


def ranks_lost(*sections: str) -> Change:
    """One file a rank and section, of which those of rank 1 of ``sections`` are gone."""
    return files(
        {
            f"ranks/{section}_world_size_3_rank_{rank}.pt": content
            for section, content in (("model", {"w": torch.ones(5, 2)}), ("optim", adam(5, 2)))
            for rank in range(3)
            if rank != 1 or section not in sections
        }
    )


# What transformers' Trainer saves without FSDP
DDP = together(
    safetensors("ddp/model.safetensors", {"w": torch.ones(4, 2)}, format="pt"),
    files(
        {
            "ddp/optimizer.pt": adam(4, 2),
            "ddp/scheduler.pt": {"last_epoch": 3, "_last_lr": [0.1]},
            "ddp/trainer_state.json": {"global_step": 3},
            "ddp/training_args.bin": {},
        }
    ),
)


def link(name: str, to: str) -> Change:
    return lambda here: (here / name).symlink_to(to)


def several(here: Path) -> None:
    for step in (900, 1000):
        (here / "run" / f"step-{step}").mkdir(parents=True)
        torch.save({"w": torch.ones(2)}, here / "run" / f"step-{step}" / "model.pt")


NESTED = "--model tests.oracle.flat_models:Nested"
WRAP = "--wrap tests.oracle.flat_models:Outer --wrap tests.oracle.flat_models:Perceptron"
RANKS = "--to sharded --container torch --world-size 2"

# fmt: off
ROWS: dict[str, list[Row]] = {
    "a wrong command line": [
        no("convert a.pt b.pt --to flat"), no("convert a.pt b.pt --key-type number"),
        no("convert a.pt b.pt --strategy zero3"), no("convert a.pt b.pt --flavor fairscale"), no("convert a.pt"),
        no("convert a.pt b.pt --world-size 0"), no("convert a.pt b.pt --rename no-equals-sign"),
        no("convert a.pt b.pt --max-memory lots"), no("inspect a.pt --section elsewhere"), no("inspect"),
        no("diff a.pt"), no("diff a.pt b.pt --rtol -1"), no("--nonsense"),
        no("convert DCP out more", "unexpected argument: more"),
    ],
    "an option that has no effect or cannot work": [
        no("convert DCP out --rename l=l", "--rename l=l has no effect"),
        no("convert DCP out --resume --no-resume", "--resume or --no-resume is given more than once"),
        no("convert DCP out --to full --to sharded", "--to is given more than once"),
        no("convert DCP out --mesh-device cuda", "--mesh-device has no effect: the target is sharded, dcp"),
        no(f"convert DCP out {RANKS} --mesh-device quux", "--mesh-device quux is not a device type"),
        no("convert DCP out --launcher torchrun", "their number is missing"),
        no("convert DCP out --nproc-per-node x", "--nproc-per-node takes a number"),
        no("convert DCP out --max-memory 1KB", "at least 128.0 KiB"),
        no("convert DCP out --add-prefix ''", "--add-prefix is empty"),
        no("convert DCP out --exclude 'nothing*'", "--exclude 'nothing*' matches no key"),
        no("convert SAVED out --to sharded --buffers running_maen",
           "--buffers running_maen matches no model key"),
        no("convert SAVED out.pt --strategy no-shard --use-orig-params",
           "--use-orig-params and --strategy have no effect",
           "next: drop --use-orig-params and --strategy, or add --to flattened"),
        no("convert RAW out.pt --reference SAVED --unit 0 --unit none", "says that only the root is wrapped"),
        no("convert SAVED x.safetensors --max-shard-size 1MB", "--max-shard-size splits", "drop --max-shard-size"),
        *(no(f"convert SAVED out.pt --only model {each}") for each in (
            "--tensor sharded-tensor", "--max-shard-size 1MB", "--exclude '*'", "--max-memory 1e400",
            f"--max-memory {'9' * 400}", "--dtype bf16")),
        *(no(f"inspect DCP --names-only {each}", f"--names-only cannot be combined with {each}")
          for each in ("--json", "--all", "--ranks")),
        *(no(f"verify DCP --finite {each} 'nothing*'", f"{each} 'nothing*' matches no key")
          for each in ("--include", "--exclude")),
    ],
    "an option that was meant": [
        *(no(f"convert SAVED out {typed}", f"next: {meant}") for typed, meant in (
            ("--to safetensors", "--container safetensors"), ("--to=safetensors", "--container safetensors"),
            ("--to huggingface", "--flavor huggingface"), ("--to trainer", "--flavor trainer"),
            ("--container sharded", "--to sharded"), ("--force", "--overwrite"), ("-f", "--overwrite"),
            ("--num-gpus 6", "--world-size"), ("-n 6", "--world-size"), ("--flavor hf", "--flavor huggingface"))),
        *(no(f"{command} DCP out {typed}", f"no such option: {typed}", next_step, omits=["--overwrite"])
          for command, typed, next_step in (
            ("inspect", "--verbose", "fsdpckpt inspect --help"), ("convert", "--verbose", "fsdpckpt convert --help"),
            ("convert", "--version", "fsdpckpt --version"), ("verify", "--digest", "did you mean --digests?"),
            ("units", "--form", "did you mean --from?"))),
        no("convert DCP out --overwite", "no such option: --overwite", "did you mean --overwrite?"),
        no("convert DCP out --to shared", "did you mean --to sharded?"),
        *(no(f"{given} somewhere", f"did you mean fsdpckpt {meant}?") for given, meant in (
            ("ls", "inspect"), ("info", "inspect"), ("compare", "diff"), ("check", "verify"), ("merge", "convert"),
            ("vrify", "verify"))),
    ],
    "a file beside what is printed": [
        *(no(f"inspect nowhere.pt --report {path}", words, code=code, omits=["rm "]) for path, code, words in (
            ("-", 2, "takes the name of a file"), ("''", 2, "is empty"), ("/dev/full", 5, "pipe or a device"),
            ("s3://bucket/report.html", 2, "written to a local file"), (".", 5, "one file"),
            ("report.pdf", 2, "a report is an HTML page"), ("report", 2, "--report report.html"))),
        *(no(f"verify SAVED --junit {name}", "--junit", code=code, make=put("notes.xml", "<notes/>"))
          for name, code in (("notes.xml", 5), ("a.json", 2), ("-", 2), ("nowhere/a.xml", 5))),
    ],
    "a framework that cannot be asked for": [
        no("verify SAVED --for trainr", "--for trainer"), no("verify SAVED --for TRAINER", "--for trainer"),
        no("verify SAVED --world-size 2", "add --for FLAVOR"),
        no("verify SAVED --for plain", omits=["next: --for plain"]),
    ],
    "units of a model": [
        no("units", "--from SRC, --config DIR with --wrap CLASS, or --model"),
        no(f"units {NESTED} --use-orig-params", "--wrap none", code=4),
        no(f"units {NESTED} {WRAP} --use-orig-params --unit outer", "--unit has no effect"),
        no("units --from x --wrap a:B", "--wrap has no effect"),
        no("units --from no/such/place", "no/such/place", code=3),
        no(f"units {NESTED} {WRAP} --use-orig-params --param-dtype int8", "int8"),
        no(f"units {NESTED} {WRAP} --use-orig-params --strategy zero", "zero"),
        no(f"units --model no_such_module:f {WRAP} --use-orig-params", "could not be imported"),
    ],
    "a selection of checkpoints": [
        no(f"convert run out {options}", make=several) for options in (
            "--newer-than step-1", "--watch 5", "--each ../*", "--each /", "--each 'step-*' --newer-than nope")
    ] + [
        no("convert run out --each 'step-*' --newer-than step-1000 --to full",
           "matches --each 'step-*' after step-1000", code=3, make=several),
        no("convert run run/sub --each 'step-*' --to full", "lies inside the source", make=several),
        no("convert run/step-900/model.pt out --each '*' --to full", "step-900/model.pt is a file", code=3,
           make=several),
        no("convert gone out --each '*' --to full", "gone does not exist", code=3),
    ],
    "an empty argument": [
        no(command, "is empty", "shell variable") for command in (
            "convert '' x.pt", "convert SAVED ''", "convert '' ''", "inspect ''", "verify ''", "diff '' SAVED",
            "diff SAVED ''", "units --from ''", "convert SAVED x.pt --units ''", "convert SAVED x.pt --reference ''",
            "convert SAVED x.pt --staging ''")
    ],
    "a file that an option names": [
        *(no(f"convert DCP out {RANKS} {each} nowhere", each, "nowhere does not exist", code=3)
          for each in ("--reference", "--like", "--units")),
        no("convert SAVED out.pt --reference missing", "missing does not exist", code=3),
        *(no("convert SAVED out.pt --key-type name --parameters names.txt", "--parameters names.txt", words, code=code,
             make=put("names.txt", text)) for text, words, code in (
            (b"0.weight\n0.bias\n\n0.weight\n", "more than once", 3), (b" \n", "the file is empty", 2),
            (b"\x80", "not a text file", 3))),
        no("convert SAVED out.pt --key-type name --parameters names.txt", "--parameters names.txt", "No such file",
           code=3),
    ],
    "a source that cannot be read": [
        *(no(f"inspect {source}", code=3, make=make) for source, make in (
            ("~/nowhere", lambda here: None), ("empty", lambda here: (here / "empty").mkdir()),
            ("nothing.pt", put("nothing.pt", b"")), ("list.pt", put("list.pt", [1, 2])),
            ("nosuch://store/x", lambda here: None), ("https://[host/x", lambda here: None),
            ("https://host]/x", lambda here: None), ("s3://[bucket/x", lambda here: None))),
        no("inspect HERE/nowhere", "error: source missing: HERE/nowhere does not exist", code=3),
        *(no(f"{command} notes.txt", "error: source not recognised: ", code=3, make=put("notes.txt", b"milk"))
          for command in ("inspect", "verify")),
        no("verify SAVED", "SAVED", code=3, make=cut("step-2.pt", by=200)),
        no("inspect bad.pt", "error: source refused as unsafe: ", "system", code=3,
           make=put("bad.pt", {"model": {"w.weight": torch.ones(2)}, "extra": Harm()})),
        no("inspect SAVED/", "give SAVED itself", code=3),
        *(no(f"inspect HERE/latest{below}", "why:  HERE/latest is a link to step-9, which does not exist\n",
             "ls -l HERE/latest\n", code=3, make=link("latest", "step-9")) for below in ("", "/", "/step-1")),
        no("inspect HERE/loop", "Too many levels of symbolic links", "ls -l HERE/loop", code=3, omits=["permissions"],
           make=link("loop", "loop")),
        no("inspect /", "root of the file system", code=3),
        no("inspect /dev/null", "pipe or a device", code=3),
        no("inspect pipe.pt", "is a pipe or a device", code=3, make=lambda here: os.mkfifo(here / "pipe.pt")),
        no("inspect oci://bucket/saved", "ocifs", code=3, omits=["pip install"]),  # fsspec says that it needs ocifs
        *(no(f"inspect {url}", code=3, omits=["complete URL"]) for url in ("hdfs:///user/x", "memory:///x")),
        no("verify HERE/runs", "HERE/runs contains 8 checkpoints", code=4,
           make=lambda here: [(here / "runs").mkdir(), many(here / "runs")]),
        no("convert ranks out.pt --to full", code=3, omits=["--only"], make=ranks_lost("model", "optim")),
        no("verify ranks", code=3, omits=["--only"], make=ranks_lost("model", "optim")),
    ],
    "a question": [
        no("diff SAVED names.pt", "error: more information is needed: ", "--key-type id", code=4, make=by_name),
        no("diff RAW TRUTH --only optim", "next: add --unit GLOB", "or --units FILE", code=4),
    ],
    "a target that cannot be": [
        *(no(f"convert SAVED HERE/{name}{more}", f"HERE/{meant}", f"HERE/{name}/") for more in ("", " --to sharded")
          for name, meant in (("q.tp", "q.pt"), ("notes.json", "notes"), ("x.ckpt2", "x.ckpt"),
                              ("m.safetensor", "m.safetensors"), ("a.PT", "a.pt"))),
        no("convert SAVED HERE/out/", "HERE/out/full.pt"),
        no("convert SAVED HERE/out", "HERE/out/full.pt", make=lambda here: (here / "out").mkdir()),
        no("convert DCP HERE/new/ --to full --container torch", "HERE/new/full.pt", omits=["--to sharded"]),
        no("convert ddp on-6 --world-size 6", "ddp is a full (DDP) checkpoint, which every rank loads whole", make=DDP),
        no("convert SAVED -", "- is not standard output"),
        no("convert SAVED ~/out.pt", "'./~/out.pt' for a directory called ~"),
        no("convert SAVED ./", "is the current directory", code=5),
        no("convert DCP .", "the current directory", code=5, omits=["--overwrite"]),
        no("convert SAVED memory://somewhere/out.pt", "gone when it ends", code=5),
        no("convert SAVED foo://somewhere/out.pt", "Protocol not known", code=5),
        no("convert SAVED http://127.0.0.1:9/out.pt", "does not write to them", code=5),
        no("convert SAVED mine.pt/ --to full", code=5, make=put("mine.pt", b"mine")),
        no("convert SAVED mine.pt/below --to full", code=5, make=put("mine.pt", b"mine")),
        no("convert SAVED mine.pt --to full", code=5, omits=["add --overwrite"], make=put("mine.pt", b"mine")),
        no("convert SAVED old.pt --to full", "add --overwrite", code=5, make=put("old.pt", {"w": torch.ones(2)})),
    ],
    "a URL": [
        *(no(f"convert {urls}", f"{which} is not a complete URL: {typed}") for typed in (
            "s3://", "s3:", "gs:/bucket/x", "https:///x") for which, urls in (
            ("DST", f"DCP {typed}"), ("SRC", f"{typed} out"))),
        *(no(f"convert {urls}", f"{which} is a local file", "next: give /tmp/x.pt\n") for typed in (
            "file:///tmp/x.pt", "file:/tmp/x.pt") for which, urls in (
            ("DST", f"DCP {typed}"), ("SRC", f"{typed} out"))),
    ],
}
# fmt: on
ALL = [pytest.param(row, id=f"{what}: {row.command[:80]}") for what, rows in ROWS.items() for row in rows]


@pytest.mark.parametrize("row", ALL)
def test_it_is_refused(row: Row, run: Run, saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/nonexistent")
    places = {"SAVED": saved, "DCP": TORCH_2_4 / "f2_default" / "ckpt", "HERE": tmp_path}
    places |= {"RAW": tmp_path / "raw", "TRUTH": TORCH_2_4 / "f1_tiny_f" / "truth" / "full.pt"}
    if "RAW" in row.command:
        copied(TORCH_2_4 / "f1_tiny_f")(tmp_path / "raw")

    def here(text: str) -> str:
        for name, path in places.items():
            text = text.replace(name, str(path))
        return text

    row.make(tmp_path)
    before = {path: path.lstat().st_mtime_ns for path in tmp_path.rglob("*")}
    done = run(*map(here, shlex.split(row.command)))
    assert done.code == row.code, done.err
    assert done.err.startswith("error: ")
    if "--json" not in row.command:  # which prints a document, and one line for a log
        assert done.out == ""
        assert "next: " in done.err
    assert "Traceback" not in done.err
    for words in row.says:
        assert here(words) in done.err, done.err
    for words in row.omits:
        assert words not in done.err, done.err
    assert {path: path.lstat().st_mtime_ns for path in tmp_path.rglob("*")} == before, "nothing is written"
