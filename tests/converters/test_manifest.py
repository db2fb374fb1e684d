"""``fsdpckpt.json``: what a written directory says about itself, and what that is good for."""

from __future__ import annotations

import hashlib
import json
import zlib
from dataclasses import replace

import pytest
import torch

from fsdpckpt import verify
from fsdpckpt.comm.protocol import Solo
from fsdpckpt.converters.pipeline import convert
from fsdpckpt.ir.checkpoint import Container, Layout
from fsdpckpt.options import ConvertOptions, VerifyLevel
from fsdpckpt.progress import NoProgress

FORMS = {
    "dcp": ConvertOptions(to=Layout.SHARDED, world_size=3, buffers=("none",)),
    "ranks": ConvertOptions(to=Layout.SHARDED, container=Container.TORCH, world_size=3, buffers=("none",)),
    "safetensors": ConvertOptions(container=Container.SAFETENSORS, max_shard_size=3_000_000),
}


@pytest.fixture
def source(tmp_path):
    torch.manual_seed(3)
    # Larger than a copy window, so that checksums are patched after their window was written.
    model = {"big": torch.randn(1031, 2053), "small": torch.randn(7), "tiny": torch.randn(3, 5)}
    torch.save(model, tmp_path / "model.pt")
    return str(tmp_path / "model.pt")


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("max_memory", [1 << 20, 128 << 20])
def test_it_states_length_and_crc_of_every_file(source, tmp_path, form: str, max_memory: int) -> None:
    out = tmp_path / "out"
    convert(Solo(), source, str(out), replace(FORMS[form], max_memory=max_memory), NoProgress())
    stated = json.loads((out / "fsdpckpt.json").read_text())["files"]
    there = {path.name: path.read_bytes() for path in out.iterdir() if path.name != "fsdpckpt.json"}
    assert stated == {name: {"nbytes": len(data), "crc32": f"{zlib.crc32(data):08x}"} for name, data in there.items()}


def test_full_verification_records_a_digest_of_every_tensor(source, tmp_path) -> None:
    convert(Solo(), source, str(tmp_path / "out"), replace(FORMS["dcp"], verify=VerifyLevel.FULL), NoProgress())
    model = torch.load(source, weights_only=True)
    digests = json.loads((tmp_path / "out" / "fsdpckpt.json").read_text())["digests"]
    assert digests == {
        f"model {name}": hashlib.sha256(value.numpy().tobytes()).hexdigest() for name, value in model.items()
    }


def test_verify_finds_a_flipped_byte_in_safetensors_by_the_stated_crc(source, tmp_path) -> None:
    out = tmp_path / "out"
    convert(Solo(), source, str(out), FORMS["safetensors"], NoProgress())
    assert verify(str(out)).whole
    shard = next(path for path in sorted(out.glob("*.safetensors")) if path.stat().st_size > 100_000)
    data = bytearray(shard.read_bytes())
    data[-1000] ^= 1
    shard.write_bytes(data)
    report = verify(str(out))
    assert not report.whole
    assert [problem.kind for problem in report.problems] == ["checksum"]


def test_what_an_interrupted_run_left_is_removed_and_said(source, tmp_path) -> None:
    left = tmp_path / ".out.fsdpckpt-staging"
    left.mkdir()
    (left / "__0_0.distcp").write_bytes(b"half")
    report = convert(Solo(), source, str(tmp_path / "out"), FORMS["dcp"], NoProgress())
    assert [note.kind for note in report.notes if note.kind == "cleared"] == ["cleared"]
    assert not left.exists()
