"""Digests do not depend on layout; statistics equal numpy's."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fsdpckpt.ir.dtypes import DTYPES
from fsdpckpt.ir.tensors import Stats, Tensor
from fsdpckpt.storage.sources import Sources
from fsdpckpt.verify.blocks import BlockReader
from fsdpckpt.verify.integrity import verify_checkpoint
from fsdpckpt.verify.measures import count_not_finite, stats
from tests.verify.raw import Raw, numbers, random_array, rows


def measured(raw: Raw, tensor: Tensor) -> Stats | None:
    checkpoint = raw.checkpoint({"w": tensor})
    with Sources() as sources:
        return stats(BlockReader(checkpoint.files, sources), tensor)


def test_digests_are_the_sha256_of_row_major_bytes_in_any_layout_in_their_order(tmp_path: Path) -> None:
    raw, tensors, expected = Raw(tmp_path, 4), {}, []
    layouts: list[tuple[Any, Any]] = [(None, None), (rows((11, 6), 3), None), (rows((11, 6), 4), (1, 0))]
    layouts.append(([((0, 0), (11, 1)), ((0, 1), (11, 5))], None))
    for number in range(60):
        array = random_array(number, (11, 6) if number < 4 else (number % 7 + 1, 5))
        boxes, order = layouts[number] if number < 4 else (None, None)
        tensors[f"w{number}"] = raw.put(array, boxes, order=order)
        expected.append(hashlib.sha256(array.tobytes()).hexdigest())
    checkpoint = raw.checkpoint(dict(reversed(tensors.items())))
    for threads in (1, 2, 5):
        with Sources() as sources:
            found = verify_checkpoint(checkpoint, sources=sources, digests=True, threads=threads).digests
        assert [one.sha256 for one in found] == expected[::-1]


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"])
def test_statistics_equal_numpys_on_the_same_numbers(tmp_path: Path, dtype: str) -> None:
    array = numbers(3, (401, 1000), dtype)  # several parts of the streaming sum
    raw = Raw(tmp_path, 3)
    result = measured(raw, raw.put(array, rows(array.shape, 3), dtype=DTYPES[dtype]))
    exact = array.astype(np.float64)
    assert (result.min, result.max, result.nan, result.inf) == (exact.min(), exact.max(), 0, 0)
    assert np.allclose(
        [result.mean, result.std, result.norm], [exact.mean(), exact.std(), np.linalg.norm(exact)], 1e-12
    )


@pytest.mark.parametrize(
    ("array", "expected"),
    [
        (np.float32([1.0, np.nan, -3.0, np.inf, -np.inf, np.nan]), Stats(-3.0, 1.0, -1.0, 2.0, np.sqrt(10.0), 2, 2)),
        (np.int16([-5, 3, 250]), Stats(-5, 250, 248 / 3, np.std([-5, 3, 250]), np.linalg.norm([-5, 3, 250]), 0, 0)),
        (np.array([True, False, True, True]), Stats(0, 1, 0.75, np.sqrt(3) / 4, np.sqrt(3), 0, 0)),
        (np.complex64([3 + 4j, 0 - 1j]), Stats(-1, 4, 1.5, np.std([3, 4, 0, -1]), np.sqrt(26), 0, 0)),
        (np.zeros((0, 3), np.float32), Stats(None, None, None, None, None, 0, 0)),
    ],
)
def test_statistics_of_every_kind_of_number(tmp_path: Path, array: np.ndarray, expected: Stats) -> None:
    """What is no finite number is counted and left out of the rest."""
    raw = Raw(tmp_path, 1)
    found = measured(raw, raw.put(array))
    assert found is not None
    for name in ("min", "max", "mean", "std", "norm", "nan", "inf"):
        value = getattr(expected, name)
        assert getattr(found, name) == (value if value is None else pytest.approx(value)), name
    assert measured(raw, raw.put(np.uint8([1, 2, 3]), dtype=DTYPES["bits8"])) is None, "bits are no numbers"


def test_numbers_whose_squares_are_too_large_for_a_float_have_statistics(tmp_path: Path) -> None:
    raw = Raw(tmp_path, 1)
    result = measured(raw, raw.put(np.array([1e-200, 2.0] * 40_000 + [3e200, -4e200])))
    assert (result.min, result.max) == (-4e200, 3e200)
    assert result.norm == pytest.approx(5e200)
    assert result.mean == pytest.approx(-1e200 / 80_002)
    assert result.std == pytest.approx(5e200 / np.sqrt(80_002), rel=1e-4)
    largest = np.finfo(np.float64).max
    assert measured(raw, raw.put(np.full(4, largest))) == Stats(largest, largest, largest, 0.0, np.inf, 0, 0)


@pytest.mark.parametrize(
    "dtype", ["float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "complex32", "complex64", "int32"]
)
def test_not_finite_elements_are_counted_as_torch_counts_them(tmp_path: Path, dtype: str) -> None:
    array = random_array(7, (3, 5000), dtype)
    raw = Raw(tmp_path, 3)
    tensor = raw.put(array, rows(array.shape, 3), dtype=DTYPES[dtype])
    checkpoint = raw.checkpoint({"w": tensor})
    as_torch = torch.frombuffer(bytearray(array.tobytes()), dtype=getattr(torch, dtype))
    real = torch.view_as_real(as_torch) if as_torch.is_complex() else as_torch
    real = real.float() if dtype.startswith("float8") else real
    with Sources() as sources:
        result = count_not_finite(BlockReader(checkpoint.files, sources), tensor)
    assert result == (int(real.isnan().sum()), int(real.isinf().sum()))
    assert result[0] > 0 or dtype == "int32"
