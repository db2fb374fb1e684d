"""What ``--overwrite`` may delete: a file, or the files of one directory with at most one checkpoint in it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

import fsdpckpt
from fsdpckpt.converters.overwrite import require_replaceable
from fsdpckpt.errors import TargetExistsError


def state(seed: int = 1) -> dict[str, dict[str, torch.Tensor]]:
    torch.manual_seed(seed)
    return {"model": {"w.weight": torch.randn(7, 3), "w.bias": torch.randn(7)}}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    torch.save(state(), tmp_path / "source.pt")
    return tmp_path / "source.pt"


def everything(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def replaced(source: Path, target: Path) -> bool:
    """Whether a conversion with ``overwrite`` replaced ``target``; when it was refused nothing there changed."""
    before = everything(target) if target.is_dir() else target.read_bytes()
    try:
        fsdpckpt.convert(source, target, overwrite=True)
    except TargetExistsError as error:
        assert "rm -r" in str(error.next_step)
        assert (everything(target) if target.is_dir() else target.read_bytes()) == before
        return False
    assert fsdpckpt.diff(source, target).same
    return True


def test_a_directory_of_somebody_is_never_replaced(source: Path, tmp_path: Path) -> None:
    home = tmp_path / "home"
    (home / "thesis").mkdir(parents=True)
    (home / "thesis" / "chapter.tex").write_text("of data and loss")
    assert not replaced(source, home)


@pytest.mark.parametrize(
    ("kind", "stranger"),
    [
        *(("dcp", name) for name in ("data/train.bin", ".git/HEAD", "other-run/model.pt")),
        ("file", "notes/one.txt"),
        ("ours", "step-1000/__0_0.distcp"),
    ],
)
def test_a_checkpoint_with_a_directory_of_something_else_beside_it_is_not_replaced(
    source: Path, tmp_path: Path, kind: str, stranger: str
) -> None:
    target = tmp_path / "runs"
    target.mkdir()
    if kind == "dcp":
        dcp.save(state(2), checkpoint_id=target, no_dist=True)
    elif kind == "file":
        torch.save(state(2), target / "full.pt")
    else:
        fsdpckpt.convert(source, target, to="sharded", world_size=2, overwrite=True)
    (target / stranger).parent.mkdir(exist_ok=True)
    (target / stranger).write_text("mine")
    with pytest.raises(TargetExistsError) as refused:
        fsdpckpt.convert(source, target, to="sharded", world_size=2, overwrite=True)
    assert any(stranger in detail for detail in refused.value.details)
    assert (target / stranger).read_text() == "mine"


@pytest.mark.parametrize("name", ["old.pt", "old", "old/notes.txt"])
def test_a_file_or_files_in_the_directory_that_was_named_are_replaced(source: Path, tmp_path: Path, name: str) -> None:
    target = tmp_path / Path(name).parts[0]
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text("an older one")
    assert replaced(source, target)


def test_a_folder_that_holds_a_run_is_not_taken_for_its_checkpoint(source: Path, tmp_path: Path) -> None:
    (tmp_path / "runs" / "step-100").mkdir(parents=True)
    torch.save(state(2), tmp_path / "runs" / "step-100" / "model.pt")
    assert not replaced(source, tmp_path / "runs")


def test_two_checkpoints_in_one_folder_are_not_replaced(source: Path, tmp_path: Path) -> None:
    (tmp_path / "zoo").mkdir()
    for number, name in enumerate(("bert.pt", "gpt.pt")):
        torch.save(state(number + 2)["model"], tmp_path / "zoo" / name)
    assert not replaced(source, tmp_path / "zoo")


def test_what_a_link_in_the_directory_leads_to_stays(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "dcp"
    dcp.save(state(2), checkpoint_id=target, no_dist=True)
    (tmp_path / "dataset").mkdir()
    (tmp_path / "dataset" / "train.bin").write_bytes(b"train")
    (target / "data").symlink_to(tmp_path / "dataset")
    assert replaced(source, target)
    assert (tmp_path / "dataset" / "train.bin").read_bytes() == b"train"


@pytest.mark.parametrize(
    "kind", ["empty directory", "empty file", "file", "dcp", "ours", "safetensors", "damaged ours"]
)
def test_a_checkpoint_or_nothing_is_replaced(source: Path, tmp_path: Path, kind: str) -> None:
    target = tmp_path / ("out.pt" if "file" in kind else "out")
    if kind == "empty directory":
        target.mkdir()
    elif kind == "empty file":
        target.touch()
    elif kind == "file":
        torch.save(state(2), target)
    elif kind == "dcp":
        dcp.save(state(2), checkpoint_id=target, no_dist=True)
    elif kind == "safetensors":
        fsdpckpt.convert(source, target, container="safetensors")
    else:
        fsdpckpt.convert(source, target, to="sharded", world_size=3)
        if kind == "damaged ours":
            (target / "__1_0.distcp").unlink()
    fsdpckpt.convert(source, target, to="sharded" if target.suffix == "" else "full", overwrite=True)
    assert fsdpckpt.diff(source, target).same


@pytest.mark.parametrize("name", [".DS_Store", ".nfs00000000a1b2c3d400000001"])
@pytest.mark.parametrize("kind", ["dcp", "ours", "nothing"])
def test_what_nfs_and_macos_leave_in_a_checkpoint_is_replaced_with_it(
    source: Path, tmp_path: Path, kind: str, name: str
) -> None:
    target = tmp_path / "out"
    if kind == "dcp":
        dcp.save(state(2), checkpoint_id=target, no_dist=True)
    elif kind == "ours":
        fsdpckpt.convert(source, target, to="sharded")
    else:
        target.mkdir()
    (target / name).write_bytes(b"left behind")
    fsdpckpt.convert(source, target, to="sharded", overwrite=True)
    assert fsdpckpt.diff(source, target).same and not (target / name).exists()


def test_what_comes_to_dst_while_it_is_written_is_not_deleted(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fsdpckpt.converters import pipeline

    target = tmp_path / "out"
    fsdpckpt.convert(source, target, to="sharded", world_size=2)
    execute = pipeline.execute

    def and_somebody_writes(*args: object, **named: object) -> object:
        (target / "results").mkdir()
        (target / "results" / "all.csv").write_text("42")
        return execute(*args, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(pipeline, "execute", and_somebody_writes)
    with pytest.raises(TargetExistsError, match="more than a checkpoint"):
        fsdpckpt.convert(source, target, to="sharded", world_size=3, overwrite=True)
    assert (target / "results" / "all.csv").read_text() == "42"


def test_nothing_at_all_is_replaceable(tmp_path: Path) -> None:
    require_replaceable(str(tmp_path / "nowhere"))
