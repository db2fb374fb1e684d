"""Bytes that several names share are counted once, by every command."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import fsdpckpt
from fsdpckpt.ir.stored_once import bytes_stored_once, have_own_bytes
from fsdpckpt.readers.detect import open_checkpoint
from fsdpckpt.storage.sources import Sources


def saved(path: Path, content: dict[str, torch.Tensor]) -> Path:
    torch.save(content, path)
    return path


def elements(path: Path) -> int:
    return fsdpckpt.inspect(path).sections["model"].elements


def test_tied_weights_are_counted_once_by_inspect_convert_and_verify(tmp_path: Path) -> None:
    words = torch.randn(7, 5)
    source = saved(tmp_path / "tied.pt", {"embed": words, "norm": torch.randn(3), "head": words})
    assert elements(source) == 38
    report = fsdpckpt.convert(source, tmp_path / "out.pt")
    assert (fsdpckpt.verify(source).nbytes, report.tensor_bytes, report.tensors) == (152, 152, 3)


def test_a_flat_parameter_and_its_slices_are_counted_once(tmp_path: Path) -> None:
    """On the first rank the flat parameter's shard is one slice; on the others it is larger than each."""
    flat = torch.randn(11)
    source = saved(tmp_path / "a.pt", {"w": flat[:4], "b": flat[4:9], "flat": flat, "other": torch.randn(2)})
    with Sources() as sources:
        tensors = {named.key: named.tensor for named in open_checkpoint(str(source), sources=sources).tensors()}
    assert dict(zip(tensors, have_own_bytes(list(tensors.values())), strict=True)) == {
        "w": False, "b": False, "flat": True, "other": True,
    }  # fmt: skip
    assert bytes_stored_once(list(tensors.values())) == 13 * 4


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (lambda x: {"a": x[:6], "b": x[4:]}, 12),  # neither holds all of the other
        (lambda x: {"t": x.reshape(2, 5).t(), "x": x}, 10),
        (lambda x: {"empty": x[:0], "x": x}, 10),
        (lambda x: {"x": x, "y": x.clone()}, 20),
        (lambda x: {"every second": x[::2], "x": x}, 10),
    ],
    ids=["overlap", "transposed", "empty", "copies", "strided"],
)
def test_only_what_another_holds_wholly_is_not_counted(tmp_path: Path, content: object, expected: int) -> None:
    counted = elements(saved(tmp_path / "a.pt", content(torch.randn(10))))  # type: ignore[operator]
    assert counted == expected


def test_no_tensors_are_none() -> None:
    assert have_own_bytes([]) == [] and bytes_stored_once([]) == 0


def test_bytes_of_tensors_with_equal_shapes_are_those_of_each_dtype(tmp_path: Path) -> None:
    """Halves of one storage meet, and none holds the other: neither of wide elements nor of narrow ones."""
    content = {}
    for dtype in (torch.uint8, torch.float64, torch.float16):
        both = torch.arange(8).to(dtype)
        content |= {f"{dtype}.begin": both[:4], f"{dtype}.end": both[4:], f"{dtype}.tied": both[4:]}
    path = saved(tmp_path / "a.pt", content)
    assert elements(path) == 3 * 8
    assert fsdpckpt.inspect(path).sections["model"].nbytes == 8 * (1 + 8 + 2)
