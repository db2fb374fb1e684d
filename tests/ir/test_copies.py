"""States that every rank has whole: copies that differ are found by their checksums, and only by these."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import fsdpckpt
from fsdpckpt.errors import SourceCorruptError
from fsdpckpt.ir.buffers import trained_keys
from fsdpckpt.ir.checkpoint import Checkpoint, Checksums, Layout, ModelState, Problem
from fsdpckpt.ir.copies import CopiesJudge, unsummed_copies
from fsdpckpt.ir.copies import differing_copies as copies_judged
from fsdpckpt.ir.dtypes import DTYPES
from fsdpckpt.ir.optimizer import Optimizer
from fsdpckpt.ir.placements import Sharded
from fsdpckpt.ir.tensors import Chunks, Tensor
from tests.flat.flat_synthetic import checkpoint, replicas, slices
from tests.ir.checkpoints import with_origin

RANKS = 3


def differing_copies(held: Checkpoint, buffers: tuple[str, ...] = ()) -> list[Problem]:
    judged = copies_judged(held, CopiesJudge(held, buffers, trained_keys(held)))
    return [different.problem() for different in judged]


def copies(*shape: int) -> Tensor:
    """A plain tensor that every rank holds whole, vectors included."""
    ranks = list(range(RANKS))
    zeros = [[0] * len(shape)] * RANKS
    rows = Chunks.rows(ndim=len(shape), rank=ranks, file=ranks, offset=[64] * RANKS, start=zeros, size=[shape] * RANKS)
    return Tensor(DTYPES["float32"], shape, rows, sharded=False)


def source(state: Tensor, rows: list[tuple[int, int, int, int]]) -> Checkpoint:
    optim = Optimizer.of({"w": {"step": state}}, None)
    return replace(checkpoint(RANKS, optim=optim), checksums=Checksums.of(rows))


def records(*crcs: int, nbytes: int = 4) -> list[tuple[int, int, int, int]]:
    """One record a file at the place of ``replicas``, between others."""
    own = [(file, 64, nbytes, crc) for file, crc in enumerate(crcs)]
    return [*[(file, 128, 4, 1) for file in range(RANKS)], *reversed(own), *[(file, 0, 4, 2) for file in range(RANKS)]]


@pytest.mark.parametrize(
    ("shape", "rows", "rank"),
    [
        ((), records(7, 7, 9), 2),
        ((), records(7, 7, 7), None),
        ((5, 3), records(7, 8, 7, nbytes=60), 1),
        ((), [], None),
        ((), records(7, 8, 9, nbytes=8), None),  # no record of its own
        ((), records(0, 7, 0), 1),  # a checksum like any other
        ((), records(7, 0, 7), 1),
    ],
)
def test_the_first_rank_that_has_another_copy_is_named(
    shape: tuple[int, ...], rows: list[tuple[int, int, int, int]], rank: int | None
) -> None:
    found = differing_copies(source(replicas(RANKS, *shape), rows))
    assert [(one.fatal, one.rank) for one in found] == ([] if rank is None else [(True, rank)])
    assert all(f"rank 0 and of rank {rank}" in one.message for one in found)


def test_what_several_parameters_share_is_named_once() -> None:
    step = replicas(RANKS)
    optim = Optimizer.of({"w": {"step": step}, "b": {"step": step}, "c": {"step": replicas(RANKS, 2)}}, None)
    held = replace(source(step, records(7, 7, 9)), optim=optim)
    assert [problem.key for problem in differing_copies(held)] == ["w.step"]


def test_running_statistics_and_counters_may_differ_from_rank_to_rank() -> None:
    """FSDP does not keep the buffers of ranks equal."""
    held = replace(source(replicas(RANKS), records(7, 7, 9)), optim=None)
    counter = replace(replicas(RANKS), dtype=DTYPES["int32"])
    norm = {"n.running_mean": replicas(RANKS), "n.num_batches_tracked": counter, "running_var": replicas(RANKS)}
    (found,) = differing_copies(replace(held, model=ModelState({"count": counter})))
    assert (found.fatal, found.kind, found.key, found.rank) == (False, "replica", "count", 2)
    of_norm = differing_copies(replace(held, model=ModelState({**norm, "n.weight": replicas(RANKS, 1)})))
    assert [(one.fatal, one.kind, one.key) for one in of_norm] == [
        (False, "replica", "n.running_mean"),
        (False, "replica", "n.num_batches_tracked"),  # at the place of the other, and of another dtype
    ]
    assert not list(differing_copies(replace(held, extra={"count": replicas(RANKS)})))


@pytest.mark.parametrize("layout", Layout)
@pytest.mark.parametrize("shape", [(), (15,), (5, 3)])
def test_whatever_its_shape_a_copy_that_differs_is_no_buffer_unless_that_is_known(
    layout: Layout, shape: tuple[int, ...]
) -> None:
    """Experts by rank, norm gains and scalars that are parameters, ``ignored_params``: all look like buffers."""
    nbytes = 4 * int(np.prod(shape))
    held = source(replicas(RANKS), records(7, 7, 8, nbytes=nbytes))
    held = with_origin(replace(held, optim=None, model=ModelState({"m.w": copies(*shape)})), layout=layout)
    (found,) = differing_copies(held)
    assert (found.kind, found.key, found.rank) == ("copies", "m.w", 2)
    (found,) = differing_copies(held, ("m.*",))
    assert (found.kind, found.fatal) == ("replica", False) and "the first is taken" in found.message
    (found,) = differing_copies(held, ("none",))
    assert (found.kind, found.fatal) == ("replica", True)
    trained = replace(held, optim=Optimizer.of({"m.w": {"m": replicas(1, *shape)}}, None))
    for globs in ((), ("m.w",)):
        (found,) = differing_copies(trained, globs)
        assert (found.kind, found.fatal) == ("replica", True) and "it is a parameter" in found.message


def test_statistics_that_the_optimizer_trains_are_parameters() -> None:
    held = source(replicas(RANKS), records(7, 7, 9))
    params = {"n.running_mean": replicas(RANKS), "n.num_batches_tracked": 3}
    optim = Optimizer.of({}, [{"params": ["n.running_mean"]}])
    (found,) = differing_copies(replace(held, model=ModelState(params), optim=optim))  # type: ignore[arg-type]
    assert found.fatal


def test_copies_without_checksums_are_listed_for_their_bytes_to_be_read() -> None:
    weight, step = copies(5), replicas(RANKS)
    held = replace(source(step, []), model=ModelState({"w": weight, "cut": replace(weight, cut=Sharded(()))}))
    assert [named.key for named in unsummed_copies(held)] == ["w"]
    assert not unsummed_copies(replace(held, checksums=Checksums.of(records(1, 2, 3, nbytes=20))))


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
    found = list(
        differing_copies(with_origin(replace(held, optim=None, checksums=Checksums.of(sums)), layout=Layout.SHARDED))
    )
    assert [problem.fatal for problem in found] == [True] * (ranks is not None)
    assert all(f"of rank {ranks[0]} and of rank {ranks[1]}" in problem.message for problem in found if ranks)


def test_a_tensor_that_lies_nowhere_has_no_copies_and_slices_are_each_ranks_own() -> None:
    nowhere = replicas(RANKS)
    gone = replace(nowhere, chunks=nowhere.chunks.take(np.zeros(RANKS, bool)))
    assert not differing_copies(source(gone, records(7, 7, 9)))
    assert not differing_copies(
        source(slices([1] * RANKS), [(file, 64 * file, 4, 100 + file) for file in range(RANKS)])
    )


def test_copies_in_another_memory_order_are_not_held_against_each_other() -> None:
    state = replicas(RANKS, 5, 3)
    stride = state.chunks.stride.copy()
    stride[1] = (1, 5)
    turned = replace(state, chunks=state.chunks.with_boxes(stride=np.asarray(stride)))
    assert not list(differing_copies(source(turned, records(7, 8, 7, nbytes=60))))


def test_a_part_of_another_tensor_is_not_that_tensor(tmp_path: Path) -> None:
    """Both begin at one place of each rank's file, and ranks differ behind the part."""
    for rank in range(2):
        whole = torch.arange(8.0)
        whole[6:] += rank
        torch.save({"bias": whole[:4], "weight": whole}, tmp_path / f"model_world_size_2_rank_{rank}.pt")
        states = {name: {"exp_avg": torch.zeros(size)} for name, size in (("bias", 4), ("weight", 8))}
        optimizer = {"state": states, "param_groups": [{"lr": 0.1, "params": ["bias", "weight"]}]}
        torch.save(optimizer, tmp_path / f"optim_world_size_2_rank_{rank}.pt")
    with pytest.raises(SourceCorruptError, match="model weight: the copies of rank 0 and of rank 1 differ"):
        fsdpckpt.convert(str(tmp_path), str(tmp_path.with_suffix(".pt")), to="full")
