"""Several models and several optimizers of one checkpoint: sections with names, each converted like the only one."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import FullyShardedDataParallel, OptimStateKeyType

import fsdpckpt
from fsdpckpt.errors import NeedsInformationError, SourceMissingError, UsageError
from tests.converters.jobs import RANK_FILES, Job, converted, messages, refused, save, states
from tests.oracle.compare import identical, require_parts

pytestmark = pytest.mark.filterwarnings("ignore")

ONE_DCP: dict[str, Any] = {"to": "sharded", "container": "dcp", "world_size": 1}
LINEARS = nn.Linear(3, 2), nn.Linear(2, 3)


class Gan(nn.Module):
    """A generator and a critic, one frozen parameter before both: ids of the second begin in the middle."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)
        self.g = nn.Linear(6, 5)
        self.d = nn.Linear(5, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.d(self.g(x))


def trained(seed: int = 0) -> tuple[Gan, list[torch.optim.Optimizer], list[torch.optim.lr_scheduler.LRScheduler]]:
    torch.manual_seed(seed)
    model = Gan()
    optimizers = [torch.optim.Adam(model.g.parameters(), lr=1e-2), torch.optim.AdamW(model.d.parameters(), lr=2e-2)]
    schedulers = [
        torch.optim.lr_scheduler.StepLR(optimizers[0], 2, 0.5),
        torch.optim.lr_scheduler.CosineAnnealingLR(optimizers[1], 50),
    ]
    for _ in range(3):
        model(torch.randn(2, 6)).square().mean().backward()
        for each in (*optimizers, *schedulers):
            each.step()
    return model, optimizers, schedulers


# Several models


def models(container: str = "torch", **more: Any) -> dict[str, Any]:
    """What ``source.pt`` has beside its step."""
    torch.manual_seed(1)
    names = ("generator", "critic", "generator_ema")
    state = {name: nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 4)).state_dict() for name in names} | more
    if container == "torch":
        save({**state, "step": 3})
    else:
        dcp.save({**state, "step": 3}, checkpoint_id="source.pt", no_dist=True)
    return state


@pytest.mark.parametrize("container", ["torch", "dcp"])
def test_one_of_several_models_is_taken_by_its_name_or_its_glob_and_a_typing_error_is_refused(container: str) -> None:
    state = models(container)
    one: dict[str, Any] = {"include": ["generator_ema.*"]}
    for number, options in enumerate(({"only": "model:generator_ema"}, one)):
        fsdpckpt.convert("source.pt", f"{number}.safetensors", **options)
        assert identical(safetensors.torch.load_file(f"{number}.safetensors"), dict(state["generator_ema"]))
    asked = refused(NeedsInformationError, "has 3 models", "source.pt", "no.safetensors", only="model")
    assert list(asked.details) == [f"--only model:{name}" for name in state]
    wrong = refused(UsageError, "of the name generator_emma", "source.pt", "no.pt", only="model:generator_emma")
    assert wrong.next_step == "did you mean --only model:generator_ema?"
    refused(SourceMissingError, "", "source.pt", "no.pt", only="optim")
    refused(UsageError, "applies to no key", "source.pt", "no.pt", rename={"nowhere": "outer"})
    none = refused(UsageError, "matches no key", "source.pt", "no.pt", include=["generator_ema.none.*"])
    assert none.next_step == "--only model:generator_ema takes that section alone"
    refused(UsageError, "leave none of the", "source.pt", "no.pt", exclude=["*"])
    for typed in ({"exclude": ["*.wieght"]}, {"rename": {"nowhere": "x"}}, {"strip_prefix": "modul."}):
        # also where another option leaves nothing of the other sections
        refused(UsageError, r"(matches|applies to) no key", "source.pt", "no.pt", **one, **typed)


@pytest.mark.parametrize("target", ["full.pt", "dcp", "torch"])
@pytest.mark.parametrize("container", ["torch", "dcp"])
def test_all_of_several_models_are_converted_and_cast(container: str, target: str) -> None:
    state = models(container)
    options: dict[str, Any] = {"to": "full"}
    if target != "full.pt":
        options = {"to": "sharded", "world_size": 2, "buffers": ["none"], "container": target}
    fsdpckpt.convert("source.pt", target, **options)
    assert fsdpckpt.diff("source.pt", target).same
    found = converted(target, "cast.pt", dtype="bfloat16", exclude=["critic.1.bias"])
    assert found.pop("step") == 3 and found.keys() == state.keys()
    for name, net in state.items():
        expected = {key: leaf.bfloat16() for key, leaf in net.items() if (name, key) != ("critic", "1.bias")}
        assert identical(dict(found[name]), expected), name


def test_an_option_that_applies_to_one_of_several_models_leaves_the_others_as_they_are() -> None:
    state = models(probe={"inner.head.weight": torch.ones(3, 2)})
    found = converted("source.pt", "out.pt", rename={"inner": "outer"})
    assert set(found["probe"]) == {"outer.head.weight"} and identical(found["critic"], state["critic"])


@pytest.mark.parametrize("key_type", ["name", "id"])
def test_a_glob_for_a_model_is_for_its_optimizer(key_type: str) -> None:
    """Otherwise states would stay of parameters that are left out, or the optimizer would be."""
    jobs = {name: Job(nn.Sequential(*copy.deepcopy(LINEARS))) for name in ("generator", "critic")}
    content = {name: job.model for name, job in jobs.items()}
    converted(save(content | {f"{name}_optimizer": job.ids for name, job in jobs.items()}), "a.pt", key_type=key_type)
    found = converted("a.pt", "less.pt", exclude=["critic.1.*"], key_type="name")
    assert list(found["critic"]) == list(found["critic_optimizer"]["state"]) == ["0.weight", "0.bias"]
    assert list(found["generator_optimizer"]["state"]) == list(content["generator"])
    taken = converted("a.pt", "one.pt", include=["generator.*"])
    assert identical(taken["model"], dict(content["generator"]))
    assert identical(list(states(taken).values()), list(jobs["generator"].ids["state"].values()))


PAIRS: dict[str, dict[str, str]] = {
    "one name is in the other": {"actor": "actor_optimizer", "actor_ref": "actor_ref_optimizer"},
    "beside a main model": {"model": "optimizer", "critic_model": "critic_optimizer"},
    "words of both": {"policy_net": "optim_policy", "value_net": "optim_value"},
    "letters that are in every key": {"e": "optimizer_e", "p": "optimizer_p"},
}


@pytest.mark.parametrize("pairs", PAIRS.values(), ids=PAIRS.keys())
def test_an_optimizer_is_that_of_the_model_whose_words_it_has(pairs: dict[str, str]) -> None:
    """The models have equal shapes: only the keys say which ids are whose."""
    content: dict[str, Any] = {}
    for number, (name, key) in enumerate(pairs.items()):
        job = Job(nn.ModuleDict({f"layer{number}": nn.Linear(3, 2), f"head{number}": nn.Linear(2, 3)}))
        content |= {name: job.model, key: job.ids}
    found = converted(save(content), "out.pt", key_type="name")
    for name, key in pairs.items():
        assert found[key]["param_groups"][0]["params"] == list(content[name])


def test_ids_that_fit_the_main_model_and_another_one_are_asked_about() -> None:
    """An average has the names of the main model: there it makes no difference."""
    main, other = (Job(nn.ModuleDict({name: nn.Linear(3, 2)})) for name in ("first", "second"))
    content = {**main.saved(), "critic": other.model, "opt_c": other.ids}
    words = r"optim:opt_c: nothing in .* maps optimizer ids"
    refused(NeedsInformationError, words, save(content), "out.pt", key_type="name")
    found = converted(save({**content, "critic": main.model}), "out.pt", key_type="name")
    assert list(found["opt_c"]["state"]) == list(main.model)


def test_an_average_beside_the_model_is_another_model() -> None:
    net, average = nn.Linear(4, 3).state_dict(), nn.Linear(4, 3).state_dict()
    save({"model": net, "ema": {"model": average}, "statistics": {"loss.mean": torch.ones(2)}})
    assert fsdpckpt.diff("source.pt", "source.pt", only="model:ema").same
    assert identical(converted("source.pt", "ema.pt", only="model:ema"), average)
    assert identical(converted("source.pt", "main.pt", only="model"), net)
    assert not fsdpckpt.diff("source.pt", "main.pt", only="model:ema").same, "the average is not the model"
    document = fsdpckpt.inspect("source.pt").to_json()
    assert {row["section"] for row in document["tensors"]} == {"model", "model:ema", "extra"}
    assert document["named"] == [{"section": "model", "name": "ema", "path": ["ema", "model"]}]


def test_an_average_is_cut_as_the_model_that_it_averages() -> None:
    """No optimizer lists its tensors."""
    job = Job(nn.ModuleDict({"g": nn.Linear(6, 5)}))
    save({**job.saved(), "ema": dict(job.model)})
    fsdpckpt.convert("source.pt", "ranks", **RANK_FILES, world_size=2)
    found = fsdpckpt.inspect("ranks").to_json()["tensors"]
    cut = {(row["section"], row["param"]): row["placement"] for row in found if row["section"].startswith("model")}
    assert cut == {(section, name): "[Shard(0)]" for section in ("model", "model:ema") for name in job.model}


# Several optimizers


def lightning() -> None:
    """``x.ckpt``: what ModelParallelStrategy saves of two optimizers and two schedulers (lightning 2.6)."""
    model, optimizers, schedulers = trained()
    state = {"state_dict": get_model_state_dict(model)}
    state |= {f"optimizer_{n}": get_optimizer_state_dict(model, each) for n, each in enumerate(optimizers)}
    dcp.save(state, checkpoint_id="x.ckpt", no_dist=True)
    meta = {
        "epoch": 0, "global_step": 6, "pytorch-lightning_version": "2.6.6", "loops": {"fit_loop": {"state_dict": {}}},
        "lr_schedulers": [each.state_dict() for each in schedulers],
    }  # fmt: skip
    save(meta, "x.ckpt/meta.pt")


def full_states() -> list[Any]:
    """``optimizer_states`` of Lightning's full file, whose ids count over all of ``model.parameters()``."""
    model, optimizers, _ = trained()
    by_name = [get_optimizer_state_dict(model, each) for each in optimizers]
    rekey = FullyShardedDataParallel.rekey_optim_state_dict
    return [rekey(each, OptimStateKeyType.PARAM_ID, model) for each in by_name]


def resume(path: str) -> tuple[list[dict[str, Any]], list[Any]]:
    """The optimizers and schedulers of a job that resumes from ``path``, as ``_load_checkpoint`` of Lightning does."""
    model, optimizers, _ = trained(seed=7)
    module = {"state_dict": get_model_state_dict(model)}
    dcp.load(module, checkpoint_id=path, no_dist=True)
    model.load_state_dict(module["state_dict"])
    for number, optimizer in enumerate(optimizers):
        held = {f"optimizer_{number}": get_optimizer_state_dict(model, optimizer)}
        dcp.load(held, checkpoint_id=path, no_dist=True)
        set_optimizer_state_dict(model, optimizer, optim_state_dict=held[f"optimizer_{number}"])
    meta = torch.load(f"{path}/meta.pt", weights_only=False)
    return [copy.deepcopy(each.state_dict()) for each in optimizers], meta["lr_schedulers"]


def test_two_optimizers_and_two_schedulers_of_lightning_resume_by_default_and_as_named() -> None:
    lightning()
    default = fsdpckpt.convert("x.ckpt", "default", to="sharded", world_size=2)
    assert default.flavor == "lightning-model-parallel"
    fsdpckpt.convert("x.ckpt", "named", flavor="lightning-model-parallel", **ONE_DCP)
    fsdpckpt.convert("x.ckpt", "full.ckpt", flavor="lightning", buffers="none")
    fsdpckpt.convert("full.ckpt", "again", flavor="lightning-model-parallel", **ONE_DCP)
    for name in ("default", "named", "again"):
        assert identical(resume(name), resume("x.ckpt")), name
        assert fsdpckpt.diff("x.ckpt", name).same, name
    assert fsdpckpt.diff("x.ckpt", "full.ckpt").same
    assert fsdpckpt.verify("default", flavor="lightning-model-parallel").resumption.resumes
    found = torch.load("full.ckpt", weights_only=False)
    assert identical(found["optimizer_states"], full_states()) and len(found["lr_schedulers"]) == 2
    refused(NeedsInformationError, "has 2 optimizers", "x.ckpt", "no.pt", only="optim", to="full")
    one = converted("x.ckpt", "one.pt", only="optim:optimizer_1")["state"]
    assert list(one) == ["d.weight", "d.bias"]
    assert identical(list(one.values()), list(trained()[1][1].state_dict()["state"].values()))
    for orig in (True, False):
        flat = {"to": "flattened", "world_size": 2, "unit": ["g", "d"], "use_orig_params": orig, "buffers": ["none"]}
        fsdpckpt.convert("x.ckpt", f"flat{orig}", **flat)
        fsdpckpt.convert(f"flat{orig}", f"{orig}.pt", to="full")
        assert fsdpckpt.diff("x.ckpt", f"flat{orig}").same and fsdpckpt.diff("x.ckpt", f"{orig}.pt").same


def test_a_step_that_differs_in_one_of_several_optimizers_is_a_problem() -> None:
    model, optimizers, _ = trained()
    saved = [copy.deepcopy(each.state_dict()) for each in optimizers]
    saved[1]["state"][1]["step"] += 1
    (problem,) = fsdpckpt.verify(save({"model": model.state_dict(), "muon": saved[0], "adamw": saved[1]})).problems
    assert problem.message.startswith("optim:adamw: ") and problem.kind == "step"


@pytest.mark.parametrize("key_type", ["id", "name"])
def test_ids_of_several_optimizers_are_those_of_their_own_models(key_type: str) -> None:
    """Actor and critic have the same names and shapes: each optimizer belongs to the model whose name it has."""
    parts: dict[str, Any] = {}
    for seed, name in enumerate(("actor", "critic")):
        model, optimizers, _ = trained(seed)
        parts[name] = {"model": model.state_dict(), "optimizer": optimizers[seed].state_dict()}
    found = converted(save(parts), "out.pt", key_type=key_type)
    for name, module in (("actor", "g"), ("critic", "d")):
        of_part = found[name]["optimizer"]["state"]
        assert list(of_part) == ([f"{module}.weight", f"{module}.bias"] if key_type == "name" else [0, 1])
        assert identical(list(of_part.values()), list(parts[name]["optimizer"]["state"].values()))
    assert fsdpckpt.diff("source.pt", "out.pt").same


def test_names_that_a_user_of_fabric_chose_are_kept_in_every_form() -> None:
    model, optimizers, _ = trained()
    state = {"generator": get_model_state_dict(model)}
    state |= {f"opt_{n}": get_optimizer_state_dict(model, each) for n, each in zip("gd", optimizers, strict=True)}
    save({**state, "iteration": 4}, "full.ckpt")
    fsdpckpt.convert("full.ckpt", "dcp", flavor="fabric", **{**ONE_DCP, "world_size": 2})
    held = copy.deepcopy(state)
    dcp.load(held, checkpoint_id="dcp", no_dist=True)
    assert identical(held, state) and torch.load("dcp/meta.pt") == {"iteration": 4}
    assert identical(converted("dcp", "again.ckpt"), {**state, "iteration": 4})


@pytest.mark.parametrize("target", ["out.pt", "dcp"])
def test_what_is_left_of_a_wrapper_keeps_its_place_beside_the_section(target: str) -> None:
    model, optimizers, _ = trained()
    root = {
        "model": {"state_dict": dict(model.state_dict()), "config": {"layers": 2}},
        "optimizer": {"inner": optimizers[0].state_dict(), "scale": 2.0},
    }
    fsdpckpt.convert(save(root), target, **({} if target == "out.pt" else {"to": "sharded", "world_size": 2}))
    assert fsdpckpt.diff("source.pt", target).same
    assert identical(converted(target, "again.pt"), root)


class Unsafe:
    """A class of a training script."""


@pytest.mark.parametrize("damage", ["unsafe", "truncated"])
@pytest.mark.parametrize("only", ["model", "optim"])
def test_a_section_never_needs_the_other_one_to_be_read(only: str, damage: str) -> None:
    job = Job(Gan())
    sections, names = {"model": job.model, "optim": job.ids}, {"model": "pytorch_model_fsdp", "optim": "optimizer"}
    Path("source").mkdir()
    for section, name in names.items():
        path = Path(f"source/{name}.bin")
        unsafe = section != only and damage == "unsafe"
        torch.save({**sections[section], "mine": Unsafe()} if unsafe else sections[section], path)
        if section != only and damage == "truncated":
            path.write_bytes(path.read_bytes()[:400])
    refused(fsdpckpt.SourceError, "", "source", "no.pt", to="full", container="torch", flavor="plain")
    report = fsdpckpt.convert("source", "out.pt", only=only, to="full", flavor="plain")
    assert identical(torch.load("out.pt"), dict(sections[only]))
    assert messages(report, f"{names['optim' if only == 'model' else 'model']}.bin is left out")


@pytest.mark.parametrize("flavor", ["trainer", "verl", "deepspeed-universal", "huggingface"])
def test_a_framework_with_room_for_one_is_not_given_several_and_says_how_to_take_one(flavor: str) -> None:
    jobs = {name: Job(nn.Sequential(*copy.deepcopy(LINEARS))) for name in ("generator", "critic")}
    optimizers = {f"{name}_optimizer": job.ids for name, job in jobs.items()}
    options = {"flavor": flavor, **({"world_size": 2, "buffers": "none"} if flavor == "verl" else {})}
    save({**{name: job.model for name, job in jobs.items()}, **optimizers})
    assert "--only model:" in str(refused(NeedsInformationError, "", "source.pt", "out", **options).next_step)
    if flavor != "huggingface":  # which has no place for any
        save({"model": jobs["generator"].model, "optimizer": optimizers}, "two.pt")
        refused(NeedsInformationError, "saves one optimizer", "two.pt", "out", **options)


def test_an_average_that_a_framework_has_no_place_for_is_left_out_with_a_warning() -> None:
    save({name: nn.Sequential(*copy.deepcopy(LINEARS)).state_dict() for name in ("model", "ema")})
    with pytest.warns(fsdpckpt.FsdpckptWarning, match="ema is left out: flavor trainer has no place for it"):
        fsdpckpt.convert("source.pt", "out", flavor="trainer")


# Places of sections that were saved apart, or under other keys


@pytest.mark.parametrize("model_at", ["", "model", "app"])
@pytest.mark.parametrize("optimizer_at", ["", "optim"])
def test_sections_of_two_directories_do_not_end_inside_of_each_other(model_at: str, optimizer_at: str) -> None:
    net = nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 2))
    weights, optimizer = (
        get_model_state_dict(net),
        get_optimizer_state_dict(net, Job(net, make=torch.optim.Adam).optimizer),
    )
    for name, place, content in (("weights", model_at, weights), ("states", optimizer_at, optimizer)):
        dcp.save({place: content} if place else content, checkpoint_id=f"source/{name}")
    fsdpckpt.convert("source", "out", to="sharded", world_size=2)
    assert fsdpckpt.diff("source", "out").same
    require_parts(converted("out", "full.pt")["model"], weights)


MOVED: dict[str, tuple[Callable[[Any, Any], Any], list[str]]] = {
    "names of their own": (lambda net, states: {"net": net, "opt": states, "epoch": 3}, ["net", "opt"]),
    "a list": (lambda net, states: {"items": [net, states], "epoch": 3}, ["items.0", "items.1"]),
    "numbers": (lambda net, states: {0: net, 1: states, 2: 7}, ["0", "1"]),
    "deeper": (lambda net, states: {"train": {"model": net, "optim": states}}, ["train.model", "train.optim"]),
    "where they stay": (lambda net, states: {"model": net, "optimizer": states}, []),
}


@pytest.mark.parametrize("container", ["torch", "dcp"])
@pytest.mark.parametrize("saved", MOVED)
def test_a_section_that_gets_another_key_is_named_with_both(saved: str, container: str) -> None:
    """A plain target has one model and one optimizer under these names, not those of the script."""
    content, places = MOVED[saved]
    optimizer = {"state": {}, "param_groups": [{"lr": 0.1, "params": [0, 1]}]}
    save(content(nn.Linear(5, 3).state_dict(), optimizer))
    target = "out.pt" if container == "torch" else "out"
    moved = "the target has the model under model (SRC: {}) and the optimizer under optimizer (SRC: {})"
    found = messages(fsdpckpt.convert("source.pt", target, container=container), "the target has")
    assert found == ([moved.format(*places)] if places else [])
    assert not messages(fsdpckpt.convert(target, "again.pt", to="full", only="model"), "the target has")
