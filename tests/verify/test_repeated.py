"""Tensors that stand for more elements than are stored cost what is stored."""

from __future__ import annotations

import hashlib
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import fsdpckpt
from fsdpckpt.errors import TargetUnwritableError
from tests.oracle.compare import require_identical

SECONDS = 10.0  # of processor time; reading every element would take hours
LONG = 1 << 40


@pytest.fixture(autouse=True)
def in_time() -> Iterator[None]:
    begun = time.process_time()
    yield
    assert time.process_time() - begun < SECONDS


def values() -> dict[str, torch.Tensor]:
    """Expanded and overlapping tensors of which every element can still be looked at."""
    draw = torch.Generator().manual_seed(5)
    base = torch.randn(4, 1, 3, generator=draw)
    odd = torch.tensor([[float("nan")], [1.0], [float("inf")]])
    return {
        "middle": base.expand(4, 500, 3),
        "all": torch.tensor(2.5).expand(7, 9),
        "odd": odd.expand(3, 50),
        "first": torch.arange(5).expand(11, 5),
        "windows": torch.randn(40, generator=draw).unfold(0, 8, 1),
        "flags": torch.tensor([[True], [False]]).expand(2, 30),
        "half": torch.randn(3, 1, generator=draw).to(torch.bfloat16).expand(3, 99),
    }


def test_digests_statistics_and_nan_are_those_of_all_elements(tmp_path: Path) -> None:
    tensors = values()
    torch.save(tensors, tmp_path / "repeated.pt")
    torch.save({key: value.clone() for key, value in tensors.items()}, tmp_path / "plain.pt")
    found = {each.key: each.sha256 for each in fsdpckpt.verify(tmp_path / "repeated.pt", digests=True).digests}
    for key, value in tensors.items():
        data = value.contiguous().view(torch.uint8).numpy().tobytes()
        assert found[key] == hashlib.sha256(data).hexdigest()
    both = [fsdpckpt.inspect(tmp_path / name, stats=True).to_json()["tensors"] for name in ("repeated.pt", "plain.pt")]
    for one, other in zip(*both, strict=True):
        assert one["stats"].keys() == other["stats"].keys()
        for name, number in one["stats"].items():
            assert number == pytest.approx(other["stats"][name], rel=1e-9, nan_ok=True), (one["key"], name)
    problems = [fsdpckpt.verify(tmp_path / name, finite=True).problems for name in ("repeated.pt", "plain.pt")]
    assert problems[0] == problems[1]
    assert len(problems[0]) == 1


def test_differences_are_counted_as_if_every_element_were_stored(tmp_path: Path) -> None:
    for name, changed in [("a", 0.0), ("b", 1.0)]:
        base = torch.arange(6.0).reshape(2, 1, 3).clone()
        base[1, 0, 2] += changed
        torch.save({"w": base.expand(2, 400, 3)}, tmp_path / f"{name}.pt")
        torch.save({"w": base.expand(2, 400, 3).clone()}, tmp_path / f"{name}-plain.pt")
    texts = {
        entry.detail
        for one, other in [("a", "b"), ("a-plain", "b-plain"), ("a", "b-plain"), ("a-plain", "b")]
        for entry in fsdpckpt.diff(tmp_path / f"{one}.pt", tmp_path / f"{other}.pt").entries
    }
    assert texts == {"400 of 2400 elements differ, first at [1, 0, 2], by up to 1"}
    assert fsdpckpt.diff(tmp_path / "a.pt", tmp_path / "a-plain.pt").same


def endless(value: float) -> dict[str, torch.Tensor]:
    windows = torch.full((1 << 12,), value).as_strided((1 << 11, 1 << 11, 1 << 11), (1, 0, 1))
    return {"w": torch.tensor([value, 3.0])[:, None].expand(2, LONG), "windows": windows}


def test_a_terabyte_of_two_numbers_is_inspected_verified_and_compared_at_once(tmp_path: Path) -> None:
    for name, value in [("a", 1.0), ("b", 1.0), ("c", 2.0)]:
        torch.save(endless(value), tmp_path / f"{name}.pt")
    assert (tmp_path / "a.pt").stat().st_size < 100_000
    stats = {
        each["key"]: each["stats"] for each in fsdpckpt.inspect(tmp_path / "a.pt", stats=True).to_json()["tensors"]
    }
    assert (stats["w"]["min"], stats["w"]["max"], stats["w"]["mean"]) == (1.0, 3.0, 2.0)
    assert stats["w"]["norm"] == pytest.approx((10.0 * LONG) ** 0.5)
    found = fsdpckpt.verify(tmp_path / "a.pt", digests=True, finite=True)
    assert found.whole
    assert {each.key: each.sha256 for each in found.digests}["w"] is None
    assert any("no digest of model w" in note for note in found.notes)
    assert fsdpckpt.diff(tmp_path / "a.pt", tmp_path / "b.pt").same
    (entry, _) = fsdpckpt.diff(tmp_path / "a.pt", tmp_path / "c.pt").entries
    assert entry.detail.startswith(f"{LONG} of {2 * LONG} elements differ, first at [0, 0]")


def test_windows_that_are_too_many_are_compared_by_what_is_stored(tmp_path: Path) -> None:
    for name, value in [("a", 0.0), ("b", 0.0), ("c", 1.0)]:
        base = torch.zeros(1 << 16)
        base[77] = value
        torch.save({"w": base.as_strided((1 << 15, 1 << 15), (1, 1))}, tmp_path / f"{name}.pt")
    assert fsdpckpt.diff(tmp_path / "a.pt", tmp_path / "b.pt").same
    (entry,) = fsdpckpt.diff(tmp_path / "a.pt", tmp_path / "c.pt").entries
    assert entry.sigil == "*"
    assert "too many to be compared one by one" in entry.detail


def test_replicas_of_a_terabyte_are_compared(tmp_path: Path) -> None:
    for rank, value in enumerate([1.0, 1.0, 2.0]):
        torch.save({"w": torch.tensor(value).expand(LONG)}, tmp_path / f"model_world_size_3_rank_{rank}.pt")
    found = fsdpckpt.verify(tmp_path)
    assert [problem.kind for problem in found.problems] == ["replica"]


SHARDED: dict[str, Any] = {"to": "sharded", "world_size": 2, "buffers": ("none",)}
FLATTENED: dict[str, Any] = SHARDED | {"to": "flattened", "unit": ("none",), "use_orig_params": True}


@pytest.mark.parametrize(
    ("target", "options", "count", "elements", "words"),
    [
        *(
            (name, options, 1, 1 << 45, "not enough free space")
            for name, options in (("out.pt", {}), ("out.safetensors", {}), ("out", SHARDED))
        ),
        *(
            ("out", options, 20, 1 << 58, "more than any file system")
            for options in ({"to": "full"}, SHARDED, FLATTENED)
        ),
    ],
)
def test_a_target_that_no_disk_holds_is_refused_before_anything_is_written(
    target: str, options: dict[str, Any], count: int, elements: int, words: str, tmp_path: Path
) -> None:
    torch.save({f"w{number}": torch.ones(1).expand(elements) for number in range(count)}, tmp_path / "source.pt")
    with pytest.raises(TargetUnwritableError, match=words):
        fsdpckpt.convert(tmp_path / "source.pt", tmp_path / target, **options)
    assert [path.name for path in tmp_path.iterdir()] == ["source.pt"]


def test_strides_beyond_any_number_of_elements_are_those_of_a_dimension_without_steps(tmp_path: Path) -> None:
    huge = 1 << 62
    tensors = {
        "one": torch.arange(12.0).as_strided((1, 12), (huge, 1)),
        "none": torch.zeros(3).as_strided((0, 5), (huge, huge)),
        "plain": torch.arange(4.0),
    }
    torch.save(tensors, tmp_path / "source.pt")
    assert fsdpckpt.verify(tmp_path / "source.pt", digests=True).whole
    fsdpckpt.convert(tmp_path / "source.pt", tmp_path / "out.pt", verify="full")
    held = torch.load(tmp_path / "out.pt")["model"]
    require_identical(held, tensors)
    shutil.rmtree(tmp_path / "out", ignore_errors=True)
    fsdpckpt.convert(tmp_path / "source.pt", tmp_path / "out", to="sharded", world_size=2, buffers=("none",))
    assert fsdpckpt.diff(tmp_path / "source.pt", tmp_path / "out").same
