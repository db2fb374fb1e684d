"""Exit codes, and errors that say what is wrong, why, and what to type next."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fsdpckpt import errors
from fsdpckpt.cli.errors import Interruption, as_fsdpckpt_error, error_json, error_text
from tests.cli.conftest import Run

PROGRAM = [sys.executable, "-m", "fsdpckpt"]


def test_no_command_shows_the_help_and_is_2(run: Run) -> None:
    done = run()
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith("Usage:")


@pytest.mark.parametrize("command", [[], ["inspect"], ["convert"], ["diff"], ["verify"], ["units"]])
def test_help_is_data_and_every_command_has_examples(run: Run, command: list[str]) -> None:
    done = run(*command, "--help")
    assert (done.code, done.err) == (0, "")
    assert f"fsdpckpt {command[0] if command else 'convert'}" in done.out
    assert ("Examples:" if command else "Exit codes:") in done.out


def test_a_bug_is_70_and_says_how_to_report_it(run: Run, saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise ZeroDivisionError("seven")

    monkeypatch.setattr("fsdpckpt.api.inspect", broken)
    done = run("inspect", saved)
    assert done.code == 70
    assert "ZeroDivisionError: seven" in done.err
    assert "FSDPCKPT_DEBUG=1" in done.err
    assert "Traceback" not in done.err
    monkeypatch.setenv("FSDPCKPT_DEBUG", "1")
    assert "Traceback" in run("inspect", saved).err


@pytest.mark.parametrize(("interruption", "as_json"), [(KeyboardInterrupt, False), (Interruption, True)])
def test_an_interrupt_is_130(
    run: Run, saved: Path, monkeypatch: pytest.MonkeyPatch, interruption: type[BaseException], as_json: bool
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise interruption

    monkeypatch.setattr("fsdpckpt.api.inspect", interrupted)
    done = run("inspect", saved, *(["--json"] if as_json else []))
    assert (done.code, done.err.splitlines()[0]) == (130, "error: interrupted (Ctrl-C or a signal)")
    assert not as_json or json.loads(done.out)["error"]["exit_code"] == 130


def test_with_json_an_error_is_a_document_too(run: Run, tmp_path: Path) -> None:
    done = run("verify", tmp_path / "nowhere", "--json")
    assert (done.code, done.err) == (3, f"error: source missing: {tmp_path / 'nowhere'} does not exist\n")  # for a log
    error = json.loads(done.out)["error"]
    assert (error["type"], error["exit_code"], error["file"]) == ("SourceMissingError", 3, str(tmp_path / "nowhere"))
    usage = run("convert", "--json")
    assert usage.code == 2
    assert json.loads(usage.out)["error"]["type"] == "UsageError"


def test_a_closed_pipe_is_quiet(tmp_path: Path) -> None:
    torch.save({f"layer{n}.weight": torch.randn(3) for n in range(3000)}, tmp_path / "many.pt")
    read, write = os.pipe()
    process = subprocess.Popen(
        [*PROGRAM, "inspect", str(tmp_path / "many.pt")], stdout=write, stderr=subprocess.PIPE, text=True
    )
    os.close(write)
    os.read(read, 100)
    os.close(read)
    _, err = process.communicate(timeout=60)
    assert err == ""
    assert process.returncode == 0


PARSER = {"typer", "annotated_doc", "shellingham"}
"""Distributions that every command imports: typer, and what it needs to parse a command line."""


def test_commands_import_no_other_packages_than_they_need(saved: Path, tmp_path: Path) -> None:
    code = (
        "import sys\n"
        "sys.argv = ['fsdpckpt', *sys.argv[1:]]\n"
        "before = {*sys.modules}\n"
        "from fsdpckpt.cli import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "others = {name.partition('.')[0] for name in sys.modules.keys() - before} - sys.stdlib_module_names\n"
        "others |= {'numpy.ma', 'fsdpckpt.maps'} & sys.modules.keys()\n"
        "print(*others, file=sys.stderr)\n"
    )

    def imported(*arguments: str) -> set[str]:
        done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=True)
        return {*done.stderr.splitlines()[-1].split()} - PARSER - {"org"}  # the standard library tries Jython's modules

    assert imported("--help") == {"fsdpckpt"}
    assert imported("inspect", str(saved), "--keys", "*", "--section", "model") == {"fsdpckpt", "numpy"}
    assert imported("verify", str(saved)) <= {"fsdpckpt", "numpy", "isal"}
    for target in ("dcp", "full.pt"):  # each from the one before
        saved, source = tmp_path / target, saved
        arguments = ["convert", str(source), str(saved), "--quiet", "--threads", "1", "--exclude", "none"]
        assert imported(*arguments) <= {"fsdpckpt", "numpy", "isal"}


ALL_ERRORS = [
    value
    for value in vars(errors).values()
    if isinstance(value, type) and issubclass(value, errors.FsdpckptError) and value is not errors.FsdpckptError
]


@pytest.mark.parametrize("kind", ALL_ERRORS)
def test_every_error_shows_all_its_fields(kind: type[errors.FsdpckptError]) -> None:
    error = kind(
        "the shards do not fit",
        details=[f"row {n} is missing" for n in range(103)],
        why="a file was not copied",
        next_step="fsdpckpt verify SRC",
        file="rank_3.pt",
        key="layer.weight",
        rank=3,
        expected="7 rows",
        found="6",
    )
    text = error_text(error)
    assert text.startswith("error: ")
    for part in ("the shards do not fit", "expected 7 rows, found 6", "rank_3.pt", "layer.weight", "row 99 is missing"):
        assert part in text
    assert "and 3 more" in text
    assert text.splitlines()[-2:] == ["why:  a file was not copied", "next: fsdpckpt verify SRC"]
    document = error_json(error)["error"]
    assert isinstance(document, dict)
    assert len(document["details"]) == 103
    assert document["exit_code"] == kind.exit_code
    json.dumps(document)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (OSError(errno.ENOSPC, "No space left on device", "/data/x"), 5),
        (OSError(errno.EROFS, "Read-only file system", "/data/x"), 5),
        (PermissionError(errno.EACCES, "Permission denied", "/data/x"), 3),
        (OSError(errno.EIO, "Input/output error", "/data/x"), 3),
        (MemoryError(), 70),
        (RuntimeError("no"), 70),
    ],
)
def test_errors_of_the_system_get_a_code_and_name_the_path(error: Exception, code: int) -> None:
    known = as_fsdpckpt_error(error)
    assert known.exit_code == code
    if isinstance(error, OSError):
        assert "/data/x" in error_text(known)


def test_a_key_and_a_rank_are_shown_unless_the_message_names_them() -> None:
    hidden = error_text(errors.SourceCorruptError("the weights of rank 1 end early", key="w", rank=1))
    assert "  key: w\n" in hidden and "rank: 1" not in hidden
    shown = error_text(errors.SourceCorruptError("w has 100 elements", key="w", rank=1))
    assert "  rank: 1\n" in shown and "key: w" not in shown


@pytest.mark.parametrize("command", ["convert", "inspect", "diff", "verify", "units"])
def test_only_convert_can_use_less_memory(monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    monkeypatch.setattr(sys, "argv", ["fsdpckpt", command, "a.pt"])
    assert ("--max-memory" in error_text(as_fsdpckpt_error(MemoryError()))) is (command == "convert")
