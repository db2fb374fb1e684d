"""Several models and several optimizers of one checkpoint: sections with names, each converted like the only one."""

from __future__ import annotations

import copy
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
from tests.oracle.compare import identical

pytestmark = pytest.mark.filterwarnings("ignore")


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


def loaded(path: Path) -> Any:
    return torch.load(path, weights_only=True)


# Several models


def models(directory: Path, container: str) -> tuple[Path, dict[str, Any]]:
    torch.manual_seed(1)
    nets = {name: nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 4)) for name in ("generator", "critic", "generator_ema")}
    state = {name: net.state_dict() for name, net in nets.items()}
    path = directory / "source.pt"
    if container == "torch":
        torch.save({**state, "step": 3}, path)
    else:
        dcp.save({**state, "step": 3}, checkpoint_id=path, no_dist=True)
    return path, state


@pytest.mark.parametrize("container", ["torch", "dcp"])
def test_one_of_several_models_is_taken_by_its_name(container: str, tmp_path: Path) -> None:
    source, state = models(tmp_path, container)
    with pytest.raises(NeedsInformationError, match="has 3 models") as caught:
        fsdpckpt.convert(source, tmp_path / "no.safetensors", only="model")
    assert list(caught.value.details) == [f"--only model:{name}" for name in state]
    fsdpckpt.convert(source, tmp_path / "one.safetensors", only="model:generator_ema")
    assert identical(safetensors.torch.load_file(tmp_path / "one.safetensors"), dict(state["generator_ema"]))
    fsdpckpt.convert(source, tmp_path / "two.safetensors", include=["generator_ema.*"])
    assert identical(safetensors.torch.load_file(tmp_path / "two.safetensors"), dict(state["generator_ema"]))
    with pytest.raises(UsageError, match="of the name generator_emma") as wrong:
        fsdpckpt.convert(source, tmp_path / "no.pt", only="model:generator_emma")
    assert wrong.value.next_step == "did you mean --only model:generator_ema?"
    with pytest.raises(SourceMissingError):
        fsdpckpt.convert(source, tmp_path / "no.pt", only="optim")


@pytest.mark.parametrize("target", ["full.pt", "dcp", "ranks"])
@pytest.mark.parametrize("container", ["torch", "dcp"])
def test_all_of_several_models_are_converted_and_cast(container: str, target: str, tmp_path: Path) -> None:
    source, state = models(tmp_path, container)
    options: dict[str, Any] = {"to": "full"}
    if target != "full.pt":
        options = {"to": "sharded", "world_size": 2, "buffers": ["none"]}
        options["container"] = "dcp" if target == "dcp" else "torch"
    fsdpckpt.convert(source, tmp_path / target, **options)
    assert fsdpckpt.diff(source, tmp_path / target).same
    fsdpckpt.convert(tmp_path / target, tmp_path / "cast.pt", to="full", dtype="bfloat16", exclude=["critic.1.bias"])
    found = loaded(tmp_path / "cast.pt")
    assert found.pop("step") == 3 and found.keys() == state.keys()
    for name, net in state.items():
        expected = {key: leaf.bfloat16() for key, leaf in net.items() if (name, key) != ("critic", "1.bias")}
        assert identical(dict(found[name]), expected), name


def test_an_option_that_applies_to_one_of_several_models_leaves_the_others_as_they_are(tmp_path: Path) -> None:
    source, state = models(tmp_path, "torch")
    only = {"inner.head.weight": torch.ones(3, 2)}
    torch.save({**torch.load(source), "probe": only}, source)
    fsdpckpt.convert(source, tmp_path / "out.pt", rename={"inner": "outer"})
    found = loaded(tmp_path / "out.pt")
    assert set(found["probe"]) == {"outer.head.weight"} and identical(found["critic"], state["critic"])
    with pytest.raises(UsageError, match="applies to no key"):
        fsdpckpt.convert(source, tmp_path / "no.pt", rename={"nowhere": "outer"})
    with pytest.raises(UsageError, match="matches no key") as caught:
        fsdpckpt.convert(source, tmp_path / "no.pt", include=["generator_ema.none.*"])
    assert caught.value.next_step == "--only model:generator_ema takes that section alone"


@pytest.mark.parametrize("key_type", ["name", "id"])
def test_a_glob_for_a_model_is_for_its_optimizer(key_type: Any, tmp_path: Path) -> None:
    """Otherwise states would stay of parameters that are left out, or the optimizer would be."""
    content: dict[str, Any] = {}
    for name in ("generator", "critic"):
        net = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 3))
        optimizer = torch.optim.AdamW(net.parameters())
        net(torch.randn(4, 3)).sum().backward()
        optimizer.step()
        content |= {name: net.state_dict(), f"{name}_optimizer": optimizer.state_dict()}
    torch.save(content, tmp_path / "ids.pt")
    source = tmp_path / "source.pt"
    fsdpckpt.convert(tmp_path / "ids.pt", source, key_type=key_type)
    fsdpckpt.convert(source, tmp_path / "less.pt", exclude=["critic.1.*"], key_type="name")
    found = loaded(tmp_path / "less.pt")
    assert list(found["critic"]) == list(found["critic_optimizer"]["state"]) == ["0.weight", "0.bias"]
    assert list(found["generator_optimizer"]["state"]) == list(content["generator"])
    fsdpckpt.convert(source, tmp_path / "one.pt", include=["generator.*"])
    taken = loaded(tmp_path / "one.pt")
    assert identical(taken["model"], dict(content["generator"]))
    expected = content["generator_optimizer"]["state"].values()
    for states, of_source in zip(taken["optimizer"]["state"].values(), expected, strict=True):
        assert identical(states, of_source)


PAIRS: dict[str, dict[str, str]] = {
    "one name is in the other": {"actor": "actor_optimizer", "actor_ref": "actor_ref_optimizer"},
    "beside a main model": {"model": "optimizer", "critic_model": "critic_optimizer"},
    "words of both": {"policy_net": "optim_policy", "value_net": "optim_value"},
    "letters that are in every key": {"e": "optimizer_e", "p": "optimizer_p"},
}


@pytest.mark.parametrize("pairs", PAIRS.values(), ids=PAIRS.keys())
def test_an_optimizer_is_that_of_the_model_whose_words_it_has(pairs: dict[str, str], tmp_path: Path) -> None:
    """The models have equal shapes: only the keys say which ids are whose."""
    content: dict[str, Any] = {}
    names: dict[str, list[str]] = {}
    for number, (name, key) in enumerate(pairs.items()):
        net = torch.nn.ModuleDict({f"layer{number}": torch.nn.Linear(3, 2), f"head{number}": torch.nn.Linear(2, 3)})
        optimizer = torch.optim.AdamW(net.parameters())
        for param in net.parameters():
            param.grad = torch.randn_like(param)
        optimizer.step()
        content |= {name: net.state_dict(), key: optimizer.state_dict()}
        names[key] = list(content[name])
    torch.save(content, tmp_path / "source.pt")
    fsdpckpt.convert(tmp_path / "source.pt", tmp_path / "out.pt", key_type="name")
    found = loaded(tmp_path / "out.pt")
    assert {key: found[key]["param_groups"][0]["params"] for key in names} == names


def test_ids_that_fit_the_main_model_and_another_one_are_asked_about(tmp_path: Path) -> None:
    """An average has the names of the main model: there it makes no difference."""
    nets = [torch.nn.ModuleDict({name: torch.nn.Linear(3, 2)}) for name in ("first", "second")]
    optimizers = [torch.optim.AdamW(net.parameters()) for net in nets]
    for net, optimizer in zip(nets, optimizers, strict=True):
        for param in net.parameters():
            param.grad = torch.randn_like(param)
        optimizer.step()
    (main, other), (optimizer, second) = (net.state_dict() for net in nets), (each.state_dict() for each in optimizers)
    content = {"model": main, "optimizer": optimizer, "critic": other, "opt_c": second}
    torch.save(content, tmp_path / "source.pt")
    with pytest.raises(NeedsInformationError, match=r"optim:opt_c: nothing in .* maps optimizer ids"):
        fsdpckpt.convert(tmp_path / "source.pt", tmp_path / "out.pt", key_type="name")
    torch.save({**content, "critic": main}, tmp_path / "source.pt")
    fsdpckpt.convert(tmp_path / "source.pt", tmp_path / "out.pt", key_type="name")
    assert list(loaded(tmp_path / "out.pt")["opt_c"]["state"]) == list(main)


def test_a_typing_error_is_refused_also_where_another_option_leaves_sections_out(tmp_path: Path) -> None:
    source, _ = models(tmp_path, "torch")
    one: dict[str, Any] = {"include": ["generator_ema.*"]}  # nothing is left of the other sections
    fsdpckpt.convert(source, tmp_path / "one.pt", **one)
    for typed in ({"exclude": ["*.wieght"]}, {"rename": {"nowhere": "x"}}, {"strip_prefix": "modul."}):
        with pytest.raises(UsageError, match=r"(matches|applies to) no key"):
            fsdpckpt.convert(source, tmp_path / "no.pt", **one, **typed)
    with pytest.raises(UsageError, match="leave none of the"):
        fsdpckpt.convert(source, tmp_path / "no.pt", exclude=["*"])


def test_an_average_beside_the_model_is_another_model(tmp_path: Path) -> None:
    torch.manual_seed(2)
    net, average = nn.Linear(4, 3), nn.Linear(4, 3)
    source = tmp_path / "source.pt"
    statistics = {"loss.mean": torch.ones(2)}
    torch.save({"model": net.state_dict(), "ema": {"model": average.state_dict()}, "statistics": statistics}, source)
    assert fsdpckpt.diff(source, source, only="model:ema").same
    fsdpckpt.convert(source, tmp_path / "ema.pt", only="model:ema")
    assert identical(loaded(tmp_path / "ema.pt"), average.state_dict())
    fsdpckpt.convert(source, tmp_path / "main.pt", only="model")
    assert identical(loaded(tmp_path / "main.pt"), net.state_dict())
    assert not fsdpckpt.diff(source, tmp_path / "main.pt", only="model:ema").same, "the average is not the model"
    document = fsdpckpt.inspect(source).to_json()
    assert {row["section"] for row in document["tensors"]} == {"model", "model:ema", "extra"}
    assert document["named"] == [{"section": "model", "name": "ema", "path": ["ema", "model"]}]


# Several optimizers


def lightning(directory: Path) -> Path:
    """What ModelParallelStrategy saves of two optimizers and two schedulers (lightning 2.6)."""
    model, optimizers, schedulers = trained()
    state = {"state_dict": get_model_state_dict(model)}
    state |= {f"optimizer_{n}": get_optimizer_state_dict(model, each) for n, each in enumerate(optimizers)}
    dcp.save(state, checkpoint_id=directory / "x.ckpt", no_dist=True)
    meta = {
        "epoch": 0, "global_step": 6, "pytorch-lightning_version": "2.6.6", "loops": {"fit_loop": {"state_dict": {}}},
        "lr_schedulers": [each.state_dict() for each in schedulers],
    }  # fmt: skip
    torch.save(meta, directory / "x.ckpt" / "meta.pt")
    return directory / "x.ckpt"


def full_states() -> list[Any]:
    """``optimizer_states`` of Lightning's full file, whose ids count over all of ``model.parameters()``."""
    model, optimizers, _ = trained()
    by_name = [get_optimizer_state_dict(model, each) for each in optimizers]
    rekey = FullyShardedDataParallel.rekey_optim_state_dict
    return [rekey(each, OptimStateKeyType.PARAM_ID, model) for each in by_name]


def resume(path: Path) -> tuple[list[dict[str, Any]], list[Any]]:
    """The optimizers and schedulers of a job that resumes from ``path``, as ``_load_checkpoint`` of Lightning does."""
    model, optimizers, _ = trained(seed=7)
    module = {"state_dict": get_model_state_dict(model)}
    dcp.load(module, checkpoint_id=path, no_dist=True)
    model.load_state_dict(module["state_dict"])
    for number, optimizer in enumerate(optimizers):
        held = {f"optimizer_{number}": get_optimizer_state_dict(model, optimizer)}
        dcp.load(held, checkpoint_id=path, no_dist=True)
        set_optimizer_state_dict(model, optimizer, optim_state_dict=held[f"optimizer_{number}"])
    meta = torch.load(path / "meta.pt", weights_only=False)
    return [copy.deepcopy(each.state_dict()) for each in optimizers], meta["lr_schedulers"]


def test_two_optimizers_and_two_schedulers_of_lightning_resume_by_default_and_as_named(tmp_path: Path) -> None:
    source = lightning(tmp_path)
    expected = resume(source)
    default = fsdpckpt.convert(source, tmp_path / "default", to="sharded", world_size=2)
    assert default.flavor == "lightning-model-parallel"
    options: dict[str, Any] = {"to": "sharded", "container": "dcp", "world_size": 1}
    fsdpckpt.convert(source, tmp_path / "named", flavor="lightning-model-parallel", **options)
    fsdpckpt.convert(source, tmp_path / "full.ckpt", flavor="lightning", buffers="none")
    fsdpckpt.convert(tmp_path / "full.ckpt", tmp_path / "again", flavor="lightning-model-parallel", **options)
    for name in ("default", "named", "again"):
        assert identical(resume(tmp_path / name), expected), name
        assert fsdpckpt.diff(source, tmp_path / name).same, name
    assert fsdpckpt.diff(source, tmp_path / "full.ckpt").same
    assert fsdpckpt.verify(tmp_path / "default", flavor="lightning-model-parallel").resumption.resumes
    found = torch.load(tmp_path / "full.ckpt", weights_only=False)
    assert identical(found["optimizer_states"], full_states()) and len(found["lr_schedulers"]) == 2


def test_one_of_several_optimizers_is_taken_by_its_name(tmp_path: Path) -> None:
    source = lightning(tmp_path)
    _, optimizers, _ = trained()
    with pytest.raises(NeedsInformationError, match="has 2 optimizers"):
        fsdpckpt.convert(source, tmp_path / "no.pt", only="optim", to="full")
    fsdpckpt.convert(source, tmp_path / "one.pt", only="optim:optimizer_1", to="full")
    found = loaded(tmp_path / "one.pt")
    assert list(found["state"]) == ["d.weight", "d.bias"]
    assert identical(list(found["state"].values()), list(optimizers[1].state_dict()["state"].values()))


def test_a_step_that_differs_in_one_of_several_optimizers_is_a_problem(tmp_path: Path) -> None:
    _, optimizers, _ = trained()
    saved = [copy.deepcopy(each.state_dict()) for each in optimizers]
    saved[1]["state"][1]["step"] += 1
    torch.save({"model": trained()[0].state_dict(), "muon": saved[0], "adamw": saved[1]}, tmp_path / "source.pt")
    (problem,) = fsdpckpt.verify(tmp_path / "source.pt").problems
    assert problem.message.startswith("optim:adamw: ") and problem.kind == "step"


@pytest.mark.parametrize("key_type", ["id", "name"])
def test_ids_of_several_optimizers_are_those_of_their_own_models(key_type: str, tmp_path: Path) -> None:
    """Actor and critic have the same names and shapes: each optimizer belongs to the model whose name it has."""
    parts: dict[str, Any] = {}
    for seed, name in enumerate(("actor", "critic")):
        model, optimizers, _ = trained(seed)
        parts[name] = {"model": model.state_dict(), "optimizer": optimizers[seed].state_dict()}
    torch.save(parts, tmp_path / "source.pt")
    fsdpckpt.convert(tmp_path / "source.pt", tmp_path / "out.pt", to="full", key_type=key_type)
    found = loaded(tmp_path / "out.pt")
    names = {"actor": ["g.weight", "g.bias"], "critic": ["d.weight", "d.bias"]}
    for name, part in parts.items():
        keys = names[name] if key_type == "name" else [0, 1]
        assert list(found[name]["optimizer"]["state"]) == keys
        assert identical(list(found[name]["optimizer"]["state"].values()), list(part["optimizer"]["state"].values()))
    assert fsdpckpt.diff(tmp_path / "source.pt", tmp_path / "out.pt").same


def test_names_that_a_user_of_fabric_chose_are_kept_in_every_form(tmp_path: Path) -> None:
    model, optimizers, _ = trained()
    state = {"generator": get_model_state_dict(model)}
    state |= {f"opt_{n}": get_optimizer_state_dict(model, each) for n, each in zip("gd", optimizers, strict=True)}
    torch.save({**state, "iteration": 4}, tmp_path / "full.ckpt")
    fsdpckpt.convert(
        tmp_path / "full.ckpt", tmp_path / "dcp", flavor="fabric", to="sharded", container="dcp", world_size=2
    )
    held = {key: copy.deepcopy(value) for key, value in state.items()}
    dcp.load(held, checkpoint_id=tmp_path / "dcp", no_dist=True)
    assert identical(held, state) and loaded(tmp_path / "dcp" / "meta.pt") == {"iteration": 4}
    fsdpckpt.convert(tmp_path / "dcp", tmp_path / "again.ckpt", to="full")
    assert identical(torch.load(tmp_path / "again.ckpt", weights_only=False), {**state, "iteration": 4})


@pytest.mark.parametrize("use_orig_params", [True, False])
def test_a_flattened_target_takes_every_optimizer(use_orig_params: bool, tmp_path: Path) -> None:
    source = lightning(tmp_path)
    fsdpckpt.convert(
        source,
        tmp_path / "flat",
        to="flattened",
        world_size=2,
        unit=["g", "d"],
        use_orig_params=use_orig_params,
        buffers=["none"],
    )
    assert fsdpckpt.diff(source, tmp_path / "flat").same
    fsdpckpt.convert(tmp_path / "flat", tmp_path / "again.pt", to="full")
    assert fsdpckpt.diff(source, tmp_path / "again.pt").same


@pytest.mark.parametrize("target", ["out.pt", "dcp"])
def test_what_is_left_of_a_wrapper_keeps_its_place_beside_the_section(target: str, tmp_path: Path) -> None:
    model, optimizers, _ = trained()
    root = {
        "model": {"state_dict": dict(model.state_dict()), "config": {"layers": 2}},
        "optimizer": {"inner": optimizers[0].state_dict(), "scale": 2.0},
    }
    torch.save(root, tmp_path / "source.pt")
    options: dict[str, Any] = {"to": "full"} if target == "out.pt" else {"to": "sharded", "world_size": 2}
    fsdpckpt.convert(tmp_path / "source.pt", tmp_path / target, **options)
    assert fsdpckpt.diff(tmp_path / "source.pt", tmp_path / target).same
    fsdpckpt.convert(tmp_path / target, tmp_path / "again.pt", to="full")
    assert identical(loaded(tmp_path / "again.pt"), root)


class Unsafe:
    """A class of a training script."""


@pytest.mark.parametrize("damage", ["unsafe", "truncated"])
@pytest.mark.parametrize("only", ["model", "optim"])
def test_a_section_never_needs_the_other_one_to_be_read(only: str, damage: str, tmp_path: Path) -> None:
    model, optimizers, _ = trained()
    sections: dict[str, Any] = {"model": model.state_dict(), "optim": optimizers[0].state_dict()}
    names = {"model": "pytorch_model_fsdp.bin", "optim": "optimizer.bin"}
    source = tmp_path / "source"
    source.mkdir()
    for section, name in names.items():
        unsafe = section != only and damage == "unsafe"
        torch.save({**sections[section], "mine": Unsafe()} if unsafe else sections[section], source / name)
        if section != only and damage == "truncated":
            (source / name).write_bytes((source / name).read_bytes()[:400])
    with pytest.raises(fsdpckpt.SourceError):
        fsdpckpt.convert(source, tmp_path / "no.pt", to="full", container="torch", flavor="plain")
    report = fsdpckpt.convert(source, tmp_path / "out.pt", only=only, to="full", flavor="plain")
    assert identical(loaded(tmp_path / "out.pt"), dict(sections[only]))
    other = next(name for section, name in names.items() if section != only)
    assert any(f"{other} is left out" in note.message for note in report.notes)


def test_an_average_is_cut_as_the_model_that_it_averages(tmp_path: Path) -> None:
    """No optimizer lists its tensors."""
    model, optimizers, _ = trained()
    state = {name: leaf for name, leaf in model.state_dict().items() if name.startswith("g.")}
    root = {"model": state, "ema": dict(state), "optimizer": optimizers[0].state_dict()}
    torch.save(root, tmp_path / "source.pt")
    fsdpckpt.convert(tmp_path / "source.pt", tmp_path / "ranks", to="sharded", container="torch", world_size=2)
    found = fsdpckpt.inspect(tmp_path / "ranks").to_json()["tensors"]
    cut = {(row["section"], row["param"]): row["placement"] for row in found if row["section"].startswith("model")}
    assert {name for section, name in cut if section == "model:ema"} == set(state)
    assert all(cut["model", name] == cut["model:ema", name] == "[Shard(0)]" for name in state)


@pytest.mark.parametrize("flavor", ["trainer", "verl", "deepspeed-universal", "huggingface"])
def test_a_framework_with_room_for_one_is_not_given_several_and_says_how_to_take_one(
    flavor: str, tmp_path: Path
) -> None:
    torch.manual_seed(1)
    models = {name: nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 3)) for name in ("generator", "critic")}
    states = {}
    for name, model in models.items():
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.randn(2, 3)).sum().backward()
        optimizer.step()
        states[f"{name}_optimizer"] = optimizer.state_dict()
    weights = {name: model.state_dict() for name, model in models.items()}
    torch.save({**weights, **states}, tmp_path / "two.pt")
    ranks = {"world_size": 2, "buffers": "none"} if flavor == "verl" else {}
    with pytest.raises(NeedsInformationError) as raised:
        fsdpckpt.convert(tmp_path / "two.pt", tmp_path / "out", flavor=flavor, **ranks)  # type: ignore[arg-type]
    assert "--only model:" in str(raised.value.next_step)
    assert not (tmp_path / "out").exists()
    torch.save({"model": weights["generator"], "optimizer": states}, tmp_path / "two optimizers.pt")
    if flavor != "huggingface":  # which has no place for any
        with pytest.raises(NeedsInformationError, match="saves one optimizer"):
            fsdpckpt.convert(tmp_path / "two optimizers.pt", tmp_path / "out", flavor=flavor, **ranks)  # type: ignore[arg-type]


def test_an_average_that_a_framework_has_no_place_for_is_left_out_with_a_warning(tmp_path: Path) -> None:
    model, average = (nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 3)) for _ in range(2))
    torch.save({"model": model.state_dict(), "ema": average.state_dict()}, tmp_path / "ema.pt")
    with pytest.warns(fsdpckpt.FsdpckptWarning, match="ema is left out: flavor trainer has no place for it"):
        fsdpckpt.convert(tmp_path / "ema.pt", tmp_path / "out", flavor="trainer")
