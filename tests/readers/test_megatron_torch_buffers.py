"""Megatron-LM's torch format with the distributed optimizer, as ``DistributedOptimizer.save_parameter_state`` and
``_compute_per_buffer_param_layout`` of ``megatron/core/optimizer/distrib_optimizer.py`` (d98e8a6) build its file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import fsdpckpt
from fsdpckpt.errors import FsdpckptError
from tests.oracle.compare import identical, require_parts
from tests.readers import test_megatron_torch_grid
from tests.readers.contents import opened
from tests.readers.test_megatron_torch_grid import RUNS, WORD_EMBEDDINGS, Run

ALIGNED, SHARDS = 64, 128


def up(position: int, multiple: int) -> int:
    return -(-position // multiple) * multiple


def layout(numels: list[tuple[int, bool]], bucket: int | None) -> tuple[list[int], int]:
    """Where each parameter is in the tensor without the padding between buckets. ``numels``: in the order of the
    buffer, each with whether it is an embedding that stages share; ``bucket``: its size."""
    starts: list[int] = []
    done = position = first = count = 0  # of the buckets before; in the padded buffer
    for numel, shared in numels:
        position = up(position, ALIGNED)
        if shared and count:
            done, first, count = done + position - first, up(position, SHARDS), 0
            position = first
        starts.append(done + position - first)
        position, count = position + numel, count + 1
        if shared or (bucket is not None and position - first >= bucket):
            done, first, count = done + position - first, up(position, SHARDS), 0
            position = first
    return starts, done + position - first


class Distributed(Run):
    """A job with the distributed optimizer. ``bucket``: the size of its buckets."""

    bucket: int | None = None

    def names_in(self, names: list[str]) -> dict[str, bool]:
        tied = self.tied and self.stages > 1
        return {name: tied and name == WORD_EMBEDDINGS for name in reversed(names)}

    def buffer(self, names: list[str], tensor: int) -> dict[Any, Any]:
        values = {name: self.shard(name, self.whole[name], tensor) for name in names}
        listed = self.names_in(names)
        starts, length = layout([(values[name].numel(), shared) for name, shared in listed.items()], self.bucket)
        flat: dict[str, Any] = {key: torch.zeros(length) for key in ("param", "exp_avg", "exp_avg_sq")}
        for name, start in zip(listed, starts, strict=True):
            for key, whole in {"param": self.whole[name], **self.states[name]}.items():
                own = self.shard(name, whole, tensor).flatten()
                flat[key][start : start + len(own)] = own
        return {(torch.bfloat16, torch.float32): {**flat, "numel_unpadded": length}}

    def content(self, rank: int, world: int, tensor: int, stage: int, expert: int) -> dict[str, Any]:
        content = super().content(rank, world, tensor, stage, expert)
        saved = content["optimizer"]
        for number, each in enumerate(saved if isinstance(saved, list) else [saved]):
            del each["fp32_from_fp16_params"], each["optimizer"]["state"]
            for group in each["optimizer"]["param_groups"]:
                del group["params"]
                group["is_expert_parallel"] = number == 1
        return content

    def save(self, run: Path, change: Callable[[dict[str, Any]], object] = lambda _: None) -> Path:
        super().save(run, change)
        for folder in (run / "iter_0000007").iterdir():
            numbers = list(map(int, folder.name.removeprefix("mp_rank_").split("_")))
            tensor, rest = numbers[0], numbers[1:]
            stage = rest.pop(0) if self.stages > 1 else 0
            expert = rest.pop(0) if self.experts > 1 else 0
            chunks = [list(chunk.values()) for chunk in self.local(stage, expert)]
            states: list[Any] = []
            for kind in [False, True] if self.experts > 1 else [None]:
                buffers: dict[Any, Any] = {"buckets_coalesced": True}
                for chunk in chunks:
                    names = [name for name in chunk if kind is None or (".experts." in name) is kind]
                    if names:
                        buffers[len(buffers) - 1] = self.buffer(names, tensor)
                # The other parameters are saved by the first of the ranks that have them.
                states.append(None if kind is False and expert and self.expert_tensor == self.tensor else buffers)
            torch.save(states if len(states) > 1 else states[0], folder / "distrib_optim.pt")
        return run


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("name", "bucket"), [
    ("stages", None), ("stages", 100), ("tied words", None), ("interleaved", 50), ("experts", 80), ("all", None),
    ("uneven stages with tensor parallelism", 1), ("one rank", 70),
])  # fmt: skip
def test_weights_and_states_are_found_in_the_buffers(name: str, bucket: int | None, tmp_path: Path) -> None:
    run = Distributed(**RUNS.get(name, {"layers": (3,)}))
    run.bucket = bucket
    source = run.save(tmp_path / "run")
    checkpoint = opened(source)
    assert checkpoint.problems == () and not fsdpckpt.verify(source).problems
    assert all(file.fate == "read" or "latest" in file.path for file in checkpoint.ledger.account.files)
    fsdpckpt.convert(source, tmp_path / "full.pt", verify="full", no_weight_decay=["standard"])
    state = torch.load(tmp_path / "full.pt", weights_only=False)
    require_parts(state["model"], run.whole)
    require_parts(state["optimizer"]["state"], run.states)
    assert all(state["optimizer"]["state"][key]["step"] == 7 for key in run.states)
    decayed = {key for group in state["optimizer"]["param_groups"] if group["wd_mult"] for key in group["params"]}
    assert decayed == {key for key, value in run.whole.items() if value.ndim > 1}


@pytest.mark.filterwarnings("ignore")
def test_buffers_that_do_not_fit_the_model_leave_the_weights(tmp_path: Path) -> None:
    run = Distributed(**RUNS["stages"])
    source = run.save(tmp_path / "run")
    path = source / "iter_0000007" / "mp_rank_00_001" / "distrib_optim.pt"
    good = torch.load(path, weights_only=False)

    def problem_of(content: object, message: str) -> None:
        torch.save(content, path) if content is not None else path.unlink()
        problems = fsdpckpt.verify(source).problems
        assert len(problems) == 1 and message in problems[0].message, problems
        with pytest.raises(FsdpckptError):
            fsdpckpt.convert(source, tmp_path / "full.pt", no_weight_decay=["standard"])

    moved = {key: dict(value) if isinstance(value, dict) else value for key, value in good.items()}
    for dtypes, flat in good[0].items():
        moved[0] = {dtypes: {**flat, "param": flat["param"].roll(1)}}
    problem_of(moved, "cannot tell where each parameter is in Megatron's buffers")
    problem_of({**good, "buckets_coalesced": False}, "cannot tell where each parameter is")
    for wrong in (
        [good, good],
        [good, good, good],
        {**good, 0: [good[0]]},
        {**good, 0: {}},
        {**good, 0: good[0] | {"x": 1}},
    ):
        problem_of(wrong, "cannot tell where each parameter is")
    problem_of(None, "has the states of decoder.layers.1.")
    fsdpckpt.convert(source, tmp_path / "model.pt", only="model")
    model = torch.load(tmp_path / "model.pt")
    assert all(identical(model[key], value.bfloat16()) for key, value in run.whole.items())


@pytest.mark.filterwarnings("ignore")
def test_equal_values_that_fit_in_two_places_are_refused(tmp_path: Path) -> None:
    """Of the ones of two norms nothing says where the first ends."""
    run = Distributed(stages=2)
    for value in run.whole.values():
        value.fill_(1.0) if value.ndim == 1 else None
    assert not fsdpckpt.verify(run.save(tmp_path / "ones")).problems  # other weights are between them
    run.whole = {name: torch.zeros_like(value) for name, value in run.whole.items()}
    problems = fsdpckpt.verify(run.save(tmp_path / "zeros")).problems
    assert any("cannot tell where each parameter is" in problem.message for problem in problems), problems


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", [Run, Distributed])
def test_a_copy_that_is_not_its_master_anywhere_is_found(
    kind: type[Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reading compares samples of large weights; ``verify`` all of them."""
    monkeypatch.setattr(test_megatron_torch_grid, "WORDS", 40_000)
    run = kind(tensor=2, layers=(1,))
    source = run.save(tmp_path / "run")
    assert not fsdpckpt.verify(source).problems
    path = source / "iter_0000007" / "mp_rank_01" / "model_optim_rng.pt"
    content = torch.load(path, weights_only=False)
    content["model"][WORD_EMBEDDINGS].view(-1)[30_000] += 1
    torch.save(content, path)
    (problem,) = fsdpckpt.verify(source).problems
    assert (problem.kind, problem.key) == ("master", WORD_EMBEDDINGS)
    assert "first at [25000, 0]" in problem.message
