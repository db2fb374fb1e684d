"""Digests do not depend on layout; statistics equal numpy's."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import pytest
import torch

from fsdpckpt.ir.checkpoint import NamedTensor, Section
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


def test_the_digest_is_the_sha256_of_the_row_major_bytes_in_any_layout(tmp_path: Path) -> None:
    array = random_array(1, (11, 6))
    result = set()
    for name, boxes, order in (
        ("one", None, None),
        ("three", rows(array.shape, 3), None),
        ("four", rows(array.shape, 4), (1, 0)),
        ("columns", [((0, 0), (11, 1)), ((0, 1), (11, 5))], None),
    ):
        raw = Raw(tmp_path / name, len(boxes or [0]))
        checkpoint = raw.checkpoint({"w": raw.put(array, boxes, order=order)})
        with Sources() as sources:
            result.update(one.sha256 for one in verify_checkpoint(checkpoint, sources=sources, digests=True).digests)
    as_torch = torch.from_numpy(array.copy()).view(torch.uint8).numpy().tobytes()
    assert result == {hashlib.sha256(as_torch).hexdigest()}


def test_the_digests_of_many_tensors_come_in_their_order_from_two_threads(tmp_path: Path) -> None:
    arrays = [random_array(n, (n % 7 + 1, 5)) for n in range(60)]
    raw = Raw(tmp_path, 2)
    tensors = {f"w{n}": raw.put(array, ranks=[n % 2]) for n, array in enumerate(arrays)}
    checkpoint = raw.checkpoint(dict(reversed(tensors.items())))
    with Sources() as sources:
        digests = verify_checkpoint(checkpoint, sources=sources, digests=True, threads=2).digests
    assert [one.sha256 for one in digests] == [
        hashlib.sha256(array.tobytes()).hexdigest() for array in reversed(arrays)
    ]


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"])
def test_statistics_equal_numpys_on_the_same_numbers(tmp_path: Path, dtype: str) -> None:
    array = numbers(3, (401, 1000), dtype)  # several parts of the streaming sum
    raw = Raw(tmp_path, 3)
    result = measured(raw, raw.put(array, rows(array.shape, 3), dtype=DTYPES[dtype]))
    exact = array.astype(np.float64)
    assert result is not None
    assert (result.min, result.max, result.nan, result.inf) == (exact.min(), exact.max(), 0, 0)
    assert np.allclose(
        [result.mean, result.std, result.norm], [exact.mean(), exact.std(), np.linalg.norm(exact)], 1e-12
    )


def test_nan_and_inf_are_counted_and_left_out_of_the_rest(tmp_path: Path) -> None:
    array = np.array([1.0, np.nan, -3.0, np.inf, -np.inf, np.nan], np.float32)
    raw = Raw(tmp_path, 1)
    result = measured(raw, raw.put(array))
    assert result == Stats(-3.0, 1.0, -1.0, 2.0, np.sqrt(10.0), 2, 2)


def test_numbers_whose_squares_are_too_large_for_a_float_have_statistics(tmp_path: Path) -> None:
    raw = Raw(tmp_path, 1)
    result = measured(raw, raw.put(np.array([1e-200, 2.0] * 40_000 + [3e200, -4e200])))
    assert result is not None
    assert (result.min, result.max) == (-4e200, 3e200)
    assert result.norm == pytest.approx(5e200)
    assert result.mean == pytest.approx(-1e200 / 80_002)
    assert result.std == pytest.approx(5e200 / np.sqrt(80_002), rel=1e-4)
    largest = np.finfo(np.float64).max
    assert measured(raw, raw.put(np.full(4, largest))) == Stats(largest, largest, largest, 0.0, np.inf, 0, 0)


def test_integers_bools_and_complex_numbers(tmp_path: Path) -> None:
    raw = Raw(tmp_path, 1)
    whole = measured(raw, raw.put(np.array([-5, 3, 250], np.int16)))
    flags = measured(raw, raw.put(np.array([True, False, True, True])))
    pairs = measured(raw, raw.put(np.array([3 + 4j, 0 - 1j], np.complex64)))
    assert whole is not None
    assert (whole.min, whole.max) == (-5, 250)
    assert flags is not None
    assert (flags.min, flags.max, flags.mean) == (0, 1, 0.75)
    assert pairs is not None
    assert (pairs.min, pairs.max) == (-1, 4)
    assert pairs.norm == pytest.approx(np.sqrt(26))


def test_what_has_no_numbers_has_no_statistics(tmp_path: Path) -> None:
    raw = Raw(tmp_path, 1)
    bits = raw.put(np.array([1, 2, 3], np.uint8), dtype=DTYPES["bits8"])
    assert measured(raw, bits) is None
    assert measured(raw, raw.put(np.zeros((0, 3), np.float32))) == Stats(None, None, None, None, None, 0, 0)


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


def test_a_named_tensor_is_what_digests_take(tmp_path: Path) -> None:
    raw = Raw(tmp_path, 1)
    tensor = raw.put(random_array(9, (4,)))
    checkpoint = raw.checkpoint({"w": tensor})
    assert list(checkpoint.tensors()) == [NamedTensor(Section.MODEL, "w", None, tensor)]
