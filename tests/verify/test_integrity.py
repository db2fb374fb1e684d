"""Verify lists everything that is wrong, and nothing about what is right."""

from __future__ import annotations

import random
import threading
import zlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch

import fsdpckpt
from fsdpckpt.errors import SourceCorruptError
from fsdpckpt.ir.checkpoint import Checkpoint, Checksums, Section
from fsdpckpt.ir.dtypes import DTYPES
from fsdpckpt.ir.optimizer import Optimizer
from fsdpckpt.ir.tensors import Chunks, Tensor
from fsdpckpt.report.page import page
from fsdpckpt.storage.sources import Sources
from fsdpckpt.verify.blocks import BlockReader
from fsdpckpt.verify.checksums import TensorsInFiles
from fsdpckpt.verify.integrity import Verification, verify_checkpoint
from fsdpckpt.verify.measures import Finite, buffer_keys
from tests.ir.checkpoints import with_ledger
from tests.verify.raw import Box, Raw, numbers, random_array, rows


def verified(checkpoint: Checkpoint, *, digests: bool = False, finite: bool = False) -> Verification:
    with Sources() as sources:
        return verify_checkpoint(checkpoint, sources=sources, digests=digests, finite=Finite() if finite else None)


def kinds(checkpoint: Checkpoint, *, finite: bool = False) -> list[tuple[str, str | None]]:
    return [(problem.kind, problem.key) for problem in verified(checkpoint, finite=finite).problems]


class Whole:
    """A sound sharded checkpoint: a model cut over three ranks, a replicated buffer, an optimizer with steps."""

    def __init__(self, directory: Path) -> None:
        self.raw = Raw(directory, 3)
        self.weight = numbers(1, (7, 5))
        self.buffer = numbers(2, (4,))
        self.model: dict[str, Tensor] = {
            "w": self.raw.put(self.weight, rows((7, 5), 3)),
            "buffer": self.raw.put(self.buffer, [((0,), (4,))] * 3),
        }
        self.steps = {key: self.raw.put(np.float32(5)) for key in "abc"}
        self.optim = Optimizer.of(
            {
                key: {"step": step, "exp_avg": self.raw.put(numbers(n, (3, 2)), rows((3, 2), 3))}
                for n, (key, step) in enumerate(self.steps.items())
            },
            [{"params": ["a", "b", "c"]}],
        )

    def checkpoint(self) -> Checkpoint:
        return self.raw.checkpoint(self.model, self.optim)


def test_a_sound_checkpoint_has_no_problem_and_says_what_was_looked_at(tmp_path: Path) -> None:
    result = verified(Whole(tmp_path).checkpoint(), finite=True)
    assert result.problems == ()
    assert result.whole
    assert (result.tensors, result.replicas, result.notes) == (8, 2, ())
    assert result.nbytes == 4 * (35 + 4 + 3 + 3 * 6)
    assert result.records == 3 + 3 + 3 + 9


def test_a_record_that_several_tensors_share_names_the_first_and_how_many_more(tmp_path: Path) -> None:
    raw = Raw(tmp_path, 1)
    tensors = {name: raw.put(numbers(n, (3, 2)), gap=0) for n, name in enumerate("abcd")}
    begin, end = raw.records[1][1], raw.records[3][1]
    crc = zlib.crc32(bytes(raw.data[0][begin:end]))
    raw.records = [(0, begin, end - begin, crc)]  # the bytes of b and c
    checkpoint = raw.checkpoint(tensors)
    raw.flip(tensors["c"], byte=23)
    (problem,) = verified(checkpoint).problems
    assert (problem.kind, problem.key, problem.section) == ("checksum", "b", Section.MODEL)
    assert problem.file == str(tmp_path / "rank_0.bin")
    assert problem.message.startswith("model b and 1 more tensor: ") and "CRC-32" in problem.message


def test_bytes_between_tensors_name_none(tmp_path: Path) -> None:
    raw = Raw(tmp_path, 1)
    first, second = (raw.put(numbers(n, (3,)), gap=8) for n in range(2))
    begin = int(first.chunks.offset[0]) + 12
    raw.records = [(0, begin, 8, zlib.crc32(bytes(raw.data[0][begin : begin + 8])) ^ 1)]
    (problem,) = verified(raw.checkpoint({"a": first, "b": second})).problems
    assert (problem.kind, problem.key) == ("checksum", None)


@pytest.mark.parametrize("seed", range(5))
def test_the_tensors_of_a_range_of_bytes_are_those_that_lie_in_it(tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    raw = Raw(tmp_path, 3)
    model = {
        f"t{n}": raw.put(numbers(n, (draw.randrange(1, 9), 3)), ranks=[draw.randrange(3)], gap=draw.randrange(4))
        for n in range(40)
    }
    model["strided"] = raw.put(numbers(7, (4, 5)), order=(1, 0))
    model["in no file"] = Tensor(DTYPES["float32"], (3,), Chunks.whole(file=-1, offset=-1, shape=(3,)))
    checkpoint = raw.checkpoint(model)
    index = TensorsInFiles(checkpoint, list(checkpoint.tensors()))
    for _ in range(100):
        rank = draw.randrange(3)
        begin = draw.randrange(len(raw.data[rank]))
        end = min(begin + draw.randrange(1, 200), len(raw.data[rank]))
        expected = [
            name
            for name, tensor in model.items()
            if int(tensor.chunks.file[0]) == rank
            and int(tensor.chunks.offset[0]) < end
            and int(tensor.chunks.offset[0]) + tensor.nbytes > begin
        ]
        assert [one.key for one in index.overlapping(checkpoint.files[rank].path, begin, end)] == expected
    assert index.overlapping("nowhere", 0, 1000) == []


def test_checksums_of_zero_everywhere_mean_there_are_none(tmp_path: Path) -> None:
    whole = Whole(tmp_path)
    whole.raw.records = [(*row[:3], 0) for row in whole.raw.records]
    checkpoint = whole.checkpoint()
    whole.raw.flip(whole.model["w"])
    result = verified(checkpoint)
    assert (result.problems, result.records) == ((), 0)
    assert "saved without checksums" in result.notes[0]
    checkpoint.checksums = Checksums.of([])
    assert "carry no checksums" in verified(checkpoint).notes[0]
    single = Whole(tmp_path / "single")
    single.raw.records[0] = (*single.raw.records[0][:3], 0)
    assert kinds(single.checkpoint()) == [("checksum", "w")], "a single zero among others is judged"


@pytest.mark.parametrize(
    ("shape", "boxes", "row"),
    [((4,), [((0,), (4,))] * 3, 2), ((5, 3), rows((5, 3), 2) * 2, 3)],
    ids=["whole", "hybrid shard"],
)
def test_replicas_that_diverged_are_compared_box_by_box_and_named_with_their_ranks(
    tmp_path: Path, shape: tuple[int, ...], boxes: list[Box], row: int
) -> None:
    raw = Raw(tmp_path, len(boxes))
    tensor = raw.put(random_array(3, shape), boxes)
    raw.records.clear()
    checkpoint = raw.checkpoint({"w": tensor})
    assert kinds(checkpoint) == []
    raw.flip(tensor, row=row, byte=8)
    (problem,) = verified(checkpoint).problems
    assert (problem.kind, problem.key, problem.rank) == ("replica", "w", row)
    assert f"rank {row % 2} and of rank {row}" in problem.message


def test_a_missing_rank_a_truncated_file_and_an_absent_one_are_all_listed(tmp_path: Path) -> None:
    raw = Raw(tmp_path, 3)
    raw.records.clear()
    model = {
        "whole": raw.put(random_array(1, (2, 2))),
        "part": raw.put(random_array(2, (6, 2)), [rows((6, 2), 3)[0], rows((6, 2), 3)[2]], ranks=[0, 2]),
        "absent": raw.put(random_array(3, (3,)), ranks=[1]),
        "short": raw.put(random_array(4, (9,)), ranks=[2]),
    }
    raw.records.clear()
    checkpoint = raw.checkpoint(model)
    (tmp_path / "rank_1.bin").unlink()
    with (tmp_path / "rank_2.bin").open("r+b") as file:
        file.truncate(checkpoint.files[2].nbytes - 1)
    result = verified(checkpoint, digests=True, finite=True)
    assert [(problem.kind, problem.key) for problem in result.problems] == [
        ("incomplete", "part"),
        ("missing-file", "absent"),
        ("truncated", "short"),
    ]
    assert {one.key: one.sha256 is not None for one in result.digests} == {
        "whole": True,
        "part": False,
        "absent": False,
        "short": False,
    }


def test_a_step_that_no_float_can_hold_is_compared(tmp_path: Path) -> None:
    weights = {name: torch.ones(2, 2) for name in "ab"}
    state = {name: {"step": step, "exp_avg": torch.ones(2, 2)} for name, step in (("a", 10**400), ("b", 3))}
    groups = [{"lr": 0.1, "params": ["a", "b"]}]
    torch.save({"model": weights, "optimizer": {"state": state, "param_groups": groups}}, tmp_path / "full.pt")
    (problem,) = [each for each in fsdpckpt.verify(tmp_path / "full.pt").problems if each.kind == "step"]
    assert "inf for 1 (a)" in problem.message
    assert "inf for 1 parameter" in page(fsdpckpt.inspect(tmp_path / "full.pt"))


def test_steps_that_disagree_are_listed_by_group(tmp_path: Path) -> None:
    whole = Whole(tmp_path)
    whole.optim.state["b"]["step"] = whole.raw.put(np.float32(6))
    (problem,) = verified(whole.checkpoint()).problems
    assert (problem.kind, problem.key) == ("step", "b.step")
    assert (
        "5 for 2 (a, c); 6 for 1 (b): two saves are mixed, or those with fewer steps had no gradient" in problem.message
    )
    whole.optim = whole.optim.with_groups([{"params": ["a", "c"]}, {"params": ["b"]}])
    assert kinds(whole.checkpoint()) == []


@pytest.mark.parametrize(("number", "found"), [(5, []), (4, ["step"])])
def test_steps_may_be_numbers_one_element_tensors_or_absent(tmp_path: Path, number: int, found: list[str]) -> None:
    whole = Whole(tmp_path)
    whole.optim.state["a"]["step"] = number
    whole.optim.state["b"]["step"] = whole.raw.put(np.array([5], np.int64))
    assert [kind for kind, _ in kinds(whole.checkpoint())] == found


def test_steps_are_read_by_several_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    both = threading.Barrier(2)
    read = BlockReader.blocks

    def blocks(reader: BlockReader, tensor: Tensor) -> Iterator[npt.NDArray[np.uint8]]:
        if tensor in (whole.steps["a"], whole.steps["b"]):
            both.wait(timeout=30)  # the other one is read at the same time
        return read(reader, tensor)

    whole = Whole(tmp_path)
    monkeypatch.setattr(BlockReader, "blocks", blocks)
    assert kinds(whole.checkpoint()) == []


def test_the_neighbours_of_a_damaged_file_are_not_read(tmp_path: Path) -> None:
    for name in ("one.pt", "other.pt"):
        torch.save({"w": torch.rand(1000)}, tmp_path / name)
        data = (tmp_path / name).read_bytes()
        (tmp_path / name).write_bytes(data[:-500])
    with pytest.raises(SourceCorruptError) as alone:
        fsdpckpt.verify(tmp_path / "one.pt")
    assert "other" not in alone.value.text
    with pytest.raises(SourceCorruptError, match="1 other file is damaged"):
        fsdpckpt.verify(tmp_path)


def test_problems_of_the_reader_are_kept_and_not_doubled(tmp_path: Path) -> None:
    raw = Raw(tmp_path, 2)
    checkpoint = raw.checkpoint({"w": raw.put(random_array(5, (4, 2)), [((0, 0), (2, 2))])})
    checkpoint = with_ledger(checkpoint, problems=verified(checkpoint).problems)
    assert kinds(checkpoint) == [("incomplete", "w")]


def test_progress_adds_up_to_what_was_announced(tmp_path: Path) -> None:
    class Counted:
        def __init__(self) -> None:
            self.stages: list[list[int | str]] = []

        def begin(self, stage: str, total_bytes: int) -> None:
            self.stages.append([stage, total_bytes, 0])

        def advance(self, nbytes: int) -> None:
            self.stages[-1][2] += nbytes  # type: ignore[operator]

        def end(self) -> None:
            pass

    progress = Counted()
    with Sources() as sources:
        verify_checkpoint(
            Whole(tmp_path).checkpoint(), sources=sources, digests=True, finite=Finite(), threads=1, progress=progress
        )
    assert [stage for stage, _, _ in progress.stages] == ["checksums", "tensors", "steps"]
    assert all(total == done and total for _, total, done in progress.stages)


def searched(checkpoint: Checkpoint, **globs: tuple[str, ...]) -> tuple[set[str | None], tuple[str, ...]]:
    with Sources() as sources:
        result = verify_checkpoint(checkpoint, sources=sources, finite=Finite(**globs))
    return {problem.key for problem in result.problems if problem.kind == "not-finite"}, result.notes


def with_mask(directory: Path, keys: tuple[str | int, ...], *, sharded: bool | None) -> Checkpoint:
    """A model with a weight, a frozen weight and a mask, all of them not finite; ``keys``: the optimizer's."""
    raw = Raw(directory, 1)
    bad = np.float32([[1.0, np.inf], [2.0, np.nan]])
    model = {name: replace(raw.put(bad), sharded=sharded) for name in ("a.weight", "frozen.weight")}
    model["mask"] = replace(raw.put(bad), sharded=None if sharded is None else False)
    state = {key: {"exp_avg": raw.put(bad)} for key in keys}
    return raw.checkpoint(model, Optimizer.of(dict(state), [{"params": list(keys)}]) if keys else None)


def test_nan_and_inf_are_problems_when_asked_for_and_of_buffers_when_they_are_named(tmp_path: Path) -> None:
    checkpoint = with_mask(tmp_path, ("a.weight",), sharded=True)
    assert kinds(checkpoint) == [], "only when that is asked for"
    assert "1 NaN and 1 Inf of 4" in verified(checkpoint, finite=True).problems[0].message
    found, notes = searched(checkpoint)
    assert found == {"a.weight", "frozen.weight", "a.weight.exp_avg"}
    assert [note for note in notes if "not searched for NaN and Inf: mask; --include" in note]
    assert searched(checkpoint, include=("mask",))[0] == {"mask"}
    assert searched(checkpoint, include=("*",))[0] == {"mask", *found}
    assert searched(checkpoint, exclude=("*.weight",))[0] == set()  # a state goes by its parameter's name as well
    assert searched(checkpoint, exclude=("*.exp_avg",))[0] == {"a.weight", "frozen.weight"}


@pytest.mark.parametrize(
    ("keys", "sharded", "buffers"),
    [
        (("a.weight", "frozen.weight"), True, {"mask"}),
        (("a.weight",), None, {"mask", "frozen.weight"}),  # one full file: only the optimizer tells
        (("a.weight", "frozen.weight"), None, {"mask"}),
        ((), True, {"mask"}),
        ((), None, set()),  # nothing tells, so everything is searched
        ((0, 1), None, set()),
        ((0, 1), True, {"mask"}),
        (("other.name",), None, set()),
    ],
)
def test_what_counts_as_a_buffer(
    tmp_path: Path, keys: tuple[str | int, ...], sharded: bool | None, buffers: set[str]
) -> None:
    assert buffer_keys(with_mask(tmp_path, keys, sharded=sharded)) == buffers
