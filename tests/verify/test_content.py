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


ARRAY = numbers(3, SHAPE)
SPECIAL = np.array([np.nan, 1.5, 0.0], np.float32)


def with_next(array: np.ndarray, element: int) -> np.ndarray:
    """``array`` with another value from ``element`` on."""
    changed = array.copy()
    changed.reshape(-1)[element:] += 1
    return changed


@pytest.mark.parametrize(
    ("array", "ranks", "other", "order", "first"),
    [
        (random_array(1, SHAPE), 3, random_array(1, SHAPE), (1, 0), None),
        *((ARRAY, 4, with_next(ARRAY, element), None, element) for element in (0, 13, 14, 15, 100, 184)),
        # A cast is applied before comparing, though blocks hold other numbers of elements.
        *((ARRAY, 2, ARRAY.astype(to), None, None) for to in ("float16", "float64")),
        *((ARRAY, 2, with_next(ARRAY.astype(to), 171), None, 171) for to in ("float16", "float64")),
        (SPECIAL, 1, np.array([np.nan, 1.5, -0.0], np.float32), None, 2),
    ],
)
def test_the_first_element_that_differs_is_named(
    tmp_path: Path, array: np.ndarray, ranks: int, other: np.ndarray, order: tuple[int, ...] | None, first: int | None
) -> None:
    cut, whole = Raw(tmp_path / "cut", ranks), Raw(tmp_path / "whole", 1)
    source = located(cut, cut.put(array, rows(array.shape, ranks)))
    assert first_difference(source, located(whole, whole.put(other, order=order))) == first
