"""Megatron-LM's torch format of several tensor-parallel ranks, as ``save_checkpoint`` builds it: shards that the
modules of Megatron-core hold, made of heads, query groups, gates and values one by one."""

from __future__ import annotations

import argparse
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fsdpckpt
from fsdpckpt.errors import FsdpckptError, SourceUnsupportedError
from fsdpckpt.readers.megatron_torch.reader import MegatronTorchReader
from fsdpckpt.testing import ReaderContract
from tests.makers import Change, Make, lose, put, swap
from tests.oracle.compare import identical, require_parts
from tests.readers.contents import opened
from tests.refusals import Refusal, corrupt, each_of, incomplete, unsupported

MEGATRON = Path(__file__).parent.parent / "golden" / "megatron"
WIDTH, HEAD, INNER, WORDS, LAYERS = 6, 5, 12, 24, 2
LAYER = "decoder.layers.{}."


class Job:
    """The whole values, and what each of ``ranks`` holds of them. ``heads``, ``groups``: of the attention."""

    def __init__(self, ranks: int, heads: int, groups: int, *, gated: bool) -> None:
        torch.manual_seed(5)
        self.ranks, self.heads, self.groups, self.gated = ranks, heads, groups, gated
        self.whole: dict[str, torch.Tensor] = {}
        self.local: list[dict[str, torch.Tensor]] = [{} for _ in range(ranks)]
        self.add("embedding.word_embeddings.weight", torch.randn(WORDS, WIDTH), rows)
        for number in range(LAYERS):
            layer = LAYER.format(number)
            self.add(f"{layer}self_attention.linear_qkv.layer_norm_weight", torch.ones(WIDTH), copies)
            for name, extent in (("weight", (WIDTH,)), ("bias", ())):
                self.add(f"{layer}self_attention.linear_qkv.{name}", self.qkv(extent), self.by_groups)
            self.add(f"{layer}self_attention.linear_proj.weight", torch.randn(WIDTH, heads * HEAD), columns)
            self.add(f"{layer}self_attention.linear_proj.bias", torch.randn(WIDTH), copies)
            self.add(f"{layer}mlp.linear_fc1.weight", torch.randn(INNER * (2 if gated else 1), WIDTH), self.gates)
            self.add(f"{layer}mlp.linear_fc2.weight", torch.randn(WIDTH, INNER), columns)
        self.add("decoder.final_layernorm.weight", torch.ones(WIDTH), copies)
        self.add("output_layer.weight", torch.randn(WORDS, WIDTH), rows)
        self.states = {
            name: {key: torch.rand(value.shape) for key in ("exp_avg", "exp_avg_sq")}
            for name, value in self.whole.items()
        }
        self.cuts = dict(self._cuts)

    _cuts: dict[str, Callable[[torch.Tensor, int], list[torch.Tensor]]]

    def add(self, name: str, value: torch.Tensor, cut: Callable[[torch.Tensor, int], list[torch.Tensor]]) -> None:
        if not hasattr(self, "_cuts"):
            self._cuts = {}
        self.whole[name], self._cuts[name] = value, cut
        for of_rank, shard in zip(self.local, cut(value, self.ranks), strict=True):
            of_rank[name] = shard.clone()

    def qkv(self, extent: tuple[int, ...]) -> torch.Tensor:
        """Of each query group its queries, then its key and its value."""
        each = self.heads // self.groups + 2
        return torch.randn(self.groups * each * HEAD, *extent)

    def by_groups(self, value: torch.Tensor, ranks: int) -> list[torch.Tensor]:
        of_groups = value.view(self.groups, -1, *value.shape[1:])
        return [part.reshape(-1, *value.shape[1:]) for part in of_groups.chunk(ranks)]

    def gates(self, value: torch.Tensor, ranks: int) -> list[torch.Tensor]:
        """A rank's gate and its value, each of which it cut by itself."""
        parts = value.chunk(2) if self.gated else (value,)
        return [torch.cat(of_rank) for of_rank in zip(*(part.chunk(ranks) for part in parts), strict=True)]

    def arguments(self, rank: int) -> dict[str, Any]:
        return {
            "tensor_model_parallel_size": self.ranks, "pipeline_model_parallel_size": 1, "rank": rank,
            "num_attention_heads": self.heads, "group_query_attention": self.groups != self.heads,
            "num_query_groups": self.groups if self.groups != self.heads else 1, "kv_channels": HEAD,
            "swiglu": self.gated, "ffn_hidden_size": INNER, "padded_vocab_size": WORDS,
        }  # fmt: skip

    def content(self, rank: int) -> dict[str, Any]:
        names = list(self.whole)
        groups = [[name for name in names if (self.whole[name].ndim > 1) is decayed] for decayed in (True, False)]
        ids = iter(range(len(names)))
        param_groups = [
            {"lr": 0.1, "weight_decay": decay, "step": 7, "params": [next(ids) for _ in of_group]}
            for decay, of_group in zip((0.1, 0.0), groups, strict=True)
        ]
        states = [
            {key: self.cuts[name](value, self.ranks)[rank].clone() for key, value in self.states[name].items()}
            for of_group in groups
            for name in of_group
        ]
        masters = [[self.local[rank][name].clone() for name in of_group] for of_group in groups]
        model: dict[str, Any] = {name: value.bfloat16() for name, value in self.local[rank].items()}
        model["decoder.layers.0.mlp.linear_fc1._extra_state"] = None
        inner = {"state": dict(enumerate(states)), "param_groups": param_groups}
        return {
            "args": argparse.Namespace(**self.arguments(rank)), "checkpoint_version": 3.0, "iteration": 7,
            "model": model, "optimizer": {"optimizer": inner, "fp32_from_fp16_params": masters},
            "opt_param_scheduler": {"num_steps": 7}, "rng_state": [{"torch_rng_state": torch.full((3,), rank)}],
        }  # fmt: skip

    def save(self, run: Path, change: Callable[[dict[str, Any]], object] = lambda _: None) -> Path:
        for rank in range(self.ranks):
            folder = run / "iter_0000007" / f"mp_rank_{rank:02}"
            folder.mkdir(parents=True)
            content = self.content(rank)
            change(content)
            torch.save(content, folder / "model_optim_rng.pt")
        (run / "latest_checkpointed_iteration.txt").write_text("7")
        return run


def copies(value: torch.Tensor, ranks: int) -> list[torch.Tensor]:
    return [value] * ranks


def rows(value: torch.Tensor, ranks: int) -> list[torch.Tensor]:
    return list(value.chunk(ranks))


def columns(value: torch.Tensor, ranks: int) -> list[torch.Tensor]:
    return list(value.chunk(ranks, dim=1))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("ranks", "heads", "groups", "gated"), [(2, 4, 4, True), (2, 4, 2, False), (4, 8, 4, True), (3, 6, 3, True)]
)
def test_weights_and_states_become_whole(ranks: int, heads: int, groups: int, gated: bool, tmp_path: Path) -> None:
    job = Job(ranks, heads, groups, gated=gated)
    source = job.save(tmp_path / "run")
    found = opened(source)
    assert found.flavor == "megatron-torch" and found.world_size == ranks and found.problems == ()
    assert not fsdpckpt.verify(source).problems
    fsdpckpt.convert(source, tmp_path / "full.pt", verify="full")
    state = torch.load(tmp_path / "full.pt", weights_only=False)
    require_parts(state["model"], job.whole)
    require_parts(state["optimizer"]["state"], job.states)
    decayed, others = (group["params"] for group in state["optimizer"]["param_groups"])
    assert decayed == [name for name in job.whole if job.whole[name].ndim > 1]
    assert others == [name for name in job.whole if job.whole[name].ndim == 1]
    assert state["iteration"] == 7 and all(file.fate == "read" or "latest" in file.path
                                           for file in found.ledger.account.files)  # fmt: skip


@pytest.mark.filterwarnings("ignore")
def test_the_iteration_alone_and_other_layouts_are_the_same(tmp_path: Path) -> None:
    source = Job(2, 4, 2, gated=True).save(tmp_path / "run")
    iteration = source / "iter_0000007"
    fsdpckpt.convert(iteration, tmp_path / "dcp", to="sharded", container="dcp", world_size=3)
    assert fsdpckpt.diff(source, tmp_path / "dcp").same and fsdpckpt.diff(source, iteration).same


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_part_under_another_name_is_still_a_part_and_the_whole_is_not(ranks: int, tmp_path: Path) -> None:
    """Both have the arguments of the run: the shapes tell them apart."""
    part = Job(ranks, 4, 4, gated=True).save(tmp_path / "run") / "iter_0000007" / "mp_rank_01" / "model_optim_rng.pt"
    with pytest.raises(SourceUnsupportedError, match="is one part of a model") as error:
        opened(part)
    assert "files of all ranks" in str(error.value.next_step)
    with pytest.raises(SourceUnsupportedError, match="is one part of a model"):
        opened(part.rename(tmp_path / "weights.pt"))


@pytest.mark.filterwarnings("ignore")
def test_what_torch_dist_joined_is_no_part_in_one_file(tmp_path: Path) -> None:
    """Its arguments say how parallel the job was, and so did the file that was made of it."""
    with tarfile.open(MEGATRON / "reshardable.tar.xz") as archive:
        archive.extractall(tmp_path, filter="data")
    common = next(tmp_path.rglob("common.pt"))
    content = torch.load(common, weights_only=False)
    for name, value in (("tensor", 2), ("pipeline", 2)):
        setattr(content["args"], f"{name}_model_parallel_size", value)
    content["args"].padded_vocab_size = 16
    torch.save(content, common)
    words = fsdpckpt.inspect(common.parent).checkpoint.model.params["embedding.word_embeddings.weight"]  # type: ignore[union-attr]
    content["args"].padded_vocab_size = words.shape[0]
    torch.save(content, common)
    fsdpckpt.convert(common.parent, tmp_path / "full.pt", only="model")
    fsdpckpt.convert(common.parent, tmp_path / "all.pt", no_weight_decay=["standard"])
    assert fsdpckpt.diff(common.parent, tmp_path / "all.pt", only="model").same


@pytest.mark.filterwarnings("ignore")
def test_ranks_and_one_rank_of_the_same_model_are_equal(tmp_path: Path) -> None:
    parallel = Job(2, 4, 4, gated=True).save(tmp_path / "parallel")
    alone = Job(1, 4, 4, gated=True).save(tmp_path / "alone")
    assert fsdpckpt.diff(parallel, alone, only="model").same


@pytest.mark.filterwarnings("ignore")
def test_an_optimizer_that_nothing_names_leaves_the_weights(tmp_path: Path) -> None:
    """Buffers of the distributed optimizer, and weights that do not round to the model's copies."""
    job = Job(2, 4, 2, gated=True)
    buffers = job.save(tmp_path / "buffers", lambda content: content["optimizer"]["optimizer"].pop("state"))

    def other(content: dict[str, Any]) -> None:
        content["optimizer"]["fp32_from_fp16_params"][0][2] += 1

    for source, message in (
        (buffers, "distributed optimizer"),
        (job.save(tmp_path / "other", other), "tell them apart"),
    ):
        problems = fsdpckpt.verify(source).problems
        assert len(problems) == 1 and message in problems[0].message
        with pytest.raises(FsdpckptError):
            fsdpckpt.convert(source, tmp_path / "full.pt")
        fsdpckpt.convert(source, tmp_path / f"{source.name}.pt", only="model")
        written = torch.load(tmp_path / f"{source.name}.pt")
        assert all(identical(written[name], value.bfloat16()) for name, value in job.whole.items())


class TestRanks(ReaderContract):
    reader = MegatronTorchReader()
    weights = {  # noqa: RUF012  # as in the base class
        "embedding.word_embeddings.weight": np.arange(1 << 20, dtype=np.float32).reshape(1 << 11, 1 << 9),
        "decoder.final_layernorm.weight": np.arange(1 << 9, dtype=np.float32),
        "output_layer.weight": np.arange(1 << 20, dtype=np.float32).reshape(1 << 11, 1 << 9) / 3,
    }

    def save(self, directory: Path) -> Path:
        arguments = {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 1, "padded_vocab_size": 1 << 11}
        for rank in range(2):
            model = {
                name: torch.from_numpy(np.array_split(value, 2)[rank] if value.ndim > 1 else value).clone()
                for name, value in self.weights.items()
            }
            folder = directory / "iter_0000007" / f"mp_rank_{rank:02}"
            folder.mkdir(parents=True)
            content = {"args": argparse.Namespace(**arguments, rank=rank), "iteration": 7, "model": model}
            torch.save(content | {"checkpoint_version": 3.0}, folder / "model_optim_rng.pt")
        return directory / "iter_0000007"


def saved(change: Callable[[dict[str, Any]], object], *changes: Change, ranks: int = 2) -> Make:
    """What tensor-parallel ranks save, their contents and then their files changed."""

    def make(directory: Path) -> None:
        Job(ranks, 2 * ranks, ranks, gated=True).save(directory, change)
        for after in changes:
            after(directory)

    return make


def as_it_is(_content: dict[str, Any]) -> None:
    return None


def args(**settings: Any) -> Callable[[dict[str, Any]], object]:
    """The arguments of the run are others on every rank."""
    return lambda content: vars(content["args"]).update(settings)


def on_last(change: Callable[[dict[str, Any]], object]) -> Callable[[dict[str, Any]], object]:
    return lambda content: change(content) if content["args"].rank == 1 else None


def of_another_job(directory: Path) -> None:
    content = Job(4, 4, 4, gated=True).content(1)
    put(f"{ITERATION}/mp_rank_01/model_optim_rng.pt", content)(directory)


ITERATION, EXPERT = "iter_0000007", "decoder.layers.0.mlp.experts.local_experts.0.linear_fc1.weight"
FC1 = "decoder.layers.0.mlp.linear_fc1.weight"
NOT_OF_FIRST = "is not that of the first rank"
CUTS = (  # arguments that do not say how weights are cut, and what is said of one of them
    ({"num_query_groups": 4}, "args say"),
    ({"num_query_groups": 1}, "not divided among 2 ranks"),
    ({"group_query_attention": None}, "args.group_query_attention is None"),
    ({"kv_channels": 4}, "args say"),
    ({"swiglu": None}, "args.swiglu is None"),
    ({"swiglu": False}, "args say"),
    ({"ffn_hidden_size": 1 << 70}, "args say"),
    ({"padded_vocab_size": WORDS * 2}, "args say"),
)
REFUSALS = (
    *(
        unsupported(str(settings), saved(args(**settings)), "cannot tell how", says, "torch_dist")
        for settings, says in CUTS
    ),
    unsupported(
        "a parameter that Megatron-core does not have",
        saved(lambda content: content["model"].update({EXPERT: torch.ones(2, 2)})),
        f"1 parameter of 2 tensor-parallel ranks is split\n  - {EXPERT}: ",
    ),
    unsupported(
        "a parameter that one rank does not have",
        saved(on_last(lambda content: content["model"].pop(FC1))),
        f"1 parameter of 2 tensor-parallel ranks is split\n  - {FC1}: ",
        f"{ITERATION}/mp_rank_01/model_optim_rng.pt has no such entry",
    ),
    *(
        corrupt(f"directories of a run with {name}", saved(args(**{name: 2})), "files of 2 tensor-parallel ranks",
                "found mp_rank_00, mp_rank_01")
        for name in ("pipeline_model_parallel_size", "expert_model_parallel_size")
    ),
    incomplete("a rank without its file", saved(as_it_is, lose("*/mp_rank_02/*.pt"), ranks=3), "mp_rank_02"),
    incomplete("a rank is missing", saved(as_it_is, lose("*/mp_rank_02"), ranks=3), "1 tensor-parallel rank"),
    corrupt("a rank of another job", saved(as_it_is, of_another_job),
            f"its args.tensor_model_parallel_size {NOT_OF_FIRST}"),
    corrupt("a later iteration", saved(on_last(lambda content: content.update(iteration=8))),
            f"its iteration {NOT_OF_FIRST}"),
    *(
        corrupt(f"another {name}", saved(on_last(args(**{name: value}))), f"its args.{name} {NOT_OF_FIRST}")
        for name, value in (("swiglu", 2), ("num_attention_heads", 8))
    ),
    # Shards of equal shapes: only args.rank shows it, unless one process saved all of them.
    corrupt("ranks in each other's directories", saved(as_it_is, swap(*(f"{ITERATION}/mp_rank_0{rank}" for rank in
            range(2)))), "in each other's directories", "mp_rank_00/model_optim_rng.pt: saved by rank 1"),
)  # fmt: skip


@pytest.mark.filterwarnings("ignore")
@each_of(REFUSALS)
def test_it_is_refused(refusal: Refusal, tmp_path: Path) -> None:
    refusal.require(tmp_path)


def test_ranks_that_one_process_saved_are_in_no_others_directories(tmp_path: Path) -> None:
    saved(args(rank=0))(tmp_path)
    assert not opened(tmp_path).problems
