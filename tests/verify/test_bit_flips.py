"""One changed bit, one forged byte: found by ``verify`` and refused by ``convert``, or provably of no difference."""

from __future__ import annotations

import random
import shutil
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import fsdpckpt
from fsdpckpt.errors import SourceCorruptError, SourceError
from fsdpckpt.ir.tensors import Tensor
from fsdpckpt.readers.detect import open_checkpoint
from fsdpckpt.storage.sources import Sources
from fsdpckpt.verify.blocks import BlockReader
from fsdpckpt.verify.integrity import verify_checkpoint
from fsdpckpt.verify.measures import digest
from tests.ir.checkpoints import with_origin
from tests.makers import GOLDEN
from tests.verify.bit_flips import (
    FORMS,
    PROTECTED,
    VERIFY_ALONE,
    WITHOUT_CHECKSUMS,
    WRITTEN,
    files_of,
    flip_each,
    found_each,
    make,
)

MANY = dict.fromkeys(("dcp", "torch ranks", "flattened", "safetensors"), 12) | {"torch.save": 90, "dcp.save": 40}
"""Bytes of each file; 4 of every other form, as ``scripts/bit_flips`` tries them all."""
SEED = 20
OTHERWISE: dict[str, dict[str, Any]] = {
    "dcp": {"world_size": 3},
    "safetensors": {"max_shard_size": 24},  # shards and their index
}


def kinds(form: str, tmp_path: Path, **options: Any) -> set[str]:
    """What comes of a bit in a sample of the bytes of every file."""
    whole, chosen = make(form, tmp_path, **options), []
    for path in files_of(whole):
        nbytes = path.stat().st_size
        sample = random.Random(f"{SEED} {path.name}").sample(range(nbytes), min(MANY.get(form, 4), nbytes))
        chosen += [(path, at) for at in sample]
    return {outcome.kind for outcome in flip_each(whole, chosen, tmp_path)}


@pytest.mark.parametrize("form", WRITTEN)
def test_beside_its_manifest_no_bit_of_a_checkpoint_changes_unnoticed_by_verify_or_convert(
    form: str, tmp_path: Path
) -> None:
    assert kinds(form, tmp_path, **OTHERWISE.get(form, {})) == {"found"}


@pytest.mark.parametrize("form", [form for form in FORMS if form not in WRITTEN])
def test_without_one_a_bit_is_found_by_the_checksums_of_records_or_makes_no_difference(
    form: str, tmp_path: Path
) -> None:
    """Where nothing has a checksum, ``convert`` says at least what ``verify`` finds."""
    found = kinds(form, tmp_path)
    assert VERIFY_ALONE not in found
    assert form in WITHOUT_CHECKSUMS or found <= PROTECTED
    assert form != "torch.save" or "harmless" in found, "padding, and fields of the zip that nobody reads"


def in_tensors(whole: Path) -> dict[Path, list[int]]:
    """A byte of every chunk of every tensor, by file."""
    found: dict[Path, set[int]] = {}
    with Sources() as sources:
        checkpoint = open_checkpoint(str(whole), sources=sources)
        for chunks in (one.tensor.chunks for one in checkpoint.tensors()):
            for file, offset in zip(chunks.file.tolist(), chunks.offset.tolist(), strict=True):
                if offset >= 0:
                    found.setdefault(Path(checkpoint.files[file].path), set()).add(offset)  # type: ignore[union-attr]
    return {path: sorted(offsets) for path, offsets in found.items()}


@pytest.mark.parametrize("source", ["f2_default/ckpt", "f1_orig_full/model.pt", "f1_orig_sh_dt_dcp/optim"])
def test_no_byte_of_a_tensor_that_pytorch_saved_can_change_unnoticed(tmp_path: Path, source: str) -> None:
    golden, whole = GOLDEN / "torch-2.4" / source, tmp_path / "whole"
    (shutil.copytree if golden.is_dir() else shutil.copy)(golden, whole)
    places = [(path, at) for path, offsets in in_tensors(whole).items() for at in offsets]
    assert len(places) > 5
    # The first and the last are where a list of checksums that is one short shows.
    ends = [(path, at) for path, offsets in in_tensors(whole).items() for at in (offsets[0], offsets[-1])]
    chosen = sorted({*ends, *random.Random(SEED).sample(places, min(40, len(places)))})
    assert all(found_each(whole, chosen))


def test_a_zip_end_record_that_a_zip64_record_overrules_is_no_crash(tmp_path: Path) -> None:
    whole = shutil.copytree(GOLDEN / "torch-2.4" / "f2_default" / "ckpt", tmp_path / "whole")
    data = (whole / "__1_0.distcp").read_bytes()
    ends = [at for at in range(len(data) - 4) if data.startswith(b"PK\5\6", at)]
    fields = (14, 18)  # bytes of the directory's size and place
    chosen = [(whole / "__1_0.distcp", end + field) for end in random.Random(SEED).sample(ends, 4) for field in fields]
    assert {outcome.kind for outcome in flip_each(whole, chosen, tmp_path)} <= PROTECTED


def test_bytes_that_keep_their_checksum_are_found_by_the_digest_that_was_recorded(tmp_path: Path) -> None:
    whole = make("dcp", tmp_path, verify="full")
    assert fsdpckpt.verify(whole, digests=True).whole
    with Sources() as sources:
        checkpoint = open_checkpoint(str(whole), sources=sources)
        changed = checkpoint.model.params["w"]
        assert isinstance(changed, Tensor)
        recorded = checkpoint.origin.manifest.digests
        assert recorded["model w"] == digest(BlockReader(checkpoint.files, sources), changed)
        # Another digest stands for other bytes with the same CRC-32, which are hard to come by.
        recorded = dict(recorded) | {"model w": recorded["optim 0.exp_avg"]}
        checkpoint = with_origin(checkpoint, manifest=replace(checkpoint.origin.manifest, digests=recorded))
        (problem,) = verify_checkpoint(checkpoint, sources=sources, digests=True).problems
        assert (problem.kind, problem.key) == ("digest", "w")


# A letter of a file whose bytes nothing proves, in a place where two facts then contradict each other.
CONTRADICTIONS = {
    "safetensors without fsdpckpt.json": ("optimizer.safetensors", b'params\\":[0]', b'params\\":[ ]'),
    "dcp.save": (".metadata", b"optimizer.state.0.step", b"optimizer.state.0.stem"),
    "dcp without fsdpckpt.json": (".metadata", b"optimizer.state.0.exp_avg", b"optimizer.state.0.exp_aug"),
}


@pytest.mark.parametrize("form", CONTRADICTIONS)
def test_a_contradiction_that_no_save_makes_is_not_converted(form: str, tmp_path: Path) -> None:
    name, before, after = CONTRADICTIONS[form]
    whole = make(form, tmp_path)
    data = (whole / name).read_bytes()
    assert before in data
    (whole / name).write_bytes(data.replace(before, after, 1))
    with pytest.raises(SourceError):
        fsdpckpt.convert(whole, tmp_path / "out.pt", to="full")
    assert not (tmp_path / "out.pt").exists()


@pytest.mark.parametrize("record", ["byteorder", "version", ".data/serialization_id"])
def test_a_record_that_no_tensor_is_in_is_compared_by_whoever_opens_the_file(record: str, tmp_path: Path) -> None:
    path = make("torch.save", tmp_path)
    with zipfile.ZipFile(path) as archive:
        content = {name.partition("/")[2]: archive.read(name) for name in archive.namelist()}
    data = path.read_bytes()
    for name in (record, "data/1"):  # and a tensor, which verify lists, too
        at = data.index(content[name])
        data = data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]
    path.write_bytes(data)
    for read in (fsdpckpt.inspect, lambda path: fsdpckpt.convert(path, tmp_path / "out.pt", to="full")):
        with pytest.raises(SourceError):
            read(path)
    with pytest.raises(SourceError) as error:
        fsdpckpt.verify(path)
    assert len(error.value.details) == 2


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("alike", [True, False])
def test_a_mesh_is_compared_with_its_checksum_on_every_rank(rank: int, alike: bool, tmp_path: Path) -> None:
    """Nobody reads its bytes again, and the other ranks' files are not parsed if they are like the first."""
    torch.save({f"w{number}": torch.randn(4, 2) for number in range(3)}, tmp_path / "source.pt")
    options: dict[str, Any] = {"to": "sharded", "container": "torch", "world_size": 2, "buffers": ("none",)}
    fsdpckpt.convert(tmp_path / "source.pt", tmp_path / "ranks", **options)
    (tmp_path / "ranks" / "fsdpckpt.json").unlink()
    path = tmp_path / "ranks" / f"model_world_size_2_rank_{rank}.pt"
    data = bytearray(path.read_bytes())
    at = data.index((0).to_bytes(4, "little") + (1).to_bytes(4, "little") + b"PK")  # the ranks of the mesh
    data[at if alike else at + 7] ^= 2
    path.write_bytes(data)
    for read in (fsdpckpt.inspect, lambda path: fsdpckpt.convert(path, tmp_path / "out.pt", to="full")):
        with pytest.raises(SourceCorruptError, match="checksum"):
            read(tmp_path / "ranks")
