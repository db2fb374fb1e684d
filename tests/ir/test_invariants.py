"""What may be converted: every element exactly once, up to replicas; states apart on disk; whole optimizers."""

from __future__ import annotations

import random
import time
import tracemalloc
from collections.abc import Sequence
from itertools import product
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsdpckpt.errors import SourceCorruptError, SourceIncompleteError, SourceUnsupportedError
from fsdpckpt.ir import coverage, invariants
from fsdpckpt.ir.checkpoint import Checkpoint, Layout, Problem, Section
from fsdpckpt.ir.coverage import flaws
from fsdpckpt.ir.dtypes import DTYPES
from fsdpckpt.ir.fatal import fatal
from fsdpckpt.ir.files import Stored
from fsdpckpt.ir.invariants import problems
from fsdpckpt.ir.optimizer import Optimizer, OwnValue
from fsdpckpt.ir.tensors import Boxes, Chunks, Tensor
from tests.ir.checkpoints import checkpoint as full
from tests.ir.checkpoints import tensor as whole
from tests.ir.checkpoints import with_origin

F32 = DTYPES["float32"]
Box = tuple[tuple[int, ...], tuple[int, ...]]


def tensor(shape: Sequence[int], boxes: Sequence[Box], ranks: Sequence[int] | None = None) -> Tensor:
    count = len(boxes)
    chunks = Chunks.rows(
        ndim=len(shape),
        rank=list(ranks if ranks is not None else range(count)),
        file=[0] * count,
        offset=[number * 10_000 for number in range(count)],
        start=[box[0] for box in boxes],
        size=[box[1] for box in boxes],
    )
    return Tensor(F32, tuple(shape), chunks)


def at(offset: int, shape: Sequence[int], stride: Sequence[int] | None = None, file: int = 0) -> Tensor:
    return whole(*shape, offset=offset, stride=stride, file=file)


def checkpoint(model: Any = None, optim: Optimizer | None = None, world_size: int = 1) -> Checkpoint:
    files = tuple(Stored(f"rank_{rank}.pt", 1 << 20) for rank in range(world_size))
    return with_origin(full(model, optim, files=files), layout=Layout.SHARDED, world_size=world_size)


@st.composite
def partitions(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Box]]:
    """A tensor cut by random guillotine cuts: a partition that is usually no grid."""
    shape = tuple(draw(st.lists(st.integers(1, 9), min_size=1, max_size=4)))
    boxes: list[Box] = [((0,) * len(shape), shape)]
    for _ in range(draw(st.integers(0, 7))):
        start, size = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        dimension = draw(st.integers(0, len(shape) - 1))
        cut = draw(st.integers(0, size[dimension]))
        low, high = list(size), list(size)
        low[dimension], high[dimension] = cut, size[dimension] - cut
        moved = list(start)
        moved[dimension] += cut
        boxes += [(start, tuple(low)), (tuple(moved), tuple(high))]
    replicas = draw(st.lists(st.sampled_from(boxes), max_size=3))
    return shape, draw(st.permutations(boxes + replicas))


def counted(shape: tuple[int, ...], boxes: Sequence[Box]) -> tuple[int, int]:
    """(missing, held by different boxes) elements, one by one."""
    seen = np.zeros(shape, np.int64)
    for start, size in set(boxes):
        seen[tuple(slice(a, a + n) for a, n in zip(start, size, strict=True))] += 1
    return int((seen == 0).sum()), int((seen > 1).sum())


@given(partitions())
def test_a_partition_with_replicas_and_empty_boxes_has_no_flaw(cut: tuple[tuple[int, ...], list[Box]]) -> None:
    shape, boxes = cut
    assert flaws(tensor(shape, boxes)) == []


@given(partitions(), st.data())
def test_the_missing_elements_are_counted_when_a_chunk_is_taken_away(
    cut: tuple[tuple[int, ...], list[Box]], data: st.DataObject
) -> None:
    shape, boxes = cut
    gone = data.draw(st.sampled_from(boxes))
    left = [box for box in boxes if box != gone]
    missing, _ = counted(shape, left)
    found = flaws(tensor(shape, left))
    assert [(flaw.kind, flaw.elements) for flaw in found] == ([("incomplete", missing)] if missing else [])
    for flaw in found:  # the box that is named really is missing
        assert counted(shape, [*left, (flaw.start, flaw.size)])[0] == missing - int(np.prod(flaw.size))


@given(partitions(), st.data())
def test_any_boxes_give_the_flaws_that_counting_element_by_element_gives(
    cut: tuple[tuple[int, ...], list[Box]], data: st.DataObject
) -> None:
    shape, boxes = cut
    start = tuple(data.draw(st.integers(0, n - 1)) for n in shape)
    size = tuple(data.draw(st.integers(1, n - a)) for a, n in zip(start, shape, strict=True))
    boxes = [*boxes[data.draw(st.integers(0, 1)) :], (start, size)]
    missing, twice = counted(shape, boxes)
    found = {flaw.kind: flaw.elements for flaw in flaws(tensor(shape, boxes))}
    assert found == {kind: n for kind, n in (("incomplete", missing), ("overlap", twice)) if n}


@given(partitions(), st.data())
def test_where_the_cells_are_too_many_to_count_one_that_is_wrong_is_found(
    cut: tuple[tuple[int, ...], list[Box]], data: st.DataObject
) -> None:
    shape, boxes = cut
    if data.draw(st.booleans()):
        boxes = boxes[1:]
    start = tuple(data.draw(st.integers(0, n - 1)) for n in shape)
    if data.draw(st.booleans()):
        boxes = [*boxes, (start, (1,) * len(shape))]
    boxes = list(dict.fromkeys(box for box in boxes if 0 not in box[1]))
    missing, twice = counted(shape, boxes)
    with patch.object(coverage, "_MAX_CELLS", 0), patch.object(coverage, "_CELLS_PER_BOX", 0):
        found = flaws(tensor(shape, boxes)) if boxes else []
    assert bool(found) == bool(boxes and (missing or twice))
    for flaw in found:
        inside = [
            box for box in boxes if all(b <= f < b + n for b, f, n in zip(box[0], flaw.start, box[1], strict=True))
        ]
        assert len(inside) > 1 if flaw.kind == "overlap" else not inside
        if flaw.kind == "incomplete" and not twice:
            assert flaw.elements == missing


def test_a_staircase_of_boxes_takes_time_and_memory_that_grow_with_their_number() -> None:
    """Its grid has 60,000 * 60,000 cells, and as many pairs of boxes."""
    steps = 60_000
    columns = np.arange(steps)
    start = np.stack([columns, steps - 1 - columns], axis=1)
    place = np.zeros(steps, np.int64)
    ones = np.ones((steps, 2), np.int64)
    chunks = Chunks(columns, place, columns * 4, Boxes(start, ones, ones))
    tracemalloc.start()
    begun = time.process_time()
    (found,) = flaws(Tensor(DTYPES["float32"], (steps, steps), chunks))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert (found.kind, found.elements, found.start) == ("incomplete", steps * steps - steps, (0, 0))
    assert time.process_time() - begun < 10
    assert peak < 100 << 20


def test_a_box_that_reaches_outside_is_named_with_its_rank() -> None:
    found = problems(checkpoint({"w": tensor((6, 3), [((0, 0), (4, 3)), ((4, 0), (4, 3))])}, world_size=2))
    assert [(one.kind, one.key, one.rank, one.fatal, one.section) for one in found] == [
        ("outside", "w", 1, True, Section.MODEL),
        ("incomplete", "w", None, True, Section.MODEL),
    ]
    assert "[4:8, 0:3]" in found[0].message


def test_a_missing_rank_is_named_with_the_rows_it_should_hold() -> None:
    boxes = [((0, 0), (3, 4)), ((6, 0), (1, 4))]
    (found,) = problems(checkpoint({"layer.weight": tensor((7, 4), boxes, ranks=[0, 2])}, world_size=3))
    assert found.kind == "incomplete"
    assert "model layer.weight [7, 4]: 12 of 28 elements are in no chunk, first [3:6, 0:4]" in found.message
    assert "nothing from rank 1" in found.message


def test_overlapping_ranks_are_named() -> None:
    (found,) = problems(checkpoint({"w": tensor((6,), [((0,), (4,)), ((3,), (3,))], ranks=[5, 9])}, world_size=10))
    assert (found.kind, found.file) == ("overlap", "rank_0.pt")
    assert "overlap in 1 element," in found.message
    assert "ranks 5, 9" in found.message


def test_a_grid_of_fsdp_by_tp_on_thousands_of_ranks_is_checked_without_comparing_pairs() -> None:
    boxes = [((i * 3, j * 5), (3, 5)) for i, j in product(range(64), range(64))]
    random.Random(1).shuffle(boxes)
    good = tensor((192, 320), boxes)
    begun = time.perf_counter()
    assert flaws(good) == []
    assert time.perf_counter() - begun < 0.5
    (flaw,) = flaws(tensor((192, 320), boxes[:-1]))
    assert (flaw.kind, flaw.elements, (flaw.start, flaw.size)) == ("incomplete", 15, boxes[-1])


def test_zero_dimensional_and_empty_tensors() -> None:
    assert flaws(tensor((), [((), ()), ((), ())])) == []
    assert [flaw.kind for flaw in flaws(tensor((), []))] == ["incomplete"]
    assert flaws(tensor((0, 4), [])) == []
    assert flaws(tensor((0, 4), [((0, 0), (0, 4))])) == []
    assert flaws(tensor((3,), [((0,), (3,)), ((3,), (0,)), ((3,), (0,))])) == []


@pytest.mark.parametrize("ones", [0, 60])
def test_a_box_of_negative_size_is_outside_and_fills_nothing(ones: int) -> None:
    boxes: list[Box] = [((row,), (1,)) for row in range(ones)]
    (first, second, *_) = flaws(tensor((ones + 4,), [*boxes, ((ones,), (5,)), ((ones + 5,), (-1,))]))
    assert (first.kind, first.start, second.kind, second.start) == ("outside", (ones,), "outside", (ones + 5,))


def test_two_states_of_one_parameter_on_the_same_bytes_are_fatal() -> None:
    states = {"step": at(0, ()), "exp_avg": at(64, (3, 5)), "exp_avg_sq": at(64, (3, 5))}
    (found,) = problems(checkpoint(optim=Optimizer.of({"a.weight": dict(states)}, None)))
    assert (found.kind, found.fatal, found.key, found.section) == (
        "aliased-states",
        True,
        "a.weight.exp_avg",
        Section.OPTIM,
    )
    assert "a.weight" in found.message
    assert "exp_avg and exp_avg_sq" in found.message


@pytest.mark.parametrize(
    ("one", "other", "aliased"),
    [
        (at(0, (4, 5)), at(80, (4, 5)), False),
        (at(0, (4, 5)), at(76, (4, 5)), True),
        (at(0, (4, 5)), at(0, (4, 5), file=1), False),
        (at(0, (6,), (2,)), at(4, (6,), (2,)), False),  # buffer[:, 0] beside buffer[:, 1]
        (at(0, (6,), (2,)), at(8, (6,), (2,)), True),
        (at(-1, (4, 5)), at(-1, (4, 5)), False),  # not located yet
        (at(0, (0, 5)), at(0, (4, 5)), False),
    ],
)
def test_aliasing_is_about_elements_not_spans(one: Tensor, other: Tensor, aliased: bool) -> None:
    optim = Optimizer.of({0: {"exp_avg": one, "exp_avg_sq": other}}, None)
    assert [found.kind for found in problems(checkpoint(optim=optim, world_size=2))] == ["aliased-states"] * aliased


def test_aliasing_is_seen_among_many_chunks() -> None:
    def cut(shift: int) -> Tensor:
        n = 100
        chunks = Chunks.rows(
            ndim=1,
            rank=range(n),
            file=range(n),
            offset=[shift] * n,
            start=[(i * 3,) for i in range(n)],
            size=[(3,)] * n,
        )
        return Tensor(F32, (300,), chunks)

    apart = Optimizer.of({"w": {"exp_avg": cut(0), "exp_avg_sq": cut(12)}}, None)
    same = Optimizer.of({"w": {"exp_avg": cut(0), "exp_avg_sq": cut(8)}}, None)
    assert problems(checkpoint(optim=apart, world_size=100)) == []
    assert [found.kind for found in problems(checkpoint(optim=same, world_size=100))] == ["aliased-states"]


@pytest.mark.parametrize("at_once", [1, 2, 5, 9, 1 << 16])
def test_every_parameter_with_aliased_states_is_named_however_many_are_looked_at_together(
    monkeypatch: pytest.MonkeyPatch, at_once: int
) -> None:
    monkeypatch.setattr(invariants, "_CHUNKS_AT_ONCE", at_once)
    second = {number: at(40 if number % 3 else 80, (4, 5), file=number) for number in range(7)}
    states = {f"w{number}": {"exp_avg": at(0, (4, 5), file=number), "exp_avg_sq": second[number]} for number in second}
    found = problems(checkpoint(optim=Optimizer.of({**states, "plain": {}}, None), world_size=2))
    assert [problem.key for problem in found] == [f"w{number}.exp_avg" for number in (1, 2, 4, 5)]


def test_tied_parameters_of_the_model_and_states_shared_between_parameters_are_fine() -> None:
    optim = Optimizer.of({"a": {"step": at(0, ())}, "b": {"step": at(0, ())}}, [{"params": ["a", "b"]}])
    assert problems(checkpoint({"embed": at(64, (3, 5)), "head": at(64, (3, 5))}, optim)) == []


def test_parameters_without_state_and_doubles_are_reported_but_not_fatal() -> None:
    state = {key: {"exp_avg": at(64 * key, (3,))} for key in (0, 1)}
    optim = Optimizer.of(dict(state), [{"params": [0, 1, 2]}, {"params": [1]}])
    found = {one.key: one.message for one in problems(checkpoint(optim=optim))}
    assert found.keys() == {"2", "1"}
    assert "no optimizer state" in found["2"]
    assert "more than once" in found["1"]
    assert not any(one.fatal for one in problems(checkpoint(optim=optim)))


@pytest.mark.parametrize(("key", "fatal"), [(7, True), ("7", False), ("w", False)])
def test_a_state_in_no_group_is_fatal_if_an_id_is_all_that_names_it(key: int | str, fatal: bool) -> None:
    state = {0: {"exp_avg": at(0, (3,))}, key: {"exp_avg": at(64, (3,))}}
    found = problems(checkpoint(optim=Optimizer.of(state, [{"params": [0]}])))
    assert [(one.key, one.fatal) for one in found] == [(str(key), fatal)]
    assert "no param group" in found[0].message
    assert problems(checkpoint(optim=Optimizer.of(state, [{"lr": 0.1}]))) == []  # the groups list nobody


def test_an_optimizer_without_any_state_is_complete() -> None:
    assert problems(checkpoint(optim=Optimizer.of({}, [{"params": ["a", "b"]}]))) == []


def test_a_state_that_all_alike_but_one_have_is_reported() -> None:
    def states(n: int, shape: tuple[int, ...]) -> dict[str, Tensor]:
        names = ("exp_avg_sq_row", "exp_avg_sq_col") if len(shape) > 1 else ("exp_avg_sq",)
        return {"step": at(n, ()), **{name: at(n + 64 * (i + 1), shape) for i, name in enumerate(names)}}

    state = {key: states(1000 * n, (3, 2)) for n, key in enumerate("abcd")}
    state["bias"] = states(9000, (3,))  # factored optimizers keep other states for vectors
    del state["c"]["step"]
    optim = Optimizer.of({key: dict(value) for key, value in state.items()}, [{"params": list(state)}])
    assert [(one.key, one.kind) for one in problems(checkpoint(optim=optim))] == [("c", "state")]
    assert "no state step" in problems(checkpoint(optim=optim))[0].message


@pytest.mark.parametrize(
    ("kinds", "error"),
    [
        (["incomplete", "overlap"], SourceIncompleteError),
        (["missing-rank"], SourceIncompleteError),
        (["overlap"], SourceCorruptError),
        (["aliased-states"], SourceUnsupportedError),
        (["flattened", "aliased-states"], SourceUnsupportedError),
    ],
)
def test_one_error_lists_every_fatal_problem(kinds: list[str], error: type[Exception]) -> None:
    found = [Problem(kind, f"{kind} happened", key=kind) for kind in kinds]
    raised = fatal([*found, Problem("state", "harmless", fatal=False)], source="SRC")
    assert type(raised) is error
    assert raised.details == tuple(one.message for one in found)
    assert "SRC" in raised.what
    with pytest.raises(ValueError, match="no fatal"):
        fatal([Problem("state", "harmless", fatal=False)], source="SRC")


def test_the_command_to_type_next_is_quoted_for_the_shell() -> None:
    raised = fatal([Problem("overlap", "it does")], source="runs/my ckpt")
    assert raised.next_step == "fsdpckpt verify 'runs/my ckpt'"


def test_the_tensors_without_their_names_are_those_with_them_in_the_same_order() -> None:
    weight, step, first, second, scale, own, seed, drawn = (at(100 * number, (number + 1,)) for number in range(8))
    states = {"exp_avg": first, "step": step, "lists": [second, (scale, 3)], "none": None}
    optim = Optimizer.of({"w": states, "v": OwnValue(own)}, [{"params": ["w", "v"], "lr": seed}], {"x": [own]})
    found = checkpoint({"w": weight, "dead": weight}, optim)
    found.model.params["_extra_state"] = {"scale": scale}  # type: ignore[union-attr]
    found.extra = {"rng": {"cpu": drawn}}
    found.rank_extra = ({"rng": seed}, {"rng": drawn})
    assert list(found.leaves()) == [named.tensor for named in found.tensors()]
    assert [(str(one.section), one.param, one.state) for one in found.tensors()] == [
        ("model", "w", None),
        ("model", "dead", None),
        ("model", "_extra_state", "scale"),
        ("optim", "w", "exp_avg"),
        ("optim", "w", "step"),
        ("optim", "w", "lists.0"),
        ("optim", "w", "lists.1.0"),
        ("optim", "v", None),
        ("optim", "param_groups.0.lr", None),
        ("optim", "x.0", None),
        ("extra", "rng.cpu", None),
        ("extra", "rank0.rng", None),
        ("extra", "rank1.rng", None),
    ]
