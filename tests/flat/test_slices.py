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
from fsdpckpt.ir.values import Value
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


def sliced(
    states: dict[ParamKey, dict[str, Tensor | Value]],
    *,
    orig: bool = False,
    without: tuple[str, ...] = (),
    names: bool = False,
) -> bool:
    units = build_units(PARAMS, ("",), Settings(orig), unmanaged=without)
    optim = Optimizer.of(states, [{"params": list("wbx") if names else [0, 1, 2]}])
    return is_sliced(checkpoint(1, optim=optim), units)


def test_an_optimizer_without_tensors_is_sliced_by_its_ids_alone() -> None:
    for states in ({}, {0: {"step": whole(), "mode": "fast"}}):
        assert sliced(dict(states)) and sliced(dict(states), orig=True)
    assert not sliced({"w": {"step": whole()}}, names=True)
    assert not is_sliced(checkpoint(1), build_units(PARAMS, ("",), Settings(use_orig_params=True)))


def test_of_one_rank_slices_are_vectors_under_the_ids_of_units() -> None:
    vector, matrix = whole(23, sharded=None), whole(5, 3, sharded=None)
    beside: dict[str, Tensor | Value] = {"step": whole(sharded=None), "mode": "fast"}
    assert sliced({0: {**beside, "exp_avg": vector}})
    assert not sliced({0: {**beside, "exp_avg": matrix}})
    assert not sliced({0: {**beside, "exp_avg": vector, "factor": matrix}})
    assert not sliced({0: {"exp_avg": vector}}, orig=True)
    assert not sliced({"w": {"exp_avg": vector}}, names=True)
    assert not sliced({0: {"exp_avg": replace(vector, sharded=True)}})  # DCP cut it: it is a parameter's own state
    assert sliced({0: {"exp_avg": slices([2, 2])}}, orig=True)


def test_parameters_beside_the_units_keep_their_shape() -> None:
    """Their ids come first where they are the root's own."""
    vector, matrix = whole(20, sharded=None), whole(4, 2, sharded=None)
    assert sliced({0: {"exp_avg": matrix}, 1: {"exp_avg": vector}}, without=("x",))
    assert not sliced({0: {"exp_avg": vector}, 1: {"exp_avg": matrix}}, without=("x",))


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
