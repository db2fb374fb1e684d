"""What counts as a slice, what as a number that a rank carries beside slices, and how lengths are shown."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from fsdpckpt.flat.slices import (
    is_number_per_rank,
    is_sliced,
    is_step,
    lengths_text,
    slice_lengths,
    tensor_text,
)
from fsdpckpt.flat.units import Settings, build_units
from fsdpckpt.ir.optimizer import Optimizer, ParamKey
from fsdpckpt.ir.tensors import Chunks, Tensor
from fsdpckpt.ir.units import Units
from fsdpckpt.ir.values import Key, Value
from tests.flat.flat_synthetic import FLOAT, checkpoint, named, replicas, slices, whole

PARAMS = (named("w", 5, 3), named("b", 5), named("x", 4, 2))


def strided(*rows: tuple[int, int, int]) -> Tensor:
    """Rows of (rank, elements, stride)."""
    zeros = [0] * len(rows)
    chunks = Chunks.rows(
        ndim=1, rank=[row[0] for row in rows], file=zeros, offset=zeros, start=[[0] for _ in rows],
        size=[[row[1]] for row in rows],
    )  # fmt: skip
    return Tensor(FLOAT, (9,), chunks.with_boxes(stride=np.asarray([[row[2]] for row in rows])))


def test_a_slice_is_one_dense_chunk_of_a_vector_on_each_rank_that_has_it() -> None:
    lengths = slice_lengths(slices([4, None, 3]), 4)
    assert lengths is not None and lengths.tolist() == [4, 0, 3, 0]
    dense = slice_lengths(strided((0, 4, 1), (2, 1, 7)), 3)  # one element lies nowhere else, whatever its stride says
    assert dense is not None and dense.tolist() == [4, 0, 1]


@pytest.mark.parametrize(
    "tensor", [replicas(2, 3, 4), strided((0, 4, 1), (0, 2, 1)), strided((0, 4, 1), (1, 4, 2)), whole()],
    ids=["matrix", "two pieces of one rank", "every second element", "no dimension"],
)  # fmt: skip
def test_other_tensors_are_no_slices(tensor: Tensor) -> None:
    assert slice_lengths(tensor, 2) is None


def test_one_number_a_rank_is_carried_whole_and_a_step_then_is_one() -> None:
    one, nowhere = slices([1, 1]), replace(whole(1), chunks=whole(1).chunks.take(np.zeros(1, bool)))
    assert is_number_per_rank(one) and not is_number_per_rank(slices([1, 2])) and not is_number_per_rank(nowhere)
    assert not is_number_per_rank(replicas(2, 1, 1))
    assert is_step("step", one) and not is_step("exp_avg", one) and not is_step("step", slices([2, 2]))


VECTOR, MATRIX = whole(23, sharded=None), whole(5, 3, sharded=None)
SHORTER, SMALL = whole(20, sharded=None), whole(4, 2, sharded=None)  # of w and b, and of x beside the units
BESIDE: dict[str, Tensor | Value] = {"step": whole(sharded=None), "mode": "fast"}
FLAT, ORIG, OUTSIDE = (
    build_units(PARAMS, ("",), Settings(orig), unmanaged=without)
    for orig, without in ((False, ()), (True, ()), (False, ("x",)))
)
SLICED: dict[str, tuple[Units, dict[ParamKey, dict[str, Tensor | Value]], bool]] = {
    # An optimizer without tensors is sliced by its ids alone
    "no states": (FLAT, {}, True), "no states of original parameters": (ORIG, {}, True),
    "numbers": (FLAT, {0: BESIDE}, True), "numbers of original parameters": (ORIG, {0: BESIDE}, True),
    "numbers by name": (FLAT, {"w": {"step": whole()}}, False),
    # Of one rank slices are vectors under the ids of units
    "a vector": (FLAT, {0: {**BESIDE, "exp_avg": VECTOR}}, True),
    "a matrix": (FLAT, {0: {**BESIDE, "exp_avg": MATRIX}}, False),
    "a matrix beside a vector": (FLAT, {0: {**BESIDE, "exp_avg": VECTOR, "factor": MATRIX}}, False),
    "a vector of an original parameter": (ORIG, {0: {"exp_avg": VECTOR}}, False),
    "a vector by name": (FLAT, {"w": {"exp_avg": VECTOR}}, False),
    "a vector that DCP cut, a parameter's own state": (FLAT, {0: {"exp_avg": replace(VECTOR, sharded=True)}}, False),
    "a slice": (ORIG, {0: {"exp_avg": slices([2, 2])}}, True),
    # Parameters beside the units keep their shape; their ids come first where they are the root's own
    "beside the units": (OUTSIDE, {0: {"exp_avg": SMALL}, 1: {"exp_avg": SHORTER}}, True),
    "beside the units, the other way round": (OUTSIDE, {0: {"exp_avg": SHORTER}, 1: {"exp_avg": SMALL}}, False),
}  # fmt: skip


@pytest.mark.parametrize("name", SLICED)
def test_an_optimizer_is_in_slices_by_its_ids_and_shapes(name: str) -> None:
    units, states, expected = SLICED[name]
    groups: list[dict[Key, Value]] = [{"params": list("wbx") if "w" in states else [0, 1, 2]}]
    assert is_sliced(checkpoint(1, optim=Optimizer.of(dict(states), groups)), units) is expected
    assert not is_sliced(checkpoint(1), units)


@pytest.mark.parametrize(
    ("lengths", "text"),
    [
        ([3], "3"), ([3, 3], "3 (each of 2)"), ([3, 4], "3, 4"),
        (list(range(12)), "0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11"),
        (list(range(13)), "0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11 and 1 more"),
    ],
)  # fmt: skip
def test_lengths_are_shown_as_short_as_they_are_clear(lengths: list[int], text: str) -> None:
    assert lengths_text(np.asarray(lengths)) == text


def test_what_is_no_slice_is_shown_by_its_shape() -> None:
    assert tensor_text(slices([2, 5]), 2) == "2, 5" and tensor_text(whole(2, 5), 2) == "shape [2, 5]"
