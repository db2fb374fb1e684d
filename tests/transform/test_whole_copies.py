"""States that every rank has whole: copies that differ are found by their checksums, and only by these."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from fsdpckpt.ir.checkpoint import Checkpoint, Checksums, Layout, ModelState, OptimState, Section
from fsdpckpt.ir.tensors import Chunks, Tensor
from fsdpckpt.transform.selection import differing_copies
from tests.flat.flat_synthetic import checkpoint, replicas, slices

RANKS = 3


def source(state: Tensor, rows: list[tuple[int, int, int, int]]) -> Checkpoint:
    optim = OptimState({"w": {"step": state}}, None)
    return replace(checkpoint(RANKS, optim=optim), checksums=Checksums.of(rows))


def records(*crcs: int, nbytes: int = 4) -> list[tuple[int, int, int, int]]:
    """One record a file at the place of ``replicas``, between others."""
    own = [(file, 64, nbytes, crc) for file, crc in enumerate(crcs)]
    return [*[(file, 128, 4, 1) for file in range(RANKS)], *reversed(own), *[(file, 0, 4, 2) for file in range(RANKS)]]


def test_the_first_rank_that_has_another_copy_is_named() -> None:
    (found,) = differing_copies(source(replicas(RANKS), records(7, 7, 9)))
    assert found.fatal and found.rank == 2
    assert "rank 0 and of rank 2" in found.message


def test_equal_copies_are_no_problem() -> None:
    assert not list(differing_copies(source(replicas(RANKS), records(7, 7, 7))))


def test_tensors_of_more_dimensions_are_compared_too() -> None:
    state = replicas(RANKS, 5, 3)
    assert len(list(differing_copies(source(state, records(7, 8, 7, nbytes=60))))) == 1


@pytest.mark.parametrize("rows", [[], records(7, 8, 9, nbytes=8)])
def test_what_is_no_record_of_its_own_is_not_compared(rows: list[tuple[int, int, int, int]]) -> None:
    assert not list(differing_copies(source(replicas(RANKS), rows)))


@pytest.mark.parametrize("crcs", [(0, 7, 0), (7, 0, 7)])
def test_a_checksum_of_zero_is_one_like_any_other(crcs: tuple[int, ...]) -> None:
    (found,) = differing_copies(source(replicas(RANKS), records(*crcs)))
    assert found.rank == 1


def test_what_several_parameters_share_is_named_once() -> None:
    step = replicas(RANKS)
    optim = OptimState({"w": {"step": step}, "b": {"step": step}, "c": {"step": replicas(RANKS, 2)}}, None)
    held = replace(source(step, records(7, 7, 9)), optim=optim)
    assert [problem.key for problem in differing_copies(held)] == ["w.step"]


def test_the_models_buffers_may_differ_from_rank_to_rank() -> None:
    """Running statistics of BatchNorm do: only FSDP's own replicas have to be equal."""
    held = source(replicas(RANKS), records(7, 7, 9))
    (found,) = differing_copies(replace(held, optim=None, model=ModelState({"count": replicas(RANKS)})))
    assert (found.fatal, found.key, found.rank) == (False, "count", 2)
    assert not list(differing_copies(replace(held, optim=None, extra={"count": replicas(RANKS)})))


@pytest.mark.parametrize(("crcs", "ranks"), [((7, 8, 7, 8), None), ((7, 8, 7, 9), (1, 3)), ((7, 8, 9, 8), (0, 2))])
def test_replicas_of_shards_are_compared_with_those_of_their_own_rows(
    crcs: tuple[int, ...], ranks: tuple[int, int] | None
) -> None:
    """HSDP on 2 x 2 ranks: rank 2 holds what rank 0 does, and rank 3 what rank 1 does."""
    rows = Chunks.rows(
        ndim=2,
        rank=[0, 1, 2, 3],
        file=[0, 1, 2, 3],
        offset=[64] * 4,
        start=[[0, 0], [3, 0]] * 2,
        size=[[3, 5], [2, 5]] * 2,
    )
    held = checkpoint(4, model=ModelState({"w": Tensor(replicas(4).dtype, (5, 5), rows, sharded=True)}))
    sums = [(file, 64, 40 if file % 2 else 60, crc) for file, crc in enumerate(crcs)]
    found = list(differing_copies(replace(held, layout=Layout.SHARDED, optim=None, checksums=Checksums.of(sums))))
    assert [problem.fatal for problem in found] == [True] * (ranks is not None)
    assert all(f"of rank {ranks[0]} and of rank {ranks[1]}" in problem.message for problem in found if ranks)


@pytest.mark.parametrize(
    ("layout", "shape", "found"), [("full", (5, 3), [True]), ("full", (15,), []), ("sharded", (5, 3), [False])]
)
def test_matrices_of_a_model_of_which_nothing_is_sharded_may_not_differ(
    layout: str, shape: tuple[int, ...], found: list[bool]
) -> None:
    """Parts of a model that was cut by something else look like whole ones; the sums tell them from replicas."""
    model = ModelState({"w": replicas(RANKS, *shape)})
    held = replace(checkpoint(RANKS, model=model), layout=Layout(layout), optim=None)
    assert not list(differing_copies(replace(held, checksums=Checksums.of(records(7, 7, 7, nbytes=60)))))
    differing = list(differing_copies(replace(held, checksums=Checksums.of(records(7, 7, 8, nbytes=60)))))
    assert [one.fatal for one in differing] == found
    assert all((one.key, one.rank, one.section) == ("w", 2, Section.MODEL) for one in differing)
    assert all(("name one of the files to take it" in one.message) is one.fatal for one in differing)


def test_a_tensor_that_lies_nowhere_has_no_copies() -> None:
    nowhere = replicas(RANKS)
    gone = replace(nowhere, chunks=nowhere.chunks.take(np.zeros(RANKS, bool)))
    assert not list(differing_copies(source(gone, records(7, 7, 9))))


def test_slices_are_each_ranks_own() -> None:
    state = slices([1] * RANKS)
    rows = [(file, 64 * file, 4, 100 + file) for file in range(RANKS)]
    assert not list(differing_copies(source(state, rows)))


def test_copies_in_another_memory_order_are_not_held_against_each_other() -> None:
    state = replicas(RANKS, 5, 3)
    stride = state.chunks.stride.copy()
    stride[1] = (1, 5)
    turned = replace(state, chunks=replace(state.chunks, stride=np.asarray(stride)))
    assert not list(differing_copies(source(turned, records(7, 8, 7, nbytes=60))))
