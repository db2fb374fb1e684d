"""Two tensors element for element, wherever each lies and in whatever blocks they are read."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from fsdpckpt.ir.tensors import Tensor
from fsdpckpt.storage.sources import Sources
from fsdpckpt.verify import elements as content
from fsdpckpt.verify.elements import Located, first_difference
from tests.verify.raw import Raw, numbers, random_array, rows

SHAPE = (37, 5)


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(content, "BLOCK_BYTES", 56)


def located(raw: Raw, tensor: Tensor) -> Located:
    return tensor, raw.checkpoint({"w": tensor}).files, Sources()


def test_a_tensor_cut_over_ranks_equals_the_same_tensor_whole(tmp_path: Path) -> None:
    array = random_array(1, SHAPE)
    cut, whole = Raw(tmp_path / "cut", 3), Raw(tmp_path / "whole", 1)
    source = located(cut, cut.put(array, rows(SHAPE, 3)))
    assert first_difference(source, located(whole, whole.put(array, order=(1, 0)))) is None


@pytest.mark.parametrize("element", [0, 13, 14, 15, 100, 184])
def test_the_first_changed_element_is_named(tmp_path: Path, element: int) -> None:
    array = random_array(2, SHAPE)
    changed = array.copy()
    changed.view(np.uint32).reshape(-1)[element:] ^= 1 << 30
    cut, whole = Raw(tmp_path / "cut", 4), Raw(tmp_path / "whole", 1)
    source = located(cut, cut.put(array, rows(SHAPE, 4)))
    assert first_difference(source, located(whole, whole.put(changed))) == element


@pytest.mark.parametrize("to", ["float16", "float64"])
def test_a_cast_is_applied_before_comparing_though_blocks_hold_other_numbers_of_elements(
    tmp_path: Path, to: str
) -> None:
    array = numbers(3, SHAPE)
    cast = array.astype(to)
    one, other, wrong = Raw(tmp_path / "one", 2), Raw(tmp_path / "other", 1), Raw(tmp_path / "wrong", 1)
    source = located(one, one.put(array, rows(SHAPE, 2)))
    assert first_difference(source, located(other, other.put(cast))) is None
    cast.reshape(-1)[171] += 1
    assert first_difference(source, located(wrong, wrong.put(cast))) == 171


def test_a_zero_of_the_other_sign_differs_and_the_same_nan_does_not(tmp_path: Path) -> None:
    one, other = Raw(tmp_path / "one", 1), Raw(tmp_path / "other", 1)
    left = np.array([np.nan, 1.5, 0.0], np.float32)
    right = np.array([np.nan, 1.5, -0.0], np.float32)
    assert first_difference(located(one, one.put(left)), located(other, other.put(right))) == 2
