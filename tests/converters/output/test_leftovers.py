"""What a failed or killed run leaves, and what the next one makes of it."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch

import fsdpckpt
from fsdpckpt.converters.output import attach_leftovers, rename
from fsdpckpt.converters.output.spool import Spool
from fsdpckpt.errors import SourceCorruptError, SourceError, TargetExistsError, TargetUnwritableError, leftover_of
from fsdpckpt.execute.journal import Journal, JournaledWindows, RunIdentity, first_record, windows_record
from fsdpckpt.options import ConvertOptions
from fsdpckpt.storage.staging import Staging

URL = "memory://bucket/step-1"


def interrupted(target: Path) -> str:
    """Leave what a run leaves that wrote a quarter of ``target``; returns the staging directory."""
    staging = Staging(str(target), directory=True)
    journal = Journal(staging.journal)
    identity = RunIdentity("1", "plan", {}, [], nbytes=4000)
    journal.append([first_record(identity), windows_record(JournaledWindows(np.array([[0, 0, 1000, 5, 0]])))])
    journal.close()
    staging.close()
    return staging.root


def test_an_error_says_how_much_of_the_output_is_kept(tmp_path: Path) -> None:
    root = interrupted(tmp_path / "out")
    error = SourceError("the disk failed")
    attach_leftovers(error, str(tmp_path / "out"), ConvertOptions())
    assert error.leftover is not None
    assert error.leftover.what == f"1000 B of 3.9 KiB done, kept in {root} (delete it to give up)"


@pytest.mark.parametrize("error", [SourceCorruptError("damaged"), SourceError("of another run", resumable=False)])
def test_an_error_that_no_next_run_survives_says_nothing_of_it(tmp_path: Path, error: SourceError) -> None:
    interrupted(tmp_path / "out")
    attach_leftovers(error, str(tmp_path / "out"), ConvertOptions())
    assert error.leftover is None


def test_a_traceback_that_is_not_ours_names_what_is_kept_too(tmp_path: Path) -> None:
    interrupted(tmp_path / "out")
    error = KeyboardInterrupt()
    attach_leftovers(error, str(tmp_path / "out"), ConvertOptions())
    assert leftover_of(error) is not None and "done, kept in" in error.__notes__[0]


def test_what_cannot_be_read_does_not_hide_the_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_path: str) -> None:
        raise PermissionError

    interrupted(tmp_path / "out")
    monkeypatch.setattr("fsdpckpt.converters.output.resume.read_run", fail)
    error = SourceError("the disk failed")
    attach_leftovers(error, str(tmp_path / "out"), ConvertOptions())
    assert error.leftover is None


def test_a_converted_checkpoint_that_waits_for_its_upload_is_named(tmp_path: Path) -> None:
    directory = Spool.of(URL, str(tmp_path))
    os.makedirs(directory.path)
    error = TargetUnwritableError("the store failed", file=URL)
    attach_leftovers(error, URL, ConvertOptions(staging=str(tmp_path)))
    assert error.leftover is not None and directory.path in error.leftover.what


def test_an_error_of_the_local_disk_in_an_upload_advises_another_directory_whatever_its_cause(tmp_path: Path) -> None:
    file = os.path.join(Spool.of(URL, str(tmp_path)).path, "model.pt")
    error = TargetUnwritableError("no permission", file=file, next_step="choose another DST, or make room")
    attach_leftovers(error, URL, ConvertOptions(staging=str(tmp_path)))
    assert "--staging DIR" in str(error.next_step)
    assert "make room there" not in str(error.next_step)


def test_whether_a_complete_target_is_compared_is_decided_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.save({"w": torch.ones(3)}, tmp_path / "model.pt")
    fsdpckpt.convert(tmp_path / "model.pt", tmp_path / "out.pt")
    answers = iter([True])  # afterwards another run has removed what was left
    monkeypatch.setattr(rename, "was_interrupted", lambda _target: next(answers, False))
    report = fsdpckpt.convert(tmp_path / "model.pt", tmp_path / "out.pt")
    assert [note.kind for note in report.notes if "already complete" in note.message] == ["resumed"]


@pytest.mark.parametrize("empty", [True, False])
def test_a_target_that_was_moved_aside_is_back_and_the_error_says_so(tmp_path: Path, empty: bool) -> None:
    torch.save({"model": {"w": torch.randn(3)}}, tmp_path / "source.pt")
    target, aside = tmp_path / "out", tmp_path / ".out.fsdpckpt-old"
    fsdpckpt.convert(tmp_path / "source.pt", target, container="dcp")
    target.rename(aside)
    if empty:
        target.mkdir()
    with pytest.raises(TargetExistsError, match="had moved this aside; it was moved back now"):
        fsdpckpt.convert(tmp_path / "source.pt", target, container="dcp", add_prefix="new.")
    assert fsdpckpt.verify(target).whole and not aside.exists()
    target.rename(aside)
    if empty:
        target.mkdir()
    report = fsdpckpt.convert(tmp_path / "source.pt", target, container="dcp", add_prefix="new.", overwrite=True)
    assert [file.path for file in report.replaced] == [".metadata", "__0_0.distcp", "fsdpckpt.json"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "source.pt"]
