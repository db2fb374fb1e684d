"""Several models and optimizers, each in a file or directory of its own, are one checkpoint with named sections."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import nn

import fsdpckpt
from fsdpckpt.errors import NeedsInformationError, SourceIncompleteError
from tests.converters.jobs import Job, converted, messages, notes
from tests.oracle.compare import identical, require_identical, require_parts

State = dict[str, Any]


def trained(seed: int, prefix: str = "") -> tuple[State, State]:
    """A model, and its AdamW by name."""
    torch.manual_seed(seed)
    job = Job(nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3)))
    return {prefix + name: leaf for name, leaf in job.model.items()}, job.named(prefix)


def save(content: State, path: Path) -> None:
    if path.suffix:
        torch.save(content, path)
    else:
        dcp.save(content, checkpoint_id=path, no_dist=True)


def saved_by_accelerate(path: Path, *, full: bool) -> list[tuple[State, State]]:
    """The files of ``save_state`` for two models and two optimizers (``utils/fsdp_utils.py``)."""
    path.mkdir()
    pairs = [trained(seed) for seed in range(2)]
    for number, (weights, states) in enumerate(pairs):
        suffix = f"_{number}" if number or not full else ""
        save(weights if full else {"model": weights}, path / f"pytorch_model_fsdp{suffix}{'.bin' if full else ''}")
        save(states if full else {"optimizer": states}, path / f"optimizer{suffix}{'.bin' if full else ''}")
        torch.save({"last_epoch": number}, path / f"scheduler{f'_{number}' if number else ''}.bin")
    for rank in range(2):
        torch.save({"step": 1, "rank": rank}, path / f"random_states_{rank}.pkl")
    return pairs


def zeros(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: zeros(entry) for key, entry in value.items()}
    return torch.zeros_like(value) if isinstance(value, torch.Tensor) else value


def require_loaded_by_accelerate(path: str, number: int, weights: State, states: State) -> None:
    """``load_fsdp_model`` and ``load_fsdp_optimizer`` find these."""
    for name, key, expected in (("pytorch_model_fsdp", "model", weights), ("optimizer", "optimizer", states)):
        found = {key: zeros(expected)}
        dcp.load(found, checkpoint_id=f"{path}/{name}_{number}", no_dist=True)
        require_identical(found[key], expected, name)


@pytest.mark.parametrize("full", [False, True])
def test_models_that_accelerate_numbers_are_listed_selected_compared_and_resumed(full: bool) -> None:
    pairs = saved_by_accelerate(Path("source"), full=full)
    checkpoint = fsdpckpt.inspect("source").checkpoint
    assert sorted(named.label for named in checkpoint.named) == [
        "model:pytorch_model_fsdp_0", "model:pytorch_model_fsdp_1", "optim:optimizer_0", "optim:optimizer_1"
    ]  # fmt: skip
    assert checkpoint.flavor == "accelerate" and fsdpckpt.verify("source").whole
    found = converted("source", "all.pt", flavor="plain")
    for number, (weights, states) in enumerate(pairs):
        one = converted("source", f"{number}.pt", only=f"model:pytorch_model_fsdp_{number}")
        assert identical(one, weights) and identical(found[f"pytorch_model_fsdp_{number}"], weights)
        assert identical(found[f"optimizer_{number}"], states)
    assert fsdpckpt.diff("source", "all.pt").same
    saved_by_accelerate(Path("other"), full=not full)
    assert fsdpckpt.diff("source", "other").same
    found["optimizer_1"]["state"]["0.bias"]["exp_avg"] += 1
    torch.save(found, "changed.pt")
    changed = [entry.key for entry in fsdpckpt.diff("source", "changed.pt").entries if entry.sigil == "*"]
    assert changed in (["optimizer_1.0.bias.exp_avg"], ["optimizer_1.state.0.bias.exp_avg"])

    assert fsdpckpt.verify("source", flavor="accelerate").resumption.resumes
    report = fsdpckpt.convert("source", "target", to="sharded", world_size=3, flavor="accelerate")
    assert report.flavor == "accelerate" and not notes(report, "not-carried")
    for number, pair in enumerate(pairs):
        require_loaded_by_accelerate("target", number, *pair)
    assert Path("target/scheduler_1.bin").read_bytes() == Path("source/scheduler_1.bin").read_bytes()
    assert fsdpckpt.diff("source", "target").same
    assert fsdpckpt.verify("target", flavor="accelerate", world_size=3).whole
    fsdpckpt.convert("target", "again", to="full", flavor="accelerate")
    assert identical(torch.load("again/pytorch_model_fsdp_1.bin"), pairs[1][0])
    assert identical(torch.load("again/optimizer.bin"), pairs[0][1])


def test_ids_are_named_by_the_model_that_each_optimizer_has() -> None:
    """Before the sections get numbers, which do not say what belongs together."""
    pairs = {name: trained(seed, f"{name}.") for seed, name in enumerate(("generator", "critic"))}
    content = {name: weights for name, (weights, _) in pairs.items()}
    for name in ("critic", "generator"):  # in another order than the models
        states = pairs[name][1]
        by_id = dict(enumerate(states["state"].values()))
        content[f"{name}_optimizer"] = {
            "state": by_id,
            "param_groups": [{**states["param_groups"][0], "params": [*by_id]}],
        }
    torch.save(content, "source.pt")
    fsdpckpt.convert("source.pt", "out", flavor="accelerate", world_size=2, buffers="none")
    for number, pair in enumerate(pairs.values()):
        require_loaded_by_accelerate("out", number, *pair)


def test_models_that_a_user_named_get_accelerates_numbers() -> None:
    actor, critic = trained(1), trained(2)
    torch.save({"actor": actor[0], "critic": critic[0], "actor_opt": actor[1], "critic_opt": critic[1]}, "source.pt")
    report = fsdpckpt.convert("source.pt", "out", flavor="accelerate", world_size=2)
    assert messages(report, "critic becomes pytorch_model_fsdp_1")
    require_loaded_by_accelerate("out", 1, *critic)
    torch.save({"model": actor[0], "optimizer": actor[1], "ema_model": critic[0]}, "ema.pt")
    fsdpckpt.convert("ema.pt", "two", flavor="accelerate", world_size=2)
    weights = {"model": zeros(critic[0])}
    dcp.load(weights, checkpoint_id="two/pytorch_model_fsdp_1", no_dist=True)
    require_identical(weights["model"], critic[0])


@pytest.mark.parametrize("form", ["a directory for each section", "a directory for each module"])
def test_modules_in_directories_are_named_models(form: str) -> None:
    """``model/vit/ckpt`` and ``model/vit/optimizer`` say by themselves what they are: both may be of one class."""
    names, of_modules = ("vit", "llm"), "module" in form
    pairs = {name: trained(seed, "" if of_modules else f"{name}.") for seed, name in enumerate(names)}
    source = Path("run/global_step_3")
    for name, (weights, states) in pairs.items():
        save({"model": weights} if of_modules else weights, source / "model" / name / ("ckpt" if of_modules else ""))
        if of_modules:
            save({"optimizer": states}, source / "model" / name / "optimizer")
        else:
            save(states, source / "optim" / name)
    if of_modules:
        (source / "extra_state").mkdir()
        for rank in range(2):
            torch.save({"global_step": 3, "rank": rank}, source / "extra_state" / f"rank_{rank}.pt")
    found = converted("run" if of_modules else source, "all.pt")
    for name, (weights, states) in pairs.items():
        require_identical(found[name], weights)
        require_identical(found[f"{name}_optim"], states)
    assert of_modules or found.keys() == {"vit", "llm", "vit_optim", "llm_optim"}
    assert fsdpckpt.diff(source, "all.pt").same and fsdpckpt.verify(source).whole
    fsdpckpt.convert(source, "dcp", to="sharded", world_size=2)
    assert fsdpckpt.diff(source, "dcp").same
    assert identical(converted(source, "vit.pt", only="model:vit"), pairs["vit"][0])
    llm = converted(source, "llm.pt", only="optim:llm_optim", key_type="id")
    assert llm["state"].keys() == {0, 1, 2, 3}


def test_directories_with_the_same_names_are_still_candidates() -> None:
    """One model in two forms, or two steps of it: nothing says that they belong together."""
    for name in ("first", "second"):
        save(trained(1)[0], Path("model", name))
    with pytest.raises(NeedsInformationError, match="2 candidates for the model"):
        fsdpckpt.inspect(".")


def saved_without_fsdp(*, safe: bool, one_layer: bool) -> dict[str, State]:
    """The files of ``save_state`` for two models, of DistributedDataParallel or one process (``checkpointing.py``)."""
    path = Path("source")
    path.mkdir()
    saved: dict[str, State] = {}
    layer = nn.Linear(5, 7)
    models = [nn.Sequential(layer, nn.Linear(7, 3)), layer if one_layer else nn.Sequential(layer)]
    for number, model in enumerate(models):
        job = Job(model)
        name, suffix = ("model" if safe else "pytorch_model"), f"_{number}" if number else ""
        weights = {key: leaf.clone() for key, leaf in job.model.items()}
        if safe:
            save_file(weights, path / f"{name}{suffix}.safetensors")
        else:
            torch.save(weights, path / f"{name}{suffix}.bin")
        torch.save(job.ids, path / f"optimizer{suffix}.bin")
        torch.save({"last_epoch": number}, path / f"scheduler{suffix}.bin")
        saved |= {f"{name}_{number}": weights, f"optimizer_{number}": torch.load(path / f"optimizer{suffix}.bin")}
    torch.save({"step": 1, "torch_manual_seed": torch.get_rng_state()}, path / "random_states_0.pkl")
    return saved


@pytest.mark.parametrize("one_layer", [True, False])
@pytest.mark.parametrize("safe", [True, False])
def test_models_that_accelerate_saves_without_fsdp_are_sections_too(safe: bool, one_layer: bool) -> None:
    saved = saved_without_fsdp(safe=safe, one_layer=one_layer)
    labels = {named.label.partition(":")[2] for named in fsdpckpt.inspect("source").checkpoint.named}
    assert labels == saved.keys() and fsdpckpt.verify("source").whole
    require_parts(converted("source", "all.pt", flavor="plain"), saved)
    assert fsdpckpt.diff("source", "all.pt").same
    if safe:  # safetensors has no order, and ids need one
        return
    fsdpckpt.convert("source", "out", to="sharded", world_size=2, flavor="accelerate")
    for number in range(2):
        weights, optimizer = saved[f"pytorch_model_{number}"], saved[f"optimizer_{number}"]
        by_name = {name: optimizer["state"][place] for place, name in enumerate(weights)}
        groups = [{**optimizer["param_groups"][0], "params": list(weights)}]
        require_loaded_by_accelerate("out", number, weights, {"state": by_name, "param_groups": groups})


@pytest.mark.parametrize("fsdp", [True, False])
@pytest.mark.parametrize("lost", ["model", "optimizer"])
def test_a_number_says_which_of_several_are_missing(lost: str, fsdp: bool) -> None:
    if fsdp:
        saved_by_accelerate(Path("source"), full=True)
    else:
        saved_without_fsdp(safe=False, one_layer=False)
    first = "optimizer.bin" if lost == "optimizer" else "pytorch_model_fsdp.bin" if fsdp else "pytorch_model.bin"
    Path("source", first).unlink()
    with pytest.raises(SourceIncompleteError, match=f"has {lost} number 1, but not the ones before it") as caught:
        fsdpckpt.inspect("source")
    assert caught.value.details == (f"{first} is missing",)
    assert fsdpckpt.verify(
        Path("source", first.replace(".", "_1."))
    ).whole  # given by its path it is all that is wanted


def test_one_numbered_file_is_perhaps_one_of_several() -> None:
    """Named by the user: a step, a rank or one of several. Beside a model of the same number it is a step."""
    weights, states = trained(0)
    torch.save(weights, "model.pt")
    torch.save(states, "optim_1.pt")
    (note,) = fsdpckpt.verify(".").notes
    assert "if it is one of several, the others are missing" in note
    Path("model.pt").rename("model_1.pt")
    assert fsdpckpt.verify(".").notes == ()
    sliced = {"state": {0: {"exp_avg": torch.randn(7)}}, "param_groups": [{"lr": 0.1, "params": [0]}]}
    Path("model_1.pt").unlink()
    torch.save(sliced, "optim_1.pt")  # no whole optimizer
    with pytest.raises(SourceIncompleteError, match="but those of rank 0 are missing"):
        fsdpckpt.verify(".")


def test_a_number_may_be_a_date_and_a_time() -> None:
    """The numbers before it are not counted one by one."""
    weights, states = trained(0)
    torch.save(weights, "model_20240101120000.pt")
    (note,) = [each for each in fsdpckpt.verify(".").notes if "if it is one of several" in each]
    assert "model_20240101120000.pt has a number" in note
    Path("model_20240101120000.pt").unlink()
    torch.save(states, "optimizer_20240101120000.bin")
    with pytest.raises(SourceIncompleteError, match="but not the ones before it") as caught:
        fsdpckpt.inspect(".")
    assert caught.value.details[0] == "optimizer.bin is missing" and len(caught.value.details) == 10_000
