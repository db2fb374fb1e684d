"""Megatron-LM's torch format: the files of all ranks become one model with its optimizer, or are refused."""

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
from fsdpckpt.errors import FsdpckptError
from fsdpckpt.readers.megatron_torch.reader import MegatronTorchReader
from fsdpckpt.testing import ReaderContract
from tests.makers import GOLDEN, Change, Make, add_copy, lose, put, swap
from tests.oracle.compare import optimizer_by_id, require_identical, require_parts
from tests.readers import megatron_jobs
from tests.readers.contents import opened
from tests.readers.megatron_jobs import RUNS, WORD_EMBEDDINGS, WORDS, Distributed, Latent, Run
from tests.refusals import Refusal, corrupt, each_of, incomplete, unsupported

pytestmark = pytest.mark.filterwarnings("ignore")

Content = dict[str, Any]
Edit = Callable[[Content], object]
ITERATION, FILE = "iter_0000007", "model_optim_rng.pt"
FUSED: dict[str, Any] = {"tensor": 2, "layers": (2,), "groups": 2, "fused": True}


def converted(source: Path, run: Run, target: Path, **options: Any) -> Any:
    """The full file of a checkpoint in which nothing is wrong: every weight and state of ``run``."""
    found = opened(source)
    assert (found.flavor, found.problems) == ("megatron-torch", ())
    assert all(file.fate == "read" or "latest" in file.path for file in found.ledger.account.files)
    assert not fsdpckpt.verify(source).problems
    fsdpckpt.convert(source, target, to="full", key_type="name", verify="full", **options)
    state = torch.load(target, weights_only=False)
    assert [key for key in state["model"] if not key.endswith("_extra_state")] == list(run.whole)
    require_parts(state["model"], run.whole)
    steps = {key: {**states, "step": torch.tensor(7.0)} for key, states in run.states.items()}
    require_identical(state["optimizer"]["state"], steps)
    assert state["iteration"] == 7
    return state


@pytest.mark.parametrize("name", RUNS)
def test_all_parts_become_one_model(name: str, tmp_path: Path) -> None:
    run = Run(**RUNS[name])
    source = run.save(tmp_path / "run")
    ranks = len(list((source / ITERATION).iterdir()))
    assert opened(source).world_size == ranks
    groups = converted(source, run, tmp_path / "full.pt")["optimizer"]["param_groups"]
    assert not any("step" in group for group in groups)
    for decayed in (True, False):
        members = [key for group in groups if bool(group["wd_mult"]) is decayed for key in group["params"]]
        expected = [key for key in run.whole if (run.whole[key].ndim > 1) is decayed]
        assert sorted(members) == sorted(expected)
        assert [key for key in members if ".experts." not in key] == [key for key in expected if ".experts." not in key]
        assert [key for key in members if ".experts." in key] == [key for key in expected if ".experts." in key]


@pytest.mark.parametrize("duplicated", [True, False])
def test_latent_attention_is_cut_as_the_recorded_sizes_say(duplicated: bool, tmp_path: Path) -> None:
    run = Latent(tensor=2, stages=2, duplicated=duplicated)
    converted(run.save(tmp_path / "run"), run, tmp_path / "full.pt")


def test_one_model_is_the_same_in_every_layout_and_on_ranks_of_every_grid(tmp_path: Path) -> None:
    source = Run(**RUNS["all"]).save(tmp_path / "run")
    fsdpckpt.convert(source / ITERATION, tmp_path / "dcp", to="sharded", container="dcp", world_size=3)
    fsdpckpt.convert(source, tmp_path / "ranks", to="sharded", container="torch", world_size=2)
    for other in ("dcp", "ranks", f"run/{ITERATION}"):
        assert fsdpckpt.diff(source, tmp_path / other).same
    settings: list[list[dict[str, Any]]] = [
        [{"experts": 2, "layers": (2,)}, {"stages": 2, "layers": (1, 1)},
         {"tensor": 2, "stages": 2, "layers": (2, 0)}],
        [{"tensor": 2, "layers": (2,)}, {"layers": (2,)}],
    ]  # fmt: skip
    for number, (first, *rest) in enumerate(settings):
        experts = {} if number else {"expert_count": 4}
        one = Run(**experts, **first).save(tmp_path / f"{number}")
        for at, each in enumerate(rest):
            other = Run(**experts, **each).save(tmp_path / f"{number}-{at}")
            assert fsdpckpt.diff(one, other, only="model").same


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_part_under_another_name_is_still_a_part(ranks: int, tmp_path: Path) -> None:
    """Part and whole have the arguments of the run: the shapes tell them apart."""
    part = Run(**{**FUSED, "tensor": ranks, "groups": 4}).save(tmp_path / "run") / ITERATION / "mp_rank_01" / FILE
    for path in (part, tmp_path / "weights.pt"):
        if path != part:
            part.rename(path)
        with pytest.raises(fsdpckpt.SourceUnsupportedError, match="is one part of a model") as error:
            opened(path)
        assert "files of all ranks" in str(error.value.next_step)


def test_what_torch_dist_joined_is_no_part_in_one_file(tmp_path: Path) -> None:
    """Its arguments say how parallel the job was, and so did the file that was made of it."""
    with tarfile.open(GOLDEN / "megatron" / "reshardable.tar.xz") as archive:
        archive.extractall(tmp_path, filter="data")
    common = next(tmp_path.rglob("common.pt"))
    content = torch.load(common, weights_only=False)
    for name, value in (("tensor", 2), ("pipeline", 2)):
        setattr(content["args"], f"{name}_model_parallel_size", value)
    content["args"].padded_vocab_size = 16
    torch.save(content, common)
    content["args"].padded_vocab_size = opened(common.parent).model.params[WORD_EMBEDDINGS].shape[0]  # type: ignore[union-attr]
    torch.save(content, common)
    fsdpckpt.convert(common.parent, tmp_path / "full.pt", only="model")
    fsdpckpt.convert(common.parent, tmp_path / "all.pt", no_weight_decay=["standard"])
    assert fsdpckpt.diff(common.parent, tmp_path / "all.pt", only="model").same


def without_states(content: Content) -> None:
    content["optimizer"]["optimizer"].pop("state")


def with_another_master(content: Content) -> None:
    content["optimizer"]["fp32_from_fp16_params"][0][2] += 1


def in_float32(content: Content) -> None:
    """``FP32Optimizer`` saves torch's own state dict: numbers, and nothing that says whose they are."""
    content["optimizer"] = content["optimizer"]["optimizer"]


UNNAMED: list[tuple[Edit, str]] = [
    (without_states, "distributed optimizer"),
    (with_another_master, "tell them apart"),
    (in_float32, "has no float32 weights (fp32_from_fp16_params), as of a model in float32"),
]


@pytest.mark.parametrize(("change", "message"), UNNAMED)
def test_an_optimizer_that_nothing_names_leaves_the_weights(change: Edit, message: str, tmp_path: Path) -> None:
    run = Run(**FUSED)
    source = run.save(tmp_path / "run", change)
    (problem,) = fsdpckpt.verify(source).problems
    assert message in problem.message
    with pytest.raises(fsdpckpt.SourceError, match=r"contents are not known|does not say which parameter"):
        fsdpckpt.convert(source, tmp_path / "full.pt")
    fsdpckpt.convert(source, tmp_path / "model.pt", only="model")
    require_parts(torch.load(tmp_path / "model.pt"), {name: value.bfloat16() for name, value in run.whole.items()})


def test_ranks_that_one_process_saved_are_in_no_others_directories(tmp_path: Path) -> None:
    assert not opened(Run(**FUSED).save(tmp_path, args(rank=0))).problems


def test_tied_words_that_differ_between_stages_are_found(tmp_path: Path) -> None:
    def change(content: Content) -> None:
        if "output_layer.weight" in content["model"]:
            last = len(content["optimizer"]["fp32_from_fp16_params"][0]) - 1
            content["optimizer"]["optimizer"]["state"][last]["exp_avg"] += 1

    problems = fsdpckpt.verify(Run(**RUNS["tied words"]).save(tmp_path / "run", change)).problems
    assert any(WORD_EMBEDDINGS in str(problem.key) for problem in problems), problems


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


@pytest.mark.parametrize("kind", [Run, Distributed])
def test_a_copy_that_is_not_its_master_anywhere_is_found(
    kind: type[Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reading compares samples of large weights; ``verify`` all of them."""
    monkeypatch.setattr(megatron_jobs, "WORDS", 40_000)
    source = kind(tensor=2, layers=(1,)).save(tmp_path / "run")
    assert not fsdpckpt.verify(source).problems
    path = source / ITERATION / "mp_rank_01" / FILE
    content = torch.load(path, weights_only=False)
    content["model"][WORD_EMBEDDINGS].view(-1)[30_000] += 1
    torch.save(content, path)
    (problem,) = fsdpckpt.verify(source).problems
    assert (problem.kind, problem.key) == ("master", WORD_EMBEDDINGS)
    assert "first at [25000, 0]" in problem.message


# The distributed optimizer


@pytest.mark.parametrize(("name", "bucket"), [
    ("stages", None), ("stages", 100), ("tied words", None), ("interleaved", 50), ("experts", 80), ("all", None),
    ("uneven stages with tensor parallelism", 1), ("one rank", 70),
])  # fmt: skip
def test_weights_and_states_are_found_in_the_buffers(name: str, bucket: int | None, tmp_path: Path) -> None:
    run = Distributed(**RUNS[name])
    run.bucket = bucket
    state = converted(run.save(tmp_path / "run"), run, tmp_path / "full.pt", no_weight_decay=["standard"])
    decayed = {key for group in state["optimizer"]["param_groups"] if group["wd_mult"] for key in group["params"]}
    assert decayed == {key for key, value in run.whole.items() if value.ndim > 1}


@pytest.mark.parametrize("name", ["stages", "one rank"])
def test_buffers_that_do_not_fit_the_model_leave_the_weights(name: str, tmp_path: Path) -> None:
    run = Distributed(**RUNS[name])
    source = run.save(tmp_path / "run")
    path = sorted((source / ITERATION).iterdir())[-1] / "distrib_optim.pt"
    good = torch.load(path, weights_only=False)
    ((dtypes, flat),) = good[0].items()
    wrong: list[Any] = [
        {**good, 0: {dtypes: {**flat, "param": flat["param"].roll(1)}}}, {**good, "buckets_coalesced": False},
        [good, good], [good, good, good], {**good, 0: [good[0]]}, {**good, 0: {}}, {**good, 0: good[0] | {"x": 1}},
    ]  # fmt: skip
    for content in (*wrong, None):
        if content is None and name == "one rank":
            continue
        torch.save(content, path) if content is not None else path.unlink()
        (problem,) = fsdpckpt.verify(source).problems
        said = "cannot tell where each parameter is in Megatron's buffers"
        assert (said if content is not None else "has the states of decoder.layers.1.") in problem.message
        with pytest.raises(FsdpckptError) as refused:
            fsdpckpt.convert(source, tmp_path / "full.pt")
        assert content is None or "contents are not known" in str(refused.value)
    fsdpckpt.convert(source, tmp_path / "model.pt", only="model")
    require_parts(torch.load(tmp_path / "model.pt"), {key: value.bfloat16() for key, value in run.whole.items()})


def test_equal_values_that_fit_in_two_places_are_refused(tmp_path: Path) -> None:
    """Of the ones of two norms nothing says where the first ends."""
    run = Distributed(stages=2)
    for value in run.whole.values():
        value.fill_(1.0) if value.ndim == 1 else None
    assert not fsdpckpt.verify(run.save(tmp_path / "ones")).problems  # other weights are between them
    run.whole = {name: torch.zeros_like(value) for name, value in run.whole.items()}
    problems = fsdpckpt.verify(run.save(tmp_path / "zeros")).problems
    assert any("cannot tell where each parameter is" in problem.message for problem in problems), problems


# The step that the fused Adam counts in its param groups is that of each parameter, as torch needs it

ADAM = {"lr": 0.1, "betas": (0.9, 0.95), "eps": 1e-8}
"""What the groups of the fused Adam have for torch's: the same names."""


def groups(change: Callable[[list[Any]], object]) -> Edit:
    """Every rank's groups are others."""
    return lambda content: change(content["optimizer"]["optimizer"]["param_groups"])


def with_settings(of_rank: list[Any]) -> None:
    for group in of_rank:
        group.update(ADAM, weight_decay=0.1 * group.get("wd_mult", 1.0))


@pytest.mark.parametrize("run", [Run(layers=(3,)), Run(stages=2), Distributed(stages=2)])
def test_torchs_adamw_goes_on_with_the_step_of_the_groups(run: Run, tmp_path: Path) -> None:
    source = run.save(tmp_path / "run", groups(with_settings))
    rule = {"no_weight_decay": ["standard"]} if isinstance(run, Distributed) else {}
    optimizer_dict = converted(source, run, tmp_path / "full.pt", **rule)["optimizer"]
    states = optimizer_dict["state"]
    # torch's optimizer takes the shapes from the states: the parameters may have any values.
    params = {name: torch.nn.Parameter(torch.zeros_like(entry["exp_avg"])) for name, entry in states.items()}
    named = [{"params": [(name, params[name]) for name in group["params"]]} for group in optimizer_dict["param_groups"]]
    optimizer = torch.optim.AdamW(named)
    optimizer.load_state_dict(optimizer_by_id(optimizer_dict))
    for param in params.values():
        param.grad = torch.rand_like(param)
    optimizer.step()
    for param in params.values():  # the correction of the moments, which has the step in it
        assert float(optimizer.state[param]["step"]) == 8
        mean, square = (optimizer.state[param][moment] for moment in ("exp_avg", "exp_avg_sq"))
        change = mean / (1 - 0.9**8) / ((square / (1 - 0.95**8)).sqrt() + 1e-8)
        torch.testing.assert_close(param.detach(), -0.1 * change)
    if not rule:
        fsdpckpt.convert(source, tmp_path / "dcp", to="sharded", container="dcp", world_size=3, key_type="name")
        assert fsdpckpt.diff(source, tmp_path / "dcp").same and not fsdpckpt.verify(tmp_path / "dcp").problems


@pytest.mark.parametrize(("change", "steps"), [
    (lambda of_rank: of_rank[1].update(step=499), [{7}, {499}]), (lambda of_rank: of_rank[1].pop("step"), [{7}, {7}]),
])  # fmt: skip
def test_groups_keep_their_steps_where_they_list_parameters(change: Any, steps: list[set[int]], tmp_path: Path) -> None:
    """A group without a step has that of the others."""
    source = Run(layers=(3,)).save(tmp_path / "listed", groups(change))
    fsdpckpt.convert(source, tmp_path / "listed.pt", to="full", key_type="name")
    optimizer = torch.load(tmp_path / "listed.pt", weights_only=False)["optimizer"]
    found = [{float(optimizer["state"][key]["step"]) for key in group["params"]} for group in optimizer["param_groups"]]
    assert found == steps


def test_buffers_whose_groups_count_different_steps_are_refused(tmp_path: Path) -> None:
    change = groups(lambda of_rank: of_rank[1].update(step=499))
    source = Distributed(stages=2).save(tmp_path / "buffers", change)
    (problem,) = fsdpckpt.verify(source).problems
    assert "the param groups count the steps 7, 499" in problem.message
    with pytest.raises(fsdpckpt.SourceCorruptError, match="the param groups count the steps 7, 499"):
        fsdpckpt.convert(source, tmp_path / "full.pt")


def test_other_optimizers_keep_their_groups_as_they_are(tmp_path: Path) -> None:
    """apex reads its step from the groups again."""
    state = {"state": {0: {"exp_avg": torch.rand(3)}}, "param_groups": [{"lr": 0.1, "step": 7, "params": [0]}]}
    torch.save({"model": {"w": torch.rand(3)}, "optimizer": state}, tmp_path / "full.pt")
    optim = opened(tmp_path / "full.pt").optim
    assert optim is not None and optim.state[0].keys() == {"exp_avg"}
    assert optim.param_groups is not None and optim.param_groups[0]["step"] == 7


# Refusals


def run_of(name: str, *changes: Change, edit: Edit = lambda _: None) -> Make:
    """What the ranks of a job save, their contents and then their files changed."""
    return saved(Run(**RUNS[name]), *changes, edit=edit)


def saved(run: Run, *changes: Change, edit: Edit = lambda _: None) -> Make:
    def make(directory: Path) -> None:
        run.save(directory, edit)
        for change in changes:
            change(directory)

    return make


def fused(*changes: Change, edit: Edit = lambda _: None, ranks: int = 2) -> Make:
    """The same of tensor-parallel ranks alone."""
    return saved(Run(**{**FUSED, "tensor": ranks, "heads": 2 * ranks, "groups": ranks}), *changes, edit=edit)


def args(**settings: Any) -> Edit:
    """The arguments of the run are others on every rank."""
    return lambda content: vars(content["args"]).update(settings)


def on_last(change: Edit) -> Edit:
    return lambda content: change(content) if content["args"].rank == 1 else None


def of_another_job(directory: Path) -> None:
    put(f"{ITERATION}/mp_rank_01/{FILE}", Run(tensor=4, layers=(2,), fused=True).content(1, 4, 1, 0, 0))(directory)


def add_to(key: str, **entries: Any) -> Edit:
    return lambda content: content[key].update(entries)


def one_of_two(size: str) -> Edit:
    """The arguments say that it is a part, and not how many words there are: no shape tells it from the whole."""
    return lambda content: (vars(content["args"]).update({size: 2}), vars(content["args"]).pop("padded_vocab_size"))


def larger_values(content: Content) -> None:
    content["args"].v_head_dim += 1


EXPERT = "decoder.layers.0.mlp.experts.local_experts.0.linear_fc1.weight"
FC1 = "decoder.layers.0.mlp.linear_fc1.weight"
NORM = "decoder.final_layernorm.weight"
NOT_OF_FIRST, ELSEWHERE = "is not that of the first rank", "in each other's directories"
ONE_SPLIT = "1 parameter of 2 tensor-parallel ranks is split\n  - "
CUTS: list[tuple[dict[str, Any], str]] = [  # arguments that do not say how weights are cut, and what is said of one
    ({"num_query_groups": 4}, "args say"),
    ({"num_query_groups": 1}, "not divided among 2 ranks"),
    ({"group_query_attention": None}, "args.group_query_attention is None"),
    ({"kv_channels": 4}, "args say"),
    ({"swiglu": None}, "args.swiglu is None"),
    ({"swiglu": False}, "args say"),
    ({"ffn_hidden_size": 1 << 70}, "args say"),
    ({"padded_vocab_size": WORDS * 2}, "args say"),
]
ARGUMENTS: list[tuple[str, str, Any, str]] = [  # of a grid of ranks, which do not fit the files
    ("stages", "num_layers", 4, "the pipeline stages have 3 layers, and args.num_layers is 4"),
    ("experts", "num_experts", 6, "on each of 2 ranks, and args.num_experts is 6"),
    ("tied words", "untie_embeddings_and_output_weights", None, "args.untie_embeddings_and_output_weights is None"),
    ("experts", "expert_tensor_parallel_size", 2, "several ranks then save to one file"),
    ("all", "moe_ffn_hidden_size", 5, "args say"),
    ("all", "moe_mlp_glu_interleave_size", 2, "gate and value are interleaved"),
    ("experts", "expert_model_parallel_size", 1 << 40, "args name 1 x 1 x"),
]
SWAPPED = [  # shards of equal shapes: only args.rank shows it, unless one process saved all of them
    ("two fused", "mp_rank_00", "mp_rank_01"), ("interleaved", "mp_rank_00_000", "mp_rank_00_001"),
    ("experts", "mp_rank_00_000", "mp_rank_00_001"), ("all", "mp_rank_01_000_001", "mp_rank_01_001_001"),
    ("all", "mp_rank_00_000_000", "mp_rank_00_000_001"),
]  # fmt: skip
REFUSALS = (
    *(
        unsupported(str(settings), fused(edit=args(**settings)), "cannot tell how", says, "torch_dist")
        for settings, says in CUTS
    ),
    *(
        unsupported(f"{name} and {argument}", run_of(name, edit=args(**{argument: value})), message, "torch_dist")
        for name, argument, value, message in ARGUMENTS
    ),
    unsupported("other sizes of latent attention", saved(Latent(tensor=2, stages=2), edit=larger_values),
                "linear_kv_up_proj.weight: 2 shards of ", " make 32, and args say"),
    unsupported("a parameter that Megatron-core does not have", fused(edit=add_to("model", **{EXPERT:
                torch.ones(2, 2)})), f"{ONE_SPLIT}{EXPERT}: "),
    unsupported("a parameter that one rank does not have", fused(edit=on_last(lambda content: content["model"].pop(
                FC1))), f"{ONE_SPLIT}{FC1}: ", f"{ITERATION}/mp_rank_01/{FILE} has no such entry"),
    unsupported("a layer that one rank does not have", fused(edit=on_last(add_to("model", **{FC1.replace("0", "2"):
                torch.ones(2, 2)}))), "ranks of pipeline stage 0 have 2 layers, others 3"),
    unsupported("a parameter that several stages have", run_of("stages", edit=add_to("model", **{NORM: torch.ones(8)})),
                f"{NORM}: several pipeline stages have it"),  # only tied words are in two
    corrupt("a chunk is missing", run_of("interleaved", edit=lambda content: content.pop("model1")),
            "does not have all chunks of its pipeline stage"),
    corrupt("states that no group lists", run_of("stages", edit=lambda content: content["optimizer"]["optimizer"][
            "state"].update({99: {"exp_avg": torch.ones(2)}})), "states of parameters that no param group lists"),
    *(
        corrupt(f"directories of a run with {name}", fused(edit=args(**{name: 2})), "files of 2 tensor-parallel ranks",
                "found mp_rank_00, mp_rank_01")
        for name in ("pipeline_model_parallel_size", "expert_model_parallel_size")
    ),
    *(
        unsupported(f"one of two {name} alone", run_of(name, lose(f"{ITERATION}/*_001")), "is one part of a model")
        for name in ("stages", "experts")
    ),
    *(
        unsupported(f"one file and {size} of 2", fused(edit=one_of_two(size), ranks=1), "is one part of a model")
        for size in ("tensor_model_parallel_size", "pipeline_model_parallel_size")
    ),
    incomplete("a rank of a grid without its file", run_of("all", lose(f"*/mp_rank_01_001_001/{FILE}")),
               f"the files of 1 rank are missing\n  - DIR/{ITERATION}/mp_rank_01_001_001\n"),
    incomplete("a rank without its file", fused(lose("*/mp_rank_02/*.pt"), ranks=3), "mp_rank_02"),
    incomplete("a rank is missing", fused(lose("*/mp_rank_02"), ranks=3), "1 tensor-parallel rank"),
    corrupt("a rank of another job", fused(of_another_job), f"its args.tensor_model_parallel_size {NOT_OF_FIRST}"),
    corrupt("a later iteration", fused(edit=on_last(lambda content: content.update(iteration=8))),
            f"its iteration {NOT_OF_FIRST}"),
    *(
        corrupt(f"another {name}", fused(edit=on_last(args(**{name: value}))), f"its args.{name} {NOT_OF_FIRST}")
        for name, value in (("swiglu", 2), ("num_attention_heads", 8))
    ),
    *(
        corrupt(f"{name}: {first} and {second}", run_of(name, swap(f"{ITERATION}/{first}", f"{ITERATION}/{second}")),
                ELSEWHERE, f"{first}/{FILE}: saved by rank ", "rename every directory to the rank that saved its file")
        for name, first, second in SWAPPED
    ),
    corrupt("a rank that was copied over another", run_of("all", add_copy(f"{ITERATION}/mp_rank_00_000_001/{FILE}",
            f"{ITERATION}/mp_rank_01_000_001/{FILE}")), ELSEWHERE, f"mp_rank_01_000_001/{FILE}: saved by rank 2",
            "next: copy these directories again"),
)  # fmt: skip


@each_of(REFUSALS)
def test_it_is_refused(refusal: Refusal, tmp_path: Path) -> None:
    refusal.require(tmp_path)


class TestRanks(ReaderContract):
    reader = MegatronTorchReader()
    weights = {  # noqa: RUF012  # as in the base class
        WORD_EMBEDDINGS: np.arange(1 << 20, dtype=np.float32).reshape(1 << 11, 1 << 9),
        NORM: np.arange(1 << 9, dtype=np.float32),
        "output_layer.weight": np.arange(1 << 15, dtype=np.float32).reshape(1 << 11, 1 << 4) / 3,
    }

    def save(self, directory: Path) -> Path:
        arguments = {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 1, "padded_vocab_size": 1 << 11}
        for rank in range(2):
            model = {
                name: torch.from_numpy(np.array_split(value, 2)[rank] if value.ndim > 1 else value).clone()
                for name, value in self.weights.items()
            }
            content = {"args": argparse.Namespace(**arguments, rank=rank), "iteration": 7, "model": model}
            put(f"{ITERATION}/mp_rank_{rank:02}/{FILE}", content | {"checkpoint_version": 3.0})(directory)
        return directory / ITERATION
