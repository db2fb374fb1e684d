"""One byte of a checkpoint changed, wherever it is: verify says so, or it provably makes no difference."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import fsdpckpt
from fsdpckpt.errors import FsdpckptError
from fsdpckpt.ir.tensors import Tensor
from fsdpckpt.readers.detect import open_checkpoint
from fsdpckpt.storage.sources import Sources
from fsdpckpt.verify.blocks import BlockReader
from fsdpckpt.verify.compare import compare
from fsdpckpt.verify.integrity import verify_checkpoint
from fsdpckpt.verify.measures import digest
from tests.ir.checkpoints import with_origin

GOLDEN = Path(__file__).parents[1] / "golden" / "torch-2.4"
SEED = 20
A_FILE = 24  # bytes of each file of a directory
ONE_FILE = 180  # bytes of a checkpoint that is one file

WRITTEN: dict[str, dict[str, Any]] = {
    "dcp": {"to": "sharded", "container": "dcp", "world_size": 3, "buffers": ("none",)},
    "ranks": {"to": "sharded", "container": "torch", "world_size": 2, "buffers": ("none",)},
    "safetensors": {"to": "full", "container": "safetensors", "max_shard_size": 700},
    "flattened": {"to": "flattened", "world_size": 2, "unit": ("none",), "use_orig_params": True},
}


def state() -> dict[str, Any]:
    """Four parameters, none of whose tensors are equal, and what a training script keeps beside them."""
    draw = torch.Generator().manual_seed(SEED)
    model = {
        "a.weight": torch.randn(7, 5, generator=draw),
        "a.bias": torch.randn(7, generator=draw),
        "b.weight": torch.randn(3, 4, generator=draw),
        "b.bias": torch.randn(3, generator=draw),
    }
    states = {
        number: {name: torch.randn(value.shape, generator=draw) for name in ("exp_avg", "exp_avg_sq")}
        | {"step": torch.tensor(4.0)}
        for number, value in enumerate(model.values())
    }
    groups = [{"lr": 0.1, "betas": (0.9, 0.99), "params": list(range(len(model)))}]
    return {"model": model, "optimizer": {"state": states, "param_groups": groups}, "epoch": 3}


def problems(path: Path) -> frozenset[str]:
    """What verify lists; raises what stops it."""
    with Sources() as sources:
        checkpoint = open_checkpoint(str(path), sources=sources)
        return frozenset(one.message for one in verify_checkpoint(checkpoint, sources=sources, threads=1).problems)


def same_content(path: Path, other: Path) -> bool:
    """Whether both mean the same: every key, tensor, value, group, layout and world size."""
    with Sources() as sources:
        one, two = (open_checkpoint(str(each), sources=sources) for each in (path, other))
        kinds = [(each.layout, each.container, each.world_size, each.flavor) for each in (one, two)]
        return kinds[0] == kinds[1] and compare(one, two, sources=sources, threads=1).same


def flips(path: Path, whole: Path, places: list[int]) -> Iterator[tuple[int, str]]:
    """(place, what came of it) for one changed bit at each of ``places`` of the file at ``path``.

    "detected", "harmless" (the checkpoint at ``whole``, which holds the file, means what it meant) or "silent".
    """
    untouched = whole.with_name(f"{whole.name}-untouched")
    (shutil.copytree if whole.is_dir() else shutil.copy)(whole, untouched)
    before = problems(whole)
    draw = random.Random(SEED)
    data = path.read_bytes()
    descriptor = os.open(path, os.O_RDWR)
    try:
        for place in places:
            os.pwrite(descriptor, bytes([data[place] ^ (1 << draw.randrange(8))]), place)
            try:
                detected = bool(problems(whole) - before)
            except FsdpckptError as error:
                assert error.exit_code in (3, 4), error
                detected = True
            yield place, "detected" if detected else "harmless" if same_content(whole, untouched) else "silent"
            os.pwrite(descriptor, data[place : place + 1], place)
    finally:
        os.close(descriptor)
        (shutil.rmtree if untouched.is_dir() else os.unlink)(untouched)


def sample(path: Path, count: int) -> list[int]:
    nbytes = path.stat().st_size
    return sorted(random.Random(SEED).sample(range(nbytes), min(count, nbytes)))


def in_tensors(path: Path) -> list[tuple[Path, int]]:
    """A byte of every chunk of every tensor."""
    with Sources() as sources:
        checkpoint = open_checkpoint(str(path), sources=sources)
        chunks = [one.tensor.chunks for one in checkpoint.tensors()]
        rows = [(int(f), int(o)) for each in chunks for f, o in zip(each.file, each.offset, strict=True)]
        return sorted({(Path(checkpoint.files[file].path), offset) for file, offset in rows if offset >= 0})


@pytest.mark.parametrize("form", WRITTEN)
def test_no_byte_of_a_directory_that_this_program_wrote_can_change_unnoticed(tmp_path: Path, form: str) -> None:
    torch.save(state(), tmp_path / "source.pt")
    whole = tmp_path / form
    fsdpckpt.convert(tmp_path / "source.pt", whole, **WRITTEN[form])
    assert problems(whole) == frozenset()
    for path in sorted(whole.iterdir()):
        outcomes = dict(flips(path, whole, sample(path, A_FILE)))
        assert {place: what for place, what in outcomes.items() if what != "detected"} == {}, path.name


def test_no_byte_that_means_something_in_a_torch_file_can_change_unnoticed(tmp_path: Path) -> None:
    whole = tmp_path / "whole.pt"
    torch.save(state(), whole)
    outcomes = dict(flips(whole, whole, sample(whole, ONE_FILE)))
    assert "silent" not in outcomes.values()
    assert "harmless" in outcomes.values()  # padding, and fields of the zip that nobody reads


def test_no_byte_that_means_something_in_a_dcp_directory_of_pytorch_can_change_unnoticed(tmp_path: Path) -> None:
    whole = tmp_path / "dcp"
    dcp.save(state(), checkpoint_id=whole, no_dist=True)
    for path in sorted(whole.iterdir()):
        outcomes = dict(flips(path, whole, sample(path, ONE_FILE // 2)))
        assert "silent" not in outcomes.values(), (path.name, outcomes)


@pytest.mark.parametrize("source", ["f2_default/ckpt", "f1_orig_full/model.pt", "f1_orig_sh_dt_dcp/optim"])
def test_no_byte_of_a_tensor_that_pytorch_saved_can_change_unnoticed(tmp_path: Path, source: str) -> None:
    whole = tmp_path / "whole"
    (shutil.copytree if (GOLDEN / source).is_dir() else shutil.copy)(GOLDEN / source, whole)
    places = in_tensors(whole)
    assert len(places) > 5
    chosen = set(random.Random(SEED).sample(places, min(40, len(places))))
    for file in sorted({path for path, _ in places}):
        offsets = [offset for path, offset in places if path == file]
        ends = (offsets[0], offsets[-1])  # where a list of checksums that is one short shows
        outcomes = dict(flips(file, whole, [at for at in offsets if at in ends or (file, at) in chosen]))
        assert set(outcomes.values()) == {"detected"}, (file.name, outcomes)


def test_a_zip_end_record_that_a_zip64_record_overrules_is_no_crash(tmp_path: Path) -> None:
    whole = shutil.copytree(GOLDEN / "f2_default" / "ckpt", tmp_path / "whole")
    path = whole / "__1_0.distcp"
    data = path.read_bytes()
    ends = [at for at in range(len(data) - 4) if data.startswith(b"PK\5\6", at)]
    chosen = random.Random(SEED).sample(ends, 4)
    fields = (14, 18)  # bytes of the directory's size and place
    outcomes = dict(flips(path, whole, [end + field for end in chosen for field in fields]))
    assert "silent" not in outcomes.values()


def test_bytes_that_keep_their_checksum_are_found_by_the_digest_that_was_recorded(tmp_path: Path) -> None:
    torch.save(state(), tmp_path / "source.pt")
    whole = tmp_path / "dcp"
    fsdpckpt.convert(tmp_path / "source.pt", whole, **WRITTEN["dcp"], verify="full")
    assert fsdpckpt.verify(whole, digests=True).whole
    with Sources() as sources:
        checkpoint = open_checkpoint(str(whole), sources=sources)
        assert checkpoint.model is not None
        assert checkpoint.origin.manifest is not None
        changed = checkpoint.model.params["a.weight"]
        assert isinstance(changed, Tensor)
        recorded = checkpoint.origin.manifest.digests
        assert recorded["model a.weight"] == digest(BlockReader(checkpoint.files, sources), changed)
        # Another digest stands for other bytes with the same CRC-32, which are hard to come by.
        recorded = dict(recorded) | {"model a.weight": recorded["model a.bias"]}
        checkpoint = with_origin(checkpoint, manifest=replace(checkpoint.origin.manifest, digests=recorded))
        (problem,) = verify_checkpoint(checkpoint, sources=sources, digests=True).problems
        assert (problem.kind, problem.key) == ("digest", "a.weight")
