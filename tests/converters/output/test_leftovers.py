"""What a failed or killed run leaves, and what the next one makes of it."""

from __future__ import annotations

import os
import uuid
from pathlib import Path
from typing import Any

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
from tests.cli.conftest import at_step
from tests.converters.jobs import save

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


@pytest.mark.parametrize(
    ("error", "kept"),
    [
        (SourceError("the disk failed"), True),
        (KeyboardInterrupt(), True),  # a traceback that is not ours
        (SourceCorruptError("damaged"), False),  # which no next run survives
        (SourceError("of another run", resumable=False), False),
    ],
    ids=repr,
)
def test_an_error_says_how_much_of_the_output_is_kept(tmp_path: Path, error: BaseException, kept: bool) -> None:
    root = interrupted(tmp_path / "out")
    attach_leftovers(error, str(tmp_path / "out"), ConvertOptions())
    left = leftover_of(error)
    assert (left is not None) is kept
    if left is not None:
        assert left.what == f"1000 B of 3.9 KiB done, kept in {root} (delete it to give up)"
    if isinstance(error, KeyboardInterrupt):
        assert "done, kept in" in error.__notes__[0]


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


def test_whether_a_complete_target_is_compared_is_decided_once(monkeypatch: pytest.MonkeyPatch) -> None:
    fsdpckpt.convert(save({"w": torch.ones(3)}), "out.pt")
    answers = iter([True])  # afterwards another run has removed what was left
    monkeypatch.setattr(rename, "was_interrupted", lambda _target: next(answers, False))
    report = fsdpckpt.convert("source.pt", "out.pt")
    assert [note.kind for note in report.notes if "already complete" in note.message] == ["resumed"]


@pytest.mark.parametrize("empty", [True, False])
def test_a_target_that_was_moved_aside_is_back_and_the_error_says_so(empty: bool) -> None:
    def move_aside() -> None:
        Path("out").rename(".out.fsdpckpt-old")
        if empty:
            Path("out").mkdir()

    fsdpckpt.convert(save({"model": {"w": torch.randn(3)}}), "out", container="dcp")
    move_aside()
    with pytest.raises(TargetExistsError, match="had moved this aside; it was moved back now"):
        fsdpckpt.convert("source.pt", "out", container="dcp", add_prefix="new.")
    assert fsdpckpt.verify("out").whole and not Path(".out.fsdpckpt-old").exists()
    move_aside()
    report = fsdpckpt.convert("source.pt", "out", container="dcp", add_prefix="new.", overwrite=True)
    assert [file.path for file in report.replaced] == [".metadata", "__0_0.distcp", "fsdpckpt.json"]
    assert sorted(os.listdir()) == ["out", "source.pt"]


# A report says how to load DST where it is, not where it was put together


@pytest.mark.filterwarnings("ignore::fsdpckpt.FsdpckptWarning")
@pytest.mark.parametrize(
    ("flavor", "said"),
    [
        ("accelerate", 'accelerator.load_state("{}")'),
        ("fabric", 'fabric.load("{}", state)'),
        ("lightning", 'trainer.fit(model, ckpt_path="{}")'),
        (None, None),
    ],
)
def test_a_target_in_a_store_is_copied_before_it_is_loaded(flavor: str | None, said: str | None) -> None:
    save(at_step(3))
    # keyed by name, which every framework's form can hold
    fsdpckpt.convert("source.pt", "named", to="sharded", world_size=2, key_type="name")
    url = f"memory://{uuid.uuid4()}/on-3"
    options: dict[str, Any] = {"flavor": flavor, "world_size": 3} if flavor else {}
    staged = fsdpckpt.convert("named", url, staging=".", **options)
    if said is None:  # plain
        assert not staged.loads
        return
    assert staged.target == url
    assert staged.loads == f"{said.format('COPY')}, where COPY is a copy of {url} on disk"
    local = fsdpckpt.convert("named", Path("on-3").resolve(), **options)
    assert local.loads == said.format(Path("on-3").resolve())
