"""What is loaded is compared with the checksums that are recorded for it, in every container."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

import fsdpckpt
from fsdpckpt.errors import SourceCorruptError
from fsdpckpt.storage.local import LocalFile
from tests.oracle.compare import identical, require_identical, require_parts

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

TARGETS: dict[str, dict[str, Any]] = {
    "torch file": {"to": "full"},
    "torch ranks": {"to": "sharded", "container": "torch", "world_size": 2, "buffers": ("none",)},
    "dcp": {"to": "sharded", "container": "dcp", "world_size": 2, "buffers": ("none",)},
    "safetensors": {"to": "full", "container": "safetensors"},
    "flattened": {"to": "flattened", "world_size": 3, "unit": ("none",), "use_orig_params": True, "buffers": ("none",)},
}
MEGABYTE = 1 << 20


def weights() -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(5)
    return {"embed": torch.randn(211, 31, generator=draw), "head": torch.randn(7, 5, generator=draw)}


@pytest.fixture
def written(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A directory, or file, that this program wrote in the form of the parameter."""
    torch.save({"model": weights()}, tmp_path / "source.pt")
    target = tmp_path / ("target.pt" if request.param == "torch file" else "target")
    fsdpckpt.convert(tmp_path / "source.pt", target, **TARGETS[request.param])
    return target


def flip_in(path: Path, value: torch.Tensor) -> None:
    """Change one bit of the bytes of ``value`` in a file at or below ``path``."""
    stored = value.contiguous().numpy().tobytes()
    for file in [path] if path.is_file() else sorted(path.iterdir()):
        data = bytearray(file.read_bytes())
        at = data.find(stored)
        if at >= 0:
            data[at + len(stored) // 2] ^= 16
            file.write_bytes(data)
            return
    raise AssertionError("the bytes are in no file")


def load(path: Path, **options: Any) -> dict[str, torch.Tensor]:
    state = {"model": {key: torch.zeros_like(value) for key, value in weights().items()}}
    try:
        dcp.load(state, storage_reader=fsdpckpt.StorageReader(path, **options), no_dist=True)
    except CheckpointException as error:
        raise next(iter(error.failures.values()))[0] from error
    return state["model"]


def open_all(path: Path, **options: Any) -> dict[str, torch.Tensor]:
    with fsdpckpt.open(path, **options) as checkpoint:
        return {key: checkpoint[key].torch() for key in checkpoint}


@pytest.mark.parametrize("read", [load, open_all])
@pytest.mark.parametrize("written", TARGETS, indirect=True)
def test_a_bit_that_changed_in_a_tensor_is_an_error_and_what_is_whole_is_loaded(
    written: Path, read: Callable[[Path], dict[str, torch.Tensor]]
) -> None:
    loaded = read(written)
    require_identical(loaded, weights())
    flip_in(written, weights()["embed"][100])
    with pytest.raises(SourceCorruptError, match="is damaged"):
        read(written)


@pytest.mark.parametrize("written", ["torch ranks", "dcp", "safetensors"], indirect=True)
def test_another_tensor_than_the_damaged_one_is_loaded_where_each_has_a_checksum(written: Path) -> None:
    flip_in(written, weights()["embed"][3])
    with fsdpckpt.open(written) as checkpoint:
        if checkpoint.checkpoint.container == "safetensors":  # one checksum, of a small file
            with pytest.raises(SourceCorruptError):
                checkpoint["head"].numpy()
        else:
            np.testing.assert_array_equal(checkpoint["head"].numpy(), weights()["head"].numpy())


@pytest.mark.parametrize("read", [load, open_all])
def test_metadata_that_is_not_what_was_written_is_an_error(
    tmp_path: Path, read: Callable[[Path], dict[str, torch.Tensor]]
) -> None:
    torch.save({"model": weights()}, tmp_path / "source.pt")
    fsdpckpt.convert(tmp_path / "source.pt", tmp_path / "dcp", **TARGETS["dcp"])
    metadata = tmp_path / "dcp" / ".metadata"
    metadata.write_bytes(metadata.read_bytes().replace(b"head", b"heat"))
    with pytest.raises(SourceCorruptError, match=r"\.metadata does not match"):
        read(tmp_path / "dcp")


@pytest.fixture
def large(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, torch.Tensor]:
    """A checkpoint of two tensors of 4 MiB each; the bytes of the last row of the first were changed."""
    draw = torch.Generator().manual_seed(9)
    value = torch.randn(1024, 1024, generator=draw)
    torch.save({"model": {"a": value, "b": value + 1}}, tmp_path / "source.pt")
    options = {"torch": {"to": "full"}, "safetensors": {"to": "full", "container": "safetensors"}}[request.param]
    target = tmp_path / ("target.pt" if request.param == "torch" else "target")
    fsdpckpt.convert(tmp_path / "source.pt", target, **options)
    flip_in(target, value[-1])
    return target, value


@pytest.fixture
def nbytes_read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    reads: list[int] = []
    read_into = LocalFile.read_into

    def counted(self: LocalFile, offset: int, buffer: memoryview) -> None:
        reads.append(len(buffer))
        read_into(self, offset, buffer)

    monkeypatch.setattr(LocalFile, "read_into", counted)
    return reads


@pytest.mark.parametrize("large", ["torch", "safetensors"], indirect=True)
def test_a_slice_costs_its_own_bytes_and_is_compared_only_if_that_is_asked_for(
    large: tuple[Path, torch.Tensor], nbytes_read: list[int]
) -> None:
    path, value = large
    with fsdpckpt.open(path) as checkpoint:
        nbytes_read.clear()
        assert identical(checkpoint["a"][:10].torch(), value[:10])
        assert sum(nbytes_read) < MEGABYTE // 8
    with fsdpckpt.open(path, verify=True) as checkpoint:
        for _ in range(2):  # it stays an error
            with pytest.raises(SourceCorruptError):
                checkpoint["a"][:10].torch()


def test_what_was_compared_once_is_not_read_again(tmp_path: Path, nbytes_read: list[int]) -> None:
    value = torch.arange(1 << 20, dtype=torch.int32).reshape(1024, 1024)
    torch.save({"a": value}, tmp_path / "a.pt")
    with fsdpckpt.open(tmp_path / "a.pt", verify=True) as checkpoint:
        nbytes_read.clear()
        assert identical(checkpoint["a"][5].torch(), value[5])
        assert value.nbytes <= sum(nbytes_read) < value.nbytes + MEGABYTE
        nbytes_read.clear()
        assert identical(checkpoint["a"][6:9].torch(), value[6:9])
        assert sum(nbytes_read) == 3 * 4096


def test_columns_of_a_tensor_are_put_together_to_what_the_checksum_is_of(tmp_path: Path) -> None:
    value = torch.arange(300 * 200, dtype=torch.float32).reshape(300, 200)
    torch.save({"a": value.t()}, tmp_path / "a.pt")  # its rows lie apart in the file
    data = bytearray((tmp_path / "a.pt").read_bytes())
    with fsdpckpt.open(tmp_path / "a.pt", verify=True) as checkpoint:
        assert identical(checkpoint["a"].torch(), value.t())
        assert identical(checkpoint["a"][3:9, 5:].torch(), value.t()[3:9, 5:])
    data[data.find(value[7].numpy().tobytes()) + 1] ^= 1
    (tmp_path / "a.pt").write_bytes(data)
    for part in (slice(None), slice(2, 4)):
        with fsdpckpt.open(tmp_path / "a.pt", verify=True) as checkpoint, pytest.raises(SourceCorruptError):
            checkpoint["a"][part].torch()


def test_a_file_saved_without_checksums_is_loaded(tmp_path: Path) -> None:
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        torch.save({"model": weights()}, tmp_path / "a.pt")
    finally:
        torch.serialization.set_crc32_options(before)
    for read in (load, open_all):
        loaded = read(tmp_path / "a.pt", verify=True)  # type: ignore[operator]
        require_parts(loaded, weights())
