"""``--link``: what comes out the same is linked, real PyTorch loads it, and no byte of the source is ever written."""

from __future__ import annotations

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
from tests.converters.jobs import RANK_FILES, messages, notes, recorded, refused
from tests.oracle.compare import require_identical

DCP: dict[str, Any] = {"container": "dcp"}  # one file of data alone reads as full, which would become a torch file
HARD: dict[str, Any] = {"link": "hardlink"}
NAMED: dict[str, Any] = {**DCP, **HARD, "add_prefix": "x."}
PARAMS = {"layers.0.w": (37, 5), "layers.1.w": (11, 3), "norm": (7,), "empty": (0, 3)}
NO_FILE = "no file of DST would be the same"


def training(prefix: str = "") -> dict[str, Any]:
    torch.manual_seed(5)
    model = {prefix + name: torch.randn(shape) for name, shape in PARAMS.items()}
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
    fsdpckpt.convert(root / "full.pt", root / "ranks", **RANK_FILES, world_size=2, buffers="none")
    return root


def state_of(path: str) -> dict[str, tuple[bytes, int, int, int]]:
    """All that nobody may change: contents, inodes, times of the last write, modes."""
    return {
        str(file.relative_to(path)): (file.read_bytes(), status.st_ino, status.st_mtime_ns, status.st_mode)
        for file in sorted(Path(path).rglob("*"))
        if (status := file.lstat()) and file.is_file()
    }


@pytest.fixture(params=["dcp", "four"])
def form(request: pytest.FixtureRequest, made: Path) -> Iterator[str]:
    """``source`` is a copy of such a checkpoint, which is afterwards what it was."""
    shutil.copytree(made / request.param, "source")
    before = state_of("source")
    yield request.param
    assert state_of("source") == before


def linked(report: Report) -> dict[str, str]:
    return {file.path: file.source for file in report.files if file.source is not None}


def require_loaded(path: str, expected: dict[str, Any]) -> None:
    """PyTorch reads it into zeros of the same form."""
    empty = torch.utils._pytree.tree_map(lambda one: torch.zeros_like(one) if torch.is_tensor(one) else one, expected)
    dcp.load(empty, checkpoint_id=path, no_dist=True)
    require_identical(empty, expected)


def data_files() -> list[str]:
    return sorted(file.name for file in Path("source").glob("*.distcp"))


@pytest.mark.usefixtures("form")
def test_other_names_for_the_same_data_move_none_and_pytorch_loads_them() -> None:
    plan = fsdpckpt.convert("source", "out", **NAMED, dry_run=True)
    assert linked(plan) and plan.disk_needed < 16384 and os.listdir() == ["source"]
    report = fsdpckpt.convert("source", "out", **NAMED, verify="full")
    assert linked(report) == {name: f"source/{name}" for name in data_files()}
    assert all(os.path.samefile(f"out/{name}", f"source/{name}") for name in data_files())
    assert report.bytes_read == 0 and report.disk_needed == report.bytes_written < 16384
    require_loaded("out", training("x."))
    assert fsdpckpt.verify("out").whole
    stated = recorded("out")["files"]
    assert {name: stated[name]["link"] for name in data_files()} == dict.fromkeys(data_files(), "hardlink")
    assert "hard links" in notes(report, "linked")[0].message


@pytest.mark.usefixtures("form")
def test_a_section_alone_is_in_the_same_files_and_what_is_cast_is_written() -> None:
    report = fsdpckpt.convert("source", "model", **DCP, **HARD, only="model")
    (note,) = notes(report, "linked")
    assert linked(report) and "that DST does not use" in note.message  # the rest of them
    require_loaded("model", {"model": training()["model"]})
    fsdpckpt.convert("source", "cast", **NAMED, optim_dtype="bfloat16", verify="full")
    whole = training("x.")
    for states in whole["optimizer"]["state"].values():
        states["exp_avg"] = states["exp_avg"].bfloat16()
    require_loaded("cast", whole)


@pytest.mark.parametrize("form", ["four"], indirect=True)
def test_two_directories_of_one_form_link_the_same_files(form: str) -> None:
    report = fsdpckpt.convert("source", "out", flavor="accelerate", **HARD)
    folders = ("pytorch_model_fsdp_0", "optimizer_0")
    assert sorted(linked(report)) == sorted(f"{folder}/{name}" for folder in folders for name in data_files())
    back = fsdpckpt.convert("out", "back", flavor="torchtitan", **HARD)
    assert len(linked(back)) == 2 * len(data_files())  # two files of one name: one of them gets the next number
    assert fsdpckpt.diff("source", "back").same


@pytest.mark.usefixtures("form")
@pytest.mark.parametrize(
    "options", [{"world_size": 3, "to": "sharded"}, {"dtype": "bfloat16", "optim_dtype": "bfloat16", **DCP}]
)
def test_where_no_file_comes_out_the_same_links_are_refused_and_auto_copies(options: dict[str, Any]) -> None:
    refused(UsageError, NO_FILE, "source", "out", **HARD, **options)
    fsdpckpt.convert("source", "auto", link="auto", **options)
    fsdpckpt.convert("source", "copy", **options)
    auto, copy = state_of("auto"), state_of("copy")
    assert {name for name in auto | copy if auto[name][0] != copy[name][0]} <= {"fsdpckpt.json"}  # which has a note


def test_whole_files_of_other_containers_are_linked_where_the_same_bytes_would_be_written(made: Path) -> None:
    shutil.copytree(made / "ranks", "source")
    before = state_of("source")
    more: dict[str, Any] = {"world_size": 2, "container": "torch", "key_type": "id"}
    report = fsdpckpt.convert("source", "out", **HARD, verify="full", **more)
    assert sorted(linked(report)) == [f"model_world_size_2_rank_{rank}.pt" for rank in (0, 1)]
    fsdpckpt.convert("source", "copy", **more)
    for file in Path("copy").glob("*.pt"):
        assert Path("out", file.name).read_bytes() == file.read_bytes()
    names = [file.path for file in report.files]
    assert len(names) == len(set(names)) == 7
    assert state_of("source") == before


def test_one_file_that_comes_out_the_same_is_a_link(made: Path) -> None:
    fsdpckpt.convert(made / "full.pt", "one.pt")
    report = fsdpckpt.convert("one.pt", "two.pt", **HARD)
    assert os.path.samefile("one.pt", "two.pt")
    assert (report.bytes_written, [file.path for file in report.files]) == (0, [""])
    data = bytearray(Path("one.pt").read_bytes())
    data[data.index(b"ZZ")] ^= 1  # padding: the same tensors at the same places, and another file
    Path("odd.pt").write_bytes(data)
    refused(UsageError, NO_FILE, "odd.pt", "three.pt", **HARD)


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


def test_data_files_without_items_of_their_own_are_not_linked() -> None:
    writer = dcp.FileSystemWriter("source", serialization_format=SerializationFormat.SAFETENSORS)
    dcp.save(training()["model"], storage_writer=writer, no_dist=True)
    refused(UsageError, NO_FILE, "source", "out", **NAMED)


def stop(*_: object, **__: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.usefixtures("form")
def test_an_interrupted_run_is_finished_and_a_replaced_link_leaves_the_source(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as broken, pytest.raises(KeyboardInterrupt):
        broken.setattr(pipeline, "encode_manifest", stop)
        fsdpckpt.convert("source", "out", **NAMED)
    assert not Path("out").exists()
    fsdpckpt.convert("source", "out", **NAMED)
    fsdpckpt.convert("source", "out", **DCP, add_prefix="y.", overwrite=True)  # over links, without a link
    assert not any(os.path.samefile(f"out/{name}", f"source/{name}") for name in data_files())
    fsdpckpt.convert("source", "out", **NAMED, overwrite=True)
    require_loaded("out", training("x."))
    again = fsdpckpt.convert("source", "out", **NAMED, resume=True)
    assert messages(again, "was already complete")
    os.unlink("out/__0_0.distcp")
    shutil.copyfile("source/.metadata", "out/__0_0.distcp")
    with pytest.raises((TargetExistsError, SourceCorruptError)):
        fsdpckpt.convert("source", "out", **NAMED, resume=True)


def test_links_in_a_staging_directory_do_not_count_as_room(tmp_path: Path) -> None:
    (tmp_path / "big").write_bytes(bytes(1 << 20))
    root = Path(staging_root(str(tmp_path / "out")))
    (root / "output").mkdir(parents=True)
    os.link(tmp_path / "big", root / "output" / "linked")
    assert InterruptedRun.of(str(tmp_path / "out"), resume=False).removed == 0
    (tmp_path / "big").unlink()  # now that is its only name
    assert InterruptedRun.of(str(tmp_path / "out"), resume=False).removed >= 1 << 20


def test_a_full_check_reads_what_was_linked(made: Path) -> None:
    shutil.copytree(made / "dcp", "source")
    (file,) = Path("source").glob("*.distcp")
    data = bytearray(file.read_bytes())
    data[data.index(training()["model"]["layers.0.w"].numpy().tobytes()) + 40] ^= 1
    file.write_bytes(data)
    fsdpckpt.convert("source", "structure", **NAMED)
    refused(SourceCorruptError, "does not match its checksum", "source", "full", **NAMED, verify="full")


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


@pytest.mark.usefixtures("form")
def test_stores_and_other_file_systems_are_named(tmp_path: Path) -> None:
    named = {**DCP, "add_prefix": "x."}
    for link in ("hardlink", "reflink"):
        refused(UsageError, "object store", "source", "memory://out", **named, link=link)
    elsewhere = Path("/dev/shm")
    if not elsewhere.is_dir() or elsewhere.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("no second file system here: links across two were not tested")
    with tempfile.TemporaryDirectory(dir=elsewhere) as directory:
        for link, words in (("hardlink", "different file systems"), ("reflink", "cannot share blocks")):
            refused(TargetUnwritableError, words, "source", f"{directory}/out", **named, link=link)
        report = fsdpckpt.convert("source", f"{directory}/out", **named, link="auto")
        assert not linked(report) and messages(report, "nothing was linked")


def shares(directory: Path) -> bool:
    (directory / "probe").write_bytes(bytes(8192))
    return can_reflink(str(directory / "probe"), str(directory))


@pytest.mark.parametrize("form", ["four"], indirect=True)
@pytest.mark.parametrize("link", ["auto", "reflink"])
@pytest.mark.parametrize("real", [True, False])
def test_reflinks_are_files_of_their_own(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, link: str, *, real: bool
) -> None:
    if real and not shares(tmp_path):
        pytest.skip("the file system of the temporary directory has no reflinks (XFS and Btrfs have)")
    if not real:
        monkeypatch.setattr(linking, "can_reflink", lambda *_: True)
        monkeypatch.setattr(linking, "reflink", shutil.copyfile)
    report = fsdpckpt.convert("source", "out", **{**NAMED, "link": link}, verify="full")
    assert report.link == "reflink" and sorted(linked(report)) == data_files()
    assert not any(os.path.samefile(f"out/{name}", path) for name, path in linked(report).items())
    require_loaded("out", training("x."))


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
