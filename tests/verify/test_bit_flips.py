"""One changed bit, in every container: found, or it makes no difference, or the container has no checksum of it.

``scripts/bit_flips.py`` tries every byte; here a sample is tried.
"""

from __future__ import annotations

import random
import zipfile
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

import fsdpckpt
from fsdpckpt.errors import SourceCorruptError, SourceError
from tests.verify.bit_flips import (
    FORMS,
    PROTECTED,
    VERIFY_ALONE,
    WITHOUT_CHECKSUMS,
    WRITTEN,
    flip_each,
    make,
    places,
)

SAMPLE = 25  # bytes of each form


def sampled(form: str, tmp_path: Path) -> Counter[str]:
    whole = make(form, tmp_path)
    chosen = random.Random(form).sample(places(whole), SAMPLE)
    return Counter(outcome.kind for outcome in flip_each(whole, chosen, tmp_path))


@pytest.mark.parametrize("form", WRITTEN)
def test_beside_its_manifest_no_bit_of_a_checkpoint_changes_unnoticed_by_verify_or_convert(
    form: str, tmp_path: Path
) -> None:
    assert sampled(form, tmp_path) == {"found": SAMPLE}


@pytest.mark.parametrize("form", [form for form in FORMS if form not in {*WRITTEN, *WITHOUT_CHECKSUMS}])
def test_without_one_a_bit_is_found_by_the_checksums_of_records_or_makes_no_difference(
    form: str, tmp_path: Path
) -> None:
    assert set(sampled(form, tmp_path)) <= PROTECTED


@pytest.mark.parametrize("form", sorted(WITHOUT_CHECKSUMS))
def test_where_nothing_has_a_checksum_convert_says_what_verify_finds(form: str, tmp_path: Path) -> None:
    assert VERIFY_ALONE not in sampled(form, tmp_path)


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
