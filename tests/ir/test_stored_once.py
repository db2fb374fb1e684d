"""Bytes that several names share are counted once, by every command."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import fsdpckpt
from fsdpckpt.ir.stored_once import bytes_stored_once, have_own_bytes
from fsdpckpt.readers.detect import open_checkpoint
from fsdpckpt.storage.sources import Sources


def counted(path: Path, content: dict[str, torch.Tensor]) -> tuple[int, int]:
    """The elements and the bytes that ``inspect`` counts in ``content``."""
    torch.save(content, path)
    model = fsdpckpt.inspect(path).sections["model"]
    return model.elements, model.nbytes


def test_tied_weights_are_counted_once_by_inspect_convert_and_verify(tmp_path: Path) -> None:
    words = torch.randn(7, 5)
    source = tmp_path / "tied.pt"
    assert counted(source, {"embed": words, "norm": torch.randn(3), "head": words}) == (38, 152)
    report = fsdpckpt.convert(source, tmp_path / "out.pt")
    assert (fsdpckpt.verify(source).nbytes, report.tensor_bytes, report.tensors) == (152, 152, 3)


def test_a_flat_parameter_and_its_slices_are_counted_once(tmp_path: Path) -> None:
    """On the first rank the flat parameter's shard is one slice; on the others it is larger than each."""
    flat = torch.randn(11)
    source = tmp_path / "a.pt"
    assert counted(source, {"w": flat[:4], "b": flat[4:9], "flat": flat, "other": torch.randn(2)}) == (13, 52)
    with Sources() as sources:
        tensors = {named.key: named.tensor for named in open_checkpoint(str(source), sources=sources).tensors()}
    assert dict(zip(tensors, have_own_bytes(list(tensors.values())), strict=True)) == {
        "w": False, "b": False, "flat": True, "other": True,
    }  # fmt: skip
    assert bytes_stored_once(list(tensors.values())) == 13 * 4
    assert have_own_bytes([]) == [] and bytes_stored_once([]) == 0


def halves(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """They meet, and none holds the other: neither of wide elements nor of narrow ones."""
    both = torch.arange(8).to(dtype)
    return {f"{dtype}.begin": both[:4], f"{dtype}.end": both[4:], f"{dtype}.tied": both[4:]}


@pytest.mark.parametrize(
    ("content", "elements", "nbytes"),
    [
        (lambda x: {"a": x[:6], "b": x[4:]}, 12, 48),  # neither holds all of the other
        (lambda x: {"t": x.reshape(2, 5).t(), "x": x}, 10, 40),
        (lambda x: {"empty": x[:0], "x": x}, 10, 40),
        (lambda x: {"x": x, "y": x.clone()}, 20, 80),
        (lambda x: {"every second": x[::2], "x": x}, 10, 40),
        (lambda _: halves(torch.uint8) | halves(torch.float64) | halves(torch.float16), 24, 8 * (1 + 8 + 2)),
    ],
    ids=["overlap", "transposed", "empty", "copies", "strided", "dtypes"],
)
def test_only_what_another_holds_wholly_is_not_counted(
    tmp_path: Path, content: Callable[[torch.Tensor], dict[str, torch.Tensor]], elements: int, nbytes: int
) -> None:
    assert counted(tmp_path / "a.pt", content(torch.randn(10))) == (elements, nbytes)
