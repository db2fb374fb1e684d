"""``--link``: what comes out the same is linked, real PyTorch loads it, and no byte of the source is ever written."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import SerializationFormat

import fsdpckpt
from fsdpckpt.converters import Report, linking, pipeline
from fsdpckpt.converters.linking import can_reflink, reflink
from fsdpckpt.errors import FsdpckptError, SourceCorruptError, TargetExistsError, TargetUnwritableError, UsageError
from fsdpckpt.ir.dtypes import DTYPES
from fsdpckpt.ir.files import Stored
from fsdpckpt.ir.targets import LinkedFile, Target, TargetFile
from fsdpckpt.ir.tensors import Chunks, Tensor
from fsdpckpt.options import LinkMode
from fsdpckpt.plan import make_plan
from fsdpckpt.storage.hidden import staging_root
from fsdpckpt.storage.sources import Sources
from fsdpckpt.storage.staging import InterruptedRun, Staging
from tests.oracle.compare import identical

DCP: dict[str, Any] = {"container": "dcp"}  # one file of data alone reads as full, which would become a torch file
PARAMS = {"layers.0.w": (37, 5), "layers.1.w": (11, 3), "norm": (7,), "empty": (0, 3)}


def training() -> dict[str, Any]:
    torch.manual_seed(5)
    model = {name: torch.randn(shape) for name, shape in PARAMS.items()}
    state = {name: {"exp_avg": torch.randn_like(one), "step": torch.tensor(7.0)} for name, one in model.items()}
    groups = [{"lr": 0.1, "betas": (0.9, 0.99), "params": list(model)}]
    return {"model": model, "optimizer": {"state": state, "param_groups": groups}, "epoch": 3}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``dcp``: by PyTorch, one file; ``four``, ``ranks``: of four ranks and of two, by this program."""
    root = tmp_path_factory.mktemp("linking")
    torch.save(training(), root / "full.pt")
    dcp.save(training(), checkpoint_id=str(root / "dcp"), no_dist=True)
    fsdpckpt.convert(root / "full.pt", root / "four", to="sharded", world_size=4)
    more: dict[str, Any] = {"to": "sharded", "container": "torch", "world_size": 2, "buffers": "none"}
    fsdpckpt.convert(root / "full.pt", root / "ranks", **more)
    return root


def state_of(path: Path) -> dict[str, tuple[bytes, int, int, int]]:
    """All that nobody may change: contents, inodes, times of the last write, modes."""
    return {
        str(file.relative_to(path)): (file.read_bytes(), status.st_ino, status.st_mtime_ns, status.st_mode)
        for file in sorted(path.rglob("*"))
        if (status := file.lstat()) and file.is_file()
    }


@pytest.fixture(params=["dcp", "four"])
def source(request: pytest.FixtureRequest, made: Path, tmp_path: Path) -> Iterator[Path]:
    """A copy of a checkpoint, which is afterwards what it was."""
    path = tmp_path / "source"
    shutil.copytree(made / request.param, path)
    before = state_of(path)
    yield path
    assert state_of(path) == before


def linked(report: Report) -> dict[str, str]:
    return {file.path: file.source for file in report.files if file.source is not None}


def load(path: Path, like: dict[str, Any]) -> dict[str, Any]:
    """What PyTorch reads into zeros of the form of ``like``."""
    empty = torch.utils._pytree.tree_map(lambda one: torch.zeros_like(one) if torch.is_tensor(one) else one, like)
    dcp.load(empty, checkpoint_id=str(path), no_dist=True)
    return empty


def renamed(section: dict[str, Any]) -> dict[str, Any]:
    return {f"x.{name}": value for name, value in section.items()}


def expected(**changed: Any) -> dict[str, Any]:
    return {**training(), **changed}


def with_names() -> dict[str, Any]:
    whole = training()
    groups = [{**whole["optimizer"]["param_groups"][0], "params": list(renamed(whole["model"]))}]
    optimizer = {"state": renamed(whole["optimizer"]["state"]), "param_groups": groups}
    return expected(model=renamed(whole["model"]), optimizer=optimizer)


def test_other_names_for_the_same_data_move_none_and_pytorch_loads_them(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "out"
    report = fsdpckpt.convert(source, target, **DCP, add_prefix="x.", link="hardlink", verify="full")
    data = sorted(file.name for file in source.glob("*.distcp"))
    assert linked(report) == {name: str(source / name) for name in data}
    assert all(os.path.samefile(target / name, source / name) for name in data)
    assert report.bytes_read == 0
    assert report.bytes_written < 16384
    assert report.disk_needed == report.bytes_written
    assert identical(load(target, with_names()), with_names())
    assert fsdpckpt.verify(target).whole
    manifest = json.loads((target / "fsdpckpt.json").read_text())
    assert {name: manifest["files"][name]["link"] for name in data} == dict.fromkeys(data, "hardlink")
    assert "hard links" in "".join(note.message for note in report.notes if note.kind == "linked")


def test_a_section_alone_is_in_the_same_files_and_the_rest_of_them_is_said(source: Path, tmp_path: Path) -> None:
    report = fsdpckpt.convert(source, tmp_path / "out", **DCP, only="model", link="hardlink")
    assert linked(report)
    (note,) = (note.message for note in report.notes if note.kind == "linked")
    assert "that DST does not use" in note
    assert identical(load(tmp_path / "out", {"model": training()["model"]}), {"model": training()["model"]})


@pytest.mark.parametrize("source", ["four"], indirect=True)
def test_two_directories_of_one_form_link_the_same_files(source: Path, tmp_path: Path) -> None:
    report = fsdpckpt.convert(source, tmp_path / "out", flavor="accelerate", link="hardlink")
    data = [file.name for file in source.glob("*.distcp")]
    folders = ("pytorch_model_fsdp_0", "optimizer_0")
    assert sorted(linked(report)) == sorted(f"{folder}/{name}" for folder in folders for name in data)
    back = fsdpckpt.convert(tmp_path / "out", tmp_path / "back", flavor="torchtitan", link="hardlink")
    assert len(linked(back)) == 2 * len(data)  # two files of one name: one of them gets the next number
    assert fsdpckpt.diff(source, tmp_path / "back").same


def test_what_is_cast_is_written_and_the_rest_linked(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "out"
    fsdpckpt.convert(source, target, **DCP, optim_dtype="bfloat16", add_prefix="x.", link="hardlink", verify="full")
    whole = with_names()
    for states in whole["optimizer"]["state"].values():
        states["exp_avg"] = states["exp_avg"].bfloat16()
    assert identical(load(target, whole), whole)


@pytest.mark.parametrize(
    "options", [{"world_size": 3, "to": "sharded"}, {"dtype": "bfloat16", "optim_dtype": "bfloat16", **DCP}]
)
def test_where_no_file_comes_out_the_same_links_are_refused_and_auto_copies(
    source: Path, tmp_path: Path, options: dict[str, Any]
) -> None:
    with pytest.raises(UsageError, match="no file of DST would be the same"):
        fsdpckpt.convert(source, tmp_path / "out", link="hardlink", **options)
    assert not (tmp_path / "out").exists()
    fsdpckpt.convert(source, tmp_path / "auto", link="auto", **options)
    fsdpckpt.convert(source, tmp_path / "copy", **options)
    auto, copy = (state_of(tmp_path / form) for form in ("auto", "copy"))
    assert {name for name in auto | copy if auto[name][0] != copy[name][0]} <= {"fsdpckpt.json"}  # which has a note


def test_whole_files_of_other_containers_are_linked_where_the_same_bytes_would_be_written(
    made: Path, tmp_path: Path
) -> None:
    source = tmp_path / "source"
    shutil.copytree(made / "ranks", source)
    before = state_of(source)
    more: dict[str, Any] = {"world_size": 2, "container": "torch", "key_type": "id"}
    report = fsdpckpt.convert(source, tmp_path / "out", link="hardlink", verify="full", **more)
    assert sorted(linked(report)) == [f"model_world_size_2_rank_{rank}.pt" for rank in (0, 1)]
    fsdpckpt.convert(source, tmp_path / "copy", **more)
    for file in (tmp_path / "copy").glob("*.pt"):
        assert (tmp_path / "out" / file.name).read_bytes() == file.read_bytes()
    names = [file.path for file in report.files]
    assert len(names) == len(set(names)) == 7
    assert state_of(source) == before


def test_one_file_that_comes_out_the_same_is_a_link(made: Path, tmp_path: Path) -> None:
    fsdpckpt.convert(made / "full.pt", tmp_path / "one.pt")
    report = fsdpckpt.convert(tmp_path / "one.pt", tmp_path / "two.pt", link="hardlink")
    assert os.path.samefile(tmp_path / "one.pt", tmp_path / "two.pt")
    assert (report.bytes_written, [file.path for file in report.files]) == (0, [""])
    data = bytearray((tmp_path / "one.pt").read_bytes())
    data[data.index(b"ZZ")] ^= 1  # padding: the same tensors at the same places, and another file
    (tmp_path / "odd.pt").write_bytes(data)
    with pytest.raises(UsageError, match="no file of DST would be the same"):
        fsdpckpt.convert(tmp_path / "odd.pt", tmp_path / "three.pt", link="hardlink")


def test_texts_that_people_edit_and_bytes_in_another_order_are_copied(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"{}")
    target = Target([TargetFile("config.json"), TargetFile("deeper/rng_state_0.pth")])
    for file in target.files:
        file.add_write_item(Tensor(DTYPES["uint8"], (2,), Chunks.whole(file=0, offset=0, shape=(2,))))
    swapped = TargetFile("swapped.pth")  # as long, of the same bytes, in another order
    for start in (1, 0):
        swapped.add_write_item(target.files[0].write_items[0].tensor, start=(start,), size=(1,))
    target.files.append(swapped)
    hard = linking.Linking(LinkMode.HARDLINK, LinkMode.HARDLINK, frozenset({0}))
    with Sources() as sources:
        files = [Stored(str(tmp_path / "file"), 2)]
        found, plan = linking.link_equal_files(target, make_plan(target), hard, files, sources)
    assert [link.path for link in found.links] == ["deeper/rng_state_0.pth"]
    left = ["config.json", "swapped.pth"]
    assert [file.path for file in plan.files] == [file.path for file in found.files] == left


def test_data_files_without_items_of_their_own_are_not_linked(tmp_path: Path) -> None:
    writer = dcp.FileSystemWriter(tmp_path / "source", serialization_format=SerializationFormat.SAFETENSORS)
    dcp.save(training()["model"], storage_writer=writer, no_dist=True)
    options: dict[str, Any] = {"add_prefix": "x.", **DCP}
    with pytest.raises(UsageError, match="no file of DST would be the same"):
        fsdpckpt.convert(tmp_path / "source", tmp_path / "out", link="hardlink", **options)


def test_a_dry_run_says_what_would_be_linked_and_makes_nothing(source: Path, tmp_path: Path) -> None:
    before = sorted(tmp_path.iterdir())
    report = fsdpckpt.convert(source, tmp_path / "out", **DCP, add_prefix="x.", link="hardlink", dry_run=True)
    assert linked(report)
    assert report.disk_needed < 16384
    assert sorted(tmp_path.iterdir()) == before


def stop(*_: object, **__: object) -> None:
    raise KeyboardInterrupt


def test_an_interrupted_run_is_finished_and_a_replaced_link_leaves_the_source(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "out"
    with monkeypatch.context() as broken, pytest.raises(KeyboardInterrupt):
        broken.setattr(pipeline, "encode_manifest", stop)
        fsdpckpt.convert(source, target, **DCP, add_prefix="x.", link="hardlink")
    assert not target.exists()
    fsdpckpt.convert(source, target, **DCP, add_prefix="x.", link="hardlink")
    fsdpckpt.convert(source, target, **DCP, add_prefix="y.", overwrite=True)  # over links, without a link
    assert not any(os.path.samefile(target / file.name, file) for file in source.glob("*.distcp"))
    fsdpckpt.convert(source, target, **DCP, add_prefix="x.", overwrite=True, link="hardlink")
    assert identical(load(target, with_names()), with_names())
    again = fsdpckpt.convert(source, target, **DCP, add_prefix="x.", link="hardlink", resume=True)
    assert "was already complete" in "".join(note.message for note in again.notes)
    os.unlink(target / "__0_0.distcp")
    shutil.copyfile(source / ".metadata", target / "__0_0.distcp")
    with pytest.raises((TargetExistsError, SourceCorruptError)):
        fsdpckpt.convert(source, target, **DCP, add_prefix="x.", link="hardlink", resume=True)


def test_links_in_a_staging_directory_do_not_count_as_room(tmp_path: Path) -> None:
    (tmp_path / "big").write_bytes(bytes(1 << 20))
    root = Path(staging_root(str(tmp_path / "out")))
    (root / "output").mkdir(parents=True)
    os.link(tmp_path / "big", root / "output" / "linked")
    assert InterruptedRun.of(str(tmp_path / "out"), resume=False).removed == 0
    (tmp_path / "big").unlink()  # now that is its only name
    assert InterruptedRun.of(str(tmp_path / "out"), resume=False).removed >= 1 << 20


def test_a_full_check_reads_what_was_linked(made: Path, tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(made / "dcp", source)
    (file,) = source.glob("*.distcp")
    data = bytearray(file.read_bytes())
    weights = training()["model"]["layers.0.w"].numpy().tobytes()
    data[data.index(weights) + 40] ^= 1
    file.write_bytes(data)
    fsdpckpt.convert(source, tmp_path / "structure", **DCP, add_prefix="x.", link="hardlink")
    with pytest.raises(SourceCorruptError, match="does not match its checksum"):
        fsdpckpt.convert(source, tmp_path / "full", **DCP, add_prefix="x.", link="hardlink", verify="full")
    assert not (tmp_path / "full").exists()


def test_a_file_that_was_replaced_meanwhile_is_not_linked(tmp_path: Path) -> None:
    file, other = tmp_path / "file", tmp_path / "other"
    file.write_bytes(b"planned")
    other.write_bytes(b"another")
    target = Target([], links=[LinkedFile("a", 0, 7)])
    staging = Staging(str(tmp_path / "out"), directory=True)
    with Sources() as sources:
        sources.identity(str(file))
        os.replace(other, file)
        chosen = linking.Linking(LinkMode.HARDLINK, LinkMode.HARDLINK, frozenset({0}))
        with pytest.raises(SourceCorruptError, match="was replaced by another file"):
            linking.make_links(target, chosen, [Stored(str(file), 7)], staging, sources)
    staging.discard()
    staging.close()


def test_what_only_other_workers_see_is_not_linked(tmp_path: Path) -> None:
    files = [Stored(str(tmp_path / "here"), 1), Stored(str(tmp_path / "on another node"), 1)]
    (tmp_path / "here").write_bytes(b"a")
    with pytest.raises(UsageError, match="on another node"):
        linking.choose_linking(LinkMode.HARDLINK, files, str(tmp_path / "out"))
    assert linking.choose_linking(LinkMode.HARDLINK, files[:1], str(tmp_path / "out")).files == {0}
    assert not linking.choose_linking(LinkMode.AUTO, files, str(tmp_path / "out")).files


def test_stores_and_other_file_systems_are_named(source: Path, tmp_path: Path) -> None:
    for link in ("hardlink", "reflink"):
        with pytest.raises(UsageError, match="object store"):
            fsdpckpt.convert(source, "memory://out", **DCP, add_prefix="x.", link=link)
    elsewhere = Path("/dev/shm")
    if not elsewhere.is_dir() or elsewhere.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("no second file system here: links across two were not tested")
    with tempfile.TemporaryDirectory(dir=elsewhere) as directory:
        with pytest.raises(TargetUnwritableError, match="different file systems"):
            fsdpckpt.convert(source, f"{directory}/out", **DCP, add_prefix="x.", link="hardlink")
        with pytest.raises(TargetUnwritableError, match="cannot share blocks"):
            fsdpckpt.convert(source, f"{directory}/out", **DCP, add_prefix="x.", link="reflink")
        report = fsdpckpt.convert(source, f"{directory}/out", **DCP, add_prefix="x.", link="auto")
        assert not linked(report)
        assert "nothing was linked" in "".join(note.message for note in report.notes)


def shares(directory: Path) -> bool:
    (directory / "probe").write_bytes(bytes(8192))
    return can_reflink(str(directory / "probe"), str(directory))


@pytest.mark.parametrize("link", ["auto", "reflink"])
@pytest.mark.parametrize("real", [True, False])
def test_reflinks_are_files_of_their_own(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, link: str, *, real: bool
) -> None:
    source = tmp_path / "source"
    shutil.copytree(made / "four", source)
    if real and not shares(tmp_path):
        pytest.skip("the file system of the temporary directory has no reflinks (XFS and Btrfs have)")
    if not real:
        monkeypatch.setattr(linking, "can_reflink", lambda *_: True)
        monkeypatch.setattr(linking, "reflink", shutil.copyfile)
    report = fsdpckpt.convert(source, tmp_path / "out", **DCP, add_prefix="x.", link=link, verify="full")
    assert report.link == "reflink"
    assert sorted(linked(report)) == sorted(file.name for file in source.glob("*.distcp"))
    assert not any(os.path.samefile(tmp_path / "out" / name, path) for name, path in linked(report).items())
    assert identical(load(tmp_path / "out", with_names()), with_names())


def test_a_reflink_that_the_file_system_refuses_leaves_an_error(tmp_path: Path) -> None:
    if shares(tmp_path):
        pytest.skip("this file system has reflinks")
    with pytest.raises(TargetUnwritableError):
        reflink(str(tmp_path / "probe"), str(tmp_path / "new"))


@pytest.mark.parametrize("number", [1, 18, 31, 5])
def test_a_hard_link_that_the_system_refuses_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def refused(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(linking, "os", SimpleNamespace(link=refused))
    with pytest.raises(FsdpckptError) as caught:
        linking.hardlink(str(tmp_path / "a"), str(tmp_path / "b"))
    assert isinstance(caught.value, TargetUnwritableError)
    assert caught.value.why
    assert caught.value.next_step
