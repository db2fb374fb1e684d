"""A byte changed in a directory that this program wrote: a conversion ends, and writes no fresh checksum over it."""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import zlib
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
from fsdpckpt.execute import recorded as recorded_sums
from fsdpckpt.ir.checkpoint import Container
from fsdpckpt.options import ConvertOptions
from fsdpckpt.progress import NoProgress
from tests.comm.forked_workers import forked_workers
from tests.converters.jobs import RANK_FILES, notes, recorded, refused, save
from tests.oracle.compare import identical, require_identical, require_parts

SAFE: dict[str, Any] = {"container": "safetensors"}
FORMS: dict[str, dict[str, Any]] = {
    "safetensors": SAFE,
    "shards of safetensors": {**SAFE, "max_shard_size": 3000},
    "dcp": {"to": "sharded", "container": "dcp", "world_size": 3, "buffers": ("none",)},
    "ranks": {**RANK_FILES, "world_size": 2, "buffers": ("none",)},
    "flattened": {"to": "flattened", "world_size": 2, "unit": ("none",), "use_orig_params": True},
}
FULL: dict[str, Any] = {"to": "full"}
BY_MANIFEST = r"does not match the checksum that fsdpckpt\.json recorded"
Written = Callable[[str], Path]


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
def made(state: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Written:
    """The directory of each form, written once."""
    base = tmp_path_factory.mktemp("written")
    torch.save(state, base / "source.pt")

    def write(form: str) -> Path:
        out = base / form.replace(" ", "-")
        if not out.exists():
            fsdpckpt.convert(base / "source.pt", out, **FORMS[form])
        return out

    return write


@pytest.fixture
def written(made: Written) -> Written:
    """A copy of such a directory as ``source``."""
    return lambda form: Path(shutil.copytree(made(form), "source"))


def flip(path: Path | str, at: int) -> None:
    """Change a bit, and nothing that a look at the file's status shows. A negative place counts from the end."""
    status = os.stat(path)
    data = bytearray(Path(path).read_bytes())
    data[at] ^= 16
    Path(path).write_bytes(data)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def data_files(directory: Path | str) -> list[Path]:
    return sorted(path for path in Path(directory).iterdir() if path.suffix not in (".json", ".metadata"))


def found_by_verify(path: Path | str) -> list[str]:
    return [problem.kind for problem in fsdpckpt.verify(path).problems]


@pytest.mark.parametrize("form", FORMS)
def test_a_changed_byte_in_any_file_ends_the_conversion_wherever_it_lies(form: str, written: Written) -> None:
    draw = random.Random(form)
    source = written(form)
    for number, path in enumerate(data_files(source)):
        nbytes = path.stat().st_size
        for at in (nbytes // 2, draw.randrange(nbytes), nbytes - 1):
            flip(path, at)
            verify = ("none", "structure", "full")[number % 3]
            error = refused(FsdpckptError, "", source, "out.pt", **FULL, verify=verify)
            assert error.exit_code == 3, (path.name, at)
            flip(path, at)
    fsdpckpt.convert(source, "out.pt", **FULL, verify="full")


def test_columns_of_a_file_without_checksums_of_its_own_are_compared_too(written: Written) -> None:
    """Half of the columns is read with gaps between its rows, of which no checksum can be combined."""
    path = data_files(written("safetensors"))[0]
    Path("columns.json").write_text(json.dumps({"*": {"tp": "Shard(1)"}}))
    options: dict[str, Any] = {"to": "sharded", "mesh": "tp=2", "placements": "columns.json", "only": "model"}
    flip(path, -300)
    refused(SourceCorruptError, BY_MANIFEST, "source", "out", **options)
    flip(path, -300)
    fsdpckpt.convert("source", "out", **options)


@pytest.mark.parametrize("cheap", [True, False])
def test_a_file_that_is_taken_in_part_is_compared_if_that_is_cheap_and_else_named_in_a_warning(
    cheap: bool, state: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    fsdpckpt.convert(save(state["model"]), "st", **SAFE)
    path = Path("st/model.safetensors")
    header = int.from_bytes(path.read_bytes()[:8], "little")
    begin = json.loads(path.read_bytes()[8 : 8 + header])["layers.3.weight"]["data_offsets"][0]
    flip(path, 8 + header + begin)
    refused(SourceCorruptError, "", "st", "all.pt", **FULL)
    part: dict[str, Any] = {"include": ["layers.0.*"]}
    if cheap:  # whatever part it is: its new checksum must not cover damage
        for options in (part, {"exclude": ["layers.0.*"]}, {"include": ["layers.3.*"]}):
            refused(SourceCorruptError, BY_MANIFEST, "st", "part.safetensors", **options)
        flip(path, 8 + header + begin)
        assert notes(fsdpckpt.convert("st", "one.safetensors", **part), "unchecked") == []
        return
    monkeypatch.setattr(recorded_sums, "_FREE_BYTES", 0)
    with pytest.warns(fsdpckpt.FsdpckptWarning, match="was read in part"):
        report = fsdpckpt.convert("st", "one.safetensors", **part)
    (note,) = notes(report, "unchecked")
    assert note.keys == (str(path),) and note.warning
    assert identical(load_file("one.safetensors")["layers.0.weight"], state["model"]["layers.0.weight"])


def test_the_model_is_compared_although_the_damaged_optimizer_beside_it_is_left_out(
    written: Written, state: dict[str, Any]
) -> None:
    source = written("safetensors")
    flip(source / "optimizer.safetensors", -1)
    report = fsdpckpt.convert(source, "model.pt", **FULL, only="model")
    assert notes(report, "unchecked") == []
    require_parts(torch.load("model.pt"), state["model"])
    flip(source / "model.safetensors", -1)
    refused(SourceCorruptError, r"model\.safetensors is damaged", source, "again.pt", **FULL, only="model")


def test_one_file_given_by_itself_is_compared_with_the_manifest_beside_it(
    written: Written, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = (written("safetensors") / "model.safetensors").resolve()
    flip(path, -5)
    monkeypatch.chdir(path.parent)
    for given in (str(path), path.name, f"./{path.name}"):
        assert found_by_verify(given) == ["checksum"]
        refused(SourceCorruptError, r"fsdpckpt\.json", given, "../out.pt", **FULL)
    flip(path, -5)
    assert fsdpckpt.verify(path.name).whole
    fsdpckpt.convert(path.name, "../out.pt", **FULL)


def test_parts_that_were_written_one_by_one_keep_the_checksums_of_each(state: dict[str, Any]) -> None:
    save(state)
    Path("run").mkdir()
    for section in ("model", "optim"):
        fsdpckpt.convert("source.pt", f"run/{section}", only=section, **SAFE)
    assert fsdpckpt.verify("run").whole
    flip(data_files("run/optim")[0], -9)
    assert found_by_verify("run") == ["checksum"]
    refused(SourceCorruptError, r"optimizer\.safetensors is damaged", "run", "out.pt", **FULL)


def test_links_keep_the_recorded_checksum_and_full_verification_reads_them(state: dict[str, Any]) -> None:
    options: dict[str, Any] = {**SAFE, "max_shard_size": 2000}
    fsdpckpt.convert(save(state["model"]), "st", **options)
    path = data_files("st")[-1]
    flip(path, -1)
    options |= {"link": "hardlink"}
    refused(SourceCorruptError, f"{path.name} is damaged", "st", "full", verify="full", **options)
    assert notes(fsdpckpt.convert("st", "linked", **options), "linked")
    assert found_by_verify("linked") == ["checksum"]


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
def test_a_resumed_conversion_compares_what_both_runs_have_read(place: str) -> None:
    model = {f"w{number}": torch.randn(256, 515) for number in range(4)}
    fsdpckpt.convert(save(model), "st", **SAFE)
    options = ConvertOptions(container=Container.TORCH, max_memory=1 << 20, threads=1)
    with pytest.raises(Stop):
        convert(Solo(), "st", "out.pt", options, Stopping())
    flip("st/model.safetensors", 2000 if place == "taken over" else -5)
    if place == "copied now":
        with pytest.raises(SourceCorruptError, match="is damaged"):
            convert(Solo(), "st", "out.pt", options, NoProgress())
        assert not Path("out.pt").exists()
        return
    assert notes(convert(Solo(), "st", "out.pt", options, NoProgress()), "resumed")
    require_identical(torch.load("out.pt")["model"], model)


def test_workers_compare_a_file_that_each_of_them_read_in_part(written: Written) -> None:
    path = written("safetensors") / "optimizer.safetensors"
    flip(path, -70)

    def body(_rank: int) -> int:
        with TorchGroup.start(device="cpu", limit=30) as group:
            try:
                options = ConvertOptions(container=Container.TORCH)
                convert(group, "source", "out.pt", options, NoProgress(), workers_here=2)
            except WorkerError as error:
                return 3 if f"{path} is damaged" in str(original_error(error)) else 1
        return 0

    assert forked_workers(2, body, limit=60) == [3, 3]
    assert not Path("out.pt").exists()


# What is recorded


@pytest.fixture
def large() -> dict[str, torch.Tensor]:
    """Larger than a copy window, so that checksums are patched after their window was written."""
    model = {"big": torch.randn(1031, 2053), "small": torch.randn(7), "tiny": torch.randn(3, 5)}
    save(model)
    return model


@pytest.mark.parametrize("form", ["dcp", "ranks", "shards of safetensors"])
@pytest.mark.parametrize("max_memory", [1 << 20, 128 << 20])
@pytest.mark.usefixtures("large")
def test_length_and_crc_of_every_file_are_stated(form: str, max_memory: int) -> None:
    options = {**FORMS[form], "max_memory": max_memory}
    if "shards" in form:
        options["max_shard_size"] = 3_000_000
    fsdpckpt.convert("source.pt", "out", **options)
    there = {path.name: path.read_bytes() for path in Path("out").iterdir() if path.name != "fsdpckpt.json"}
    stated = {name: {"nbytes": len(data), "crc32": f"{zlib.crc32(data):08x}"} for name, data in there.items()}
    assert recorded("out")["files"] == stated


def test_full_verification_records_a_digest_of_every_tensor(large: dict[str, torch.Tensor]) -> None:
    fsdpckpt.convert("source.pt", "out", **FORMS["dcp"], verify="full")
    digests = {f"model {name}": hashlib.sha256(value.numpy().tobytes()).hexdigest() for name, value in large.items()}
    assert recorded("out")["digests"] == digests


def test_what_an_interrupted_run_left_is_removed_and_said(state: dict[str, Any]) -> None:
    left = Path(".out.fsdpckpt-staging")
    left.mkdir()
    (left / "__0_0.distcp").write_bytes(b"half")
    assert len(notes(fsdpckpt.convert(save(state), "out", **FORMS["dcp"]), "cleared")) == 1
    assert not left.exists()
