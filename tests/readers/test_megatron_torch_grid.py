"""Megatron-LM's torch format of pipeline stages, interleaved ones, and experts.

The files are what ``save_checkpoint`` builds (``generate_state_dict`` and ``get_checkpoint_name`` of
``megatron/training/checkpointing.py``, ``ChainedOptimizer.state_dict`` of ``megatron/core/optimizer/optimizer.py``,
``_get_param_groups`` of ``megatron/core/optimizer/__init__.py``, the ranks of ``RankGenerator``), at d98e8a6.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

import fsdpckpt
from fsdpckpt.errors import SourceCorruptError, SourceError, SourceIncompleteError, SourceUnsupportedError
from tests.oracle.compare import identical
from tests.readers.contents import opened

WIDTH, HEADS, HEAD, INNER, EXPERT_INNER, WORDS = 6, 4, 3, 8, 4, 16
WORD_EMBEDDINGS = "embedding.word_embeddings.weight"
Cut = Callable[[torch.Tensor, int, int], torch.Tensor]


def copy(value: torch.Tensor, rank: int, ranks: int) -> torch.Tensor:
    return value


def rows(value: torch.Tensor, rank: int, ranks: int) -> torch.Tensor:
    return value.chunk(ranks)[rank]


def columns(value: torch.Tensor, rank: int, ranks: int) -> torch.Tensor:
    return value.chunk(ranks, dim=1)[rank]


def gate_and_value(value: torch.Tensor, rank: int, ranks: int) -> torch.Tensor:
    return torch.cat([part.chunk(ranks)[rank] for part in value.chunk(2)])


@dataclass
class Run:
    """A job of ``tensor`` x ``stages`` x ``experts`` ranks. ``layers``: of each chunk, in the order of the pipeline."""

    tensor: int = 1
    stages: int = 1
    layers: tuple[int, ...] = (1, 2)
    experts: int = 1
    expert_count: int = 0
    expert_tensor: int = 0
    grouped: bool = False
    tied: bool = False
    whole: dict[str, torch.Tensor] = field(default_factory=dict)
    cuts: dict[str, Cut] = field(default_factory=dict)
    states: dict[str, dict[str, torch.Tensor]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        torch.manual_seed(7)
        self.expert_tensor = self.expert_tensor or self.tensor
        self.chunks = len(self.layers) // self.stages
        self.add(WORD_EMBEDDINGS, (WORDS, WIDTH), rows)
        for number in range(sum(self.layers)):
            layer = f"decoder.layers.{number}."
            self.add(f"{layer}input_layernorm.weight", (WIDTH,), copy)
            self.add(f"{layer}self_attention.linear_proj.weight", (WIDTH, HEADS * HEAD), columns)
            self.add(f"{layer}self_attention.linear_qkv.weight", (3 * HEADS * HEAD, WIDTH), rows)
            if not self.expert_count:
                self.add(f"{layer}mlp.linear_fc1.weight", (2 * INNER, WIDTH), gate_and_value)
                self.add(f"{layer}mlp.linear_fc2.weight", (WIDTH, INNER), columns)
                continue
            self.add(f"{layer}mlp.router.weight", (self.expert_count, WIDTH), copy)
            self.add(f"{layer}mlp.shared_experts.linear_fc1.weight", (2 * INNER, WIDTH), gate_and_value)
            for expert, name in self.expert_names():
                shape, cut = (
                    ((2 * EXPERT_INNER, WIDTH), gate_and_value) if "fc1" in name else ((WIDTH, EXPERT_INNER), columns)
                )
                self.add(f"{layer}mlp.experts.{name.format(expert)}", shape, cut)
        self.add("decoder.final_layernorm.weight", (WIDTH,), copy)
        if not self.tied:
            self.add("output_layer.weight", (WORDS, WIDTH), rows)
        for name, value in self.whole.items():
            self.states[name] = {key: torch.rand(value.shape) for key in ("exp_avg", "exp_avg_sq")}

    def expert_names(self) -> Iterator[tuple[int, str]]:
        """In the order of a state dict: TEGroupedMLP has all first weights before the second ones."""
        names = ["linear_fc1.weight{}", "linear_fc2.weight{}"]
        if self.grouped:
            yield from ((expert, name) for name in names for expert in range(self.expert_count))
            return
        names = ["local_experts.{}.linear_fc1.weight", "local_experts.{}.linear_fc2.weight"]
        yield from ((expert, name) for expert in range(self.expert_count) for name in names)

    def add(self, name: str, shape: tuple[int, ...], cut: Cut) -> None:
        self.whole[name], self.cuts[name] = torch.randn(shape), cut

    def shard(self, name: str, value: torch.Tensor, tensor: int) -> torch.Tensor:
        if ".experts." in name:
            return self.cuts[name](value, tensor % self.expert_tensor, self.expert_tensor).clone()
        return self.cuts[name](value, tensor, self.tensor).clone()

    def local(self, stage: int, expert: int) -> list[dict[str, str]]:
        """What each chunk of a rank calls its parameters, with their names in the whole model."""
        found = []
        local = self.expert_count // self.experts
        for number in range(self.chunks):
            at = number * self.stages + stage
            first, names = sum(self.layers[:at]), {}
            if at == 0:
                names[WORD_EMBEDDINGS] = WORD_EMBEDDINGS
            for layer in range(self.layers[at]):
                for name in (each for each in self.whole if each.startswith(f"decoder.layers.{first + layer}.")):
                    own = name.replace(f"layers.{first + layer}.", f"layers.{layer}.")
                    if ".experts." in name:
                        head, _, tail = own.partition("mlp.experts.")
                        digits = "".join(filter(str.isdigit, tail.replace("fc1", "").replace("fc2", "")))
                        if int(digits) // local != expert:
                            continue
                        before, after = (tail[: -len(digits)], "") if self.grouped else tail.split(digits, 1)
                        own = f"{head}mlp.experts.{before}{int(digits) % local}{after}"
                    names[own] = name
            if at == len(self.layers) - 1:
                names["decoder.final_layernorm.weight"] = "decoder.final_layernorm.weight"
                if not self.tied or self.stages > 1:
                    names["output_layer.weight"] = WORD_EMBEDDINGS if self.tied else "output_layer.weight"
            found.append(names)
        return found

    def arguments(self, rank: int, world: int) -> argparse.Namespace:
        return argparse.Namespace(
            tensor_model_parallel_size=self.tensor, pipeline_model_parallel_size=self.stages, rank=rank,
            world_size=world, virtual_pipeline_model_parallel_size=self.chunks if self.chunks > 1 else None,
            expert_model_parallel_size=self.experts, expert_tensor_parallel_size=self.expert_tensor,
            num_layers=sum(self.layers), num_attention_heads=HEADS, group_query_attention=False, kv_channels=HEAD,
            num_query_groups=1, swiglu=True, ffn_hidden_size=INNER, padded_vocab_size=WORDS,
            moe_ffn_hidden_size=EXPERT_INNER, moe_shared_expert_intermediate_size=INNER,
            num_experts=self.expert_count or None, untie_embeddings_and_output_weights=not self.tied,
        )  # fmt: skip

    def content(self, rank: int, world: int, tensor: int, stage: int, expert: int) -> dict[str, Any]:
        chunks = self.local(stage, expert)
        names = [name for chunk in chunks for name in chunk.values()]
        content: dict[str, Any] = {
            "args": self.arguments(rank, world), "checkpoint_version": 3.0, "iteration": 7,
            "opt_param_scheduler": {"num_steps": 7}, "rng_state": [{"torch_rng_state": torch.full((3,), rank)}],
        }  # fmt: skip
        for number, chunk in enumerate(chunks):
            key = f"model{number}" if self.chunks > 1 else "model"
            content[key] = {own: self.shard(name, self.whole[name], tensor).bfloat16() for own, name in chunk.items()}
            content[key] |= {f"{own.rpartition('.')[0]}._extra_state": None for own in chunk if "linear" in own}
        parallel = [".experts." in name and self.experts > 1 for name in names]
        kinds = [False, True] if any(parallel) else [False]
        saved = [
            self.optimizer([name for name, each in zip(names, parallel, strict=True) if each is kind], tensor)
            for kind in kinds
        ]
        content["optimizer"] = saved if len(saved) > 1 else saved[0]
        return content

    def optimizer(self, names: list[str], tensor: int) -> dict[str, Any]:
        groups = [[name for name in names if (self.whole[name].ndim > 1) is decayed] for decayed in (True, False)]
        ids = iter(range(len(names)))
        param_groups = [
            {"lr": 0.1, "wd_mult": decay, **({"step": 7} if of_group else {}), "params": [next(ids) for _ in of_group]}
            for decay, of_group in zip((1.0, 0.0), groups, strict=True)
        ]
        states = [
            {key: self.shard(name, value, tensor) for key, value in self.states[name].items()}
            for of_group in groups
            for name in of_group
        ]
        masters = [[self.shard(name, self.whole[name], tensor) for name in of_group] for of_group in groups]
        return {
            "optimizer": {"state": dict(enumerate(states)), "param_groups": param_groups},
            "fp32_from_fp16_params": masters,
        }

    def save(self, run: Path, change: Callable[[dict[str, Any]], object] = lambda _: None) -> Path:
        """Every process in turn; of those with one name, which hold the same, the first writes."""
        ranks = max(self.tensor, self.expert_tensor * self.experts)
        world = ranks * self.stages
        for rank in range(world):
            tensor, expert = rank % self.tensor, rank // self.expert_tensor % self.experts
            stage = rank // ranks
            name = f"mp_rank_{tensor:02}" + (f"_{stage:03}" if self.stages > 1 else "")
            folder = run / "iter_0000007" / (name + (f"_{expert:03}" if self.experts > 1 else ""))
            if folder.exists():
                continue
            folder.mkdir(parents=True)
            content = self.content(rank, world, tensor, stage, expert)
            change(content)
            torch.save(content, folder / "model_optim_rng.pt")
        (run / "latest_checkpointed_iteration.txt").write_text("7")
        return run


@dataclass
class Latent(Run):
    """A job whose attention is latent. ``duplicated``: whether each rank has the whole projections to latents."""

    duplicated: bool = True

    def add(self, name: str, shape: tuple[int, ...], cut: Cut) -> None:
        layer = name.removesuffix("self_attention.linear_qkv.weight")
        if layer == name:
            super().add(name, (WIDTH, HEADS * VALUE) if "linear_proj" in name else shape, cut)
            return
        down = copy if self.duplicated else rows
        for own, rows_of_it, how in (
            ("q_down_proj.weight", QUERY_LATENT, down), ("q_up_proj.weight", HEADS * (KEY + ROTARY), rows),
            ("kv_down_proj.weight", LATENT + ROTARY, down), ("kv_up_proj.weight", HEADS * (KEY + VALUE), rows),
        ):  # fmt: skip
            inner = {"q_up_proj.weight": QUERY_LATENT, "kv_up_proj.weight": LATENT}.get(own, WIDTH)
            super().add(f"{layer}self_attention.linear_{own}", (rows_of_it, inner), how)
        for own, width in (("q_up_proj.layer_norm_weight", QUERY_LATENT), ("kv_up_proj.layer_norm_weight", LATENT)):
            super().add(f"{layer}self_attention.linear_{own}", (width,), copy)

    def arguments(self, rank: int, world: int) -> argparse.Namespace:
        latent = {"q_lora_rank": QUERY_LATENT, "kv_lora_rank": LATENT, "qk_head_dim": KEY, "v_head_dim": VALUE}
        usual = vars(super().arguments(rank, world))
        return argparse.Namespace(**{**usual, **latent, "qk_pos_emb_head_dim": ROTARY, "multi_latent_attention": True})


QUERY_LATENT, LATENT, KEY, ROTARY, VALUE = 10, 4, 3, 2, 5


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("duplicated", [True, False])
def test_latent_attention_is_cut_as_the_recorded_sizes_say(duplicated: bool, tmp_path: Path) -> None:
    run = Latent(tensor=2, stages=2, duplicated=duplicated)
    source = run.save(tmp_path / "run")
    assert not fsdpckpt.verify(source).problems
    fsdpckpt.convert(source, tmp_path / "full.pt", verify="full")
    state = torch.load(tmp_path / "full.pt", weights_only=False)
    for key, value in run.whole.items():
        assert identical(state["model"][key], value), key
        for moment, expected in run.states[key].items():
            assert identical(state["optimizer"]["state"][key][moment], expected), (key, moment)

    def other_sizes(content: dict[str, Any]) -> None:
        content["args"].v_head_dim += 1

    with pytest.raises(
        SourceUnsupportedError, match=r"linear_kv_up_proj\.weight: 2 shards of \d+ make 32, and args say"
    ):
        opened(run.save(tmp_path / "changed", other_sizes))


RUNS: dict[str, dict[str, Any]] = {
    "stages": {"stages": 2},
    "uneven stages with tensor parallelism": {"tensor": 2, "stages": 3, "layers": (1, 2, 0)},
    "tied words": {"tensor": 2, "stages": 2, "tied": True},
    "interleaved": {"stages": 2, "layers": (1, 2, 1, 1)},
    "experts": {"experts": 2, "expert_count": 4, "layers": (2,)},
    "grouped experts": {"tensor": 2, "experts": 2, "expert_count": 4, "grouped": True, "layers": (1,)},
    "experts that are not cut": {"tensor": 2, "experts": 2, "expert_count": 12, "expert_tensor": 1, "grouped": True,
                                 "layers": (1,)},
    "all": {"tensor": 2, "stages": 2, "experts": 2, "expert_count": 4, "layers": (1, 1, 0, 1)},
}  # fmt: skip


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", RUNS)
def test_all_parts_become_one_model(name: str, tmp_path: Path) -> None:
    run = Run(**RUNS[name])
    source = run.save(tmp_path / "run")
    checkpoint = opened(source)
    assert checkpoint.flavor == "megatron-torch" and checkpoint.problems == ()
    assert all(file.fate == "read" or "latest" in file.path for file in checkpoint.ledger.account.files)
    assert not fsdpckpt.verify(source).problems
    fsdpckpt.convert(source, tmp_path / "full.pt", verify="full")
    state = torch.load(tmp_path / "full.pt", weights_only=False)
    assert [key for key in state["model"] if not key.endswith("_extra_state")] == list(run.whole)
    for key, value in run.whole.items():
        assert identical(state["model"][key], value), key
        assert state["optimizer"]["state"][key].keys() == {*run.states[key], "step"}
        assert state["optimizer"]["state"][key]["step"] == 7
        assert all(identical(state["optimizer"]["state"][key][each], run.states[key][each]) for each in run.states[key])
    groups = state["optimizer"]["param_groups"]
    assert not any("step" in group for group in groups)
    for decayed in (True, False):
        members = [key for group in groups if bool(group["wd_mult"]) is decayed for key in group["params"]]
        expected = [key for key in run.whole if (run.whole[key].ndim > 1) is decayed]
        assert sorted(members) == sorted(expected)
        assert [key for key in members if ".experts." not in key] == [key for key in expected if ".experts." not in key]
        assert [key for key in members if ".experts." in key] == [key for key in expected if ".experts." in key]


@pytest.mark.filterwarnings("ignore")
def test_it_becomes_a_dcp_directory_of_other_ranks_and_rank_files(tmp_path: Path) -> None:
    source = Run(**RUNS["all"]).save(tmp_path / "run")
    fsdpckpt.convert(source, tmp_path / "dcp", to="sharded", container="dcp", world_size=3)
    fsdpckpt.convert(source, tmp_path / "ranks", to="sharded", container="torch", world_size=2)
    assert fsdpckpt.diff(source, tmp_path / "dcp").same and fsdpckpt.diff(source, tmp_path / "ranks").same


@pytest.mark.filterwarnings("ignore")
def test_one_model_saved_by_grids_of_several_shapes_is_the_same(tmp_path: Path) -> None:
    settings: list[dict[str, Any]] = [
        {"experts": 2}, {"stages": 2, "layers": (1, 1)}, {"tensor": 2, "stages": 2, "layers": (2, 0)},
    ]  # fmt: skip
    runs = [
        Run(**{"expert_count": 4, "layers": (2,), **each}).save(tmp_path / str(number))
        for number, each in enumerate(settings)
    ]
    assert all(fsdpckpt.diff(runs[0], other, only="model").same for other in runs[1:])


@pytest.mark.parametrize("name", ["stages", "experts", "all"])
def test_a_rank_that_is_missing_is_named(name: str, tmp_path: Path) -> None:
    iteration = Run(**RUNS[name]).save(tmp_path / "run") / "iter_0000007"
    last = sorted(iteration.iterdir())[-1]
    (last / "model_optim_rng.pt").unlink()
    if name != "all":
        last.rmdir()
    if name != "all":  # one file is left
        with pytest.raises(SourceUnsupportedError, match="is one part of a model"):
            opened(iteration)
        return
    with pytest.raises(SourceIncompleteError, match="the files of 1 rank are missing") as error:
        opened(iteration)
    assert error.value.details == (str(last),) or list(error.value.details) == [str(last)]


@pytest.mark.parametrize(
    ("name", "first", "second"),
    [("interleaved", "mp_rank_00_000", "mp_rank_00_001"), ("experts", "mp_rank_00_000", "mp_rank_00_001"),
     ("all", "mp_rank_01_000_001", "mp_rank_01_001_001"), ("all", "mp_rank_00_000_000", "mp_rank_00_000_001")],
)  # fmt: skip
def test_ranks_in_each_others_directories_are_refused(name: str, first: str, second: str, tmp_path: Path) -> None:
    iteration = Run(**RUNS[name]).save(tmp_path / "run") / "iter_0000007"
    for old, new in ((first, "x"), (second, first), ("x", second)):
        (iteration / old).rename(iteration / new)
    with pytest.raises(SourceCorruptError, match="in each other's directories") as error:
        opened(iteration)
    assert "rename every directory to the rank that saved its file" in str(error.value.next_step)


def test_a_rank_that_was_copied_over_another_is_refused(tmp_path: Path) -> None:
    iteration = Run(**RUNS["all"]).save(tmp_path / "run") / "iter_0000007"
    data = (iteration / "mp_rank_00_000_001" / "model_optim_rng.pt").read_bytes()
    (iteration / "mp_rank_01_000_001" / "model_optim_rng.pt").write_bytes(data)
    with pytest.raises(SourceCorruptError, match="in each other's directories") as error:
        opened(iteration)
    assert error.value.details[0].endswith("mp_rank_01_000_001/model_optim_rng.pt: saved by rank 2")
    assert str(error.value.next_step) == "copy these directories again"


@pytest.mark.parametrize(
    ("name", "argument", "value", "message"),
    [
        ("stages", "num_layers", 4, "the pipeline stages have 3 layers, and args.num_layers is 4"),
        ("experts", "num_experts", 6, "on each of 2 ranks, and args.num_experts is 6"),
        ("tied words", "untie_embeddings_and_output_weights", None, "args.untie_embeddings_and_output_weights is None"),
        ("experts", "expert_tensor_parallel_size", 2, "several ranks then save to one file"),
        ("all", "moe_ffn_hidden_size", 5, "args say"),
        ("all", "moe_mlp_glu_interleave_size", 2, "gate and value are interleaved"),
        ("experts", "expert_model_parallel_size", 1 << 40, "args name 1 x 1 x"),
    ],
)
def test_arguments_that_do_not_fit_the_files_are_refused(
    name: str, argument: str, value: Any, message: str, tmp_path: Path
) -> None:
    source = Run(**RUNS[name]).save(tmp_path / "run", lambda content: setattr(content["args"], argument, value))
    with pytest.raises(SourceUnsupportedError) as error:
        opened(source)
    assert any(message in detail for detail in error.value.details), error.value.details
    assert "torch_dist" in str(error.value.next_step)


def test_a_chunk_that_is_missing_is_refused(tmp_path: Path) -> None:
    source = Run(**RUNS["interleaved"]).save(tmp_path / "run", lambda content: content.pop("model1"))
    with pytest.raises(SourceCorruptError, match="does not have all chunks of its pipeline stage"):
        opened(source)


def test_a_parameter_that_several_stages_have_is_refused(tmp_path: Path) -> None:
    """Only tied words are in two."""

    def change(content: dict[str, Any]) -> None:
        content["model"]["decoder.final_layernorm.weight"] = torch.ones(8)

    with pytest.raises(SourceError, match=r"decoder\.final_layernorm\.weight: several pipeline stages have it"):
        opened(Run(**RUNS["stages"]).save(tmp_path / "run", change))


@pytest.mark.filterwarnings("ignore")
def test_tied_words_that_differ_between_stages_are_found(tmp_path: Path) -> None:
    def change(content: dict[str, Any]) -> None:
        if "output_layer.weight" in content["model"]:
            content["optimizer"]["optimizer"]["state"][len(content["optimizer"]["fp32_from_fp16_params"][0]) - 1][
                "exp_avg"
            ] += 1

    problems = fsdpckpt.verify(Run(**RUNS["tied words"]).save(tmp_path / "run", change)).problems
    assert any(WORD_EMBEDDINGS in str(problem.key) for problem in problems), problems


def test_states_that_no_group_lists_are_not_left_out(tmp_path: Path) -> None:
    def change(content: dict[str, Any]) -> None:
        content["optimizer"]["optimizer"]["state"][99] = {"exp_avg": torch.ones(2)}

    with pytest.raises(SourceCorruptError, match="states of parameters that no param group lists"):
        opened(Run(**RUNS["stages"]).save(tmp_path / "run", change))


@pytest.mark.parametrize("chosen", [{"include": ["*layers.0.*"]}, {"exclude": ["*word_embeddings*", "output_layer*"]}])
def test_some_parameters_of_a_parallel_model_are_no_part_of_one_rank(chosen: dict[str, Any], tmp_path: Path) -> None:
    """The arguments still said that a rank has half: reading the target back failed, with exit code 70."""
    run = Run(tensor=2, stages=2)
    target = tmp_path / "some.pt"
    done = fsdpckpt.convert(run.save(tmp_path / "run"), target, verify="full", **chosen)
    assert any("tensor_model_parallel_size=2" in note.message for note in done.notes)
    found = opened(target)
    assert found.model is not None and WORD_EMBEDDINGS not in found.model.params
    arguments: Any = found.extra["args"]
    sizes = [arguments.state[f"{kind}_model_parallel_size"] for kind in ("tensor", "pipeline")]
    assert sizes == [1, 1] and arguments.state["num_layers"] == sum(run.layers)


@pytest.mark.filterwarnings("ignore")
def test_an_optimizer_without_float32_weights_is_refused_for_what_it_lacks(tmp_path: Path) -> None:
    """``FP32Optimizer`` saves torch's own state dict: numbers, and nothing that says whose they are."""

    def without(content: dict[str, Any]) -> None:
        content["optimizer"] = content["optimizer"]["optimizer"]

    source = Run(tensor=2, layers=(2,)).save(tmp_path / "run", without)
    (problem,) = fsdpckpt.verify(source).problems
    assert "has no float32 weights (fp32_from_fp16_params), as of a model in float32" in problem.message
    fsdpckpt.convert(source, tmp_path / "model.pt", only="model")
