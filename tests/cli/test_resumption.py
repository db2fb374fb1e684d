"""``verify --for``: what is printed, the exit code, the JSON, and that the command it names does what it says."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from tests.cli.conftest import Run
from tests.cli.test_schemas import checked


def test_it_says_what_stops_a_framework_and_its_command_mends_it(
    run: Run, saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = run("verify", saved, "--for", "accelerate", "--world-size", "2")
    assert done.code == 1
    assert "problem: resume: accelerate looks for other file names or keys" in done.out
    assert f"accelerate does not resume from {saved} on 2 ranks" in done.err
    (line,) = (line for line in done.err.splitlines() if line.startswith("next: fsdpckpt "))
    command = shlex.split(line.removeprefix("next: fsdpckpt "))
    assert run(*command).code == 0
    done = run("verify", command[2], "--for", "accelerate", "--world-size", "2")
    assert (done.code, done.out) == (0, "")
    assert f"accelerate resumes from {command[2]} on 2 ranks" in done.err


def test_its_json_follows_the_schema(run: Run, saved: Path) -> None:
    done = run("verify", saved, "--for", "trainer", "--json", "-q")
    found = checked(done.out)["resumption"]
    assert done.code == 1 and isinstance(found, dict)
    assert (found["flavor"], found["resumes"], found["world_size"]) == ("trainer", False, 1)
    assert any("trainer_state.json" in reason for reason in found["still_missing"])
    assert "resumption" not in json.loads(run("verify", saved, "--json", "-q").out)


def test_a_flavor_that_is_unknown_or_missing_is_a_mistake_in_the_command_line(run: Run, saved: Path) -> None:
    done = run("verify", saved, "--for", "trainr")
    assert done.code == 2 and "--for trainer" in done.err
    done = run("verify", saved, "--world-size", "2")
    assert done.code == 2 and "add --for FLAVOR" in done.err


def test_one_file_of_fabrics_is_as_anyone_saves_it(run: Run, saved: Path, tmp_path: Path) -> None:
    assert run("convert", saved, tmp_path / "file", "--flavor", "fabric", "--to", "full", "--buffers", "none").code == 0
    assert run("verify", tmp_path / "file", "--for", "fabric").code == 0
    done = run("verify", saved, "--for", "plain")
    assert done.code == 2 and "next: --for plain" not in done.err
    assert "--for trainer" in run("verify", saved, "--for", "TRAINER").err


def test_what_torchtitan_opens_and_the_target_lacks_is_said(run: Run, saved: Path, tmp_path: Path) -> None:
    target = tmp_path / "titan"
    done = run("convert", saved, target, "--flavor", "torchtitan", "--world-size", "2")
    assert done.code == 0 and "warning: it has no train_state: without it torchtitan stops, unless" in done.err
    done = run("verify", target, "--for", "torchtitan")
    assert done.code == 1 and "resume: it has no lr_scheduler" in done.out
    assert "no conversion adds this: it has no train_state" in done.err
