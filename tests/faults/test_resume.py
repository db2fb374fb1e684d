"""The same command continues an interrupted run, or says why not; what it makes is what an undisturbed run makes."""

from __future__ import annotations

import os
import shlex
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.faults.conftest import DCP, FULL, state
from tests.faults.runs import convert, finished, hidden, same

AFTER_SYNC = "import time; time.sleep(0.1); os.kill(os.getpid(), 9)"
Whole = Callable[..., Path]


def _interrupt(source: Path, target: Path, *options: str, at: int = 20) -> None:
    """A run that is killed behind the first entries of its journal."""
    assert convert(source, target, *options, hook=(at, AFTER_SYNC)).code == -signal.SIGKILL
    assert (hidden(target) / "journal").stat().st_size > 0
    assert not target.exists()


@pytest.mark.parametrize("options", [FULL, DCP], ids=["full", "dcp"])
def test_a_killed_run_is_finished_with_the_same_bytes(
    source: Path, tmp_path: Path, whole: Whole, options: list[str]
) -> None:
    target = tmp_path / "target"
    _interrupt(source, target, *options)
    plan = convert(source, target, *options, "--dry-run")
    done = finished(source, target, *options, expected=whole(*options))
    assert "continued an interrupted run" in done.out
    assert next(line for line in done.out.splitlines() if "interrupted" in line) in plan.out


@pytest.mark.parametrize("options", [FULL, DCP], ids=["full", "dcp"])
def test_a_run_killed_at_any_system_call_leaves_nothing_or_everything(
    source: Path, tmp_path: Path, whole: Whole, shim: str, options: list[str]
) -> None:
    whole(*options)
    names = "rename,unlink,rmdir,mkdir"  # few, and one after the other: those that make a directory appear are all met
    faults = {"LD_PRELOAD": shim, "FAULT_PATH": "target", "FAULT_DO": "kill"}
    moments = []
    for calls in (names, f"pwrite,write,fsync,fdatasync,ftruncate,fallocate,open,{names}"):
        counted, target = tmp_path / f"count{len(moments)}", tmp_path / f"target{len(moments)}"
        assert convert(source, target, *options, FAULT_CALLS=calls, FAULT_COUNT=str(counted), **faults).code == 0
        count = int(counted.read_text())
        chosen = range(1, count + 1) if calls == names else sorted({1, 4, count // 3, count // 2, count - 1})
        moments += [(calls, moment) for moment in chosen]
    for calls, moment in moments:
        target = tmp_path / f"target-{len(calls)}-{moment}"
        killed = convert(source, target, *options, FAULT_CALLS=calls, FAULT_NTH=str(moment), **faults)
        assert killed.code in (-signal.SIGKILL, 0)  # the number of calls varies with the threads
        assert not target.exists() or same(whole(*options), target), moment
        left = hidden(target).exists() or hidden(target, "lock").exists()
        again = ["--resume"] if target.exists() and not left else []  # nothing tells it from a run that was not killed
        finished(source, target, *options, *again, expected=whole(*options))


@pytest.mark.parametrize(("number", "options"), [(signal.SIGINT, FULL), (signal.SIGTERM, DCP), (signal.SIGHUP, FULL)])
def test_a_signal_stops_the_run_and_names_the_command_that_goes_on(
    source: Path, tmp_path: Path, whole: Whole, number: int, options: list[str]
) -> None:
    target = tmp_path / "target"
    stopped = convert(source, target, *options, hook=(20, f"os.kill(os.getpid(), {int(number)})"))
    assert stopped.code == 130
    assert f"B done, kept in {hidden(target)} (delete it to give up)" in stopped.err
    assert sorted(os.listdir(tmp_path)) == [hidden(target).name, "source.pt"], "no lock, and nothing else"
    command = shlex.split(stopped.err.splitlines()[-1])  # on a line of its own, to be copied
    assert command[:2] == ["fsdpckpt", "convert"]
    assert not [word for word in command if "resume" in word]
    done = finished(source, target, *command[4:], expected=whole(*options))
    assert "continued an interrupted run" in done.out


def test_a_signal_before_anything_is_on_the_disk_leaves_nothing(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "below" / "target"
    hook = "from fsdpckpt.cli.errors import Interruption; raise Interruption"
    stopped = convert(source, target, *FULL, "--threads", "1", hook=(1, hook))
    assert stopped.code == 130
    assert "no partial output was left" in stopped.err
    assert sorted(os.listdir(tmp_path)) == ["source.pt"]


@pytest.mark.parametrize(
    "more",
    [
        *(["--threads", "1"], ["--threads", "8", "--max-memory", "64MiB"]),
        *(["--max-memory", size] for size in ("512KiB", "128KiB")),
    ],
)
def test_threads_and_memory_may_differ_from_the_interrupted_run(
    source: Path, tmp_path: Path, whole: Whole, more: list[str]
) -> None:
    target = tmp_path / "target"
    _interrupt(source, target, *FULL)
    done = finished(source, target, *FULL, *more, "--verify", "full", expected=whole(*FULL))
    less_than_one_staged_window = "128KiB" in more
    assert ("started from the beginning" if less_than_one_staged_window else "continued an interrupted run") in done.out


@pytest.mark.parametrize("damage", ["torn", "zeros", "emptied", "staged file gone", "staged file cut", "staged bytes"])
def test_a_journal_or_a_staged_file_that_a_crash_damaged_costs_time_only(
    source: Path, tmp_path: Path, whole: Whole, damage: str
) -> None:
    target = tmp_path / "target"
    _interrupt(source, target, *FULL)
    journal, staged = hidden(target) / "journal", hidden(target) / "output" / target.name
    if damage == "torn":
        os.truncate(journal, journal.stat().st_size - 7)
    elif damage == "zeros":
        journal.write_bytes(journal.read_bytes() + bytes(4096))
    elif damage == "emptied":
        os.truncate(journal, 0)
    elif damage == "staged file gone":
        staged.unlink()
    elif damage == "staged file cut":
        os.truncate(staged, staged.stat().st_size - 1)
    else:
        data = bytearray(staged.read_bytes())
        for place in range(0, len(data), 50_021):
            data[place] ^= 1
        staged.write_bytes(data)
    finished(source, target, *FULL, expected=whole(*FULL))


@pytest.mark.parametrize("change", ["other bytes", "replaced", "grown", "gone"])
def test_a_source_that_changed_is_not_resumed(source: Path, tmp_path: Path, whole: Whole, change: str) -> None:
    target = tmp_path / "target"
    whole(*FULL)
    _interrupt(source, target, *FULL)
    if change == "other bytes":
        torch.save(state(2), source)
    elif change == "replaced":
        status = source.stat()
        other = tmp_path / "other"
        other.write_bytes(source.read_bytes())
        os.utime(other, ns=(status.st_atime_ns, status.st_mtime_ns))
        other.replace(source)
    elif change == "grown":
        torch.save({**state(1), "more": torch.randn(1000)}, source)
    else:
        source.rename(tmp_path / "elsewhere.pt")
    done = convert(source, target, *FULL, "--resume")
    assert done.code == 3
    assert str(source) in done.err
    if change != "gone":
        assert "the source is not what that run read" in done.err
        assert "--no-resume" in done.err
    assert (hidden(target) / "journal").exists()
    assert not target.exists()
    if change == "replaced":  # nobody can finish that run any more
        again = finished(source, target, *FULL, expected=whole(*FULL))
        assert "because its source has changed" in again.out
        assert str(hidden(target)) in again.out


def test_what_a_run_from_another_source_left_stays_until_somebody_says_otherwise(source: Path, tmp_path: Path) -> None:
    target, other = tmp_path / "target", tmp_path / "other.pt"
    torch.save(state(2), other)
    _interrupt(source, target, *FULL)
    done = convert(other, target, *FULL)
    assert done.code == 3, done.out
    assert f"{hidden(target)} holds " in done.err and "--no-resume" in done.err
    assert "continued an interrupted run" in convert(source, target, *FULL).out


def test_a_source_that_comes_back_as_it_was_is_resumed(source: Path, tmp_path: Path, whole: Whole) -> None:
    target = tmp_path / "target"
    whole(*FULL)
    _interrupt(source, target, *FULL)
    source.rename(tmp_path / "elsewhere.pt")
    assert convert(source, target, *FULL).code == 3
    (tmp_path / "elsewhere.pt").rename(source)
    done = finished(source, target, *FULL, expected=whole(*FULL))
    assert "continued an interrupted run" in done.out


@pytest.mark.parametrize(
    ("more", "named"),
    [
        (["--dtype", "bfloat16"], "--dtype was - and is bfloat16"),
        (["--exclude", "bias"], "--exclude was - and is ('bias',)"),
        (["--only", "model"], "--only was - and is model"),
    ],
)
def test_other_options_are_not_resumed_and_named(source: Path, tmp_path: Path, more: list[str], named: str) -> None:
    target = tmp_path / "target"
    _interrupt(source, target, *FULL)
    done = convert(source, target, *FULL, *more)
    assert done.code == 5
    assert named in done.err
    assert f"{hidden(target)} holds " in done.err and "--no-resume" in done.err
    assert (hidden(target) / "journal").exists()
    if "bfloat16" in more:
        again = convert(source, target, *FULL, *more, "--no-resume")
        assert again.code == 0
        assert f"that an interrupted run had left in {hidden(target)} were removed" in again.out


def test_another_program_version_is_not_resumed(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "target"
    older = "from fsdpckpt.converters.output import resume; resume.__version__ = '0.0.9'"
    assert convert(source, target, *FULL, hook=(20, AFTER_SYNC), BEFORE=older).code == -signal.SIGKILL
    done = convert(source, target, *FULL)
    assert done.code == 5
    assert "begun by fsdpckpt 0.0.9" in done.err


def test_nothing_to_resume_is_said_and_the_run_begins(source: Path, tmp_path: Path, whole: Whole) -> None:
    target = tmp_path / "target"
    done = finished(source, target, *DCP, "--resume", expected=whole(*DCP))
    assert "there was nothing to resume: started from the beginning" in done.out


@pytest.mark.parametrize("options", [FULL, DCP], ids=["full", "dcp"])
def test_a_finished_target_is_recognised_and_not_written_again(
    source: Path, tmp_path: Path, whole: Whole, options: list[str]
) -> None:
    target = whole(*options)
    before = target.stat().st_ctime_ns
    done = convert(source, target, *options, "--resume")
    assert done.code == 0, done.err
    assert "was already complete" in done.out
    assert target.stat().st_ctime_ns == before
    assert not hidden(target).exists()


@pytest.mark.parametrize("options", [FULL, DCP], ids=["full", "dcp"])
def test_another_target_is_refused_with_resume_too(
    source: Path, tmp_path: Path, whole: Whole, options: list[str]
) -> None:
    target = whole(*options)
    changed = max(target.iterdir(), key=lambda path: path.stat().st_size) if target.is_dir() else target
    data = bytearray(changed.read_bytes())
    data[len(data) // 2] ^= 1
    changed.write_bytes(data)
    done = convert(source, target, *options, "--resume")
    assert done.code == 5
    assert f"{target} already exists, and is not what this command writes" in done.err
    assert changed.read_bytes() == data


def test_an_interrupted_replacement_goes_on_and_the_older_target_stays_until_then(
    source: Path, tmp_path: Path, whole: Whole
) -> None:
    target = tmp_path / "target"
    target.mkdir()
    torch.save({"model": {"w": torch.randn(3)}}, target / "older.pt")
    older = (target / "older.pt").read_bytes()
    assert convert(source, target, *DCP, "--overwrite", hook=(30, AFTER_SYNC)).code == -signal.SIGKILL
    assert (target / "older.pt").read_bytes() == older
    done = finished(source, target, *DCP, "--overwrite", expected=whole(*DCP))
    assert "continued an interrupted run" in done.out


KILLED_BY_THE_SWAP = """
from fsdpckpt.storage import staging
def killed(one, other, swap=staging.swap_names, system=os):
    if {exchanged}:
        swap(one, other)
    system.kill(system.getpid(), 9)
staging.swap_names = killed
"""


@pytest.mark.parametrize("exchanged", [True, False])
def test_a_kill_at_either_side_of_the_swap_leaves_a_target_that_is_whole(
    source: Path, tmp_path: Path, whole: Whole, exchanged: bool
) -> None:
    target = tmp_path / "target"
    assert convert(source, target, "--to", "sharded", "--world-size", "2").code == 0
    older = max(target.glob("*.distcp"))
    assert older.name in os.listdir(whole(*DCP))
    mine = tmp_path / "mine"
    os.link(older, mine)
    content = mine.read_bytes()
    before = sorted(os.listdir(target))
    swap = KILLED_BY_THE_SWAP.format(exchanged=exchanged)
    assert convert(source, target, *DCP, "--overwrite", hook=(1, swap)).code == -signal.SIGKILL
    assert same(whole(*DCP), target) if exchanged else sorted(os.listdir(target)) == before
    finished(source, target, *DCP, "--overwrite", expected=whole(*DCP))
    assert mine.read_bytes() == content


def test_damage_in_a_record_read_before_the_interruption_is_found_after_it(source: Path, tmp_path: Path) -> None:
    data = bytearray(source.read_bytes())
    data[1_000_000] ^= 1  # in a record of many windows
    source.write_bytes(data)
    target = tmp_path / "target"
    _interrupt(source, target, *FULL, at=20)
    done = convert(source, target, *FULL, "--resume")
    assert done.code == 3
    assert "does not match its checksum" in done.err
    assert not hidden(target).exists()
    assert not target.exists()
