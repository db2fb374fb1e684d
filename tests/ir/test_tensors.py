"""Numbers in columns."""

from __future__ import annotations

import numpy as np
import pytest

from fsdpckpt.ir.tensors import distinct


@pytest.mark.parametrize("values", [[], [5], [3, -1, 3, 3, 1 << 60, -1], np.arange(6).reshape(2, 3) % 4])
def test_the_different_numbers_are_those_of_numpy(values: object) -> None:
    found = distinct(values)  # type: ignore[arg-type]
    assert found.dtype == np.int64
    assert found.tolist() == np.unique(np.asarray(values, np.int64)).tolist()
