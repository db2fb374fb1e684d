"""How far tensors and modules moved: numpy computes the same from the whole arrays."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from fsdpckpt.ir.checkpoint import Section
from fsdpckpt.storage.sources import Sources
from fsdpckpt.verify import blocks
from fsdpckpt.verify.changes import joined_lists, module_changes
from fsdpckpt.verify.compare import compare
from fsdpckpt.verify.difference import Change, ComparedKey, Difference
from tests.verify.raw import Raw, numbers, rows


def of(directory: Path, arrays: dict[str, np.ndarray], ranks: int) -> tuple[Raw, dict[str, object]]:
    raw = Raw(directory, ranks)
    return raw, {name: raw.put(array, rows(array.shape, ranks)) for name, array in arrays.items()}


def difference(tmp_path: Path, a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> Difference:
    raws = [of(tmp_path / name, arrays, ranks) for name, arrays, ranks in (("a", a, 2), ("b", b, 3))]
    with Sources() as sources:
        return compare(*(raw.checkpoint(tensors) for raw, tensors in raws), sources=sources)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "int32", "complex64"])
def test_the_relative_norm_is_that_of_the_whole_tensors_also_if_the_first_blocks_are_equal(
    dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blocks, "BLOCK_BYTES", 64)
    monkeypatch.setattr(blocks.BlockReader.__init__, "__defaults__", (64,))
    a = (numbers(1, (37, 5)) * 7).astype(dtype)
    b = a.copy()
    b[30:] += 3  # several blocks after the first one
    (entry,) = difference(tmp_path, {"w": a}, {"w": b}).entries
    wide = np.complex128 if dtype == "complex64" else np.float64
    apart = b.astype(wide) - a.astype(wide)
    assert entry.change.elements == 35
    assert entry.change.largest == pytest.approx(np.abs(apart).max())
    assert entry.change.norm == pytest.approx(np.linalg.norm(apart))
    assert entry.change.relative == pytest.approx(np.linalg.norm(apart) / np.linalg.norm(a.astype(wide)))


def test_what_is_not_a_number_is_in_no_norm(tmp_path: Path) -> None:
    a, b = np.float32([3, np.nan, np.inf, 4]), np.float32([3, 1, 2, 5])
    (entry,) = difference(tmp_path, {"w": a}, {"w": b}).entries
    assert entry.change == Change(3, 4, float("inf"), 1.0, 25.0)
    (entry,) = difference(tmp_path / "zero", {"w": np.zeros(2)}, {"w": np.ones(2)}).entries
    assert entry.change.relative is None


def test_a_module_is_all_its_tensors_and_layers_that_moved_are_one_row(tmp_path: Path) -> None:
    a = {f"layers.{n}.mlp.{name}": numbers(n, (6, 2)) for n in range(4) for name in ("weight", "bias")}
    b = {name: array + (0 if name.startswith("layers.2.") else 0.5) for name, array in a.items()}
    (row,) = module_changes(difference(tmp_path, a, b).entries)
    assert (row.module, row.count, list(row.changes)) == ("layers.{0..1,3}.mlp", 3, ["weights"])
    moved = [name for name in a if not name.startswith("layers.2.")]
    apart = np.concatenate([(b[name] - a[name]).ravel() for name in moved])
    norm = np.linalg.norm(np.concatenate([a[name].ravel() for name in moved]))
    assert row.changes["weights"].relative == pytest.approx(np.linalg.norm(apart) / norm)


def test_the_values_of_a_long_list_are_one_entry_and_sides_stay_apart() -> None:
    entries = [ComparedKey("*" if n < 2 else "=", Section.EXTRA, f"rng.{n}", "1 vs 2") for n in range(12)]
    entries += [ComparedKey("-", Section.EXTRA, f"rng.{n}") for n in range(12, 14)]
    entries += [ComparedKey("=", Section.EXTRA, f"short.{n}") for n in range(3)]
    found = [(entry.sigil, entry.key, entry.detail) for entry in joined_lists(entries, 8)]
    assert found == [
        ("*", "rng", "2 of 12 values differ"),
        ("-", "rng", "2 values"),
        *(("=", f"short.{n}", "") for n in range(3)),
    ]
