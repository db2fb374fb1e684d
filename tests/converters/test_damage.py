"""A byte changed in a directory that this program wrote: a conversion ends, and writes no fresh checksum over it."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import fsdpckpt
from fsdpckpt.comm.protocol import Solo, original_error
from fsdpckpt.comm.torch_group import TorchGroup
from fsdpckpt.converters.pipeline import convert
from fsdpckpt.errors import FsdpckptError, SourceCorruptError, WorkerError
from fsdpckpt.execute import recorded
from fsdpckpt.ir.checkpoint import Container
from fsdpckpt.options import ConvertOptions
from fsdpckpt.progress import NoProgress
from tests.comm.forked_workers import forked_workers
from tests.oracle.compare import identical, require_identical, require_parts

FORMS: dict[str, dict[str, Any]] = {
    "safetensors": {"to": "full", "container": "safetensors"},
    "shards of safetensors": {"to": "full", "container": "safetensors", "max_shard_size": 3000},
    "dcp": {"to": "sharded", "container": "dcp", "world_size": 3, "buffers": ("none",)},
    "ranks": {"to": "sharded", "container": "torch", "world_size": 2, "buffers": ("none",)},
    "flattened": {"to": "flattened", "world_size": 2, "unit": ("none",), "use_orig_params": True},
}


@pytest.fixture(scope="module")
def state() -> dict[str, Any]:
    draw = torch.Generator().manual_seed(11)
    model = {f"layers.{number}.weight": torch.randn(7 + number, 31, generator=draw) for number in range(4)}
    states = {
        name: {"exp_avg": torch.randn(value.shape, generator=draw), "step": torch.tensor(3.0)}
        for name, value in model.items()
    }
    return {"model": model, "optimizer": {"state": states, "param_groups": [{"lr": 0.1, "params": list(model)}]}}


@pytest.fixture(scope="module")
def written(state: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The directory of each form, written once."""
    base = tmp_path_factory.mktemp("written")
    torch.save(state, base / "source.pt")

    def write(form: str) -> Path:
        out = base / form.replace(" ", "-")
        if not out.exists():
            fsdpckpt.convert(base / "source.pt", out, **FORMS[form])
        return out

    return write


def flip(path: Path, at: int) -> None:
    """Change a bit, and nothing that a look at the file's status shows."""
    status = path.stat()
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 16]))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def data_files(directory: Path) -> list[Path]:
    return sorted(path for path in directory.iterdir() if path.suffix not in (".json", ".metadata"))


@pytest.mark.parametrize("form", FORMS)
def test_a_changed_byte_in_any_file_ends_the_conversion_wherever_it_lies(
    form: str, written: Callable[[str], Path], tmp_path: Path
) -> None:
    draw = random.Random(form)
    source = shutil.copytree(written(form), tmp_path / "source")
    for number, path in enumerate(data_files(source)):
        nbytes = path.stat().st_size
        for at in (nbytes // 2, draw.randrange(nbytes), nbytes - 1):
            flip(path, at)
            verify = ("none", "structure", "full")[number % 3]
            with pytest.raises(FsdpckptError) as caught:
                fsdpckpt.convert(source, tmp_path / "out.pt", to="full", verify=verify)
            assert caught.value.exit_code == 3, (path.name, at)
            assert not (tmp_path / "out.pt").exists()
            flip(path, at)
    fsdpckpt.convert(source, tmp_path / "out.pt", to="full", verify="full")


def test_columns_of_a_file_without_checksums_of_its_own_are_compared_too(
    written: Callable[[str], Path], tmp_path: Path
) -> None:
    """Half of the columns is read with gaps between its rows, of which no checksum can be combined."""
    source = shutil.copytree(written("safetensors"), tmp_path / "source")
    path = next(iter(data_files(source)))
    columns = tmp_path / "columns.json"
    columns.write_text(json.dumps({"*": {"tp": "Shard(1)"}}))
    options: dict[str, Any] = {"to": "sharded", "mesh": "tp=2", "placements": columns, "only": "model"}
    flip(path, path.stat().st_size - 300)
    with pytest.raises(SourceCorruptError, match=r"does not match the checksum that fsdpckpt\.json recorded"):
        fsdpckpt.convert(source, tmp_path / "out", **options)
    flip(path, path.stat().st_size - 300)
    fsdpckpt.convert(source, tmp_path / "out", **options)


@pytest.mark.parametrize("cheap", [True, False])
def test_a_file_that_is_taken_in_part_is_compared_if_that_is_cheap_and_else_named_in_a_warning(
    cheap: bool, state: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.save(state["model"], tmp_path / "source.pt")
    fsdpckpt.convert(tmp_path / "source.pt", tmp_path / "st", container="safetensors")
    path = tmp_path / "st" / "model.safetensors"
    header = int.from_bytes(path.read_bytes()[:8], "little")
    begin = json.loads(path.read_bytes()[8 : 8 + header])["layers.3.weight"]["data_offsets"][0]
    flip(path, 8 + header + begin)
    with pytest.raises(SourceCorruptError):
        fsdpckpt.convert(tmp_path / "st", tmp_path / "all.pt", to="full")
    part: dict[str, Any] = {"include": ["layers.0.*"]}
    if cheap:  # whatever part it is: its new checksum must not cover damage
        for number, options in enumerate((part, {"exclude": ["layers.0.*"]}, {"include": ["layers.3.*"]})):
            with pytest.raises(SourceCorruptError, match=r"does not match the checksum that fsdpckpt\.json recorded"):
                fsdpckpt.convert(tmp_path / "st", tmp_path / f"{number}.safetensors", **options)
        flip(path, 8 + header + begin)
        report = fsdpckpt.convert(tmp_path / "st", tmp_path / "one.safetensors", **part)
        assert [note for note in report.notes if note.kind == "unchecked"] == []
        return
    monkeypatch.setattr(recorded, "_FREE_BYTES", 0)
    with pytest.warns(fsdpckpt.FsdpckptWarning, match="was read in part"):
        report = fsdpckpt.convert(tmp_path / "st", tmp_path / "one.safetensors", **part)
    (note,) = [note for note in report.notes if note.kind == "unchecked"]
    assert note.keys == (str(path),) and note.warning
    assert identical(load_file(tmp_path / "one.safetensors")["layers.0.weight"], state["model"]["layers.0.weight"])


def test_the_model_is_compared_although_the_damaged_optimizer_beside_it_is_left_out(
    written: Callable[[str], Path], state: dict[str, Any], tmp_path: Path
) -> None:
    source = shutil.copytree(written("safetensors"), tmp_path / "source")
    model, optimizer = (source / f"{name}.safetensors" for name in ("model", "optimizer"))
    flip(optimizer, optimizer.stat().st_size - 1)
    report = fsdpckpt.convert(source, tmp_path / "model.pt", to="full", only="model")
    assert [note for note in report.notes if note.kind == "unchecked"] == []
    held = torch.load(tmp_path / "model.pt")
    require_parts(held, state["model"])
    flip(model, model.stat().st_size - 1)
    with pytest.raises(SourceCorruptError, match=r"model\.safetensors is damaged"):
        fsdpckpt.convert(source, tmp_path / "again.pt", to="full", only="model")


def test_one_file_given_by_itself_is_compared_with_the_manifest_beside_it(
    written: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = shutil.copytree(written("safetensors"), tmp_path / "source")
    path = source / "model.safetensors"
    flip(path, path.stat().st_size - 5)
    monkeypatch.chdir(source)
    for given in (str(path), path.name, f"./{path.name}"):
        assert [problem.kind for problem in fsdpckpt.verify(given).problems] == ["checksum"]
        with pytest.raises(SourceCorruptError, match=r"fsdpckpt\.json"):
            fsdpckpt.convert(given, tmp_path / "out.pt", to="full")
    flip(path, path.stat().st_size - 5)
    assert fsdpckpt.verify(path.name).whole
    fsdpckpt.convert(path.name, tmp_path / "out.pt", to="full")


def test_parts_that_were_written_one_by_one_keep_the_checksums_of_each(state: dict[str, Any], tmp_path: Path) -> None:
    torch.save(state, tmp_path / "source.pt")
    run = tmp_path / "run"
    run.mkdir()
    for section in ("model", "optim"):
        fsdpckpt.convert(tmp_path / "source.pt", run / section, only=section, container="safetensors")
    assert fsdpckpt.verify(run).whole
    path = next(iter(data_files(run / "optim")))
    flip(path, path.stat().st_size - 9)
    assert [problem.kind for problem in fsdpckpt.verify(run).problems] == ["checksum"]
    with pytest.raises(SourceCorruptError, match=r"optimizer\.safetensors is damaged"):
        fsdpckpt.convert(run, tmp_path / "out.pt", to="full")


def test_links_keep_the_recorded_checksum_and_full_verification_reads_them(
    state: dict[str, Any], tmp_path: Path
) -> None:
    torch.save(state["model"], tmp_path / "source.pt")
    fsdpckpt.convert(tmp_path / "source.pt", tmp_path / "st", container="safetensors", max_shard_size=2000)
    path = data_files(tmp_path / "st")[-1]
    flip(path, path.stat().st_size - 1)
    options: dict[str, Any] = {"container": "safetensors", "max_shard_size": 2000, "link": "hardlink"}
    with pytest.raises(SourceCorruptError, match=f"{path.name} is damaged"):
        fsdpckpt.convert(tmp_path / "st", tmp_path / "full", verify="full", **options)
    report = fsdpckpt.convert(tmp_path / "st", tmp_path / "linked", **options)
    assert any(note.kind == "linked" for note in report.notes)
    assert [problem.kind for problem in fsdpckpt.verify(tmp_path / "linked").problems] == ["checksum"]


class Stop(BaseException):
    """As a signal."""


class Stopping(NoProgress):
    """Stops the conversion when the first bytes are copied."""

    copying = False

    def begin(self, stage: str, total_bytes: int) -> None:
        self.copying = stage == "copy"

    def advance(self, nbytes: int) -> None:
        if self.copying and nbytes:
            raise Stop


@pytest.mark.parametrize("place", ["taken over", "copied now"])
def test_a_resumed_conversion_compares_what_both_runs_have_read(place: str, tmp_path: Path) -> None:
    model = {f"w{number}": torch.randn(256, 515) for number in range(4)}
    torch.save(model, tmp_path / "source.pt")
    fsdpckpt.convert(tmp_path / "source.pt", tmp_path / "st", container="safetensors")
    options = ConvertOptions(container=Container.TORCH, max_memory=1 << 20, threads=1)
    out = tmp_path / "out.pt"
    with pytest.raises(Stop):
        convert(Solo(), str(tmp_path / "st"), str(out), options, Stopping())
    path = tmp_path / "st" / "model.safetensors"
    flip(path, 2000 if place == "taken over" else path.stat().st_size - 5)
    if place == "copied now":
        with pytest.raises(SourceCorruptError, match="is damaged"):
            convert(Solo(), str(tmp_path / "st"), str(out), options, NoProgress())
        assert not out.exists()
        return
    report = convert(Solo(), str(tmp_path / "st"), str(out), options, NoProgress())
    assert any(note.kind == "resumed" for note in report.notes)
    held = torch.load(out)["model"]
    require_identical(held, model)


def test_workers_compare_a_file_that_each_of_them_read_in_part(written: Callable[[str], Path], tmp_path: Path) -> None:
    source = shutil.copytree(written("safetensors"), tmp_path / "source")
    path = source / "optimizer.safetensors"
    flip(path, path.stat().st_size - 70)

    def body(_rank: int) -> int:
        with TorchGroup.start(device="cpu", limit=30) as group:
            try:
                options = ConvertOptions(container=Container.TORCH)
                convert(group, str(source), str(tmp_path / "out.pt"), options, NoProgress(), workers_here=2)
            except WorkerError as error:
                return 3 if f"{path} is damaged" in str(original_error(error)) else 1
        return 0

    assert forked_workers(2, body, limit=60) == [3, 3]
    assert not (tmp_path / "out.pt").exists()
